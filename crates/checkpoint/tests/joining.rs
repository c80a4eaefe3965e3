//! Ranks are lost and replaced: the new ones get model, optimizer, schedule, position and the program's value from the memory of the
//! others, and all end with the weights of an undisturbed run. Ranks are threads, with the page and the store of a launcher.

mod support;

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::optim::AdamWConfig;
use burn::tensor::Device;
use paceline_checkpoint::{Checkpoint, Checkpoints, ledger};
use paceline_collective::{GroupOptions, ProcessGroup, Transport};
use paceline_ddp::sampler::BatchOptions;
use paceline_ddp::{Ddp, DdpError, DdpOptions, Give, Recovery};
use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::page::JobPage;
use paceline_rendezvous::store::Server;
use paceline_rendezvous::token::Token;
use paceline_testing::wait_until;
use support::Net;
use tempfile::tempdir;

const WORLD: usize = 4;
const LIMIT: Duration = Duration::from_secs(60);
/// From this step on the ranks wait until those that were lost are replaced.
const FULL_FROM: u64 = 8;

/// A rank's process ends.
#[derive(Clone, Copy, Debug)]
struct Death {
    slot: usize,
    /// Which process in that slot.
    replacement: u32,
    /// After so many steps.
    after: u64,
}

struct Job<'a> {
    page: JobPage,
    server: Server,
    token: Token,
    transport: Transport,
    folder: &'a Path,
    deaths: &'a [Death],
}

/// The weights' hash and the sum of all losses.
type End = (String, f64);

/// A slot, and how its process ended if it did not die.
type Ended = (usize, Option<End>);

impl Job<'_> {
    fn env(&self, slot: usize, replacement: u32) -> WorkerEnv {
        WorkerEnv {
            rank: slot,
            world: WORLD,
            local_rank: slot,
            local_world: WORLD,
            store: Some(self.server.addr().to_string()),
            token: self.token.clone(),
            token_is_secret: true,
            page_fd: self.page.raw_fd(),
            replacement,
            ..WorkerEnv::alone()
        }
    }

    /// A program without a word about recovery but its option and `admit`. `None` if it dies.
    fn rank(&self, slot: usize, replacement: u32) -> Option<End> {
        let options = GroupOptions {
            timeout: LIMIT,
            transport: self.transport,
            arena_bytes: Some(4 << 20),
            ..GroupOptions::default()
        };
        let death = self.deaths.iter();
        let death = death.filter(|death| (death.slot, death.replacement) == (slot, replacement));
        let death = death.map(|death| death.after).next();
        let group = ProcessGroup::connect(self.env(slot, replacement), &options).expect("a group");
        let device = Device::flex().autodiff();
        // A replacement's own weights count for nothing.
        let net = Net::new(&device, 1.0 + replacement as f32);
        let options = DdpOptions {
            shards: Some(8),
            seed: 3,
            recovery: Recovery::Live,
            ..DdpOptions::default()
        };
        let (mut ddp, mut net) = Ddp::new(group, net, options).expect("the ranks agree");
        let mut optimizer = AdamWConfig::new().init();
        let schedule = LinearLrSchedulerConfig::new(0.05, 0.001, 40).init();
        let mut schedule = schedule.expect("a valid schedule");
        let mut batches = ddp
            .batches(64, BatchOptions::new(16).epochs(6))
            .expect("steps");
        let mut losses = 0.0;
        let mut checkpoints = Checkpoints::open(self.folder, ddp.group()).expect("a folder");
        if let Some(mut saved) = checkpoints.resume(&mut ddp).expect("readable") {
            assert_eq!(saved.step(), ddp.next_step());
            (net, optimizer) = saved.restore(&mut ddp, net, optimizer).expect("it fits");
            batches
                .load_state_dict(saved.sampler().expect("a position"))
                .expect("the same data");
            schedule = saved.schedule(schedule).expect("a schedule");
            losses = saved.value().expect("a number");
        }
        assert_eq!(ddp.has_joined(), replacement > 0);
        for plan in batches {
            let step = ddp.next_step();
            if death == Some(step) {
                return None;
            }
            let began = Instant::now();
            let is_short = |ddp: &Ddp| step >= FULL_FROM && ddp.group().world() < WORLD;
            while is_short(&ddp) && !ddp.group().is_invited() && ddp.group().health().is_ok() {
                assert!(began.elapsed() < LIMIT, "slot {slot} waits at step {step}");
                std::thread::yield_now();
            }
            let reduced = ddp.step_on(&net, &plan, Net::loss).expect("a step");
            net = optimizer.step(schedule.step(), net, reduced.grads);
            losses += reduced.loss;
            checkpoints.record(&ddp, &plan).expect("recorded");
            let state = || {
                Checkpoint::new(&net, &optimizer)
                    .sampler(&plan.after)
                    .schedule(&schedule)
                    .value(&losses)
            };
            checkpoints.admit(&mut ddp, &net, state).expect("admitted");
        }
        checkpoints.finish().expect("written");
        Some((ddp.sha256(&net).expect("whole"), losses))
    }

    /// What a launcher does, with all restarts that it needs.
    fn launch<'s, 'e>(
        &'s self,
        scope: &'s std::thread::Scope<'s, 'e>,
        (ended, ends): (Sender<Ended>, Receiver<Ended>),
    ) -> Vec<End> {
        let start = |slot: usize, replacement: u32| {
            let ended = ended.clone();
            scope.spawn(move || {
                let end = self.rank(slot, replacement);
                ended.send((slot, end)).expect("the launcher waits");
            });
        };
        (0..WORLD).for_each(|slot| start(slot, 0));
        let page = &self.page;
        let (mut members, mut invited): (Vec<usize>, Vec<usize>) = ((0..WORLD).collect(), vec![]);
        let (mut waiting, mut started, mut done) = (Vec::new(), 0, Vec::new());
        while done.len() < WORLD {
            let ended = ends.recv_timeout(Duration::from_millis(1));
            // After a death, because the dead one may have been in the generation that has begun.
            if page.begun_generation() == page.newest_generation() {
                members.append(&mut invited);
            }
            match ended {
                Ok((_, Some(end))) => done.push(end),
                Ok((slot, None)) => {
                    page.end_generation(page.newest_generation(), slot);
                    members.retain(|member| *member != slot);
                    let is_new = |member: &mut usize| page.slot(*member).is_ready_to_join();
                    waiting.extend(members.extract_if(.., is_new));
                    waiting.append(&mut invited);
                    page.publish_generation(&members);
                    page.clear_slot(slot);
                    started += 1;
                    start(slot, started);
                    waiting.push(slot);
                }
                Err(_) => {}
            }
            let is_ready = |slot: &mut usize| page.slot(*slot).is_ready_to_join();
            if invited.is_empty() && done.is_empty() {
                invited.extend(waiting.extract_if(.., is_ready));
                if !invited.is_empty() {
                    page.invite_generation(&[&members[..], &invited].concat());
                }
            }
        }
        done
    }
}

/// What all ranks end with.
fn train(transport: Transport, deaths: &[Death]) -> End {
    let folder = tempdir().expect("a folder");
    train_in(folder.path(), transport, deaths)
}

fn train_in(folder: &Path, transport: Transport, deaths: &[Death]) -> End {
    let token = Token::generate().expect("random numbers");
    let addr = "127.0.0.1:0".parse().expect("an address");
    let page = JobPage::create_memfd(WORLD).expect("a page");
    page.set_recovers();
    let job = Job {
        page,
        server: Server::bind(addr, &token).expect("a free port"),
        token,
        transport,
        folder,
        deaths,
    };
    let ends = std::thread::scope(|scope| job.launch(scope, channel()));
    assert!(
        ends.iter().all(|end| *end == ends[0]),
        "{deaths:?} {ends:?}"
    );
    ends[0].clone()
}

fn death(slot: usize, replacement: u32, after: u64) -> Death {
    Death {
        slot,
        replacement,
        after,
    }
}

#[test]
fn replaced_ranks_end_with_the_same_bits() {
    let whole = train(Transport::Tcp, &[]);
    for transport in [Transport::Shm, Transport::Tcp] {
        for deaths in [
            // Any rank, rank 0 too; two at once; one after the other.
            &[death(2, 0, 5)][..],
            &[death(0, 0, 5)],
            &[death(1, 0, 5), death(3, 0, 5)],
            &[
                death(0, 0, 2),
                death(1, 0, 6),
                death(2, 0, 12),
                death(3, 0, 16),
            ],
            // A replacement, soon after it has joined.
            &[death(3, 0, 4), death(3, 1, 10)],
            // The last one.
            &[death(0, 0, 4), death(1, 0, 4), death(2, 0, 4)],
        ] {
            assert_eq!(train(transport, deaths), whole, "{transport:?} {deaths:?}");
        }
    }
}

#[test]
fn the_ledger_calls_ranks_by_the_numbers_that_they_were_started_with() {
    let folder = tempdir().expect("a folder");
    train_in(folder.path(), Transport::Tcp, &[death(1, 0, 5)]);
    let audit = ledger::audit(folder.path()).expect("a ledger");
    assert_eq!(audit.faults, []);
    let owners = audit.attempts.iter().map(|attempt| {
        let owners = attempt.begin.owners.iter();
        owners.map(|(rank, _)| *rank).collect::<Vec<_>>()
    });
    let owners: Vec<_> = owners.collect();
    assert_eq!(owners, [vec![0, 1, 2, 3], vec![0, 2, 3], vec![0, 2, 3, 1]]);
}

#[test]
fn a_replacement_with_other_settings_is_refused_and_the_others_go_on() {
    let token = Token::generate().expect("random numbers");
    let addr = "127.0.0.1:0".parse().expect("an address");
    let server = Server::bind(addr, &token).expect("a free port");
    let page = JobPage::create_memfd(2).expect("a page");
    page.set_recovers();
    let new = |rank: usize, replacement: u32, seed: u64| {
        let env = WorkerEnv {
            rank,
            world: 2,
            local_rank: rank,
            local_world: 2,
            store: Some(server.addr().to_string()),
            token: token.clone(),
            token_is_secret: true,
            page_fd: page.raw_fd(),
            replacement,
            ..WorkerEnv::alone()
        };
        let group = ProcessGroup::connect(env, &GroupOptions::default()).expect("a group");
        let options = DdpOptions {
            seed,
            recovery: Recovery::Live,
            ..DdpOptions::default()
        };
        Ddp::new(group, Net::new(&Device::flex().autodiff(), 1.0), options)
    };
    let (lost, all_are_ready) = (channel::<()>(), channel::<()>());
    std::thread::scope(|scope| {
        let stays = scope.spawn(|| {
            let (mut ddp, net) = new(0, 0, 1).expect("the ranks agree");
            let step = |ddp: &mut Ddp, net: &Net| {
                let run = |shard: &mut paceline_ddp::ShardStep<'_, Net>| {
                    let loss = shard.model()?.loss(&[shard.shard(), 9]);
                    shard.backward(loss, 2.0)
                };
                ddp.step::<_, DdpError>(net, run).expect("a step");
                let give = |_: &Ddp, give: &mut Give<'_>| give(b"state");
                ddp.admit(net, give).expect("admitted");
            };
            step(&mut ddp, &net);
            all_are_ready.0.send(()).expect("the test waits");
            let began = Instant::now();
            // Alone, with the replacement, and alone again.
            while ddp.group().generation() < 3 && began.elapsed() < LIMIT {
                step(&mut ddp, &net);
            }
            (ddp.group().generation(), ddp.group().world())
        });
        let leaves = scope.spawn(|| {
            let (mut ddp, net) = new(1, 0, 1).expect("the ranks agree");
            let run = |shard: &mut paceline_ddp::ShardStep<'_, Net>| {
                let loss = shard.model()?.loss(&[shard.shard(), 9]);
                shard.backward(loss, 2.0)
            };
            ddp.step::<_, DdpError>(&net, run).expect("a step");
            drop(ddp);
            lost.0.send(()).expect("the test waits");
        });
        all_are_ready.1.recv().expect("a step");
        lost.1.recv().expect("it leaves");
        leaves.join().expect("it has left");
        page.end_generation(0, 1);
        page.publish_generation(&[0]);
        page.clear_slot(1);
        let replaces = scope.spawn(|| new(1, 1, 2).err().expect("another seed").to_string());
        wait_until("the replacement is ready", || {
            page.slot(1).is_ready_to_join()
        });
        page.invite_generation(&[0, 1]);
        let why = replaces.join().expect("no panic");
        assert_eq!(
            why,
            "ranks do not agree on setting seed: rank 0 has 1, rank 1 has 2"
        );
        page.end_generation(2, 1);
        page.publish_generation(&[0]);
        assert_eq!(stays.join().expect("it goes on"), (3, 1));
    });
}
