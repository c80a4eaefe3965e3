//! Attention without a matrix of all weights in memory, and its gradients.

#![expect(unsafe_code, reason = "heads write columns of rows that they share")]

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use crate::functions::exp;
use crate::isa::{Kernels, Task};
use crate::product::{Left, Out, Product};
use crate::registers::Register;
use crate::scratch::Scratch;
use crate::softmax::to_powers;
use crate::sums::{LANES, sums};
use crate::threads::each_mut;
use crate::transpose::to_rows;

/// Queries that are computed together.
const BLOCK: usize = 64;

/// Attention of several heads with these shapes: each query's mean of the values, weighted by the softmax over its products with the
/// keys.
///
/// Queries, keys and values of a head are side by side in a row of all heads, as a linear layer returns them.
///
/// *Numerics*: a product is one chain over a head's columns, the sum of a query's weights one of 32 lanes, and an output one chain over
/// its keys. The gradients of keys and values are sums over blocks of 64 queries.
///
/// A NaN or an infinity in a row may reach the queries of its block of 64 that do not see it, with a weight of 0.
///
/// *Memory*: two values for each query and head, and for each thread the weights of 64 queries and copies of a head's keys and values.
///
/// *Source*: Dao et al. 2022, "FlashAttention"; `torch.nn.functional.scaled_dot_product_attention`.
///
/// *Example*:
/// ```
/// use paceline_kernels::{Attention, Kernels};
///
/// let attention = Attention { sequences: 1, heads: 1, queries: 2, keys: 2, width: 1, causal: true };
/// let (output, _) = Kernels::of_process()?.attention(&attention, [&[0.0, 0.0], &[1.0, 1.0], &[3.0, 5.0]]);
/// assert_eq!(output, [3.0, 4.0]);
/// # Ok::<(), paceline_kernels::IsaError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Sequences, which do not see each other.
    pub sequences: usize,
    /// Heads side by side.
    pub heads: usize,
    /// Queries of a sequence.
    pub queries: usize,
    /// Keys of a sequence, and values.
    pub keys: usize,
    /// Columns of a head. The products are divided by its square root.
    pub width: usize,
    /// A query sees no key after its own place, counted from the first of both.
    pub causal: bool,
}

/// What the backward pass needs of an attention's weights: the largest product of each query, and the inverse of the sum of its weights.
#[derive(Clone, Debug)]
pub struct AttentionSums(Vec<[f32; 2]>);

/// Gradients of an attention.
#[derive(Clone, Debug)]
pub struct AttentionGradients {
    /// `[sequences, queries, heads * width]`.
    pub queries: Vec<f32>,
    /// `[sequences, keys, heads * width]`.
    pub keys: Vec<f32>,
    /// `[sequences, keys, heads * width]`.
    pub values: Vec<f32>,
}

impl Kernels {
    /// The attention of queries, keys and values.
    ///
    /// *Shape*: queries and the result are `[sequences, queries, heads * width]`, keys and values `[sequences, keys, heads * width]`.
    ///
    /// # Panics
    ///
    /// If a slice has another length, or there are queries and no keys.
    pub fn attention(
        self,
        attention: &Attention,
        inputs: [&[f32]; 3],
    ) -> (Vec<f32>, AttentionSums) {
        attention.check(inputs);
        match self.is_wide(attention.width) {
            true => attention.forward::<32>(self, inputs),
            false => attention.forward::<16>(self, inputs),
        }
    }

    /// The gradients of queries, keys and values, from the output and its gradient.
    ///
    /// *Shape*: `inputs` as for [`attention`](Self::attention); `output` is its result, and `gradient` has the same shape.
    ///
    /// # Panics
    ///
    /// If a slice has another length.
    pub fn attention_gradients(
        self,
        attention: &Attention,
        inputs: [&[f32]; 3],
        sums: &AttentionSums,
        output: &[f32],
        gradient: &[f32],
    ) -> AttentionGradients {
        attention.check(inputs);
        attention.check([output, inputs[1], inputs[2]]);
        attention.check([gradient, inputs[1], inputs[2]]);
        assert_eq!(sums.0.len(), attention.all_heads() * attention.queries);
        match self.is_wide(attention.width) {
            true => attention.backward::<32>(self, inputs, sums, [output, gradient]),
            false => attention.backward::<16>(self, inputs, sums, [output, gradient]),
        }
    }
}

impl Attention {
    fn check(&self, [queries, keys, values]: [&[f32]; 3]) {
        let of = |rows: usize| self.sequences * rows * self.step();
        assert_eq!(queries.len(), of(self.queries), "the queries of {self:?}");
        assert_eq!(keys.len(), of(self.keys), "the keys of {self:?}");
        assert_eq!(values.len(), of(self.keys), "the values of {self:?}");
        assert!(self.keys > 0 || queries.is_empty(), "keys for {self:?}");
    }

    fn all_heads(&self) -> usize {
        self.sequences * self.heads
    }

    /// From a row to the next.
    fn step(&self) -> usize {
        self.heads * self.width
    }

    /// Multiplications of each of the products.
    fn cost(&self) -> usize {
        self.all_heads() * self.queries * self.keys * self.width
    }

    fn scale(&self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }

    /// Keys that a query sees.
    fn seen(&self, query: usize) -> usize {
        match self.causal {
            true => (query + 1).min(self.keys),
            false => self.keys,
        }
    }

    /// Values of a row of weights, in whole panels and lanes.
    fn padded(&self) -> usize {
        self.keys.next_multiple_of(LANES)
    }

    /// Where a head's first row starts, in a tensor with so many rows for each sequence.
    fn start(&self, head: usize, rows: usize) -> usize {
        head / self.heads * rows * self.step() + head % self.heads * self.width
    }

    fn forward<const WIDTH: usize>(
        &self,
        kernels: Kernels,
        [queries, keys, values]: [&[f32]; 3],
    ) -> (Vec<f32>, AttentionSums) {
        let mut output = Vec::with_capacity(queries.len());
        let rows = Columns::of(self, self.queries, &mut output);
        let mut sums = vec![[0.0; 2]; self.all_heads() * self.queries];
        let steps = offsets(self.width, 1);
        each_mut(&mut sums, self.queries, 2 * self.cost(), |head, sums| {
            for (head, sums) in (head..).zip(sums.chunks_mut(self.queries.max(1))) {
                let start = self.start(head, self.keys);
                let by_key = Panels::<WIDTH>::of_columns(kernels, self, &keys[start..]);
                let by_column = Panels::<WIDTH>::of_rows(self, &values[start..], self.keys);
                let start = self.start(head, self.queries);
                let mut weights = Scratch::new(BLOCK * self.padded());
                let mut block = by_column.block();
                for (sums, first) in sums.chunks_mut(BLOCK).zip((0..).step_by(BLOCK)) {
                    let count = sums.len();
                    let seen = self.seen(first + count - 1);
                    let queries = &queries[start + first * self.step()..];
                    by_key.multiply(
                        kernels,
                        (queries, &offsets(count, self.step()), &steps),
                        seen,
                        Out::Old(&mut weights),
                        self.padded(),
                    );
                    kernels.run(Softmax {
                        attention: self,
                        first,
                        weights: &mut weights,
                        sums,
                    });
                    by_column.multiply(
                        kernels,
                        (&weights, &offsets(count, self.padded()), &offsets(seen, 1)),
                        self.width,
                        Out::Old(&mut block),
                        by_column.padded(),
                    );
                    for (row, [_, inverse]) in sums.iter().enumerate() {
                        let from = &mut block[row * by_column.padded()..][..self.width];
                        from.iter_mut().for_each(|value| *value *= inverse);
                        // SAFETY: this task has this head.
                        unsafe { rows.write(head, first + row, from) };
                    }
                }
            }
        });
        // SAFETY: every query of every head has been written.
        unsafe { output.set_len(queries.len()) };
        (output, AttentionSums(sums))
    }

    fn backward<const WIDTH: usize>(
        &self,
        kernels: Kernels,
        [queries, keys, values]: [&[f32]; 3],
        sums: &AttentionSums,
        [output, gradient]: [&[f32]; 2],
    ) -> AttentionGradients {
        let mut all = [queries, keys, values].map(|like| Vec::with_capacity(like.len()));
        let [of_queries, of_keys, of_values] = &mut all;
        let of_queries = Columns::of(self, self.queries, of_queries);
        let of_keys = Columns::of(self, self.keys, of_keys);
        let of_values = Columns::of(self, self.keys, of_values);
        let steps = offsets(self.width, 1);
        let mut heads = vec![(); self.all_heads()];
        each_mut(&mut heads, 1, 5 * self.cost(), |head, heads| {
            for (head, ()) in (head..).zip(heads) {
                let start = self.start(head, self.keys);
                let (keys, values) = (&keys[start..], &values[start..]);
                let by_key = Panels::<WIDTH>::of_columns(kernels, self, keys);
                let by_value = Panels::<WIDTH>::of_columns(kernels, self, values);
                let by_column = Panels::<WIDTH>::of_rows(self, keys, self.keys);
                let step = by_column.padded();
                let mut weights = Scratch::new(BLOCK * self.padded());
                let mut of_weights = Scratch::new(BLOCK * self.padded());
                let mut block = by_column.block();
                let mut key_sums = Scratch::new(self.keys * step);
                let mut value_sums = Scratch::new(self.keys * step);
                key_sums.fill(0.0);
                value_sums.fill(0.0);
                let start = self.start(head, self.queries);
                for first in (0..self.queries).step_by(BLOCK) {
                    let count = BLOCK.min(self.queries - first);
                    let seen = self.seen(first + count - 1);
                    let from = start + first * self.step();
                    let (queries, gradient) = (&queries[from..], &gradient[from..]);
                    let rows = offsets(count, self.step());
                    for (panels, values, out) in [
                        (&by_key, queries, &mut weights),
                        (&by_value, gradient, &mut of_weights),
                    ] {
                        let out = Out::Old(out);
                        panels.multiply(kernels, (values, &rows, &steps), seen, out, self.padded());
                    }
                    kernels.run(SoftmaxGradient {
                        attention: self,
                        first,
                        sums: &sums.0[head * self.queries + first..][..count],
                        output: &output[from..],
                        gradient,
                        weights: &mut weights,
                        of_weights: &mut of_weights,
                    });
                    // The roles change: a row for each key, and a step for each query.
                    let by_query = offsets(count, self.padded());
                    let by_seen = offsets(seen, 1);
                    for (weights, values, sums) in [
                        (&weights, gradient, &mut value_sums),
                        (&of_weights, queries, &mut key_sums),
                    ] {
                        let panels = Panels::<WIDTH>::of_rows(self, values, count);
                        let a = (&**weights, &by_seen[..], &by_query[..]);
                        panels.multiply(kernels, a, self.width, Out::Sum(sums), step);
                    }
                    let a = (&*of_weights, &by_query[..], &by_seen[..]);
                    by_column.multiply(kernels, a, self.width, Out::Old(&mut block), step);
                    for row in 0..count {
                        // SAFETY: this task has this head.
                        unsafe { of_queries.write(head, first + row, &block[row * step..]) };
                    }
                }
                for row in 0..self.keys {
                    // SAFETY: as above.
                    unsafe {
                        of_keys.write(head, row, &key_sums[row * step..]);
                        of_values.write(head, row, &value_sums[row * step..]);
                    }
                }
            }
        });
        for (values, like) in all.iter_mut().zip([queries, keys, values]) {
            // SAFETY: every row of every head has been written.
            unsafe { values.set_len(like.len()) };
        }
        let [queries, keys, values] = all;
        AttentionGradients {
            queries,
            keys,
            values,
        }
    }
}

/// A tensor whose heads are written by different threads.
struct Columns<'a> {
    attention: &'a Attention,
    rows: usize,
    to: *mut f32,
    tensor: PhantomData<&'a mut [MaybeUninit<f32>]>,
}

// SAFETY: each head is written by one thread.
unsafe impl Sync for Columns<'_> {}

impl<'a> Columns<'a> {
    /// An empty vector with room for all rows.
    fn of(attention: &'a Attention, rows: usize, tensor: &'a mut Vec<f32>) -> Self {
        assert!(tensor.capacity() >= attention.sequences * rows * attention.step());
        Self {
            attention,
            rows,
            to: tensor.as_mut_ptr(),
            tensor: PhantomData,
        }
    }

    /// Writes a row of a head.
    ///
    /// # Safety
    ///
    /// No other thread writes this head.
    unsafe fn write(&self, head: usize, row: usize, values: &[f32]) {
        let width = self.attention.width;
        assert!(row < self.rows && head < self.attention.all_heads() && values.len() >= width);
        let place = self.attention.start(head, self.rows) + row * self.attention.step();
        // SAFETY: `of` has compared the capacity with all rows of all heads.
        unsafe {
            values
                .as_ptr()
                .copy_to_nonoverlapping(self.to.add(place), width)
        };
    }
}

/// A packed right matrix.
struct Panels<const WIDTH: usize> {
    values: Scratch,
    steps: usize,
    panels: usize,
}

impl<const WIDTH: usize> Panels<WIDTH> {
    /// A head's rows, transposed: a step for each column of the head.
    fn of_columns(kernels: Kernels, attention: &Attention, values: &[f32]) -> Self {
        let panels = attention.padded() / WIDTH;
        Self::new(attention.width, panels, |panel, out| {
            let row = panel * WIDTH;
            let lanes = WIDTH.min(attention.keys.saturating_sub(row));
            let values = values.get(row * attention.step()..).unwrap_or_default();
            to_rows(kernels, values, attention.step(), lanes, out);
        })
    }

    /// A head's rows.
    fn of_rows(attention: &Attention, values: &[f32], rows: usize) -> Self {
        let panels = attention.width.div_ceil(WIDTH);
        Self::new(rows, panels, |panel, out| {
            let column = panel * WIDTH;
            let lanes = WIDTH.min(attention.width - column);
            for (row, out) in out.iter_mut().enumerate() {
                let values = &values[row * attention.step() + column..][..lanes];
                out[..lanes].copy_from_slice(values);
                out[lanes..].fill(0.0);
            }
        })
    }

    fn new(steps: usize, panels: usize, fill: impl Fn(usize, &mut [[f32; WIDTH]])) -> Self {
        let mut values = Scratch::new(panels * steps * WIDTH);
        for (panel, rows) in values.rows_mut().chunks_mut(steps.max(1)).enumerate() {
            fill(panel, rows);
        }
        Self {
            values,
            steps,
            panels,
        }
    }

    /// Columns of all panels.
    fn padded(&self) -> usize {
        self.panels * WIDTH
    }

    /// Room for the products of a block.
    fn block(&self) -> Scratch {
        Scratch::new(BLOCK * self.padded())
    }

    /// The product of a matrix, with the offsets of its rows and steps, and the panels of the first columns.
    fn multiply(
        &self,
        kernels: Kernels,
        (a, rows, steps): (&[f32], &[u32], &[u32]),
        columns: usize,
        out: Out<'_>,
        out_step: usize,
    ) {
        kernels.run(Product {
            a: Left::Windows {
                values: a,
                rows,
                steps,
            },
            b: self.values.rows::<WIDTH>(),
            b_step: self.steps,
            first: &[],
            out,
            out_step,
            columns: columns.next_multiple_of(WIDTH),
        });
    }
}

fn offsets(count: usize, step: usize) -> Vec<u32> {
    let offset = |at: usize| {
        (at * step)
            .try_into()
            .expect("a matrix of less than 16 GiB")
    };
    (0..count).map(offset).collect()
}

/// From products to weights, which are not divided by their sums yet.
struct Softmax<'a> {
    attention: &'a Attention,
    first: usize,
    weights: &'a mut [f32],
    sums: &'a mut [[f32; 2]],
}

impl Task for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let scale = self.attention.scale();
        let rows = self.weights.chunks_exact_mut(self.attention.padded());
        let all_seen = self.attention.seen(self.first + self.sums.len() - 1);
        for (at, (row, sums)) in rows.zip(self.sums).enumerate() {
            let seen = self.attention.seen(self.first + at);
            let row = &mut row[..all_seen.next_multiple_of(LANES)];
            row[seen..].fill(f32::NEG_INFINITY);
            row.iter_mut().for_each(|value| *value *= scale);
            let [largest, sum] = to_powers(row);
            *sums = [largest, 1.0 / sum];
        }
    }
}

/// From products to weights, and from the weights' gradients to those of the products.
struct SoftmaxGradient<'a> {
    attention: &'a Attention,
    first: usize,
    sums: &'a [[f32; 2]],
    /// Rows of the head.
    output: &'a [f32],
    gradient: &'a [f32],
    weights: &'a mut [f32],
    of_weights: &'a mut [f32],
}

impl Task for SoftmaxGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let Attention { width, .. } = *self.attention;
        let scale = self.attention.scale();
        let all_seen = self.attention.seen(self.first + self.sums.len() - 1);
        for (at, [largest, inverse]) in self.sums.iter().enumerate() {
            let from = at * self.attention.step();
            let (output, gradient) = (
                &self.output[from..][..width],
                &self.gradient[from..][..width],
            );
            let [along] = sums(output, gradient, |[sum], output: R, gradient| {
                [output.mul_add(gradient, sum)]
            });
            let row = at * self.attention.padded()..;
            let seen = self.attention.seen(self.first + at);
            let (weights, of_weights) = (&mut self.weights[row.clone()], &mut self.of_weights[row]);
            // Whole lanes, because what a loop over registers leaves over would take as long as the loop.
            let (whole, _) = weights.as_chunks_mut::<LANES>();
            let (whole_gradients, _) = of_weights.as_chunks_mut::<LANES>();
            let lanes = whole.iter_mut().zip(whole_gradients);
            for (weights, gradients) in lanes.take(seen.div_ceil(LANES)) {
                for (weight, gradient) in weights.iter_mut().zip(gradients) {
                    *weight = exp(*weight * scale - largest) * inverse;
                    *gradient = (*gradient - along) * *weight * scale;
                }
            }
            weights[seen..all_seen].fill(0.0);
            of_weights[seen..all_seen].fill(0.0);
        }
    }
}
