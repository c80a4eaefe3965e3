//! One device of a fixture.

use std::collections::BTreeMap;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::answer::{Answer, Code, Count, Text};

/// A device; every field may be an error, or left out for `NOT_SUPPORTED`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Device {
    /// The code that every function returns once the device is gone.
    pub(crate) lost: Option<Code>,
    pub(crate) name: Answer<Text>,
    pub(crate) uuid: Answer<Text>,
    pub(crate) minor: Answer<u32>,
    /// Place on the bus: `0000:18:00.0`.
    pub(crate) pci: Answer<Text>,
    /// Device and vendor number, as one: `0x233010de`.
    pub(crate) pci_id: Answer<Number>,
    pub(crate) architecture: Answer<Architecture>,
    pub(crate) capability: Answer<(i32, i32)>,
    pub(crate) memory: Answer<Memory>,
    /// Of the multiprocessors and of the memory, in percent.
    pub(crate) utilization: Answer<(u32, u32)>,
    pub(crate) power_mw: Answer<u32>,
    pub(crate) power_limit_mw: Answer<u32>,
    pub(crate) energy_mj: Answer<Count>,
    pub(crate) temperature_c: Answer<u32>,
    /// Where it shuts down, slows down, its memory is too hot, it itself is.
    pub(crate) temperature_limits_c: Answer<[u32; 4]>,
    /// Graphics, multiprocessors, memory, video.
    pub(crate) clocks_mhz: Answer<[u32; 4]>,
    pub(crate) throttles: Answer<Throttles>,
    pub(crate) pcie_generation: Answer<u32>,
    /// The highest that device and slot have in common.
    pub(crate) pcie_generation_max: Answer<u32>,
    pub(crate) pcie_lanes: Answer<u32>,
    pub(crate) pcie_lanes_max: Answer<u32>,
    pub(crate) pcie_tx_kb_s: Answer<u32>,
    pub(crate) pcie_rx_kb_s: Answer<u32>,
    pub(crate) pcie_replays: Answer<u32>,
    /// Now, and after a reset.
    pub(crate) ecc: Answer<(State, State)>,
    /// Since the driver was loaded, and ever.
    pub(crate) ecc_corrected: Answer<[u64; 2]>,
    pub(crate) ecc_uncorrected: Answer<[u64; 2]>,
    /// Because of many corrected errors, and of one uncorrected.
    pub(crate) retired_pages: Answer<[u32; 2]>,
    pub(crate) retirement_pending: Answer<State>,
    /// Because of corrected errors, of uncorrected ones, whether some wait for a reset, whether one failed.
    pub(crate) remapped_rows: Answer<(u32, u32, State, State)>,
    pub(crate) compute_mode: Answer<ComputeMode>,
    pub(crate) persistence: Answer<State>,
    pub(crate) display_connected: Answer<State>,
    pub(crate) display_active: Answer<State>,
    /// Now, and after a reset.
    pub(crate) mig: Answer<(State, State)>,
    pub(crate) mig_max: Answer<u32>,
    pub(crate) mig_devices: Vec<MigDevice>,
    pub(crate) numa_node: Answer<u32>,
    /// As the kernel writes lists: `0-31,64-95`.
    pub(crate) cpus: Answer<Cpus>,
    pub(crate) compute: Answer<Vec<Process>>,
    pub(crate) graphics: Answer<Vec<Process>>,
    /// Number of processes that is told, where it is not the right one.
    pub(crate) process_count: Option<u32>,
    /// One more process appears each time it is asked how many there are.
    pub(crate) processes_grow: bool,
    pub(crate) nvlinks: Answer<Vec<NvLink>>,
    /// Shares in percent, by number of the metric, of the performance counters; a device without them has no such field.
    pub(crate) gpm: Option<BTreeMap<u32, Answer<f64>>>,
    /// Field values by number, or by number and scope: `138`, `138:3`.
    pub(crate) fields: BTreeMap<String, Answer<Count>>,
}

/// Device memory, in MiB.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Memory {
    pub(crate) total_mib: u64,
    pub(crate) used_mib: u64,
    #[serde(default)]
    pub(crate) reserved_mib: u64,
}

/// A process on a device.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// Not known if not given.
    pub(crate) memory_mib: Option<u64>,
}

/// A MIG instance.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct MigDevice {
    pub(crate) uuid: Answer<Text>,
}

/// One or several NVLinks that are alike.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct NvLink {
    /// How many; 1 if not given.
    times: Option<usize>,
    pub(crate) active: Answer<State>,
    pub(crate) version: Answer<u32>,
    pub(crate) remote: Answer<Remote>,
    pub(crate) remote_pci: Answer<Text>,
    /// Replays, recoveries, CRC errors of flits and of data, ECC errors of data.
    pub(crate) errors: Answer<[u64; 5]>,
}

impl Device {
    /// An NVLink by number.
    pub(crate) fn nvlink(&self, number: u32, tick: u64) -> Result<&NvLink, Code> {
        let mut links = self
            .nvlinks
            .at(tick)?
            .iter()
            .flat_map(|link| std::iter::repeat_n(link, link.times.unwrap_or(1)));
        links.nth(number as usize).ok_or(Code::INVALID_ARGUMENT)
    }

    /// A field's value, that of its scope first.
    pub(crate) fn field(&self, id: u32, scope: u32, tick: u64) -> Result<u64, Code> {
        let answer = self
            .fields
            .get(&format!("{id}:{scope}"))
            .or_else(|| self.fields.get(&id.to_string()));
        let count = answer.ok_or(Code::NOT_SUPPORTED)?.at(tick)?;
        Ok(count.at(tick))
    }
}

/// A type that is written as a number, or as one of some words.
macro_rules! named {
    ($(#[$doc:meta])* $name:ident { $($word:literal = $value:expr),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) struct $name(pub(crate) u32);

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let value = match Value::deserialize(deserializer)? {
                    Value::Bool(is_on) => u32::from(is_on),
                    Value::String(word) => match word.as_str() {
                        $($word => $value,)*
                        other => match other.strip_prefix("0x") {
                            Some(digits) => {
                                u32::from_str_radix(digits, 16).map_err(D::Error::custom)?
                            }
                            None => return Err(D::Error::custom(format!("unknown word {other}"))),
                        },
                    },
                    other => u32::deserialize(other).map_err(D::Error::custom)?,
                };
                Ok(Self(value))
            }
        }
    };
}

named!(
    /// A number that may be written in hexadecimal.
    Number {}
);
named!(
    /// A setting; `true` is 1.
    State {}
);
named!(
    /// *Source*: `NVML_DEVICE_ARCH_*`.
    Architecture {
        "kepler" = 2,
        "maxwell" = 3,
        "pascal" = 4,
        "volta" = 5,
        "turing" = 6,
        "ampere" = 7,
        "ada" = 8,
        "hopper" = 9,
        "blackwell" = 10,
        "unknown" = u32::MAX,
    }
);
named!(
    /// *Source*: `nvmlComputeMode_t`.
    ComputeMode {
        "default" = 0,
        "exclusive_thread" = 1,
        "prohibited" = 2,
        "exclusive_process" = 3,
    }
);
named!(
    /// *Source*: `nvmlIntNvLinkDeviceType_t`.
    Remote {
        "gpu" = 0,
        "cpu" = 1,
        "switch" = 2,
        "unknown" = 255,
    }
);
named!(
    /// *Source*: `nvmlClocksEventReason*` and `nvmlClocksThrottleReason*`.
    Throttle {
        "idle" = 1,
        "clocks_setting" = 2,
        "power_cap" = 4,
        "hardware" = 8,
        "sync_boost" = 16,
        "thermal" = 32,
        "hardware_thermal" = 64,
        "power_brake" = 128,
        "display_clock" = 256,
    }
);

/// Why the clocks are held down: a mask, or words.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum Throttles {
    Mask(u64),
    Words(Vec<Throttle>),
}

impl Throttles {
    pub(crate) fn mask(&self) -> u64 {
        match self {
            Self::Mask(mask) => *mask,
            Self::Words(words) => words.iter().fold(0, |mask, word| mask | u64::from(word.0)),
        }
    }
}

/// A list of CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cpus(pub(crate) Vec<usize>);

impl<'de> Deserialize<'de> for Cpus {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let mut cpus = Vec::new();
        for range in text.split(',').filter(|range| !range.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let number = |digits: &str| digits.trim().parse::<usize>().map_err(D::Error::custom);
            cpus.extend(number(first)?..=number(last)?);
        }
        Ok(Self(cpus))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_leaves_out_is_not_supported() {
        let device: Device = serde_json::from_str("{}").expect("a device");
        assert_eq!(device.name.at(0), Err(Code::NOT_SUPPORTED));
        assert_eq!(device.field(138, 0, 0), Err(Code::NOT_SUPPORTED));
        assert!(matches!(device.nvlink(0, 0), Err(Code::NOT_SUPPORTED)));
    }

    #[test]
    fn links_that_are_alike_are_written_once() {
        let json = r#"{"nvlinks": [{"times": 2, "version": 4}, {"version": 3}]}"#;
        let device: Device = serde_json::from_str(json).expect("a device");
        let version = |link| {
            device
                .nvlink(link, 0)
                .map(|link| *link.version.at(0).expect("known"))
        };
        assert_eq!(
            [0, 1, 2, 3].map(|link| version(link).ok()),
            [Some(4), Some(4), Some(3), None]
        );
    }

    #[test]
    fn words_and_numbers_both_stand_for_settings() {
        let check = |json: &str, expect: u32| {
            let state: Architecture = serde_json::from_str(json).expect(json);
            assert_eq!(state.0, expect);
        };
        check(r#""hopper""#, 9);
        check("77", 77);
        check(r#""0x10""#, 16);
        assert!(serde_json::from_str::<Architecture>(r#""hoper""#).is_err());
        let cpus: Cpus = serde_json::from_str(r#""0-2,8""#).expect("a list");
        assert_eq!(cpus.0, [0, 1, 2, 8]);
    }
}
