//! The probe of a new communicator: each pair of ranks alone, then an exchange and a sum over all, checked on the host.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::call::Float;
use crate::driver::Memory;
use crate::error::NcclError;
use crate::nccl::Reduce;
use crate::options::Probe;
use crate::report::{PairFailure, PairReport};
use crate::worker::Worker;

/// Bounds of a pair's message: less does not show the speed, more only takes memory.
const BYTES_MIN: usize = 4 << 10;
const BYTES_MAX: usize = 256 << 20;
/// Number of timed exchanges, after an untimed one that connects and whose data is checked.
const TIMED: u32 = 4;
/// Time limit of a pair.
const PAIR_LIMIT: Duration = Duration::from_secs(20);
/// Number of summed elements.
const SUMMED: usize = 4096;
/// Words that each rank sends to each other one in the exchange.
const EXCHANGED_WORDS: usize = 256;

/// Runs the probe of the newest lane and records the results in `report`.
///
/// *Errors*: data arrived wrong or not at all; the same on all ranks.
pub(crate) fn probe(
    worker: &mut Worker,
    (probe, bytes): (Probe, usize),
    report: &mut PairReport,
) -> Result<(), NcclError> {
    let world = worker.newest().world();
    if probe == Probe::Pairs && (2..=crate::PROBED_WORLD_MAX).contains(&world) {
        pairs(worker, bytes.clamp(BYTES_MIN, BYTES_MAX), report)?;
    }
    if probe != Probe::None {
        exchange(worker)?;
        sum(worker)?;
    }
    Ok(())
}

/// The result of a rank's part in a round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum Went {
    /// No partner.
    Idle,
    /// The time of one exchange.
    Well { nanoseconds: u64 },
    /// Wrong data arrived.
    WrongData,
    /// NCCL failed, and cannot continue.
    Failed { reason: String },
}

/// Tests every pair alone, in both directions at once, in rounds in which every rank has one partner.
fn pairs(worker: &mut Worker, bytes: usize, report: &mut PairReport) -> Result<(), NcclError> {
    let (rank, world) = (worker.newest().rank(), worker.newest().world());
    report.message_bytes = bytes;
    let memory = [worker.room(bytes)?, worker.room(bytes)?];
    for round in 0..rounds(world) {
        let went = match partner(rank, round, world) {
            Some(peer) => with_partner(worker, &memory, (rank, peer))?,
            None => Went::Idle,
        };
        let told = serde_json::to_vec(&went).expect("words and numbers are always JSON");
        let all = worker.newest().all_gather_bytes(&told)?;
        let mut is_over = false;
        for (to, told) in all.iter().enumerate() {
            let went = serde_json::from_slice(told).unwrap_or_else(|error| Went::Failed {
                reason: format!("rank {to} said something that is no report: {error}"),
            });
            is_over |= matches!(went, Went::Failed { .. });
            if let Some(from) = partner(to, round, world) {
                note(report, (from, to), went);
            }
        }
        // NCCL still waits for the failed exchange, so nothing can follow.
        if is_over {
            break;
        }
    }
    if report.failures.is_empty() {
        return Ok(());
    }
    Err(NcclError::Probe {
        report: Box::new(report.clone()),
    })
}

fn note(report: &mut PairReport, (from, to): (usize, usize), went: Went) {
    let reason = match went {
        Went::Idle => return,
        Went::Well { nanoseconds } => {
            let speed = report.message_bytes as f64 / nanoseconds.max(1) as f64;
            report.gb_per_second[from][to] = Some(speed);
            return;
        }
        Went::WrongData => "other data arrived than was sent".into(),
        Went::Failed { reason } => reason,
    };
    report.failures.push(PairFailure { from, to, reason });
}

/// Number of rounds in which every rank meets every other one once.
fn rounds(world: usize) -> usize {
    world.next_multiple_of(2) - 1
}

/// A rank's partner in a round, by the circle method: one seat is fixed, the others rotate.
fn partner(rank: usize, round: usize, world: usize) -> Option<usize> {
    // An odd world has one empty seat.
    let seats = world.next_multiple_of(2);
    let turning = seats - 1;
    let peer = if rank == turning {
        // Twice the partner's number equals the round's, modulo the turning seats.
        if round.is_multiple_of(2) {
            round / 2
        } else {
            (round + turning) / 2
        }
    } else {
        let mirrored = (round + turning - rank) % turning;
        if mirrored == rank { turning } else { mirrored }
    };
    (peer < world).then_some(peer)
}

/// One checked exchange, then the timed ones.
fn with_partner(
    worker: &mut Worker,
    memory: &[Arc<Memory>; 2],
    (rank, peer): (usize, usize),
) -> Result<Went, NcclError> {
    match exchanges(worker, memory, (rank, peer)) {
        // Reported to the others, who would not learn of it if this rank left.
        Err(NcclError::Deadline { .. }) => Ok(Went::Failed {
            reason: "what was sent did not arrive in time".into(),
        }),
        Err(error @ (NcclError::Nccl { .. } | NcclError::Driver { .. })) => Ok(Went::Failed {
            reason: error.to_string(),
        }),
        other => other,
    }
}

fn exchanges(
    worker: &mut Worker,
    [sent, came]: &[Arc<Memory>; 2],
    (rank, peer): (usize, usize),
) -> Result<Went, NcclError> {
    let bytes = sent.bytes;
    let limit = PAIR_LIMIT.min(worker.newest().timeout() / 2);
    let written = pattern(rank, peer, bytes);
    write(worker, sent, &written)?;
    // Leftovers of the previous round must not pass for the expected data.
    write(worker, came, &written)?;
    let exchange = |worker: &mut Worker| {
        worker.complete("an exchange of two ranks", limit, |comm, stream| {
            // SAFETY: both rooms have this length, and live until the communicator or the probe ends.
            comm.group(|| unsafe {
                comm.send(sent.ptr, bytes, peer, stream)?;
                comm.recv(came.ptr, bytes, peer, stream)
            })
        })
    };
    exchange(worker)?;
    if read(worker, came)? != pattern(peer, rank, bytes) {
        return Ok(Went::WrongData);
    }
    let mut took = Duration::ZERO;
    for _ in 0..TIMED {
        took += exchange(worker)?;
    }
    let nanoseconds = u64::try_from((took / TIMED).as_nanos()).unwrap_or(u64::MAX);
    Ok(Went::Well { nanoseconds })
}

fn write(worker: &Worker, memory: &Memory, data: &[u8]) -> Result<(), NcclError> {
    let stream = &worker.stream;
    let shared = &worker.shared;
    shared.within("cuMemcpyHtoDAsync", || memory.write(data, stream))
}

fn read(worker: &Worker, memory: &Memory) -> Result<Vec<u8>, NcclError> {
    let mut data = vec![0; memory.bytes];
    let stream = &worker.stream;
    let shared = &worker.shared;
    shared.within("cuMemcpyDtoHAsync", || memory.read(&mut data, stream))?;
    Ok(data)
}

/// Pseudorandom bytes, different for each direction of each pair.
fn pattern(from: usize, to: usize, bytes: usize) -> Vec<u8> {
    let seed = mixed((from as u64) << 32 | to as u64);
    let words = (0..bytes.div_ceil(8) as u64).map(|place| mixed(seed ^ place).to_le_bytes());
    let mut all: Vec<u8> = words.flatten().collect();
    all.truncate(bytes);
    all
}

/// *Source*: the finalizer of SplitMix64 (Steele, Lea, Flood 2014).
fn mixed(seed: u64) -> u64 {
    let mut x = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

/// A sum over all ranks, of numbers whose sum is exact in any order.
fn sum(worker: &mut Worker) -> Result<(), NcclError> {
    let (rank, world) = (worker.newest().rank(), worker.newest().world());
    let limit = worker.limit();
    let own = |rank: usize, place: usize| ((rank + 1) * (place % 7 + 1)) as f32;
    let bytes: Vec<u8> = (0..SUMMED)
        .flat_map(|place| own(rank, place).to_le_bytes())
        .collect();
    let room = worker.room(bytes.len())?;
    write(worker, &room, &bytes)?;
    worker.complete("a sum over all ranks", limit, |comm, stream| {
        // SAFETY: the room has this many numbers, and lives as above.
        unsafe { comm.all_reduce(room.ptr, (SUMMED, Float::F32), Reduce::Sum, stream) }
    })?;
    let read = read(worker, &room)?;
    let wrong = read.chunks_exact(4).enumerate().find_map(|(place, came)| {
        let came = f32::from_le_bytes([came[0], came[1], came[2], came[3]]);
        let expected = (world * (world + 1) / 2 * (place % 7 + 1)) as f32;
        (came != expected).then(|| (expected.to_string(), came.to_string()))
    });
    judge(worker, "sum", wrong)
}

/// Every rank sends every other one different data.
fn exchange(worker: &mut Worker) -> Result<(), NcclError> {
    let (rank, world) = (worker.newest().rank(), worker.newest().world());
    let limit = worker.limit();
    let each = EXCHANGED_WORDS * 8;
    let sent: Vec<u8> = (0..world)
        .flat_map(|peer| pattern(rank, peer, each))
        .collect();
    let (from, to) = (worker.room(sent.len())?, worker.room(sent.len())?);
    write(worker, &from, &sent)?;
    write(worker, &to, &sent)?;
    worker.complete("an exchange of all ranks", limit, |comm, stream| {
        comm.group(|| {
            for peer in (0..world).filter(|peer| *peer != rank) {
                let place = (peer * each) as u64;
                // SAFETY: both rooms have a part for every peer, and live as above.
                unsafe {
                    comm.send(from.ptr + place, each, peer, stream)?;
                    comm.recv(to.ptr + place, each, peer, stream)?;
                }
            }
            Ok(())
        })
    })?;
    let read = read(worker, &to)?;
    let came = read.chunks_exact(each).enumerate();
    let wrong = came
        .filter(|(peer, _)| *peer != rank)
        .find_map(|(peer, came)| {
            let expected = pattern(peer, rank, each);
            let words = expected.chunks_exact(8).zip(came.chunks_exact(8));
            let (expected, came) = words
                .into_iter()
                .find(|(expected, came)| expected != came)?;
            Some((
                format!("{expected:02x?} from rank {peer}"),
                format!("{came:02x?}"),
            ))
        });
    judge(worker, "exchange", wrong)
}

/// The first wrong result of any rank, on all of them.
fn judge(
    worker: &Worker,
    what: &'static str,
    wrong: Option<(String, String)>,
) -> Result<(), NcclError> {
    let own = serde_json::to_vec(&wrong).expect("strings are always JSON");
    let all = worker.newest().all_gather_bytes(&own)?;
    for (rank, bytes) in all.iter().enumerate() {
        let wrong: Option<(String, String)> = serde_json::from_slice(bytes).unwrap_or_default();
        if let Some((expected, got)) = wrong {
            return Err(NcclError::WrongResult {
                rank,
                what,
                expected,
                got,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_rounds_every_rank_meets_every_other_one_once() {
        for world in 2..=21 {
            let mut met = vec![vec![0; world]; world];
            for round in 0..rounds(world) {
                for (rank, met) in met.iter_mut().enumerate() {
                    if let Some(peer) = partner(rank, round, world) {
                        assert_ne!(peer, rank);
                        assert_eq!(partner(peer, round, world), Some(rank), "{world} {round}");
                        met[peer] += 1;
                    }
                }
            }
            for (rank, met) in met.iter().enumerate() {
                for (peer, times) in met.iter().enumerate() {
                    assert_eq!(
                        *times,
                        usize::from(peer != rank),
                        "{rank} {peer} of {world}"
                    );
                }
            }
        }
    }

    #[test]
    fn every_direction_has_data_of_its_own() {
        let mut all: Vec<Vec<u8>> = Vec::new();
        for from in 0..4 {
            for to in 0..4 {
                all.push(pattern(from, to, 24));
            }
        }
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count);
        assert_eq!(pattern(0, 1, 13).len(), 13);
    }
}
