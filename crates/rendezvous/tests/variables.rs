//! The tables of variables against the sources of all crates: nothing is read that they do not have, and no row is dead.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use paceline_rendezvous::env::{TOOL_VARIABLES, VARIABLES};

/// Variables of tests and of the libraries that stand in for NVIDIA's.
const OF_TESTS: [&str; 4] = [
    "PACELINE_FAKE_",
    "PACELINE_TEST_",
    "PACELINE_BENCH_",
    "PACELINE_UPDATE_DOCS",
];
/// Folders and files that only tests are compiled from.
const TESTS: [&str; 3] = ["tests", "tests.rs", "simulation"];

/// The Rust files below `folder` that programs are compiled from.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        if TESTS.contains(&name.as_str()) {
            continue;
        }
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
}

/// The names of our variables in string literals, with a file that has them. A `#[cfg(test)]` ends a file's production code.
fn literals() -> BTreeMap<String, PathBuf> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("crates/");
    let mut files = Vec::new();
    for entry in fs::read_dir(crates).expect("crates/") {
        sources(&entry.expect("a crate").path().join("src"), &mut files);
    }
    assert!(files.len() > 300, "only {} files", files.len());
    let mut found = BTreeMap::new();
    for file in files {
        if file.ends_with("rendezvous/src/env/variables.rs") {
            continue;
        }
        let text = fs::read_to_string(&file).expect("a source file");
        let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        let lines = code
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        for literal in lines.flat_map(|line| line.split("\"PACELINE_").skip(1)) {
            let end = literal.find(|c: char| !c.is_ascii_uppercase() && c != '_');
            let name = &literal[..end.unwrap_or(literal.len())];
            if !name.is_empty() {
                found.insert(format!("PACELINE_{name}"), file.clone());
            }
        }
    }
    found
}

#[test]
fn no_crate_reads_a_variable_that_is_in_no_table() {
    let known: BTreeSet<&str> = VARIABLES
        .iter()
        .chain(TOOL_VARIABLES)
        .map(|row| row.name)
        .collect();
    let of_tests = |name: &str| OF_TESTS.iter().any(|start| name.starts_with(start));
    let missing: Vec<_> = literals()
        .into_iter()
        .filter(|(name, _)| !known.contains(name.as_str()) && !of_tests(name))
        .collect();
    assert!(
        missing.is_empty(),
        "add these to env/variables.rs: {missing:#?}"
    );
}

#[test]
fn every_tools_variable_is_read_somewhere() {
    let literals = literals();
    for row in TOOL_VARIABLES {
        assert!(literals.contains_key(row.name), "no crate has {}", row.name);
    }
}

#[test]
fn no_variable_has_two_rows() {
    let mut names = BTreeSet::new();
    for row in VARIABLES.iter().chain(TOOL_VARIABLES) {
        assert!(names.insert(row.name), "{} has two rows", row.name);
    }
}
