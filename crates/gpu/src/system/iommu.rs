//! The unit that translates addresses of devices: whether it works, and how it treats GPUs.

use super::{CHARS_MAX, line, text};
use crate::host::Host;
use crate::snapshot::{Gap, Iommu, PciDevice, PciKind};
use paceline_words::plain;

const GROUPS: &str = "/sys/kernel/iommu_groups";
const COMMAND_LINE_BYTES_MAX: u64 = 64 << 10;
const PARAMETERS_MAX: usize = 32;
/// What the kernel is told about it, and about Access Control Services.
const PARAMETERS: [&str; 6] = [
    "intel_iommu",
    "amd_iommu",
    "iommu",
    "iommu.passthrough",
    "iommu.strict",
    "pcie_acs_override",
];

pub(super) fn read(host: &Host<'_>, pci: &[PciDevice]) -> Iommu {
    Iommu {
        is_on: is_on(host).into(),
        mode: mode(host, pci).ok_or(Gap::NotSupported).into(),
        parameters: parameters(host),
    }
}

fn is_on(host: &Host<'_>) -> Result<bool, Gap> {
    let has_some = |folder| host.names(folder, 1).map(|names| !names.is_empty());
    match (has_some(GROUPS), has_some("/sys/class/iommu")) {
        (Ok(true), _) | (_, Ok(true)) => Ok(true),
        (Ok(false), _) | (_, Ok(false)) => Ok(false),
        // A kernel without support has neither.
        _ if host.has("/sys/class") => Ok(false),
        (Err(error), _) => Err(super::gap(&error)),
    }
}

/// That of the GPUs; where they differ, one that is not passed through.
fn mode(host: &Host<'_>, pci: &[PciDevice]) -> Option<String> {
    let gpus = pci.iter().filter(|device| device.kind == PciKind::Gpu);
    let groups = gpus.filter_map(|gpu| gpu.iommu_group.known());
    let modes = groups.filter_map(|group| line(host, &format!("{GROUPS}/{group}/type")));
    modes.reduce(|first, next| if first == "identity" { next } else { first })
}

fn parameters(host: &Host<'_>) -> Vec<String> {
    let line = text(host, "/proc/cmdline", COMMAND_LINE_BYTES_MAX).unwrap_or_default();
    let matters = |parameter: &&str| {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        PARAMETERS.contains(&name) || name == "pci" && value.contains("acs")
    };
    line.split_whitespace()
        .filter(matters)
        .take(PARAMETERS_MAX)
        .map(|parameter| plain(parameter, CHARS_MAX))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::recorded::Recorded;

    #[test]
    fn it_is_on_where_there_are_groups() {
        let check = |files: &[(&str, &str)], expect: Result<bool, Gap>| {
            assert_eq!(is_on(&Recorded::new(files).host()), expect, "{files:?}");
        };
        check(&[("/sys/kernel/iommu_groups/0/type", "DMA\n")], Ok(true));
        check(&[("/sys/class/iommu/dmar0/x", "")], Ok(true));
        check(&[("/sys/class/net/lo/type", "772\n")], Ok(false));
        check(&[], Err(Gap::NotSupported));
    }

    #[test]
    fn the_mode_is_that_of_a_gpu_which_is_not_passed_through() {
        let gpu = |group: u32| PciDevice {
            kind: PciKind::Gpu,
            iommu_group: group.into(),
            ..PciDevice::default()
        };
        let nic = PciDevice {
            kind: PciKind::Nic,
            ..gpu(2)
        };
        let recorded = Recorded::new(&[
            ("/sys/kernel/iommu_groups/1/type", "identity\n"),
            ("/sys/kernel/iommu_groups/2/type", "DMA-FQ\n"),
        ]);
        let check = |pci: &[PciDevice], expect: Option<&str>| {
            assert_eq!(mode(&recorded.host(), pci).as_deref(), expect);
        };
        check(&[gpu(1), nic.clone()], Some("identity"));
        check(&[gpu(1), gpu(2), gpu(1)], Some("DMA-FQ"));
        check(&[nic, gpu(7)], None);
    }

    #[test]
    fn what_the_kernel_was_told_is_picked_out() {
        let line = "root=/dev/sda quiet intel_iommu=on iommu=pt pci=noaer pci=disable_acs_redir=pci:1 iommu.strict=0\n";
        let recorded = Recorded::new(&[("/proc/cmdline", line)]);
        let expect = [
            "intel_iommu=on",
            "iommu=pt",
            "pci=disable_acs_redir=pci:1",
            "iommu.strict=0",
        ];
        assert_eq!(parameters(&recorded.host()), expect);
    }
}
