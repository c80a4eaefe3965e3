//! Recorded buses.

use super::*;
use crate::host::recorded::Recorded;

const HOST_BRIDGE: &str = "/sys/devices/pci0000:17";

/// A GPU and a network card below a switch, and a card of its own below the other socket.
fn board() -> Recorded {
    let mut files: Vec<(String, &str)> = Vec::new();
    let mut add = |place: &str, lines: &[(&'static str, &'static str)]| {
        for (file, line) in lines {
            files.push((format!("{HOST_BRIDGE}/{place}/{file}"), *line));
        }
    };
    let bridge = [
        ("class", "0x060400\n"),
        ("vendor", "0x1000\n"),
        ("device", "0xc030\n"),
    ];
    let port = "0000:17:01.0";
    let up = "0000:17:01.0/0000:18:00.0";
    let (down_0, down_1) = (format!("{up}/0000:19:00.0"), format!("{up}/0000:19:01.0"));
    for place in [port, up, &down_0, &down_1] {
        add(place, &bridge);
    }
    add(
        &format!("{down_0}/0000:1a:00.0"),
        &[
            ("class", "0x030200\n"),
            ("vendor", "0x10de\n"),
            ("device", "0x2330\n"),
            ("current_link_speed", "2.5 GT/s PCIe\n"),
            ("max_link_speed", "32.0 GT/s PCIe\n"),
            ("current_link_width", "4\n"),
            ("max_link_width", "16\n"),
            ("numa_node", "1\n"),
            ("local_cpulist", "0-3\n"),
        ],
    );
    add(
        &format!("{down_1}/0000:1b:00.0"),
        &[
            ("class", "0x020700\n"),
            ("vendor", "0x15b3\n"),
            ("numa_node", "-1\n"),
            ("current_link_speed", "Unknown\n"),
            ("max_link_speed", "Unknown\n"),
            ("current_link_width", "0\n"),
            ("max_link_width", "255\n"),
        ],
    );
    add(
        "0000:17:1f.0",
        &[("class", "0x060100\n"), ("vendor", "0x8086\n")],
    );
    let files: Vec<(&str, &str)> = files.iter().map(|(p, t)| (p.as_str(), *t)).collect();
    let target = |place: &str| format!("../../../devices/pci0000:17/{place}");
    let places = [
        port.to_owned(),
        up.to_owned(),
        down_0.clone(),
        down_1.clone(),
        format!("{down_0}/0000:1a:00.0"),
        format!("{down_1}/0000:1b:00.0"),
        "0000:17:1f.0".to_owned(),
    ];
    let mut links: Vec<(String, String)> = places
        .iter()
        .map(|place| {
            (
                folder(place.rsplit('/').next().expect("a name")),
                target(place),
            )
        })
        .collect();
    links.push((
        format!("{HOST_BRIDGE}/{down_0}/0000:1a:00.0/driver"),
        "../../bus/pci/drivers/nvidia".to_owned(),
    ));
    links.push((
        format!("{HOST_BRIDGE}/{down_0}/0000:1a:00.0/iommu_group"),
        "../../kernel/iommu_groups/42".to_owned(),
    ));
    let links: Vec<(&str, &str)> = links
        .iter()
        .map(|(p, t)| (p.as_str(), t.as_str()))
        .collect();
    Recorded::new(&files).linked(&links)
}

#[test]
fn devices_that_matter_are_found_with_the_bridges_above_them() {
    let board = board();
    let found = read(&board.host());
    let short: Vec<(&str, Option<&str>, PciKind)> = found
        .iter()
        .map(|device| {
            (
                device.address.as_str(),
                device.parent.as_deref(),
                device.kind,
            )
        })
        .collect();
    let expect = [
        ("0000:17:01.0", None, PciKind::Bridge),
        ("0000:18:00.0", Some("0000:17:01.0"), PciKind::Bridge),
        ("0000:19:00.0", Some("0000:18:00.0"), PciKind::Bridge),
        ("0000:19:01.0", Some("0000:18:00.0"), PciKind::Bridge),
        ("0000:1a:00.0", Some("0000:19:00.0"), PciKind::Gpu),
        ("0000:1b:00.0", Some("0000:19:01.0"), PciKind::Nic),
    ];
    assert_eq!(short, expect);
    assert!(found.iter().all(|device| device.root == "pci0000:17"));
    assert_eq!(found[0].acs_redirects.gap(), Some(&Gap::NotSupported));
}

#[test]
fn a_device_tells_what_it_knows() {
    let board = board();
    let found = read(&board.host());
    let [.., gpu, nic] = &found[..] else {
        panic!("{found:?}");
    };
    let link = PcieLink {
        generation: 1,
        generation_max: 5,
        lanes: 4,
        lanes_max: 16,
    };
    assert_eq!(gpu.link, Reading::Known(link));
    assert_eq!(gpu.id, (NVIDIA, 0x2330));
    assert_eq!(gpu.driver.as_deref(), Some("nvidia"));
    assert_eq!(gpu.iommu_group, Reading::Known(42));
    assert_eq!(gpu.numa_node, Reading::Known(1));
    assert_eq!(gpu.cpus, Reading::Known(vec![0, 1, 2, 3]));
    assert_eq!(nic.link.gap(), Some(&Gap::NotSupported));
    assert_eq!(nic.numa_node.gap(), Some(&Gap::NotSupported));
    assert_eq!((nic.driver.as_deref(), nic.id), (None, (0x15b3, 0)));
}

#[test]
fn a_bridge_tells_whether_it_redirects() {
    let board = board();
    let mut config = vec![0_u8; 4096];
    config[0x100..0x104].copy_from_slice(&0x0001_000d_u32.to_le_bytes());
    config[0x106] = 0x1d;
    let path = board
        .host()
        .path("/sys/bus/pci/devices/0000:19:00.0/config");
    std::fs::write(path, config).expect("written");
    let path = board
        .host()
        .path("/sys/bus/pci/devices/0000:19:01.0/config");
    std::fs::write(path, [0; 64]).expect("written");
    let found = read(&board.host());
    let acs: Vec<&Reading<bool>> = found.iter().map(|device| &device.acs_redirects).collect();
    assert_eq!(acs[2], &Reading::Known(true));
    assert_eq!(acs[3], &Reading::missing(Gap::NoPermission));
}

#[test]
fn kinds_follow_class_and_maker() {
    let check = |class: u32, vendor: u16, expect: Option<PciKind>| {
        assert_eq!(kind_of(class, vendor), expect, "{class:06x} {vendor:04x}");
    };
    check(0x03_00_00, NVIDIA, Some(PciKind::Gpu));
    check(0x03_02_00, NVIDIA, Some(PciKind::Gpu));
    check(0x03_80_00, AMD, Some(PciKind::Gpu));
    check(0x12_00_00, AMD, Some(PciKind::Gpu));
    check(0x12_00_00, 0x1da3, Some(PciKind::Gpu));
    check(0x03_00_00, 0x1a03, None);
    check(0x06_80_00, NVIDIA, Some(PciKind::NvSwitch));
    check(0x06_80_00, INTEL, None);
    check(0x02_00_00, 0x1af4, Some(PciKind::Nic));
    check(0x04_03_00, NVIDIA, None);
    check(0x06_04_00, NVIDIA, None);
}

#[test]
fn places_are_read_from_links_and_nonsense_leaves_the_device_alone() {
    let check = |target: Option<&str>, root: &str, chain: &[&str]| {
        let links = target.map(|target| ("/sys/bus/pci/devices/10000:e1:00.0", target));
        let recorded = Recorded::new(&[]).linked(links.as_slice());
        let place = place(&recorded.host(), "10000:e1:00.0");
        assert_eq!(
            (place.root.as_str(), &place.chain[..]),
            (
                root,
                &chain.iter().map(|c| (*c).to_owned()).collect::<Vec<_>>()[..]
            )
        );
    };
    // A controller that makes a domain of its own.
    check(
        Some("../../../devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0"),
        "pci10000:e0",
        &["10000:e0:06.0", "10000:e1:00.0"],
    );
    check(
        Some("../../../devices/LNXSYSTM:00/VMBUS:00/47505500/pci10000:e1/10000:e1:00.0"),
        "pci10000:e1",
        &["10000:e1:00.0"],
    );
    check(None, "", &["10000:e1:00.0"]);
    check(Some("../../.."), "", &["10000:e1:00.0"]);
    check(Some("/etc/passwd"), "", &["10000:e1:00.0"]);
    check(
        Some("../pci0000:00/0000:00:01.0"),
        "pci0000:00",
        &["10000:e1:00.0"],
    );
}

#[test]
fn addresses_speeds_and_widths_are_read_as_the_kernel_writes_them() {
    for (name, expect) in [
        ("0000:18:00.0", true),
        ("10000:e1:00.0", true),
        ("0000:18:00", false),
        ("0000:18.00:0", false),
        ("0000:18:00.0.0", false),
        ("pci0000:18", false),
        ("..", false),
        ("", false),
    ] {
        assert_eq!(is_address(name), expect, "{name}");
    }
    for (text, expect) in [
        ("2.5 GT/s PCIe\n", 1),
        ("5 GT/s\n", 2),
        ("8.0 GT/s PCIe\n", 3),
        ("16.0 GT/s PCIe\n", 4),
        ("32.0 GT/s PCIe\n", 5),
        ("64.0 GT/s PCIe\n", 6),
        ("Unknown\n", 0),
        ("", 0),
    ] {
        assert_eq!(generation(text), expect, "{text:?}");
    }
    for (text, expect) in [("16\n", 16), ("0\n", 0), ("255\n", 0), ("-1\n", 0)] {
        assert_eq!(lanes(text), expect, "{text:?}");
    }
}
