//! NCCL: its functions, its types as its header has had them since 2.18, and a communicator as it sees one.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::{Handle, Stream};
use crate::error::NcclError;
use crate::library::{Library, functions};
use crate::places::Places;
use crate::version::Version;

/// The oldest NCCL that works: configurations with `splitShare`, `ncclCommAbort` of communicators that do not block.
pub(crate) const LEAST: Version = Version {
    major: 2,
    minor: 18,
    patch: Some(0),
};

/// `ncclInvalidUsage`.
const INVALID_USAGE: c_int = 5;

/// `ncclInProgress`: a call on a communicator that does not block goes on by itself.
const IN_PROGRESS: c_int = 7;

/// `ncclUniqueId`: what ranks of one communicator have in common.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct UniqueId(pub(crate) [u8; UNIQUE_ID_BYTES]);

/// `NCCL_UNIQUE_ID_BYTES`.
pub(crate) const UNIQUE_ID_BYTES: usize = 128;

/// The beginning of `ncclConfig_t`, as in 2.18. Newer versions have more fields; which there are they tell from `size`,
/// and which are to be looked at from `version`.
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

    /// A communicator whose functions return at once.
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

/// `ncclDataType_t`, as far as it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum DataType {
    Float16 = 6,
    Float32 = 7,
    Bfloat16 = 9,
}

/// `ncclSum`.
const SUM: c_int = 0;

/// `ncclUint8`: data that is moved and not added.
const BYTES: c_int = 1;

functions! {
    /// NCCL's functions.
    Functions
    required {
        get_unique_id: "ncclGetUniqueId", (*mut UniqueId) -> c_int;
        comm_init_rank_config: "ncclCommInitRankConfig", (*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int;
        comm_finalize: "ncclCommFinalize", (Handle) -> c_int;
        comm_destroy: "ncclCommDestroy", (Handle) -> c_int;
        comm_abort: "ncclCommAbort", (Handle) -> c_int;
        comm_get_async_error: "ncclCommGetAsyncError", (Handle, *mut c_int) -> c_int;
        get_last_error: "ncclGetLastError", (Handle) -> *const c_char;
        all_reduce: "ncclAllReduce", (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int;
        broadcast: "ncclBroadcast", (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int;
        all_gather: "ncclAllGather", (*const c_void, *mut c_void, usize, c_int, Handle, Handle) -> c_int;
        send: "ncclSend", (*const c_void, usize, c_int, c_int, Handle, Handle) -> c_int;
        recv: "ncclRecv", (*mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int;
        group_start: "ncclGroupStart", () -> c_int;
        group_end: "ncclGroupEnd", () -> c_int;
    }
    optional {}
}

/// NCCL, loaded and of a version that works. All copies are the same one.
#[derive(Clone, Copy)]
pub(crate) struct Nccl {
    functions: &'static Functions,
    version: Version,
}

impl Nccl {
    /// Loads the first that works.
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

    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// A new identity for a communicator. It needs no device.
    pub(crate) fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: NCCL stores 128 bytes.
        let answer = unsafe { (self.functions.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", answer, null_mut())?;
        Ok(id)
    }

    /// An error unless `code` says that it worked, or that it is on its way.
    fn check(&self, call: &'static str, code: c_int, comm: Handle) -> Result<(), NcclError> {
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

    /// What NCCL wrote last about a failure, behind a separator.
    fn last_words(&self, comm: Handle) -> String {
        // SAFETY: null or a communicator; the answer is null or a string that stays until NCCL's next failure, which this
        // thread would have to cause.
        let words = unsafe {
            let words = (self.functions.get_last_error)(comm);
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

/// Asked before anything else is looked up: an old version is better told than a function that it lacks.
fn version_of(library: &Library) -> Result<Version, NcclError> {
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
    let mut code = 0;
    // SAFETY: the function has had this type since it came; it stores one int.
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

/// What a `ncclResult_t` means.
fn meaning(code: c_int) -> &'static str {
    match code {
        1 => "a CUDA call inside NCCL failed",
        2 => "a call to the system inside NCCL failed",
        3 => "an error inside NCCL, or memory that was overwritten",
        4 => "an argument that NCCL does not take",
        5 => "a use that NCCL does not allow",
        6 => "a peer is gone, or the network to it failed",
        7 => "it is still going on",
        8 => "NCCL's own time was over",
        _ => "an error that this program has no name for",
    }
}

/// A communicator of NCCL. It belongs to one thread: NCCL allows no second one in it while the first is.
#[derive(Debug)]
pub(crate) struct Comm {
    nccl: Nccl,
    /// Locked during every call; none once it has been ended.
    raw: Arc<Mutex<Option<Raw>>>,
}

/// A `ncclComm_t`.
#[derive(Debug, Clone, Copy)]
struct Raw(Handle);

// SAFETY: NCCL allows any thread in a communicator, one after another; the lock around it sees to that.
unsafe impl Send for Raw {}

/// Ends a communicator from another thread, while its own does not come back from the driver.
#[derive(Debug, Clone)]
pub(crate) struct Ender {
    nccl: Nccl,
    raw: Arc<Mutex<Option<Raw>>>,
}

impl Ender {
    /// Aborts it unless its thread is calling NCCL; `is_away` is asked once that thread cannot begin to. Whether it is ended then.
    ///
    /// *Blocks*: until NCCL is done. The communicator's own thread waits for that as soon as it calls NCCL. *Source* - "Fault
    /// Tolerance" in NCCL's user guide: any thread may abort while no other one is in NCCL.
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
        let answer = unsafe { (self.nccl.functions.comm_abort)(ended) };
        if let Err(error) = self.nccl.check("ncclCommAbort", answer, null_mut()) {
            tracing::debug!("NCCL's communicator did not end: {error}");
        }
        true
    }
}

impl Comm {
    /// Begins to join; [`state`](Self::state) says when it is done. The device's context is current on this thread.
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
        let answer = unsafe {
            (nccl.functions.comm_init_rank_config)(&mut raw, world, id, rank, &mut config)
        };
        nccl.check("ncclCommInitRankConfig", answer, raw)?;
        Ok(Self {
            nccl,
            raw: Arc::new(Mutex::new(Some(Raw(raw)))),
        })
    }

    /// What ends it from another thread.
    pub(crate) fn ender(&self) -> Ender {
        Ender {
            nccl: self.nccl,
            raw: self.raw.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Raw>> {
        self.raw.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls a function with the communicator, which is an error where it has been ended.
    fn call(&self, call: &'static str, run: impl FnOnce(Handle) -> c_int) -> Result<(), NcclError> {
        let raw = self.lock();
        let Some(Raw(raw)) = *raw else {
            return Err(NcclError::Nccl {
                call,
                code: INVALID_USAGE,
                text: "the communicator has been ended",
                detail: String::new(),
                during: None,
            });
        };
        self.nccl.check(call, run(raw), raw)
    }

    /// The same for the functions that end it, which have nothing to do where it has been ended.
    fn end(self, call: &'static str, run: impl FnOnce(Handle) -> c_int) -> Result<(), NcclError> {
        match self.lock().take() {
            Some(Raw(raw)) => self.nccl.check(call, run(raw), null_mut()),
            None => Ok(()),
        }
    }

    /// Whether NCCL has done what it was told, or what went wrong meanwhile.
    pub(crate) fn is_settled(&self, call: &'static str) -> Result<bool, NcclError> {
        let mut state = 0;
        let ask = self.nccl.functions.comm_get_async_error;
        self.call("ncclCommGetAsyncError", |raw| {
            // SAFETY: the communicator is alive; NCCL stores one int.
            unsafe { ask(raw, &mut state) }
        })?;
        self.call(call, |_| state)?;
        Ok(state != IN_PROGRESS)
    }

    /// Begins to end it in order, when everything it was told is done; [`is_settled`](Self::is_settled) says when peers have
    /// all that they need from here.
    pub(crate) fn finalize(&self) -> Result<(), NcclError> {
        let finalize = self.nccl.functions.comm_finalize;
        // SAFETY: the communicator is alive.
        self.call("ncclCommFinalize", |raw| unsafe { finalize(raw) })
    }

    /// Gives back what it held, after [`finalize`](Self::finalize).
    pub(crate) fn destroy(self) -> Result<(), NcclError> {
        let destroy = self.nccl.functions.comm_destroy;
        // SAFETY: the communicator is alive, and nobody uses it after this.
        self.end("ncclCommDestroy", |raw| unsafe { destroy(raw) })
    }

    /// Ends it, whatever it is doing. All ranks have to.
    pub(crate) fn abort(self) -> Result<(), NcclError> {
        let abort = self.nccl.functions.comm_abort;
        // SAFETY: the communicator is alive, and nobody uses it after this.
        self.end("ncclCommAbort", |raw| unsafe { abort(raw) })
    }

    /// What `put` calls on this thread is one call.
    ///
    /// The group is ended also where one of its calls fails: NCCL does not carry out an abort that comes within a group, though
    /// it answers that it has. *Errors*: the first one, since the group's end only says it again.
    pub(crate) fn group(
        &self,
        put: impl FnOnce() -> Result<(), NcclError>,
    ) -> Result<(), NcclError> {
        self.group_start()?;
        let put = put();
        let ended = self.group_end();
        put.and(ended)
    }

    fn group_start(&self) -> Result<(), NcclError> {
        // SAFETY: it takes nothing.
        let answer = unsafe { (self.nccl.functions.group_start)() };
        self.nccl.check("ncclGroupStart", answer, null_mut())
    }

    fn group_end(&self) -> Result<(), NcclError> {
        let raw = self.lock();
        // SAFETY: it takes nothing; while this has the lock, the communicator whose calls it begins is not ended.
        let answer = unsafe { (self.nccl.functions.group_end)() };
        let raw = raw.map_or(null_mut(), |raw| raw.0);
        self.nccl.check("ncclGroupEnd", answer, raw)
    }

    /// Sums `count` numbers in place.
    ///
    /// # Safety
    ///
    /// As for all calls below: the ranges are memory of the stream's context, and stay until the stream has done it.
    pub(crate) unsafe fn all_reduce(
        &self,
        ptr: u64,
        count: usize,
        data: DataType,
        stream: &Stream,
    ) -> Result<(), NcclError> {
        let (from, to) = (ptr as *const c_void, ptr as *mut c_void);
        let function = self.nccl.functions.all_reduce;
        self.call("ncclAllReduce", |raw| {
            // SAFETY: the caller's contract.
            unsafe { function(from, to, count, data as c_int, SUM, raw, stream.raw()) }
        })
    }

    /// Gives all ranks what the root has at `from`; `to` may be the same.
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
        let function = self.nccl.functions.broadcast;
        let (from, to) = (from as *const c_void, to as *mut c_void);
        self.call("ncclBroadcast", |raw| {
            // SAFETY: the caller's contract.
            unsafe { function(from, to, bytes, BYTES, root as c_int, raw, stream.raw()) }
        })
    }

    /// Gives all ranks what each has at `from`, at `to` in their order; this rank's may already be at its place.
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
        let function = self.nccl.functions.all_gather;
        let (from, to) = (from as *const c_void, to as *mut c_void);
        self.call("ncclAllGather", |raw| {
            // SAFETY: the caller's contract.
            unsafe { function(from, to, bytes, BYTES, raw, stream.raw()) }
        })
    }

    /// Sends to a peer, which receives as much.
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
        let (function, place) = (self.nccl.functions.send, ptr as *const c_void);
        self.call("ncclSend", |raw| {
            // SAFETY: the caller's contract.
            unsafe { function(place, bytes, BYTES, peer as c_int, raw, stream.raw()) }
        })
    }

    /// Receives from a peer, which sends as much.
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
        let (function, place) = (self.nccl.functions.recv, ptr as *mut c_void);
        self.call("ncclRecv", |raw| {
            // SAFETY: the caller's contract.
            unsafe { function(place, bytes, BYTES, peer as c_int, raw, stream.raw()) }
        })
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
