//! Inputs whose reductions are exact in any order, and what the results must be.

use paceline_collective::{DType, Element, ReduceOp, bf16, f16};

use super::shape::{Origin, Run};

/// An element that small whole numbers can be made of.
pub(super) trait Sample: Element {
    /// The number; integers keep its low bits, as their sums do.
    fn of(number: u64) -> Self;
    /// The quotient, rounded once. Whole where the type has no fractions, but averages of those are refused.
    fn mean(sum: u64, count: usize) -> Self {
        Self::of(sum / count as u64)
    }
}

macro_rules! sample {
    ($($type:ty: $of:expr $(, $mean:expr)?;)*) => {$(
        impl Sample for $type {
            fn of(number: u64) -> Self {
                let of: fn(u64) -> Self = $of;
                of(number)
            }

            $(fn mean(sum: u64, count: usize) -> Self {
                let mean: fn(u64, usize) -> Self = $mean;
                mean(sum, count)
            })?
        }
    )*};
}

sample! {
    f64: |number| number as f64, |sum, count| sum as f64 / count as f64;
    f32: |number| number as f32, |sum, count| sum as f32 / count as f32;
    f16: |number| f16::from_f32(number as f32), |sum, count| f16::from_f32(sum as f32 / count as f32);
    bf16: |number| bf16::from_f32(number as f32), |sum, count| bf16::from_f32(sum as f32 / count as f32);
    i64: |number| number as i64;
    i32: |number| number as i32;
    i8: |number| number as i8;
    u8: |number| number as u8;
    bool: |number| number != 0;
}

/// Inputs repeat after this many elements at most.
const PERIOD_MAX: usize = 16;

/// Fills memory before an operation whose result is checked, where the operation itself is to write.
pub(super) const POISON: u64 = 251;

/// The inputs of all ranks: whole numbers from 0 to below a power of two, different from rank to rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Samples {
    world: usize,
    /// A power of two; also how many different numbers there are.
    period: usize,
}

impl Samples {
    pub(super) fn new(world: usize, dtype: DType) -> Self {
        // The largest sum must still be a whole number of the type, and all partial sums are below it.
        let is_exact =
            |period: &usize| (*period as u64 - 1) * world as u64 <= 1 << significant_bits(dtype);
        let periods: &[usize] = match dtype {
            DType::Bool => &[2],
            _ => &[PERIOD_MAX, 8, 4, 2],
        };
        let period = periods.iter().copied().find(is_exact);
        Self {
            world,
            period: period.unwrap_or(1),
        }
    }

    fn number(self, rank: usize, at: usize) -> u64 {
        ((3 * at + 5 * rank + 1) % self.period) as u64
    }

    /// Writes a rank's input.
    pub(super) fn fill<T: Sample>(self, rank: usize, input: &mut [T]) {
        let table = self.table(|at| T::of(self.number(rank, at)));
        for (at, element) in input.iter_mut().enumerate() {
            *element = table[at % PERIOD_MAX];
        }
    }

    /// Elements of `output` that are not what they must be.
    pub(super) fn wrong<T: Sample>(self, reduction: ReduceOp, runs: &[Run], output: &[T]) -> usize {
        let mut rest = output;
        let mut wrong = 0;
        for run in runs {
            let (part, others) = rest.split_at(run.len.min(rest.len()));
            rest = others;
            let table = match run.origin {
                Origin::Reduced => self.table(|at| self.reduced::<T>(reduction, at)),
                Origin::Rank(rank) => self.table(|at| T::of(self.number(rank, at))),
            };
            let expected = |at: usize| table[(run.at + at) % PERIOD_MAX];
            wrong += part
                .iter()
                .enumerate()
                .filter(|(at, got)| **got != expected(*at))
                .count();
            wrong += run.len - part.len();
        }
        wrong + rest.len()
    }

    /// The first numbers; the period divides their count, so they repeat from there on.
    fn table<T>(self, number: impl Fn(usize) -> T) -> [T; PERIOD_MAX] {
        std::array::from_fn(number)
    }

    fn reduced<T: Sample>(self, reduction: ReduceOp, at: usize) -> T {
        let numbers = (0..self.world).map(|rank| self.number(rank, at));
        match reduction {
            ReduceOp::Sum => T::of(numbers.sum()),
            ReduceOp::Average => T::mean(numbers.sum(), self.world),
            ReduceOp::Min => T::of(numbers.min().unwrap_or(0)),
            ReduceOp::Max => T::of(numbers.max().unwrap_or(0)),
            // Exact while it fits; no command offers it.
            ReduceOp::Product => T::of(numbers.fold(1, u64::wrapping_mul)),
            ReduceOp::BitAnd => T::of(numbers.fold(u64::MAX, |all, one| all & one)),
            ReduceOp::BitOr => T::of(numbers.fold(0, |all, one| all | one)),
            ReduceOp::BitXor => T::of(numbers.fold(0, |all, one| all ^ one)),
            // Exact for whole factors.
            ReduceOp::PreMulSum(factor) => T::of((factor * numbers.sum::<u64>() as f64) as u64),
        }
    }
}

/// Whole numbers up to two to this power are values of the type, or sums beyond wrap around and stay exact.
fn significant_bits(dtype: DType) -> u32 {
    match dtype {
        DType::F64 => 53,
        DType::F32 => 24,
        DType::F16 => 11,
        DType::BF16 => 8,
        DType::I64 | DType::I32 | DType::I8 | DType::U8 | DType::Bool => 63,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced_run(len: usize) -> [Run; 1] {
        [Run {
            len,
            origin: Origin::Reduced,
            at: 0,
        }]
    }

    #[test]
    fn right_results_are_right_and_each_wrong_element_counts() {
        let samples = Samples::new(3, DType::F32);
        let inputs: Vec<Vec<f32>> = (0..3)
            .map(|rank| {
                let mut input = vec![0.0; 40];
                samples.fill(rank, &mut input);
                input
            })
            .collect();
        let mut sum: Vec<f32> = (0..40)
            .map(|at| inputs.iter().map(|input| input[at]).sum())
            .collect();
        let wrong = |sum: &[f32]| samples.wrong(ReduceOp::Sum, &reduced_run(40), sum);
        assert_eq!(wrong(&sum), 0);
        sum[7] += 1.0;
        sum[39] = f32::NAN;
        assert_eq!(wrong(&sum), 2);
        // What is missing or too much is wrong as well.
        assert_eq!(wrong(&sum[..39]), 2);
        assert_eq!(samples.wrong(ReduceOp::Sum, &reduced_run(30), &sum), 11);
    }

    #[test]
    fn another_ranks_data_is_wrong() {
        let samples = Samples::new(2, DType::I64);
        let mut input = vec![0_i64; 32];
        samples.fill(1, &mut input);
        let from = |rank| {
            [Run {
                len: 32,
                origin: Origin::Rank(rank),
                at: 0,
            }]
        };
        assert_eq!(samples.wrong(ReduceOp::Sum, &from(1), &input), 0);
        assert_eq!(samples.wrong(ReduceOp::Sum, &from(0), &input), 32);
    }

    #[test]
    fn a_stretch_may_begin_anywhere() {
        let samples = Samples::new(2, DType::F64);
        let mut input = vec![0_f64; 50];
        samples.fill(0, &mut input);
        let run = [Run {
            len: 20,
            origin: Origin::Rank(0),
            at: 29,
        }];
        assert_eq!(samples.wrong(ReduceOp::Sum, &run, &input[29..49]), 0);
    }

    #[test]
    fn sums_are_exact_in_any_order_for_every_world() {
        for world in [1, 2, 7, 64, 200] {
            for dtype in DType::ALL {
                let samples = Samples::new(world, dtype);
                let largest: u64 = (0..world).map(|rank| samples.number(rank, 0)).sum();
                assert!(largest <= 1 << significant_bits(dtype));
                assert!(samples.period >= 2);
            }
        }
        // Where there are no such numbers all inputs are 0, and still exact.
        assert_eq!(Samples::new(1024, DType::BF16).period, 1);
    }
}
