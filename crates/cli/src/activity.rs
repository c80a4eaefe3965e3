//! What a rank does, in few words.

use paceline_rendezvous::page::{Activity, Phase, op_name};
use paceline_report::words;
use paceline_words::Lang;

/// `backward: all-reduce #4411 b3`, `data`.
pub(crate) fn doing(activity: &Activity, lang: Lang) -> String {
    let phase = phase(activity.phase, lang);
    let Some(op) = &activity.op else {
        return phase.to_owned();
    };
    let bucket = op.bucket.map(|bucket| format!(" b{bucket}"));
    let (name, seq) = (op_name(op.code), op.seq);
    format!("{phase}: {name} #{seq}{}", bucket.unwrap_or_default())
}

/// A phase in one word.
pub(crate) fn phase(phase: Phase, lang: Lang) -> &'static str {
    let word = match phase {
        Phase::Starting => words::STARTING,
        Phase::Rendezvous => words::RENDEZVOUS,
        Phase::DataLoader => words::DATA,
        Phase::Forward => words::FORWARD,
        Phase::Backward => words::BACKWARD,
        Phase::Communication => words::COMMUNICATION,
        Phase::BetweenSteps | Phase::StepClosure => words::OWN_CODE,
        Phase::Evaluation => words::EVALUATION,
        Phase::Checkpoint => words::CHECKPOINT,
        Phase::Finished => words::FINISHED,
    };
    word.of(lang)
}

#[cfg(test)]
mod tests {
    use paceline_rendezvous::page::{OpActivity, op};

    use super::*;

    #[test]
    fn an_activity_is_a_few_words() {
        let op = |bucket| {
            Some(OpActivity {
                code: op::ALL_REDUCE,
                seq: 4411,
                bucket,
            })
        };
        let check = |phase, op, expect: &str| {
            assert_eq!(doing(&Activity { phase, step: 1, op }, Lang::En), expect);
        };
        check(Phase::DataLoader, None, "data");
        check(
            Phase::Backward,
            op(Some(3)),
            "backward: all-reduce #4411 b3",
        );
        check(
            Phase::Communication,
            op(None),
            "communication: all-reduce #4411",
        );
    }
}
