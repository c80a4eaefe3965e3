//! A store on torch's TCPStore, for ranks that share one with a PyTorch program.

use std::fmt;
use std::io;
use std::net::TcpStream;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{
    ADD, APPEND, CANCEL_WAIT, CHECK, COMPARE_SET, COUNT, DELETE, Exchange, GET, LIST, MULTI_GET,
    MULTI_SET, QUEUE_LEN, QUEUE_POP, QUEUE_PUSH, STOP_WAITING, WAIT, WAIT_CANCELED, dial,
    key_message, keys_message, set_message, text, value_message,
};
use crate::store::client::dial::retry;
use crate::store::{KEY_BYTES_MAX, KeyList, Store, StoreError, VALUE_BYTES_MAX};

/// How long the server may take for an answer it need not wait for.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Most keys that are looked at in a store that nobody vouches for.
const KEYS_MAX: u64 = 1 << 20;

/// A connection to torch's TCPStore, with the key names that Python programs see.
///
/// That store knows no token: believe nothing that is read from it without proof. Where its protocol promises less than
/// [`Store`], so does this: `set`, `append`, `multi_set` and `queue_push` are not confirmed (the counts that `append` and
/// `queue_push` return are asked for afterwards), `add` to a text and `get` of a key deleted at that moment end the
/// connection, and an item popped for a client that dies is lost.
///
/// *Blocks*: and *Errors*: as for [`Client`](crate::store::Client). A server of an older torch that does not know an
/// operation (queues and `list` are young) ends the connection: [`StoreError::Lost`].
///
/// *Source*: torch's TCPStore.
pub struct TorchStore {
    server: String,
    /// The connection, or why there is none any more.
    stream: Mutex<Result<TcpStream, StoreError>>,
}

/// Why an operation has no result.
enum Failure {
    Io(io::Error),
    /// The keys did not come in time; the connection is as good as before.
    Missing(Vec<String>),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl TorchStore {
    /// Connects to `host:port`, trying again until `timeout`.
    pub fn connect(server: &str, timeout: Duration) -> Result<Self, StoreError> {
        retry(
            server,
            timeout,
            |_| false,
            |left| {
                let stream = dial(server, left).map_err(|error| StoreError::Connect {
                    server: server.to_owned(),
                    waited: Duration::ZERO,
                    attempts: 1,
                    reason: error.to_string(),
                })?;
                Ok(Self {
                    server: server.to_owned(),
                    stream: Mutex::new(Ok(stream)),
                })
            },
        )
    }

    /// Host and port of the server.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Carries out one operation; `key` is the one that errors name.
    fn call<T>(
        &self,
        operation: &'static str,
        key: &str,
        act: impl FnOnce(&TcpStream) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        if key.len() > KEY_BYTES_MAX {
            return Err(StoreError::KeyTooLong {
                bytes: key.len(),
                start: key[..key.floor_char_boundary(40)].to_owned(),
            });
        }
        let mut latch = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = latch.as_ref().map_err(Clone::clone)?;
        let started = Instant::now();
        let failure = match act(stream) {
            Ok(result) => return Ok(result),
            Err(failure) => failure,
        };
        let (key, server, waited) = (key.to_owned(), self.server.clone(), started.elapsed());
        let error = match failure {
            Failure::Missing(missing) => {
                return Err(StoreError::TimedOut {
                    operation,
                    server,
                    missing,
                    waited,
                });
            }
            Failure::Io(error) if error.kind() == io::ErrorKind::TimedOut => StoreError::NoAnswer {
                operation,
                key,
                server,
                waited,
            },
            Failure::Io(error) => StoreError::Lost {
                operation,
                key,
                server,
                waited,
                reason: error.to_string(),
            },
        };
        *latch = Err(error.clone());
        Err(error)
    }

    /// Sends what has no answer.
    fn tell(&self, operation: &'static str, key: &str, message: &[u8]) -> Result<(), StoreError> {
        self.call(operation, key, |stream| Ok(answer(stream).send(message)?))
    }

    /// Sends a message and reads its answer.
    fn ask<T>(
        &self,
        operation: &'static str,
        key: &str,
        message: &[u8],
        read: impl FnOnce(&mut Exchange<'_>) -> io::Result<T>,
    ) -> Result<T, StoreError> {
        self.call(operation, key, |stream| {
            let mut exchange = answer(stream);
            exchange.send(message)?;
            Ok(read(&mut exchange)?)
        })
    }

    fn keys(&self, operation: &'static str, prefix: &str) -> Result<Vec<String>, StoreError> {
        let whole = whole(prefix);
        let mut keys = self.ask(operation, prefix, &[LIST], |exchange| {
            let count = exchange.u64()?;
            if count > KEYS_MAX {
                return Err(unexpected(format!(
                    "{count} keys, at most {KEYS_MAX} are expected"
                )));
            }
            let mut keys = Vec::new();
            for _ in 0..count {
                let key = exchange.text(VALUE_BYTES_MAX)?;
                // torch's own keys have no slash, and a key that is no text is none that this side could ask for.
                if let Ok(key) = String::from_utf8(key)
                    && key.starts_with(&whole)
                {
                    keys.push(key[1..].to_owned());
                }
            }
            Ok(keys)
        })?;
        keys.sort_unstable();
        Ok(keys)
    }
}

impl Store for TorchStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.tell("set", key, &set_message(&whole(key), value))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.call("get", key, |stream| {
            wait(stream, &[key], timeout)?;
            let mut exchange = answer(stream);
            exchange.send(&key_message(GET, &whole(key)))?;
            Ok(exchange.text(VALUE_BYTES_MAX)?)
        })
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError> {
        self.call("wait", first(keys), |stream| wait(stream, keys, timeout))
    }

    fn check(&self, keys: &[&str]) -> Result<bool, StoreError> {
        self.call("check", first(keys), |stream| check(stream, keys))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        let mut message = key_message(ADD, &whole(key));
        message.extend_from_slice(&amount.to_le_bytes());
        self.ask("add", key, &message, |exchange| {
            Ok(exchange.u64()?.cast_signed())
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], new: &[u8]) -> Result<Vec<u8>, StoreError> {
        let mut message = value_message(COMPARE_SET, &whole(key), expected);
        text(&mut message, new);
        self.ask("compare-set", key, &message, |exchange| {
            exchange.text(VALUE_BYTES_MAX)
        })
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        let message = key_message(DELETE, &whole(key));
        self.ask("delete", key, &message, |exchange| Ok(exchange.u64()? == 1))
    }

    fn append(&self, key: &str, more: &[u8]) -> Result<usize, StoreError> {
        self.tell("append", key, &value_message(APPEND, &whole(key), more))?;
        Ok(self.get(key, ANSWER_TIMEOUT)?.len())
    }

    fn list(&self, prefix: &str, most: usize) -> Result<KeyList, StoreError> {
        let mut keys = self.keys("list", prefix)?;
        let more = keys.len() > most;
        keys.truncate(most);
        Ok(KeyList { keys, more })
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>, StoreError> {
        self.call("multi-get", first(keys), |stream| {
            wait(stream, keys, timeout)?;
            let mut exchange = answer(stream);
            exchange.send(&whole_keys_message(MULTI_GET, keys))?;
            let values = keys.iter().map(|_| exchange.text(VALUE_BYTES_MAX));
            Ok(values.collect::<io::Result<_>>()?)
        })
    }

    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<(), StoreError> {
        let mut message = vec![MULTI_SET];
        message.extend_from_slice(&(entries.len() as u64).to_le_bytes());
        for (key, value) in entries {
            text(&mut message, whole(key).as_bytes());
            text(&mut message, value);
        }
        let key = entries.first().map(|entry| entry.0).unwrap_or_default();
        self.tell("multi-set", key, &message)
    }

    fn queue_push(&self, queue: &str, value: &[u8]) -> Result<usize, StoreError> {
        let message = value_message(QUEUE_PUSH, &whole(queue), value);
        self.tell("queue-push", queue, &message)?;
        self.queue_len(queue)
    }

    /// torch's server answers a pop at once, so this waits for an item and asks again when another client was faster.
    fn queue_pop(&self, queue: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        let started = Instant::now();
        self.call("queue-pop", queue, |stream| {
            loop {
                let mut exchange = answer(stream);
                exchange.send(&key_message(QUEUE_POP, &whole(queue)))?;
                match exchange.u64()? {
                    0 => wait(stream, &[queue], timeout.saturating_sub(started.elapsed()))?,
                    1 => return Ok(exchange.text(VALUE_BYTES_MAX)?),
                    other => return Err(unexpected(format!("{other} items for one pop")).into()),
                }
            }
        })
    }

    fn queue_len(&self, queue: &str) -> Result<usize, StoreError> {
        let message = key_message(QUEUE_LEN, &whole(queue));
        self.ask("queue-length", queue, &message, count)
    }

    fn num_keys(&self, prefix: &str) -> Result<usize, StoreError> {
        if prefix.is_empty() {
            return self.ask("number of keys", prefix, &[COUNT], count);
        }
        Ok(self.keys("number of keys", prefix)?.len())
    }
}

impl fmt::Debug for TorchStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TorchStore")
            .field("server", &self.server)
            .finish_non_exhaustive()
    }
}

fn answer(stream: &TcpStream) -> Exchange<'_> {
    Exchange::new(stream, ANSWER_TIMEOUT)
}

/// Waits until all keys are there; without time it only looks, because a wait would have to be cancelled.
fn wait(stream: &TcpStream, keys: &[&str], timeout: Duration) -> Result<(), Failure> {
    if timeout.is_zero() {
        return match check(stream, keys)? {
            true => Ok(()),
            false => Err(Failure::Missing(missing(stream, keys)?)),
        };
    }
    answer(stream).send(&whole_keys_message(WAIT, keys))?;
    match Exchange::new(stream, timeout).u8() {
        Ok(STOP_WAITING) => return Ok(()),
        Ok(other) => {
            let reason = format!("the answer to a wait is {other}, expected {STOP_WAITING}");
            return Err(unexpected(reason).into());
        }
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {}
        Err(error) => return Err(error.into()),
    }
    let mut exchange = answer(stream);
    exchange.send(&[CANCEL_WAIT])?;
    match exchange.u8()? {
        WAIT_CANCELED => Err(Failure::Missing(missing(stream, keys)?)),
        // The keys came while the wait was being cancelled; the cancellation is answered all the same.
        STOP_WAITING if exchange.u8()? == WAIT_CANCELED => Ok(()),
        other => Err(unexpected(format!("the answer to a cancelled wait is {other}")).into()),
    }
}

fn check(stream: &TcpStream, keys: &[&str]) -> Result<bool, Failure> {
    let mut exchange = answer(stream);
    exchange.send(&whole_keys_message(CHECK, keys))?;
    match exchange.u8()? {
        0 => Ok(true),
        1 => Ok(false),
        other => {
            Err(unexpected(format!("the answer to a check is {other}, expected 0 or 1")).into())
        }
    }
}

fn missing(stream: &TcpStream, keys: &[&str]) -> Result<Vec<String>, Failure> {
    let mut missing = Vec::new();
    for key in keys {
        if !check(stream, &[key])? {
            missing.push((*key).to_owned());
        }
    }
    Ok(missing)
}

fn count(exchange: &mut Exchange<'_>) -> io::Result<usize> {
    let count = exchange.u64()?;
    usize::try_from(count.cast_signed()).map_err(|_| unexpected(format!("a count of {count}")))
}

/// As torch's own client names it.
fn whole(key: &str) -> String {
    format!("/{key}")
}

fn whole_keys_message(query: u8, keys: &[&str]) -> Vec<u8> {
    let keys: Vec<String> = keys.iter().map(|key| whole(key)).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    keys_message(query, &keys)
}

fn first<'k>(keys: &[&'k str]) -> &'k str {
    keys.first().copied().unwrap_or_default()
}

fn unexpected(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}
