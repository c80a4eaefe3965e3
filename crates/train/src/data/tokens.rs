//! The tokens of a text: in memory up to a limit, and beyond it in a temporary file.

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::{DataProblem, temporary};

/// Bytes of tokens that are held in memory.
const MEMORY_BYTES: usize = 128 << 20;

/// Bytes that are written at once.
const CHUNK: usize = 1 << 20;

/// Maximum number of tokens. The order of sequences is in memory.
const TOKENS_MAX: u64 = 1 << 36;

/// A stream of tokens, each in as few bytes as the vocabulary takes.
#[derive(Debug)]
pub(crate) struct Tokens {
    bytes_each: usize,
    len: usize,
    /// The last ones, which are not in the file.
    memory: Vec<u8>,
    memory_max: usize,
    file: Option<File>,
    in_file: usize,
}

impl Tokens {
    /// No tokens, of so many kinds.
    pub(crate) fn new(vocabulary: usize) -> Self {
        Self::with_memory(vocabulary, MEMORY_BYTES)
    }

    fn with_memory(vocabulary: usize, memory_max: usize) -> Self {
        Self {
            bytes_each: if vocabulary <= 1 << 16 { 2 } else { 4 },
            len: 0,
            memory: Vec::new(),
            memory_max,
            file: None,
            in_file: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds tokens.
    ///
    /// *Errors*: too many; the temporary file cannot be written.
    pub(crate) fn push(&mut self, tokens: &[u32]) -> Result<(), DataProblem> {
        self.len += tokens.len();
        if self.len as u64 > TOKENS_MAX {
            return Err(DataProblem::too_large(
                "tokens",
                self.len as u64,
                TOKENS_MAX,
            ));
        }
        for token in tokens {
            let bytes = token.to_le_bytes();
            self.memory.extend(&bytes[..self.bytes_each]);
        }
        if self.memory.len() > self.memory_max {
            self.write().map_err(|error| {
                let hint = "set TMPDIR to a folder with 2 bytes for each token and each rank, or 4 for more than 65,536 kinds";
                temporary::unwritable(&error, hint)
            })?;
        }
        Ok(())
    }

    fn write(&mut self) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(temporary::file()?),
        };
        file.write_all(&self.memory)?;
        self.in_file += self.memory.len();
        self.memory_max = self.memory_max.min(CHUNK);
        self.memory = Vec::new();
        Ok(())
    }

    /// The tokens at these places, which must be there.
    ///
    /// *Errors*: the temporary file cannot be read.
    pub(crate) fn read(&self, places: Range<usize>) -> Result<Vec<u32>, DataProblem> {
        let [start, end] = [places.start, places.end].map(|place| place * self.bytes_each);
        let mut bytes = vec![0; end - start];
        let in_file = self.in_file.clamp(start, end) - start;
        let (first, last) = bytes.split_at_mut(in_file);
        if let Some(file) = self.file.as_ref().filter(|_| !first.is_empty()) {
            let read = file.read_exact_at(first, start as u64);
            read.map_err(|error| temporary::unreadable(&error))?;
        }
        let from = (start + in_file) - self.in_file.min(start + in_file);
        last.copy_from_slice(&self.memory[from..][..last.len()]);
        let tokens = bytes.chunks_exact(self.bytes_each).map(|bytes| {
            let mut whole = [0; 4];
            whole[..bytes.len()].copy_from_slice(bytes);
            u32::from_le_bytes(whole)
        });
        Ok(tokens.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back_from_memory_and_from_a_file() {
        for (vocabulary, offset) in [(1 << 16, 65_000), (1 << 16 | 1, 65_500)] {
            for memory_max in [0, 10, 150, 1 << 20] {
                let mut tokens = Tokens::with_memory(vocabulary, memory_max);
                let all: Vec<u32> = (offset..offset + 100).collect();
                all.chunks(7)
                    .for_each(|some| tokens.push(some).expect("written"));
                assert_eq!(tokens.len(), 100);
                assert_eq!(tokens.file.is_some(), memory_max < 200, "{memory_max}");
                for start in 0..100 {
                    for end in start..=100 {
                        let read = tokens.read(start..end).expect("read");
                        assert_eq!(read, all[start..end], "{start}..{end}, {memory_max}");
                    }
                }
            }
        }
    }
}
