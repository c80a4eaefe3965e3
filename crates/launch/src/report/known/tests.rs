//! Each row against what programs really print before they end.

use paceline_words::Lang;

use super::*;
use crate::report::{FailureKind, RankError};

fn printed(text: &str) -> Failure {
    let lines = text.lines().map(str::trim_end);
    Failure {
        last_lines: lines
            .filter(|line| !line.is_empty())
            .map(str::to_owned)
            .collect(),
        ..Failure::example(FailureKind::ExitCode(1))
    }
}

/// What a rank printed last, and how its advice begins.
const CASES: &[(&str, &str)] = &[
    (
        r#"
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/ann/train.py", line 61, in <module>
[rank1]:     loss.backward()
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.44 GiB is free. Process 4711 has 77.70 GiB memory in use. See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)
"#,
        "the GPU's memory is full",
    ),
    (
        r#"
  File "train.py", line 12, in main
    x = torch.empty(n, device="cuda")
torch.cuda.OutOfMemoryError: Allocation on device
"#,
        "the GPU's memory is full",
    ),
    (
        r#"
thread 'main' panicked at src/compute/storage.rs:132:87:
called `Result::unwrap()` on an `Err` value: DriverError(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace
"#,
        "the GPU's memory is full",
    ),
    (
        r#"
thread 'main' (81) panicked at src/train.rs:90:14:
out of device memory allocating 17179869184 bytes
"#,
        "the GPU's memory is full",
    ),
    (
        r#"
ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).
Traceback (most recent call last):
  File "train.py", line 40, in <module>
    for batch in loader:
RuntimeError: DataLoader worker (pid 6144) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.
"#,
        "/dev/shm is full",
    ),
    (
        r#"
node1:77:101 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-abc123 to 9637892 bytes
node1:77:101 [0] misc/shmutils.cc:113 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-abc123 (size 9637888)
torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5
"#,
        "/dev/shm is full",
    ),
    (
        "RuntimeError: DataLoader worker (pid 2201) is killed by signal: Killed.",
        "the kernel killed a data-loader worker",
    ),
    (
        "RuntimeError: DataLoader worker (pid(s) 2201, 2202) exited unexpectedly",
        "a data-loader worker ended first",
    ),
    (
        r#"
RuntimeError: [enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)
"#,
        "the machine's memory is full",
    ),
    (
        "memory allocation of 8589934592 bytes failed",
        "the machine's memory is full",
    ),
    (
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
        "the machine's memory is full",
    ),
    (
        r#"
[rank0]: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss. You can enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by
[rank0]: making sure all `forward` function outputs participate in calculating loss.
[rank0]: Parameter indices which did not receive grad for rank 0: 2 3
"#,
        "some parameters got no gradient in a step: pass find_unused_parameters=True",
    ),
    (
        "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a module parameter outside the `forward` function.",
        "a parameter got two gradients",
    ),
    (
        "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
        "call torch.distributed.init_process_group()",
    ),
    (
        r#"
  File "/usr/lib/python3/dist-packages/torch/cuda/__init__.py", line 310, in _lazy_init
    raise AssertionError("Torch not compiled with CUDA enabled")
AssertionError: Torch not compiled with CUDA enabled
"#,
        "this Python has PyTorch without CUDA",
    ),
    (
        r#"
torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.20.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000
"#,
        "two ranks use the same GPU",
    ),
    (
        r#"
    torch._C._cuda_setDevice(device)
torch.AcceleratorError: CUDA error: invalid device ordinal
GPU device may be out of range, do you have enough GPUs?
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"#,
        "this rank chose a GPU that it does not see",
    ),
    (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1!",
        "move the model and every batch",
    ),
    (
        "terminate called after throwing an instance of 'std::runtime_error'\n  what():  CUDA driver version is insufficient for CUDA runtime version",
        "the program needs a newer driver",
    ),
    (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading and installing a new version",
        "the program needs a newer driver",
    ),
    (
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from http://www.nvidia.com/Download/index.aspx",
        "this rank sees no GPU",
    ),
    (
        "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        "this rank sees no GPU",
    ),
    (
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "the program was built for other GPUs",
    ),
    (
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "another process has the GPU for itself",
    ),
    (
        r#"
../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [4,0,0] Assertion `t >= 0 && t < n_classes` failed.
RuntimeError: CUDA error: device-side assert triggered
"#,
        "the kernel that failed was started before",
    ),
    (
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method",
        "let data loaders start their workers",
    ),
    (
        r#"
Traceback (most recent call last):
  File "ask.py", line 1, in <module>
    name = input("name? ")
EOFError: EOF when reading a line
"#,
        "this rank has no standard input: `--stdin RANK`",
    ),
    (
        "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
        "Gloo uses an address that other ranks do not reach: set GLOO_SOCKET_IFNAME",
    ),
    (
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:38417: Connection refused",
        "Gloo uses an address",
    ),
    (
        "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth7",
        "Gloo uses an address",
    ),
    (
        r#"
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=112, NumelOut=112, Timeout(ms)=600000) ran for 600011 milliseconds before timing out.
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:632 (most recent call first):
"#,
        "a rank did not take part in this collective in time",
    ),
    (
        r#"
torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2501, remote process exited or there was a network error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
"#,
        "a rank that this one talked to ended first",
    ),
    (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:41230",
        "a rank that this one talked to ended first",
    ),
    (
        r#"
torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
"#,
        "NCCL says the reason if NCCL_DEBUG=INFO is set",
    ),
    (
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "another program has this port",
    ),
    (
        "OSError: [Errno 98] Address already in use",
        "another program has this port",
    ),
    (
        r#"Error: Os { code: 98, kind: AddrInUse, message: "Address already in use" }"#,
        "another program has this port",
    ),
    (
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (10.0.0.1, 29500).",
        "rank 0 was not reached",
    ),
    (
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
        "rank 0 was not reached",
    ),
    (
        r#"
Traceback (most recent call last):
  File "train.py", line 1, in <module>
    import torch
ModuleNotFoundError: No module named 'torch'
"#,
        "the Python that runs the ranks lacks this module",
    ),
    (
        "/usr/bin/python3: No module named package.train",
        "the Python that runs the ranks lacks",
    ),
    (
        "./train: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by ./train)",
        "the program was built on a newer system",
    ),
    (
        "./train: error while loading shared libraries: libtorch.so: cannot open shared object file: No such file or directory",
        "the loader does not find this library",
    ),
    (
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "the loader does not find this library",
    ),
    (
        "bash: ./train: cannot execute binary file: Exec format error",
        "this file is a program for another processor",
    ),
    (
        "AttributeError: Can't pickle local object 'main.<locals>.<lambda>'",
        "worker processes get functions by name",
    ),
    (
        "AttributeError: Can't get local object 'main.<locals>.collate'",
        "worker processes get functions by name",
    ),
    (
        "TypeError: cannot pickle '_io.BufferedReader' object",
        "worker processes get functions by name",
    ),
    (
        r#"
RuntimeError:
        An attempt has been made to start a new process before the
        current process has finished its bootstrapping phase.
        This probably means that you are not using fork to start your
        child processes and you have forgotten to use the proper idiom
        in the main module:
"#,
        "worker processes import the script again",
    ),
    (
        "OSError: [Errno 24] Too many open files: '/data/shard-17.tar'",
        "raise the limit on open files",
    ),
    (
        "RuntimeError: received 0 items of ancdata",
        "raise the limit on open files",
    ),
    (
        "OSError: [Errno 28] No space left on device: 'runs/checkpoint.pt'",
        "the disk is full",
    ),
    (
        "PermissionError: [Errno 13] Permission denied: '/data/train.idx'",
        "this user may not open or execute",
    ),
    (
        "sh: 1: ./train: Permission denied",
        "this user may not open or execute",
    ),
];

#[test]
fn real_last_lines_get_their_advice() {
    for (text, expect) in CASES {
        let got = advice(&printed(text)).map(|got| got.of(Lang::En));
        assert!(
            got.is_some_and(|got| got.starts_with(expect)),
            "{text}\n{got:?}"
        );
    }
}

#[test]
fn every_row_has_a_case() {
    for row in KNOWN {
        let row = row.advice.of(Lang::En);
        let is_its = |(_, expect): &&(&str, &str)| row.starts_with(expect);
        assert!(CASES.iter().any(|case| is_its(&case)), "{row}");
    }
}

#[test]
fn lines_without_a_known_error_get_none() {
    for text in [
        "",
        "epoch 3 step 400 loss 0.31",
        "ValueError: no data",
        "loaded 12 modules named in config.toml",
        "memory allocation took 3 ms",
    ] {
        assert_eq!(advice(&printed(text)), None, "{text}");
    }
}

#[test]
fn a_program_with_a_hint_of_its_own_gets_no_second_one() {
    let text = "error: cannot listen on port 29500: Address already in use";
    assert!(advice(&printed(text)).is_some());
    let text = format!("{text}\nhint: name another port with --master-port");
    assert_eq!(advice(&printed(&text)), None);
}

#[test]
fn an_error_that_only_its_file_has_is_looked_at_too() {
    let error = RankError {
        message: "RuntimeError: CUDA error: invalid device ordinal".to_owned(),
        traceback: Vec::new(),
    };
    let failure = Failure {
        error: Some(error),
        ..printed("shutting down")
    };
    assert!(advice(&failure).is_some_and(|advice| advice.of(Lang::Ko).contains("LOCAL_RANK")));
}

#[test]
fn the_parts_of_a_pattern_come_in_order_in_one_line() {
    let check = |line, pattern, expect| assert_eq!(matches(line, pattern), expect, "{line}");
    check(
        "version `GLIBC_2.38' not found",
        "version `GLIBC*not found",
        true,
    );
    check(
        "not found: version `GLIBC",
        "version `GLIBC*not found",
        false,
    );
    check("", "x", false);
    check("äx", "x", true);
}
