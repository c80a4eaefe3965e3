//! Requests and answers for a caller: names in errors, bounds, failures.

use std::time::Duration;

use super::wire::{CONTROL_BYTES_MAX, Reply, Request};
use super::{KEY_BYTES_MAX, StoreError, VALUE_BYTES_MAX};
use crate::store::wire::BODY_BYTES_MAX;

/// Turns a reply that reports a failure into the error.
pub(super) fn accept(
    request: &Request<'_>,
    reply: Reply,
    server: &str,
    waited: Duration,
) -> Result<Reply, StoreError> {
    let (operation, key, server) = (
        request.name(),
        request.first_key().to_owned(),
        server.to_owned(),
    );
    Err(match reply {
        Reply::TimedOut { missing } => StoreError::TimedOut {
            operation,
            server,
            missing,
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
            StoreError::AnswerTooLarge {
                operation,
                key,
                bytes,
                bytes_max: BODY_BYTES_MAX,
            }
        }
        Reply::Unknown { .. } => StoreError::Unsupported { operation, server },
        other => return Ok(other),
    })
}

impl<'a> Request<'a> {
    /// The key that errors name.
    pub(super) fn first_key(&self) -> &str {
        match self {
            Self::Wait { keys, .. } | Self::Check { keys } | Self::MultiGet { keys, .. } => {
                keys.first().copied().unwrap_or_default()
            }
            Self::MultiSet { entries } => entries.first().map(|entry| entry.0).unwrap_or_default(),
            Self::List { prefix, .. } => prefix,
            Self::Count { folder } => folder,
            Self::Set { key, .. }
            | Self::Get { key, .. }
            | Self::Add { key, .. }
            | Self::CompareSet { key, .. }
            | Self::Delete { key } => key,
        }
    }

    /// How long it lets the store wait.
    pub(super) fn timeout(&self) -> Duration {
        match self {
            Self::Get { timeout_ms, .. }
            | Self::Wait { timeout_ms, .. }
            | Self::MultiGet { timeout_ms, .. } => Duration::from_millis(*timeout_ms),
            _ => Duration::ZERO,
        }
    }

    /// The same request `waited` later, on another connection; nothing if carrying it out twice is not the same as once.
    pub(super) fn repeated(&self, waited: Duration) -> Option<Request<'a>> {
        let mut again = self.clone();
        match &mut again {
            Self::Get { timeout_ms, .. }
            | Self::Wait { timeout_ms, .. }
            | Self::MultiGet { timeout_ms, .. } => {
                let left = Duration::from_millis(*timeout_ms).saturating_sub(waited);
                *timeout_ms = whole_milliseconds(left);
            }
            Self::Set { .. }
            | Self::MultiSet { .. }
            | Self::Check { .. }
            | Self::List { .. }
            | Self::Count { .. } => {}
            Self::Add { .. } | Self::CompareSet { .. } | Self::Delete { .. } => return None,
        }
        Some(again)
    }

    /// Checks the bounds of the other side: each key's, and the whole message's.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_is_repeated_is_as_much_shorter_as_it_has_waited() {
        let get = |timeout_ms| Request::Get {
            timeout_ms,
            key: "key",
        };
        let after = |waited_ms| get(500).repeated(Duration::from_millis(waited_ms));
        assert_eq!((after(200), after(900)), (Some(get(300)), Some(get(0))));
    }

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
