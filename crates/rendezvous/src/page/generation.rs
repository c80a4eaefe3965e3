//! Generations on the page: which local ranks go on after others are lost, and which generations are over.
//!
//! Generation 0 has all slots. The launcher alone writes the later ones, in this order: the old generation is over; each
//! member's slot gets the new number; the new number stands in the header. A generation is over for good, and the page with
//! its newest generation goes on. If only "the page" were over, two ranks that look at different moments would form
//! different groups and wait for each other.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use super::{JobPage, Revocation, Slot, layout};
use crate::os;

/// A generation that ranks can form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    /// 0 for the ranks that the job began with.
    pub number: u32,
    /// Its slots, ascending.
    pub members: Vec<usize>,
}

impl JobPage {
    /// Says that the launcher publishes a next generation when ranks are lost.
    pub fn set_recovers(&self) {
        self.header().recovers.store(1, SeqCst);
    }

    /// Whether a launcher publishes a next generation when ranks are lost.
    pub fn recovers(&self) -> bool {
        self.has_launcher() && self.header().recovers.load(SeqCst) != 0
    }

    /// Ends all generations up to this one, because of global rank `culprit`: from now on their operations fail.
    pub fn end_generation(&self, number: u32, culprit: usize) {
        let ended = layout::tagged(Some(culprit), number.saturating_add(1));
        self.header().ended.store(ended, SeqCst);
        self.changed();
    }

    /// Publishes the generation after the newest one, which has ended. Returns its number.
    ///
    /// Only the launcher may call it.
    pub fn publish_generation(&self, members: &[usize]) -> u32 {
        let number = self.header().generation.load(SeqCst).saturating_add(1);
        for member in members {
            self.slot(*member).raw().member_of.store(number, SeqCst);
        }
        self.header().generation.store(number, SeqCst);
        self.changed();
        number
    }

    /// Why no operation of this generation may go on, if that is so. Two loads where it may.
    ///
    /// *Blocks*: as [`revocation`](Self::revocation).
    pub fn end_of_generation(&self, number: u32) -> Option<Revocation> {
        if self.is_revoked() {
            return self.revocation();
        }
        let (culprit, below) = layout::untagged(self.header().ended.load(SeqCst));
        (number < below).then(|| Revocation {
            rank: culprit,
            text: match culprit {
                Some(rank) => format!("generation {number} ended with the loss of rank {rank}"),
                None => format!("generation {number} has ended"),
            },
        })
    }

    /// Sleeps until there is a generation after `after` that has not ended. Nothing if the page is revoked first, or
    /// `timeout` is over.
    pub fn wait_generation(&self, after: u32, timeout: Duration) -> Option<Generation> {
        let started = Instant::now();
        loop {
            let seen = self.header().changes.load(SeqCst);
            if self.is_revoked() {
                return None;
            }
            if let Some(newest) = self.newest().filter(|newest| newest.number > after) {
                return Some(newest);
            }
            let left = timeout.saturating_sub(started.elapsed());
            if left.is_zero() {
                return None;
            }
            os::futex_wait(&self.header().changes, seen, left);
        }
    }

    /// The newest generation, unless it has ended.
    fn newest(&self) -> Option<Generation> {
        let number = self.header().generation.load(SeqCst);
        let is_member =
            |slot: &usize| number == 0 || self.slot(*slot).raw().member_of.load(SeqCst) == number;
        let members = (0..self.slots()).filter(is_member).collect();
        // A later generation changes the slots only after this one has ended.
        let (_, below) = layout::untagged(self.header().ended.load(SeqCst));
        (number >= below).then_some(Generation { number, members })
    }

    /// Wakes those who wait for a generation.
    pub(super) fn changed(&self) {
        self.header().changes.fetch_add(1, SeqCst);
        os::futex_wake_all(&self.header().changes);
    }
}

impl Slot {
    /// Says that this rank goes on with the next generation when others are lost.
    pub fn set_recovers(&self) {
        self.raw().recovers.store(1, SeqCst);
    }

    /// Whether this rank goes on when others are lost.
    pub fn recovers(&self) -> bool {
        self.raw().recovers.load(SeqCst) != 0
    }

    /// Says that this rank's group of this generation has failed and that it waits for a later one; or that it no longer
    /// does.
    pub fn set_awaits(&self, failed: Option<u32>) {
        let word = failed.map_or(0, |number| number.saturating_add(1));
        self.raw().awaits.store(word, SeqCst);
    }

    /// The generation whose successor this rank waits for.
    pub fn awaits(&self) -> Option<u32> {
        self.raw().awaits.load(SeqCst).checked_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_ends_for_good_and_the_next_one_has_the_ranks_that_are_left() {
        let page = JobPage::private(4).unwrap();
        let all = Generation {
            number: 0,
            members: vec![0, 1, 2, 3],
        };
        assert_eq!(page.newest(), Some(all));
        page.end_generation(0, 2);
        assert_eq!(page.newest(), None);
        let end = page.end_of_generation(0).unwrap();
        assert_eq!(end.rank, Some(2));
        assert_eq!(page.end_of_generation(1), None);

        assert_eq!(page.publish_generation(&[0, 1, 3]), 1);
        page.end_generation(1, 0);
        assert_eq!(
            page.wait_generation(0, Duration::ZERO),
            None,
            "generation 1 has ended before anybody saw it"
        );
        page.publish_generation(&[1, 3]);
        let last = Generation {
            number: 2,
            members: vec![1, 3],
        };
        assert_eq!(page.wait_generation(0, Duration::ZERO), Some(last));
        assert_eq!(page.wait_generation(2, Duration::ZERO), None);
        assert!(page.end_of_generation(1).is_some() && page.end_of_generation(2).is_none());

        let over = Revocation {
            rank: None,
            text: "over".into(),
        };
        page.revoke(&over);
        assert_eq!(page.end_of_generation(2), Some(over));
        assert_eq!(page.wait_generation(0, Duration::MAX), None);
    }

    #[test]
    fn a_waiting_rank_wakes_when_a_generation_is_published_and_when_the_job_is_over() {
        let page = JobPage::private(2).unwrap();
        std::thread::scope(|scope| {
            let waits = || page.wait_generation(0, Duration::from_secs(60));
            let waiting = scope.spawn(waits);
            page.end_generation(0, 0);
            page.publish_generation(&[1]);
            assert_eq!(waiting.join().unwrap().unwrap().members, [1]);
            let page = &page;
            let waiting = scope.spawn(move || page.wait_generation(1, Duration::from_secs(60)));
            page.revoke(&Revocation {
                rank: None,
                text: String::new(),
            });
            assert_eq!(waiting.join().unwrap(), None);
        });
    }

    #[test]
    fn blame_belongs_to_a_generation() {
        let page = JobPage::private(2).unwrap();
        let slot = page.slot(1);
        slot.set_victim_of(0, 3);
        assert_eq!(slot.victim_of(), Some(0));
        assert_eq!((slot.victim_in(3), slot.victim_in(4)), (Some(0), None));
        assert_eq!((slot.awaits(), slot.recovers()), (None, false));
        slot.set_awaits(Some(3));
        assert_eq!(slot.awaits(), Some(3));
        slot.set_awaits(None);
        assert_eq!(slot.awaits(), None);
    }
}
