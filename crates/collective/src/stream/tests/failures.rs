//! What a rank makes of peers that call something else, break the protocol, stall or die.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::job::{Job, LONG, alone, header, spot, task, unix_pair, wires};
use crate::error::Error;
use crate::plan::{Algorithm, Hosts, Kind, Pattern, Space};
use crate::socket::Socket;
use crate::stream::frame::{Frame, MEETING};
use crate::stream::*;

fn all_reduce(len: usize, world: usize) -> Job {
    let pattern = Pattern::new(Kind::AllReduce, len);
    Job::new(
        pattern,
        Algorithm::Direct,
        world,
        Hosts::apart(world),
        world,
    )
}

/// Every rank calls with its own total; what each of them is told.
fn quarrel(totals: &[usize], pattern: impl Fn(usize) -> Pattern + Sync) -> Vec<Error> {
    let world = totals.len();
    let wires = wires(&Hosts::apart(world), world, 2, unix_pair);
    let call = |rank: usize, sockets| {
        let hosts = Hosts::apart(world);
        let job = Job::new(
            pattern(totals[rank]),
            Algorithm::Direct,
            world,
            hosts,
            world,
        );
        let mut streams = Streams::new(rank, sockets).unwrap();
        let header = header(totals[rank], world);
        let error = alone(&job, (rank, 0), &mut streams, &header, LONG).unwrap_err();
        // Kept until all are done: a connection that ends is another error.
        (error, streams)
    };
    std::thread::scope(|scope| {
        let ranks = wires.into_iter().enumerate();
        let ranks: Vec<_> = ranks
            .map(|(rank, sockets)| scope.spawn(move || call(rank, sockets)))
            .collect();
        let outcomes: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        outcomes.into_iter().map(|(error, _)| error).collect()
    })
}

#[test]
fn different_calls_are_the_same_mismatch_on_every_rank() {
    for len in [10, 2_000_000] {
        let errors = quarrel(&[len, len, len + 1], |len| {
            Pattern::new(Kind::AllReduce, len)
        });
        for error in &errors {
            assert!(
                matches!(
                    error,
                    Error::Mismatch {
                        culprit: Some(2),
                        ..
                    }
                ),
                "{error}"
            );
            assert_eq!(error.to_string(), errors[0].to_string());
        }
    }
    // A rank that neither sends to the odd one nor gets anything from it hears of it all the same.
    let errors = quarrel(&[5, 5, 6, 5], |len| {
        Pattern::rooted(Kind::Broadcast, len, 0)
    });
    assert!(
        errors.iter().all(|error| error.culprit() == Some(2)),
        "{errors:?}"
    );
}

const LEN: usize = 100;

/// What rank 0 of 2 makes of a peer that sends `bytes` and then says nothing, or leaves.
fn against(bytes: &[u8], leaves: bool) -> Error {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut streams = Streams::new(0, vec![vec![None, Some(Socket::Unix(ours))]]).unwrap();
    theirs.write_all(bytes).unwrap();
    let theirs = (!leaves).then_some(theirs);
    let limit = Duration::from_millis(400);
    let outcome = alone(
        &all_reduce(LEN, 2),
        (0, 0),
        &mut streams,
        &header(LEN, 2),
        limit,
    );
    drop(theirs);
    outcome.unwrap_err()
}

fn frame(total: usize, round: u32, payload: u64) -> Vec<u8> {
    let header = header(total, 2);
    Frame {
        header,
        round,
        payload,
    }
    .encode()
    .to_vec()
}

/// What rank 1 sends in the whole round: its part of rank 0's slice, and the result of its own.
const PAYLOAD: u64 = LEN as u64 * 4;

#[test]
fn nonsense_is_the_peers_fault() {
    for (bytes, words) in [
        (vec![0xAA; 72], "a frame begins with [aa"),
        (
            frame(LEN, 0, u64::MAX),
            "a payload of 18446744073709551615 bytes, expected 400",
        ),
        (
            frame(LEN, 0, PAYLOAD - 4),
            "a payload of 396 bytes, expected 400",
        ),
        (frame(LEN, 1, PAYLOAD), "a frame of round 1, expected 0"),
        (
            frame(LEN, MEETING, 0),
            "a frame of round 4294967295, expected 0",
        ),
    ] {
        let error = against(&bytes, false);
        assert!(matches!(error, Error::Wire { peer: 1, .. }), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn another_call_is_a_mismatch_whatever_else_its_frame_says() {
    for bytes in [frame(LEN - 1, 0, 1), frame(LEN + 1, MEETING, 0)] {
        let error = against(&bytes, false);
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    }
}

#[test]
fn a_truncated_frame_is_a_deadline_or_a_broken_connection() {
    let whole = frame(LEN, 0, PAYLOAD);
    let mut longer = whole.clone();
    longer.extend([0; 50]);
    for bytes in [&whole[..0], &whole[..40], &whole, &longer] {
        let error = against(bytes, false);
        assert!(error.is_deadline() && error.culprit() == Some(1), "{error}");
        // A death ends the connection for messages as well, which this one has not.
        let error = against(bytes, true);
        assert!(
            matches!(error, Error::Disconnected { rank: 1, .. }),
            "{error}"
        );
    }
}

#[test]
fn a_peer_whose_second_connection_ends_is_lost_and_one_that_does_not_read_is_late() {
    let len = 2_000_000;
    for leaves in [true, false] {
        let (first, mut theirs) = UnixStream::pair().unwrap();
        let (second, their_second) = UnixStream::pair().unwrap();
        let sockets = [first, second].map(|socket| vec![None, Some(Socket::Unix(socket))]);
        let mut streams = Streams::new(0, sockets.into()).unwrap();
        theirs.write_all(&frame(len, 0, len as u64 * 4)).unwrap();
        let kept = (!leaves).then_some(their_second);
        let limit = Duration::from_millis(400);
        let outcome = alone(
            &all_reduce(len, 2),
            (0, 0),
            &mut streams,
            &header(len, 2),
            limit,
        );
        let error = outcome.unwrap_err();
        assert_eq!(error.culprit(), Some(1), "{error}");
        assert_eq!(error.is_deadline(), !leaves, "{error}");
        drop((theirs, kept));
    }
}

#[test]
fn a_later_round_of_another_call_is_the_peers_fault() {
    use Space::{In, Out};
    let taken = vec![task(LEN, vec![spot(1, In)], vec![spot(0, Out)])];
    let job = Job::of_tasks(vec![vec![vec![], vec![]], vec![taken, vec![]]], LEN);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut streams = Streams::new(0, vec![vec![None, Some(Socket::Unix(ours))]]).unwrap();
    theirs.write_all(&frame(LEN, 0, 0)).unwrap();
    theirs.write_all(&frame(LEN + 1, 1, PAYLOAD)).unwrap();
    let mut outcome = |index| alone(&job, (0, index), &mut streams, &header(LEN, 2), LONG);
    assert!(outcome(0).is_ok());
    let error = outcome(1).unwrap_err();
    assert!(matches!(error, Error::Wire { peer: 1, .. }), "{error}");
    let words = "round 1 of all-reduce (sum) of 101 f32";
    assert!(error.to_string().contains(words), "{error}");
}
