//! The loop around one operation at one size.

use std::time::{Duration, Instant};

use paceline_collective::{DType, Error, ProcessGroup, ReduceOp, bf16, f16};

use super::measurement::{Amount, ITERATIONS_MAX, Settings};
use super::op::Op;
use super::quantile::quantile;
use super::record::{Measured, Timing};
use super::samples::{Sample, Samples};
use super::turn::Turn;

/// Fewest iterations that a time is turned into.
const ITERATIONS_MIN: usize = 5;

/// Measures one operation at one size. The same on all ranks.
pub(super) fn measure(
    group: &ProcessGroup,
    settings: &Settings,
    op: Op,
    bytes: usize,
) -> Result<Timing, Error> {
    match settings.dtype {
        DType::F64 => measure_of::<f64>(group, settings, op, bytes),
        DType::F32 => measure_of::<f32>(group, settings, op, bytes),
        DType::F16 => measure_of::<f16>(group, settings, op, bytes),
        DType::BF16 => measure_of::<bf16>(group, settings, op, bytes),
        DType::I64 => measure_of::<i64>(group, settings, op, bytes),
        DType::I32 => measure_of::<i32>(group, settings, op, bytes),
        DType::I8 => measure_of::<i8>(group, settings, op, bytes),
        DType::U8 => measure_of::<u8>(group, settings, op, bytes),
        DType::Bool => measure_of::<bool>(group, settings, op, bytes),
    }
}

fn measure_of<T: Sample>(
    group: &ProcessGroup,
    settings: &Settings,
    op: Op,
    bytes: usize,
) -> Result<Timing, Error> {
    let mut turn = Turn::<T>::new(group, settings, op, bytes)?;
    let is_checked = settings.check && op != Op::Barrier;
    let mut wrong = 0;
    if is_checked {
        wrong += checked(group, settings, op, &mut turn)?;
    }
    turn.clear();
    let mut walls = Vec::with_capacity(settings.warmup);
    for _ in 0..settings.warmup.clamp(1, ITERATIONS_MAX) {
        let began = Instant::now();
        timed(group, &mut turn)?;
        walls.push(nanos_since(began));
    }
    walls.sort_unstable();
    // The slowest rank's word, so that all ranks count alike.
    let typical = slowest(group, vec![quantile(&walls, 0.5)])?[0];
    let iterations = iterations(settings.amount, typical);
    let mut nanos = Vec::with_capacity(iterations);
    for _ in 0..iterations {
        nanos.push(timed(group, &mut turn)?);
    }
    let algorithm = last_algorithm(group, op);
    let nanos = slowest(group, nanos)?;
    if is_checked {
        wrong += checked(group, settings, op, &mut turn)?;
        let mut all = [wrong as i64];
        group.all_reduce(&mut all, ReduceOp::Sum)?;
        wrong = all[0] as usize;
    }
    let measured = Measured {
        op,
        shape: turn.shape(),
        nanos,
        algorithm,
        wrong: settings.check.then_some(wrong as u64),
    };
    Ok(Timing::new(group, settings, measured))
}

/// The algorithm of this rank's last call of an operation, which the group chose or the user asked for, as the flight
/// recorder has it.
fn last_algorithm(group: &ProcessGroup, op: Op) -> Option<String> {
    if matches!(op, Op::Barrier | Op::SendRecv) {
        return None;
    }
    let mut dump = group.dump_flight();
    let of_group = dump.groups.iter_mut().find(|one| one.name == group.name());
    let records = &mut of_group?.records;
    let last = records.iter_mut().rfind(|record| record.op == op.name())?;
    Some(std::mem::take(&mut last.algorithm))
}

/// Calls once, and returns how many nanoseconds it took.
fn timed<T: Sample>(group: &ProcessGroup, turn: &mut Turn<'_, T>) -> Result<i64, Error> {
    group.barrier()?;
    let began = Instant::now();
    turn.run()?;
    Ok(nanos_since(began))
}

/// Calls once on inputs that are known, and counts what is wrong on this rank.
fn checked<T: Sample>(
    group: &ProcessGroup,
    settings: &Settings,
    op: Op,
    turn: &mut Turn<'_, T>,
) -> Result<usize, Error> {
    let samples = Samples::new(group.world(), T::DTYPE);
    turn.prepare(|input| samples.fill(group.rank(), input));
    turn.run()?;
    let runs = turn.shape().runs(op, turn.place());
    Ok(samples.wrong(settings.reduction, &runs, turn.output()))
}

/// The slowest rank's time of each iteration.
pub(super) fn slowest(group: &ProcessGroup, mut nanos: Vec<i64>) -> Result<Vec<i64>, Error> {
    group.all_reduce(&mut nanos, ReduceOp::Max)?;
    Ok(nanos)
}

pub(super) fn nanos_since(began: Instant) -> i64 {
    i64::try_from(began.elapsed().as_nanos()).unwrap_or(i64::MAX)
}

/// How often to call, if once takes about `nanos` with its barrier.
fn iterations(amount: Amount, nanos: i64) -> usize {
    match amount {
        Amount::Iterations(count) => count.clamp(1, ITERATIONS_MAX),
        Amount::Time(time) => {
            let each = Duration::from_nanos(nanos.max(1).unsigned_abs());
            let count = time.as_nanos() / each.as_nanos();
            usize::try_from(count)
                .unwrap_or(ITERATIONS_MAX)
                .clamp(ITERATIONS_MIN, ITERATIONS_MAX)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_turned_into_calls_within_bounds() {
        let check = |amount, nanos, expect| {
            assert_eq!(
                iterations(amount, nanos),
                expect,
                "{amount:?} of {nanos} ns"
            );
        };
        let second = Amount::Time(Duration::from_secs(1));
        check(second, 1_000_000, 1000);
        check(second, 900_000_000, ITERATIONS_MIN);
        check(second, i64::MAX, ITERATIONS_MIN);
        check(second, 10, ITERATIONS_MAX);
        check(second, 0, ITERATIONS_MAX);
        check(Amount::Iterations(7), 1, 7);
        check(Amount::Iterations(0), 1, 1);
        check(Amount::Iterations(usize::MAX), 1, ITERATIONS_MAX);
    }
}
