//! Command lines and their parsed form.

use paceline_cli::exit::Exit;
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
    for row in OPTIONS {
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

fn rows(line: &str) -> Vec<(String, usize, String)> {
    let Command::Around(Around::Compare(args)) = parsed(line) else {
        panic!("{line}");
    };
    assert!(args.is_training);
    let row = |row: &paceline_cli::compare::RowArgs| {
        let args: Vec<_> = row.args.iter().map(|arg| arg.to_string_lossy()).collect();
        (row.name.clone(), row.ranks, args.join(" "))
    };
    args.rows.iter().map(row).collect()
}

#[test]
fn strategies_are_compared_on_as_many_shards_as_the_most_ranks() {
    let row = |name: &str, ranks, args: &str| (name.to_owned(), ranks, format!("train {args}"));
    assert_eq!(
        rows("compare --strategy single,ddp --epochs 3 --lr -1"),
        [
            row(
                "single",
                1,
                "--strategy=single --shards=2 --epochs=3 --lr=-1"
            ),
            row(
                "ddp on 2 ranks",
                2,
                "--strategy=ddp --shards=2 --epochs=3 --lr=-1"
            ),
        ]
    );
    assert_eq!(
        rows("compare --strategy ddp --ranks 1,4 --shards 8 -- --epochs 3"),
        [
            row("ddp on 1 rank", 1, "--strategy=ddp --shards=8 --epochs 3"),
            row("ddp on 4 ranks", 4, "--strategy=ddp --shards=8 --epochs 3"),
        ]
    );
    assert_eq!(
        rows("compare --strategy dp,model --ranks 3"),
        [
            row("dp on 3 devices", 1, "--strategy=dp --devices=3 --shards=3"),
            row(
                "model on 3 devices",
                1,
                "--strategy=model --devices=3 --shards=3"
            ),
        ]
    );
    let names: Vec<String> = rows("compare --strategy single --strategy ddp 1 2")
        .into_iter()
        .map(|row| row.0)
        .collect();
    assert_eq!(names, ["ddp on 1 rank", "ddp on 2 ranks"]);
}

#[test]
fn a_strategy_that_is_not_there_and_options_without_one_are_refused() {
    let check = |line: &str, part: &str| {
        let text = stopped(line).0.to_string();
        assert!(text.contains(part), "{line}: {part} in\n{text}");
    };
    check(
        "compare --strategy single,fsdp",
        "[possible values: ddp, dp, model, single]",
    );
    check(
        "compare --strategy ,",
        "possible values: ddp, dp, model, single",
    );
    check("compare --epochs 3 -- prog", "--strategy <NAME,...>");
    check(
        "compare --strategy ddp prog",
        "takes no PROGRAM, but there is prog",
    );
    check(
        "compare --strategy ddp --run-dir x",
        "--run-dir cannot be used here",
    );
    check("compare --strategy ddp --use-gpus 1", "'--use-gpus'");
    check("compare --strategy dp --devices 2", "'--devices'");
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
}

#[test]
fn a_plan_takes_machines_and_the_settings_of_a_training() {
    let Command::Plan(args) = parsed("plan") else {
        panic!("another command");
    };
    assert_eq!(
        (args.nodes, args.memory_gb, args.between),
        (1, None, [1.25, 50.0])
    );
    let line = "plan --task lm --nproc-per-node 8 --nodes 1250 --memory-gb 16 --latency-us 2 --check 1,2 --json";
    let Command::Plan(args) = parsed(line) else {
        panic!("another command");
    };
    assert_eq!((args.nodes, args.memory_gb), (1250, Some(16.0)));
    assert_eq!(args.within, [None, Some(2.0)]);
    assert_eq!((args.check, args.json), (vec![1, 2], true));
    let settings = [pair("task", "lm"), pair("nproc_per_node", "8")];
    assert_eq!(args.train.settings, settings);
    for line in ["plan --memory-gb 0", "plan --nodes 0", "plan --strategy dp"] {
        assert!(stopped(line).0.use_stderr(), "{line}");
    }
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
        global_batch: None,
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
        global_batch: Some(8),
        json: true,
        ..asked
    };
    let line = "indices --len 11 --world 4 --rank 3 --seed 18446744073709551615 --epoch 2 --no-shuffle --drop-last --global-batch 8 --json";
    assert_eq!(parsed(line), Command::Indices(other));
}

#[test]
fn a_worker_is_told_its_file() {
    let expect = WorkerArgs {
        config: PathBuf::from("runs/x/config.toml"),
        json: false,
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
    check("", &["Usage: paceline [OPTIONS] <COMMAND>"]);
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
    ] {
        assert_eq!(stopped(line).exit(), Exit::Done, "{line}");
    }
    let version = stopped("--version").0.to_string();
    assert_eq!(version, format!("paceline {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn the_help_of_train_names_every_setting_with_its_default() {
    let help = stopped("train --help").0.to_string();
    for row in OPTIONS {
        assert!(help.contains(&row.flag()), "{}", row.key);
    }
    assert!(
        help.contains("Passes over the training data [default: 15]"),
        "{help}"
    );
}
