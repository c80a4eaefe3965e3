//! Who waits for what, and what happens when it comes.

use std::collections::{BTreeSet, HashMap};

use super::super::conn::{State, Wants};
use super::super::table::{Answer, Item};
use super::super::wire::Request;
use super::{Loop, show};

/// Connections that wait, by what they wait for.
#[derive(Default)]
pub(super) struct Waiting {
    keys: HashMap<String, BTreeSet<u64>>,
    /// With the turn in which they came: the first to ask is the first to get an item.
    queues: HashMap<String, BTreeSet<(u64, u64)>>,
    turns: u64,
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
            Request::QueuePop { key, .. } => {
                self.turns += 1;
                let waiters = self.queues.entry((*key).to_owned()).or_default();
                waiters.insert((self.turns, conn));
                return State::Popping {
                    queue: (*key).to_owned(),
                    turn: self.turns,
                };
            }
            Request::Get { key, .. } => Wants::Value((*key).to_owned()),
            Request::MultiGet { keys, .. } => {
                Wants::Values(keys.iter().map(|key| (*key).to_owned()).collect())
            }
            _ => Wants::Nothing,
        };
        let missing: BTreeSet<String> = missing.into_iter().collect();
        self.enter_keys(conn, &missing);
        State::Parked { wants, missing }
    }

    /// The connection waits no more; what it still missed.
    pub(super) fn leave(&mut self, conn: u64, state: State) -> Vec<String> {
        match state {
            State::Parked { missing, .. } => {
                for name in &missing {
                    remove(&mut self.keys, name, &conn);
                }
                missing.into_iter().collect()
            }
            State::Popping { queue, turn } => {
                remove(&mut self.queues, &queue, &(turn, conn));
                vec![queue]
            }
            State::Stranger(_) | State::Greeted(_) | State::Member => Vec::new(),
        }
    }

    fn enter_keys(&mut self, conn: u64, names: &BTreeSet<String>) {
        for name in names {
            self.keys.entry(name.clone()).or_default().insert(conn);
        }
    }

    /// The connection that has waited longest for an item of the queue.
    fn first_popper(&mut self, queue: &str) -> Option<u64> {
        let waiters = self.queues.get_mut(queue)?;
        let (_, conn) = waiters.pop_first()?;
        if waiters.is_empty() {
            self.queues.remove(queue);
        }
        Some(conn)
    }
}

impl Loop {
    /// Wakes those who waited for the keys that this request has set.
    pub(super) fn appeared(&mut self, request: &Request<'_>) {
        match request {
            Request::Set { key, .. }
            | Request::Add { key, .. }
            | Request::CompareSet { key, .. }
            | Request::Append { key, .. } => self.key_appeared(key),
            Request::MultiSet { entries } => {
                for (key, _) in entries {
                    self.key_appeared(key);
                }
            }
            _ => {}
        }
    }

    /// Shows a queue's items to those who wait for them, first come, first served.
    pub(super) fn offer(&mut self, queue: &str) {
        while self.waiting.queues.contains_key(queue)
            && let Some(item) = self.table.pop(queue)
        {
            let popper = self.waiting.first_popper(queue);
            let Some((key, conn)) = popper.and_then(|key| Some((key, self.conns.get_mut(&key)?)))
            else {
                self.table.put_back(queue, item);
                continue;
            };
            conn.state = State::Member;
            show(conn, queue.to_owned(), item);
            self.wake(key);
        }
    }

    /// An item that its client was shown and did not take is the next one's.
    pub(super) fn put_back(&mut self, shown: Option<(String, Item)>) {
        if let Some((queue, item)) = shown {
            self.table.put_back(&queue, item);
            self.offer(&queue);
        }
    }

    fn key_appeared(&mut self, name: &str) {
        for key in self.waiting.keys.remove(name).unwrap_or_default() {
            let Some(conn) = self.conns.get_mut(&key) else {
                continue;
            };
            let State::Parked { wants, missing } = &mut conn.state else {
                continue;
            };
            missing.remove(name);
            if !missing.is_empty() {
                continue;
            }
            let answer = match wants {
                Wants::Nothing => Answer::Done,
                Wants::Value(name) => self.table.get(name).map_or(Answer::Done, Answer::Value),
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
            conn.state = State::Member;
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

fn remove<T: Ord>(waiters: &mut HashMap<String, BTreeSet<T>>, name: &str, waiter: &T) {
    if let Some(set) = waiters.get_mut(name) {
        set.remove(waiter);
        if set.is_empty() {
            waiters.remove(name);
        }
    }
}
