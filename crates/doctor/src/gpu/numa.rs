//! Memory nodes: GPUs near CPUs that this process may not use, and network cards far from every GPU.

use std::collections::BTreeSet;

use paceline_gpu::snapshot::{Device, Nic, Reading, Snapshot};
use paceline_words::{Lang, count, say};

use super::rules::indices;
use super::words::{gpus, gpus_that, grouped, joined, listed};
use crate::checks;
use crate::finding::{Notes, plain};

/// Speed in megabits per second from which a network card is one to train over.
const FAST_MBPS: u64 = 25_000;

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let nodes = snapshot.system.numa.len();
    if snapshot.devices.is_empty() || nodes == 0 {
        return;
    }
    let lang = notes.lang;
    let places = snapshot.devices.iter();
    let places = places.map(|device| (node(snapshot, device), device.index));
    let words = grouped(places).into_iter().map(|(node, of)| {
        let gpus = gpus(&of, lang);
        match node {
            Some(node) => say!(lang, "{gpus} at node {node}", "{gpus}: 노드 {node}"),
            None => say!(
                lang,
                "{gpus} at an unknown node",
                "{gpus}: 노드를 알 수 없음"
            ),
        }
    });
    let words = listed(words.collect(), lang);
    let all = count(lang, nodes, "node", "노드");
    notes.sheet(checks::NUMA).fact(match lang {
        Lang::En => format!("{all}: {words}"),
        Lang::Ko => format!("{all}; {words}"),
    });
    if nodes < 2 {
        return;
    }
    judge_allowed(snapshot, notes);
    judge_nics(snapshot, notes);
}

/// The driver's word, else the kernel's.
fn node(snapshot: &Snapshot, device: &Device) -> Option<u32> {
    let of_kernel = || {
        let place = device.pci.known()?;
        let mut all = snapshot.system.pci.iter();
        let known = all.find(|known| known.address == *place)?;
        known.numa_node.known().copied()
    };
    device.numa_node.known().copied().or_else(of_kernel)
}

/// CPUs near a device: the driver's word, else those of its node.
fn near(snapshot: &Snapshot, device: &Device) -> BTreeSet<u32> {
    if let Some(cpus) = device.cpus.known().filter(|cpus| !cpus.is_empty()) {
        return cpus.iter().copied().collect();
    }
    let index = node(snapshot, device);
    let mut nodes = snapshot.system.numa.iter();
    let node = nodes.find(|node| Some(node.index) == index);
    let cpus = node.map(|node| node.cpus.iter().copied().collect());
    cpus.unwrap_or_default()
}

fn judge_allowed(snapshot: &Snapshot, notes: &mut Notes) {
    let allowed = snapshot.system.allowed_cpus.known();
    let Some(allowed) = allowed.filter(|cpus| !cpus.is_empty()) else {
        return;
    };
    let far = indices(&snapshot.devices, |device| {
        let near = near(snapshot, device);
        !near.is_empty() && !allowed.iter().any(|cpu| near.contains(cpu))
    });
    if far.is_empty() {
        return;
    }
    let lang = notes.lang;
    let fix = match snapshot.system.is_container() {
        true => say!(
            lang,
            "give the container CPUs of those nodes too (`docker run --cpuset-cpus`, the cluster's topology manager), or only GPUs near its CPUs",
            "컨테이너에 그 노드의 CPU도 주거나(`docker run --cpuset-cpus`, 클러스터의 토폴로지 매니저), 컨테이너의 CPU와 가까운 GPU만 주세요"
        ),
        false => say!(
            lang,
            "`taskset -p $$` shows what this shell may use: ask the scheduler for CPUs near the GPUs, or use only the GPUs near your CPUs",
            "이 셸이 쓸 수 있는 CPU는 `taskset -p $$`에 나옵니다. 스케줄러에 GPU와 가까운 CPU를 요청하거나, 쓸 수 있는 CPU와 가까운 GPU만 쓰세요"
        ),
    };
    let whom = gpus_that(&far, "hangs", "hang", lang);
    notes.sheet(checks::NUMA).warning(
        say!(
            lang,
            "{whom} on a memory node none of whose CPUs this process may use",
            "{whom}: 연결된 메모리 노드의 CPU를 이 프로세스가 하나도 쓸 수 없음"
        ),
        say!(
            lang,
            "every copy between host and GPU crosses from one CPU socket to the other, and waits for all others that do",
            "호스트와 GPU 사이의 모든 복사가 다른 CPU 소켓을 거치며, 같은 길을 쓰는 다른 복사를 기다립니다"
        ),
        fix,
    );
}

fn judge_nics(snapshot: &Snapshot, notes: &mut Notes) {
    let of_gpus: Option<BTreeSet<u32>> = snapshot
        .devices
        .iter()
        .map(|device| node(snapshot, device))
        .collect();
    // As long as one GPU's node is not known, it may be the card's.
    let Some(of_gpus) = of_gpus else {
        return;
    };
    let is_for_training = |nic: &&Nic| {
        let is_fast = nic.speed_mbps.known() >= Some(&FAST_MBPS);
        nic.is_up == Reading::Known(true) && nic.pci.is_some() && (nic.is_rdma || is_fast)
    };
    let nics = snapshot.system.nics.iter();
    let nics: Vec<&Nic> = nics.filter(is_for_training).collect();
    let is_near = |nic: &&Nic| match nic.numa_node.known() {
        Some(node) => of_gpus.contains(node),
        None => true,
    };
    if nics.is_empty() || nics.iter().any(is_near) {
        return;
    }
    let lang = notes.lang;
    let names = nics.iter().map(|nic| plain(&nic.name));
    let names = joined(names.collect(), lang);
    notes.sheet(checks::NUMA).note(
        say!(
            lang,
            "the network card {names} is on another memory node than every GPU",
            "네트워크 카드 {names}: 모든 GPU와 다른 메모리 노드에 있음"
        ),
        say!(
            lang,
            "what GPUs send to other nodes crosses from one CPU socket to the other first; GPUDirect RDMA is off at that distance unless \
             NCCL_NET_GDR_LEVEL=SYS asks for it",
            "GPU가 다른 노드로 보내는 데이터가 먼저 다른 CPU 소켓을 거칩니다. 이 거리에서는 NCCL_NET_GDR_LEVEL=SYS를 주지 않으면 GPUDirect RDMA가 \
             꺼집니다"
        ),
        say!(
            lang,
            "put the card into a slot of the GPUs' socket, as the mainboard's manual draws them",
            "메인보드 설명서를 보고, GPU와 같은 소켓에 연결된 슬롯으로 카드를 옮기세요"
        ),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};
    use paceline_gpu::snapshot::NumaNode;

    /// Two nodes of eight CPUs, a GPU at each.
    fn two_nodes() -> Snapshot {
        let mut snapshot = machine(2);
        let node = |index: u32| NumaNode {
            index,
            cpus: (index * 8..index * 8 + 8).collect(),
            distances: Vec::new(),
        };
        snapshot.system.numa = vec![node(0), node(1)];
        for (device, node) in snapshot.devices.iter_mut().zip(0..) {
            device.numa_node = node.into();
        }
        snapshot
    }

    #[test]
    fn a_process_should_have_cpus_near_each_device() {
        let speaks = |allowed: Vec<u32>, expect: &[&str]| {
            let mut snapshot = two_nodes();
            snapshot.system.allowed_cpus = allowed.into();
            check(judge, &snapshot, expect);
        };
        speaks((0..16).collect(), &[]);
        speaks(vec![7, 8], &[]);
        speaks((0..8).collect(), &["warning: NUMA: `taskset -p $$`"]);
        speaks(Vec::new(), &[]);
        let mut container = two_nodes();
        container.system.allowed_cpus = vec![1].into();
        container.system.confined_by = vec!["docker".to_owned()];
        check(
            judge,
            &container,
            &["warning: NUMA: give the container CPUs"],
        );
    }

    #[test]
    fn one_node_needs_no_care() {
        let mut snapshot = two_nodes();
        snapshot.system.numa.truncate(1);
        snapshot.system.allowed_cpus = vec![0].into();
        check(judge, &snapshot, &[]);
    }

    #[test]
    fn a_network_card_far_from_every_gpu_is_noted() {
        let nic = |node: u32, is_rdma: bool, speed: u64| Nic {
            name: "mlx5_0".to_owned(),
            pci: Some("0000:c1:00.0".to_owned()),
            is_rdma,
            is_up: true.into(),
            speed_mbps: speed.into(),
            numa_node: node.into(),
            ..Nic::default()
        };
        let speaks = |nics: Vec<Nic>, expect: &[&str]| {
            let mut snapshot = two_nodes();
            snapshot.devices.truncate(1);
            snapshot.system.nics = nics;
            check(judge, &snapshot, expect);
        };
        let far = ["note: NUMA: put the card into a slot"];
        speaks(vec![nic(1, true, 200_000)], &far);
        speaks(vec![nic(1, false, 100_000)], &far);
        speaks(vec![nic(1, false, 1_000)], &[]);
        speaks(vec![nic(1, true, 200_000), nic(0, true, 200_000)], &[]);
        let down = Nic {
            is_up: false.into(),
            ..nic(1, true, 200_000)
        };
        speaks(vec![down], &[]);
    }
}
