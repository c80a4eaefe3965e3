//! The store over TCP on the loopback address: clients that join, and operations of one client a second.
//!
//! `cargo bench -p paceline-rendezvous --bench store [-- --clients 10000 --idle 1000 --seconds 1 --tls]`. Prints one JSON line
//! for each measurement; `torch_store.py` prints the same for torch's TCPStore. The server is a process of its own (this
//! program again): 10,000 connections take 10,000 descriptors at either end. `join` counts the time until every client
//! has connected and both sides have proven the token, and says what the server has used for it. A run by `cargo test` takes a few clients and 20 ms, and shows
//! only that nothing is broken.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use paceline_rendezvous::store::{Client, Server, ServerOptions, Store};
use paceline_rendezvous::token::Token;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Threads that connect clients, one after the other each.
const DIALERS: usize = 32;
/// Descriptors beside the connections.
const OTHER_DESCRIPTORS: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(60);

/// What is measured, and how much of it.
struct Plan {
    tls: bool,
    clients: usize,
    idle: usize,
    time: Duration,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let number = |name: &str, default: f64| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1)?.parse().ok())
            .unwrap_or(default)
    };
    let descriptors = raise_descriptors();
    if has("--serve") {
        return serve(has("--tls"));
    }
    let full = has("--bench") && !has("--quick");
    let (clients, idle, seconds) = if full {
        (10_000.0, 1_000.0, 1.0)
    } else {
        (64.0, 16.0, 0.02)
    };
    let asked = number("--clients", clients) as usize;
    let plan = Plan {
        tls: has("--tls"),
        clients: asked.min(descriptors.saturating_sub(OTHER_DESCRIPTORS)),
        idle: number("--idle", idle) as usize,
        time: Duration::from_secs_f64(number("--seconds", seconds)),
    };
    if plan.clients < asked {
        eprintln!(
            "{} of {asked} clients: the limit of open files is {descriptors}",
            plan.clients
        );
    }
    measure(&plan);
}

fn measure(plan: &Plan) {
    let (addr, server) = start_server(plan.tls);
    let client = connect(&addr, plan.tls);
    let value = [b'v'; 64];
    client.set("key", &value).expect("set");
    let get = || assert_eq!(client.get("key", TIMEOUT).expect("get").len(), value.len());

    rate("get", plan, 0, get);
    rate("set", plan, 0, || client.set("key", &value).expect("set"));
    rate("add", plan, 0, || {
        client.add("count", 1).expect("add");
    });
    let (idle, _) = join(&addr, plan.tls, plan.idle);
    rate("get_idle", plan, idle.len(), get);
    drop(idle);

    let before = used(&server);
    let (clients, took) = join(&addr, plan.tls, plan.clients);
    let (bytes, seconds) = used(&server);
    println!(
        r#"{{"store":"paceline","bench":"join","tls":{},"clients":{},"seconds":{:.3},"server_seconds":{:.2},"server_bytes":{}}}"#,
        plan.tls,
        clients.len(),
        took.as_secs_f64(),
        seconds - before.1,
        bytes.saturating_sub(before.0),
    );
    rate("get_joined", plan, clients.len(), get);
    let sum = client.add("count", 0).expect("add");
    let last = clients
        .last()
        .map(|last| last.add("count", 0).expect("add"));
    assert_eq!(last, Some(sum), "the last client is served like the first");
    drop(clients);
    stop_server(server);
}

/// Connects clients from a few threads; how long it took.
fn join(addr: &str, tls: bool, count: usize) -> (Vec<Client>, Duration) {
    let started = Instant::now();
    let clients = thread::scope(|scope| {
        let dialers: Vec<_> = (0..DIALERS)
            .map(|dialer| {
                let share = count / DIALERS + usize::from(dialer < count % DIALERS);
                scope.spawn(move || (0..share).map(|_| connect(addr, tls)).collect::<Vec<_>>())
            })
            .collect();
        let dialers = dialers.into_iter();
        dialers
            .flat_map(|dialer| dialer.join().expect("no panic"))
            .collect::<Vec<_>>()
    });
    (clients, started.elapsed())
}

fn rate(name: &str, plan: &Plan, others: usize, operation: impl Fn()) {
    for _ in 0..10 {
        operation();
    }
    let (mut count, started) = (0_u32, Instant::now());
    while started.elapsed() < plan.time {
        for _ in 0..10 {
            operation();
        }
        count += 10;
    }
    let us = started.elapsed().as_secs_f64() * 1e6 / f64::from(count);
    println!(
        r#"{{"store":"paceline","bench":"{name}","tls":{},"per_second":{:.0},"us":{us:.2},"value_bytes":64,"idle_clients":{others}}}"#,
        plan.tls,
        1e6 / us
    );
}

fn token() -> Token {
    Token::derived("store benchmark")
}

fn connect(addr: &str, tls: bool) -> Client {
    Client::connect_as(addr, &token(), tls, TIMEOUT).expect("a client joins")
}

/// Memory that the server has, and processor time that it has had, in seconds.
fn used(server: &Child) -> (usize, f64) {
    let file = |name: &str| {
        std::fs::read_to_string(format!("/proc/{}/{name}", server.id())).unwrap_or_default()
    };
    let status = file("status");
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = resident.and_then(|text| text.trim().strip_suffix(" kB")?.parse().ok());
    let stat = file("stat");
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let ticks = fields.split_whitespace().skip(11).take(2);
    let ticks: f64 = ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
    let per_second = rustix::param::clock_ticks_per_second() as f64;
    (1024 * kib.unwrap_or(0), ticks / per_second)
}

/// This program again, as a server until its standard input ends.
fn start_server(tls: bool) -> (String, Child) {
    let program = std::env::current_exe().expect("this program");
    let mut server = Command::new(program)
        .arg("--serve")
        .args(tls.then_some("--tls"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a server");
    let mut addr = String::new();
    let stdout = server.stdout.take().expect("a pipe");
    BufReader::new(stdout)
        .read_line(&mut addr)
        .expect("its address");
    (addr.trim().to_owned(), server)
}

fn stop_server(mut server: Child) {
    drop(server.stdin.take());
    server.wait().expect("the server ends");
}

fn serve(tls: bool) {
    let options = ServerOptions {
        tls,
        ..ServerOptions::default()
    };
    let server =
        Server::bind_with(([127, 0, 0, 1], 0).into(), &token(), options).expect("a free port");
    println!("{}", server.addr());
    std::io::stdin()
        .read_to_end(&mut Vec::new())
        .expect("a pipe");
    if server.refused() > 0 {
        eprintln!("the server refused {} connections", server.refused());
    }
}

/// Raises this process's limit of open files to what the system allows; the limit then.
fn raise_descriptors() -> usize {
    let limit = getrlimit(Resource::Nofile);
    // Refused only where a sandbox says so; then the old limit counts.
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    );
    let now = getrlimit(Resource::Nofile).current;
    now.map_or(usize::MAX, |now| usize::try_from(now).unwrap_or(usize::MAX))
}
