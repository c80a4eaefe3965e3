//! `paceline chaos` on training jobs: they survive each kind of fault with the same bits and every sample used once.

use std::path::Path;

use serde_json::Value;
use tempfile::tempdir;

use super::support::{Ended, LIMIT, PACELINE, Running, command, paceline};

/// 90 steps an epoch, each followed by an evaluation, a checkpoint after every 20.
const JOB: &str =
    "--model tiny --global-batch 16 --shards 8 --epochs 6 --evaluate-every 1 --save-every 20";
/// Should a fault cost the deadline, the test ends all the same.
const LIVE: &str = "--nproc-per-node 4 --recovery live --max-restarts 50 --timeout-seconds 5";

/// Disturbs `paceline JOB`; how it ended, and the report.
fn chaos(folder: &Path, options: &[&str], job: &str) -> (Ended, Value) {
    let mut args = vec!["chaos", "--log-dir", "logs", "--json"];
    args.extend(options);
    args.extend(["--", PACELINE]);
    args.extend(job.split(' '));
    let ended = Running::start(command(folder, PACELINE, args)).ended(LIMIT);
    let report = serde_json::from_str(&ended.out).unwrap_or_else(|error| {
        panic!("{error}: {} {}", ended.out, ended.err);
    });
    (ended, report)
}

#[test]
fn a_training_job_repairs_flipped_bits_and_says_which_rank_had_them() {
    let folder = tempdir().expect("a folder");
    let [whole, again] = ["whole", "again"].map(|run| {
        format!("--reference={PACELINE} train --run-dir {run} {JOB} --nproc-per-node 2")
    });
    let job = |run: &str, more: &str| {
        format!("train --run-dir {run} {JOB} --nproc-per-node 3 --timeout-seconds 20 {more}")
    };
    // Four bits that are not rounded away, none right after another one.
    let options = ["--faults", "corrupt", "--seed", "36", "--kills"];
    let four = [&options[..], &["4", &*whole]].concat();
    let more = "--snapshot-every 10 --memory-checkpoint 4 --recovery live";
    let (_, report) = chaos(folder.path(), &four, &job("run", more));
    let dealt = report["dealt"].as_array().expect("a list");
    assert_eq!(dealt.len(), 4, "{report}");
    for one in dealt {
        assert_eq!(one["fate"], "repaired", "{report}");
        assert_eq!(one["found"]["named"], one["rank"], "{report}");
        // At the next snapshot, if not before.
        assert!(one["found"]["after_steps"].as_u64() <= Some(10), "{report}");
    }
    assert_eq!(report["survived"], true, "{report}");
    let told = paceline(folder.path(), "ledger verify run");
    assert!(told.is_well().out.contains("exactly once"), "{}", told.out);

    // With nothing to go back to, the job ends and names the rank.
    let one = [&options[..], &["1", &*again]].concat();
    let (ended, report) = chaos(folder.path(), &one, &job("other", "--recovery none"));
    assert_eq!(ended.code, Some(1), "{report}");
    let one = &report["dealt"][0];
    assert_eq!(one["fate"], "failed", "{report}");
    assert_eq!(one["found"]["named"], one["rank"], "{report}");
    let named = format!("on ranks [{}] differ from the other ranks", one["rank"]);
    assert!(ended.err.contains(&named), "{}", ended.err);
}

#[test]
fn a_training_job_survives_every_kind_of_fault() {
    let folder = tempdir().expect("a folder");
    let reference =
        format!("--reference={PACELINE} train --run-dir whole {JOB} --nproc-per-node 2");
    // Over shared memory ranks are lost in the tests of recovery.
    let faults = "kill,abort,exit,memory,agent,stop,slow,cut,stall";
    let options = format!("--kills 9 --faults {faults} --hold-seconds 0.2");
    let options: Vec<&str> = options.split(' ').chain(["--resume", &reference]).collect();
    let job = format!("train --run-dir run --resume auto {JOB} {LIVE} --transport tcp");
    let (ended, report) = chaos(folder.path(), &options, &job);
    ended.is_well();
    assert_eq!(report["survived"], true, "{report}");
    // Its only launcher was killed once.
    assert_eq!(report["resumed"], 1, "{report}");
    let told = paceline(folder.path(), "ledger verify run");
    let proof = "epochs    1 to 6: each of 1437 samples was used exactly once";
    assert!(told.is_well().out.contains(proof), "{}", told.out);
}
