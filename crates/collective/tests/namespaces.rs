//! Two hosts made of network namespaces: ranks as processes, two on each host, and the bytes that travel between the hosts
//! counted by the interfaces of both. Skipped, and said so, where namespaces cannot be made (that takes root and `ip`).
//!
//! A namespace belongs to a process that ends when this one does, and the ranks die with it: nothing is left behind,
//! however the test ends.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use paceline_collective::{AllReduce, GroupOptions, ProcessGroup, ReduceOp};
use paceline_rendezvous::env::{WorkerEnv, worker_vars};
use paceline_rendezvous::net::nodename;
use paceline_rendezvous::token::Token;
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

/// How late a survivor may report.
const SOON: Duration = Duration::from_secs(8);
/// How long the test waits for anything before it fails.
const PATIENCE: Duration = Duration::from_secs(60);
/// Set in the processes that play a rank.
const ROLE: &str = "PACELINE_TEST_ROLE";
/// Lines of a rank that are meant for the test.
const MARK: &str = "@@ ";

/// Hosts, and ranks on each.
const HOSTS: usize = 2;
const LOCAL: usize = 2;
const ADDRESSES: [&str; HOSTS] = ["10.77.0.1", "10.77.0.2"];
const PORT: u16 = 29_500;
/// The interface between the hosts, called the same on both.
const INTERFACE: &str = "pace0";

const SIZES_MIB: [usize; 3] = [1, 16, 64];
/// Elements of one MiB.
const MIB: usize = (1 << 20) / size_of::<f32>();
/// What headers may add: those of TCP, IP and Ethernet are 66 of up to 1514 bytes of a packet, as many of one that only
/// acknowledges. What ranks tell each other about a call, and the barriers around what is counted, are a few KiB.
const HEADERS: f64 = 0.06;
const SMALL_BYTES: u64 = 64 << 10;

fn say(line: &str) {
    println!("\n{MARK}{line}");
}

/// Bytes that this host's interface has received and sent. Of this process's network namespace, unlike what `/sys` shows.
fn counted() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/self/net/dev").unwrap();
    let line = text
        .lines()
        .find_map(|line| line.trim().strip_prefix(INTERFACE)?.strip_prefix(':'));
    let fields: Vec<u64> = line
        .unwrap()
        .split_whitespace()
        .map(|field| field.parse().unwrap())
        .collect();
    (fields[0], fields[8])
}

/// The part of a rank: reduce and count, then reduce until something fails. True when this process is a rank.
fn played() -> bool {
    if std::env::var_os(ROLE).is_none() {
        return false;
    }
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let options = GroupOptions {
        timeout: PATIENCE,
        arena_bytes: Some(1 << 30),
        ..GroupOptions::default()
    };
    let group = match ProcessGroup::init(&options) {
        Ok(group) => group,
        Err(error) => {
            say(&format!("no group: {error}"));
            return true;
        }
    };
    say(&format!("{} on {}", group.transport(), nodename()));
    for mib in SIZES_MIB {
        count(&group, mib, "ordinary", &|len| {
            let mut data = inputs(&group, len);
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            check(&group, &data);
        });
        count(&group, mib, "shared", &|len| {
            let mut buffer = group.buffer::<f32>(len).unwrap();
            buffer.copy_from_slice(&inputs(&group, len));
            let call = AllReduce::new(ReduceOp::Sum, len);
            let done = group.all_reduce_async(buffer, call).wait().unwrap();
            check(&group, &done.buffer);
        });
    }
    say("done");
    let error = loop {
        let mut data = [1.0_f32; 20_000];
        if let Err(error) = group.all_reduce(&mut data, ReduceOp::Sum) {
            break error;
        }
    };
    say(&format!("culprit {:?}: {error}", error.culprit()));
    true
}

fn inputs(group: &ProcessGroup, len: usize) -> Vec<f32> {
    let factor = (group.rank() + 1) as f32;
    (0..len).map(|i| factor * (i % 7) as f32).collect()
}

fn check(group: &ProcessGroup, data: &[f32]) {
    let world = group.world();
    let factor = (world * (world + 1) / 2) as f32;
    let mut all = data.iter().enumerate();
    assert!(all.all(|(i, sum)| *sum == factor * (i % 7) as f32));
}

/// Says how many bytes the first rank of each host counts for one operation.
fn count(group: &ProcessGroup, mib: usize, memory: &str, reduce: &dyn Fn(usize)) {
    group.barrier().unwrap();
    let before = counted();
    // Nobody begins before all who count have looked.
    group.barrier().unwrap();
    let started = Instant::now();
    reduce(mib * MIB);
    let took = started.elapsed();
    group.barrier().unwrap();
    let after = counted();
    if group.local_rank() == 0 {
        say(&format!(
            "{mib} {memory} {} {} {}",
            after.0 - before.0,
            after.1 - before.1,
            took.as_millis()
        ));
    }
}

/// A process that holds a network namespace and a host name of its own until its input ends.
struct Host(Child);

impl Host {
    /// *Errors*: why there can be none.
    fn new(name: &str) -> Result<Self, String> {
        let script = format!(
            "hostname {name} 2>/dev/null || echo {name} > /proc/sys/kernel/hostname || exit 1; echo made; exec cat"
        );
        let mut command = Command::new("unshare");
        command.args(["--net", "--uts", "sh", "-c", &script]);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut host = Self(
            command
                .spawn()
                .map_err(|error| format!("unshare: {error}"))?,
        );
        let mut line = String::new();
        let stdout = host.0.stdout.as_mut().unwrap();
        let _ = BufReader::new(stdout).read_line(&mut line);
        if line == "made\n" {
            return Ok(host);
        }
        let _ = host.0.kill();
        let mut reason = String::new();
        let stderr = host.0.stderr.as_mut().unwrap();
        let _ = stderr.read_to_string(&mut reason);
        Err(format!("unshare: {}", reason.trim()))
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }

    /// A command that runs on this host.
    fn command(&self, program: &std::ffi::OsStr) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &self.pid(), "--net", "--uts"])
            .arg(program);
        command
    }

    fn ip(&self, words: &str) -> Result<(), String> {
        let mut command = self.command("ip".as_ref());
        run(command.args(words.split_whitespace()), words)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(command: &mut Command, words: &str) -> Result<(), String> {
    let output = command
        .output()
        .map_err(|error| format!("ip {words}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let reason = String::from_utf8_lossy(&output.stderr);
    Err(format!("ip {words}: {}", reason.trim()))
}

/// Two hosts with a cable between them. *Errors*: why there can be none.
fn hosts(names: [&str; HOSTS]) -> Result<Vec<Host>, String> {
    let hosts = names.map(Host::new);
    let hosts = hosts.into_iter().collect::<Result<Vec<_>, _>>()?;
    let words = format!(
        "link add {INTERFACE} netns {} type veth peer name {INTERFACE} netns {}",
        hosts[0].pid(),
        hosts[1].pid()
    );
    run(Command::new("ip").args(words.split_whitespace()), &words)?;
    for (host, address) in hosts.iter().zip(ADDRESSES) {
        host.ip("link set lo up")?;
        host.ip(&format!("addr add {address}/24 dev {INTERFACE}"))?;
        host.ip(&format!("link set {INTERFACE} up"))?;
    }
    Ok(hosts)
}

/// The processes of one job; killed when the test ends, however it ends.
struct Job(Vec<(Child, Receiver<String>)>);

impl Job {
    fn start(test: &str, hosts: &[Host], transport: &str) -> Self {
        let token = Token::generate().unwrap();
        let ranks = (0..HOSTS * LOCAL).map(|rank| {
            let env = WorkerEnv {
                rank,
                world: HOSTS * LOCAL,
                local_rank: rank % LOCAL,
                local_world: LOCAL,
                node_rank: rank / LOCAL,
                node_count: HOSTS,
                master_addr: ADDRESSES[0].into(),
                master_port: PORT,
                token: token.clone(),
                token_is_secret: true,
                run_id: format!("namespaces-{transport}"),
                transport: Some(transport.into()),
                ..WorkerEnv::alone()
            };
            let binary = std::env::current_exe().unwrap();
            let mut command = hosts[rank / LOCAL].command(binary.as_os_str());
            command
                .args(["--exact", test, "--nocapture", "--test-threads=1"])
                .env(ROLE, "rank")
                .envs(worker_vars(&env))
                .stdout(Stdio::piped())
                .stderr(Stdio::null());
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
            (child, lines)
        });
        Self(ranks.collect())
    }

    fn line(&self, rank: usize) -> String {
        let line = self.0[rank].1.recv_timeout(PATIENCE);
        line.unwrap_or_else(|_| panic!("rank {rank} said nothing"))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for (child, _) in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn data_crosses_between_hosts_once_each_way_and_a_death_is_known_on_both() {
    if played() {
        return;
    }
    let test = "data_crosses_between_hosts_once_each_way_and_a_death_is_known_on_both";
    let hosts = match hosts(["host-a", "host-b"]) {
        Ok(hosts) => hosts,
        Err(reason) => {
            paceline_testing::skipped(format!(
                "two network namespaces cannot be made here: {reason}"
            ));
            return;
        }
    };
    // TCP between all pairs only for the comparison that is printed.
    for transport in ["hierarchical", "auto", "tcp"] {
        let job = Job::start(test, &hosts, transport);
        let expected = transport.replace("auto", "hierarchical");
        for rank in 0..HOSTS * LOCAL {
            let host = ["host-a", "host-b"][rank / LOCAL];
            assert_eq!(job.line(rank), format!("{expected} on {host}"));
        }
        for mib in SIZES_MIB {
            for memory in ["ordinary", "shared"] {
                for host in 0..HOSTS {
                    let line = job.line(host * LOCAL);
                    let start = format!("{mib} {memory} ");
                    let numbers = line
                        .strip_prefix(&start)
                        .unwrap_or_else(|| panic!("{line}"));
                    let numbers: Vec<u64> = numbers
                        .split_whitespace()
                        .map(|number| number.parse().unwrap())
                        .collect();
                    judge(transport, host, mib, memory, &numbers);
                }
            }
        }
        for rank in 0..HOSTS * LOCAL {
            assert_eq!(job.line(rank), "done");
        }
        let victim = HOSTS * LOCAL - 1;
        kill_process(Pid::from_child(&job.0[victim].0), Signal::KILL).unwrap();
        let killed = Instant::now();
        for rank in 0..victim {
            let line = job.line(rank);
            let start = format!("culprit Some({victim}): ");
            assert!(line.starts_with(&start) && line.contains("died"), "{line}");
            assert!(line.contains("host host-b"), "{line}");
        }
        assert!(killed.elapsed() < SOON, "{:?}", killed.elapsed());
    }
}

#[test]
fn two_containers_of_one_name_are_two_hosts() {
    if played() {
        return;
    }
    let test = "two_containers_of_one_name_are_two_hosts";
    let hosts = match hosts(["twin", "twin"]) {
        Ok(hosts) => hosts,
        Err(reason) => {
            paceline_testing::skipped(format!(
                "two network namespaces cannot be made here: {reason}"
            ));
            return;
        }
    };
    for transport in ["hierarchical", "auto"] {
        let job = Job::start(test, &hosts, transport);
        for rank in 0..HOSTS * LOCAL {
            assert_eq!(job.line(rank), "hierarchical on twin");
        }
    }
    let job = Job::start(test, &hosts, "shm");
    for rank in 0..HOSTS * LOCAL {
        let line = job.line(rank);
        let words = "rank 0 and rank 2 are in different network namespaces of host twin";
        assert!(
            line.starts_with("no group: ") && line.contains(words),
            "{line}"
        );
    }
}

/// Compares what one host's interface counted with what an all-reduce by hosts must send: each host `(h - 1) / h` of the
/// data to be folded elsewhere, and `(h - 1) / h` of the data that it has folded.
fn judge(transport: &str, host: usize, mib: usize, memory: &str, numbers: &[u64]) {
    let (received, sent, took) = (numbers[0], numbers[1], numbers[2]);
    let data = (mib << 20) as u64;
    let least = 2 * (HOSTS as u64 - 1) * data / HOSTS as u64;
    let over = |bytes: u64| (bytes as f64 / least as f64 - 1.0) * 100.0;
    println!(
        "{transport}, {mib} MiB of {memory} memory, host {host}: {received} bytes received ({:+.2} %), {sent} sent ({:+.2} \
         %) for {least} of data, {took} ms",
        over(received),
        over(sent)
    );
    if transport == "tcp" {
        return;
    }
    let most = least + (least as f64 * HEADERS) as u64 + SMALL_BYTES;
    for bytes in [received, sent] {
        assert!(
            (least..=most).contains(&bytes),
            "{bytes} bytes, expected {least} to {most}"
        );
    }
}
