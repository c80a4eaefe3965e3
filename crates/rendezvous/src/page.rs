//! The job page: shared memory in which each local rank reports its activity, any process can declare the job over, and the
//! launcher says which ranks go on after others are lost.
//!
//! ```text
//! byte    0  header, 2240 bytes                          byte 2240 + 256 * r  slot of local rank r
//!         0  magic "PACEPAGE"  u64                           0  step        u64
//!         8  version           u32                           8  seq         u64
//!        12  slots             u32                          16  since       u64  CLOCK_MONOTONIC, ns; 0 = no activity yet
//!        16  size of it all    u64                          24  phase       u32  0 = none
//!        64  revoked (futex)   u32  0 no, 1 being           28  operation   u32  code + 1, 0 = none
//!                                   written, 2 yes          32  bucket      u32  index + 1, 0 = none
//!        68  generation        u32  the newest              36  awaits      u32  failed generation + 1, 0 = none
//!        72  ended below       u32  generations that        40  pid         u32  0 = none
//!                                   are over                44  rank        u32  rank + 1, 0 = none
//!        76  because of        u32  rank + 1                48  polls stop  u32  0 no, 1 yes
//!        80  changes (futex)   u32  of 64 to 88, awaits     52  stopped by  i32  signal, 0 = not stopped
//!        84  recovers          u32  0 no, 1 yes             56  stopped at  u64  steps done
//!        88  begun             u32  the newest generation   64  misconfigured  u32  0 no, 1 yes
//!                                   that ranks may form     68  recovers    u32  0 no, 1 yes
//!       128  stop signal       i32  0 = none                72  in generation  u32, and there
//!       192  culprit           u32  rank + 1, 0 = none      76  victim of   u32  rank + 1, 0 = none
//!       196  bytes of text     u32                          80  member of   u32  generation at 1280
//!       200  text, 1000 bytes                               84  as          u32  rank in it + 1
//!      1280  generation        u32                          88  member of   u32  generation at 1600
//!      1284  its ranks on all  u32                          92  as          u32  rank in it + 1
//!            nodes                                          96  admits      u32  0 no, 1 yes
//!      1288  bytes of address  u32                         100  joins       u32  0 no, 1 is ready, 2 has joined
//!      1292  address of its store, 308 bytes                104  timeout     u32  ms, 0 = none
//!      1600  another generation, in the same way            108  finishes    u32  0 no, 1 yes
//!      1920  explained         u32  a generation           112  leaves state  u32  0 no, 1 yes
//!      1924  bytes of reason   u32                         116  life (robust futex)  u32  0 = not held
//!      1928  the reason for it, 312 bytes                  120  weights       u64  address, 0 = none
//!                                                          128  their bytes   u64
//!                                                          136  differed at   u64  step, the last time
//!                                                          144  odd one       u32  rank + 1, 0 = none named
//!                                                          148  differences   u32  times that weights differed
//! ```
//!
//! The launcher creates the page as a sealed memfd and its children inherit the descriptor (`PACELINE_PAGE_FD`). Memory
//! outlives the process that wrote it, so the last report of a dead rank can still be read. Every field is a separate
//! atomic and there is no lock: a rank may die between any two stores without blocking another. A reader may therefore
//! see half of an update; the page is for reports and for revocation, never for data.
#![allow(unsafe_code)]

mod activity;
mod error;
mod generation;
mod layout;
mod life;
mod running;

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use memmap2::{MmapOptions, MmapRaw};

use self::layout::{Header, RawSlot};
use crate::env::{WorkerEnv, names};
use crate::os;
use crate::stop::StopSignal;

pub use self::activity::{Activity, OpActivity, Phase, op, op_name};
pub use self::error::PageError;
pub use self::generation::Generation;
pub use self::layout::REVOCATION_TEXT_BYTES_MAX;
pub use self::running::{Running, RunningJob, RunningRank};

/// Largest number of ranks on one machine that a page holds.
pub const SLOTS_MAX: usize = 4096;

/// How long a reader waits for the first revoker to finish writing its cause. Writing takes microseconds; a writer that
/// needs longer is stopped or dead.
const REVOCATION_WRITE_TIMEOUT: Duration = Duration::from_millis(20);

const NOT_REVOKED: u32 = 0;
const BEING_WRITTEN: u32 = 1;
const REVOKED: u32 = 2;

/// A mapped job page. Clones share the mapping.
///
/// ```
/// use paceline_rendezvous::page::{Activity, JobPage, Phase, Revocation};
///
/// let page = JobPage::private(2)?;
/// page.slot(1).set_activity(&Activity { phase: Phase::DataLoader, step: 812, op: None });
/// let (activity, _since) = page.slot(1).activity().unwrap();
/// assert_eq!(activity.to_string(), "in the data loader at step 812");
///
/// assert!(page.revoke(&Revocation { rank: Some(1), text: "rank 1 was killed".into() }));
/// assert_eq!(page.revocation().unwrap().rank, Some(1));
/// # Ok::<(), paceline_rendezvous::page::PageError>(())
/// ```
#[derive(Clone)]
pub struct JobPage(Arc<Mapping>);

struct Mapping {
    memory: MmapRaw,
    slots: usize,
    fd: Option<OwnedFd>,
    is_inherited: bool,
}

/// Why the job was revoked: the culprit and its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revocation {
    /// Global rank of the culprit, if known.
    pub rank: Option<usize>,
    /// What happened, for people. Cut to [`REVOCATION_TEXT_BYTES_MAX`] bytes on a character's boundary.
    pub text: String,
}

/// How often a rank has found that the ranks' weights differ, and what it found the last time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Differences {
    /// How often.
    pub times: u32,
    /// The step at whose start they differed.
    pub step: u64,
    /// The first rank that differed from the majority, by the number that it was started with; `None` without a majority.
    pub odd: Option<usize>,
}

/// A rank that has ended its work at a step boundary because it was asked to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stopped {
    /// The signal that all ranks agreed on.
    pub signal: StopSignal,
    /// Steps done.
    pub step: u64,
}

impl JobPage {
    /// A page that can be handed to children: a memfd, sealed against any change of size.
    ///
    /// The descriptor closes on exec, so that it reaches only the children it is meant for; see [`allow_inherit`].
    pub fn create_memfd(local_world: usize) -> Result<Self, PageError> {
        let bytes = checked_bytes(local_world)?;
        let fd = os::memfd("paceline-page", bytes as u64)
            .map_err(|source| PageError::os("create", source))?;
        let memory = MmapOptions::new()
            .len(bytes)
            .map_raw(&fd)
            .map_err(|source| PageError::os("map", source))?;
        Ok(Self::initialised(memory, local_world, Some(fd)))
    }

    /// A page in this process's own memory, for ranks without a launcher and for threads as ranks.
    pub fn private(local_world: usize) -> Result<Self, PageError> {
        let bytes = checked_bytes(local_world)?;
        let memory = MmapOptions::new()
            .len(bytes)
            .map_anon()
            .map_err(|source| PageError::os("map", source))?;
        Ok(Self::initialised(memory.into(), local_world, None))
    }

    /// Maps the page behind a descriptor inherited from the launcher. The descriptor stays open and the caller's.
    ///
    /// *Errors*: the number comes from the environment and is not believed: a closed descriptor, another kind of file,
    /// a file that could shrink under the mapping, and a page of another version are each told apart.
    pub fn from_fd(fd: RawFd) -> Result<Self, PageError> {
        Self::mapped(fd, |options| options.map_raw(fd))
    }

    /// The same, mapped read-only. Kept inside this module, because most methods of a page write, which would end the
    /// process.
    fn from_fd_to_read(fd: RawFd) -> Result<Self, PageError> {
        Self::mapped(fd, |options| options.map_raw_read_only(fd))
    }

    fn mapped(
        fd: RawFd,
        map: impl FnOnce(&MmapOptions) -> io::Result<MmapRaw>,
    ) -> Result<Self, PageError> {
        if fd < 0 {
            return Err(PageError::NotAPage {
                fd,
                reason: "a descriptor is not negative".into(),
            });
        }
        // SAFETY: the descriptor is borrowed for this function only; should the number be closed, the system calls
        // below answer EBADF, which is reported.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        let refuse = |reason: String| PageError::NotAPage { fd, reason };
        match os::cannot_shrink(file) {
            Ok(true) => {}
            Ok(false) => return Err(refuse("the memory could shrink while it is in use".into())),
            Err(error) => return Err(refuse(format!("not a memfd ({error})"))),
        }
        let bytes = os::file_bytes(file)
            .map_err(|error| refuse(format!("its size is not known ({error})")))?;
        let bytes_max = layout::page_bytes(SLOTS_MAX);
        let Some(bytes) = usize::try_from(bytes)
            .ok()
            .filter(|bytes| (size_of::<Header>()..=bytes_max).contains(bytes))
        else {
            return Err(refuse(format!(
                "it has {bytes} bytes, a page has at most {bytes_max}"
            )));
        };
        let memory =
            map(MmapOptions::new().len(bytes)).map_err(|error| refuse(error.to_string()))?;
        let mut mapping = Mapping {
            memory,
            slots: 0,
            fd: None,
            is_inherited: true,
        };
        mapping.slots = mapping.header().validate(bytes).map_err(refuse)?;
        Ok(Self(Arc::new(mapping)))
    }

    /// The page of the process described by `env`: its launcher's, or a private one when it has no launcher.
    ///
    /// *Errors*: a descriptor without a valid page, or a number of slots that differs from `LOCAL_WORLD_SIZE`.
    pub fn for_worker(env: &WorkerEnv) -> Result<Self, PageError> {
        let Some(fd) = env.page_fd else {
            return Self::private(env.local_world);
        };
        let page = Self::from_fd(fd)?;
        if page.slots() != env.local_world {
            let reason = format!(
                "it has {} slots, LOCAL_WORLD_SIZE is {}",
                page.slots(),
                env.local_world
            );
            return Err(PageError::NotAPage { fd, reason });
        }
        Ok(page)
    }

    /// This process's slot on the page of the launcher that its environment names, as far as there is one.
    fn own_slot(get: &dyn Fn(&str) -> Option<String>) -> Option<Slot> {
        let number = |name: &str| get(name)?.parse::<u16>().ok();
        let page = Self::from_fd(number(names::PACELINE_PAGE_FD)?.into()).ok()?;
        let local_rank = number(names::PACELINE_LOCAL_RANK).or(number(names::LOCAL_RANK))?;
        let local_rank = usize::from(local_rank);
        (local_rank < page.slots()).then(|| page.slot(local_rank))
    }

    /// The descriptor to inherit, when this page was made by [`JobPage::create_memfd`]. It lives as long as the page.
    pub fn raw_fd(&self) -> Option<RawFd> {
        self.0.fd.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Whether a launcher reads it: it was made by another process.
    pub fn has_launcher(&self) -> bool {
        self.0.is_inherited
    }

    /// How many local ranks the page holds.
    pub fn slots(&self) -> usize {
        self.0.slots
    }

    /// The slot of a local rank.
    ///
    /// *Panics*: when `local_rank` is not below [`JobPage::slots`]; [`JobPage::for_worker`] has checked that for a rank's own.
    pub fn slot(&self, local_rank: usize) -> Slot {
        assert!(
            local_rank < self.0.slots,
            "local rank {local_rank} of a page with {} slots",
            self.0.slots
        );
        Slot {
            page: self.clone(),
            index: local_rank,
        }
    }

    /// Declares the job over; the first caller's cause stands. Says whether this caller was the first.
    ///
    /// Wakes all that sleep on [`JobPage::revoked_word`], even if another caller was first: that one may have died before
    /// its wake.
    pub fn revoke(&self, cause: &Revocation) -> bool {
        let header = self.header();
        let first = header
            .revoked
            .compare_exchange(
                NOT_REVOKED,
                BEING_WRITTEN,
                Ordering::Acquire,
                Ordering::Relaxed,
            )
            .is_ok();
        if first {
            header.write_cause(cause);
            // Release: a reader of REVOKED sees the whole cause.
            header.revoked.store(REVOKED, Ordering::Release);
        }
        os::futex_wake_all(&header.revoked);
        self.changed();
        first
    }

    /// Whether the job is over. One load; fit for a spinning loop.
    pub fn is_revoked(&self) -> bool {
        self.revoked_word().load(Ordering::Relaxed) != NOT_REVOKED
    }

    /// The cause, once the job is over.
    ///
    /// *Blocks*: for at most 20 ms while the first revoker is writing. Should it have died there, the job is
    /// revoked all the same, with a cause that says so.
    pub fn revocation(&self) -> Option<Revocation> {
        let word = self.revoked_word();
        let started = Instant::now();
        loop {
            match word.load(Ordering::Acquire) {
                NOT_REVOKED => return None,
                BEING_WRITTEN if started.elapsed() < REVOCATION_WRITE_TIMEOUT => {
                    os::futex_wait(word, BEING_WRITTEN, Duration::from_millis(1));
                }
                BEING_WRITTEN => {
                    let text =
                        "the job was revoked by a process that died before it could say why".into();
                    return Some(Revocation { rank: None, text });
                }
                _ => return Some(self.header().read_cause()),
            }
        }
    }

    /// The futex word: 0 while the job runs, anything else once it is over.
    ///
    /// Wait on it with a timeout: a revoker may be killed between its store and its wake.
    pub fn revoked_word(&self) -> &AtomicU32 {
        &self.header().revoked
    }

    /// Sleeps until the job is revoked or `timeout` is over; says whether it is revoked.
    pub fn wait_revoked(&self, timeout: Duration) -> bool {
        let started = Instant::now();
        loop {
            if self.is_revoked() {
                return true;
            }
            let left = timeout.saturating_sub(started.elapsed());
            if left.is_zero() {
                return false;
            }
            os::futex_wait(self.revoked_word(), NOT_REVOKED, left);
        }
    }

    /// Asks all ranks to save and leave at the next step boundary, because of `signal`. A later request replaces it.
    pub fn request_stop(&self, signal: i32) {
        self.header().stop_signal.store(signal, Ordering::Relaxed);
    }

    /// The signal because of which the ranks were asked to stop.
    pub fn stop_requested(&self) -> Option<i32> {
        Some(self.header().stop_signal.load(Ordering::Relaxed)).filter(|signal| *signal != 0)
    }

    fn header(&self) -> &Header {
        self.0.header()
    }

    fn initialised(memory: MmapRaw, slots: usize, fd: Option<OwnedFd>) -> Self {
        let mapping = Mapping {
            memory,
            slots,
            fd,
            is_inherited: false,
        };
        mapping.header().initialise(slots);
        Self(Arc::new(mapping))
    }
}

impl std::fmt::Debug for JobPage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobPage")
            .field("slots", &self.0.slots)
            .field("fd", &self.raw_fd())
            .finish_non_exhaustive()
    }
}

impl Mapping {
    fn header(&self) -> &Header {
        // SAFETY: every constructor maps at least `size_of::<Header>()` bytes, page aligned, for as long as `self`
        // lives; the file cannot shrink (sealed, or anonymous); all fields are atomics, so other processes may write.
        unsafe { &*self.memory.as_mut_ptr().cast::<Header>() }
    }

    fn slot(&self, index: usize) -> &RawSlot {
        assert!(index < self.slots);
        // SAFETY: `slots` was checked against the mapping's size, so the slot lies inside; the header's size keeps it
        // aligned; otherwise as in `header`.
        unsafe {
            let first = self
                .memory
                .as_mut_ptr()
                .add(size_of::<Header>())
                .cast::<RawSlot>();
            &*first.add(index)
        }
    }
}

/// One local rank's part of the page. Written by that rank, read by all.
#[derive(Clone)]
pub struct Slot {
    page: JobPage,
    index: usize,
}

impl Slot {
    /// Publishes the process id.
    pub fn set_pid(&self, pid: u32) {
        self.raw().pid.store(pid, Ordering::Relaxed);
    }

    /// The process id, once it is known.
    pub fn pid(&self) -> Option<u32> {
        Some(self.raw().pid.load(Ordering::Relaxed)).filter(|pid| *pid != 0)
    }

    /// Publishes the global rank.
    pub fn set_rank(&self, rank: usize) {
        self.raw()
            .rank
            .store(layout::encode(Some(rank)), Ordering::Relaxed);
    }

    /// The global rank, once it is known.
    pub fn rank(&self) -> Option<usize> {
        layout::decode(self.raw().rank.load(Ordering::Relaxed))
    }

    /// Publishes what this rank is doing from now on.
    ///
    /// *Cost*: one reading of the clock and six relaxed stores to one cache line, about 30 ns.
    pub fn set_activity(&self, activity: &Activity) {
        self.raw().store(activity, os::monotonic_ns());
    }

    /// What the rank was doing last, and for how long it has been.
    pub fn activity(&self) -> Option<(Activity, Duration)> {
        let (activity, since_ns) = self.raw().load()?;
        Some((
            activity,
            Duration::from_nanos(os::monotonic_ns().saturating_sub(since_ns)),
        ))
    }

    /// Its number on the page: the local rank that its process was started with.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Says that this rank fails in this generation because of global rank `culprit`, so that the launcher does not report
    /// it as the cause. The rank's number is that of its first generation.
    ///
    /// The first call of a generation counts: a rank gives up its other groups because of the first failure, and their failures
    /// come back to it from ranks that gave up because of this one.
    pub fn set_victim_of(&self, culprit: usize, generation: u32) {
        let blame = layout::tagged(Some(culprit), generation);
        let is_first = |word| !matches!(layout::untagged(word), (Some(_), of) if of == generation);
        let set = |word| is_first(word).then_some(blame);
        // An earlier word stands.
        let _ = (self.raw().blame).fetch_update(Ordering::AcqRel, Ordering::Acquire, set);
    }

    /// The global rank that this rank blames, in whatever generation.
    pub fn victim_of(&self) -> Option<usize> {
        layout::untagged(self.raw().blame.load(Ordering::Acquire)).0
    }

    /// The global rank that this rank blames for the failure of this generation.
    pub fn victim_in(&self, generation: u32) -> Option<usize> {
        let (culprit, of) = layout::untagged(self.raw().blame.load(Ordering::Acquire));
        culprit.filter(|_| of == generation)
    }

    /// Publishes how long this rank waits for the others in one operation.
    pub fn set_timeout(&self, timeout: Duration) {
        let millis = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        self.raw()
            .timeout_ms
            .store(millis.max(1), Ordering::Relaxed);
    }

    /// How long this rank waits for the others in one operation, once it is known.
    pub fn timeout(&self) -> Option<Duration> {
        let millis = self.raw().timeout_ms.load(Ordering::Relaxed);
        (millis > 0).then(|| Duration::from_millis(millis.into()))
    }

    /// Says that this rank polls [`JobPage::stop_requested`] at every step boundary, so it needs no signal.
    pub fn set_polls_stop(&self) {
        self.raw().polls_stop.store(1, Ordering::Release);
    }

    /// Whether this rank acts on [`JobPage::request_stop`].
    pub fn polls_stop(&self) -> bool {
        self.raw().polls_stop.load(Ordering::Acquire) != 0
    }

    /// Says that this rank, if another one is lost, writes its state into the job's memory before it ends, so that the next start of
    /// the ranks goes on from it.
    pub fn set_leaves_state(&self) {
        self.raw().leaves_state.store(1, Ordering::Release);
    }

    /// Whether this rank needs some time after a loss, to write its state.
    pub fn leaves_state(&self) -> bool {
        self.raw().leaves_state.load(Ordering::Acquire) != 0
    }

    /// Says where some of this rank's weights are in its memory, so that `paceline chaos` can flip a bit there. They stay there until
    /// [`hide_weights`](Self::hide_weights).
    pub fn show_weights(&self, addresses: &Range<u64>) {
        let bytes = addresses.end.saturating_sub(addresses.start);
        self.raw().weights_bytes.store(bytes, Ordering::Relaxed);
        // Release: a reader of the address sees the length.
        self.raw().weights.store(addresses.start, Ordering::Release);
    }

    /// Says that no weights are where this rank has [shown](Self::show_weights) them.
    pub fn hide_weights(&self) {
        self.raw().weights.store(0, Ordering::Release);
    }

    /// Addresses of some of the rank's weights in its memory, while it shows them.
    pub fn weights(&self) -> Option<Range<u64>> {
        let address = self.raw().weights.load(Ordering::Acquire);
        let bytes = self.raw().weights_bytes.load(Ordering::Relaxed);
        (address != 0 && bytes != 0).then(|| address..address.saturating_add(bytes))
    }

    /// Says that the weights of the ranks differ at the start of `step`; `odd` is the first rank that differs from the majority.
    pub fn set_differs(&self, step: u64, odd: Option<usize>) {
        self.raw().differed_at.store(step, Ordering::Relaxed);
        let odd = layout::encode(odd);
        self.raw().differed.store(odd, Ordering::Relaxed);
        // Release: a reader of the number sees the rest.
        self.raw().differences.fetch_add(1, Ordering::Release);
    }

    /// The differences between the ranks' weights that this rank has found.
    pub fn differences(&self) -> Differences {
        Differences {
            times: self.raw().differences.load(Ordering::Acquire),
            step: self.raw().differed_at.load(Ordering::Relaxed),
            odd: layout::decode(self.raw().differed.load(Ordering::Relaxed)),
        }
    }

    /// Says that this rank, in agreement with all others, stops because it was asked to.
    pub fn set_stopped(&self, stopped: Stopped) {
        self.raw().stopped_at.store(stopped.step, Ordering::Relaxed);
        // Release: a reader of the signal sees the step.
        self.raw()
            .stopped_by
            .store(stopped.signal.number(), Ordering::Release);
    }

    /// Why and where this rank has stopped, if it was asked to.
    pub fn stopped(&self) -> Option<Stopped> {
        let signal = StopSignal::new(self.raw().stopped_by.load(Ordering::Acquire))?;
        let step = self.raw().stopped_at.load(Ordering::Relaxed);
        Some(Stopped { signal, step })
    }

    /// Whether this rank has said that its configuration is wrong, so that starting it again would not help.
    pub fn is_misconfigured(&self) -> bool {
        self.raw().misconfigured.load(Ordering::Acquire) != 0
    }

    fn raw(&self) -> &RawSlot {
        self.page.0.slot(self.index)
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot")
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

/// Tells this process's launcher whether what was just tried failed because of a wrong setting. If the rank then exits with
/// an error, the job is not started again: any exit code may mean anything, and a `main` that returns its error exits with 1.
///
/// It does nothing in a process without a launcher.
pub fn tell_misconfigured(is_so: bool) {
    if let Some(slot) = JobPage::own_slot(&|name| std::env::var(name).ok()) {
        slot.raw()
            .misconfigured
            .store(is_so.into(), Ordering::Release);
    }
}

/// Lets the program that is about to be executed inherit `fd`.
///
/// Call it in the child, between fork and exec: done in the parent, every child started at that moment would get the
/// page. Makes one system call and neither allocates nor locks, which is what that place allows.
pub fn allow_inherit(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?)
}

fn checked_bytes(slots: usize) -> Result<usize, PageError> {
    if slots == 0 || slots > SLOTS_MAX {
        return Err(PageError::Slots { slots });
    }
    Ok(layout::page_bytes(slots))
}

#[cfg(test)]
mod tests;
