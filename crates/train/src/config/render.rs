//! Resolved settings as text: a table for people, JSON for scripts, a file for resuming.

use super::Resolved;
use super::layers::PROGRAM;

/// Maximum width that a column is padded to, so that one long path does not widen every line.
const COLUMN_WIDTH_MAX: usize = 40;

impl Resolved {
    /// An aligned table of every setting with its value and source, and another of the variables that ranks and tools read.
    #[must_use]
    pub fn explain(&self) -> String {
        let settings = self.settings.shown().map(|(row, setting)| {
            let value = setting.value.to_string();
            [row.key.to_owned(), value, setting.origin()]
        });
        let variables = self.variables.iter().map(|listed| {
            let name = listed.variable.name.to_owned();
            [name, listed.value.clone(), listed.origin.to_string()]
        });
        let (settings, variables) = (table("setting", settings), table("variable", variables));
        format!("{settings}\n{variables}")
    }

    /// The same for scripts: one JSON object, keyed by setting.
    #[must_use]
    pub fn explain_json(&self) -> String {
        let settings = self.settings.shown().map(|(row, setting)| {
            let entry = serde_json::json!({
                "value": setting.value.to_toml(),
                "from": setting.origin(),
            });
            (row.key.to_owned(), entry)
        });
        let variables = self.variables.iter().map(|listed| {
            let from = listed.origin.to_string();
            let entry = serde_json::json!({ "value": listed.value, "from": from });
            (listed.variable.name.to_owned(), entry)
        });
        serde_json::Value::Object(settings.chain(variables).collect()).to_string()
    }

    /// The resolved settings as a file, each with its source.
    ///
    /// [`Resolved::from_saved`] reads it back. To use it for a new job, change its run directory.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let lines = self.settings.shown().map(|(row, setting)| {
            let from = one_line(&setting.origin());
            match setting.value.to_toml() {
                Some(value) => format!("{} = {value} # {from}\n", row.key),
                None => format!("# {} is not set # {from}\n", row.key),
            }
        });
        let heading = "# The settings of a training job, each with its source.\n".to_owned();
        let program = self.settings.program.as_ref();
        let program = program.map(|program| {
            let name = toml::Value::String(program.name.clone());
            format!("{PROGRAM} = {name} # the program that trains\n")
        });
        std::iter::once(heading)
            .chain(program)
            .chain(lines)
            .collect()
    }
}

/// Lines under a heading, in columns.
fn table(what: &str, rows: impl Iterator<Item = [String; 3]>) -> String {
    let heading = [what, "value", "from"].map(str::to_owned);
    let lines: Vec<[String; 3]> = std::iter::once(heading).chain(rows).collect();
    let width = |column: usize| {
        let widths = lines.iter().map(|line| line[column].chars().count());
        widths
            .filter(|width| *width <= COLUMN_WIDTH_MAX)
            .max()
            .unwrap_or(0)
    };
    let (keys, values) = (width(0), width(1));
    lines
        .iter()
        .map(|[key, value, from]| format!("{key:keys$}  {value:values$}  {from}\n"))
        .collect()
}

/// A path in a source may contain a newline, which would end the comment.
fn one_line(text: &str) -> String {
    text.replace(|character: char| character.is_control(), "?")
}
