//! Where to look for NCCL and the CUDA driver.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Variable that names NCCL's file.
pub const NCCL_VARIABLE: &str = "PACELINE_NCCL_LIBRARY";

/// Variable that names the CUDA driver's file.
pub const CUDA_VARIABLE: &str = "PACELINE_CUDA_LIBRARY";

/// Maximum number of folders searched in one place; bounds the time on an unusual file system.
const FOLDERS_MAX: usize = 64;

/// The files of the libraries, or the places to search.
///
/// If NCCL's file is named, nothing else is tried. Otherwise the search order is: the loader, for `libnccl.so.2` or
/// `libnccl.so`; the Python package folders (`nvidia/nccl/lib`, where pip installs it) of the active virtual environment, of
/// Conda, of every `python3` or `python` in `PATH`, of the user (`~/.local`) and of the system; the CUDA toolkits under
/// `/usr/local`; and the folders of `LD_LIBRARY_PATH`, which may hold a file with another version number. A library that is
/// too old or lacks a function is skipped. The search does not run Python.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// NCCL's file, if known.
    pub nccl: Option<PathBuf>,
    /// The driver's file, if known; otherwise the loader looks for `libcuda.so.1`.
    pub cuda: Option<PathBuf>,
    /// Roots of Python installations: folders with `lib/python3.*/site-packages`.
    pub pythons: Vec<PathBuf>,
    /// Library folders to search last.
    pub folders: Vec<PathBuf>,
    /// The folder to use as `/`.
    pub root: PathBuf,
}

/// One place to try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Candidate {
    /// A name for the system's loader to search.
    Loader(&'static str),
    /// A file.
    File(PathBuf),
}

impl Places {
    /// Reads this process's environment: [`NCCL_VARIABLE`], [`CUDA_VARIABLE`], `VIRTUAL_ENV`, `CONDA_PREFIX`, `PATH`, `HOME`,
    /// `LD_LIBRARY_PATH`.
    pub fn from_env() -> Self {
        Self::from_lookup(&|name| std::env::var_os(name))
    }

    /// Like [`from_env`](Self::from_env), with another environment.
    pub fn from_lookup(get: &dyn Fn(&str) -> Option<OsString>) -> Self {
        let named = |name: &str| get(name).filter(|value| !value.is_empty());
        let file = |name: &str| named(name).map(PathBuf::from);
        let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(file);
        let in_path = named("PATH");
        let in_path = in_path.iter().flat_map(std::env::split_paths);
        let found = in_path
            .take(FOLDERS_MAX)
            .filter_map(|folder| root_of(&folder));
        let user = file("HOME").map(|home| home.join(".local"));
        let mut pythons: Vec<PathBuf> = Vec::new();
        for python in active.chain(found).chain(user) {
            if !pythons.contains(&python) {
                pythons.push(python);
            }
        }
        let folders = named("LD_LIBRARY_PATH");
        let folders = folders.iter().flat_map(std::env::split_paths);
        Self {
            nccl: file(NCCL_VARIABLE),
            cuda: file(CUDA_VARIABLE),
            pythons,
            folders: folders
                .filter(|folder| !folder.as_os_str().is_empty())
                .take(FOLDERS_MAX)
                .collect(),
            root: "/".into(),
        }
    }

    /// Candidates for NCCL, best first.
    pub(crate) fn nccl_candidates(&self) -> Vec<Candidate> {
        if let Some(path) = &self.nccl {
            return vec![Candidate::File(path.clone())];
        }
        let mut all = vec![
            Candidate::Loader("libnccl.so.2"),
            Candidate::Loader("libnccl.so"),
        ];
        // After the user's folder, as in Python's own order, even if `PATH` names them.
        let system = ["usr/local", "usr"].map(|prefix| self.root.join(prefix));
        let others = self.pythons.iter().filter(|root| !system.contains(root));
        let wheels = others.chain(&system).flat_map(|python| packages(python));
        for packages in wheels {
            all.push(Candidate::File(
                packages.join("nvidia/nccl/lib/libnccl.so.2"),
            ));
        }
        for toolkit in matching(&self.root.join("usr/local"), "cuda") {
            all.extend(either(&toolkit.join("lib64")));
        }
        for folder in &self.folders {
            all.extend(either(folder));
        }
        all
    }

    /// Candidates for the driver.
    pub(crate) fn cuda_candidates(&self) -> Vec<Candidate> {
        match &self.cuda {
            Some(path) => vec![Candidate::File(path.clone())],
            None => vec![Candidate::Loader("libcuda.so.1")],
        }
    }
}

/// The root of a Python installation, from a program folder with a `python3` or `python`. Links are not followed: a virtual
/// environment's `python` links to the Python that created it.
fn root_of(folder: &Path) -> Option<PathBuf> {
    let has_python = ["python3", "python"]
        .iter()
        .any(|name| folder.join(name).is_file());
    let root = folder.parent().filter(|root| root.is_absolute())?;
    has_python.then(|| root.to_owned())
}

/// The files in the folder that have one of NCCL's two names, or else the expected name.
fn either(folder: &Path) -> Vec<Candidate> {
    let names = ["libnccl.so.2", "libnccl.so"].map(|name| folder.join(name));
    let there: Vec<Candidate> = names
        .iter()
        .filter(|path| path.is_file())
        .map(|path| Candidate::File(path.clone()))
        .collect();
    if there.is_empty() {
        let [first, _] = names;
        return vec![Candidate::File(first)];
    }
    there
}

/// The folders of Python's packages below an installation: `lib/python3.12/site-packages`, Debian's `dist-packages`.
fn packages(python: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for lib in ["lib", "lib64"] {
        let lib = python.join(lib);
        // On many systems one links to the other.
        if lib.is_symlink() {
            continue;
        }
        for version in matching(&lib, "python3") {
            for name in ["site-packages", "dist-packages"] {
                let folder = version.join(name);
                if folder.is_dir() {
                    found.push(folder);
                }
            }
        }
    }
    found
}

/// The subfolders whose names begin with `prefix`, highest version first.
fn matching(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    let mut found: Vec<(Vec<u32>, OsString)> = names
        .filter(|name| name.to_string_lossy().starts_with(prefix))
        .take(FOLDERS_MAX)
        .map(|name| (numbers(&name.to_string_lossy()), name))
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    let paths = found.into_iter().map(|(_, name)| folder.join(name));
    paths.filter(|path| path.is_dir()).collect()
}

/// `cuda-12.8` gives 12, 8, so that 12.10 sorts above 12.9.
fn numbers(name: &str) -> Vec<u32> {
    name.split(|letter: char| !letter.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a root with `files` and returns the candidates for NCCL in it, after the loader's.
    fn looked_for(files: &[&str], variables: &[(&str, &str)]) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        for file in files {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        let within = |value: &str| value.replace('~', &root.path().display().to_string());
        let mut places = Places::from_lookup(&|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| within(value).into())
        });
        places.root = root.path().into();
        let shown = |candidate: &Candidate| match candidate {
            Candidate::Loader(name) => (*name).to_string(),
            Candidate::File(path) => match path.strip_prefix(root.path()) {
                Ok(path) => path.display().to_string(),
                Err(_) => path.display().to_string(),
            },
        };
        places.nccl_candidates().iter().map(shown).collect()
    }

    #[test]
    fn a_named_file_is_the_only_place() {
        let named = [(NCCL_VARIABLE, "/opt/nccl/libnccl.so.2")];
        assert_eq!(
            looked_for(&["usr/local/cuda/lib64/libnccl.so.2"], &named),
            ["/opt/nccl/libnccl.so.2"]
        );
    }

    #[test]
    fn the_loader_comes_first_and_an_empty_variable_is_none() {
        let found = looked_for(&[], &[(NCCL_VARIABLE, "")]);
        assert_eq!(found, ["libnccl.so.2", "libnccl.so"]);
    }

    #[test]
    fn wheels_of_the_active_environment_come_before_those_of_the_system() {
        let wheel = |python: &str| format!("{python}/nvidia/nccl/lib/libnccl.so.2");
        let [active, conda, local, debian] = [
            "venv/lib/python3.12/site-packages",
            "conda/lib/python3.11/site-packages",
            "usr/local/lib/python3.13/dist-packages",
            "usr/lib/python3/dist-packages",
        ]
        .map(wheel);
        let found = looked_for(
            &[&debian, &local, &conda, &active],
            &[("VIRTUAL_ENV", "~/venv"), ("CONDA_PREFIX", "~/conda")],
        );
        assert_eq!(found[2..], [active, conda, local, debian]);
    }

    #[test]
    fn the_python_that_programs_find_counts_without_being_active() {
        let wheel = |python: &str| format!("{python}/nvidia/nccl/lib/libnccl.so.2");
        let [found, user, local, system] = [
            "opt/torch/.venv/lib/python3.12/site-packages",
            "home/.local/lib/python3.10/site-packages",
            "usr/local/lib/python3.10/dist-packages",
            "usr/lib/python3/dist-packages",
        ]
        .map(wheel);
        let other = wheel("opt/other/lib/python3.12/site-packages");
        let files = [
            &*found,
            &user,
            &local,
            &system,
            &other,
            "opt/torch/.venv/bin/python3",
            "usr/bin/python3",
            "opt/other/bin/pip",
        ];
        let path = "bin::~/opt/other/bin:~/opt/torch/.venv/bin/:~/usr/bin:~/opt/torch/.venv/bin";
        let looked = looked_for(&files, &[("PATH", path), ("HOME", "~/home")]);
        assert_eq!(looked[2..], [found, user, local, system]);
    }

    #[test]
    fn newer_toolkits_come_first() {
        let found = looked_for(
            &[
                "usr/local/cuda-12.9/lib64/libnccl.so.2",
                "usr/local/cuda-12.10/lib64/libnccl.so",
                "usr/local/cuda-11.8/lib64/other.so",
            ],
            &[],
        );
        assert_eq!(
            found[2..],
            [
                "usr/local/cuda-12.10/lib64/libnccl.so",
                "usr/local/cuda-12.9/lib64/libnccl.so.2",
                "usr/local/cuda-11.8/lib64/libnccl.so.2",
            ]
        );
    }

    #[test]
    fn folders_of_libraries_are_the_last_places() {
        let found = looked_for(&["b/libnccl.so"], &[("LD_LIBRARY_PATH", "~/a::~/b")]);
        assert_eq!(found[2..], ["a/libnccl.so.2", "b/libnccl.so"]);
    }

    #[test]
    fn an_absent_library_is_an_error_that_lists_all_places() {
        let places = Places {
            nccl: None,
            cuda: Some("/nowhere/libcuda.so.1".into()),
            pythons: Vec::new(),
            folders: vec!["/nowhere".into()],
            root: "/nowhere".into(),
        };
        let error = places.open_cuda().unwrap_err();
        assert_eq!(
            error.to_string(),
            "libcuda.so.1 cannot be loaded; looked for /nowhere/libcuda.so.1 (no such file)"
        );
        assert!(error.hint().unwrap().contains("PACELINE_CUDA_LIBRARY"));
        if let Err(error) = places.open_nccl(&Ok) {
            let text = error.to_string();
            assert!(text.contains("libnccl.so as the loader finds it"), "{text}");
            assert!(
                text.ends_with("/nowhere/libnccl.so.2 (no such file)"),
                "{text}"
            );
            assert!(error.hint().unwrap().contains("pip install nvidia-nccl"));
        }
    }

    #[test]
    fn a_file_that_is_no_library_is_an_error_that_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libnccl.so.2");
        std::fs::write(&path, "not a library").unwrap();
        let places = Places {
            nccl: Some(path),
            ..Places::from_lookup(&|_| None)
        };
        let text = places.open_nccl(&Ok).unwrap_err().to_string();
        assert!(
            text.contains("file too short") || text.contains("ELF"),
            "{text}"
        );
    }
}
