//! Every rank publishes a value and gets those of all ranks, in a number of requests that does not grow with the world.
//!
//! ```text
//! rank r:  set NAME/r    count NAME    get all of NAME
//!                            | as many as ranks: it came last
//!                            v
//!                        reads NAME/0, NAME/1, ... and sets them as one value
//! ```
//!
//! Ranks that come last at the same moment set the same value, which harms nobody. A rank that waits counts again now and
//! then, so it makes up for one that died before it had set the value.

use std::collections::HashSet;
use std::ops::Range;
use std::time::{Duration, Instant};

use paceline_rendezvous::store::{NOTICE_AFTER, Store as _, StoreError};

use super::{Forming, RECORDS, SLICE};
use crate::error::{Error, Ranks};

/// Values that are read or set in one request: with the longest ones that are usual, less than 1 MiB.
const CHUNK: usize = 1024;

/// Longest wait between two looks while a later generation forms: the next loss is likely now, and the other ranks do nothing
/// else.
const NEXT_SLICE: Duration = Duration::from_millis(10);

/// The same without a launcher: there is no page to look at.
const ALONE_SLICE: Duration = Duration::from_secs(1);

/// Ranks that wait make two requests together in this time, however many they are: the store serves a hundred times as many.
const REQUEST_PAUSE: Duration = Duration::from_micros(200);

/// In larger jobs rank 0 alone says who is missing, and names so many.
const TELLERS_MAX: usize = 16;

impl Forming<'_> {
    /// Publishes this rank's value and reads all ranks'.
    pub(super) fn exchange<T>(
        &self,
        name: &str,
        value: &[u8],
        what: &'static str,
        decode: impl Fn(usize, &[u8]) -> Result<T, String>,
    ) -> Result<Vec<T>, Error> {
        self.formation.enter(what);
        let folder = format!("{}/{name}", self.prefix);
        let values = self.gather(&folder, value, what);
        if name == RECORDS {
            match values {
                Ok(_) => self.formation.arrived(0..self.env.world),
                Err(_) => self.note_arrived(&folder),
            }
        }
        let decoded = values?
            .into_iter()
            .enumerate()
            .map(|(rank, bytes)| decode(rank, &bytes).map_err(|reason| self.peer(rank, reason)));
        decoded.collect()
    }

    fn gather(
        &self,
        folder: &str,
        value: &[u8],
        what: &'static str,
    ) -> Result<Vec<Vec<u8>>, Error> {
        let failed = |error| self.store(what, error);
        let own = key(folder, self.env.rank);
        self.client.set(&own, value).map_err(failed)?;
        if folder.ends_with(RECORDS) {
            self.tell_missing(folder);
        }
        let mut values = Vec::with_capacity(self.env.world);
        while values.len() < self.env.world {
            let chunk = values.len() / CHUNK;
            self.health()?;
            let left = self.deadline.saturating_duration_since(Instant::now());
            let Some(joined) = self.ask(folder, chunk, left).map_err(failed)? else {
                if left.is_zero() {
                    let missing = self.missing(folder).map_err(failed)?;
                    if !missing.is_empty() {
                        return Err(self.absent(missing, what, String::new()));
                    }
                }
                continue;
            };
            let parts = split(&joined).filter(|parts| parts.len() == self.ranks_of(chunk).len());
            let Some(parts) = parts else {
                let reason = format!("{folder} in the store is not a value of each rank");
                return Err(self.system(what, &std::io::Error::other(reason)));
            };
            values.extend(parts.into_iter().map(<[u8]>::to_vec));
        }
        Ok(values)
    }

    fn ranks_of(&self, chunk: usize) -> Range<usize> {
        chunk * CHUNK..self.env.world.min((chunk + 1) * CHUNK)
    }

    /// The values of a chunk's ranks as one, once all ranks have come; nothing if the launcher's page or the clock is to be
    /// looked at before.
    fn ask(
        &self,
        folder: &str,
        chunk: usize,
        left: Duration,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        if self.client.count(folder)? >= self.env.world {
            self.join(folder)?;
        }
        let slice = match (self.env.page_fd, self.succession) {
            (None, _) => ALONE_SLICE,
            (Some(_), None) => SLICE,
            (Some(_), Some(_)) => NEXT_SLICE,
        };
        let slice = slice.max(REQUEST_PAUSE.saturating_mul(self.env.world as u32));
        match self.client.get(&joined_key(folder, chunk), left.min(slice)) {
            Err(StoreError::TimedOut { .. }) => Ok(None),
            value => value.map(Some),
        }
    }

    /// Sets the values of all ranks as one for each chunk, unless another rank has.
    fn join(&self, folder: &str) -> Result<(), StoreError> {
        for chunk in 0..self.env.world.div_ceil(CHUNK) {
            let joined = joined_key(folder, chunk);
            if self.client.check(&[&joined])? {
                continue;
            }
            let keys: Vec<String> = self.ranks_of(chunk).map(|rank| key(folder, rank)).collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let values = self.client.multi_get(&keys, Duration::ZERO)?;
            self.client.set(&joined, &concat(&values))?;
        }
        Ok(())
    }

    /// The ranks whose value is not there.
    fn missing(&self, folder: &str) -> Result<Vec<usize>, StoreError> {
        let list = self.client.list(&format!("{folder}/"), self.env.world)?;
        let here: HashSet<&str> = list.keys.iter().map(String::as_str).collect();
        let mut missing = Vec::new();
        for rank in 0..self.env.world {
            let key = key(folder, rank);
            // Of very many keys the list has the first ones only.
            let is_here = here.contains(&*key) || list.more && self.client.check(&[&key])?;
            if !is_here {
                missing.push(rank);
            }
        }
        Ok(missing)
    }

    /// Notes for the flight record which ranks have come, if the store still answers after a failure.
    fn note_arrived(&self, folder: &str) {
        let prefix = format!("{folder}/");
        let listed = self
            .notices()
            .map(|store| store.list(&prefix, self.env.world));
        let keys = listed.and_then(Result::ok).unwrap_or_default().keys;
        let rank = |key: &String| key.strip_prefix(&prefix)?.parse().ok();
        self.formation.arrived(keys.iter().filter_map(rank));
    }

    /// Says who is missing, if that takes long and no launcher does: ranks that were started by hand would wait in silence.
    fn tell_missing(&self, folder: &str) {
        let world = self.env.world;
        let is_alone = self.env.page_fd.is_none() && self.subgroup.is_none();
        let tells = self.env.rank == 0 || world <= TELLERS_MAX;
        let after = NOTICE_AFTER.saturating_sub(self.started.elapsed());
        if !is_alone || !tells || self.started + after >= self.deadline {
            return;
        }
        let keys: Vec<String> = (0..world).map(|rank| key(folder, rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        if let Err(StoreError::TimedOut { .. }) = self.client.wait(&keys, after) {
            let missing = self.missing(folder).unwrap_or_default();
            let (rank, here) = (self.env.rank, world - missing.len());
            if !missing.is_empty() {
                paceline_rendezvous::notice!(
                    WARN,
                    "rank {rank} waits for {}: {here} of {world} ranks have joined",
                    Ranks(&missing)
                );
            }
        }
    }
}

fn key(folder: &str, rank: usize) -> String {
    format!("{folder}/{rank}")
}

/// In a folder of its own, so that it is not counted as a rank's.
fn joined_key(folder: &str, chunk: usize) -> String {
    format!("{folder}/all/{chunk}")
}

/// Values one after another, each behind its length.
fn concat(values: &[Vec<u8>]) -> Vec<u8> {
    let bytes = values.iter().map(|value| 4 + value.len()).sum();
    let mut joined = Vec::with_capacity(bytes);
    for value in values {
        joined.extend((value.len() as u32).to_le_bytes());
        joined.extend(value);
    }
    joined
}

/// The values of [`concat`], if that is what the bytes are.
fn split(mut joined: &[u8]) -> Option<Vec<&[u8]>> {
    let mut values = Vec::new();
    while let Some((bytes, rest)) = joined.split_first_chunk() {
        let (value, rest) = rest.split_at_checked(u32::from_le_bytes(*bytes) as usize)?;
        values.push(value);
        joined = rest;
    }
    joined.is_empty().then_some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_values_come_apart_again_and_cut_ones_do_not() {
        let values = [b"a".to_vec(), Vec::new(), b"long".to_vec()];
        let joined = concat(&values);
        assert_eq!(split(&joined).unwrap(), values);
        assert_eq!(split(&[]), Some(Vec::new()));
        for cut in (1..joined.len()).filter(|cut| ![5, 9].contains(cut)) {
            assert_eq!(split(&joined[..cut]), None, "{cut}");
        }
    }
}
