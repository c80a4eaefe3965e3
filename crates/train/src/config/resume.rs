//! The settings that a resumed run may and may not change.

use super::settings::Settings;
use super::table::{OPTIONS, OptionRow};

/// A message for every fixed setting that `given` would change, in table order.
///
/// A setting not given keeps the run's value.
pub(super) fn conflicts(saved: &Settings, given: &Settings) -> Vec<String> {
    let conflict = |row: &'static OptionRow| {
        let why = row.fixed?;
        let (now, before) = (given.get(row.key)?, saved.get(row.key)?);
        (before.value != now.value).then(|| {
            let (key, before, now) = (row.key, &before.value, now.cite());
            format!("`{key}` was {before} and is now {now}: {why}")
        })
    };
    OPTIONS.iter().filter_map(conflict).collect()
}
