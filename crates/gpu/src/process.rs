//! What the kernel tells about a process: the fields of `/proc/PID/stat`, and its environment.

use std::fmt::Display;

use crate::host::Host;

/// The variable by which a launcher marks its job's processes: pid and start time, of launchers around it first. It is
/// `paceline_launch::MARK_VARIABLE`.
pub const LAUNCHER_VARIABLE: &str = "PACELINE_LAUNCHER";

/// The longest line is about 400 bytes: 52 numbers and a name.
const STAT_BYTES_MAX: u64 = 4096;
/// Beyond this an environment is not looked through.
const ENVIRON_BYTES_MAX: u64 = 2 << 20;

/// One process at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stat {
    /// Name of its program, at most 15 bytes of it.
    pub name: String,
    /// Its parent; 0 where that cannot be seen from here.
    pub parent: u32,
    /// Its process group.
    pub group: u32,
    /// Its session.
    pub session: u32,
    /// Its terminal; 0 without one.
    pub terminal: i64,
    /// The process group that its terminal listens to; -1 without a terminal.
    pub foreground: i64,
    /// Processor time of its threads, in ticks.
    pub own_ticks: u64,
    /// Processor time of its children that have ended and that it waited for, and theirs, in ticks.
    pub children_ticks: u64,
    /// When it was started, in ticks since boot; with its number it names a process for good.
    pub started_ticks: u64,
    /// Resident memory, in pages.
    pub resident_pages: u64,
}

impl Stat {
    /// Reads the process with this number, where there is one and it may be seen.
    pub fn read(host: &Host<'_>, pid: u32) -> Option<Self> {
        let line = host
            .read(&format!("/proc/{pid}/stat"), STAT_BYTES_MAX)
            .ok()?;
        Self::parse(&String::from_utf8_lossy(&line))
    }

    /// *Source*: proc_pid_stat(5); the numbers below are that page's, less the three fields before them.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        // The name stands in parentheses and may contain blanks and parentheses of its own.
        let (start, rest) = line.rsplit_once(')')?;
        let (_, name) = start.split_once('(')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        let signed = |index: usize| fields.get(index)?.parse::<i64>().ok();
        // Children's times are signed in the kernel; they have never been seen below 0.
        let ticks = |index: usize| signed(index).map(|ticks| ticks.max(0) as u64);
        Some(Self {
            name: name.to_owned(),
            parent: number(1)?.try_into().ok()?,
            group: signed(2)?.try_into().unwrap_or(0),
            session: signed(3)?.try_into().unwrap_or(0),
            terminal: signed(4)?,
            foreground: signed(5)?,
            own_ticks: number(11)?.saturating_add(number(12)?),
            children_ticks: ticks(13)?.saturating_add(ticks(14)?),
            started_ticks: number(19)?,
            resident_pages: signed(21)?.max(0) as u64,
        })
    }
}

/// The environment that a process was started with.
pub struct Environ(Vec<u8>);

impl Environ {
    /// Reads that of the process with this number, or of `self`, where it may be read.
    ///
    /// *Cost*: 2 MiB at most.
    pub fn read(host: &Host<'_>, pid: impl Display) -> Option<Self> {
        let path = format!("/proc/{pid}/environ");
        host.read(&path, ENVIRON_BYTES_MAX).ok().map(Self)
    }

    /// Variables that are text.
    pub(crate) fn variables(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .split(|byte| *byte == 0)
            .filter_map(|entry| std::str::from_utf8(entry).ok()?.split_once('='))
    }

    pub(crate) fn variable(&self, name: &str) -> Option<&str> {
        self.variables()
            .find_map(|(own, value)| (own == name).then_some(value))
    }

    /// Pid and start time of the innermost launcher that [`LAUNCHER_VARIABLE`] names.
    pub fn launcher(&self) -> Option<(u32, u64)> {
        let launchers = self.variable(LAUNCHER_VARIABLE)?;
        let (pid, started) = launchers.rsplit(',').next()?.split_once(':')?;
        Some((pid.parse().ok()?, started.parse().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "13557 (a (b) c) R 13547 13547 24358 34816 13547 4194304 102 0 0 0 7 5 -1 2 20 0 1 0 160299 3133440 \
                        409 18446744073709551615 1 1 0";

    #[test]
    fn a_line_is_read_whatever_the_name() {
        let expect = Stat {
            name: "a (b) c".to_owned(),
            parent: 13547,
            group: 13547,
            session: 24358,
            terminal: 34816,
            foreground: 13547,
            own_ticks: 12,
            children_ticks: 2,
            started_ticks: 160_299,
            resident_pages: 409,
        };
        assert_eq!(Stat::parse(LINE), Some(expect));
    }

    #[test]
    fn a_line_that_ends_early_or_is_none_gives_nothing() {
        for end in (0..LINE.len() - "409 18446744073709551615 1 1 0".len()).step_by(7) {
            assert_eq!(Stat::parse(&LINE[..end]), None, "{end}");
        }
        assert_eq!(Stat::parse("1 x 2"), None);
        assert_eq!(Stat::parse(&LINE.replace('(', "")), None);
    }

    #[test]
    fn this_process_is_its_own() {
        let stat = Stat::read(&Host::new("/", &|_| None), std::process::id());
        assert!(stat.is_none_or(|stat| stat.resident_pages > 0 && !stat.name.is_empty()));
    }
}
