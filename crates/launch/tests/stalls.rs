//! Ranks that hang, in real processes: what is said of them, and how a job ends because of them.

mod support;

use std::time::Duration;

use support::Watched;
use support::launcher::Launcher;

const LIMIT: Duration = Duration::from_secs(30);

/// Runs `script` on three ranks under these flags; returns the exit code and what the launcher wrote to standard error.
fn run(flags: &[&str], script: &str) -> (Option<i32>, Vec<String>) {
    let flags = [&["--nproc", "3", "--stall-ms", "1000"], flags].concat();
    let (status, _, errors) = Launcher::start(&flags, script).end(LIMIT);
    (status.code(), errors.lines().map(str::to_owned).collect())
}

/// With 1 s in place of the time that ranks have been quiet, which is longer on a busy machine.
fn of_any_time(words: &str) -> String {
    const BEFORE: &str = "no processor time for ";
    let Some((start, rest)) = words.split_once(BEFORE) else {
        return words.to_owned();
    };
    let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit());
    format!("{start}{BEFORE}1{rest}")
}

/// The lines about stalled ranks, without the moment, [of any time](of_any_time).
fn told(lines: &[String]) -> Vec<String> {
    let after_moment = |line: &String| {
        let rest = line.strip_prefix("stalled since ")?;
        let (moment, _) = rest.split_once("Z: ")?;
        assert!(moment.starts_with("20") && moment.contains('T'), "{line}");
        line.split_once("Z: ").map(|(_, words)| words.len())
    };
    let words =
        |line: &String| after_moment(line).map(|length| of_any_time(&line[line.len() - length..]));
    lines.iter().filter_map(words).collect()
}

/// Computes in this shell until the time is over.
const COMPUTE: &str =
    "compute() { end=$(($(date +%s) + $1)); while [ $(date +%s) -lt $end ]; do :; done; }";

#[test]
fn a_rank_that_sleeps_is_named_and_one_that_computes_is_not() {
    let script = format!("{COMPUTE}; case $RANK in 1) exec sleep 60;; *) compute 60;; esac");
    let (code, lines) = run(&["--abort"], &script);
    assert_eq!(code, Some(4), "{lines:?}");
    let told = told(&lines);
    let expect = "rank 1 has printed nothing and used no processor time for 1 s; ranks 0 and 2 work; --stall-after SECONDS \
                  shows where they wait";
    assert_eq!(told, [expect], "{lines:?}");
}

#[test]
fn one_that_spins_is_described_beside_those_that_wait_for_it() {
    let script = "case $RANK in 1) while :; do :; done;; *) exec sleep 60;; esac";
    let (code, lines) = run(&["--abort", "--stacks"], script);
    assert_eq!(code, Some(4), "{lines:?}");
    let [words] = &told(&lines)[..] else {
        panic!("{lines:?}")
    };
    let expect = "rank 1 spins: one thread uses a whole core and reads, writes and prints nothing; ranks 0 and 2 have \
                  printed nothing and used no processor time for 1 s";
    assert_eq!(words, expect);
    assert!(
        lines
            .iter()
            .any(|line| line.starts_with("failure: rank 1 ")),
        "{lines:?}"
    );
    let listed: Vec<_> = lines
        .iter()
        .filter_map(|line| line.strip_prefix("  rank "))
        .collect();
    let ranks: Vec<_> = listed.iter().map(|line| &line[..1]).collect();
    assert_eq!(ranks, ["1", "0", "2"], "{lines:?}");
    assert!(listed[0].ends_with(" running (R)"), "{lines:?}");
}

#[test]
fn slow_ranks_that_print_or_have_deadlines_are_left_alone() {
    let script = "case $RANK in 0) $PROBE worker join sleep=3000;;
        *) i=0; while [ $i -lt 30 ]; do echo $i; sleep 0.1; i=$((i+1)); done;; esac";
    let (code, lines) = run(&[], script);
    assert_eq!(code, Some(0), "{lines:?}");
    assert!(told(&lines).is_empty(), "{lines:?}");
}

#[test]
fn a_console_that_takes_nothing_stalls_nobody() {
    let flags = ["--nproc", "3", "--stall-ms", "300", "--abort"];
    // Nobody reads what the launcher writes to standard output.
    let launcher = Launcher::start(&flags, "exec yes");
    assert!(!Watched::new(launcher.process.id() as i32).ends_within(Duration::from_secs(3)));
}

#[test]
fn a_job_ends_because_of_a_stall_if_it_is_to() {
    let script = format!("{COMPUTE}; case $RANK in 2) exec sleep 60;; *) compute 60;; esac");
    let (code, lines) = run(&["--abort"], &script);
    assert_eq!(code, Some(4), "{lines:?}");
    let report = lines
        .iter()
        .find(|line| line.starts_with("failure: "))
        .expect("a report");
    assert!(
        report.starts_with("failure: rank 2 (pid ") && report.contains(") stalled after "),
        "{report}"
    );
    let why = "its process is sleeping (S); rank 2 has printed nothing and used no processor time for 1 s; ranks 0 and 1 work";
    assert!(of_any_time(report).ends_with(why), "{report}");
    assert!(lines.contains(&"left behind: []".to_owned()), "{lines:?}");
}

#[test]
fn the_threads_of_a_stalled_rank_are_listed_with_where_they_wait() {
    // They hang at the same moment, once all have come. A thread of Python's is in a lock then, and the main one in a read.
    let folder = tempfile::tempdir().expect("a folder");
    let (here, came) = (folder.path().display(), folder.path().join("came"));
    std::fs::create_dir(&came).expect("a folder");
    let came = came.display();
    let python = format!(
        "import os, threading, time\n\
         lock, pipe = threading.Lock(), os.pipe()\n\
         lock.acquire()\n\
         threading.Thread(target=lock.acquire, daemon=True).start()\n\
         open('{came}/' + os.environ['RANK'], 'w')\n\
         while not os.path.exists('{came}/go'): print('waits', flush=True); time.sleep(0.002)\n\
         os.read(pipe[0], 1)\n"
    );
    std::fs::write(folder.path().join("hang.py"), python).expect("a file");
    let shell = format!(
        "while [ $(ls {came} | wc -l) -lt 2 ]; do echo waits; sleep 0.05; done; : > {came}/go; exec sleep 60"
    );
    let script = format!("[ $RANK = 2 ] || exec python3 {here}/hang.py; {shell}");
    let (code, lines) = run(&["--stacks", "--abort"], &script);
    assert_eq!(code, Some(4), "{lines:?}");
    let text = lines.join("\n");
    assert!(
        told(&lines)[0].starts_with("ranks 0 to 2 have printed nothing"),
        "{text}"
    );
    let block = |rank: usize| {
        let head = format!("  rank {rank}, pid ");
        let at = lines
            .iter()
            .position(|line| line.starts_with(&head))
            .expect(&text);
        let body = lines[at + 1..]
            .iter()
            .take_while(|line| line.starts_with("    "));
        (lines[at].clone(), body.cloned().collect::<Vec<_>>())
    };
    let (head, threads) = block(1);
    assert!(
        head.contains(" (python3") && head.ends_with("), sleeping (S)"),
        "{head}"
    );
    let has = |call: &str| {
        let start = format!("sleeping (S) in {call}");
        threads
            .iter()
            .any(|line| line.starts_with("    thread ") && line.contains(&start))
    };
    // What may be read of a thread depends on the machine; its name and state always.
    let is_told = threads.iter().any(|line| line.contains(" in "));
    assert!(!is_told || (has("read") && has("futex")), "{text}");
    assert!(
        threads
            .iter()
            .filter(|line| line.contains("sleeping (S)"))
            .count()
            >= 2,
        "{text}"
    );
    let has_stack = threads
        .iter()
        .any(|line| line.contains("py-spy") || line.contains("Thread "));
    // Two ranks run Python, and the advice is for both.
    assert!(
        has_stack || text.matches("pip install py-spy").count() == 1,
        "{text}"
    );
    let (head, threads) = block(2);
    assert!(
        head.contains(" (sleep)") && threads[0].starts_with("    thread sleep: sleeping (S)"),
        "{text}"
    );
}
