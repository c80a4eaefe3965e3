//! Findings that name the devices of which something is so: a table of them for each rule, and one way from table to finding.

use paceline_gpu::snapshot::Device;

use super::words::{gpus, gpus_that};
use crate::finding::{Notes, Severity};

/// A finding about all devices of which `is` holds.
pub(super) struct Rule {
    pub(super) check: &'static str,
    pub(super) severity: Severity,
    pub(super) is: fn(&Device) -> bool,
    /// `{}` stands for the devices, `{has|have}` for the devices with the verb that fits their number.
    pub(super) what: &'static str,
    pub(super) why: &'static str,
    pub(super) fix: &'static str,
}

/// A table of [`Rule`]s.
macro_rules! rules {
    ($($severity:ident $check:literal, $is:expr => $what:expr, $why:expr, $fix:expr;)*) => {
        &[$($crate::gpu::rules::Rule {
            check: $check,
            severity: $crate::finding::Severity::$severity,
            is: $is,
            what: $what,
            why: $why,
            fix: $fix,
        }),*]
    };
}
pub(super) use rules;

pub(super) fn judge(rules: &[Rule], devices: &[Device], notes: &mut Notes) {
    for rule in rules {
        let of = indices(devices, rule.is);
        if !of.is_empty() {
            let what = named(rule.what, &of);
            notes
                .sheet(rule.check)
                .add(rule.severity, what, rule.why, rule.fix);
        }
    }
}

/// Numbers of the devices of which `is` holds.
pub(super) fn indices(devices: &[Device], is: impl Fn(&Device) -> bool) -> Vec<u32> {
    let some = devices.iter().filter(|device| is(device));
    some.map(|device| device.index).collect()
}

fn named(what: &str, of: &[u32]) -> String {
    let (before, rest) = what.split_once('{').unwrap_or((what, "}"));
    let (verbs, after) = rest.split_once('}').unwrap_or_default();
    match verbs.split_once('|') {
        Some((one, several)) => format!("{before}{}{after}", gpus_that(of, one, several)),
        None => format!("{before}{}{after}", gpus(of)),
    }
}
