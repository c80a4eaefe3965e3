//! NCCL: its functions, its types as in the headers since 2.18, and its communicators.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::call::Float;
use crate::driver::{Handle, Stream};
use crate::error::NcclError;
use crate::library::{Answer, Library, functions};
use crate::places::Places;
use crate::version::Version;

/// The oldest supported NCCL: configurations with `splitShare`, and `ncclCommAbort` of non-blocking communicators.
pub(crate) const LEAST: Version = Version {
    major: 2,
    minor: 18,
    patch: Some(0),
};

/// `ncclInvalidUsage`.
const INVALID_USAGE: c_int = 5;

/// `ncclInProgress`: a call on a non-blocking communicator continues in the background.
const IN_PROGRESS: c_int = 7;

/// `ncclUniqueId`: shared by the ranks of a communicator.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct UniqueId(pub(crate) [u8; UNIQUE_ID_BYTES]);

/// `NCCL_UNIQUE_ID_BYTES`.
pub(crate) const UNIQUE_ID_BYTES: usize = 128;

/// The beginning of `ncclConfig_t`, as in 2.18. Newer versions have more fields; NCCL reads from `size` and `version` which
/// of them are present.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// `NCCL_CONFIG_UNDEF_INT`.
    const UNDEFINED: c_int = c_int::MIN;

    /// For a communicator whose functions return at once.
    fn without_blocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 0,
            cga_cluster_size: Self::UNDEFINED,
            min_ctas: Self::UNDEFINED,
            max_ctas: Self::UNDEFINED,
            net_name: null(),
            split_share: Self::UNDEFINED,
        }
    }
}

/// `ncclRedOp_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduce {
    /// `ncclSum`.
    Sum = 0,
    /// `ncclMax`.
    Max = 2,
}

/// `ncclUint8`: for data that is moved, not added.
const BYTES: c_int = 1;

functions! {
    /// NCCL's functions.
    Functions
    required {
        get_unique_id: "ncclGetUniqueId", (id: *mut UniqueId) -> c_int;
        comm_init_rank_config: "ncclCommInitRankConfig", (
            comm: *mut Handle, world: c_int, id: UniqueId, rank: c_int, config: *mut Config
        ) -> c_int;
        comm_finalize: "ncclCommFinalize", (comm: Handle) -> c_int;
        comm_destroy: "ncclCommDestroy", (comm: Handle) -> c_int;
        comm_abort: "ncclCommAbort", (comm: Handle) -> c_int;
        get_last_error: "ncclGetLastError", (comm: Handle) -> *const c_char;
        comm_get_async_error: "ncclCommGetAsyncError", (comm: Handle, error: *mut c_int) -> c_int;
        all_reduce: "ncclAllReduce", (
            from: *const c_void, to: *mut c_void, count: usize, data: c_int, op: c_int, comm: Handle, stream: Handle
        ) -> c_int;
        reduce: "ncclReduce", (
            from: *const c_void, to: *mut c_void, count: usize, data: c_int, op: c_int, root: c_int, comm: Handle, stream: Handle
        ) -> c_int;
        broadcast: "ncclBroadcast", (
            from: *const c_void, to: *mut c_void, count: usize, data: c_int, root: c_int, comm: Handle, stream: Handle
        ) -> c_int;
        all_gather: "ncclAllGather", (
            from: *const c_void, to: *mut c_void, count: usize, data: c_int, comm: Handle, stream: Handle
        ) -> c_int;
        send: "ncclSend", (from: *const c_void, count: usize, data: c_int, to: c_int, comm: Handle, stream: Handle) -> c_int;
        recv: "ncclRecv", (to: *mut c_void, count: usize, data: c_int, from: c_int, comm: Handle, stream: Handle) -> c_int;
        group_start: "ncclGroupStart", () -> c_int;
        group_end: "ncclGroupEnd", () -> c_int;
    }
    optional {}
}

/// NCCL, loaded and of a supported version. Copies share it.
#[derive(Clone, Copy)]
pub(crate) struct Nccl {
    functions: &'static Functions,
    pub(crate) version: Version,
}

impl Nccl {
    /// Loads the first usable copy.
    pub(crate) fn load(places: &Places) -> Result<Self, NcclError> {
        places.open_nccl(&Self::of)
    }

    fn of(library: Library) -> Result<Self, NcclError> {
        let version = version_of(&library)?;
        if version < LEAST {
            return Err(NcclError::TooOld {
                path: library.path().into(),
                found: version,
                least: LEAST,
            });
        }
        let functions = Functions::find(&library)?;
        Ok(Self {
            functions: Box::leak(Box::new(functions)),
            version,
        })
    }

    /// A new communicator's id. Needs no device.
    pub(crate) fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: NCCL stores 128 bytes.
        let made = unsafe { self.functions.get_unique_id(&mut id) };
        self.check(made, null_mut())?;
        Ok(id)
    }

    /// An error unless `code` is success or in progress.
    fn check(&self, (call, code): Answer, comm: Handle) -> Result<(), NcclError> {
        if code == 0 || code == IN_PROGRESS {
            return Ok(());
        }
        Err(NcclError::Nccl {
            call,
            code,
            text: meaning(code),
            detail: self.last_words(comm),
            during: None,
        })
    }

    /// NCCL's last error message, in parentheses after a blank, or nothing.
    fn last_words(&self, comm: Handle) -> String {
        // SAFETY: null or a communicator; the answer is null or a string that lives until NCCL's next failure, which only this
        // thread can cause.
        let words = unsafe {
            let (_, words) = self.functions.get_last_error(comm);
            (!words.is_null()).then(|| CStr::from_ptr(words).to_string_lossy().into_owned())
        };
        let words = words.unwrap_or_default();
        let last = words.lines().rev().find(|line| !line.trim().is_empty());
        let last: Option<String> = last.map(|line| line.trim().chars().take(400).collect());
        last.map_or_else(String::new, |line| format!(" ({line})"))
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {}", self.version)
    }
}

/// Checked before other functions are looked up: "too old" is a better error than a missing function.
fn version_of(library: &Library) -> Result<Version, NcclError> {
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
    let mut code = 0;
    // SAFETY: the function has always had this type; it stores one int.
    let answer = unsafe { library.function::<GetVersion>("ncclGetVersion")?(&mut code) };
    if answer != 0 {
        return Err(NcclError::Nccl {
            call: "ncclGetVersion",
            code: answer,
            text: meaning(answer),
            detail: String::new(),
            during: None,
        });
    }
    Ok(Version::of_nccl(code))
}

/// The meaning of a `ncclResult_t`.
fn meaning(code: c_int) -> &'static str {
    match code {
        1 => "a CUDA call inside NCCL failed",
        2 => "a call to the system inside NCCL failed",
        3 => "an error inside NCCL, or memory that was overwritten",
        4 => "an invalid argument",
        5 => "an invalid use of NCCL",
        6 => "a peer is gone, or the network to it failed",
        7 => "still in progress",
        8 => "a timeout inside NCCL",
        _ => "an unknown error",
    }
}

/// An NCCL communicator. It belongs to one thread: NCCL allows only one thread in a communicator at a time.
#[derive(Debug)]
pub(crate) struct Comm {
    nccl: Nccl,
    /// Locked during every call; `None` after its end.
    raw: Arc<Mutex<Option<Raw>>>,
}

/// A `ncclComm_t`.
#[derive(Debug, Clone, Copy)]
struct Raw(Handle);

// SAFETY: NCCL allows any thread in a communicator, one at a time; the lock around it ensures that.
unsafe impl Send for Raw {}

/// Ends a communicator from another thread while its own is stuck in the driver.
#[derive(Debug, Clone)]
pub(crate) struct Ender {
    nccl: Nccl,
    raw: Arc<Mutex<Option<Raw>>>,
}

impl Ender {
    /// Aborts the communicator unless its thread is calling NCCL; returns whether it is ended. `is_away` is evaluated while that
    /// thread cannot start a call.
    ///
    /// *Blocks*: until NCCL is done. The communicator's own thread waits for that when it next calls NCCL.
    ///
    /// *Source*: "Fault Tolerance" in NCCL's user guide: any thread may abort while no other is in NCCL.
    pub(crate) fn abort(&self, is_away: impl FnOnce() -> bool) -> bool {
        let Ok(mut raw) = self.raw.try_lock() else {
            return false;
        };
        if raw.is_some() && !is_away() {
            return false;
        }
        let Some(Raw(ended)) = raw.take() else {
            return true;
        };
        // SAFETY: the communicator is alive, no thread is in it, and nobody uses it after this.
        let answer = unsafe { self.nccl.functions.comm_abort(ended) };
        if let Err(error) = self.nccl.check(answer, null_mut()) {
            tracing::debug!("NCCL's communicator did not end: {error}");
        }
        true
    }
}

impl Comm {
    /// Begins to join; [`is_settled`](Self::is_settled) says when it is done. The device's context is current on this thread.
    pub(crate) fn begin(
        nccl: Nccl,
        id: UniqueId,
        rank: usize,
        world: usize,
    ) -> Result<Self, NcclError> {
        let (Ok(rank), Ok(world)) = (c_int::try_from(rank), c_int::try_from(world)) else {
            // A group has at most 1024 ranks.
            unreachable!("rank {rank} of {world}");
        };
        let mut config = Config::without_blocking();
        let mut raw = null_mut();
        // SAFETY: NCCL stores one pointer, and copies the configuration before it returns.
        let begun = unsafe {
            (nccl.functions).comm_init_rank_config(&mut raw, world, id, rank, &mut config)
        };
        nccl.check(begun, raw)?;
        Ok(Self {
            nccl,
            raw: Arc::new(Mutex::new(Some(Raw(raw)))),
        })
    }

    /// A handle that ends it from another thread.
    pub(crate) fn ender(&self) -> Ender {
        Ender {
            nccl: self.nccl,
            raw: self.raw.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Raw>> {
        self.raw.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls a function with the communicator; an error if it has been ended.
    fn call(&self, run: impl FnOnce(&Functions, Handle) -> Answer) -> Result<(), NcclError> {
        let raw = self.lock();
        let Some(Raw(raw)) = *raw else {
            return Err(NcclError::Nccl {
                call: "NCCL",
                code: INVALID_USAGE,
                text: "the communicator has been ended",
                detail: String::new(),
                during: None,
            });
        };
        self.nccl.check(run(self.nccl.functions, raw), raw)
    }

    /// The same for functions that end it, which do nothing if it has been ended.
    fn end(self, run: impl FnOnce(&Functions, Handle) -> Answer) -> Result<(), NcclError> {
        match self.lock().take() {
            Some(Raw(raw)) => self.nccl.check(run(self.nccl.functions, raw), null_mut()),
            None => Ok(()),
        }
    }

    /// Whether NCCL has finished the last call, or its error.
    pub(crate) fn is_settled(&self, call: &'static str) -> Result<bool, NcclError> {
        let mut state = 0;
        // SAFETY: the communicator is alive; NCCL stores one int.
        self.call(|nccl, raw| unsafe { nccl.comm_get_async_error(raw, &mut state) })?;
        self.call(|_, _| (call, state))?;
        Ok(state != IN_PROGRESS)
    }

    /// Begins an orderly end after all its work; [`is_settled`](Self::is_settled) says when peers need nothing more from this
    /// rank.
    pub(crate) fn finalize(&self) -> Result<(), NcclError> {
        // SAFETY: the communicator is alive.
        self.call(|nccl, raw| unsafe { nccl.comm_finalize(raw) })
    }

    /// Frees its resources, after [`finalize`](Self::finalize).
    pub(crate) fn destroy(self) -> Result<(), NcclError> {
        // SAFETY: the communicator is alive, and nobody uses it after this.
        self.end(|nccl, raw| unsafe { nccl.comm_destroy(raw) })
    }

    /// Ends it at once. All ranks must do so.
    pub(crate) fn abort(self) -> Result<(), NcclError> {
        // SAFETY: the communicator is alive, and nobody uses it after this.
        self.end(|nccl, raw| unsafe { nccl.comm_abort(raw) })
    }

    /// Groups the calls that `put` makes on this thread into one.
    ///
    /// The group is ended even if one of its calls fails: NCCL does not carry out an abort within a group, although it reports
    /// success.
    ///
    /// *Errors*: the first one; the group's end would only repeat it.
    pub(crate) fn group(
        &self,
        put: impl FnOnce() -> Result<(), NcclError>,
    ) -> Result<(), NcclError> {
        // SAFETY: it takes no arguments.
        let started = unsafe { self.nccl.functions.group_start() };
        self.nccl.check(started, null_mut())?;
        let put = put();
        let raw = self.lock();
        // SAFETY: it takes no arguments; the lock keeps the communicator alive while its calls begin.
        let ended = unsafe { self.nccl.functions.group_end() };
        let raw = raw.map_or(null_mut(), |raw| raw.0);
        put.and(self.nccl.check(ended, raw))
    }

    /// Reduces `count` numbers in place.
    ///
    /// # Safety
    ///
    /// As for all calls below: the ranges are memory of the stream's context, and live until the stream has done the work.
    pub(crate) unsafe fn all_reduce(
        &self,
        ptr: u64,
        (count, data): (usize, Float),
        reduce: Reduce,
        stream: &Stream,
    ) -> Result<(), NcclError> {
        let (from, to, data) = (ptr as *const c_void, ptr as *mut c_void, data as c_int);
        // SAFETY: the caller's contract.
        self.call(|nccl, raw| unsafe {
            nccl.all_reduce(from, to, count, data, reduce as c_int, raw, stream.raw)
        })
    }

    /// Sums `count` numbers of all ranks, in place, on the root. Those of the other ranks stay.
    ///
    /// # Safety
    ///
    /// As [`all_reduce`](Self::all_reduce).
    pub(crate) unsafe fn reduce(
        &self,
        ptr: u64,
        (count, data): (usize, Float),
        root: usize,
        stream: &Stream,
    ) -> Result<(), NcclError> {
        let (from, to, data) = (ptr as *const c_void, ptr as *mut c_void, data as c_int);
        // SAFETY: the caller's contract.
        self.call(|nccl, raw| unsafe {
            let op = Reduce::Sum as c_int;
            nccl.reduce(from, to, count, data, op, root as c_int, raw, stream.raw)
        })
    }

    /// Copies the root's data at `from` to `to` on all ranks; the two may be equal.
    ///
    /// # Safety
    ///
    /// As [`all_reduce`](Self::all_reduce).
    pub(crate) unsafe fn broadcast(
        &self,
        (from, to): (u64, u64),
        bytes: usize,
        root: usize,
        stream: &Stream,
    ) -> Result<(), NcclError> {
        let (from, to, root) = (from as *const c_void, to as *mut c_void, root as c_int);
        // SAFETY: the caller's contract.
        self.call(|nccl, raw| unsafe {
            nccl.broadcast(from, to, bytes, BYTES, root, raw, stream.raw)
        })
    }

    /// Collects all ranks' data at `from` into `to`, in rank order; this rank's part may already be in place.
    ///
    /// # Safety
    ///
    /// As [`all_reduce`](Self::all_reduce).
    pub(crate) unsafe fn all_gather(
        &self,
        (from, to): (u64, u64),
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), NcclError> {
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: the caller's contract.
        self.call(|nccl, raw| unsafe { nccl.all_gather(from, to, bytes, BYTES, raw, stream.raw) })
    }

    /// Sends to a peer, which receives as many bytes.
    ///
    /// # Safety
    ///
    /// As [`all_reduce`](Self::all_reduce).
    pub(crate) unsafe fn send(
        &self,
        ptr: u64,
        bytes: usize,
        peer: usize,
        stream: &Stream,
    ) -> Result<(), NcclError> {
        let (from, peer) = (ptr as *const c_void, peer as c_int);
        // SAFETY: the caller's contract.
        self.call(|nccl, raw| unsafe { nccl.send(from, bytes, BYTES, peer, raw, stream.raw) })
    }

    /// Receives from a peer, which sends as many bytes.
    ///
    /// # Safety
    ///
    /// As [`all_reduce`](Self::all_reduce).
    pub(crate) unsafe fn recv(
        &self,
        ptr: u64,
        bytes: usize,
        peer: usize,
        stream: &Stream,
    ) -> Result<(), NcclError> {
        let (to, peer) = (ptr as *mut c_void, peer as c_int);
        // SAFETY: the caller's contract.
        self.call(|nccl, raw| unsafe { nccl.recv(to, bytes, BYTES, peer, raw, stream.raw) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn the_configuration_lies_as_in_the_header() {
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(
            [
                offset_of!(Config, size),
                offset_of!(Config, magic),
                offset_of!(Config, version),
                offset_of!(Config, blocking),
                offset_of!(Config, cga_cluster_size),
                offset_of!(Config, min_ctas),
                offset_of!(Config, max_ctas),
                offset_of!(Config, net_name),
                offset_of!(Config, split_share),
            ],
            [0, 8, 12, 16, 20, 24, 28, 32, 40]
        );
        let config = Config::without_blocking();
        assert_eq!((config.size, config.blocking), (48, 0));
    }

    #[test]
    fn an_identity_is_128_bytes() {
        assert_eq!(size_of::<UniqueId>(), 128);
        assert_eq!(align_of::<UniqueId>(), 1);
    }
}
