//! A store for the threads of one process: no sockets, the same operations, the same bounds.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use super::api::forward_store;
use super::calls::{Calls, accept};
use super::table::{Answer, Outcome, Table};
use super::wire::{Reply, Request};
use super::{ServerOptions, StoreError};
use crate::net::deadline_after;

/// What errors say in place of host and port.
const HERE: &str = "in this process";

/// A store in this process; a clone is another handle to the same keys.
///
/// *Blocks*: waiting threads sleep until a key or a queue's item comes.
///
/// ```
/// use std::thread;
/// use std::time::Duration;
/// use paceline_rendezvous::store::{LocalStore, Store};
///
/// let store = LocalStore::new();
/// let other = store.clone();
/// let reader = thread::spawn(move || other.get("key", Duration::from_secs(5)));
/// store.set("key", b"value")?;
/// assert_eq!(reader.join().unwrap()?, b"value");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct LocalStore {
    shared: Arc<Shared>,
}

struct Shared {
    table: Mutex<Table>,
    /// Keys or items have come.
    changed: Condvar,
}

impl LocalStore {
    /// An empty store with the bound that a server has by default.
    pub fn new() -> Self {
        Self::with_bytes_max(ServerOptions::default().bytes_max)
    }

    /// An empty store of at most `bytes_max` bytes of keys, values and queues.
    pub fn with_bytes_max(bytes_max: usize) -> Self {
        Self {
            shared: Arc::new(Shared {
                table: Mutex::new(Table::new(bytes_max)),
                changed: Condvar::new(),
            }),
        }
    }
}

impl Default for LocalStore {
    fn default() -> Self {
        Self::new()
    }
}

impl Calls for LocalStore {
    fn call<T>(
        &self,
        request: &Request<'_>,
        read: impl FnOnce(Reply<'_>) -> Option<T>,
    ) -> Result<T, StoreError> {
        request.check_bounds()?;
        let started = Instant::now();
        let deadline = deadline_after(request.timeout());
        let lock = &self.shared.table;
        let mut table = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = loop {
            let missing = match table.apply(request) {
                Outcome::Answer(answer) => break answer,
                Outcome::Appeared(answer) | Outcome::Pushed(answer) => {
                    self.shared.changed.notify_all();
                    break answer;
                }
                Outcome::Popped(item) => {
                    let value = item.value.clone();
                    table.finish(request.first_key(), item);
                    break Answer::Value(value);
                }
                Outcome::Park { missing, .. } => missing,
                Outcome::Take => break Answer::Flag(false),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break Answer::TimedOut { missing };
            }
            let waited = self.shared.changed.wait_timeout(table, left);
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        // Read under the lock: no value is in use outside of it, so none is counted twice.
        let outcome = accept(request, answer.reply(), HERE, started.elapsed()).map(read);
        drop(answer);
        drop(table);
        outcome?.ok_or_else(|| StoreError::Unsupported {
            operation: request.name(),
            server: HERE.into(),
        })
    }
}

forward_store!([] LocalStore, <Self as Calls>, this => this);

impl fmt::Debug for LocalStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalStore").finish_non_exhaustive()
    }
}
