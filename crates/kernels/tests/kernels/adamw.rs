//! Steps of AdamW against f64, and their bits on every instruction set and number of threads.

use crate::support::{assert_close, everywhere, noise};
use paceline_kernels::{AdamW, Kernels};

const STEPS: u32 = 20;

/// Parameter and moments after all steps, with a gradient that changes.
fn expected(optimizer: &AdamW, parameter: &[f32], gradient: &[f32]) -> [Vec<f64>; 3] {
    let (beta_1, beta_2) = (f64::from(optimizer.beta_1), f64::from(optimizer.beta_2));
    let rate = optimizer.learning_rate;
    let mut all = [Vec::new(), Vec::new(), Vec::new()];
    for (parameter, gradient) in parameter.iter().zip(gradient) {
        let (mut parameter, mut first, mut second) = (f64::from(*parameter), 0.0, 0.0);
        for step in 1..=STEPS as i32 {
            let gradient = f64::from(gradient / step as f32);
            first = beta_1 * first + (1.0 - beta_1) * gradient;
            second = beta_2 * second + (1.0 - beta_2) * gradient * gradient;
            let mean = first / (1.0 - beta_1.powi(step));
            let size = (second / (1.0 - beta_2.powi(step))).sqrt() + f64::from(optimizer.epsilon);
            parameter -= parameter * rate * f64::from(optimizer.weight_decay);
            parameter -= rate * mean / size;
        }
        for (all, value) in all.iter_mut().zip([parameter, first, second]) {
            all.push(value);
        }
    }
    all
}

fn run(optimizer: &AdamW, parameter: &[f32], gradient: &[f32]) -> [Vec<f32>; 3] {
    everywhere(|kernels: Kernels| {
        let mut parameter = parameter.to_vec();
        let [mut first, mut second] = [0, 1].map(|_| vec![0.0; parameter.len()]);
        for step in 1..=STEPS {
            let gradient: Vec<f32> = gradient.iter().map(|value| value / step as f32).collect();
            kernels.adamw(
                optimizer,
                step,
                &mut parameter,
                &gradient,
                [&mut first, &mut second],
            );
        }
        [parameter, first, second]
    })
}

const OPTIMISER: AdamW = AdamW {
    learning_rate: 0.01,
    beta_1: 0.9,
    beta_2: 0.999,
    epsilon: 1e-5,
    weight_decay: 0.1,
};

#[test]
fn any_number_of_values() {
    for count in [0, 1, 31, 32, 33, 1023, 1024, 1025, 30_011] {
        for weight_decay in [0.0, 0.1] {
            let optimizer = AdamW {
                weight_decay,
                ..OPTIMISER
            };
            let (parameter, gradient) = (noise(1, count), noise(2, count));
            let got = run(&optimizer, &parameter, &gradient);
            for (got, expected) in got.iter().zip(expected(&optimizer, &parameter, &gradient)) {
                assert_close(got, &expected, &format!("{count} values"));
            }
        }
    }
}

#[test]
fn a_gradient_that_is_not_finite_spoils_its_value_only() {
    let [parameter, ..] = run(&OPTIMISER, &[1.0; 3], &[0.5, f32::NAN, 0.0]);
    assert!(parameter[0].is_finite() && parameter[1].is_nan() && parameter[2].is_finite());
}

#[test]
#[should_panic(expected = "a gradient and two moments for each of 2 values")]
fn a_moment_of_another_length() {
    let kernels = Kernels::of_process().unwrap();
    kernels.adamw(
        &OPTIMISER,
        1,
        &mut [0.0; 2],
        &[0.0; 2],
        [&mut [0.0; 2], &mut [0.0; 1]],
    );
}
