//! First in, first out, under names: what was pushed and not taken yet.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::Value;

/// One pushed value and its place in the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::store) struct Item {
    /// Grows with every push, so that an item that is put back finds its place.
    place: u64,
    pub(in crate::store) value: Value,
}

/// All queues. An empty one does not exist.
#[derive(Default)]
pub(super) struct Queues {
    queues: HashMap<Box<str>, VecDeque<Item>>,
    pushed: u64,
}

impl Queues {
    /// Items in the queue then.
    pub(super) fn push(&mut self, key: &str, value: &[u8]) -> usize {
        self.pushed += 1;
        let item = Item {
            place: self.pushed,
            value: Arc::new(value.to_vec()),
        };
        let queue = self.queue(key);
        queue.push_back(item);
        queue.len()
    }

    pub(super) fn pop(&mut self, key: &str) -> Option<Item> {
        let queue = self.queues.get_mut(key)?;
        let item = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(key);
        }
        item
    }

    /// Several clients may give items back in any order.
    pub(super) fn put_back(&mut self, key: &str, item: Item) {
        let queue = self.queue(key);
        let index = queue.partition_point(|other| other.place < item.place);
        queue.insert(index, item);
    }

    pub(super) fn len(&self, key: &str) -> usize {
        self.queues.get(key).map_or(0, VecDeque::len)
    }

    #[cfg(test)]
    pub(super) fn values(&self) -> impl Iterator<Item = (&str, &Value)> {
        let queues = self.queues.iter();
        queues.flat_map(|(key, queue)| queue.iter().map(move |item| (&**key, &item.value)))
    }

    fn queue(&mut self, key: &str) -> &mut VecDeque<Item> {
        self.queues.entry(key.into()).or_default()
    }
}
