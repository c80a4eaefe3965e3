//! Under a real Slurm: launchers that find their place without any option, and what becomes of codes and signals.
//!
//! Each test has a cluster of its own on this machine, from tools/slurm.sh.

#[path = "schedulers/support.rs"]
mod support;

use support::{Ended, Site, has};

/// Says what a rank was given.
const SAY: &str = "echo at $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE on node $GROUP_RANK of \
                   $GROUP_WORLD_SIZE, $TORCHELASTIC_RUN_ID start $TORCHELASTIC_RESTART_COUNT meet $MASTER_ADDR";
const TOKEN: &str = "export PACELINE_JOB_TOKEN=$(printf '0f%.0s' {1..32});";

fn has_slurm() -> bool {
    has(
        &["slurmctld", "slurmd", "srun", "munged"],
        "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge",
    )
}

/// Runs a line of the shell with a cluster, which has what the script's options say.
fn slurm(site: &Site, options: &str, line: &str) -> Ended {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tools/slurm.sh");
    let words: Vec<_> = std::iter::once(script)
        .chain(options.split_whitespace())
        .collect();
    site.run(&words, line)
}

#[test]
fn srun_alone_places_launchers_and_ranks_under_real_slurm() {
    if !has_slurm() {
        return;
    }
    let site = Site::new(SAY);
    let line = "srun -N2 --ntasks-per-node=1 --gpus-per-node=2 $LAUNCHER run --log-dir /dev/null ./rank.sh";
    let ended = slurm(&site, "--gpus 2", &format!("{TOKEN} {line}"));
    ended.ends_with(0);
    let ranks = ended.ranks();
    assert_eq!(ranks.len(), 4, "{ended:?}");
    for (rank, line) in ranks.iter().enumerate() {
        let (local, node) = (rank % 2, rank / 2);
        let start = format!("at {rank} of 4, {local} of 2 on node {node} of 2, slurm-");
        assert!(line.starts_with(&start), "{line}");
        assert!(line.ends_with(".0 start 0 meet 127.0.0.1"), "{line}");
    }
    for node in 0..2 {
        let name = format!("127.0.0.{}", node + 1);
        ended.says(&format!(
            ".0: 2 nodes, this is node {node} ({name}), meeting at 127.0.0.1:"
        ));
    }
    ended.says("; 2 ranks on this node, as SLURM_GPUS_ON_NODE says");
}

#[test]
fn a_failing_ranks_code_is_the_steps_under_real_slurm() {
    if !has_slurm() {
        return;
    }
    let site = Site::new("[ $RANK = 1 ] && exit 7; exec sleep 100");
    let line = "srun -N2 --ntasks-per-node=1 $LAUNCHER run --log-dir /dev/null ./rank.sh";
    let ended = slurm(&site, "", &format!("{TOKEN} {line}"));
    ended
        .ends_with(7)
        .says("rank 1 (node 1")
        .says("exited with code 7");
}

#[test]
fn mistakes_of_a_step_are_said_with_what_to_do_under_real_slurm() {
    if !has_slurm() {
        return;
    }
    let site = Site::new(SAY);
    let run = "$LAUNCHER run --log-dir /dev/null";
    let ended = slurm(
        &site,
        "",
        &format!("srun -N2 --ntasks-per-node=1 {run} ./rank.sh"),
    );
    ended
        .ends_with(2)
        .says("PACELINE_JOB_TOKEN is not set")
        .says("before srun:\n  export PACELINE_JOB_TOKEN=$(openssl rand -hex 32)");

    let ended = slurm(&site, "", &format!("{TOKEN} srun -N2 -n4 {run} ./rank.sh"));
    ended
        .ends_with(2)
        .says("Slurm started")
        .says("`srun --ntasks-per-node=1 paceline run --nproc-per-node");
    assert!(ended.ranks().is_empty(), "{ended:?}");

    let ended = slurm(
        &site,
        "",
        &format!("srun -N1 -n2 {run} --standalone ./rank.sh"),
    );
    ended.ends_with(0);
    assert_eq!(ended.ranks().len(), 2, "two jobs: {ended:?}");
}

#[test]
fn a_batch_script_without_srun_is_one_node_and_a_hint_under_real_slurm() {
    if !has_slurm() {
        return;
    }
    let site = Site::new(SAY);
    site.script(
        "batch.sh",
        "$LAUNCHER run --nproc-per-node 2 --log-dir /dev/null ./rank.sh",
    );
    let ended = slurm(
        &site,
        "",
        "sbatch --quiet --wait --nodes=2 --output=out --error=err batch.sh; code=$?; cat out; cat err >&2; exit $code",
    );
    ended.ends_with(0).says(
        "hint: the job has 2 nodes, and outside of srun this is one: `srun --ntasks-per-node=1",
    );
    let ranks = ended.ranks();
    assert_eq!(ranks.len(), 2, "{ended:?}");
    assert!(
        ranks[1].starts_with("at 1 of 2, 1 of 2 on node 0 of 1"),
        "{ranks:?}"
    );
}

#[test]
fn a_requeued_job_knows_that_it_was_started_before_under_real_slurm() {
    if !has_slurm() {
        return;
    }
    let site = Site::new(SAY);
    site.script(
        "batch.sh",
        "if [ -z \"$SLURM_RESTART_COUNT\" ]; then scontrol requeue $SLURM_JOB_ID; exec sleep 100; fi
         srun --ntasks-per-node=1 $LAUNCHER run --log-dir /dev/null ./rank.sh; touch done",
    );
    let submit =
        "sbatch --quiet --nodes=2 --requeue --open-mode=append --output=out --error=err batch.sh";
    // A job that was put back waits for two minutes. It may start earlier, but not in the second in which its first
    // start was revoked.
    let begin = "job=$(squeue --noheader --format=%A)
                 until [ \"$(squeue --noheader --states=PENDING --format=%r)\" = BeginTime ]; do sleep 0.1; done
                 scontrol update JobId=$job StartTime=now+3
                 until [ -e done ]; do sleep 0.1; done";
    let ended = slurm(
        &site,
        "",
        &format!("{TOKEN} {submit}\n{begin}\ncat out; cat err >&2"),
    );
    ended.ends_with(0);
    let ranks = ended.ranks();
    assert_eq!(ranks.len(), 2, "{ended:?}");
    assert!(ranks[0].contains(" start 1 "), "{ranks:?}");
}

#[test]
fn a_signal_of_scancel_reaches_the_ranks_under_real_slurm() {
    if !has_slurm() {
        return;
    }
    // Slurm itself signals only the launchers: every rank leads a process group of its own.
    let site = Site::new(
        "trap 'echo at told $RANK; exit 0' USR1
         touch up.$RANK; while :; do sleep 0.1; done",
    );
    let line = "srun -N2 --ntasks-per-node=1 $LAUNCHER run --log-dir /dev/null ./rank.sh & \
                until [ -e up.0 ] && [ -e up.1 ]; do sleep 0.1; done; \
                scancel --quiet --signal=USR1 $(squeue --noheader --format=%A); wait $!";
    let ended = slurm(&site, "", &format!("{TOKEN} {line}"));
    ended.ends_with(128 + 10).says("stopped by SIGUSR1");
    assert_eq!(ended.ranks(), ["at told 0", "at told 1"], "{ended:?}");
}
