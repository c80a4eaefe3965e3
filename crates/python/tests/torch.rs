//! The Python package: its wheel, and the package beside PyTorch, if there is a Python with it.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The package as it is installed: its files, the library that cargo has built, and what says that torch may use it.
fn install(folder: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python");
    let package = folder.join("paceline");
    std::fs::create_dir(&package).unwrap();
    for entry in std::fs::read_dir(root.join("paceline")).unwrap() {
        let entry = entry.unwrap();
        symlink(
            entry.path().canonicalize().unwrap(),
            package.join(entry.file_name()),
        )
        .unwrap();
    }
    symlink(library(), package.join("libpaceline_python.so")).unwrap();
    let info = folder.join("paceline-0.1.0.dist-info");
    std::fs::create_dir(&info).unwrap();
    std::fs::write(
        info.join("METADATA"),
        "Metadata-Version: 2.1\nName: paceline\nVersion: 0.1.0\n",
    )
    .unwrap();
    let entry = "[torch.distributed.backends]\npaceline = paceline.torch:register\n";
    std::fs::write(info.join("entry_points.txt"), entry).unwrap();
}

fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let deps = program.parent().unwrap();
    deps.join("libpaceline_python.so")
}

fn python(python: &str, folder: &Path) -> Command {
    let mut command = Command::new(python);
    paceline_testing::outside_of_jobs(&mut command).env("PYTHONPATH", folder);
    command
}

#[test]
fn the_package_says_its_version_without_torch() {
    let Some(program) = paceline_testing::python_with(&["sys"]) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    install(folder.path());
    let script =
        "import paceline, sys; assert 'torch' not in sys.modules; print(paceline.__version__)";
    let output = python(&program, folder.path())
        .args(["-c", script])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(said.trim(), env!("CARGO_PKG_VERSION"), "{output:?}");
}

/// It is made of the program and the library that cargo has built for tests.
#[test]
fn the_wheel_installs_and_runs_where_there_is_no_torch() {
    let built = library();
    let built = built.ancestors().nth(2).unwrap();
    if !built.join("paceline").exists() {
        paceline_testing::skipped(
            "there is no program paceline yet; `cargo test --workspace` builds it",
        );
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/wheel.sh");
    let mut command = Command::new(script);
    let command = paceline_testing::outside_of_jobs(&mut command);
    command.arg("--prebuilt").args([built, folder.path()]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(3) {
        paceline_testing::skipped(errors.trim());
        return;
    }
    assert!(output.status.success(), "{said}\n{errors}");
    assert!(
        said.contains("rank 0 ") && said.contains("rank 1 "),
        "{said}"
    );
}

/// Runs the cases of a script in `python/tests`.
fn run_cases(script: &str) {
    let Some(program) = paceline_testing::python_with(&["torch"]) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    install(folder.path());
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/tests");
    let mut command = python(&program, folder.path());
    let output = command.arg(cases.join(script)).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(said.contains("... ok"), "{said}");
}

#[test]
fn the_backend_of_torch_does_what_gloo_does_and_names_who_failed() {
    run_cases("backend.py");
}

#[test]
fn same_bits_trains_to_the_same_weights_on_any_number_of_ranks() {
    run_cases("same_bits.py");
}

#[test]
fn the_loader_of_torch_reads_the_samples_of_paceline_indices() {
    run_cases("samples.py");
}
