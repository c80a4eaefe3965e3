//! What each rank publishes about itself, and which transport follows from all of it.

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use paceline_rendezvous::wait::wait_for;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::options::Transport;
use crate::plan::Hosts;
use crate::stream::LANES_MAX;

/// Version of the records, of the segments and of everything that travels on the connections.
pub(super) const PROTOCOL: u32 = 8;
/// Data connections of a pair unless somebody asks for another number. On one host a second one only costs system calls;
/// between hosts one connection is often held back by one core, by one path of the network or by a lost packet.
const SOCKETS_ON_ONE_HOST: usize = 1;
const SOCKETS_BETWEEN_HOSTS: usize = 4;
/// The same for more ranks than [`FEW_RANKS`]: each has connections to all others.
const SOCKETS_OF_MANY_RANKS: usize = 2;
const FEW_RANKS: usize = 64;
/// How long a process may take to end after its socket has closed.
pub(super) const END_TIMEOUT: Duration = Duration::from_millis(100);
/// Longest entry of a rank that is read.
pub(super) const ENTRY_BYTES_MAX: usize = 64 << 10;

/// One rank's entry in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) protocol: u32,
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) transport: String,
    pub(super) host: String,
    /// Changes with every boot; with the host's name it tells machines apart.
    pub(super) boot: String,
    /// Identity of the network namespace, if it can be read. Abstract Unix sockets, over which ranks hand each other their
    /// memory, do not reach beyond it, so it tells containers of one name apart.
    pub(super) net: Option<(u64, u64)>,
    pub(super) pid: u32,
    /// Identity of the namespace of process numbers, so that ranks know whether they see the same processes.
    pub(super) pids: Option<(u64, u64)>,
    pub(super) local_rank: usize,
    /// Device and inode of the launcher's page, for ranks that have one.
    pub(super) page: Option<(u64, u64)>,
    /// Name of the abstract Unix socket that it listens at, unless it only takes TCP.
    pub(super) unix: Option<String>,
    /// Addresses that it listens at, best first, unless it only takes shared memory.
    pub(super) tcp: Vec<IpAddr>,
    pub(super) port: u16,
    /// Data connections of each pair that it asks for.
    pub(super) sockets: Option<usize>,
    /// The MPI library that it would use, or why it has none; only where MPI was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) mpi: Option<Result<String, String>>,
    /// The rank that its process was started with.
    pub(super) started: usize,
}

impl Record {
    pub(super) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a record has string keys only")
    }

    /// The record of `rank`, or what is wrong with the bytes.
    pub(super) fn decode(bytes: &[u8], rank: usize, world: usize) -> Result<Self, String> {
        let record: Self = read_json(bytes, "record")?;
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
        match record.sockets {
            Some(sockets) if !(1..=LANES_MAX).contains(&sockets) => Err(format!(
                "it asks for {sockets} sockets per peer, expected 1 to {LANES_MAX}"
            )),
            _ => Ok(record),
        }
    }

    /// Whether this rank can see that the process of another one has ended, or does within `limit`.
    pub(super) fn sees_the_end_of(&self, other: &Self, limit: Duration) -> bool {
        let sees = self.is_on_machine_of(other) && self.pids.is_some() && self.pids == other.pids;
        sees && ends_within(other.pid, limit)
    }

    fn is_on_machine_of(&self, other: &Self) -> bool {
        (&self.host, &self.boot) == (&other.host, &other.boot)
    }

    /// What ranks have in common that may share memory, as far as names tell; [`proven`](super::reach::proven) knows.
    fn host_identity(&self) -> (&str, &str, Option<(u64, u64)>) {
        (&self.host, &self.boot, self.net)
    }

    fn is_on_host_of(&self, other: &Self) -> bool {
        self.host_identity() == other.host_identity()
    }
}

/// A rank's entry in the store, or what is wrong with it.
pub(super) fn read_json<T: DeserializeOwned>(bytes: &[u8], what: &str) -> Result<T, String> {
    if bytes.len() > ENTRY_BYTES_MAX {
        return Err(format!(
            "its {what} has {} bytes, at most {ENTRY_BYTES_MAX} are allowed",
            bytes.len()
        ));
    }
    serde_json::from_slice(bytes).map_err(|error| format!("its {what} is unreadable: {error}"))
}

/// Device and inode of one of this process's namespaces.
pub(super) fn namespace(kind: &str) -> Option<(u64, u64)> {
    let stat = rustix::fs::stat(format!("/proc/self/ns/{kind}")).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

/// Whether a process has ended, or does within `limit`: its sockets close a moment before it counts as dead.
fn ends_within(pid: u32, limit: Duration) -> bool {
    let Some(process) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return false;
    };
    match pidfd_open(process, PidfdFlags::empty()) {
        Ok(process) => {
            // A system that cannot wait for it cannot tell either.
            wait_for(process.as_fd(), PollFlags::IN, Instant::now() + limit).unwrap_or(false)
        }
        Err(error) => error == Errno::SRCH,
    }
}

/// What the records lead to. The same on every rank, because it is made of the same records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Choice {
    /// Shared memory within hosts, if the ranks of each can reach each other, and TCP or MPI between hosts. `or_tcp`: what to do
    /// if not.
    Share { or_tcp: bool },
    /// Nothing shared: TCP or MPI between all ranks.
    Tcp,
    /// Shared memory or MPI was asked for and cannot work.
    Impossible { reason: String },
    /// This rank asks for something else than rank 0.
    Quarrel { rank: usize, reason: String },
}

pub(super) fn choose(records: &[Record]) -> Choice {
    let first = &records[0];
    let differs = |what: &str, words: &dyn Fn(&Record) -> String| {
        let odd = records
            .iter()
            .find(|record| words(record) != words(first))?;
        let (rank, ours, theirs) = (odd.rank, words(first), words(odd));
        let reason = format!("rank 0 asks for {what}{ours}, rank {rank} for {theirs}");
        Some((rank, reason))
    };
    let transport = |record: &Record| record.transport.clone();
    let sockets = |record: &Record| match record.sockets {
        Some(sockets) => format!("{sockets} sockets per peer"),
        None => "no number of sockets per peer".into(),
    };
    if let Some((rank, reason)) =
        differs("transport ", &transport).or_else(|| differs("", &sockets))
    {
        return Choice::Quarrel { rank, reason };
    }
    if let Some(reason) = without_mpi(records) {
        return Choice::Impossible { reason };
    }
    let stranger = records.iter().find(|record| !record.is_on_host_of(first));
    let wish = Transport::from_name(&first.transport);
    let or_tcp = wish == Some(Transport::Auto);
    match (wish, stranger) {
        (Some(Transport::Tcp), _) => Choice::Tcp,
        (Some(_), None) => Choice::Share { or_tcp },
        (Some(Transport::Hierarchical | Transport::Auto | Transport::Mpi), Some(_)) => {
            match hosts(records).mixed() {
                true => Choice::Share { or_tcp },
                false => Choice::Tcp,
            }
        }
        (Some(Transport::Shm), Some(stranger)) => Choice::Impossible {
            reason: match first.is_on_machine_of(stranger) {
                false => format!(
                    "rank 0 is on host {}, rank {} on host {}",
                    first.host, stranger.rank, stranger.host
                ),
                true => format!(
                    "rank 0 and rank {} are in different network namespaces of host {}",
                    stranger.rank, first.host
                ),
            },
        },
        (None, _) => Choice::Quarrel {
            rank: 0,
            reason: format!("transport {} is unknown", first.transport),
        },
    }
}

/// Why ranks that ask for MPI cannot use it together.
fn without_mpi(records: &[Record]) -> Option<String> {
    let mut libraries = records.iter().filter_map(|record| match &record.mpi {
        None => None,
        Some(Ok(version)) => Some(Ok((record.rank, version))),
        Some(Err(reason)) => Some(Err(format!("rank {} cannot: {reason}", record.rank))),
    });
    let (rank, version) = match libraries.next()? {
        Ok(first) => first,
        Err(reason) => return Some(reason),
    };
    libraries.find_map(|library| match library {
        Ok((_, other)) if other == version => None,
        Ok((other, theirs)) => Some(format!(
            "rank {rank} has {version}, rank {other} has {theirs}"
        )),
        Err(reason) => Some(reason),
    })
}

/// Which ranks share a host.
pub(super) fn hosts(records: &[Record]) -> Hosts {
    let mut numbers = HashMap::new();
    let numbered = records.iter().map(|record| {
        let next = numbers.len();
        *numbers.entry(record.host_identity()).or_insert(next)
    });
    Hosts::new(numbered.collect())
}

/// Data connections of each pair. The same on every rank, because records that differ in it are a quarrel.
pub(super) fn data_lanes(records: &[Record]) -> usize {
    let first = &records[0];
    let one_host = records.iter().all(|record| record.is_on_host_of(first));
    first.sockets.unwrap_or(match one_host {
        true => SOCKETS_ON_ONE_HOST,
        false if records.len() <= FEW_RANKS => SOCKETS_BETWEEN_HOSTS,
        false => SOCKETS_OF_MANY_RANKS,
    })
}

/// The slot of `peer` on the page of `me`, when they have the same one.
pub(super) fn shared_slot(me: &Record, peer: &Record) -> Option<usize> {
    let shared = me.rank == peer.rank
        || (me.page.is_some() && me.page == peer.page && me.is_on_machine_of(peer));
    shared.then_some(peer.local_rank)
}

/// The records of a world, as they come from the store.
#[cfg(test)]
pub(crate) struct Simulated(Vec<Vec<u8>>);

#[cfg(test)]
pub(crate) fn simulated(world: usize, mates: usize) -> Simulated {
    let record = |rank: usize| {
        let host = format!("node{}.cluster", rank / mates);
        let record = Record {
            world,
            unix: Some(format!("paceline-{rank:032x}")),
            ..tests::record(rank, "auto", &host)
        };
        record.encode()
    };
    Simulated((0..world).map(record).collect())
}

#[cfg(test)]
impl Simulated {
    /// What a rank makes of them: the hosts as they are, if all ranks reach those of their own.
    pub(crate) fn hosts(&self) -> Hosts {
        let world = self.0.len();
        let records = self.0.iter().enumerate();
        let records: Vec<Record> = records
            .map(|(rank, bytes)| Record::decode(bytes, rank, world).unwrap())
            .collect();
        assert!(matches!(choose(&records), Choice::Share { .. }));
        super::reach::proven(
            &hosts(&records),
            &vec![super::reach::Reach::default(); world],
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(super) fn record(rank: usize, transport: &str, host: &str) -> Record {
        Record {
            protocol: PROTOCOL,
            rank,
            world: 3,
            transport: transport.into(),
            host: host.into(),
            boot: "b".into(),
            net: Some((4, 1)),
            pid: 1,
            pids: None,
            local_rank: rank,
            page: None,
            unix: None,
            tcp: vec!["127.0.0.1".parse().unwrap()],
            port: 1,
            sockets: None,
            mpi: None,
            started: rank,
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
            Choice::Share { or_tcp: true }
        );
        assert_eq!(
            chosen([("shm", "a"), ("shm", "a"), ("shm", "a")]),
            Choice::Share { or_tcp: false }
        );
        for hosts in [["a"; 3], ["a", "a", "b"], ["a", "b", "c"]] {
            assert_eq!(chosen(hosts.map(|host| ("tcp", host))), Choice::Tcp);
        }
    }

    #[test]
    fn some_ranks_on_one_host_and_others_elsewhere_do_both() {
        for (wish, or_tcp) in [("auto", true), ("hierarchical", false)] {
            let chosen = |hosts: [&'static str; 3]| chosen(hosts.map(|host| (wish, host)));
            let hosts = Choice::Share { or_tcp };
            assert_eq!(chosen(["a", "a", "b"]), hosts);
            assert_eq!(chosen(["a", "b", "a"]), hosts);
            assert_eq!(chosen(["a", "b", "c"]), Choice::Tcp);
            assert_eq!(chosen(["a", "a", "a"]), Choice::Share { or_tcp });
        }
    }

    #[test]
    fn hosts_are_numbered_by_their_lowest_ranks() {
        let records = ["b", "a", "b"].iter().enumerate();
        let mut records: Vec<_> = records
            .map(|(rank, host)| record(rank, "auto", host))
            .collect();
        assert_eq!(hosts(&records), Hosts::new(vec![0, 1, 0]));
        // Another container of the same name on the same machine, then another machine.
        records[2].net = Some((4, 2));
        assert_eq!(hosts(&records), Hosts::apart(3));
        records[2].net = records[0].net;
        records[2].boot = "c".into();
        assert_eq!(hosts(&records), Hosts::apart(3));
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
    fn mpi_needs_one_library_on_all_ranks() {
        let chosen = |libraries: [Result<&str, &str>; 3], hosts: [&str; 3]| {
            let records = libraries.into_iter().zip(hosts).enumerate();
            let records = records.map(|(rank, (library, host))| Record {
                mpi: Some(library.map(String::from).map_err(String::from)),
                ..record(rank, "mpi", host)
            });
            choose(&records.collect::<Vec<_>>())
        };
        let same = [Ok("Open MPI v4.1.4"); 3];
        assert_eq!(chosen(same, ["a", "b", "c"]), Choice::Tcp);
        for hosts in [["a"; 3], ["a", "a", "b"]] {
            assert_eq!(chosen(same, hosts), Choice::Share { or_tcp: false });
        }
        for (libraries, expected) in [
            (
                [
                    Ok("Open MPI v4.1.4"),
                    Ok("Open MPI v4.1.4"),
                    Ok("MPICH Version: 4.0.2"),
                ],
                "rank 0 has Open MPI v4.1.4, rank 2 has MPICH Version: 4.0.2",
            ),
            (
                [Ok("Open MPI v4.1.4"), Err("it is not there"), Ok("MPICH")],
                "rank 1 cannot: it is not there",
            ),
        ] {
            let reason = expected.into();
            assert_eq!(chosen(libraries, ["a"; 3]), Choice::Impossible { reason });
        }
    }

    #[test]
    fn the_number_of_sockets_is_everybodys_or_the_hosts() {
        let records = |sockets: [Option<usize>; 3], host: &str| {
            let records = sockets
                .into_iter()
                .enumerate()
                .map(|(rank, sockets)| Record {
                    sockets,
                    ..record(rank, "tcp", if rank == 2 { host } else { "a" })
                });
            records.collect::<Vec<_>>()
        };
        assert_eq!(data_lanes(&records([None; 3], "a")), SOCKETS_ON_ONE_HOST);
        assert_eq!(data_lanes(&records([None; 3], "b")), SOCKETS_BETWEEN_HOSTS);
        assert_eq!(data_lanes(&records([Some(5); 3], "a")), 5);
        let host = |rank| if rank == 0 { "b" } else { "a" };
        let many = (0..=FEW_RANKS).map(|rank| record(rank, "tcp", host(rank)));
        let many: Vec<Record> = many.collect();
        assert_eq!(data_lanes(&many), SOCKETS_OF_MANY_RANKS);
        assert_eq!(data_lanes(&many[1..]), SOCKETS_ON_ONE_HOST);
        assert_eq!(
            choose(&records([Some(2), Some(2), Some(4)], "a")),
            Choice::Quarrel {
                rank: 2,
                reason: "rank 0 asks for 2 sockets per peer, rank 2 for 4 sockets per peer".into()
            }
        );
        assert_eq!(
            choose(&records([Some(2), None, Some(2)], "a")),
            Choice::Quarrel {
                rank: 1,
                reason:
                    "rank 0 asks for 2 sockets per peer, rank 1 for no number of sockets per peer"
                        .into()
            }
        );
    }

    #[test]
    fn impossible_numbers_of_sockets_are_refused() {
        for sockets in [0, LANES_MAX + 1, usize::MAX] {
            let record = Record {
                sockets: Some(sockets),
                ..record(1, "tcp", "a")
            };
            let error = Record::decode(&record.encode(), 1, 3).unwrap_err();
            assert!(
                error.contains("sockets per peer, expected 1 to 8"),
                "{error}"
            );
        }
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
        assert!(Record::decode(&vec![b' '; ENTRY_BYTES_MAX + 1], 1, 3).is_err());
    }

    #[test]
    fn the_end_of_a_process_is_seen_where_its_number_means_it() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let here = Record {
            pid: std::process::id(),
            pids: namespace("pid"),
            ..record(0, "shm", "a")
        };
        let there = Record {
            pid: child.id(),
            ..here.clone()
        };
        let of = |pids| Record {
            pids,
            ..there.clone()
        };
        let (at_once, patient) = (Duration::ZERO, Duration::from_secs(20));
        assert!(namespace("pid").is_some() && !here.sees_the_end_of(&here, at_once));
        // Dead, and waited for only afterwards.
        assert!(here.sees_the_end_of(&there, patient));
        assert!(child.wait().unwrap().success() && here.sees_the_end_of(&there, at_once));
        assert!(!here.sees_the_end_of(&of(None), at_once));
        assert!(!here.sees_the_end_of(&of(Some((0, 1))), at_once));
        let elsewhere = Record {
            host: "b".into(),
            ..there.clone()
        };
        assert!(!here.sees_the_end_of(&elsewhere, at_once));
    }

    /// Files are named after what they are to rank 1 of 3: `good-*` is a record that survives, `bad-*` is refused in words.
    #[test]
    fn the_saved_corpus_is_judged_as_its_names_say() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus/record");
        let mut seen = [0, 0];
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let good = name.starts_with("good-");
            assert!(good || name.starts_with("bad-"), "{name}");
            match Record::decode(&bytes, 1, 3) {
                Ok(record) => {
                    assert!(good, "{name}: {record:?}");
                    assert_eq!(Record::decode(&record.encode(), 1, 3).unwrap(), record);
                    // Whatever it holds, the choice made of it is a choice.
                    let _ = choose(&[record.clone(), record]);
                }
                Err(reason) => assert!(!good && !reason.is_empty(), "{name}: {reason}"),
            }
            seen[usize::from(good)] += 1;
        }
        assert!(seen[0] >= 15 && seen[1] >= 8, "{seen:?}");
    }

    proptest! {
        #[test]
        fn a_changed_byte_is_another_record_or_an_error(at in 0_usize..1000, byte in any::<u8>()) {
            let mut bytes = record(1, "auto", "a").encode();
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(other) = Record::decode(&bytes, 1, 3) {
                prop_assert_eq!(Record::decode(&other.encode(), 1, 3).unwrap(), other);
            }
        }

        #[test]
        fn any_bytes_are_a_record_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(Record::decode(&bytes, 0, 1).is_err());
        }
    }
}
