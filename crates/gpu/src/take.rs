//! Takes a snapshot of this machine.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::host::Host;
use crate::nvml;
use crate::places::Places;
use crate::snapshot::{Device, Driver, Reading, Snapshot, VERSION};
use crate::system::{self, holders};
use paceline_words::plain;

/// Longest name of a machine; Linux knows 64 bytes.
const HOST_CHARS_MAX: usize = 64;

/// Most processes that are looked up, some files each.
const HOLDERS_MAX: usize = 4096;

/// Everything that driver and system say about this machine's devices now. What cannot be had is missing in it, and why is
/// said in its place. Rates over PCIe and NVLink are not read: they need two looks, see [`crate::sampler`].
///
/// *Cost*: some milliseconds a device, more where nothing keeps the devices awake, and six calls of microseconds for each
/// pair.
///
/// *Blocks*: as long as the driver does, with a broken one forever; take it on another thread where that matters.
pub fn take(places: &Places) -> Snapshot {
    let variable = |name: &str| std::env::var(name).ok();
    let host = Host::new(&places.root, &variable);
    let name = host.text("/proc/sys/kernel/hostname").unwrap_or_default();
    let mut snapshot = Snapshot {
        paceline_snapshot: VERSION,
        taken_unix_s: unix_s(),
        host: plain(name.trim(), HOST_CHARS_MAX),
        others: system::others(&host),
        system: system::read(&host),
        ..Snapshot::default()
    };
    match nvml::open(places) {
        Ok(library) => {
            snapshot.driver = nvml::driver(&library);
            let indexes = 0..library.count();
            snapshot.devices = indexes
                .map(|index| nvml::read_device(&library, index))
                .collect();
            snapshot.links = nvml::read_links(&library);
            describe_holders(&host, &mut snapshot.devices);
        }
        Err(trouble) => {
            snapshot.driver = Driver {
                trouble: Some(trouble),
                ..Driver::default()
            };
        }
    }
    snapshot
}

fn describe_holders(host: &Host<'_>, devices: &mut [Device]) {
    let lists = devices
        .iter_mut()
        .filter_map(|device| match &mut device.processes {
            Reading::Known(holders) => Some(holders),
            Reading::Missing { .. } => None,
        });
    for holder in lists.flatten().take(HOLDERS_MAX) {
        holders::describe(host, holder);
    }
}

fn unix_s() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    // A clock before 1970 is not set.
    since.map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::DriverError;

    #[test]
    fn a_machine_without_a_driver_has_a_snapshot_too() {
        let places = Places {
            library: Some("/nowhere/libnvidia-ml.so.1".into()),
            ..Places::default()
        };
        let snapshot = take(&places);
        assert_eq!(snapshot.paceline_snapshot, VERSION);
        assert!(matches!(
            snapshot.driver.trouble,
            Some(DriverError::NoLibrary(_))
        ));
        assert!(snapshot.devices.is_empty());
        let json = serde_json::to_vec(&snapshot).expect("encodes");
        assert_eq!(Snapshot::from_json(&json).expect("decodes"), snapshot);
    }
}
