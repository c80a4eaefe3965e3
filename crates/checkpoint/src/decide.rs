//! Decisions that rank 0 makes for all ranks, such as the checkpoint to resume from.

use std::fmt::Display;

use paceline_collective::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::CheckpointError;

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
    let message = group.broadcast_bytes(message.as_deref(), 0)?;
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
