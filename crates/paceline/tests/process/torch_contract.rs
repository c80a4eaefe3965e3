//! `paceline run` gives a program the same environment as torchrun.

use std::collections::BTreeMap;
use std::path::PathBuf;

use tempfile::tempdir;

use super::support::{Ended, LIMIT, PACELINE, Running, command, example, free_port, paceline};

/// The variables that a rank printed.
fn variables(ended: &Ended, rank: usize) -> BTreeMap<&str, &str> {
    let prefix = format!("[rank {rank}] ");
    let lines = ended
        .out
        .lines()
        .filter_map(|line| line.strip_prefix(&prefix));
    lines.filter_map(|line| line.split_once('=')).collect()
}

#[test]
fn every_rank_gets_torchruns_variables() {
    let folder = tempdir().expect("a folder");
    let ended = paceline(folder.path(), "run --no-fold --nproc-per-node 3 env");
    ended.is_well();
    for rank in 0..3 {
        let variables = variables(&ended, rank);
        let own = rank.to_string();
        let expect = [
            ("RANK", own.as_str()),
            ("LOCAL_RANK", own.as_str()),
            ("ROLE_RANK", own.as_str()),
            ("WORLD_SIZE", "3"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("ROLE_WORLD_SIZE", "3"),
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("ROLE_NAME", "default"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "0"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ];
        for (name, value) in expect {
            assert_eq!(variables.get(name), Some(&value), "{name} of rank {rank}");
        }
        let port: u16 = variables["MASTER_PORT"].parse().expect("a port");
        assert_ne!(port, 0);
        // The variable would tell a program that another process hosts the store on MASTER_PORT.
        assert_ne!(variables.get("TORCHELASTIC_USE_AGENT_STORE"), Some(&"True"));
        let threads: usize = variables["OMP_NUM_THREADS"].parse().expect("a number");
        assert!(threads >= 1);
    }
}

#[test]
fn all_ranks_share_the_meeting_point_and_a_secret_that_no_other_job_has() {
    let folder = tempdir().expect("a folder");
    let tokens = [0, 1].map(|_| {
        let ended = paceline(folder.path(), "run --no-fold --nproc-per-node 2 env");
        let (first, second) = (variables(&ended, 0), variables(&ended, 1));
        for name in ["MASTER_PORT", "PACELINE_STORE", "PACELINE_JOB_TOKEN"] {
            assert_eq!(first[name], second[name]);
        }
        first["PACELINE_JOB_TOKEN"].to_owned()
    });
    assert_ne!(tokens[0], tokens[1]);
    assert_eq!(tokens[0].len(), 64);
}

#[test]
fn threads_that_are_set_stay_as_they_are() {
    let folder = tempdir().expect("a folder");
    let mut command = command(
        folder.path(),
        PACELINE,
        ["run", "--no-fold", "--nproc-per-node", "2", "env"],
    );
    command.env("OMP_NUM_THREADS", "7");
    let ended = Running::start(command).ended(LIMIT);
    assert_eq!(variables(ended.is_well(), 1)["OMP_NUM_THREADS"], "7");
}

#[test]
fn the_programs_own_options_and_exit_code_are_its_own() {
    let folder = tempdir().expect("a folder");
    let script = "printf '%s|' \"$@\"; echo; exit $((RANK + 6))";
    let args = [
        "run",
        "--nproc-per-node",
        "1",
        "sh",
        "-c",
        script,
        "--",
        "--nproc-per-node",
        "a b",
        "",
    ];
    let ended = Running::start(command(folder.path(), PACELINE, args)).ended(LIMIT);
    ended.check(6, &["rank 0 (pid ", "exited with code 6"]);
    assert_eq!(ended.out, "[rank 0] --nproc-per-node|a b||\n");
}

#[test]
fn a_program_that_is_not_there_is_wrong_usage() {
    let folder = tempdir().expect("a folder");
    paceline(folder.path(), "run ./nothing-here").check(2, &["program `./nothing-here` not found"]);
    paceline(folder.path(), "run --nproc-per-node 2").check(2, &["no PROGRAM to start"]);
    paceline(folder.path(), "run --nproc-per-nodes 2 true").check(2, &["--nproc-per-node"]);
}

#[test]
fn every_ranks_output_is_kept_where_torchrun_keeps_it() {
    let folder = tempdir().expect("a folder");
    let script = "echo out $RANK; echo err $TORCHELASTIC_ERROR_FILE >&2";
    let args = [
        "run",
        "--nproc-per-node",
        "2",
        "--log-dir",
        "logs",
        "sh",
        "-c",
        script,
    ];
    let ended = Running::start(command(folder.path(), PACELINE, args)).ended(LIMIT);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let runs = std::fs::read_dir(folder.path().join("logs")).expect("a folder");
    let runs: Vec<_> = runs.map(|run| run.expect("a run").path()).collect();
    let [run] = &*runs else {
        panic!("{runs:?}");
    };
    let name = run.file_name().and_then(|name| name.to_str());
    assert!(
        name.is_some_and(|name| name.starts_with("none_")),
        "{name:?}"
    );
    for rank in 0..2 {
        let own = run.join(format!("attempt_0/{rank}"));
        let log = |name| std::fs::read_to_string(own.join(name)).expect("a log");
        assert_eq!(log("stdout.log"), format!("out {rank}\n"));
        let error_file = own.join("error.json");
        assert_eq!(log("stderr.log"), format!("err {}\n", error_file.display()));
    }
}

#[test]
fn what_a_failed_run_printed_is_kept_without_being_asked_for() {
    let folder = tempdir().expect("a folder");
    let args = [
        "run",
        "--nproc-per-node",
        "1",
        "sh",
        "-c",
        "echo lost >&2; exit 9",
    ];
    let ended = Running::start(command(folder.path(), PACELINE, args)).ended(LIMIT);
    ended.check(
        9,
        &[
            "exited with code 9",
            "paceline/runs/",
            "/attempt_0/0/stderr.log",
        ],
    );
    let run = folder.path().join(".state/paceline/runs/latest");
    let log = std::fs::read_to_string(run.join("attempt_0/0/stderr.log")).expect("a log");
    assert_eq!(log, "lost\n");
    let told = std::fs::read(run.join("error.json")).expect("a file");
    let told: serde_json::Value = serde_json::from_slice(&told).expect("JSON");
    assert_eq!((&told["rank"], &told["exit_code"]), (&0.into(), &9.into()));
}

#[test]
fn the_program_and_an_example_warn_that_ranks_started_by_hand_have_no_token() {
    let folder = tempdir().expect("a folder");
    for (program, args) in [
        (PathBuf::from(PACELINE), vec!["bench"]),
        (example("minimal"), Vec::new()),
    ] {
        // Any address but the loopback one; the other rank never joins.
        let mut command = command(folder.path(), program, args);
        command
            .envs([("RANK", "0"), ("WORLD_SIZE", "2")])
            .envs([("MASTER_ADDR", "0.0.0.0"), ("MASTER_PORT", &free_port())]);
        Running::start(command).has_complained("warning: PACELINE_JOB_TOKEN is not set");
    }
}
