//! The connections that a rank has accepted, and what became of them.

use std::collections::HashMap;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use super::{Arrival, Connections};
use crate::socket::Socket;

/// What happened at the door so far.
pub(super) struct Visits {
    pub(super) connections: Connections,
    /// Connections that higher ranks have not made yet.
    pub(super) awaited: usize,
    /// By number of the visit.
    pub(super) at_the_door: HashMap<usize, Socket>,
    pub(super) refused: usize,
    pub(super) last: String,
}

impl Visits {
    pub(super) fn enter(&mut self, visit: usize, arrival: Arrival) {
        self.at_the_door.remove(&visit);
        match arrival {
            // A rank that dials twice gave up on the first connection.
            Ok((peer, lane, socket)) => {
                let before = self.connections[lane][peer].replace(socket);
                self.awaited -= usize::from(before.is_none());
            }
            Err(reason) => {
                self.refused += 1;
                self.last = reason.to_string();
            }
        }
    }

    /// Accepts connections that are already waiting.
    ///
    /// *Blocks*: at most for `limit`: there may be strangers among them, who say nothing.
    pub(super) fn admit(&mut self, arrivals: &Receiver<(usize, Arrival)>, limit: Duration) {
        let until = Instant::now() + limit;
        while !self.at_the_door.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            let Ok((visit, arrival)) = arrivals.recv_timeout(left) else {
                return;
            };
            self.enter(visit, arrival);
        }
    }

    /// Ranks above `rank` that have not come on all of their `lanes`.
    pub(super) fn missing(&self, rank: usize, lanes: &[usize]) -> Vec<usize> {
        let is_missing = |peer: &usize| {
            let mut connections = self.connections.iter().take(lanes[*peer]);
            connections.any(|sockets| sockets[*peer].is_none())
        };
        (rank + 1..lanes.len()).filter(is_missing).collect()
    }

    pub(super) fn detail(&self) -> String {
        match self.refused {
            0 => String::new(),
            n => format!(
                "; {n} connections were refused meanwhile, the last because {}",
                self.last
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn waiting_connections_are_accepted_and_a_stranger_is_not_waited_for() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut visits = Visits {
            connections: vec![vec![None, None]],
            awaited: 1,
            at_the_door: HashMap::from([(0, Socket::Unix(ours.try_clone().unwrap()))]),
            refused: 0,
            last: String::new(),
        };
        let (sender, arrivals) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| sender.send((0, Ok((1, 0, Socket::Unix(ours))))).unwrap());
            visits.admit(&arrivals, Duration::from_secs(30));
        });
        assert!(visits.connections[0][1].is_some());
        assert_eq!(visits.awaited, 0);
        visits.at_the_door.insert(1, Socket::Unix(theirs));
        visits.admit(&arrivals, Duration::from_millis(1));
        assert!(visits.at_the_door.contains_key(&1));
    }
}
