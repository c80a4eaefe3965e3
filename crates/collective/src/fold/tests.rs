//! Folds against a scalar reference that knows nothing of chunks, vectors and bits of its own.

use half::{bf16, f16};

use super::premultiply::premultiply_at;
use super::*;
use crate::element::Element;

/// Numbers under test: made from noise, compared by their bytes, combined by the plainest code there is.
trait Tested: Element {
    /// What a whole fold is computed in.
    type Wide: Copy;
    fn make(bits: u64) -> Self;
    fn widen(self) -> Self::Wide;
    fn combine(op: ReduceOp, left: Self::Wide, right: Self::Wide) -> Self::Wide;
    fn finish(wide: Self::Wide, count: Option<usize>) -> Self;
    /// The bytes, with one pattern for all NaNs.
    fn bits(self) -> u64;
}

/// Mostly numbers of similar size, so that sums round; some special ones.
fn noise(bits: u64) -> f64 {
    match bits % 97 {
        0 => f64::NAN,
        1 => 0.0,
        2 => -0.0,
        3 => f64::INFINITY,
        4 => f64::NEG_INFINITY,
        5 => 3e-8,
        _ => {
            ((bits >> 11) as f64 / (1_u64 << 53) as f64 - 0.5)
                * 2.0_f64.powi((bits % 23) as i32 - 11)
        }
    }
}

macro_rules! tested_float {
    ($type:ty, $wide:ty, $make:expr, $widen:expr, $narrow:expr) => {
        impl Tested for $type {
            type Wide = $wide;

            fn make(bits: u64) -> Self {
                $make(noise(bits))
            }

            fn widen(self) -> $wide {
                $widen(self)
            }

            fn combine(op: ReduceOp, left: $wide, right: $wide) -> $wide {
                match op {
                    ReduceOp::Sum | ReduceOp::Average | ReduceOp::PreMulSum(_) => left + right,
                    ReduceOp::Product => left * right,
                    ReduceOp::Min | ReduceOp::Max if left.is_nan() || right.is_nan() => {
                        <$wide>::NAN
                    }
                    ReduceOp::Min if right < left => right,
                    ReduceOp::Max if right > left => right,
                    ReduceOp::Min | ReduceOp::Max => left,
                    other => unreachable!("{other} of floats"),
                }
            }

            fn finish(wide: $wide, count: Option<usize>) -> Self {
                $narrow(count.map_or(wide, |count| wide / count as $wide))
            }

            fn bits(self) -> u64 {
                if self.is_nan() {
                    u64::MAX
                } else {
                    self.to_bits().into()
                }
            }
        }
    };
}

tested_float!(f64, f64, |x| x, |x| x, |x| x);
tested_float!(f32, f32, |x| x as f32, |x| x, |x| x);
tested_float!(f16, f32, f16::from_f64, f16::to_f32, f16::from_f32);
tested_float!(bf16, f32, bf16::from_f64, bf16::to_f32, bf16::from_f32);

macro_rules! tested_integer {
    ($type:ty) => {
        impl Tested for $type {
            type Wide = $type;

            fn make(bits: u64) -> Self {
                (bits >> 7) as $type
            }

            fn widen(self) -> $type {
                self
            }

            fn combine(op: ReduceOp, left: $type, right: $type) -> $type {
                match op {
                    ReduceOp::Sum => (i128::from(left) + i128::from(right)) as $type,
                    ReduceOp::Product => (i128::from(left) * i128::from(right)) as $type,
                    ReduceOp::Min => std::cmp::min(left, right),
                    ReduceOp::Max => std::cmp::max(left, right),
                    ReduceOp::BitAnd => left & right,
                    ReduceOp::BitOr => left | right,
                    ReduceOp::BitXor => left ^ right,
                    other => unreachable!("{other} of integers"),
                }
            }

            fn finish(wide: $type, _: Option<usize>) -> Self {
                wide
            }

            fn bits(self) -> u64 {
                self as u64
            }
        }
    };
}

tested_integer!(i64);
tested_integer!(i32);
tested_integer!(i8);
tested_integer!(u8);

impl Tested for bool {
    type Wide = bool;

    fn make(bits: u64) -> Self {
        bits >> 9 & 1 == 1
    }

    fn widen(self) -> bool {
        self
    }

    fn combine(op: ReduceOp, left: bool, right: bool) -> bool {
        match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => left || right,
            ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => left && right,
            ReduceOp::BitXor => left != right,
            other => unreachable!("{other} of truth values"),
        }
    }

    fn finish(wide: bool, _: Option<usize>) -> Self {
        wide
    }

    fn bits(self) -> u64 {
        self.into()
    }
}

const OPS: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Average,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
    ReduceOp::PreMulSum(0.5),
];

fn ops(dtype: DType) -> impl Iterator<Item = ReduceOp> {
    OPS.into_iter().filter(move |op| op.check(dtype).is_ok())
}

/// Recursion over the definition of the tree, one element at a time.
fn reference<T: Tested>(op: ReduceOp, inputs: &[Vec<T>], element: usize) -> T::Wide {
    if inputs.len() == 1 {
        return inputs[0][element].widen();
    }
    let (left, right) = inputs.split_at(inputs.len().next_power_of_two() / 2);
    T::combine(
        op,
        reference(op, left, element),
        reference(op, right, element),
    )
}

fn expected<T: Tested>(op: ReduceOp, inputs: &[Vec<T>]) -> Vec<T> {
    let count = (op == ReduceOp::Average).then_some(inputs.len());
    (0..inputs[0].len())
        .map(|element| T::finish(reference(op, inputs, element), count))
        .collect()
}

/// Noise for some leaves, the same for the same arguments.
fn leaves<T: Tested>(leaves: usize, len: usize) -> Vec<Vec<T>> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        T::make(state.wrapping_mul(0x2545_F491_4F6C_DD1D))
    };
    (0..leaves)
        .map(|_| (0..len).map(|_| next()).collect())
        .collect()
}

/// Memory that begins some elements after the begin of a line.
struct Memory<T> {
    lines: Vec<Line>,
    skip: usize,
    element: PhantomData<T>,
}

impl<T: Element> Memory<T> {
    fn new(skip: usize, len: usize) -> Self {
        // One line more at the end, which nothing may touch.
        let bytes = (skip + len) * size_of::<T>();
        Self {
            lines: vec![Line([0xA5; LINE_BYTES]); bytes / LINE_BYTES + 2],
            skip,
            element: PhantomData,
        }
    }

    fn of(skip: usize, values: &[T]) -> Self {
        let mut memory = Self::new(skip, values.len());
        // SAFETY: there is room for the values.
        unsafe {
            let to = memory.start().cast::<T>();
            to.copy_from_nonoverlapping(values.as_ptr(), values.len());
        }
        memory
    }

    fn start(&mut self) -> *mut u8 {
        // SAFETY: the memory has that many elements.
        unsafe { self.lines.as_mut_ptr().cast::<T>().add(self.skip).cast() }
    }

    fn values(&mut self, len: usize) -> Vec<T> {
        // SAFETY: as above, and something wrote valid elements.
        unsafe { std::slice::from_raw_parts(self.start().cast::<T>(), len) }.to_vec()
    }

    fn assert_untouched_around(&self, len: usize, what: &str) {
        let bytes: Vec<u8> = self.lines.iter().flat_map(|line| line.0).collect();
        let (first, last) = (
            self.skip * size_of::<T>(),
            (self.skip + len) * size_of::<T>(),
        );
        let around = bytes[..first].iter().chain(&bytes[last..]);
        assert!(around.into_iter().all(|byte| *byte == 0xA5), "{what}");
    }
}

fn fold<T: Tested>(level: Level, op: ReduceOp, inputs: &[Vec<T>]) -> Vec<T> {
    let len = inputs[0].len();
    let pointers: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr().cast()).collect();
    let mut out = vec![T::default(); len];
    let fold = Fold {
        tree: &Tree::per_rank(inputs.len()),
        dtype: T::DTYPE,
        op,
        inputs: &pointers,
        len,
        outputs: &[out.as_mut_ptr().cast()],
        divide: (op == ReduceOp::Average).then_some(inputs.len()),
        streaming: false,
    };
    // SAFETY: inputs and output have `len` elements, and the level is one of this machine's.
    unsafe { fold.run_at(level, &mut Scratch::default()) };
    out
}

fn bits<T: Tested>(values: &[T]) -> Vec<u64> {
    values.iter().map(|value| value.bits()).collect()
}

fn assert_same<T: Tested>(got: &[T], expected: &[T], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(
            got.bits(),
            expected.bits(),
            "element {at} of {what}: {got:?}, not {expected:?}"
        );
    }
}

fn every_arity<T: Tested>() {
    let most = if cfg!(miri) { 5 } else { 17 };
    let len = if cfg!(miri) { 67 } else { 331 };
    for arity in 1..=most {
        let inputs = leaves::<T>(arity, len);
        for op in ops(T::DTYPE) {
            let expected = expected(op, &inputs);
            for level in Level::available() {
                let what = format!("{op} of {arity} x {len} {}, {level:?}", T::DTYPE);
                assert_same(&fold(*level, op, &inputs), &expected, &what);
            }
        }
    }
}

/// Nothing, single elements, primes, around vectors, lines and chunks, from places that are no begin of a line; with one
/// output apart, in place, or in several places that are aligned alike or not.
fn every_length_and_place<T: Tested>() {
    let line = LINE_BYTES / size_of::<T>();
    let chunk = CHUNK_BYTES / size_of::<T>();
    let mut lengths = vec![0, 1, 3, line - 1, line, line + 1, 2 * line + 1, 31, 97];
    if !cfg!(miri) {
        lengths.extend([
            chunk - 1,
            chunk,
            chunk + 1,
            2 * chunk + 5,
            3 * chunk - line + 1,
        ]);
    }
    let op = if T::DTYPE.is_float() {
        ReduceOp::Average
    } else {
        ReduceOp::Sum
    };
    let arities: &[usize] = if cfg!(miri) {
        &[1, 3]
    } else {
        &[1, 2, 3, 4, 6]
    };
    for &arity in arities {
        let longest = leaves::<T>(arity, *lengths.iter().max().unwrap());
        let longest_expected = expected(op, &longest);
        for &len in &lengths {
            for (skip, other) in [(0, 0), (1, 1), (line - 1, 0), (1, 2)] {
                for streaming in [false, true] {
                    for level in Level::available() {
                        let what = format!(
                            "{op} of {arity} x {len} {}, {level:?}, skipping {skip} and {other}, streaming {streaming}",
                            T::DTYPE
                        );
                        in_place_and_apart(
                            *level,
                            op,
                            &longest,
                            len,
                            (skip, other),
                            streaming,
                            &longest_expected,
                            &what,
                        );
                    }
                }
            }
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn in_place_and_apart<T: Tested>(
    level: Level,
    op: ReduceOp,
    leaves: &[Vec<T>],
    len: usize,
    (skip, other): (usize, usize),
    streaming: bool,
    expected: &[T],
    what: &str,
) {
    let mut inputs: Vec<Memory<T>> = leaves
        .iter()
        .enumerate()
        .map(|(leaf, values)| Memory::of(if leaf % 2 == 0 { skip } else { other }, &values[..len]))
        .collect();
    let starts: Vec<*mut u8> = inputs.iter_mut().map(Memory::start).collect();
    let constant: Vec<*const u8> = starts.iter().map(|start| start.cast_const()).collect();
    let mut apart = Memory::<T>::new(other, len);
    let run = |outputs: &[*mut u8]| {
        let fold = Fold {
            tree: &Tree::per_rank(leaves.len()),
            dtype: T::DTYPE,
            op,
            inputs: &constant,
            len,
            outputs,
            divide: (op == ReduceOp::Average).then_some(leaves.len()),
            streaming,
        };
        // SAFETY: all memory is `len` elements long; the level is one of this machine's.
        unsafe { fold.run_at(level, &mut Scratch::default()) }
    };
    run(&[apart.start()]);
    apart.assert_untouched_around(len, what);
    assert_same(&apart.values(len), &expected[..len], what);
    // Every input is also an output, and one more: more of them than are stored to at once where there are six.
    let mut everywhere = starts.clone();
    everywhere.push(apart.start());
    run(&everywhere);
    for memory in inputs.iter_mut().chain([&mut apart]) {
        memory.assert_untouched_around(len, what);
        assert_same(&memory.values(len), &expected[..len], what);
    }
}

macro_rules! for_every_type {
    ($check:ident) => {
        $check::<f64>();
        $check::<f32>();
        $check::<f16>();
        $check::<bf16>();
        $check::<i64>();
        $check::<i32>();
        $check::<i8>();
        $check::<u8>();
        $check::<bool>();
    };
}

#[test]
fn every_operation_type_arity_and_level_follows_the_tree_to_the_last_bit() {
    for_every_type!(every_arity);
}

#[test]
fn length_place_and_streaming_change_no_bit() {
    for_every_type!(every_length_and_place);
}

#[test]
fn the_order_matters_so_the_tests_can_tell() {
    let inputs = leaves::<f32>(8, 500);
    let running: Vec<f32> = (0..500)
        .map(|i| inputs.iter().map(|input| input[i]).sum())
        .collect();
    let sums = fold(Level::best(), ReduceOp::Sum, &inputs);
    assert_ne!(bits(&sums), bits(&running));
}

#[test]
fn halves_are_rounded_once_at_the_end() {
    // 2048 + 1 is a tie in f16, and goes down each time it is rounded.
    let inputs = [2048.0, 1.0, 1.0, 1.0].map(|x| vec![f16::from_f32(x); 40]);
    let steps = inputs[0][0] + inputs[1][0] + (inputs[2][0] + inputs[3][0]);
    assert_eq!(steps.to_f32(), 2050.0);
    // 256 + 1 is the same tie in bf16.
    let wide = [256.0, 1.0, 1.0, 1.0].map(|x| vec![bf16::from_f32(x); 40]);
    let wide_steps = wide[0][0] + wide[1][0] + (wide[2][0] + wide[3][0]);
    assert_eq!(wide_steps.to_f32(), 258.0);
    for level in Level::available() {
        // 2051 lies between 2050 and 2052, and its last place decides for the even one.
        assert!(
            fold(*level, ReduceOp::Sum, &inputs)
                .iter()
                .all(|x| x.to_f32() == 2052.0)
        );
        assert!(
            fold(*level, ReduceOp::Sum, &wide)
                .iter()
                .all(|x| x.to_f32() == 260.0)
        );
        // Half of the sum would have been too large for an f16.
        let large = [vec![f16::MAX; 40], vec![f16::MAX; 40]];
        assert!(
            fold(*level, ReduceOp::Average, &large)
                .iter()
                .all(|x| *x == f16::MAX)
        );
        // 3 / 2048 of 1 + 2^-10 more than 1: the quotient is rounded, not the sum first.
        let thirds = [1.0, 1.0, 1.0 + 2.0_f32.powi(-10)].map(|x| vec![f16::from_f32(x); 40]);
        let quotient = f16::from_f32((3.0 + 2.0_f32.powi(-10)) / 3.0);
        assert!(
            fold(*level, ReduceOp::Average, &thirds)
                .iter()
                .all(|x| *x == quotient)
        );
    }
}

#[test]
fn a_nan_on_either_side_survives_min_and_max() {
    for level in Level::available() {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            for (left, right) in [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::NAN, f32::NAN)] {
                let inputs = [vec![left; 100], vec![right; 100]];
                assert!(fold(*level, op, &inputs).iter().all(|x| x.is_nan()));
                let inputs = inputs.map(|values| values.into_iter().map(f16::from_f32).collect());
                assert!(fold(*level, op, &inputs).iter().all(|x| x.is_nan()));
            }
        }
    }
}

#[test]
fn equal_zeros_keep_the_left_one() {
    for level in Level::available() {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            for (left, right) in [(0.0_f64, -0.0), (-0.0, 0.0)] {
                let kept = fold(*level, op, &[vec![left; 100], vec![right; 100]]);
                assert!(kept.iter().all(|x| x.to_bits() == left.to_bits()));
            }
        }
    }
}

#[test]
fn integers_wrap() {
    for level in Level::available() {
        let sum = fold(*level, ReduceOp::Sum, &[vec![i64::MAX; 70], vec![1; 70]]);
        assert_eq!(sum, [i64::MIN; 70]);
        let product = fold(
            *level,
            ReduceOp::Product,
            &[vec![-128_i8; 70], vec![-1; 70]],
        );
        assert_eq!(product, [-128_i8; 70]);
    }
}

#[test]
fn whatever_peers_wrote_a_bool_comes_out_as_one() {
    for level in Level::available() {
        for (op, expected) in [
            (ReduceOp::Sum, [0, 1, 1, 1]),
            (ReduceOp::Product, [0, 0, 0, 1]),
            (ReduceOp::BitXor, [0, 1, 1, 0]),
        ] {
            let inputs = [[0_u8, 0, 4, 0x80].repeat(30), [0, 2, 0, 1].repeat(30)];
            let mut out = [9_u8; 120];
            for inputs in [&inputs[..], &inputs[..1]] {
                let fold = Fold {
                    tree: &Tree::per_rank(inputs.len()),
                    dtype: DType::Bool,
                    op,
                    inputs: &inputs
                        .iter()
                        .map(|input| input.as_ptr())
                        .collect::<Vec<_>>(),
                    len: 120,
                    outputs: &[out.as_mut_ptr()],
                    divide: None,
                    streaming: true,
                };
                // SAFETY: inputs and output have 120 bytes; the level is one of this machine's.
                unsafe { fold.run_at(*level, &mut Scratch::default()) };
                if inputs.len() == 2 {
                    assert_eq!(out[..], expected.repeat(30), "{op}");
                } else {
                    assert_eq!(out[..], [0, 0, 1, 1].repeat(30), "{op} of one");
                }
            }
        }
    }
}

fn scaled<T: Tested>(level: Level, values: &[T], factor: f64) -> Vec<T> {
    let mut in_place = values.to_vec();
    let mut apart = vec![T::default(); values.len()];
    let start = in_place.as_mut_ptr().cast::<u8>();
    // SAFETY: everything has the length of `values`; the level is one of this machine's.
    unsafe {
        premultiply_at(
            level,
            T::DTYPE,
            start,
            apart.as_mut_ptr().cast(),
            values.len(),
            factor,
        );
        premultiply_at(level, T::DTYPE, start, start, values.len(), factor);
    }
    assert_eq!(bits(&in_place), bits(&apart));
    in_place
}

#[test]
fn factors_and_products_are_rounded_once_to_the_type() {
    let factor = 1.0 / 3.0;
    for level in Level::available() {
        for len in [0, 1, 31, 200] {
            let values = leaves::<f64>(1, len).remove(0);
            let expected: Vec<f64> = values.iter().map(|x| x * factor).collect();
            assert_same(&scaled(*level, &values, factor), &expected, "f64");
            let values = leaves::<f32>(1, len).remove(0);
            let expected: Vec<f32> = values.iter().map(|x| x * factor as f32).collect();
            assert_same(&scaled(*level, &values, factor), &expected, "f32");
            let values = leaves::<f16>(1, len).remove(0);
            let third = f16::from_f64(factor).to_f32();
            let expected: Vec<f16> = values
                .iter()
                .map(|x| f16::from_f32(x.to_f32() * third))
                .collect();
            assert_same(&scaled(*level, &values, factor), &expected, "f16");
            let values = leaves::<bf16>(1, len).remove(0);
            let third = bf16::from_f64(factor).to_f32();
            let expected: Vec<bf16> = values
                .iter()
                .map(|x| bf16::from_f32(x.to_f32() * third))
                .collect();
            assert_same(&scaled(*level, &values, factor), &expected, "bf16");
        }
    }
}

#[test]
fn copies_arrive_whole_at_every_place() {
    for len in [0_usize, 1, 63, 64, 65, 1009, 40_000] {
        if cfg!(miri) && len > 100 {
            continue;
        }
        let source = leaves::<u8>(1, len).remove(0);
        for skips in [[0, 0, 0], [1, 1, 1], [0, 5, 63]] {
            for streaming in [false, true] {
                let what = format!("{len} bytes to {skips:?}, streaming {streaming}");
                let mut from = Memory::of(skips[1], &source);
                let mut to = skips.map(|skip| Memory::<u8>::new(skip, len));
                let mut targets: Vec<*mut u8> = to.iter_mut().map(Memory::start).collect();
                targets.insert(1, from.start());
                // SAFETY: everything is `len` bytes long.
                unsafe { copy(from.start(), &targets, len, streaming) };
                for memory in to.iter_mut().chain([&mut from]) {
                    memory.assert_untouched_around(len, &what);
                    assert_same(&memory.values(len), &source, &what);
                }
            }
        }
    }
}

#[test]
fn one_level_at_least_is_known() {
    assert_eq!(Level::available()[0], Level::Portable);
    assert_eq!(Level::available().last(), Some(&Level::best()));
}
