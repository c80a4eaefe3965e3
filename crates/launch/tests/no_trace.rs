//! A job leaves the process that ran it as it was. The only test of its file, because it looks at the whole process.

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use support::{job, run};

/// Caught, ignored and blocked signals, threads, open files, children, and whether orphans come here.
fn state() -> (Vec<String>, usize, BTreeSet<String>, bool) {
    // This thread's own: the test harness's main thread blocks signals for a moment while it starts this one.
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    let wanted = ["SigCgt:", "SigIgn:", "SigBlk:", "Threads:"];
    let is_wanted = |line: &&str| wanted.iter().any(|name| line.starts_with(name));
    let status = status
        .lines()
        .filter(is_wanted)
        .map(str::to_owned)
        .collect();
    let files = fs::read_dir("/proc/self/fd").unwrap().count();
    let threads = fs::read_dir("/proc/self/task").unwrap().flatten();
    // A thread may end meanwhile.
    let children = threads.flat_map(|thread| fs::read_to_string(thread.path().join("children")));
    let is_subreaper = rustix::process::child_subreaper().unwrap().is_some();
    (
        status,
        files,
        children.filter(|text| !text.is_empty()).collect(),
        is_subreaper,
    )
}

#[test]
fn a_job_leaves_the_process_as_it_was() {
    let logs = tempfile::tempdir().unwrap();
    let before = state();
    for script in ["true", "exit $RANK", "sleep 60 & kill -9 $$"] {
        let mut job = job(script, 3);
        job.log_dir = Some(logs.path().into());
        run(job);
        // The kernel may count a thread for a moment that was joined.
        let deadline = Instant::now() + Duration::from_secs(15);
        let mut after = state();
        while after != before && Instant::now() < deadline {
            std::thread::yield_now();
            after = state();
        }
        assert_eq!(after, before, "after `{script}`");
    }
}
