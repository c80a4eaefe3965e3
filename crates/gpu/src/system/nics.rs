//! Network cards: those that do RDMA, and plain interfaces.

use super::pci::address_in;
use super::{gap, line, numa_node, number, try_line};
use crate::host::Host;
use crate::snapshot::{Gap, Nic};

const RDMA: &str = "/sys/class/infiniband";
const NET: &str = "/sys/class/net";
const RDMA_MAX: usize = 256;
/// A machine full of containers has an interface for each.
const NET_MAX: usize = 4096;
const PORTS_MAX: usize = 16;
/// Virtual interfaces that are shown where there is no card.
const VIRTUAL_MAX: usize = 16;

/// RDMA devices, then interfaces of other cards. Interfaces without a card count only where there is none: a container's
/// are of this kind.
pub(super) fn read(host: &Host<'_>) -> Vec<Nic> {
    let mut nics: Vec<Nic> = host
        .names(RDMA, RDMA_MAX)
        .unwrap_or_default()
        .iter()
        .map(|name| rdma(host, name))
        .collect();
    let mut cards = Vec::new();
    let mut virtual_ones = Vec::new();
    for name in host.names(NET, NET_MAX).unwrap_or_default() {
        let is_known = nics.iter().any(|nic| nic.interfaces.contains(&name));
        if is_known || is_loopback(host, &name) {
            continue;
        }
        match host.has(&format!("{NET}/{name}/device")) {
            true => cards.push(plain_one(host, &name)),
            false if virtual_ones.len() < VIRTUAL_MAX => virtual_ones.push(plain_one(host, &name)),
            false => {}
        }
    }
    nics.extend(cards);
    if nics.is_empty() { virtual_ones } else { nics }
}

fn rdma(host: &Host<'_>, name: &str) -> Nic {
    let folder = format!("{RDMA}/{name}");
    let device = format!("{folder}/device");
    let ports = host.names(&format!("{folder}/ports"), PORTS_MAX);
    let states: Result<Vec<(bool, u64)>, Gap> =
        ports.map_err(|error| gap(&error)).and_then(|ports| {
            let port = |port: &String| port_state(host, &format!("{folder}/ports/{port}"));
            ports.iter().map(port).collect()
        });
    let is_up = |states: &Vec<(bool, u64)>| states.iter().any(|(is_up, _)| *is_up);
    // Of several ports the fastest that is up; a card whose ports are all down says what they could do.
    let speed = |states: &Vec<(bool, u64)>| {
        let states = states.iter().max();
        states.map(|(_, speed)| *speed).filter(|speed| *speed > 0)
    };
    Nic {
        name: name.to_owned(),
        interfaces: host
            .names(&format!("{device}/net"), PORTS_MAX)
            .unwrap_or_default(),
        pci: pci_of(host, &folder),
        is_rdma: true,
        is_up: states.as_ref().map(is_up).map_err(Clone::clone).into(),
        speed_mbps: states
            .and_then(|states| speed(&states).ok_or(Gap::NotSupported))
            .into(),
        numa_node: numa_node(host, &device),
    }
}

/// Whether a port is up, and its speed in megabits per second: `4: ACTIVE` and `400 Gb/sec (4X NDR)`.
fn port_state(host: &Host<'_>, folder: &str) -> Result<(bool, u64), Gap> {
    let state = try_line(host, &format!("{folder}/state"))?;
    let rate = line(host, &format!("{folder}/rate")).unwrap_or_default();
    let gigabits = rate.split_whitespace().next();
    let gigabits: Option<f64> = gigabits.and_then(|number| number.parse().ok());
    // 2.5 is a speed; what is no number, or none that a link has, is not known.
    let mbps = gigabits.filter(|gigabits| (0.0..1e6).contains(gigabits));
    let mbps = mbps.map_or(0, |gigabits| (gigabits * 1000.0) as u64);
    Ok((state.contains("ACTIVE"), mbps))
}

fn plain_one(host: &Host<'_>, name: &str) -> Nic {
    let folder = format!("{NET}/{name}");
    Nic {
        name: name.to_owned(),
        interfaces: Vec::new(),
        pci: pci_of(host, &folder),
        is_rdma: false,
        is_up: is_up(host, &folder).into(),
        speed_mbps: speed(host, &folder).into(),
        numa_node: numa_node(host, &format!("{folder}/device")),
    }
}

fn is_up(host: &Host<'_>, folder: &str) -> Result<bool, Gap> {
    match try_line(host, &format!("{folder}/operstate"))?.as_str() {
        "up" => Ok(true),
        // Drivers that do not tell; whether there is a carrier is known where the interface was brought up.
        "unknown" => Ok(number(host, &format!("{folder}/carrier")) == Ok(1)),
        _ => Ok(false),
    }
}

/// -1 where the driver does not know, and an error while the interface is down.
fn speed(host: &Host<'_>, folder: &str) -> Result<u64, Gap> {
    number(host, &format!("{folder}/speed"))
        .ok()
        .filter(|speed| (1..u64::from(u32::MAX)).contains(speed))
        .ok_or(Gap::NotSupported)
}

/// *Source*: `ARPHRD_LOOPBACK`.
fn is_loopback(host: &Host<'_>, name: &str) -> bool {
    name == "lo" || number(host, &format!("{NET}/{name}/type")) == Ok(772)
}

/// The card's place: in the link of its folder, or where that is none in that of its device.
fn pci_of(host: &Host<'_>, folder: &str) -> Option<String> {
    let links = [folder.to_owned(), format!("{folder}/device")];
    links.iter().find_map(|link| address_in(&host.link(link)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::recorded::Recorded;
    use crate::snapshot::Reading;

    /// Name, interfaces, place, whether it does RDMA, whether it is up, speed.
    type Short<'a> = (
        &'a str,
        &'a [&'a str],
        Option<&'a str>,
        bool,
        Option<bool>,
        Option<u64>,
    );

    fn check(recorded: &Recorded, expect: &[Short<'_>]) {
        let nics = read(&recorded.host());
        let names: Vec<Vec<&str>> = nics
            .iter()
            .map(|nic| nic.interfaces.iter().map(String::as_str).collect())
            .collect();
        let found: Vec<Short<'_>> = nics
            .iter()
            .zip(&names)
            .map(|(nic, interfaces)| {
                (
                    nic.name.as_str(),
                    &interfaces[..],
                    nic.pci.as_deref(),
                    nic.is_rdma,
                    nic.is_up.known().copied(),
                    nic.speed_mbps.known().copied(),
                )
            })
            .collect();
        assert_eq!(found, expect);
    }

    #[test]
    fn rdma_devices_own_their_interfaces() {
        let card = "/sys/devices/pci0000:17/0000:17:01.0/0000:18:00.0";
        let files = [
            ("infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n"),
            ("infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n"),
            ("infiniband/mlx5_0/ports/2/state", "1: DOWN\n"),
            ("infiniband/mlx5_0/ports/2/rate", "2.5 Gb/sec (1X SDR)\n"),
            ("net/ib0/operstate", "up\n"),
            ("numa_node", "1\n"),
        ];
        let files: Vec<(String, &str)> = files
            .iter()
            .map(|(path, text)| (format!("{card}/{path}"), *text))
            .collect();
        let files: Vec<(&str, &str)> = files.iter().map(|(p, t)| (p.as_str(), *t)).collect();
        let recorded = Recorded::new(&files).linked(&[
            (
                "/sys/class/infiniband/mlx5_0",
                "../../devices/pci0000:17/0000:17:01.0/0000:18:00.0/infiniband/mlx5_0",
            ),
            (
                "/sys/devices/pci0000:17/0000:17:01.0/0000:18:00.0/infiniband/mlx5_0/device",
                "../../../0000:18:00.0",
            ),
            (
                "/sys/class/net/ib0",
                "../../devices/pci0000:17/0000:17:01.0/0000:18:00.0/net/ib0",
            ),
        ]);
        let place = Some("0000:18:00.0");
        check(
            &recorded,
            &[("mlx5_0", &["ib0"], place, true, Some(true), Some(400_000))],
        );
        let nic = &read(&recorded.host())[0];
        assert_eq!(nic.numa_node, Reading::Known(1));
    }

    #[test]
    fn plain_cards_hide_virtual_interfaces() {
        let recorded = Recorded::new(&[
            (
                "/sys/devices/pci0000:00/0000:00:03.0/virtio0/net/eth0/operstate",
                "up\n",
            ),
            (
                "/sys/devices/pci0000:00/0000:00:03.0/virtio0/net/eth0/speed",
                "-1\n",
            ),
            (
                "/sys/devices/pci0000:00/0000:00:03.0/virtio0/net/eth0/device/x",
                "",
            ),
            ("/sys/class/net/docker0/operstate", "down\n"),
            ("/sys/class/net/lo/operstate", "unknown\n"),
        ])
        .linked(&[(
            "/sys/class/net/eth0",
            "../../devices/pci0000:00/0000:00:03.0/virtio0/net/eth0",
        )]);
        check(
            &recorded,
            &[("eth0", &[], Some("0000:00:03.0"), false, Some(true), None)],
        );
    }

    #[test]
    fn a_container_shows_what_it_has() {
        let recorded = Recorded::new(&[
            ("/sys/class/net/eth0/operstate", "unknown\n"),
            ("/sys/class/net/eth0/carrier", "1\n"),
            ("/sys/class/net/eth0/speed", "10000\n"),
            ("/sys/class/net/dummy/type", "772\n"),
            ("/sys/class/net/lo/operstate", "unknown\n"),
        ]);
        check(
            &recorded,
            &[("eth0", &[], None, false, Some(true), Some(10_000))],
        );
    }

    #[test]
    fn odd_files_leave_gaps() {
        let recorded = Recorded::new(&[
            ("/sys/class/infiniband/mlx5_0/ports/1/state", "\n"),
            ("/sys/class/infiniband/mlx5_0/ports/1/rate", "1e99 Gb/sec\n"),
            ("/sys/class/infiniband/mlx5_1/x", ""),
        ]);
        check(
            &recorded,
            &[
                ("mlx5_0", &[], None, true, Some(false), None),
                ("mlx5_1", &[], None, true, None, None),
            ],
        );
    }
}
