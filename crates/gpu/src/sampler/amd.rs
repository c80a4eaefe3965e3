//! AMD's devices, by the files of their driver.

use std::time::Duration;

use crate::host::Host;
use crate::places::Places;
use crate::sample::DeviceSample;
use crate::snapshot::OtherDevice;
use crate::system::{self, others};

/// How long a reading holds: for most files the driver asks the device.
const PAUSE: Duration = Duration::from_millis(500);

/// Reads what AMD's devices do. They are numbered in the order of their addresses.
#[derive(Debug, Default)]
pub struct AmdSampler {
    places: Places,
    devices: Vec<OtherDevice>,
    due: Duration,
}

impl AmdSampler {
    /// Finds the devices below the root of `places`.
    pub fn open(places: &Places) -> Self {
        let mut devices = system::others(&Host::new(&places.root, &|_| None));
        devices.retain(|device| device.maker == "AMD");
        for (device, index) in devices.iter_mut().zip(0..) {
            device.now.index = index;
        }
        Self {
            places: places.clone(),
            devices,
            due: Duration::ZERO,
        }
    }

    /// Whether there are no devices.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// What the devices do now, `at` this time since sampling began.
    ///
    /// *Cost*: about ten small files a device, twice a second at most.
    pub fn sample(&mut self, at: Duration) -> impl Iterator<Item = DeviceSample> + '_ {
        if at >= self.due {
            self.due = at.saturating_add(PAUSE);
            let host = Host::new(&self.places.root, &|_| None);
            for device in &mut self.devices {
                device.now = others::sample(&host, device);
            }
        }
        self.devices.iter().map(|device| device.now.clone())
    }
}
