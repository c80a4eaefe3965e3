//! Steps of our own on Burn's tape.

use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Tensor};
use paceline_nn::Pass;
use paceline_nn::tape::{Point, custom, plain};

use crate::support::{device, values};

#[test]
fn a_custom_output_hands_its_gradient_to_the_step_and_the_result_to_the_parent() {
    let (device, _alone) = device();
    let x = values([2, 3], &device).require_grad();
    let elsewhere = plain(x.clone()).sum_dim(1).reshape([2]);
    let origin = Point::origin(&x);
    let y = custom(elsewhere, x.clone(), &origin, |gradient: Tensor<1>| {
        Some(gradient.reshape([2, 1]).repeat_dim(1, 3))
    });
    let weights = values([2], &device);
    let gradients = (y * weights.clone()).sum().backward();
    let expected = plain(weights).reshape([2, 1]).repeat_dim(1, 3);
    assert_eq!(
        x.grad(&gradients).expect("a gradient").into_data(),
        expected.into_data()
    );
}

#[test]
fn deposits_give_any_number_of_parents_the_gradients_that_a_step_left() {
    let (device, _alone) = device();
    for parents in 0..5 {
        let leaves: Vec<_> = (0..parents)
            .map(|i| values([i + 1], &device).require_grad())
            .collect();
        let left: Arc<Mutex<Vec<Tensor<1>>>> = Arc::default();
        let mut tip = Point::on(&device);
        for leaf in &leaves {
            // Through an operation: its own step needs the gradient too.
            let parent = leaf.clone() * 2.0;
            let left = left.clone();
            tip = tip.deposit(parent, move || left.lock().unwrap().pop());
        }
        let device = device.clone();
        let tip = tip.then(move || {
            let gradients = (0..parents).map(|i| values([i + 1], &device).inner());
            left.lock().unwrap().extend(gradients);
        });
        assert_eq!(tip.is_tracked(), parents > 0);
        let Some(gradients) = tip.backward() else {
            continue;
        };
        for leaf in leaves {
            let gradient = leaf.grad(&gradients).expect("a gradient").into_data();
            assert_eq!(gradient, (plain(leaf) * 2.0).into_data());
        }
    }
}

#[test]
fn a_missing_deposit_leaves_a_leaf_alone_and_gives_an_operation_zeros() {
    let (device, _alone) = device();
    let x = values([3], &device).require_grad();
    let y = values([3], &device).require_grad();
    let tip = Point::origin(&x);
    let tip = tip.deposit(x.clone(), || None);
    let tip = tip.deposit(y.clone().exp(), || None);
    let gradients = tip.backward().expect("two parents");
    assert!(x.grad(&gradients).is_none());
    let zeros = y.grad(&gradients).expect("zeros").into_data();
    assert_eq!(zeros, Tensor::<1>::zeros([3], &device.inner()).into_data());
}

#[test]
fn a_backward_pass_from_given_gradients_has_the_bits_of_a_weighted_sum() {
    let (device, _alone) = device();
    let x = values([4, 5], &device).require_grad();
    let (g, h) = (values([4, 5], &device), values([5, 4], &device));
    let outputs = || (x.clone().tanh(), x.clone().transpose().exp());
    let (a, b) = outputs();
    let sums = (a * g.clone()).sum() + (b * h.clone()).sum();
    let expected = x.grad(&sums.backward()).expect("a gradient").into_data();

    let (a, b) = outputs();
    let tip = Point::origin(&x).deposit(a, move || Some(g));
    let tip = tip.deposit(b, move || Some(h));
    let gradients = tip.backward().expect("a tape");
    assert_eq!(
        x.grad(&gradients).expect("a gradient").into_data(),
        expected
    );
}

/// A step may fail; what follows it in the pass does not run, and every parent gets zeros of its own type.
#[test]
fn the_first_failure_of_a_pass_wins_and_its_gradients_are_zeros() {
    let (device, _alone) = device();
    let pass = Pass::default();
    let x = values([2, 2], &device).cast(DType::F64).require_grad();
    let mut y = x.clone() * 1.0;
    for name in ["last", "middle", "first"] {
        let failure = pass.failure().clone();
        let origin = Point::origin(&y);
        y = custom(y.clone(), y, &origin, move |gradient| {
            let fails = name != "first";
            failure.attempt(|| if fails { Err(name) } else { Ok(gradient) })
        });
    }
    let gradients = y.sum().backward();
    let gradient = x.grad(&gradients).expect("zeros");
    assert_eq!(gradient.dtype(), DType::F64);
    assert_eq!(gradient.abs().sum().into_scalar::<f64>(), 0.0);
    assert_eq!(pass.finish().expect_err("failed").to_string(), "middle");
    assert!(pass.finish().is_ok(), "an error is reported once");
    assert!(pass.failure().has_failed());
}
