//! What may change when a run is gone on with, and what may not.

use std::fmt;

use super::settings::Settings;
use super::table::{OPTIONS, OnResume};
use super::value::Setting;

/// A setting that a run keeps for its life, and that was set to something else.
#[derive(Clone, Debug, PartialEq)]
pub struct ResumeConflict {
    /// The setting.
    pub key: &'static str,
    /// Its value in the run.
    pub saved: String,
    /// Its value now.
    pub now: Setting,
    /// Why it cannot change.
    pub why: &'static str,
}

impl fmt::Display for ResumeConflict {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            key,
            saved,
            now,
            why,
        } = self;
        write!(out, "`{key}` was {saved} and is now {}: {why}", now.cite())
    }
}

/// Every setting of a run that `given` would change although it cannot, in the order of the table.
///
/// A setting that was not given keeps the run's value and is in no conflict.
pub(super) fn resume_conflicts(saved: &Settings, given: &Settings) -> Vec<ResumeConflict> {
    let conflict = |row: &'static super::OptionRow| {
        let OnResume::Fixed(why) = row.on_resume else {
            return None;
        };
        let now = given.get(row.key)?;
        let before = saved.get(row.key)?;
        (before.value != now.value).then(|| ResumeConflict {
            key: row.key,
            saved: before.value.to_string(),
            now: now.clone(),
            why,
        })
    };
    OPTIONS.iter().filter_map(conflict).collect()
}
