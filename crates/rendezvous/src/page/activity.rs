//! A rank's activity, as data and as text.

use std::fmt;

use paceline_words::{Lang, Word, say};

macro_rules! phases {
    ($($phase:ident, $en:literal, $ko:literal, $doc:literal;)*) => {
        /// The part of a training step a rank is in.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Phase {
            $(#[doc = $doc] $phase,)*
        }

        impl Phase {
            /// All phases; the position plus one is the phase's number in shared memory, where 0 means no phase.
            const ALL: &[Self] = &[$(Self::$phase),*];

            /// In English the end of "rank 2 is ...", in Korean a noun.
            pub fn text(self, lang: Lang) -> &'static str {
                match self { $(Self::$phase => const { Word::new($en, $ko) },)* }.of(lang)
            }
        }
    };
}

phases! {
    Starting, "starting", "시작 단계", "The process runs, nothing of the job has begun.";
    Rendezvous, "looking for the other ranks", "다른 랭크를 찾는 단계", "Looking for the other ranks.";
    DataLoader, "in the data loader", "데이터 로더", "Waiting for or decoding input.";
    Forward, "in the forward pass", "순전파", "Forward pass.";
    Backward, "in the backward pass", "역전파", "Backward pass.";
    Communication, "communicating", "통신", "In a collective, outside the backward pass.";
    BetweenSteps, "in the program's own code (optimizer, evaluation, saving)", "프로그램 자체 코드(옵티마이저, 평가, 저장)", "Between two steps of `Ddp`, which cannot tell what the program does there.";
    Evaluation, "evaluating", "평가", "Evaluation.";
    Checkpoint, "at a checkpoint", "체크포인트", "Writing or reading a checkpoint.";
    Finished, "finished", "완료 단계", "Done; about to leave.";
    StepClosure, "in its step's closure before the forward pass", "순전파 전의 스텝 클로저", "In the closure that `Ddp::step` calls, before it asks for the model.";
}

impl Phase {
    pub(super) fn code(self) -> u32 {
        self as u32 + 1
    }

    pub(super) fn from_code(code: u32) -> Option<Self> {
        let index = usize::try_from(code.checked_sub(1)?).ok()?;
        Self::ALL.get(index).copied()
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

impl Activity {
    /// In English the end of "rank 2 is ...": "in the backward pass at step 812, waiting in all-reduce #4411 (bucket 3)"; in Korean a noun.
    pub fn text(&self, lang: Lang) -> String {
        let (phase, step) = (self.phase.text(lang), self.step);
        let place = match self.phase {
            Phase::Starting | Phase::Rendezvous | Phase::Finished => phase.to_owned(),
            Phase::BetweenSteps => {
                say!(
                    lang,
                    "{phase}, after step {step}",
                    "스텝 {step} 이후 {phase}"
                )
            }
            _ => say!(lang, "{phase} at step {step}", "스텝 {step}의 {phase}"),
        };
        let Some(op) = &self.op else {
            return place;
        };
        let (name, seq) = (op_name(op.code), op.seq);
        let bucket = op.bucket.map_or_else(String::new, |bucket| {
            say!(lang, " (bucket {bucket})", " (버킷 {bucket})")
        });
        say!(
            lang,
            "{place}, waiting in {name} #{seq}{bucket}",
            "{place}, {name} #{seq}{bucket}에서 대기 중"
        )
    }
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(Lang::En))
    }
}

macro_rules! operations {
    ($($name:ident = $code:literal, $words:literal;)*) => {
        /// The operations' numbers on the page; collectives write them, launchers read them.
        pub mod op {
            $(#[doc = $words] pub const $name: u32 = $code;)*
        }

        /// The name of an operation of [`op`], for people.
        pub fn op_name(code: u32) -> &'static str {
            match code {
                $($code => $words,)*
                _ => "an operation of another version",
            }
        }
    };
}

operations! {
    ALL_REDUCE = 0, "all-reduce";
    BROADCAST = 1, "broadcast";
    ALL_GATHER = 2, "all-gather";
    REDUCE_SCATTER = 3, "reduce-scatter";
    BARRIER = 4, "barrier";
    ALL_GATHER_BYTES = 5, "all-gather of bytes";
    BROADCAST_BYTES = 6, "broadcast of bytes";
    REDUCE = 7, "reduce";
    GATHER = 8, "gather";
    SCATTER = 9, "scatter";
    ALL_TO_ALL = 10, "all-to-all";
    SEND = 11, "send";
    RECV = 12, "recv";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_survives_shared_memory() {
        for &phase in Phase::ALL {
            assert_eq!(Phase::from_code(phase.code()), Some(phase));
        }
        assert_eq!(Phase::from_code(0), None);
        assert_eq!(Phase::from_code(12), None);
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
                    phase: Phase::BetweenSteps,
                    step: 41,
                    op: None,
                },
                "in the program's own code (optimizer, evaluation, saving), after step 41",
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
        let activity = Activity {
            phase: Phase::Backward,
            step: 812,
            op,
        };
        let korean = "스텝 812의 역전파, all-reduce #4411 (버킷 3)에서 대기 중";
        assert_eq!(activity.text(Lang::Ko), korean);
    }
}
