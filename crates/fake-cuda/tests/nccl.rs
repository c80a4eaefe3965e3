//! The fake NCCL with threads as ranks, each with a device of its own.
#![allow(unsafe_code)]

mod support;

use std::ptr::null_mut;
use std::sync::Barrier;

use support::{Api, Config, Fake, Handle, IN_PROGRESS, NOT_READY, UniqueId, at};

const F32: u32 = 7;
const SUM: u32 = 0;

/// One rank.
struct Rank {
    api: Api,
    rank: i32,
    world: i32,
    comm: Handle,
    stream: Handle,
}

impl Rank {
    fn join(api: Api, rank: i32, world: i32, id: UniqueId) -> Self {
        api.enter(rank);
        let mut comm = null_mut();
        // SAFETY: NCCL writes one handle.
        assert_eq!(
            unsafe { (api.ncclCommInitRank)(&mut comm, world, id, rank) },
            0
        );
        Self {
            api,
            rank,
            world,
            comm,
            stream: api.stream(),
        }
    }

    fn join_without_blocking(api: Api, rank: i32, world: i32, id: UniqueId) -> Self {
        api.enter(rank);
        let (mut comm, mut config) = (
            null_mut(),
            Config {
                size: 48,
                magic: 0xcafe_beef,
                version: 21800,
                blocking: 0,
            },
        );
        // SAFETY: NCCL writes one handle, and reads as much of the configuration as there is.
        let code = unsafe { (api.ncclCommInitRankConfig)(&mut comm, world, id, rank, &mut config) };
        assert_eq!(code, IN_PROGRESS);
        Self {
            api,
            rank,
            world,
            comm,
            stream: api.stream(),
        }
    }

    fn state(&self) -> u32 {
        let mut state = 99;
        // SAFETY: NCCL writes one number.
        assert_eq!(
            unsafe { (self.api.ncclCommGetAsyncError)(self.comm, &mut state) },
            0
        );
        state
    }

    /// Waits until the communicator is in this state.
    fn wait_for(&self, state: u32) {
        while self.state() != state {
            std::thread::yield_now();
        }
    }

    /// Begins to reduce in place.
    fn all_reduce(&self, memory: u64, count: usize, op: u32) -> u32 {
        // SAFETY: addresses are never followed, and looked up first.
        unsafe {
            (self.api.ncclAllReduce)(
                at(memory),
                at(memory),
                count,
                F32,
                op,
                self.comm,
                self.stream,
            )
        }
    }

    fn reduced<const N: usize>(&self, numbers: [f32; N], op: u32) -> [f32; N] {
        let memory = self.api.memory(&numbers);
        assert_eq!(self.all_reduce(memory, N, op), 0);
        assert_eq!(self.api.synchronize(self.stream), 0);
        self.api.numbers(memory)
    }

    fn abort(&self) {
        // SAFETY: the handle is not used again.
        assert_eq!(unsafe { (self.api.ncclCommAbort)(self.comm) }, 0);
    }
}

fn id(api: Api) -> UniqueId {
    let mut id = UniqueId([0; 128]);
    // SAFETY: NCCL writes 128 bytes.
    assert_eq!(unsafe { (api.ncclGetUniqueId)(&mut id) }, 0);
    id
}

/// Runs ranks as threads, and returns what each does.
fn ranks<T: Send>(fake: &Fake, world: i32, run: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let (api, id) = (fake.api, id(fake.api));
    // One that leaves early is gone for those that still join.
    let (run, joined) = (&run, &Barrier::new(world as usize));
    let begin = move |rank| {
        let rank = Rank::join(api, rank, world, id);
        joined.wait();
        run(rank)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|rank| scope.spawn(move || begin(rank)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a rank"))
            .collect()
    })
}

#[test]
fn sums_are_those_of_all_ranks() {
    let fake = Fake::with(r#"{"devices": 3}"#);
    let all = ranks(&fake, 3, |rank| {
        let own = rank.rank as f32;
        rank.reduced([own, 10.0 * own, 1.0, -own], SUM)
    });
    assert_eq!(all, [[3.0, 30.0, 3.0, -3.0]; 3]);
}

#[test]
fn the_order_of_a_sum_depends_on_the_place_in_the_ring() {
    let fake = Fake::with(r#"{"devices": 3}"#);
    // 1e8 swallows a 1 that comes alone, and not one that comes with others.
    let numbers = [[1e8, 1.0], [1.0, 1e8], [-1e8, 1.0]];
    let all = ranks(&fake, 3, |rank| {
        rank.reduced(numbers[rank.rank as usize], SUM)
    });
    assert_eq!(all, [all[0]; 3], "all ranks have the same bits");
    let straight: f32 = numbers.iter().map(|pair| pair[0]).sum();
    assert_ne!(
        [straight, 1e8 + 2.0],
        all[0],
        "and not those of a sum in the order of ranks"
    );
}

#[test]
fn collectives_bring_everything_where_it_belongs() {
    let fake = Fake::with(r#"{"devices": 2}"#);
    ranks(&fake, 2, |rank| {
        let (api, own, comm, stream) = (rank.api, rank.rank as f32, rank.comm, rank.stream);
        let (one, all) = (api.memory(&[own]), api.memory(&[-1.0; 2]));
        // SAFETY: addresses are never followed, and looked up first.
        unsafe {
            assert_eq!(
                (api.ncclAllGather)(at(one), at(all), 1, F32, comm, stream),
                0
            );
            api.synchronize(stream);
            assert_eq!(api.numbers(all), [0.0, 1.0]);
            assert_eq!(
                (api.ncclBroadcast)(at(one), at(one), 1, F32, 1, comm, stream),
                0
            );
            api.synchronize(stream);
            assert_eq!(api.numbers(one), [1.0]);
            assert_eq!((api.ncclCommDestroy)(comm), 0);
        }
    });
}

#[test]
fn messages_meet_within_a_group_and_wait_for_each_other_without_one() {
    let fake = Fake::with(r#"{"devices": 2}"#);
    let both_asked = Barrier::new(2);
    ranks(&fake, 2, |rank| {
        let (api, comm, stream, peer) = (rank.api, rank.comm, rank.stream, 1 - rank.rank);
        let (from, to) = (api.memory(&[rank.rank as f32]), api.memory(&[-1.0]));
        // SAFETY: addresses are never followed, and looked up first.
        unsafe {
            (api.ncclGroupStart)();
            assert_eq!((api.ncclSend)(at(from), 1, F32, peer, comm, stream), 0);
            assert_eq!((api.ncclRecv)(at(to), 1, F32, peer, comm, stream), 0);
            assert_eq!((api.ncclGroupEnd)(), 0);
            assert_eq!(api.synchronize(stream), 0);
            assert_eq!(api.numbers(to), [peer as f32]);
            // Both send first, and neither comes to receive.
            assert_eq!((api.ncclSend)(at(from), 1, F32, peer, comm, stream), 0);
            assert_eq!((api.ncclRecv)(at(to), 1, F32, peer, comm, stream), 0);
            assert_eq!((api.cuStreamQuery)(stream), NOT_READY);
        }
        both_asked.wait();
        rank.abort();
        assert_eq!(api.synchronize(stream), 0);
    });
}

#[test]
fn without_blocking_a_call_is_done_when_the_communicator_says_so() {
    let fake = Fake::with(r#"{"devices": 2, "delays_ms": {"submit": 30}}"#);
    let (api, id) = (fake.api, id(fake.api));
    let run = |rank: i32| {
        let rank = Rank::join_without_blocking(api, rank, 2, id);
        rank.wait_for(0);
        let memory = rank.api.memory(&[1.0]);
        assert_eq!(rank.all_reduce(memory, 1, SUM), IN_PROGRESS);
        // Nothing is on the stream yet: an event that is recorded now comes too early.
        // SAFETY: handles are never followed.
        assert_eq!(unsafe { (api.cuStreamQuery)(rank.stream) }, 0);
        assert_eq!(
            rank.all_reduce(memory, 1, SUM),
            4,
            "it was not asked whether it is done"
        );
        rank.wait_for(0);
        assert_eq!(api.synchronize(rank.stream), 0);
        assert_eq!(rank.api.numbers(memory), [rank.world as f32]);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| run(0));
        scope.spawn(|| run(1));
    });
}

#[test]
fn a_rank_that_joins_alone_can_be_aborted() {
    let fake = Fake::with(r#"{"devices": 2}"#);
    let rank = Rank::join_without_blocking(fake.api, 0, 2, id(fake.api));
    assert_eq!(rank.state(), IN_PROGRESS);
    rank.abort();
    let mut state = 0;
    // SAFETY: NCCL knows the handle no longer, and says so.
    let code = unsafe { (fake.api.ncclCommGetAsyncError)(rank.comm, &mut state) };
    assert_eq!(code, 4);
}

#[test]
fn a_call_that_hangs_ends_with_an_abort_and_the_stream_goes_on() {
    let fake = Fake::with(
        r#"{"devices": 2, "faults": [{"call": "ncclAllReduce", "rank": 1, "after": 1, "does": "hang"}]}"#,
    );
    // A rank that sees the other leave says so.
    let both_seen = Barrier::new(2);
    ranks(&fake, 2, |rank| {
        assert_eq!(rank.reduced([1.0], SUM), [2.0]);
        let memory = rank.api.memory(&[1.0]);
        assert_eq!(rank.all_reduce(memory, 1, SUM), 0);
        // SAFETY: handles are never followed.
        assert_eq!(unsafe { (rank.api.cuStreamQuery)(rank.stream) }, NOT_READY);
        assert_eq!(rank.state(), 0, "nobody says anything");
        both_seen.wait();
        rank.abort();
        assert_eq!(rank.api.synchronize(rank.stream), 0);
        assert_eq!(rank.api.numbers(memory), [1.0], "nothing was reduced");
    });
}

#[test]
fn an_abort_within_a_group_does_nothing() {
    let fake =
        Fake::with(r#"{"devices": 2, "faults": [{"call": "ncclAllReduce", "does": "hang"}]}"#);
    // A rank that sees the other leave says so.
    let both_seen = Barrier::new(2);
    ranks(&fake, 2, |rank| {
        let memory = rank.api.memory(&[1.0]);
        assert_eq!(rank.all_reduce(memory, 1, SUM), 0);
        // SAFETY: handles are never followed.
        unsafe {
            assert_eq!((rank.api.ncclGroupStart)(), 0);
            rank.abort();
            assert_eq!((rank.api.ncclGroupEnd)(), 0);
            assert_eq!((rank.api.cuStreamQuery)(rank.stream), NOT_READY);
        }
        both_seen.wait();
        rank.abort();
        assert_eq!(rank.api.synchronize(rank.stream), 0);
    });
}

#[test]
fn a_rank_that_is_gone_is_told_or_not() {
    let check = |death: &str, expect: u32| {
        let fake = Fake::with(&format!(r#"{{"devices": 2, "peer_death": "{death}"}}"#));
        let gone = Barrier::new(2);
        ranks(&fake, 2, |rank| {
            if rank.rank == 1 {
                rank.abort();
                gone.wait();
                return;
            }
            gone.wait();
            if expect != 0 {
                rank.wait_for(expect);
            }
            let memory = rank.api.memory(&[1.0]);
            assert_eq!(rank.all_reduce(memory, 1, SUM), expect);
            assert_eq!(rank.state(), expect);
            rank.abort();
            assert_eq!(rank.api.synchronize(rank.stream), 0);
        });
    };
    check("error", 6);
    check("hang", 0);
}

#[test]
fn ranks_that_do_not_mean_the_same_are_told() {
    let fake = Fake::with(r#"{"devices": 2}"#);
    let both_seen = Barrier::new(2);
    ranks(&fake, 2, |rank| {
        let memory = rank.api.memory(&[1.0; 2]);
        assert_eq!(rank.all_reduce(memory, 1 + rank.rank as usize, SUM), 0);
        rank.wait_for(5);
        both_seen.wait();
        rank.abort();
    });
}

#[test]
fn two_ranks_on_one_device_are_refused() {
    let fake = Fake::with("{}");
    let (api, id) = (fake.api, id(fake.api));
    api.enter(0);
    let [first, second] = [0, 1].map(|rank| {
        let (mut comm, mut config) = (
            null_mut(),
            Config {
                size: 48,
                magic: 0xcafe_beef,
                version: 21800,
                blocking: 0,
            },
        );
        // SAFETY: NCCL writes one handle, and reads as much of the configuration as there is.
        unsafe { (api.ncclCommInitRankConfig)(&mut comm, 2, id, rank, &mut config) };
        Rank {
            api,
            rank,
            world: 2,
            comm,
            stream: null_mut(),
        }
    });
    while [first.state(), second.state()] != [5, IN_PROGRESS]
        && [first.state(), second.state()] != [IN_PROGRESS, 5]
    {
        std::thread::yield_now();
    }
    first.abort();
    second.abort();
}

#[test]
fn links_between_ranks_do_what_they_are_told_to() {
    let check = |word: &str, expect: f32| {
        let fake = Fake::with(&format!(r#"{{"devices": 2, "peers": "{word}"}}"#));
        let all = ranks(&fake, 2, |rank| rank.reduced([1.0, 1.0], SUM));
        assert_eq!(
            all[0][0] == 2.0 && all[1][0] == 2.0,
            expect == 2.0,
            "{word}: {all:?}"
        );
    };
    check("OK", 2.0);
    // NCCL goes through the host by itself.
    check("NS", 2.0);
    check("BAD", f32::NAN);
}
