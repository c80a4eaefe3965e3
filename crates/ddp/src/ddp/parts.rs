//! The step of a model whose parts are on different ranks: what their replicas decide together.

use burn::module::Module;
use paceline_collective::{ProcessGroup, ReduceOp};

use super::Ddp;
use super::step::blame;
use crate::buffer;
use crate::error::DdpError;
use crate::verify;
use crate::zero::CHUNK;

/// The other parts of a model of which a [`Ddp`] trains one, such as the stages of a pipeline.
///
/// Each part is a [`Ddp`] over its own replicas. With `Parts` they stop after the same step, skip the same steps, clip by the
/// norm of the whole gradient, and have the same sums and loss.
pub(crate) struct Parts {
    /// One rank of each part.
    group: ProcessGroup,
    /// The parameters of all parts in the order of the whole model: the part, and the number of chunks.
    order: Vec<(usize, usize)>,
}

impl Ddp {
    /// Takes part in the steps of the other parts of a model: `group` has one rank of each part. `model` has placeholders for
    /// the parameters of the others. All ranks of the group call it.
    ///
    /// *Numerics*: in host memory, the norm has the bits of a model on one rank.
    ///
    /// *Cost*: one all-reduce of a few numbers at the end of each step; with clipping, an all-gather of one number for each
    /// 1,024 gradients.
    ///
    /// *Errors*: [`DdpError::Mismatch`] if the parts' settings differ.
    pub fn join_parts<M: Module>(
        &mut self,
        group: &ProcessGroup,
        model: &M,
    ) -> Result<(), DdpError> {
        let settings = self.options.compared(self.group.world());
        let manifest = verify::manifest(&[], "", &settings);
        verify::compare(group, &manifest).inspect_err(|error| blame(group, error))?;
        let mut own = Vec::new();
        for (place, (id, _)) in buffer::paths(model).into_iter().enumerate() {
            let index = self.index.iter().find(|(known, _)| known.val() == id);
            if let Some((_, index)) = index {
                let chunks = self.parameters[*index].len().div_ceil(CHUNK);
                own.extend([place as i64, chunks as i64]);
            }
        }
        let counts = gather_counts(group, own.len())?;
        let mut all = vec![0; counts.iter().sum()];
        group.all_gather_v(&own, &mut all, &counts)?;
        let mut places = Vec::new();
        let mut rest = &all[..];
        for (part, count) in counts.into_iter().enumerate() {
            let (mine, after) = rest.split_at(count);
            rest = after;
            let (pairs, _) = mine.as_chunks::<2>();
            places.extend(
                pairs
                    .iter()
                    .map(|[place, chunks]| (*place, part, *chunks as usize)),
            );
        }
        places.sort_unstable();
        self.parts = Some(Parts {
            group: group.clone(),
            order: places
                .into_iter()
                .map(|(_, part, chunks)| (part, chunks))
                .collect(),
        });
        Ok(())
    }
}

impl Parts {
    /// Whether any part shows it.
    pub(crate) fn any(&self, here: bool) -> Result<bool, DdpError> {
        let mut any = [i32::from(here)];
        self.group.all_reduce(&mut any, ReduceOp::Max)?;
        Ok(any[0] > 0)
    }

    /// Adds up the votes and sums in `extras`, which begin after the weight: only one part has numbers other than 0 in each
    /// sum, so the addition is exact.
    pub(super) fn add(&self, extras: &mut [f32]) -> Result<(), DdpError> {
        Ok(self.group.all_reduce(&mut extras[1..], ReduceOp::Sum)?)
    }

    /// The sum of the squares of the parts' chunks, added in the order of the whole model.
    pub(crate) fn sum_of_squares(&self, own: &[f64]) -> Result<f64, DdpError> {
        let mut counts = vec![0; self.group.world()];
        for (part, chunks) in &self.order {
            counts[*part] += chunks;
        }
        let mut all = vec![0.0; counts.iter().sum()];
        self.group.all_gather_v(own, &mut all, &counts)?;
        let mut rest = &all[..];
        let mut of_parts: Vec<_> = counts
            .into_iter()
            .map(|count| {
                let (part, after) = rest.split_at(count);
                rest = after;
                part.iter()
            })
            .collect();
        let in_order = self
            .order
            .iter()
            .flat_map(|(part, chunks)| of_parts[*part].by_ref().take(*chunks).collect::<Vec<_>>());
        Ok(in_order.sum())
    }

    /// The sum over parts of numbers that are not in chunks.
    pub(crate) fn sum(&self, own: f64) -> Result<f64, DdpError> {
        let mut all = vec![0.0; self.group.world()];
        self.group.all_gather(&[own], &mut all)?;
        Ok(all.iter().sum())
    }
}

fn gather_counts(group: &ProcessGroup, own: usize) -> Result<Vec<usize>, DdpError> {
    let mut counts = vec![0; group.world()];
    group.all_gather(&[own as i64], &mut counts)?;
    Ok(counts.into_iter().map(|count| count as usize).collect())
}
