//! A snapshot: everything that the driver and the system say about this machine's devices at one moment, as plain data.
//!
//! Nothing here looks at the machine. Readers of the driver and the system fill these types; drawing and judging code
//! takes them. A snapshot written as JSON is read again elsewhere by the same types, and is not believed: sizes are bounded
//! when it is read ([`Snapshot::from_json`]), numbers may be anything.

mod reading;

use serde::{Deserialize, Serialize};

pub(crate) use self::reading::all_missing;
pub use self::reading::{Gap, Reading};

/// Version of the fields below; one that is higher is refused.
pub const VERSION: u32 = 1;

/// Largest snapshot in bytes of JSON; 64 devices need about 2 MB.
pub const JSON_BYTES_MAX: usize = 32 << 20;

/// Most devices that are looked at; no machine has as many.
pub const DEVICES_MAX: usize = 256;

/// Kinds of [`System::confined_by`] that are virtual machines; all others are containers.
const VIRTUAL_MACHINES: [&str; 8] = [
    "kvm",
    "xen",
    "vmware",
    "hyper-v",
    "virtualbox",
    "parallels",
    "wsl",
    "virtual machine",
];

/// This machine's devices and what is between them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Snapshot {
    /// [`VERSION`].
    pub paceline_snapshot: u32,
    /// When it was taken, in seconds since 1970.
    pub taken_unix_s: u64,
    /// Name of the machine.
    pub host: String,
    /// NVIDIA's driver and its libraries.
    pub driver: Driver,
    /// NVIDIA's devices in the order of the driver, those that were lost too.
    pub devices: Vec<Device>,
    /// Each ordered pair of different devices.
    pub links: Vec<Link>,
    /// Other makers' devices, as far as the system knows them.
    pub others: Vec<OtherDevice>,
    /// The system around them.
    pub system: System,
}

/// NVIDIA's driver.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Driver {
    /// Why there is nothing to see at all: no library, no driver, no permission.
    pub trouble: Option<DriverError>,
    /// Such as `580.159.04`.
    pub version: Reading<String>,
    /// Version of the management library, such as `13.580.159.04`.
    pub nvml: Reading<String>,
    /// Newest CUDA that the driver can run, major and minor.
    pub cuda: Reading<(u32, u32)>,
}

/// What keeps the driver from answering at all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum DriverError {
    /// The management library cannot be loaded; the loader's words.
    #[error("NVIDIA's driver library libnvidia-ml.so.1 is not installed")]
    NoLibrary(String),
    /// The library is there, the kernel's module is not.
    #[error("NVIDIA's kernel module is not loaded")]
    NoDriver,
    /// A static program has no loader for the library.
    #[error("this program is linked statically and cannot load NVIDIA's driver library")]
    Static,
    /// This user may not ask.
    #[error("this user has no permission to ask NVIDIA's driver")]
    NoPermission,
    /// Library and module are of different versions.
    #[error("NVIDIA's library and kernel module have different versions")]
    VersionMismatch,
    /// Something else; the library's words.
    #[error("NVIDIA's driver says: {0}")]
    Other(String),
}

/// One device of NVIDIA's.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Device {
    /// The driver's number.
    pub index: u32,
    /// Such as `NVIDIA H100 80GB HBM3`.
    pub name: Reading<String>,
    /// Such as `GPU-5e8c...`.
    pub uuid: Reading<String>,
    /// Place on the bus as the kernel writes it: `0000:18:00.0`.
    pub pci: Reading<String>,
    /// Such as `hopper`.
    pub architecture: Reading<String>,
    /// CUDA compute capability, major and minor.
    pub capability: Reading<(u32, u32)>,
    /// Device memory.
    pub memory: Reading<Memory>,
    /// The PCIe link as the driver sees it; idle devices lower its speed.
    pub pcie: Reading<PcieLink>,
    /// NUMA node that the driver names.
    pub numa_node: Reading<u32>,
    /// CPUs near the device, ascending.
    pub cpus: Reading<Vec<u32>>,
    /// Whether MIG is on, and whether it will be after a reset.
    pub mig: Reading<Mode>,
    /// MIG instances, where MIG is on.
    pub mig_devices: Reading<u32>,
    /// Whether memory is error-corrected, and whether it will be after a reset.
    pub ecc: Reading<Mode>,
    /// Error counters.
    pub errors: Errors,
    /// `default`, `exclusive_process`, `exclusive_thread` or `prohibited`.
    pub compute_mode: Reading<String>,
    /// Whether the driver keeps the device awake without users.
    pub persistence: Reading<bool>,
    /// Whether a monitor hangs on it.
    pub has_display: Reading<bool>,
    /// NVLinks, by number; empty where the device has none.
    pub nvlinks: Reading<Vec<NvLink>>,
    /// The power limit that the maker has set, in milliwatts.
    pub power_default_mw: Reading<u32>,
    /// Temperature at which hardware slows the device down, in degrees Celsius.
    pub slowdown_c: Reading<u32>,
    /// Processes that hold the device.
    pub processes: Reading<Vec<Holder>>,
    /// What it does now.
    pub now: crate::sample::DeviceSample,
}

/// A setting now, and after the next reset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mode {
    /// In force.
    pub is_on: bool,
    /// After a reset.
    pub will_be_on: bool,
}

/// Memory, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// In use, by anyone.
    pub used_bytes: u64,
    /// In all.
    pub total_bytes: u64,
}

/// Speed and width of a PCIe link, and the most that both ends can.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PcieLink {
    /// Generation in use, 1 to 7; 0 is not known.
    pub generation: u32,
    /// Highest generation of device and slot.
    pub generation_max: u32,
    /// Lanes in use; 0 is not known.
    pub lanes: u32,
    /// Most lanes of device and slot.
    pub lanes_max: u32,
}

/// What went wrong with a device since it was reset, or ever.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Errors {
    /// Corrected memory errors since the driver was loaded.
    pub corrected: Reading<u64>,
    /// Uncorrected memory errors since the driver was loaded.
    pub uncorrected: Reading<u64>,
    /// Uncorrected memory errors of the device's life.
    pub uncorrected_ever: Reading<u64>,
    /// Pages or rows retired because of errors.
    pub retired_pages: Reading<u64>,
    /// Whether some wait for a reset to be retired.
    pub retirement_pending: Reading<bool>,
    /// Whether retiring one has failed: there was nothing left to put in its place.
    pub retirement_failed: Reading<bool>,
    /// PCIe packets sent again.
    pub pcie_replays: Reading<u64>,
}

/// One NVLink.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NvLink {
    /// Its number on the device.
    pub index: u32,
    /// Whether it is up.
    pub is_active: Reading<bool>,
    /// Generation of NVLink.
    pub version: Reading<u32>,
    /// What is at the other end.
    pub remote: Reading<Remote>,
    /// Place of the other end on the bus: `0000:18:00.0`.
    pub remote_pci: Reading<String>,
    /// Speed of one direction, in megabytes (10^6) per second.
    pub speed_mbps: Reading<u64>,
    /// Replay, recovery and CRC errors, added up.
    pub errors: Reading<u64>,
}

/// What an NVLink leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Remote {
    /// Another GPU.
    Gpu,
    /// An NVSwitch.
    Switch,
    /// A CPU.
    Cpu,
}

/// A process that holds a device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Holder {
    /// Its number, in the driver's namespace; in a container there may be no such process here.
    pub pid: u32,
    /// Device memory that it uses.
    pub memory_bytes: Reading<u64>,
    /// Whether it computes, or draws.
    pub is_compute: bool,
    /// Name of the program; missing where no such process is seen from here.
    pub name: Reading<String>,
    /// Its parent.
    pub parent: Reading<u32>,
    /// Whether the parent that started it is gone: it now belongs to process 1 or a subreaper, and no terminal or service.
    pub is_orphan: Reading<bool>,
    /// Seconds since it was started.
    pub age_s: Reading<u64>,
    /// The Paceline or torchrun job that it says it is a rank of (`RANK`, `PACELINE_JOB_ID`), where its environment can be read.
    pub rank: Option<u32>,
}

/// What one device can do with another.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Link {
    /// Index of the device that asks.
    pub from: u32,
    /// Index of the other.
    pub to: u32,
    /// Peer-to-peer, in the order of [`Capability::ALL`].
    pub p2p: [Reading<P2pStatus>; 5],
    /// The nearest thing that both hang on, as the driver sees it.
    pub ancestor: Reading<Ancestor>,
}

/// What peer-to-peer may be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Capability {
    /// Reading the other's memory.
    Read,
    /// Writing to it.
    Write,
    /// Either over NVLink.
    NvLink,
    /// Atomic operations on it.
    Atomics,
    /// Either over PCIe.
    Pcie,
}

impl Capability {
    /// All of them, in the order of [`Link::p2p`].
    pub const ALL: [Self; 5] = [
        Self::Read,
        Self::Write,
        Self::NvLink,
        Self::Atomics,
        Self::Pcie,
    ];
}

/// The driver's answer about peer-to-peer.
///
/// *Source*: `nvmlGpuP2PStatus_t`; the codes are those of `nvidia-smi topo -p2p`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum P2pStatus {
    /// `OK`
    Ok,
    /// `CNS`: the chipset does not support it.
    ChipsetNotSupported,
    /// `GNS`: the device does not support it.
    GpuNotSupported,
    /// `TNS`: not over this way between the two.
    TopologyNotSupported,
    /// `DR`: switched off by a setting of the driver.
    DisabledByRegkey,
    /// `NS`: not supported.
    NotSupported,
    /// `U`: the driver does not know.
    Unknown,
}

/// The nearest thing that two devices both hang on.
///
/// *Source*: `nvmlGpuTopologyLevel_t`; the codes are those of `nvidia-smi topo -m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ancestor {
    /// One board; nvidia-smi counts it as `PIX`.
    Board,
    /// `PIX`: at most one PCIe bridge.
    Bridge,
    /// `PXB`: several PCIe bridges, and no CPU.
    Bridges,
    /// `PHB`: a PCIe host bridge, so a CPU.
    HostBridge,
    /// `NODE`: several host bridges of one NUMA node.
    Node,
    /// `SYS`: the way between NUMA nodes.
    System,
}

/// A device of another maker.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OtherDevice {
    /// `AMD`, or what the system calls the maker.
    pub maker: String,
    /// Place on the bus.
    pub pci: String,
    /// The system's name for it.
    pub name: Reading<String>,
    /// Device memory.
    pub memory: Reading<Memory>,
    /// NUMA node.
    pub numa_node: Reading<u32>,
    /// What it does now.
    pub now: crate::sample::DeviceSample,
}

/// The system around the devices.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct System {
    /// Release of the kernel.
    pub kernel: String,
    /// What kind of container or virtual machine this is, such as `docker`, `kubernetes`, `kvm`; several where nested.
    pub confined_by: Vec<String>,
    /// CPUs that this process may run on, ascending.
    pub allowed_cpus: Reading<Vec<u32>>,
    /// NUMA nodes with memory or CPUs.
    pub numa: Vec<NumaNode>,
    /// Everything on the PCI bus that is a GPU, a network card, an NVSwitch, or a bridge on the way to one.
    pub pci: Vec<PciDevice>,
    /// Network cards.
    pub nics: Vec<Nic>,
    /// The unit that translates addresses of devices.
    pub iommu: Iommu,
    /// Shared memory for processes, `/dev/shm`.
    pub shm: Reading<Memory>,
    /// How much memory a process may lock, in bytes; nothing is no limit.
    pub memlock_bytes: Reading<Option<u64>>,
    /// What the driver wrote into the kernel's log about failing devices.
    pub xids: Reading<Vec<Xid>>,
    /// NCCL libraries that programs here would load.
    pub nccl: Vec<Nccl>,
    /// Variables that decide which devices are seen and how they talk, that are set: `CUDA_VISIBLE_DEVICES`, `NCCL_*`.
    pub variables: Vec<(String, String)>,
    /// `NVreg_*` settings of the driver that are not the default, and `PeerMappingOverride` and the like in `RegistryDwords`.
    pub driver_parameters: Vec<(String, String)>,
    /// Whether `nvidia-peermem` or its like, GPUDirect RDMA for network cards, is loaded.
    pub has_peermem: Reading<bool>,
    /// Whether the NVSwitch manager (`nv-fabricmanager`) runs; missing where processes cannot be seen.
    pub has_fabric_manager: Reading<bool>,
}

/// A NUMA node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NumaNode {
    /// Its number.
    pub index: u32,
    /// Its CPUs, ascending.
    pub cpus: Vec<u32>,
    /// Distance to each node, in the order of the system's nodes; 10 is itself.
    pub distances: Vec<u32>,
}

/// Something on the PCI bus.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PciDevice {
    /// Its place: `0000:18:00.0`.
    pub address: String,
    /// The bridge above it; nothing where that is the host bridge.
    pub parent: Option<String>,
    /// The host bridge: `pci0000:17`.
    pub root: String,
    /// What it is.
    pub kind: PciKind,
    /// Vendor and device number.
    pub id: (u16, u16),
    /// The link towards the host. What it can at most is the device's own; that of its slot is said of the bridge above it.
    pub link: Reading<PcieLink>,
    /// NUMA node.
    pub numa_node: Reading<u32>,
    /// CPUs near it, ascending.
    pub cpus: Reading<Vec<u32>>,
    /// The kernel's module that drives it.
    pub driver: Option<String>,
    /// Number of the group of devices that the IOMMU cannot tell apart; missing where it is off.
    pub iommu_group: Reading<u32>,
    /// Whether Access Control Services send peer-to-peer traffic up to the host bridge: request or completion redirect, or
    /// upstream forwarding. Missing where the configuration cannot be read, which needs root.
    pub acs_redirects: Reading<bool>,
}

/// What something on the PCI bus is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PciKind {
    /// A bridge or a port of a switch.
    #[default]
    Bridge,
    /// A graphics or compute device of any maker.
    Gpu,
    /// An NVSwitch.
    NvSwitch,
    /// A network card.
    Nic,
}

/// A network card.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Nic {
    /// The interface, or the RDMA device where it has one: `eth0`, `mlx5_0`.
    pub name: String,
    /// Network interfaces of an RDMA device.
    pub interfaces: Vec<String>,
    /// Place on the bus; nothing for virtual ones.
    pub pci: Option<String>,
    /// Whether it does RDMA.
    pub is_rdma: bool,
    /// Whether a link is up.
    pub is_up: Reading<bool>,
    /// Speed in megabits per second.
    pub speed_mbps: Reading<u64>,
    /// NUMA node.
    pub numa_node: Reading<u32>,
}

/// The unit that translates addresses of devices.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Iommu {
    /// Whether one works: the system has groups.
    pub is_on: Reading<bool>,
    /// How it treats a GPU's traffic: `identity` (passed through), `DMA`, `DMA-FQ`.
    pub mode: Reading<String>,
    /// What the kernel was told: `intel_iommu=on`, `iommu=pt`, `amd_iommu=...`.
    pub parameters: Vec<String>,
}

/// What the driver wrote about a failing device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Xid {
    /// NVIDIA's number for the kind of failure.
    pub code: u32,
    /// Place of the device.
    pub pci: String,
    /// How long ago, in seconds, where the log tells.
    pub age_s: Option<u64>,
    /// The rest of the line, bounded.
    pub text: String,
}

/// An NCCL library.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Nccl {
    /// Where it lies.
    pub path: String,
    /// Major, minor, patch.
    pub version: Option<(u32, u32, u32)>,
    /// The CUDA it was built with, major and minor.
    pub cuda: Option<(u32, u32)>,
}

/// Why a snapshot cannot be read again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// It has more bytes than any machine's.
    #[error("the snapshot has {bytes} bytes, at most {JSON_BYTES_MAX} are read")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// It is no snapshot.
    #[error("this is no snapshot: {0}")]
    NotASnapshot(#[from] serde_json::Error),
    /// It was written by a newer Paceline.
    #[error("the snapshot has version {found}, but this program knows versions up to {VERSION}")]
    Version {
        /// Its version.
        found: u32,
    },
    /// It has more devices than any machine.
    #[error("the snapshot has {found} devices, at most {DEVICES_MAX} are believed")]
    TooManyDevices {
        /// How many.
        found: usize,
    },
}

impl SnapshotError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::NotASnapshot(_) => "write one with `paceline gpu doctor --save-snapshot FILE`",
            Self::Version { .. } => "read it with the program that wrote it, or a newer one",
            Self::TooLarge { .. } | Self::TooManyDevices { .. } => return None,
        };
        Some(text.to_owned())
    }
}

impl Device {
    /// Whether it fell off the bus.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        let gaps = [
            self.name.gap(),
            self.uuid.gap(),
            self.memory.gap(),
            self.pcie.gap(),
        ];
        gaps.contains(&Some(&Gap::Lost)) || self.now.is_lost()
    }
}

impl System {
    /// The kind of virtual machine that this is, if it is one.
    #[must_use]
    pub fn virtual_machine(&self) -> Option<&str> {
        let kinds = self.confined_by.iter().map(String::as_str);
        kinds
            .into_iter()
            .find(|kind| VIRTUAL_MACHINES.contains(kind))
    }

    /// Whether this is a container.
    #[must_use]
    pub fn is_container(&self) -> bool {
        let mut kinds = self.confined_by.iter();
        kinds.any(|kind| !VIRTUAL_MACHINES.contains(&kind.as_str()))
    }

    /// The value of a variable of CUDA or NCCL.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<&str> {
        let mut all = self.variables.iter();
        all.find_map(|(known, value)| (known == name).then_some(value.as_str()))
    }
}

impl P2pStatus {
    /// The code of `nvidia-smi topo -p2p`.
    #[must_use]
    pub fn code(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::ChipsetNotSupported => "CNS",
            Self::GpuNotSupported => "GNS",
            Self::TopologyNotSupported => "TNS",
            Self::DisabledByRegkey => "DR",
            Self::NotSupported => "NS",
            Self::Unknown => "U",
        }
    }
}

impl Snapshot {
    /// Reads a snapshot that was saved as JSON.
    ///
    /// *Errors*: see [`SnapshotError`]; bytes from outside are bounded before they are decoded.
    pub fn from_json(bytes: &[u8]) -> Result<Self, SnapshotError> {
        if bytes.len() > JSON_BYTES_MAX {
            return Err(SnapshotError::TooLarge { bytes: bytes.len() });
        }
        let snapshot: Self = serde_json::from_slice(bytes)?;
        match snapshot.paceline_snapshot {
            0 => {
                let missing = serde::de::Error::missing_field("paceline_snapshot");
                return Err(SnapshotError::NotASnapshot(missing));
            }
            1..=VERSION => {}
            found => return Err(SnapshotError::Version { found }),
        }
        match snapshot.devices.len() {
            0..=DEVICES_MAX => Ok(snapshot),
            found => Err(SnapshotError::TooManyDevices { found }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_survives_json() {
        let mut snapshot = Snapshot {
            paceline_snapshot: VERSION,
            devices: vec![Device::default()],
            links: vec![Link::default()],
            ..Snapshot::default()
        };
        snapshot.devices[0].name = "Some GPU".to_owned().into();
        snapshot.devices[0].memory = Reading::missing(Gap::Lost);
        snapshot.links[0].p2p[0] = P2pStatus::NotSupported.into();
        snapshot.system.memlock_bytes = Reading::Known(None);
        let json = serde_json::to_vec(&snapshot).expect("encodes");
        assert_eq!(Snapshot::from_json(&json).expect("decodes"), snapshot);
    }

    #[test]
    fn what_is_no_snapshot_is_refused() {
        let check = |json: &str, expect: &str| {
            let error = Snapshot::from_json(json.as_bytes()).expect_err(json);
            assert!(error.to_string().starts_with(expect), "{error}");
        };
        check("", "this is no snapshot: EOF");
        check("{}", "this is no snapshot: missing field");
        check(r#"{"paceline_snapshot":2}"#, "the snapshot has version 2");
        let many = format!(
            r#"{{"paceline_snapshot":1,"devices":[{}{{}}]}}"#,
            "{},".repeat(DEVICES_MAX)
        );
        check(&many, "the snapshot has 257 devices");
    }
}
