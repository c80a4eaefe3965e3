//! `paceline train` as the ranks of a job with another launcher: one job, the same bits, rank 0's output.

use std::path::Path;

use rustix::process::Signal;
use tempfile::tempdir;

use super::support::{
    LIMIT, PACELINE, Running, checkpoints, command, free_port, in_time, metrics, paceline, start,
    steps,
};

/// 1437 samples in batches of 16: 90 steps an epoch.
const JOB: &str = "--model tiny --global-batch 16 --shards 4 --epochs 2";

/// The hash of the job on ranks that `paceline train` starts itself.
fn expected(folder: &Path) -> String {
    let line = format!("train --run-dir expected {JOB} --nproc-per-node 1");
    paceline(folder, &line).is_well().hash().to_owned()
}

/// Two connected nodes: network namespaces with their own host names. `$1` is the program, the rest are its arguments on both
/// nodes; each node has its own folder.
const TWO_NODES: &str = r#"
set -eu
hostname host-a
ip link set lo up
mkdir a b
mkfifo connected
node='hostname host-b; ip link set lo up; read _ < ../connected; ip addr add 10.77.0.2/24 dev pace0
ip link set pace0 up; exec "$@"'
(cd b; exec unshare --net --uts sh -c "$node" sh "$@" > ../b.out 2> ../b.err) &
own=$(readlink /proc/self/ns/net)
until [ "$(readlink /proc/$!/ns/net)" != "$own" ]; do sleep 0.01; done
ip link add pace0 type veth peer name pace0 netns $!
ip addr add 10.77.0.1/24 dev pace0
ip link set pace0 up
echo > connected
(cd a; exec "$@")
wait $!
"#;

/// A rank with these variables, as a scheduler or a user starts it.
fn rank(folder: &Path, line: &str, variables: &[(&str, String)]) -> Running {
    let mut command = command(folder, PACELINE, line.split_whitespace());
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    Running::start(command)
}

#[test]
fn under_paceline_run_the_processes_are_the_ranks_of_one_job() {
    let folder = tempdir().expect("a folder");
    let line = format!("run --nproc-per-node 3 {PACELINE} train --run-dir run {JOB}");
    let ended = paceline(folder.path(), &line);
    assert_eq!(ended.is_well().hash(), expected(folder.path()));
    let headers = ended.out.matches("ranks     3 on CPU").count();
    assert_eq!(headers, 1, "{}", ended.out);
    assert!(!ended.out.contains("[rank 1]"), "{}", ended.out);
    assert_eq!(
        steps(&metrics(&folder.path().join("run")), "epoch"),
        [90, 180]
    );
}

#[test]
fn under_torchruns_variables_every_process_is_its_rank() {
    let folder = tempdir().expect("a folder");
    let port = free_port();
    // Without a directory: rank 0 chooses one and sends it to the others.
    let line = format!("train {JOB}");
    let ranks = [0, 1].map(|number: usize| {
        let set = |name: &'static str, value: &str| (name, value.to_owned());
        let variables = [
            set("RANK", &number.to_string()),
            set("LOCAL_RANK", &number.to_string()),
            set("WORLD_SIZE", "2"),
            set("LOCAL_WORLD_SIZE", "2"),
            set("MASTER_ADDR", "127.0.0.1"),
            set("MASTER_PORT", &port),
        ];
        rank(folder.path(), &line, &variables)
    });
    let [first, second] = ranks.map(|rank| rank.ended(LIMIT));
    assert_eq!(first.is_well().hash(), expected(folder.path()));
    assert_eq!(second.is_well().out, "");
    let runs = std::fs::read_dir(folder.path().join("runs")).expect("a run");
    assert_eq!(runs.count(), 1);
}

#[test]
fn the_tasks_of_a_slurm_step_are_ranks_and_a_batch_script_starts_its_own() {
    let folder = tempdir().expect("a folder");
    let line = format!("train --run-dir run {JOB}");
    let job = std::process::id().to_string();
    let batch = |number: usize| {
        [
            ("SLURM_JOB_ID", job.clone()),
            ("SLURM_PROCID", number.to_string()),
            ("SLURM_NTASKS", "2".to_owned()),
        ]
    };
    let step = |number: usize| {
        let own = [
            ("SLURM_STEP_ID", "0".to_owned()),
            ("SLURM_STEP_NUM_TASKS", "2".to_owned()),
            ("SLURM_LOCALID", number.to_string()),
            ("SLURM_NODEID", "0".to_owned()),
            ("SLURM_STEP_NUM_NODES", "1".to_owned()),
            ("SLURM_STEP_TASKS_PER_NODE", "2".to_owned()),
            ("SLURM_STEP_NODELIST", "localhost".to_owned()),
        ];
        rank(folder.path(), &line, &[&batch(number)[..], &own].concat())
    };
    let ranks = [step(0), step(1)].map(|rank| rank.ended(LIMIT));
    let expect = expected(folder.path());
    assert_eq!(ranks[0].is_well().hash(), expect);
    assert_eq!(ranks[1].is_well().out, "");

    let line = format!("train --run-dir alone {JOB} --nproc-per-node 3");
    let alone = rank(folder.path(), &line, &batch(0)).ended(LIMIT);
    assert_eq!(alone.is_well().hash(), expect);
    assert!(alone.out.contains("ranks     3 on CPU"), "{}", alone.out);
}

#[test]
fn settings_that_a_rank_cannot_follow_are_warned_of_once() {
    let folder = tempdir().expect("a folder");
    let line = format!(
        "run --nproc-per-node 2 {PACELINE} train --run-dir run {JOB} --epochs 1 --nproc-per-node 4 --usage on --max-restarts 2"
    )
    .replace("--epochs 2 ", "");
    let ended = paceline(folder.path(), &line);
    let says = [
        "`nproc_per_node` is 4 (flag --nproc-per-node) and has no effect: the launcher has started 2 on this machine",
        "`usage` is on (flag --usage) and has no effect: this process is one rank of a job, whose launcher decides",
        "`max_restarts` is 2 (flag --max-restarts) and has no effect",
    ];
    ended.check(0, &says);
    for text in says {
        assert_eq!(ended.err.matches(text).count(), 1, "{}", ended.err);
    }
    let settings = paceline(
        folder.path(),
        &format!("run --nproc-per-node 2 {PACELINE} train --explain"),
    );
    let shards = settings
        .is_well()
        .out
        .lines()
        .find(|line| line.contains("] shards "));
    let shards: Vec<_> = shards.expect("a line").split_whitespace().collect();
    assert_eq!(shards[3..], ["2", "default", "(one", "per", "rank)"]);
}

#[test]
fn a_mistake_of_rank_0_ends_the_job_with_its_words_and_its_code() {
    let folder = tempdir().expect("a folder");
    let line = format!("run --nproc-per-node 2 {PACELINE} train --data nothing.csv");
    let ended = paceline(folder.path(), &line);
    ended.check(
        2,
        &[
            "nothing.csv: no such file or folder\n  so rank 0 (pid ",
            "exited with code 2",
        ],
    );
    assert!(!ended.err.contains("hint: "), "{}", ended.err);
    assert!(!folder.path().join("runs").exists());
}

#[test]
fn a_killed_rank_starts_again_from_the_newest_checkpoint() {
    let line = format!(
        "train --run-dir run {JOB} --nproc-per-node 2 --save-every 7 --recovery restart --max-restarts 1"
    );
    let (folder, ended) = in_time(|folder| {
        let job = start(folder, &line);
        job.has_printed("epoch 1/2");
        job.hits(&[1], Signal::KILL);
        job.ended(LIMIT).says("restart 1 of 1 took ")
    });
    ended.check(0, &["was killed by signal 9"]);
    assert_eq!(ended.hash(), expected(folder.path()));
    assert!(ended.out.contains("resumed   after step "), "{}", ended.out);
    let all: Vec<u64> = (1..=180).collect();
    assert_eq!(steps(&metrics(&folder.path().join("run")), "step"), all);
}

#[test]
fn a_killed_rank_without_a_restart_left_is_told_how_to_continue() {
    let line =
        format!("train --run-dir run {JOB} --nproc-per-node 2 --save-every 7 --recovery restart");
    let (_, ended) = in_time(|folder| {
        let job = start(folder, &line);
        job.has_printed("epoch 1/2");
        job.hits(&[1], Signal::KILL);
        job.ended(LIMIT).ended_with(Some(137))
    });
    let hint = "\nhint: continue with --resume run\n";
    ended.check(137, &["was killed by signal 9", hint]);
}

#[test]
fn one_command_line_begins_goes_on_and_has_nothing_left_to_do() {
    let line = format!("train --run-dir run --resume auto {JOB} --nproc-per-node 2");
    let (folder, stopped) = in_time(|folder| {
        let job = start(folder, &line);
        job.has_printed("epoch 1/2");
        job.signal(Signal::USR1);
        job.ended(LIMIT).ended_with(Some(138))
    });
    assert!(!stopped.out.contains("resumed"), "{}", stopped.out);
    for _ in 0..2 {
        let ended = paceline(folder.path(), &line);
        assert_eq!(ended.is_well().hash(), expected(folder.path()));
        assert!(ended.out.contains("resumed   after step "), "{}", ended.out);
        std::fs::remove_dir_all(folder.path().join("expected")).expect("made");
    }
    let nowhere = paceline(folder.path(), "train --resume auto");
    nowhere.check(
        2,
        &[
            "`resume` auto (flag --resume) needs `run_dir`",
            "--run-dir DIR",
        ],
    );
}

#[test]
fn ranks_that_paceline_run_starts_again_go_on_with_their_run() {
    // A restarted job goes on with its own run, asked to or not.
    for resume in ["--resume auto ", ""] {
        let line = format!(
            "run --nproc-per-node 2 --recovery restart --max-restarts 3 {PACELINE} train --run-dir run {resume}--save-every 7 {JOB}"
        );
        let (folder, ended) = in_time(|folder| {
            let job = start(folder, &line);
            job.has_printed("[rank 0] epoch 1/2");
            job.hits(&[0], Signal::KILL);
            job.ended(LIMIT).says("restart 1 of 3 took ")
        });
        ended.check(0, &[]);
        assert_eq!(ended.hash(), expected(folder.path()));
        assert!(!checkpoints(&folder.path().join("run")).is_empty());
    }
}

#[test]
fn two_nodes_train_a_built_in_task_to_the_bits_of_one() {
    let can = std::process::Command::new("unshare")
        .args([
            "--user",
            "--map-root-user",
            "--net",
            "--uts",
            "ip",
            "link",
            "set",
            "lo",
            "up",
        ])
        .output();
    if !can.is_ok_and(|output| output.status.success()) {
        paceline_testing::skipped("network namespaces cannot be made here, or `ip` is missing");
        return;
    }
    let folder = tempdir().expect("a folder");
    let node = format!(
        "test \"$(hostname)\" = host-a && rank=0 || rank=1
        exec {PACELINE} run --nnodes 2 --node-rank $rank --master-addr 10.77.0.1 --nproc-per-node 2 \
             {PACELINE} train --run-dir run {JOB}"
    );
    let words = [
        "--user",
        "--map-root-user",
        "--net",
        "--uts",
        "sh",
        "-c",
        TWO_NODES,
        "sh",
        "sh",
        "-c",
        &node,
    ];
    let mut command = command(folder.path(), "unshare", words);
    command.env("PACELINE_JOB_TOKEN", "5e".repeat(32));
    let ended = Running::start(command).ended(LIMIT);
    let other = |name| std::fs::read_to_string(folder.path().join(name)).expect("its output");
    ended.check(0, &[]);
    let told = format!("{}{}{}", ended.out, ended.err, other("b.err"));
    assert_eq!(ended.hash(), expected(folder.path()), "{told}");
    let header = "ranks     4 on CPU, ";
    let line = ended
        .out
        .lines()
        .find(|line| line.contains(header))
        .expect("a header");
    assert!(line.ends_with("transport hierarchical"), "{line}");
    assert_eq!(other("b.out"), "", "rank 0 alone speaks");
    assert!(folder.path().join("a/run/config.toml").exists());
    let left = std::fs::read_dir(folder.path().join("b"))
        .expect("a folder")
        .count();
    assert_eq!(left, 0, "rank 0 alone writes");
}
