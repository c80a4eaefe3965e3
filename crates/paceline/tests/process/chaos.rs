//! `paceline chaos` on training jobs: they survive each kind of fault with the same bits and every sample used once.

use tempfile::tempdir;

use super::support::{LIMIT, PACELINE, Running, command, paceline};

/// 90 steps an epoch, each followed by an evaluation, a checkpoint after every 20.
const JOB: &str =
    "--model tiny --global-batch 16 --shards 8 --epochs 3 --evaluate-every 1 --save-every 20";
/// Should a fault cost the deadline, the test ends all the same.
const LIVE: &str = "--nproc-per-node 4 --recovery live --max-restarts 50 --timeout-seconds 5";

#[test]
fn a_training_job_survives_every_kind_of_fault() {
    let deadly = "kill,abort,exit,memory,agent";
    let all = format!("{deadly},stop,slow,cut,stall");
    for (transport, faults, kills) in [("tcp", &*all, 9), ("shm", deadly, 5)] {
        let folder = tempdir().expect("a folder");
        let reference =
            format!("--reference={PACELINE} train --run-dir whole {JOB} --nproc-per-node 2");
        let options = format!("--kills {kills} --faults {faults} --hold-seconds 0.2 --json");
        let job = format!("train --run-dir run --resume auto {JOB} {LIVE} --transport {transport}");
        let mut args = vec!["chaos", "--log-dir", "logs", "--resume", &reference];
        args.extend(options.split(' '));
        args.extend(["--", PACELINE]);
        args.extend(job.split(' '));
        let ended = Running::start(command(folder.path(), PACELINE, args)).ended(LIMIT);
        let ended = ended.is_well();
        let report: serde_json::Value = serde_json::from_str(&ended.out).expect("JSON");
        assert_eq!(report["survived"], true, "{report}");
        // Its only launcher was killed once.
        assert_eq!(report["resumed"], 1, "{report}");
        let told = paceline(folder.path(), "ledger verify run");
        let proof = "epochs    1 to 3: each of 1437 samples was used exactly once";
        assert!(told.is_well().out.contains(proof), "{}", told.out);
    }
}
