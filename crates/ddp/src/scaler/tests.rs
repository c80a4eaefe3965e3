//! The scale's rule as tables, and the effect of unscaling on gradients.

use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};

use super::*;

/// Checks the scale after each step; a step is good (`.`) or has an infinity (`x`).
fn check(options: GradScalerOptions, steps: &str, expect: &[f32]) {
    let mut scaler = GradScaler::new(options).expect("valid options");
    let scales: Vec<f32> = steps
        .chars()
        .map(|step| {
            scaler.update(step == 'x');
            scaler.get_scale()
        })
        .collect();
    assert_eq!(scales, expect, "{steps}");
}

fn every(growth_interval: u32) -> GradScalerOptions {
    GradScalerOptions {
        init_scale: 8.0,
        growth_interval,
        ..GradScalerOptions::default()
    }
}

#[test]
fn the_defaults_are_those_of_pytorch() {
    let state = GradScaler::default().state_dict().expect("enabled");
    let json = serde_json::to_value(state).expect("it encodes");
    let expect = serde_json::json!({
        "scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0,
    });
    assert_eq!(json, expect);
}

#[test]
fn the_scale_grows_after_so_many_steps_in_a_row_and_backs_off_after_a_skipped_one() {
    check(every(3), "...", &[8.0, 8.0, 16.0]);
    check(every(3), "......", &[8.0, 8.0, 16.0, 16.0, 16.0, 32.0]);
    check(every(3), "xx", &[4.0, 2.0]);
    // A skipped step resets the count.
    check(every(3), "..x..", &[8.0, 8.0, 4.0, 4.0, 4.0]);
    check(every(3), "..x...", &[8.0, 8.0, 4.0, 4.0, 4.0, 8.0]);
    check(every(1), ".x.", &[16.0, 8.0, 16.0]);
}

#[test]
fn factors_are_the_users() {
    let options = GradScalerOptions {
        growth_factor: 1.5,
        backoff_factor: 0.25,
        ..every(2)
    };
    check(options, "..x", &[8.0, 12.0, 3.0]);
}

#[test]
fn two_thousand_good_steps_double_the_default_scale() {
    let mut scaler = GradScaler::default();
    (0..1999).for_each(|_| scaler.update(false));
    assert_eq!(scaler.get_scale(), 65536.0);
    scaler.update(false);
    assert_eq!(scaler.get_scale(), 131_072.0);
}

#[test]
fn the_scale_does_not_grow_beyond_f32() {
    let options = GradScalerOptions {
        init_scale: 2e38,
        ..every(1)
    };
    check(options, "..", &[2e38, 2e38]);
}

#[test]
fn a_scaler_that_is_not_enabled_does_nothing() {
    let options = GradScalerOptions {
        enabled: false,
        init_scale: 0.0,
        ..GradScalerOptions::default()
    };
    let mut scaler = GradScaler::new(options).expect("nothing to be wrong");
    scaler.update(true);
    assert_eq!((scaler.get_scale(), scaler.state_dict()), (1.0, None));
    let (found, means) = unscaled(&scaler, &[f32::INFINITY], false);
    assert_eq!((found, means), (false, [Some(vec![f32::INFINITY]), None]));
    let saved = GradScaler::default().state_dict().expect("enabled");
    scaler.load_state_dict(saved).expect("ignored");
    assert_eq!(scaler.get_scale(), 1.0);
}

#[test]
fn a_saved_scaler_goes_on_where_it_was() {
    let mut scaler = GradScaler::new(every(3)).expect("valid");
    scaler.update(true);
    scaler.update(false);
    let saved = serde_json::to_string(&scaler.state_dict()).expect("it encodes");
    let mut other = GradScaler::default();
    let saved: GradScalerState = serde_json::from_str(&saved).expect("it decodes");
    other.load_state_dict(saved).expect("a valid state");
    assert_eq!(other, scaler);
}

#[test]
fn options_and_states_that_cannot_work_are_refused() {
    let check = |change: fn(&mut GradScalerState), expect: &str| {
        let mut state = GradScaler::default().state_dict().expect("enabled");
        change(&mut state);
        let error = GradScaler::default().load_state_dict(state);
        assert_eq!(error.expect_err("refused").to_string(), expect);
    };
    check(
        |state| state.scale = 0.0,
        "gradient scaler: the scale must be finite and above 0, not 0",
    );
    check(
        |state| state.scale = f32::NAN,
        "gradient scaler: the scale must be finite and above 0, not NaN",
    );
    check(
        |state| state.growth_factor = 1.0,
        "gradient scaler: growth_factor must be above 1, not 1",
    );
    check(
        |state| state.backoff_factor = 1.0,
        "gradient scaler: backoff_factor must be between 0 and 1, not 1",
    );
    check(
        |state| state.growth_tracker = 2000,
        "gradient scaler: the growth tracker 2000 must be below growth_interval 2000",
    );
    let options = GradScalerOptions {
        growth_interval: 0,
        ..GradScalerOptions::default()
    };
    assert!(GradScaler::new(options).is_err());
}

/// Unscales averages, one of which no rank used, in ordinary memory or on a device.
fn unscaled(scaler: &GradScaler, values: &[f32], on_device: bool) -> (bool, [Option<Vec<f32>>; 2]) {
    let mut means = if on_device {
        let tensor = Tensor::<1>::from_floats(values, &Device::flex());
        Means::Device(vec![Some(tensor), None])
    } else {
        Means::Host(vec![Some(values.to_vec()), None].into())
    };
    let found = scaler.is_enabled() && !are_finite(&means).expect("a device that works");
    match found {
        true => means.clear(),
        false => scaler.unscale_means(&mut means),
    }
    let means: Vec<Option<Vec<f32>>> = match means {
        Means::Host(means) => means.iter().map(|mean| mean.map(<[f32]>::to_vec)).collect(),
        Means::Device(values) => {
            let read = |tensor: Tensor<1>| tensor.into_data().try_to_vec().expect("f32");
            values.into_iter().map(|tensor| tensor.map(read)).collect()
        }
    };
    (found, means.try_into().expect("two"))
}

#[test]
fn one_value_that_is_not_finite_leaves_no_gradients() {
    let scaler = GradScaler::new(every(3)).expect("valid");
    let check = |values: &[f32], expect: Option<&[f32]>| {
        for on_device in [false, true] {
            let (found, means) = unscaled(&scaler, values, on_device);
            assert_eq!(found, expect.is_none(), "{values:?}");
            assert_eq!(means, [expect.map(<[f32]>::to_vec), None], "{values:?}");
        }
    };
    check(&[8.0, -1.0], Some(&[1.0, -0.125]));
    check(&[f32::MAX, 0.0], Some(&[f32::MAX / 8.0, 0.0]));
    check(&[1.0, f32::INFINITY], None);
    check(&[f32::NEG_INFINITY, 1.0], None);
    check(&[1.0, f32::NAN], None);
}

#[test]
fn an_optimizer_changes_nothing_where_a_gradient_was_infinite() {
    let device = Device::flex().autodiff();
    let scaler = GradScaler::new(every(3)).expect("valid");
    let model: Linear = LinearConfig::new(3, 2).init(&device);
    let gradients = |factor: f32| {
        let x = Tensor::<2>::ones([4, 3], &device);
        let loss = model.forward(x).mean().mul_scalar(factor);
        GradientsParams::from_grads(scaler.scale(loss).backward(), &model)
    };
    let weight = |grads: &GradientsParams| {
        let gradient: Tensor<2> = grads.get(model.weight.id).expect("a gradient");
        gradient.into_data().try_to_vec::<f32>().expect("f32")
    };
    let (grads, found) = scaler.unscale(&model, gradients(1.0)).expect("read");
    assert!(!found);
    assert_eq!(weight(&grads), vec![0.5; 6]);

    let (grads, found) = scaler
        .unscale(&model, gradients(f32::INFINITY))
        .expect("read");
    assert!(found && grads.is_empty());
    let mut optimizer = AdamWConfig::new().init();
    let before = model.weight.val().into_data();
    let after = optimizer.step(0.1, model.clone(), grads);
    assert_eq!(after.weight.val().into_data(), before);
}
