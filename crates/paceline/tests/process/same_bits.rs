//! The result depends on the settings and the number of shards, not on the number of ranks or the transport.

use std::fs;
use std::path::Path;
use std::process::Command;

use paceline_nn::Isa;
use tempfile::tempdir;

use super::support::{LIMIT, PACELINE, Running, command, paceline, probe, write_text};

/// Trains with `settings` and returns the hash of the weights.
fn hash(folder: &Path, settings: &str, ranks: usize, transport: &str) -> String {
    let run = format!("run-{ranks}-{transport}");
    let line = format!(
        "train --model tiny --run-dir {run} --nproc-per-node {ranks} --transport {transport} {settings}"
    );
    let ended = paceline(folder, &line);
    ended.is_well().hash().to_owned()
}

/// Every number of ranks and transport gives the bits of one rank.
fn check(settings: &str, others: &[(usize, &str)]) -> String {
    let folder = tempdir().expect("a folder");
    let alone = hash(folder.path(), settings, 1, "auto");
    for (ranks, transport) in others {
        let found = hash(folder.path(), settings, *ranks, transport);
        assert_eq!(found, alone, "{settings}: {ranks} ranks over {transport}");
    }
    alone
}

#[test]
fn one_to_eight_ranks_over_shared_memory_and_tcp_give_the_same_bits() {
    let others = [2, 3, 4, 8]
        .into_iter()
        .flat_map(|ranks| [(ranks, "shm"), (ranks, "tcp")]);
    // 1437 samples in batches of 64: the last batch of an epoch has 29.
    check("--shards 8 --epochs 2", &others.collect::<Vec<_>>());
}

/// The kernels' bits do not depend on the instructions, also if each rank has others.
#[test]
fn every_instruction_set_of_this_machine_gives_the_same_bits() {
    let folder = tempdir().expect("a folder");
    // 33 steps.
    write_text(folder.path(), 1520);
    let with = |isa: &str, words: &[&str]| {
        let mut command = command(folder.path(), PACELINE, words);
        command.env("PACELINE_ISA", isa);
        Running::start(command).ended(LIMIT)
    };
    let here: Vec<Isa> = Isa::ALL
        .into_iter()
        .filter(|isa| isa.is_available())
        .collect();
    let [.., widest] = here[..] else {
        unreachable!("portable code runs everywhere")
    };
    let other = here[here.len().saturating_sub(2)];
    for (name, job) in [
        ("digits", "--model tiny --epochs 1 --shards 2"),
        (
            "gpt",
            "--task lm --data text.txt --layers 1 --heads 2 --width 16 --context 32 --global-batch 64 --epochs 1 --shards 2",
        ),
    ] {
        let hash = |isa: &str| {
            let line = format!("train {job} --run-dir {name}-{isa} --nproc-per-node 1");
            let words: Vec<&str> = line.split_whitespace().collect();
            with(isa, &words).is_well().hash().to_owned()
        };
        let hashes: Vec<String> = here.iter().map(|isa| hash(&isa.to_string())).collect();
        for (isa, found) in here.iter().zip(&hashes) {
            assert_eq!(*found, hashes[0], "{name}, {isa}");
        }
        let ranks = format!(
            "[ $RANK = 0 ] && export PACELINE_ISA={widest}; exec {PACELINE} train {job} --run-dir {name}-mixed"
        );
        let mixed = with(
            &other.to_string(),
            &["run", "--nproc-per-node", "2", "sh", "-c", &ranks],
        );
        // On a machine without AVX-512 the other rank is a portable one, which is reported as slow.
        assert_eq!(mixed.check(0, &[]).hash(), hashes[0], "{name}");
    }

    let wrong = with(
        "sse9",
        &["train", "--run-dir", "wrong", "--nproc-per-node", "1"],
    );
    wrong.check(
        2,
        &["PACELINE_ISA: `sse9` is no instruction set; expected portable, avx2 or avx512"],
    );
}

/// The other rank's system has another exponential function, as systems of other machines may.
#[test]
fn a_rank_that_computes_other_bits_is_named_and_ends_a_strict_job() {
    let folder = tempdir().expect("a folder");
    let other = "double exp(double);\nfloat expf(float x) { return exp(x) * 1.0000001f; }\n";
    fs::write(folder.path().join("other.c"), other).expect("a file");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o", "other.so", "other.c", "-lm"]);
    let made = compiler.current_dir(folder.path()).status();
    if !made.is_ok_and(|status| status.success()) {
        paceline_testing::skipped("there is no C compiler");
        return;
    }
    let with = |options: &str| {
        let rank = format!(
            "[ $RANK = 1 ] && export LD_PRELOAD=$PWD/other.so; \
             exec {PACELINE} train --model tiny --epochs 1 --shards 2 {options}"
        );
        let words = ["run", "--nproc-per-node", "2", "sh", "-c", &rank];
        Running::start(command(folder.path(), PACELINE, words)).ended(LIMIT)
    };
    let found = "ranks [1] compute other bits than rank 0 in softmax, log_softmax, exp, ";
    with("--run-dir warned").check(0, &[&format!("warning: {found}"), "--same-bits strict"]);
    let strict = with("--run-dir strict --same-bits strict");
    strict.check(1, &[found, "hint: take machines of one kind"]);
    with("--run-dir compressed --comm-hook bf16").is_well();
}

#[test]
fn accumulation_clipping_and_small_buckets_keep_the_bits() {
    check(
        "--shards 8 --epochs 1 --accumulate 2 --clip-norm 0.5 --bucket-cap-mb 0.001",
        &[(2, "tcp"), (3, "shm"), (8, "shm")],
    );
}

/// Dropout and running statistics included, and whatever runs the blocks twice.
#[test]
fn replicas_in_threads_and_layers_on_devices_keep_the_bits() {
    let small =
        "--task lm --layers 2 --heads 2 --width 16 --context 32 --global-batch 64 --dropout 0.2";
    for settings in [
        "--model tiny --accumulate 2 --clip-norm 0.5",
        &format!("{small} --recompute blocks"),
    ] {
        let folder = tempdir().expect("a folder");
        let hash = |strategy: &str, run: &str| {
            let line = format!(
                "train {settings} --epochs 1 --shards 4 --run-dir {run} --strategy {strategy}"
            );
            paceline(folder.path(), &line).is_well().hash().to_owned()
        };
        let alone = hash("single", "single");
        assert_eq!(hash("dp --devices 3", "dp"), alone, "{settings}");
        assert_eq!(hash("model --devices 3", "model"), alone, "{settings}");
    }
}

#[test]
fn a_sharded_optimizer_keeps_the_bits() {
    let folder = tempdir().expect("a folder");
    let train = |line: &str| {
        let settings = "--model small --shards 4 --clip-norm 0.5 --evaluate-every 0";
        let line = format!("train {settings} {line}");
        paceline(folder.path(), &line).is_well().hash().to_owned()
    };
    let whole = train("--epochs 2 --run-dir whole --nproc-per-node 1");
    let jobs = [
        (1, "auto", 1),
        (2, "shm", 1),
        (3, "tcp", 1),
        (2, "tcp", 2),
        (4, "shm", 2),
    ];
    for (ranks, transport, stage) in jobs {
        let line = format!(
            "--zero {stage} --epochs 2 --run-dir zero-{stage}-{ranks} --nproc-per-node {ranks} --transport {transport}"
        );
        assert_eq!(
            train(&line),
            whole,
            "stage {stage} on {ranks} ranks over {transport}"
        );
    }
}

#[test]
fn a_batch_that_shards_do_not_divide_keeps_the_bits() {
    check(
        "--shards 8 --epochs 1 --global-batch 60 --accumulate 3",
        &[(3, "tcp"), (4, "shm")],
    );
}

#[test]
fn shards_without_a_sample_in_the_last_batch_keep_the_bits() {
    // 1437 samples in batches of 8: the last batch has 5 for 8 shards, so most of 8 ranks have one and some have none.
    check(
        "--shards 8 --epochs 1 --global-batch 8",
        &[(3, "shm"), (8, "tcp")],
    );
}

#[test]
fn a_table_gives_the_same_bits_too() {
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("table.csv");
    let rows = (0..101).map(|i| format!("{},{},{}\n", i % 7, i * i % 13, i % 3));
    fs::write(&path, format!("a,b,label\n{}", rows.collect::<String>())).expect("a file");
    let settings = format!(
        "--shards 6 --epochs 2 --global-batch 12 --data {}",
        path.display()
    );
    check(&settings, &[(2, "shm"), (3, "tcp"), (6, "shm")]);
}

#[test]
fn other_seeds_and_other_shards_give_other_bits() {
    let base = check("--shards 4 --epochs 1", &[]);
    assert_ne!(check("--shards 4 --epochs 1 --seed 1", &[]), base);
    assert_ne!(check("--shards 3 --epochs 1", &[]), base);
}

#[test]
fn every_precision_keeps_bits_of_its_own() {
    let bits = ["f32", "bf16", "fp16"].map(|precision| {
        check(
            &format!("--shards 4 --epochs 1 --precision {precision}"),
            &[(2, "shm"), (4, "tcp")],
        )
    });
    assert!(bits[0] != bits[1] && bits[1] != bits[2] && bits[0] != bits[2]);
}

/// A GPU must give the same hash: `paceline run --nproc-per-node N probe device vulkan`.
#[test]
fn the_probe_of_devices_has_one_hash_on_any_number_of_ranks() {
    let folder = tempdir().expect("a folder");
    for ranks in 1..=4 {
        let probe = probe("device");
        let line = format!("run --nproc-per-node {ranks} {probe} cpu");
        let ended = paceline(folder.path(), &line);
        ended.is_well();
        assert!(
            ended
                .out
                .contains("9d778440e2650f1976d6318730e887c9e2968db8c1320bdbd50d16a1496d9d2e"),
            "{ranks} ranks: {}",
            ended.out
        );
    }
}
