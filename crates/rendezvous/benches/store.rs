//! The store over TCP on the loopback address: clients that join, and operations of one client a second.
//!
//! `cargo bench -p paceline-rendezvous --bench store [-- --clients 10000 --idle 1000 --seconds 1]`. Prints one JSON line
//! for each measurement; `torch_store.py` prints the same for torch's TCPStore. The server is a process of its own (this
//! program again): 10,000 connections take 10,000 descriptors at either end. `join` counts the time until every client
//! has connected and both sides have proven the token. A run by `cargo test` takes a few clients and 20 ms, and shows
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
        return serve();
    }
    let full = has("--bench") && !has("--quick");
    let (clients, idle, seconds) = if full {
        (10_000.0, 1_000.0, 1.0)
    } else {
        (64.0, 16.0, 0.02)
    };
    let asked = number("--clients", clients) as usize;
    let plan = Plan {
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
    let (addr, server) = start_server();
    let client = connect(&addr);
    let value = [b'v'; 64];
    client.set("key", &value).expect("set");
    let get = || assert_eq!(client.get("key", TIMEOUT).expect("get").len(), value.len());

    rate("get", plan, 0, get);
    rate("set", plan, 0, || client.set("key", &value).expect("set"));
    rate("add", plan, 0, || {
        client.add("count", 1).expect("add");
    });
    let (idle, _) = join(&addr, plan.idle);
    rate("get_idle", plan, idle.len(), get);
    drop(idle);

    let (clients, took) = join(&addr, plan.clients);
    println!(
        r#"{{"store":"paceline","bench":"join","clients":{},"seconds":{:.3}}}"#,
        clients.len(),
        took.as_secs_f64()
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
fn join(addr: &str, count: usize) -> (Vec<Client>, Duration) {
    let started = Instant::now();
    let clients = thread::scope(|scope| {
        let dialers: Vec<_> = (0..DIALERS)
            .map(|dialer| {
                let share = count / DIALERS + usize::from(dialer < count % DIALERS);
                scope.spawn(move || (0..share).map(|_| connect(addr)).collect::<Vec<_>>())
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
        r#"{{"store":"paceline","bench":"{name}","per_second":{:.0},"us":{us:.2},"value_bytes":64,"idle_clients":{others}}}"#,
        1e6 / us
    );
}

fn token() -> Token {
    Token::derived("store benchmark")
}

fn connect(addr: &str) -> Client {
    Client::connect(addr, &token(), TIMEOUT).expect("a client joins")
}

/// This program again, as a server until its standard input ends.
fn start_server() -> (String, Child) {
    let program = std::env::current_exe().expect("this program");
    let mut server = Command::new(program)
        .arg("--serve")
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

fn serve() {
    let options = ServerOptions {
        connections_max: 1 << 16,
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
