//! Looks at the devices: names once, what they do each time.

use std::time::Duration;

use paceline_gpu::places::Places;
use paceline_gpu::sampler::Sampler;
use paceline_gpu::snapshot::{Device as Described, Snapshot};

use super::{Device, Devices};

/// How long a driver that was not there is left alone; it may be loaded later.
const RETRY_PAUSE: Duration = Duration::from_secs(10);

/// Follows the devices of a machine.
#[derive(Debug)]
pub(super) struct DeviceWatch {
    places: Places,
    open: Option<Open>,
    retry_at: Duration,
}

#[derive(Debug)]
struct Open {
    sampler: Sampler,
    snapshot: Snapshot,
}

impl DeviceWatch {
    pub(super) fn new(places: Places) -> Self {
        Self {
            places,
            open: None,
            retry_at: Duration::ZERO,
        }
    }

    /// The devices now.
    ///
    /// *Blocks*: as long as the driver does.
    pub(super) fn look(&mut self, at: Duration) -> Devices {
        let is_in_trouble = |open: &Open| open.sampler.trouble().is_some();
        if self.open.as_ref().is_none_or(is_in_trouble) && at >= self.retry_at {
            self.retry_at = at + RETRY_PAUSE;
            self.open = Some(Open {
                sampler: Sampler::open(&self.places),
                snapshot: paceline_gpu::take(&self.places),
            });
        }
        let Some(open) = &mut self.open else {
            return Devices::default();
        };
        let sample = open.sampler.sample(at);
        let snapshot = &open.snapshot;
        let of_index = |index| snapshot.devices.iter().find(|device| device.index == index);
        let nobody = Described::default();
        let described = |now: paceline_gpu::sample::DeviceSample| {
            let device = of_index(now.index).unwrap_or(&nobody);
            Device {
                name: device.name.clone(),
                uuid: device.uuid.clone(),
                now,
            }
        };
        Devices {
            at,
            host: snapshot.host.clone(),
            driver: snapshot.driver.version.known().cloned(),
            trouble: open.sampler.trouble().map(ToString::to_string),
            devices: sample.into_iter().map(described).collect(),
        }
    }
}
