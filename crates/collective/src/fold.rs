//! Folds all ranks' blocks of one slice in the order of the tree, a cache-sized chunk at a time.
#![allow(unsafe_code)]

use crate::element::sealed::Number;
use crate::element::{DType, Element, ReduceOp};
use crate::tree::{Step, Tree};

/// Size of one accumulator. Two accumulators and two inputs of this size stay in a 32 KiB first-level cache.
///
/// *Units*: bytes.
pub(crate) const CHUNK_BYTES: usize = 8 << 10;

/// Accumulators, kept between operations so that they stay warm and are allocated once.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    // u64 for the alignment of every element type.
    words: Vec<u64>,
}

/// A fold over raw inputs. All inputs have `len` elements of `dtype`.
#[derive(Debug)]
pub(crate) struct Fold<'a> {
    pub(crate) tree: &'a Tree,
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    /// Where each input begins, in the order of the program's loads.
    pub(crate) inputs: &'a [*const u8],
    pub(crate) len: usize,
    pub(crate) outputs: &'a [*mut u8],
    pub(crate) streaming: bool,
    /// Divides the finished sum: the number of leaves of an average.
    pub(crate) divide: Option<usize>,
}

/// # Safety
///
/// As [`Fold::run`].
pub(crate) unsafe fn copy(from: *const u8, outputs: &[*mut u8], bytes: usize, _streaming: bool) {
    for output in outputs {
        if !std::ptr::eq(*output, from) {
            // SAFETY: the caller's contract.
            unsafe { std::ptr::copy_nonoverlapping(from, *output, bytes) };
        }
    }
}

impl Fold<'_> {
    /// Folds and hands each finished chunk to `store(first_byte, bytes)`.
    ///
    /// *Numerics*: every element is combined in the tree's order, in the element's own precision, with one rounding
    /// per addition; `Average` divides the finished sum once.
    ///
    /// # Safety
    ///
    /// Every input points to `len` initialised elements, aligned for `dtype`, that nobody writes to while this runs,
    /// save `store`, which may overwrite the bytes of the chunk it was given in any of the inputs.
    pub(crate) unsafe fn run(&self, scratch: &mut Scratch) {
        let store = |at: usize, bytes: &[u8]| {
            for output in self.outputs {
                // SAFETY: the caller's contract.
                unsafe {
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), output.add(at), bytes.len())
                };
            }
        };
        // SAFETY: the caller's contract, passed on unchanged; the type matches the dtype.
        unsafe {
            match self.dtype {
                DType::F32 => self.run_as::<f32>(scratch, store),
                DType::F64 => self.run_as::<f64>(scratch, store),
                DType::I64 => self.run_as::<i64>(scratch, store),
                DType::U8 => self.run_as::<u8>(scratch, store),
            }
        }
    }

    unsafe fn run_as<T: Element>(&self, scratch: &mut Scratch, store: impl FnMut(usize, &[u8])) {
        let count = self.divide;
        // SAFETY: the caller's contract, passed on unchanged.
        unsafe {
            match self.op {
                ReduceOp::Sum | ReduceOp::Average => {
                    self.run_with::<T>(scratch, store, T::reduce_add, count)
                }
                ReduceOp::Min => self.run_with::<T>(scratch, store, T::reduce_least, None),
                ReduceOp::Max => self.run_with::<T>(scratch, store, T::reduce_most, None),
            }
        }
    }

    unsafe fn run_with<T: Element>(
        &self,
        scratch: &mut Scratch,
        mut store: impl FnMut(usize, &[u8]),
        merge: impl Fn(T, T) -> T + Copy,
        count: Option<usize>,
    ) {
        let chunk = CHUNK_BYTES / size_of::<T>();
        // One for each position of the stack: a merge leaves its result at the position of its left operand.
        let accumulators = self.tree.program_depth();
        scratch
            .words
            .resize((accumulators * CHUNK_BYTES / 8).max(scratch.words.len()), 0);
        let base = scratch.words.as_mut_ptr().cast::<T>();
        let mut stack: Vec<Entry> = Vec::with_capacity(accumulators);
        let mut first = 0;
        while first < self.len {
            let n = chunk.min(self.len - first);
            let mut loads = self.inputs.iter();
            stack.clear();
            for step in self.tree.program() {
                let depth = stack.len();
                match step {
                    Step::Load { .. } => {
                        stack.push(Entry::Input(
                            *loads
                                .next()
                                .expect("one input for each load of the program"),
                        ));
                    }
                    Step::Merge => {
                        let right = stack.pop().expect("a program merges two entries");
                        let left = stack.pop().expect("a program merges two entries");
                        // The position that the result takes; its accumulator is free, or is the left operand.
                        let slot = depth - 2;
                        // SAFETY: `slot < accumulators`, inputs hold elements `first..first + n` by the contract,
                        // and accumulators of different positions do not overlap.
                        unsafe {
                            let out = std::slice::from_raw_parts_mut(base.add(slot * chunk), n);
                            match (left, right) {
                                (Entry::Input(a), Entry::Input(b)) => {
                                    combine(out, part(a, first, n), part(b, first, n), merge);
                                }
                                (Entry::Input(a), Entry::Slot(b)) => {
                                    let b = std::slice::from_raw_parts(base.add(b * chunk), n);
                                    combine(out, part(a, first, n), b, merge);
                                }
                                (Entry::Slot(_), Entry::Input(b)) => {
                                    accumulate(out, part(b, first, n), merge)
                                }
                                (Entry::Slot(_), Entry::Slot(b)) => {
                                    accumulate(
                                        out,
                                        std::slice::from_raw_parts(base.add(b * chunk), n),
                                        merge,
                                    );
                                }
                            }
                        }
                        stack.push(Entry::Slot(slot));
                    }
                }
            }
            // SAFETY: as above; the bytes of numbers are initialised, and no reference into the inputs is alive when
            // `store` runs.
            unsafe {
                let out = std::slice::from_raw_parts_mut(base, n);
                if let Some(Entry::Input(only)) = stack.pop() {
                    out.copy_from_slice(part(only, first, n));
                }
                if let Some(count) = count {
                    out.iter_mut()
                        .for_each(|value| *value = value.reduce_over(count));
                }
                let bytes = std::slice::from_raw_parts(base.cast::<u8>(), n * size_of::<T>());
                store(first * size_of::<T>(), bytes);
            }
            first += n;
        }
    }
}

/// One entry of the stack: an input nobody has touched yet, or the accumulator of that position.
#[derive(Debug, Clone, Copy)]
enum Entry {
    Input(*const u8),
    Slot(usize),
}

/// # Safety
///
/// `input` points to at least `first + n` aligned elements that nobody writes to during `'a`.
unsafe fn part<'a, T>(input: *const u8, first: usize, n: usize) -> &'a [T] {
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts(input.cast::<T>().add(first), n) }
}

#[inline(always)]
fn combine<T: Number>(out: &mut [T], left: &[T], right: &[T], merge: impl Fn(T, T) -> T) {
    for ((out, left), right) in out.iter_mut().zip(left).zip(right) {
        *out = merge(*left, *right);
    }
}

#[inline(always)]
fn accumulate<T: Number>(left: &mut [T], right: &[T], merge: impl Fn(T, T) -> T) {
    for (left, right) in left.iter_mut().zip(right) {
        *left = merge(*left, *right);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fold<T: Element>(tree: &Tree, op: ReduceOp, inputs: &[Vec<T>]) -> Vec<T> {
        let len = inputs[0].len();
        let pointers: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr().cast()).collect();
        let mut out = vec![T::default(); len];
        let fold = Fold {
            tree,
            dtype: T::DTYPE,
            op,
            inputs: &pointers,
            len,
        };
        let target = out.as_mut_ptr().cast::<u8>();
        // SAFETY: each input has `len` elements; `store` writes only to `out`, within its `len` elements.
        unsafe {
            fold.run(&mut Scratch::default(), |at, bytes| {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.add(at), bytes.len());
            });
        }
        out
    }

    /// Recursion over the definition of the tree, one element at a time.
    fn reference(inputs: &[Vec<f32>], element: usize) -> f32 {
        if inputs.len() == 1 {
            return inputs[0][element];
        }
        let left = inputs.len().next_power_of_two() / 2;
        reference(&inputs[..left], element) + reference(&inputs[left..], element)
    }

    fn noise(leaves: usize, len: usize) -> Vec<Vec<f32>> {
        let mut state = 0x9E37_79B9_u32;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            (state as f32 / u32::MAX as f32 - 0.5) * 2.0_f32.powi((state % 40) as i32 - 20)
        };
        (0..leaves)
            .map(|_| (0..len).map(|_| next()).collect())
            .collect()
    }

    #[test]
    fn sums_follow_the_tree_to_the_last_bit() {
        let chunk = CHUNK_BYTES / 4;
        for leaves in 1..=17 {
            for len in [0, 1, 3, chunk - 1, chunk, chunk + 1, 2 * chunk + 5] {
                let inputs = noise(leaves, len);
                let sums = fold(&Tree::per_rank(leaves), ReduceOp::Sum, &inputs);
                let averages = fold(&Tree::per_rank(leaves), ReduceOp::Average, &inputs);
                for i in 0..len {
                    let sum = reference(&inputs, i);
                    assert_eq!(
                        sums[i].to_bits(),
                        sum.to_bits(),
                        "{leaves} leaves, element {i} of {len}"
                    );
                    assert_eq!(averages[i].to_bits(), (sum / leaves as f32).to_bits());
                }
            }
        }
    }

    #[test]
    fn the_order_matters_so_the_tests_can_tell() {
        let inputs = noise(8, 500);
        let running: Vec<f32> = (0..500)
            .map(|i| inputs.iter().map(|input| input[i]).sum())
            .collect();
        assert_ne!(fold(&Tree::per_rank(8), ReduceOp::Sum, &inputs), running);
    }

    #[test]
    fn min_and_max_of_all_types() {
        let tree = Tree::per_rank(3);
        assert_eq!(
            fold(
                &tree,
                ReduceOp::Min,
                &[vec![3_i64, -1], vec![2, 5], vec![9, 0]]
            ),
            [2, -1]
        );
        assert_eq!(
            fold(
                &tree,
                ReduceOp::Max,
                &[vec![3.0_f64, -1.0], vec![2.0, 5.0], vec![9.0, 0.0]]
            ),
            [9.0, 5.0]
        );
    }
}
