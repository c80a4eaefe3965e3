//! What `/proc` says about a process or a thread: its state, its parent and its processor time.

use std::fs;
use std::path::Path;
use std::time::Duration;

/// The fields of `/proc/<pid>/stat` that are used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// One letter, see proc(5).
    pub state: char,
    /// The parent's pid.
    pub parent: u32,
    /// Clock ticks since boot. Together with the pid it identifies a process for good.
    pub started: u64,
    /// Clock ticks in which it ran, and those of the children that it has waited for.
    ran: [u64; 2],
}

impl Stat {
    /// Reads it; `None` if there is no such process.
    pub fn read(pid: u32) -> Option<Self> {
        Self::read_from(Path::new(&format!("/proc/{pid}")))
    }

    /// The same for a process or a thread by its folder.
    pub fn read_from(folder: &Path) -> Option<Self> {
        // A program's name need not be text.
        Self::parse(&String::from_utf8_lossy(
            &fs::read(folder.join("stat")).ok()?,
        ))
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
    pub fn cpu(self) -> Duration {
        ticks(self.ran[0])
    }

    /// Processor time of the process's children that it has waited for.
    pub fn reaped_cpu(self) -> Duration {
        ticks(self.ran[1])
    }

    /// Whether it has ended, waited for or not.
    pub fn has_ended(self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// Whether a signal or a debugger has stopped it.
    pub fn is_stopped(self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    /// The state in words.
    pub fn state_text(self) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_is_read_whatever_the_program_is_called() {
        let check = |text: &str, expect: Option<Stat>| {
            assert_eq!(Stat::parse(text), expect, "{text}");
        };
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
        check("42 sh T 17", None);
        check("", None);
    }

    #[test]
    fn this_process_is_running_and_started_by_its_parent() {
        let stat = Stat::read(std::process::id()).expect("this process exists");
        let parent = std::os::unix::process::parent_id();
        assert_eq!(stat.parent, parent);
        assert!(!stat.is_stopped() && !stat.has_ended());
        assert_eq!(Stat::read(u32::MAX), None);
    }
}
