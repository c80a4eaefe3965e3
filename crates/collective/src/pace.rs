//! How long a wait looks for the peers before it sleeps: decided from times, none of which is read here.
//!
//! A thread needs 5 us to wake up, or 50 where its core has gone to sleep too, and an operation 1 us. Two ranks that look for less time
//! than the other needs to wake up therefore never meet awake again once one of them has slept: they sleep in turns, and every operation takes as
//! long as a wake-up. So where somebody has just been woken the next wait looks for as long as that one may need. How long it
//! needed is seen by the waits that gave up too early. A wait that has nothing to do with a wake-up, as that of a step that
//! computes in between, looks no longer than [`Runner::spin`] says.

use std::time::{Duration, Instant};

use crate::runner::Runner;

/// Longest time after a wake-up that a woken rank is looked for; what takes longer is no matter of waking up.
const BACK_MAX: Duration = Duration::from_micros(200);

/// Sleep between two looks at the launcher's page and the deadline: a rank may be killed before it rings. A wait that has lasted
/// for longer sleeps as long as it has waited, so that many ranks that take turns on few cores do not spend them on looking.
const SLICES: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(100)];

/// How long a rank that has waited for so long sleeps if nobody wakes it, with so much time left until its deadline.
pub(crate) fn slice(waited: Duration, left: Duration) -> Duration {
    waited.clamp(SLICES[0], SLICES[1]).min(left)
}

/// What one rank knows of its peers' wake-ups.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pace {
    /// When somebody was woken last, this rank or a peer.
    woken: Option<Instant>,
    /// How long after that all are there again.
    back: Duration,
}

impl Pace {
    /// How long a wait that begins `now` looks.
    pub(crate) fn look(self, now: Instant, runner: Runner) -> Duration {
        let usual = runner.spin();
        match self.woken {
            // The communication thread would take this from the thread that computes.
            Some(woken) if runner == Runner::Caller => {
                usual.max((woken + self.back).saturating_duration_since(now))
            }
            _ => usual,
        }
    }

    /// A peer was woken.
    pub(crate) fn after_waking(self, now: Instant) -> Self {
        Self {
            woken: Some(now),
            ..self
        }
    }

    /// This rank looked in vain from `began` on, and slept until `now`.
    pub(crate) fn after_sleep(self, began: Instant, now: Instant) -> Self {
        let since = |woken: Instant| {
            let soon = began.saturating_duration_since(woken) < BACK_MAX;
            soon.then(|| now.saturating_duration_since(woken))
        };
        let back = match self.woken.and_then(since) {
            // Twice what it took: the next one may take a little longer.
            Some(took) if took <= BACK_MAX => self.back.max((2 * took).min(BACK_MAX)),
            Some(_) => self.back / 2,
            None => self.back,
        };
        Self {
            woken: Some(now),
            back,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: Duration = Duration::from_micros(30);

    fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    /// A rank was woken at 0, and the next wait began 1 us later, slept and ended after `took`.
    fn learnt(start: Instant, took: &[Duration]) -> Pace {
        took.iter().fold(Pace::default(), |pace, took| {
            let pace = pace.after_waking(start);
            pace.after_sleep(start + us(1), start + *took)
        })
    }

    #[test]
    fn a_wait_right_after_a_wake_up_looks_until_the_woken_are_back() {
        let start = Instant::now();
        let mut pace = Pace::default();
        assert_eq!(pace.look(start, Runner::Caller), USUAL);
        // Both have slept: the peer took 45 us to come back, longer than this rank looked.
        pace = pace.after_waking(start);
        pace = pace.after_sleep(start + us(1), start + us(45));
        // The peer sleeps by now. The next time it is looked for until it must be awake.
        let next = start + us(46);
        assert_eq!(pace.look(next, Runner::Caller), us(89));
        assert!(pace.look(next, Runner::Caller) > us(45));
    }

    #[test]
    fn a_step_that_computes_between_its_calls_looks_no_longer_than_before() {
        let start = Instant::now();
        let mut pace = learnt(start, &[us(45)]);
        for step in 1..100 {
            let began = start + us(10_000 * step);
            assert_eq!(pace.look(began, Runner::Caller), USUAL);
            pace = pace.after_sleep(began, began + us(150));
        }
    }

    #[test]
    fn the_communication_thread_never_looks_longer() {
        let start = Instant::now();
        let pace = learnt(start, &[us(45)]);
        let usual = Runner::CommThread.spin();
        assert_eq!(pace.look(start + us(46), Runner::CommThread), usual);
    }

    #[test]
    fn what_takes_too_long_for_a_wake_up_is_forgotten_again() {
        let start = Instant::now();
        let back = |took: &[Duration]| learnt(start, took).back;
        assert_eq!(back(&[us(45)]), us(90));
        assert_eq!(back(&[us(45), us(40)]), us(90));
        assert_eq!(back(&[us(45), us(150)]), BACK_MAX);
        assert_eq!(back(&[us(45), us(5_000)]), us(45));
        assert_eq!(back(&[us(5_000)]), Duration::ZERO);
        let long = vec![us(5_000); 20];
        assert_eq!(back(&[vec![us(100)], long].concat()), Duration::ZERO);
    }

    #[test]
    fn two_ranks_that_sleep_in_turns_stop_it() {
        // Each needs `wake` to wake up and nothing else; times on one clock, as both see it.
        for wake in [us(5), us(31), us(60), us(99)] {
            let start = Instant::now();
            let (mut paces, mut now) = ([Pace::default(); 2], start);
            let mut slept = 0;
            // At `now` the rank `by` comes last and wakes the other one.
            for turn in 0..50 {
                let (by, other) = (turn % 2, (turn + 1) % 2);
                paces[by] = paces[by].after_waking(now);
                let back = now + wake;
                let looked = paces[by].look(now, Runner::Caller);
                let woken_since = start; // it began to wait long ago
                paces[other] = paces[other].after_sleep(woken_since, back);
                if looked >= wake {
                    break;
                }
                slept += 1;
                // The other one comes first now and wakes `by`, which needs its time too.
                paces[by] = paces[by].after_sleep(now, back + wake);
                now = back;
            }
            assert!(slept <= 2, "{slept} times at {wake:?}");
        }
    }
}
