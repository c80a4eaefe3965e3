//! Which elements of each parameter a rank has the optimizer's state of.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::Module;
use burn::tensor::Bytes;
use paceline_ddp::{Ddp, Slice, weights};
use serde::{Deserialize, Serialize};

/// What a rank has of every parameter of the model, by id.
pub(crate) struct Shares(HashMap<u64, Share>);

/// What a rank has of a parameter.
pub(crate) enum Share {
    Nothing,
    Whole,
    Part(Part),
}

/// A part of a parameter.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Part {
    /// The shape of the whole parameter.
    pub(crate) whole: Vec<usize>,
    /// The shape of a tensor of this part.
    pub(crate) own: Vec<usize>,
    /// Elements of a row of the whole parameter, the first one and the number in a row of the slice that a layer of other
    /// ranks left to this one, and the elements of that slice, row-major.
    row: usize,
    start: usize,
    len: usize,
    range: Range<usize>,
}

impl Shares {
    /// Of this rank. `slices` are those of an optimizer whose state is dealt to the ranks.
    pub(crate) fn new<M: Module>(ddp: &Ddp, model: &M, slices: Option<Vec<Slice>>) -> Self {
        let dealt = slices.map(|slices| {
            let slices = slices.into_iter();
            let slices = slices.map(|slice| (slice.id, slice.range));
            slices.collect::<HashMap<u64, Range<usize>>>()
        });
        let wholes = ddp.tensors(model).into_iter();
        let mut wholes: HashMap<String, Vec<usize>> =
            wholes.map(|(path, shape, _)| (path, shape)).collect();
        let own = weights::paths(model)
            .into_iter()
            .zip(weights::tensors(model));
        let shares = own.map(|((id, path), (_, own, _))| {
            let whole = wholes.remove(&path).unwrap_or_else(|| own.clone());
            let placement = ddp.placement();
            let slice = placement.and_then(|placement| placement.slice(id.into()));
            let dealt = dealt.as_ref().map(|dealt| dealt.get(&id).cloned());
            let share = match dealt {
                None if own.contains(&0) && !whole.contains(&0) => Share::Nothing,
                None => Share::new(whole, slice, None),
                Some(None) => Share::Nothing,
                Some(Some(range)) if range.is_empty() => Share::Nothing,
                Some(range) => Share::new(whole, slice, range),
            };
            (id, share)
        });
        Self(shares.collect())
    }

    pub(crate) fn of(&self, id: Option<u64>) -> &Share {
        let share = id.and_then(|id| self.0.get(&id));
        share.unwrap_or(&Share::Whole)
    }

    pub(crate) fn has(&self, id: u64) -> bool {
        !matches!(self.of(Some(id)), Share::Nothing)
    }
}

impl Share {
    /// `range` of the elements of a slice along an axis.
    pub(crate) fn new(
        whole: Vec<usize>,
        slice: Option<(usize, Range<usize>)>,
        range: Option<Range<usize>>,
    ) -> Self {
        let elements = |shape: &[usize]| shape.iter().product::<usize>();
        let mut own = whole.clone();
        let (row, start, len) = match slice {
            None => (elements(&whole), 0, elements(&whole)),
            Some((axis, range)) => {
                own[axis] = range.len();
                let below = elements(&whole[axis + 1..]);
                (
                    whole[axis] * below,
                    range.start * below,
                    range.len() * below,
                )
            }
        };
        let all = elements(&own);
        let range = range.unwrap_or(0..all);
        if range.len() == all && own == whole {
            return Self::Whole;
        }
        if range.len() < all {
            own.fill(1);
            if let Some(last) = own.last_mut() {
                *last = range.len();
            }
        }
        Self::Part(Part {
            whole,
            own,
            row,
            start,
            len,
            range,
        })
    }
}

impl Part {
    /// Calls `each` for every run of elements: where it lies in the part and in the whole parameter, and its length.
    fn runs(&self, mut each: impl FnMut(usize, usize, usize)) {
        let mut at = self.range.start;
        while at < self.range.end {
            let column = at % self.len;
            let run = (self.len - column).min(self.range.end - at);
            let place = at / self.len * self.row + self.start + column;
            each(at - self.range.start, place, run);
            at += run;
        }
    }

    /// Writes the part into the whole parameter's bytes, with so many bytes for each element.
    pub(crate) fn join(&self, part: &[u8], whole: &mut [u8], size: usize) {
        self.runs(|from, to, run| {
            let own = &part[from * size..(from + run) * size];
            whole[to * size..(to + run) * size].copy_from_slice(own);
        });
    }

    /// The part of the whole parameter's bytes.
    pub(crate) fn cut(&self, whole: &[u8], size: usize) -> Bytes {
        let mut part = Vec::with_capacity(self.range.len() * size);
        self.runs(|_, from, run| {
            part.extend_from_slice(&whole[from * size..(from + run) * size]);
        });
        Bytes::from_bytes_vec(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a parameter of shape [3, 5, 4].
    fn parts(slice: Option<(usize, Range<usize>)>, ranges: &[Range<usize>]) -> Vec<Part> {
        let share =
            |range: &Range<usize>| Share::new(vec![3, 5, 4], slice.clone(), Some(range.clone()));
        let shares = ranges.iter().map(share);
        let parts = shares.map(|share| match share {
            Share::Part(part) => part,
            _ => panic!("a part"),
        });
        parts.collect()
    }

    #[test]
    fn slices_of_slices_are_the_parameter_again() {
        let whole: Vec<u8> = (0..120).collect();
        let along = |axis: usize, at: usize, ranges: &[Range<usize>]| {
            let end = [3, 5, 4][axis];
            let mut parts_of = parts(Some((axis, 0..at)), ranges);
            let rest = (end - at) * 60 / end;
            let half = rest / 2;
            parts_of.extend(parts(Some((axis, at..end)), &[0..half, half..rest]));
            parts_of
        };
        for parts in [
            parts(None, &[0..7, 7..33, 33..60]),
            along(0, 1, &[0..1, 1..20]),
            along(1, 2, &[0..5, 5..24]),
            along(2, 3, &[0..44, 44..45]),
        ] {
            let mut joined = vec![0xFF; 120];
            for part in parts {
                part.join(&part.cut(&whole, 2), &mut joined, 2);
            }
            assert_eq!(joined, whole);
        }
    }
}
