//! The Python package: its wheel, and the package beside PyTorch, if there is a Python with it.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use paceline_gpu::places::LIBRARY_VARIABLE;

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
    let entries = "[torch.distributed.backends]\npaceline = paceline.torch:register\n\n\
                   [torch.backends]\npaceline = paceline._autoload:register\n";
    std::fs::write(info.join("entry_points.txt"), entries).unwrap();
}

fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let deps = program.parent().unwrap();
    deps.join("libpaceline_python.so")
}

/// The launcher, if cargo has built it.
fn launcher() -> PathBuf {
    let library = library();
    library
        .ancestors()
        .nth(2)
        .unwrap()
        .join("paceline-launcher")
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

/// What a script without torch says, on stdout and stderr; `variables` are in its environment.
fn run_script(script: &str, variables: &[(&str, &str)]) -> Option<[String; 2]> {
    let program = paceline_testing::python_with(&["sys"])?;
    let folder = tempfile::tempdir().unwrap();
    install(folder.path());
    let mut command = python(&program, folder.path());
    command.args(["-c", script]).current_dir(folder.path());
    // No driver but that of the test.
    command.env(LIBRARY_VARIABLE, "/no such library");
    command.env_remove("CUDA_VISIBLE_DEVICES");
    command.envs(variables.iter().copied());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    Some([output.stdout, output.stderr].map(|said| String::from_utf8(said).unwrap()))
}

#[test]
fn a_script_that_nothing_launched_is_told_what_it_has_used() {
    let script = r#"
import json, subprocess, sys, paceline
assert "torch" not in sys.modules
with paceline.track(json="usage.json", csv="usage.csv", svg="usage.svg", lang="en", period=0.02) as usage:
    # What the process starts counts too.
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        while usage.total_s < 0.6 or not usage.process.get("busy_s") or not usage.process["resident_peak_bytes"]:
            pass
        child.kill()
assert json.load(open("usage.json")) == usage.report and usage.report["paceline_usage"] == 1
assert open("usage.svg").read().startswith("<svg") and open("usage.csv").readline()
assert usage.gpus == [] and usage.process["rank"] == 0 and usage.process["cpu_s"] > 0
usage.stop()  # again
print(usage.text, end="")
"#;
    let Some([text, printed]) = run_script(script, &[]) else {
        return;
    };
    assert_eq!(text, printed);
    let begin = "⏱️ Run time summary\n• Total run time : 0 h 0 min ";
    assert!(printed.starts_with(begin), "{printed}");
    assert!(printed.contains("\nrank 0: busy "), "{printed}");
}

#[test]
fn the_usage_of_gpus_is_that_of_the_visible_ones() {
    let script = r#"
import paceline
with paceline.track(quiet=True) as usage:
    while len(usage.gpus) < 2 or usage.gpus[0]["memory_peak_bytes"] is None:
        pass
print([gpu["index"] for gpu in usage.gpus])
"#;
    let fixture = paceline_fake_nvml::Fixture::open("nvswitch-8");
    let library = fixture.library().to_str().unwrap();
    let variables = [(LIBRARY_VARIABLE, library), ("CUDA_VISIBLE_DEVICES", "2,5")];
    let Some(said) = run_script(script, &variables) else {
        return;
    };
    assert_eq!(said, ["[2, 5]\n", ""]);
}

#[test]
fn a_plain_call_ends_with_the_program_and_only_there() {
    let script = r#"
import os, sys, paceline
usage = paceline.track(lang="ko")
while not usage.process:
    pass
print(usage.process["rank"], flush=True)
child = os.fork()
if child == 0:
    sys.exit()  # with all that is to run at an exit
os.waitpid(child, 0)
"#;
    // As under torchrun.
    let variables = [
        ("RANK", "3"),
        ("WORLD_SIZE", "8"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "29500"),
    ];
    let Some([rank, printed]) = run_script(script, &variables) else {
        return;
    };
    assert_eq!(rank, "3\n");
    assert_eq!(printed.matches("⏱️").count(), 1, "{printed}");
    assert!(printed.contains("실행"), "{printed}");
}

#[test]
fn a_process_that_is_tracked_already_is_told_by_whom() {
    let script = r#"
import os, sys, warnings, paceline
warnings.simplefilter("ignore")  # Python 3.12 and later warn of a fork beside threads
def refused(call=paceline.track):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it was not refused")
if "PACELINE_PAGE_FD" in os.environ:
    print(refused())
    sys.exit()
with paceline.track(quiet=True) as usage:
    print(refused(), flush=True)
    child = os.fork()
    if child == 0:
        print(refused().replace(str(os.getppid()), "P").replace(str(os.getpid()), "C"))
        print(refused(usage.stop).splitlines()[1], flush=True)
    else:
        os.waitpid(child, 0)
if child:
    print(refused(lambda: paceline.track(lang="fr")))
    with paceline.track(quiet=True):  # one after another
        pass
"#;
    let Some([said, printed]) = run_script(script, &[]) else {
        return;
    };
    let expected = "\
this process is tracked already
  end the first tracker before the next one begins
the tracker belongs to process P, and this is process C, which was forked from it
  its figures include those of the processes that it starts; track either it or this one
  only that process can ask for its figures
\"fr\" is no language that Paceline speaks; it speaks en, ko
";
    assert_eq!((&*said, &*printed), (expected, ""));
    let Some([said, _]) = run_script(script, &[("PACELINE_PAGE_FD", "7")]) else {
        return;
    };
    let expected = "this process runs under `paceline run`, which tracks it already\n  leave track() out here: ";
    assert!(said.starts_with(expected), "{said}");
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
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/release.sh");
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
    command.env("PACELINE_TEST_LAUNCHER", launcher());
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

#[test]
fn ranks_of_torch_that_are_killed_cost_no_bits() {
    if !launcher().exists() {
        paceline_testing::skipped(
            "there is no program paceline-launcher yet; `cargo test --workspace` builds it",
        );
        return;
    }
    run_cases("live.py");
}

#[test]
fn steps_and_buckets_of_torch_are_recorded_in_a_run_directory() {
    if !launcher().exists() {
        paceline_testing::skipped(
            "there is no program paceline-launcher yet; `cargo test --workspace` builds it",
        );
        return;
    }
    run_cases("recorded.py");
}
