//! What `/proc` tells about processes: state, parent, children, threads, processor time.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::time::Duration;

/// The part of `/proc/<pid>/stat` that the launcher uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stat {
    /// One letter, see proc(5).
    pub(crate) state: char,
    pub(crate) parent: u32,
    /// Clock ticks since boot; together with the pid it names a process for good.
    pub(crate) started: u64,
    /// Clock ticks in which it ran, and the same of the children that it has waited for.
    ran: [u64; 2],
}

impl Stat {
    /// Reads it; `None` when there is no such process (any more).
    pub(crate) fn read(pid: u32) -> Option<Self> {
        Self::read_from(&format!("/proc/{pid}"))
    }

    /// The same for a process or a thread by its folder.
    pub(crate) fn read_from(folder: &str) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("{folder}/stat")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        // The name stands in parentheses and may contain blanks and parentheses of its own.
        let (_, fields) = text.rsplit_once(')')?;
        let mut fields = fields.split_whitespace();
        let (state, parent) = (fields.next()?.chars().next()?, fields.next()?);
        // The name was field 2 of the line, the parent field 4; the times are fields 14 to 17, the start field 22.
        let mut numbers = fields.map(str::parse::<u64>).skip(9);
        let mut next = || numbers.next()?.ok();
        let ran = [next()? + next()?, next()? + next()?];
        Some(Self {
            state,
            parent: parent.parse().ok()?,
            started: numbers.nth(4)?.ok()?,
            ran,
        })
    }

    /// Processor time of the process, or of the thread.
    pub(crate) fn cpu(self) -> Duration {
        ticks(self.ran[0])
    }

    /// Processor time of the process's children that it has waited for.
    pub(crate) fn reaped_cpu(self) -> Duration {
        ticks(self.ran[1])
    }

    /// Whether a signal or a debugger has stopped it.
    pub(crate) fn is_stopped(self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    /// The state in words.
    pub(crate) fn state_text(self) -> String {
        let words = match self.state {
            'R' => "running",
            'S' => "sleeping",
            'D' => "in an uninterruptible wait, mostly for a disk or a device",
            'T' => "stopped by a signal",
            't' => "stopped by a debugger",
            'Z' | 'X' => "ended",
            other => return format!("in state {other}"),
        };
        format!("{words} ({})", self.state)
    }
}

fn ticks(count: u64) -> Duration {
    Duration::from_millis(
        count.saturating_mul(1000) / rustix::param::clock_ticks_per_second().max(1),
    )
}

/// The threads of a process.
pub(crate) fn threads(pid: u32) -> impl Iterator<Item = u32> {
    let entries = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// A process and all that it has started, as far as their parents live; at most `most`.
pub(crate) fn tree(root: u32, most: usize) -> Vec<u32> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        let children = children_of(pid).unwrap_or_default();
        found.extend(children.into_iter().take(most - found.len()));
        next += 1;
    }
    found
}

/// The children of this process, orphans that it has inherited included.
pub(crate) fn children() -> io::Result<BTreeSet<u32>> {
    children_of(std::process::id())
}

fn children_of(pid: u32) -> io::Result<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        match fs::read_to_string(thread?.path().join("children")) {
            Ok(text) => found.extend(
                text.split_whitespace()
                    .filter_map(|pid| pid.parse::<u32>().ok()),
            ),
            // The kernel was built without these files, or the thread is gone: look at every process instead.
            Err(_) => return children_by_scan(pid),
        }
    }
    Ok(found)
}

fn children_by_scan(own: u32) -> io::Result<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        if Stat::read(pid).is_some_and(|stat| stat.parent == own) {
            found.insert(pid);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expect: Option<Stat>) {
        assert_eq!(Stat::parse(text), expect, "{text}");
    }

    #[test]
    fn a_stat_line_is_read_whatever_the_program_is_called() {
        let rest = "T 17 42 42 0 -1 4194560 1 0 0 0 30 4 5 6 20 0 1 0 991 2412544 200";
        let expect = Some(Stat {
            state: 'T',
            parent: 17,
            started: 991,
            ran: [34, 11],
        });
        check(&format!("42 (sh) {rest}"), expect);
        check(&format!("42 (a b) c) {rest}"), expect);
        check(&format!("42 (:-) S 1 2) {rest}"), expect);
        check("42 (sh) T 17", None);
        check("", None);
    }

    #[test]
    fn this_process_is_running_and_started_by_its_parent() {
        let stat = Stat::read(std::process::id()).expect("this process exists");
        assert_eq!(
            Some(stat.parent),
            std::os::unix::process::parent_id().into()
        );
        assert!(!stat.is_stopped());
        assert_eq!(Stat::read(u32::MAX), None);
    }

    #[test]
    fn both_ways_to_find_a_child_find_it() {
        let mut child = std::process::Command::new("sleep")
            .arg("30")
            .spawn()
            .unwrap();
        let (quick, scan) = (
            children().unwrap(),
            children_by_scan(std::process::id()).unwrap(),
        );
        let tree = tree(std::process::id(), 1000);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(quick.contains(&child.id()));
        assert!(scan.contains(&child.id()));
        assert!(tree.contains(&child.id()) && tree[0] == std::process::id());
    }
}
