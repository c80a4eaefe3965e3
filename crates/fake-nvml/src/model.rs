//! What a fixture's `nvml.json` may say. Whatever it leaves out is answered with `NOT_SUPPORTED`.

mod answer;
mod device;
mod pairs;

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

pub(crate) use self::answer::{Answer, Code, Text};
pub(crate) use self::device::{Device, MigDevice, Process};
pub(crate) use self::pairs::{Pairs, level, p2p_status};

/// What peer-to-peer is asked for, in NVML's order; `all` stands for those that are not given.
pub(crate) const CAPABILITIES: [&str; 6] = ["read", "write", "nvlink", "atomics", "pcie", "all"];

/// A machine as its driver describes it.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Machine {
    pub(crate) driver: Answer<Text>,
    pub(crate) nvml: Answer<Text>,
    pub(crate) cuda: Answer<(u32, u32)>,
    /// Number of devices, where it is not that of `devices`.
    pub(crate) count: Option<Answer<u32>>,
    /// What all devices have in common.
    pub(crate) common: Map<String, Value>,
    /// Each device: fields of [`Device`] over those in common.
    pub(crate) devices: Vec<Map<String, Value>>,
    pub(crate) p2p: BTreeMap<String, Pairs>,
    pub(crate) ancestors: Pairs,
    /// Functions that fail, `*` for all.
    pub(crate) fail: BTreeMap<String, Failure>,
    /// Functions that this driver does not have; they are taken out of a fixture's copy of the library.
    pub(crate) without: Vec<String>,
    /// What changes with the ticks.
    pub(crate) timeline: Vec<Change>,
}

/// How a function fails.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum Failure {
    Always(Code),
    Sometimes(Failing),
}

/// When a function fails.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Failing {
    code: Code,
    /// The only device it fails for.
    #[serde(default)]
    device: Option<u32>,
    /// So many calls succeed first.
    #[serde(default)]
    after: u64,
    /// So many calls fail, then they succeed again.
    #[serde(default = "forever")]
    times: u64,
}

fn forever() -> u64 {
    u64::MAX
}

/// Fields of a device that change at a tick.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Change {
    pub(crate) at: u64,
    /// All devices if not given.
    pub(crate) device: Option<u32>,
    pub(crate) set: Map<String, Value>,
}

impl Machine {
    /// Reads a machine, and tries every change once so that a mistake shows at once.
    pub(crate) fn parse(json: &[u8]) -> Result<Self, String> {
        let mut machine: Self =
            serde_json::from_slice(json).map_err(|error| format!("no machine: {error}"))?;
        machine.check_names()?;
        machine.timeline.sort_by_key(|change| change.at);
        for changes in 0..=machine.timeline.len() {
            machine.devices_after(changes)?;
        }
        Ok(machine)
    }

    /// Names that nothing has would be without effect.
    fn check_names(&self) -> Result<(), String> {
        let functions = self.fail.keys().chain(&self.without);
        for name in functions.filter(|name| name.as_str() != "*") {
            if !crate::FUNCTIONS.contains(&name.as_str()) {
                return Err(format!("no function {name}"));
            }
        }
        let unknown = self
            .p2p
            .keys()
            .find(|name| !CAPABILITIES.contains(&name.as_str()));
        unknown.map_or(Ok(()), |name| Err(format!("no capability {name}")))
    }

    /// How many changes have happened at a tick.
    pub(crate) fn changes_at(&self, tick: u64) -> usize {
        self.timeline.partition_point(|change| change.at <= tick)
    }

    /// The devices after the first so many changes.
    pub(crate) fn devices_after(&self, changes: usize) -> Result<Vec<Device>, String> {
        let device = |(index, own): (usize, &Map<String, Value>)| {
            let mut fields = self.common.clone();
            fields.extend(own.clone());
            for change in &self.timeline[..changes] {
                if change.device.is_none_or(|device| device as usize == index) {
                    fields.extend(change.set.clone());
                }
            }
            Device::deserialize(Value::Object(fields))
                .map_err(|error| format!("device {index}: {error}"))
        };
        self.devices.iter().enumerate().map(device).collect()
    }

    /// The code that a call fails with, if it is to fail; `calls` is how many came before it.
    pub(crate) fn failure(&self, function: &str, device: Option<u32>, calls: u64) -> Option<Code> {
        [function, "*"]
            .iter()
            .find_map(|name| match self.fail.get(*name)? {
                Failure::Always(code) => Some(*code),
                Failure::Sometimes(failing) => {
                    let is_meant = failing.device.is_none() || failing.device == device;
                    let is_time = calls >= failing.after && calls - failing.after < failing.times;
                    (is_meant && is_time).then_some(failing.code)
                }
            })
    }
}
