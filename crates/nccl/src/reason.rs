//! The cause of a failure: the groups' errors before NCCL's, and the ranks to blame for a deadline.

use std::time::{Duration, Instant};

use paceline_collective::{AllReduce, Error, ProcessGroup, ReduceOp, Ticket};

use crate::error::NcclError;
use crate::shared::Shared;

/// Interval between two polls of the groups' health.
const LOOK: Duration = Duration::from_millis(1);

/// Determines the cause of a lane's failure, and reports it to the peers and to local waiters. Returns the first failure.
pub(crate) fn give_reason(shared: &Shared, lane: usize, error: NcclError) -> NcclError {
    let error = match error {
        // A dead peer breaks NCCL's connections at the same time as its groups', and a group knows the rank.
        NcclError::Nccl { .. } => {
            // If no rank died, it is this rank's own failure.
            failed_within(shared, shared.grace).unwrap_or(error)
        }
        NcclError::Deadline { .. } => missing(shared, lane, error),
        other => other,
    };
    shared.give_up(lane, error)
}

/// Finds the ranks to blame for a deadline: all ranks that wait for NCCL meet after their own deadlines, and the error of the
/// meeting names the missing ones and their activity.
///
/// They meet in all lanes, so that a rank that waits in one is not missing in the others. If all ranks of a lane have come, one
/// of them may wait for a rank in another lane. It names that one, and this rank hears it.
///
/// *Blocks*: up to the group's timeout again; with several lanes and nobody missing, up to twice that and the grace.
fn missing(shared: &Shared, lane: usize, mut deadline: NcclError) -> NcclError {
    let lanes = shared.lanes();
    let controls = lanes.iter().map(|lane| lane.control.as_ref());
    let mut meetings: Vec<_> = controls.map(|control| control.map(meet)).collect();
    let came = match meetings.swap_remove(lane) {
        Some(meeting) => meeting.and_then(|meeting| meeting.wait()).map(drop),
        None => Ok(()),
    };
    if came.is_ok()
        && lanes.len() > 1
        && let Some(error) = failed_within(shared, shared.limit())
    {
        return error;
    }
    if let Err(error) = shared.health() {
        return error;
    }
    if let NcclError::Deadline { source, .. } = &mut deadline {
        *source = came.err().map(Box::new);
    }
    deadline
}

/// Comes to the meeting of a lane's ranks.
fn meet(control: &ProcessGroup) -> Result<Ticket<f32>, Error> {
    let call = AllReduce::new(ReduceOp::Max, 1);
    Ok(control.all_reduce_async(control.buffer(1)?, call))
}

/// A group's failure, if it comes soon.
fn failed_within(shared: &Shared, limit: Duration) -> Option<NcclError> {
    let begun = Instant::now();
    loop {
        if let Err(error) = shared.health() {
            return Some(error);
        }
        if begun.elapsed() > limit {
            return None;
        }
        std::thread::park_timeout(LOOK);
    }
}
