//! Ranks as processes, killed and stopped. Each test starts its own binary again for every rank, running the same test,
//! which then plays that rank's part.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use paceline_collective::{DeviceMesh, GroupOptions, ProcessGroup, ReduceOp};
use paceline_fake_cuda::Library;
use paceline_rendezvous::env::{WorkerEnv, worker_vars};
use paceline_rendezvous::store::{Server, ServerOptions};
use paceline_rendezvous::token::Token;
use rustix::process::{Pid, Signal, kill_process};

use super::{Bench, buffer};
use crate::{
    Before, CUDA_VARIABLE, Communicator, Float, Label, NCCL_VARIABLE, NcclOptions, Probe, Ticket,
};

/// How long a test waits for anything before it fails.
const PATIENCE: Duration = Duration::from_secs(60);
/// Set in the processes that play a rank: which device each has.
const ROLE: &str = "PACELINE_TEST_ROLE";
/// Lines that are meant for the test.
const MARK: &str = "@@ ";

/// Processes of one job; killed when the test ends, however it ends.
struct Job {
    ranks: Vec<Rank>,
    _server: Server,
    _library: Library,
}

struct Rank {
    child: Child,
    lines: Receiver<String>,
}

impl Job {
    /// Starts `world` processes that run the test called `test` on a machine.
    fn start(test: &str, world: usize, machine: &str, adapt: impl Fn(usize, &mut Command)) -> Self {
        let token = Token::generate().unwrap();
        let server = Server::bind_with(
            "127.0.0.1:0".parse().unwrap(),
            &token,
            ServerOptions::default(),
        );
        let server = server.unwrap();
        let library = Library::whole();
        library.describe(machine);
        let ranks = (0..world).map(|rank| {
            let env = WorkerEnv {
                rank,
                world,
                local_rank: rank,
                local_world: world,
                master_addr: server.addr().ip().to_string(),
                master_port: server.addr().port(),
                store: Some(server.addr().to_string()),
                token: token.clone(),
                token_is_secret: true,
                run_id: format!("{test}-{}", std::process::id()),
                ..WorkerEnv::alone()
            };
            let mut command = Command::new(std::env::current_exe().unwrap());
            let test = format!("tests::processes::{test}");
            command
                .args(["--exact", &test, "--nocapture", "--test-threads=1"])
                .env(ROLE, "rank")
                .env(NCCL_VARIABLE, library.nccl())
                .env(CUDA_VARIABLE, library.driver())
                .envs(worker_vars(&env))
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::null());
            adapt(rank, &mut command);
            Rank::of(command)
        });
        Self {
            ranks: ranks.collect(),
            _server: server,
            _library: library,
        }
    }

    fn line(&self, rank: usize) -> String {
        let heard = self.ranks[rank].lines.recv_timeout(PATIENCE);
        heard.unwrap_or_else(|_| panic!("rank {rank} said nothing"))
    }

    fn signal(&self, rank: usize, signal: Signal) {
        kill_process(Pid::from_child(&self.ranks[rank].child), signal).unwrap();
    }
}

impl Rank {
    fn of(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(line) = line.strip_prefix(MARK) {
                    let _ = sender.send(line.to_owned());
                }
            }
        });
        Self { child, lines }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.child.kill();
            let _ = rank.child.wait();
        }
    }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(format!("\n{MARK}{line}\n").as_bytes());
    let _ = out.flush();
}

/// The part of a rank: steps of a bucket on the device and a few numbers on the host, as in training, until something
/// fails. After rank 1's death it joins the others in a new group and adds once more. True when this process is a rank.
fn played(timeout: Duration, device: impl Fn(usize) -> usize) -> bool {
    if std::env::var_os(ROLE).is_none() {
        return false;
    }
    let group = ProcessGroup::init(&GroupOptions {
        timeout,
        ..GroupOptions::default()
    });
    let group = group.unwrap();
    let options = NcclOptions {
        probe: Probe::Pairs,
        probe_bytes: 64 << 10,
        grace: Duration::from_secs(2),
        ..NcclOptions::default()
    };
    let device_number = device(group.rank());
    let comm = match Communicator::join(&group, device_number, &options) {
        Ok(comm) => comm,
        Err(error) => {
            say(&format!("cannot join: {error}"));
            return true;
        }
    };
    let bench = Bench::at(&options.places, device_number);
    let rooms = [bench.floats(&[1.0; 64]), bench.floats(&[1.0; 64])];
    let mut before: Option<Ticket> = None;
    for step in 0.. {
        let label = Label {
            bucket: Some(0),
            step,
        };
        let room = &rooms[step as usize % 2];
        let bucket = comm.all_reduce(buffer(room), Float::F32, Before::Context, label);
        // No rank waits for a bucket before the next step's: a missing rank is found on the host.
        let mut loss = [1.0_f32];
        let host = group.all_reduce(&mut loss, ReduceOp::Sum);
        let device = before.map_or(Ok(()), |before| before.wait().map(drop));
        let error = match (device, host) {
            (Err(error), _) => Some((error.culprit(), error.to_string())),
            (_, Err(error)) => Some((error.culprit(), format!("{error} (on the host)"))),
            _ => None,
        };
        if let Some((culprit, error)) = error {
            say(&format!("culprit {culprit:?}: {error}"));
            if culprit == Some(1) {
                say(&go_on(comm, &group, &bench, device_number, &options));
            }
            return true;
        }
        if step == 0 {
            bucket.wait().unwrap();
            let sum = bench.read(room)[0];
            say(&format!("ready {sum} {}", comm.report().failures.len()));
        }
        before = Some(bucket);
    }
    true
}

/// A sum of the ranks that are left when rank 1 has died, in words.
fn go_on(
    comm: Communicator,
    group: &ProcessGroup,
    bench: &Bench,
    device: usize,
    options: &NcclOptions,
) -> String {
    comm.abort().unwrap();
    let env = group.env();
    let env = WorkerEnv {
        rank: env.rank - usize::from(env.rank > 1),
        world: env.world - 1,
        run_id: format!("{}-next", env.run_id),
        ..env.clone()
    };
    let group = ProcessGroup::connect(env, &GroupOptions::default()).unwrap();
    let comm = Communicator::join(&group, device, options).unwrap();
    let room = bench.floats(&[1.0; 64]);
    let label = Label {
        bucket: Some(0),
        step: 0,
    };
    let sum = comm.all_reduce(buffer(&room), Float::F32, Before::Context, label);
    sum.wait().unwrap();
    // Nobody leaves before all have the sum.
    group.barrier().unwrap();
    format!("goes on {}", bench.read(&room)[0])
}

#[test]
fn ranks_in_processes_of_their_own_reach_each_other() {
    if played(PATIENCE, |rank| rank) {
        return;
    }
    let test = "ranks_in_processes_of_their_own_reach_each_other";
    let job = Job::start(test, 3, r#"{"devices": 3}"#, |_, _| {});
    for rank in 0..3 {
        assert_eq!(job.line(rank), "ready 3 0");
    }
}

#[test]
fn a_variable_that_would_let_nccl_block_is_refused() {
    if played(PATIENCE, |rank| rank) {
        return;
    }
    let test = "a_variable_that_would_let_nccl_block_is_refused";
    let job = Job::start(test, 2, r#"{"devices": 2}"#, |_, command| {
        command.env("NCCL_COMM_BLOCKING", "1");
    });
    for rank in 0..2 {
        let line = job.line(rank);
        let expect = "cannot join: NCCL_COMM_BLOCKING=1 is set for NCCL: ";
        assert!(line.starts_with(expect), "{line}");
    }
}

#[test]
fn the_host_waits_where_nccl_copies_in_the_context() {
    if std::env::var_os(ROLE).is_some() {
        let group = ProcessGroup::init(&GroupOptions::default()).unwrap();
        let comm = Communicator::join(&group, 0, &NcclOptions::default()).unwrap();
        say(&format!("context events: {}", comm.has_context_events()));
        return;
    }
    let test = "the_host_waits_where_nccl_copies_in_the_context";
    for (value, has_events) in [("0", true), ("1", false)] {
        let job = Job::start(test, 1, r#"{"devices": 1}"#, |_, command| {
            command.env("NCCL_P2P_USE_CUDA_MEMCPY", value);
        });
        assert_eq!(job.line(0), format!("context events: {has_events}"));
    }
}

#[test]
fn a_killed_rank_is_named_by_the_others_and_they_go_on_without_it() {
    if played(PATIENCE, |rank| rank) {
        return;
    }
    for peer_death in ["error", "hang"] {
        let machine = format!(r#"{{"devices": 3, "peer_death": "{peer_death}"}}"#);
        let test = "a_killed_rank_is_named_by_the_others_and_they_go_on_without_it";
        let job = Job::start(test, 3, &machine, |_, _| {});
        for rank in 0..3 {
            assert_eq!(job.line(rank), "ready 3 0");
        }
        job.signal(1, Signal::KILL);
        for rank in [0, 2] {
            let line = job.line(rank);
            assert!(
                line.starts_with("culprit Some(1): ") && line.contains("died"),
                "{peer_death}: {line}"
            );
        }
        for rank in [0, 2] {
            assert_eq!(job.line(rank), "goes on 2", "{peer_death}");
        }
    }
}

#[test]
fn a_killed_rank_ends_both_lanes_of_the_others() {
    if std::env::var_os(ROLE).is_some() {
        let world = ProcessGroup::init(&GroupOptions::default()).unwrap();
        let mesh = DeviceMesh::new(&world, &[("dp", 2), ("tp", 2)]).unwrap();
        let options = NcclOptions {
            probe: Probe::Check,
            grace: Duration::from_secs(2),
            ..NcclOptions::default()
        };
        let dp = Communicator::join(mesh.group("dp").unwrap(), world.rank(), &options).unwrap();
        let tp = dp.join_lane(mesh.group("tp").unwrap()).unwrap();
        let bench = Bench::at(&options.places, world.rank());
        let room = bench.floats(&[0.0; 64]);
        for step in 0.. {
            let label = Label { bucket: None, step };
            let sums = [&dp, &tp]
                .map(|lane| lane.all_reduce(buffer(&room), Float::F32, Before::Context, label));
            let ends = sums.map(|sum| sum.wait());
            if ends.iter().any(Result::is_err) {
                // The other lane has the same failure.
                say(&format!(
                    "{} {}",
                    dp.health().unwrap_err(),
                    tp.health().is_err()
                ));
                return;
            }
            if step == 0 {
                say("ready");
            }
        }
    }
    for peer_death in ["error", "hang"] {
        let machine = format!(r#"{{"devices": 4, "peer_death": "{peer_death}"}}"#);
        let test = "a_killed_rank_ends_both_lanes_of_the_others";
        let job = Job::start(test, 4, &machine, |_, _| {});
        for rank in 0..4 {
            assert_eq!(job.line(rank), "ready");
        }
        job.signal(3, Signal::KILL);
        for rank in 0..3 {
            let line = job.line(rank);
            let is_named = line.contains("rank 3 of the job: ") && line.contains("died");
            assert!(is_named && line.ends_with(" true"), "{peer_death}: {line}");
        }
    }
}

#[test]
fn a_stopped_rank_is_named_by_the_others() {
    if played(Duration::from_secs(3), |rank| rank) {
        return;
    }
    let test = "a_stopped_rank_is_named_by_the_others";
    let job = Job::start(
        test,
        3,
        r#"{"devices": 3, "peer_death": "hang"}"#,
        |_, _| {},
    );
    for rank in 0..3 {
        assert_eq!(job.line(rank), "ready 3 0");
    }
    job.signal(2, Signal::STOP);
    for rank in [0, 1] {
        let line = job.line(rank);
        // Where one rank waits for the stopped one in NCCL and the other waits for both in the group, that one sees two
        // who have not come, and may blame either; which of them does not answer it always says.
        let is_told_apart = line
            .split("; ")
            .any(|part| part.contains("rank 2 (") && part.contains("does not answer"));
        assert!(
            line.starts_with("culprit Some(2): ") || is_told_apart,
            "{line}"
        );
    }
}

#[test]
fn ranks_share_a_device_when_they_say_they_are_on_different_hosts() {
    if played(PATIENCE, |_| 0) {
        return;
    }
    let test = "ranks_share_a_device_when_they_say_they_are_on_different_hosts";
    let job = Job::start(test, 2, r#"{"devices": 1}"#, |rank, command| {
        command.env("NCCL_HOSTID", format!("host{rank}"));
    });
    for rank in 0..2 {
        assert_eq!(job.line(rank), "ready 2 0");
    }
}

#[test]
fn ranks_that_share_a_device_are_refused() {
    if played(PATIENCE, |_| 0) {
        return;
    }
    let test = "ranks_that_share_a_device_are_refused";
    let job = Job::start(test, 2, r#"{"devices": 1}"#, |_, command| {
        command.env_remove("NCCL_HOSTID");
    });
    for rank in 0..2 {
        let line = job.line(rank);
        assert!(
            line.starts_with("cannot join: ranks 0 and 1 both use device GPU-"),
            "{line}"
        );
    }
}
