//! The rows of a table as a data set has them: cells, which become values when a sample is read.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::columns::{Encoder, encode};
use super::spool::Spool;
use crate::data::DataError;

/// The rows of one table, and of one to evaluate on, as they were read.
#[derive(Clone, Debug)]
pub struct StoredRows {
    parts: Vec<Arc<Part>>,
}

#[derive(Debug)]
struct Part {
    path: PathBuf,
    rows: Spool,
    encoders: Vec<Encoder>,
}

/// Whether they are the same rows; cells are not compared.
impl PartialEq for StoredRows {
    fn eq(&self, other: &Self) -> bool {
        let of = |rows: &Self| -> Vec<_> { rows.parts.iter().map(Arc::as_ptr).collect() };
        of(self) == of(other)
    }
}

impl StoredRows {
    pub(super) fn new(path: &Path, rows: Spool, encoders: Vec<Encoder>) -> Self {
        let path = path.to_owned();
        let part = Part {
            path,
            rows,
            encoders,
        };
        Self {
            parts: vec![Arc::new(part)],
        }
    }

    /// These rows and then the others.
    pub(crate) fn extend(&mut self, others: Self) {
        self.parts.extend(others.parts);
    }

    /// Writes the values of a row.
    ///
    /// *Errors*: the temporary file cannot be read.
    ///
    /// # Panics
    ///
    /// If there is no such row, or `values` are not as many as it has.
    pub(crate) fn read(&self, row: usize, values: &mut [f32]) -> Result<(), DataError> {
        let (mut row, mut parts) = (row, self.parts.iter());
        let mut part = parts.next().expect("a table");
        while row >= part.rows.len() {
            row -= part.rows.len();
            part = parts.next().expect("a row of a table");
        }
        let mut cells = Vec::new();
        let read = part.rows.read(row, &mut cells);
        read.map_err(|problem| problem.of(&part.path))?;
        encode(&part.encoders, &cells, values);
        Ok(())
    }
}
