//! The rows of a table: in memory up to a limit, and beyond it in a temporary file, as Python's `SpooledTemporaryFile` has it.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use crate::data::{DataProblem, temporary};

/// Cells that are written at once.
const CHUNK: usize = 1 << 16;

/// Rows of cells, each a number.
#[derive(Debug)]
pub(super) struct Spool {
    /// Rows of one width; later ones are wider if JSON lines have new keys.
    parts: Vec<Part>,
    rows: usize,
    /// The last cells, which are not in the file.
    memory: Vec<f64>,
    memory_max: usize,
    /// The cells before them.
    file: Option<File>,
    in_file: usize,
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
            memory: Vec::new(),
            memory_max: bytes_max / size_of::<f64>(),
            file: None,
            in_file: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.rows
    }

    /// Adds a row, which is at least as wide as the last one.
    ///
    /// *Errors*: the temporary file cannot be written.
    pub(super) fn push(&mut self, cells: &[f64]) -> Result<(), DataProblem> {
        if self.memory.len() + cells.len() > self.memory_max {
            self.write().map_err(|error| {
                let hint = "set TMPDIR to a folder with 8 bytes for each cell of the table and each rank; leave columns out with --drop-columns";
                temporary::unwritable(&error, hint)
            })?;
        }
        if self
            .parts
            .last()
            .is_none_or(|part| part.width != cells.len())
        {
            self.parts.push(Part {
                row: self.rows,
                cell: self.in_file + self.memory.len(),
                width: cells.len(),
            });
        }
        self.memory.extend(cells);
        self.rows += 1;
        Ok(())
    }

    fn write(&mut self) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(temporary::file()?),
        };
        for cells in self.memory.chunks(CHUNK) {
            let bytes: Vec<u8> = cells.iter().flat_map(|cell| cell.to_le_bytes()).collect();
            file.write_all(&bytes)?;
        }
        self.in_file += self.memory.len();
        self.memory_max = self.memory_max.min(CHUNK);
        self.memory = Vec::with_capacity(self.memory_max);
        Ok(())
    }

    /// Puts the cells of a row in place of `cells`, as many as the last row has; those that are not in the row are `NaN`.
    ///
    /// *Errors*: the temporary file cannot be read.
    pub(super) fn read(&self, row: usize, cells: &mut Vec<f64>) -> Result<(), DataProblem> {
        let after = self.parts.partition_point(|part| part.row <= row);
        let part = &self.parts[after - 1];
        let at = part.cell + (row - part.row) * part.width;
        cells.clear();
        match (&self.file, at.checked_sub(self.in_file)) {
            (Some(file), None) => {
                let mut bytes = vec![0; part.width * size_of::<f64>()];
                let read = file.read_exact_at(&mut bytes, (at * size_of::<f64>()) as u64);
                read.map_err(|error| temporary::unreadable(&error))?;
                let (all, _) = bytes.as_chunks::<8>();
                cells.extend(all.iter().map(|bytes| f64::from_le_bytes(*bytes)));
            }
            (_, at) => cells.extend(&self.memory[at.unwrap_or(0)..][..part.width]),
        }
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
            assert_eq!((spool.len(), spool.file.is_some()), (20, bytes_max < 1000));
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
