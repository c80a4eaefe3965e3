//! Resolved settings as text: a table for people, JSON for a script, a file to go on from.

use super::Resolved;

/// Widest a column is padded to, so that one long path does not push every line out of the window.
const COLUMN_WIDTH_MAX: usize = 40;

impl Resolved {
    /// An aligned table of every setting with its value and source, then the variables of the job's environment that are set.
    #[must_use]
    pub fn explain(&self) -> String {
        let heading = ["setting", "value", "from"].map(str::to_owned);
        let rows = self.settings.iter().map(|(row, setting)| {
            [
                row.key.to_owned(),
                setting.value.to_string(),
                setting.origin(),
            ]
        });
        let variables = self.variables.iter().cloned();
        let variables = variables.map(|(name, value)| [name, value, "environment".to_owned()]);
        let lines: Vec<[String; 3]> = std::iter::once(heading)
            .chain(rows)
            .chain(variables)
            .collect();
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

    /// The same for a script: one JSON object, by setting.
    #[must_use]
    pub fn explain_json(&self) -> String {
        let settings = self.settings.iter().map(|(row, setting)| {
            let entry = serde_json::json!({
                "value": setting.value.to_json(),
                "from": setting.origin(),
            });
            (row.key.to_owned(), entry)
        });
        let variables = self.variables.iter().map(|(name, value)| {
            let entry = serde_json::json!({ "value": value, "from": "environment" });
            (name.clone(), entry)
        });
        serde_json::Value::Object(settings.chain(variables).collect()).to_string()
    }

    /// The resolved settings as a file, each with where it came from.
    ///
    /// [`Resolved::from_saved`] reads it back. As the file of a new job it names a run directory that is taken.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let lines = self.settings.iter().map(|(row, setting)| {
            let from = one_line(&setting.origin());
            match setting.value.to_toml() {
                Some(value) => format!("{} = {value} # {from}\n", row.key),
                None => format!("# {} is not set # {from}\n", row.key),
            }
        });
        let heading = "# The settings of a training job, and where each came from.\n".to_owned();
        std::iter::once(heading).chain(lines).collect()
    }
}

/// A path in a source may hold a newline, which would end a comment.
fn one_line(text: &str) -> String {
    text.replace(|character: char| character.is_control(), "?")
}
