//! The operations of every store.

use std::time::Duration;

use super::StoreError;

/// Keys and values that the ranks of a job share.
///
/// Implemented by [`Client`](super::Client) (over TCP) and `EtcdStore` (feature `etcd`). Every operation is atomic.
///
/// *Blocks*: operations with a timeout wait until then for what is missing; with a timeout of zero they look once.
/// *Errors*: [`StoreError::TimedOut`] names what is missing; [`StoreError::Full`] when the store is at its bound.
/// *Source*: the operations of torch's TCPStore, with a deadline per call in place of one per store.
///
/// ```
/// use std::time::Duration;
/// use paceline_rendezvous::store::{Client, Server, Store};
/// use paceline_rendezvous::token::Token;
///
/// fn barrier(store: &dyn Store, world: i64, timeout: Duration) -> Result<(), Box<dyn std::error::Error>> {
///     if store.add("arrived", 1)? == world {
///         store.set("all", b"")?;
///     }
///     Ok(store.wait(&["all"], timeout)?)
/// }
///
/// let token = Token::generate()?;
/// let server = Server::bind("127.0.0.1:0".parse()?, &token)?;
/// let client = Client::connect(&server.addr().to_string(), &token, Duration::from_secs(5))?;
/// barrier(&client, 1, Duration::from_secs(1))?;
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

    /// Adds to a number and returns the sum. A missing key counts as 0; values are ASCII decimal.
    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError>;

    /// Sets a key to `new` if its value is `expected`, and returns the value it has then.
    ///
    /// A missing key is set when `expected` is empty; otherwise `expected` is returned and nothing is set.
    fn compare_set(&self, key: &str, expected: &[u8], new: &[u8]) -> Result<Vec<u8>, StoreError>;

    /// Removes a key; whether it was there.
    fn delete(&self, key: &str) -> Result<bool, StoreError>;

    /// The first `most` keys that begin with `prefix`, in the order of their bytes; fewer when their names together
    /// are longer than 1 MiB.
    fn list(&self, prefix: &str, most: usize) -> Result<KeyList, StoreError>;

    /// The values of several keys at one moment.
    ///
    /// *Blocks*: until all exist, at most for `timeout`.
    /// *Errors*: [`StoreError::AnswerTooLarge`] when the values together do not fit one message.
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>, StoreError>;
}

/// Keys under a prefix.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KeyList {
    /// Their whole names, in the order of their bytes.
    pub keys: Vec<String>,
    /// Whether there are more than these.
    pub more: bool,
}
