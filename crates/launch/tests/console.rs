//! What the ranks print, as a user and a log reader see it.

mod support;

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::process::Command;
use std::time::{Duration, Instant};

use support::launcher::{Launcher, PROMPTLY};
use support::{PROBE, lines, log, numbers};

#[test]
fn lines_of_different_ranks_are_never_mixed() {
    const LINES: usize = 400;
    let logs = tempfile::tempdir().unwrap();
    let script = "i=0; while [ $i -lt 400 ]; do
        printf '%s %s ' $RANK $i; printf '%0300d\n' $RANK; echo error $RANK $i >&2; i=$((i+1)); done";
    // Both streams into one pipe, as in a terminal.
    let mut command = Command::new("sh");
    command
        .args(["-c", "exec \"$@\" 2>&1", "sh", PROBE, "launch", "--log-dir"])
        .arg(logs.path());
    let mut launcher = Launcher::start_command(command, &["--nproc", "4"], script);
    let mut out = String::new();
    launcher.stdout.read_to_string(&mut out).unwrap();
    for rank in 0..4 {
        let prefix = format!("[rank {rank}] ");
        let seen = out.lines().filter_map(|line| line.strip_prefix(&prefix));
        let (errors, lines): (Vec<_>, Vec<_>) = seen.partition(|line| line.starts_with("error"));
        assert!(
            lines
                .into_iter()
                .eq((0..LINES).map(|i| format!("{rank} {i} {rank:0300}"))),
            "{out}"
        );
        assert!(
            errors
                .into_iter()
                .eq((0..LINES).map(|i| format!("error {rank} {i}"))),
            "{out}"
        );
        let log = log(logs.path(), rank);
        for log in [log.with_file_name("stderr.log"), log] {
            assert_eq!(support::lines(&log).len(), LINES);
        }
    }
    let (_, rest, _) = launcher.end(PROMPTLY);
    assert_eq!(rest, "");
    let others: Vec<_> = out
        .lines()
        .filter(|line| !line.starts_with("[rank "))
        .collect();
    assert_eq!(others, ["left behind: []", "notes: []"]);
}

#[test]
fn a_stranger_that_holds_a_ranks_output_does_not_hold_up_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    let script = format!(
        "echo pid $$; until [ -e {} ]; do sleep 0.02; done; printf bye",
        go.display()
    );
    let mut launcher = Launcher::start(&["--log-dir", folder.path().to_str().unwrap()], &script);
    let pid = numbers(&launcher.line())[0];
    let held = OpenOptions::new()
        .write(true)
        .open(format!("/proc/{pid}/fd/1"))
        .unwrap();
    std::fs::write(&go, "").unwrap();
    let (status, out, err) = launcher.end(PROMPTLY);
    drop(held);
    assert_eq!((status.code(), &*out), (Some(0), "[rank 0] bye\n"), "{err}");
    assert_eq!(
        lines(&log(folder.path(), 0)).last().map(String::as_str),
        Some("bye")
    );
}

#[test]
fn the_raw_console_passes_rank_0_through_byte_by_byte() {
    let logs = tempfile::tempdir().unwrap();
    let script = "[ $RANK = 0 ] && printf '10%%\\r20%%\\r' || echo only in the file; printf end";
    let flags = [
        "--nproc",
        "2",
        "--console",
        "raw",
        "--log-dir",
        logs.path().to_str().unwrap(),
    ];
    let mut launcher = Launcher::start(&flags, script);
    let (_, out, _) = launcher.end(PROMPTLY);
    assert_eq!(out, "10%\r20%\rend");
    assert_eq!(lines(&log(logs.path(), 0)), ["end"]);
    assert_eq!(lines(&log(logs.path(), 1)), ["only in the file", "end"]);
}

#[test]
fn a_console_that_is_gone_does_not_end_the_job() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "echo first; i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done; touch {}/done",
        folder.path().display()
    );
    let mut command = Command::new("sh");
    command
        .args([
            "-c",
            "\"$@\" | head -n 1",
            "sh",
            PROBE,
            "launch",
            "--log-dir",
        ])
        .arg(folder.path());
    let mut launcher = Launcher::start_command(command, &[], &script);
    let (_, out, _) = launcher.end(Duration::from_secs(20));
    assert_eq!(out, "[rank 0] first\n");
    assert!(folder.path().join("done").exists());
    assert_eq!(lines(&log(folder.path(), 0)).len(), 2001);
}

/// What the console shows for a script on one or more ranks: standard output and standard error.
fn shown(flags: &[&str], script: &str) -> (String, String) {
    let mut launcher = Launcher::start(flags, script);
    let (status, out, err) = launcher.end(PROMPTLY);
    assert_eq!(status.code(), Some(0), "{err}");
    let (err, rest) = err.split_once("left behind: ").expect("the outcome");
    assert_eq!(rest, "[]\nnotes: []\n");
    (out, err.to_owned())
}

#[test]
fn equal_lines_of_many_ranks_are_printed_once() {
    const RANKS: usize = 4;
    const LINES: usize = 100;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    // Each waits for its own word, so that they print at about the same time.
    let script = format!(
        "mkfifo {path}/go$RANK; touch {path}/ready$RANK; read word < {path}/go$RANK
         i=0; while [ $i -lt {LINES} ]; do echo same $i; echo warning $i >&2; i=$((i+1)); done; echo own $RANK"
    );
    let mut launcher = Launcher::start(&["--fold", "--nproc", "4"], &script);
    let deadline = Instant::now() + PROMPTLY;
    for rank in 0..RANKS {
        while !folder.path().join(format!("ready{rank}")).exists() {
            assert!(Instant::now() < deadline, "rank {rank} is not ready");
            std::thread::yield_now();
        }
    }
    // Opened to read too, a pipe waits for nobody. It keeps the word until it is closed.
    let mut both = OpenOptions::new();
    both.read(true).write(true);
    let pipes: Vec<_> = (0..RANKS)
        .map(|rank| {
            let path = folder.path().join(format!("go{rank}"));
            let mut pipe = both.open(path).unwrap();
            pipe.write_all(b"go\n").unwrap();
            pipe
        })
        .collect();
    let (_, out, err) = launcher.end(PROMPTLY);
    drop(pipes);
    for (text, word, own) in [(&out, "same", true), (&err, "warning", false)] {
        let mut of_rank = vec![Vec::new(); RANKS];
        let printed: Vec<_> = text
            .lines()
            .filter(|line| line.starts_with("[rank"))
            .collect();
        for line in &printed {
            let (ranks, line) = line.split_once("] ").expect("a prefix");
            let ranks = ranks.trim_start_matches(|c: char| !c.is_ascii_digit());
            for run in ranks.split(',') {
                let (first, last) = run.split_once('-').unwrap_or((run, run));
                let number = |text: &str| text.parse::<usize>().expect("a rank");
                (number(first)..=number(last)).for_each(|rank| of_rank[rank].push(line));
            }
        }
        for (rank, lines) in of_rank.iter().enumerate() {
            let own = own.then(|| format!("own {rank}"));
            let expect = (0..LINES).map(|i| format!("{word} {i}")).chain(own);
            assert!(lines.iter().copied().eq(expect), "rank {rank}: {text}");
        }
        assert!(printed.len() < RANKS * LINES, "nothing was folded:\n{text}");
    }
}

#[test]
fn a_prefix_is_what_the_template_says_and_a_time_may_stand_before_it() {
    let flags = [
        "--timestamps",
        "--prefix",
        "${role_name}/${local_rank}/${hostname}> ",
    ];
    let (out, _) = shown(&flags, "uname -n");
    let (time, line) = out.trim_end().split_once(' ').expect("a time");
    let shape: String = time
        .chars()
        .map(|c| if c.is_ascii_digit() { '0' } else { c })
        .collect();
    assert_eq!(shape, "0000-00-00T00:00:00.000Z");
    let host = line.rsplit(' ').next().expect("a name");
    assert_eq!(line, format!("default/0/{host}> {host}"));
}

#[test]
fn json_lines_are_one_object_each() {
    let script = "printf 'one \"quoted\"\\ntwo \\033[31m\\377\\n'; echo error >&2";
    let (out, err) = shown(&["--json", "--fold", "--restart-count", "2"], script);
    let records: Vec<serde_json::Value> = (out + &err)
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let seen: Vec<_> = records
        .iter()
        .map(|record| {
            (
                record["stream"].as_str().unwrap(),
                record["text"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            ("stdout", "one \"quoted\""),
            ("stdout", "two \u{fffd}"),
            ("stderr", "error")
        ]
    );
    for record in &records {
        assert_eq!(
            (&record["rank"], &record["local_rank"]),
            (&0.into(), &0.into())
        );
        assert_eq!(record["attempt"], 2);
        assert!(
            record["time"]
                .as_str()
                .is_some_and(|time| time.ends_with('Z'))
        );
        assert!(record["host"].as_str().is_some_and(|host| !host.is_empty()));
    }
}

#[test]
fn a_rank_cannot_colour_or_overwrite_the_lines_of_others() {
    let (out, _) = shown(&[], "printf '\\033[31mred\\n\\033[2J\\033[Hhome\\n'");
    assert_eq!(out, "[rank 0] \x1b[31mred\x1b[0m\n[rank 0] home\n");
}

#[test]
fn progress_bars_leave_their_last_state_on_the_console_too() {
    let logs = tempfile::tempdir().unwrap();
    let script = "i=0; while [ $i -le 1000 ]; do printf '\\rstep %s' $i; i=$((i+1)); done; echo; echo done
        printf 'outer 0\\n\\rinner 0\\033[A\\router 1\\n\\rinner 9\\033[A\\router 2\\n\\n' >&2; echo end >&2";
    let (out, err) = shown(&["--log-dir", logs.path().to_str().unwrap()], script);
    assert_eq!(out, "[rank 0] step 1000\n[rank 0] done\n");
    assert_eq!(lines(&log(logs.path(), 0)), ["step 1000", "done"]);
    assert_eq!(
        err,
        "[rank 0] outer 0\n[rank 0] outer 2\n[rank 0] \n[rank 0] end\n"
    );
}

#[test]
fn what_the_console_does_not_show_is_in_the_files() {
    let logs = tempfile::tempdir().unwrap();
    let path = logs.path().to_str().unwrap();
    let script = "echo out $RANK; echo err $RANK >&2";
    let sorted = |text: String| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    let mut begins = 0;
    let mut check = |flags: &[&str], out: &[&str], err: &[&str]| {
        let flags = [&["--nproc", "3", "--log-dir", path], flags].concat();
        let (seen_out, seen_err) = shown(&flags, script);
        assert_eq!(sorted(seen_out), out, "{flags:?}");
        assert_eq!(sorted(seen_err), err, "{flags:?}");
        begins += 1;
        for rank in 0..3 {
            let log = log(logs.path(), rank);
            assert_eq!(lines(&log), vec![format!("out {rank}"); begins]);
            assert_eq!(
                lines(&log.with_file_name("stderr.log")),
                vec![format!("err {rank}"); begins]
            );
        }
    };
    check(&["--redirects", "3"], &[], &[]);
    check(
        &["--redirects", "0:1,1:3", "--tee", "1:2"],
        &["[rank 2] out 2"],
        &["[rank 0] err 0", "[rank 1] err 1", "[rank 2] err 2"],
    );
    check(
        &["--local-ranks", "1"],
        &["[rank 1] out 1"],
        &["[rank 1] err 1"],
    );
}

#[test]
fn lines_with_a_word_are_in_a_file_of_their_own() {
    let logs = tempfile::tempdir().unwrap();
    let path = logs.path().to_str().unwrap();
    let script = "echo loss $RANK; echo other; echo loss: error >&2";
    let flags = [
        "--nproc",
        "2",
        "--log-dir",
        path,
        "--redirects",
        "3",
        "--filter-out",
        "loss,none",
    ];
    shown(&flags, script);
    let mut found = lines(&logs.path().join("attempt_0/filtered_stdout.log"));
    found.sort_unstable();
    assert_eq!(found, ["[rank 0] loss 0", "[rank 1] loss 1"]);
    assert!(!logs.path().join("attempt_0/filtered_stderr.log").exists());
}
