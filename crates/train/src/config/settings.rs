//! Settings by key, each with its source, in layers.

use std::collections::BTreeMap;
use std::path::Path;

use super::kind::Written;
use super::table::{Fallback, NONE, OPTIONS, OptionRow, UserProgram};
use super::value::{Setting, Source, Value};

/// Settings by key; a layer has only some of the table's keys, a resolved job all of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Settings {
    /// The user's program that has them; `None` for `paceline train`.
    pub(super) program: Option<UserProgram>,
    by_key: BTreeMap<&'static str, Setting>,
}

impl Settings {
    /// The defaults, without the settings that are derived from others.
    pub(super) fn defaults() -> Self {
        let mut settings = Self::default();
        for row in OPTIONS {
            let setting = match row.fallback {
                Fallback::Value(text) => {
                    let value = row.kind.read(Written::Bare(text));
                    let value = value.expect("a default is a valid value of its row");
                    Setting::new(value, Source::Default)
                }
                Fallback::Unset(NONE) => Setting::new(Value::Unset, Source::Default),
                Fallback::Unset(meaning) => Setting::noted(Value::Unset, Source::Default, meaning),
                Fallback::Derived(_) => continue,
            };
            settings.insert(row, setting);
        }
        settings
    }

    /// The setting of a key.
    pub(super) fn get(&self, key: &str) -> Option<&Setting> {
        self.by_key.get(key)
    }

    /// The settings in the order of the table.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&'static OptionRow, &Setting)> {
        OPTIONS
            .iter()
            .filter_map(|row| self.get(row.key).map(|setting| (row, setting)))
    }

    /// Those that the program has.
    pub(super) fn shown(&self) -> impl Iterator<Item = (&'static OptionRow, &Setting)> {
        let program = self.program.as_ref();
        self.iter().filter(move |(row, _)| row.is_of(program))
    }

    pub(super) fn insert(&mut self, row: &'static OptionRow, setting: Setting) {
        self.by_key.insert(row.key, setting);
    }

    /// Adds or replaces the setting of a key in the table.
    pub(super) fn set(&mut self, key: &'static str, setting: Setting) {
        let row = super::option(key).expect("a key of the table");
        self.insert(row, setting);
    }

    /// Sets a key that is not set, with how its default follows from other settings.
    pub(super) fn set_default(
        &mut self,
        key: &'static str,
        value: impl Into<Value>,
        note: Option<&str>,
    ) {
        if self.get(key).is_none() {
            let mut setting = Setting::new(value.into(), Source::Default);
            setting.note = note.map(str::to_owned);
            self.set(key, setting);
        }
    }

    /// Replaces a value that asked for a choice, with the reason for what was chosen.
    pub(super) fn choose(&mut self, key: &'static str, value: impl Into<Value>, note: &str) {
        let source = self.need(key).source.clone();
        self.set(key, Setting::noted(value.into(), source, note));
    }

    /// Removes the setting of a key.
    pub(super) fn remove(&mut self, key: &'static str) {
        self.by_key.remove(key);
    }

    /// Merges another layer into this one; its settings win.
    pub(super) fn overlay(&mut self, upper: Self) {
        self.program = upper.program.or(self.program.take());
        self.by_key.extend(upper.by_key);
    }

    /// The setting of a key that every resolved job has.
    pub(super) fn need(&self, key: &'static str) -> &Setting {
        self.get(key)
            .unwrap_or_else(|| panic!("`{key}` must be resolved before it is read"))
    }

    /// The value of a whole-number setting, if set.
    pub(super) fn count(&self, key: &'static str) -> Option<u64> {
        match self.get(key)?.value {
            Value::Count(count) => Some(count),
            _ => None,
        }
    }

    /// The value of a setting that is a word or a text, if set.
    pub(super) fn word(&self, key: &'static str) -> Option<&str> {
        match &self.get(key)?.value {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The value of a path setting, if set.
    pub(super) fn path(&self, key: &'static str) -> Option<&Path> {
        match &self.get(key)?.value {
            Value::Path(path) => Some(path),
            _ => None,
        }
    }
}
