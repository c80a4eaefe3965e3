//! What waits to be executed, and what the communication thread does next.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::call::Call;
use crate::engine::Engine;
use crate::memory::Operand;
use crate::ticket::Promise;

/// How long an operation that its caller has begun is left to callers. Its peers have what they need; what waits is
/// the result, and the notice that a peer has not come.
pub(super) const PATIENCE: Duration = Duration::from_millis(1);

/// Operations in the order of their submission.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) jobs: VecDeque<Job>,
    /// Away while somebody is executing with it; others queue up then.
    engine: Option<Box<Engine>>,
    pub(super) closed: bool,
    /// Number of the last operation submitted.
    pub(super) seq: u64,
    /// Operations that callers have begun and not seen the end of at once, so far.
    pub(super) begun: u64,
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
}

/// How far an operation has come before it is executed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    pub(super) submitted: Instant,
    /// When its caller began it.
    pub(super) begun: Option<Instant>,
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
    /// When this rank joined the operation: now, unless its caller began it.
    pub(super) fn started(&self) -> Instant {
        self.begun.unwrap_or_else(Instant::now)
    }

    /// Submitted, and no more.
    pub(super) fn of(submitted: Instant) -> Self {
        Self {
            submitted,
            begun: None,
        }
    }
}

impl Job {
    pub(super) fn seq(&self) -> u64 {
        self.call.header.operation.seq
    }
}

impl Queue {
    pub(super) fn of(engine: Engine) -> Self {
        Self {
            jobs: VecDeque::new(),
            engine: Some(Box::new(engine)),
            closed: false,
            seq: 0,
            begun: 0,
            looks: false,
            crowd: 0,
        }
    }

    /// Whether somebody is executing.
    pub(super) fn is_running(&self) -> bool {
        self.engine.is_none()
    }

    /// The engine, unless somebody is executing.
    pub(super) fn engine(&mut self) -> Option<&mut Engine> {
        self.engine.as_deref_mut()
    }

    /// Somebody begins to execute.
    pub(super) fn take_engine(&mut self) -> Option<Box<Engine>> {
        self.engine.take()
    }

    /// Nobody is executing any more.
    pub(super) fn give_back(&mut self, engine: Box<Engine>) {
        self.engine = Some(engine);
    }

    /// Gives a call the next number.
    pub(super) fn number(&mut self, call: &mut Call) -> u64 {
        self.seq += 1;
        call.header.operation.seq = self.seq;
        self.seq
    }

    /// What the communication thread does, which has seen `seen` operations begun when it looked last.
    pub(super) fn next(&self, now: Instant, seen: u64) -> Next {
        // While callers begin operations it is cheaper to look now and then than to be woken for each.
        let rest = match self.begun == seen {
            true => Next::Sleep,
            false => Next::Look(PATIENCE),
        };
        match self.jobs.front() {
            _ if self.is_running() => rest,
            None if self.closed => Next::End,
            None => rest,
            Some(front) => {
                let age = |begun: Instant| now.saturating_duration_since(begun);
                let left = front
                    .times
                    .begun
                    .map(|begun| PATIENCE.checked_sub(age(begun)));
                match left.flatten() {
                    Some(left) if !left.is_zero() && self.jobs.len() == 1 && !self.closed => {
                        Next::Look(left)
                    }
                    _ => Next::Run,
                }
            }
        }
    }

    /// Whether the communication thread has to be woken, now that nobody executes.
    pub(super) fn needs_thread(&self) -> bool {
        let begun = |job: &Job| job.times.begun.is_some();
        match self.jobs.front() {
            _ if self.closed => true,
            None => false,
            Some(front) => !begun(front) || self.jobs.len() > 1 || !self.looks,
        }
    }

    /// Whether the front was begun by its caller, all ranks have come to it since, and nobody executes.
    pub(super) fn has_met(&self) -> bool {
        let begun = |job: &Job| job.times.begun.is_some();
        self.jobs.front().is_some_and(begun)
            && self.engine.as_ref().is_some_and(|engine| engine.is_met())
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
    use crate::memory::Allocator;
    use crate::plan::{Algorithm, Hosts, Kind, Pattern, Spec};
    use crate::tree::Tree;

    fn job(seq: u64, submitted: Instant, begun: Option<Instant>) -> Job {
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
            times: Times { submitted, begun },
        }
    }

    /// A queue of two kinds of operations, in order: begun by their caller at the start, or not.
    fn queue(begun: &[bool]) -> (Queue, Instant) {
        let start = Instant::now();
        let jobs = begun.iter().zip(1..);
        let jobs = jobs.map(|(begun, seq)| job(seq, start, begun.then_some(start)));
        let mut queue = Queue::of(Engine::new(0, None, None, Allocator::Heap));
        queue.jobs = jobs.collect();
        queue.begun = begun.iter().filter(|begun| **begun).count() as u64;
        (queue, start)
    }

    #[test]
    fn the_thread_runs_what_is_queued_and_leaves_what_was_begun_to_its_caller_for_a_while() {
        let half = PATIENCE / 2;
        let cases: [(&[bool], Duration, Next); 6] = [
            (&[], half, Next::Sleep),
            (&[false], half, Next::Run),
            (&[true], half, Next::Look(half)),
            (&[true], PATIENCE, Next::Run),
            (&[true], 9 * PATIENCE, Next::Run),
            (&[true, false], half, Next::Run),
        ];
        for (begun, age, expected) in cases {
            let (queue, start) = queue(begun);
            let next = queue.next(start + age, queue.begun);
            assert_eq!(next, expected, "{begun:?} after {age:?}");
        }
    }

    #[test]
    fn the_thread_looks_now_and_then_while_callers_begin_operations() {
        let (mut queue, start) = queue(&[]);
        queue.begun = 7;
        assert_eq!(queue.next(start, 6), Next::Look(PATIENCE));
        assert_eq!(queue.next(start, 7), Next::Sleep);
        let _engine = queue.take_engine();
        assert_eq!(queue.next(start, 6), Next::Look(PATIENCE));
    }

    #[test]
    fn the_thread_ends_after_everything_has_run() {
        for (begun, running, expected) in [
            (&[][..], false, Next::End),
            (&[], true, Next::Sleep),
            (&[true], false, Next::Run),
            (&[true], true, Next::Sleep),
            (&[false], false, Next::Run),
        ] {
            let (mut queue, start) = queue(begun);
            queue.closed = true;
            if running {
                queue.take_engine();
            }
            assert_eq!(queue.next(start, queue.begun), expected, "{begun:?}");
            assert!(queue.needs_thread());
        }
    }

    #[test]
    fn the_thread_is_woken_unless_it_looks_by_itself_at_the_only_one_begun() {
        for (begun, looks, expected) in [
            (&[][..], false, false),
            (&[true], true, false),
            (&[true], false, true),
            (&[true, false], true, true),
            (&[false], true, true),
        ] {
            let (mut queue, _) = queue(begun);
            queue.looks = looks;
            assert_eq!(queue.needs_thread(), expected, "{begun:?} {looks}");
        }
    }

    #[test]
    fn operations_are_taken_from_the_front_and_no_further_than_asked() {
        let (mut queue, _) = queue(&[true, false, false]);
        let taken = std::iter::from_fn(|| queue.take_until(2)).map(|job| job.seq());
        assert_eq!(taken.collect::<Vec<_>>(), [1, 2]);
    }
}
