//! Faults of a rank that is a thread, for tests.

use std::cell::Cell;

use paceline_collective::ProcessGroup;

use crate::error::DdpError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The rank dies before it sends a bucket.
    Dies { step: u64, bucket: usize },
    /// The result of the tail does not reach the rank, because of another rank. The others may have it.
    LosesTail { step: u64, culprit: usize },
    /// The rank dies in its first recovery, before the ranks settle which step holds.
    DiesSettling,
    /// The same, before they deal their work anew.
    DiesDealing,
    /// The rank dies before it takes part in the comparison of weights that precedes an admission.
    DiesAdmitting { step: u64 },
}

thread_local! {
    /// The fault to come, and the step that is being sent.
    static FAULT: Cell<(Option<Fault>, u64)> = const { Cell::new((None, 0)) };
    /// The step in which the rank is invited to admit others.
    static INVITED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Plans a fault of this thread's rank.
pub(crate) fn plan(fault: Option<Fault>) {
    FAULT.set((fault, 0));
}

/// Has the launcher invite this thread's rank in `step`.
pub(crate) fn invite(step: Option<u64>) {
    INVITED.set(step);
}

pub(crate) fn is_invited(step: u64) -> bool {
    INVITED.get() == Some(step)
}

pub(crate) fn before_send(step: u64, bucket: usize, group: &ProcessGroup) {
    let (fault, _) = FAULT.get();
    // One that fails because of another rank first repeats the step.
    let dies = fault == Some(Fault::Dies { step, bucket }) && group.health().is_ok();
    FAULT.set((fault.filter(|_| !dies), step));
    if dies {
        group.abort("it dies");
    }
}

pub(crate) fn after_tail(group: &ProcessGroup) -> Result<(), DdpError> {
    match FAULT.get() {
        (Some(Fault::LosesTail { step, culprit }), now) if step == now => {
            FAULT.set((None, now));
            group.abort_over(Some(culprit), "a connection broke");
            Ok(group.health()?)
        }
        _ => Ok(()),
    }
}

pub(crate) fn in_recovery(moment: Fault, group: &ProcessGroup) {
    let (fault, step) = FAULT.get();
    if fault == Some(moment) {
        FAULT.set((None, step));
        group.abort("it dies");
    }
}
