//! Why a communicator fails: the group's reason before NCCL's, and the ranks to blame for a deadline.

use std::time::{Duration, Instant};

use paceline_collective::ProcessGroup;

use crate::error::NcclError;
use crate::shared::Shared;

/// Time between two looks at the group's health.
const LOOK: Duration = Duration::from_millis(1);

/// Finds out why it failed, and tells it to the peers and to whoever waits here. The first failure.
pub(crate) fn give_reason(
    shared: &Shared,
    control: Option<&ProcessGroup>,
    error: NcclError,
) -> NcclError {
    let error = match error {
        // A peer that died ends NCCL's connections at the same moment as the group's: the group knows who.
        NcclError::Nccl { .. } => {
            // If nobody died, it is this rank's own trouble.
            culprit_within(shared, shared.grace).unwrap_or(error)
        }
        NcclError::Deadline {
            rank,
            doing,
            waited,
        } => missing(shared, control, (rank, doing, waited)),
        other => other,
    };
    let error = shared.fail(error);
    // Of what a probe finds all ranks know.
    let is_known = matches!(
        error,
        NcclError::Group(_) | NcclError::Probe { .. } | NcclError::WrongResult { .. }
    );
    if !is_known {
        let culprit = error.culprit();
        shared.group.abort_over(culprit, &error.to_string());
    }
    error
}

/// Who is to blame for a deadline: all ranks that wait for NCCL come together here, each when its own time is over, and who
/// does not is named with what it is doing.
///
/// *Blocks*: up to the group's timeout once more.
fn missing(
    shared: &Shared,
    control: Option<&ProcessGroup>,
    (rank, doing, waited): (usize, String, Duration),
) -> NcclError {
    let came = control.map_or(Ok(()), ProcessGroup::barrier);
    if let Err(error) = shared.group.health() {
        return error.into();
    }
    match came {
        Err(source) => NcclError::Missing {
            rank,
            doing,
            waited,
            source: Box::new(source),
        },
        Ok(()) => NcclError::Deadline {
            rank,
            doing,
            waited,
        },
    }
}

/// The group's failure, if it comes soon.
fn culprit_within(shared: &Shared, grace: Duration) -> Option<NcclError> {
    let begun = Instant::now();
    loop {
        if let Err(error) = shared.group.health() {
            return Some(error.into());
        }
        if begun.elapsed() > grace {
            return None;
        }
        std::thread::park_timeout(LOOK);
    }
}
