//! What the system gives a process that trains on GPUs: `/dev/shm`, locked memory, and the module for RDMA.
//!
//! *Source*: "Shared memory", "GPU-to-NIC communication" and "InfiniBand" in NCCL's user guide.

use paceline_gpu::snapshot::{Memory, Reading, Snapshot};

use super::words::joined;
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
    let mut sheet = notes.sheet("/dev/shm");
    let Some(Memory {
        used_bytes,
        total_bytes,
    }) = snapshot.system.shm.known().copied()
    else {
        return;
    };
    let free = total_bytes.saturating_sub(used_bytes);
    sheet.fact(format!("{}, {} free", size(total_bytes), size(free)));
    const WHY: &str = "NCCL exchanges data of ranks without peer-to-peer there, and PyTorch's data loaders their batches: the job fails with \
                       \"bus error\", \"no space left on device\" or \"failed to extend /dev/shm/nccl-...\"";
    let is_kubernetes = snapshot
        .system
        .confined_by
        .iter()
        .any(|known| known == "kubernetes");
    let more = match (is_kubernetes, snapshot.system.is_container()) {
        (true, _) => {
            "mount a volume `emptyDir: {medium: Memory, sizeLimit: 8Gi}` at /dev/shm in the pod"
        }
        (false, true) => "start the container with `--shm-size=8g`, or `--ipc=host`",
        (false, false) => "`sudo mount -o remount,size=8G /dev/shm`",
    };
    if total_bytes <= SHM_OF_DOCKER {
        let total = size(total_bytes);
        sheet.warning(
            format!("/dev/shm has {total}, as containers have unless told otherwise"),
            WHY,
            more,
        );
    } else if free < SHM_FREE_MIN {
        sheet.warning(
            format!("/dev/shm is full: {} of {} are free", size(free), size(total_bytes)),
            WHY,
            format!("`ls -l /dev/shm` shows what an earlier job left there (nccl-*, torch_*, psm_*): remove what no process uses; or {more}"),
        );
    } else if total_bytes < SHM_MIN {
        sheet.note(
            format!("/dev/shm has {} only", size(total_bytes)),
            WHY,
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
    let mut sheet = notes.sheet("locked memory");
    let Some(limit) = snapshot.system.memlock_bytes.known() else {
        return;
    };
    sheet.fact(limit.map_or("unlimited".to_owned(), size));
    let adapters = rdma(snapshot);
    let Some(bytes) = limit.filter(|bytes| *bytes < LOCKED_MIN && !adapters.is_empty()) else {
        return;
    };
    sheet.warning(
        format!("a process may lock {} of memory, and there is RDMA ({})", size(bytes), joined(adapters)),
        "NCCL must lock what it sends over it: jobs of several nodes fail with \"Call to ibv_reg_mr failed\" or \"ibv_create_qp failed\"",
        match snapshot.system.is_container() {
            true => "`docker run --ulimit memlock=-1`; in Kubernetes the container runtime's own limit (`LimitMEMLOCK=infinity`)",
            false => {
                "`ulimit -l unlimited`, for good `* - memlock unlimited` in /etc/security/limits.conf; under a scheduler or service \
                 `LimitMEMLOCK=infinity` of its daemon"
            }
        },
    );
}

fn judge_peermem(snapshot: &Snapshot, notes: &mut Notes) {
    let adapters = rdma(snapshot);
    if adapters.is_empty() {
        return;
    }
    let has = &snapshot.system.has_peermem;
    let mut sheet = notes.sheet("GPUDirect RDMA");
    sheet.fact(match has {
        Reading::Known(true) => "nvidia-peermem is loaded".to_owned(),
        Reading::Known(false) => "nvidia-peermem is not loaded".to_owned(),
        Reading::Missing { missing } => format!("not known: {}", plain(&missing.to_string())),
    });
    if *has == Reading::Known(false) {
        sheet.note(
            format!("nvidia-peermem is not loaded, and there is RDMA ({})", joined(adapters)),
            "unless DMA-BUF does it (a recent kernel and NVIDIA's open kernel module), data for other nodes goes through the host's memory: \
             right, but slower",
            "`sudo modprobe nvidia-peermem`; NCCL_DEBUG=INFO prints \"GDRDMA\" for connections that use it",
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
