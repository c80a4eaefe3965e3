//! Findings that name the devices of which something is so: a table of them for each rule, and one way from table to finding.

use paceline_gpu::snapshot::Device;
use paceline_words::{Lang, Word};

use super::words::gpus;
use crate::finding::{Notes, Severity};

/// A finding about all devices of which `is` holds.
pub(super) struct Rule {
    pub(super) check: Word,
    pub(super) severity: Severity,
    pub(super) is: fn(&Device) -> bool,
    /// `{}` stands for the devices; `{has|have}`, in English, for the verb that fits their number.
    pub(super) what: Word,
    pub(super) why: Word,
    pub(super) fix: Word,
}

/// A table of [`Rule`]s, each sentence in English and Korean.
macro_rules! rules {
    ($($severity:ident $check:ident, $is:expr => $what:expr, $why:expr, $fix:expr;)*) => {
        &[$($crate::gpu::rules::Rule {
            check: $crate::checks::$check,
            severity: $crate::finding::Severity::$severity,
            is: $is,
            what: paceline_words::Word::new($what.0, $what.1),
            why: paceline_words::Word::new($why.0, $why.1),
            fix: paceline_words::Word::new($fix.0, $fix.1),
        }),*]
    };
}
pub(super) use rules;

pub(super) fn judge(rules: &[Rule], devices: &[Device], notes: &mut Notes) {
    let lang = notes.lang;
    for rule in rules {
        let of = indices(devices, rule.is);
        if !of.is_empty() {
            let what = named(rule.what, &of, lang);
            let (why, fix) = (rule.why.of(lang), rule.fix.of(lang));
            notes.sheet(rule.check).add(rule.severity, what, why, fix);
        }
    }
}

/// Numbers of the devices of which `is` holds.
pub(super) fn indices(devices: &[Device], is: impl Fn(&Device) -> bool) -> Vec<u32> {
    let some = devices.iter().filter(|device| is(device));
    some.map(|device| device.index).collect()
}

fn named(what: Word, of: &[u32], lang: Lang) -> String {
    let text = what.filled(lang, &[&gpus(of, lang)]);
    let Some((before, rest)) = text.split_once('{') else {
        return text;
    };
    let (verbs, after) = rest.split_once('}').unwrap_or_default();
    let (one, several) = verbs.split_once('|').unwrap_or_default();
    let verb = if of.len() == 1 { one } else { several };
    format!("{before}{verb}{after}")
}
