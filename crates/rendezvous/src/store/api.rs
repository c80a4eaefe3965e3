//! What every store can do, wherever its keys are.

use std::sync::Arc;
use std::time::Duration;

use super::StoreError;

/// Keys and values that the ranks of a job share, and queues between them.
///
/// Implemented by [`Client`](super::Client) (over TCP), [`LocalStore`](super::LocalStore) (threads of one process),
/// [`PrefixStore`](super::PrefixStore) (a part of another store) and [`TorchStore`](super::TorchStore) (torch's
/// TCPStore). Every operation is atomic. Keys and queues have separate names.
///
/// *Blocks*: operations with a timeout wait until then for what is missing; with a timeout of zero they look once.
/// *Errors*: [`StoreError::TimedOut`] names what is missing; [`StoreError::Full`] when the store is at its bound.
/// *Source*: the operations of torch's TCPStore, with a deadline per call in place of one per store.
///
/// ```
/// use std::time::Duration;
/// use paceline_rendezvous::store::{LocalStore, PrefixStore, Store};
///
/// fn barrier(store: &dyn Store, world: i64, timeout: Duration) -> Result<(), Box<dyn std::error::Error>> {
///     if store.add("arrived", 1)? == world {
///         store.set("all", b"")?;
///     }
///     Ok(store.wait(&["all"], timeout)?)
/// }
///
/// let store = PrefixStore::new(LocalStore::new(), "step/7");
/// barrier(&store, 1, Duration::from_secs(1))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Store: Send + Sync {
    /// Sets a key.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError>;

    /// The value of a key.
    ///
    /// *Blocks*: until the key exists, at most for `timeout`.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError>;

    /// Waits until all keys exist.
    ///
    /// *Blocks*: at most for `timeout`; the error names the keys that are missing then.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError>;

    /// Whether all keys exist now.
    fn check(&self, keys: &[&str]) -> Result<bool, StoreError>;

    /// Adds to a number and returns the sum. A missing key counts as 0; values are ASCII decimal.
    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError>;

    /// Sets a key to `new` if its value is `expected`, and returns the value it has then.
    ///
    /// A missing key is set when `expected` is empty; otherwise `expected` is returned and nothing is set.
    fn compare_set(&self, key: &str, expected: &[u8], new: &[u8]) -> Result<Vec<u8>, StoreError>;

    /// Removes a key; whether it was there.
    fn delete(&self, key: &str) -> Result<bool, StoreError>;

    /// Puts bytes behind a key's value and returns its length then. A missing key counts as empty.
    ///
    /// *Errors*: [`StoreError::ValueTooLarge`] when the value would outgrow its bound; it stays as it was.
    fn append(&self, key: &str, more: &[u8]) -> Result<usize, StoreError>;

    /// The first `most` keys that begin with `prefix`, in the order of their bytes; fewer when their names together
    /// are longer than 1 MiB.
    fn list(&self, prefix: &str, most: usize) -> Result<KeyList, StoreError>;

    /// The values of several keys at one moment.
    ///
    /// *Blocks*: until all exist, at most for `timeout`.
    /// *Errors*: [`StoreError::AnswerTooLarge`] when the values together do not fit one message.
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>, StoreError>;

    /// Sets several keys at one moment, or none of them.
    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<(), StoreError>;

    /// Puts a value at the end of a queue and returns how many are in it then.
    fn queue_push(&self, queue: &str, value: &[u8]) -> Result<usize, StoreError>;

    /// Takes the first value of a queue. No other caller gets it; whoever asked first is served first.
    ///
    /// *Blocks*: until the queue has one, at most for `timeout`.
    /// *Errors*: a value is only lost when the connection breaks in the moment in which this caller takes it; then
    /// [`StoreError::Lost`] or [`StoreError::NoAnswer`] is returned. One who dies while it waits takes nothing along.
    fn queue_pop(&self, queue: &str, timeout: Duration) -> Result<Vec<u8>, StoreError>;

    /// How many values are in a queue now.
    fn queue_len(&self, queue: &str) -> Result<usize, StoreError>;

    /// How many keys begin with `prefix`; all, for an empty one.
    ///
    /// *Cost*: the number of these keys, except for an empty prefix.
    fn num_keys(&self, prefix: &str) -> Result<usize, StoreError>;
}

/// Keys under a prefix.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KeyList {
    /// Their whole names, in the order of their bytes.
    pub keys: Vec<String>,
    /// Whether there are more than these.
    pub more: bool,
}

/// Implements [`Store`] for a type by the methods of the same names of another.
macro_rules! forward_store {
    ([$($generics:tt)*] $type:ty, <$inner:ty $(as $calls:ident)?>, $this:ident => $deref:expr) => {
        impl<$($generics)*> $crate::store::Store for $type {
            fn set(&self, key: &str, value: &[u8]) -> Result<(), $crate::store::StoreError> {
                let $this = self;
                <$inner $(as $calls)?>::set($deref, key, value)
            }

            fn get(
                &self,
                key: &str,
                timeout: std::time::Duration,
            ) -> Result<Vec<u8>, $crate::store::StoreError> {
                let $this = self;
                <$inner $(as $calls)?>::get($deref, key, timeout)
            }

            fn wait(
                &self,
                keys: &[&str],
                timeout: std::time::Duration,
            ) -> Result<(), $crate::store::StoreError> {
                let $this = self;
                <$inner $(as $calls)?>::wait($deref, keys, timeout)
            }

            fn check(&self, keys: &[&str]) -> Result<bool, $crate::store::StoreError> {
                let $this = self;
                <$inner $(as $calls)?>::check($deref, keys)
            }

            fn add(&self, key: &str, amount: i64) -> Result<i64, $crate::store::StoreError> {
                let $this = self;
                <$inner $(as $calls)?>::add($deref, key, amount)
            }

            fn compare_set(
                &self,
                key: &str,
                expected: &[u8],
                new: &[u8],
            ) -> Result<Vec<u8>, $crate::store::StoreError> {
                let $this = self;
                <$inner $(as $calls)?>::compare_set($deref, key, expected, new)
            }

            fn delete(&self, key: &str) -> Result<bool, $crate::store::StoreError> {
                let $this = self;
                <$inner $(as $calls)?>::delete($deref, key)
            }

            fn append(
                &self,
                key: &str,
                more: &[u8],
            ) -> Result<usize, $crate::store::StoreError> {
                let $this = self;
                <$inner $(as $calls)?>::append($deref, key, more)
            }

            fn list(
                &self,
                prefix: &str,
                most: usize,
            ) -> Result<$crate::store::KeyList, $crate::store::StoreError> {
                let $this = self;
                <$inner $(as $calls)?>::list($deref, prefix, most)
            }

            fn multi_get(
                &self,
                keys: &[&str],
                timeout: std::time::Duration,
            ) -> Result<Vec<Vec<u8>>, $crate::store::StoreError> {
                let $this = self;
                <$inner $(as $calls)?>::multi_get($deref, keys, timeout)
            }

            fn multi_set(
                &self,
                entries: &[(&str, &[u8])],
            ) -> Result<(), $crate::store::StoreError> {
                let $this = self;
                <$inner $(as $calls)?>::multi_set($deref, entries)
            }

            fn queue_push(
                &self,
                queue: &str,
                value: &[u8],
            ) -> Result<usize, $crate::store::StoreError> {
                let $this = self;
                <$inner $(as $calls)?>::queue_push($deref, queue, value)
            }

            fn queue_pop(
                &self,
                queue: &str,
                timeout: std::time::Duration,
            ) -> Result<Vec<u8>, $crate::store::StoreError> {
                let $this = self;
                <$inner $(as $calls)?>::queue_pop($deref, queue, timeout)
            }

            fn queue_len(&self, queue: &str) -> Result<usize, $crate::store::StoreError> {
                let $this = self;
                <$inner $(as $calls)?>::queue_len($deref, queue)
            }

            fn num_keys(&self, prefix: &str) -> Result<usize, $crate::store::StoreError> {
                let $this = self;
                <$inner $(as $calls)?>::num_keys($deref, prefix)
            }
        }
    };
}
pub(super) use forward_store;

forward_store!([S: Store + ?Sized] &S, <S>, this => *this);
forward_store!([S: Store + ?Sized] Arc<S>, <S>, this => &**this);
forward_store!([S: Store + ?Sized] Box<S>, <S>, this => &**this);
