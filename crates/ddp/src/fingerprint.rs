//! A rolling check that all replicas still hold the same weights.
//!
//! Every step hashes one window of the weights and compares it over all ranks, asynchronously; the
//! windows go round the whole model. A replica that has drifted is detected within `weights / window` steps at a cost that
//! does not grow with the model.

use burn::module::{Module, ParamId};
use burn::tensor::Tensor;
use paceline_collective::{AllGather, ProcessGroup, Ticket};
use sha2::{Digest, Sha256};

use crate::buffer::{self, Entry};
use crate::error::DdpError;

/// Elements of one window: 64 KiB of f32, tens of microseconds to hash.
const WINDOW_ELEMENTS: usize = 16 << 10;

/// Goes round the parameters window by window.
pub(crate) struct Fingerprint {
    parameters: Vec<(ParamId, String, usize)>,
    every: u64,
    /// The next.
    window: Window,
    chosen: Option<Chosen>,
    pending: Option<Pending>,
}

/// The start of a window.
#[derive(Clone, Copy, Default)]
pub(crate) struct Window {
    parameter: usize,
    offset: usize,
}

/// The window to compare next.
struct Chosen {
    values: Tensor<1>,
    path: String,
    step: u64,
    window: Window,
}

struct Pending {
    ticket: Ticket<i64>,
    path: String,
    step: u64,
    window: Window,
}

impl Fingerprint {
    /// Compares every `every` steps; 0 switches it off.
    pub(crate) fn new(parameters: &[&Entry], every: u64) -> Self {
        Self {
            parameters: parameters
                .iter()
                .map(|e| (e.id, e.path.clone(), e.len()))
                .filter(|(_, _, len)| *len > 0)
                .collect(),
            every,
            window: Window::default(),
            chosen: None,
            pending: None,
        }
    }

    /// Chooses the next window of `model`. `step` decides whether a comparison is due; the number of calls, which is the same
    /// on every rank, decides which window.
    ///
    /// The values are those of this moment but are read later: on a GPU, reading now would wait for all earlier work.
    pub(crate) fn choose<M: Module>(&mut self, group: &ProcessGroup, model: &M, step: u64) {
        self.chosen = None;
        let due = self.every > 0 && step.is_multiple_of(self.every) && group.world() > 1;
        if !due || self.parameters.is_empty() || self.pending.is_some() {
            return;
        }
        let window = self.window;
        let (id, path, len) = self.parameters[window.parameter].clone();
        let end = (window.offset + WINDOW_ELEMENTS).min(len);
        let values = buffer::window(model, id, window.offset..end);
        self.window = self.after(end, len);
        self.chosen = values.map(|values| Chosen {
            values,
            path,
            step,
            window,
        });
    }

    /// The window that the next step compares.
    pub(crate) fn window(&self) -> Window {
        let pending = self.pending.as_ref();
        pending.map_or(self.window, |pending| pending.window)
    }

    /// Returns to `window` after a failed step. With `keeps_sent`, a fingerprint that was sent waits for the repeated step: the
    /// other ranks have sent theirs, and the weights are the same.
    pub(crate) fn undo(&mut self, window: Window, keeps_sent: bool) {
        self.chosen = None;
        if self.pending.is_some() && keeps_sent {
            return;
        }
        self.pending = None;
        self.window = window;
    }

    /// Sends the fingerprint of the chosen window; a second call does nothing.
    pub(crate) fn send(&mut self, group: &ProcessGroup) -> Result<(), DdpError> {
        let Some(chosen) = self.chosen.take() else {
            return Ok(());
        };
        let Chosen {
            values,
            path,
            step,
            window,
        } = chosen;
        let values = buffer::read([values], "weights")?;
        let mut hashes = group.buffer::<i64>(group.world())?;
        hashes[group.rank()] = hash64(values[0].as_bytes());
        let ticket = group.all_gather_async(hashes, AllGather::default());
        self.pending = Some(Pending {
            ticket,
            path,
            step,
            window,
        });
        Ok(())
    }

    fn after(&self, end: usize, len: usize) -> Window {
        let Window { parameter, .. } = self.window;
        let (parameter, offset) = match end < len {
            true => (parameter, end),
            false => ((parameter + 1) % self.parameters.len(), 0),
        };
        Window { parameter, offset }
    }

    /// Compares the fingerprints sent.
    pub(crate) fn check(&mut self) -> Result<(), DdpError> {
        let Some(Pending {
            ticket, path, step, ..
        }) = self.pending.take()
        else {
            return Ok(());
        };
        let done = ticket.wait()?;
        let ranks = odd_ones(&done.buffer);
        if ranks.is_empty() {
            return Ok(());
        }
        Err(DdpError::Diverged { step, path, ranks })
    }
}

/// The ranks whose value is not the most frequent one. In a tie the lowest rank's value wins.
fn odd_ones(hashes: &[i64]) -> Vec<usize> {
    let count = |value: i64| hashes.iter().filter(|h| **h == value).count();
    let mut best: Option<(i64, usize)> = None;
    for &hash in hashes {
        let votes = count(hash);
        if best.is_none_or(|(_, most)| votes > most) {
            best = Some((hash, votes));
        }
    }
    let Some((majority, _)) = best else {
        return Vec::new();
    };
    (0..hashes.len())
        .filter(|rank| hashes[*rank] != majority)
        .collect()
}

fn hash64(bytes: &[u8]) -> i64 {
    let digest = Sha256::digest(bytes);
    let mut first = [0u8; 8];
    first.copy_from_slice(&digest[..8]);
    i64::from_le_bytes(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_fingerprints_name_nobody() {
        assert_eq!(odd_ones(&[7, 7, 7]), Vec::<usize>::new());
    }

    #[test]
    fn the_minority_is_named() {
        assert_eq!(odd_ones(&[7, 8, 7, 7]), vec![1]);
        assert_eq!(odd_ones(&[8, 7, 7]), vec![0]);
    }

    #[test]
    fn of_two_that_differ_rank_0_counts_as_right() {
        assert_eq!(odd_ones(&[7, 8]), vec![1]);
    }
}
