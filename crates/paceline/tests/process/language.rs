//! A language model trains with the same bits on any number of ranks, writes text, and refuses what makes no sense.

use std::fs;

use super::support::{
    PACELINE, checkpoints, command, hash_of, metrics, paceline, steps, text_folder,
};

/// 80 sequences of 32 tokens to train on, in batches of 8: 10 steps an epoch.
const JOB: &str = "--task lm --data text.txt --layers 2 --heads 2 --width 16 --context 32 --dropout 0.1 --shards 4 --global-batch 8 \
                   --clip-norm 1 --epochs 2";

#[test]
fn one_to_four_ranks_and_a_resume_on_others_give_the_same_bits() {
    let folder = text_folder();
    let alone = hash_of(
        folder.path(),
        &format!("train --run-dir 1 {JOB} --nproc-per-node 1"),
    );
    for ranks in 2..=4 {
        let line = format!("train --run-dir {ranks} {JOB} --nproc-per-node {ranks}");
        assert_eq!(hash_of(folder.path(), &line), alone, "{ranks} ranks");
    }
    for recompute in ["blocks", "2", "burn"] {
        let line = format!("train --run-dir {recompute}-again {JOB} --recompute {recompute}");
        assert_eq!(
            hash_of(folder.path(), &line),
            alone,
            "recompute {recompute}"
        );
    }
    // The newest checkpoint is in the middle of the second epoch.
    let line = format!("train --run-dir cut {JOB} --nproc-per-node 3 --save-every 7 --keep 9");
    assert_eq!(hash_of(folder.path(), &line), alone);
    let run = folder.path().join("cut");
    fs::remove_dir_all(checkpoints(&run).pop().expect("a checkpoint")).expect("removed");
    let resumed = hash_of(folder.path(), "train --resume cut --nproc-per-node 2");
    assert_eq!(resumed, alone);
}

#[test]
fn parameters_that_are_dealt_to_ranks_keep_the_bits_and_resume_in_any_layout() {
    let folder = text_folder();
    let alone = format!("train --run-dir alone {JOB} --evaluate-every 4 --nproc-per-node 1");
    let alone = hash_of(folder.path(), &alone);
    let jobs = [(1, "shm"), (2, "shm"), (3, "tcp"), (4, "shm")];
    for (ranks, transport) in jobs {
        let line = format!(
            "train --run-dir zero-{ranks} {JOB} --evaluate-every 4 --zero 3 --nproc-per-node {ranks} --transport {transport}"
        );
        assert_eq!(hash_of(folder.path(), &line), alone, "{ranks} ranks");
    }
    let layouts = [
        ("--zero 3", 3),
        ("--zero 0", 2),
        ("--zero 3", 4),
        ("--zero 1", 3),
    ];
    for (at, [(saved, from), (resumed, to)]) in layouts.array_windows().enumerate() {
        let line = format!(
            "train --run-dir cut-{at} {JOB} --evaluate-every 4 {saved} --nproc-per-node {from} --save-every 7 --keep 9"
        );
        assert_eq!(hash_of(folder.path(), &line), alone);
        let run = folder.path().join(format!("cut-{at}"));
        fs::remove_dir_all(checkpoints(&run).pop().expect("a checkpoint")).expect("removed");
        let line = format!("train --resume cut-{at} {resumed} --nproc-per-node {to}");
        assert_eq!(hash_of(folder.path(), &line), alone, "{saved} to {resumed}");
    }
    paceline(folder.path(), "generate zero-4 the --tokens 3").check(0, &[]);
}

#[test]
fn loss_and_perplexity_fall_and_are_measured_within_an_epoch_too() {
    let folder = text_folder();
    let line = format!("train --run-dir run {JOB} --lr 0.01 --evaluate-every 3");
    let ended = paceline(folder.path(), &line);
    let out = &ended.is_well().out;
    assert!(
        out.contains("perplexity") && out.contains("tokens/s"),
        "{out}"
    );
    let records = metrics(&folder.path().join("run"));
    assert_eq!(steps(&records, "evaluation"), [3, 6, 9, 12, 15, 18]);
    let losses: Vec<f64> = records
        .iter()
        .filter_map(|record| record["held_out_loss"].as_f64())
        .collect();
    // An untrained model knows nothing: ln 257 is 5.5.
    assert!(losses[0] > 4.0 && losses[7] < losses[0] - 0.5, "{losses:?}");
    let last = records.iter().rfind(|record| record["kind"] == "epoch");
    let last = last.expect("an epoch");
    let perplexity = last["perplexity"].as_f64().expect("a perplexity");
    assert!((perplexity.ln() - losses[7]).abs() < 1e-9, "{last}");
    // 52 lines of 54 bytes: nine tenths, each a target once.
    let tokens: f64 = records
        .iter()
        .filter(|record| record["epoch"] == 1)
        .filter_map(|record| record["tokens"].as_f64())
        .sum();
    assert_eq!(tokens, f64::from(52 * 54 * 9 / 10));
}

#[test]
fn a_trained_tokenizer_is_kept_in_the_run_and_serves_the_resumed_run_and_the_generator() {
    let folder = text_folder();
    let bpe = format!("train --run-dir run {JOB} --tokenizer bpe --vocab 280");
    let ended = paceline(folder.path(), &bpe);
    let out = &ended.is_well().out;
    assert!(out.contains("tokens of 280 kinds"), "{out}");
    let run = folder.path().join("run");
    // A resumed run and the generator read the run's own tokenizer, and the generator that of the checkpoint.
    fs::remove_dir_all(checkpoints(&run).pop().expect("a checkpoint")).expect("removed");
    paceline(folder.path(), "train --resume run").is_well();
    fs::rename(run.join("tokenizer.json"), folder.path().join("t.json")).expect("renamed");
    let written = paceline(folder.path(), "generate run the --tokens 20");
    written.check(0, &[]);
    assert!(written.out.starts_with("the"), "{}", written.out);
    // The file is in Hugging Face's format, and another run takes it.
    let other = JOB.replace("--data text.txt", "--tokenizer t.json");
    let line = format!("train --run-dir other {other} --epochs 1").replace("--epochs 2 ", "");
    let ended = paceline(folder.path(), &line);
    let out = &ended.is_well().out;
    assert!(out.contains("tokens of 280 kinds"), "{out}");
}

#[test]
fn a_run_writes_the_same_text_for_the_same_seed_and_the_newest_run_is_taken() {
    let folder = text_folder();
    paceline(folder.path(), &format!("train --run-dir runs/a {JOB}")).is_well();
    let generate = |line: &str| {
        let ended = paceline(folder.path(), &format!("generate {line}"));
        ended.check(0, &[]);
        ended.out.clone()
    };
    let text = generate("runs/a lazy --tokens 40 --seed 3");
    assert!(text.starts_with("lazy") && text.len() > 20, "{text}");
    assert_eq!(generate("lazy --tokens 40 --seed 3"), text);
    assert_ne!(generate("lazy --tokens 40 --seed 4"), text);
    let greedy = generate("lazy --tokens 40 --temperature 0 --seed 1");
    assert_eq!(generate("lazy --tokens 40 --top-k 1 --seed 2"), greedy);
}

#[test]
fn a_run_that_cannot_write_text_is_refused() {
    let folder = text_folder();
    let check = |line: &str, expect: &str| {
        paceline(folder.path(), &format!("generate {line}")).check(2, &[expect]);
    };
    check("prompt", "there is no run with a checkpoint below runs");
    check("runs/a prompt", "runs/a holds no run");
    let digits = "train --model tiny --epochs 1 --run-dir runs/digits";
    paceline(folder.path(), digits).is_well();
    check("prompt", "runs/digits holds no language model");
    fs::remove_dir_all(folder.path().join("runs/digits/checkpoints")).expect("removed");
    check("runs/digits prompt", "runs/digits has no checkpoint");
}

#[test]
fn settings_and_texts_that_make_no_sense_are_refused_before_any_rank_starts() {
    let folder = text_folder();
    fs::create_dir(folder.path().join("empty")).expect("a folder");
    fs::write(folder.path().join("a.bin"), [0xff, 0xfe]).expect("a file");
    let check = |line: &str, expect: &str| {
        let ended = paceline(folder.path(), &format!("train --run-dir run {line}"));
        ended.check(2, &[expect]);
        assert!(!folder.path().join("run").exists(), "{line}");
    };
    check(
        "--context 64",
        "`context` is 64 (flag --context), but task digits",
    );
    check("--task lm --model small", "gpt-1m, gpt-10m or gpt-124m");
    check("--model gpt-1m", "tiny, small, base");
    check(
        "--task lm --heads 3",
        "3 attention heads do not divide a width of 128",
    );
    check(
        "--task lm --vocab 280",
        "`vocab` is 280 (flag --vocab), but `tokenizer` is not bpe",
    );
    check("--task lm --tokenizer no.json", "no.json: No such file");
    check("--task lm --data empty", "empty: no text");
    check("--task lm --data a.bin", "a.bin: line 1: not UTF-8 text");
    check(
        "--task lm --data text.txt --context 4096",
        "fewer than the 4096 of one context",
    );
    // A prompt with spaces is one argument.
    let spaced = command(folder.path(), PACELINE, ["generate", "two words"]).output();
    let text = String::from_utf8(spaced.expect("started").stderr).expect("text");
    assert!(text.contains("there is no run"), "{text}");
}
