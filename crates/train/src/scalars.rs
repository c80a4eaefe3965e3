//! What programs that draw curves show of a record, by the tags that they know it by.

use std::borrow::Cow;

use serde_json::{Map, Value};

use crate::records::{HELD_OUT_LOSS, NO_METRICS, STEP_KEYS};

/// Scalars of a step, by their key in the record.
const OF_STEP: [(&str, &str); 6] = [
    ("loss", "train/loss"),
    ("lr", "train/lr"),
    ("grad_norm", "train/grad_norm"),
    ("scale", "train/loss_scale"),
    ("seconds", "train/step_seconds"),
    ("epoch", "train/epoch"),
];

/// Keys of a step that are shown for each second of it.
const OF_SECOND: [(&str, &str); 3] = [
    ("samples", "train/samples_per_second"),
    ("tokens", "train/tokens_per_second"),
    ("waited_seconds", "train/waited_share"),
];

/// Tags and values of a line of `metrics.jsonl`, as TensorBoard and MLflow show them.
#[must_use]
pub fn scalars(record: &Map<String, Value>) -> Vec<(Cow<'static, str>, f64)> {
    let number = |key: &str| record.get(key)?.as_f64();
    let found = |(key, tag): &(&str, &'static str)| Some((Cow::Borrowed(*tag), number(key)?));
    match record.get("kind").and_then(Value::as_str) {
        Some("step") => {
            let seconds = number("seconds").filter(|seconds| *seconds > 0.0);
            let rate = |(key, tag): &(&str, &'static str)| {
                Some((Cow::Borrowed(*tag), number(key)? / seconds?))
            };
            let of_step = OF_STEP.iter().filter_map(found);
            let own = record.iter();
            let own = own.filter(|(key, _)| !STEP_KEYS.contains(&key.as_str()));
            let own = own.filter_map(|(key, value)| {
                Some((Cow::Owned(format!("train/{key}")), value.as_f64()?))
            });
            let of_second = OF_SECOND.iter().filter_map(rate);
            of_step.chain(of_second).chain(own).collect()
        }
        Some("epoch" | "evaluation") => {
            let scalar = |(key, value): (&String, &Value)| {
                let tag = match &**key {
                    "kind" | "step" | "epoch" => return None,
                    HELD_OUT_LOSS => Cow::Borrowed("held_out/loss"),
                    key if NO_METRICS.contains(&key) => Cow::Owned(format!("epoch/{key}")),
                    key => Cow::Owned(format!("held_out/{key}")),
                };
                Some((tag, value.as_f64()?))
            };
            record.iter().filter_map(scalar).collect()
        }
        Some("start") => found(&("world", "train/ranks")).into_iter().collect(),
        Some("ranks") => found(&("now", "train/ranks")).into_iter().collect(),
        _ => Vec::new(),
    }
}
