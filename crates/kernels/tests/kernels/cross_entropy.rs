//! Cross-entropy and its gradient against f64, and their bits on every instruction set and number of threads.

use crate::support::{assert_close, everywhere, noise};
use paceline_kernels::Kernels;

/// Loss, and the gradient of the logits, in f64.
fn expected(logits: &[f32], classes: usize, targets: &[usize], gradient: f64) -> [Vec<f64>; 2] {
    let rows = targets.len() as f64;
    let (mut loss, mut of_logits) = (0.0, Vec::new());
    for (logits, target) in logits.chunks(classes).zip(targets) {
        let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        loss += sum.ln() - f64::from(logits[*target]);
        of_logits.extend(logits.iter().enumerate().map(|(class, logit)| {
            let hit = if class == *target { 1.0 } else { 0.0 };
            (f64::from(*logit).exp() / sum - hit) * gradient / rows
        }));
    }
    [vec![loss / rows], of_logits]
}

fn run(logits: &[f32], classes: usize, targets: &[usize], gradient: f32) -> [Vec<f32>; 2] {
    everywhere(|kernels| {
        let (loss, sums) = kernels.cross_entropy(logits, classes, targets);
        let of_logits = kernels.cross_entropy_gradient(logits, classes, targets, &sums, gradient);
        [vec![loss], of_logits]
    })
}

#[test]
fn shapes_with_and_without_a_rest() {
    for (rows, classes) in [
        (1, 1),
        (3, 2),
        (64, 10),
        (5, 31),
        (7, 32),
        (31, 33),
        (1009, 100),
        (3, 4099),
    ] {
        for size in [1.0, 30.0] {
            let logits: Vec<f32> = noise(1, rows * classes).iter().map(|x| size * x).collect();
            let targets: Vec<usize> = (0..rows).map(|row| row * 7 % classes).collect();
            let got = run(&logits, classes, &targets, 3.0);
            for (got, expected) in got.iter().zip(expected(&logits, classes, &targets, 3.0)) {
                assert_close(got, &expected, &format!("{rows} x {classes}"));
            }
        }
    }
}

#[test]
fn logits_far_from_zero_keep_their_loss() {
    let near: Vec<f32> = noise(2, 100)
        .iter()
        .map(|x| (x * 1024.0).round() / 1024.0)
        .collect();
    let far: Vec<f32> = near.iter().map(|x| x + 4096.0).collect();
    let targets = [3; 10];
    assert_eq!(run(&near, 10, &targets, 1.0), run(&far, 10, &targets, 1.0));
}

#[test]
fn numbers_that_are_not_finite() {
    const MASKED: f32 = f32::NEG_INFINITY;
    // A masked class costs nothing, unless it is the target.
    let [loss, of_logits] = run(&[0.0, MASKED, 0.0], 3, &[0], 1.0);
    assert!((loss[0] - 2.0_f32.ln()).abs() < 1e-7);
    assert_eq!(of_logits, [-0.5, 0.0, 0.5]);
    assert_eq!(run(&[0.0, MASKED], 2, &[1], 1.0)[0], [f32::INFINITY]);
    assert!(run(&[MASKED, MASKED], 2, &[1], 1.0)[0][0].is_nan());
    assert!(run(&[0.0, f32::NAN], 2, &[0], 1.0)[0][0].is_nan());
    assert!(run(&[], 2, &[], 1.0)[0][0].is_nan());
}

#[test]
#[should_panic(expected = "target 2 of 2 classes in row 1")]
fn a_target_without_a_class() {
    let kernels = Kernels::of_process().unwrap();
    kernels.cross_entropy(&[0.0; 4], 2, &[0, 2]);
}
