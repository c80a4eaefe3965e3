//! Decisions that rank 0 makes for all ranks, such as the checkpoint to resume from.

use std::fmt::Display;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use paceline_collective::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::CheckpointError;

/// Time between two signs of life of a rank 0 that decides slowly: far below the shortest timeout, which is a second.
const BEAT: Duration = Duration::from_millis(300);
/// A sign of life; no decision, because it is not JSON.
const ALIVE: &[u8] = b" ";

/// As [`by_rank_0`], for a decision that may take longer than the group's timeout and has bounds of its own, such as a download. The
/// other ranks wait as long as rank 0 is alive; on rank 0 nothing else may use the group meanwhile.
///
/// *Blocks*, *Errors*: as `by_rank_0`.
pub fn by_rank_0_slowly<T, E>(
    group: &ProcessGroup,
    decide: impl FnOnce() -> Result<T, E>,
) -> Result<Result<T, E>, CheckpointError>
where
    T: Serialize + DeserializeOwned,
    E: Display,
{
    by_rank_0(group, || {
        let (done, is_done) = mpsc::channel::<()>();
        // A group that failed meanwhile says so to the next call.
        let beat = move || {
            while is_done.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout)
                && group.broadcast_bytes(Some(ALIVE), 0).is_ok()
            {}
        };
        thread::scope(|scope| {
            scope.spawn(beat);
            let decided = decide();
            drop(done);
            decided
        })
    })
}

/// Rank 0's decision, on every rank. The inner error is rank 0's own, and `decide` runs there only.
///
/// *Blocks*: until rank 0 has decided.
///
/// *Errors*: `Rank0` on the other ranks if rank 0 cannot decide; those of the group.
pub fn by_rank_0<T, E>(
    group: &ProcessGroup,
    decide: impl FnOnce() -> Result<T, E>,
) -> Result<Result<T, E>, CheckpointError>
where
    T: Serialize + DeserializeOwned,
    E: Display,
{
    let own = (group.rank() == 0).then(decide);
    let message = own.as_ref().map(|decided| match decided {
        Ok(decided) => Ok(decided),
        Err(error) => Err(error.to_string()),
    });
    let message = message.map(|message| serde_json::to_vec(&message).expect("plain data encodes"));
    let message = loop {
        let message = group.broadcast_bytes(message.as_deref(), 0)?;
        // Rank 0 still decides, see `by_rank_0_slowly`.
        if message != ALIVE {
            break message;
        }
    };
    let blame = || group.blame(0);
    if let Some(own) = own {
        // A rank that blames itself fails on behalf of all.
        return Ok(own.inspect_err(|_| blame()));
    }
    let decided: Result<T, String> = serde_json::from_slice(&message)
        .unwrap_or_else(|error| Err(format!("rank 0's message cannot be decoded: {error}")));
    decided.map(Ok).map_err(|why| {
        // Makes the launcher report rank 0, which has the cause.
        blame();
        CheckpointError::Rank0(why)
    })
}

#[cfg(test)]
mod tests {
    use paceline_collective::GroupOptions;
    use paceline_testing::on_threads;

    use super::*;

    #[test]
    fn ranks_wait_longer_than_their_timeout_for_a_slow_rank_0() {
        let timeout = Duration::from_secs(4);
        let options = GroupOptions {
            timeout,
            ..GroupOptions::default()
        };
        let ranks = ProcessGroup::local(2, &options).expect("ranks");
        let decided = on_threads(ranks, |group| {
            let decide = || {
                thread::sleep(timeout + Duration::from_secs(1));
                Ok::<_, String>(7)
            };
            by_rank_0_slowly(&group, decide).expect("a decision")
        });
        assert_eq!(decided, [Ok(7), Ok(7)]);
    }
}
