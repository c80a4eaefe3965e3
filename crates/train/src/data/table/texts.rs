//! The texts in a column of a table.

use std::path::Path;

use super::columns::opaque;
use super::rows::{Cell, Rows};
use super::{Skipped, column_of, separator_named};
use crate::config::{BadSamples, TrainConfig};
use crate::data::DataProblem;
use crate::report::plural;

/// The default column, as data sets of Hugging Face call it.
const TEXT_COLUMN: &str = "text";

/// The column to read, and how.
pub(crate) struct TextColumn {
    name: String,
    /// Whether it is asked for by name.
    pub(crate) is_named: bool,
    separator: Option<u8>,
    bad_samples: BadSamples,
}

impl TextColumn {
    pub(crate) fn new(config: &TrainConfig) -> Self {
        let name = config.text_column.as_deref();
        Self {
            name: name.unwrap_or(TEXT_COLUMN).to_owned(),
            is_named: name.is_some(),
            separator: config.separator.as_deref().and_then(separator_named),
            bad_samples: config.bad_samples,
        }
    }

    /// Hands the text of each row to `take`, one after another, but for rows without one, and returns warnings about those left out.
    ///
    /// *Errors*: a file that cannot be read; no such column; a bad line, unless those are skipped; that of `take`.
    pub(crate) fn read(
        &self,
        path: &Path,
        mut take: impl FnMut(&str) -> Result<(), DataProblem>,
    ) -> Result<Vec<String>, DataProblem> {
        let mut rows = Rows::open(path, self.separator, Some(&self.name))?;
        let check = |rows: &Rows| column_of(rows, &self.name, "texts", "--text-column").map(drop);
        if rows.has_header() {
            check(&rows)?;
        }
        let mut at = None;
        let (mut skipped, mut empty) = (Skipped::new(&rows), 0);
        while let Some(row) = rows.next()? {
            let row = match row {
                Ok(row) => row,
                Err(problem) => {
                    skipped.add(problem, self.bad_samples)?;
                    continue;
                }
            };
            // In JSON lines the key may come later.
            at = at.or_else(|| rows.names().iter().position(|name| *name == self.name));
            match at.map(|at| (row.cell(at), row.text(at))) {
                Some((Cell::Opaque, _)) => {
                    skipped.add(opaque(row.place, &self.name), self.bad_samples)?;
                }
                Some((_, text)) if !text.is_empty() => take(text)?,
                _ => empty += 1,
            }
        }
        check(&rows)?;
        let empty = (empty > 0).then(|| {
            let (path, rows) = (path.display(), plural(empty, "row"));
            format!(
                "{path}: left out {rows} without a text in column {:?}",
                self.name
            )
        });
        Ok(skipped.warning(path).into_iter().chain(empty).collect())
    }
}
