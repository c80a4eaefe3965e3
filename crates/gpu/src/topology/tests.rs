//! Machines built by hand, and what is printed of them.

use super::*;
use crate::snapshot::{
    Ancestor, Device, Driver, DriverError, Gap, Link, Memory, Mode, Nic, NumaNode, NvLink,
    OtherDevice, P2pStatus, PciDevice, PciKind, PcieLink, Reading, Remote,
};

/// A machine with two NUMA nodes, 16 CPUs each.
fn machine() -> Snapshot {
    let node = |index: u32| NumaNode {
        index,
        cpus: (index * 16..index * 16 + 16).collect(),
        distances: vec![10, 21],
    };
    let mut snapshot = Snapshot {
        host: "node1".to_owned(),
        driver: Driver {
            version: "580.159.04".to_owned().into(),
            cuda: (13, 0).into(),
            ..Driver::default()
        },
        ..Snapshot::default()
    };
    snapshot.system.numa = vec![node(0), node(1)];
    snapshot
}

fn link(lanes: u32, lanes_max: u32, generation: u32, generation_max: u32) -> PcieLink {
    PcieLink {
        generation,
        generation_max,
        lanes,
        lanes_max,
    }
}

impl Snapshot {
    /// Puts something at the end of a path from the host bridge, such as `pci0000:17/17:01.0/18:00.0`; bridges with it.
    fn plug(&mut self, path: &str, kind: PciKind, node: u32, link: PcieLink) -> String {
        let parts: Vec<String> = path
            .split('/')
            .map(|part| match part.starts_with("pci") {
                true => part.to_owned(),
                false => format!("0000:{part}"),
            })
            .collect();
        for at in 1..parts.len() {
            let is_end = at + 1 == parts.len();
            if self
                .system
                .pci
                .iter()
                .any(|known| known.address == parts[at])
            {
                continue;
            }
            self.system.pci.push(PciDevice {
                address: parts[at].clone(),
                parent: (at > 1).then(|| parts[at - 1].clone()),
                root: parts[0].clone(),
                kind: if is_end { kind } else { PciKind::Bridge },
                id: (crate::bus::NVIDIA, 0),
                link: link.into(),
                numa_node: node.into(),
                cpus: (node * 16..node * 16 + 16).collect::<Vec<u32>>().into(),
                ..PciDevice::default()
            });
        }
        parts.last().cloned().unwrap_or_default()
    }

    fn gpu(&mut self, path: &str, name: &str, node: u32, link: PcieLink) {
        let pci = self.plug(path, PciKind::Gpu, node, link);
        self.devices.push(Device {
            index: self.devices.len() as u32,
            name: name.to_owned().into(),
            uuid: format!("GPU-{}", self.devices.len()).into(),
            pci: pci.into(),
            memory: Memory {
                used_bytes: 0,
                total_bytes: 81559 << 20,
            }
            .into(),
            pcie: link.into(),
            nvlinks: Reading::missing(Gap::NotSupported),
            ..Device::default()
        });
    }

    fn nic(&mut self, path: &str, name: &str, node: u32, link: PcieLink) {
        let pci = self.plug(path, PciKind::Nic, node, link);
        self.system.nics.push(Nic {
            name: name.to_owned(),
            pci: Some(pci),
            is_rdma: name.starts_with("mlx"),
            is_up: true.into(),
            speed_mbps: 400_000.into(),
            ..Nic::default()
        });
    }

    fn answer(&mut self, p2p: [P2pStatus; 5], ancestor: impl Fn(u32, u32) -> Reading<Ancestor>) {
        let number = self.devices.len() as u32;
        for from in 0..number {
            for to in (0..number).filter(|to| *to != from) {
                self.links.push(Link {
                    from,
                    to,
                    p2p: p2p.map(Reading::Known),
                    ancestor: ancestor(from, to),
                });
            }
        }
    }
}

fn text(snapshot: &Snapshot) -> String {
    let mut out = Vec::new();
    Topology::of(snapshot)
        .write(false, &mut out)
        .expect("memory");
    String::from_utf8(out).expect("text")
}

fn two_cards() -> Snapshot {
    let mut machine = machine();
    machine.gpu(
        "pci0000:16/16:01.0/17:00.0",
        "NVIDIA RTX PRO 6000",
        0,
        link(16, 16, 1, 5),
    );
    machine.gpu(
        "pci0000:96/96:01.0/97:00.0",
        "NVIDIA RTX PRO 6000",
        1,
        link(4, 16, 5, 5),
    );
    machine.answer([P2pStatus::NotSupported; 5], |_, _| Ancestor::System.into());
    machine
}

fn board() -> Snapshot {
    let mut machine = machine();
    let full = link(16, 16, 5, 5);
    for gpu in 0..8_u32 {
        let node = gpu / 4;
        let bus = 0x10 + gpu * 0x10;
        let switch = format!("pci0000:{bus:02x}/{bus:02x}:01.0/{:02x}:00.0", bus + 1);
        machine.gpu(
            &format!("{switch}/{:02x}:00.0/{:02x}:00.0", bus + 2, bus + 3),
            "NVIDIA H100 80GB HBM3",
            node,
            full,
        );
        machine.nic(
            &format!("{switch}/{:02x}:01.0/{:02x}:00.0", bus + 2, bus + 4),
            &format!("mlx5_{gpu}"),
            node,
            full,
        );
    }
    for switch in 0..4_u32 {
        let path = format!(
            "pci0000:00/00:01.0/01:00.0/02:{switch:02x}.0/{:02x}:00.0",
            3 + switch
        );
        machine.plug(&path, PciKind::NvSwitch, 0, link(2, 2, 2, 2));
    }
    for device in &mut machine.devices {
        let link = |index| NvLink {
            index,
            is_active: true.into(),
            remote: Remote::Switch.into(),
            ..NvLink::default()
        };
        device.nvlinks = (0..18).map(link).collect::<Vec<_>>().into();
    }
    machine.answer([P2pStatus::Ok; 5], |_, _| Ancestor::System.into());
    machine
}

/// Lines of `text` that hold `word`, without the spaces that align them.
fn lines_with(text: &str, word: &str) -> Vec<String> {
    let fold = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let lines = text.lines().filter(|line| line.contains(word));
    lines.map(fold).collect()
}

#[test]
fn two_cards_without_peer_to_peer() {
    let expect = "\
node1: 2 GPUs, driver 580.159.04, CUDA up to 13.0

  GPU0  NVIDIA RTX PRO 6000  81559 MiB  0000:17:00.0
  GPU1  NVIDIA RTX PRO 6000  81559 MiB  0000:97:00.0

Connections, in the codes of nvidia-smi topo -m

      GPU0  GPU1  CPU affinity  NUMA affinity
GPU0   X    SYS   0-15          0
GPU1  SYS    X    16-31         1

  X    the device itself
  SYS  from NUMA node to NUMA node, by the link between CPUs

Peer-to-peer (P2P), in the codes of nvidia-smi topo -p2p

read, write, NVLink, atomics and PCIe: all the same
      GPU0  GPU1
GPU0   X    NS
GPU1  NS     X

  X   the device itself
  NS  not supported

PCIe tree, with each link towards the host

pci0000:16  NUMA node 0
└─ GPU0     0000:17:00.0  x16, gen 1 of 5   NVIDIA RTX PRO 6000  idle
pci0000:96  NUMA node 1
└─ GPU1     0000:97:00.0  x4 of x16, gen 5  NVIDIA RTX PRO 6000  <-- 4 of its 16 lanes

<--   less than the device can: a slot with fewer lanes, lanes shared between slots, a bad riser or
      contact, or the firmware's settings

idle  the link's generation is lowered to save power, and rises under load: no fault
";
    assert_eq!(text(&two_cards()), expect);
}

#[test]
fn a_board_of_eight_fits_a_screen_with_its_switches_folded() {
    let text = text(&board());
    assert_eq!(
        lines_with(&text, "GPU5 "),
        [
            "GPU5 NVIDIA H100 80GB HBM3 81559 MiB 0000:63:00.0 18 of 18 NVLinks up",
            "GPU0 GPU1 GPU2 GPU3 GPU4 GPU5 GPU6 GPU7 NIC0 NIC1 NIC2 NIC3 NIC4 NIC5 NIC6 NIC7 CPU affinity NUMA affinity",
            "GPU5 NV18 NV18 NV18 NV18 NV18 X NV18 NV18 SYS SYS SYS SYS NODE PIX NODE NODE 16-31 1",
            "GPU0 GPU1 GPU2 GPU3 GPU4 GPU5 GPU6 GPU7",
            "GPU5 OK OK OK OK OK X OK OK",
            "├─ GPU5 0000:63:00.0 x16 gen 5 NVIDIA H100 80GB HBM3",
        ]
    );
    let tree = text.split_once("PCIe tree").expect("a tree").1;
    assert_eq!(tree.lines().count(), 40, "{tree}");
    let widest = text.lines().map(|line| line.chars().count()).max();
    assert_eq!(widest, Some(129));
}

#[test]
fn columns_stand_below_each_other_for_one_to_sixteen_devices() {
    for number in 1..=16_u32 {
        let mut machine = machine();
        for gpu in 0..number {
            let path = format!("pci0000:{:02x}/{:02x}:00.0", gpu * 2, gpu * 2 + 1);
            machine.gpu(&path, "GPU", 0, link(16, 16, 4, 4));
        }
        machine.answer([P2pStatus::Ok; 5], |_, _| Ancestor::Node.into());
        let text = text(&machine);
        let row = |label: &str| {
            text.lines()
                .find(|line| line.starts_with(label))
                .map(str::to_owned)
        };
        let header = text
            .lines()
            .find(|line| line.contains("CPU affinity"))
            .expect("a header");
        let at = header.find("CPU affinity").expect("found above");
        for gpu in 0..number {
            let row = row(&format!("GPU{gpu} ")).expect("a row");
            assert_eq!(row.get(at - 2..at + 4), Some("  0-15"), "{row}");
        }
    }
}

#[test]
fn capabilities_that_differ_have_a_matrix_each_and_a_legend() {
    use P2pStatus::*;
    let mut machine = two_cards();
    machine.links.clear();
    machine.answer(
        [
            Ok,
            ChipsetNotSupported,
            GpuNotSupported,
            Ok,
            TopologyNotSupported,
        ],
        |_, _| Ancestor::System.into(),
    );
    machine.links[0].p2p[3] = DisabledByRegkey.into();
    machine.links[1].p2p[4] = Unknown.into();
    let text = text(&machine);
    let p2p = text.split_once("topo -p2p\n").expect("the matrices").1;
    let expect = "
read
      GPU0  GPU1
GPU0   X    OK
GPU1  OK     X

write
      GPU0  GPU1
GPU0   X    CNS
GPU1  CNS    X

NVLink
      GPU0  GPU1
GPU0   X    GNS
GPU1  GNS    X

atomics
      GPU0  GPU1
GPU0   X    DR
GPU1  OK     X

PCIe
      GPU0  GPU1
GPU0   X    TNS
GPU1  U      X

  X    the device itself
  OK   supported, says the driver
  CNS  not supported by the chipset
  GNS  not supported by the GPU
  TNS  not supported over the way between the two
  DR   disabled by a setting of the driver
  U    unknown to the driver

OK is the driver's word, no proof that data arrives: see `paceline gpu doctor`
";
    assert!(p2p.starts_with(expect), "{p2p}");
}

#[test]
fn straight_nvlinks_count_those_that_are_up_and_lead_to_the_other() {
    let mut machine = two_cards();
    let other = |device: usize| {
        format!(
            "0000{}",
            machine.devices[1 - device].pci.known().expect("a place")
        )
    };
    let link = |up: bool, pci: &str| NvLink {
        is_active: up.into(),
        remote: Remote::Gpu.into(),
        remote_pci: pci.to_owned().into(),
        ..NvLink::default()
    };
    let places = [other(0), other(1)];
    let elsewhere = "0000:aa:00.0";
    machine.devices[0].nvlinks = vec![
        link(true, &places[0]),
        link(true, &places[0]),
        link(false, &places[0]),
        link(true, elsewhere),
    ]
    .into();
    let nv = |machine: &Snapshot| Topology::of(machine).connections[0][1].clone();
    // The other end does not tell; then it tells of fewer; then of none.
    assert_eq!(nv(&machine), "NV2");
    machine.devices[1].nvlinks = vec![link(true, &places[1])].into();
    assert_eq!(nv(&machine), "NV1");
    machine.devices[1].nvlinks = vec![link(false, &places[1])].into();
    assert_eq!(nv(&machine), "SYS");
    let text = text(&machine);
    assert_eq!(
        lines_with(&text, "GPU0  NVIDIA")[0],
        "GPU0 NVIDIA RTX PRO 6000 81559 MiB 0000:17:00.0 3 of 4 NVLinks up"
    );
}

#[test]
fn a_lost_card_keeps_its_place_and_the_rest_is_shown() {
    let mut machine = two_cards();
    machine.devices[1] = Device {
        index: 1,
        pci: "0000:97:00.0".to_owned().into(),
        name: Reading::missing(Gap::Lost),
        nvlinks: Reading::missing(Gap::Lost),
        ..Device::default()
    };
    for link in &mut machine.links {
        link.p2p = [(); 5].map(|()| Reading::missing(Gap::Lost));
        link.ancestor = Reading::missing(Gap::Lost);
    }
    let text = text(&machine);
    assert_eq!(
        lines_with(&text, "GPU1 "),
        [
            "GPU1 ? 0000:97:00.0",
            "GPU0 GPU1 CPU affinity NUMA affinity",
            "GPU1 SYS X 16-31 1",
            "GPU1 ? X",
            "└─ GPU1 0000:97:00.0 x4 of x16, gen 5 <-- 4 of its 16 lanes",
            "note: GPU1 is lost: it no longer answers, and only what is still known is shown. The kernel's log has the \
             reason (an XID such as 79); a restart of the machine brings most back",
        ]
    );
    assert_eq!(
        lines_with(&text, "note: `?`"),
        [
            "note: `?` in P2P read, write, NVLink, atomics and PCIe, 2 ways from one GPU to another: the device is lost"
        ]
    );
}

#[test]
fn without_a_driver_the_system_still_shows_the_cards() {
    let mut machine = two_cards();
    machine.devices.clear();
    machine.links.clear();
    machine.driver = Driver {
        trouble: Some(DriverError::NoDriver),
        ..Driver::default()
    };
    machine.system.pci[1].driver = Some("nouveau".to_owned());
    machine.system.pci[3].driver = Some("vfio-pci".to_owned());
    assert_eq!(Topology::of(&machine).something(), Ok(()));
    let text = text(&machine);
    assert_eq!(
        lines_with(&text, "NVIDIA0 "),
        [
            "NVIDIA0 NVIDIA device 0000:17:00.0",
            "NVIDIA0 NVIDIA1 CPU affinity NUMA affinity",
            "NVIDIA0 X SYS 0-15 0",
            "└─ NVIDIA0 0000:17:00.0 x16, gen 1 of 5 NVIDIA device idle",
            "note: NVIDIA0 (0000:17:00.0) is a GPU of NVIDIA's without the driver's number: the kernel's nouveau has it \
             in place of NVIDIA's driver",
        ]
    );
    assert_eq!(
        lines_with(&text, "note: NVIDIA"),
        [
            "note: NVIDIA's kernel module is not loaded",
            &lines_with(&text, "note: NVIDIA0")[0],
            "note: NVIDIA1 (0000:97:00.0) is a GPU of NVIDIA's without the driver's number: vfio-pci has it, for a \
             virtual machine",
        ]
    );
}

#[test]
fn nothing_at_all_has_its_reason_and_advice() {
    let check = |trouble: Option<DriverError>, message: &str, advice: &str| {
        let mut machine = machine();
        machine.nic("pci0000:16/17:00.0", "eth0", 0, link(4, 4, 3, 3));
        machine.driver.trouble = trouble;
        let nothing = Topology::of(&machine).something().expect_err("nothing");
        assert_eq!(nothing.to_string(), message);
        let hint = nothing.hint().expect("advice");
        assert!(hint.contains(advice), "{hint}");
    };
    check(None, "there is no GPU to see", "--root DIR");
    check(
        Some(DriverError::NoLibrary(
            "libnvidia-ml.so.1: cannot open".to_owned(),
        )),
        "there is no GPU to see; NVIDIA's driver library libnvidia-ml.so.1 is not installed: libnvidia-ml.so.1: cannot open",
        "--nvml-library FILE",
    );
    check(
        Some(DriverError::VersionMismatch),
        "there is no GPU to see; NVIDIA's library and kernel module have different versions",
        "restart the machine",
    );
    check(
        Some(DriverError::NoPermission),
        "there is no GPU to see; this user has no permission to ask NVIDIA's driver",
        "/dev/nvidia*",
    );
}

#[test]
fn devices_of_amd_are_in_the_matrix_without_peer_to_peer() {
    let mut machine = machine();
    for (path, node) in [
        ("pci0000:16/16:01.0/17:00.0", 0),
        ("pci0000:16/16:02.0/18:00.0", 0),
    ] {
        let pci = machine.plug(path, PciKind::Gpu, node, link(8, 16, 4, 4));
        for device in machine
            .system
            .pci
            .iter_mut()
            .filter(|device| device.address == pci)
        {
            device.id = (0x1002, 0x73bf);
        }
        machine.others.push(OtherDevice {
            maker: "AMD".to_owned(),
            pci,
            name: "Navi 21".to_owned().into(),
            memory: Memory {
                used_bytes: 0,
                total_bytes: 16 << 30,
            }
            .into(),
            ..OtherDevice::default()
        });
    }
    let text = text(&machine);
    assert_eq!(
        lines_with(&text, "AMD0"),
        [
            "AMD0 Navi 21 16384 MiB 0000:17:00.0",
            "AMD0 AMD1 CPU affinity NUMA affinity",
            "AMD0 X PHB 0-15 0",
            "├─ AMD0 0000:17:00.0 x8 of x16, gen 4 Navi 21 <-- 8 of its 16 lanes",
            "note: P2P matrix of AMD0 and AMD1: not supported for AMD yet",
        ]
    );
    assert!(!text.contains("topo -p2p"), "{text}");
}

#[test]
fn links_are_judged_by_what_device_and_slot_can() {
    let check = |device: PcieLink, slot: PcieLink, busy: Option<u32>, words: &str| {
        let mut machine = machine();
        machine.gpu("pci0000:16/16:01.0/17:00.0", "card", 0, device);
        machine.system.pci[0].link = slot.into();
        machine.devices[0].now.utilization_percent =
            busy.map_or(Reading::default(), Reading::Known);
        let text = text(&machine);
        let line = lines_with(&text, "─ GPU0");
        assert_eq!(line, [format!("└─ GPU0 0000:17:00.0 {words}")]);
    };
    let slot = link(16, 16, 4, 4);
    check(link(16, 16, 4, 4), slot, None, "x16 gen 4 card");
    // The slot is of an older generation: as good as it gets.
    check(link(16, 16, 4, 5), slot, None, "x16 gen 4 card");
    check(
        link(16, 16, 1, 5),
        slot,
        Some(0),
        "x16, gen 1 of 4 card idle",
    );
    check(
        link(16, 16, 1, 5),
        slot,
        Some(95),
        "x16, gen 1 of 4 card <-- below its generation",
    );
    check(
        link(4, 16, 4, 4),
        link(4, 4, 4, 4),
        Some(95),
        "x4 of x16, gen 4 card <-- the slot has 4 lanes",
    );
    check(
        link(4, 16, 3, 4),
        slot,
        Some(95),
        "x4 of x16, gen 3 of 4 card <-- 4 of its 16 lanes, below its generation",
    );
    check(link(8, 8, 4, 4), slot, None, "x8 gen 4 card");
    check(link(0, 0, 0, 0), link(0, 0, 0, 0), None, "card");
}

#[test]
fn a_bridge_that_holds_its_only_device_back_has_a_line() {
    let mut machine = machine();
    machine.gpu(
        "pci0000:16/16:01.0/17:00.0/18:00.0/19:00.0",
        "card",
        0,
        link(16, 16, 1, 4),
    );
    let tree = |machine: &Snapshot| {
        let text = text(machine);
        let tree = text.split_once("NUMA node 0\n").expect("a tree").1;
        let lines: Vec<String> = tree
            .lines()
            .take_while(|line| !line.is_empty())
            .map(str::to_owned)
            .collect();
        lines.join("|")
    };
    machine.system.pci[1].link = link(16, 16, 4, 4).into();
    assert_eq!(
        tree(&machine),
        "└─ GPU0     0000:19:00.0  x16, gen 1 of 4  card  idle"
    );
    machine.system.pci[1].link = link(4, 16, 4, 4).into();
    let expect = "└─ switch   0000:17:00.0  x4 of x16, gen 4        <-- 4 of its 16 lanes|   └─ GPU0  0000:19:00.0  \
                  x16, gen 1 of 4   card  idle";
    assert_eq!(tree(&machine), expect);
}

#[test]
fn network_cards_with_many_functions_do_not_fill_the_screen() {
    let mut machine = two_cards();
    for function in 0..100_u32 {
        let path = format!(
            "pci0000:20/20:01.0/21:{:02x}.{}",
            function / 8,
            function % 8
        );
        machine.nic(&path, &format!("mlx5_{function}"), 0, link(16, 16, 4, 4));
    }
    let text = text(&machine);
    let below = text.split_once("pci0000:20").expect("a tree").1;
    let below = below.split_once("pci0000:96").expect("the next one").0;
    assert_eq!(below.lines().count(), 11, "{below}");
    assert!(below.contains("   └─ and 92 NICs more\n"), "{below}");
    assert_eq!(
        lines_with(&text, "not shown"),
        ["note: 36 more network cards are not shown"]
    );
}

#[test]
fn a_place_that_the_driver_does_not_tell_is_found_where_only_one_is_left() {
    let mut machine = two_cards();
    let hide = |device: &mut Device| {
        device.name = Reading::missing(Gap::NoPermission);
        device.pci = Reading::missing(Gap::NoPermission);
    };
    hide(&mut machine.devices[1]);
    let one = Topology::of(&machine);
    assert_eq!(one.ends.len(), 2);
    assert_eq!(one.ends[1].pci.as_deref(), Some("0000:97:00.0"));
    assert_eq!(one.notes, ["model of GPU1: no permission"]);
    hide(&mut machine.devices[0]);
    let both = Topology::of(&machine);
    assert_eq!(both.ends.len(), 2);
    assert_eq!(
        both.notes,
        [
            "model and place on the bus of GPU0 and GPU1: no permission",
            "not found in the system's PCI tree: GPU0 and GPU1"
        ]
    );
    // Fewer are left than the driver has: one is not its own, or two of its own are somewhere else.
    machine.devices.truncate(1);
    machine.links.clear();
    let labels: Vec<String> = Topology::of(&machine)
        .ends
        .into_iter()
        .map(|end| end.label)
        .collect();
    assert_eq!(labels, ["GPU0"]);
}

#[test]
fn instances_and_virtual_machines_are_told() {
    let mut machine = two_cards();
    machine.devices[0].mig = Mode {
        is_on: true,
        will_be_on: true,
    }
    .into();
    machine.devices[0].mig_devices = 7.into();
    machine.system.confined_by = vec!["docker".to_owned(), "kvm".to_owned()];
    machine
        .system
        .variables
        .push(("CUDA_VISIBLE_DEVICES".to_owned(), "1".to_owned()));
    let text = text(&machine);
    assert_eq!(
        lines_with(&text, "MIG")
            .first()
            .map(|line| line.ends_with("MIG on, 7 instances")),
        Some(true)
    );
    assert_eq!(lines_with(&text, "which is virtual (kvm)").len(), 1);
    let expect = "CUDA_VISIBLE_DEVICES=1: a program started with it sees GPU1 (as its 0)";
    assert_eq!(lines_with(&text, "CUDA_VISIBLE"), [expect]);
}

#[test]
fn whatever_a_snapshot_holds_is_shown_without_harm() {
    let mut machine = two_cards();
    machine.devices[0].name = "a\u{1b}[31m".to_owned().into();
    machine.devices[1].index = 0;
    machine.host = "x".repeat(1 << 20);
    machine.system.pci[0].parent = Some("0000:17:00.0".to_owned());
    machine.system.pci[2].parent = Some("nowhere".to_owned());
    machine.links[0].to = u32::MAX;
    let deep: Vec<String> = (0..200).map(|at| format!("{at:02x}:00.0")).collect();
    machine.nic(
        &format!("pci0000:ff/{}", deep.join("/")),
        "deep0",
        0,
        link(300, 2, u32::MAX, u32::MAX),
    );
    let topology = Topology::of(&machine);
    let text = text(&machine);
    assert!(!text.contains('\u{1b}') && text.len() < 10_000, "{text}");
    assert_eq!(topology.tree[0].name, "pci0000:96");
    let json = serde_json::to_value(&topology).expect("JSON");
    assert_eq!(json["paceline_topology"], 1);
    assert_eq!(json["ends"][0]["label"], "GPU0");
    assert_eq!(json["p2p"][0]["capability"], "read");
    assert_eq!(json["p2p"][0]["codes"][0][0], "X");
    assert_eq!(json["tree"][0]["below"][0]["link"]["is_narrow"], true);
}

#[test]
fn nothing_known_is_shown_as_nothing_known() {
    let machine = Snapshot {
        devices: vec![
            Device::default(),
            Device {
                index: 1,
                ..Device::default()
            },
        ],
        ..Snapshot::default()
    };
    let text = text(&machine);
    let expect = "\
this machine: 2 GPUs

  GPU0  ?    ?
  GPU1  ?    ?

Connections, in the codes of nvidia-smi topo -m

      GPU0  GPU1  CPU affinity  NUMA affinity
GPU0   X    ?     N/A           N/A
GPU1  ?      X    N/A           N/A

  X  the device itself
  ?  not told; the notes say why

Peer-to-peer (P2P), in the codes of nvidia-smi topo -p2p

read, write, NVLink, atomics and PCIe: all the same
      GPU0  GPU1
GPU0   X    ?
GPU1  ?      X

  X  the device itself
  ?  not told; the notes say why

note: model, place on the bus and NVLinks of GPU0 and GPU1: not read
note: `?` in P2P read, write, NVLink, atomics and PCIe, 2 ways from one GPU to another: not read
note: `?` in the connections: neither the driver nor the system's PCI tree tells what both hang on
note: the system shows no PCI bus (/sys/bus/pci), so there is no tree
";
    assert_eq!(text, expect);
}
