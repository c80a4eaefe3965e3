//! Runs with a copy of their checkpoints in an object store: resumed from there alone, and unharmed by a store that fails.

use std::path::Path;

use paceline_testing::bucket::{Bucket, Fault};
use rustix::process::Signal;
use tempfile::tempdir;

use super::support::{Ended, LIMIT, PACELINE, Running, checkpoints, command, hash_of, paceline};

/// 1437 samples in batches of 16: 90 steps an epoch.
const JOB: &str = "--model tiny --global-batch 16 --shards 8 --epochs 6 --save-every 20";
const URL: &str = "s3://bucket/runs/mine";

/// Starts `paceline` with the bucket as its S3.
fn start(folder: &Path, bucket: &Bucket, line: &str) -> Running {
    let mut command = command(folder, PACELINE, line.split_whitespace());
    command.env("AWS_ENDPOINT_URL", bucket.endpoint());
    command.env("AWS_ACCESS_KEY_ID", "key");
    command.env("AWS_SECRET_ACCESS_KEY", "secret");
    Running::start(command)
}

fn run(folder: &Path, bucket: &Bucket, line: &str) -> Ended {
    start(folder, bucket, line).ended(LIMIT)
}

fn is_published(names: &[&str]) -> bool {
    names.iter().any(|name| name.ends_with("state.json"))
}

#[test]
fn a_killed_job_goes_on_elsewhere_from_the_url_alone_with_the_same_bits() {
    let [first, second] = [(); 2].map(|()| tempdir().expect("a folder"));
    let whole = hash_of(
        first.path(),
        &format!("train --run-dir whole {JOB} --nproc-per-node 2"),
    );
    let bucket = Bucket::start(Some("key"));
    let line = format!("train --run-dir run {JOB} --nproc-per-node 2 --checkpoint-dir {URL}");
    let killed = start(first.path(), &bucket, &line);
    killed.has_printed("epoch 1/6");
    assert!(bucket.wait_for(LIMIT, is_published), "nothing is uploaded");
    killed.signal(Signal::KILL);
    assert_eq!(killed.ended(LIMIT).code, None, "killed");

    let line = format!("train --resume {URL} --nproc-per-node 1");
    let resumed = run(second.path(), &bucket, &line);
    assert_eq!(resumed.is_well().hash(), whole);
    let from = "from runs/mine/checkpoints/step-";
    assert!(resumed.out.contains(from), "{}", resumed.out);
    paceline(second.path(), "ledger verify runs/mine").check(0, &[]);
    let names = bucket.objects().into_keys();
    let steps: Vec<String> = names.filter(|name| name.ends_with("state.json")).collect();
    // Those between are not uploaded if saves are faster.
    let newest = "runs/mine/step-0000000540/state.json";
    assert_eq!(steps.last().map(String::as_str), Some(newest));
    assert!(steps.len() <= 3, "--keep counts here too: {steps:?}");

    // The first machine has an older checkpoint than the store.
    let line = format!(
        "run --nproc-per-node 2 {PACELINE} train --resume auto --run-dir run --checkpoint-dir {URL}"
    );
    let last = run(first.path(), &bucket, &line);
    assert_eq!((last.code, last.hash()), (Some(0), &*whole), "{}", last.err);
    assert!(last.out.contains("after step 540"), "{}", last.out);

    let line = format!("train --run-dir other {JOB} --checkpoint-dir {URL}");
    run(first.path(), &bucket, &line).check(
        2,
        &[
            "s3://bucket/runs/mine already holds the checkpoints of a run",
            "--resume s3://bucket/runs/mine",
        ],
    );
    assert!(
        !first.path().join("other").exists(),
        "nothing is left behind"
    );
}

#[test]
fn a_store_that_fails_or_does_not_answer_holds_no_step_up_and_is_named_once() {
    let folder = tempdir().expect("a folder");
    let job = JOB.replace("--epochs 6", "--epochs 2");
    let whole = hash_of(folder.path(), &format!("train --run-dir whole {job}"));
    let train = |run: &str| format!("train --run-dir {run} {job} --checkpoint-dir {URL}-{run}");

    let bucket = Bucket::start(None);
    let of_step = |line: &str| line.contains("/step-");
    bucket.hold(true);
    bucket.set_faults(move |_, line| of_step(line).then_some(Fault::Held));
    let held = start(folder.path(), &bucket, &train("held"));
    // All steps are done, and nothing is uploaded.
    held.has_printed("weights sha256: ");
    assert!(!bucket.objects().keys().any(|name| name.contains("/step-")));
    bucket.hold(false);
    let held = held.ended(LIMIT);
    assert_eq!(held.is_well().hash(), whole);
    assert!(
        bucket
            .objects()
            .contains_key("runs/mine-held/step-0000000180/state.json")
    );

    bucket.set_faults(move |_, line| of_step(line).then_some(Fault::Denied));
    let denied = run(folder.path(), &bucket, &train("denied"));
    assert_eq!((denied.code, denied.hash()), (Some(0), &*whole));
    let warning =
        "warning: cannot upload a checkpoint to s3://bucket/runs/mine-denied: permission denied";
    assert_eq!(denied.err.matches(warning).count(), 1, "{}", denied.err);
    assert_eq!(checkpoints(&folder.path().join("denied")).len(), 3);

    bucket.set_faults(|method, _| (method == "PUT").then_some(Fault::Denied));
    run(folder.path(), &bucket, &train("refused")).check(
        3,
        &[
            "cannot write to s3://bucket/runs/mine-refused: permission denied",
            "hint: the credentials must allow",
        ],
    );
}
