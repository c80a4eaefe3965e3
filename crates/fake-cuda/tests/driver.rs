//! The fake driver as a program meets it: what streams and events keep in order, and what they do not.
#![allow(unsafe_code)]

mod support;

use std::ffi::{CString, c_void};
use std::ptr::null_mut;

use paceline_fake_cuda::{DRIVER_FUNCTIONS, Library, NCCL_FUNCTIONS};

use support::{Fake, NOT_READY, made};

const ADD: &str = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry paceline_add_f32(\n\
    .param .u64 dst, .param .u64 src, .param .u64 n\n) { ret; }";

#[test]
fn a_stream_does_its_work_in_order_after_the_calls() {
    let fake = Fake::with("{}");
    let api = fake.api;
    api.enter(0);
    let (stream, to) = (api.stream(), api.memory(&[0.0; 4]));
    let from = api.memory(&[1.0; 4]);
    fake.library.hold();
    // SAFETY: both places are of 16 bytes.
    unsafe {
        assert_eq!((api.cuMemcpyDtoDAsync_v2)(to, from, 16, stream), 0);
        assert_eq!((api.cuMemsetD32Async)(to, 2.0_f32.to_bits(), 2, stream), 0);
        assert_eq!((api.cuStreamQuery)(stream), NOT_READY);
    }
    fake.library.let_go();
    assert_eq!(api.synchronize(stream), 0);
    assert_eq!(api.numbers(to), [2.0, 2.0, 1.0, 1.0]);
}

#[test]
fn a_wait_that_is_missing_shows_as_wrong_data() {
    let check = |waits: bool, expect: f32| {
        // The first stream is late with every copy.
        let fake = Fake::with(r#"{"delays_ms": {"copy": 50}}"#);
        let api = fake.api;
        api.enter(0);
        let [first, second] = [(); 2].map(|()| api.stream());
        let [from, between, to] = [1.0, 2.0, 3.0].map(|number| api.memory(&[number]));
        let done = api.event();
        // SAFETY: all places are of 4 bytes.
        unsafe {
            assert_eq!((api.cuMemcpyDtoDAsync_v2)(between, from, 4, first), 0);
            assert_eq!((api.cuEventRecord)(done, first), 0);
            if waits {
                assert_eq!((api.cuStreamWaitEvent)(second, done, 0), 0);
            }
            let arguments = [to, between, 1];
            launch(&fake, second, &arguments);
            assert_eq!(api.synchronize(second), 0);
        }
        assert_eq!(api.numbers(to), [expect]);
    };
    check(true, 4.0);
    check(false, 5.0);
}

/// Starts the kernel that adds.
fn launch(fake: &Fake, stream: support::Handle, arguments: &[u64; 3]) {
    assert_eq!(start(fake, adding(fake), stream, arguments), 0);
}

/// The kernel that adds, on the current device.
fn adding(fake: &Fake) -> support::Handle {
    let api = fake.api;
    let (ptx, name) = (CString::new(ADD).expect("text"), c"paceline_add_f32");
    // SAFETY: both are text that ends.
    unsafe {
        let module = made(|to| (api.cuModuleLoadData)(to, ptx.as_ptr().cast()));
        made(|to| (api.cuModuleGetFunction)(to, module, name.as_ptr()))
    }
}

/// What the driver says to a launch of it.
fn start(
    fake: &Fake,
    kernel: support::Handle,
    stream: support::Handle,
    arguments: &[u64; 3],
) -> u32 {
    let mut pointers = arguments
        .each_ref()
        .map(|value| std::ptr::from_ref(value).cast_mut().cast::<c_void>());
    // SAFETY: the kernel has three parameters of 8 bytes.
    unsafe {
        (fake.api.cuLaunchKernel)(
            kernel,
            1,
            1,
            1,
            32,
            1,
            1,
            0,
            stream,
            pointers.as_mut_ptr(),
            null_mut(),
        )
    }
}

#[test]
fn an_event_of_a_context_comes_after_all_its_streams_and_before_what_waits() {
    let fake = Fake::with("{}");
    let api = fake.api;
    let context = api.enter(0);
    let [first, second] = [(); 2].map(|()| api.stream());
    let [from, to, last] = [1.0, 0.0, 0.0].map(|number| api.memory(&[number]));
    let (recorded, awaited) = (api.event(), api.event());
    fake.library.hold();
    // SAFETY: all places are of 4 bytes.
    unsafe {
        assert_eq!((api.cuMemcpyDtoDAsync_v2)(to, from, 4, first), 0);
        assert_eq!((api.cuCtxRecordEvent)(context, recorded), 0);
        assert_eq!((api.cuEventQuery)(recorded), NOT_READY);
        assert_eq!((api.cuEventRecord)(awaited, first), 0);
        assert_eq!((api.cuCtxWaitEvent)(context, awaited), 0);
        // Streams that were there, and one that comes later.
        let third = api.stream();
        assert_eq!((api.cuMemcpyDtoDAsync_v2)(last, to, 4, third), 0);
        assert_eq!((api.cuStreamQuery)(second), NOT_READY);
        fake.library.let_go();
        assert_eq!(api.synchronize(third), 0);
        assert_eq!((api.cuEventSynchronize)(recorded), 0);
    }
    assert_eq!(api.numbers(last), [1.0]);
}

#[test]
fn an_event_that_was_never_recorded_holds_nobody() {
    let fake = Fake::with("{}");
    let api = fake.api;
    api.enter(0);
    let (stream, event) = (api.stream(), api.event());
    // SAFETY: handles are never followed.
    unsafe {
        assert_eq!((api.cuStreamWaitEvent)(stream, event, 0), 0);
        assert_eq!((api.cuEventSynchronize)(event), 0);
        assert_eq!(api.synchronize(stream), 0);
        assert_eq!((api.cuEventElapsedTime)(&mut 0.0, event, event), 400);
    }
}

#[test]
fn pinned_memory_is_read_when_the_copy_is_done_and_other_memory_at_the_call() {
    let fake = Fake::with("{}");
    let api = fake.api;
    api.enter(0);
    let (stream, [late, early]) = (api.stream(), [0.0; 2].map(|number| api.memory(&[number])));
    let mut plain = 1.0_f32;
    fake.library.hold();
    // SAFETY: all places are of 4 bytes, and pinned memory is only written while no stream works.
    unsafe {
        let pinned = made(|to| (api.cuMemAllocHost_v2)(to, 4)).cast::<f32>();
        pinned.write(1.0);
        assert_eq!(
            (api.cuMemcpyHtoDAsync_v2)(late, pinned.cast(), 4, stream),
            0
        );
        assert_eq!(
            (api.cuMemcpyHtoDAsync_v2)(early, (&raw const plain).cast(), 4, stream),
            0
        );
        pinned.write(2.0);
        plain = 2.0;
    }
    fake.library.let_go();
    assert_eq!(api.synchronize(stream), 0);
    assert_eq!((api.numbers(late), api.numbers(early)), ([2.0], [1.0]));
    assert_eq!(plain, 2.0);
}

#[test]
fn links_do_what_they_are_told_to() {
    let check = |word: &str, enables: bool, says: i32, expect: f32| {
        let fake = Fake::with(&format!(r#"{{"devices": 2, "peers": "{word}"}}"#));
        let api = fake.api;
        let (mut can, there) = (0, api.enter(1));
        let to = api.memory(&[0.0]);
        let here = api.enter(0);
        let (from, stream) = (api.memory(&[1.0]), api.stream());
        // SAFETY: both places are of 4 bytes.
        unsafe {
            assert_eq!((api.cuDeviceCanAccessPeer)(&mut can, 0, 1), 0);
            assert_eq!(can, says, "{word}");
            if enables {
                let expect = if says == 1 { 0 } else { 217 };
                assert_eq!((api.cuCtxEnablePeerAccess)(there, 0), expect, "{word}");
            }
            assert_eq!((api.cuMemcpyPeerAsync)(to, there, from, here, 4, stream), 0);
            assert_eq!(api.synchronize(stream), 0);
        }
        assert_eq!(api.numbers(to), [expect], "{word}");
    };
    check("OK", true, 1, 1.0);
    check("NS", true, 0, 1.0);
    let corrupted = f32::from_bits(1.0_f32.to_bits() ^ 0x40);
    check("BAD", true, 1, corrupted);
    // Through the host all links are well.
    check("BAD", false, 1, 1.0);
    check("STUCK", false, 1, 1.0);
}

#[test]
fn a_copy_over_a_stuck_link_never_ends() {
    let fake = Fake::with(r#"{"devices": 2, "peers": "STUCK"}"#);
    let api = fake.api;
    let there = api.enter(1);
    let to = api.memory(&[0.0]);
    let here = api.enter(0);
    let (from, stream) = (api.memory(&[1.0]), api.stream());
    let other = api.stream();
    // SAFETY: both places are of 4 bytes.
    unsafe {
        assert_eq!((api.cuCtxEnablePeerAccess)(there, 0), 0);
        assert_eq!((api.cuMemcpyPeerAsync)(to, there, from, here, 4, stream), 0);
        // Others go on.
        assert_eq!((api.cuMemsetD32Async)(from, 0, 1, other), 0);
        assert_eq!(api.synchronize(other), 0);
        assert_eq!((api.cuStreamQuery)(stream), NOT_READY);
    }
}

#[test]
fn a_kernel_that_leaves_its_memory_spoils_the_context() {
    let fake = Fake::with("{}");
    let api = fake.api;
    api.enter(0);
    let (stream, memory) = (api.stream(), api.memory(&[1.0]));
    launch(&fake, stream, &[memory, memory, 2]);
    assert_eq!(api.synchronize(stream), 700);
    // SAFETY: the driver writes one number.
    let code = unsafe { (api.cuMemAlloc_v2)(&mut 0, 4) };
    assert_eq!(code, 700, "and every call after it fails");
}

#[test]
fn every_thread_has_contexts_of_its_own() {
    let fake = Fake::with(r#"{"devices": 2}"#);
    let api = fake.api;
    let first = api.enter(0);
    let current = move || {
        let mut context = null_mut();
        // SAFETY: the driver writes one handle.
        assert_eq!(unsafe { (api.cuCtxGetCurrent)(&mut context) }, 0);
        context.addr()
    };
    assert_eq!(std::thread::spawn(current).join().expect("a thread"), 0);
    // SAFETY: handles are never followed.
    unsafe {
        let second = made(|to| (api.cuDevicePrimaryCtxRetain)(to, 1));
        assert_eq!((api.cuCtxPushCurrent_v2)(second), 0);
        assert_eq!(current(), second.addr());
        assert_eq!((api.cuCtxPopCurrent_v2)(null_mut()), 0);
    }
    assert_eq!(current(), first.addr());
}

#[test]
fn a_kernel_needs_its_streams_context_and_a_copy_no_other_one() {
    let fake = Fake::with(r#"{"devices": 2}"#);
    let api = fake.api;
    let check = |device: i32, expect: [u32; 2]| {
        let own = api.enter(0);
        let (stream, memory) = (api.stream(), api.memory(&[0.0]));
        let kernel = adding(&fake);
        // SAFETY: handles are never followed, and the kernel gets three numbers, of which the last says that there is nothing
        // to do; the place is of 4 bytes.
        unsafe {
            let current = match device {
                -1 => null_mut(),
                0 => own,
                other => api.enter(other),
            };
            assert_eq!((api.cuCtxSetCurrent)(current), 0);
            let launched = start(&fake, kernel, stream, &[memory, memory, 0]);
            let copied = (api.cuMemcpyDtoDAsync_v2)(memory, memory, 4, stream);
            assert_eq!([launched, copied], expect, "current: {device}");
        }
    };
    const INVALID_VALUE: u32 = 1;
    const INVALID_CONTEXT: u32 = 201;
    check(0, [0, 0]);
    check(-1, [INVALID_CONTEXT, 0]);
    check(1, [INVALID_CONTEXT, INVALID_VALUE]);
}

#[test]
fn a_call_fails_when_it_is_told_to_and_calls_are_counted() {
    let fake = Fake::with(
        r#"{"faults": [{"call": "cuMemAlloc_v2", "after": 1, "times": 1, "does": {"code": 2}}]}"#,
    );
    let api = fake.api;
    api.enter(0);
    // SAFETY: the driver writes one number.
    let codes = [(); 3].map(|()| unsafe { (api.cuMemAlloc_v2)(&mut 0, 4) });
    assert_eq!(codes, [0, 2, 0]);
    assert_eq!(fake.library.calls("cuMemAlloc_v2"), 3);
}

#[test]
fn every_function_can_be_taken_out_and_every_other_stays() {
    let all = || DRIVER_FUNCTIONS.iter().chain(NCCL_FUNCTIONS);
    for gone in all() {
        let library = Library::without(&[gone]);
        // SAFETY: nothing runs when this library is loaded, and functions are looked up and not called.
        unsafe {
            let loaded = libloading::Library::new(library.nccl()).expect("a library");
            for function in all() {
                let found = loaded.get::<extern "C" fn()>(function.as_bytes());
                assert_eq!(found.is_ok(), function != gone, "{function} without {gone}");
            }
        }
    }
}
