//! Hearing how fast the ranks are: the thin part around the decisions of `pace`.

use std::time::{Duration, Instant};

use paceline_rendezvous::notice;

use super::{Ddp, extra};
use crate::error::DdpError;
use crate::pace::{Fate, Straggler};

/// A rank's own times.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// When the last step ended, in this generation of the group.
    ended: Option<Instant>,
    pub(super) said: Said,
    /// How often the ranks have changed.
    changes: u64,
}

/// What a rank says of its last step in the next one, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Said {
    /// From the end of one step to the end of the next.
    pub(super) interval: Option<f32>,
    /// The forward and backward passes of a shard.
    pub(super) busy: Option<f32>,
}

/// What all ranks say of their last step.
pub(super) struct Heard {
    /// The [`Clock::changes`] before.
    changes: u64,
    interval: f32,
    /// By rank; empty if a rank's time includes waiting for others.
    busy: Vec<f32>,
}

impl Clock {
    pub(super) fn computed(&mut self, time: Duration, shards: usize) {
        self.said.busy = Some(time.as_secs_f32() / shards as f32);
    }

    fn step_ended(&mut self) {
        let now = Instant::now();
        let last = self.ended.replace(now);
        self.said.interval = last.map(|last| (now - last).as_secs_f32());
    }
}

impl Ddp {
    /// Ranks that are or were slower than the others, as this rank has heard: those that it named. All ranks hear the same.
    ///
    /// The time of a rank is that of its forward and backward passes, by shard, as the program's thread sees it. On a GPU it
    /// includes the device's work if the program reads the loss in its step. Models whose ranks wait for one another within the
    /// passes (ZeRO, parts, stages, `SyncBatchNorm`) and hooks that take several steps at once name none.
    pub fn stragglers(&self) -> &[Straggler] {
        self.pace.stragglers.named()
    }

    /// Has the deadline of the step's operations follow the steps, if the group's is automatic.
    pub(super) fn limit_step(&self) {
        if let Some(initial) = self.group.auto_timeout() {
            let timeout = self.pace.intervals.timeout();
            self.group.set_timeout(timeout.unwrap_or(initial));
        }
    }

    /// Begins to measure anew, because the ranks have changed.
    pub(super) fn restart_pace(&mut self) {
        self.clock = Clock {
            changes: self.clock.changes + 1,
            ..Clock::default()
        };
        self.pace.restart();
    }

    pub(super) fn heard(&self, extras: &[f32]) -> Heard {
        let waits_within = self.shares.is_some()
            || self.sharded.is_some()
            || self.parts.is_some()
            || self.norms.is_some()
            || self.rounds.is_some();
        let ranks = if waits_within { 0 } else { self.group.world() };
        let shard = |rank| self.tree.range(rank).start;
        let busy = (0..ranks).map(|rank| extras[extra::busy(self.options.sums, shard(rank))]);
        Heard {
            changes: self.clock.changes,
            interval: extras[extra::INTERVAL],
            busy: busy.collect(),
        }
    }

    /// Draws the conclusions from what all ranks have said.
    ///
    /// *Errors*: this rank is a straggler that leaves.
    pub(super) fn keep_pace(&mut self, heard: &Heard) -> Result<(), DdpError> {
        self.pace.intervals.hear(heard.interval);
        if self.clock.changes != heard.changes {
            // Ranks were lost while this step was concluded: its times are those of other ranks.
            self.restart_pace();
            return Ok(());
        }
        self.clock.step_ended();
        let is_first = self.group.rank() == 0;
        if let Some(initial) = self.group.auto_timeout() {
            let timeout = self.pace.intervals.timeout().unwrap_or(initial);
            // Between two steps a rank may do what no step has shown yet.
            self.group.set_timeout(timeout.max(initial));
            if let Some(news) = self.pace.intervals.news().filter(|_| is_first) {
                notice!(INFO, "{news}");
            }
        }
        let started: Vec<usize> = (0..heard.busy.len())
            .map(|rank| self.group.started_rank(rank))
            .collect();
        let (news, slowest) = self.pace.stragglers.hear(&heard.busy, &started);
        let least = self.options.exclude_stragglers;
        let leaver = slowest.filter(|_| {
            let stragglers = &self.pace.stragglers;
            least.is_some_and(|least| {
                self.is_expendable && stragglers.should_leave(self.shard_count(), least.get())
            })
        });
        for straggler in news.iter().filter(|_| is_first) {
            match straggler.fate {
                Fate::Recovered => notice!(INFO, "{straggler}"),
                _ => notice!(WARN, "{straggler}"),
            }
        }
        let Some(leaver) = leaver else {
            return Ok(());
        };
        let Some(straggler) = self.pace.stragglers.has_left(started[leaver]) else {
            return Ok(());
        };
        if is_first {
            let left = match self.group.world() - 1 {
                1 => "1 rank is".to_owned(),
                left => format!("{left} ranks are"),
            };
            let rank = straggler.rank;
            notice!(WARN, "rank {rank} leaves the job: {left} faster without it");
        }
        match leaver == self.group.rank() {
            true => Err(DdpError::Straggler(straggler)),
            false => Ok(()),
        }
    }
}
