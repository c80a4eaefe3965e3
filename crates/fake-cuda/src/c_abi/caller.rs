//! Common parts of the driver functions: the caller, its context, and the place for the answer.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use crate::code::Code;
use crate::device::{Device, Event, Span, Stream, Work};
use crate::machine::{Effect, Kind};
use crate::process::Process;

pub(super) type Outcome = Result<(), Code>;

/// The handle of device 0's context; further devices follow.
const CONTEXTS: u64 = 6 << 40;

/// `CU_STREAM_LEGACY`, another handle of the default stream.
const LEGACY_STREAM: u64 = 1;

thread_local! {
    /// The stack of current contexts by device; `None` is no context.
    static CURRENT: RefCell<Vec<Option<usize>>> = const { RefCell::new(Vec::new()) };
}

/// One call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    pub(super) process: &'static Process,
    /// Its work on a stream never ends.
    is_stuck: bool,
}

/// Counts the call, then answers it unless the machine makes it fail.
pub(super) fn answer(name: &'static str, tell: impl FnOnce(Call) -> Outcome) -> u32 {
    let process = Process::here();
    let is_stuck = match process.enter(name, None) {
        Some(Effect::Code(code)) => return code,
        effect => effect == Some(Effect::Hang),
    };
    tell(Call { process, is_stuck }).map_or_else(|code| code.0, |()| Code::SUCCESS.0)
}

impl Call {
    pub(super) fn device(self, ordinal: c_int) -> Result<Arc<Device>, Code> {
        self.process.device(ordinal)
    }

    /// The current context, if it has not failed.
    pub(super) fn context(self) -> Result<Arc<Device>, Code> {
        let devices = self.process.devices()?;
        let device = current().and_then(|ordinal| devices.get(ordinal));
        let device = device.ok_or(Code::INVALID_CONTEXT)?;
        is_retained(device)?;
        device.check()?;
        Ok(device.clone())
    }

    /// The context of a handle.
    pub(super) fn context_of(self, handle: *mut c_void) -> Result<Arc<Device>, Code> {
        let devices = self.process.devices()?;
        let number = (handle.addr() as u64)
            .checked_sub(CONTEXTS)
            .filter(|number| number % 16 == 0);
        let ordinal = number.and_then(|number| usize::try_from(number / 16).ok());
        let device = ordinal
            .and_then(|ordinal| devices.get(ordinal))
            .ok_or(Code::INVALID_CONTEXT)?;
        is_retained(device)?;
        Ok(device.clone())
    }

    pub(super) fn stream(self, handle: *mut c_void) -> Result<Arc<Stream>, Code> {
        let number = handle.addr() as u64;
        if number == 0 || number == LEGACY_STREAM {
            return Ok(self.context()?.default_stream());
        }
        self.process.devices()?;
        let stream = self
            .process
            .streams
            .get(number)
            .ok_or(Code::INVALID_HANDLE)?;
        stream.device.check()?;
        Ok(stream)
    }

    /// The stream of a copy: no context needs to be current, but another device's is refused.
    pub(super) fn stream_to_copy(self, handle: *mut c_void) -> Result<Arc<Stream>, Code> {
        let stream = self.stream(handle)?;
        match current() {
            Some(ordinal) if ordinal != stream.device.ordinal => Err(Code::INVALID_VALUE),
            _ => Ok(stream),
        }
    }

    /// The stream of a kernel, whose context must be current.
    pub(super) fn stream_to_launch(self, handle: *mut c_void) -> Result<Arc<Stream>, Code> {
        let stream = self.stream(handle)?;
        let is_current = self.context()?.ordinal == stream.device.ordinal;
        require(is_current, Code::INVALID_CONTEXT).map(|()| stream)
    }

    pub(super) fn event(self, handle: *mut c_void) -> Result<Arc<Event>, Code> {
        self.process.devices()?;
        self.process
            .events
            .get(handle.addr() as u64)
            .ok_or(Code::INVALID_HANDLE)
    }

    pub(super) fn span(self, address: u64, length: usize) -> Result<Span, Code> {
        self.process
            .memory
            .span(address, length)
            .ok_or(Code::INVALID_VALUE)
    }

    /// Puts work on a stream, or work that never ends if the machine says so.
    pub(super) fn submit(self, stream: &Arc<Stream>, work: Work) {
        let work = match work {
            Work::Do(..) if self.is_stuck => Work::new(Kind::Kernel, || {
                loop {
                    std::thread::park();
                }
            }),
            work => work,
        };
        stream.device.submit(stream, work);
    }

    /// Puts a copy on a stream, and waits for it unless it may be late.
    pub(super) fn submit_copy(
        self,
        stream: &Arc<Stream>,
        is_late: bool,
        copy: impl FnOnce() + Send + 'static,
    ) -> Outcome {
        let work = move || {
            copy();
            Ok(())
        };
        self.submit(stream, Work::new(Kind::Copy, work));
        if is_late {
            return Ok(());
        }
        stream.mark().wait();
        stream.device.check()
    }
}

/// An error unless something holds.
pub(super) fn require<E>(holds: bool, or: E) -> Result<(), E> {
    if holds { Ok(()) } else { Err(or) }
}

fn is_retained(device: &Device) -> Outcome {
    let is_there = *crate::process::lock(&device.retained) > 0;
    require(is_there, Code::INVALID_CONTEXT)
}

/// The handle of a device's context.
pub(super) fn context_handle(device: &Device) -> *mut c_void {
    handle(CONTEXTS + 16 * device.ordinal as u64)
}

/// The device of this thread's current context, even if that has failed.
pub(super) fn current() -> Option<usize> {
    CURRENT.with_borrow(|stack| stack.last().copied().flatten())
}

/// Replaces the current context.
pub(super) fn replace_current(ordinal: Option<usize>) {
    CURRENT.with_borrow_mut(|stack| {
        stack.pop();
        stack.push(ordinal);
    });
}

/// Pushes a context.
pub(super) fn push_current(ordinal: usize) {
    CURRENT.with_borrow_mut(|stack| stack.push(Some(ordinal)));
}

/// Pops the current context.
pub(super) fn pop_current() -> Option<usize> {
    CURRENT.with_borrow_mut(Vec::pop).flatten()
}

/// A number as an opaque pointer.
pub(super) fn handle(number: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(number as usize)
}

/// Writes an answer; a null pointer is an invalid argument.
pub(super) fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the caller of a C function gives a place for its answer.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes as much of a text as fits, and a zero byte.
pub(super) fn put_text(text: &str, to: *mut c_char, length: c_int) -> Outcome {
    let length = usize::try_from(length).ok().filter(|length| *length > 0);
    let length = length
        .filter(|_| !to.is_null())
        .ok_or(Code::INVALID_VALUE)?;
    let bytes: Vec<u8> = text.bytes().take(length - 1).chain([0]).collect();
    // SAFETY: the caller lends `length` bytes, which is at least as many.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len()) };
    Ok(())
}

/// A caller's string.
pub(super) fn text(from: *const c_char) -> Result<String, Code> {
    if from.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the caller gives a terminated string.
    let text = unsafe { CStr::from_ptr(from) };
    text.to_str()
        .map(str::to_owned)
        .map_err(|_| Code::INVALID_VALUE)
}

/// A call of NCCL's to the driver.
pub(super) fn of_nccl() -> Call {
    Call {
        process: Process::here(),
        is_stuck: false,
    }
}
