//! Errors that programs often end with, and what helps: one table over the failed rank's last lines.

use super::Failure;

/// One kind of error.
struct Known {
    /// Any of these in one line; `*` stands for any text.
    patterns: &'static [&'static str],
    /// What to do about it.
    advice: &'static str,
}

/// Advice for the first row that one of the rank's last lines matches. A program that prints a hint of its own, as Paceline's
/// do, needs none.
///
/// *Cost*: at most 80 lines of at most 4000 characters are compared with the table.
pub(super) fn advice(failure: &Failure) -> Option<&'static str> {
    let error = failure.error.iter();
    let error = error.flat_map(|error| error.message.lines().take(60));
    let last = failure.last_lines.iter().map(String::as_str);
    let lines: Vec<&str> = error.chain(last).collect();
    if lines
        .iter()
        .any(|line| line.trim_start().starts_with("hint:"))
    {
        return None;
    }
    let is_met = |pattern: &&str| lines.iter().any(|line| matches(line, pattern));
    let row = KNOWN.iter().find(|row| row.patterns.iter().any(is_met));
    row.map(|row| row.advice)
}

/// Whether the parts of a pattern occur in the line, one after another.
fn matches(line: &str, pattern: &str) -> bool {
    let mut rest = line;
    pattern.split('*').all(|part| match rest.find(part) {
        Some(at) => {
            rest = &rest[at + part.len()..];
            true
        }
        None => false,
    })
}

/// The first matching row counts: a program prints the particular error together with the general one.
const KNOWN: &[Known] = &[
    // Memory.
    Known {
        patterns: &[
            "CUDA out of memory",
            "HIP out of memory",
            "torch.OutOfMemoryError",
            "torch.cuda.OutOfMemoryError",
            "CUDA error: out of memory",
            "CUDA_ERROR_OUT_OF_MEMORY",
            "CUBLAS_STATUS_ALLOC_FAILED",
            "out of device memory allocating",
            "out-of-memory error happened during launch",
        ],
        advice: "the GPU's memory is full: make the batch of each rank smaller, or end other programs that use \
                 it, which `paceline gpu top` lists",
    },
    Known {
        patterns: &[
            "killed by signal: Bus error",
            "Unexpected bus error encountered in worker",
            "Error while creating shared memory segment",
            "unable to allocate shared memory",
            "/dev/shm*No space left on device",
            "No space left on device*/dev/shm",
        ],
        advice: "/dev/shm is full: give the container more of it (`docker run --shm-size=8g`, or `--ipc=host`), or use fewer \
                 data-loader workers",
    },
    Known {
        patterns: &["DataLoader worker*killed by signal: Killed"],
        advice: "the kernel killed a data-loader worker, mostly because memory ran out: use fewer workers, or raise the \
                 container's memory limit",
    },
    Known {
        patterns: &["DataLoader worker*exited unexpectedly"],
        advice: "a data-loader worker ended first: start again with num_workers=0 to see its own error",
    },
    Known {
        patterns: &[
            "MemoryError",
            "std::bad_alloc",
            "DefaultCPUAllocator: can't allocate memory",
            "memory allocation of*bytes failed",
            "Cannot allocate memory",
        ],
        advice: "the machine's memory is full: make the batch smaller, start fewer ranks or data-loader workers, or raise the \
                 limit of the container or of `ulimit`; `paceline train --zero 3` deals a model to its ranks",
    },
    // DistributedDataParallel.
    Known {
        patterns: &["Expected to have finished reduction in the prior iteration"],
        advice: "some parameters got no gradient in a step: pass find_unused_parameters=True to DistributedDataParallel, or \
                 use every parameter in the loss; TORCH_DISTRIBUTED_DEBUG=DETAIL names them",
    },
    Known {
        patterns: &["Expected to mark a variable ready only once"],
        advice: "a parameter got two gradients in one backward pass: pass static_graph=True to DistributedDataParallel, or \
                 use_reentrant=False to torch.utils.checkpoint",
    },
    Known {
        patterns: &["Default process group has not been initialized"],
        advice: "call torch.distributed.init_process_group() before anything that communicates",
    },
    // GPUs and the driver.
    Known {
        patterns: &[
            "Torch not compiled with CUDA enabled",
            "Distributed package doesn't have NCCL built in",
        ],
        advice: "this Python has PyTorch without CUDA: install the build with CUDA, name another Python with PYTHON_EXEC, or \
                 use the CPU with the gloo backend",
    },
    Known {
        patterns: &["Duplicate GPU detected"],
        advice: "two ranks use the same GPU: call torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"])) before the first \
                 collective, and start no more ranks than there are GPUs",
    },
    Known {
        patterns: &["invalid device ordinal", "CUDA_ERROR_INVALID_DEVICE"],
        advice: "this rank chose a GPU that it does not see: start no more ranks than there are GPUs (`--nproc-per-node gpu`), \
                 and choose by LOCAL_RANK, not by RANK",
    },
    Known {
        patterns: &["Expected all tensors to be on the same device"],
        advice: "move the model and every batch to the GPU of this rank, `cuda:LOCAL_RANK`",
    },
    Known {
        patterns: &[
            "CUDA driver version is insufficient",
            "The NVIDIA driver on your system is too old",
            "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        ],
        advice: "the program needs a newer driver: update it, or install a build for the CUDA version that `nvidia-smi` shows",
    },
    Known {
        patterns: &[
            "Found no NVIDIA driver on your system",
            "no CUDA-capable device is detected",
            "CUDA_ERROR_NO_DEVICE",
            "ProcessGroupNCCL is only supported with GPUs",
            "No CUDA GPUs are available",
        ],
        advice: "this rank sees no GPU: look at CUDA_VISIBLE_DEVICES, start a container with `--gpus all`, and see what \
                 `paceline gpu doctor` finds",
    },
    Known {
        patterns: &["no kernel image is available for execution on the device"],
        advice: "the program was built for other GPUs: install or build it for this one's compute capability",
    },
    Known {
        patterns: &[
            "CUDA-capable device(s) is/are busy or unavailable",
            "CUDA-capable devices are busy or unavailable",
        ],
        advice: "another process has the GPU for itself, and `nvidia-smi` shows which: end it, or let several share the GPU with \
                 `sudo nvidia-smi -c DEFAULT`",
    },
    Known {
        patterns: &[
            "device-side assert triggered",
            "an illegal memory access was encountered",
        ],
        advice: "the kernel that failed was started before the line that the traceback shows: CUDA_LAUNCH_BLOCKING=1 shows the \
                 right one, often a label or an index out of range",
    },
    Known {
        patterns: &["Cannot re-initialize CUDA in forked subprocess"],
        advice: "let data loaders start their workers with multiprocessing_context=\"spawn\", or use CUDA only after they have \
                 started",
    },
    // Communication.
    Known {
        patterns: &[
            "Gloo connectFullMesh failed",
            "gloo/transport/tcp/*Connection refused",
            "gloo/transport/tcp/*Unable to find address for",
        ],
        advice: "Gloo uses an address that other ranks do not reach: set GLOO_SOCKET_IFNAME to the interface that leads to \
                 them (`lo` if all are on this machine), or put the machine's network address in front of its name in \
                 /etc/hosts; `paceline doctor` shows both",
    },
    Known {
        patterns: &["Watchdog caught collective operation timeout"],
        advice: "a rank did not take part in this collective in time: start again with `--stall-after 60` to see where each rank \
                 waits, or raise the timeout of init_process_group if a rank may take so long",
    },
    Known {
        patterns: &[
            "ncclRemoteError",
            "gloo/transport/tcp/*Connection closed by peer",
            "Connection reset by peer",
        ],
        advice: "a rank that this one talked to ended first, or the network between them broke: look at the other ranks' logs",
    },
    Known {
        patterns: &[
            "unhandled system error",
            "unhandled cuda error",
            "ncclSystemError",
            "ncclInternalError",
        ],
        advice: "NCCL says the reason if NCCL_DEBUG=INFO is set: start again with it; a small /dev/shm and a wrong \
                 NCCL_SOCKET_IFNAME are usual",
    },
    Known {
        patterns: &["EADDRINUSE", "ddress already in use"],
        advice: "another program has this port, and `ss -ltnp` shows which: end it, or use MASTER_PORT, for which \
                 `paceline run` finds a free one unless it is told a port",
    },
    Known {
        patterns: &[
            "client socket has timed out after*while trying to connect",
            "Timed out after*clients joined",
        ],
        advice: "rank 0 was not reached or a rank never came: start the program on every node, and let firewalls accept \
                 MASTER_PORT; `paceline doctor` checks the way between nodes",
    },
    // The program and its files.
    Known {
        patterns: &["EOFError: EOF when reading a line"],
        advice: "this rank has no standard input: `--stdin RANK` names the rank that reads the launcher's, rank 0 by default",
    },
    Known {
        patterns: &["No module named "],
        advice: "the Python that runs the ranks lacks this module: activate the environment that has it, or name that \
                 environment's Python with PYTHON_EXEC",
    },
    Known {
        patterns: &["version `GLIBC*not found", "version `CXXABI*not found"],
        advice: "the program was built on a newer system: build it on this one, or start it in a container of the other",
    },
    Known {
        patterns: &[
            "error while loading shared libraries",
            "cannot open shared object file",
        ],
        advice: "the loader does not find this library: install it, or add its folder to LD_LIBRARY_PATH",
    },
    Known {
        patterns: &["Exec format error", "cannot execute binary file"],
        advice: "this file is a program for another processor, or a script without a `#!` line",
    },
    Known {
        patterns: &["Can't pickle", "Can't get local object", "cannot pickle "],
        advice: "worker processes get functions by name: move this lambda or local function to the top level of a module",
    },
    Known {
        patterns: &["current process has finished its bootstrapping phase"],
        advice: "worker processes import the script again: put the code that starts them under `if __name__ == \"__main__\":`",
    },
    Known {
        patterns: &["Too many open files", "received 0 items of ancdata"],
        advice: "raise the limit on open files before the job starts (`ulimit -n 65536`), or let data loaders share by \
                 torch.multiprocessing.set_sharing_strategy(\"file_system\")",
    },
    Known {
        patterns: &["No space left on device", "Disk quota exceeded"],
        advice: "the disk is full: `df -h` and `df -i` of the folder in the message show how far",
    },
    Known {
        patterns: &["Permission denied"],
        advice: "this user may not open or execute the file in the message: see `ls -l`, and `chmod +x` for a program",
    },
];

#[cfg(test)]
mod tests;
