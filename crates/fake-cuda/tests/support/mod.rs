//! The fake library as a C program sees it, and the few lines that every test needs.
#![allow(unsafe_code, non_snake_case, dead_code)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use paceline_fake_cuda::Library;

/// A handle of the driver or of NCCL.
pub(crate) type Handle = *mut c_void;

/// NCCL's identity of a communicator.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

/// The part of NCCL's configuration that all versions have.
#[repr(C)]
pub(crate) struct Config {
    pub(crate) size: usize,
    pub(crate) magic: c_uint,
    pub(crate) version: c_uint,
    pub(crate) blocking: c_int,
}

macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        /// Functions by their names.
        #[derive(Clone, Copy)]
        pub(crate) struct Api {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl Api {
            fn of(library: &libloading::Library) -> Self {
                // SAFETY: the types are those of the vendors' headers, which the library declares too.
                unsafe { Self { $($name: *library.get(stringify!($name).as_bytes()).expect(stringify!($name)),)* } }
            }
        }
    };
}

functions! {
    cuInit(c_uint);
    cuDeviceGetCount(*mut c_int);
    cuDeviceCanAccessPeer(*mut c_int, c_int, c_int);
    cuDeviceGetUuid(*mut [u8; 16], c_int);
    cuDevicePrimaryCtxRetain(*mut Handle, c_int);
    cuCtxSetCurrent(Handle);
    cuCtxGetCurrent(*mut Handle);
    cuCtxPushCurrent_v2(Handle);
    cuCtxPopCurrent_v2(*mut Handle);
    cuCtxSynchronize();
    cuCtxRecordEvent(Handle, Handle);
    cuCtxWaitEvent(Handle, Handle);
    cuCtxEnablePeerAccess(Handle, c_uint);
    cuMemAlloc_v2(*mut u64, usize);
    cuMemFree_v2(u64);
    cuMemAllocHost_v2(*mut *mut c_void, usize);
    cuMemcpyHtoD_v2(u64, *const c_void, usize);
    cuMemcpyDtoH_v2(*mut c_void, u64, usize);
    cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, Handle);
    cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, Handle);
    cuMemcpyDtoDAsync_v2(u64, u64, usize, Handle);
    cuMemcpyPeerAsync(u64, Handle, u64, Handle, usize, Handle);
    cuMemsetD32Async(u64, c_uint, usize, Handle);
    cuStreamCreate(*mut Handle, c_uint);
    cuStreamDestroy_v2(Handle);
    cuStreamSynchronize(Handle);
    cuStreamQuery(Handle);
    cuStreamWaitEvent(Handle, Handle, c_uint);
    cuEventCreate(*mut Handle, c_uint);
    cuEventRecord(Handle, Handle);
    cuEventQuery(Handle);
    cuEventSynchronize(Handle);
    cuEventElapsedTime(*mut f32, Handle, Handle);
    cuModuleLoadData(*mut Handle, *const c_void);
    cuModuleGetFunction(*mut Handle, Handle, *const c_char);
    cuLaunchKernel(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
    ncclGetUniqueId(*mut UniqueId);
    ncclCommInitRank(*mut Handle, c_int, UniqueId, c_int);
    ncclCommInitRankConfig(*mut Handle, c_int, UniqueId, c_int, *mut Config);
    ncclCommGetAsyncError(Handle, *mut c_uint);
    ncclCommAbort(Handle);
    ncclCommDestroy(Handle);
    ncclAllReduce(*const c_void, *mut c_void, usize, c_uint, c_uint, Handle, Handle);
    ncclBroadcast(*const c_void, *mut c_void, usize, c_uint, c_int, Handle, Handle);
    ncclAllGather(*const c_void, *mut c_void, usize, c_uint, Handle, Handle);
    ncclSend(*const c_void, usize, c_uint, c_int, Handle, Handle);
    ncclRecv(*mut c_void, usize, c_uint, c_int, Handle, Handle);
    ncclGroupStart();
    ncclGroupEnd();
}

/// What is still going on, to the driver and to NCCL.
pub(crate) const NOT_READY: u32 = 600;
pub(crate) const IN_PROGRESS: u32 = 7;

/// A copy of the library with a machine.
pub(crate) struct Fake {
    pub(crate) library: Library,
    pub(crate) api: Api,
}

impl Fake {
    pub(crate) fn with(machine: &str) -> Self {
        let library = Library::whole();
        library.load(machine);
        // SAFETY: nothing runs when this library is loaded.
        let loaded =
            unsafe { libloading::Library::new(library.driver()) }.expect("the fake library");
        let api = Api::of(&loaded);
        std::mem::forget(loaded);
        // SAFETY: it takes a number.
        assert_eq!(unsafe { (api.cuInit)(0) }, 0);
        Self { library, api }
    }
}

impl Api {
    /// Makes a device's context current in this thread.
    pub(crate) fn enter(&self, device: c_int) -> Handle {
        // SAFETY: the driver writes one handle, and takes it again.
        unsafe {
            let context = made(|to| (self.cuDevicePrimaryCtxRetain)(to, device));
            assert_eq!((self.cuCtxSetCurrent)(context), 0);
            context
        }
    }

    pub(crate) fn stream(&self) -> Handle {
        // SAFETY: the driver writes one handle.
        unsafe { made(|to| (self.cuStreamCreate)(to, 1)) }
    }

    pub(crate) fn event(&self) -> Handle {
        // SAFETY: the driver writes one handle.
        unsafe { made(|to| (self.cuEventCreate)(to, 0)) }
    }

    /// Memory of the current device with these numbers in it.
    pub(crate) fn memory(&self, numbers: &[f32]) -> u64 {
        let mut address = 0;
        // SAFETY: the driver writes one number, and reads as many bytes as there are.
        unsafe {
            assert_eq!((self.cuMemAlloc_v2)(&mut address, size_of_val(numbers)), 0);
            assert_eq!(
                (self.cuMemcpyHtoD_v2)(address, numbers.as_ptr().cast(), size_of_val(numbers)),
                0
            );
        }
        address
    }

    /// What memory holds now, whatever streams are going to do.
    pub(crate) fn numbers<const N: usize>(&self, address: u64) -> [f32; N] {
        let mut numbers = [0.0; N];
        // SAFETY: there is place for as many bytes as are copied.
        let code = unsafe {
            (self.cuMemcpyDtoH_v2)(numbers.as_mut_ptr().cast(), address, size_of_val(&numbers))
        };
        assert_eq!(code, 0);
        numbers
    }

    pub(crate) fn synchronize(&self, stream: Handle) -> u32 {
        // SAFETY: handles are never followed.
        unsafe { (self.cuStreamSynchronize)(stream) }
    }
}

/// The handle that a function writes.
pub(crate) fn made(make: impl FnOnce(*mut Handle) -> u32) -> Handle {
    let mut handle = null_mut();
    assert_eq!(make(&mut handle), 0);
    handle
}

/// An address as NCCL takes it.
pub(crate) fn at(address: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(address as usize)
}
