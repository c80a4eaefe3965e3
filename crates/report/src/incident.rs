//! What does not belong to an undisturbed run, in sentences.

use paceline_usage::figures::thousands;
use paceline_words::Lang;

use crate::records::Straggler;
use crate::words;

/// Something that does not belong to an undisturbed run.
#[derive(Clone, Debug, PartialEq)]
pub enum Incident {
    /// A step was skipped because its numbers were not finite.
    Skipped {
        /// The step.
        step: u64,
    },
    /// All ranks went back to the state of an earlier step.
    WentBack {
        /// After this step.
        step: u64,
        /// To the state after this one.
        to: u64,
    },
    /// The job was started again.
    Resumed {
        /// After this step.
        step: u64,
        /// On so many ranks.
        ranks: u64,
    },
    /// The job went on with other ranks.
    Ranks {
        /// After this step.
        step: u64,
        /// Ranks until then.
        before: u64,
        /// Ranks from then on.
        now: u64,
        /// Which ranks were lost and how, in the launcher's words; older runs do not say.
        why: Option<String>,
    },
    /// A signal asked the job to stop after this step.
    Stopped {
        /// The step.
        step: u64,
        /// The signal's name.
        signal: String,
    },
    /// A rank was slower than the others.
    Slow(Straggler),
}

impl Incident {
    /// The incident in a sentence.
    #[must_use]
    pub fn text(&self, lang: Lang) -> String {
        let at = |step: &u64, text: &str| {
            format!("{} {}: {text}", words::STEP.of(lang), thousands(*step))
        };
        match self {
            Self::Skipped { step } => at(step, words::SKIPPED.of(lang)),
            Self::WentBack { step, to } => at(
                step,
                &format!("{} {}", words::WENT_BACK.of(lang), thousands(*to)),
            ),
            Self::Resumed { step, ranks } => {
                at(step, &words::RESUMED.filled(lang, &[&ranks.to_string()]))
            }
            Self::Ranks {
                step,
                before,
                now,
                why,
            } => {
                let why = why.as_deref();
                let why = why.map_or(String::new(), |why| format!(" ({why})"));
                let went_on = words::RANKS_NOW.of(lang);
                at(step, &format!("{went_on} {before} → {now}{why}"))
            }
            Self::Stopped { step, signal } => at(step, &words::STOPPED.filled(lang, &[signal])),
            Self::Slow(slow) => {
                let times = [slow.seconds, slow.others_seconds].map(|time| format!("{time:.4}"));
                let text = words::SLOW.filled(lang, &[&times[0], &times[1]]);
                format!("{} {}: {text}", words::RANK.of(lang), slow.rank)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_ranks_are_named_if_the_run_says_which() {
        let incident = |why: Option<&str>| Incident::Ranks {
            step: 15,
            before: 2,
            now: 1,
            why: why.map(str::to_owned),
        };
        let text = |why| incident(why).text(Lang::En);
        assert_eq!(
            text(None),
            "step 15: the job went on with other ranks: 2 → 1"
        );
        assert_eq!(
            text(Some("rank 1 was killed by signal 9 (SIGKILL)")),
            "step 15: the job went on with other ranks: 2 → 1 (rank 1 was killed by signal 9 (SIGKILL))"
        );
    }

    #[test]
    fn a_signal_that_stopped_the_job_is_named() {
        let stopped = Incident::Stopped {
            step: 1_400,
            signal: "SIGTERM".into(),
        };
        assert_eq!(stopped.text(Lang::En), "step 1,400: stopped by SIGTERM");
        assert_eq!(
            stopped.text(Lang::Ko),
            "스텝 1,400: SIGTERM 시그널로 중단됨"
        );
    }
}
