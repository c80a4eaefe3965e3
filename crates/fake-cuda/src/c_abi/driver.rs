//! The driver's functions.

mod answers;

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::caller::{
    answer, context_handle, current, pop_current, push_current, put, put_text, replace_current,
};
use super::exported;
use crate::code::Code;
use crate::process::Process;

use self::answers::*;

/// *Source*: `CUuuid`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Uuid([u8; 16]);

/// *Source*: `CUDA_MEMCPY2D_v2`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Copy2D {
    from: Side,
    to: Side,
    width_bytes: usize,
    height: usize,
}

/// One side of a copy of rows.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Side {
    x_bytes: usize,
    y: usize,
    /// 1 the host's, 2 a device's; arrays are not known here.
    memory: c_uint,
    host: *mut c_void,
    device: u64,
    array: *mut c_void,
    pitch_bytes: usize,
}

/// Declares functions that are counted and then answer with `body`, unless the machine makes them fail.
macro_rules! functions {
    ($(fn $function:ident($($argument:ident: $type:ty),* $(,)?) = |$call:ident| $body:expr;)*) => {
        exported! {
            /// The driver functions of the fake library.
            DRIVER_FUNCTIONS:
            $(fn $function($($argument: $type),*) = |name| answer(name, |$call| $body);)*
        }
    };
}

functions! {
    fn cuInit(flags: c_uint) = |call| {
        super::stay();
        if flags == 0 { call.process.initialize() } else { Err(Code::INVALID_VALUE) }
    };
    fn cuDriverGetVersion(version: *mut c_int) = |call| {
        put(version, call.process.machine().map_err(|_| Code::UNKNOWN)?.driver)
    };
    fn cuGetErrorName(error: c_uint, text: *mut *const c_char) = |_call| put_name(error, text);
    fn cuGetErrorString(error: c_uint, text: *mut *const c_char) = |_call| put_name(error, text);

    fn cuDeviceGetCount(count: *mut c_int) = |call| put(count, call.process.devices()?.len() as c_int);
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) = |call| call.device(ordinal).and_then(|_| put(device, ordinal));
    fn cuDeviceGetName(to: *mut c_char, length: c_int, device: c_int) = |call| put_text(&call.device(device)?.name, to, length);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) = |call| {
        put(value, device_attribute(&*call.device(device)?, attribute)?)
    };
    fn cuDeviceGetUuid(uuid: *mut Uuid, device: c_int) = |call| put(uuid, Uuid(call.device(device)?.uuid));
    fn cuDeviceGetUuid_v2(uuid: *mut Uuid, device: c_int) = |call| put(uuid, Uuid(call.device(device)?.uuid));
    fn cuDeviceGetPCIBusId(to: *mut c_char, length: c_int, device: c_int) = |call| {
        put_text(&call.device(device)?.pci, to, length)
    };
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) = |call| put(bytes, call.device(device)?.memory_bytes as usize);
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) = |call| {
        put(can, c_int::from(says_ok(call, device, peer)?))
    };
    fn cuDeviceGetP2PAttribute(value: *mut c_int, attribute: c_uint, from: c_int, to: c_int) = |call| {
        put(value, p2p_attribute(call, attribute, from, to)?)
    };

    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) = |call| retain(call, context, device);
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) = |call| release(&*call.device(device)?);
    fn cuCtxSetCurrent(context: *mut c_void) = |call| {
        let device = if context.is_null() { None } else { Some(call.context_of(context)?.ordinal) };
        replace_current(device);
        Ok(())
    };
    fn cuCtxGetCurrent(context: *mut *mut c_void) = |call| put_context(call, context, current());
    fn cuCtxPushCurrent_v2(context: *mut c_void) = |call| {
        push_current(call.context_of(context)?.ordinal);
        Ok(())
    };
    fn cuCtxPopCurrent_v2(context: *mut *mut c_void) = |call| {
        let popped = pop_current().ok_or(Code::INVALID_CONTEXT)?;
        if context.is_null() { Ok(()) } else { put_context(call, context, Some(popped)) }
    };
    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) = |call| {
        call.context()?;
        put(least, 0)?;
        put(greatest, 0)
    };
    fn cuCtxSynchronize() = |call| call.context()?.synchronize();
    fn cuCtxRecordEvent(context: *mut c_void, event: *mut c_void) = |call| {
        let (device, event) = (call.context_of(context)?, call.event(event)?);
        *crate::process::lock(&event.mark) = Some(device.mark());
        Ok(())
    };
    fn cuCtxWaitEvent(context: *mut c_void, event: *mut c_void) = |call| {
        let (device, event) = (call.context_of(context)?, call.event(event)?);
        if let Some(mark) = event.mark() {
            device.wait_for(&mark);
        }
        Ok(())
    };
    fn cuCtxEnablePeerAccess(peer: *mut c_void, flags: c_uint) = |call| enable(call, peer, flags);
    fn cuCtxDisablePeerAccess(peer: *mut c_void) = |call| disable(call, peer);

    fn cuMemAlloc_v2(address: *mut u64, length: usize) = |call| {
        put(address, call.process.memory.allocate(&call.context()?, length)?)
    };
    fn cuMemFree_v2(address: u64) = |call| free(call, address);
    fn cuMemGetInfo_v2(left: *mut usize, total: *mut usize) = |call| {
        let device = call.context()?;
        let used = device.used.load(std::sync::atomic::Ordering::Relaxed);
        put(left, (device.memory_bytes - used) as usize)?;
        put(total, device.memory_bytes as usize)
    };
    fn cuMemAllocHost_v2(address: *mut *mut c_void, length: usize) = |call| pin(call, address, length);
    fn cuMemHostAlloc(address: *mut *mut c_void, length: usize, _flags: c_uint) = |call| pin(call, address, length);
    fn cuMemFreeHost(address: *mut c_void) = |call| call.process.memory.unpin(address);
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, length: usize) = |call| to_device(call, to, from, length, None);
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, length: usize) = |call| to_host(call, to, from, length, None);
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, length: usize, stream: *mut c_void) = |call| {
        to_device(call, to, from, length, Some(stream))
    };
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, length: usize, stream: *mut c_void) = |call| {
        to_host(call, to, from, length, Some(stream))
    };
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, length: usize, stream: *mut c_void) = |call| {
        between(call, to, from, length, stream)
    };
    fn cuMemcpy2DAsync_v2(copy: *const Copy2D, stream: *mut c_void) = |call| rows(call, copy, stream);
    fn cuMemcpyPeerAsync(
        to: u64, to_context: *mut c_void, from: u64, from_context: *mut c_void, length: usize, stream: *mut c_void,
    ) = |call| {
        is_of(call, to, length, to_context)?;
        is_of(call, from, length, from_context)?;
        between(call, to, from, length, stream)
    };
    fn cuMemsetD8_v2(to: u64, value: u8, count: usize) = |call| fill(call, to, count, &[value], None);
    fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: *mut c_void) = |call| {
        fill(call, to, count, &[value], Some(stream))
    };
    fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: *mut c_void) = |call| {
        fill(call, to, count, &value.to_le_bytes(), Some(stream))
    };

    fn cuStreamCreate(stream: *mut *mut c_void, flags: c_uint) = |call| new_stream(call, stream, flags);
    fn cuStreamCreateWithPriority(stream: *mut *mut c_void, flags: c_uint, _priority: c_int) = |call| {
        new_stream(call, stream, flags)
    };
    fn cuStreamDestroy_v2(stream: *mut c_void) = |call| {
        let taken = call.process.streams.take(stream.addr() as u64);
        taken.ok_or(Code::INVALID_HANDLE)?.close();
        Ok(())
    };
    fn cuStreamSynchronize(stream: *mut c_void) = |call| {
        let stream = call.stream(stream)?;
        stream.mark().wait();
        stream.device.check()
    };
    fn cuStreamQuery(stream: *mut c_void) = |call| if call.stream(stream)?.is_idle() { Ok(()) } else { Err(Code::NOT_READY) };
    fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, _flags: c_uint) = |call| wait_on_stream(call, stream, event);

    fn cuEventCreate(event: *mut *mut c_void, flags: c_uint) = |call| new_event(call, event, flags);
    fn cuEventDestroy_v2(event: *mut c_void) = |call| known(call.process.events.take(event.addr() as u64));
    fn cuEventRecord(event: *mut c_void, stream: *mut c_void) = |call| {
        let (event, stream) = (call.event(event)?, call.stream(stream)?);
        *crate::process::lock(&event.mark) = Some(stream.mark());
        Ok(())
    };
    fn cuEventQuery(event: *mut c_void) = |call| {
        let is_done = call.event(event)?.mark().is_none_or(|mark| mark.is_done());
        healthy()?;
        if is_done { Ok(()) } else { Err(Code::NOT_READY) }
    };
    fn cuEventSynchronize(event: *mut c_void) = |call| {
        if let Some(mark) = call.event(event)?.mark() {
            mark.wait();
        }
        healthy()
    };
    fn cuEventElapsedTime(milliseconds: *mut f32, from: *mut c_void, to: *mut c_void) = |call| {
        put(milliseconds, elapsed(call, from, to)?)
    };
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, from: *mut c_void, to: *mut c_void) = |call| {
        put(milliseconds, elapsed(call, from, to)?)
    };

    fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) = |call| load_module(call, module, image);
    fn cuModuleUnload(module: *mut c_void) = |call| known(call.process.modules.take(module.addr() as u64));
    fn cuModuleGetFunction(function: *mut *mut c_void, module: *mut c_void, wanted: *const c_char) = |call| {
        get_function(call, function, module, wanted)
    };
    fn cuFuncSetAttribute(function: *mut c_void, _attribute: c_int, _value: c_int) = |call| {
        known(call.process.functions.get(function.addr() as u64))
    };
    fn cuLaunchKernel(
        function: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, _shared_bytes: c_uint, stream: *mut c_void, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) = |call| {
        let grid = [grid_x, grid_y, grid_z, block_x, block_y, block_z];
        if extra.is_null() { launch(call, function, grid, stream, parameters) } else { Err(Code::NOT_SUPPORTED) }
    };
}

/// An error unless there is something with the handle.
fn known<T>(found: Option<T>) -> Result<(), Code> {
    found.map(drop).ok_or(Code::INVALID_HANDLE)
}

/// The first failure of any device, since an event may belong to any.
fn healthy() -> Result<(), Code> {
    Process::here()
        .devices()?
        .iter()
        .try_for_each(|device| device.check())
}

/// Writes the handle of a device's context, or null.
fn put_context(
    call: super::caller::Call,
    to: *mut *mut c_void,
    ordinal: Option<usize>,
) -> Result<(), Code> {
    let devices = call.process.devices()?;
    let device = ordinal.and_then(|ordinal| devices.get(ordinal));
    put(
        to,
        device.map_or(std::ptr::null_mut(), |device| context_handle(device)),
    )
}
