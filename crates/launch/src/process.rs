//! What `/proc` tells about processes: state, parent, children.

use std::collections::BTreeSet;
use std::fs;
use std::io;

/// The part of `/proc/<pid>/stat` that the launcher uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stat {
    /// One letter, see proc(5).
    pub(crate) state: char,
    pub(crate) parent: u32,
    /// Clock ticks since boot; together with the pid it names a process for good.
    pub(crate) started: u64,
}

impl Stat {
    /// Reads it; `None` when there is no such process (any more).
    pub(crate) fn read(pid: u32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        // The name stands in parentheses and may contain blanks and parentheses of its own.
        let (_, fields) = text.rsplit_once(')')?;
        let mut fields = fields.split_whitespace();
        Some(Self {
            state: fields.next()?.chars().next()?,
            parent: fields.next()?.parse().ok()?,
            // Field 22 of the line; the name was field 2, the parent field 4.
            started: fields.nth(17)?.parse().ok()?,
        })
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

/// The children of this process, orphans that it has inherited included.
pub(crate) fn children() -> io::Result<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    for thread in fs::read_dir("/proc/self/task")? {
        match fs::read_to_string(thread?.path().join("children")) {
            Ok(text) => found.extend(
                text.split_whitespace()
                    .filter_map(|pid| pid.parse::<u32>().ok()),
            ),
            // The kernel was built without these files, or the thread is gone: look at every process instead.
            Err(_) => return children_by_scan(),
        }
    }
    Ok(found)
}

fn children_by_scan() -> io::Result<BTreeSet<u32>> {
    let own = std::process::id();
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
        let rest = "T 17 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 991 2412544 200";
        let expect = Some(Stat {
            state: 'T',
            parent: 17,
            started: 991,
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
        let (quick, scan) = (children().unwrap(), children_by_scan().unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(quick.contains(&child.id()));
        assert!(scan.contains(&child.id()));
    }
}
