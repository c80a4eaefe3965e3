//! Takes a snapshot of this machine.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::nvml;
use crate::places::Places;
use crate::snapshot::{Driver, Snapshot, System, VERSION};

/// Longest name of a machine that is believed; Linux knows 64 bytes.
const HOST_BYTES_MAX: u64 = 256;

/// Everything that driver and system say about this machine's devices now. What cannot be had is missing in it, and why is
/// said in its place. Rates over PCIe and NVLink are not read: they need two looks, see [`crate::sampler`].
///
/// *Cost* - some milliseconds a device, more where nothing keeps the devices awake, and six calls of microseconds for each
/// pair.
///
/// *Blocks* - as long as the driver does, with a broken one for ever; whoever cannot wait takes it on another thread.
pub fn take(places: &Places) -> Snapshot {
    let mut snapshot = Snapshot {
        paceline_snapshot: VERSION,
        taken_unix_s: unix_s(),
        host: host_name(&places.root),
        system: System::default(),
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

fn unix_s() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    // A clock before 1970 is not set.
    since.map_or(0, |since| since.as_secs())
}

fn host_name(root: &Path) -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = File::open(root.join("proc/sys/kernel/hostname")) {
        // What was read before an error is still a name, or nothing.
        let _ = file.take(HOST_BYTES_MAX).read_to_end(&mut bytes);
    }
    let name = String::from_utf8_lossy(&bytes);
    name.trim().chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::Trouble;

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
            Some(Trouble::NoLibrary(_))
        ));
        assert!(snapshot.devices.is_empty());
        let json = serde_json::to_vec(&snapshot).expect("encodes");
        assert_eq!(Snapshot::from_json(&json).expect("decodes"), snapshot);
    }
}
