//! The loss of a classifier, and its gradient.

#![expect(unsafe_code, reason = "results are not filled with zeros first")]

use std::mem::MaybeUninit;

use crate::functions::{exp, log};
use crate::isa::{Kernels, Task};
use crate::registers::Register;
use crate::softmax::max_and_sum;
use crate::threads::{each_mut, written};

/// What the gradient of a cross-entropy needs of each row of logits.
#[derive(Clone, Debug, PartialEq)]
pub struct RowSums {
    /// The largest logits.
    pub largest: Vec<f32>,
    /// Sums of `exp(logit - largest)`. One log-sum-exp could replace both, but would lose precision.
    pub sum: Vec<f32>,
}

impl Kernels {
    /// The mean over rows of `log(sum(exp(logits))) - logits[target]`, and what its gradient needs.
    ///
    /// *Shape*: `logits` are `[rows, classes]`; `targets` has the number of a class for each row.
    ///
    /// *Numerics*: as [`Kernels::softmax`]; the mean is taken in f64, row by row. Without rows it is NaN.
    ///
    /// # Panics
    ///
    /// If `logits` has another length, or there is no such class.
    pub fn cross_entropy(
        self,
        logits: &[f32],
        classes: usize,
        targets: &[usize],
    ) -> (f32, RowSums) {
        check(logits, classes, targets);
        let mut rows = vec![[0.0; 3]; targets.len()];
        each_mut(&mut rows, 1, 16 * logits.len(), |first, rows| {
            self.run(Losses {
                logits: &logits[first * classes..][..rows.len() * classes],
                classes,
                targets: &targets[first..],
                rows,
            });
        });
        let loss: f64 = rows.iter().map(|[.., loss]| f64::from(*loss)).sum();
        let (largest, sum) = rows.iter().map(|[largest, sum, _]| (largest, sum)).unzip();
        let loss = (loss / targets.len() as f64) as f32;
        (loss, RowSums { largest, sum })
    }

    /// The gradient of the logits, from that of the loss: `(softmax(logits) - 1 at the target) * gradient / rows`.
    ///
    /// # Panics
    ///
    /// If a slice has another length, or there is no such class.
    pub fn cross_entropy_gradient(
        self,
        logits: &[f32],
        classes: usize,
        targets: &[usize],
        sums: &RowSums,
        gradient: f32,
    ) -> Vec<f32> {
        check(logits, classes, targets);
        assert!(
            [&sums.largest, &sums.sum]
                .iter()
                .all(|of_rows| of_rows.len() == targets.len()),
            "sums for {} rows",
            targets.len()
        );
        let scale = gradient / targets.len() as f32;
        let fill = |first: usize, out: &mut [MaybeUninit<f32>]| {
            self.run(Gradient {
                logits: &logits[first * classes..][..out.len()],
                classes,
                targets: &targets[first..],
                largest: &sums.largest[first..],
                sum: &sums.sum[first..],
                scale,
                out,
            });
        };
        // SAFETY: it writes a value for each logit.
        unsafe { written(logits.len(), classes, 16 * logits.len(), fill) }
    }
}

fn check(logits: &[f32], classes: usize, targets: &[usize]) {
    assert_eq!(
        logits.len(),
        targets.len() * classes,
        "logits of {classes} classes for {} targets",
        targets.len()
    );
    for (row, target) in targets.iter().enumerate() {
        assert!(
            *target < classes,
            "target {target} of {classes} classes in row {row}"
        );
    }
}

/// Largest logit, sum and loss of each row.
struct Losses<'a> {
    logits: &'a [f32],
    classes: usize,
    targets: &'a [usize],
    rows: &'a mut [[f32; 3]],
}

impl Task for Losses<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let inputs = self
            .logits
            .chunks_exact(self.classes.max(1))
            .zip(self.targets);
        for ((logits, target), row) in inputs.zip(self.rows) {
            let [largest, sum] = max_and_sum(logits);
            *row = [largest, sum, log(sum) - (logits[*target] - largest)];
        }
    }
}

/// `exp(logit - largest) / sum * scale`, and less by `scale` at the target.
struct Gradient<'a> {
    logits: &'a [f32],
    classes: usize,
    targets: &'a [usize],
    largest: &'a [f32],
    sum: &'a [f32],
    scale: f32,
    out: &'a mut [MaybeUninit<f32>],
}

impl Task for Gradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let classes = self.classes.max(1);
        let rows = self
            .logits
            .chunks_exact(classes)
            .zip(self.out.chunks_exact_mut(classes));
        let of_rows = self.targets.iter().zip(self.largest.iter().zip(self.sum));
        for ((logits, out), (target, (largest, sum))) in rows.zip(of_rows) {
            let inverse = 1.0 / sum;
            let value = |logit: f32| exp(logit - largest) * inverse;
            for (logit, out) in logits.iter().zip(&mut *out) {
                out.write(value(*logit) * self.scale);
            }
            out[*target].write((value(logits[*target]) - 1.0) * self.scale);
        }
    }
}
