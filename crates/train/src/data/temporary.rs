//! Data in memory up to a limit, and beyond it in a temporary file, as Python's `SpooledTemporaryFile` has it.

use std::env;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::DataProblem;

/// Bytes of the samples of a data set that may be in memory.
pub(super) const MEMORY_BYTES: usize = 256 << 20;

/// Bytes that stay in memory once there is a file.
const CHUNK: usize = 1 << 19;

/// Bytes one after another.
#[derive(Debug)]
pub(super) struct Spill {
    /// The last bytes, which are not in the file.
    memory: Vec<u8>,
    memory_max: usize,
    /// The bytes before them. It has no name, so nothing is left of it when the process ends.
    file: Option<File>,
    in_file: usize,
    /// What to do if there is no room for the file.
    hint: &'static str,
}

impl Spill {
    /// No bytes, of which so many may be in memory.
    pub(super) fn new(memory_max: usize, hint: &'static str) -> Self {
        Self {
            memory: Vec::new(),
            memory_max,
            file: None,
            in_file: 0,
            hint,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.in_file + self.memory.len()
    }

    /// Adds bytes.
    ///
    /// *Errors*: the temporary file cannot be made or written.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<(), DataProblem> {
        if self.memory.len() + bytes.len() > self.memory_max {
            self.write()
                .map_err(|error| unwritable(&error, self.hint))?;
        }
        let len = self.memory.len() + bytes.len();
        if len > self.memory.capacity() {
            // Doubling without a limit would reserve twice as much as may be in memory.
            let doubled = (2 * self.memory.capacity()).min(self.memory_max);
            let more = doubled.max(len) - self.memory.len();
            self.memory.reserve_exact(more);
        }
        self.memory.extend(bytes);
        Ok(())
    }

    fn write(&mut self) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(tempfile::tempfile_in(folder())?),
        };
        file.write_all(&self.memory)?;
        self.in_file += self.memory.len();
        self.memory_max = self.memory_max.min(CHUNK);
        self.memory = Vec::new();
        Ok(())
    }

    /// So many bytes from a place on, which must be there.
    ///
    /// *Errors*: the temporary file cannot be read.
    pub(super) fn read(&self, start: usize, len: usize) -> Result<Vec<u8>, DataProblem> {
        let mut bytes = vec![0; len];
        let in_file = self.in_file.clamp(start, start + len) - start;
        let (first, last) = bytes.split_at_mut(in_file);
        if let Some(file) = self.file.as_ref().filter(|_| !first.is_empty()) {
            let read = file.read_exact_at(first, start as u64);
            read.map_err(|error| unreadable(&error))?;
        }
        let from = (start + in_file).saturating_sub(self.in_file);
        last.copy_from_slice(&self.memory[from..][..last.len()]);
        Ok(bytes)
    }
}

/// Where large temporary files belong: on many systems `/tmp` is in memory.
fn folder() -> PathBuf {
    let set = env::var_os("TMPDIR").filter(|folder| !folder.is_empty());
    set.map_or_else(|| "/var/tmp".into(), PathBuf::from)
}

fn unwritable(error: &io::Error, hint: &str) -> DataProblem {
    let folder = folder();
    let folder = folder.display();
    let what = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "is full",
        _ => "cannot be written",
    };
    DataProblem::new(format!(
        "too large for memory, and {folder}, which takes a temporary file of it, {what}: {error}"
    ))
    .with_hint(hint)
}

fn unreadable(error: &io::Error) -> DataProblem {
    let folder = folder();
    let folder = folder.display();
    DataProblem::new(format!(
        "its temporary file in {folder} cannot be read: {error}"
    ))
}

#[cfg(test)]
impl Spill {
    pub(super) fn has_file(&self) -> bool {
        self.file.is_some()
    }
}
