//! Linear interpolation.

use crate::isa::{Kernels, Task};
use crate::registers::Register;
use crate::threads::each_mut;

/// Values that are interpolated at once.
const UNIT: usize = 1024;

impl Kernels {
    /// Moves each value of `start` towards that of `end`, in place: `start + weight * (end - start)`.
    ///
    /// # Panics
    ///
    /// If the slices have different lengths.
    pub fn lerp(self, start: &mut [f32], end: &[f32], weight: f32) {
        assert_eq!(start.len(), end.len(), "an end for each value");
        let cost = 4 * start.len();
        each_mut(start, UNIT, cost, |unit, start| {
            let end = &end[unit * UNIT..][..start.len()];
            self.run(Lerp { start, end, weight });
        });
    }
}

struct Lerp<'a> {
    start: &'a mut [f32],
    end: &'a [f32],
    weight: f32,
}

impl Task for Lerp<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        for (start, end) in self.start.iter_mut().zip(self.end) {
            *start += (end - *start) * self.weight;
        }
    }
}
