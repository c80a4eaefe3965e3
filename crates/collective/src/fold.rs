//! Folds all ranks' blocks of one slice in the order of the tree and stores the result wherever it is wanted.
//!
//! A chunk at a time, so that what is between the first addition and the last stays in the first-level cache. The last
//! addition goes straight to the outputs: two inputs are read once, and nothing is written that is not a result.
#![allow(unsafe_code)]

mod copy;
mod halves;
mod isa;
mod number;
mod premultiply;
#[cfg(test)]
mod tests;
mod work;

use std::marker::PhantomData;

use half::{bf16, f16};

use crate::element::{DType, ReduceOp};
use crate::tree::{Step, Tree};
pub(crate) use copy::copy;
use isa::{LINE_BYTES, Level};
use number::{
    Add, And, Combine, Divide, Finish, Float, Keep, Least, Most, Multiply, Number, Or, Stored,
    Truth, Xor,
};
pub(crate) use premultiply::premultiply;
use work::{Last, Merge, Narrow, Single, Sink, Widen};

/// Size of one accumulator. Two accumulators and two inputs of this size stay in a 32 KiB first-level cache.
///
/// *Units*: bytes.
pub(crate) const CHUNK_BYTES: usize = 8 << 10;

/// Most outputs that the last addition stores to by itself. With more, lines of too many places are under way at once, and
/// a finished chunk is copied to one output after the other.
const DIRECT_OUTPUTS_MAX: usize = 4;

/// What folds work in, kept between operations so that it stays warm and is allocated once.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Accumulators.
    lines: Vec<Line>,
    /// Where the entries of a program's stack lie, while it runs.
    stack: Vec<*const u8>,
}

// SAFETY: what is in the stack is not used after the fold that put it there.
unsafe impl Send for Scratch {}

/// For the alignment of every element type, and so that no vector straddles two lines.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
#[allow(dead_code)] // size and alignment are all that counts
struct Line([u8; LINE_BYTES]);

impl Scratch {
    /// Room for a number of chunks, one after the other.
    fn chunks(&mut self, count: usize) -> *mut u8 {
        let lines = count * CHUNK_BYTES / LINE_BYTES;
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0; LINE_BYTES]));
        }
        self.lines.as_mut_ptr().cast()
    }
}

/// A fold over raw inputs. All inputs and outputs have `len` elements of `dtype`.
#[derive(Debug)]
pub(crate) struct Fold<'a> {
    pub(crate) tree: &'a Tree,
    pub(crate) dtype: DType,
    /// One that [makes sense](ReduceOp::check) for `dtype`. The inputs of a premultiplied sum are
    /// [multiplied](premultiply) already.
    pub(crate) op: ReduceOp,
    /// Where each input begins, in the order of the program's loads.
    pub(crate) inputs: &'a [*const u8],
    pub(crate) len: usize,
    /// Where the result goes.
    pub(crate) outputs: &'a [*mut u8],
    /// What an average's sum is divided by, where the fold is its last step.
    pub(crate) divide: Option<usize>,
    /// Stores around the caches: right where nobody reads the result before it would have fallen out of them.
    pub(crate) streaming: bool,
}

impl Fold<'_> {
    /// Folds, and stores the result in every output.
    ///
    /// *Numerics*: every element is combined in the tree's order, `f16` and `bf16` in `f32`, all others in their own
    /// type, with one rounding per step; `divide` divides the finished sum once. `f16` and `bf16` are rounded once,
    /// after that. The bytes do not depend on the machine's instructions, on alignment or on `streaming`; of a NaN only
    /// that it is one is promised.
    ///
    /// # Safety
    ///
    /// Every input is readable for `len` elements, every output writable for `len` elements, all aligned for `dtype`.
    /// An output may be the same memory as an input at the same position; otherwise outputs overlap nothing. Nobody else
    /// touches the outputs or writes the inputs while this runs.
    pub(crate) unsafe fn run(&self, scratch: &mut Scratch) {
        // SAFETY: the caller's contract; the best level is one that the machine has.
        unsafe { self.run_at(Level::best(), scratch) }
    }

    /// # Safety
    ///
    /// As [`run`](Self::run), and the machine has the level.
    unsafe fn run_at(&self, level: Level, scratch: &mut Scratch) {
        if self.len == 0 || self.outputs.is_empty() {
            return;
        }
        // SAFETY: the caller's contract, passed on unchanged; the types match the dtype.
        unsafe {
            match self.dtype {
                DType::F64 => self.float::<f64, 8>(level, scratch),
                DType::F32 => self.float::<f32, 16>(level, scratch),
                DType::F16 => self.float::<f16, 16>(level, scratch),
                DType::BF16 => self.float::<bf16, 16>(level, scratch),
                DType::I64 => self.integer::<i64, 8>(level, scratch),
                DType::I32 => self.integer::<i32, 16>(level, scratch),
                DType::I8 => self.integer::<i8, 64>(level, scratch),
                DType::U8 => self.integer::<u8, 64>(level, scratch),
                DType::Bool => self.truth(level, scratch),
            }
        }
        if self.streaming {
            isa::fence();
        }
    }

    unsafe fn float<T: Stored<Wide: Float>, const N: usize>(
        &self,
        level: Level,
        scratch: &mut Scratch,
    ) {
        // SAFETY: the caller's contract, passed on unchanged.
        unsafe {
            match (self.op, self.divide) {
                (ReduceOp::Average, Some(count)) => {
                    self.chunks::<T, Add, Divide, N>(level, scratch, Divide(count));
                }
                (ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor, _) => self.senseless(),
                _ => self.number::<T, N>(level, scratch),
            }
        }
    }

    unsafe fn integer<T: Number, const N: usize>(&self, level: Level, scratch: &mut Scratch) {
        let bytes = Fold {
            dtype: DType::U8,
            len: self.len * self.dtype.bytes(),
            ..*self
        };
        // SAFETY: the caller's contract, passed on unchanged; as bytes, a buffer has the length of all its elements.
        unsafe {
            match self.op {
                ReduceOp::BitAnd => bytes.chunks::<u8, And, Keep, 64>(level, scratch, Keep),
                ReduceOp::BitOr => bytes.chunks::<u8, Or, Keep, 64>(level, scratch, Keep),
                ReduceOp::BitXor => bytes.chunks::<u8, Xor, Keep, 64>(level, scratch, Keep),
                ReduceOp::Average | ReduceOp::PreMulSum(_) => self.senseless(),
                _ => self.number::<T, N>(level, scratch),
            }
        }
    }

    /// What all numbers have.
    unsafe fn number<T: Stored, const N: usize>(&self, level: Level, scratch: &mut Scratch) {
        // SAFETY: the caller's contract, passed on unchanged.
        unsafe {
            match self.op {
                ReduceOp::Product => self.chunks::<T, Multiply, Keep, N>(level, scratch, Keep),
                ReduceOp::Min => self.chunks::<T, Least, Keep, N>(level, scratch, Keep),
                ReduceOp::Max => self.chunks::<T, Most, Keep, N>(level, scratch, Keep),
                _ => self.chunks::<T, Add, Keep, N>(level, scratch, Keep),
            }
        }
    }

    unsafe fn truth(&self, level: Level, scratch: &mut Scratch) {
        // SAFETY: the caller's contract, passed on unchanged.
        unsafe {
            match self.op {
                ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => {
                    self.chunks::<Truth, Or, Keep, 64>(level, scratch, Keep)
                }
                ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => {
                    self.chunks::<Truth, And, Keep, 64>(level, scratch, Keep)
                }
                ReduceOp::BitXor => self.chunks::<Truth, Xor, Keep, 64>(level, scratch, Keep),
                ReduceOp::Average | ReduceOp::PreMulSum(_) => self.senseless(),
            }
        }
    }

    fn senseless(&self) -> ! {
        unreachable!("{} of {} is refused before it starts", self.op, self.dtype)
    }

    /// `N` numbers, as they are combined, fill a line.
    ///
    /// # Safety
    ///
    /// As [`run_at`](Self::run_at); `T` is the type of `dtype`.
    unsafe fn chunks<T, M, F, const N: usize>(&self, level: Level, scratch: &mut Scratch, finish: F)
    where
        T: Stored,
        M: Combine<T::Wide>,
        F: Finish<T::Wide>,
    {
        const { assert!(N * size_of::<T::Wide>() == LINE_BYTES) }
        let chunk = CHUNK_BYTES / size_of::<T::Wide>();
        let program = self.tree.program();
        // One accumulator for each position of the stack: a merge leaves its result at the position of its left operand.
        let accumulators = self.tree.program_depth();
        let base = scratch.chunks(accumulators + 1);
        // SAFETY: `position <= accumulators`, and there is room for one chunk more than that.
        let slot = |position: usize| unsafe { base.add(position * CHUNK_BYTES).cast::<T::Wide>() };
        let staged = slot(accumulators).cast::<u8>();
        let route = Route::new::<T>(self.outputs, self.streaming);
        let stack = &mut scratch.stack;
        // A short first chunk brings the outputs to the begin of a line.
        let offset = self.outputs[0].addr() % LINE_BYTES;
        let head = (LINE_BYTES - offset) % LINE_BYTES / size_of::<T>();
        let (mut first, mut n) = (0, if head == 0 { chunk } else { head });
        while first < self.len {
            n = n.min(self.len - first);
            let first_byte = first * size_of::<T>();
            let finished = [if T::PLAIN { staged } else { slot(0).cast() }];
            let sink = match route {
                Route::Direct => Sink {
                    outputs: self.outputs,
                    first_byte,
                    streaming: self.streaming && (first > 0 || head == 0),
                },
                Route::Narrow | Route::Staged => Sink::at_start(&finished),
            };
            let mut inputs = self.inputs.iter();
            stack.clear();
            for (index, step) in program.iter().enumerate() {
                let last = index + 1 == program.len();
                match step {
                    Step::Load { .. } => {
                        let input = inputs
                            .next()
                            .expect("one input for each load of the program");
                        // SAFETY: the input holds elements `first..first + n` by the contract, and a slot a chunk; the
                        // slot at the position that the input takes is free.
                        unsafe {
                            let input = input.add(first_byte).cast::<T>();
                            let from = if T::PLAIN {
                                input.cast::<T::Wide>()
                            } else {
                                let to = slot(stack.len());
                                level.run(Widen {
                                    from: std::slice::from_raw_parts(input, n),
                                    to: std::slice::from_raw_parts_mut(to, n),
                                });
                                to
                            };
                            if last {
                                level.run(Single::<_, F, N> {
                                    from,
                                    sink,
                                    n,
                                    finish,
                                });
                            }
                            stack.push(from.cast());
                        }
                    }
                    Step::Merge => {
                        let mut pop = || stack.pop().expect("a program merges two entries").cast();
                        let (right, left) = (pop(), pop());
                        let to = slot(stack.len());
                        // SAFETY: as above; the slot at the position that the result takes is free, or is the left
                        // operand, and slots do not overlap.
                        unsafe {
                            if last {
                                level.run(Last::<_, M, F, N> {
                                    left,
                                    right,
                                    sink,
                                    n,
                                    finish,
                                    merge: PhantomData,
                                });
                            } else {
                                level.run(Merge::<_, M, N> {
                                    left,
                                    right,
                                    to,
                                    n,
                                    merge: PhantomData,
                                });
                            }
                        }
                        stack.push(to.cast_const().cast());
                    }
                }
            }
            let bytes = n * size_of::<T>();
            // SAFETY: the finished chunk has `n` numbers, which lie in no output; the staged chunk and every output at
            // this place have room for them as elements.
            unsafe {
                if !T::PLAIN {
                    let to = match route {
                        Route::Narrow => self.outputs[0].add(first_byte),
                        Route::Direct | Route::Staged => staged,
                    };
                    level.run(Narrow::<T> {
                        from: std::slice::from_raw_parts(slot(0), n),
                        to: std::slice::from_raw_parts_mut(to.cast(), n),
                    });
                }
                if route == Route::Staged {
                    copy::at(
                        level,
                        staged,
                        self.outputs,
                        first_byte,
                        bytes,
                        self.streaming,
                    );
                }
            }
            first += n;
            n = chunk;
        }
    }
}

/// How a finished chunk gets to the outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    /// The last step stores to all of them.
    Direct,
    /// The rounding after the last step stores to the only one.
    Narrow,
    /// It is put aside and copied to one output after the other.
    Staged,
}

impl Route {
    fn new<T: Stored>(outputs: &[*mut u8], streaming: bool) -> Self {
        let offset = |output: &*mut u8| output.addr() % LINE_BYTES;
        // Only then the outputs come to the begin of a line together.
        let together = outputs.iter().all(|it| offset(it) == offset(&outputs[0]));
        let few = outputs.len() <= DIRECT_OUTPUTS_MAX;
        match (T::PLAIN, outputs.len()) {
            (true, _) if few && (together || !streaming) => Self::Direct,
            (false, 1) if !streaming => Self::Narrow,
            _ => Self::Staged,
        }
    }
}
