//! Errors that programs often end with, and what helps: one table over the failed rank's last lines.

use paceline_words::Word;

use super::Failure;

/// One kind of error.
struct Known {
    /// Any of these in one line; `*` stands for any text.
    patterns: &'static [&'static str],
    /// What to do about it.
    advice: Word,
}

/// Advice for the first row that one of the rank's last lines matches. A program that prints a hint of its own, as Paceline's
/// do, needs none.
///
/// *Cost*: at most 80 lines of at most 4000 characters are compared with the table.
pub(super) fn advice(failure: &Failure) -> Option<Word> {
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
        advice: Word::new(
            "the GPU's memory is full: make the batch of each rank smaller, or end other programs that use it, which `paceline \
             gpu top` lists",
            "GPU 메모리가 가득 찼습니다. 랭크별 배치를 줄이거나, `paceline gpu top`으로 GPU를 쓰는 다른 프로그램을 찾아 \
             종료하세요",
        ),
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
        advice: Word::new(
            "/dev/shm is full: give the container more of it (`docker run --shm-size=8g`, or `--ipc=host`), or use fewer \
             data-loader workers",
            "/dev/shm이 가득 찼습니다. 컨테이너에 더 크게 잡아 주거나(`docker run --shm-size=8g` 또는 `--ipc=host`) 데이터 로더 \
             워커 수를 줄이세요",
        ),
    },
    Known {
        patterns: &["DataLoader worker*killed by signal: Killed"],
        advice: Word::new(
            "the kernel killed a data-loader worker, mostly because memory ran out: use fewer workers, or raise the container's \
             memory limit",
            "커널이 데이터 로더 워커를 종료했습니다. 대개 메모리 부족 때문이니, 워커 수를 줄이거나 컨테이너의 메모리 한도를 \
             늘리세요",
        ),
    },
    Known {
        patterns: &["DataLoader worker*exited unexpectedly"],
        advice: Word::new(
            "a data-loader worker ended first: start again with num_workers=0 to see its own error",
            "데이터 로더 워커가 먼저 종료되었습니다. num_workers=0으로 다시 실행하면 원래 오류가 보입니다",
        ),
    },
    Known {
        patterns: &[
            "MemoryError",
            "std::bad_alloc",
            "DefaultCPUAllocator: can't allocate memory",
            "memory allocation of*bytes failed",
            "Cannot allocate memory",
        ],
        advice: Word::new(
            "the machine's memory is full: make the batch smaller, start fewer ranks or data-loader workers, or raise the limit \
             of the container or of `ulimit`; `paceline train --zero 3` deals a model to its ranks",
            "머신의 메모리가 부족합니다. 배치를 줄이거나, 랭크나 데이터 로더 워커 수를 줄이거나, 컨테이너나 `ulimit`의 한도를 \
             늘리세요. `paceline train --zero 3`은 모델을 랭크들이 나누어 갖게 합니다",
        ),
    },
    // DistributedDataParallel.
    Known {
        patterns: &["Expected to have finished reduction in the prior iteration"],
        advice: Word::new(
            "some parameters got no gradient in a step: pass find_unused_parameters=True to DistributedDataParallel, or use every \
             parameter in the loss; TORCH_DISTRIBUTED_DEBUG=DETAIL names them",
            "어떤 스텝에서 그래디언트를 받지 못한 파라미터가 있습니다. DistributedDataParallel에 find_unused_parameters=True를 \
             주거나, 모든 파라미터를 손실 계산에 쓰세요. TORCH_DISTRIBUTED_DEBUG=DETAIL로 파라미터 이름을 볼 수 있습니다",
        ),
    },
    Known {
        patterns: &["Expected to mark a variable ready only once"],
        advice: Word::new(
            "a parameter got two gradients in one backward pass: pass static_graph=True to DistributedDataParallel, or \
             use_reentrant=False to torch.utils.checkpoint",
            "역전파 한 번에 그래디언트를 두 번 받은 파라미터가 있습니다. DistributedDataParallel에 static_graph=True를 주거나, \
             torch.utils.checkpoint에 use_reentrant=False를 주세요",
        ),
    },
    Known {
        patterns: &["Default process group has not been initialized"],
        advice: Word::new(
            "call torch.distributed.init_process_group() before anything that communicates",
            "통신하기 전에 torch.distributed.init_process_group()을 먼저 호출하세요",
        ),
    },
    // GPUs and the driver.
    Known {
        patterns: &[
            "Torch not compiled with CUDA enabled",
            "Distributed package doesn't have NCCL built in",
        ],
        advice: Word::new(
            "this Python has PyTorch without CUDA: install the build with CUDA, name another Python with PYTHON_EXEC, or use the \
             CPU with the gloo backend",
            "이 Python에는 CUDA가 없는 PyTorch가 설치되어 있습니다. CUDA 빌드를 설치하거나, PYTHON_EXEC 변수로 다른 Python을 \
             지정하거나, gloo 백엔드로 CPU를 쓰세요",
        ),
    },
    Known {
        patterns: &["Duplicate GPU detected"],
        advice: Word::new(
            "two ranks use the same GPU: call torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"])) before the first collective, \
             and start no more ranks than there are GPUs",
            "두 랭크가 같은 GPU를 쓰고 있습니다. 첫 집합 통신 전에 torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"]))를 \
             호출하고, 랭크를 GPU 수보다 많이 띄우지 마세요",
        ),
    },
    Known {
        patterns: &["invalid device ordinal", "CUDA_ERROR_INVALID_DEVICE"],
        advice: Word::new(
            "this rank chose a GPU that it does not see: start no more ranks than there are GPUs (`--nproc-per-node gpu`), and \
             choose by LOCAL_RANK, not by RANK",
            "이 랭크에서 보이지 않는 GPU를 골랐습니다. 랭크를 GPU 수보다 많이 띄우지 말고(`--nproc-per-node gpu`), RANK가 아니라 \
             LOCAL_RANK로 고르세요",
        ),
    },
    Known {
        patterns: &["Expected all tensors to be on the same device"],
        advice: Word::new(
            "move the model and every batch to the GPU of this rank, `cuda:LOCAL_RANK`",
            "모델과 모든 배치를 이 랭크의 GPU인 `cuda:LOCAL_RANK`로 옮기세요",
        ),
    },
    Known {
        patterns: &[
            "CUDA driver version is insufficient",
            "The NVIDIA driver on your system is too old",
            "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        ],
        advice: Word::new(
            "the program needs a newer driver: update it, or install a build for the CUDA version that `nvidia-smi` shows",
            "프로그램에 더 새로운 드라이버가 필요합니다. 드라이버를 업데이트하거나, `nvidia-smi`에 표시된 CUDA 버전용 빌드를 \
             설치하세요",
        ),
    },
    Known {
        patterns: &[
            "Found no NVIDIA driver on your system",
            "no CUDA-capable device is detected",
            "CUDA_ERROR_NO_DEVICE",
            "ProcessGroupNCCL is only supported with GPUs",
            "No CUDA GPUs are available",
        ],
        advice: Word::new(
            "this rank sees no GPU: look at CUDA_VISIBLE_DEVICES, start a container with `--gpus all`, and see what `paceline gpu \
             doctor` finds",
            "이 랭크에서 GPU가 보이지 않습니다. CUDA_VISIBLE_DEVICES를 확인하고, 컨테이너라면 `--gpus all`로 시작하고, `paceline \
             gpu doctor`로 진단해 보세요",
        ),
    },
    Known {
        patterns: &["no kernel image is available for execution on the device"],
        advice: Word::new(
            "the program was built for other GPUs: install or build it for this one's compute capability",
            "다른 GPU용으로 빌드한 프로그램입니다. 이 GPU의 compute capability에 맞는 빌드를 설치하거나 다시 빌드하세요",
        ),
    },
    Known {
        patterns: &[
            "CUDA-capable device(s) is/are busy or unavailable",
            "CUDA-capable devices are busy or unavailable",
        ],
        advice: Word::new(
            "another process has the GPU for itself, and `nvidia-smi` shows which: end it, or let several share the GPU with \
             `sudo nvidia-smi -c DEFAULT`",
            "다른 프로세스가 GPU를 독점하고 있습니다(`nvidia-smi`로 확인). 그 프로세스를 종료하거나, `sudo nvidia-smi -c \
             DEFAULT`로 함께 쓸 수 있게 하세요",
        ),
    },
    Known {
        patterns: &[
            "device-side assert triggered",
            "an illegal memory access was encountered",
        ],
        advice: Word::new(
            "the kernel that failed was started before the line that the traceback shows: CUDA_LAUNCH_BLOCKING=1 shows the right \
             one, often a label or an index out of range",
            "traceback의 줄보다 앞서 시작한 커널에서 실패했습니다. CUDA_LAUNCH_BLOCKING=1로 실행하면 정확한 줄이 나옵니다. 범위를 \
             벗어난 레이블이나 인덱스인 경우가 많습니다",
        ),
    },
    Known {
        patterns: &["Cannot re-initialize CUDA in forked subprocess"],
        advice: Word::new(
            "let data loaders start their workers with multiprocessing_context=\"spawn\", or use CUDA only after they have \
             started",
            "데이터 로더에 multiprocessing_context=\"spawn\"을 주거나, 워커를 띄운 뒤에만 CUDA를 쓰세요",
        ),
    },
    // Communication.
    Known {
        patterns: &[
            "Gloo connectFullMesh failed",
            "gloo/transport/tcp/*Connection refused",
            "gloo/transport/tcp/*Unable to find address for",
        ],
        advice: Word::new(
            "Gloo uses an address that other ranks do not reach: set GLOO_SOCKET_IFNAME to the interface that leads to them (`lo` \
             if all are on this machine), or put the machine's network address in front of its name in /etc/hosts; `paceline \
             doctor` shows both",
            "Gloo가 다른 랭크에서 접속할 수 없는 주소를 쓰고 있습니다. GLOO_SOCKET_IFNAME에 랭크끼리 연결되는 인터페이스를 \
             지정하거나(모두 이 머신에 있으면 `lo`), /etc/hosts에서 이 머신의 이름 앞에 네트워크 주소를 적으세요. 둘 다 `paceline \
             doctor`로 볼 수 있습니다",
        ),
    },
    Known {
        patterns: &["Watchdog caught collective operation timeout"],
        advice: Word::new(
            "a rank did not take part in this collective in time: start again with `--stall-after 60` to see where each rank \
             waits, or raise the timeout of init_process_group if a rank may take so long",
            "제한 시간 안에 이 집합 통신에 들어오지 않은 랭크가 있습니다. `--stall-after 60`으로 다시 실행해 각 랭크가 어디서 \
             기다리는지 보세요. 원래 오래 걸리는 작업이라면 init_process_group의 timeout을 늘리세요",
        ),
    },
    Known {
        patterns: &[
            "ncclRemoteError",
            "gloo/transport/tcp/*Connection closed by peer",
            "Connection reset by peer",
        ],
        advice: Word::new(
            "a rank that this one talked to ended first, or the network between them broke: look at the other ranks' logs",
            "통신하던 상대 랭크가 먼저 종료되었거나 네트워크가 끊겼습니다. 다른 랭크의 로그를 확인하세요",
        ),
    },
    Known {
        patterns: &[
            "unhandled system error",
            "unhandled cuda error",
            "ncclSystemError",
            "ncclInternalError",
        ],
        advice: Word::new(
            "NCCL says the reason if NCCL_DEBUG=INFO is set: start again with it; a small /dev/shm and a wrong NCCL_SOCKET_IFNAME \
             are usual",
            "NCCL_DEBUG=INFO를 설정하고 다시 실행하면 NCCL이 이유를 출력합니다. 작은 /dev/shm이나 잘못된 NCCL_SOCKET_IFNAME이 \
             흔한 원인입니다",
        ),
    },
    Known {
        patterns: &["EADDRINUSE", "ddress already in use"],
        advice: Word::new(
            "another program has this port, and `ss -ltnp` shows which: end it, or use MASTER_PORT, for which `paceline run` \
             finds a free one unless it is told a port",
            "다른 프로그램이 이 포트를 쓰고 있습니다(`ss -ltnp`로 확인). 그 프로그램을 종료하거나 MASTER_PORT를 쓰세요. `paceline \
             run`은 포트를 지정하지 않으면 빈 포트를 찾아 줍니다",
        ),
    },
    Known {
        patterns: &[
            "client socket has timed out after*while trying to connect",
            "Timed out after*clients joined",
        ],
        advice: Word::new(
            "rank 0 was not reached or a rank never came: start the program on every node, and let firewalls accept MASTER_PORT; \
             `paceline doctor` checks the way between nodes",
            "랭크 0에 접속하지 못했거나 오지 않은 랭크가 있습니다. 모든 노드에서 프로그램을 시작하고 방화벽에서 MASTER_PORT를 \
             허용하세요. 노드 사이의 연결은 `paceline doctor`로 점검할 수 있습니다",
        ),
    },
    // The program and its files.
    Known {
        patterns: &["EOFError: EOF when reading a line"],
        advice: Word::new(
            "this rank has no standard input: `--stdin RANK` names the rank that reads the launcher's, rank 0 by default",
            "이 랭크에는 표준 입력이 없습니다. 런처의 표준 입력을 읽을 랭크는 `--stdin RANK`로 지정하며 기본값은 0입니다",
        ),
    },
    Known {
        patterns: &["No module named "],
        advice: Word::new(
            "the Python that runs the ranks lacks this module: activate the environment that has it, or name that environment's \
             Python with PYTHON_EXEC",
            "랭크를 실행하는 Python에 이 모듈이 없습니다. 모듈이 있는 환경을 활성화하거나, 그 환경의 Python을 PYTHON_EXEC 변수에 \
             지정하세요",
        ),
    },
    Known {
        patterns: &["version `GLIBC*not found", "version `CXXABI*not found"],
        advice: Word::new(
            "the program was built on a newer system: build it on this one, or start it in a container of the other",
            "더 새로운 시스템에서 빌드한 프로그램입니다. 이 시스템에서 다시 빌드하거나, 빌드한 시스템의 컨테이너에서 실행하세요",
        ),
    },
    Known {
        patterns: &[
            "error while loading shared libraries",
            "cannot open shared object file",
        ],
        advice: Word::new(
            "the loader does not find this library: install it, or add its folder to LD_LIBRARY_PATH",
            "로더가 이 라이브러리를 찾지 못합니다. 라이브러리를 설치하거나 그 폴더를 LD_LIBRARY_PATH에 추가하세요",
        ),
    },
    Known {
        patterns: &["Exec format error", "cannot execute binary file"],
        advice: Word::new(
            "this file is a program for another processor, or a script without a `#!` line",
            "다른 CPU용 프로그램이거나 `#!` 줄이 없는 스크립트입니다",
        ),
    },
    Known {
        patterns: &["Can't pickle", "Can't get local object", "cannot pickle "],
        advice: Word::new(
            "worker processes get functions by name: move this lambda or local function to the top level of a module",
            "워커 프로세스에는 함수가 이름으로 전달됩니다. 이 lambda나 지역 함수를 모듈 최상위로 옮기세요",
        ),
    },
    Known {
        patterns: &["current process has finished its bootstrapping phase"],
        advice: Word::new(
            "worker processes import the script again: put the code that starts them under `if __name__ == \"__main__\":`",
            "워커 프로세스는 스크립트를 다시 import합니다. 워커를 띄우는 코드를 `if __name__ == \"__main__\":` 아래에 두세요",
        ),
    },
    Known {
        patterns: &["Too many open files", "received 0 items of ancdata"],
        advice: Word::new(
            "raise the limit on open files before the job starts (`ulimit -n 65536`), or let data loaders share by \
             torch.multiprocessing.set_sharing_strategy(\"file_system\")",
            "작업을 시작하기 전에 열린 파일 수의 한도를 늘리거나(`ulimit -n 65536`), \
             torch.multiprocessing.set_sharing_strategy(\"file_system\")로 데이터 로더의 공유 방식을 바꾸세요",
        ),
    },
    Known {
        patterns: &["No space left on device", "Disk quota exceeded"],
        advice: Word::new(
            "the disk is full: `df -h` and `df -i` of the folder in the message show how far",
            "디스크가 가득 찼습니다. 메시지에 나온 폴더를 `df -h`와 `df -i`로 확인하세요",
        ),
    },
    Known {
        patterns: &["Permission denied"],
        advice: Word::new(
            "this user may not open or execute the file in the message: see `ls -l`, and `chmod +x` for a program",
            "메시지에 나온 파일을 열거나 실행할 권한이 없습니다. `ls -l`로 확인하고, 프로그램이라면 `chmod +x`를 하세요",
        ),
    },
];

#[cfg(test)]
mod tests;
