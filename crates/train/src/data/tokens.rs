//! The tokens of a text: in memory up to a limit, and beyond it in a temporary file.

use std::ops::Range;

use super::DataProblem;
use super::temporary::Spill;

/// Bytes of tokens that are held in memory.
const MEMORY_BYTES: usize = 128 << 20;

/// What to do if there is no room for more of them.
const NO_ROOM: &str = "set TMPDIR to a folder with 2 bytes for each token and each rank, or 4 for more than 65,536 kinds";

/// Maximum number of tokens. The order of sequences is in memory.
const TOKENS_MAX: u64 = 1 << 36;

/// A stream of tokens, each in as few bytes as the vocabulary takes.
#[derive(Debug)]
pub(crate) struct Tokens {
    bytes_each: usize,
    bytes: Spill,
}

impl Tokens {
    /// No tokens, of so many kinds.
    pub(crate) fn new(vocabulary: usize) -> Self {
        Self::with_memory(vocabulary, MEMORY_BYTES)
    }

    fn with_memory(vocabulary: usize, memory_max: usize) -> Self {
        Self {
            bytes_each: if vocabulary <= 1 << 16 { 2 } else { 4 },
            bytes: Spill::new(memory_max, NO_ROOM),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len() / self.bytes_each
    }

    /// Adds tokens.
    ///
    /// *Errors*: too many; the temporary file cannot be written.
    pub(crate) fn push(&mut self, tokens: &[u32]) -> Result<(), DataProblem> {
        let len = (self.len() + tokens.len()) as u64;
        if len > TOKENS_MAX {
            return Err(DataProblem::too_large("tokens", len, TOKENS_MAX));
        }
        let mut bytes = Vec::with_capacity(tokens.len() * self.bytes_each);
        for token in tokens {
            bytes.extend(&token.to_le_bytes()[..self.bytes_each]);
        }
        self.bytes.push(&bytes)
    }

    /// The tokens at these places, which must be there.
    ///
    /// *Errors*: the temporary file cannot be read.
    pub(crate) fn read(&self, places: Range<usize>) -> Result<Vec<u32>, DataProblem> {
        let each = self.bytes_each;
        let bytes = self.bytes.read(places.start * each, places.len() * each)?;
        let tokens = bytes.chunks_exact(each).map(|bytes| {
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
                assert_eq!(tokens.bytes.has_file(), memory_max < 200, "{memory_max}");
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
