//! `compare` with real programs: what it prints and writes, how it ends early, and that nothing is left.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::tempdir;

#[path = "support/mod.rs"]
mod support;

use support::{End, LAUNCHER, PATIENCE, Run};

/// Counts to a number that the ranks share, and says so.
const SPIN: &str =
    "i=0; while [ $i -lt $((60000 / WORLD_SIZE)) ]; do i=$((i + 1)); done; echo counted";

/// `paceline-launcher compare` in this folder.
fn command(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new("env");
    // A test runner in the background may ignore signals, and children inherit that.
    command.arg("--default-signal=INT,TERM").arg(LAUNCHER);
    command.arg("compare").args(words);
    paceline_testing::outside_of_jobs(&mut command)
        .current_dir(folder)
        .env("XDG_STATE_HOME", folder.join("state"));
    command
}

fn compare(folder: &Path, words: &[&str]) -> End {
    Run::start(&mut command(folder, words)).end(PATIENCE)
}

/// Every file of this name below a folder, as text.
fn files(folder: &Path, name: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path, name));
        } else if path.ends_with(name) {
            found.push(fs::read_to_string(path).expect("text"));
        }
    }
    found
}

#[test]
fn a_program_is_timed_in_rounds_and_told_as_json_csv_and_a_picture() {
    let folder = tempdir().expect("a folder");
    let options = "--rounds 2 --samples 60000 --json --csv c.csv --svg c.svg --log-dir logs 1 2 --";
    let words: Vec<&str> = options.split(' ').chain(["sh", "-c", SPIN]).collect();
    let ended = compare(folder.path(), &words);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let told: Value = serde_json::from_str(&ended.out).expect("JSON");
    assert_eq!(told["rows"].as_array().map(Vec::len), Some(2), "{told}");
    for (row, ranks) in [(0, 1), (1, 2)] {
        let row = &told["rows"][row];
        assert_eq!(
            (&row["ranks"], &row["rounds"]),
            (&ranks.into(), &2.into()),
            "{row}"
        );
        for (place, run) in row["runs"].as_array().expect("runs").iter().enumerate() {
            assert_eq!(run["round"], place + 1, "{row}");
            let bytes = run["peak_bytes"].as_array().map(Vec::len);
            assert_eq!(bytes, Some(ranks), "{row}");
            assert!(run["seconds"].as_f64() > Some(0.0), "{row}");
        }
        assert!(row["samples_per_second"].as_f64() > Some(0.0), "{row}");
    }
    assert_eq!(told["rows"][0]["speed_up"], 1.0);
    assert_eq!(told["verdict"].as_array().map(Vec::len), Some(1), "{told}");
    let rounds: Vec<&str> = ended
        .err
        .lines()
        .filter(|line| line.starts_with("note: round "))
        .collect();
    let order = [
        "1 of 2: 1 rank",
        "1 of 2: 2 ranks",
        "2 of 2: 1 rank",
        "2 of 2: 2 ranks",
    ];
    assert_eq!(rounds.len(), order.len(), "{}", ended.err);
    for (round, start) in rounds.iter().zip(order) {
        assert!(
            round.starts_with(&format!("note: round {start} took ")),
            "{round}"
        );
    }
    let csv = fs::read_to_string(folder.path().join("c.csv")).expect("a table");
    let starts: Vec<&str> = csv
        .lines()
        .map(|line| line.split(',').next().unwrap())
        .collect();
    assert_eq!(starts, ["row", "1 rank", "2 ranks"]);
    let svg = fs::read_to_string(folder.path().join("c.svg")).expect("a picture");
    assert!(svg.starts_with("<svg ") && svg.contains("2 ranks"), "{svg}");
    // The programs' output is in files, one for each rank of each run.
    assert!(!ended.err.contains("counted"), "{}", ended.err);
    let outputs = files(&folder.path().join("logs"), "stdout.log");
    assert_eq!(outputs, ["counted\n"; 6]);
}

#[test]
fn programs_that_sleep_get_a_table_a_verdict_and_the_folder() {
    let folder = tempdir().expect("a folder");
    let ended = compare(folder.path(), &["--ranks", "1,2", "--", "sleep", "0.2"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let lines: Vec<&str> = ended.out.lines().collect();
    assert_eq!(lines[0], "sleep 0.2");
    // Too short to say how busy they were.
    let heads = "time fastest to slowest speed-up efficiency memory of a rank";
    let found: Vec<&str> = lines[2].split_whitespace().collect();
    assert_eq!(found.join(" "), heads);
    assert!(
        lines[3].starts_with("1 rank ") && lines[4].starts_with("2 ranks "),
        "{lines:?}"
    );
    assert!(
        lines[6].contains("1 rank") && lines[6].contains("2 ranks"),
        "{lines:?}"
    );
    let (_, kept) = lines[7]
        .split_once("Output and records of every run: ")
        .expect("a folder");
    assert_eq!(files(Path::new(kept), "stdout.log").len(), 9, "{kept}");
}

#[test]
fn a_run_that_fails_ends_the_comparison_with_its_code_and_the_rows_so_far() {
    let folder = tempdir().expect("a folder");
    let script = "[ $WORLD_SIZE = 1 ] || exit 7";
    let ended = compare(folder.path(), &["--svg", "c.svg", "--", "sh", "-c", script]);
    assert_eq!(ended.code, Some(7), "{ended:?}");
    assert!(
        ended.out.contains("\n1 rank ") && !ended.out.contains("2 ranks"),
        "{}",
        ended.out
    );
    assert!(ended.err.contains("exited with code 7"), "{}", ended.err);
    assert!(folder.path().join("c.svg").exists());
    let ended = compare(folder.path(), &["--", "sh", "-c", "exit 7"]);
    assert_eq!(
        (ended.code, ended.out.as_str()),
        (Some(7), ""),
        "{}",
        ended.err
    );
}

#[test]
fn bad_input_starts_nothing() {
    let folder = tempdir().expect("a folder");
    let check = |words: &[&str], code, part: &str| {
        let ended = compare(folder.path(), words);
        assert_eq!(
            (ended.code, ended.out.as_str()),
            (Some(code), ""),
            "{}",
            ended.err
        );
        assert!(ended.err.contains(part), "{part:?} is not in {}", ended.err);
    };
    check(&["--", "./none"], 2, "program `./none` not found");
    check(
        &["--ranks", "0", "--", "true"],
        2,
        "expected a whole number from 1 to 1024",
    );
    let missing = "none/c.svg cannot be written: its folder is not there";
    check(&["--svg", "none/c.svg", "--", "true"], 2, missing);
    fs::write(folder.path().join("file"), "").expect("a file");
    check(&["--log-dir", "file", "--", "true"], 3, "file");
}

#[test]
fn more_ranks_than_cores_are_warned_of_once() {
    let folder = tempdir().expect("a folder");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let ranks = format!("1,{}", cores + 1);
    let ended = compare(
        folder.path(),
        &["--ranks", &ranks, "--rounds", "2", "--", "true"],
    );
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(
        ended.err.matches("they take turns").count(),
        1,
        "{}",
        ended.err
    );
}

#[test]
fn a_signal_ends_the_run_and_the_comparison_and_leaves_nothing() {
    let folder = tempdir().expect("a folder");
    let script = "[ $WORLD_SIZE = 1 ] || { echo $$ > pid$RANK.new; mv pid$RANK.new pid$RANK; exec sleep 600; }";
    let mut command = command(folder.path(), &["--", "sh", "-c", script]);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = command.spawn().expect("it starts");
    let pids = [0, 1].map(|rank| pid_in(&folder.path().join(format!("pid{rank}"))));
    let launcher = Pid::from_raw(child.id().cast_signed()).expect("a process");
    kill_process(launcher, Signal::INT).expect("it lives");
    let ended = child.wait_with_output().expect("it ends");
    let (out, err) = (
        String::from_utf8_lossy(&ended.stdout),
        String::from_utf8_lossy(&ended.stderr),
    );
    assert_eq!(ended.status.code(), Some(130), "{err}");
    assert!(
        out.contains("\n1 rank ") && !out.contains("2 ranks"),
        "{out}"
    );
    for pid in pids {
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "{pid} lives");
    }
}

/// The number in a file, once it is there.
fn pid_in(file: &Path) -> u32 {
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        if let Ok(text) = fs::read_to_string(file) {
            return text.trim().parse().expect("a number");
        }
        assert!(
            std::time::Instant::now() < deadline,
            "{} never came",
            file.display()
        );
        std::thread::park_timeout(Duration::from_millis(10));
    }
}
