//! The store's contents and the effect of each request: no sockets, no clock, no waiting.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::Arc;

use super::wire::{BODY_BYTES_MAX, CONTROL_BYTES_MAX, Reply, Request, Value};

/// Overhead of an entry beside its key and value, so that many empty ones are bounded too, each in a folder of its own.
const ENTRY_BYTES: usize = 192;

/// Keys and values, of bounded total size.
pub(super) struct Table {
    /// In order, so that the keys under a prefix are neighbours.
    entries: BTreeMap<Box<str>, Value>,
    /// How many keys each folder has; empty ones are not here.
    folders: HashMap<Box<str>, usize>,
    /// Values that have left the table while an answer still carries them: they still take memory.
    leaving: Vec<Value>,
    bytes: usize,
    bytes_max: usize,
}

/// The outcome of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It is answered.
    Answer(Reply),
    /// It is answered, and its keys now have values: connections that wait for them go on.
    Appeared(Reply),
    /// It waits until these keys are there.
    Wait {
        missing: Vec<String>,
        timeout_ms: u64,
    },
}

impl Table {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            entries: BTreeMap::new(),
            folders: HashMap::new(),
            leaving: Vec::new(),
            bytes: 0,
            bytes_max,
        }
    }

    /// Memory in use, by the table's own reckoning.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn get(&self, key: &str) -> Option<Value> {
        self.entries.get(key).cloned()
    }

    /// Carries out a request. torch's TCPStore sets the meaning of `add` and `compare_set`.
    pub(super) fn apply(&mut self, request: &Request<'_>) -> Outcome {
        match request {
            Request::Set { key, value } => self.store(key, value, Reply::Done),
            Request::Get { timeout_ms, key } => match self.get(key) {
                Some(value) => Outcome::Answer(Reply::Value(value)),
                None => wait_for(vec![(*key).to_owned()], *timeout_ms),
            },
            Request::Wait { timeout_ms, keys } => match self.missing(keys) {
                missing if missing.is_empty() => Outcome::Answer(Reply::Done),
                missing => wait_for(missing, *timeout_ms),
            },
            Request::MultiGet { timeout_ms, keys } => match self.values(keys) {
                Ok(answer) => Outcome::Answer(answer),
                Err(missing) => wait_for(missing, *timeout_ms),
            },
            Request::Check { keys } => {
                let all = keys.iter().all(|key| self.entries.contains_key(*key));
                Outcome::Answer(Reply::Flag(all))
            }
            Request::Add { key, amount } => self.add(key, *amount),
            Request::CompareSet { key, expected, new } => self.compare_set(key, expected, new),
            Request::Delete { key } => Outcome::Answer(Reply::Flag(self.delete(key))),
            Request::List { most, prefix } => Outcome::Answer(self.list(prefix, *most as usize)),
            Request::MultiSet { entries } => self.multi_set(entries),
            Request::Count { folder } => {
                let keys = self.folders.get(*folder).copied().unwrap_or(0);
                Outcome::Answer(Reply::Number(keys as i64))
            }
        }
    }

    /// The values of keys, or the keys that have none.
    pub(super) fn values<K: AsRef<str>>(&self, keys: &[K]) -> Result<Reply, Vec<String>> {
        let missing = self.missing(keys);
        if !missing.is_empty() {
            return Err(missing);
        }
        let values: Vec<Value> = keys
            .iter()
            .filter_map(|key| self.get(key.as_ref()))
            .collect();
        let bytes = values_body_bytes(&values);
        if bytes > BODY_BYTES_MAX {
            return Ok(Reply::TooLarge {
                bytes: bytes as u64,
            });
        }
        Ok(Reply::Values(values))
    }

    /// The value is ASCII decimal; a missing key counts as 0.
    fn add(&mut self, key: &str, amount: i64) -> Outcome {
        let current = match self.entries.get(key) {
            None => Some(0),
            Some(value) => std::str::from_utf8(value)
                .ok()
                .and_then(|text| text.parse::<i64>().ok()),
        };
        match current.and_then(|current| current.checked_add(amount)) {
            Some(sum) => self.store(key, sum.to_string().as_bytes(), Reply::Number(sum)),
            None => Outcome::Answer(Reply::NoNumber),
        }
    }

    fn compare_set(&mut self, key: &str, expected: &[u8], new: &[u8]) -> Outcome {
        match self.entries.get(key) {
            Some(current) if **current != *expected => {
                Outcome::Answer(Reply::Value(current.clone()))
            }
            None if !expected.is_empty() => {
                Outcome::Answer(Reply::Value(Arc::new(expected.to_vec())))
            }
            _ => match self.store(key, new, Reply::Done) {
                Outcome::Appeared(_) => Outcome::Appeared(Reply::Value(self.entries[key].clone())),
                full => full,
            },
        }
    }

    fn store(&mut self, key: &str, value: &[u8], answer: Reply) -> Outcome {
        let old = self.entries.get(key);
        let old_cost = old.map_or(0, |old| cost(key, old.capacity()));
        // A value that an answer still carries is not free yet.
        let is_carried = old.is_some_and(|old| Arc::strong_count(old) > 1);
        let freed = if is_carried { 0 } else { old_cost };
        if !self.has_room(freed, cost(key, value.len())) {
            return Outcome::Answer(Reply::Full);
        }
        let value = Arc::new(value.to_vec());
        self.bytes += cost(key, value.capacity());
        self.bytes -= old_cost;
        if let Some(slot) = self.entries.get_mut(key) {
            let old = std::mem::replace(slot, value);
            self.leave(old);
        } else {
            self.entries.insert(key.into(), value);
            *self.folders.entry(folder(key).into()).or_default() += 1;
        }
        Outcome::Appeared(answer)
    }

    /// All or nothing.
    fn multi_set(&mut self, entries: &[(&str, &[u8])]) -> Outcome {
        // Memory that old values free is not counted: a key may come twice.
        let wanted = entries.iter().map(|(key, value)| cost(key, value.len()));
        if !self.has_room(0, wanted.sum()) {
            return Outcome::Answer(Reply::Full);
        }
        for (key, value) in entries {
            self.store(key, value, Reply::Done);
        }
        Outcome::Appeared(Reply::Done)
    }

    fn delete(&mut self, key: &str) -> bool {
        let Some(value) = self.entries.remove(key) else {
            return false;
        };
        self.bytes -= cost(key, value.capacity());
        self.leave(value);
        if let Some(keys) = self.folders.get_mut(folder(key)) {
            *keys -= 1;
            if *keys == 0 {
                self.folders.remove(folder(key));
            }
        }
        true
    }

    /// At most `most` keys, and no more than fit a message.
    fn list(&self, prefix: &str, most: usize) -> Reply {
        let (mut keys, mut bytes) = (Vec::new(), 16);
        for key in self.under(prefix) {
            bytes += 2 + key.len();
            if keys.len() == most || bytes > CONTROL_BYTES_MAX {
                return Reply::Keys { keys, more: true };
            }
            keys.push(key.to_owned());
        }
        Reply::Keys { keys, more: false }
    }

    fn under<'t>(&'t self, prefix: &'t str) -> impl Iterator<Item = &'t str> {
        self.entries
            .range::<str, _>((Bound::Included(prefix), Bound::Unbounded))
            .map(|(key, _)| &**key)
            .take_while(move |key| key.starts_with(prefix))
    }

    fn missing<K: AsRef<str>>(&self, keys: &[K]) -> Vec<String> {
        let keys = keys.iter().map(AsRef::as_ref);
        let absent = keys.filter(|key| !self.entries.contains_key(*key));
        absent.map(str::to_owned).collect()
    }

    /// Whether `wanted` bytes fit once `freed` are given back.
    fn has_room(&mut self, freed: usize, wanted: usize) -> bool {
        if self.bytes - freed + wanted > self.bytes_max {
            self.sweep();
        }
        self.bytes - freed + wanted <= self.bytes_max
    }

    /// Keeps counting a value that an answer still carries.
    fn leave(&mut self, value: Value) {
        // Small ones are copied into answers; see `outbox.rs`.
        if Arc::strong_count(&value) > 1 {
            self.bytes += value.capacity();
            self.leaving.push(value);
            self.sweep();
        }
    }

    /// Stops counting values that no answer carries any more.
    pub(super) fn sweep(&mut self) {
        let bytes = &mut self.bytes;
        self.leaving.retain(|value| {
            let is_carried = Arc::strong_count(value) > 1;
            if !is_carried {
                *bytes -= value.capacity();
            }
            is_carried
        });
    }
}

/// Length of the body that carries these values.
pub(super) fn values_body_bytes(values: &[Value]) -> usize {
    5 + values.iter().map(|value| 4 + value.len()).sum::<usize>()
}

fn wait_for(missing: Vec<String>, timeout_ms: u64) -> Outcome {
    Outcome::Wait {
        missing,
        timeout_ms,
    }
}

/// What a key's name has before its last slash.
fn folder(key: &str) -> &str {
    key.rsplit_once('/').map_or("", |(folder, _)| folder)
}

fn cost(key: &str, value_bytes: usize) -> usize {
    key.len() + value_bytes + ENTRY_BYTES
}

#[cfg(test)]
mod tests;
