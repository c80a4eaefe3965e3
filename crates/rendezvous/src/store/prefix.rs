//! A part of another store, under a name of its own.

use std::time::Duration;

use super::{KeyList, Store, StoreError};

/// Puts `prefix/` before every key, so that users of one store do not meet.
///
/// Errors name the whole keys, as they are in the store underneath.
///
/// *Source*: torch's PrefixStore; `list` sees this part alone.
#[derive(Debug, Clone)]
pub struct PrefixStore<S> {
    store: S,
    /// With the slash.
    prefix: String,
}

impl<S: Store> PrefixStore<S> {
    /// The part of `store` under `prefix/`.
    pub fn new(store: S, prefix: &str) -> Self {
        Self {
            store,
            prefix: format!("{prefix}/"),
        }
    }

    fn whole(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn with_whole<T>(&self, keys: &[&str], act: impl FnOnce(&[&str]) -> T) -> T {
        let keys: Vec<String> = keys.iter().map(|key| self.whole(key)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        act(&keys)
    }
}

impl<S: Store> Store for PrefixStore<S> {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.store.set(&self.whole(key), value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.store.get(&self.whole(key), timeout)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError> {
        self.with_whole(keys, |keys| self.store.wait(keys, timeout))
    }

    fn check(&self, keys: &[&str]) -> Result<bool, StoreError> {
        self.with_whole(keys, |keys| self.store.check(keys))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        self.store.add(&self.whole(key), amount)
    }

    fn compare_set(&self, key: &str, expected: &[u8], new: &[u8]) -> Result<Vec<u8>, StoreError> {
        self.store.compare_set(&self.whole(key), expected, new)
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        self.store.delete(&self.whole(key))
    }

    fn list(&self, prefix: &str, most: usize) -> Result<KeyList, StoreError> {
        let mut list = self.store.list(&self.whole(prefix), most)?;
        for key in &mut list.keys {
            if key.starts_with(&self.prefix) {
                key.drain(..self.prefix.len());
            }
        }
        Ok(list)
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>, StoreError> {
        self.with_whole(keys, |keys| self.store.multi_get(keys, timeout))
    }

    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<(), StoreError> {
        let keys: Vec<&str> = entries.iter().map(|entry| entry.0).collect();
        self.with_whole(&keys, |keys| {
            let values = entries.iter().map(|entry| entry.1);
            let entries: Vec<(&str, &[u8])> = keys.iter().copied().zip(values).collect();
            self.store.multi_set(&entries)
        })
    }
}
