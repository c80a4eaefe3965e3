//! One process as `/proc` shows it: its parent, its rank, its command.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use paceline_words::plain;

use crate::env::{WORLD_MAX, names};
use crate::process::Stat;

/// Largest file that is read: the kernel's bound on command line and environment together is 2 MiB by default.
const BYTES_MAX: u64 = 2 << 20;
/// Longest command, in characters, and longest name of a job.
const CHARS_MAX: usize = 200;

/// A process that holds a page.
#[derive(Debug, Clone)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) parent: u32,
    /// Clock ticks since boot; together with the pid it names a process for good.
    pub(super) started: u64,
    /// Its pids in the namespaces below the one that `/proc` shows.
    inner: Vec<u32>,
    /// Set if it was started as this rank of the very page.
    pub(super) local_rank: Option<usize>,
    /// Its number in the job, if it was told.
    pub(super) rank: Option<usize>,
    /// Ranks of the job, if it was told.
    pub(super) world: Option<usize>,
    /// How often the job was started again.
    pub(super) restarts: u32,
    /// Name of the job, if it has one.
    pub(super) job: Option<String>,
    /// Its command line.
    pub(super) command: String,
}

impl Process {
    /// Reads it; `None` if the process has gone or may not be looked at. `fd` is its descriptor of the page.
    pub(super) fn read(proc: &Path, pid: u32, fd: i32) -> Option<Self> {
        let folder = proc.join(pid.to_string());
        let stat = Stat::read_from(&folder)?;
        let status = bounded(&folder.join("status")).unwrap_or_default();
        let environ = bounded(&folder.join("environ")).unwrap_or_default();
        let environ = Environ(&environ);
        // A process that was started as a rank was told where the page is. A launcher within a rank of another job has that
        // job's variables, and its own page elsewhere.
        let is_rank = environ.number(names::PACELINE_PAGE_FD) == usize::try_from(fd).ok();
        let told = |name| environ.number(name).filter(|_| is_rank);
        let local_rank = told(names::PACELINE_LOCAL_RANK).or_else(|| told(names::LOCAL_RANK));
        let job = environ.text(names::TORCHELASTIC_RUN_ID);
        Some(Self {
            pid,
            parent: stat.parent,
            started: stat.started,
            inner: inner_pids(&String::from_utf8_lossy(&status)),
            local_rank,
            rank: environ.number(names::RANK),
            world: environ.number(names::WORLD_SIZE),
            restarts: environ
                .number(names::TORCHELASTIC_RESTART_COUNT)
                .and_then(|count| u32::try_from(count).ok())
                .unwrap_or(0),
            job: job.filter(|job| job != "none"),
            command: command(&bounded(&folder.join("cmdline")).unwrap_or_default()),
        })
    }

    /// Whether it is there still, and no other one with its number.
    pub(super) fn lives(&self, proc: &Path) -> bool {
        let stat = Stat::read_from(&proc.join(self.pid.to_string()));
        stat.is_some_and(|stat| stat.started == self.started && !stat.has_ended())
    }

    /// Whether it may call itself so: in a container its number is another one than from outside.
    pub(super) fn is_called(&self, pid: u32) -> bool {
        self.inner.last().map_or(self.pid, |inner| *inner) == pid
    }
}

/// A process's numbers, from the namespace of `/proc` inwards.
fn inner_pids(status: &str) -> Vec<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let numbers = line.unwrap_or_default().split_whitespace();
    numbers.filter_map(|number| number.parse().ok()).collect()
}

/// The environment that a process was started with.
struct Environ<'a>(&'a [u8]);

impl Environ<'_> {
    fn text(&self, name: &str) -> Option<String> {
        let mut entries = self.0.split(|byte| *byte == 0);
        let value = entries.find_map(|entry| {
            let value = entry.strip_prefix(name.as_bytes())?;
            value.strip_prefix(b"=")
        })?;
        Some(harmless(value)).filter(|value| !value.is_empty())
    }

    fn number(&self, name: &str) -> Option<usize> {
        let number = self.text(name)?.parse().ok()?;
        Some(number).filter(|number| *number <= WORLD_MAX)
    }
}

/// The words of a command line.
fn command(cmdline: &[u8]) -> String {
    let words = cmdline.strip_suffix(&[0]).unwrap_or(cmdline);
    harmless(words)
}

/// Printable text: bounded, one line, no control characters.
fn harmless(bytes: &[u8]) -> String {
    // Four bytes are the longest character.
    let bytes = &bytes[..bytes.len().min(4 * CHARS_MAX)];
    let text = String::from_utf8_lossy(bytes);
    plain(&text, CHARS_MAX).trim().to_owned()
}

fn bounded(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = File::open(path).ok()?;
    file.take(BYTES_MAX).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_whole_names_and_bounded_numbers() {
        let environ =
            Environ(b"XRANK=1\0RANK=3\0RANKS=4\0WORLD_SIZE=99999999\0EMPTY=\0ODD=\x1b[2J\xff\0");
        let check = |name: &str, text: Option<&str>, number| {
            assert_eq!(environ.text(name).as_deref(), text, "{name}");
            assert_eq!(environ.number(name), number, "{name}");
        };
        check("RANK", Some("3"), Some(3));
        check("WORLD_SIZE", Some("99999999"), None);
        check("EMPTY", None, None);
        check("NONE", None, None);
        check("ODD", Some("[2J\u{fffd}"), None);
    }

    #[test]
    fn a_command_is_one_line_of_bounded_length() {
        assert_eq!(
            command(b"python\0train.py\0--lr\0a\nb\0"),
            "python train.py --lr a b"
        );
        assert_eq!(command(b""), "");
        assert_eq!(command("ä".repeat(5000).as_bytes()).chars().count(), 200);
    }

    #[test]
    fn a_process_in_a_container_has_its_own_number_there() {
        let status = "Name:\tx\nNSpid:\t4711\t23\t7\nThreads:\t1\n";
        assert_eq!(inner_pids(status), [4711, 23, 7]);
        assert_eq!(inner_pids("Name:\tx\n"), Vec::<u32>::new());
        assert_eq!(inner_pids("NSpid:\todd\n"), Vec::<u32>::new());
    }

    #[test]
    fn this_process_lives_and_one_that_never_was_does_not() {
        let proc = Path::new("/proc");
        let own = std::process::id();
        let process = Process::read(proc, own, -1).expect("this process");
        assert!(process.lives(proc));
        assert_eq!(process.local_rank, None);
        assert!(!process.command.is_empty());
        let earlier = Process {
            started: process.started + 1,
            ..process
        };
        assert!(!earlier.lives(proc));
        assert!(Process::read(proc, u32::MAX, 0).is_none());
    }
}
