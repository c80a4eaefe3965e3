//! Kubernetes' rules for names, and options that are written in one word.

use std::str::FromStr;

use serde_json::{Value, json};

use super::{Options, pods_name};
use crate::error::SubmitError;
use crate::submission::Submission;

/// A label of machines: `LABEL=VALUE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selector {
    /// The label.
    pub key: String,
    /// Its value.
    pub value: String,
}

/// A taint that does not keep pods away: `KEY`, `KEY=VALUE`, `KEY:EFFECT` or `KEY=VALUE:EFFECT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Toleration {
    key: String,
    value: Option<String>,
    effect: Option<String>,
}

/// A volume: `CLAIM:PATH`, or `CLAIM:PATH:ro` to read only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Name of the PersistentVolumeClaim.
    pub claim: String,
    /// Where it is mounted.
    pub path: String,
    /// Whether nothing can be written there.
    pub read_only: bool,
}

impl FromStr for Selector {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (key, value) = split(text, '=').ok_or("expected LABEL=VALUE")?;
        Ok(Self {
            key: key.to_owned(),
            value: value.to_owned(),
        })
    }
}

impl FromStr for Toleration {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str = "expected KEY, KEY=VALUE or KEY=VALUE:EFFECT, with the effect NoSchedule, \
                                PreferNoSchedule or NoExecute";
        let (taint, effect) = match text.split_once(':') {
            Some((taint, effect)) => (taint, Some(effect.to_owned())),
            None => (text, None),
        };
        let effects = ["NoSchedule", "PreferNoSchedule", "NoExecute"];
        let (key, value) = match taint.split_once('=') {
            Some((key, value)) => (key, Some(value.to_owned())),
            None => (taint, None),
        };
        let known = effect
            .as_deref()
            .is_none_or(|effect| effects.contains(&effect));
        if key.is_empty() || !known {
            return Err(EXPECTED);
        }
        Ok(Self {
            key: key.to_owned(),
            value,
            effect,
        })
    }
}

impl Toleration {
    pub(super) fn manifest(&self) -> Value {
        let mut toleration = match &self.value {
            Some(value) => json!({ "key": self.key, "operator": "Equal", "value": value }),
            None => json!({ "key": self.key, "operator": "Exists" }),
        };
        if let Some(effect) = &self.effect {
            toleration["effect"] = json!(effect);
        }
        toleration
    }
}

impl FromStr for Claim {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str = "expected CLAIM:PATH or CLAIM:PATH:ro, with a path from the root";
        let (claim, rest) = split(text, ':').ok_or(EXPECTED)?;
        let (path, read_only) = match rest.split_once(':') {
            Some((path, "ro")) => (path, true),
            Some((path, "rw")) => (path, false),
            Some(_) => return Err(EXPECTED),
            None => (rest, false),
        };
        // Kubernetes takes no path with a colon, and one mounted over the root would hide the image.
        if !path.starts_with('/') || path.trim_end_matches('/').is_empty() {
            return Err(EXPECTED);
        }
        Ok(Self {
            claim: claim.to_owned(),
            path: path.to_owned(),
            read_only,
        })
    }
}

/// Longest label of a domain name, RFC 1035.
const LABEL_MAX: usize = 63;

/// Refuses names that Kubernetes would refuse, or accept and then never start a pod for.
pub(super) fn check(job: &Submission, options: &Options) -> Result<(), SubmitError> {
    let refused = |why: &str| Err(SubmitError::name(&job.name, why));
    // A Service's name is the strictest.
    if !is_label(&job.name) || job.name.starts_with(|letter: char| letter.is_ascii_digit()) {
        return refused(
            "expected small letters, digits and dashes, a letter first and no dash last",
        );
    }
    let longest = format!("{}-{}", pods_name(job, options), job.nodes.max() - 1).len();
    let secret = super::secret_name(job).len();
    if longest.max(secret) > LABEL_MAX {
        let allowed = job.name.len() - (longest.max(secret) - LABEL_MAX);
        return refused(&format!(
            "it has {} letters, pods leave room for {allowed}",
            job.name.len()
        ));
    }
    let names = [
        ("--namespace", options.namespace.iter().collect::<Vec<_>>()),
        ("--queue", options.queue.iter().collect()),
        ("--pod-group", options.pod_group.iter().collect()),
        (
            "--service-account",
            options.service_account.iter().collect(),
        ),
        (
            "--image-pull-secret",
            options.image_pull_secrets.iter().collect(),
        ),
        (
            "--pvc",
            options.claims.iter().map(|claim| &claim.claim).collect(),
        ),
        ("--cluster-domain", vec![&options.cluster_domain]),
    ];
    for (setting, values) in names {
        if let Some(value) = values.into_iter().find(|value| !is_name(value)) {
            let expected = "small letters, digits, dashes and dots";
            return Err(SubmitError::setting(setting, value, expected));
        }
    }
    if options.image.is_empty() || options.image.contains(char::is_whitespace) {
        let expected = "an image such as registry/name:tag";
        return Err(SubmitError::setting("--image", &options.image, expected));
    }
    Ok(())
}

/// RFC 1123: a label of a domain name.
fn is_label(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let ends_well = !name.starts_with('-') && !name.ends_with('-');
    (1..=LABEL_MAX).contains(&name.len()) && name.bytes().all(is_plain) && ends_well
}

fn is_name(name: &str) -> bool {
    name.len() <= 253 && name.split('.').all(is_label)
}

/// Splits at the first of these, both sides having something.
fn split(text: &str, at: char) -> Option<(&str, &str)> {
    let (left, right) = text.split_once(at)?;
    (!left.is_empty() && !right.is_empty()).then_some((left, right))
}
