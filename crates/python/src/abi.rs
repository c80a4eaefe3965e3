//! The C functions.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_rendezvous::page::Phase;
use parking_lot::Mutex;
use serde::Serialize;

use crate::call::{Asked, Call};
use crate::failure::{Failure, panic_text};
use crate::group::Group;
use crate::handles::tables;
use crate::recorder::{End, Recorder};
use crate::settings::Settings;
use crate::track;

/// It is done.
pub const OK: i32 = 0;
/// It failed; [`paceline_text`] says why.
pub const FAILED: i32 = 1;
/// It is not over yet.
pub const PENDING: i32 = 2;

thread_local! {
    /// The last text for this thread.
    static TEXT: RefCell<CString> = RefCell::default();
}

pub(crate) fn say(text: &impl Serialize) {
    let json = serde_json::to_vec(text).expect("a text of strings and numbers");
    let text = CString::new(json).expect("JSON has no zero bytes");
    TEXT.with(|last| *last.borrow_mut() = text);
}

/// Runs the body of a function; nothing but a status leaves it.
pub(crate) fn status(body: impl FnOnce() -> Result<i32, Failure>) -> i32 {
    let result = catch_unwind(AssertUnwindSafe(body));
    let failure = match result {
        Ok(Ok(status)) => return status,
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::new("bug", panic_text(&*panic)),
    };
    say(&failure);
    FAILED
}

/// The caller's bytes.
///
/// # Safety
///
/// `len` bytes can be read there, or `len` is 0.
unsafe fn bytes<'a>(start: *const u8, len: usize) -> &'a [u8] {
    match len {
        0 => &[],
        // SAFETY: the caller's contract.
        _ => unsafe { std::slice::from_raw_parts(start, len) },
    }
}

fn text(bytes: &[u8]) -> Result<&str, Failure> {
    std::str::from_utf8(bytes).map_err(|error| Failure::new("bug", error.to_string()))
}

/// The version of Paceline, as text that ends with a zero byte.
#[unsafe(no_mangle)]
pub extern "C" fn paceline_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The last result or failure of this thread as JSON that ends with a zero byte; valid until the thread's next call.
#[unsafe(no_mangle)]
pub extern "C" fn paceline_text() -> *const c_char {
    TEXT.with(|last| last.borrow().as_ptr())
}

/// Hosts the store in which a group forms, on rank 0. The text is what the other ranks need for [`paceline_join`], where it is the setting
/// `meeting`; `server` is for this rank's own.
///
/// # Safety
///
/// `settings` has `len` bytes, and `server` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_host(settings: *const u8, len: usize, server: *mut u64) -> i32 {
    status(|| {
        // SAFETY: the caller's contract.
        let settings = Settings::parse(unsafe { bytes(settings, len) })?;
        let (hosted, meeting) = settings.host()?;
        let handle = tables().number();
        let hosted = Arc::new(Mutex::new(Some(hosted)));
        tables().servers.insert(handle, hosted);
        say(&meeting);
        // SAFETY: the caller's contract.
        unsafe { server.write(handle) };
        Ok(OK)
    })
}

/// Joins a group of all ranks. `settings` is an object with `variables`, which win over the environment's, `timeout_ms` and `meeting`;
/// `server` is what [`paceline_host`] gave, or 0.
///
/// *Blocks*: until all ranks have joined, at most for the timeout.
///
/// # Safety
///
/// `settings` has `len` bytes, and `group` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_join(
    settings: *const u8,
    len: usize,
    server: u64,
    group: *mut u64,
) -> i32 {
    status(|| {
        // SAFETY: the caller's contract.
        let settings = Settings::parse(unsafe { bytes(settings, len) })?;
        let server = match server {
            0 => None,
            handle => tables().servers.remove(handle)?.lock().take(),
        };
        let joined = Group::new(settings.join()?, server);
        // SAFETY: the caller's contract.
        unsafe { group.write(keep(joined)) };
        Ok(OK)
    })
}

/// Makes a group of the `members` of another one, in whose numbers they are. They alone call it, all with the same list and a name that no
/// other group has.
///
/// *Blocks*: until all members have called it.
///
/// # Safety
///
/// `name` has `name_len` bytes, `members` has `members_len` numbers, and `group` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_subgroup(
    parent: u64,
    name: *const u8,
    name_len: usize,
    members: *const u64,
    members_len: usize,
    timeout_ms: u64,
    group: *mut u64,
) -> i32 {
    status(|| {
        // SAFETY: the caller's contract.
        let name = text(unsafe { bytes(name, name_len) })?;
        let members: &[u64] = match members_len {
            0 => &[],
            // SAFETY: the caller's contract.
            _ => unsafe { std::slice::from_raw_parts(members, members_len) },
        };
        let members: Vec<usize> = members.iter().map(|member| *member as usize).collect();
        let parent = tables().groups.get(parent)?;
        let made = parent.subgroup(name, &members, timeout_ms)?;
        // SAFETY: the caller's contract.
        unsafe { group.write(keep(made)) };
        Ok(OK)
    })
}

pub(crate) fn keep(group: Group) -> u64 {
    let handle = tables().number();
    tables().groups.insert(handle, Arc::new(group));
    handle
}

/// Does a call and returns when it is over.
///
/// # Safety
///
/// The call's spans can be read, those of its outputs written, and until this returns nobody else writes what it reads or touches what it
/// writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_run(group: u64, call: *const Call, source: *mut i64) -> i32 {
    status(|| {
        let group = tables().groups.get(group)?;
        // SAFETY: the caller's contract.
        let outcome = group.run(unsafe { Asked::new(&*call) }?)?;
        // SAFETY: the caller's contract.
        unsafe { tell_source(source, outcome) };
        Ok(OK)
    })
}

/// Puts a call on its way and gives its work.
///
/// # Safety
///
/// As [`paceline_run`], but until the work is over.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_submit(group: u64, call: *const Call, work: *mut u64) -> i32 {
    status(|| {
        let group = tables().groups.get(group)?;
        // SAFETY: the caller's contract.
        let submitted = group.submit(unsafe { Asked::new(&*call) }?)?;
        let handle = tables().number();
        tables().works.insert(handle, submitted);
        // SAFETY: the caller's contract.
        unsafe { work.write(handle) };
        Ok(OK)
    })
}

/// Waits for a work: [`OK`], [`FAILED`] or, after `timeout_ms`, [`PENDING`]. A negative time is as long as the call may take. `source`,
/// unless it is null, becomes the rank that a receive is from, or -1.
///
/// # Safety
///
/// `source` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_wait(work: u64, timeout_ms: i64, source: *mut i64) -> i32 {
    status(|| {
        let limit = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        let (work, since) = (tables().works.get(work)?, Instant::now());
        let outcome = work.wait(limit);
        if limit != Some(Duration::ZERO) {
            tables().record(|recorder| recorder.waited(since));
        }
        match outcome {
            None => Ok(PENDING),
            Some(outcome) => {
                // SAFETY: the caller's contract.
                unsafe { tell_source(source, outcome?) };
                Ok(OK)
            }
        }
    })
}

/// # Safety
///
/// `source` is null or can be written.
unsafe fn tell_source(source: *mut i64, from: Option<usize>) {
    if !source.is_null() {
        // SAFETY: the caller's contract.
        unsafe { source.write(from.map_or(-1, |from| from as i64)) };
    }
}

/// Has [`paceline_next_finished`] give this number when the work is over; at once for 0.
#[unsafe(no_mangle)]
pub extern "C" fn paceline_notify(work: u64) -> i32 {
    status(|| {
        let finished = &tables().finished;
        match work {
            0 => finished.push(0),
            work => tables().works.get(work)?.tell(finished, work),
        }
        Ok(OK)
    })
}

/// The next number that [`paceline_notify`] was called with and whose work is over: [`OK`], or [`PENDING`] after `timeout_ms`.
///
/// # Safety
///
/// `work` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_next_finished(timeout_ms: u64, work: *mut u64) -> i32 {
    status(
        || match tables().finished.next(Duration::from_millis(timeout_ms)) {
            None => Ok(PENDING),
            Some(handle) => {
                // SAFETY: the caller's contract.
                unsafe { work.write(handle) };
                Ok(OK)
            }
        },
    )
}

/// Forgets a work. It goes on until it is over, and so do the caller's duties to its memory.
#[unsafe(no_mangle)]
pub extern "C" fn paceline_forget(work: u64) -> i32 {
    status(|| tables().works.remove(work).map(|_| OK))
}

/// Sets the deadline of each operation between all ranks that is submitted from now on.
#[unsafe(no_mangle)]
pub extern "C" fn paceline_set_timeout(group: u64, timeout_ms: u64) -> i32 {
    status(|| {
        tables().groups.get(group)?.set_timeout(timeout_ms);
        Ok(OK)
    })
}

/// Publishes what this rank does, at which step: 1 the program's own code, 2 the data loader, 3 the forward pass, 4 the backward pass, 5
/// evaluation. *Cost*: about 100 ns.
#[unsafe(no_mangle)]
pub extern "C" fn paceline_set_phase(group: u64, phase: u32, step: u64) -> i32 {
    status(|| {
        let phase = match phase {
            1 => Phase::BetweenSteps,
            2 => Phase::DataLoader,
            3 => Phase::Forward,
            4 => Phase::Backward,
            5 => Phase::Evaluation,
            _ => {
                return Err(Failure::new(
                    "bug",
                    format!("no phase has the number {phase}"),
                ));
            }
        };
        let number = group;
        let group = tables().groups.get(number)?;
        group.set_phase(phase, step);
        tables().record(|recorder| {
            if recorder.group == number {
                recorder.enter(phase, step);
            }
        });
        Ok(OK)
    })
}

/// Records in the run directory `folder` what this process does in a group of all ranks, after `steps` steps; rank 0 writes it. Follows the
/// group that was recorded before.
///
/// *Blocks*: for some seconds where another process writes there.
///
/// # Safety
///
/// `folder` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_record(
    group: u64,
    folder: *const u8,
    len: usize,
    steps: u64,
) -> i32 {
    status(|| {
        // SAFETY: the caller's contract.
        let folder = text(unsafe { bytes(folder, len) })?;
        let processes = tables().groups.get(group)?.processes().clone();
        let last = tables().recorder.write().take();
        let ranks_before = last.as_ref().map(|last| last.world);
        if let Some(last) = last {
            last.end(End::CutOff);
        }
        let recorder = Recorder::start(group, processes, folder.as_ref(), steps, ranks_before)?;
        *tables().recorder.write() = Some(recorder);
        Ok(OK)
    })
}

/// Gives up: all works of the group fail, here and on its other ranks, which get `why`.
///
/// # Safety
///
/// `why` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_abort(group: u64, why: *const u8, len: usize) -> i32 {
    status(|| {
        // SAFETY: the caller's contract.
        let why = text(unsafe { bytes(why, len) })?;
        tables().groups.get(group)?.abort(why);
        Ok(OK)
    })
}

/// Leaves a group. Works that are on their way have two seconds, or none if there is a reason `why`, which the other ranks get. When it
/// returns, no memory of the caller's is used any more.
///
/// # Safety
///
/// `why` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_close(group: u64, why: *const u8, len: usize) -> i32 {
    status(|| {
        // SAFETY: the caller's contract.
        let why = text(unsafe { bytes(why, len) })?;
        let number = group;
        let group = tables().groups.remove(number)?;
        let mut recorder = tables().recorder.write();
        let ended = recorder.take_if(|recorder| recorder.group == number);
        drop(recorder);
        if let Some(ended) = ended {
            let is_left = why.is_empty() && group.processes().health().is_ok();
            ended.end(if is_left { End::Left } else { End::CutOff });
        }
        group.close(Some(why).filter(|why| !why.is_empty()));
        Ok(OK)
    })
}

/// Begins to track what this process and those that it starts use. `settings` is an object that may have `period_s`, `busy_percent`,
/// `rank_busy_percent`, `csv`, `json`, `svg` and `lang`.
///
/// # Safety
///
/// `settings` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_track(settings: *const u8, len: usize) -> i32 {
    status(|| {
        // SAFETY: the caller's contract.
        let settings = track::Settings::parse(unsafe { bytes(settings, len) })?;
        track::start(settings).map(|()| OK)
    })
}

/// What the tracker has seen so far: the text is an object with the `report` and its `text` for people.
#[unsafe(no_mangle)]
pub extern "C" fn paceline_tracked() -> i32 {
    status(|| track::report().map(|told| say(&told)).map(|()| OK))
}

/// Ends the tracker, which writes its files; the text is as for [`paceline_tracked`].
///
/// *Blocks*: for two seconds at most, where a driver does not answer.
#[unsafe(no_mangle)]
pub extern "C" fn paceline_track_end() -> i32 {
    status(|| track::finish().map(|told| say(&told)).map(|()| OK))
}
