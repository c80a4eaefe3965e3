//! Messages that this rank has sent and that are not taken yet.

use std::collections::{HashMap, VecDeque};

use super::shelf::cost;
use crate::memory::Region;

/// Most that a rank may have sent through its own memory before the receivers have taken it; one message alone may be
/// longer.
///
/// *Units*: bytes, at least 4096 for each message.
pub(super) const SENT_BYTES_MAX: usize = 64 << 20;

/// Most memory that is kept for the next messages.
///
/// *Units*: bytes.
pub(super) const SPARE_BYTES_MAX: usize = 32 << 20;
/// Most pieces of memory that are kept: they are searched one by one.
const SPARE_MAX: usize = 64;

/// Messages by their numbers.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    last: u64,
    sent: HashMap<u64, Sent>,
    held: usize,
    /// Memory of messages that have been taken, the oldest first: its pages are in place on both sides, and to get new
    /// ones costs several times the copying.
    spare: VecDeque<Region>,
    spare_bytes: usize,
}

#[derive(Debug)]
struct Sent {
    to: usize,
    cost: usize,
    region: Option<Region>,
    /// Somebody wants the region back.
    ticket: bool,
    done: bool,
}

impl Ledger {
    /// Whether one more message of `bytes` bytes of this rank's memory may be on its way.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.held == 0 || self.held + cost(bytes) <= SENT_BYTES_MAX
    }

    /// Notes a message and returns its number. `bytes` is what it counts: nothing for a caller's own buffer.
    pub(super) fn open(&mut self, to: usize, bytes: usize, ticket: bool) -> u64 {
        self.last += 1;
        let cost = cost(bytes);
        self.held += cost;
        self.sent.insert(
            self.last,
            Sent {
                to,
                cost,
                region: None,
                ticket,
                done: false,
            },
        );
        self.last
    }

    /// Keeps the message's memory until it has been taken.
    pub(super) fn keep(&mut self, id: u64, region: Region) {
        if let Some(sent) = self.sent.get_mut(&id) {
            sent.region = Some(region);
        }
    }

    /// The receiver has taken a message. Says whether there was one.
    pub(super) fn taken(&mut self, id: u64, by: usize) -> bool {
        let Some(sent) = self
            .sent
            .get_mut(&id)
            .filter(|sent| sent.to == by && !sent.done)
        else {
            return false;
        };
        self.held -= std::mem::take(&mut sent.cost);
        sent.done = true;
        if !sent.ticket
            && let Some(region) = self.sent.remove(&id).and_then(|sent| sent.region)
        {
            self.put_by(region);
        }
        true
    }

    /// Memory of an earlier message for one of `bytes` bytes, if there is some that is not far too large.
    pub(super) fn reuse(&mut self, bytes: usize) -> Option<Region> {
        let fits = |region: &Region| region.bytes() >= bytes && region.bytes() / 4 <= cost(bytes);
        let spare = self.spare.iter().enumerate();
        let (at, _) = spare
            .filter(|(_, region)| fits(region))
            .min_by_key(|(_, region)| region.bytes())?;
        let region = self.spare.remove(at)?;
        self.spare_bytes -= region.bytes();
        Some(region)
    }

    fn put_by(&mut self, region: Region) {
        self.spare_bytes += region.bytes();
        self.spare.push_back(region);
        while self.spare_bytes > SPARE_BYTES_MAX || self.spare.len() > SPARE_MAX {
            let oldest = self.spare.pop_front();
            self.spare_bytes -= oldest.map_or(0, |region| region.bytes());
        }
    }

    pub(super) fn is_done(&self, id: u64) -> bool {
        self.sent.get(&id).is_none_or(|sent| sent.done)
    }

    /// The memory of a message that is done.
    pub(super) fn collect(&mut self, id: u64) -> Option<Region> {
        if !self.sent.get(&id)?.done {
            return None;
        }
        self.sent.remove(&id)?.region
    }

    /// Nobody wants the memory back any more; it is freed once the message has been taken.
    pub(super) fn disown(&mut self, id: u64) {
        if let Some(sent) = self.sent.get_mut(&id) {
            sent.ticket = false;
            if sent.done {
                self.sent.remove(&id);
            }
        }
    }

    /// What is on its way and counts, and what is kept for more.
    pub(super) fn bytes(&self) -> usize {
        self.held + self.spare_bytes
    }

    /// The ranks that have not taken something yet.
    pub(super) fn debtors(&self) -> Vec<usize> {
        let mut ranks: Vec<usize> = self
            .sent
            .values()
            .filter(|sent| !sent.done)
            .map(|sent| sent.to)
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// A rank is gone and takes nothing any more.
    pub(super) fn release(&mut self, to: usize) {
        let gone = |sent: &Sent| sent.to == to && !sent.done;
        let freed: usize = self
            .sent
            .values()
            .filter(|sent| gone(sent))
            .map(|sent| sent.cost)
            .sum();
        self.held -= freed;
        self.sent.retain(|_, sent| !gone(sent));
    }

    /// Gives up all memory that somebody may still read.
    pub(super) fn lose(&mut self) {
        let regions = self
            .sent
            .values_mut()
            .filter_map(|sent| sent.region.as_mut());
        regions.for_each(|region| region.lose(None));
        self.sent.clear();
        self.held = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_nobody_has_taken_counts() {
        let mut ledger = Ledger::default();
        assert!(ledger.has_room(usize::MAX / 2), "one alone always fits");
        let large = ledger.open(1, SENT_BYTES_MAX - 4096, false);
        assert!(ledger.has_room(0));
        let small = ledger.open(2, 0, false);
        assert!(!ledger.has_room(0));
        assert_eq!(ledger.debtors(), [1, 2]);
        assert!(!ledger.taken(large, 2), "it was for another rank");
        assert!(ledger.taken(large, 1) && !ledger.taken(large, 1));
        assert!(ledger.has_room(SENT_BYTES_MAX - 4096) && !ledger.has_room(SENT_BYTES_MAX));
        ledger.release(2);
        assert!(ledger.is_done(small) && ledger.has_room(SENT_BYTES_MAX));
    }

    #[test]
    fn memory_is_used_again_for_messages_of_about_its_size() {
        let mut ledger = Ledger::default();
        for bytes in [4096, 1 << 20, 2 << 20] {
            ledger.put_by(Region::heap(bytes).unwrap());
        }
        assert!(ledger.reuse(3 << 20).is_none());
        assert_eq!(ledger.reuse(1 << 20).unwrap().bytes(), 1 << 20);
        assert_eq!(ledger.reuse(1 << 20).unwrap().bytes(), 2 << 20);
        assert_eq!(ledger.reuse(1).unwrap().bytes(), 4096);
        for bytes in [SPARE_BYTES_MAX + 1, 1 << 20, SPARE_BYTES_MAX - 4096] {
            ledger.put_by(Region::heap(bytes).unwrap());
        }
        assert!(ledger.reuse(SPARE_BYTES_MAX + 1).is_none() && ledger.reuse(1 << 20).is_none());
        assert!(ledger.reuse(SPARE_BYTES_MAX / 2).is_some());
        assert_eq!(ledger.spare_bytes, 0);
    }

    #[test]
    fn a_buffer_comes_back_to_its_ticket_and_to_nobody_else() {
        let mut ledger = Ledger::default();
        let ids = [0, 1].map(|_| {
            let id = ledger.open(1, 0, true);
            ledger.keep(id, Region::heap(8).unwrap());
            id
        });
        assert!(ledger.collect(ids[0]).is_none());
        assert!(ledger.taken(ids[0], 1));
        assert!(ledger.collect(ids[0]).is_some());
        ledger.disown(ids[1]);
        assert!(ledger.taken(ids[1], 1) && ledger.collect(ids[1]).is_none());
    }
}
