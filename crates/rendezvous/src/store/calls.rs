//! Operations as requests and their answers, the same for a store over TCP and one in this process.

use std::time::Duration;

use super::wire::{CONTROL_BYTES_MAX, Reply, Request};
use super::{KEY_BYTES_MAX, KeyList, StoreError, VALUE_BYTES_MAX};
use crate::store::wire::BODY_BYTES_MAX;

/// Something that answers requests.
pub(super) trait Calls {
    /// Has a request answered. `read` takes the expected kind of reply and leaves the others.
    fn call<T>(
        &self,
        request: &Request<'_>,
        read: impl FnOnce(Reply<'_>) -> Option<T>,
    ) -> Result<T, StoreError>;

    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        check_value(key, value.len())?;
        self.call(&Request::Set { key, value }, done)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        let timeout_ms = whole_milliseconds(timeout);
        self.call(&Request::Get { timeout_ms, key }, value)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError> {
        let request = Request::Wait {
            timeout_ms: whole_milliseconds(timeout),
            keys: keys.to_vec(),
        };
        self.call(&request, done)
    }

    fn check(&self, keys: &[&str]) -> Result<bool, StoreError> {
        let keys = keys.to_vec();
        self.call(&Request::Check { keys }, flag)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        self.call(&Request::Add { key, amount }, number)
    }

    fn compare_set(&self, key: &str, expected: &[u8], new: &[u8]) -> Result<Vec<u8>, StoreError> {
        check_value(key, expected.len())?;
        check_value(key, new.len())?;
        self.call(&Request::CompareSet { key, expected, new }, value)
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        self.call(&Request::Delete { key }, flag)
    }

    fn append(&self, key: &str, more: &[u8]) -> Result<usize, StoreError> {
        check_value(key, more.len())?;
        self.call(&Request::Append { key, value: more }, count)
    }

    fn list(&self, prefix: &str, most: usize) -> Result<KeyList, StoreError> {
        let most = u32::try_from(most).unwrap_or(u32::MAX);
        self.call(&Request::List { most, prefix }, |reply| match reply {
            Reply::Keys { more, keys } => Some(KeyList {
                keys: keys.into_iter().map(str::to_owned).collect(),
                more,
            }),
            _ => None,
        })
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>, StoreError> {
        let request = Request::MultiGet {
            timeout_ms: whole_milliseconds(timeout),
            keys: keys.to_vec(),
        };
        self.call(&request, |reply| match reply {
            Reply::Values(values) if values.len() == keys.len() => {
                Some(values.into_iter().map(<[u8]>::to_vec).collect())
            }
            _ => None,
        })
    }

    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<(), StoreError> {
        for (key, value) in entries {
            check_value(key, value.len())?;
        }
        let entries = entries.to_vec();
        self.call(&Request::MultiSet { entries }, done)
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<usize, StoreError> {
        check_value(key, value.len())?;
        self.call(&Request::QueuePush { key, value }, count)
    }

    /// An item is taken in two steps where it could be lost between them; see [`super::wire`].
    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        let timeout_ms = whole_milliseconds(timeout);
        self.call(&Request::QueuePop { timeout_ms, key }, value)
    }

    fn queue_len(&self, key: &str) -> Result<usize, StoreError> {
        self.call(&Request::QueueLen { key }, count)
    }

    fn num_keys(&self, prefix: &str) -> Result<usize, StoreError> {
        self.call(&Request::NumKeys { prefix }, count)
    }
}

/// Takes from a reply what it says is wrong.
pub(super) fn accept<'r>(
    request: &Request<'_>,
    reply: Reply<'r>,
    server: &str,
    waited: Duration,
) -> Result<Reply<'r>, StoreError> {
    let (operation, key, server) = (
        request.name(),
        request.first_key().to_owned(),
        server.to_owned(),
    );
    Err(match reply {
        Reply::TimedOut { missing } => StoreError::TimedOut {
            operation,
            server,
            missing: missing.into_iter().map(str::to_owned).collect(),
            waited,
        },
        Reply::NoNumber => StoreError::NotANumber { key, server },
        Reply::Full => StoreError::Full {
            operation,
            key,
            server,
        },
        Reply::TooLarge { bytes } => {
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            match request {
                Request::Append { .. } => StoreError::ValueTooLarge { key, bytes },
                _ => StoreError::AnswerTooLarge {
                    operation,
                    key,
                    bytes,
                    bytes_max: BODY_BYTES_MAX,
                },
            }
        }
        Reply::Unknown { .. } => StoreError::Unsupported { operation, server },
        other => return Ok(other),
    })
}

impl Request<'_> {
    /// What errors call it.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Set { .. } => "set",
            Self::Get { .. } => "get",
            Self::Wait { .. } => "wait",
            Self::Check { .. } => "check",
            Self::Add { .. } => "add",
            Self::CompareSet { .. } => "compare-set",
            Self::Delete { .. } => "delete",
            Self::Append { .. } => "append",
            Self::List { .. } => "list",
            Self::MultiGet { .. } => "multi-get",
            Self::MultiSet { .. } => "multi-set",
            Self::QueuePush { .. } => "queue-push",
            Self::QueuePop { .. } => "queue-pop",
            Self::QueueTake => "queue-take",
            Self::QueueLen { .. } => "queue-length",
            Self::NumKeys { .. } => "number of keys",
        }
    }

    /// The key that errors name.
    pub(super) fn first_key(&self) -> &str {
        match self {
            Self::Wait { keys, .. } | Self::Check { keys } | Self::MultiGet { keys, .. } => {
                keys.first().copied().unwrap_or_default()
            }
            Self::MultiSet { entries } => entries.first().map(|entry| entry.0).unwrap_or_default(),
            Self::List { prefix, .. } | Self::NumKeys { prefix } => prefix,
            Self::QueueTake => "",
            Self::Set { key, .. }
            | Self::Get { key, .. }
            | Self::Add { key, .. }
            | Self::CompareSet { key, .. }
            | Self::Delete { key }
            | Self::Append { key, .. }
            | Self::QueuePush { key, .. }
            | Self::QueuePop { key, .. }
            | Self::QueueLen { key } => key,
        }
    }

    /// How long it lets the store wait.
    pub(super) fn timeout(&self) -> Duration {
        match self {
            Self::Get { timeout_ms, .. }
            | Self::Wait { timeout_ms, .. }
            | Self::MultiGet { timeout_ms, .. }
            | Self::QueuePop { timeout_ms, .. } => Duration::from_millis(*timeout_ms),
            _ => Duration::ZERO,
        }
    }

    /// Whether the other side would take it: keys within their bound, and all together within a message's.
    pub(super) fn check_bounds(&self) -> Result<(), StoreError> {
        let (bytes, count, bytes_max) = match self {
            Self::Wait { keys, .. } | Self::Check { keys } | Self::MultiGet { keys, .. } => {
                keys.iter().try_for_each(|key| check_key(key))?;
                let bytes = keys.iter().map(|key| 2 + key.len()).sum::<usize>();
                (bytes, keys.len(), CONTROL_BYTES_MAX)
            }
            Self::MultiSet { entries } => {
                entries.iter().try_for_each(|(key, _)| check_key(key))?;
                let bytes = entries
                    .iter()
                    .map(|(key, value)| 6 + key.len() + value.len());
                (bytes.sum::<usize>(), entries.len(), BODY_BYTES_MAX)
            }
            _ => return check_key(self.first_key()),
        };
        if 13 + bytes > bytes_max {
            return Err(StoreError::TooManyKeys {
                keys: count,
                bytes: 13 + bytes,
                bytes_max,
            });
        }
        Ok(())
    }
}

/// Rounded up: a wait is never shorter than asked for.
pub(super) fn whole_milliseconds(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

pub(super) fn check_key(key: &str) -> Result<(), StoreError> {
    if key.len() > KEY_BYTES_MAX {
        return Err(StoreError::KeyTooLong {
            bytes: key.len(),
            start: key[..key.floor_char_boundary(40)].to_owned(),
        });
    }
    Ok(())
}

pub(super) fn check_value(key: &str, bytes: usize) -> Result<(), StoreError> {
    if bytes > VALUE_BYTES_MAX {
        return Err(StoreError::ValueTooLarge {
            key: key.to_owned(),
            bytes,
        });
    }
    Ok(())
}

fn done(reply: Reply<'_>) -> Option<()> {
    matches!(reply, Reply::Done).then_some(())
}

fn value(reply: Reply<'_>) -> Option<Vec<u8>> {
    match reply {
        Reply::Value(value) => Some(value.to_vec()),
        _ => None,
    }
}

fn flag(reply: Reply<'_>) -> Option<bool> {
    match reply {
        Reply::Flag(flag) => Some(flag),
        _ => None,
    }
}

fn number(reply: Reply<'_>) -> Option<i64> {
    match reply {
        Reply::Number(number) => Some(number),
        _ => None,
    }
}

fn count(reply: Reply<'_>) -> Option<usize> {
    number(reply).and_then(|number| usize::try_from(number).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_never_shorter_than_asked_for() {
        for (timeout, expected) in [
            (Duration::ZERO, 0),
            (Duration::from_nanos(1), 1),
            (Duration::from_micros(1001), 2),
            (Duration::from_secs(2), 2000),
            (Duration::MAX, u64::MAX),
        ] {
            assert_eq!(whole_milliseconds(timeout), expected, "{timeout:?}");
        }
    }
}
