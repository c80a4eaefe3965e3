//! Which connections wait for which keys, and how they go on.

use std::collections::{BTreeSet, HashMap};

use super::super::conn::{State, Wants};
use super::super::wire::{Reply, Request};
use super::Loop;

/// Connections that wait, by what they wait for.
#[derive(Default)]
pub(super) struct Waiting {
    keys: HashMap<String, BTreeSet<u64>>,
}

impl Waiting {
    /// Has a connection wait for what its request misses; its state from now on.
    pub(super) fn enter(
        &mut self,
        conn: u64,
        request: &Request<'_>,
        missing: Vec<String>,
    ) -> State {
        let wants = match request {
            Request::Get { key, .. } => Wants::Value((*key).to_owned()),
            Request::MultiGet { keys, .. } => {
                Wants::Values(keys.iter().map(|key| (*key).to_owned()).collect())
            }
            _ => Wants::Nothing,
        };
        let missing: BTreeSet<String> = missing.into_iter().collect();
        self.enter_keys(conn, &missing);
        State::Waiting { wants, missing }
    }

    /// Ends the connection's wait; returns the keys that it still missed.
    pub(super) fn leave(&mut self, conn: u64, state: State) -> Vec<String> {
        match state {
            State::Waiting { missing, .. } => {
                for name in &missing {
                    if let Some(waiters) = self.keys.get_mut(name) {
                        waiters.remove(&conn);
                        if waiters.is_empty() {
                            self.keys.remove(name);
                        }
                    }
                }
                missing.into_iter().collect()
            }
            State::Connected(_) | State::Challenged(_) | State::Authenticated => Vec::new(),
        }
    }

    fn enter_keys(&mut self, conn: u64, names: &BTreeSet<String>) {
        for name in names {
            self.keys.entry(name.clone()).or_default().insert(conn);
        }
    }
}

impl Loop {
    /// Wakes the connections that waited for the keys that this request has set.
    pub(super) fn appeared(&mut self, request: &Request<'_>) {
        match request {
            Request::Set { key, .. }
            | Request::Add { key, .. }
            | Request::CompareSet { key, .. } => self.key_appeared(key),
            Request::MultiSet { entries } => {
                for (key, _) in entries {
                    self.key_appeared(key);
                }
            }
            _ => {}
        }
    }

    fn key_appeared(&mut self, name: &str) {
        for key in self.waiting.keys.remove(name).unwrap_or_default() {
            let Some(conn) = self.conns.get_mut(&key) else {
                continue;
            };
            let State::Waiting { wants, missing } = &mut conn.state else {
                continue;
            };
            missing.remove(name);
            if !missing.is_empty() {
                continue;
            }
            let answer = match wants {
                Wants::Nothing => Reply::Done,
                Wants::Value(name) => self.table.get(name).map_or(Reply::Done, Reply::Value),
                Wants::Values(names) => match self.table.values(names) {
                    Ok(answer) => answer,
                    // Some were there and have been deleted since: the wait goes on for these.
                    Err(gone) => {
                        missing.extend(gone);
                        let missing = missing.clone();
                        self.waiting.enter_keys(key, &missing);
                        continue;
                    }
                },
            };
            conn.state = State::Authenticated;
            conn.outbox.push_answer(&answer);
            self.wake(key);
        }
    }

    /// Its wait's deadline is over; the answer gets its own.
    fn wake(&mut self, key: u64) {
        if let Some(conn) = self.conns.get_mut(&key)
            && let Some(at) = conn.deadline.take()
        {
            self.timers.remove(&(at, key));
        }
        self.woken.push_back(key);
    }
}
