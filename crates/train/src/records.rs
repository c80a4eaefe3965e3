//! The lines of `metrics.jsonl`.

use serde::Serialize;

/// A line for a step.
#[derive(Serialize)]
pub(crate) struct StepRecord {
    pub(crate) kind: &'static str,
    pub(crate) step: u64,
    pub(crate) epoch: u64,
    pub(crate) loss: f64,
    pub(crate) lr: f64,
    pub(crate) samples: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) grad_norm: Option<f64>,
    /// The loss scale, if losses are scaled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) scale: Option<f32>,
    /// Whether the step was skipped because a gradient was not finite, if losses are scaled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<bool>,
    pub(crate) seconds: f64,
    pub(crate) waited_seconds: f64,
}

/// A line for an epoch.
#[derive(Serialize)]
pub(crate) struct EpochRecord {
    pub(crate) kind: &'static str,
    pub(crate) step: u64,
    pub(crate) epoch: usize,
    pub(crate) train_loss: f64,
    pub(crate) held_out_loss: f64,
    pub(crate) accuracy: f64,
    pub(crate) samples_per_second: f64,
    /// Steps skipped in the epoch, if losses are scaled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped_steps: Option<u64>,
}
