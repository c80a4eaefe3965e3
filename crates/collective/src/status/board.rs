//! What a rank says on the job page: one record, shared by all groups that the rank is in.

use parking_lot::Mutex;

use paceline_rendezvous::page::{Activity, OpActivity, Phase, Slot};

use crate::error::{Operation, Seconds};

/// One rank's slot and what it says there.
#[derive(Debug)]
pub(super) struct Board {
    pub(super) slot: Slot,
    doing: Mutex<Doing>,
}

/// The page holds one record for both; each side changes only its own half.
#[derive(Debug)]
struct Doing {
    phase: Phase,
    step: u64,
    /// What has begun and not ended, in the order of beginning; the page shows the last.
    operations: Vec<(u64, Operation)>,
    next: u64,
}

impl Board {
    pub(super) fn new(slot: Slot) -> Self {
        let doing = Doing {
            phase: Phase::Starting,
            step: 0,
            operations: Vec::new(),
            next: 0,
        };
        Self {
            slot,
            doing: Mutex::new(doing),
        }
    }

    pub(super) fn set_phase(&self, phase: Phase, step: u64) {
        let mut doing = self.doing.lock();
        (doing.phase, doing.step) = (phase, step);
        self.publish(&doing);
    }

    /// Shows an operation until [`end`](Self::end) is called with the result.
    pub(super) fn begin(&self, operation: Operation) -> u64 {
        let mut doing = self.doing.lock();
        let place = doing.next;
        doing.next += 1;
        doing.operations.push((place, operation));
        self.publish(&doing);
        place
    }

    pub(super) fn end(&self, place: u64) {
        let mut doing = self.doing.lock();
        doing.operations.retain(|(other, _)| *other != place);
        self.publish(&doing);
    }

    /// Whether some group of this process waits in an operation.
    pub(super) fn is_waiting(&self) -> bool {
        !self.doing.lock().operations.is_empty()
    }

    /// The page's time stamp is that of the last change of either half: of the last sign of progress.
    fn publish(&self, doing: &Doing) {
        let op = doing.operations.last().map(|(_, operation)| OpActivity {
            code: operation.kind.code(),
            seq: operation.seq,
            bucket: operation.bucket,
        });
        self.slot.set_activity(&Activity {
            phase: doing.phase,
            step: doing.step,
            op,
        });
    }
}

/// "is in the data loader at step 812 since 14 s".
pub(super) fn activity(slot: &Slot) -> String {
    match slot.activity() {
        Some((activity, since)) => format!("is {activity} since {}", Seconds(since)),
        None => "has not said what it is doing".into(),
    }
}
