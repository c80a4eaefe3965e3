//! The protocol of a meeting under a model checker: the very file that ranks run, over words whose every interleaving
//! the checker chooses.
//!
//! Its `wait` has no timeout, so a lost wake-up is a deadlock, which the checker reports. Accesses are sequentially
//! consistent in the protocol and in the model.

#[path = "../src/team/protocol.rs"]
#[allow(unreachable_pub)]
mod protocol;

/// Words that the checker watches, and a futex made of its lock and condition variable.
mod sync {
    pub(crate) use shuttle::sync::atomic::{AtomicU32, Ordering};
    use shuttle::sync::{Condvar, Mutex};

    shuttle::lazy_static! {
        static ref LOCK: Mutex<()> = Mutex::new(());
        static ref CHANGED: Condvar = Condvar::new();
    }

    /// As a futex: compares and sleeps in one step, seen from a waker.
    pub(crate) fn wait(word: &AtomicU32, seen: u32, _: std::time::Duration) {
        let guard = LOCK.lock().unwrap();
        if word.load(Ordering::SeqCst) == seen {
            drop(CHANGED.wait(guard).unwrap());
        }
    }

    pub(crate) fn wake_all(_: &AtomicU32) {
        let _guard = LOCK.lock().unwrap();
        CHANGED.notify_all();
    }
}

use std::sync::Arc;
use std::time::Duration;

use protocol::{Arrival, Asleep, Board, arrive, complete};
use shuttle::thread;
use sync::{AtomicU32, Ordering};

/// The words of a few ranks, with two cells each, as in a control page.
struct Words {
    progress: Vec<[AtomicU32; 2]>,
    bell: AtomicU32,
    sleepers: AtomicU32,
    /// What each rank brings; plain in the segment, atomic here so that the checker sees it.
    data: Vec<[AtomicU32; 2]>,
}

impl Words {
    fn new(ranks: usize) -> Self {
        let cells = || (0..ranks).map(|_| [AtomicU32::new(0), AtomicU32::new(0)]);
        Self {
            progress: cells().collect(),
            bell: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            data: cells().collect(),
        }
    }
}

/// One operation's view: its cell.
struct View<'a>(&'a Words, usize);

impl Board for View<'_> {
    fn members(&self) -> usize {
        self.0.progress.len()
    }

    fn progress(&self, member: usize) -> &AtomicU32 {
        &self.0.progress[member][self.1 % 2]
    }

    fn bell(&self) -> &AtomicU32 {
        &self.0.bell
    }

    fn sleepers(&self) -> &AtomicU32 {
        &self.0.sleepers
    }
}

/// A meeting as `Meeting::meet` holds it, with `looks` looks before sleep.
fn meet(board: &View<'_>, me: usize, target: u32, looks: usize) {
    let arrival = arrive(board, me, target);
    if arrival != Arrival::Early || (0..looks).any(|_| complete(board, target)) {
        return;
    }
    let asleep = Asleep::register(board);
    while !asleep.sleep(target, || Duration::MAX) {}
}

/// Every rank runs operations of one meeting each, whose data lies in the operation's cell, as small ones do.
fn inline_operations(ranks: usize, operations: usize, looks: usize) {
    let words = Arc::new(Words::new(ranks));
    let threads: Vec<_> = (0..ranks)
        .map(|me| {
            let words = words.clone();
            thread::spawn(move || {
                for operation in 1..=operations {
                    let view = View(&words, operation);
                    let brought = |rank: usize| (operation * 100 + rank) as u32;
                    words.data[me][operation % 2].store(brought(me), Ordering::Relaxed);
                    meet(&view, me, operation as u32, looks);
                    for rank in 0..ranks {
                        let seen = words.data[rank][operation % 2].load(Ordering::Relaxed);
                        assert_eq!(seen, brought(rank), "rank {me} reads rank {rank}'s data");
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|rank| rank.join().unwrap());
}

/// Every rank runs operations of two meetings on one buffer each, which its peers read and write in between.
fn shared_operations(ranks: usize, operations: usize, looks: usize) {
    let words = Arc::new(Words::new(ranks));
    let threads: Vec<_> = (0..ranks)
        .map(|me| {
            let words = words.clone();
            thread::spawn(move || {
                for operation in 1..=operations {
                    let view = View(&words, operation);
                    words.data[me][0].store(1, Ordering::Relaxed);
                    meet(&view, me, 2 * operation as u32 - 1, looks);
                    // Rank 0 folds all buffers into all buffers.
                    if me == 0 {
                        let sum = (0..ranks)
                            .map(|rank| words.data[rank][0].load(Ordering::Relaxed))
                            .sum();
                        (0..ranks)
                            .for_each(|rank| words.data[rank][0].store(sum, Ordering::Relaxed));
                    }
                    meet(&view, me, 2 * operation as u32, looks);
                    assert_eq!(words.data[me][0].load(Ordering::Relaxed), ranks as u32);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|rank| rank.join().unwrap());
}

#[test]
fn the_first_schedules_of_two_ranks_lose_no_wake_up() {
    // Depth first: the last steps of both ranks in every order, where they go to sleep and wake each other.
    shuttle::check_dfs(|| inline_operations(2, 1, 0), Some(30_000));
}

#[test]
fn small_operations_read_what_was_brought_under_many_schedules() {
    shuttle::check_random(|| inline_operations(2, 4, 1), 5_000);
    shuttle::check_random(|| inline_operations(3, 3, 0), 5_000);
    shuttle::check_pct(|| inline_operations(3, 3, 1), 3_000, 3);
}

#[test]
fn buffers_belong_to_the_operation_between_its_meetings() {
    shuttle::check_random(|| shared_operations(2, 3, 1), 5_000);
    shuttle::check_random(|| shared_operations(4, 2, 0), 3_000);
    shuttle::check_pct(|| shared_operations(3, 2, 0), 3_000, 3);
}
