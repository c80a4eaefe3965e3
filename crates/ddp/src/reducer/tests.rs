//! The three reducers give the same bytes; tested on Flex, where all of them run, that of NCCL on the stand-in.

mod dealt;
mod exchange;
mod messages;
pub(crate) mod stand_in;

use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};
use paceline_collective::GroupOptions;

use super::*;
use crate::ddp::{BackwardPart, Ddp, DdpOptions, Reduced, Reduction};
use crate::plan::BucketCaps;
use crate::weights;
use stand_in::StandIn;

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
    side: Linear,
    never: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layer = |from, to| LinearConfig::new(from, to).init(device);
        let net = Self {
            first: layer(5, 17),
            second: layer(17, 3),
            side: layer(5, 3),
            never: layer(2, 2),
        };
        fixed(net)
    }

    fn loss(&self, samples: &[usize], side: bool) -> Tensor<1> {
        let x = inputs(samples, &self.first.weight.device());
        let y = self.second.forward(relu(self.first.forward(x.clone())));
        let y = if side { y + self.side.forward(x) } else { y };
        y.powf_scalar(2.0).mean()
    }
}

/// The model with the same weights in every process.
fn fixed<M: Module>(net: M) -> M {
    let fixed = weights::export(&net).into_iter().enumerate();
    let fixed = fixed.map(|(at, (path, data))| {
        let values = (0..data.num_elements()).map(|i| wave(at * 100 + i));
        let values: Vec<f32> = values.collect();
        (path, TensorData::new(values, data.shape().clone()))
    });
    weights::import(net, fixed.collect())
}

fn inputs(samples: &[usize], device: &Device) -> Tensor<2> {
    let values = samples
        .iter()
        .flat_map(|s| (0..5).map(move |k| wave(s * 5 + k)));
    let values: Vec<f32> = values.collect();
    Tensor::from_data(TensorData::new(values, [samples.len(), 5]), device)
}

/// A number that needs all its digits.
fn wave(at: usize) -> f32 {
    ((at * 7919 % 1009) as f32 / 1009.0 - 0.5) * 0.3
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Walk {
    Host,
    Staged,
    Device,
}

impl Walk {
    fn reducer(self, setup: Setup) -> Result<Arc<dyn Reducer>, DdpError> {
        Ok(match self {
            Self::Host => Arc::new(HostReducer::new(setup)),
            Self::Staged => Arc::new(StagedReducer::new(setup)?),
            Self::Device => {
                let device = setup.group.rank();
                let group = stand_in::group(&setup, device, Reduction::Tree)?;
                Arc::new(DeviceReducer::new(setup, Arc::new(group)))
            }
        })
    }
}

/// A group that loses its device.
struct Failing {
    device: Device,
    /// The first bucket that cannot be reduced.
    from: usize,
    group: NcclGroup<StandIn>,
}

impl DeviceGroup for Failing {
    fn device(&self) -> &Device {
        &self.device
    }

    fn computed(&self, tensor: Tensor<1>) -> Tensor<1> {
        tensor
    }

    fn reduce(
        &self,
        call: DeviceCall,
        blocks: Vec<Tensor<1>>,
    ) -> Result<Box<dyn DeviceTicket>, DdpError> {
        match call.bucket.is_some_and(|bucket| bucket >= self.from) {
            true => Err(DdpError::Device("it has fallen off the bus".into())),
            false => self.group.reduce(call, blocks),
        }
    }

    fn all_gather(
        &self,
        call: DeviceCall,
        values: Tensor<1>,
    ) -> Result<Box<dyn DeviceTicket>, DdpError> {
        self.group.all_gather(call, values)
    }

    fn synchronize(&self) -> Result<(), DdpError> {
        self.group.synchronize()
    }

    fn abort(&self) -> Result<(), DdpError> {
        self.group.abort()
    }
}

fn options(shards: usize) -> DdpOptions {
    DdpOptions {
        shards: Some(shards),
        caps: BucketCaps {
            first_bytes: 64,
            bytes: 256,
        },
        sums: 1,
        ..DdpOptions::default()
    }
}

/// One step: uneven micro-batches, some shards without any, and a branch that some shards do not use.
fn step(ddp: &mut Ddp, net: &Net) -> Result<Reduced, DdpError> {
    step_between(ddp, net, || ())
}

/// The same, with something before each shard and after each backward pass.
fn step_between(ddp: &mut Ddp, net: &Net, mut between: impl FnMut()) -> Result<Reduced, DdpError> {
    ddp.step(net, |turn| {
        between();
        let (step, shard) = (turn.step() as usize, turn.shard());
        let count = (step * 5 + shard * 3) % 7;
        let samples: Vec<usize> = (0..count).map(|k| step * 50 + shard * 10 + k).collect();
        let micro: Vec<&[usize]> = samples.chunks(2).collect();
        turn.micro_batches(micro.len());
        for samples in micro {
            let loss = turn.model()?.loss(samples, shard % 3 == 1);
            turn.add(0, samples.len() as f32);
            turn.backward(loss, samples.len() as f32)?;
            between();
        }
        Ok(())
    })
}

/// Runs `world` ranks as threads and returns their results.
fn on_ranks<R: Send>(world: usize, rank: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    let _devices = stand_in::devices();
    let options = GroupOptions {
        timeout: Duration::from_secs(20),
        ..GroupOptions::default()
    };
    let groups = ProcessGroup::local(world, &options).expect("a local group");
    paceline_testing::on_threads(groups, rank)
}

/// All results of four steps on `world` ranks, which are the same on every rank.
fn train(walk: Walk, world: usize, shards: usize) -> Vec<String> {
    let rank = |group: ProcessGroup| {
        let device = Device::flex().autodiff();
        let made = Ddp::with_reducer(
            group,
            Net::new(&device),
            options(shards),
            move |_, setup| walk.reducer(setup),
        );
        let (mut ddp, mut net) = made.expect("ranks agree");
        let mut optimizer = SgdConfig::new().init();
        let mut seen = Vec::new();
        for _ in 0..4 {
            let reduced = step(&mut ddp, &net).expect("a step");
            seen.push(format!(
                "{:?} {:?} {}",
                reduced.unused, reduced.sums, reduced.weight
            ));
            net = optimizer.step(0.1, net, reduced.grads);
        }
        ddp.synchronize().expect("nothing is under way");
        seen.push(weights::sha256(&weights::export(&net)));
        seen
    };
    let mut all = on_ranks(world, rank);
    let first = all.remove(0);
    assert!(
        all.iter().all(|seen| *seen == first),
        "{walk:?}, {world} ranks"
    );
    first
}

#[test]
fn the_order_of_uses_is_learnt_wherever_gradients_are() {
    let run = |walk: Walk| {
        on_ranks(2, |group| {
            let device = Device::flex().autodiff();
            let made = Ddp::with_reducer(group, Net::new(&device), options(2), move |_, setup| {
                walk.reducer(setup)
            });
            let (mut ddp, mut net) = made.expect("ranks agree");
            ddp.uses = Some(Arc::default());
            let mut optimizer = SgdConfig::new().init();
            for at in 0..4 {
                let reduced = ddp.step(&net, |turn| {
                    let loss = turn.model()?.loss(&[at, turn.shard()], true);
                    turn.backward(loss, 2.0)
                });
                let reduced = reduced.unwrap_or_else(|error: DdpError| panic!("{error}"));
                net = optimizer.step(0.1, net, reduced.grads);
            }
            ddp.synchronize().expect("nothing is under way");
            (ddp.order.clone(), weights::sha256(&weights::export(&net)))
        })
    };
    let learnt = run(Walk::Host);
    // Weight and bias of the layer without a use, which is registered last, come first.
    assert_eq!(learnt[0].0[..2], [6, 7]);
    for walk in [Walk::Staged, Walk::Device] {
        assert_eq!(run(walk), learnt, "{walk:?}");
    }
}

/// As the passes of a rank with several stages, or those that compute gradients of weights later: on a device their buckets leave when
/// the shard ends.
#[test]
fn passes_that_reach_some_parameters_each_fill_the_same_buckets() {
    let run = |walk: Walk, world: usize| {
        let rank = |group: ProcessGroup| {
            let device = Device::flex().autodiff();
            let made = Ddp::with_reducer(group, Net::new(&device), options(2), move |_, setup| {
                walk.reducer(setup)
            });
            let (mut ddp, mut net) = made.expect("ranks agree");
            let mut optimizer = SgdConfig::new().init();
            for at in 0..3 {
                let reduced = ddp.step(&net, |turn| {
                    turn.micro_batches(2);
                    for micro_batch in 0..2 {
                        let x = inputs(&[10 * at + micro_batch, turn.shard()], &device);
                        let part = |is_first| BackwardPart {
                            weight: 2.0,
                            is_first,
                            is_last: micro_batch == 1 && walk != Walk::Device,
                            stage: 0,
                            runs_blocks: false,
                            ends_shard: false,
                        };
                        let side = turn.model()?.side.forward(x.clone());
                        let side = side.powf_scalar(2.0).mean();
                        turn.backward_part(part(true), || drop(side.backward()))?;
                        let net = turn.model()?;
                        let rest = net.second.forward(relu(net.first.forward(x)));
                        let rest = rest.powf_scalar(2.0).mean();
                        turn.backward_part(part(false), || drop(rest.backward()))?;
                    }
                    Ok::<_, DdpError>(())
                });
                net = optimizer.step(0.1, net, reduced.expect("a step").grads);
            }
            ddp.synchronize().expect("nothing is under way");
            weights::sha256(&weights::export(&net))
        };
        on_ranks(world, rank)
    };
    let expected = run(Walk::Host, 1).remove(0);
    for world in [1, 2] {
        for walk in [Walk::Host, Walk::Staged, Walk::Device] {
            for hash in run(walk, world) {
                assert_eq!(hash, expected, "{walk:?} on {world} ranks");
            }
        }
    }
}

#[test]
fn gradients_that_are_read_back_or_stay_on_their_device_give_the_bytes_of_those_in_host_memory() {
    for shards in [1, 3, 8] {
        let expected = train(Walk::Host, 1, shards);
        for world in [1, 2, 3, 8].into_iter().filter(|world| *world <= shards) {
            for walk in [Walk::Host, Walk::Staged, Walk::Device] {
                let found = train(walk, world, shards);
                assert_eq!(
                    found, expected,
                    "{walk:?}: {shards} shards on {world} ranks"
                );
            }
        }
    }
}

#[test]
fn halves_on_the_wire_are_near_and_the_same_on_all_ranks_and_ways() {
    let gradient = |walk: Walk, comm_hook: CommHook, world: usize| {
        let run = |group: ProcessGroup| {
            let device = Device::flex().autodiff();
            let options = DdpOptions {
                comm_hook,
                ..options(4)
            };
            let made = Ddp::with_reducer(group, Net::new(&device), options, move |_, setup| {
                walk.reducer(setup)
            });
            let (mut ddp, net) = made.expect("ranks agree");
            let reduced = step(&mut ddp, &net).expect("a step");
            assert_eq!(
                reduced.weight as f32, reduced.sums[0],
                "sums are not rounded"
            );
            let gradient: Tensor<2> = reduced.grads.get(net.first.weight.id).expect("a gradient");
            gradient.into_data().try_to_vec::<f32>().expect("f32")
        };
        let all = on_ranks(world, run);
        assert!(
            all.iter().all(|found| *found == all[0]),
            "{walk:?}, {world} ranks"
        );
        all[0].clone()
    };
    for world in [1, 2, 4] {
        let whole = gradient(Walk::Host, CommHook::None, world);
        let largest = whole
            .iter()
            .fold(0.0f32, |most, value| most.max(value.abs()));
        // Two roundings to 8 and 11 digits each.
        for (hook, digits) in [
            (CommHook::Bf16Compress, 128.0),
            (CommHook::Fp16Compress, 1024.0),
        ] {
            let half = gradient(Walk::Host, hook, world);
            assert_ne!(whole, half);
            for (whole, half) in whole.iter().zip(&half) {
                assert!((whole - half).abs() <= largest / digits, "{whole} {half}");
            }
            assert_eq!(gradient(Walk::Staged, hook, world), half);
        }
    }
}

#[test]
fn one_shard_and_one_micro_batch_are_passed_on_untouched() {
    let gradients = |walk: Walk| {
        let device = Device::flex().autodiff();
        let group = ProcessGroup::local(1, &GroupOptions::default())
            .expect("a group")
            .remove(0);
        let made = Ddp::with_reducer(group, Net::new(&device), options(1), move |_, setup| {
            walk.reducer(setup)
        });
        let (mut ddp, net) = made.expect("ranks agree");
        let reduced = ddp.step(&net, |turn| {
            let loss = turn.model()?.loss(&[1, 2, 3], true);
            turn.backward(loss, 3.0)
        });
        let grads = reduced
            .unwrap_or_else(|error: DdpError| panic!("{error}"))
            .grads;
        let gradient: Tensor<2> = grads.get(net.first.weight.id).expect("a gradient");
        gradient.into_data()
    };
    let net = Net::new(&Device::flex().autodiff());
    let plain = net.loss(&[1, 2, 3], true).backward();
    let plain = net
        .first
        .weight
        .val()
        .grad(&plain)
        .expect("a gradient")
        .into_data();
    for walk in [Walk::Host, Walk::Staged, Walk::Device] {
        assert_eq!(gradients(walk), plain, "{walk:?}");
    }
}

#[test]
fn a_device_that_fails_is_named_by_its_rank_and_told_to_the_others_at_once() {
    let errors = on_ranks(2, |group| {
        let device = Device::flex().autodiff();
        let rank = group.rank();
        let made = Ddp::with_reducer(group, Net::new(&device), options(2), move |_, setup| {
            let failing = Failing {
                device: Device::flex(),
                from: if rank == 1 { 2 } else { usize::MAX },
                group: stand_in::group(&setup, rank, Reduction::Tree)?,
            };
            Ok(Arc::new(DeviceReducer::new(setup, Arc::new(failing))))
        });
        let (mut ddp, net) = made.expect("ranks agree");
        let failed = ddp.step(&net, |turn| {
            let loss = turn.model()?.loss(&[1, 2, 3], true);
            turn.backward(loss, 3.0)
        });
        let error = failed.err().expect("one rank has failed");
        (error.to_string(), error.culprit())
    });
    assert_eq!(errors[1].0, "device: it has fallen off the bus");
    assert_eq!(errors[0].1, Some(1), "{}", errors[0].0);
    assert!(
        errors[0].0.contains("fallen off the bus"),
        "{}",
        errors[0].0
    );
}
