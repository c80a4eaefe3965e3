//! States in memory, to go back to when numbers turn out to be wrong or are not finite.
//!
//! Every rank keeps its own copy of the state of a few steps ago, and its digest is compared over all ranks in the next step. Once
//! all have the same, the copy counts: whatever has gone wrong on one rank, the ranks restore their own copies and repeat the
//! steps since. Nothing is sent.

use std::path::Path;

use burn::module::Module;
use burn::tensor::{Bytes, TensorData};
use paceline_ddp::sampler::SamplerState;
use paceline_ddp::{Ddp, weights};
use sha2::{Digest, Sha256};

use crate::checkpoint::Checkpoint;
use crate::record::with_ids;
use crate::saved::{InMemory, Origin, Saved, Told};

/// So often in a row the ranks go back to one state: two passing faults may come soon after another, a lasting one comes each time.
const TIMES_MAX: u32 = 3;

/// The states that a rank keeps.
#[derive(Debug, Default)]
pub(crate) struct Snapshots {
    /// Steps between two of them; 0 keeps none.
    every: u64,
    /// Not compared yet.
    newest: Option<Snapshot>,
    /// The same on all ranks.
    agreed: Option<Snapshot>,
    /// The step to which the ranks went back last, and how often in a row.
    went_back_to: (u64, u32),
}

#[derive(Debug)]
struct Snapshot {
    told: Told,
    weights: Vec<(String, TensorData)>,
    optimizer: Bytes,
}

impl Snapshots {
    pub(crate) fn every(steps: u64) -> Self {
        Self {
            every: steps,
            ..Self::default()
        }
    }

    /// Whether one is due before the next step of `ddp`.
    pub(crate) fn is_due(&mut self, ddp: &Ddp) -> bool {
        if self.every == 0 {
            return false;
        }
        self.settle(ddp);
        // At the same steps whatever the job has been through.
        let is_due = self.agreed.is_none() || ddp.next_step().is_multiple_of(self.every);
        self.newest.is_none() && is_due
    }

    /// Keeps `checkpoint`, and has the next step compare it.
    ///
    /// *Errors*: what cannot be kept, in words.
    pub(crate) fn keep<M: Module>(
        &mut self,
        path: &Path,
        ddp: &mut Ddp,
        checkpoint: &Checkpoint<'_, M>,
    ) -> Result<(), String> {
        if checkpoint.is_dealt(ddp) {
            return Err("the state is dealt to the ranks, and each has only a part of it".into());
        }
        let mut told = Told::of(path, Origin::Memory, checkpoint, ddp)?;
        // Burn's ids differ from rank to rank.
        let paths = weights::paths(checkpoint.model()).into_iter();
        let (ids, paths): (Vec<u64>, Vec<String>) = paths.unzip();
        told.state.parameters = paths.into_iter().zip(0..).collect();
        let places = ids.into_iter().zip(0..).collect();
        let optimizer = with_ids(vec![checkpoint.optimizer_state()?], Vec::new(), &places)?;
        let weights = weights::export(checkpoint.model());
        let mut hasher = Sha256::new();
        for (path, data) in &weights {
            hasher.update(path);
            hasher.update(data.as_bytes());
        }
        hasher.update(&optimizer[..]);
        let digest: [u8; 32] = hasher.finalize().into();
        let first = digest.first_chunk().expect("a SHA-256 is longer");
        ddp.compare_state(u64::from_le_bytes(*first));
        self.newest = Some(Snapshot {
            told,
            weights,
            optimizer,
        });
        Ok(())
    }

    /// Takes the newest state on which all ranks agreed, unless the ranks have gone back to it as often as they may: they would again.
    pub(crate) fn go_back(&mut self, ddp: &Ddp) -> Option<Saved> {
        self.settle(ddp);
        self.newest = None;
        let agreed = self.agreed.take()?;
        let times = match self.went_back_to {
            (step, times) if step == agreed.step() => times + 1,
            _ => 1,
        };
        self.went_back_to = (agreed.step(), times);
        (times <= TIMES_MAX).then(|| agreed.into_saved())
    }

    /// Takes the newest state that a step with finite numbers has followed, or else the newest one, as the state of `ddp` at `position`;
    /// and its step.
    pub(crate) fn give_up(&mut self, ddp: &Ddp, position: SamplerState) -> Option<(u64, Saved)> {
        let newest = self.newest.take();
        // `newest` may lead to the same numbers with any samples.
        let mut state = self.agreed.take().or(newest)?;
        let step = state.step();
        (state.told.state.ddp, state.told.state.sampler) = (ddp.state_dict(), Some(position));
        Some((step, state.into_saved()))
    }

    /// Forgets all, because a rank has joined that has none.
    pub(crate) fn clear(&mut self) {
        (self.newest, self.agreed) = (None, None);
    }

    fn settle(&mut self, ddp: &Ddp) {
        let newest = self.newest.as_ref().map(Snapshot::step);
        if newest.is_some() && newest == ddp.agreed_step() {
            self.agreed = self.newest.take();
        }
    }
}

impl Snapshot {
    fn step(&self) -> u64 {
        self.told.state.ddp.step
    }

    fn into_saved(self) -> Saved {
        let tensors = InMemory {
            weights: Some(self.weights),
            optimizer: vec![self.optimizer],
            room: Vec::new(),
        };
        Saved::from_memory(self.told, tensors)
    }
}
