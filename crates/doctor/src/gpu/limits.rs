//! What the system gives a process that trains on GPUs: `/dev/shm`, locked memory, and the module for RDMA.
//!
//! *Source*: "Shared memory", "GPU-to-NIC communication" and "InfiniBand" in NCCL's user guide.

use paceline_gpu::snapshot::{Memory, Reading, Snapshot};
use paceline_words::say;

use super::gaps::told_as;
use super::words::joined;
use crate::checks;
use crate::finding::{Notes, plain, size};

/// What Docker and Kubernetes give a container unless told otherwise.
const SHM_OF_DOCKER: u64 = 64 << 20;

/// What NCCL's user guide recommends at least.
const SHM_MIN: u64 = 1 << 30;

/// What is left of `/dev/shm` when it is as good as full: less than NCCL takes for one pair of ranks.
const SHM_FREE_MIN: u64 = 32 << 20;

/// Below this not even a small job's buffers can be registered; what NCCL needs grows with the number of connections.
const LOCKED_MIN: u64 = 1 << 30;

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    if snapshot.devices.is_empty() {
        return;
    }
    judge_shm(snapshot, notes);
    judge_locked(snapshot, notes);
    judge_peermem(snapshot, notes);
}

fn judge_shm(snapshot: &Snapshot, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::SHM);
    let Some(Memory {
        used_bytes,
        total_bytes,
    }) = snapshot.system.shm.known().copied()
    else {
        return;
    };
    let free_bytes = total_bytes.saturating_sub(used_bytes);
    let (total, free) = (size(total_bytes), size(free_bytes));
    sheet.fact(say!(lang, "{total}, {free} free", "{total} 중 {free} 남음"));
    let why = say!(
        lang,
        "NCCL exchanges data of ranks without peer-to-peer there, and PyTorch's data loaders their batches: the job fails with \
         \"bus error\", \"no space left on device\" or \"failed to extend /dev/shm/nccl-...\"",
        "P2P가 없으면 NCCL이 랭크 사이의 데이터를, PyTorch 데이터 로더가 배치를 여기로 주고받습니다. 모자라면 작업이 \"bus error\", \"no space left on \
         device\", \"failed to extend /dev/shm/nccl-...\"로 실패합니다"
    );
    let is_kubernetes = snapshot
        .system
        .confined_by
        .iter()
        .any(|known| known == "kubernetes");
    let more = match (is_kubernetes, snapshot.system.is_container()) {
        (true, _) => say!(
            lang,
            "mount a volume `emptyDir: {{medium: Memory, sizeLimit: 8Gi}}` at /dev/shm in the pod",
            "파드의 /dev/shm에 `emptyDir: {{medium: Memory, sizeLimit: 8Gi}}` 볼륨을 마운트하세요"
        ),
        (false, true) => say!(
            lang,
            "start the container with `--shm-size=8g`, or `--ipc=host`",
            "컨테이너를 `--shm-size=8g` 또는 `--ipc=host`로 시작하세요"
        ),
        (false, false) => say!(
            lang,
            "`sudo mount -o remount,size=8G /dev/shm`",
            "`sudo mount -o remount,size=8G /dev/shm`을 실행하세요"
        ),
    };
    if total_bytes <= SHM_OF_DOCKER {
        sheet.warning(
            say!(
                lang,
                "/dev/shm has {total}, as containers have unless told otherwise",
                "/dev/shm 크기가 컨테이너 기본값인 {total}임"
            ),
            why,
            more,
        );
    } else if free_bytes < SHM_FREE_MIN {
        sheet.warning(
            say!(
                lang,
                "/dev/shm is full: {free} of {total} are free",
                "/dev/shm이 가득 참: {total} 중 {free} 남음"
            ),
            why,
            say!(
                lang,
                "`ls -l /dev/shm` shows what an earlier job left there (nccl-*, torch_*, psm_*): remove what no process uses; or {more}",
                "이전 작업이 남긴 파일(nccl-*, torch_*, psm_*)을 `ls -l /dev/shm`으로 찾아, 쓰는 프로세스가 없는 것을 지우세요. 또는 {more}"
            ),
        );
    } else if total_bytes < SHM_MIN {
        sheet.note(
            say!(
                lang,
                "/dev/shm has {total} only",
                "/dev/shm 크기가 {total}뿐임"
            ),
            why,
            more,
        );
    }
}

fn rdma(snapshot: &Snapshot) -> Vec<String> {
    let nics = snapshot.system.nics.iter();
    let up = nics.filter(|nic| nic.is_rdma && nic.is_up != Reading::Known(false));
    up.map(|nic| plain(&nic.name)).collect()
}

fn judge_locked(snapshot: &Snapshot, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::LOCKED_MEMORY);
    let Some(limit) = snapshot.system.memlock_bytes.known() else {
        return;
    };
    sheet.fact(limit.map_or_else(|| say!(lang, "unlimited", "제한 없음"), size));
    let adapters = rdma(snapshot);
    let Some(bytes) = limit.filter(|bytes| *bytes < LOCKED_MIN && !adapters.is_empty()) else {
        return;
    };
    let (most, adapters) = (size(bytes), joined(adapters, lang));
    sheet.warning(
        say!(
            lang,
            "a process may lock {most} of memory, and there is RDMA ({adapters})",
            "RDMA 어댑터({adapters})가 있는데 프로세스가 잠글 수 있는 메모리가 {most}뿐임"
        ),
        say!(
            lang,
            "NCCL must lock what it sends over it: jobs of several nodes fail with \"Call to ibv_reg_mr failed\" or \"ibv_create_qp failed\"",
            "NCCL은 RDMA로 보내는 메모리를 잠가야 합니다. 여러 노드의 작업이 \"Call to ibv_reg_mr failed\" 또는 \"ibv_create_qp failed\"로 실패합니다"
        ),
        match snapshot.system.is_container() {
            true => say!(
                lang,
                "`docker run --ulimit memlock=-1`; in Kubernetes the container runtime's own limit (`LimitMEMLOCK=infinity`)",
                "`docker run --ulimit memlock=-1`로 시작하세요. Kubernetes에서는 컨테이너 런타임의 한도(`LimitMEMLOCK=infinity`)를 올리세요"
            ),
            false => say!(
                lang,
                "`ulimit -l unlimited`, for good `* - memlock unlimited` in /etc/security/limits.conf; under a scheduler or service \
                 `LimitMEMLOCK=infinity` of its daemon",
                "`ulimit -l unlimited`를 실행하세요. 계속 유지하려면 /etc/security/limits.conf에 `* - memlock unlimited`를 넣으세요. 스케줄러나 서비스라면 \
                 그 데몬에 `LimitMEMLOCK=infinity`를 설정하세요"
            ),
        },
    );
}

fn judge_peermem(snapshot: &Snapshot, notes: &mut Notes) {
    let adapters = rdma(snapshot);
    if adapters.is_empty() {
        return;
    }
    let lang = notes.lang;
    let has = &snapshot.system.has_peermem;
    let mut sheet = notes.sheet(checks::PEERMEM);
    sheet.fact(match has {
        Reading::Known(true) => say!(lang, "nvidia-peermem is loaded", "nvidia-peermem 로드됨"),
        Reading::Known(false) => {
            say!(
                lang,
                "nvidia-peermem is not loaded",
                "nvidia-peermem 로드되지 않음"
            )
        }
        Reading::Missing { missing } => {
            let why = told_as(missing, lang);
            say!(lang, "not known: {why}", "알 수 없음: {why}")
        }
    });
    if *has == Reading::Known(false) {
        let adapters = joined(adapters, lang);
        sheet.note(
            say!(
                lang,
                "nvidia-peermem is not loaded, and there is RDMA ({adapters})",
                "RDMA 어댑터({adapters})가 있는데 nvidia-peermem이 로드되지 않음"
            ),
            say!(
                lang,
                "unless DMA-BUF does it (a recent kernel and NVIDIA's open kernel module), data for other nodes goes through the host's memory: \
                 right, but slower",
                "DMA-BUF(최신 커널과 NVIDIA 오픈 커널 모듈)가 대신하지 않으면, 다른 노드로 가는 데이터가 호스트 메모리를 거칩니다. 결과는 맞지만 느립니다"
            ),
            say!(
                lang,
                "`sudo modprobe nvidia-peermem`; NCCL_DEBUG=INFO prints \"GDRDMA\" for connections that use it",
                "`sudo modprobe nvidia-peermem`을 실행하세요. NCCL_DEBUG=INFO를 주면 이를 쓰는 연결에 \"GDRDMA\"가 출력됩니다"
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};
    use paceline_gpu::snapshot::Nic;

    fn shm(used_bytes: u64, total_bytes: u64, confined_by: &[&str]) -> Snapshot {
        let mut snapshot = machine(2);
        snapshot.system.shm = Memory {
            used_bytes,
            total_bytes,
        }
        .into();
        snapshot.system.confined_by = confined_by.iter().map(|kind| (*kind).to_owned()).collect();
        snapshot
    }

    #[test]
    fn shared_memory_has_the_remedy_of_its_container() {
        check(judge, &shm(0, 64 << 30, &[]), &[]);
        check(
            judge,
            &shm(0, 64 << 20, &["docker"]),
            &["warning: /dev/shm: start the container"],
        );
        check(
            judge,
            &shm(0, 64 << 20, &["kubernetes"]),
            &["warning: /dev/shm: mount a volume"],
        );
        check(
            judge,
            &shm(0, 64 << 20, &["kvm"]),
            &["warning: /dev/shm: `sudo mount"],
        );
        check(
            judge,
            &shm(0, 512 << 20, &["docker"]),
            &["note: /dev/shm: start the container"],
        );
        check(
            judge,
            &shm(2 << 30, 2 << 30, &[]),
            &["warning: /dev/shm: `ls -l /dev/shm`"],
        );
        check(
            judge,
            &shm(u64::MAX, 2 << 30, &[]),
            &["warning: /dev/shm: `ls -l"],
        );
    }

    #[test]
    fn locked_memory_matters_with_rdma() {
        let speaks = |limit: Option<u64>, has_rdma: bool, confined_by: &[&str], expect: &[&str]| {
            let mut snapshot = shm(0, 64 << 30, confined_by);
            snapshot.system.memlock_bytes = limit.into();
            snapshot.system.nics = vec![Nic {
                name: "mlx5_0".to_owned(),
                is_rdma: has_rdma,
                is_up: true.into(),
                ..Nic::default()
            }];
            check(judge, &snapshot, expect);
        };
        speaks(Some(8 << 20), false, &[], &[]);
        speaks(None, true, &[], &[]);
        speaks(Some(64 << 30), true, &[], &[]);
        speaks(
            Some(8 << 20),
            true,
            &[],
            &["warning: locked memory: `ulimit -l unlimited`"],
        );
        speaks(
            Some(8 << 20),
            true,
            &["docker"],
            &["warning: locked memory: `docker run"],
        );
    }

    #[test]
    fn a_missing_module_for_rdma_is_noted() {
        let mut snapshot = machine(2);
        snapshot.system.has_peermem = false.into();
        check(judge, &snapshot, &[]);
        snapshot.system.nics = vec![Nic {
            is_rdma: true,
            is_up: true.into(),
            ..Nic::default()
        }];
        check(judge, &snapshot, &["note: GPUDirect RDMA: `sudo modprobe"]);
        snapshot.system.has_peermem = true.into();
        check(judge, &snapshot, &[]);
    }
}
