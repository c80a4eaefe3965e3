//! Processor time and resident memory of ranks: each process and all that it started, on machines without GPUs the only
//! measure of work.

mod clock;
mod rank;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::time::Duration;

use paceline_gpu::host::Host;
use paceline_gpu::process::Stat;

use self::rank::Rank;
use crate::sample::RankSample;

/// Least time between two looks for new processes.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Processes of the machine for which such a look is cheap; with more it is taken as much less often.
const PROCESSES_CHEAP: usize = 4096;
/// Processes that are looked at; no machine has as many.
const PROCESSES_MAX: usize = 1 << 18;
/// How deep processes that start each other between two looks are followed.
const DEPTH_MAX: usize = 64;

/// Processor time and resident memory of the ranks of this machine.
///
/// A process belongs to a rank if the rank or one of its processes started it, or if it is in a process group or a session
/// that the rank leads; it stays with the rank when its parent ends.
///
/// *Units*: time as the kernel accounts it, in nanoseconds on this machine and in ticks below another root. Children that
/// came and went between two looks count once their parent has waited for them. Memory that processes share counts for
/// each.
///
/// *Cost*: two system calls for each process of a rank, microseconds together. Once a second the machine's processes are
/// listed, and those that are new and those of the ranks read, some 10 µs each.
///
/// ```
/// use std::time::Duration;
/// use paceline_usage::ranks::Ranks;
///
/// let mut ranks = Ranks::below("/");
/// let own = std::process::id();
/// let sample = ranks.sample(&[(0, own)], Duration::ZERO);
/// assert_eq!(sample[0].pid, Some(own));
/// ```
#[derive(Debug)]
pub struct Ranks {
    root: PathBuf,
    units: Units,
    ranks: BTreeMap<u32, Rank>,
    /// Processes that belong to no rank, and never will.
    strangers: HashSet<u32>,
    look_at: Duration,
}

/// What the kernel counts in.
#[derive(Debug, Clone, Copy)]
struct Units {
    tick_ns: u64,
    page_bytes: u64,
    /// Whether the kernel can be asked for times that are finer than its files.
    has_clocks: bool,
}

impl Ranks {
    /// Looks at processes below this root; `/` is this machine.
    pub fn below(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        let ticks = rustix::param::clock_ticks_per_second().max(1);
        let units = Units {
            tick_ns: 1_000_000_000 / ticks,
            page_bytes: rustix::param::page_size() as u64,
            has_clocks: Host::new(&root, &|_| None).is_this_one(),
        };
        Self {
            root,
            units,
            ranks: BTreeMap::new(),
            strangers: HashSet::new(),
            look_at: Duration::ZERO,
        }
    }

    /// What the ranks, each with its process, have used by now; in rank order. `at` is the time since sampling began.
    ///
    /// A rank whose process has ended keeps its time as long as it is asked for; with another process it begins anew.
    pub fn sample(&mut self, pids: &[(u32, u32)], at: Duration) -> Vec<RankSample> {
        let host = Host::new(&self.root, &|_| None);
        let pids: BTreeMap<u32, u32> = pids.iter().copied().collect();
        self.ranks
            .retain(|rank, known| pids.get(rank) == Some(&known.pid));
        let mut is_due = at >= self.look_at;
        for (rank, pid) in &pids {
            if !self.ranks.contains_key(rank) {
                self.ranks
                    .insert(*rank, Rank::new(&host, *pid, &self.units));
                // Processes of no rank may belong to this one.
                self.strangers.clear();
                is_due = true;
            }
        }
        if is_due {
            let processes = look(&host, &mut self.ranks, &mut self.strangers, &self.units);
            let times = 1 + processes / PROCESSES_CHEAP;
            self.look_at = at + LOOK_EVERY * u32::try_from(times).unwrap_or(u32::MAX);
        }
        let units = &self.units;
        let ranks = self.ranks.iter_mut();
        ranks
            .map(|(rank, known)| known.sample(*rank, &host, units, is_due))
            .collect()
    }
}

/// Finds processes that the ranks have started since, and returns how many the machine has.
fn look(
    host: &Host<'_>,
    ranks: &mut BTreeMap<u32, Rank>,
    strangers: &mut HashSet<u32>,
    units: &Units,
) -> usize {
    let pids: HashSet<u32> = host.processes(PROCESSES_MAX).into_iter().collect();
    // A number that comes again belongs to another process; numbers are used up before they do.
    strangers.retain(|pid| pids.contains(pid));
    let mut owners: HashMap<u32, u32> = HashMap::new();
    for (rank, known) in ranks.iter() {
        owners.extend(known.members().map(|pid| (pid, *rank)));
    }
    let leaders: HashMap<u32, u32> = ranks
        .iter()
        .map(|(rank, known)| (known.pid, *rank))
        .collect();
    let is_new = |pid: &&u32| !strangers.contains(pid) && !owners.contains_key(pid);
    let mut new: HashMap<u32, Stat> = pids
        .iter()
        .filter(is_new)
        .filter_map(|pid| Some((*pid, Stat::read(host, *pid)?)))
        .collect();
    for _ in 0..DEPTH_MAX {
        let owner = |stat: &Stat| {
            let led = || {
                leaders
                    .get(&stat.group)
                    .or_else(|| leaders.get(&stat.session))
            };
            owners.get(&stat.parent).or_else(led).copied()
        };
        let found: Vec<(u32, u32)> = new
            .iter()
            .filter_map(|(pid, stat)| Some((*pid, owner(stat)?)))
            .collect();
        if found.is_empty() {
            break;
        }
        for (pid, rank) in found {
            if let (Some(stat), Some(known)) = (new.remove(&pid), ranks.get_mut(&rank)) {
                known.add(pid, &stat, units);
                owners.insert(pid, rank);
            }
        }
    }
    strangers.extend(new.into_keys());
    pids.len()
}
