//! Whether to look again for a moment before sleeping: a decision from how it went before.
//!
//! Waking a thread on a core that has gone idle costs more than the whole rest of a request on one host: a `get` takes
//! 62 us when both ends sleep and 10 us when both look for a moment first (loopback, two cores of a virtual machine).
//! Where looking finds nothing (the peer is far, or there is nothing to come) it is given up after a few times and tried
//! again rarely. A looking thread yields its core between two looks: on busy cores it changes nothing (16 us either way),
//! and they lose at most a moment.

use std::thread;
use std::time::{Duration, Instant};

/// Longest look: as long as it takes the other end to wake up once, so that both stay awake from then on.
const LOOK: Duration = Duration::from_micros(50);
/// Looks in vain after which it is mostly given up.
const LOST_MAX: u32 = 4;
/// One wait in so many is a trial then: at most 50 us in 64 waits are lost.
const TRIAL: u32 = 64;

/// How looking has gone lately.
#[derive(Debug, Default)]
pub(crate) struct Spin {
    lost: u32,
    skipped: u32,
}

impl Spin {
    /// Calls `look` until it finds something or the moment is over.
    pub(crate) fn look<T>(&mut self, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        if !self.is_worth_it() {
            return None;
        }
        let started = Instant::now();
        let found = loop {
            if let Some(found) = look() {
                break Some(found);
            }
            if started.elapsed() >= LOOK {
                break None;
            }
            thread::yield_now();
        };
        self.record(found.is_some());
        found
    }

    fn is_worth_it(&mut self) -> bool {
        if self.lost < LOST_MAX {
            return true;
        }
        self.skipped += 1;
        if self.skipped < TRIAL {
            return false;
        }
        self.skipped = 0;
        true
    }

    fn record(&mut self, is_found: bool) {
        self.lost = if is_found {
            0
        } else {
            self.lost.saturating_add(1)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looking_in_vain_is_given_up_and_one_success_brings_it_back() {
        let mut spin = Spin::default();
        let mut looked = 0;
        for _ in 0..LOST_MAX + 10 * TRIAL {
            if spin.is_worth_it() {
                looked += 1;
                spin.record(false);
            }
        }
        assert_eq!(looked, LOST_MAX + 10);
        spin.record(true);
        assert!((0..100).all(|_| {
            spin.record(true);
            spin.is_worth_it()
        }));
    }

    #[test]
    fn a_look_ends_with_what_it_finds_or_in_time() {
        // A loaded machine may take the processor away during a look, which then ends in vain.
        assert!((0..1000).any(|_| {
            let mut left = 3;
            let found = Spin::default().look(|| {
                left -= 1;
                (left == 0).then_some("it")
            });
            (found, left) == (Some("it"), 0)
        }));
        assert_eq!(Spin::default().look(|| None::<()>), None);
    }
}
