//! From what the user typed to the file that is executed, checked before anything is started.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::error::LaunchError;

/// A program that exists and may be executed, with the arguments that stand before the user's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Executable {
    pub(crate) file: PathBuf,
    pub(crate) leading_args: Vec<OsString>,
}

/// Finds the program: Python scripts run as `python3 -u script` (or `PYTHON_EXEC`), names without a slash come
/// from `PATH`.
pub(crate) fn resolve(
    program: &Path,
    var: &dyn Fn(&str) -> Option<OsString>,
) -> Result<Executable, LaunchError> {
    if program.extension() == Some(OsStr::new("py")) {
        if !program.is_file() {
            return Err(LaunchError::ProgramNotFound {
                program: program.to_owned(),
                searched_path: false,
            });
        }
        let python = var("PYTHON_EXEC")
            .filter(|python| !python.is_empty())
            .unwrap_or_else(|| "python3".into());
        return Ok(Executable {
            file: find(Path::new(&python), var)?,
            leading_args: vec!["-u".into(), program.into()],
        });
    }
    Ok(Executable {
        file: find(program, var)?,
        leading_args: Vec::new(),
    })
}

fn find(program: &Path, var: &dyn Fn(&str) -> Option<OsString>) -> Result<PathBuf, LaunchError> {
    let searched_path = !program.as_os_str().as_bytes().contains(&b'/');
    let not_found = || LaunchError::ProgramNotFound {
        program: program.to_owned(),
        searched_path,
    };
    if program.as_os_str().is_empty() {
        return Err(not_found());
    }
    if !searched_path {
        return if program.exists() {
            executable(program)
        } else {
            Err(not_found())
        };
    }
    // As the shell does: a file that may not be executed does not hide one further on, but is named if it is the only one.
    let path = var("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let mut refused = None;
    for folder in std::env::split_paths(&path) {
        let candidate = if folder.as_os_str().is_empty() {
            Path::new(".").join(program)
        } else {
            folder.join(program)
        };
        if !candidate.is_file() {
            continue;
        }
        match executable(&candidate) {
            Ok(file) => return Ok(file),
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(refused.unwrap_or_else(not_found))
}

fn executable(file: &Path) -> Result<PathBuf, LaunchError> {
    let why = match file.metadata() {
        Ok(data) if data.is_dir() => "it is a folder",
        Ok(data) if data.permissions().mode() & 0o111 == 0 => "it has no execute permission",
        Ok(_) if rustix::fs::access(file, rustix::fs::Access::EXEC_OK).is_err() => {
            "this user may not execute it"
        }
        Ok(_) => return Ok(file.to_owned()),
        Err(_) => "it cannot be looked at",
    };
    Err(LaunchError::NotExecutable {
        program: file.to_owned(),
        why,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A folder with `tool` (executable), `plain` (not), `train.py` and `python` (executable).
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, mode) in [
            ("tool", 0o755),
            ("plain", 0o644),
            ("train.py", 0o644),
            ("python", 0o755),
        ] {
            let file = folder.path().join(name);
            fs::write(&file, "").unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        }
        folder
    }

    /// Resolves with `PATH=<folder>` and `PYTHON_EXEC=<folder>/python`; `{}` in both texts is the folder.
    fn check(program: &str, expect: &str) {
        let folder = folder();
        let here = folder.path().to_str().unwrap();
        let var = |name: &str| match name {
            "PATH" => Some(OsString::from(here)),
            "PYTHON_EXEC" => Some(format!("{here}/python").into()),
            _ => None,
        };
        let text = match resolve(Path::new(&program.replace("{}", here)), &var) {
            Ok(found) => {
                let mut words = vec![found.file.into_os_string()];
                words.extend(found.leading_args);
                words.join(OsStr::new(" ")).into_string().unwrap()
            }
            Err(error) => error.to_string(),
        };
        assert_eq!(text, expect.replace("{}", here), "{program}");
    }

    #[test]
    fn a_name_is_looked_up_in_path() {
        check("tool", "{}/tool");
        check("nothing", "program `nothing` not found in PATH");
        check(
            "plain",
            "program `{}/plain` cannot be executed: it has no execute permission",
        );
        check("", "program `` not found in PATH");
    }

    #[test]
    fn a_path_is_taken_as_it_is() {
        check("{}/tool", "{}/tool");
        check("{}/nothing", "program `{}/nothing` not found");
        check(
            "{}/plain",
            "program `{}/plain` cannot be executed: it has no execute permission",
        );
        check("{}/", "program `{}/` cannot be executed: it is a folder");
    }

    #[test]
    fn a_python_script_runs_under_python_unbuffered() {
        check("{}/train.py", "{}/python -u {}/train.py");
        check("{}/absent.py", "program `{}/absent.py` not found");
    }

    #[test]
    fn a_missing_program_comes_with_advice() {
        let error = resolve(Path::new("no-such-program"), &|_| None).unwrap_err();
        assert_eq!(
            error.hint().as_deref(),
            Some("to run a file of the current folder, write `./no-such-program`")
        );
        assert_eq!(error.exit_code(), 2);
    }
}
