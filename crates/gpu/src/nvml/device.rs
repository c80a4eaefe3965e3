//! Everything that the driver says about one device.

use nvml_wrapper::Device as Nvidia;
use nvml_wrapper::enum_wrappers::device::{
    ComputeMode, EccCounter, MemoryError, TemperatureThreshold,
};
use nvml_wrapper::enums::device::DeviceArchitecture;
use nvml_wrapper_sys::bindings as c;

use crate::devices::Gpu;
use crate::sample::DeviceSample;
use crate::snapshot::{Device, Errors, Gap, Mode, PcieLink, all_missing};

use super::gap::gap;
use super::links::{nvlinks, sum};
use super::now;
use super::processes::processes;
use super::raw::{self, Library};
use super::{reading, up_to};

/// Most CPUs of a machine that are believed; Linux knows 8192.
const CPUS_MAX: usize = 8192;

/// Most NUMA nodes; Linux knows 1024.
const NODES_MAX: usize = 1024;

/// Most MIG instances of a device that are looked for; there are 7 today.
const MIG_DEVICES_MAX: u32 = 64;

/// Reads a device. One that cannot be opened is there too, with the reason in the place of each value.
///
/// *Blocks*: see [`Library::device`]; then some hundred calls of microseconds.
pub(crate) fn read(library: &Library, index: u32) -> Device {
    match library.device(index) {
        Ok(device) => opened(library, &device, index),
        Err(gap) => closed(index, &gap),
    }
}

fn opened(library: &Library, device: &Nvidia<'_>, index: u32) -> Device {
    let now = now::at_once(library, device, index);
    Device {
        index,
        name: reading(raw::name(device)),
        uuid: reading(raw::uuid(device)),
        pci: raw::place(device).into(),
        architecture: reading(device.architecture().map(architecture)),
        capability: capability(device).into(),
        memory: now.memory.clone(),
        pcie: pcie(device).into(),
        numa_node: numa_node(device).into(),
        cpus: cpus(device).into(),
        mig: mig(device).into(),
        // At most `MIG_DEVICES_MAX`.
        mig_devices: mig_instances(device)
            .map(|instances| instances.len() as u32)
            .into(),
        ecc: reading(device.is_ecc_enabled().map(|ecc| Mode {
            is_on: ecc.currently_enabled,
            will_be_on: ecc.pending_enabled,
        })),
        errors: errors(device),
        compute_mode: reading(device.compute_mode().map(compute_mode)),
        persistence: reading(device.is_in_persistent_mode()),
        has_display: reading(
            device
                .is_display_connected()
                .or_else(|_| device.is_display_active()),
        ),
        nvlinks: nvlinks(device).into(),
        power_default_mw: device
            .power_management_limit_default()
            .map_err(gap)
            .and_then(now::milliwatts)
            .into(),
        slowdown_c: slowdown(device).into(),
        processes: processes(device).into(),
        now,
    }
}

/// What CUDA's variables may call the device.
pub(crate) fn gpu(library: &Library, index: u32) -> Gpu {
    let Ok(device) = library.device(index) else {
        return Gpu {
            index,
            ..Gpu::default()
        };
    };
    let mig = match mig(&device) {
        Ok(Mode { is_on: true, .. }) => mig_instances(&device).unwrap_or_default(),
        _ => Vec::new(),
    };
    Gpu {
        index,
        uuid: raw::uuid(&device).unwrap_or_default(),
        name: raw::name(&device).unwrap_or_default(),
        pci: raw::place(&device).unwrap_or_default(),
        mig: mig
            .iter()
            .filter_map(|instance| raw::uuid(instance).ok())
            .collect(),
    }
}

/// A device that only its number is known of.
fn closed(index: u32, gap: &Gap) -> Device {
    all_missing!(gap, Device {
        name, uuid, pci, architecture, capability, memory, pcie, numa_node, cpus, mig, mig_devices, ecc, compute_mode,
        persistence, has_display, nvlinks, power_default_mw, slowdown_c, processes;
        index,
        errors: all_missing!(gap, Errors {
            corrected, uncorrected, uncorrected_ever, retired_pages, retirement_pending, retirement_failed, pcie_replays;
        }),
        now: DeviceSample::missing(index, gap),
    })
}

fn architecture(architecture: DeviceArchitecture) -> String {
    // Their names are one word each.
    format!("{architecture:?}").to_lowercase()
}

fn compute_mode(mode: ComputeMode) -> String {
    let name = match mode {
        ComputeMode::Default => "default",
        ComputeMode::ExclusiveThread => "exclusive_thread",
        ComputeMode::Prohibited => "prohibited",
        ComputeMode::ExclusiveProcess => "exclusive_process",
    };
    name.to_owned()
}

fn capability(device: &Nvidia<'_>) -> Result<(u32, u32), Gap> {
    let capability = device.cuda_compute_capability().map_err(gap)?;
    let part = |value: i32| {
        let value = u32::try_from(value).map_err(|_| Gap::other("a version below zero"))?;
        up_to(1000, "as compute capability", value)
    };
    Ok((part(capability.major)?, part(capability.minor)?))
}

fn pcie(device: &Nvidia<'_>) -> Result<PcieLink, Gap> {
    let generation = device.current_pcie_link_gen().map_err(gap);
    let why = generation.clone().err();
    let known = |value: Result<u32, Gap>, most: u32| value.ok().filter(|value| *value <= most);
    let link = PcieLink {
        generation: known(generation, 9).unwrap_or(0),
        generation_max: known(device.max_pcie_link_gen().map_err(gap), 9).unwrap_or(0),
        lanes: known(device.current_pcie_link_width().map_err(gap), 32).unwrap_or(0),
        lanes_max: known(device.max_pcie_link_width().map_err(gap), 32).unwrap_or(0),
    };
    match why {
        Some(why) if link == PcieLink::default() => Err(why),
        _ => Ok(link),
    }
}

fn slowdown(device: &Nvidia<'_>) -> Result<u32, Gap> {
    let value = device.temperature_threshold(TemperatureThreshold::Slowdown);
    up_to(250, "degrees", value.map_err(gap)?)
}

fn numa_node(device: &Nvidia<'_>) -> Result<u32, Gap> {
    let words = NODES_MAX.div_ceil(usize::BITS as usize);
    let set = device
        .memory_affinity(words, c::NVML_AFFINITY_SCOPE_NODE)
        .map_err(gap)?;
    match ones(&set, NODES_MAX).as_slice() {
        [node] => Ok(*node),
        [] => Err(Gap::NotSupported),
        _ => Err(Gap::other("the driver names several nodes")),
    }
}

fn cpus(device: &Nvidia<'_>) -> Result<Vec<u32>, Gap> {
    let words = CPUS_MAX.div_ceil(usize::BITS as usize);
    let cpus = ones(&device.cpu_affinity(words).map_err(gap)?, CPUS_MAX);
    if cpus.is_empty() {
        return Err(Gap::NotSupported);
    }
    Ok(cpus)
}

/// The numbers of the bits that are set, below `most`.
fn ones(words: &[std::os::raw::c_ulong], most: usize) -> Vec<u32> {
    let bits = std::os::raw::c_ulong::BITS;
    let numbers = (0u32..).zip(words).flat_map(|(at, word)| {
        let set = (0..bits).filter(move |bit| word >> bit & 1 == 1);
        set.map(move |bit| at * bits + bit)
    });
    numbers
        .take_while(|number| (*number as usize) < most)
        .collect()
}

fn mig(device: &Nvidia<'_>) -> Result<Mode, Gap> {
    let mode = device.mig_mode().map_err(gap)?;
    let is_on = |value: u32| match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Gap::other(format!("the driver says MIG is {other}"))),
    };
    Ok(Mode {
        is_on: is_on(mode.current)?,
        will_be_on: is_on(mode.pending)?,
    })
}

/// The MIG instances; the driver says how many there may be, and each is asked for.
fn mig_instances<'nvml>(device: &Nvidia<'nvml>) -> Result<Vec<Nvidia<'nvml>>, Gap> {
    let most = device.mig_device_count().map_err(gap)?.min(MIG_DEVICES_MAX);
    let there = (0..most).filter_map(|index| device.mig_device_by_index(index).ok());
    Ok(there.collect())
}

fn errors(device: &Nvidia<'_>) -> Errors {
    let ecc = |kind, since| {
        let count = device.total_ecc_errors(kind, since).map_err(gap);
        sum([count]).into()
    };
    // Devices before Ampere retire pages, later ones remap rows.
    let rows = raw::remapped_rows(device).map_err(gap);
    let row = |place: usize| rows.clone().map(|rows| u64::from(rows[place]));
    let pages = |cause| {
        raw::retired_pages(device, cause)
            .map(u64::from)
            .map_err(gap)
    };
    let retired = [
        pages(c::nvmlPageRetirementCause_enum_NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS),
        pages(c::nvmlPageRetirementCause_enum_NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR),
        row(0),
        row(1),
    ];
    let pages_pending = device
        .are_pages_pending_retired()
        .map(u64::from)
        .map_err(gap);
    let pending = sum([pages_pending, row(2)]);
    Errors {
        corrected: ecc(MemoryError::Corrected, EccCounter::Volatile),
        uncorrected: ecc(MemoryError::Uncorrected, EccCounter::Volatile),
        uncorrected_ever: ecc(MemoryError::Uncorrected, EccCounter::Aggregate),
        retired_pages: sum(retired).into(),
        retirement_pending: pending.map(|pending| pending > 0).into(),
        retirement_failed: rows.map(|rows| rows[3] > 0).into(),
        pcie_replays: reading(device.pcie_replay_counter().map(u64::from)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_numbers() {
        assert_eq!(ones(&[0b1011, 1 << 63], 8192), [0, 1, 3, 127]);
        assert_eq!(ones(&[u64::MAX; 4], 3), [0, 1, 2]);
        assert_eq!(ones(&[], 8192), [0u32; 0]);
    }

    #[test]
    fn an_architecture_is_one_small_word() {
        assert_eq!(architecture(DeviceArchitecture::Hopper), "hopper");
    }

    #[test]
    fn a_device_that_cannot_be_opened_has_only_a_number() {
        let device = closed(3, &Gap::Lost);
        let json = serde_json::to_value(&device).expect("encodes");
        let text = json.to_string();
        assert!(!text.contains("not_read"), "{text}");
        assert_eq!(json["index"], 3);
        assert_eq!(json["now"]["index"], 3);
    }
}
