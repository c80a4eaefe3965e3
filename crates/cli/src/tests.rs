//! Command lines and what they come to.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use paceline_launch::{HandledSignals, LogOptions, RunAs, StallOptions};
use paceline_rendezvous::env::Timeout;

use super::*;
use crate::run::{Given, HostsArgs, NodesArgs, Placement, Processes, RdzvBackend};
use crate::usage::{Summary, UsageArgs};

fn words(line: &str) -> Vec<OsString> {
    let words = line.split_whitespace().map(OsString::from);
    std::iter::once("paceline".into()).chain(words).collect()
}

fn parse(words: Vec<OsString>) -> Result<Command, Stop> {
    let stop = |error| Stop::new(error, None);
    let matches = launcher().try_get_matches_from(words).map_err(stop)?;
    let (name, matches) = matches.subcommand().expect("required");
    Command::read(&launcher(), name, matches)
        .expect("known")
        .map_err(stop)
}

pub(crate) fn parsed(line: &str) -> Command {
    parse(words(line)).unwrap_or_else(|stop| panic!("{line}: {}", stop.0))
}

pub(crate) fn stopped(line: &str) -> Stop {
    match parse(words(line)) {
        Ok(command) => panic!("{line}: {command:?}"),
        Err(stop) => stop,
    }
}

#[test]
fn the_definition_is_sound() {
    launcher().debug_assert();
}

fn run(line: &str) -> RunArgs {
    match parsed(line) {
        Command::Run(args) => *args,
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn everything_after_the_program_is_the_programs() {
    let args = run("run --nproc-per-node 2 prog --nproc-per-node 9 --bogus -h -- --version x");
    assert_eq!(args.processes, Processes::Count(2));
    assert_eq!(args.program, "prog");
    assert_eq!(
        args.args,
        [
            "--nproc-per-node",
            "9",
            "--bogus",
            "-h",
            "--",
            "--version",
            "x"
        ]
    );
}

#[test]
fn a_program_may_be_named_like_a_command() {
    for name in ["help", "train", "run"] {
        let args = run(&format!("run {name} --flag"));
        assert_eq!(
            (args.program, args.args),
            (name.into(), vec!["--flag".into()])
        );
    }
}

#[test]
fn two_dashes_may_stand_before_the_program() {
    let args = run("run --nproc-per-node 2 -- prog --flag");
    assert_eq!(
        (args.program, args.args),
        ("prog".into(), vec!["--flag".into()])
    );
}

#[test]
fn run_takes_torchruns_names_with_underscores() {
    let args = run("run --nproc_per_node=3 --log_dir logs --shutdown_timeout 5 prog");
    assert_eq!(args.processes, Processes::Count(3));
    assert_eq!(args.log_dir, Some(PathBuf::from("logs")));
    assert_eq!(args.shutdown_timeout, Duration::from_secs(5));
}

#[test]
fn run_has_defaults() {
    let expect = RunArgs {
        stdin: Some(0),
        processes: Processes::Count(1),
        run_dir: None,
        log_dir: None,
        logs: LogOptions {
            fold: true,
            ..LogOptions::default()
        },
        flight_dir: None,
        timeout: None,
        shutdown_timeout: Duration::from_secs(30),
        signals: HandledSignals::default(),
        stall: StallOptions::default(),
        nodes: NodesArgs::default(),
        given: Given::default(),
        threads_per_rank: None,
        placement: Placement::default(),
        hosts: HostsArgs::default(),
        passed: vec![],
        usage: UsageArgs::default(),
        warnings: vec![],
        run_as: RunAs::ByName,
        program: "prog".into(),
        args: vec![],
    };
    assert_eq!(run("run prog"), expect);
    let args = run("run --timeout-seconds 5 --threads-per-rank 2 prog");
    assert_eq!(
        (args.timeout, args.threads_per_rank),
        (Some(Timeout::After(Duration::from_secs(5))), Some(2))
    );
    let args = run("run --timeout-seconds auto prog");
    assert_eq!(args.timeout, Some(Timeout::Auto));
}

#[test]
fn run_and_what_it_tells_of_usage() {
    let args = run("run --usage off --usage-csv u.csv --lang ko prog --usage on");
    let expect = UsageArgs {
        summary: Summary::Off,
        csv: Some("u.csv".into()),
        lang: Some(paceline_words::Lang::Ko),
        ..UsageArgs::default()
    };
    assert_eq!(args.usage, expect);
    for line in ["run --usage maybe prog", "run --lang xx prog"] {
        assert_eq!(stopped(line).exit(), Exit::Usage);
    }
}

#[test]
fn run_takes_torchruns_options_for_logs() {
    let args = run("run -r 3 -t 0:1 --local-ranks-filter 0 prog -t 7");
    assert_eq!(args.logs.redirects, "3".parse().unwrap());
    assert_eq!(args.logs.tee, "0:1".parse().unwrap());
    assert_eq!(args.args, ["-t", "7"]);
    assert_eq!(stopped("run -t 4 prog").exit(), Exit::Usage);
}

#[test]
fn run_takes_torchruns_options_for_several_nodes() {
    let args = run(
        "run --nnodes=2:4 --rdzv_backend c10d --rdzv-endpoint node1:5000 --rdzv_id job7 --rdzv-conf lease=2 \
         --max_restarts 3 --monitor-interval 0.5 --local_addr 10.0.0.2 --role trainer prog",
    );
    let nodes = args.nodes;
    assert_eq!((nodes.nodes.min, nodes.nodes.max), (2, 4));
    assert_eq!(nodes.backend, RdzvBackend::C10d);
    assert_eq!(nodes.endpoint.as_deref(), Some("node1:5000"));
    assert_eq!(
        (nodes.id.as_str(), nodes.role.as_str()),
        ("job7", "trainer")
    );
    assert_eq!(nodes.conf.lease, Some(Duration::from_secs(2)));
    assert_eq!(nodes.max_restarts, 3);
    assert_eq!(nodes.local_addr.as_deref(), Some("10.0.0.2"));
    let args = run("run --nnodes 2 --node_rank 1 --master-addr node1 --master_port 29501 prog");
    assert_eq!(
        (args.nodes.node_rank, args.nodes.master_port),
        (1, Some(29_501))
    );
    assert_eq!(args.nodes.master_addr.as_deref(), Some("node1"));
}

#[test]
fn run_takes_torchruns_list_of_signals() {
    let args = run("run --signals_to_handle=SIGTERM,SIGUSR2 prog");
    assert_eq!(args.signals.to_string(), "SIGUSR2,SIGTERM");
}

#[test]
fn run_takes_a_run_directory() {
    let dir = run("run --run-dir runs/a prog").run_dir;
    assert_eq!(dir, Some(PathBuf::from("runs/a")));
}

#[test]
fn run_takes_a_folder_for_flight_records() {
    for line in [
        "run --flight-dir flight prog",
        "run --flight_dir=flight prog",
    ] {
        assert_eq!(run(line).flight_dir, Some(PathBuf::from("flight")));
    }
}

#[test]
fn doctor_reads_a_folder_of_flight_records() {
    for (line, json) in [
        ("doctor --flight flight", false),
        ("doctor --json --flight=flight", true),
    ] {
        let Command::Doctor(args) = parsed(line) else {
            panic!("{line}");
        };
        assert_eq!(args.flight, Some(PathBuf::from("flight")));
        assert_eq!(args.json, json);
    }
}

#[test]
fn doctor_without_a_folder_looks_before_a_job() {
    let line = "doctor --nnodes 2 --rdzv-endpoint node1 --nproc_per_node 8 --json";
    let Command::Doctor(args) = parsed(line) else {
        panic!("{line}");
    };
    assert_eq!((args.flight, args.json), (None, true));
    assert_eq!(args.check.processes, Processes::Count(8));
    assert_eq!(args.check.endpoint.as_deref(), Some("node1"));
}

fn compare(line: &str) -> CompareArgs {
    match parsed(line) {
        Command::Compare(args) => *args,
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn the_numbers_of_ranks_to_compare_stand_in_an_option_or_before_the_program() {
    let check = |line: &str, ranks: &[usize], program: &str, args: &[&str]| {
        let found = compare(line);
        let rows: Vec<usize> = found.rows.iter().map(|row| row.ranks).collect();
        assert_eq!(
            (&*rows, found.options.program.to_str()),
            (ranks, Some(program)),
            "{line}"
        );
        assert!(
            found.rows.iter().all(|row| row.args == args),
            "{line}: {:?}",
            found.rows
        );
    };
    check("compare prog", &[1, 2], "prog", &[]);
    check(
        "compare -- prog --ranks 9",
        &[1, 2],
        "prog",
        &["--ranks", "9"],
    );
    check("compare --ranks 1,4 -- prog 5", &[1, 4], "prog", &["5"]);
    check(
        "compare --ranks 1,4 prog -- 5",
        &[1, 4],
        "prog",
        &["--", "5"],
    );
    check("compare -- 1 2 prog --x", &[1, 2], "prog", &["--x"]);
    check("compare 1 2 -- prog --x", &[1, 2], "prog", &["--x"]);
    check("compare 2 2 4 prog", &[2, 2, 4], "prog", &[]);
}

#[test]
fn a_comparison_takes_options_of_run_and_keeps_output_off_the_console() {
    let args =
        compare("compare --rounds 5 --samples 70 --threads-per-rank 1 --log-dir logs -- -m x");
    assert_eq!((args.rounds, args.samples, args.json), (5, Some(70), false));
    assert_eq!(args.options.threads_per_rank, Some(1));
    assert_eq!(args.options.logs.redirects, "3".parse().unwrap());
    let told = compare("compare --tee 0:1 --svg a.svg --csv a.csv --json prog");
    assert_eq!(told.options.logs.redirects, Default::default());
    assert_eq!(
        (told.svg, told.csv),
        (Some("a.svg".into()), Some("a.csv".into()))
    );
}

#[test]
fn what_cannot_be_compared_is_refused_with_the_reason() {
    let check = |line: &str, part: &str| {
        let stop = stopped(line);
        let text = stop.0.to_string();
        assert_eq!(stop.exit(), Exit::Usage, "{line}");
        assert!(text.contains(part), "{line}: {part} in\n{text}");
    };
    let range = "expected a whole number from 1 to 1024";
    check("compare --ranks 0 prog", range);
    check("compare --ranks= prog", range);
    check("compare --ranks 1,,2 prog", range);
    check(
        "compare 1 0 -- prog",
        "invalid number of ranks '0': expected",
    );
    check(
        "compare -- -1 prog",
        "invalid number of ranks '-1': expected",
    );
    check("compare", "no PROGRAM to start");
    check("compare 1 2", "no PROGRAM to start");
    check("compare 1 2 --", "no PROGRAM to start");
    check(
        "compare 1 2 --rounds 5 -- prog",
        "--rounds comes after the numbers of ranks",
    );
    check("compare --rounds 0 prog", "from 1 to 1000");
    check(
        "compare --nproc-per-node 2 prog",
        "--nproc-per-node cannot be used here",
    );
    check("compare --nnodes 2 prog", "--nnodes cannot be used here");
    // The program without training has no strategies.
    check("compare --strategy ddp", "unexpected argument '--strategy'");
}

#[test]
fn names_may_be_shortened_and_the_last_of_several_counts_as_for_torchrun() {
    let args = run("run --nproc 2 --nnode=1 --master_p 1 --nproc_per_node 3 prog");
    assert_eq!(args.processes, Processes::Count(3));
    assert_eq!(args.nodes.master_port, Some(1));
    // Three options begin so.
    assert_eq!(stopped("run --rdzv 2 prog").exit(), Exit::Usage);
}

#[test]
fn a_module_and_a_script_without_a_suffix_are_programs_too() {
    let args = run("run -m package.train --epochs 3");
    assert_eq!(
        (args.run_as, args.program),
        (RunAs::Module, "package.train".into())
    );
    assert_eq!(args.args, ["--epochs", "3"]);
    assert_eq!(run("run --run_path train").run_as, RunAs::Script);
    assert_eq!(run("run --no_python train.py").run_as, RunAs::Program);
}

#[test]
fn what_is_printed_needs_no_program() {
    for line in ["run --print-completion bash", "run --print_completion=zsh"] {
        assert!(matches!(parsed(line), Command::Print(_)), "{line}");
    }
    assert_eq!(stopped("run --print-completion tcsh").exit(), Exit::Usage);
}

/// What `torchrun --help` of torch 2.15 lists.
const TORCHRUN: [&str; 30] = [
    "duplicate-stderr-filters",
    "duplicate-stdout-filters",
    "event-log-handler",
    "local-addr",
    "local-ranks-filter",
    "log-dir",
    "log-line-prefix-template",
    "logs-specs",
    "master-addr",
    "master-port",
    "max-restarts",
    "module",
    "monitor-interval",
    "nnodes",
    "no-python",
    "node-rank",
    "nproc-per-node",
    "numa-binding",
    "print-completion",
    "rdzv-backend",
    "rdzv-conf",
    "rdzv-endpoint",
    "rdzv-id",
    "role",
    "run-path",
    "shutdown-timeout",
    "signals-to-handle",
    "standalone",
    "start-method",
    "virtual-local-rank",
];

#[test]
fn every_option_of_torchruns_is_understood_in_both_spellings() {
    let command = crate::run::command();
    for name in TORCHRUN {
        let mut options = command.get_arguments();
        let option = options.find(|arg| arg.get_long() == Some(name));
        let option = option.unwrap_or_else(|| panic!("--{name}"));
        let other = name.replace('-', "_");
        let aliases = option.get_all_aliases().unwrap_or_default();
        assert!(name == other || aliases.contains(&&*other), "--{other}");
    }
}

#[test]
fn every_option_stands_under_a_heading() {
    for arg in crate::run::command().get_arguments() {
        assert!(arg.get_help_heading().is_some(), "{}", arg.get_id());
    }
}

#[test]
fn arguments_of_a_program_need_not_be_text() {
    use std::os::unix::ffi::OsStringExt;
    let odd = OsString::from_vec(vec![0xff, b'x']);
    let line = [words("run prog"), vec![odd.clone()]].concat();
    match parse(line) {
        Ok(Command::Run(args)) => assert_eq!(args.args, [odd]),
        other => panic!("{other:?}"),
    }
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
        "run",
        &[
            "no PROGRAM to start",
            "Usage: paceline run [OPTIONS] PROGRAM [ARGS]...",
        ],
    );
    check(
        "run --nproc-per-nodes 2 prog",
        &["'--nproc-per-nodes'", "'--nproc-per-node'"],
    );
    check(
        "run --nproc-per-node 0 prog",
        &[
            "'0'",
            "expected auto, gpu, cpu, or a whole number from 1 to 1024",
        ],
    );
    check("run --", &["no PROGRAM to start"]);
    check(
        "doctor --flight f --nnodes 2",
        &["'--flight <DIR>' cannot be used with", "--nnodes"],
    );
    check("run --nproc-per-node xpu prog", &["'xpu'"]);
    check(
        "run --shutdown-timeout -1 prog",
        &["expected a whole number from 0 to 86400"],
    );
    check(
        "run --signals-to-handle SIGKILL prog",
        &["`SIGKILL` is no signal that the launcher can handle: give a list such as"],
    );
    check("run --master-port 99999 prog", &["from 1 to 65534"]);
    check("run --max-restarts -1 prog", &["'-1'", "from 0 to"]);
    check(
        "run -m --no-python prog",
        &["'--module' cannot be used with '--no-python'"],
    );
    check(
        "doctor flight --nnodes 2",
        &["'[RUN]' cannot be used with '--nnodes"],
    );
    check("", &["Usage: paceline [OPTIONS] <COMMAND>"]);
}

#[test]
fn help_and_version_are_no_mistakes() {
    for line in [
        "--help",
        "-V",
        "run --help",
        "doctor --help",
        "bench --help",
    ] {
        assert_eq!(stopped(line).exit(), Exit::Done, "{line}");
    }
}
