//! What ranks do at one moment, read from `/proc`.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use paceline_rendezvous::page::Slot;
use paceline_rendezvous::process::{self, Stat};

use crate::output::Traffic;

/// Processes of one rank that are looked at.
pub(crate) const PROCESSES_MAX: usize = 256;
/// Threads of one process that are looked at.
pub(crate) const THREADS_MAX: usize = 1024;

/// A rank that is looked at.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) pid: u32,
    /// When it was started: the number may become another process's. `None` if it had ended already.
    pub(crate) started: Option<u64>,
    pub(crate) slot: Slot,
    pub(crate) traffic: Arc<Traffic>,
}

/// How closely a rank is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depth {
    /// At its own process: one file is read.
    Own,
    /// At all processes that it started.
    Processes,
    /// At all their threads.
    Threads,
}

/// All ranks of this node at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Sample {
    /// Time since sampling began.
    pub(crate) at: Duration,
    /// In the order of their local ranks.
    pub(crate) ranks: Vec<RankSample>,
}

/// One rank at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct RankSample {
    pub(crate) is_running: bool,
    /// It has opened its slot of the job page.
    pub(crate) is_paceline: bool,
    /// Its output waits for a console that takes nothing. In the end, so does the rank.
    pub(crate) is_held_up: bool,
    /// Bytes on its two streams so far.
    pub(crate) printed: u64,
    /// Processor time of its own process, and of children that it has waited for.
    pub(crate) own_cpu: Duration,
    /// The same and more of all that it started, if it was looked at so closely.
    pub(crate) tree: Option<Tree>,
}

impl RankSample {
    /// Whether one of its processes waits for somebody to type, as far as they were looked at.
    pub(crate) fn waits_for_input(&self) -> bool {
        self.tree.as_ref().is_some_and(|tree| tree.waits_for_input)
    }
}

/// A rank's processes.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Tree {
    pub(crate) cpu: Duration,
    /// Read and written through system calls, to files, pipes and terminals.
    pub(crate) io_bytes: u64,
    /// Whether the main thread of one of them waits for somebody to type.
    pub(crate) waits_for_input: bool,
    /// By the number that the kernel gives them; empty unless asked for.
    pub(crate) threads: BTreeMap<u32, Thread>,
}

/// One thread.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Thread {
    pub(crate) cpu: Duration,
    /// The same, and the time in which it could have run and others did.
    pub(crate) runnable: Duration,
}

/// Looks at all ranks. What cannot be read counts as nothing.
pub(crate) fn take(ranks: &[Subject], depths: &[Depth], at: Duration) -> Sample {
    let look = |(rank, depth): (&Subject, &Depth)| rank_sample(rank, *depth);
    Sample {
        at,
        ranks: ranks.iter().zip(depths).map(look).collect(),
    }
}

fn rank_sample(rank: &Subject, depth: Depth) -> RankSample {
    let stat =
        Stat::read(rank.pid).filter(|stat| Some(stat.started) == rank.started && !stat.has_ended());
    let Some(stat) = stat else {
        return RankSample::default();
    };
    RankSample {
        is_running: true,
        is_paceline: rank.slot.pid().is_some(),
        is_held_up: rank.traffic.is_held_up.load(Ordering::Relaxed),
        printed: rank.traffic.bytes.load(Ordering::Relaxed),
        own_cpu: stat.cpu() + stat.reaped_cpu(),
        tree: (depth != Depth::Own).then(|| tree(rank.pid, depth)),
    }
}

fn tree(root: u32, depth: Depth) -> Tree {
    let mut tree = Tree::default();
    for pid in process::tree(root, PROCESSES_MAX) {
        let Some(stat) = Stat::read(pid) else {
            continue;
        };
        tree.cpu += stat.cpu() + stat.reaped_cpu();
        tree.io_bytes += fs::read_to_string(format!("/proc/{pid}/io"))
            .map_or(0, |text| numbers(&text, &["rchar:", "wchar:"]));
        tree.waits_for_input |= waits_for_input(pid);
        if depth == Depth::Threads {
            let threads = process::threads(pid, THREADS_MAX).into_iter();
            tree.threads
                .extend(threads.filter_map(|id| Some((id, thread(pid, id)?))));
        }
    }
    tree
}

/// Whether a process's main thread reads the launcher's own standard input, as `input()` and debuggers do.
fn waits_for_input(pid: u32) -> bool {
    let call = fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
    let mut words = call.split_whitespace();
    let number = words.next().and_then(|number| number.parse().ok());
    let stdin = |process: &str| fs::read_link(format!("/proc/{process}/fd/0")).ok();
    number == Some(libc::SYS_read)
        && words.next() == Some("0x0")
        && stdin("self").is_some_and(|own| stdin(&pid.to_string()) == Some(own))
}

/// From `schedstat`: nanoseconds on a processor, nanoseconds of waiting for one.
fn thread(pid: u32, id: u32) -> Option<Thread> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{id}/schedstat")).ok()?;
    let mut numbers = text.split_whitespace().map(|word| word.parse().ok());
    let cpu = Duration::from_nanos(numbers.next()??);
    let runnable = cpu + Duration::from_nanos(numbers.next()??);
    Some(Thread { cpu, runnable })
}

/// The sum of the lines with these names.
fn numbers(text: &str, names: &[&str]) -> u64 {
    let number = |line: &str| {
        let rest = names.iter().find_map(|name| line.strip_prefix(name))?;
        rest.trim().parse::<u64>().ok()
    };
    text.lines().filter_map(number).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_by_their_names() {
        let text = "rchar: 100\nwchar: 23\nsyscr: 7\nread_bytes: 9\n";
        assert_eq!(numbers(text, &["rchar:", "wchar:"]), 123);
        assert_eq!(numbers("", &["rchar:"]), 0);
    }

    #[test]
    fn this_process_has_threads_and_processor_time() {
        let own = std::process::id();
        let seen = tree(own, Depth::Threads);
        assert!(seen.threads.contains_key(&own));
        assert!(seen.io_bytes > 0);
        assert!(tree(own, Depth::Processes).threads.is_empty());
        assert_eq!(tree(u32::MAX, Depth::Threads), Tree::default());
    }
}
