//! Ranks with different numbers of batches: what PyTorch's `join` is for.

use std::collections::BTreeMap;

use paceline_collective::ProcessGroup;
use paceline_ddp::{Ddp, DdpError, weights};

use crate::support::*;

/// Batches of each shard.
const BATCHES: [usize; 4] = [2, 5, 0, 3];

/// Each rank steps until no rank has a batch. Returns the number of steps and the hash of the weights.
fn train_until_all_are_out(group: ProcessGroup) -> (usize, String) {
    let (device, mut optimizer) = (device(), optimizer());
    let made = Ddp::new(group, fixed_net(&device), options(BATCHES.len()));
    let (mut ddp, mut net) = made.expect("ranks agree");
    let shards = ddp.shards();
    let mut batches: BTreeMap<_, _> = shards.map(|at| (at, 0..BATCHES[at])).collect();
    for steps in 0.. {
        let reduced = ddp.step(&net, |shard| {
            let own = batches.get_mut(&shard.shard()).expect("this rank's");
            let Some(batch) = own.next() else {
                shard.micro_batches(0);
                return Ok(());
            };
            let samples = [batch, batch + 10 * shard.shard(), 7];
            let loss = loss(&shard.model()?, &samples, batch % 2 == 0, &device);
            shard.backward(loss, 3.0)
        });
        let reduced = reduced.unwrap_or_else(|error: DdpError| panic!("{error}"));
        if reduced.weight == 0.0 {
            return (steps, weights::sha256(&weights::export(&net)));
        }
        net = optimizer.step(0.01, net, reduced.grads);
    }
    unreachable!("the batches end");
}

#[test]
fn a_rank_without_batches_goes_along_until_all_are_out() {
    let expected = ranks(1, train_until_all_are_out).remove(0);
    assert_eq!(expected.0, 5);
    for world in [2, 3, 4] {
        for found in ranks(world, train_until_all_are_out) {
            assert_eq!(found, expected, "{world} ranks");
        }
    }
}

/// No wait until the deadline: the end of rank 0's process, or of its group, is noticed.
#[test]
fn a_rank_that_leaves_its_loop_early_is_named_to_the_others() {
    let errors = ranks(3, |group| {
        let device = device();
        let steps = [2, 4, 4][group.rank()];
        let made = Ddp::new(group, fixed_net(&device), options(3));
        let (mut ddp, net) = made.expect("ranks agree");
        let run = (0..steps).map(|_| {
            let reduced = ddp.step(&net, |shard| {
                let loss = loss(&shard.model()?, &[1, 2], true, &device);
                shard.backward(loss, 2.0)
            });
            reduced.map(drop)
        });
        let ended: Result<(), DdpError> = run.collect();
        ended
            .err()
            .map(|error| (error.to_string(), error.culprit()))
    });
    assert_eq!(errors[0], None);
    for error in &errors[1..] {
        let (text, culprit) = error.as_ref().expect("rank 0 has left");
        assert_eq!(*culprit, Some(0), "{text}");
    }
}
