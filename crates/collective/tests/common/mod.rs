//! Ranks as threads over every transport, and the serial reference that all results are compared with.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses its own part"
)]

pub mod job;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use paceline_collective::{Element, Error, GroupOptions, ProcessGroup, Transport, bf16, f16};
use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::store::{Server, ServerOptions};
use paceline_rendezvous::token::Token;

/// How the ranks of a test are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    Local,
    Shm,
    Tcp,
    Tcp6,
    /// TCP, encrypted.
    Tls,
    /// Two ranks on each host, as far as the ranks say.
    Pairs,
    /// The host of each rank, as far as the ranks say.
    Hosts(&'static [usize]),
}

pub const WIRES: [Wire; 5] = [Wire::Local, Wire::Shm, Wire::Tcp, Wire::Tls, Wire::Pairs];

impl Wire {
    pub fn transport(self) -> Transport {
        match self {
            Self::Local => Transport::Auto,
            Self::Shm => Transport::Shm,
            Self::Tcp | Self::Tcp6 | Self::Tls => Transport::Tcp,
            Self::Pairs | Self::Hosts(_) => Transport::Hierarchical,
        }
    }

    /// What a rank says its host is called.
    fn host_id(self, rank: usize) -> Option<String> {
        match self {
            Self::Pairs => Some(format!("host{}", rank / 2)),
            Self::Hosts(hosts) => Some(format!("host{}", hosts[rank])),
            _ => None,
        }
    }
}

/// Bounds every test: nothing waits longer than this for anything.
pub fn options(wire: Wire) -> GroupOptions {
    GroupOptions {
        timeout: Duration::from_secs(30),
        transport: wire.transport(),
        arena_bytes: Some(256 << 20),
        ..GroupOptions::default()
    }
}

/// The environments of `world` ranks that meet at `server`.
pub fn envs(world: usize, server: &Server, token: &Token) -> Vec<WorkerEnv> {
    static JOB: AtomicU32 = AtomicU32::new(0);
    let run_id = format!(
        "test-{}-{}",
        std::process::id(),
        JOB.fetch_add(1, Ordering::Relaxed)
    );
    (0..world)
        .map(|rank| WorkerEnv {
            rank,
            world,
            local_rank: rank,
            local_world: world,
            master_addr: server.addr().ip().to_string(),
            master_port: server.addr().port(),
            store: Some(server.addr().to_string()),
            token: token.clone(),
            token_is_secret: true,
            run_id: run_id.clone(),
            ..WorkerEnv::alone()
        })
        .collect()
}

pub fn server(wire: Wire, token: &Token) -> Server {
    let addr = if wire == Wire::Tcp6 {
        "[::1]:0"
    } else {
        "127.0.0.1:0"
    };
    let options = ServerOptions {
        tls: wire == Wire::Tls,
        ..ServerOptions::default()
    };
    Server::bind_with(addr.parse().unwrap(), token, options).unwrap()
}

/// Runs `rank_main` on `world` ranks, each a thread, and returns what they return, in rank order.
pub fn on_ranks<R: Send>(
    wire: Wire,
    world: usize,
    rank_main: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    on_ranks_with(wire, world, &options(wire), rank_main)
}

pub fn on_ranks_with<R: Send>(
    wire: Wire,
    world: usize,
    options: &GroupOptions,
    rank_main: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    let rank_main = &rank_main;
    std::thread::scope(|scope| {
        let mut held = None;
        let threads: Vec<_> = if wire == Wire::Local {
            let groups = ProcessGroup::local(world, options).unwrap();
            groups
                .into_iter()
                .map(|group| scope.spawn(move || rank_main(group)))
                .collect()
        } else {
            let token = Token::generate().unwrap();
            let server = held.insert(server(wire, &token));
            let envs = envs(world, server, &token);
            let envs = envs.into_iter().map(|env| WorkerEnv {
                host_id: wire.host_id(env.rank),
                tls: wire == Wire::Tls,
                ..env
            });
            envs.map(|env| {
                scope.spawn(move || rank_main(ProcessGroup::connect(env, options).unwrap()))
            })
            .collect()
        };
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// What every rank's call ended with; all of them must have failed.
pub fn errors(
    wire: Wire,
    world: usize,
    rank_main: impl Fn(ProcessGroup) -> Result<(), Error> + Sync,
) -> Vec<Error> {
    on_ranks(wire, world, |group| rank_main(group).unwrap_err())
}

/// Numbers of very different sizes, so that sums depend on their order; the same for the same leaf on any rank.
pub fn noise(leaf: usize, len: usize) -> Vec<f32> {
    let mut state = (leaf as u32 + 1).wrapping_mul(0x9E37_79B9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state as f32 / u32::MAX as f32 - 0.5) * 2.0_f32.powi((state >> 7) as i32 % 24 - 12)
    };
    (0..len).map(|_| next()).collect()
}

/// The fixed tree by its definition: the largest power of two below `n` goes left.
pub fn reference<T: Copy>(leaves: &[Vec<T>], combine: &impl Fn(T, T) -> T) -> Vec<T> {
    if let [only] = leaves {
        return only.clone();
    }
    let left = leaves.len().next_power_of_two() / 2;
    let (left, right) = (
        reference(&leaves[..left], combine),
        reference(&leaves[left..], combine),
    );
    left.into_iter()
        .zip(right)
        .map(|(left, right)| combine(left, right))
        .collect()
}

/// Bit patterns, so that comparisons are of bytes and not of numbers.
pub trait Bits: Element {
    fn bits(self) -> u64;
}

macro_rules! bits {
    ($($type:ty: $bits:expr),* $(,)?) => {$(
        impl Bits for $type {
            fn bits(self) -> u64 {
                $bits(self)
            }
        }
    )*};
}

bits! {
    f64: f64::to_bits,
    f32: |x: f32| u64::from(x.to_bits()),
    f16: |x: f16| u64::from(x.to_bits()),
    bf16: |x: bf16| u64::from(x.to_bits()),
    i64: |x| x as u64,
    i32: |x| x as u64,
    i8: |x| x as u64,
    u8: u64::from,
    bool: u64::from,
}

#[track_caller]
pub fn assert_same<T: Bits>(got: &[T], expected: &[T], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let wrong: Vec<usize> = (0..got.len())
        .filter(|i| got[*i].bits() != expected[*i].bits())
        .collect();
    if let Some(first) = wrong.first() {
        panic!(
            "{what}: {} of {} elements are wrong, the first at {first}: {:?} instead of {:?}",
            wrong.len(),
            got.len(),
            got[*first],
            expected[*first]
        );
    }
}
