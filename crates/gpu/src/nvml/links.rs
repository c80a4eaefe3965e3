//! What is between devices: peer-to-peer and the nearest common thing of each pair, and the NVLinks of each device.

use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::{
    P2pCapabilitiesIndex, P2pStatus as Status, TopologyLevel,
};
use nvml_wrapper::enum_wrappers::nv_link::ErrorCounter;
use nvml_wrapper::sys_exports::field_id;
use nvml_wrapper_sys::bindings as c;

use crate::snapshot::{Ancestor, Capability, Gap, Link, NvLink, P2pStatus, Reading, Remote};

use super::gap::gap;
use super::now::known;
use super::raw::{self, Field, Library};
use super::{reading, up_to};

/// Each ordered pair of different devices, in order.
///
/// *Cost*: six calls a pair, a few microseconds each.
pub(crate) fn read(library: &Library) -> Vec<Link> {
    let count = library.count();
    let all = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
    let pairs = all.filter(|(from, to)| from != to);
    pairs.map(|(from, to)| pair(library, from, to)).collect()
}

fn pair(library: &Library, from: u32, to: u32) -> Link {
    let mut link = Link {
        from,
        to,
        ..Link::default()
    };
    let both = library
        .device(from)
        .and_then(|from| Ok((from, library.device(to)?)));
    let (a, b) = match both {
        Ok(both) => both,
        Err(gap) => {
            link.p2p = Capability::ALL.map(|_| Reading::missing(gap.clone()));
            link.ancestor = Reading::missing(gap);
            return link;
        }
    };
    link.p2p = CAPABILITIES.map(|capability| reading(a.p2p_status(&b, capability).map(p2p_status)));
    link.ancestor = reading(
        library
            .nvml()
            .topology_common_ancestor(&a, &b)
            .map(ancestor),
    );
    link
}

/// In the order of [`Capability::ALL`]. The driver's first name for PCIe was "proprietary".
const CAPABILITIES: [P2pCapabilitiesIndex; 5] = [
    P2pCapabilitiesIndex::Read,
    P2pCapabilitiesIndex::Write,
    P2pCapabilitiesIndex::NvLink,
    P2pCapabilitiesIndex::Atomics,
    P2pCapabilitiesIndex::Prop,
];

fn p2p_status(status: Status) -> P2pStatus {
    match status {
        Status::Ok => P2pStatus::Ok,
        Status::ChipsetNotSupported => P2pStatus::ChipsetNotSupported,
        Status::GpuNotSupported => P2pStatus::GpuNotSupported,
        Status::IohTopologyNotSupported => P2pStatus::TopologyNotSupported,
        Status::DisabledByRegkey => P2pStatus::DisabledByRegkey,
        Status::NotSupported => P2pStatus::NotSupported,
        Status::Unknown => P2pStatus::Unknown,
    }
}

fn ancestor(level: TopologyLevel) -> Ancestor {
    match level {
        TopologyLevel::Internal => Ancestor::Board,
        TopologyLevel::Single => Ancestor::Bridge,
        TopologyLevel::Multiple => Ancestor::Bridges,
        TopologyLevel::HostBridge => Ancestor::HostBridge,
        TopologyLevel::Node => Ancestor::Node,
        TopologyLevel::System => Ancestor::System,
    }
}

/// The NVLinks of a device; none is a fact too.
pub(super) fn nvlinks(device: &Device<'_>) -> Result<Vec<NvLink>, Gap> {
    let mut links = Vec::new();
    for index in 0..c::NVML_NVLINK_MAX_LINKS {
        let is_active = match device.link_wrapper_for(index).is_active() {
            // The device has no link of this number; another link may still be there.
            Err(
                nvml_wrapper::error::NvmlError::NotSupported
                | nvml_wrapper::error::NvmlError::InvalidArg,
            ) => continue,
            answer => answer.map_err(gap),
        };
        match is_active {
            Err(gap @ (Gap::NoFunction | Gap::Lost)) => return Err(gap),
            is_active => links.push(nvlink(device, index, is_active)),
        }
    }
    Ok(links)
}

fn nvlink(device: &Device<'_>, index: u32, is_active: Result<bool, Gap>) -> NvLink {
    let version = device.link_wrapper_for(index).version().map_err(gap);
    let mut link = NvLink {
        index,
        is_active: is_active.clone().into(),
        version: version
            .and_then(|version| up_to(100, "as version of NVLink", version))
            .into(),
        ..NvLink::default()
    };
    if is_active == Ok(false) {
        // Nothing is at the other end.
        return link;
    }
    link.remote = raw::remote_kind(device, index)
        .map_err(gap)
        .and_then(remote)
        .into();
    link.remote_pci = raw::remote_place(device, index).into();
    link.speed_mbps = speed(device, index).into();
    link.errors = errors(device, index).into();
    link
}

fn remote(kind: u32) -> Result<Remote, Gap> {
    match kind {
        c::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU => Ok(Remote::Gpu),
        c::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH => Ok(Remote::Switch),
        c::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_IBMNPU => Ok(Remote::Cpu),
        _ => Err(Gap::other(
            "the driver does not know what is at the other end",
        )),
    }
}

/// Megabytes per second of one direction: of the link itself, or with older drivers what all links share.
fn speed(device: &Device<'_>, index: u32) -> Result<u64, Gap> {
    let own = Field::of_link(index, field_id::NVML_FI_DEV_NVLINK_GET_SPEED);
    let common = Field::of_device(field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON);
    let [own, common] = raw::fields(device, [own, common]).map_err(gap)?;
    let speed = own.or_else(|gap| common.map_err(|_| gap))?;
    up_to(10_000_000, "MB/s", speed.value)
}

/// What the link has had to do again, all kinds together. Newer devices count in fields.
fn errors(device: &Device<'_>, index: u32) -> Result<u64, Gap> {
    let link = device.link_wrapper_for(index);
    let kinds = [
        ErrorCounter::DlReplay,
        ErrorCounter::DlRecovery,
        ErrorCounter::DlCrcFlit,
        ErrorCounter::DlCrcData,
    ];
    let counted = kinds.map(|kind| link.error_counter(kind).map_err(gap));
    let first = sum(counted);
    if first.is_ok() {
        return first;
    }
    let ids = [
        field_id::NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
        field_id::NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
        field_id::NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
    ];
    let asked = ids.map(|id| Field::of_link(index, id));
    let counted = raw::fields(device, asked).map_err(gap)?;
    sum(counted.map(|number| number.map(|number| number.value))).or(first)
}

/// The sum of those that are known, or why none is.
pub(super) fn sum<const N: usize>(counted: [Result<u64, Gap>; N]) -> Result<u64, Gap> {
    let mut sum = None;
    let mut why = None;
    for answer in counted {
        // The driver writes "not known" as the largest number.
        match answer.and_then(known) {
            Ok(count) => sum = Some(u64::saturating_add(sum.unwrap_or(0), count)),
            // That one kind is not counted here says less than what kept another from being told.
            Err(gap) if why.as_ref().is_none_or(|why| *why == Gap::NotSupported) => why = Some(gap),
            Err(_) => {}
        }
    }
    sum.ok_or(why.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_is_of_what_is_known() {
        let lost = || Err(Gap::Lost);
        assert_eq!(sum([Ok(1), lost(), Ok(2)]), Ok(3));
        assert_eq!(sum([Ok(u64::MAX - 1), Ok(9)]), Ok(u64::MAX));
        assert_eq!(sum([Ok(u64::MAX)]), Err(Gap::NotSupported));
        let unsupported = || Err(Gap::NotSupported);
        assert_eq!(sum([lost(), unsupported()]), Err(Gap::Lost));
        assert_eq!(sum([unsupported(), lost()]), Err(Gap::Lost));
        assert_eq!(sum([]), Err(Gap::NotRead));
    }

    #[test]
    fn the_other_end_is_one_of_three_things() {
        assert_eq!(remote(0), Ok(Remote::Gpu));
        assert_eq!(remote(1), Ok(Remote::Cpu));
        assert_eq!(remote(2), Ok(Remote::Switch));
        assert!(remote(255).is_err());
    }
}
