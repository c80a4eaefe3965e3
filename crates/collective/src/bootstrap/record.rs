//! What each rank publishes about itself, and which transport follows from all of it.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::options::Transport;

/// Version of the records, of the segments and of everything that travels on the connections.
pub(super) const PROTOCOL: u32 = 1;
/// Longest encoded record that is read.
const RECORD_BYTES_MAX: usize = 64 << 10;

/// One rank's entry in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) protocol: u32,
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) transport: String,
    pub(super) host: String,
    /// Changes with every boot; with the host name it tells machines and containers apart.
    pub(super) boot: String,
    pub(super) pid: u32,
    pub(super) local_rank: usize,
    /// Device and inode of the launcher's page, for ranks that have one.
    pub(super) page: Option<(u64, u64)>,
    /// Name of the abstract Unix socket that it listens at, unless it only takes TCP.
    pub(super) unix: Option<String>,
    /// Addresses that it listens at, best first, unless it only takes shared memory.
    pub(super) tcp: Vec<IpAddr>,
    pub(super) port: u16,
}

impl Record {
    pub(super) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a record has string keys only")
    }

    /// The record of `rank`, or what is wrong with the bytes.
    pub(super) fn decode(bytes: &[u8], rank: usize, world: usize) -> Result<Self, String> {
        if bytes.len() > RECORD_BYTES_MAX {
            return Err(format!(
                "its record has {} bytes, at most {RECORD_BYTES_MAX} are allowed",
                bytes.len()
            ));
        }
        let record: Self = serde_json::from_slice(bytes)
            .map_err(|error| format!("its record is unreadable: {error}"))?;
        if record.protocol != PROTOCOL {
            return Err(format!(
                "it speaks protocol {}, this rank {PROTOCOL}",
                record.protocol
            ));
        }
        if (record.rank, record.world) != (rank, world) {
            return Err(format!(
                "it is rank {} of {}, expected rank {rank} of {world}",
                record.rank, record.world
            ));
        }
        Ok(record)
    }

    fn is_on_host_of(&self, other: &Self) -> bool {
        (&self.host, &self.boot) == (&other.host, &other.boot)
    }
}

/// What the records lead to. The same on every rank, because it is made of the same records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Choice {
    /// Shared memory, if all can reach each other. `or_tcp`: what to do when not.
    TryShm {
        or_tcp: bool,
    },
    Tcp,
    /// Shared memory was asked for and cannot work.
    Impossible {
        reason: String,
    },
    /// This rank asks for something else than rank 0.
    Quarrel {
        rank: usize,
        reason: String,
    },
}

pub(super) fn choose(records: &[Record]) -> Choice {
    let first = &records[0];
    if let Some(odd) = records
        .iter()
        .find(|record| record.transport != first.transport)
    {
        let reason = format!(
            "rank 0 asks for transport {}, rank {} for {}",
            first.transport, odd.rank, odd.transport
        );
        return Choice::Quarrel {
            rank: odd.rank,
            reason,
        };
    }
    let stranger = records.iter().find(|record| !record.is_on_host_of(first));
    match (Transport::from_name(&first.transport), stranger) {
        (Some(Transport::Tcp), _) => Choice::Tcp,
        (Some(Transport::Shm), None) => Choice::TryShm { or_tcp: false },
        (Some(Transport::Auto), None) => Choice::TryShm { or_tcp: true },
        (Some(Transport::Auto), Some(_)) => Choice::Tcp,
        (Some(Transport::Shm), Some(stranger)) => Choice::Impossible {
            reason: format!(
                "rank 0 is on host {}, rank {} on host {}",
                first.host, stranger.rank, stranger.host
            ),
        },
        (None, _) => Choice::Quarrel {
            rank: 0,
            reason: format!("transport {} is unknown", first.transport),
        },
    }
}

/// The slot of `peer` on the page of `me`, when they have the same one.
pub(super) fn shared_slot(me: &Record, peer: &Record) -> Option<usize> {
    let shared = me.rank == peer.rank
        || (me.page.is_some() && me.page == peer.page && me.is_on_host_of(peer));
    shared.then_some(peer.local_rank)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(rank: usize, transport: &str, host: &str) -> Record {
        Record {
            protocol: PROTOCOL,
            rank,
            world: 3,
            transport: transport.into(),
            host: host.into(),
            boot: "b".into(),
            pid: 1,
            local_rank: rank,
            page: None,
            unix: None,
            tcp: vec!["127.0.0.1".parse().unwrap()],
            port: 1,
        }
    }

    fn chosen(ranks: [(&str, &str); 3]) -> Choice {
        let records: Vec<_> = ranks
            .iter()
            .enumerate()
            .map(|(rank, (wish, host))| record(rank, wish, host))
            .collect();
        choose(&records)
    }

    #[test]
    fn one_host_shares_memory_and_several_do_not() {
        assert_eq!(
            chosen([("auto", "a"), ("auto", "a"), ("auto", "a")]),
            Choice::TryShm { or_tcp: true }
        );
        assert_eq!(
            chosen([("shm", "a"), ("shm", "a"), ("shm", "a")]),
            Choice::TryShm { or_tcp: false }
        );
        assert_eq!(
            chosen([("auto", "a"), ("auto", "a"), ("auto", "b")]),
            Choice::Tcp
        );
        assert_eq!(
            chosen([("tcp", "a"), ("tcp", "a"), ("tcp", "a")]),
            Choice::Tcp
        );
    }

    #[test]
    fn shared_memory_over_two_hosts_is_refused_with_their_names() {
        let Choice::Impossible { reason } = chosen([("shm", "a"), ("shm", "a"), ("shm", "b")])
        else {
            panic!("not refused")
        };
        assert_eq!(reason, "rank 0 is on host a, rank 2 on host b");
    }

    #[test]
    fn different_wishes_are_a_quarrel() {
        let Choice::Quarrel { rank, reason } = chosen([("auto", "a"), ("tcp", "a"), ("auto", "a")])
        else {
            panic!("no quarrel")
        };
        assert_eq!(
            (rank, reason.as_str()),
            (1, "rank 0 asks for transport auto, rank 1 for tcp")
        );
    }

    #[test]
    fn records_survive_and_others_are_refused() {
        let one = record(1, "auto", "a");
        assert_eq!(Record::decode(&one.encode(), 1, 3).unwrap(), one);
        assert!(
            Record::decode(&one.encode(), 2, 3)
                .unwrap_err()
                .contains("expected rank 2 of 3")
        );
        let newer = Record { protocol: 9, ..one };
        assert!(
            Record::decode(&newer.encode(), 1, 3)
                .unwrap_err()
                .contains("speaks protocol 9")
        );
        assert!(Record::decode(&vec![b' '; RECORD_BYTES_MAX + 1], 1, 3).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_record_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(Record::decode(&bytes, 0, 1).is_err());
        }
    }
}
