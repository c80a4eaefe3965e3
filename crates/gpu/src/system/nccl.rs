//! NCCL libraries that programs here would load, and their versions.

mod version;

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path};

use crate::host::Host;
use crate::snapshot::Nccl;

const NAME: &str = "libnccl.so";
const LIBRARIES_MAX: usize = 32;
/// Folders of a search path that are looked into.
const SEARCHED_MAX: usize = 64;
const ENTRIES_MAX: usize = 8192;
/// Versions of Python side by side.
const PYTHONS_MAX: usize = 8;
/// Where loaders look, and where NVIDIA's packages and images put it.
const FOLDERS: [&str; 12] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
    "/lib",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/usr/local/nccl/lib",
    "/opt/nccl/lib",
];

/// Each library once, in the order in which programs would find them.
pub(super) fn read(host: &Host<'_>) -> Vec<Nccl> {
    let mut found = Vec::new();
    let mut seen = HashSet::new();
    for folder in folders(host) {
        // Names with a version come last, and say most.
        for name in names(host, &folder).into_iter().rev() {
            let path = format!("{folder}/{name}");
            let Ok(file) = host.path(&path).metadata() else {
                continue;
            };
            if found.len() < LIBRARIES_MAX
                && file.is_file()
                && seen.insert((file.dev(), file.ino()))
            {
                found.push(library(host, path, &name));
            }
        }
    }
    found
}

fn names(host: &Host<'_>, folder: &str) -> Vec<String> {
    // Most folders have none; a look for the usual names is far cheaper than reading `/usr/lib`.
    if !["", ".2"]
        .iter()
        .any(|end| host.has(&format!("{folder}/{NAME}{end}")))
    {
        return Vec::new();
    }
    let mut names = host.names(folder, ENTRIES_MAX).unwrap_or_default();
    names.retain(|name| {
        let end = name.strip_prefix(NAME);
        end.is_some_and(|end| end.is_empty() || end.starts_with('.'))
    });
    names
}

fn library(host: &Host<'_>, path: String, name: &str) -> Nccl {
    let target = host.link_name(&path);
    let names = [Some(name), target.as_deref()];
    let mut names = names.into_iter().flatten();
    let named = names.find_map(version::in_name);
    let inside = version::in_file(&host.path(&path));
    Nccl {
        version: named.or(inside.map(|(version, _)| version)),
        cuda: inside.and_then(|(_, cuda)| cuda),
        path,
    }
}

/// What is searched: what variables name, then Python's packages, then the system's folders.
fn folders(host: &Host<'_>) -> Vec<String> {
    let mut folders = listed(host, "LD_LIBRARY_PATH");
    let mut prefixes: Vec<String> = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .iter()
        .filter_map(|name| absolute(&host.variable(name)?))
        .collect();
    prefixes.extend(listed(host, "PATH").iter().filter_map(|folder| {
        let has_python = ["python3", "python"]
            .iter()
            .any(|name| host.has(&format!("{folder}/{name}")));
        let (prefix, _) = folder.rsplit_once('/').filter(|_| has_python)?;
        Some(prefix.to_owned())
    }));
    if let Some(home) = host.variable("HOME").and_then(|home| absolute(&home)) {
        prefixes.push(format!("{home}/.local"));
    }
    prefixes.extend(["/usr/local".to_owned(), "/usr".to_owned()]);
    let mut known = HashSet::new();
    for prefix in prefixes
        .iter()
        .filter(|prefix| known.insert(prefix.as_str()))
    {
        folders.extend(wheels(host, prefix));
        // Conda has a package of its own.
        folders.push(format!("{prefix}/lib"));
    }
    folders.extend(FOLDERS.map(str::to_owned));
    let mut known = HashSet::new();
    folders.retain(|folder| known.insert(folder.clone()));
    folders
}

/// Where pip puts NVIDIA's wheels below a prefix.
fn wheels(host: &Host<'_>, prefix: &str) -> Vec<String> {
    let lib = format!("{prefix}/lib");
    let names = host.names(&lib, ENTRIES_MAX).unwrap_or_default();
    names
        .iter()
        .filter(|name| name.starts_with("python3"))
        .take(PYTHONS_MAX)
        .flat_map(|python| {
            ["site-packages", "dist-packages"]
                .map(|packages| format!("{lib}/{python}/{packages}/nvidia/nccl/lib"))
        })
        .collect()
}

fn listed(host: &Host<'_>, variable: &str) -> Vec<String> {
    let value = host.variable(variable).unwrap_or_default();
    let folders = value.split(':').take(SEARCHED_MAX);
    folders.filter_map(absolute).collect()
}

/// A path from the root that does not go up again, without a slash at its end.
fn absolute(path: &str) -> Option<String> {
    let path = path.trim_end_matches('/');
    let goes_up = Path::new(path)
        .components()
        .any(|part| part == Component::ParentDir);
    (path.starts_with('/') && !goes_up).then(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::recorded::Recorded;

    /// Path, version, CUDA.
    type Short<'a> = (&'a str, Option<(u32, u32, u32)>, Option<(u32, u32)>);

    fn check(recorded: &Recorded, variables: &[(&str, &str)], expect: &[Short<'_>]) {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let found = read(&recorded.host_with(&variable));
        let found: Vec<_> = found
            .iter()
            .map(|nccl| (nccl.path.as_str(), nccl.version, nccl.cuda))
            .collect();
        assert_eq!(found, expect);
    }

    const TEXT: &str = "\u{7f}ELF\0\0NCCL version 2.27.5+cuda12.9\0more";

    #[test]
    fn a_library_is_listed_once_with_its_version() {
        let recorded = Recorded::new(&[("/usr/lib/x86_64-linux-gnu/libnccl.so.2.18.3", "nothing")])
            .linked(&[
                (
                    "/usr/lib/x86_64-linux-gnu/libnccl.so.2",
                    "libnccl.so.2.18.3",
                ),
                ("/usr/lib/x86_64-linux-gnu/libnccl.so", "libnccl.so.2"),
                ("/lib", "usr/lib"),
            ]);
        let expect = [(
            "/usr/lib/x86_64-linux-gnu/libnccl.so.2.18.3",
            Some((2, 18, 3)),
            None,
        )];
        check(&recorded, &[], &expect);
    }

    #[test]
    fn wheels_of_the_pythons_in_use_are_found_first() {
        let recorded = Recorded::new(&[
            (
                "/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2",
                TEXT,
            ),
            ("/opt/py/bin/python3", ""),
            (
                "/opt/py/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2",
                TEXT,
            ),
            ("/usr/local/cuda/lib64/libnccl.so", "odd"),
            ("/mine/libnccl.so.2", TEXT),
            ("/mine/libnccl-net.so", TEXT),
        ]);
        let version = (Some((2, 27, 5)), Some((12, 9)));
        check(
            &recorded,
            &[
                ("VIRTUAL_ENV", "/venv/"),
                ("PATH", "/opt/py/bin:relative:/opt/../py/bin:/none"),
                ("LD_LIBRARY_PATH", ":/mine:/mine"),
            ],
            &[
                ("/mine/libnccl.so.2", version.0, version.1),
                (
                    "/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2",
                    version.0,
                    version.1,
                ),
                (
                    "/opt/py/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2",
                    version.0,
                    version.1,
                ),
                ("/usr/local/cuda/lib64/libnccl.so", None, None),
            ],
        );
    }
}
