//! The CUDA driver: its functions, and handles that give back what they hold.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::Duration;

use crate::error::NcclError;
use crate::library::{Answer, functions};
use crate::places::Places;
use crate::version::Version;

/// A `CUcontext`, `CUstream`, `CUevent`, `CUmodule` or `CUfunction`: opaque to this program.
pub(crate) type Handle = *mut c_void;

/// `CUDA_ERROR_NOT_READY`: the answer to a query about unfinished work, and no failure.
const NOT_READY: c_int = 600;
/// `CU_STREAM_NON_BLOCKING`: no order with the legacy default stream.
const NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const WITHOUT_TIME: c_uint = 2;
/// The highest priority: lower numbers come first, and the driver clamps this one to its range.
const FIRST: c_int = -100;

functions! {
    /// The driver's functions, in the forms that its header has given these names since CUDA 11.
    Functions
    required {
        init: "cuInit", (flags: c_uint) -> c_int;
        driver_get_version: "cuDriverGetVersion", (version: *mut c_int) -> c_int;
        device_get_count: "cuDeviceGetCount", (count: *mut c_int) -> c_int;
        device_get: "cuDeviceGet", (device: *mut c_int, ordinal: c_int) -> c_int;
        device_get_name: "cuDeviceGetName", (name: *mut c_char, bytes: c_int, device: c_int) -> c_int;
        device_get_uuid: "cuDeviceGetUuid", (uuid: *mut [u8; 16], device: c_int) -> c_int;
        device_get_pci_bus_id: "cuDeviceGetPCIBusId", (id: *mut c_char, bytes: c_int, device: c_int) -> c_int;
        device_primary_ctx_retain: "cuDevicePrimaryCtxRetain", (context: *mut Handle, device: c_int) -> c_int;
        device_primary_ctx_release: "cuDevicePrimaryCtxRelease_v2", (device: c_int) -> c_int;
        ctx_set_current: "cuCtxSetCurrent", (context: Handle) -> c_int;
        ctx_push_current: "cuCtxPushCurrent_v2", (context: Handle) -> c_int;
        ctx_pop_current: "cuCtxPopCurrent_v2", (context: *mut Handle) -> c_int;
        stream_create_with_priority: "cuStreamCreateWithPriority", (stream: *mut Handle, flags: c_uint, priority: c_int) -> c_int;
        stream_destroy: "cuStreamDestroy_v2", (stream: Handle) -> c_int;
        stream_wait_event: "cuStreamWaitEvent", (stream: Handle, event: Handle, flags: c_uint) -> c_int;
        stream_synchronize: "cuStreamSynchronize", (stream: Handle) -> c_int;
        event_create: "cuEventCreate", (event: *mut Handle, flags: c_uint) -> c_int;
        event_destroy: "cuEventDestroy_v2", (event: Handle) -> c_int;
        event_record: "cuEventRecord", (event: Handle, stream: Handle) -> c_int;
        event_query: "cuEventQuery", (event: Handle) -> c_int;
        event_elapsed_time: "cuEventElapsedTime", (milliseconds: *mut f32, from: Handle, to: Handle) -> c_int;
        mem_alloc: "cuMemAlloc_v2", (ptr: *mut u64, bytes: usize) -> c_int;
        mem_free: "cuMemFree_v2", (ptr: u64) -> c_int;
        memcpy_htod_async: "cuMemcpyHtoDAsync_v2", (to: u64, from: *const c_void, bytes: usize, stream: Handle) -> c_int;
        memcpy_dtoh_async: "cuMemcpyDtoHAsync_v2", (to: *mut c_void, from: u64, bytes: usize, stream: Handle) -> c_int;
        module_load_data: "cuModuleLoadData", (module: *mut Handle, image: *const c_void) -> c_int;
        module_unload: "cuModuleUnload", (module: Handle) -> c_int;
        module_get_function: "cuModuleGetFunction", (function: *mut Handle, module: Handle, name: *const c_char) -> c_int;
        get_error_name: "cuGetErrorName", (error: c_int, name: *mut *const c_char) -> c_int;
        ctx_enable_peer_access: "cuCtxEnablePeerAccess", (peer: Handle, flags: c_uint) -> c_int;
        ctx_disable_peer_access: "cuCtxDisablePeerAccess", (peer: Handle) -> c_int;
        memcpy_peer_async: "cuMemcpyPeerAsync", (
            to: u64, to_context: Handle, from: u64, from_context: Handle, bytes: usize, stream: Handle
        ) -> c_int;
        launch_kernel: "cuLaunchKernel", (
            function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
            block_z: c_uint, shared_bytes: c_uint, stream: Handle, arguments: *mut *mut c_void, extra: *mut *mut c_void
        ) -> c_int;
    }
    optional {
        device_get_uuid_v2: "cuDeviceGetUuid_v2", (*mut [u8; 16], c_int) -> c_int;
        ctx_record_event: "cuCtxRecordEvent", (Handle, Handle) -> c_int;
        ctx_wait_event: "cuCtxWaitEvent", (Handle, Handle) -> c_int;
        device_can_access_peer: "cuDeviceCanAccessPeer", (*mut c_int, c_int, c_int) -> c_int;
        device_get_p2p_attribute: "cuDeviceGetP2PAttribute", (*mut c_int, c_int, c_int, c_int) -> c_int;
    }
}

/// The driver, loaded and initialized. Copies share it.
#[derive(Clone, Copy)]
pub(crate) struct Driver(pub(crate) &'static Functions);

impl Driver {
    /// Loads and initializes it.
    ///
    /// *Blocks*: as long as the driver does; a dead one may take for ever.
    pub(crate) fn load(places: &Places) -> Result<Self, NcclError> {
        let mut functions = Functions::find(&places.open_cuda()?)?;
        if crate::environment::copies_in_context(&crate::environment::here) {
            functions.ctx_record_event = None;
            functions.ctx_wait_event = None;
        }
        let driver = Self(Box::leak(Box::new(functions)));
        // SAFETY: the function has this type, and 0 is the only flag there is.
        driver.check(unsafe { driver.0.init(0) })?;
        Ok(driver)
    }

    /// An error unless `code` is 0.
    pub(crate) fn check(&self, (call, code): Answer) -> Result<(), NcclError> {
        if code == 0 {
            return Ok(());
        }
        Err(NcclError::Driver {
            call: call.trim_end_matches("_v2"),
            code,
            text: self.error_name(code),
            during: None,
        })
    }

    fn error_name(&self, code: c_int) -> String {
        let mut name = null();
        // SAFETY: the driver stores null or a pointer to a string that is never freed.
        let (_, answer) = unsafe { self.0.get_error_name(code, &mut name) };
        if answer != 0 || name.is_null() {
            return "an error that the driver has no name for".into();
        }
        // SAFETY: it is a string, by the check above.
        let name = unsafe { CStr::from_ptr(name) };
        name.to_string_lossy().into_owned()
    }

    /// The version of CUDA that it is made for.
    pub(crate) fn version(&self) -> Result<Version, NcclError> {
        let mut code = 0;
        // SAFETY: the driver stores one int.
        self.check(unsafe { self.0.driver_get_version(&mut code) })?;
        Ok(Version::of_cuda(code))
    }

    /// Whether a whole context can record and await events without NCCL waiting for its own work.
    pub(crate) fn has_context_events(&self) -> bool {
        self.0.ctx_record_event.is_some() && self.0.ctx_wait_event.is_some()
    }

    /// How many devices this process sees.
    pub(crate) fn device_count(&self) -> Result<usize, NcclError> {
        let mut count = 0;
        // SAFETY: the driver stores one int.
        self.check(unsafe { self.0.device_get_count(&mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// A device by its number in this process.
    pub(crate) fn device(&self, ordinal: usize) -> Result<Device, NcclError> {
        let count = self.device_count()?;
        let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let number = number.ok_or_else(|| {
            NcclError::setup(
                format!("there is no CUDA device {ordinal}: the driver has {count}"),
                "start no more ranks on a host than it has devices, and check CUDA_VISIBLE_DEVICES",
            )
        })?;
        let mut raw = 0;
        // SAFETY: the driver stores one int.
        self.check(unsafe { self.0.device_get(&mut raw, number) })?;
        Ok(Device {
            driver: *self,
            ordinal,
            raw,
        })
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Driver")
    }
}

/// A device of this process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Device {
    driver: Driver,
    /// Its number in this process.
    pub(crate) ordinal: usize,
    /// Its `CUdevice`.
    pub(crate) raw: c_int,
}

impl Device {
    /// "NVIDIA H200".
    pub(crate) fn name(&self) -> Result<String, NcclError> {
        // SAFETY: `text` gives room for as many bytes as it says.
        self.text(|cu, to, bytes| unsafe { cu.device_get_name(to, bytes, self.raw) })
    }

    /// "00000000:41:00.0".
    pub(crate) fn bus(&self) -> Result<String, NcclError> {
        // SAFETY: the same.
        self.text(|cu, to, bytes| unsafe { cu.device_get_pci_bus_id(to, bytes, self.raw) })
    }

    fn text(
        &self,
        ask: impl FnOnce(&Functions, *mut c_char, c_int) -> Answer,
    ) -> Result<String, NcclError> {
        const BYTES: usize = 256;
        let mut bytes = [0_u8; BYTES];
        // The last byte stays zero.
        let answer = ask(self.driver.0, bytes.as_mut_ptr().cast(), BYTES as c_int - 1);
        self.driver.check(answer)?;
        let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    /// "GPU-" and hexadecimal digits; a MIG slice has its own.
    pub(crate) fn uuid(&self) -> Result<String, NcclError> {
        let mut bytes = [0_u8; 16];
        let cu = self.driver.0;
        // SAFETY: the driver stores 16 bytes.
        let answer = match cu.device_get_uuid_v2 {
            Some(newer) => ("cuDeviceGetUuid", unsafe { newer(&mut bytes, self.raw) }),
            None => unsafe { cu.device_get_uuid(&mut bytes, self.raw) },
        };
        self.driver.check(answer)?;
        let mut text = String::from("GPU");
        for (index, byte) in bytes.iter().enumerate() {
            if matches!(index, 0 | 4 | 6 | 8 | 10) {
                text.push('-');
            }
            text.push_str(&format!("{byte:02x}"));
        }
        Ok(text)
    }

    /// Its primary context, which everything in this process shares.
    pub(crate) fn primary(&self) -> Result<Context, NcclError> {
        let mut raw = null_mut();
        // SAFETY: the driver stores one pointer.
        let retained = unsafe { self.driver.0.device_primary_ctx_retain(&mut raw, self.raw) };
        self.driver.check(retained)?;
        Ok(Context(Arc::new(Primary { device: *self, raw })))
    }
}

/// A device's primary context, retained while any copy lives.
#[derive(Debug, Clone)]
pub(crate) struct Context(Arc<Primary>);

#[derive(Debug)]
struct Primary {
    device: Device,
    raw: Handle,
}

// SAFETY: a context may be used from every thread; the handle is only ever passed to the driver.
unsafe impl Send for Primary {}
// SAFETY: the same.
unsafe impl Sync for Primary {}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: retained once when this was made.
        unsafe {
            self.device
                .driver
                .0
                .device_primary_ctx_release(self.device.raw)
        };
    }
}

/// Keeps a context current on this thread until it is dropped.
#[derive(Debug)]
pub(crate) struct Entered<'a> {
    driver: Driver,
    context: std::marker::PhantomData<&'a Context>,
    /// The current context is a property of the thread.
    thread: std::marker::PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut raw = null_mut();
        // SAFETY: it was pushed on this thread when this was made; the driver stores one pointer.
        unsafe { self.driver.0.ctx_pop_current(&mut raw) };
    }
}

impl Context {
    pub(crate) fn driver(&self) -> Driver {
        self.0.device.driver
    }

    pub(crate) fn raw(&self) -> Handle {
        self.0.raw
    }

    /// Makes it current on this thread, for good: the thread is ours.
    pub(crate) fn make_current(&self) -> Result<(), NcclError> {
        let driver = self.driver();
        // SAFETY: the context is retained.
        driver.check(unsafe { driver.0.ctx_set_current(self.0.raw) })
    }

    /// Makes it current on this thread for a while. A caller's thread may have no context or another device's; the driver then
    /// refuses calls about streams, memory and kernels.
    ///
    /// *Cost*: about 100 ns.
    pub(crate) fn enter(&self) -> Result<Entered<'_>, NcclError> {
        let driver = self.driver();
        // SAFETY: the context is retained.
        driver.check(unsafe { driver.0.ctx_push_current(self.0.raw) })?;
        Ok(Entered {
            driver,
            context: std::marker::PhantomData,
            thread: std::marker::PhantomData,
        })
    }

    /// Calls a function of the driver while this is the thread's current context.
    pub(crate) fn call(&self, run: impl FnOnce(&Functions) -> Answer) -> Result<(), NcclError> {
        let _entered = self.enter()?;
        self.driver().check(run(self.driver().0))
    }

    /// Records `event` after all work submitted to the context so far.
    pub(crate) fn record(&self, event: &Event) -> Result<(), NcclError> {
        self.with_event("cuCtxRecordEvent", self.driver().0.ctx_record_event, event)
    }

    /// Makes all later work of the context wait for `event`.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), NcclError> {
        self.with_event("cuCtxWaitEvent", self.driver().0.ctx_wait_event, event)
    }

    fn with_event(
        &self,
        call: &'static str,
        function: Option<unsafe extern "C" fn(Handle, Handle) -> c_int>,
        event: &Event,
    ) -> Result<(), NcclError> {
        let Some(function) = function else {
            let version = self.driver().version()?;
            return Err(NcclError::setup(
                format!("the driver (CUDA {version}) has no cuCtxRecordEvent"),
                "update the driver to one for CUDA 12.5 or newer (555), unset NCCL_P2P_USE_CUDA_MEMCPY, which disables its use, \
                 or await the data with a fence",
            ));
        };
        // SAFETY: both are alive, and the event is of this context.
        self.call(|_| (call, unsafe { function(self.0.raw, event.raw) }))
    }

    /// A stream of the highest priority, unordered with the default stream.
    pub(crate) fn stream(&self) -> Result<Stream, NcclError> {
        let mut raw = null_mut();
        // SAFETY: a context is current, and the driver stores one pointer.
        self.call(|cu| unsafe { cu.stream_create_with_priority(&mut raw, NON_BLOCKING, FIRST) })?;
        Ok(Stream {
            context: self.clone(),
            raw,
        })
    }

    /// An event; `timed` if it records when it happened.
    pub(crate) fn event(&self, timed: bool) -> Result<Event, NcclError> {
        let mut raw = null_mut();
        let flags = if timed { 0 } else { WITHOUT_TIME };
        // SAFETY: a context is current, and the driver stores one pointer.
        self.call(|cu| unsafe { cu.event_create(&mut raw, flags) })?;
        Ok(Event {
            context: self.clone(),
            raw,
        })
    }

    /// Memory of the device.
    pub(crate) fn memory(&self, bytes: usize) -> Result<Memory, NcclError> {
        let mut ptr = 0;
        // SAFETY: a context is current, and the driver stores one address. It refuses 0 bytes.
        self.call(|cu| unsafe { cu.mem_alloc(&mut ptr, bytes.max(1)) })?;
        Ok(Memory {
            context: self.clone(),
            ptr,
            bytes,
        })
    }

    /// A kernel from a program in PTX, which ends with a zero byte.
    pub(crate) fn kernel(&self, ptx: &CStr, name: &CStr) -> Result<Kernel, NcclError> {
        let mut module = null_mut();
        // SAFETY: a context is current; the program is text that ends with a zero byte.
        self.call(|cu| unsafe { cu.module_load_data(&mut module, ptx.as_ptr().cast()) })?;
        let mut kernel = Kernel {
            context: self.clone(),
            module,
            function: null_mut(),
        };
        // SAFETY: the module is loaded, and the driver stores one pointer.
        self.call(|cu| unsafe {
            cu.module_get_function(&mut kernel.function, module, name.as_ptr())
        })?;
        Ok(kernel)
    }
}

/// Makes a handle `Send` and frees it on drop, with its context current.
macro_rules! given_back {
    ($type:ident, $field:ident, $function:ident) => {
        // SAFETY: the driver takes such handles on every thread; this program only passes them on.
        unsafe impl Send for $type {}
        // SAFETY: the same.
        unsafe impl Sync for $type {}

        impl Drop for $type {
            fn drop(&mut self) {
                // If the context cannot be entered, it is gone with everything in it.
                if let Ok(_entered) = self.context.enter() {
                    // SAFETY: created once and freed once.
                    unsafe { self.context.driver().0.$function(self.$field) };
                }
            }
        }
    };
}

/// A queue of work on the device.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: Context,
    pub(crate) raw: Handle,
}

given_back!(Stream, raw, stream_destroy);

impl Stream {
    /// Records `event` after the work submitted to the stream so far.
    pub(crate) fn record(&self, event: &Event) -> Result<(), NcclError> {
        // SAFETY: both are alive, and of one context.
        self.context
            .call(|cu| unsafe { cu.event_record(event.raw, self.raw) })
    }

    /// Makes the stream's later work wait for `event`.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), NcclError> {
        // SAFETY: both are alive.
        self.context
            .call(|cu| unsafe { cu.stream_wait_event(self.raw, event.raw, 0) })
    }

    /// Waits on the host until the stream is idle.
    pub(crate) fn synchronize(&self) -> Result<(), NcclError> {
        // SAFETY: the stream is alive.
        self.context
            .call(|cu| unsafe { cu.stream_synchronize(self.raw) })
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub(crate) struct Event {
    context: Context,
    raw: Handle,
}

given_back!(Event, raw, event_destroy);

impl Event {
    /// Whether it has happened since it was last recorded.
    pub(crate) fn has_happened(&self) -> Result<bool, NcclError> {
        let driver = self.context.driver();
        // A query needs no current context, and this runs in a loop.
        // SAFETY: the event is alive.
        match unsafe { driver.0.event_query(self.raw) } {
            (_, NOT_READY) => Ok(false),
            answer => driver.check(answer).map(|()| true),
        }
    }

    /// The time from `earlier` to this event; zero if the driver's answer makes no sense.
    pub(crate) fn since(&self, earlier: &Event) -> Result<Duration, NcclError> {
        let mut milliseconds = 0.0_f32;
        // SAFETY: both are alive; the driver stores one float.
        self.context.call(|cu| unsafe {
            cu.event_elapsed_time(&mut milliseconds, earlier.raw, self.raw)
        })?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }
}

/// Memory of the device.
#[derive(Debug)]
pub(crate) struct Memory {
    context: Context,
    /// Address of the first byte.
    pub(crate) ptr: u64,
    /// Length.
    pub(crate) bytes: usize,
}

given_back!(Memory, ptr, mem_free);

impl Memory {
    /// Copies from the host to the first bytes, in the order of `stream`, and waits for it.
    ///
    /// *Panics*: when `data` is longer than this.
    pub(crate) fn write(&self, data: &[u8], stream: &Stream) -> Result<(), NcclError> {
        assert!(data.len() <= self.bytes, "{} of {}", data.len(), self.bytes);
        // SAFETY: there are as many bytes on both sides, which stay until the wait below.
        self.context.call(|cu| unsafe {
            cu.memcpy_htod_async(self.ptr, data.as_ptr().cast(), data.len(), stream.raw)
        })?;
        stream.synchronize()
    }

    /// Copies the first bytes to the host, in the order of `stream`, and waits for it.
    ///
    /// *Panics*: when `data` is longer than this.
    pub(crate) fn read(&self, data: &mut [u8], stream: &Stream) -> Result<(), NcclError> {
        assert!(data.len() <= self.bytes, "{} of {}", data.len(), self.bytes);
        // SAFETY: there are as many bytes on both sides, which stay until the wait below.
        self.context.call(|cu| unsafe {
            cu.memcpy_dtoh_async(data.as_mut_ptr().cast(), self.ptr, data.len(), stream.raw)
        })?;
        stream.synchronize()
    }
}

/// A program for the device.
#[derive(Debug)]
pub(crate) struct Kernel {
    context: Context,
    module: Handle,
    function: Handle,
}

given_back!(Kernel, module, module_unload);

impl Kernel {
    /// Launches it on a stream, with this many blocks of this many threads.
    ///
    /// # Safety
    ///
    /// `arguments` point to values of the kernel's parameter types, in order. The memory that the kernel accesses stays valid
    /// until the stream has run it.
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        (blocks, threads): (u32, u32),
        arguments: &mut [*mut c_void],
    ) -> Result<(), NcclError> {
        // A launch uses the calling thread's context, not the stream's.
        // SAFETY: the caller's contract; the function lives as long as its module.
        self.context.call(|cu| unsafe {
            cu.launch_kernel(
                self.function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.raw,
                arguments.as_mut_ptr(),
                null_mut(),
            )
        })
    }
}
