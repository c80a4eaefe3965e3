//! MPI as a carrier of data: this process's place in an MPI job, and lines to its other processes.
//!
//! MPI moves bytes and nothing else: it adds no numbers, and no call of it that waits is ever made by a thread that a program
//! waits for. Everything else stays where it is: ranks prove the token over TCP before anything that came over MPI is used, and
//! that a rank has died, given up or stalled is learned from the connections for messages and from deadlines.
//!
//! All calls are made one at a time (`MPI_THREAD_SERIALIZED`). MPI is started once for each process, by a thread of its own,
//! `rank3/mpi`: `MPI_Init_thread` and `MPI_Finalize` wait for all processes of the job, and can be left alone there. Between these
//! two, the thread looks in at MPI now and then, because messages move only inside of its calls.
#![allow(unsafe_code)]

mod library;
mod line;
mod messages;
#[cfg(test)]
pub(crate) mod tests;

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use paceline_rendezvous::scheduler::{self, Scheduler};
use parking_lot::Mutex;

use self::library::Calls;
pub(crate) use self::library::Library;
pub(crate) use self::line::{Line, message_bytes};
pub(crate) use self::messages::{Address, Messages, Request};

/// How often the thread looks in, so that messages move while their rank computes.
const PROGRESS: Duration = Duration::from_millis(5);
/// Pause between two looks at whether all processes have come.
const LOOK: Duration = Duration::from_micros(200);
/// Longest that a process which ends in order waits for the others: rank 0 may still be writing files. Then it leaves without
/// `MPI_Finalize`, upon which most launchers end the rest.
const MEET_TIMEOUT: Duration = Duration::from_secs(600);
/// Longest that `MPI_Finalize` may take when all have come. That of MPICH 4.0 does not return now and then if UCX goes over TCP.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(5);
/// The tag of a message that nobody ever sends.
const IDLE_TAG: c_int = 0;
/// The largest tag that every MPI has.
const TAG_MAX: c_int = 32_767;

static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
static WORLD: OnceLock<Result<World, String>> = OnceLock::new();
static STARTED: AtomicBool = AtomicBool::new(false);

/// The job that MPI's launcher has started, as this process sees it.
#[derive(Debug)]
pub(crate) struct World {
    /// This process's number. MPI may count otherwise than the job.
    pub(crate) process: c_int,
    pub(crate) processes: usize,
    library: &'static Library,
    /// The process that has started it, and not its forked children.
    pid: u32,
    /// Held during every call. True once MPI may not be called any more.
    finalized: Mutex<bool>,
    /// Tags that groups have been given.
    tags: AtomicI32,
    /// Groups that use MPI.
    groups: AtomicUsize,
    /// A group has failed: peers may never come to `MPI_Finalize`.
    failed: AtomicBool,
    leaving: AtomicBool,
    thread: Thread,
    left: Mutex<Receiver<()>>,
}

/// The library that this process uses, and which is loaded at the first call.
///
/// *Errors*: it cannot be used, and why.
pub(crate) fn library() -> Result<&'static Library, String> {
    LIBRARY
        .get_or_init(Library::load)
        .as_ref()
        .map_err(Clone::clone)
}

/// The launcher that has started this process, and how many it started, where it says so in the environment.
pub(crate) fn launcher() -> Option<(Scheduler, usize)> {
    scheduler::tasks(&|name| std::env::var(name).ok())
}

/// MPI with `world` processes, once it has started; the first call begins that.
///
/// *Errors*: it cannot start, and why.
pub(crate) fn world(rank: usize, world: usize) -> Option<Result<&'static World, String>> {
    if !STARTED.swap(true, Ordering::Relaxed) {
        let thread = std::thread::Builder::new().name(format!("rank{rank}/mpi"));
        let spawned = thread.spawn(move || match World::start(world) {
            Ok((started, idle, left)) => {
                if let Ok(world) = WORLD.get_or_init(|| Ok(started)) {
                    world.serve(idle, &left);
                }
            }
            Err(reason) => drop(WORLD.set(Err(reason))),
        });
        if let Err(error) = spawned {
            let _ = WORLD.set(Err(format!("cannot start a thread for MPI: {error}")));
        }
    }
    WORLD
        .get()
        .map(|world| world.as_ref().map_err(Clone::clone))
}

/// A group has failed. From now on MPI is called for other groups only, because some libraries end the process when they find that
/// a peer is gone; and the process will end without `MPI_Finalize`, which waits for all peers.
pub(crate) fn give_up() {
    if let Some(Ok(world)) = WORLD.get() {
        world.failed.store(true, Ordering::Relaxed);
    }
}

impl World {
    /// Also the request that the thread looks in with, and by what it says that all have met and that it has left.
    ///
    /// *Blocks*: until all processes have started.
    fn start(expected: usize) -> Result<(Self, Request, Sender<()>), String> {
        let library = library()?;
        let version = &library.version;
        let calls = &*library.calls;
        if calls.is_initialized() {
            return Err(
                "the program has initialized MPI itself, and would call it at the same time".into(),
            );
        }
        let (process, size) = calls.init()?;
        match usize::try_from(size) {
            Ok(size) if size == expected => {}
            Ok(1) => {
                return Err(format!(
                    "{version} finds this process alone, and the job has {expected} ranks: its own launcher has not started them"
                ));
            }
            _ => {
                return Err(format!(
                    "{version} was started with {size} processes, and the job has {expected} ranks"
                ));
            }
        }
        await_all(calls, &mut calls.duplicate()?)?;
        let from = Address {
            process,
            tag: IDLE_TAG,
        };
        // SAFETY: there is no room for a message, and none is ever sent.
        let idle = unsafe { calls.receive(from, std::ptr::dangling_mut(), 0) }?;
        // SAFETY: the function has this type; what it calls is there as long as the process.
        if unsafe { atexit(leave) } != 0 {
            return Err("the system does not take what is to be done when the program ends".into());
        }
        let (left, has_left) = channel();
        let world = Self {
            process,
            processes: expected,
            library,
            pid: std::process::id(),
            finalized: Mutex::new(false),
            tags: AtomicI32::new(IDLE_TAG),
            groups: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            thread: std::thread::current(),
            left: Mutex::new(has_left),
        };
        Ok((world, idle, left))
    }

    /// The thread's work between start and end.
    fn serve(&self, mut idle: Request, left: &Sender<()>) {
        while !self.leaving.load(Ordering::Acquire) {
            std::thread::park_timeout(PROGRESS);
            let is_used = self.groups.load(Ordering::Relaxed) > 0;
            if is_used && !self.failed.load(Ordering::Relaxed) {
                // It is never done; and lines see errors themselves.
                let _ = self.call(|library| library.test(&mut idle));
            }
        }
        let mut finalized = self.finalized.lock();
        let calls = &*self.library.calls;
        calls.end(idle, true);
        *finalized = true;
        // `MPI_Finalize` waits busily, and others may have work to do on these cores.
        let met = calls.meet().and_then(|mut met| await_all(calls, &mut met));
        let _ = left.send(());
        if let Err(reason) = met.and_then(|()| calls.finalize()) {
            paceline_rendezvous::notice!(WARN, "MPI did not end in order: {reason}");
        }
        let _ = left.send(());
    }

    /// Leaves MPI's job in order, if that was possible in this process.
    fn leave(&self) {
        let is_fork = self.pid != std::process::id();
        // A group that was not left means that the program ends amid its work, and peers must learn that by its end.
        let in_order =
            !self.failed.load(Ordering::Relaxed) && self.groups.load(Ordering::Relaxed) == 0;
        if in_order && !is_fork {
            self.leaving.store(true, Ordering::Release);
            self.thread.unpark();
            let left = self.left.lock();
            let came = [MEET_TIMEOUT, FINALIZE_TIMEOUT].map(|limit| left.recv_timeout(limit));
            if came[1].is_err() {
                paceline_rendezvous::notice!(
                    WARN,
                    "MPI's end takes too long: this process leaves without it"
                );
            }
        }
    }

    /// A tag by which this process receives, and no other group of it.
    pub(crate) fn tag(&self) -> Result<c_int, String> {
        let tag = self.tags.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        match tag {
            1..=TAG_MAX => Ok(tag),
            _ => Err(format!(
                "a process can form {TAG_MAX} groups over MPI, and has"
            )),
        }
    }

    /// MPI for the lines of one group.
    pub(crate) fn open(&'static self) -> Arc<dyn Messages> {
        self.groups.fetch_add(1, Ordering::Relaxed);
        Arc::new(Open(self))
    }

    fn call<T>(&self, call: impl FnOnce(&dyn Messages) -> Result<T, String>) -> Result<T, String> {
        let finalized = self.finalized.lock();
        match *finalized {
            false => call(&*self.library.calls),
            true => Err("MPI has been finalized".into()),
        }
    }
}

/// Waits for what all processes take part in.
fn await_all(calls: &dyn Calls, request: &mut Request) -> Result<(), String> {
    while calls.test(request)?.is_none() {
        std::thread::sleep(LOOK);
    }
    Ok(())
}

unsafe extern "C" {
    /// As in C's standard.
    fn atexit(function: extern "C" fn()) -> c_int;
}

extern "C" fn leave() {
    if let Some(Ok(world)) = WORLD.get() {
        world.leave();
    }
}

/// MPI, as one group uses it.
#[derive(Debug)]
struct Open(&'static World);

impl Messages for Open {
    unsafe fn send(&self, to: Address, bytes: *const u8, len: usize) -> Result<Request, String> {
        // SAFETY: the caller's contract.
        self.0.call(|mpi| unsafe { mpi.send(to, bytes, len) })
    }

    unsafe fn receive(&self, from: Address, room: *mut u8, len: usize) -> Result<Request, String> {
        // SAFETY: the caller's contract.
        self.0.call(|mpi| unsafe { mpi.receive(from, room, len) })
    }

    fn test(&self, request: &mut Request) -> Result<Option<usize>, String> {
        self.0.call(|mpi| mpi.test(request))
    }

    fn end(&self, request: Request, receives: bool) -> bool {
        let failed = self.0.failed.load(Ordering::Relaxed);
        !failed && self.0.call(|mpi| Ok(mpi.end(request, receives))) == Ok(true)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.groups.fetch_sub(1, Ordering::Relaxed);
    }
}
