//! The cause of a failure: the group's error before NCCL's, and the ranks to blame for a deadline.

use std::time::{Duration, Instant};

use paceline_collective::ProcessGroup;

use crate::error::NcclError;
use crate::shared::Shared;

/// Interval between two polls of the group's health.
const LOOK: Duration = Duration::from_millis(1);

/// Determines the cause, and reports it to the peers and to local waiters. Returns the first failure.
pub(crate) fn give_reason(
    shared: &Shared,
    control: Option<&ProcessGroup>,
    error: NcclError,
) -> NcclError {
    let error = match error {
        // A dead peer breaks NCCL's connections at the same time as the group's, and the group knows the rank.
        NcclError::Nccl { .. } => {
            // If no rank died, it is this rank's own failure.
            culprit_within(shared, shared.grace).unwrap_or(error)
        }
        NcclError::Deadline { .. } => missing(shared, control, error),
        other => other,
    };
    let error = shared.fail(error);
    // All ranks know the probe's findings.
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

/// Finds the ranks to blame for a deadline: all ranks that wait for NCCL meet in a barrier after their own deadlines, and its
/// error names the missing ones and their activity.
///
/// *Blocks*: up to the group's timeout again.
fn missing(shared: &Shared, control: Option<&ProcessGroup>, mut deadline: NcclError) -> NcclError {
    let came = control.map_or(Ok(()), ProcessGroup::barrier);
    if let Err(error) = shared.group.health() {
        return error.into();
    }
    if let NcclError::Deadline { source, .. } = &mut deadline {
        *source = came.err().map(Box::new);
    }
    deadline
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
