//! NVIDIA's kernel modules: their settings, the one for network cards, and the manager of NVSwitches.

use super::{CHARS_MAX, text, try_line};
use crate::host::Host;
use crate::snapshot::Gap;
use paceline_words::plain;

const PARAMETERS_BYTES_MAX: u64 = 64 << 10;
const PARAMETERS_MAX: usize = 128;
const MODULES_BYTES_MAX: u64 = 1 << 20;
const PROCESSES_MAX: usize = 65_536;
/// The kernel keeps 15 bytes of `nv-fabricmanager`.
const FABRIC_MANAGER: &str = "nv-fabricmanage";
/// What the first namespace of processes is called; it is the kernel's constant.
const FIRST_NAMESPACE: &str = "pid:[4026531836]";

/// Settings that change which devices there are or how they reach each other, and their defaults.
///
/// *Source*: `nv-reg.h` of NVIDIA's open kernel modules. Others are not shown: their defaults change with the driver.
const DEFAULTS: [(&str, &str); 12] = [
    ("EnableMSI", "1"),
    ("EnablePCIeGen3", "0"),
    ("EnablePCIERelaxedOrderingMode", "0"),
    ("EnableResizableBar", "0"),
    ("EnableStreamMemOPs", "0"),
    ("EnableUserNUMAManagement", "1"),
    ("DmaRemapPeerMmio", "1"),
    ("ExcludedGpus", ""),
    ("GpuBlacklist", ""),
    ("GrdmaPciTopoCheckOverride", "0"),
    ("IgnoreMMIOCheck", "0"),
    ("NvLinkDisable", "0"),
];
/// Lists of settings within one.
const LISTS: [&str; 2] = ["RegistryDwords", "RegistryDwordsPerDevice"];

/// `NVreg_*` settings that are not the default, and those within `RegistryDwords`.
pub(super) fn parameters(host: &Host<'_>) -> Vec<(String, String)> {
    let table = text(host, "/proc/driver/nvidia/params", PARAMETERS_BYTES_MAX).unwrap_or_default();
    let mut found = Vec::new();
    for line in table.lines() {
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        let (name, value) = (name.trim(), value.trim().trim_matches('"'));
        if LISTS.contains(&name) {
            let settings = value
                .split(';')
                .filter_map(|setting| setting.split_once('='));
            found.extend(
                settings
                    .map(|(name, value)| (name.trim(), value.trim()))
                    .map(owned),
            );
        }
        let default = DEFAULTS.iter().find(|(known, _)| *known == name);
        if default.is_some_and(|(_, default)| *default != value) {
            found.push(owned((&format!("NVreg_{name}"), value)));
        }
    }
    found.truncate(PARAMETERS_MAX);
    found
}

fn owned((name, value): (&str, &str)) -> (String, String) {
    (plain(name, CHARS_MAX), plain(value, CHARS_MAX))
}

/// Whether network cards may reach the devices' memory by way of a module; what they do by DMA-BUF does not need it.
pub(super) fn has_peermem(host: &Host<'_>) -> Result<bool, Gap> {
    let modules = text(host, "/proc/modules", MODULES_BYTES_MAX)?;
    let is_it = |name: &str| ["nvidia_peermem", "nv_peer_mem"].contains(&name);
    Ok(modules
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .any(is_it))
}

pub(super) fn has_fabric_manager(host: &Host<'_>) -> Result<bool, Gap> {
    let names = host.names("/proc", PROCESSES_MAX);
    let names = names.map_err(|error| super::gap(&error))?;
    let pids: Vec<&String> = names
        .iter()
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
        .collect();
    let is_it = |pid: &&String| {
        try_line(host, &format!("/proc/{pid}/comm")).as_deref() == Ok(FABRIC_MANAGER)
    };
    if pids.iter().any(is_it) {
        return Ok(true);
    }
    match is_in_container(host) {
        true => Err(Gap::other(
            "the host's processes are not seen from this container",
        )),
        // With `hidepid` a user sees only his own processes, not even the first.
        false if host.names("/proc/1", 1).is_err() => Err(Gap::NoPermission),
        false => Ok(false),
    }
}

/// Whether processes here are numbered apart from those of the machine.
pub(super) fn is_in_container(host: &Host<'_>) -> bool {
    let namespace = host.link("/proc/self/ns/pid");
    namespace.is_some_and(|namespace| namespace != FIRST_NAMESPACE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::recorded::Recorded;

    #[test]
    fn settings_that_somebody_changed_are_shown() {
        let table = "ResmanDebugLevel: 4294967295\nEnableMSI: 1\nNvLinkDisable: 1\nExcludedGpus: \"\"\nGpuBlacklist: \"GPU-1\"\n\
                     RegistryDwords: \"PeerMappingOverride=1; ForceP2P=0x11;odd;\"\nRegistryDwordsPerDevice: \"\"\nno line\n";
        let recorded = Recorded::new(&[("/proc/driver/nvidia/params", table)]);
        let found = parameters(&recorded.host());
        let found: Vec<(&str, &str)> = found
            .iter()
            .map(|(n, v)| (n.as_str(), v.as_str()))
            .collect();
        let expect = [
            ("NVreg_NvLinkDisable", "1"),
            ("NVreg_GpuBlacklist", "GPU-1"),
            ("PeerMappingOverride", "1"),
            ("ForceP2P", "0x11"),
        ];
        assert_eq!(found, expect);
    }

    #[test]
    fn the_module_for_network_cards_is_looked_for() {
        let check = |table: &str, expect: bool| {
            let recorded = Recorded::new(&[("/proc/modules", table)]);
            assert_eq!(has_peermem(&recorded.host()), Ok(expect), "{table}");
        };
        check(
            "nvidia 1 2 - Live\nnvidia_peermem 16384 0 - Live 0x0\n",
            true,
        );
        check("nv_peer_mem 16384 0 - Live 0x0\n", true);
        check("nvidia 56717312 5 nvidia_peermem_other, Live 0x0\n", false);
        check("", false);
        assert_eq!(
            has_peermem(&Recorded::new(&[]).host()),
            Err(Gap::NotSupported)
        );
    }

    #[test]
    fn the_manager_of_switches_is_looked_for_where_processes_are_seen() {
        let check = |recorded: Recorded, expect: Result<bool, Gap>| {
            assert_eq!(has_fabric_manager(&recorded.host()), expect);
        };
        let (first, other) = (
            ("/proc/1/comm", "systemd\n"),
            ("/proc/77/comm", "nv-fabricmanage\n"),
        );
        check(Recorded::new(&[first, other]), Ok(true));
        check(Recorded::new(&[first]), Ok(false));
        check(
            Recorded::new(&[("/proc/77/comm", "bash\n")]),
            Err(Gap::NoPermission),
        );
        check(Recorded::new(&[]), Err(Gap::NotSupported));
        let inside = Recorded::new(&[first]).linked(&[("/proc/self/ns/pid", "pid:[4026532201]")]);
        let words = "the host's processes are not seen from this container";
        check(inside, Err(Gap::other(words)));
        let outside = Recorded::new(&[first]).linked(&[("/proc/self/ns/pid", FIRST_NAMESPACE)]);
        check(outside, Ok(false));
    }
}
