//! What may change when a run goes on, and what may not.

use super::settings::Settings;
use super::table::{OPTIONS, OnResume, OptionRow};

/// A sentence for every setting of a run that `given` would change although it cannot, in the order of the table.
///
/// A setting that is not given keeps the run's value.
pub(super) fn conflicts(saved: &Settings, given: &Settings) -> Vec<String> {
    let conflict = |row: &'static OptionRow| {
        let OnResume::Fixed(why) = row.on_resume else {
            return None;
        };
        let (now, before) = (given.get(row.key)?, saved.get(row.key)?);
        (before.value != now.value).then(|| {
            let (key, before, now) = (row.key, &before.value, now.cite());
            format!("`{key}` was {before} and is now {now}: {why}")
        })
    };
    OPTIONS.iter().filter_map(conflict).collect()
}
