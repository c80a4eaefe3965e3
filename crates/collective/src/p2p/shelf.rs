//! What has arrived and what is waited for: which message goes to which receive. No threads, no clocks.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::frame::Label;
use crate::flight::Unclaimed;
use crate::memory::{Region, Segment};

/// A message that has arrived.
#[derive(Debug)]
pub(super) struct P2pMessage {
    pub(super) from: usize,
    pub(super) label: Label,
    pub(super) body: Body,
}

/// Where the data of a message is.
#[derive(Debug)]
pub(super) enum Body {
    /// In this rank's own memory.
    Here(Region),
    /// In the sender's segment; the sender is told when it has been taken.
    There {
        segment: Arc<Segment>,
        id: u64,
        offset: usize,
    },
}

/// Least that a message counts, so that many empty ones are bounded too.
///
/// *Units*: bytes.
const COST_BYTES_MIN: usize = 4096;

/// What a message of so many bytes counts towards the bounds on untaken messages.
pub(super) fn cost(bytes: usize) -> usize {
    bytes.max(COST_BYTES_MIN)
}

/// A posted receive.
#[derive(Debug)]
struct Claim {
    id: u64,
    from: Option<usize>,
    tag: u32,
}

impl Claim {
    fn wants(&self, message: &P2pMessage) -> bool {
        self.tag == message.label.tag && self.from.is_none_or(|from| from == message.from)
    }
}

/// Matches messages with receives, both in their order.
#[derive(Debug)]
pub(super) struct Shelf {
    /// Messages that no receive wants yet, by source and tag, each with its running number.
    waiting: HashMap<(usize, u32), VecDeque<(u64, P2pMessage)>>,
    arrivals: u64,
    claims: Vec<Claim>,
    next_claim: u64,
    /// Messages that have their receive, by its number.
    matched: HashMap<u64, P2pMessage>,
    /// Bytes of each rank's untaken messages.
    ///
    /// *Units*: bytes, at least 4096 for each message.
    held: Vec<usize>,
    /// How many messages that are.
    count: Vec<usize>,
    /// Ranks from which nothing more comes.
    ended: Vec<bool>,
}

impl Shelf {
    pub(super) fn new(world: usize) -> Self {
        Self {
            waiting: HashMap::new(),
            arrivals: 0,
            claims: Vec::new(),
            next_claim: 0,
            matched: HashMap::new(),
            held: vec![0; world],
            count: vec![0; world],
            ended: vec![false; world],
        }
    }

    /// A message has arrived: it goes to the oldest receive that wants it.
    pub(super) fn deliver(&mut self, message: P2pMessage) {
        self.held[message.from] += cost(message.label.bytes());
        self.count[message.from] += 1;
        match self.claims.iter().position(|claim| claim.wants(&message)) {
            Some(at) => {
                let claim = self.claims.remove(at);
                self.matched.insert(claim.id, message);
            }
            None => {
                self.arrivals += 1;
                let key = (message.from, message.label.tag);
                let queue = self.waiting.entry(key).or_default();
                queue.push_back((self.arrivals, message));
            }
        }
    }

    /// Posts a receive: it gets the oldest message that it wants, now or later. Returns its number.
    pub(super) fn post(&mut self, from: Option<usize>, tag: u32) -> u64 {
        self.next_claim += 1;
        let id = self.next_claim;
        let sources = match from {
            Some(from) => from..from + 1,
            None => 0..self.held.len(),
        };
        let oldest = sources
            .filter_map(|from| Some((self.waiting.get(&(from, tag))?.front()?.0, from)))
            .min();
        let message = oldest.and_then(|(_, from)| {
            let queue = self.waiting.get_mut(&(from, tag))?;
            let message = queue.pop_front();
            if queue.is_empty() {
                self.waiting.remove(&(from, tag));
            }
            message
        });
        match message {
            Some((_, message)) => {
                self.matched.insert(id, message);
            }
            None => self.claims.push(Claim { id, from, tag }),
        }
        id
    }

    /// The message of a receive, once it is there.
    pub(super) fn take(&mut self, claim: u64) -> Option<P2pMessage> {
        let message = self.matched.remove(&claim)?;
        self.held[message.from] -= cost(message.label.bytes());
        self.count[message.from] -= 1;
        Some(message)
    }

    pub(super) fn is_matched(&self, claim: u64) -> bool {
        self.matched.contains_key(&claim)
    }

    /// Gives a receive up; the message that it already had goes with it.
    pub(super) fn withdraw(&mut self, claim: u64) -> Option<P2pMessage> {
        self.claims.retain(|other| other.id != claim);
        self.take(claim)
    }

    /// Whether a message of so many bytes fits beside what the rank has sent already; one alone always does.
    pub(super) fn has_room(&self, from: usize, bytes: usize, held_max: usize) -> bool {
        self.held[from] == 0 || self.held[from].saturating_add(cost(bytes)) <= held_max
    }

    /// Bytes of all ranks' untaken messages.
    pub(super) fn bytes(&self) -> usize {
        self.held.iter().sum()
    }

    /// Untaken messages of a rank.
    pub(super) fn count(&self, from: usize) -> usize {
        self.count[from]
    }

    /// Messages that no receive has asked for, in order; at most `most` sources and tags.
    pub(super) fn unclaimed(&self, most: usize) -> Vec<Unclaimed> {
        let mut keys: Vec<(usize, u32, usize)> = self
            .waiting
            .iter()
            .map(|((from, tag), queue)| (*from, *tag, queue.len()))
            .collect();
        keys.sort_unstable();
        let unclaimed = keys.into_iter().map(|(from, tag, messages)| Unclaimed {
            from: from as u64,
            tag: u64::from(tag),
            messages: messages as u64,
        });
        unclaimed.take(most).collect()
    }

    pub(super) fn end(&mut self, from: usize) {
        self.ended[from] = true;
    }

    pub(super) fn has_ended(&self, from: usize) -> bool {
        self.ended[from]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The length serves as the message's name.
    fn message(from: usize, tag: u32, name: usize) -> P2pMessage {
        let label = Label {
            tag,
            dtype: None,
            len: name,
        };
        let body = Body::Here(Region::heap(0).unwrap());
        P2pMessage { from, label, body }
    }

    fn name(shelf: &mut Shelf, claim: u64) -> Option<usize> {
        shelf.take(claim).map(|message| message.label.len)
    }

    #[test]
    fn one_tag_keeps_its_order_and_another_overtakes() {
        let mut shelf = Shelf::new(2);
        for (tag, name) in [(7, 1), (7, 2), (8, 3)] {
            shelf.deliver(message(1, tag, name));
        }
        let lie: Vec<_> = shelf
            .unclaimed(9)
            .iter()
            .map(|lies| (lies.from, lies.tag, lies.messages))
            .collect();
        assert_eq!(lie, [(1, 7, 2), (1, 8, 1)]);
        assert_eq!(shelf.unclaimed(1).len(), 1);
        let other = shelf.post(Some(1), 8);
        assert_eq!(name(&mut shelf, other), Some(3));
        let (first, second) = (shelf.post(Some(1), 7), shelf.post(Some(1), 7));
        assert_eq!(name(&mut shelf, second), Some(2));
        assert_eq!(name(&mut shelf, first), Some(1));
    }

    #[test]
    fn receives_that_wait_are_served_in_the_order_of_posting() {
        let mut shelf = Shelf::new(3);
        let (any, one) = (shelf.post(None, 7), shelf.post(Some(1), 7));
        shelf.deliver(message(1, 7, 1));
        assert!(shelf.is_matched(any) && !shelf.is_matched(one));
        shelf.deliver(message(2, 7, 2));
        assert!(!shelf.is_matched(one));
        shelf.deliver(message(1, 7, 3));
        assert_eq!(
            (name(&mut shelf, any), name(&mut shelf, one)),
            (Some(1), Some(3))
        );
    }

    #[test]
    fn any_source_means_the_message_that_came_first() {
        let mut shelf = Shelf::new(3);
        shelf.deliver(message(2, 7, 1));
        shelf.deliver(message(0, 7, 2));
        let claims = [shelf.post(None, 7), shelf.post(None, 7)];
        assert_eq!(
            claims.map(|claim| name(&mut shelf, claim)),
            [Some(1), Some(2)]
        );
    }

    #[test]
    fn a_receive_that_is_given_up_leaves_later_messages_to_others() {
        let mut shelf = Shelf::new(2);
        let (first, second) = (shelf.post(Some(1), 7), shelf.post(Some(1), 7));
        assert!(shelf.withdraw(first).is_none());
        shelf.deliver(message(1, 7, 1));
        assert_eq!(name(&mut shelf, second), Some(1));
    }

    #[test]
    fn what_nobody_has_taken_is_counted_for_each_rank() {
        let mut shelf = Shelf::new(2);
        assert!(shelf.has_room(1, 1 << 30, 10_000), "one alone always fits");
        shelf.deliver(message(1, 7, 0));
        assert!(shelf.has_room(1, 0, 8192) && !shelf.has_room(1, 4097, 8192));
        assert!(shelf.has_room(0, 1 << 30, 8192));
        let claim = shelf.post(Some(1), 7);
        assert!(!shelf.has_room(1, 4097, 8192), "matched is not taken");
        shelf.take(claim).unwrap();
        assert!(shelf.has_room(1, 1 << 30, 8192));
    }
}
