//! A rank's activity, as data and as text.

use std::fmt;

/// The part of a training step a rank is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The process runs, nothing of the job has begun.
    Starting,
    /// Looking for the other ranks.
    Rendezvous,
    /// Waiting for or decoding input.
    DataLoader,
    /// Forward pass.
    Forward,
    /// Backward pass.
    Backward,
    /// In a collective, outside the backward pass.
    Communication,
    /// Optimizer step.
    Optimizer,
    /// Evaluation.
    Evaluation,
    /// Writing or reading a checkpoint.
    Checkpoint,
    /// Done; about to leave.
    Finished,
}

impl Phase {
    /// All phases; the position plus one is the phase's number in shared memory, where 0 means none.
    const ALL: [Self; 10] = [
        Self::Starting,
        Self::Rendezvous,
        Self::DataLoader,
        Self::Forward,
        Self::Backward,
        Self::Communication,
        Self::Optimizer,
        Self::Evaluation,
        Self::Checkpoint,
        Self::Finished,
    ];

    pub(super) fn code(self) -> u32 {
        self as u32 + 1
    }

    pub(super) fn from_code(code: u32) -> Option<Self> {
        let index = usize::try_from(code.checked_sub(1)?).ok()?;
        Self::ALL.get(index).copied()
    }
}

/// Reads as the end of "rank 2 is ...".
impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Starting => "starting",
            Self::Rendezvous => "looking for the other ranks",
            Self::DataLoader => "in the data loader",
            Self::Forward => "in the forward pass",
            Self::Backward => "in the backward pass",
            Self::Communication => "communicating",
            Self::Optimizer => "in the optimizer",
            Self::Evaluation => "evaluating",
            Self::Checkpoint => "at a checkpoint",
            Self::Finished => "finished",
        })
    }
}

/// What a rank is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Activity {
    /// Part of the step.
    pub phase: Phase,
    /// Training step, from 0.
    pub step: u64,
    /// The collective the rank is waiting in, if it is.
    pub op: Option<OpActivity>,
}

/// The collective a rank is waiting in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpActivity {
    /// Which operation, one of [`op`]'s numbers.
    pub code: u32,
    /// The group's running number of the operation.
    pub seq: u64,
    /// Gradient bucket, when the operation carries one.
    pub bucket: Option<u32>,
}

/// Reads as the end of "rank 2 is ...": "in the backward pass at step 812, waiting in all-reduce #4411 (bucket 3)".
impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.phase {
            Phase::Starting | Phase::Rendezvous | Phase::Finished => write!(f, "{}", self.phase)?,
            _ => write!(f, "{} at step {}", self.phase, self.step)?,
        }
        match &self.op {
            Some(op) => write!(f, ", waiting in {op}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for OpActivity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", op_name(self.code), self.seq)?;
        match self.bucket {
            Some(bucket) => write!(f, " (bucket {bucket})"),
            None => Ok(()),
        }
    }
}

/// The operations' numbers on the page; collectives write them, launchers read them.
pub mod op {
    /// All-reduce.
    pub const ALL_REDUCE: u32 = 0;
    /// Broadcast.
    pub const BROADCAST: u32 = 1;
    /// All-gather.
    pub const ALL_GATHER: u32 = 2;
    /// Reduce-scatter.
    pub const REDUCE_SCATTER: u32 = 3;
    /// Barrier.
    pub const BARRIER: u32 = 4;
    /// All-gather of control data of any length.
    pub const ALL_GATHER_BYTES: u32 = 5;
    /// Broadcast of control data of any length.
    pub const BROADCAST_BYTES: u32 = 6;
    /// Reduce to one rank.
    pub const REDUCE: u32 = 7;
    /// Gather to one rank.
    pub const GATHER: u32 = 8;
    /// Scatter from one rank.
    pub const SCATTER: u32 = 9;
    /// All-to-all.
    pub const ALL_TO_ALL: u32 = 10;
    /// Send from one rank to another.
    pub const SEND: u32 = 11;
    /// Receive by one rank from another.
    pub const RECV: u32 = 12;
}

/// The name of an operation of [`op`], for people.
pub fn op_name(code: u32) -> &'static str {
    match code {
        op::ALL_REDUCE => "all-reduce",
        op::BROADCAST => "broadcast",
        op::ALL_GATHER => "all-gather",
        op::REDUCE_SCATTER => "reduce-scatter",
        op::BARRIER => "barrier",
        op::ALL_GATHER_BYTES => "all-gather of bytes",
        op::BROADCAST_BYTES => "broadcast of bytes",
        op::REDUCE => "reduce",
        op::GATHER => "gather",
        op::SCATTER => "scatter",
        op::ALL_TO_ALL => "all-to-all",
        op::SEND => "send",
        op::RECV => "recv",
        _ => "an operation of another version",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_survives_shared_memory() {
        for phase in Phase::ALL {
            assert_eq!(Phase::from_code(phase.code()), Some(phase));
        }
        assert_eq!(Phase::from_code(0), None);
        assert_eq!(Phase::from_code(11), None);
        assert_eq!(Phase::from_code(u32::MAX), None);
    }

    #[test]
    fn an_activity_reads_as_the_end_of_a_sentence() {
        let op = Some(OpActivity {
            code: op::ALL_REDUCE,
            seq: 4411,
            bucket: Some(3),
        });
        for (activity, expected) in [
            (
                Activity {
                    phase: Phase::DataLoader,
                    step: 812,
                    op: None,
                },
                "in the data loader at step 812",
            ),
            (
                Activity {
                    phase: Phase::Backward,
                    step: 812,
                    op,
                },
                "in the backward pass at step 812, waiting in all-reduce #4411 (bucket 3)",
            ),
            (
                Activity {
                    phase: Phase::Rendezvous,
                    step: 0,
                    op: None,
                },
                "looking for the other ranks",
            ),
            (
                Activity {
                    phase: Phase::Communication,
                    step: 1,
                    op: Some(OpActivity {
                        code: op::BARRIER,
                        seq: 9,
                        bucket: None,
                    }),
                },
                "communicating at step 1, waiting in barrier #9",
            ),
        ] {
            assert_eq!(activity.to_string(), expected);
        }
    }
}
