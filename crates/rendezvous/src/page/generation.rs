//! Generations on the page: which local ranks go on after others are lost or replaced, and which generations are over.
//!
//! Generation 0 has all slots. The launcher alone publishes the later ones.
//!
//! - *After a loss*: the old generation is over; each member's slot gets the new number; the new number stands in the header, and
//!   the new generation has begun.
//! - *With replacements*, an invitation: the members' slots and the header get the new number, and the old generation goes on. Its
//!   ranks agree on the moment, and the first of them to leave says that the new one has begun. A rank that is lost before that
//!   ends both.
//!
//! So at most one generation follows the one that has begun, and there are two places for them. A generation has ranks on the pages
//! of all its nodes; their launchers publish it under the same number. A generation is over for good, and the page with its newest
//! generation goes on. If only "the page" were over, two ranks that look at different moments would
//! form different groups and wait for each other.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use super::{JobPage, Phase, Revocation, Slot, layout};
use crate::os;

/// A replacement that has the job's environment and waits.
const IS_READY: u32 = 1;
/// A replacement that has the job's state.
const HAS_JOINED: u32 = 2;

/// A generation that ranks can form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    /// Grows; 0 is for the ranks that the job began with.
    pub number: u32,
    /// How many ranks it has, on all nodes.
    pub world: usize,
    /// The rank of the first slot; those of the others follow.
    pub first: usize,
    /// Its slots on this page, in the order of their ranks.
    pub members: Vec<usize>,
    /// Address of the store in which its ranks meet, if that is not the job's first.
    pub store: Option<String>,
    /// Whether its ranks wait for others before they go on, because the job has too few nodes.
    pub is_held: bool,
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

    /// Number of the newest generation, which may be an invitation.
    pub fn newest_generation(&self) -> u32 {
        self.header().generation.load(SeqCst)
    }

    /// Number of the newest generation that has begun.
    pub fn begun_generation(&self) -> u32 {
        self.header().begun.load(SeqCst)
    }

    /// Ends all generations that were published, invitations included; see [`end_generation`](Self::end_generation).
    pub fn end_generations(&self, culprit: impl Into<Option<usize>>) {
        self.end_generation(self.newest_generation(), culprit);
    }

    /// Ends all generations up to this one: from now on their operations fail. `culprit` is the rank because of which, if it
    /// is one.
    pub fn end_generation(&self, number: u32, culprit: impl Into<Option<usize>>) {
        let ended = layout::tagged(culprit.into(), number.saturating_add(1));
        self.header().ended.store(ended, SeqCst);
        self.changed();
    }

    /// Publishes the generation after the newest one, which has ended, with these slots and no other node. Returns its number.
    ///
    /// Only the launcher may call it.
    pub fn publish_generation(&self, members: &[usize]) -> u32 {
        let next = self.next_on_one_node(members);
        self.publish(&next);
        next.number
    }

    /// Publishes a generation of any nodes. It comes after the newest one, which has ended.
    ///
    /// Only the launcher may call it.
    pub fn publish(&self, next: &Generation) {
        self.write_generation(next);
        self.begin_generation(next.number);
    }

    /// Invites the ranks of the newest generation, which has begun, to form the one after it, with these slots and no other
    /// node. Returns its number.
    ///
    /// Only the launcher may call it.
    pub fn invite_generation(&self, members: &[usize]) -> u32 {
        let next = self.next_on_one_node(members);
        self.invite(&next);
        next.number
    }

    /// Invites the ranks of the newest generation, which has begun, to form a later one of any nodes.
    ///
    /// Only the launcher may call it.
    pub fn invite(&self, next: &Generation) {
        self.write_generation(next);
        self.changed();
    }

    fn next_on_one_node(&self, members: &[usize]) -> Generation {
        Generation {
            number: self.newest_generation().saturating_add(1),
            world: members.len(),
            first: 0,
            members: members.to_vec(),
            store: None,
            is_held: false,
        }
    }

    fn write_generation(&self, next: &Generation) {
        let number = next.number;
        let numbers = self.header().generations.each_ref();
        let begun = self.begun_generation();
        // Not over the one that has begun.
        let place = usize::from(numbers[0].number.load(SeqCst) == begun);
        let raw = numbers[place];
        raw.number.store(number, SeqCst);
        raw.world.store(next.world as u32, SeqCst);
        raw.store.write(next.store.as_deref().unwrap_or_default());
        for (rank, member) in (next.first..).zip(&next.members) {
            let word = layout::tagged(Some(rank), number);
            self.slot(*member).raw().member_of[place].store(word, SeqCst);
        }
        if next.is_held {
            self.header().held.store(number + 1, SeqCst);
        }
        self.header().generation.store(number, SeqCst);
    }

    /// Whether the ranks of this generation are to wait for others before they do the next step.
    pub fn is_held(&self, number: u32) -> bool {
        self.header().held.load(SeqCst) == number + 1
    }

    /// Has ranks that wait for others go on without them.
    ///
    /// Only the launcher may call it.
    pub fn release(&self) {
        self.header().held.store(0, SeqCst);
        self.changed();
    }

    /// Whether the launcher invites the ranks of this generation to form the next one. Two loads.
    pub fn is_invited(&self, number: u32) -> bool {
        self.newest_generation() > number && self.begun_generation() == number
    }

    /// Says in words why there will be this generation, for records of the job. Only the newest reason is kept.
    ///
    /// Only the launcher may call it, before it publishes the generation.
    pub fn explain_generation(&self, number: u32, why: &str) {
        let header = self.header();
        header.explained.store(0, SeqCst);
        header.why.write(why);
        header.explained.store(number, SeqCst);
    }

    /// Why there is this generation, in the launcher's words; `None` if it has said nothing, or has explained a later one.
    pub fn why_generation(&self, number: u32) -> Option<String> {
        let is_explained = || number > 0 && self.header().explained.load(SeqCst) == number;
        let why = is_explained().then(|| self.header().why.read());
        why.filter(|_| is_explained())
    }

    /// Says that the ranks of the previous generation have agreed to form this one. Any of them may say it, and all do.
    pub fn begin_generation(&self, number: u32) {
        let number = number.min(self.newest_generation());
        self.header().begun.fetch_max(number, SeqCst);
        self.changed();
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

    /// Sleeps until a generation after `after` has begun that has not ended. Nothing if the page is revoked first, or
    /// `timeout` is over.
    pub fn wait_generation(&self, after: u32, timeout: Duration) -> Option<Generation> {
        self.wait_for(timeout, || {
            self.current().filter(|current| current.number > after)
        })
    }

    fn wait_for<T>(&self, timeout: Duration, look: impl Fn() -> Option<T>) -> Option<T> {
        let started = Instant::now();
        loop {
            let seen = self.header().changes.load(SeqCst);
            if self.is_revoked() {
                return None;
            }
            if let Some(found) = look() {
                return Some(found);
            }
            let left = timeout.saturating_sub(started.elapsed());
            if left.is_zero() {
                return None;
            }
            os::futex_wait(&self.header().changes, seen, left);
        }
    }

    /// Sleeps until the launcher has invited the ranks of this generation, or published a later one. Returns the number of that
    /// one; nothing if the page is revoked first, or `timeout` is over.
    pub fn wait_invitation(&self, number: u32, timeout: Duration) -> Option<u32> {
        self.wait_for(timeout, || {
            let newest = self.newest_generation();
            // Once another rank has begun the next one, the launcher may invite to the one after it. Read last: that invitation is
            // written only when the first one has begun.
            let begun = self.begun_generation();
            let next = if begun > number { begun } else { newest };
            Some(next).filter(|next| *next > number)
        })
    }

    /// The newest generation that has begun, unless it is the first or has ended.
    fn current(&self) -> Option<Generation> {
        let header = self.header();
        loop {
            let numbers = || (header.generation.load(SeqCst), header.begun.load(SeqCst));
            let (newest, number) = numbers();
            let mut places = header.generations.iter();
            let place = places.position(|raw| raw.number.load(SeqCst) == number && number != 0)?;
            let rank_of = |slot: usize| {
                let word = self.0.slot(slot).member_of[place].load(SeqCst);
                let (rank, of) = layout::untagged(word);
                Some((rank.filter(|_| of == number)?, slot))
            };
            let mut members: Vec<_> = (0..self.slots()).filter_map(rank_of).collect();
            members.sort_unstable();
            let raw = &header.generations[place];
            let current = Generation {
                number,
                world: raw.world.load(SeqCst) as usize,
                first: members.first().map_or(0, |(rank, _)| *rank),
                members: members.into_iter().map(|(_, slot)| slot).collect(),
                store: Some(raw.store.read()).filter(|store| !store.is_empty()),
                is_held: self.is_held(number),
            };
            // The launcher writes over this generation only after it has ended, or after a later one has begun.
            let (_, below) = layout::untagged(header.ended.load(SeqCst));
            if number < below {
                return None;
            }
            if numbers() == (newest, number) {
                return Some(current);
            }
        }
    }

    /// Makes a slot ready for another process, in place of one that has ended.
    ///
    /// Only the launcher may call it.
    pub fn clear_slot(&self, index: usize) {
        self.slot(index).raw().clear();
    }

    /// Sleeps until generations have changed since there were `seen` changes, a rank waits for another one, or a process
    /// [has ended](Slot::has_let_go); at most for `timeout`. Returns how many changes there are.
    pub fn wait_changed(&self, seen: u32, timeout: Duration) -> u32 {
        let changes = &self.header().changes;
        let lives: Vec<_> = self.lives().collect();
        if changes.load(SeqCst) == seen {
            os::futex_wait_any((changes, seen), &lives, timeout);
            self.lives().for_each(drop);
        }
        changes.load(SeqCst)
    }

    /// Wakes those who wait for a generation, or for any [change](Self::wait_changed).
    pub fn changed(&self) {
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

    /// Says that this rank writes [`Phase::Finished`] before it ends well.
    pub fn set_finishes(&self) {
        self.raw().finishes.store(1, SeqCst);
    }

    /// Whether this rank has yet to write [`Phase::Finished`], as it said it would.
    pub fn is_unfinished(&self) -> bool {
        let phase = self.activity().map(|(activity, _)| activity.phase);
        self.raw().finishes.load(SeqCst) != 0 && phase != Some(Phase::Finished)
    }

    /// Says that this rank takes in replacements of lost ranks, when it is invited to.
    pub fn set_admits(&self) {
        self.raw().admits.store(1, SeqCst);
    }

    /// Whether this rank takes in replacements of lost ranks.
    pub fn admits(&self) -> bool {
        self.raw().admits.load(SeqCst) != 0
    }

    /// Says that this process replaces a lost rank, and that the others may invite it.
    pub fn set_ready_to_join(&self) {
        self.raw().joins.store(IS_READY, SeqCst);
    }

    /// Whether this process waits for an invitation, or has not the job's state yet.
    pub fn is_ready_to_join(&self) -> bool {
        self.raw().joins.load(SeqCst) == IS_READY
    }

    /// Says that this process, a replacement, has the job's state.
    pub fn set_joined(&self) {
        self.raw().joins.store(HAS_JOINED, SeqCst);
    }

    /// Whether this process has the job's state as a replacement.
    pub fn has_joined(&self) -> bool {
        self.raw().joins.load(SeqCst) == HAS_JOINED
    }

    /// Says that this rank's group of this generation has failed and that it waits for a later one; or that it no longer
    /// does. Wakes those who wait for a [change](JobPage::wait_changed).
    pub fn set_awaits(&self, failed: Option<u32>) {
        let word = failed.map_or(0, |number| number.saturating_add(1));
        self.raw().awaits.store(word, SeqCst);
        self.page.changed();
    }

    /// The generation whose successor this rank waits for.
    pub fn awaits(&self) -> Option<u32> {
        self.raw().awaits.load(SeqCst).checked_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(number: u32, members: &[usize]) -> Generation {
        Generation {
            number,
            world: members.len(),
            first: 0,
            members: members.to_vec(),
            store: None,
            is_held: false,
        }
    }

    #[test]
    fn a_generation_has_ranks_on_several_pages() {
        let pages = [3, 2].map(|slots| JobPage::private(slots).unwrap());
        let store = Some("node1:29500".to_owned());
        let parts = [(0, vec![0, 2]), (2, vec![1])].map(|(first, members)| Generation {
            number: 5,
            world: 3,
            first,
            members,
            store: store.clone(),
            is_held: false,
        });
        for (page, part) in pages.iter().zip(&parts) {
            page.end_generation(0, 4);
            page.publish(part);
            assert_eq!(page.current().as_ref(), Some(part));
        }
        // The second page hears of the next one later; its ranks have agreed already.
        let waits = |page: &JobPage| page.wait_invitation(5, Duration::ZERO);
        assert_eq!(waits(&pages[1]), None);
        let next = Generation {
            number: 9,
            world: 4,
            members: vec![0, 1],
            ..parts[1].clone()
        };
        pages[1].invite(&next);
        assert_eq!(waits(&pages[1]), Some(9));
        assert_eq!(pages[1].current().as_ref(), Some(&parts[1]));
        pages[1].begin_generation(9);
        assert_eq!(pages[1].current(), Some(next));
    }

    #[test]
    fn a_generation_is_held_until_it_is_released_and_the_next_one_by_itself() {
        let page = JobPage::private(2).unwrap();
        page.end_generation(0, 1);
        let held = Generation {
            is_held: true,
            ..of(3, &[0])
        };
        page.publish(&held);
        assert_eq!(page.current(), Some(held));
        page.invite(&of(4, &[0, 1]));
        page.begin_generation(4);
        assert!(page.is_held(3) && !page.is_held(4));
        page.release();
        assert!(!page.is_held(3));
    }

    #[test]
    fn the_newest_generation_is_explained_to_its_ranks() {
        let page = JobPage::private(2).unwrap();
        page.explain_generation(1, "rank 1 was killed");
        assert_eq!(page.why_generation(1).as_deref(), Some("rank 1 was killed"));
        page.explain_generation(2, &"ü".repeat(1000));
        let why = page.why_generation(2).unwrap();
        assert!(why.len() < 1000 && why.chars().all(|c| c == 'ü'), "{why}");
        assert_eq!(
            (page.why_generation(0), page.why_generation(1)),
            (None, None)
        );
    }

    #[test]
    fn a_generation_ends_for_good_and_the_next_one_has_the_ranks_that_are_left() {
        let page = JobPage::private(4).unwrap();
        page.end_generation(0, 2);
        assert_eq!(page.current(), None);
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
        let last = of(2, &[1, 3][..]);
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
        slot.set_victim_of(1, 3);
        assert_eq!(slot.victim_in(3), Some(0), "the first one counts");
        slot.set_victim_of(1, 4);
        assert_eq!((slot.victim_in(3), slot.victim_in(4)), (None, Some(1)));
        assert_eq!((slot.awaits(), slot.recovers()), (None, false));
        slot.set_awaits(Some(3));
        assert_eq!(slot.awaits(), Some(3));
        slot.set_awaits(None);
        assert_eq!(slot.awaits(), None);
    }

    #[test]
    fn an_invitation_leaves_the_generation_as_it_is_until_its_ranks_follow() {
        let page = JobPage::private(3).unwrap();
        page.end_generation(0, 1);
        page.publish_generation(&[0, 2]);
        let two = of(1, &[0, 2][..]);
        page.clear_slot(1);
        assert_eq!(page.invite_generation(&[0, 2, 1]), 2);
        assert_eq!(page.current(), Some(two));
        assert!(page.is_invited(1) && page.end_of_generation(1).is_none());
        assert_eq!((page.newest_generation(), page.begun_generation()), (2, 1));

        page.begin_generation(2);
        page.begin_generation(2);
        let all = of(2, &[0, 2, 1][..]);
        assert_eq!(page.wait_generation(1, Duration::ZERO), Some(all));
        assert!(!page.is_invited(1) && !page.is_invited(2));

        // A rank is lost while another invitation is out: both generations are over, and a rank that follows late changes nothing.
        page.invite_generation(&[0, 1, 2]);
        page.end_generation(3, 0);
        assert_eq!(page.current(), None);
        assert_eq!(page.publish_generation(&[1, 2]), 4);
        page.begin_generation(3);
        let left = of(4, &[1, 2][..]);
        assert_eq!(page.wait_generation(2, Duration::ZERO), Some(left));
    }

    #[test]
    fn a_slow_rank_follows_the_invitation_that_the_others_have_followed() {
        let page = JobPage::private(4).unwrap();
        page.publish_generation(&[1, 2]);
        assert_eq!(page.invite_generation(&[1, 2, 3]), 2);
        let next = || page.wait_invitation(1, Duration::ZERO);
        assert_eq!(next(), Some(2));
        page.begin_generation(2);
        assert_eq!(page.invite_generation(&[1, 2, 3, 0]), 3);
        assert_eq!(next(), Some(2));
        let with_one = of(2, &[1, 2, 3]);
        assert_eq!(page.wait_generation(1, Duration::ZERO), Some(with_one));
    }

    #[test]
    fn a_cleared_slot_says_nothing_of_the_process_before() {
        let page = JobPage::private(2).unwrap();
        let slot = page.slot(1);
        slot.raw().fill_for_test();
        slot.set_recovers();
        slot.set_admits();
        slot.set_joined();
        slot.set_timeout(Duration::from_secs(60));
        slot.set_finishes();
        slot.set_leaves_state();
        page.clear_slot(1);
        assert!(slot.activity().is_none() && slot.pid().is_none() && slot.rank().is_none());
        assert!(slot.victim_of().is_none() && slot.awaits().is_none() && slot.stopped().is_none());
        assert!(!slot.recovers() && !slot.admits() && !slot.is_ready_to_join());
        assert!(!slot.has_joined() && !slot.polls_stop() && !slot.is_misconfigured());
        assert!(slot.timeout().is_none() && !slot.is_unfinished() && !slot.leaves_state());
    }
}
