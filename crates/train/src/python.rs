//! A Python for tests that read our files with the programs that they are for.

use std::process::Command;

/// A Python that can import these packages: `PACELINE_TEST_PYTHON`, or else `python3`. Says what is missing if there is none.
pub(crate) fn python_with(packages: &[&str]) -> Option<String> {
    let python = std::env::var("PACELINE_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let import = format!("import {}", packages.join(", "));
    let found = Command::new(&python).args(["-c", &import]).output();
    if found.is_ok_and(|found| found.status.success()) {
        return Some(python);
    }
    let packages = packages.join(" ");
    paceline_testing::skipped(format!(
        "{python} lacks a package; `pip install {packages}` into a virtual environment and set PACELINE_TEST_PYTHON to its bin/python"
    ));
    None
}
