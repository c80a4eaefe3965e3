//! A rolling check that all replicas still hold the same weights.
//!
//! Every step hashes one window of the weights and compares it over all ranks, asynchronously; the
//! windows go round the whole model. A replica that has drifted is detected within `weights / window` steps at a cost that
//! does not grow with the model.

use burn::module::{Module, ParamId};
use burn::tensor::Tensor;
use paceline_collective::{AllGather, ProcessGroup, Ticket};

use crate::buffer::{self, Entry};
use crate::error::DdpError;
use crate::record::digest;

/// Elements of one window: 64 KiB of f32, a few microseconds to hash.
const WINDOW_ELEMENTS: usize = 16 << 10;

/// Goes round the parameters window by window.
pub(crate) struct Fingerprint {
    parameters: Vec<Windows>,
    /// Windows of all parameters.
    windows: u64,
    every: u64,
    chosen: Option<Chosen>,
    pending: Option<Pending>,
}

/// The windows of one parameter.
struct Windows {
    id: ParamId,
    path: String,
    len: usize,
    /// Number of the first one.
    first: u64,
}

/// The window to compare next.
struct Chosen {
    values: Tensor<1>,
    path: String,
    step: u64,
}

struct Pending {
    ticket: Ticket<i64>,
    path: String,
    step: u64,
}

impl Fingerprint {
    /// Compares every `every` steps; 0 switches it off.
    pub(crate) fn new(parameters: &[&Entry], every: u64) -> Self {
        let mut windows = 0;
        let parameters = parameters.iter().filter(|entry| entry.len() > 0);
        let parameters = parameters.map(|entry| {
            let first = windows;
            windows += entry.len().div_ceil(WINDOW_ELEMENTS) as u64;
            Windows {
                id: entry.id,
                path: entry.path.clone(),
                len: entry.len(),
                first,
            }
        });
        Self {
            parameters: parameters.collect(),
            windows,
            every,
            chosen: None,
            pending: None,
        }
    }

    /// Chooses the window of `model` that `step` compares, if it compares any.
    ///
    /// The values are those of this moment but are read later: on a GPU, reading now would wait for all earlier work.
    pub(crate) fn choose<M: Module>(&mut self, group: &ProcessGroup, model: &M, step: u64) {
        self.chosen = None;
        let due = self.every > 0 && step.is_multiple_of(self.every) && group.world() > 1;
        if !due || self.parameters.is_empty() || self.pending.is_some() {
            return;
        }
        let window = (step / self.every) % self.windows;
        let after = self.parameters.partition_point(|p| p.first <= window);
        let Windows {
            id,
            path,
            len,
            first,
        } = &self.parameters[after - 1];
        let start = (window - first) as usize * WINDOW_ELEMENTS;
        let values = buffer::window(model, *id, start..(start + WINDOW_ELEMENTS).min(*len));
        let path = path.clone();
        self.chosen = values.map(|values| Chosen { values, path, step });
    }

    /// After a failed step. With `keeps_sent`, a fingerprint that was sent waits for the repeated step: the other ranks have
    /// sent theirs, and the weights are the same.
    pub(crate) fn undo(&mut self, keeps_sent: bool) {
        self.chosen = None;
        self.pending = self.pending.take().filter(|_| keeps_sent);
    }

    /// Sends the fingerprint of the chosen window; a second call does nothing.
    pub(crate) fn send(&mut self, group: &ProcessGroup) -> Result<(), DdpError> {
        let Some(Chosen { values, path, step }) = self.chosen.take() else {
            return Ok(());
        };
        let values = buffer::read([values], "weights")?;
        let mut hashes = group.buffer::<i64>(group.world())?;
        hashes[group.rank()] = digest(values[0].as_bytes()).cast_signed();
        let ticket = group.all_gather_async(hashes, AllGather::default());
        self.pending = Some(Pending { ticket, path, step });
        Ok(())
    }

    /// Compares the fingerprints sent.
    pub(crate) fn check(&mut self) -> Result<(), DdpError> {
        let Some(Pending { ticket, path, step }) = self.pending.take() else {
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
