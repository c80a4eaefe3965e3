//! Looks at the devices: names once, what they do each time.

use std::time::Duration;

use paceline_gpu::places::Places;
use paceline_gpu::sample::DeviceSample;
use paceline_gpu::sampler::Sampler;
use paceline_gpu::snapshot::{Device as Described, Snapshot};
use paceline_usage::Rules;
use paceline_usage::idle::{IdleWatch, Idleness};

use super::{Device, Devices};

/// How long a driver that was not there is left alone; it may be loaded later.
const RETRY_PAUSE: Duration = Duration::from_secs(10);

/// Follows the devices of a machine.
#[derive(Debug)]
pub(super) struct DeviceWatch {
    places: Places,
    open: Option<Open>,
    idle: IdleWatch,
    retry_at: Duration,
}

#[derive(Debug)]
struct Open {
    sampler: Sampler,
    snapshot: Snapshot,
}

impl DeviceWatch {
    /// Looks that come at this interval.
    pub(super) fn new(places: Places, interval: Duration) -> Self {
        Self {
            places,
            open: None,
            idle: IdleWatch::new(Rules::default(), interval),
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
        let idleness = self.idle.see(at, &sample);
        let described = |(now, idleness): (DeviceSample, Option<Idleness>)| {
            let device = of_index(now.index).unwrap_or(&nobody);
            Device {
                name: device.name.clone(),
                uuid: device.uuid.clone(),
                idleness,
                now,
            }
        };
        Devices {
            at,
            host: snapshot.host.clone(),
            driver: snapshot.driver.version.known().cloned(),
            trouble: open.sampler.trouble().map(ToString::to_string),
            devices: sample.into_iter().zip(idleness).map(described).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use paceline_fake_nvml::Fixture;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_device_that_is_held_and_one_that_nobody_takes_are_told_after_ten_seconds() {
        let fixture = Fixture::open("nvswitch-8");
        let mut machine = fixture.json();
        for device in machine["devices"].as_array_mut().expect("devices") {
            device["utilization"] = json!([99, 50]);
        }
        machine["common"]["memory"] = json!({"total_mib": 81559, "used_mib": 500});
        machine["devices"][3]["utilization"] = json!([0, 0]);
        machine["devices"][5]["utilization"] = json!([0, 0]);
        machine["devices"][5]["compute"] = json!([]);
        fixture.load(&machine);
        let places = Places {
            library: Some(fixture.library().into()),
            root: fixture.root().into(),
        };
        let mut watch = DeviceWatch::new(places, Duration::from_secs(1));
        let mut look = |second| {
            let devices = watch.look(Duration::from_secs(second)).devices;
            let of = |is_it: fn(Idleness) -> bool| -> Vec<u32> {
                let found = devices.iter().filter(|d| d.idleness.is_some_and(is_it));
                found.map(|device| device.now.index).collect()
            };
            (of(|idle| idle.held_idle), of(|idle| idle.unused))
        };
        for second in 0..10 {
            assert_eq!(look(second), (vec![], vec![]), "second {second}");
        }
        assert_eq!(look(10), (vec![3], vec![5]));
    }
}
