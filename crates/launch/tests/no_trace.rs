//! A job leaves the process that ran it as it was. The only test of its file, because it looks at the whole process.

mod support;

use std::collections::BTreeSet;
use std::fs;

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
    let children =
        threads.map(|thread| fs::read_to_string(thread.path().join("children")).unwrap());
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
        assert_eq!(state(), before, "after `{script}`");
    }
}
