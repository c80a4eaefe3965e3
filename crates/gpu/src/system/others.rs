//! GPUs of other makers than NVIDIA: AMD's by the files of its driver, the rest by name only.

use super::pci::{self, AMD, INTEL, NVIDIA};
use super::{line, number, text};
use crate::host::Host;
use crate::sample::DeviceSample;
use crate::snapshot::{Gap, Memory, OtherDevice, PciDevice, PciKind, Reading};

const DEVICES_MAX: usize = 64;
const NODES_MAX: usize = 256;
const KFD: &str = "/sys/class/kfd/kfd/topology/nodes";

/// In the order of addresses.
pub(super) fn read(host: &Host<'_>) -> Vec<OtherDevice> {
    let gpus = pci::read(host).into_iter();
    let gpus = gpus.filter(|device| device.kind == PciKind::Gpu && device.id.0 != NVIDIA);
    gpus.take(DEVICES_MAX)
        .zip(0..)
        .map(|(device, index)| other(host, device, index))
        .collect()
}

/// What one of them does now.
///
/// *Cost*: about ten small files; the driver asks the device for most of them.
pub(crate) fn sample(host: &Host<'_>, device: &OtherDevice) -> DeviceSample {
    let index = device.now.index;
    match device.maker == maker(AMD) {
        true => amd(host, &device.pci, index),
        false => unsupported(index),
    }
}

fn other(host: &Host<'_>, device: PciDevice, index: u32) -> OtherDevice {
    let mut other = OtherDevice {
        maker: maker(device.id.0),
        name: name(host, &device).ok_or(Gap::NotSupported).into(),
        pci: device.address,
        memory: Reading::missing(Gap::NotSupported),
        numa_node: device.numa_node,
        now: unsupported(index),
    };
    other.now = sample(host, &other);
    other.memory = other.now.memory.clone();
    other
}

/// *Source*: the PCI ID database, for makers of devices that compute.
fn maker(vendor: u16) -> String {
    match vendor {
        AMD => "AMD".to_owned(),
        INTEL => "Intel".to_owned(),
        0x1da3 => "Habana Labs".to_owned(),
        0x1e52 => "Tenstorrent".to_owned(),
        0x1ed2 => "FuriosaAI".to_owned(),
        0x1eff => "Rebellions".to_owned(),
        0x19e5 => "Huawei".to_owned(),
        0x1ae0 => "Google".to_owned(),
        0x1d0f => "Amazon".to_owned(),
        _ => format!("PCI vendor {vendor:04x}"),
    }
}

/// What AMD's driver calls it, which on older ones is the name of the chip only.
fn name(host: &Host<'_>, device: &PciDevice) -> Option<String> {
    let folder = pci::folder(&device.address);
    let (vendor, id) = device.id;
    line(host, &format!("{folder}/product_name"))
        .or_else(|| chip(host, &device.address))
        .or_else(|| Some(format!("PCI device {vendor:04x}:{id:04x}")))
}

/// The name in the table of ROCm's kernel driver, which knows devices by domain and bus.
fn chip(host: &Host<'_>, address: &str) -> Option<String> {
    let place = location(address)?;
    let nodes = host.names(KFD, NODES_MAX).ok()?;
    nodes.iter().find_map(|node| {
        let table = text(host, &format!("{KFD}/{node}/properties"), 16 << 10).ok()?;
        let property = |name: &str| -> Option<u32> {
            let mut lines = table.lines();
            lines.find_map(|line| {
                line.strip_prefix(name)?
                    .strip_prefix(' ')?
                    .trim()
                    .parse()
                    .ok()
            })
        };
        let is_it = (property("domain").unwrap_or(0), property("location_id")?) == place;
        let name = line(host, &format!("{KFD}/{node}/name")).filter(|_| is_it)?;
        Some(name)
    })
}

/// Domain, and bus with device and function in one number.
fn location(address: &str) -> Option<(u32, u32)> {
    let mut parts = address.split([':', '.']);
    let mut next = || u32::from_str_radix(parts.next()?, 16).ok();
    let (domain, bus, device, function) = (next()?, next()?, next()?, next()?);
    Some((domain, bus << 8 | device << 3 | function))
}

/// No reading is available.
fn unsupported(index: u32) -> DeviceSample {
    DeviceSample::missing(index, &Gap::NotSupported)
}

/// *Source*: the Linux kernel's documentation of amdgpu (`mem_info_*`, `gpu_busy_percent`) and of hwmon, whose units are
/// microwatts, thousandths of a degree and Hz. `pcie_bw` is left alone: reading it takes a second.
fn amd(host: &Host<'_>, address: &str, index: u32) -> DeviceSample {
    let folder = pci::folder(address);
    let own = |file: &str| number(host, &format!("{folder}/{file}"));
    let sensors = host
        .names(&format!("{folder}/hwmon"), 8)
        .unwrap_or_default();
    let sensors = sensors.iter().find(|name| name.starts_with("hwmon"));
    // The first of these files that is there, in a unit so many times larger.
    let sensor = |files: &[&str], unit: u64| -> Reading<u32> {
        let mut last = Gap::NotSupported;
        for file in files {
            let Some(sensors) = sensors else { break };
            match own(&format!("hwmon/{sensors}/{file}")) {
                Ok(value) => return u32::try_from(value / unit).map_err(Gap::other).into(),
                Err(gap) => last = gap,
            }
        }
        Reading::missing(last)
    };
    let percent = |file| own(file).map(|percent| percent.min(100) as u32);
    let memory = own("mem_info_vram_used").and_then(|used_bytes| {
        let total_bytes = own("mem_info_vram_total")?;
        Ok(Memory {
            used_bytes,
            total_bytes,
        })
    });
    DeviceSample {
        utilization_percent: percent("gpu_busy_percent").into(),
        memory_utilization_percent: percent("mem_busy_percent").into(),
        memory: memory.into(),
        power_mw: sensor(&["power1_average", "power1_input"], 1000),
        power_limit_mw: sensor(&["power1_cap"], 1000),
        // Newer boards measure at the junction only.
        temperature_c: sensor(&["temp1_input", "temp2_input"], 1000),
        sm_clock_mhz: sensor(&["freq1_input"], 1_000_000),
        memory_clock_mhz: sensor(&["freq2_input"], 1_000_000),
        ..unsupported(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::recorded::Recorded;

    fn machine(vendor: &str, files: &[(&str, &str)]) -> Recorded {
        let folder = "/sys/devices/pci0000:c0/0000:c1:00.0";
        let mut all = vec![
            (format!("{folder}/class"), "0x120000\n"),
            (format!("{folder}/vendor"), vendor),
            (format!("{folder}/device"), "0x74a1\n"),
            (format!("{folder}/numa_node"), "3\n"),
        ];
        for (path, text) in files {
            let path = match path.starts_with('/') {
                true => (*path).to_owned(),
                false => format!("{folder}/{path}"),
            };
            all.push((path, text));
        }
        let all: Vec<(&str, &str)> = all.iter().map(|(p, t)| (p.as_str(), *t)).collect();
        Recorded::new(&all).linked(&[(
            "/sys/bus/pci/devices/0000:c1:00.0",
            "../../../devices/pci0000:c0/0000:c1:00.0",
        )])
    }

    #[test]
    fn amds_devices_tell_what_their_driver_knows() {
        let recorded = machine(
            "0x1002\n",
            &[
                ("mem_info_vram_total", "206141652992\n"),
                ("mem_info_vram_used", "1000\n"),
                ("gpu_busy_percent", "97\n"),
                ("hwmon/hwmon4/power1_input", "750000000\n"),
                ("hwmon/hwmon4/power1_cap", "1000000000\n"),
                ("hwmon/hwmon4/temp2_input", "71000\n"),
                ("hwmon/hwmon4/freq1_input", "2100000000\n"),
                (
                    "/sys/class/kfd/kfd/topology/nodes/0/properties",
                    "location_id 0\n",
                ),
                (
                    "/sys/class/kfd/kfd/topology/nodes/2/properties",
                    "domain 0\nlocation_id 49408\n",
                ),
                ("/sys/class/kfd/kfd/topology/nodes/2/name", "ip_discovery\n"),
            ],
        );
        let found = read(&recorded.host());
        let [device] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!(
            (device.maker.as_str(), device.pci.as_str()),
            ("AMD", "0000:c1:00.0")
        );
        assert_eq!(device.name, Reading::Known("ip_discovery".to_owned()));
        assert_eq!(device.numa_node, Reading::Known(3));
        assert_eq!(
            device.memory.known().map(|memory| memory.total_bytes),
            Some(206_141_652_992)
        );
        let now = &device.now;
        let found = [
            &now.utilization_percent,
            &now.memory_utilization_percent,
            &now.power_mw,
            &now.power_limit_mw,
            &now.temperature_c,
            &now.sm_clock_mhz,
        ];
        let expect = [
            Some(97),
            None,
            Some(750_000),
            Some(1_000_000),
            Some(71),
            Some(2100),
        ];
        assert_eq!(found.map(|reading| reading.known().copied()), expect);
        assert_eq!(now.energy_mj.gap(), Some(&Gap::NotSupported));
    }

    #[test]
    fn a_name_of_the_product_is_preferred() {
        let recorded = machine("0x1002\n", &[("product_name", "AMD Instinct MI300X\n")]);
        let name = read(&recorded.host())[0].name.clone();
        assert_eq!(name, Reading::Known("AMD Instinct MI300X".to_owned()));
    }

    #[test]
    fn other_makers_are_named_and_no_more() {
        for (vendor, expect) in [
            ("0x8086\n", "Intel"),
            ("0x1da3\n", "Habana Labs"),
            ("0xabcd\n", "PCI vendor abcd"),
        ] {
            let recorded = machine(vendor, &[("gpu_busy_percent", "97\n")]);
            let found = read(&recorded.host());
            assert_eq!(found[0].maker, expect);
            assert_eq!(found[0].now, unsupported(0));
            assert!(
                found[0]
                    .name
                    .known()
                    .is_some_and(|name| name.ends_with(":74a1"))
            );
        }
        assert_eq!(read(&machine("0x10de\n", &[]).host()), []);
    }

    #[test]
    fn numbers_that_make_no_sense_leave_gaps() {
        let recorded = machine(
            "0x1002\n",
            &[
                ("gpu_busy_percent", "999\n"),
                ("mem_info_vram_used", "many\n"),
                ("hwmon/hwmon0/temp1_input", "-5000\n"),
                ("hwmon/hwmon0/power1_average", "18446744073709551615\n"),
            ],
        );
        let now = &read(&recorded.host())[0].now;
        assert_eq!(now.utilization_percent, Reading::Known(100));
        assert!(now.memory.gap().is_some());
        assert!(now.temperature_c.gap().is_some());
        assert!(now.power_mw.gap().is_some());
    }
}
