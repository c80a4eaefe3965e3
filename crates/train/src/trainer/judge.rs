//! What becomes of a step whose loss or gradients are not finite.

use serde::{Deserialize, Serialize};

use crate::config::NonFinite;
use crate::error::TrainError;

/// Smallest sensible loss scale, f16's smallest number: gradients that still overflow are above 1e12.
const LEAST_SCALE: f32 = 1.0 / (1 << 24) as f32;

/// After so many such steps in a row the weights themselves are useless.
const IN_A_ROW_MAX: u32 = 10;

/// What the user wants.
#[derive(Clone, Copy, Debug)]
pub(super) struct Policy {
    pub(super) non_finite: NonFinite,
    /// Steps between two states in memory.
    pub(super) snapshot_every: u64,
}

/// The numbers of a step, which all ranks have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers {
    /// Its number, from 1.
    pub(super) step: u64,
    pub(super) loss: f32,
    /// Whether the loss or a gradient was looked at and is not finite.
    pub(super) skipped: bool,
    /// The loss scale, if losses are scaled.
    pub(super) scale: Option<f32>,
}

impl Numbers {
    /// Which of them is not finite.
    pub(super) fn what(&self) -> String {
        match self.loss.is_finite() {
            true => "a gradient is not finite".into(),
            false => format!("the loss is {}", self.loss),
        }
    }
}

/// The last steps with numbers that are not finite. It is in checkpoints, so that all ranks have it after any recovery.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Row {
    steps: u32,
    last: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It counts, or a scaler lowers its scale and goes on.
    Counts,
    /// It changes nothing.
    Skip,
    /// The steps since a state in memory change nothing, and the job goes on from that state with the next samples.
    Back,
}

/// *Errors*: the job ends.
pub(super) fn judge(
    policy: Policy,
    numbers: &Numbers,
    row: &mut Row,
) -> Result<Verdict, TrainError> {
    let Numbers {
        step, loss, scale, ..
    } = *numbers;
    let diverged = |which: &str| TrainError::NotFinite {
        message: format!(
            "{} at step {step}{which}: training has diverged",
            numbers.what()
        ),
        hint: "lower --lr, set --clip-norm 1, or raise --warmup; earlier checkpoints are kept",
    };
    if policy.non_finite == NonFinite::Stop && !loss.is_finite() {
        return Err(diverged(""));
    }
    if let Some(scale) = scale.filter(|scale| numbers.skipped && *scale < LEAST_SCALE) {
        return Err(TrainError::NotFinite {
            message: format!(
                "the gradients of step {step} are not finite, even with the loss scaled by {scale:e}"
            ),
            hint: "train with --precision bf16, which has the range of f32, or check why the gradients are so large",
        });
    }
    // A scaler looks for its scale by skipping steps, and ends when that is too small.
    if !numbers.skipped || (scale.is_some() && loss.is_finite()) {
        return Ok(Verdict::Counts);
    }
    let (verdict, within) = match policy.non_finite {
        // With this many steps between two of them, the job has got beyond the state that it went back to.
        NonFinite::Back => (Verdict::Back, policy.snapshot_every + 1),
        NonFinite::Skip | NonFinite::Stop => (Verdict::Skip, 1),
    };
    let follows = row.steps > 0 && step <= row.last + within;
    *row = Row {
        steps: if follows { row.steps + 1 } else { 1 },
        last: step,
    };
    match (row.steps < IN_A_ROW_MAX, verdict) {
        (true, verdict) => Ok(verdict),
        (false, Verdict::Back) => Err(diverged(&format!(
            ", the last of {IN_A_ROW_MAX} within {within} steps of each other, although the job went back each time"
        ))),
        (false, _) => Err(diverged(&format!(
            ", the last of {IN_A_ROW_MAX} skipped in a row"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The verdicts on steps 1, 2, .. with these losses, up to an error.
    fn verdicts(
        non_finite: NonFinite,
        scale: Option<f32>,
        losses: &[f32],
    ) -> (Vec<Verdict>, Option<String>) {
        let policy = Policy {
            non_finite,
            snapshot_every: 4,
        };
        let (mut row, mut verdicts) = (Row::default(), Vec::new());
        for (step, loss) in (1..).zip(losses) {
            let numbers = Numbers {
                step,
                loss: *loss,
                skipped: non_finite != NonFinite::Stop && !loss.is_finite(),
                scale,
            };
            match judge(policy, &numbers, &mut row) {
                Ok(verdict) => verdicts.push(verdict),
                Err(error) => return (verdicts, Some(error.to_string())),
            }
        }
        (verdicts, None)
    }

    use Verdict::{Back, Counts, Skip};
    const NAN: f32 = f32::NAN;

    #[test]
    fn each_policy_has_its_verdict() {
        let losses = [1.0, NAN, 1.0];
        let (before, why) = verdicts(NonFinite::Stop, None, &losses);
        assert_eq!(before, [Counts]);
        let why = why.expect("it ends");
        assert_eq!(why, "the loss is NaN at step 2: training has diverged");
        assert_eq!(
            verdicts(NonFinite::Skip, None, &losses),
            (vec![Counts, Skip, Counts], None)
        );
        assert_eq!(
            verdicts(NonFinite::Back, None, &losses),
            (vec![Counts, Back, Counts], None)
        );
    }

    #[test]
    fn a_job_ends_if_skipping_or_going_back_does_not_help() {
        let (skipped, why) = verdicts(NonFinite::Skip, None, &[NAN; 20]);
        assert_eq!(skipped, [Skip; 9]);
        assert!(why.is_some_and(|why| why.contains("step 10, the last of 10 skipped in a row")));
        // Skipping helps if one step counts, going back if a later state in memory does.
        for (good, row_ends) in [(1, false), (4, false), (5, true)] {
            let cycle: Vec<f32> = [&[NAN][..], &[1.0].repeat(good)].concat();
            let losses = cycle.repeat(20);
            let (_, why) = verdicts(NonFinite::Skip, None, &losses);
            assert_eq!(why, None);
            let (verdicts, why) = verdicts(NonFinite::Back, None, &losses);
            assert_eq!(why.is_none(), row_ends, "{good} between: {why:?}");
            let backs = verdicts.iter().filter(|verdict| **verdict == Back).count();
            assert_eq!(backs, if row_ends { 20 } else { 9 });
        }
    }

    #[test]
    fn a_scaler_looks_for_its_scale_until_that_is_too_small() {
        let judge = |scale| {
            let numbers = Numbers {
                step: 7,
                loss: 1.0,
                skipped: true,
                scale: Some(scale),
            };
            let policy = Policy {
                non_finite: NonFinite::Back,
                snapshot_every: 4,
            };
            judge(policy, &numbers, &mut Row::default())
        };
        assert_eq!(judge(1.0).expect("it goes on"), Counts);
        let error = judge(1e-9).expect_err("too small").to_string();
        assert!(
            error.contains("even with the loss scaled by 1e-9"),
            "{error}"
        );
    }
}
