//! One rank: its processes, and the sum of what they and those before them used.

use std::collections::BTreeMap;
use std::time::Duration;

use paceline_gpu::host::Host;
use paceline_gpu::process::Stat;
use paceline_gpu::snapshot::{Gap, Reading};

use super::{Units, clock};
use crate::sample::RankSample;

/// Processes of one rank; more are not counted.
const MEMBERS_MAX: usize = 4096;

#[derive(Debug)]
pub(super) struct Rank {
    pub(super) pid: u32,
    members: BTreeMap<u32, Member>,
    /// Time of processes that ended and that no process of the rank waited for.
    kept_ns: u64,
    /// What was told last; it never falls.
    told_ns: u64,
    /// Whether the process was ever there.
    is_known: bool,
}

/// A process, as it was seen last.
#[derive(Debug, Clone, Copy)]
struct Member {
    started_ticks: u64,
    /// Its own time.
    own_ns: u64,
    /// Time of its children that ended and that it waited for, and theirs.
    children_ns: u64,
    resident_bytes: u64,
}

impl Member {
    fn of(stat: &Stat, units: &Units) -> Self {
        Self {
            started_ticks: stat.started_ticks,
            own_ns: stat.own_ticks.saturating_mul(units.tick_ns),
            children_ns: stat.children_ticks.saturating_mul(units.tick_ns),
            resident_bytes: stat.resident_pages.saturating_mul(units.page_bytes),
        }
    }

    fn ns(&self) -> u64 {
        self.own_ns.saturating_add(self.children_ns)
    }
}

/// What has changed since the sample before.
#[derive(Debug, Default)]
struct Change {
    /// Processes that ended.
    ended: u64,
    /// What they had used when they were seen last.
    ended_ns: u64,
    /// By how much the others' children have grown.
    waited_ns: u64,
}

impl Rank {
    pub(super) fn new(host: &Host<'_>, pid: u32, units: &Units) -> Self {
        let mut rank = Self {
            pid,
            members: BTreeMap::new(),
            kept_ns: 0,
            told_ns: 0,
            is_known: false,
        };
        if let Some(stat) = Stat::read(host, pid) {
            rank.add(pid, &stat, units);
            rank.is_known = true;
        }
        rank
    }

    /// Its processes, those of its children too.
    pub(super) fn members(&self) -> impl Iterator<Item = u32> {
        self.members.keys().copied()
    }

    pub(super) fn add(&mut self, pid: u32, stat: &Stat, units: &Units) {
        if self.members.len() < MEMBERS_MAX {
            self.members.insert(pid, Member::of(stat, units));
        }
    }

    /// What it has used by now. With `is_due`, or when a process has ended, what only files tell is read again.
    pub(super) fn sample(
        &mut self,
        rank: u32,
        host: &Host<'_>,
        units: &Units,
        is_due: bool,
    ) -> RankSample {
        if !self.is_known {
            let gap = Gap::other("no such process is seen from here");
            return RankSample {
                rank,
                pid: None,
                cpu: Reading::missing(gap.clone()),
                resident_bytes: Reading::missing(gap),
            };
        }
        let mut change = Change::default();
        self.read_clocks(units, &mut change);
        if is_due || change.ended > 0 || !units.has_clocks {
            self.read_files(host, units, &mut change);
        }
        self.settle(&change, units);
        let members = self.members.values();
        let resident = members.fold(0, |sum: u64, member| {
            sum.saturating_add(member.resident_bytes)
        });
        RankSample {
            rank,
            pid: self.members.contains_key(&self.pid).then_some(self.pid),
            cpu: Duration::from_nanos(self.told_ns).into(),
            resident_bytes: resident.into(),
        }
    }

    fn read_clocks(&mut self, units: &Units, change: &mut Change) {
        if !units.has_clocks {
            return;
        }
        self.members.retain(|pid, member| {
            match clock::process_ns(*pid) {
                // A file's ticks may be ahead of the clock by what they are rounded by. What is behind by more is the
                // clock of another process that has this number now.
                Some(own_ns) if own_ns.saturating_add(2 * units.tick_ns) >= member.own_ns => {
                    member.own_ns = member.own_ns.max(own_ns);
                    true
                }
                _ => change.count(member),
            }
        });
    }

    fn read_files(&mut self, host: &Host<'_>, units: &Units, change: &mut Change) {
        self.members.retain(|pid, member| {
            let stat = Stat::read(host, *pid);
            let Some(stat) = stat.filter(|stat| stat.started_ticks == member.started_ticks) else {
                return change.count(member);
            };
            let now = Member::of(&stat, units);
            let waited_ns = now.children_ns.saturating_sub(member.children_ns);
            change.waited_ns = change.waited_ns.saturating_add(waited_ns);
            *member = Member {
                own_ns: now.own_ns.max(member.own_ns),
                children_ns: now.children_ns.max(member.children_ns),
                ..now
            };
            true
        });
    }

    /// The time of a process that ended goes to its parent's children when that waits for it. What did not arrive there is
    /// kept here: nobody waited, or whoever did has ended as well or is no process of the rank. Files tell times of
    /// children in ticks, so that a little may seem to be missing that is not.
    fn settle(&mut self, change: &Change, units: &Units) {
        let missing_ns = change.ended_ns.saturating_sub(change.waited_ns);
        let rounding_ns = 2 * units.tick_ns * (1 + change.ended);
        if missing_ns > rounding_ns {
            self.kept_ns = self.kept_ns.saturating_add(missing_ns);
        }
        let members = self.members.values();
        let sum_ns = members.fold(self.kept_ns, |sum, member| sum.saturating_add(member.ns()));
        self.told_ns = self.told_ns.max(sum_ns);
    }
}

impl Change {
    /// Counts a process that ended; it is not to be retained.
    fn count(&mut self, member: &Member) -> bool {
        self.ended += 1;
        self.ended_ns = self.ended_ns.saturating_add(member.ns());
        false
    }
}
