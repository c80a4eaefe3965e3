//! All-reduce of buffers in place: median time and bus bandwidth for each size.
//!
//! `cargo bench -p paceline-collective [-- local|tcp|shm] [world]`. Prints one JSON line for each size; `busbw` is
//! nccl-tests' definition, `bytes * 2 (n-1)/n / seconds`, in 1e9 bytes a second. Ranks are threads, each with its own
//! group. `--quick`, and a run by `cargo test`, take one turn of each size and show only that nothing is broken.

use std::time::{Duration, Instant};

use paceline_collective::{AllReduce, GroupOptions, ProcessGroup, ReduceOp, Transport};
use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::store::Server;
use paceline_rendezvous::token::Token;

/// 8 B to 64 MiB in f32 elements.
const LENGTHS: [usize; 6] = [2, 1 << 10, 16 << 10, 256 << 10, 4 << 20, 16 << 20];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let full = arguments.iter().any(|argument| argument == "--bench")
        && !arguments.iter().any(|argument| argument == "--quick");
    let transport = ["shm", "tcp", "local"]
        .into_iter()
        .find(|name| arguments.iter().any(|a| a == name));
    let world = arguments
        .iter()
        .find_map(|argument| argument.parse().ok())
        .unwrap_or(2);
    let transport = transport.unwrap_or("shm");
    let groups = match transport {
        "local" => ProcessGroup::local(world, &GroupOptions::default()).expect("threads as ranks"),
        name => connect(
            world,
            if name == "tcp" {
                Transport::Tcp
            } else {
                Transport::Shm
            },
        ),
    };
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || LENGTHS.iter().for_each(|len| measure(&group, *len, full)));
        }
    });
}

fn connect(world: usize, transport: Transport) -> Vec<ProcessGroup> {
    let token = Token::generate().expect("the system's randomness");
    let server = Server::bind(([127, 0, 0, 1], 0).into(), &token).expect("a free port");
    let options = GroupOptions {
        transport,
        ..GroupOptions::default()
    };
    let env = |rank| WorkerEnv {
        rank,
        world,
        local_rank: rank,
        local_world: world,
        store: Some(server.addr().to_string()),
        token: token.clone(),
        token_is_secret: true,
        ..WorkerEnv::alone()
    };
    std::thread::scope(|scope| {
        let options = &options;
        let ranks: Vec<_> = (0..world)
            .map(|rank| (scope, env(rank)))
            .map(|(scope, env)| {
                scope.spawn(move || ProcessGroup::connect(env, options).expect("a group"))
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("no panic"))
            .collect()
    })
}

fn measure(group: &ProcessGroup, len: usize, full: bool) {
    let bytes = len * 4;
    let turns = if full {
        ((256 << 20) / bytes).clamp(7, 2000)
    } else {
        1
    };
    let sync = bytes <= 4096;
    let mut buffer = group.buffer::<f32>(len).expect("memory");
    buffer.fill(1.0);
    let mut times: Vec<Duration> = Vec::with_capacity(turns);
    for turn in 0..turns + turns / 10 {
        group.barrier().expect("a barrier");
        let started = Instant::now();
        // Small ones as a program would: synchronous, from ordinary memory.
        if sync {
            group
                .all_reduce(&mut buffer, ReduceOp::Max)
                .expect("an all-reduce");
        } else {
            let call = AllReduce {
                op: ReduceOp::Max,
                tree: None,
                len,
                bucket: None,
                step: 0,
            };
            buffer = group
                .all_reduce_async(buffer, call)
                .wait()
                .expect("an all-reduce")
                .buffer;
        }
        if turn >= turns / 10 {
            times.push(started.elapsed());
        }
    }
    times.sort();
    let median = times[times.len() / 2];
    if group.rank() == 0 {
        let (world, seconds) = (group.world() as f64, median.as_secs_f64());
        let busbw = bytes as f64 * 2.0 * (world - 1.0) / world / seconds / 1e9;
        println!(
            "{{\"op\":\"all_reduce\",\"transport\":\"{}\",\"world\":{world},\"bytes\":{bytes},\"turns\":{turns},\
             \"median_us\":{:.2},\"fastest_us\":{:.2},\"busbw\":{busbw:.3}}}",
            group.transport(),
            seconds * 1e6,
            times[0].as_secs_f64() * 1e6,
        );
    }
}
