//! What this process does in a step of training, put together from the phases and operations that it passes.

use std::time::{Duration, Instant};

use paceline_rendezvous::page::Phase;
use paceline_usage::spans::Kind;

/// Spans and waits of a step that are kept one by one; later ones are left out. A program without an optimizer has a step that never ends.
const SPANS_MAX: usize = 4096;

/// The step that runs.
#[derive(Debug)]
pub(crate) struct Steps {
    phase: Phase,
    since: Instant,
    /// Steps that are over.
    over: u64,
    /// When the step began: when the last one ended, or an evaluation after it; the first one, when it reads its data or computes.
    began: Instant,
    has_begun: bool,
    spans: Vec<(Kind, Instant, Instant)>,
    waits: Vec<(Instant, Instant)>,
    backward_end: Option<Instant>,
    /// When the last operation was handed over to be done meanwhile.
    handed_over: Option<Instant>,
    /// When the last operation ended.
    landed: Option<Instant>,
}

/// A step that is over.
#[derive(Debug)]
pub(crate) struct Step {
    /// Steps done with it.
    pub(crate) step: u64,
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
    /// Of that, for other ranks.
    pub(crate) waited: Duration,
    /// When all ranks had reduced it.
    pub(crate) reduced: Instant,
    /// With the waits.
    pub(crate) spans: Vec<(Kind, Instant, Instant)>,
}

impl Steps {
    /// After `over` steps.
    pub(crate) fn new(over: u64, now: Instant) -> Self {
        Self {
            phase: Phase::BetweenSteps,
            since: now,
            over,
            began: now,
            has_begun: false,
            spans: Vec::new(),
            waits: Vec::new(),
            backward_end: None,
            handed_over: None,
            landed: None,
        }
    }

    /// The program enters a phase, in its own code after `step` steps; gives the step that ends with that.
    pub(crate) fn enter(&mut self, phase: Phase, step: u64, now: Instant) -> Option<Step> {
        let (was, since) = (self.phase, self.since);
        (self.phase, self.since) = (phase, now);
        if phase != Phase::BetweenSteps && !std::mem::replace(&mut self.has_begun, true) {
            self.began = now;
        }
        match was {
            Phase::DataLoader => self.note(Kind::Data, since, now),
            Phase::Forward => self.note(Kind::Forward, since, now),
            Phase::Backward => {
                self.note(Kind::Backward, since, now);
                self.backward_end = Some(now);
                self.wait_for_the_last(since, now);
            }
            // It follows a step, and its data is no step's.
            Phase::Evaluation if self.backward_end.is_none() => self.begin(now),
            _ => {}
        }
        if phase != Phase::BetweenSteps || step <= self.over {
            return None;
        }
        self.over = step;
        let ended = self.end(now);
        self.begin(now);
        ended
    }

    /// An operation is done meanwhile.
    pub(crate) fn handed_over(&mut self, now: Instant) {
        self.handed_over = Some(now);
    }

    /// An operation has ended.
    pub(crate) fn landed(&mut self, now: Instant) {
        self.landed = self.landed.max(Some(now));
    }

    /// The program has waited for an operation.
    pub(crate) fn waited(&mut self, since: Instant, now: Instant) {
        self.landed(now);
        if self.waits.len() < SPANS_MAX {
            self.waits.push((since, now));
        }
    }

    fn note(&mut self, kind: Kind, since: Instant, now: Instant) {
        if self.spans.len() < SPANS_MAX {
            self.spans.push((kind, since, now));
        }
    }

    /// At the end of the backward pass, DistributedDataParallel waits for the futures of its operations, without telling us. The last one is
    /// handed over with the last gradient, so what it takes within the pass is a wait.
    fn wait_for_the_last(&mut self, since: Instant, now: Instant) {
        let last = self.handed_over.filter(|at| *at >= since);
        let landed = self.landed.map(|at| at.min(now));
        if let (Some(from), Some(to)) = (last, landed)
            && from < to
        {
            self.waited(from, to);
        }
    }

    /// The step that ends now; none without a backward pass, as in a process that has taken over the state of another one.
    fn end(&mut self, now: Instant) -> Option<Step> {
        let backward_end = self.backward_end?;
        let mut spans = std::mem::take(&mut self.spans);
        spans.push((Kind::Optimizer, backward_end, now));
        let waits = joined(std::mem::take(&mut self.waits), self.began, now);
        let waited = waits.iter().map(|(start, end)| *end - *start).sum();
        let of_waits = waits.iter().map(|(start, end)| (Kind::Wait, *start, *end));
        spans.extend(of_waits);
        Some(Step {
            step: self.over,
            began: self.began,
            ended: now,
            waited,
            reduced: self.landed.unwrap_or(now).min(now),
            spans,
        })
    }

    fn begin(&mut self, now: Instant) {
        self.began = now;
        self.spans.clear();
        self.waits.clear();
        (self.backward_end, self.handed_over, self.landed) = (None, None, None);
    }
}

/// Stretches of time within a step, in order, without those that others cover.
fn joined(
    mut stretches: Vec<(Instant, Instant)>,
    began: Instant,
    ended: Instant,
) -> Vec<(Instant, Instant)> {
    stretches.sort_unstable();
    let mut joined: Vec<(Instant, Instant)> = Vec::new();
    for (start, end) in stretches {
        let (start, end) = (start.max(began), end.min(ended));
        match joined.last_mut() {
            _ if end <= start => {}
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => joined.push((start, end)),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A moment in milliseconds, and a step as spans in milliseconds.
    struct Clock(Instant);

    impl Clock {
        fn at(&self, ms: u64) -> Instant {
            self.0 + Duration::from_millis(ms)
        }

        fn spans(&self, step: &Step) -> Vec<(Kind, u128, u128)> {
            let ms = |at: Instant| (at - self.0).as_millis();
            let spans = step.spans.iter();
            spans
                .map(|(kind, start, end)| (*kind, ms(*start), ms(*end)))
                .collect()
        }
    }

    #[test]
    fn what_the_last_bucket_takes_within_the_backward_pass_is_a_wait() {
        let clock = Clock(Instant::now());
        let at = |ms| clock.at(ms);
        let mut steps = Steps::new(6, at(0));
        for (phase, ms) in [
            (Phase::DataLoader, 1),
            (Phase::Forward, 2),
            (Phase::Backward, 5),
        ] {
            assert!(steps.enter(phase, 7, at(ms)).is_none());
        }
        steps.handed_over(at(7));
        steps.landed(at(9));
        steps.handed_over(at(10));
        steps.landed(at(14));
        assert!(steps.enter(Phase::BetweenSteps, 6, at(15)).is_none());
        let step = steps
            .enter(Phase::BetweenSteps, 7, at(17))
            .expect("it is over");
        assert_eq!(
            clock.spans(&step),
            [
                (Kind::Data, 1, 2),
                (Kind::Forward, 2, 5),
                (Kind::Backward, 5, 15),
                (Kind::Optimizer, 15, 17),
                (Kind::Wait, 10, 14),
            ]
        );
        assert_eq!((step.step, step.began, step.ended), (7, at(1), at(17)));
        steps.enter(Phase::Backward, 8, at(20));
        steps.enter(Phase::BetweenSteps, 7, at(24));
        let next = steps.enter(Phase::BetweenSteps, 8, at(25));
        assert_eq!(next.map(|step| step.began), Some(at(17)));
        assert_eq!(step.waited, Duration::from_millis(4));
        assert_eq!((step.reduced, steps.over), (at(14), 8));
    }

    #[test]
    fn waits_count_once_and_only_within_the_step() {
        let clock = Clock(Instant::now());
        let at = |ms| clock.at(ms);
        let mut steps = Steps::new(0, at(10));
        steps.enter(Phase::Backward, 1, at(12));
        steps.enter(Phase::BetweenSteps, 0, at(20));
        for (start, end) in [(22, 25), (5, 13), (21, 23), (25, 26)] {
            steps.waited(at(start), at(end));
        }
        let step = steps
            .enter(Phase::BetweenSteps, 1, at(30))
            .expect("it is over");
        assert_eq!(step.waited, Duration::from_millis(1 + 5));
    }

    #[test]
    fn an_evaluation_is_no_part_of_a_step() {
        let clock = Clock(Instant::now());
        let at = |ms| clock.at(ms);
        let mut steps = Steps::new(0, at(0));
        steps.enter(Phase::DataLoader, 1, at(0));
        steps.enter(Phase::Evaluation, 1, at(1));
        steps.waited(at(2), at(3));
        steps.enter(Phase::BetweenSteps, 0, at(50));
        steps.enter(Phase::Backward, 1, at(51));
        steps.enter(Phase::BetweenSteps, 0, at(55));
        let step = steps
            .enter(Phase::BetweenSteps, 1, at(56))
            .expect("it is over");
        assert_eq!(
            clock.spans(&step),
            [(Kind::Backward, 51, 55), (Kind::Optimizer, 55, 56)]
        );
        assert_eq!((step.began, step.waited), (at(50), Duration::ZERO));
    }

    #[test]
    fn a_process_that_goes_on_with_anothers_work_has_done_no_step() {
        let now = Instant::now();
        let mut steps = Steps::new(0, now);
        steps.enter(Phase::DataLoader, 1, now);
        assert!(steps.enter(Phase::BetweenSteps, 500, now).is_none());
        steps.enter(Phase::Backward, 501, now);
        let step = steps.enter(Phase::BetweenSteps, 501, now);
        assert_eq!(step.expect("it is over").step, 501);
    }
}
