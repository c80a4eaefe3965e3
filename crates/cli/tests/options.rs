//! The options of `run` with the real program: the environment's forms, what is started, and what a mistake is told.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::{TempDir, tempdir};

const LAUNCHER: &str = env!("CARGO_BIN_EXE_paceline-launcher");

struct Ended {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ended {
    #[track_caller]
    fn check(&self, code: i32, out: &str, says: &[&str]) {
        assert_eq!(
            (self.code, self.out.as_str()),
            (Some(code), out),
            "{}",
            self.err
        );
        for text in says {
            assert!(self.err.contains(text), "{text:?} is not in\n{}", self.err);
        }
    }
}

/// `paceline-launcher run` in this folder, with these variables and words.
fn run(folder: &Path, vars: &[(&str, &str)], words: &[&str]) -> Ended {
    let mut command = Command::new(LAUNCHER);
    let ended = paceline_testing::outside_of_jobs(&mut command)
        .current_dir(folder)
        .env("HOME", folder)
        .env_remove("XDG_STATE_HOME")
        .envs(vars.iter().copied())
        .arg("run")
        .args(words)
        .stdin(Stdio::null())
        .output()
        .expect("it starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    Ended {
        code: ended.status.code(),
        out: text(ended.stdout),
        err: text(ended.stderr),
    }
}

const SHOW: [&str; 3] = [
    "sh",
    "-c",
    "echo $WORLD_SIZE $TORCHELASTIC_MAX_RESTARTS $ROLE_NAME",
];

/// Options, and then a program that shows what came of them.
fn shown(vars: &[(&str, &str)], options: &[&str]) -> Ended {
    let folder = tempdir().expect("a folder");
    run(folder.path(), vars, &[options, &SHOW].concat())
}

#[test]
fn every_option_has_a_variable_that_counts_after_the_command_line() {
    let vars = [
        ("PET_NPROC_PER_NODE", "2"),
        ("PET_MAX_RESTARTS", "7"),
        ("PET_ROLE", "trainer"),
    ];
    let one = "--local-ranks-filter=1";
    shown(&vars, &[one]).check(0, "[rank 1] 2 7 trainer\n", &[]);
    let options = ["--nproc_per_node=1", "--role", "other"];
    shown(&vars, &options).check(0, "[rank 0] 1 7 other\n", &[]);
}

#[test]
fn a_variable_that_is_empty_or_off_sets_nothing() {
    let vars = [
        ("PET_MAX_RESTARTS", "7"),
        ("PET_NPROC_PER_NODE", ""),
        ("PET_MODULE", "0"),
        ("PET_STANDALONE", "0"),
    ];
    shown(&vars, &["--no-python"]).check(0, "[rank 0] 1 7 default\n", &[]);
}

#[test]
fn a_variable_that_is_wrong_is_named() {
    shown(&[("PET_NNODES", "x")], &[]).check(
        2,
        "",
        &["invalid value 'x' for 'PET_NNODES, the environment's form of --nnodes"],
    );
    shown(&[("PET_STANDALONE", "yes")], &[]).check(2, "", &["PET_STANDALONE", "expected 1 or 0"]);
    let second = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon");
    shown(&[second], &[]).check(2, "", &["'TORCH_ELASTIC_SHUTDOWN_TIMEOUT, the", "'soon'"]);
    // What the command line says makes the variable meaningless.
    let options = ["--shutdown-timeout=5", "--max-restarts", "7"];
    shown(&[second], &options).check(0, "[rank 0] 1 7 default\n", &[]);
}

#[test]
fn a_standalone_job_has_an_id_of_its_own_and_does_not_use_an_address() {
    let folder = tempdir().expect("a folder");
    let id = || {
        let words = [
            "--standalone",
            "--master-port",
            "29876",
            "sh",
            "-c",
            "echo $TORCHELASTIC_RUN_ID $MASTER_PORT",
        ];
        let ended = run(folder.path(), &[], &words);
        assert_eq!(ended.code, Some(0), "{}", ended.err);
        assert!(
            ended.err.contains("--master-port has no effect"),
            "{}",
            ended.err
        );
        assert!(!ended.out.contains("29876"), "{}", ended.out);
        ended.out.split(' ').nth(2).map(str::to_owned)
    };
    assert_ne!(id(), id());
    shown(&[("PET_STANDALONE", "1")], &["--nnodes", "2"]).check(
        2,
        "",
        &["--standalone is one node"],
    );
}

/// A folder with an interpreter that shows how it was called, and `train.py`.
fn with_python() -> TempDir {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempdir().expect("a folder");
    let python = folder.path().join("python");
    fs::write(&python, "#!/bin/sh\necho \"$@\"\n").expect("written");
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).expect("made executable");
    fs::write(folder.path().join("train.py"), "").expect("written");
    folder
}

#[test]
fn scripts_and_modules_run_under_python_and_each_rank_has_its_own_arguments() {
    let folder = with_python();
    let check = |words: &[&str], expect: &str| {
        let ended = run(folder.path(), &[("PYTHON_EXEC", "./python")], words);
        ended.check(0, expect, &[]);
    };
    check(
        &["train.py", "--nnodes", "3"],
        "[rank 0] -u train.py --nnodes 3\n",
    );
    check(
        &["-m", "package.train", "-x"],
        "[rank 0] -u -m package.train -x\n",
    );
    let words = [
        "--nproc-per-node=2",
        "--tee=0:1,1:0",
        "--local-ranks-filter=1",
    ];
    let program = ["train.py", "--device=${local_rank}", "$$"];
    check(
        &[&words[..], &program].concat(),
        "[rank 1] -u train.py --device=1 $$\n",
    );
}

#[test]
fn python_that_is_missing_is_the_machines_fault_and_said_with_what_to_do() {
    let folder = with_python();
    let vars = [("PATH", "/nowhere")];
    run(folder.path(), &vars, &["train.py"]).check(
        3,
        "",
        &[
            "neither python3 nor python is in PATH",
            "hint: activate the environment",
        ],
    );
    run(folder.path(), &[], &["--no-python", "./train.py"]).check(
        2,
        "",
        &[
            "it has no execute permission",
            "hint: try `chmod +x ./train.py`",
        ],
    );
}

#[test]
fn an_option_after_the_program_is_named_at_once_or_when_the_program_fails() {
    let folder = tempdir().expect("a folder");
    let after = |option| {
        run(
            folder.path(),
            &[],
            &["sh", "-c", "exit $#", "sh", option, "x"],
        )
    };
    let says = "warning: --nproc-per-node=2 comes after the program and is passed to it";
    after("--nproc-per-node=2").check(
        2,
        "",
        &[says, "`paceline run --nproc-per-node=2 ... sh ...`"],
    );
    // It may well be the program's own.
    let says = "hint: --role=x came after the program and was passed to it";
    after("--role=x").check(2, "", &[says]);
}

#[test]
fn a_usage_error_is_not_started_again_and_any_other_failure_is() {
    let folder = tempdir().expect("a folder");
    let failing = |script| {
        run(
            folder.path(),
            &[],
            &["--max-restarts=1", "sh", "-c", script],
        )
    };
    let script = "echo $TORCHELASTIC_RESTART_COUNT; exit 2";
    let says = "warning: exit code 2 stands for a wrong command line or configuration";
    failing(script).check(2, "[rank 0] 0\n", &[says]);
    let script = "echo $TORCHELASTIC_RESTART_COUNT; exit 3";
    failing(script).check(3, "[rank 0] 0\n[rank 0] 1\n", &["restart 1 of 1 took"]);
}

#[test]
fn more_ranks_than_cores_are_said_once() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (few, many) = (
        format!("--nproc-per-node={cores}"),
        format!("--nproc-per-node={}", cores + 1),
    );
    let says = format!("{} ranks on {cores} core", cores + 1);
    let filter = "--local-ranks-filter=0";
    let ended = shown(&[], &[&many, filter]);
    assert_eq!(ended.err.matches(&says).count(), 1, "{}", ended.err);
    assert!(ended.err.contains("they take turns"), "{}", ended.err);
    assert!(!shown(&[], &[&few, filter]).err.contains("turns"));
}

#[test]
fn an_upside_down_range_and_other_launchers_options_are_told_what_is_right() {
    shown(&[], &["--nnodes=4:2"]).check(2, "", &["MIN is 4 and MAX is 2", "2:4"]);
    let ended = shown(&[], &["--gpus", "2"]);
    ended.check(2, "", &["tip: '--gpus' is called '--nproc-per-node' here"]);
    assert_eq!(ended.err.matches("tip:").count(), 1, "{}", ended.err);
    shown(&[], &["--nnodes=2"]).check(
        2,
        "",
        &[
            "--nnodes 2 needs a rendezvous address",
            "--master-addr HOST",
        ],
    );
}

#[test]
fn the_threads_that_were_chosen_for_several_ranks_are_said() {
    let options = [
        "--nproc-per-node=2",
        "--max-restarts=7",
        "--local-ranks-filter=1",
    ];
    let out = "[rank 1] 2 7 default\n";
    shown(&[], &options).check(0, out, &["note: 2 ranks on ", " each"]);
    let ended = shown(
        &[("OMP_NUM_THREADS", "1"), ("RAYON_NUM_THREADS", "1")],
        &options,
    );
    ended.check(0, out, &[]);
    assert_eq!(ended.err, "");
}

#[test]
fn a_man_page_is_what_man_can_show() {
    let folder = tempdir().expect("a folder");
    let page = run(folder.path(), &[], &["--print-man"]);
    page.check(0, &page.out, &[]);
    let file = folder.path().join("page.1");
    fs::write(&file, &page.out).expect("written");
    let shown = Command::new("mandoc")
        .args(["-T", "lint", "-W", "warning"])
        .arg(&file)
        .stdin(Stdio::null())
        .output();
    match shown {
        Ok(shown) => {
            let said = String::from_utf8_lossy(&shown.stdout);
            // A page that is made when it is asked for has no date.
            let mut said = said.lines().filter(|line| !line.contains("date"));
            assert_eq!(said.next(), None);
        }
        Err(error) => {
            paceline_testing::skipped(format!(
                "mandoc cannot be run ({error}): apt-get install mandoc"
            ));
        }
    }
}

#[test]
fn the_launcher_warns_of_a_program_that_takes_its_store_for_a_web_server() {
    let folder = tempdir().expect("a folder");
    let script = "exec 3<>/dev/tcp/${PACELINE_STORE%:*}/${PACELINE_STORE##*:}
        printf 'GET /index.html HTTP/1.1\\r\\nHost: node\\r\\n\\r\\n' >&3; cat <&3";
    let ended = run(
        folder.path(),
        &[],
        &["--nproc-per-node", "1", "bash", "-c", script],
    );
    let warning = "warning: the job's store refused a connection from 127.0.0.1: the peer seems to be an HTTP client";
    ended.check(0, "", &[warning]);
}
