//! What a communication hook keeps from step to step, to save and to resume from.

use std::collections::{BTreeMap, HashMap};

use burn::tensor::{DType, TensorData};

use super::Ddp;
use crate::error::DdpError;
use crate::reducer::Kept;

/// One tensor of the state.
struct Part {
    kept: Kept,
    /// Of the parameter.
    index: usize,
    name: String,
    len: usize,
    /// A replica that has it.
    replica: usize,
}

impl Ddp {
    /// Whether each replica's optimizer has a state of its own, as with [`CommHook::LocalSgd`](crate::CommHook::LocalSgd).
    pub fn has_own_optimizers(&self) -> bool {
        self.rounds.is_some() && self.group.world() > 1
    }

    /// Whether the [communication hook](crate::CommHook) keeps anything from step to step.
    pub fn has_hook_state(&self) -> bool {
        self.options.comm_hook.is_per_shard()
    }

    /// A copy of the tensors that the [communication hook](crate::CommHook) keeps on this rank from step to step, by name: residuals by
    /// shard and path; on the first replica PowerSGD's `Q` and the outer optimizer's momentum by path. Call it between two steps; no
    /// rank waits.
    ///
    /// The names do not depend on the number of replicas, nor on the stages of a pipeline; those of a parameter's slice say which slice
    /// it is. Only ranks that share the parts of some parameters have the same tensors of the others.
    ///
    /// *Errors*: a round of local steps that has not ended.
    pub fn hook_state(&self) -> Result<Vec<(String, TensorData)>, DdpError> {
        let rounds = self.rounds.as_ref();
        if rounds.is_some_and(|rounds| !rounds.phase.is_in_sync) {
            return Err(DdpError::NotAveraged { step: self.step });
        }
        let parts = self.kept_parts().into_iter();
        let own = parts.filter(|part| part.replica == self.group.rank());
        let tensors = own.filter_map(|part| {
            let values = self.read_kept(part.kept, part.index)?;
            Some((part.name, TensorData::new(values, [part.len])))
        });
        Ok(tensors.collect())
    }

    /// Continues with the tensors of all ranks' [`hook_state`](Self::hook_state) that rank 0 of the
    /// [model's group](Self::model_group) has by name. All ranks call it, after [`load_state_dict`](Self::load_state_dict). If they are
    /// not those of this hook, the hook starts without state, and rank 0 warns.
    ///
    /// *Blocks*: until rank 0 has sent them. *Errors*: failed collectives.
    pub fn load_hook_state(&mut self, saved: HashMap<String, TensorData>) -> Result<(), DdpError> {
        let parts = self.kept_parts().into_iter();
        let parts: HashMap<String, Part> = parts.map(|part| (part.name.clone(), part)).collect();
        let group = self.model_group().clone();
        let is_root = group.rank() == 0;
        // Replicas have the same names, ranks of one replica others.
        let told = parts.values().map(|part| (&part.name[..], part.len));
        let told: Vec<_> = told.filter(|_| self.group.rank() == 0).collect();
        let told = serde_json::to_vec(&told).expect("plain data encodes");
        let mut expected: BTreeMap<String, usize> = BTreeMap::new();
        for told in group.all_gather_bytes(&told)? {
            let told: Vec<(String, usize)> = serde_json::from_slice(&told).unwrap_or_default();
            expected.extend(told);
        }
        let fits = |(name, len): (&String, &usize)| {
            let found = saved.get(name);
            found.is_some_and(|data| data.dtype() == DType::F32 && data.num_elements() == *len)
        };
        let is_known = saved.len() == expected.len() && expected.iter().all(fits);
        if is_root && !is_known {
            paceline_rendezvous::notice!(
                WARN,
                "the saved state of a communication hook is not used: expected {} tensors for {}, got {}; the hook and \
                 the numbers of shards and of ranks that share a layer's parts must be those of the checkpoint",
                expected.len(),
                self.options.comm_hook,
                saved.len()
            );
        }
        let mut answer = [u8::from(is_known)];
        group.broadcast(&mut answer, 0)?;
        if answer == [0] {
            return Ok(());
        }
        for (name, len) in expected {
            let mut values = vec![0.0; len];
            if let Some(data) = saved.get(&name).filter(|_| is_root) {
                values.copy_from_slice(&crate::buffer::floats(data));
            }
            group.broadcast(&mut values, 0)?;
            let Some(Part { kept, index, .. }) = parts.get(&name) else {
                continue;
            };
            match (kept, &mut self.rounds) {
                (Kept::Momentum, Some(rounds)) => {
                    let id = self.parameters[*index].id;
                    rounds.momentum.insert(id, values);
                }
                _ => self.reducer.kept(*kept, *index, &mut |kept| {
                    kept.copy_from_slice(&values);
                }),
            }
        }
        Ok(())
    }

    /// The tensors of the state: the same on every replica of this rank.
    fn kept_parts(&self) -> Vec<Part> {
        let owner = |shard| {
            let mut replicas = 0..self.group.world();
            let found = replicas.find(|replica| self.tree.range(*replica).contains(&shard));
            found.expect("every shard has a replica")
        };
        let mut parts = Vec::new();
        for (index, entry) in self.parameters.iter().enumerate() {
            let slice = self.placement().and_then(|all| all.slice(entry.id));
            let path = match slice {
                None => entry.path.clone(),
                Some((_, at)) => format!("{}/{}..{}", entry.path, at.start, at.end),
            };
            for (kept, name) in [(Kept::Factor, "factor"), (Kept::Momentum, "momentum")] {
                let own = self.read_kept(kept, index);
                parts.extend(own.map(|own| Part {
                    kept,
                    index,
                    name: format!("{name}/{path}"),
                    len: own.len(),
                    replica: 0,
                }));
            }
            // A hook keeps residuals of a parameter for all shards or for none.
            let shard = self.shards().start;
            let own = self.read_kept(Kept::Residual { shard }, index);
            let shards = own.map_or(0, |_| self.shard_count());
            parts.extend((0..shards).map(|shard| Part {
                kept: Kept::Residual { shard },
                index,
                name: format!("residual/{shard}/{path}"),
                len: entry.len(),
                replica: owner(shard),
            }));
        }
        parts
    }

    fn read_kept(&self, kept: Kept, index: usize) -> Option<Vec<f32>> {
        if let (Kept::Momentum, Some(rounds)) = (kept, &self.rounds) {
            let entry = &self.parameters[index];
            let momentum = rounds.momentum.get(&entry.id).cloned();
            let momentum = momentum.unwrap_or_else(|| vec![0.0; entry.len()]);
            return rounds.has_outer().then_some(momentum);
        }
        let mut found = None;
        self.reducer
            .kept(kept, index, &mut |values| found = Some(values.to_vec()));
        found
    }
}
