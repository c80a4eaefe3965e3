//! A store's operations in etcd: reads, and changes as transactions on the values that were read.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::gateway::{Again, Gateway};
use super::messages::{
    Bytes, DeleteAnswer, KeyValue, Number, PlainAnswer, RangeAnswer, Streamed, TxnAnswer,
    WatchAnswer,
};
use super::{Etcd, EtcdError, NOT_FOUND, seal};
use crate::net::deadline_after;
use crate::store::calls::{check_key, check_value};
use crate::store::{KeyList, Store, StoreError};

/// Operations that one transaction may have; etcd's own bound, unless set otherwise.
const OPERATIONS_MAX: usize = 128;
/// Attempts to change a key that others change too.
const ATTEMPTS_MAX: u32 = 64;
/// Keys that one list names.
const KEYS_MAX: usize = 10_000;
/// A [`Store`] in etcd. A request has room for 128 keys to be set at one moment.
///
/// *Source*: etcd's API v3 over its JSON gateway, etcd 3.4 and later.
pub struct EtcdStore {
    etcd: Etcd,
    gateway: Gateway,
    answer_timeout: Duration,
    /// When the lease was last kept alive.
    refreshed: Mutex<Instant>,
}

/// A value and its revision; 0 if there is no value.
struct Found {
    value: Option<Vec<u8>>,
    revision: i64,
}

/// Values of keys at one moment, and its revision.
type Look = (Vec<Option<Vec<u8>>>, i64);

impl EtcdStore {
    /// One whose lease was kept alive at `refreshed`.
    pub(super) fn new(
        etcd: &Etcd,
        gateway: Gateway,
        answer_timeout: Duration,
        refreshed: Instant,
    ) -> Self {
        Self {
            etcd: etcd.clone(),
            gateway,
            answer_timeout,
            refreshed: Mutex::new(refreshed),
        }
    }

    /// Removes all keys of the job at once.
    pub fn end_job(&self) -> Result<(), StoreError> {
        let lease = json!({ "ID": Number(self.etcd.lease) });
        self.run("end", "", |deadline| {
            let path = "/v3/lease/revoke";
            match self
                .gateway
                .call::<PlainAnswer>(path, &lease, Again::May, deadline)
            {
                Ok(_) => Ok(()),
                Err(EtcdError::Refused { code, .. }) if code == NOT_FOUND => Ok(()),
                Err(error) => Err(error),
            }
        })
    }

    /// Runs an operation that does not wait, after keeping the lease alive.
    fn run<T>(
        &self,
        operation: &'static str,
        key: &str,
        act: impl FnOnce(Instant) -> Result<T, EtcdError>,
    ) -> Result<T, StoreError> {
        check_key(key)?;
        let started = Instant::now();
        let deadline = deadline_after(self.answer_timeout);
        let done = self.keep_lease(deadline).and_then(|()| act(deadline));
        done.map_err(|source| self.etcd.error(operation, key, started, source))
    }

    fn keep_lease(&self, deadline: Instant) -> Result<(), EtcdError> {
        let mut refreshed = self
            .refreshed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if refreshed.elapsed() < self.etcd.ttl / 4 {
            return Ok(());
        }
        let now = Instant::now();
        self.etcd.refresh(&self.gateway, deadline)?;
        *refreshed = now;
        Ok(())
    }

    fn whole(&self, key: &str) -> Bytes {
        Bytes(format!("{}{key}", self.etcd.prefix).into_bytes())
    }

    fn put(&self, key: &str, value: &[u8]) -> Value {
        let key = self.whole(key);
        let value = Bytes(seal::seal(&self.etcd.token, &key.0, value));
        json!({ "key": key, "value": value, "lease": Number(self.etcd.lease) })
    }

    fn open(&self, key: &Bytes, sealed: &Bytes) -> Result<Vec<u8>, EtcdError> {
        seal::open(&self.etcd.token, &key.0, &sealed.0)
            .map(<[u8]>::to_vec)
            .ok_or(EtcdError::Unproven)
    }

    /// The value in the answer to a range of one key.
    fn found(&self, key: &Bytes, kvs: &[KeyValue]) -> Result<Found, EtcdError> {
        match kvs {
            [] => Ok(Found {
                value: None,
                revision: 0,
            }),
            [found] if found.key == *key => Ok(Found {
                value: Some(self.open(key, &found.value)?),
                revision: found.mod_revision.0,
            }),
            _ => Err(other_keys()),
        }
    }

    fn range(&self, range: &Value, deadline: Instant) -> Result<RangeAnswer, EtcdError> {
        self.gateway
            .call("/v3/kv/range", range, Again::May, deadline)
    }

    /// Does `success` if `compare` holds, else `failure`, all at one moment.
    fn txn(&self, txn: &Value, again: Again, deadline: Instant) -> Result<TxnAnswer, EtcdError> {
        let answer: TxnAnswer = self.gateway.call("/v3/kv/txn", txn, again, deadline)?;
        let done = match answer.succeeded {
            true => &txn["success"],
            false => &txn["failure"],
        };
        if answer.responses.len() != done.as_array().map_or(0, Vec::len) {
            return Err(other_keys());
        }
        Ok(answer)
    }

    /// Changes a key from what it is to what `change` makes of it, or leaves it when that makes nothing of it.
    fn change<T>(
        &self,
        operation: &'static str,
        key: &str,
        change: impl Fn(Option<&[u8]>) -> Result<(Option<Vec<u8>>, T), StoreError>,
    ) -> Result<T, StoreError> {
        let whole = self.whole(key);
        let look = json!({ "key": whole });
        let mut found = self.run(operation, key, |deadline| {
            let answer = self.range(&look, deadline)?;
            self.found(&whole, &answer.kvs)
        })?;
        for _ in 0..ATTEMPTS_MAX {
            let (new, result) = change(found.value.as_deref())?;
            let Some(new) = new else {
                return Ok(result);
            };
            // It holds as long as the key is as it was in that revision; 0 is that of a key that is not there.
            let unchanged = json!({
                "key": whole, "target": "MOD", "result": "EQUAL", "mod_revision": Number(found.revision),
            });
            let txn = json!({
                "compare": [unchanged],
                "success": [{ "request_put": self.put(key, &new) }],
                "failure": [{ "request_range": look }],
            });
            let other = self.run(operation, key, |deadline| {
                let answer = self.txn(&txn, Again::MayNot, deadline)?;
                match answer.responses.first() {
                    Some(now) if !answer.succeeded => {
                        self.found(&whole, &now.response_range.kvs).map(Some)
                    }
                    _ => Ok(None),
                }
            })?;
            match other {
                None => return Ok(result),
                Some(now) => found = now,
            }
        }
        let attempts = ATTEMPTS_MAX;
        let source = EtcdError::Contended { attempts };
        Err(self.etcd.error(operation, key, Instant::now(), source))
    }

    /// Values of keys at one moment, and that moment; with `keys_only` they are empty.
    fn look(
        &self,
        operation: &'static str,
        keys: &[&str],
        keys_only: bool,
    ) -> Result<Look, StoreError> {
        keys.iter().try_for_each(|key| check_key(key))?;
        let wholes: Vec<Bytes> = keys.iter().map(|key| self.whole(key)).collect();
        self.run(operation, first(keys), |deadline| {
            let mut values = Vec::with_capacity(keys.len());
            // 0 is now.
            let mut revision = Number(0);
            for some in wholes.chunks(OPERATIONS_MAX) {
                let ranges = some.iter().map(|key| {
                    let range = json!({ "key": key, "revision": revision, "keys_only": keys_only });
                    json!({ "request_range": range })
                });
                let txn = json!({ "success": ranges.collect::<Vec<_>>() });
                let answer = self.txn(&txn, Again::May, deadline)?;
                if !answer.succeeded {
                    return Err(other_keys());
                }
                // The next ranges are read at the same revision.
                if revision.0 == 0 {
                    revision = answer.header.revision;
                }
                for (key, answer) in some.iter().zip(answer.responses) {
                    values.push(match &answer.response_range.kvs[..] {
                        [found] if keys_only && found.key == *key => Some(Vec::new()),
                        kvs => self.found(key, kvs)?.value,
                    });
                }
            }
            Ok((values, revision.0))
        })
    }

    /// The values of keys once all are there. With `keys_only` they are empty.
    fn await_all(
        &self,
        operation: &'static str,
        keys: &[&str],
        keys_only: bool,
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, StoreError> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let started = Instant::now();
        let deadline = deadline_after(timeout);
        loop {
            let (values, revision) = self.look(operation, keys, keys_only)?;
            let missing: Vec<String> = keys
                .iter()
                .zip(&values)
                .filter(|(_, value)| value.is_none())
                .map(|(key, _)| (*key).to_owned())
                .collect();
            let Some(next) = missing.first() else {
                return Ok(values.into_iter().flatten().collect());
            };
            if Instant::now() >= deadline {
                return Err(StoreError::TimedOut {
                    operation,
                    server: self.etcd.name(),
                    missing,
                    waited: started.elapsed(),
                });
            }
            // A long wait looks again often enough to keep the lease alive.
            let until = deadline.min(deadline_after(self.etcd.ttl / 4));
            self.watch(next, revision, until)
                .map_err(|source| self.etcd.error(operation, next, started, source))?;
        }
    }

    /// Until a key is set after that revision, or the deadline.
    fn watch(&self, key: &str, revision: i64, until: Instant) -> Result<(), EtcdError> {
        let watch = json!({ "create_request": {
            "key": self.whole(key),
            "start_revision": Number(revision.saturating_add(1)),
            "filters": ["NODELETE"],
        } });
        let seen =
            self.gateway
                .stream("/v3/watch", &watch, until, |line: Streamed<WatchAnswer>| {
                    let answer = line.result;
                    if answer.canceled && answer.compact_revision.0 == 0 {
                        return Err(EtcdError::Refused {
                            code: 0,
                            message: answer.cancel_reason.chars().take(300).collect(),
                        });
                    }
                    Ok((!answer.events.is_empty() || answer.canceled).then_some(()))
                });
        match seen {
            Err(EtcdError::NoAnswer) if Instant::now() >= until => Ok(()),
            seen => seen,
        }
    }
}

impl Store for EtcdStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        check_value(key, value.len())?;
        self.run("set", key, |deadline| {
            let put = self.put(key, value);
            self.gateway
                .call::<PlainAnswer>("/v3/kv/put", &put, Again::May, deadline)
                .map(drop)
        })
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        let mut values = self.await_all("get", &[key], false, timeout)?;
        Ok(values.pop().unwrap_or_default())
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError> {
        self.await_all("wait", keys, true, timeout).map(drop)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        self.change("add", key, |value| {
            let old = match value {
                None => Some(0),
                Some(value) => std::str::from_utf8(value)
                    .ok()
                    .and_then(|text| text.parse().ok()),
            };
            let sum = old.and_then(|old: i64| old.checked_add(amount));
            let sum = sum.ok_or_else(|| StoreError::NotANumber {
                key: key.to_owned(),
                server: self.etcd.name(),
            })?;
            let is_same = value.is_some() && amount == 0;
            Ok(((!is_same).then(|| sum.to_string().into_bytes()), sum))
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], new: &[u8]) -> Result<Vec<u8>, StoreError> {
        check_value(key, new.len())?;
        self.change("compare-set", key, |value| {
            let is_expected = value.unwrap_or_default() == expected;
            Ok(match value {
                _ if is_expected => (Some(new.to_vec()), new.to_vec()),
                Some(value) => (None, value.to_vec()),
                None => (None, expected.to_vec()),
            })
        })
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        let request = json!({ "key": self.whole(key) });
        self.run("delete", key, |deadline| {
            let path = "/v3/kv/deleterange";
            let answer: DeleteAnswer =
                self.gateway.call(path, &request, Again::MayNot, deadline)?;
            Ok(answer.deleted.0 > 0)
        })
    }

    fn list(&self, prefix: &str, most: usize) -> Result<KeyList, StoreError> {
        let most = most.min(KEYS_MAX);
        let key = self.whole(prefix);
        let request = json!({
            "key": key,
            "range_end": after_prefix(&key),
            "limit": Number(most.max(1) as i64),
            "keys_only": true,
        });
        let answer = self.run("list", prefix, |deadline| self.range(&request, deadline))?;
        let names = answer.kvs.into_iter().filter_map(|found| {
            // A key that is not text cannot be one of ours.
            let name = String::from_utf8(found.key.0).ok()?;
            name.strip_prefix(&self.etcd.prefix).map(str::to_owned)
        });
        let mut keys: Vec<String> = names.collect();
        let more = answer.more || keys.len() > most;
        keys.truncate(most);
        Ok(KeyList { keys, more })
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>, StoreError> {
        self.await_all("multi-get", keys, false, timeout)
    }
}

impl fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdStore")
            .field("etcd", &self.etcd)
            .finish_non_exhaustive()
    }
}

fn first<'k>(keys: &[&'k str]) -> &'k str {
    keys.first().copied().unwrap_or_default()
}

fn other_keys() -> EtcdError {
    EtcdError::NotEtcd {
        reason: "it is about other keys than the request".to_owned(),
    }
}

/// The end of the range of all keys that begin with these bytes. They are text, so the last one is never 255.
fn after_prefix(prefix: &Bytes) -> Bytes {
    let mut end = prefix.clone();
    if let Some(last) = end.0.last_mut() {
        *last = last.saturating_add(1);
    }
    end
}
