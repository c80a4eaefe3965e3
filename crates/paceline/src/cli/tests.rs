//! Command lines and what they come to.

use std::time::Duration;

use paceline_cli::exit::Exit;
use paceline_cli::run::Processes;
use paceline_collective::bench::{Amount, Memory, Op, Settings};
use paceline_collective::{DType, ReduceOp, Transport};
use paceline_train::config::OPTIONS;

use super::*;

fn parsed(line: &str) -> Command {
    parse(words(line)).unwrap_or_else(|stop| panic!("{line}: {}", stop.0))
}

fn stopped(line: &str) -> Stop {
    match parse(words(line)) {
        Ok(command) => panic!("{line}: {command:?}"),
        Err(stop) => stop,
    }
}

fn words(line: &str) -> Vec<OsString> {
    let words = line.split_whitespace().map(OsString::from);
    std::iter::once("paceline".into()).chain(words).collect()
}

fn settings(line: &str) -> Vec<(String, String)> {
    match parsed(line) {
        Command::Train(args) => args.settings,
        other => panic!("{line}: {other:?}"),
    }
}

fn pair(key: &str, text: &str) -> (String, String) {
    (key.to_owned(), text.to_owned())
}

#[test]
fn the_definition_is_sound() {
    program().debug_assert();
}

#[test]
fn train_needs_nothing() {
    assert_eq!(parsed("train"), Command::Train(TrainArgs::default()));
}

#[test]
fn train_has_a_flag_for_every_setting_with_dashes_or_underscores() {
    for row in &OPTIONS {
        let flag = row.flag();
        assert_eq!(settings(&format!("train {flag} 3")), [pair(row.key, "3")]);
        assert_eq!(settings(&format!("train {flag}=3")), [pair(row.key, "3")]);
        assert_eq!(
            settings(&format!("train --{} 3", row.key)),
            [pair(row.key, "3")]
        );
    }
}

#[test]
fn train_leaves_the_checking_of_values_to_the_table() {
    assert_eq!(
        settings("train --lr -0.1 --seed -1"),
        [pair("lr", "-0.1"), pair("seed", "-1")]
    );
    assert_eq!(settings("train --epochs many"), [pair("epochs", "many")]);
}

#[test]
fn resume_comes_with_or_without_a_folder() {
    assert_eq!(settings("train --resume"), [pair("resume", "true")]);
    assert_eq!(
        settings("train --resume runs/x"),
        [pair("resume", "runs/x")]
    );
    assert_eq!(
        settings("train --resume --lr 1"),
        [pair("lr", "1"), pair("resume", "true")]
    );
}

#[test]
fn train_explains_settings_from_a_file() {
    let Command::Train(args) = parsed("train --config a.toml --explain --json") else {
        panic!("another command");
    };
    assert_eq!(args.config, Some(PathBuf::from("a.toml")));
    assert!(args.explain && args.json);
    assert_eq!(stopped("train --json").exit(), Exit::Usage);
}

#[test]
fn indices_are_asked_for_with_pytorchs_words() {
    let asked = IndicesArgs {
        len: 11,
        world: 4,
        rank: 3,
        seed: 0,
        epoch: 0,
        shuffle: true,
        drop_last: false,
        json: false,
    };
    assert_eq!(
        parsed("indices --len 11 --world 4 --rank 3"),
        Command::Indices(asked)
    );
    let other = IndicesArgs {
        seed: u64::MAX,
        epoch: 2,
        shuffle: false,
        drop_last: true,
        json: true,
        ..asked
    };
    let line = "indices --len 11 --world 4 --rank 3 --seed 18446744073709551615 --epoch 2 --no-shuffle --drop-last --json";
    assert_eq!(parsed(line), Command::Indices(other));
}

fn bench(line: &str) -> BenchArgs {
    match parsed(line) {
        Command::Bench(args) => args,
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn bench_has_defaults() {
    let expect = BenchArgs {
        settings: Settings::default(),
        processes: None,
        transport: None,
        json: false,
        table: None,
    };
    assert_eq!(bench("bench"), expect);
}

#[test]
fn bench_measures_what_it_is_told() {
    let args = bench(
        "bench all-gather barrier --nproc-per-node 4 --transport tcp --min-bytes 1KiB --max-bytes 8K --factor 2 \
         --dtype f64 --reduction max --root 3 --algorithm ring --memory ordinary --iterations 9 --warmup 0 --no-check --json",
    );
    let settings = Settings {
        ops: vec![Op::AllGather, Op::Barrier],
        sizes: vec![1024, 2048, 4096, 8192],
        dtype: DType::F64,
        reduction: ReduceOp::Max,
        root: 3,
        memory: Memory::Ordinary,
        amount: Amount::Iterations(9),
        warmup: 0,
        check: false,
        algorithm: Some("ring".into()),
        ..Settings::default()
    };
    let expect = BenchArgs {
        settings,
        processes: Some(Processes::Count(4)),
        transport: Some(Transport::Tcp),
        json: true,
        table: None,
    };
    assert_eq!(args, expect);
}

#[test]
fn bench_takes_a_list_of_sizes_and_a_time() {
    let settings = bench("bench --sizes 8,1KiB,64MiB --seconds 0.25").settings;
    assert_eq!(settings.sizes, [8, 1 << 10, 64 << 20]);
    assert_eq!(settings.amount, Amount::Time(Duration::from_millis(250)));
    let checks = |line: &str| bench(line).settings.check;
    assert!(checks("bench --no-check --check"));
    assert!(!checks("bench --check --no-check"));
}

#[test]
fn bench_prints_tables_of_a_file() {
    let args = bench("bench --table raw.jsonl");
    assert_eq!(args.table, Some(PathBuf::from("raw.jsonl")));
}

#[test]
fn a_rank_of_a_bench_understands_what_bench_does() {
    let options = "reduce --nproc-per-node 2 --sizes 8,16 --json";
    let Command::BenchRank(rank) = parsed(&format!("bench-rank {options}")) else {
        panic!("another command");
    };
    assert_eq!(rank, bench(&format!("bench {options}")));
    assert!(!stopped("--help").0.to_string().contains("bench-rank"));
}

#[test]
fn a_worker_is_told_its_file() {
    let expect = WorkerArgs {
        config: PathBuf::from("runs/x/config.toml"),
    };
    assert_eq!(
        parsed("worker --config runs/x/config.toml"),
        Command::Worker(expect)
    );
    assert!(!stopped("--help").0.to_string().contains("worker"));
}

#[test]
fn mistakes_end_with_code_2_and_say_what_was_meant() {
    let check = |line: &str, parts: &[&str]| {
        let stop = stopped(line);
        let text = stop.0.to_string();
        assert_eq!(stop.exit(), Exit::Usage, "{line}");
        for part in parts {
            assert!(text.contains(part), "{line}: {part} in\n{text}");
        }
    };
    check(
        "train --epoch 3",
        &["'--epoch'", "'--epochs'", "Usage: paceline train"],
    );
    check(
        "train --globl-batch 3",
        &["'--globl-batch'", "'--global-batch'"],
    );
    check(
        "train --epochs",
        &["a value is required for '--epochs <N>'"],
    );
    check(
        "train --epochs 1 --epochs 2",
        &["cannot be used multiple times"],
    );
    check("train data.csv", &["unexpected argument 'data.csv'"]);
    check("tran", &["'tran'", "'train'"]);
    check("indices --len 4 --world 2", &["--rank <N>"]);
    check(
        "indices --len 4 --world 2 --rank 2",
        &[
            "a world of 2 has the ranks 0 to 1",
            "Usage: paceline indices",
        ],
    );
    check(
        "indices --len 0 --world 2 --rank 0",
        &["0 is not in 1..=4294967296"],
    );
    check(
        "bench all-reduse",
        &["'all-reduse'", "expected one of all-reduce, reduce,"],
    );
    check(
        "bench --transport rdma",
        &["'rdma'", "expected one of auto, shm, tcp"],
    );
    check("bench --min-bytes 8X", &["\"8X\" is not a size"]);
    check(
        "bench --min-bytes 16 --max-bytes 8",
        &[
            "no size is at least 16 and at most 8 bytes",
            "Usage: paceline bench",
        ],
    );
    check(
        "bench --sizes 8 --factor 2",
        &["'--sizes <SIZE,...>'", "'--factor <N>'"],
    );
    check("bench --iterations 3 --seconds 1", &["cannot be used with"]);
    check("bench --algorithm butterfly", &["butterfly"]);
    check(
        "bench --seconds 0",
        &["expected seconds from 0.001 to 3600"],
    );
    check("bench --table a.jsonl --json", &["cannot be used with"]);
    check("", &["Usage: paceline <COMMAND>"]);
}

#[test]
fn help_and_version_are_no_mistakes() {
    for line in [
        "--help",
        "-h",
        "--version",
        "-V",
        "train --help",
        "indices --help",
        "bench --help",
    ] {
        assert_eq!(stopped(line).exit(), Exit::Done, "{line}");
    }
    let version = stopped("--version").0.to_string();
    assert_eq!(version, format!("paceline {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn the_help_of_train_names_every_setting_with_its_default() {
    let help = stopped("train --help").0.to_string();
    for row in &OPTIONS {
        assert!(help.contains(&row.flag()), "{}", row.key);
    }
    assert!(
        help.contains("Passes over the training data [default: 15]"),
        "{help}"
    );
}
