//! The rows of a table, in memory or in a temporary file.

use crate::data::DataProblem;
use crate::data::temporary::Spill;

const CELL_BYTES: usize = size_of::<f64>();

/// What to do if there is no room for more cells.
const NO_ROOM: &str = "set TMPDIR to a folder with 8 bytes for each cell of the table and each rank; leave columns out with --drop-columns";

/// Rows of cells, each a number.
#[derive(Debug)]
pub(super) struct Spool {
    /// Rows of one width; later ones are wider if JSON lines have new keys.
    parts: Vec<Part>,
    rows: usize,
    cells: Spill,
}

/// Where rows of one width begin.
#[derive(Debug)]
struct Part {
    row: usize,
    cell: usize,
    width: usize,
}

impl Spool {
    /// No rows, of which so many bytes may be in memory.
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            parts: Vec::new(),
            rows: 0,
            cells: Spill::new(bytes_max, NO_ROOM),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.rows
    }

    /// Adds a row, which is at least as wide as the last one.
    ///
    /// *Errors*: the temporary file cannot be written.
    pub(super) fn push(&mut self, cells: &[f64]) -> Result<(), DataProblem> {
        if self
            .parts
            .last()
            .is_none_or(|part| part.width != cells.len())
        {
            self.parts.push(Part {
                row: self.rows,
                cell: self.cells.len() / CELL_BYTES,
                width: cells.len(),
            });
        }
        let bytes: Vec<[u8; CELL_BYTES]> = cells.iter().map(|cell| cell.to_le_bytes()).collect();
        self.cells.push(bytes.as_flattened())?;
        self.rows += 1;
        Ok(())
    }

    /// Puts the cells of a row in place of `cells`, as many as the last row has; those that are not in the row are `NaN`.
    ///
    /// *Errors*: the temporary file cannot be read.
    pub(super) fn read(&self, row: usize, cells: &mut Vec<f64>) -> Result<(), DataProblem> {
        let after = self.parts.partition_point(|part| part.row <= row);
        let part = &self.parts[after - 1];
        let at = part.cell + (row - part.row) * part.width;
        let bytes = self.cells.read(at * CELL_BYTES, part.width * CELL_BYTES)?;
        cells.clear();
        let (all, _) = bytes.as_chunks();
        cells.extend(all.iter().map(|bytes| f64::from_le_bytes(*bytes)));
        let width = self.parts.last().map_or(0, |part| part.width);
        cells.resize(width, f64::NAN);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_the_same_in_memory_in_the_file_and_over_both() {
        // 0 bytes: each row but the last is in the file.
        for bytes_max in [0, 24, 100, 1 << 20] {
            let mut spool = Spool::new(bytes_max);
            let row = |row: usize| -> Vec<f64> {
                let width = if row < 7 { 2 } else { 3 };
                (0..width)
                    .map(|column| (10 * row + column) as f64)
                    .collect()
            };
            (0..20).for_each(|index| spool.push(&row(index)).expect("written"));
            assert_eq!(
                (spool.len(), spool.cells.has_file()),
                (20, bytes_max < 1000)
            );
            let mut cells = Vec::new();
            for index in (0..20).rev() {
                spool.read(index, &mut cells).expect("read");
                let expected = row(index);
                assert_eq!(cells[..expected.len()], expected, "{bytes_max} {index}");
                assert_eq!(cells.len(), 3);
                assert_eq!(cells[2].is_nan(), index < 7);
            }
        }
    }
}
