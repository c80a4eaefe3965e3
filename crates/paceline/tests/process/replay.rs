//! Steps of a job on several ranks, replayed on one: the same bits, or the shard and the tensor that differ.

use std::fs;
use std::path::Path;

use rustix::process::Signal;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::tempdir;

use super::support::{
    LIMIT, PACELINE, Running, checkpoints, command, example, in_time, paceline, probe, start,
    text_folder,
};

/// 1437 samples in batches of 64: 23 steps an epoch.
const JOB: &str = "--model tiny --global-batch 64 --shards 8 --epochs 3 --record 1000";

fn replayed(folder: &Path, line: &str) -> Value {
    let ended = paceline(folder, &format!("replay run {line} --json"));
    ended.is_well();
    serde_json::from_str(&ended.out).expect("JSON")
}

/// Changes the digest of one parameter and the checksums of this line and all later ones, as if the rank had computed it so.
fn change(file: &Path, step: u64, shard: u64, parameter: usize) {
    let sum = |body: &str| {
        let sum = Sha256::digest(body);
        let first: Vec<String> = sum[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        first.concat()
    };
    let text = fs::read_to_string(file).expect("a record");
    let mut lines = Vec::new();
    let mut previous: Option<(String, String)> = None;
    for line in text.lines() {
        let (body, old) = line.rsplit_once(",\"sum\":").expect("a checksum");
        let mut body = body.to_owned();
        if let Some((before, after)) = &previous {
            body = body.replacen(before, after, 1);
        }
        let record: Value = serde_json::from_str(line).expect("JSON");
        if (&record["step"], &record["shard"]) == (&json!(step), &json!(shard)) {
            let digests = record["digests"].as_str().expect("digests");
            let mut changed = digests.to_owned();
            changed.replace_range(16 * parameter..16 * (parameter + 1), "0123456789abcdef");
            body = body.replacen(digests, &changed, 1);
        }
        let old: String = old.chars().filter(char::is_ascii_hexdigit).collect();
        let new = sum(&body);
        lines.push(format!("{body},\"sum\":\"{new}\"}}\n"));
        previous = Some((old, new));
    }
    fs::write(file, lines.concat()).expect("written");
}

#[test]
fn a_run_is_replayed_from_a_checkpoint_of_other_ranks_and_a_changed_digest_is_named() {
    let (folder, ()) = in_time(|folder| {
        let line =
            format!("train --run-dir run {JOB} --save-every 10 --keep 1000 --nproc-per-node 2");
        let first = start(folder, &line);
        first.has_printed("epoch 1/3");
        first.signal(Signal::KILL);
        let killed = first.ended(LIMIT).ended_with(None)?;
        // Other ranks are to do the steps from 50 on.
        let run = folder.join("run");
        match checkpoints(&run).pop() < Some(run.join("checkpoints/step-0000000050")) {
            true => Ok(()),
            false => Err(killed),
        }
    });
    let kept = folder.path().join("kept");
    paceline(
        folder.path(),
        "train --resume run --nproc-per-node 4 --save-every 10 --keep 1000",
    )
    .is_well();
    // Of another number of ranks than the steps after it.
    let checkpoints = folder.path().join("run/checkpoints");
    let found = replayed(folder.path(), "--step 29");
    assert_eq!((&found["from"], &found["step"]), (&json!(23), &json!(29)));
    assert_eq!(found["difference"], Value::Null);
    assert_eq!(found["shards_unrecorded"], 0);
    assert_eq!(found["shards_compared"], 6 * 8, "{found}");
    let told = paceline(folder.path(), "replay run --step 4 --rank 1");
    told.is_well();
    for text in [
        "steps 1 to 4 on one rank, from the start of the run",
        "same bits",
    ] {
        assert!(told.out.contains(text), "{text:?} is not in\n{}", told.out);
    }
    assert_eq!(
        replayed(folder.path(), "--step 69 --rank 3")["shards_compared"],
        2 * 9
    );

    // Shard 5 is one of rank 2's.
    let record = checkpoints.join("digests/rank-2.jsonl");
    fs::copy(&record, &kept).expect("copied");
    change(&record, 52, 5, 1);
    let differs = paceline(folder.path(), "replay run --step 55 --json");
    differs.check(
        1,
        &["step 52, shard 5: rank 2 recorded other bits for the gradients of "],
    );
    let found: Value = serde_json::from_str(&differs.out).expect("JSON");
    assert_eq!((&found["from"], &found["step"]), (&json!(50), &json!(52)));
    let difference = &found["difference"];
    assert_eq!(difference["rank"], 2);
    assert_eq!(
        difference["tensors"].as_array().map(Vec::len),
        Some(1),
        "{found}"
    );
    assert_eq!(
        replayed(folder.path(), "--step 55 --rank 1")["difference"],
        Value::Null
    );

    let refused = |line: &str, says: &[&str]| {
        paceline(folder.path(), line).check(2, says);
    };
    let text = fs::read_to_string(&kept).expect("a record");
    fs::write(&record, text.replacen("\"shard\":4", "\"shard\":5", 1)).expect("written");
    refused(
        "replay run --step 55",
        &["rank-2.jsonl: line ", " was changed"],
    );
    fs::write(&record, text).expect("written");
    refused(
        "replay run --step 70",
        &["step 70 is not recorded, only steps 1 to 69"],
    );
    refused(
        "replay run --step 69 --rank 4",
        &["no record of rank 4", "choose one of 0, 1, 2, 3"],
    );
    refused("replay nowhere --step 1", &["holds no run"]);
    fs::remove_dir_all(checkpoints.join("digests")).expect("removed");
    refused(
        "replay run --step 5",
        &["no record of its gradients", "--record N"],
    );
    refused(
        "train --task lm --record 5 --tp 2",
        &["`record` is 5", "does not go with tp 2"],
    );
}

#[test]
fn steps_after_a_loss_and_after_a_join_are_replayed() {
    let mut epochs = 0;
    let (folder, ()) = in_time(|folder| {
        epochs += 3;
        // 90 steps an epoch.
        let line = format!(
            "train --run-dir run --model tiny --global-batch 16 --shards 8 --epochs {epochs} --record 10000 --nproc-per-node 4 \
             --max-restarts 1 --evaluate-every 1 --keep 1000"
        );
        let job = start(folder, &line);
        job.has_printed("epoch ");
        job.hits(&[1], Signal::KILL);
        let ended = job.ended(LIMIT);
        let ended = ended.says(" joins as a replacement; 4 ranks go on")?;
        ended.check(0, &["; 3 ranks go on"]);
        Ok(())
    });

    let told = paceline(folder.path(), "ledger verify run --json");
    let found: Value = serde_json::from_str(&told.is_well().out).expect("JSON");
    let attempts = found["attempts"].as_array().expect("attempts");
    let owners = |attempt: &Value| {
        let owners = attempt["begin"]["owners"].as_array().expect("owners");
        owners
            .iter()
            .map(|owner| owner[0].clone())
            .collect::<Vec<_>>()
    };
    let owners: Vec<_> = attempts.iter().map(owners).collect();
    assert_eq!(owners[0], [0, 1, 2, 3]);
    assert_eq!(owners[1], [0, 2, 3]);
    assert_eq!(owners.last().expect("the last one"), &[0, 2, 3, 1]);

    let told = paceline(folder.path(), "ledger verify run").out;
    let says = [
        "  rank 1 (pid ",
        ") was killed by signal 9 (SIGKILL) after ",
        "; went on after step ",
        "  rank 1 was replaced; went on after step ",
    ];
    for text in says {
        assert!(told.contains(text), "{text:?} is not in\n{told}");
    }
    for (attempt, ranks) in [(&attempts[1], [0, 2, 3]), (&attempts[2], [1, 2, 3])] {
        let step = &attempt["last_step"];
        let found = replayed(folder.path(), &format!("--step {step}"));
        assert_eq!(found["difference"], Value::Null, "{found}");
        // The lost rank may not have written those of its last step.
        let unrecorded = found["shards_unrecorded"].as_u64();
        assert!(unrecorded.is_some_and(|shards| shards <= 2), "{found}");
        for rank in ranks {
            let found = replayed(folder.path(), &format!("--step {step} --rank {rank}"));
            assert_ne!(found["shards_compared"], 0, "{found}");
        }
    }
}

#[test]
fn every_layout_of_replicas_is_replayed() {
    let job = "--task lm --data text.txt --layers 2 --width 16 --heads 2 --context 16 --global-batch 8 --shards 4 --epochs 1";
    for layout in [
        "--nproc-per-node 2 --zero 3 --accumulate 2 --precision fp16 --clip-norm 1",
        "--nproc-per-node 4 --transport tcp --comm-hook topk:0.1 --dropout 0.1",
        "--strategy dp --devices 2",
    ] {
        let folder = text_folder();
        let line = format!("train --run-dir run {job} {layout} --save-every 5 --record 50");
        paceline(folder.path(), &line).is_well();
        let found = replayed(folder.path(), "--step 13");
        assert_eq!(found["difference"], Value::Null, "{layout}");
        let compared = (&found["from"], &found["shards_compared"]);
        assert_eq!(compared, (&json!(10), &json!(3 * 4)), "{layout}");
        // The data was moved.
        fs::rename(
            folder.path().join("text.txt"),
            folder.path().join("moved.txt"),
        )
        .expect("moved");
        paceline(folder.path(), "replay run --step 13").check(2, &["text.txt"]);
        let found = replayed(folder.path(), "--step 13 --data moved.txt");
        assert_eq!(found["difference"], Value::Null, "{layout}");
    }
}

#[test]
fn the_rank_that_computed_a_wrong_gradient_is_named() {
    let folder = tempdir().expect("a folder");
    let line = format!("run --nproc-per-node 4 {} saved", probe("replay"));
    Running::start(command(folder.path(), PACELINE, line.split_whitespace()))
        .ended(LIMIT)
        .check(0, &[]);
    let alone = Running::start(command(
        folder.path(),
        example("probe"),
        ["replay", "saved", "9"],
    ))
    .ended(LIMIT);
    assert_eq!(
        alone.is_well().out,
        "step 4: 4 shards\nstep 5: 4 shards\nstep 6: 4 shards\n\
         step 7: shard 2 of rank 2 differs: weight bias\n"
    );
}
