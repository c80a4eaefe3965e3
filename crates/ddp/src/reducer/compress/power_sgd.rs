//! `CommHook::PowerSgd`: gradients of matrices as products of two thin ones, with error feedback.
//!
//! ```text
//!  M = gradient + residual          of each shard, n x m
//!  P = sum of M Q                   all_reduce of n x r; then orthonormal columns
//!  Q = sum of M^T P                 all_reduce of m x r; kept for the next step
//!  sum of M ~ P Q^T                 residual of a shard: M - P (M^T P)^T
//! ```
//!
//! Both sums go along the tree of the shards, so the result does not depend on the number of ranks.
//!
//! *Source*: Vogels et al. 2019, "PowerSGD: practical low-rank gradient compression for distributed optimization", algorithms
//! 1 and 2.

use std::ops::Range;

use paceline_collective::{Error, OpTiming, Ticket};
use paceline_nn::mix;

use super::residuals::Residuals;
use super::{Compressor, Context, Kept, Leaf, Received, Stack};
use crate::comm_hook::PowerSgdOptions;

/// A matrix is compressed if that makes it smaller by more than this factor.
///
/// *Source*: `min_compression_rate` of PyTorch's `PowerSGDState`.
const LEAST_RATE: usize = 2;

pub(super) struct PowerSgd {
    context: Context,
    options: PowerSgdOptions,
    residuals: Residuals,
    live: Vec<Live>,
}

struct Live {
    matrices: Vec<Matrix>,
    /// Parameters that are sent whole: their place in the bucket, and in the first message behind all `P`.
    whole: Vec<(Range<usize>, usize)>,
    /// Lengths of the two messages.
    lens: [usize; 2],
    /// All `Q` of the last step.
    q: Vec<f32>,
    /// All `Q` of this step.
    next_q: Option<Vec<f32>>,
    /// All orthonormal `P` of this step, and the whole parameters.
    p: Vec<f32>,
    stack: Stack<f32>,
    sent: Option<Ticket<f32>>,
    first: Option<OpTiming>,
}

/// A matrix in the bucket, and its place in the two messages. `P` and `Q` are row-major with `rank` columns.
struct Matrix {
    at: Range<usize>,
    rows: usize,
    columns: usize,
    p: Range<usize>,
    q: Range<usize>,
}

impl Live {
    fn new(bucket: &crate::plan::Bucket, rank: usize, shapes: &[(usize, Vec<usize>)]) -> Self {
        let (mut matrices, mut vectors) = (Vec::new(), Vec::new());
        let (mut lens, mut q) = ([0, 0], Vec::new());
        for segment in &bucket.segments {
            let at = segment.offset..segment.offset + segment.len;
            let (place, shape) = &shapes[segment.index];
            let rows = shape.first().copied().unwrap_or(1).max(1);
            let columns = segment.len / rows;
            if (rows + columns) * rank * LEAST_RATE >= segment.len {
                vectors.push(at);
                continue;
            }
            let take = |len: &mut usize, count| {
                let start = *len;
                *len += count * rank;
                start..*len
            };
            let matrix = Matrix {
                at,
                rows,
                columns,
                p: take(&mut lens[0], rows),
                q: take(&mut lens[1], columns),
            };
            // The same on every rank, and in every stage.
            let draw = |number| mix(0, *place as u64, number as u64) as f64;
            let uniform = |number| (draw(number) / u64::MAX as f64 - 0.5) as f32;
            q.extend((0..matrix.q.len()).map(uniform));
            matrices.push(matrix);
        }
        let place = |at: Range<usize>| {
            let start = lens[0];
            lens[0] += at.len();
            (at, start)
        };
        Self {
            whole: vectors.into_iter().map(place).collect(),
            matrices,
            lens,
            q,
            next_q: None,
            p: Vec::new(),
            stack: Stack::default(),
            sent: None,
            first: None,
        }
    }
}

impl PowerSgd {
    pub(super) fn new(
        context: Context,
        options: PowerSgdOptions,
        shapes: &[(usize, Vec<usize>)],
    ) -> Self {
        let buckets = context.plan.buckets[..context.buckets()].iter();
        let live = buckets.map(|bucket| Live::new(bucket, options.rank.get(), shapes));
        Self {
            live: live.collect(),
            residuals: Residuals::new(&context),
            context,
            options,
        }
    }

    fn is_active(&self) -> bool {
        self.context.step >= self.options.start_iter
    }

    /// Length of a bucket's first message.
    fn first_len(&self, bucket: usize) -> usize {
        match self.is_active() {
            true => self.live[bucket].lens[0],
            false => self.context.len(bucket),
        }
    }

    /// Whether a bucket has a second exchange in this step.
    fn has_second(&self, bucket: usize) -> bool {
        self.is_active() && !self.live[bucket].matrices.is_empty()
    }
}

impl Compressor for PowerSgd {
    fn begin(&mut self, step: u64) {
        self.context.step = step;
        self.residuals.begin();
        for live in &mut self.live {
            live.stack = Stack::default();
            live.next_q = None;
        }
    }

    fn add(&mut self, leaf: Leaf<'_>) -> Result<(), Error> {
        let (is_active, rank) = (self.is_active(), self.options.rank.get());
        let live = &mut self.live[leaf.bucket];
        let message = if is_active {
            let shard = self.residuals.add(&self.context, &leaf);
            let mut message = vec![0.0; live.lens[0]];
            for matrix in &live.matrices {
                let p = &mut message[matrix.p.clone()];
                matrix.times(
                    &shard[matrix.at.clone()],
                    &live.q[matrix.q.clone()],
                    p,
                    rank,
                );
            }
            for (at, to) in &live.whole {
                message[*to..to + at.len()].copy_from_slice(&leaf.values[at.clone()]);
            }
            message
        } else {
            leaf.values.to_vec()
        };
        let own = self.context.group.rank();
        live.stack
            .push(&self.context.tree, own, leaf.shard, message);
        Ok(())
    }

    fn send(&mut self, bucket: usize) -> Result<(), Error> {
        let len = self.first_len(bucket);
        let stack = std::mem::take(&mut self.live[bucket].stack);
        let sent = self.context.all_reduce(bucket, stack, len)?;
        self.live[bucket].sent = Some(sent);
        Ok(())
    }

    fn resend(&mut self, bucket: usize) -> Result<(), Error> {
        let (len, has_second) = (self.first_len(bucket), self.has_second(bucket));
        let rank = self.options.rank.get();
        let live = &mut self.live[bucket];
        let done = live.sent.take().expect("every bucket is sent").wait()?;
        live.p = done.buffer[..len].to_vec();
        live.first = Some(done.timing);
        if !has_second {
            return Ok(());
        }
        for matrix in &live.matrices {
            orthonormalise(&mut live.p[matrix.p.clone()], rank);
        }
        let own = self.context.group.rank();
        let mut stack = Stack::default();
        for (turn, shard) in self.context.tree.range(own).enumerate() {
            let rest = self.residuals.rest(bucket, turn);
            let mut message = vec![0.0; live.lens[1]];
            for matrix in &live.matrices {
                let (rest, p) = (&mut rest[matrix.at.clone()], &live.p[matrix.p.clone()]);
                let q = &mut message[matrix.q.clone()];
                matrix.transposed_times(rest, p, q, rank);
                matrix.subtract(rest, p, q, rank);
            }
            // Sent whole.
            for (at, _) in &live.whole {
                rest[at.clone()].fill(0.0);
            }
            stack.push(&self.context.tree, own, shard, message);
        }
        let sent = self.context.all_reduce(bucket, stack, live.lens[1])?;
        live.sent = Some(sent);
        Ok(())
    }

    fn receive(&mut self, bucket: usize) -> Result<Received, Error> {
        let rank = self.options.rank.get();
        let (is_active, has_second) = (self.is_active(), self.has_second(bucket));
        let live = &mut self.live[bucket];
        let p = std::mem::take(&mut live.p);
        let first = live.first.take().expect("every bucket is waited for first");
        let mut bytes = size_of_val(&p[..]);
        let mut last = first;
        if !is_active {
            let timing = Some([first, last]);
            return Ok(Received {
                values: p,
                bytes,
                timing,
                own: None,
            });
        }
        if has_second {
            let done = live.sent.take().expect("a bucket is sent twice").wait()?;
            live.next_q = Some(done.buffer[..live.lens[1]].to_vec());
            last = done.timing;
            bytes += size_of_val(&live.q[..]);
        }
        let q = live.next_q.as_ref().unwrap_or(&live.q);
        let mut values = vec![0.0; self.context.len(bucket)];
        for matrix in &live.matrices {
            let values = &mut values[matrix.at.clone()];
            let (p, q) = (&p[matrix.p.clone()], &q[matrix.q.clone()]);
            matrix.subtract(values, p, q, rank);
            values.iter_mut().for_each(|value| *value = -*value);
        }
        for (at, from) in &live.whole {
            let len = at.len();
            values[at.clone()].copy_from_slice(&p[*from..from + len]);
        }
        Ok(Received {
            values,
            bytes,
            timing: Some([first, last]),
            own: None,
        })
    }

    fn commit(&mut self) {
        self.residuals.commit(&self.context);
        for live in &mut self.live {
            if let Some(q) = live.next_q.take() {
                live.q = q;
            }
        }
    }

    /// A parameter that is sent whole keeps nothing.
    fn kept(&mut self, kept: Kept, index: usize) -> Option<&mut [f32]> {
        let (bucket, position) = self.context.plan.places[index];
        let start = self.context.plan.buckets[bucket].segments[position].offset;
        let live = &mut self.live[bucket];
        let matrix = live
            .matrices
            .iter()
            .find(|matrix| matrix.at.start == start)?;
        match kept {
            Kept::Residual { shard } => self.residuals.of(&self.context, shard, index),
            Kept::Factor => Some(&mut live.q[matrix.q.clone()]),
            Kept::Momentum => None,
        }
    }
}

impl Matrix {
    fn row_of<'a>(&self, values: &'a [f32], row: usize) -> &'a [f32] {
        &values[row * self.columns..(row + 1) * self.columns]
    }

    /// `p = m q`
    fn times(&self, m: &[f32], q: &[f32], p: &mut [f32], rank: usize) {
        for (row, p) in p.chunks_mut(rank).enumerate() {
            for (m, q) in self.row_of(m, row).iter().zip(q.chunks(rank)) {
                p.iter_mut().zip(q).for_each(|(p, q)| *p += m * q);
            }
        }
    }

    /// `q = m^T p`
    fn transposed_times(&self, m: &[f32], p: &[f32], q: &mut [f32], rank: usize) {
        for (row, p) in p.chunks(rank).enumerate() {
            for (m, q) in self.row_of(m, row).iter().zip(q.chunks_mut(rank)) {
                q.iter_mut().zip(p).for_each(|(q, p)| *q += m * p);
            }
        }
    }

    /// `m -= p q^T`
    fn subtract(&self, m: &mut [f32], p: &[f32], q: &[f32], rank: usize) {
        for (row, p) in p.chunks(rank).enumerate().take(self.rows) {
            let m = &mut m[row * self.columns..(row + 1) * self.columns];
            for (m, q) in m.iter_mut().zip(q.chunks(rank)) {
                *m -= p.iter().zip(q).map(|(p, q)| p * q).sum::<f32>();
            }
        }
    }
}

/// Makes the columns of `p` orthonormal, one after the other (Gram-Schmidt). A column that is a combination of earlier ones
/// becomes zero.
fn orthonormalise(p: &mut [f32], rank: usize) {
    let rows = p.len() / rank;
    for column in 0..rank {
        let before = norm(p, rank, column);
        for earlier in 0..column {
            let at = |row| row * rank;
            let dot = (0..rows)
                .map(|row| f64::from(p[at(row) + column]) * f64::from(p[at(row) + earlier]))
                .sum::<f64>() as f32;
            for row in 0..rows {
                p[at(row) + column] -= dot * p[at(row) + earlier];
            }
        }
        let norm = norm(p, rank, column);
        // Only rounding is left of it. Also false for NaN, which must show in the result.
        let is_lost = norm <= before * 1e-6;
        for value in p.iter_mut().skip(column).step_by(rank) {
            *value = if is_lost {
                0.0
            } else {
                (f64::from(*value) / norm) as f32
            };
        }
    }
}

fn norm(p: &[f32], rank: usize, column: usize) -> f64 {
    let values = p.iter().skip(column).step_by(rank);
    values
        .map(|value| f64::from(*value) * f64::from(*value))
        .sum::<f64>()
        .sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_become_orthonormal_and_a_dependent_one_zero() {
        // The third column is the sum of the first two.
        let mut p = [
            1.0, 2.0, 3.0, 0.5, -1.0, -0.5, 2.0, 0.25, 2.25, 0.0, 1.0, 1.0,
        ];
        orthonormalise(&mut p, 3);
        let dot = |a: usize, b: usize| {
            (0..4)
                .map(|row| p[row * 3 + a] * p[row * 3 + b])
                .sum::<f32>()
        };
        for (a, b, expected) in [(0, 0, 1.0), (1, 1, 1.0), (0, 1, 0.0), (2, 2, 0.0)] {
            assert!(
                (dot(a, b) - expected).abs() < 1e-6,
                "{a} {b}: {}",
                dot(a, b)
            );
        }
    }

    #[test]
    fn a_matrix_of_low_rank_is_kept_exactly() {
        let (rows, columns, rank) = (5, 7, 2);
        let matrix = Matrix {
            at: 0..rows * columns,
            rows,
            columns,
            p: 0..rows * rank,
            q: 0..columns * rank,
        };
        let m: Vec<f32> = (0..rows * columns)
            .map(|at| {
                let (row, column) = ((at / columns) as f32, (at % columns) as f32);
                (row + 1.0) * (column - 2.0) + (row * row - 3.0) * (column * 0.5 + 1.0)
            })
            .collect();
        let mut p = vec![0.0; rows * rank];
        let q: Vec<f32> = (0..columns * rank)
            .map(|at| (at as f32 * 1.3).sin())
            .collect();
        matrix.times(&m, &q, &mut p, rank);
        orthonormalise(&mut p, rank);
        let mut q = vec![0.0; columns * rank];
        matrix.transposed_times(&m, &p, &mut q, rank);
        let mut rest = m.clone();
        matrix.subtract(&mut rest, &p, &q, rank);
        let largest = m.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        assert!(
            rest.iter().all(|rest| rest.abs() < largest * 1e-5),
            "{rest:?}"
        );
    }
}
