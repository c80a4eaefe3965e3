//! Ranks that a real scheduler starts itself, without a launcher of ours: they find their places and meet.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// No test takes as long, on a busy machine neither; what still runs then is killed.
const LIMIT: &str = "120";

fn meet() -> PathBuf {
    paceline_testing::example("paceline-rendezvous", "meet")
}

/// Whether a program is there; says how to get it otherwise.
fn has(program: &str, how: &str) -> bool {
    let found = Command::new("bash")
        .args(["-c", &format!("PATH=$PATH:/usr/sbin; command -v {program}")])
        .output();
    let found = found.is_ok_and(|found| found.status.success());
    if !found {
        paceline_testing::skipped(format!(
            "{program} is not installed: apt-get install --no-install-recommends {how}"
        ));
    }
    found
}

fn output(line: &str, vars: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut command = Command::new("timeout");
    paceline_testing::outside_of_jobs(&mut command)
        .args(["--kill-after=20", LIMIT, "bash", "-c", line])
        .env("MEET", meet())
        .env(
            "SLURM",
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../tools/slurm.sh"),
        )
        .stdin(Stdio::null());
    let ended = command
        .envs(vars.iter().copied())
        .output()
        .expect("timeout(1) starts");
    let text = [ended.stdout, ended.stderr].concat();
    (
        ended.status.code(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

#[track_caller]
fn all_four_meet((code, text): (Option<i32>, String), nodes: [usize; 4]) {
    assert_eq!(code, Some(0), "{text}");
    for one in 0..4 {
        for (other, node) in nodes.iter().enumerate() {
            let line = format!("rank {one} sees rank {other}: process ");
            let seen = text.lines().find(|seen| seen.contains(&line));
            let is_there = seen.is_some_and(|seen| seen.ends_with(&format!(" on node {node}")));
            assert!(is_there, "no {line:?} on node {node} in {text}");
        }
    }
}

const SLURM: &str = "slurmctld slurmd slurm-client munge";
const TOKEN: &str = "0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f";

#[test]
fn ranks_of_srun_meet_under_real_slurm() {
    if !has("slurmd", SLURM) || !has("munged", SLURM) {
        return;
    }
    let vars = [("PACELINE_JOB_TOKEN", TOKEN)];
    let uneven = "$SLURM bash -c 'srun -N2 -n4 --distribution=block $MEET'";
    all_four_meet(output(uneven, &vars), [0, 0, 0, 1]);
    let cyclic =
        "$SLURM bash -c 'srun -N2 --ntasks-per-node=2 --distribution=cyclic --mpi=pmi2 $MEET'";
    all_four_meet(output(cyclic, &vars), [0, 1, 0, 1]);
    // Those of one node need no token: they meet where nobody else comes.
    let one = "$SLURM bash -c 'srun -N1 -n4 $MEET'";
    let (code, text) = output(one, &[]);
    assert!(!text.contains("anybody"), "{text}");
    all_four_meet((code, text), [0; 4]);
}

#[test]
fn ranks_of_mpirun_meet_under_real_open_mpi() {
    if !has("mpirun.openmpi", "openmpi-bin") {
        return;
    }
    let mpirun = "mpirun.openmpi --allow-run-as-root --oversubscribe -n 4";
    all_four_meet(output(&format!("{mpirun} $MEET"), &[]), [0; 4]);
    // A second machine, which is this one under another name, reached by a stand-in for ssh: its options, the host, and
    // the command, which runs here.
    let folder = tempfile::tempdir().expect("a folder");
    let ssh = folder.path().join("ssh");
    let script = "#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done; shift; exec sh -c \"$*\"\n";
    std::fs::write(&ssh, script).expect("written");
    std::fs::set_permissions(&ssh, PermissionsExt::from_mode(0o755)).expect("allowed");
    let hosts = format!(
        "-mca rtc ^hwloc -mca plm_rsh_agent {} --host $(hostname):2,127.0.0.2:2",
        ssh.display()
    );
    all_four_meet(
        output(&format!("{mpirun} {hosts} $MEET"), &[]),
        [0, 0, 1, 1],
    );
}

#[test]
fn ranks_of_mpiexec_meet_under_real_hydra() {
    if !has("mpiexec.hydra", "mpich") {
        return;
    }
    all_four_meet(output("mpiexec.hydra -n 4 $MEET", &[]), [0; 4]);
}
