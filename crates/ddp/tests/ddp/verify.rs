//! The comparisons before and during training.

use burn::nn::LinearConfig;
use paceline_ddp::{Ddp, DdpError, DdpOptions};

use crate::support::*;

#[test]
fn another_model_on_one_rank_is_refused_on_all_with_the_first_difference() {
    let errors = ranks(3, |group| {
        let device = device();
        let mut net = fixed_net(&device);
        if group.rank() == 2 {
            net.second = LinearConfig::new(16, 4).init(&device);
        }
        Ddp::new(group, net, options(3))
            .err()
            .expect("refused")
            .to_string()
    });
    for error in errors {
        assert_eq!(
            error,
            "ranks do not agree on tensor 6 of the model: rank 0 has parameter second.weight [16, 3] F32, \
             rank 2 has parameter second.weight [16, 4] F32"
        );
    }
}

#[test]
fn another_setting_on_one_rank_is_refused_on_all() {
    let errors = ranks(2, |group| {
        let device = device();
        let options = DdpOptions {
            settings: vec![("lr".into(), format!("0.{}", group.rank()))],
            ..options(2)
        };
        Ddp::new(group, fixed_net(&device), options)
            .err()
            .expect("refused")
            .to_string()
    });
    assert_eq!(
        errors[0],
        "ranks do not agree on setting lr: rank 0 has 0.0, rank 1 has 0.1"
    );
    assert_eq!(errors[0], errors[1]);
}

#[test]
fn fewer_shards_than_ranks_are_refused() {
    let errors = ranks(2, |group| {
        Ddp::new(group, fixed_net(&device()), options(1))
            .err()
            .expect("refused")
    });
    for error in errors {
        assert!(matches!(
            error,
            DdpError::Shards {
                shards: 1,
                world: 2
            }
        ));
    }
}

#[test]
fn all_ranks_start_with_the_weights_of_rank_0() {
    let hashes = ranks(3, |group| {
        let (_, net) = Ddp::new(group, Net::new(&device()), options(3)).expect("ranks agree");
        paceline_ddp::weights::sha256(&paceline_ddp::weights::export(&net))
    });
    assert_eq!(hashes[0], hashes[1]);
    assert_eq!(hashes[0], hashes[2]);
}

#[test]
fn a_replica_that_drifts_is_named() {
    let errors = ranks(3, |group| {
        let device = device();
        let rank = group.rank();
        let (mut ddp, mut net) =
            Ddp::new(group, fixed_net(&device), options(3)).expect("ranks agree");
        for step in 0..40 {
            match train_step_without_sums(&mut ddp, &net, &device) {
                Ok(reduced) => net = optimizer().step(0.01, net, reduced.grads),
                Err(error) => return Some(error.to_string()),
            }
            if step == 3 && rank == 1 {
                net.second.bias = net
                    .second
                    .bias
                    .map(|bias| bias.map(|b| b.inner().add_scalar(1e-6).autodiff().require_grad()));
            }
        }
        None
    });
    for error in errors {
        let error = error.expect("the drift is found");
        assert!(error.contains("rank") && error.contains("[1]"), "{error}");
    }
}

fn train_step_without_sums(
    ddp: &mut Ddp,
    net: &Net,
    device: &burn::tensor::Device,
) -> Result<paceline_ddp::Reduced, DdpError> {
    ddp.step(net, |shard| {
        let loss = loss(&shard.model()?, &[1, 2, 3], true, device);
        shard.backward(loss, 3.0)
    })
}

/// Two good steps with a bad one between them, whose loss is NaN on one shard of one rank.
fn steps_around_a_nan(group: paceline_collective::ProcessGroup, has_bad: bool) -> String {
    let device = device();
    let options = DdpOptions {
        skip_non_finite: true,
        ..options(3)
    };
    let (mut ddp, mut net) = Ddp::new(group, fixed_net(&device), options).expect("ranks agree");
    let mut optimizer = optimizer();
    for at in 0..if has_bad { 3 } else { 2 } {
        let is_bad = has_bad && at == 1;
        let reduced = ddp.step(&net, |shard| {
            let (mut x, y) = batch(&[1, 2, 3], &device);
            if is_bad && shard.shard() == 1 {
                // Through the running statistics too.
                x = x.mul_scalar(f32::NAN);
            }
            let loss = (shard.model()?.forward(x, true) - y)
                .powf_scalar(2.0)
                .mean();
            shard.add_loss(3.0 * loss.clone().inner().into_scalar::<f32>());
            shard.backward(loss, 3.0)
        });
        let reduced = reduced.expect("a step");
        assert_eq!(
            (reduced.skipped, reduced.grads.is_empty()),
            (is_bad, is_bad)
        );
        assert_eq!((ddp.has_skipped(), reduced.loss.is_nan()), (is_bad, is_bad));
        net = optimizer.step(0.01, net, reduced.grads);
    }
    ddp.sha256(&net).expect("whole")
}

#[test]
fn a_step_with_a_loss_that_is_not_finite_changes_nothing() {
    let good = ranks(3, |group| steps_around_a_nan(group, false));
    let skipped = ranks(3, |group| steps_around_a_nan(group, true));
    assert_eq!(skipped, good);
}
