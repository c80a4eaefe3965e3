//! Groups that lose ranks at every operation of a step, with ranks that are threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};
use paceline_collective::{Error, GroupOptions, OpKind, Operation, ProcessGroup, Transport, Tree};
use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::store::{Server, ServerOptions};
use paceline_rendezvous::token::Token;
use paceline_testing::Meeting;

use super::faults::{self, Fault};
use super::*;
use crate::ddp::{Ddp, DdpOptions, Reduction};
use crate::error::DdpError;
use crate::plan::BucketCaps;
use crate::reducer::tests::stand_in;
use crate::reducer::{DeviceReducer, HostReducer, InDouble, Reducer, Setup, StagedReducer};
use crate::sampler::permutation;
use crate::scaler::GradScaler;
use crate::weights;

const SHARDS: usize = 8;
const WORLD: usize = 4;
const STEPS: u64 = 3;
/// Gradient buckets of [`Net`], and the tail.
const BUCKETS: usize = 5;

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    norm: BatchNorm,
    second: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let net = Self {
            first: LinearConfig::new(5, 16).init(device),
            norm: BatchNormConfig::new(16).init(device),
            second: LinearConfig::new(16, 3).init(device),
        };
        let tensors = weights::export(&net).into_iter().enumerate();
        let fixed = tensors.filter(|(_, (path, _))| !path.contains("running"));
        let fixed = fixed.map(|(at, (path, data))| {
            let values = (0..data.num_elements()).map(|i| wave(at * 100 + i));
            let values: Vec<f32> = values.collect();
            (path, TensorData::new(values, data.shape().clone()))
        });
        let fixed = fixed.collect();
        weights::import(net, fixed)
    }

    fn loss(&self, step: u64, shard: usize, device: &Device) -> Tensor<1> {
        let samples = 2 + (step as usize + shard) % 3;
        let values = (0..samples * 5).map(|i| wave(step as usize * 1000 + shard * 100 + i));
        let values: Vec<f32> = values.collect();
        let x = Tensor::<2>::from_data(TensorData::new(values, [samples, 5]), device);
        let hidden = relu(self.norm.forward(self.first.forward(x)));
        let y = self.second.forward(hidden);
        y.powf_scalar(2.0).mean()
    }
}

/// A number that needs all its digits.
fn wave(at: usize) -> f32 {
    ((at * 7919 % 1009) as f32 / 1009.0 - 0.5) * 0.3
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wire {
    Local,
    Tcp,
    /// Local, with the gradients on devices of NCCL's stand-in.
    Nccl,
    /// Local, with gradients that another thread reads from their device.
    Staged,
    /// Local, with sums in f64.
    Double,
}

impl Wire {
    fn reducer(self, setup: Setup, id: usize, dies: bool) -> Result<Arc<dyn Reducer>, DdpError> {
        let device = Device::flex();
        Ok(match self {
            Self::Nccl => {
                let group = stand_in::group(&setup, id, Reduction::Tree)?;
                Arc::new(DeviceReducer::new(setup, Arc::new(group)))
            }
            Self::Double => {
                let sums = InDouble::new(&setup, &device);
                Arc::new(DeviceReducer::new(setup, Arc::new(sums)))
            }
            // Only the thread that computes has faults before a bucket.
            Self::Staged if !dies => Arc::new(StagedReducer::new(setup)?),
            _ => Arc::new(HostReducer::new(setup)),
        })
    }
}

/// Decides which ranks are in the next generation, as the job's launcher does.
struct Launcher {
    wire: Wire,
    /// Is not in the second generation.
    given_up: Option<usize>,
    /// Invites the ranks in this step to admit others, of whom none comes.
    invites: Option<u64>,
    /// Whether ranks agree on something between a step and an admission.
    evaluates: bool,
    all_are_ready: Meeting,
    token: Token,
    server: Server,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// By their numbers in the first generation.
    alive: Vec<usize>,
    /// Waits for the next generation.
    waiting: Vec<usize>,
    generation: u64,
    /// The next group of each rank.
    seats: Vec<(usize, Seat)>,
}

enum Seat {
    Group(ProcessGroup),
    Env(Box<WorkerEnv>),
}

impl Launcher {
    fn new(wire: Wire, given_up: Option<usize>) -> Self {
        let token = Token::generate().expect("random numbers");
        let addr = "127.0.0.1:0".parse().expect("an address");
        let server = Server::bind_with(addr, &token, ServerOptions::default());
        Self {
            wire,
            given_up,
            invites: None,
            evaluates: true,
            all_are_ready: Meeting::new(WORLD),
            token,
            server: server.expect("a free port"),
            state: Mutex::new(State {
                alive: (0..WORLD).collect(),
                waiting: Vec::new(),
                generation: 0,
                seats: Vec::new(),
            }),
            changed: Condvar::new(),
        }
    }

    fn options(&self) -> GroupOptions {
        GroupOptions {
            timeout: Duration::from_secs(30),
            transport: match self.wire {
                Wire::Tcp => Transport::Tcp,
                _ => Transport::Auto,
            },
            ..GroupOptions::default()
        }
    }

    /// Groups of all ranks that are alive and wait.
    fn form(&self, state: &mut State) {
        state.generation += 1;
        let members = state.alive.clone();
        let world = members.len();
        state.seats = match self.wire {
            Wire::Local | Wire::Nccl | Wire::Staged | Wire::Double => {
                let groups = ProcessGroup::local(world, &self.options()).expect("a local group");
                members
                    .into_iter()
                    .zip(groups.into_iter().map(Seat::Group))
                    .collect()
            }
            Wire::Tcp => {
                let env = |rank| WorkerEnv {
                    rank,
                    world,
                    local_rank: rank,
                    local_world: world,
                    master_addr: self.server.addr().ip().to_string(),
                    master_port: self.server.addr().port(),
                    store: Some(self.server.addr().to_string()),
                    token: self.token.clone(),
                    token_is_secret: true,
                    run_id: format!("generation-{}", state.generation),
                    ..WorkerEnv::alone()
                };
                let envs = members.into_iter().enumerate();
                envs.map(|(rank, id)| (id, Seat::Env(Box::new(env(rank)))))
                    .collect()
            }
        };
        state.waiting.clear();
        self.changed.notify_all();
    }

    /// Waits until all ranks that are alive do.
    fn next(&self, id: usize) -> Result<ProcessGroup, Error> {
        let fenced = || Error::Fenced {
            rank: id,
            generation: 0,
        };
        let mut state = self.state.lock().expect("no holder panics");
        if state.generation > 0 && self.given_up == Some(id) {
            return Err(fenced());
        }
        state.waiting.push(id);
        let seat = loop {
            if let Some(at) = state.seats.iter().position(|(other, _)| *other == id) {
                break state.seats.swap_remove(at).1;
            }
            if state.alive.iter().all(|id| state.waiting.contains(id)) {
                self.form(&mut state);
                continue;
            }
            let limit = Duration::from_secs(60);
            let waited = self.changed.wait_timeout(state, limit);
            let (now, waited) = waited.expect("no holder panics");
            state = now;
            assert!(
                !waited.timed_out(),
                "rank {id} waits, alive {:?}",
                state.alive
            );
        };
        drop(state);
        match seat {
            Seat::Group(group) => Ok(group),
            Seat::Env(env) => ProcessGroup::connect(*env, &self.options()),
        }
    }

    /// The rank will not come any more.
    fn lost(&self, id: usize) {
        let mut state = self.state.lock().expect("no holder panics");
        state.alive.retain(|other| *other != id);
        self.changed.notify_all();
    }
}

/// What one rank of a test does wrong.
#[derive(Clone, Copy, Debug)]
struct Plan {
    rank: usize,
    fault: Fault,
}

/// A rank to its end: its hash if it survives, and how many shards it has computed.
struct Outcome {
    hash: Option<String>,
    shards: usize,
}

fn train(launcher: &Arc<Launcher>, id: usize, plans: &[Plan]) -> Outcome {
    let fault = plans.iter().find(|plan| plan.rank == id);
    let group = launcher.next(id).expect("the first generation");
    faults::plan(fault.map(|plan| plan.fault));
    faults::invite(launcher.invites);
    let device = Device::flex().autodiff();
    let options = DdpOptions {
        shards: Some(SHARDS),
        caps: BucketCaps {
            first_bytes: 64,
            bytes: 256,
        },
        seed: 5,
        sums: 1,
        clip_norm: Some(1.0),
        scaler: Some(GradScaler::default()),
        recovery: Recovery::Live,
        ..DdpOptions::default()
    };
    let shards = AtomicUsize::new(0);
    let run = || -> Result<String, DdpError> {
        let mut optimizer = AdamWConfig::new().init();
        let (wire, net) = (launcher.wire, Net::new(&device));
        let dies = fault.is_some_and(|plan| matches!(plan.fault, Fault::Dies { .. }));
        let (mut ddp, mut net) = match wire {
            Wire::Local | Wire::Tcp => Ddp::new(group, net, options)?,
            _ => Ddp::with_reducer(group, net, options, move |_, setup| {
                wire.reducer(setup, id, dies)
            })?,
        };
        assert_eq!(ddp.bucket_count() + 1, BUCKETS);
        // A loss before the first step ends the job.
        launcher.all_are_ready.wait();
        let evaluates = launcher.evaluates;
        let launcher = launcher.clone();
        ddp.successor = Some(Box::new(move |_| launcher.next(id)));
        for step in 0..STEPS {
            let reduced = ddp.step(&net, |shard| {
                shards.fetch_add(1, Ordering::Relaxed);
                let loss = shard.model()?.loss(shard.step(), shard.shard(), &device);
                shard.add(0, 1.0);
                shard.backward(loss, 1.0 + (shard.shard() % 3) as f32)
            })?;
            assert_eq!(reduced.sums, [SHARDS as f32], "step {step}");
            net = optimizer.step(0.01, net, reduced.grads);
            if evaluates {
                let sums = ddp.with_recovery(|ddp| {
                    let own: Vec<u8> = ddp.shards().map(|shard| shard as u8).collect();
                    Ok::<_, DdpError>(ddp.group().all_gather_bytes(&own)?.concat())
                })?;
                assert_eq!(sums, (0..SHARDS as u8).collect::<Vec<_>>());
            }
            faults::in_recovery(Fault::DiesAdmitting { step }, ddp.group());
            ddp.admit(&net, |_, _| Ok::<_, DdpError>(()))?;
        }
        ddp.sha256(&net)
    };
    let hash = run().inspect_err(|error| println!("rank {id} ends: {error}"));
    launcher.lost(id);
    Outcome {
        hash: hash.ok(),
        shards: shards.into_inner(),
    }
}

/// Trains with these faults. Ranks in `given_up` are not in the second generation, whatever they do.
fn outcomes(wire: Wire, plans: &[Plan], given_up: Option<usize>) -> Vec<Outcome> {
    outcomes_under(Launcher::new(wire, given_up), plans)
}

fn outcomes_under(launcher: Launcher, plans: &[Plan]) -> Vec<Outcome> {
    let launcher = Arc::new(launcher);
    paceline_testing::on_threads(0..WORLD, |id| train(&launcher, id, plans))
}

/// The weights' hash without faults, on all ranks.
fn undisturbed(wire: Wire) -> String {
    let mut all = outcomes(wire, &[], None);
    let hashes = all.iter_mut().map(|outcome| outcome.hash.take());
    let hashes: Vec<String> = hashes.map(|hash| hash.expect("nothing fails")).collect();
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:?}");
    hashes[0].clone()
}

#[track_caller]
fn assert_survivors(outcomes: &[Outcome], lost: &[usize], hash: &str, case: &str) {
    for (id, outcome) in outcomes.iter().enumerate() {
        let expected = (!lost.contains(&id)).then_some(hash);
        assert_eq!(outcome.hash.as_deref(), expected, "rank {id}, {case}");
    }
}

#[test]
fn survivors_end_with_the_same_bits_wherever_a_rank_dies() {
    let hash = undisturbed(Wire::Local);
    for wire in [Wire::Local, Wire::Tcp] {
        for rank in 0..WORLD {
            for (step, bucket) in (0..STEPS).flat_map(|s| (0..BUCKETS).map(move |b| (s, b))) {
                let fault = Fault::Dies { step, bucket };
                let outcomes = outcomes(wire, &[Plan { rank, fault }], None);
                assert_survivors(&outcomes, &[rank], &hash, &format!("{wire:?} {fault:?}"));
            }
        }
    }
}

#[test]
fn a_rank_that_lacks_the_tail_of_a_step_borrows_it_or_all_repeat_the_step() {
    let hash = undisturbed(Wire::Local);
    let shards_of = |world, rank| {
        let tree = Tree::split(SHARDS, world).expect("enough shards");
        tree.range(rank).len()
    };
    for wire in [Wire::Local, Wire::Tcp] {
        for (rank, culprit) in [(0, 3), (3, 0), (1, 2)] {
            for step in 0..STEPS {
                let fault = Fault::LosesTail { step, culprit };
                let outcomes = outcomes(wire, &[Plan { rank, fault }], Some(culprit));
                let case = format!("{wire:?} {rank} {fault:?}");
                assert_survivors(&outcomes, &[culprit], &hash, &case);
                if wire == Wire::Local {
                    // The others have returned from the step, so it runs once.
                    let done = step as usize + 1;
                    let after = shards_of(WORLD - 1, rank - usize::from(culprit < rank));
                    let expected = done * shards_of(WORLD, rank) + (STEPS as usize - done) * after;
                    assert_eq!(outcomes[rank].shards, expected, "{case}");
                }
            }
        }
    }
}

#[test]
fn an_invitation_is_over_on_all_ranks_once_one_is_lost() {
    let hash = undisturbed(Wire::Local);
    let launcher = |wire, given_up, evaluates| Launcher {
        invites: Some(1),
        evaluates,
        ..Launcher::new(wire, given_up)
    };
    for (wire, evaluates) in [Wire::Local, Wire::Tcp]
        .into_iter()
        .flat_map(|wire| [(wire, true), (wire, false)])
    {
        let case = format!("{wire:?}, evaluates: {evaluates}");
        let outcomes = outcomes_under(launcher(wire, None, evaluates), &[]);
        assert_survivors(&outcomes, &[], &hash, &case);
        for (rank, lost) in [(0, 3), (3, 0), (1, 2)] {
            // The others have the step's result, and with it the invitation; the rank borrows it.
            let culprit = lost;
            let fault = Fault::LosesTail { step: 1, culprit };
            let plans = [Plan { rank, fault }];
            let outcomes = outcomes_under(launcher(wire, Some(lost), evaluates), &plans);
            assert_survivors(
                &outcomes,
                &[lost],
                &hash,
                &format!("{rank} {fault:?}, {case}"),
            );

            let fault = Fault::DiesAdmitting { step: 1 };
            let plans = [Plan { rank: lost, fault }];
            let outcomes = outcomes_under(launcher(wire, None, evaluates), &plans);
            assert_survivors(&outcomes, &[lost], &hash, &format!("{fault:?}, {case}"));
        }
    }
}

#[test]
fn a_second_rank_may_be_lost_while_the_next_generation_forms() {
    let hash = undisturbed(Wire::Local);
    for wire in [Wire::Local, Wire::Tcp] {
        for (first, second) in [(0, 1), (3, 0), (2, 3)] {
            let fault = Fault::Dies { step: 1, bucket: 1 };
            let first_dies = Plan { rank: first, fault };
            for fault in [Fault::DiesSettling, fault] {
                let second_dies = Plan {
                    rank: second,
                    fault,
                };
                let outcomes = outcomes(wire, &[first_dies, second_dies], None);
                let case = format!("{wire:?} {first} {second} {fault:?}");
                assert_survivors(&outcomes, &[first, second], &hash, &case);
            }
        }
    }
}

#[test]
fn gradients_that_are_not_in_ordinary_memory_survive_too() {
    let _devices = stand_in::devices();
    let places = (0..STEPS).flat_map(|s| (0..BUCKETS).map(move |b| (s, b)));
    let places: Vec<(u64, usize)> = places.collect();
    for wire in [Wire::Nccl, Wire::Staged, Wire::Double] {
        let hash = undisturbed(wire);
        for (turn, (step, bucket)) in places.iter().copied().enumerate() {
            let rank = turn % WORLD;
            let fault = Fault::Dies { step, bucket };
            let outcomes = outcomes(wire, &[Plan { rank, fault }], None);
            assert_survivors(&outcomes, &[rank], &hash, &format!("{wire:?} {fault:?}"));
        }
        for (rank, culprit) in [(0, 3), (3, 0), (1, 2)] {
            // The thread that reads gradients does not tell this one the step.
            let step = u64::from(wire != Wire::Staged);
            let fault = Fault::LosesTail { step, culprit };
            let outcomes = outcomes(wire, &[Plan { rank, fault }], Some(culprit));
            let case = format!("{wire:?} {rank} {fault:?}");
            assert_survivors(&outcomes, &[culprit], &hash, &case);
        }
        for second in [Fault::DiesSettling, Fault::DiesDealing] {
            let first = Fault::Dies { step: 1, bucket: 1 };
            let plans = [(2, first), (3, second)];
            let plans = plans.map(|(rank, fault)| Plan { rank, fault });
            let outcomes = outcomes(wire, &plans, None);
            assert_survivors(&outcomes, &[2, 3], &hash, &format!("{wire:?} {second:?}"));
        }
    }
}

#[test]
fn any_ranks_may_be_lost_anywhere() {
    let hash = undisturbed(Wire::Local);
    // The places where a rank dies; the last bucket stands for a death during its first recovery.
    let places = BUCKETS + 1;
    for seed in 0..150 {
        let wire = [Wire::Local, Wire::Tcp][seed as usize % 2];
        let ranks = permutation(WORLD, seed).into_iter();
        let draws = permutation(STEPS as usize * places, seed).into_iter();
        let plans = ranks.zip(draws).map(|(rank, at)| Plan {
            rank,
            fault: match (at as u64 / places as u64, at % places) {
                (_, BUCKETS) => Fault::DiesSettling,
                (step, bucket) => Fault::Dies { step, bucket },
            },
        });
        let plans: Vec<Plan> = plans.take(1 + seed as usize % (WORLD - 1)).collect();
        let outcomes = outcomes(wire, &plans, None);
        let is_lost = |rank: &usize| outcomes[*rank].hash.is_none();
        let lost: Vec<usize> = (0..WORLD).filter(is_lost).collect();
        // A rank that would die in an operation of a group that another one has just ended takes part in the next one.
        let may_die = |rank: &usize| plans.iter().any(|plan| plan.rank == *rank);
        assert!(lost.iter().all(may_die), "seed {seed}, {plans:?}: {lost:?}");
        let dies = |plan: &Plan| matches!(plan.fault, Fault::Dies { .. });
        assert_eq!(!lost.is_empty(), plans.iter().any(dies), "seed {seed}");
        assert_survivors(&outcomes, &lost, &hash, &format!("seed {seed}, {plans:?}"));
    }
}

#[test]
fn the_last_rank_goes_on_alone() {
    let hash = undisturbed(Wire::Local);
    let plans = [0, 1, 3].map(|rank| Plan {
        rank,
        fault: Fault::Dies {
            step: rank as u64 % 2,
            bucket: 2,
        },
    });
    let outcomes = outcomes(Wire::Local, &plans, None);
    assert_survivors(&outcomes, &[0, 1, 3], &hash, "three are lost");
    assert!(outcomes[2].shards >= 2 + 2 * SHARDS);
}

#[test]
fn a_step_that_has_to_be_repeated_ends_before_its_next_pass() {
    let groups = ProcessGroup::local(2, &GroupOptions::default()).expect("a local group");
    let both_are_ready = Meeting::new(2);
    let computed = paceline_testing::on_threads(groups, |group| {
        let device = Device::flex().autodiff();
        let options = DdpOptions {
            shards: Some(SHARDS),
            recovery: Recovery::Live,
            ..DdpOptions::default()
        };
        let (mut ddp, net) = Ddp::new(group.clone(), Net::new(&device), options).expect("alike");
        both_are_ready.wait();
        let mut computed = 0;
        let stepped = ddp.step(&net, |shard| {
            if group.rank() == 1 {
                group.abort("it dies");
            }
            let limit = Instant::now() + Duration::from_secs(60);
            while group.health().is_ok() && Instant::now() < limit {
                std::thread::sleep(Duration::from_millis(1));
            }
            let loss = shard.model()?.loss(0, shard.shard(), &device);
            shard.backward(loss, 1.0)?;
            computed += 1;
            Ok::<_, DdpError>(())
        });
        (stepped.is_ok(), computed)
    });
    assert_eq!(computed, [(true, SHARDS), (false, 0)]);
}

#[test]
fn a_cut_connection_is_a_loss_and_nonsense_is_none() {
    let during = Operation {
        kind: OpKind::AllReduce,
        seq: 7,
        bucket: None,
    };
    let cut = Error::Disconnected {
        rank: 1,
        place: "host b, pid 7".into(),
        during,
    };
    let nonsense = Error::Wire {
        peer: 1,
        during: Some(during),
        reason: "a frame begins with [aa]".into(),
    };
    assert!(cut.is_loss() && !nonsense.is_loss());
}

#[test]
fn what_cannot_recover_says_so() {
    let device = Device::flex().autodiff();
    let group = || ProcessGroup::local(1, &GroupOptions::default());
    let options = DdpOptions {
        recovery: Recovery::Live,
        comm_hook: crate::CommHook::Bf16Compress,
        ..DdpOptions::default()
    };
    let group = group().expect("a local group").remove(0);
    let refused = Ddp::new(group, Net::new(&device), options).err();
    let refused = refused.expect("a lossy hook does not recover").to_string();
    assert!(
        refused.starts_with("live recovery does not work with a communication hook"),
        "{refused}"
    );
}
