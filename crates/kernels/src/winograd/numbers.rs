//! Values as the numbers of tiles, and back.

#![expect(
    unsafe_code,
    reason = "inner loops read and write without checks what was checked before them"
)]

use std::slice;

use super::{LANES, NUMBERS, TAPS};
use crate::isa::Task;
use crate::registers::Register;

/// Four values as four numbers.
#[inline(always)]
fn numbers<R: Register>([a, b, c, d]: [R; 4]) -> [R; 4] {
    [a.sub(c), b.add(c), c.sub(b), b.sub(d)]
}

/// Two values of a gradient as four numbers, the middle ones twice as large.
#[inline(always)]
fn filter_of_two<R: Register>([a, b]: [R; 2]) -> [R; 4] {
    [a, a.add(b), a.sub(b), b]
}

/// Three values of a weight as four numbers.
#[inline(always)]
fn filter_of_three<R: Register>([a, b, c]: [R; 3]) -> [R; 4] {
    let ends = a.add(c);
    [a, half(ends.add(b)), half(ends.sub(b)), c]
}

/// Two outputs from four sums of numbers.
#[inline(always)]
fn two<R: Register>([a, b, c, d]: [R; 4]) -> [R; 2] {
    [a.add(b).add(c), b.sub(c).sub(d)]
}

/// Three values of a weight's gradient from four sums of numbers.
#[inline(always)]
fn three<R: Register>([a, b, c, d]: [R; 4]) -> [R; 3] {
    let sum = half(b.add(c));
    [a.add(sum), half(b.sub(c)), sum.sub(d)]
}

#[inline(always)]
fn half<R: Register>(value: R) -> R {
    value.mul_add(R::splat(0.5), R::splat(0.0))
}

/// A register of the same lanes of some rows, which are one below the other in a strip.
///
/// # Safety
///
/// The strip has these rows.
#[inline(always)]
unsafe fn column<R: Register, const ROWS: usize>(
    strip: *const [f32; LANES],
    pitch: usize,
    at: usize,
    lane: usize,
) -> [R; ROWS] {
    let mut values = [R::splat(0.0); ROWS];
    for (row, value) in values.iter_mut().enumerate() {
        // SAFETY: the caller's.
        let row = unsafe { &*strip.add(row * pitch + at) };
        *value = R::load(&row[lane..]);
    }
    values
}

/// Where numbers of tiles are.
#[derive(Clone, Copy)]
pub(super) struct Places {
    /// Rows of tiles, and tiles of a row.
    pub(super) tiles: [usize; 2],
    /// From tile to tile.
    pub(super) step: usize,
    /// From number to number.
    pub(super) of_number: usize,
}

impl Places {
    /// Panics unless the registers of all numbers of all tiles are within so many values.
    #[inline(always)]
    fn check(&self, values: usize) {
        let [down, across] = self.tiles;
        let last = (NUMBERS - 1) * self.of_number + (down * across).saturating_sub(1) * self.step;
        assert!(last + LANES <= values, "numbers of all tiles");
    }

    /// Writes four numbers of a tile.
    ///
    /// # Safety
    ///
    /// `out` was [checked](Self::check), and the tile and lane are within it.
    #[inline(always)]
    unsafe fn put<R: Register>(
        &self,
        out: &mut [f32],
        tile: usize,
        lane: usize,
        line: usize,
        values: [R; 4],
    ) {
        let out = out.as_mut_ptr();
        for (number, value) in values.into_iter().enumerate() {
            let at = (4 * line + number) * self.of_number + tile * self.step + lane;
            // SAFETY: the caller's.
            value.store(unsafe { slice::from_raw_parts_mut(out.add(at), R::LEN) });
        }
    }
}

/// A row of four numbers' rows, or fewer.
#[inline(always)]
fn of_line<R: Register, const LINES: usize, const COLUMNS: usize>(
    columns: &[[R; LINES]; COLUMNS],
    line: usize,
) -> [R; COLUMNS] {
    let mut values = [R::splat(0.0); COLUMNS];
    for (value, column) in values.iter_mut().zip(columns) {
        *value = column[line];
    }
    values
}

/// A column of a tile's sums of numbers.
///
/// # Safety
///
/// All of them are there.
#[inline(always)]
unsafe fn column_of_sums<R: Register>(
    sums: *const f32,
    of_number: usize,
    column: usize,
    at: usize,
) -> [R; 4] {
    let mut values = [R::splat(0.0); 4];
    for (line, value) in values.iter_mut().enumerate() {
        // SAFETY: the caller's.
        *value = R::load(unsafe {
            slice::from_raw_parts(sums.add((4 * line + column) * of_number + at), R::LEN)
        });
    }
    values
}

/// The numbers of an input's tiles.
pub(super) struct ToNumbers<'a> {
    pub(super) strip: &'a [[f32; LANES]],
    pub(super) out: &'a mut [f32],
    pub(super) places: Places,
}

impl Task for ToNumbers<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let [down, across] = self.places.tiles;
        let pitch = 2 * across + 2;
        assert!(self.strip.len() >= (2 * down + 2) * pitch);
        self.places.check(self.out.len());
        // SAFETY, of all blocks: as asserted.
        for row in 0..down {
            let strip = self.strip[2 * row * pitch..].as_ptr();
            for lane in (0..LANES).step_by(R::LEN) {
                let mut a: [R; 4] = numbers(unsafe { column(strip, pitch, 0, lane) });
                let mut b: [R; 4] = numbers(unsafe { column(strip, pitch, 1, lane) });
                for tile in 0..across {
                    let c: [R; 4] = numbers(unsafe { column(strip, pitch, 2 * tile + 2, lane) });
                    let d: [R; 4] = numbers(unsafe { column(strip, pitch, 2 * tile + 3, lane) });
                    for line in 0..4 {
                        let values = numbers([a[line], b[line], c[line], d[line]]);
                        let tile = row * across + tile;
                        unsafe { self.places.put(self.out, tile, lane, line, values) };
                    }
                    (a, b) = (c, d);
                }
            }
        }
    }
}

/// The numbers of a gradient's tiles, which are filters of the input's: twice, and four times, as large where there are two in the middle.
pub(super) struct ToFilters<'a> {
    pub(super) strip: &'a [[f32; LANES]],
    pub(super) out: &'a mut [f32],
    pub(super) places: Places,
}

impl Task for ToFilters<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let [down, across] = self.places.tiles;
        let pitch = 2 * across;
        assert!(self.strip.len() >= 2 * down * pitch);
        self.places.check(self.out.len());
        // SAFETY, of all blocks: as asserted.
        for row in 0..down {
            let strip = self.strip[2 * row * pitch..].as_ptr();
            for lane in (0..LANES).step_by(R::LEN) {
                for tile in 0..across {
                    let a: [R; 4] = filter_of_two(unsafe { column(strip, pitch, 2 * tile, lane) });
                    let b: [R; 4] =
                        filter_of_two(unsafe { column(strip, pitch, 2 * tile + 1, lane) });
                    for line in 0..4 {
                        let values = filter_of_two([a[line], b[line]]);
                        let tile = row * across + tile;
                        unsafe { self.places.put(self.out, tile, lane, line, values) };
                    }
                }
            }
        }
    }
}

/// The numbers of a weight's windows.
pub(super) struct ToWeights<'a> {
    pub(super) windows: &'a [[f32; LANES]],
    /// Whether the windows' last values come first.
    pub(super) are_turned: bool,
    pub(super) out: &'a mut [f32],
    /// From number to number.
    pub(super) of_number: usize,
}

impl Task for ToWeights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        for (channel, window) in self.windows.chunks_exact(TAPS).enumerate() {
            for lane in (0..LANES).step_by(R::LEN) {
                let mut columns = [[R::splat(0.0); 4]; 3];
                for (column, numbers) in columns.iter_mut().enumerate() {
                    let mut values = [R::splat(0.0); 3];
                    for (row, value) in values.iter_mut().enumerate() {
                        let tap = 3 * row + column;
                        let tap = if self.are_turned { TAPS - 1 - tap } else { tap };
                        *value = R::load(&window[tap][lane..]);
                    }
                    *numbers = filter_of_three(values);
                }
                let at = channel * LANES + lane;
                for line in 0..4 {
                    let values = filter_of_three(of_line(&columns, line));
                    for (number, value) in values.into_iter().enumerate() {
                        value.store(&mut self.out[(4 * line + number) * self.of_number + at..]);
                    }
                }
            }
        }
    }
}

/// A row of an output's tiles from the sums of their numbers. The result is whether all are finite.
pub(super) struct FromSums<'a> {
    pub(super) sums: &'a [f32],
    pub(super) places: Places,
    pub(super) bias: &'a [f32; LANES],
    /// Two rows of the output.
    pub(super) out: &'a mut [[f32; LANES]],
}

impl Task for FromSums<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<R: Register>(self) -> bool {
        let Places {
            tiles: [down, across],
            step,
            of_number,
        } = self.places;
        self.places.check(self.sums.len());
        assert!(down == 1 && self.out.len() >= 4 * across);
        let (sums, out) = (self.sums.as_ptr(), self.out.as_mut_ptr());
        let none = R::splat(0.0);
        let mut is_finite = true;
        for lane in (0..LANES).step_by(R::LEN) {
            let bias = R::load(&self.bias[lane..]);
            let mut check = none;
            for tile in 0..across {
                let at = tile * step + lane;
                let mut columns = [[none; 2]; 4];
                for (column, values) in columns.iter_mut().enumerate() {
                    // SAFETY: as asserted.
                    *values = two(unsafe { column_of_sums(sums, of_number, column, at) });
                }
                for line in 0..2 {
                    for (column, value) in two(of_line(&columns, line)).into_iter().enumerate() {
                        let value = value.add(bias);
                        check = value.mul_add(none, check);
                        let at = 2 * (line * across + tile) + column;
                        // SAFETY: as asserted.
                        value.store(&mut unsafe { &mut *out.add(at) }[lane..]);
                    }
                }
            }
            let mut values = [0.0; LANES];
            check.store(&mut values);
            is_finite &= values.iter().all(|value| *value == 0.0);
        }
        is_finite
    }
}

/// The windows of a weight's gradient from the sums of their numbers.
pub(super) struct ToWindows<'a, const WIDTH: usize> {
    pub(super) sums: &'a [f32],
    pub(super) of_number: usize,
    pub(super) windows: &'a mut [[f32; WIDTH]],
}

impl<const WIDTH: usize> Task for ToWindows<'_, WIDTH> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let last = (NUMBERS - 1) * self.of_number + self.windows.len() / TAPS * WIDTH;
        assert!(self.sums.len() >= last);
        let sums = self.sums.as_ptr();
        for (channel, window) in self.windows.chunks_exact_mut(TAPS).enumerate() {
            for lane in (0..WIDTH).step_by(R::LEN) {
                let at = channel * WIDTH + lane;
                let mut columns = [[R::splat(0.0); 3]; 4];
                for (column, values) in columns.iter_mut().enumerate() {
                    // SAFETY: as asserted.
                    *values = three(unsafe { column_of_sums(sums, self.of_number, column, at) });
                }
                for line in 0..3 {
                    let values = three(of_line(&columns, line));
                    for (tap, value) in values.into_iter().enumerate() {
                        value.store(&mut window[3 * line + tap][lane..]);
                    }
                }
            }
        }
    }
}
