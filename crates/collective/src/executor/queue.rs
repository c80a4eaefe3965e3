//! What waits to be executed, and what the communication thread does next.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::call::Call;
use crate::memory::Operand;
use crate::ticket::Promise;

/// How long a short operation is left to callers. Of one that its caller has begun the peers have what they need; what waits is the
/// result, and the notice that a peer has not come.
pub(super) const PATIENCE: Duration = Duration::from_millis(1);

/// Operations in the order of their submission.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) jobs: VecDeque<Job>,
    /// Somebody is executing; others queue up.
    pub(super) running: bool,
    pub(super) closed: bool,
    /// Number of the last operation submitted.
    pub(super) seq: u64,
    /// Operations that were left to callers, so far.
    pub(super) left: u64,
    /// The communication thread looks at the queue within [`PATIENCE`] without being woken.
    pub(super) looks: bool,
    /// Threads that wait for room.
    pub(super) crowd: usize,
}

/// An operation that waits.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) call: Call,
    pub(super) operand: Operand,
    pub(super) promise: Promise,
    pub(super) times: Times,
    /// It is short, and left to callers for [`PATIENCE`].
    pub(super) is_left: bool,
}

/// How far an operation has come before it is executed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    pub(super) submitted: Instant,
    /// When it was started; none as long as it has not been.
    pub(super) started: Option<Instant>,
    /// Its caller has begun it.
    pub(super) is_begun: bool,
}

/// What the communication thread does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Executes the front of the queue.
    Run,
    /// Sleeps until it is woken.
    Sleep,
    /// Looks again after this time.
    Look(Duration),
    /// Nothing will come any more.
    End,
}

impl Times {
    /// Submitted, and no more.
    pub(super) fn of(submitted: Instant) -> Self {
        Self {
            submitted,
            started: None,
            is_begun: false,
        }
    }

    /// Started by its caller without waiting for anything.
    pub(super) fn at_once(submitted: Instant) -> Self {
        Self {
            started: Some(submitted),
            ..Self::of(submitted)
        }
    }
}

impl Job {
    pub(super) fn seq(&self) -> u64 {
        self.call.header.operation.seq
    }
}

impl Queue {
    /// Gives a call the next number.
    pub(super) fn number(&mut self, call: &mut Call) -> u64 {
        self.seq += 1;
        call.header.operation.seq = self.seq;
        self.seq
    }

    /// What the communication thread does, which has seen `seen` operations left to callers when it looked last.
    pub(super) fn next(&self, now: Instant, seen: u64) -> Next {
        // While callers have operations left to them it is cheaper to look now and then than to be woken for each.
        let rest = match self.left == seen {
            true => Next::Sleep,
            false => Next::Look(PATIENCE),
        };
        match self.jobs.front() {
            _ if self.running => rest,
            None if self.closed => Next::End,
            None => rest,
            Some(front) => {
                let age = now.saturating_duration_since(front.times.submitted);
                let left = PATIENCE.saturating_sub(age);
                let waits = front.is_left && self.jobs.len() == 1 && !self.closed;
                match waits && !left.is_zero() {
                    true => Next::Look(left),
                    false => Next::Run,
                }
            }
        }
    }

    /// Whether the communication thread has to be woken, now that nobody executes.
    pub(super) fn needs_thread(&self) -> bool {
        match self.jobs.front() {
            _ if self.closed => true,
            None => false,
            Some(front) => !front.is_left || self.jobs.len() > 1 || !self.looks,
        }
    }

    /// Whether the front was begun by its caller, and nobody executes.
    pub(super) fn has_begun(&self) -> bool {
        let front = self.jobs.front();
        !self.running && front.is_some_and(|job| job.times.is_begun)
    }

    /// The next operation, none when `seq` lies before it.
    pub(super) fn take_until(&mut self, seq: u64) -> Option<Job> {
        self.jobs.front().filter(|job| job.seq() <= seq)?;
        self.jobs.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Header;
    use crate::element::DType;
    use crate::error::{OpKind, Operation};
    use crate::plan::{Algorithm, Hosts, Kind, Pattern, Spec};
    use crate::tree::Tree;

    fn job(seq: u64, submitted: Instant, is_left: bool) -> Job {
        let operation = Operation {
            kind: OpKind::Barrier,
            seq,
            bucket: None,
        };
        let header = Header {
            operation,
            reduce: None,
            dtype: Some(DType::U8),
            algorithm: Algorithm::Direct,
            total: 0,
            piece: 0,
            counts: 0,
            mark: 0,
            leaves: 0,
        };
        let spec = Spec {
            pattern: Pattern::new(Kind::Barrier, 0),
            algorithm: Algorithm::Direct,
            tree: Tree::per_rank(1),
            hosts: Hosts::one(1).into(),
            line: 1,
        };
        Job {
            call: Call { header, spec },
            operand: Operand::none(),
            promise: Promise::new(0).0,
            times: Times::of(submitted),
            is_left,
        }
    }

    /// A queue of two kinds of operations, in order: left to callers, or not.
    fn queue(left: &[bool]) -> (Queue, Instant) {
        let start = Instant::now();
        let jobs = left.iter().zip(1..);
        let jobs = jobs.map(|(left, seq)| job(seq, start, *left));
        let queue = Queue {
            jobs: jobs.collect(),
            left: left.iter().filter(|left| **left).count() as u64,
            ..Queue::default()
        };
        (queue, start)
    }

    #[test]
    fn the_thread_runs_what_is_queued_and_leaves_what_is_short_to_callers_for_a_while() {
        let half = PATIENCE / 2;
        let cases: [(&[bool], Duration, Next); 6] = [
            (&[], half, Next::Sleep),
            (&[false], half, Next::Run),
            (&[true], half, Next::Look(half)),
            (&[true], PATIENCE, Next::Run),
            (&[true], 9 * PATIENCE, Next::Run),
            (&[true, false], half, Next::Run),
        ];
        for (left, age, expected) in cases {
            let (queue, start) = queue(left);
            let next = queue.next(start + age, queue.left);
            assert_eq!(next, expected, "{left:?} after {age:?}");
        }
    }

    #[test]
    fn the_thread_looks_now_and_then_while_callers_have_operations_left_to_them() {
        let (mut queue, start) = queue(&[]);
        queue.left = 7;
        assert_eq!(queue.next(start, 6), Next::Look(PATIENCE));
        assert_eq!(queue.next(start, 7), Next::Sleep);
        queue.running = true;
        assert_eq!(queue.next(start, 6), Next::Look(PATIENCE));
    }

    #[test]
    fn the_thread_ends_after_everything_has_run() {
        for (left, running, expected) in [
            (&[][..], false, Next::End),
            (&[], true, Next::Sleep),
            (&[true], false, Next::Run),
            (&[true], true, Next::Sleep),
            (&[false], false, Next::Run),
        ] {
            let (mut queue, start) = queue(left);
            (queue.closed, queue.running) = (true, running);
            assert_eq!(queue.next(start, queue.left), expected, "{left:?}");
            assert!(queue.needs_thread());
        }
    }

    #[test]
    fn the_thread_is_woken_unless_it_looks_by_itself_at_the_only_one_left_to_callers() {
        for (left, looks, expected) in [
            (&[][..], false, false),
            (&[true], true, false),
            (&[true], false, true),
            (&[true, false], true, true),
            (&[false], true, true),
        ] {
            let (mut queue, _) = queue(left);
            queue.looks = looks;
            assert_eq!(queue.needs_thread(), expected, "{left:?} {looks}");
        }
    }

    #[test]
    fn operations_are_taken_from_the_front_and_no_further_than_asked() {
        let (mut queue, _) = queue(&[true, false, false]);
        let taken = std::iter::from_fn(|| queue.take_until(2)).map(|job| job.seq());
        assert_eq!(taken.collect::<Vec<_>>(), [1, 2]);
        assert!(!queue.has_begun());
    }
}
