//! The step of a model whose parts are on different ranks: what their replicas decide together.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use burn::module::{Module, ParamId};
use burn::tensor::Tensor;
use paceline_collective::{ProcessGroup, ReduceOp};

use super::Ddp;
use super::step::{blame, extra};
use crate::buffer::{self, Entry};
use crate::error::DdpError;
use crate::verify;
use crate::zero::CHUNK;

/// The other parts of a model of which a [`Ddp`] trains one: stages of a pipeline, slices of tensors, or slices of a stage.
///
/// Each part is a [`Ddp`] over its own replicas. With `Parts` they stop after the same step, skip the same steps, clip by the
/// norm of the whole gradient, and have the same sums and loss.
pub(crate) struct Parts {
    /// One rank of each part.
    group: ProcessGroup,
    /// The parameters of all parts in the order of the whole model.
    order: Vec<Chunks>,
    /// This part's cut parameters, by index.
    cuts: HashMap<usize, Layout>,
    /// Whether an earlier part has the same loss and sums.
    is_copy: bool,
}

/// The chunks of a parameter that a part brings to the norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Chunks {
    /// The parameter's place in the whole model.
    place: usize,
    part: usize,
    count: usize,
    /// Whether an earlier part brings the same.
    is_copy: bool,
}

/// How the pieces of a slice lie in its row-major elements.
struct Layout {
    /// Elements from one row of pieces to the next.
    stride: usize,
    /// The elements of each piece in a row.
    pieces: Vec<Range<usize>>,
}

/// Pieces of a parameter that is cut along an axis. Squares for the norm are added piece by piece, so that its bits do not
/// depend on where the pieces are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// The axis.
    pub axis: usize,
    /// The sizes, along the axis, of the pieces that make this rank's slice.
    pub lens: Vec<usize>,
}

impl Ddp {
    /// Takes part in the steps of the other parts of a model: `group` has the ranks of one replica, which are its stages, the
    /// ranks that share its tensors, or both. `model` has placeholders for the parameters of other stages; `pieces` tells, by
    /// id, how those are cut of which this rank has a slice. All ranks of the group call it.
    ///
    /// A parameter that several ranks have whole gets the same gradients on all of them and counts once in the norm. A rank
    /// whose parameters an earlier rank has too, whole or as slices, computes the same loss; its sums do not count.
    ///
    /// *Numerics*: the norm has the bits of a model on one rank. Those of a model that is cut depend on the pieces, not on the
    /// ranks that have them.
    ///
    /// *Cost*: one all-reduce of a few numbers at the end of each step; with clipping, an all-gather of one number for each
    /// 1,024 gradients.
    ///
    /// *Errors*: [`DdpError::Mismatch`] if the parts' settings differ; an optimizer that is sharded already, because the parts
    /// decide how its state is dealt; [`CommHook::TopK`](crate::CommHook::TopK) if several ranks have a parameter whole.
    pub fn join_parts<M: Module>(
        &mut self,
        group: &ProcessGroup,
        model: &M,
        pieces: impl Fn(ParamId) -> Option<Pieces>,
    ) -> Result<(), DdpError> {
        if self.shares.is_some() {
            let why = "the parts of a model were joined after its optimizer was sharded";
            return Err(DdpError::Sharded(why));
        }
        if self.recorder.is_some() {
            let what = "a model in parts or stages";
            return Err(DdpError::Record { what });
        }
        let settings = self.options.compared(self.group.world());
        let fingerprint = (self.options).fingerprint(Some(&self.device), group.world())?;
        let manifest = verify::manifest(&[], "", &settings, fingerprint);
        verify::compare(group, &manifest, self.options.same_bits)
            .inspect_err(|error| blame(group, error))?;
        let layout = |(index, entry): (usize, &Entry)| {
            Some((index, Layout::new(&pieces(entry.id)?, &entry.shape)))
        };
        let cuts = self.parameters.iter().enumerate().filter_map(layout);
        let cuts: HashMap<usize, Layout> = cuts.collect();
        let mut own = Vec::new();
        for (place, (id, _)) in buffer::paths(model).into_iter().enumerate() {
            let Some((_, index)) = self.index.iter().find(|(known, _)| known.val() == id) else {
                continue;
            };
            let len = self.parameters[*index].len();
            let cut = cuts.get(index);
            let count = match cut {
                Some(cut) => cut.counts(len).map(|len| len.div_ceil(CHUNK)).sum(),
                None => len.div_ceil(CHUNK),
            };
            own.extend([place as i64, count as i64, cut.is_some().into()]);
        }
        let counts = gather_counts(group, own.len())?;
        let mut all = vec![0; counts.iter().sum()];
        group.all_gather_v(&own, &mut all, &counts)?;
        let (mut order, mut is_copy) = (Vec::new(), false);
        let mut known = HashSet::new();
        let mut rest = &all[..];
        for (part, count) in counts.into_iter().enumerate() {
            let (mine, after) = rest.split_at(count);
            rest = after;
            let (said, _) = mine.as_chunks::<3>();
            let is_known = |place: &i64| known.contains(place);
            is_copy |= part == group.rank() && said.iter().any(|[place, ..]| is_known(place));
            order.extend(said.iter().map(|[place, count, is_cut]| Chunks {
                place: *place as usize,
                part,
                count: *count as usize,
                is_copy: *is_cut == 0 && is_known(place),
            }));
            known.extend(said.iter().map(|[place, ..]| *place));
        }
        let hook = self.options.comm_hook;
        let are_shared = order.iter().any(|chunks| chunks.is_copy);
        if let Some(why) = hook.refuses_parts().filter(|_| are_shared) {
            return Err(DdpError::CommHook {
                hook,
                what: "parts of a model",
                why,
                instead: "take another hook; all others compress each parameter by itself",
            });
        }
        order.sort_unstable();
        self.parts = Some(Parts {
            group: group.clone(),
            order,
            cuts,
            is_copy,
        });
        Ok(())
    }
}

impl Layout {
    fn new(pieces: &Pieces, shape: &[usize]) -> Self {
        let row: usize = shape[pieces.axis + 1..].iter().product();
        let mut end = 0;
        let ranges = pieces.lens.iter().map(|len| {
            let start = end;
            end += len * row;
            start..end
        });
        Self {
            pieces: ranges.collect(),
            stride: shape[pieces.axis] * row,
        }
    }

    /// The elements of each piece, in a slice of `len` elements.
    fn counts(&self, len: usize) -> impl Iterator<Item = usize> {
        let rows = len / self.stride.max(1);
        self.pieces.iter().map(move |piece| rows * piece.len())
    }
}

impl Parts {
    /// Ends the waiting of the other parts, which would otherwise notice this one's failure at their deadline: Burn may keep
    /// a tape, and with it handles of the group, for some time.
    pub(super) fn abort(&self, why: &str) {
        if self.group.world() > 1 {
            self.group.abort(why);
        }
    }

    /// Whether any part shows it.
    pub(crate) fn any(&self, here: bool) -> Result<bool, DdpError> {
        let mut any = [i32::from(here)];
        let done = self.group.all_reduce(&mut any, ReduceOp::Max);
        done.map_err(|error| DdpError::along(&self.group, error))?;
        Ok(any[0] > 0)
    }

    /// Adds up the votes and sums in `extras`, which begin after the weight: only one part has numbers other than 0 in each
    /// sum, or all have the same and one counts, so the addition is exact.
    pub(super) fn add(&self, extras: &mut [f32]) -> Result<(), DdpError> {
        if self.is_copy {
            extras[extra::LOSS] = 0.0;
            extras[extra::USER..].fill(0.0);
        }
        let done = self.group.all_reduce(&mut extras[1..], ReduceOp::Sum);
        done.map_err(|error| DdpError::along(&self.group, error))
    }

    /// A parameter of which this rank has several pieces.
    fn cut_up(&self, index: usize) -> Option<&Layout> {
        let cut = self.cuts.get(&index);
        cut.filter(|cut| cut.pieces.len() > 1)
    }

    /// A gradient by pieces, if there are several.
    pub(crate) fn by_piece(&self, index: usize, gradient: &[f32]) -> Option<Vec<Vec<f32>>> {
        let cut = self.cut_up(index)?;
        let pieces = cut.pieces.iter().map(|piece| {
            let rows = gradient.chunks_exact(cut.stride.max(1));
            rows.flat_map(|row| &row[piece.clone()]).copied().collect()
        });
        Some(pieces.collect())
    }

    /// As [`by_piece`](Self::by_piece), on a device.
    pub(crate) fn by_piece_on_device(
        &self,
        index: usize,
        gradient: &Tensor<1>,
    ) -> Option<Vec<Tensor<1>>> {
        let cut = self.cut_up(index)?;
        let rows: Tensor<2> = gradient.clone().reshape([-1, cut.stride as i64]);
        let pieces = cut.pieces.iter();
        let piece = |piece: &Range<usize>| rows.clone().narrow(1, piece.start, piece.len());
        Some(pieces.map(|range| piece(range).flatten(0, 1)).collect())
    }

    /// Pieces of a parameter; 1 if it is not cut.
    pub(crate) fn pieces(&self, index: usize) -> usize {
        self.cuts.get(&index).map_or(1, |cut| cut.pieces.len())
    }

    /// Chunks of a gradient, or of its first `len` elements if it is one piece.
    pub(crate) fn chunks(&self, index: usize, len: usize) -> usize {
        match self.cut_up(index) {
            Some(cut) => cut.counts(len).map(|len| len.div_ceil(CHUNK)).sum(),
            None => len.div_ceil(CHUNK),
        }
    }

    /// The sum of the squares of the parts' chunks, added in the order of the whole model.
    pub(crate) fn sum_of_squares(&self, own: &[f64]) -> Result<f64, DdpError> {
        let mut counts = vec![0; self.group.world()];
        for chunks in &self.order {
            counts[chunks.part] += chunks.count;
        }
        let mut all = vec![0.0; counts.iter().sum()];
        let done = self.group.all_gather_v(own, &mut all, &counts);
        done.map_err(|error| DdpError::along(&self.group, error))?;
        let mut rest = &all[..];
        let mut of_parts: Vec<_> = counts
            .into_iter()
            .map(|count| {
                let (part, after) = rest.split_at(count);
                rest = after;
                part.iter()
            })
            .collect();
        let mut total = 0.0;
        for chunks in &self.order {
            let of_part = of_parts[chunks.part].by_ref().take(chunks.count);
            // One by one: the order of additions must not depend on who has a chunk.
            of_part
                .filter(|_| !chunks.is_copy)
                .for_each(|chunk| total += chunk);
        }
        Ok(total)
    }
}

fn gather_counts(group: &ProcessGroup, own: usize) -> Result<Vec<usize>, DdpError> {
    let mut counts = vec![0; group.world()];
    group.all_gather(&[own as i64], &mut counts)?;
    Ok(counts.into_iter().map(|count| count as usize).collect())
}
