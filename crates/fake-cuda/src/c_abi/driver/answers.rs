//! The longer answers of the driver.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use super::{Copy2D, Side};
use crate::c_abi::caller::{Call, Outcome, context_handle, handle, put, require, text};
use crate::code::Code;
use crate::device::{Device, Event, HostSpan, Mark, Module, Work, copy};
use crate::machine::{Kind, Link};
use crate::process::lock;

/// *Source*: `CU_STREAM_NON_BLOCKING` and `CU_EVENT_DISABLE_TIMING`.
const NON_BLOCKING: c_uint = 1;
const WITHOUT_TIMES: c_uint = 2;

/// Attributes of devices that there are; others than these below are 0. *Source* - `CU_DEVICE_ATTRIBUTE_MAX`.
const ATTRIBUTES: std::ops::Range<c_uint> = 1..150;

/// Most bytes of PTX.
const PTX_BYTES_MAX: usize = 16 << 20;

/// The code's name also serves as its description.
pub(super) fn put_name(error: c_uint, to: *mut *const c_char) -> Outcome {
    let name = Code(error).name();
    put(to, name.map_or(std::ptr::null(), CStr::as_ptr))?;
    name.map(drop).ok_or(Code::INVALID_VALUE)
}

/// *Source*: `CUdevice_attribute`.
pub(super) fn device_attribute(device: &Device, attribute: c_uint) -> Result<c_int, Code> {
    let part = |from: usize, to: usize| {
        let digits = device.pci.get(from..to).unwrap_or("0");
        c_int::from_str_radix(digits, 16).unwrap_or(0)
    };
    match attribute {
        1..=3 => Ok(1024),
        4 => Ok(64),
        5 => Ok(i32::MAX),
        6 | 7 => Ok(65_535),
        10 => Ok(32),
        16 => Ok(132),
        33 => Ok(part(5, 7)),
        34 => Ok(part(8, 10)),
        41 => Ok(1),
        97 => Ok(227 << 10),
        50 => Ok(part(0, 4)),
        75 => Ok(device.capability.0),
        76 => Ok(device.capability.1),
        other if ATTRIBUTES.contains(&other) => Ok(0),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Whether the driver reports peer access, which may be false.
pub(super) fn says_ok(call: Call, device: c_int, peer: c_int) -> Result<bool, Code> {
    let (device, peer) = (call.process.device(device)?, call.process.device(peer)?);
    Ok(device.ordinal != peer.ordinal && device.link_to(&peer) != Link::NotSupported)
}

/// *Source*: `CUdevice_P2PAttribute`.
pub(super) fn p2p_attribute(
    call: Call,
    attribute: c_uint,
    from: c_int,
    to: c_int,
) -> Result<c_int, Code> {
    if from == to {
        return Err(Code::INVALID_DEVICE);
    }
    let is_ok = says_ok(call, from, to)?;
    match attribute {
        1 => Ok(c_int::from(!is_ok)),
        2 => Ok(c_int::from(is_ok)),
        3 | 4 => Ok(0),
        _ => Err(Code::INVALID_VALUE),
    }
}

pub(super) fn retain(call: Call, context: *mut *mut c_void, device: c_int) -> Outcome {
    let device = call.process.device(device)?;
    put(context, context_handle(&device))?;
    *lock(&device.retained) += 1;
    Ok(())
}

pub(super) fn release(device: &Device) -> Outcome {
    let mut retained = lock(&device.retained);
    *retained = retained.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
    if *retained == 0 {
        device.reset();
    }
    Ok(())
}

pub(super) fn enable(call: Call, peer: *mut c_void, flags: c_uint) -> Outcome {
    let (device, peer) = (call.context()?, call.context_of(peer)?);
    if flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    if device.ordinal == peer.ordinal {
        return Err(Code::INVALID_DEVICE);
    }
    if device.link_to(&peer) == Link::NotSupported {
        return Err(Code::PEER_ACCESS_UNSUPPORTED);
    }
    let is_new = lock(&device.reach).insert(peer.ordinal);
    require(is_new, Code::PEER_ACCESS_ALREADY_ENABLED)
}

pub(super) fn disable(call: Call, peer: *mut c_void) -> Outcome {
    let (device, peer) = (call.context()?, call.context_of(peer)?);
    let was_there = lock(&device.reach).remove(&peer.ordinal);
    require(was_there, Code::PEER_ACCESS_NOT_ENABLED)
}

pub(super) fn pin(call: Call, to: *mut *mut c_void, length: usize) -> Outcome {
    call.context()?;
    put(to, call.process.memory.pin(length)?)
}

/// Frees memory after all of the device's work.
pub(super) fn free(call: Call, address: u64) -> Outcome {
    call.process.devices()?;
    if address == 0 {
        return Ok(());
    }
    let device = call
        .process
        .memory
        .owner(address)
        .ok_or(Code::INVALID_VALUE)?;
    device.synchronize()?;
    call.process.memory.free(address)
}

/// Copies to a device. With a stream and pinned host memory the copy runs after the call, otherwise before it returns.
pub(super) fn to_device(
    call: Call,
    to: u64,
    from: *const c_void,
    length: usize,
    stream: Option<*mut c_void>,
) -> Outcome {
    let chosen = call.stream_to_copy(stream.unwrap_or(std::ptr::null_mut()))?;
    if length == 0 {
        return Ok(());
    }
    let (to, from) = (
        call.span(to, length)?,
        HostSpan::new(from.cast_mut(), length)?,
    );
    // As in the driver, unpinned bytes are read before the call returns.
    let is_pinned = call.process.memory.is_pinned(from);
    let early = (!is_pinned).then(|| from.read());
    call.submit_copy(&chosen, stream.is_some(), move || {
        to.write(&early.unwrap_or_else(|| from.read()));
    })
}

/// Copies to the host. With a stream and pinned host memory the copy runs after the call, otherwise before it returns.
pub(super) fn to_host(
    call: Call,
    to: *mut c_void,
    from: u64,
    length: usize,
    stream: Option<*mut c_void>,
) -> Outcome {
    let chosen = call.stream_to_copy(stream.unwrap_or(std::ptr::null_mut()))?;
    if length == 0 {
        return Ok(());
    }
    let (to, from) = (HostSpan::new(to, length)?, call.span(from, length)?);
    let is_late = stream.is_some() && call.process.memory.is_pinned(to);
    call.submit_copy(&chosen, is_late, move || to.write(&from.read()))
}

/// Copies within a device or between two.
pub(super) fn between(
    call: Call,
    to: u64,
    from: u64,
    length: usize,
    stream: *mut c_void,
) -> Outcome {
    let stream = call.stream_to_copy(stream)?;
    if length == 0 {
        return Ok(());
    }
    call.submit(
        &stream,
        copy(call.span(from, length)?, call.span(to, length)?),
    );
    Ok(())
}

/// Refuses memory of another context.
pub(super) fn is_of(call: Call, address: u64, length: usize, context: *mut c_void) -> Outcome {
    let device = call.context_of(context)?;
    let is_its = length == 0 || Arc::ptr_eq(call.span(address, length)?.device(), &device);
    require(is_its, Code::INVALID_VALUE)
}

/// Fills memory with `count` copies of a pattern.
pub(super) fn fill(
    call: Call,
    to: u64,
    count: usize,
    pattern: &[u8],
    stream: Option<*mut c_void>,
) -> Outcome {
    let chosen = call.stream_to_copy(stream.unwrap_or(std::ptr::null_mut()))?;
    if count == 0 {
        return Ok(());
    }
    let length = count
        .checked_mul(pattern.len())
        .ok_or(Code::INVALID_VALUE)?;
    let (to, pattern) = (call.span(to, length)?, pattern.to_vec());
    let work = move || {
        to.fill(&pattern);
        Ok(())
    };
    // As on a device, the call does not wait, even without a stream.
    call.submit(&chosen, Work::new(Kind::Kernel, work));
    Ok(())
}

pub(super) fn new_stream(call: Call, to: *mut *mut c_void, flags: c_uint) -> Outcome {
    if flags > NON_BLOCKING {
        return Err(Code::INVALID_VALUE);
    }
    let stream = call.context()?.new_stream(flags == NON_BLOCKING);
    put(to, handle(call.process.streams.put(stream)))
}

/// Makes a stream wait for an event, unless the event was never recorded.
pub(super) fn wait_on_stream(call: Call, stream: *mut c_void, event: *mut c_void) -> Outcome {
    let (stream, event) = (call.stream(stream)?, call.event(event)?);
    if let Some(mark) = event.mark() {
        call.submit(&stream, Work::Wait(mark));
    }
    Ok(())
}

pub(super) fn new_event(call: Call, to: *mut *mut c_void, flags: c_uint) -> Outcome {
    call.context()?;
    let event = Event {
        is_timed: flags & WITHOUT_TIMES == 0,
        ..Event::default()
    };
    put(to, handle(call.process.events.put(Arc::new(event))))
}

/// Milliseconds between two events.
pub(super) fn elapsed(call: Call, from: *mut c_void, to: *mut c_void) -> Result<f32, Code> {
    let events = [call.event(from)?, call.event(to)?];
    if events.iter().any(|event| !event.is_timed) {
        return Err(Code::INVALID_HANDLE);
    }
    let at = |mark: Option<Arc<Mark>>| {
        mark.ok_or(Code::INVALID_HANDLE)?
            .at()
            .ok_or(Code::NOT_READY)
    };
    let [from, to] = [at(events[0].mark())?, at(events[1].mark())?];
    let signed = |later: std::time::Instant, earlier| {
        later.saturating_duration_since(earlier).as_secs_f32() * 1e3
    };
    Ok(signed(to, from) - signed(from, to))
}

/// Copies row by row.
pub(super) fn rows(call: Call, copy: *const Copy2D, stream: *mut c_void) -> Outcome {
    if copy.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the caller gives a description of a copy.
    let Copy2D {
        from,
        to,
        width_bytes,
        height,
    } = unsafe { *copy };
    for row in 0..height {
        let at = |side: &Side| side.x_bytes + (side.y + row) * side.pitch_bytes;
        let on_device = |side: &Side| side.device + at(side) as u64;
        let on_host = |side: &Side| side.host.wrapping_byte_add(at(side));
        match (from.memory, to.memory) {
            (1, 2) => to_device(
                call,
                on_device(&to),
                on_host(&from),
                width_bytes,
                Some(stream),
            )?,
            (2, 1) => to_host(
                call,
                on_host(&to),
                on_device(&from),
                width_bytes,
                Some(stream),
            )?,
            (2, 2) => between(call, on_device(&to), on_device(&from), width_bytes, stream)?,
            _ => return Err(Code::NOT_SUPPORTED),
        }
    }
    Ok(())
}

pub(super) fn load_module(call: Call, to: *mut *mut c_void, image: *const c_void) -> Outcome {
    let device = call.context()?;
    let ptx = text(image.cast::<c_char>()).map_err(|_| Code::INVALID_PTX)?;
    if ptx.len() > PTX_BYTES_MAX {
        return Err(Code::INVALID_PTX);
    }
    let machine = call.process.machine().map_err(|_| Code::UNKNOWN)?;
    let module = Module::load(device, &ptx, machine.foreign_kernels.as_deref())?;
    put(to, handle(call.process.modules.put(Arc::new(module))))
}

pub(super) fn get_function(
    call: Call,
    to: *mut *mut c_void,
    module: *mut c_void,
    wanted: *const c_char,
) -> Outcome {
    let module = call
        .process
        .modules
        .get(module.addr() as u64)
        .ok_or(Code::INVALID_HANDLE)?;
    let function = module.function(&text(wanted)?)?;
    put(to, handle(call.process.functions.put(Arc::new(function))))
}

pub(super) fn launch(
    call: Call,
    function: *mut c_void,
    grid: [c_uint; 6],
    stream: *mut c_void,
    parameters: *mut *mut c_void,
) -> Outcome {
    let function = call
        .process
        .functions
        .get(function.addr() as u64)
        .ok_or(Code::INVALID_HANDLE)?;
    let stream = call.stream_to_launch(stream)?;
    if !Arc::ptr_eq(&stream.device, &function.device) {
        return Err(Code::INVALID_HANDLE);
    }
    let [.., x, y, z] = grid;
    let in_block = u64::from(x) * u64::from(y) * u64::from(z);
    if in_block > 1024 {
        return Err(Code::INVALID_VALUE);
    }
    let threads = grid[..3].iter().fold(in_block, |threads, size| {
        threads.saturating_mul((*size).into())
    });
    let sizes = function.parameters();
    if parameters.is_null() && !sizes.is_empty() {
        return Err(Code::INVALID_VALUE);
    }
    let mut arguments = Vec::new();
    for (index, size) in sizes.iter().enumerate() {
        let mut bytes = [0; 8];
        // SAFETY: the caller gives one pointer per parameter, each to a value of the parameter's size.
        unsafe {
            let value = *parameters.add(index);
            std::ptr::copy_nonoverlapping(value.cast::<u8>(), bytes.as_mut_ptr(), (*size).min(8));
        }
        arguments.push(u64::from_le_bytes(bytes));
    }
    call.submit(&stream, function.launch(arguments, threads)?);
    Ok(())
}
