//! The description of a machine: its devices, their links, delays and faults.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

/// Maximum number of devices.
const DEVICES_MAX: usize = 64;

/// A machine. The default is one good device.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Machine {
    /// The newest CUDA version of the driver: 12080 is 12.8.
    pub(crate) driver: i32,
    /// NCCL's version: 22707 is 2.27.7.
    pub(crate) nccl: i32,
    pub(crate) devices: Devices,
    /// The links between devices.
    pub(crate) peers: Peers,
    /// Extra time of each piece of work, by kind.
    delays_ms: BTreeMap<Kind, u64>,
    pub(crate) faults: Vec<Fault>,
    /// The effect of a dead peer on a communicator.
    pub(crate) peer_death: PeerDeath,
    /// If set, unknown kernels do nothing, and their PTX is written to this folder.
    pub(crate) foreign_kernels: Option<PathBuf>,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            driver: 12080,
            nccl: 22707,
            devices: Devices::Count(1),
            peers: Peers::All(Link::Ok),
            delays_ms: BTreeMap::new(),
            faults: Vec::new(),
            peer_death: PeerDeath::Error,
            foreign_kernels: None,
        }
    }
}

/// A number of equal devices, or a list.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum Devices {
    Count(usize),
    Each(Vec<Device>),
}

/// A device. Defaults depend on its position.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Device {
    pub(crate) name: Option<String>,
    /// 32 hexadecimal digits, with or without dashes and `GPU-`.
    uuid: Option<String>,
    /// Place on the bus: `0000:18:00.0`.
    pub(crate) pci: Option<String>,
    pub(crate) capability: Option<(i32, i32)>,
    pub(crate) memory_mib: Option<u64>,
}

/// One word for all pairs, or one row of words for each device, with `X` for a device and itself.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum Peers {
    All(Link),
    Each(Vec<String>),
}

/// A link between two devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(crate) enum Link {
    /// It works.
    #[serde(rename = "OK")]
    Ok,
    /// The driver reports no peer access.
    #[serde(rename = "NS")]
    NotSupported,
    /// The driver reports access, but data arrives corrupted.
    #[serde(rename = "BAD")]
    Corrupting,
    /// The same for kernels' writes only; copies work.
    #[serde(rename = "BAD_KERNEL")]
    CorruptingKernels,
    /// The driver reports access, but nothing ever arrives.
    #[serde(rename = "STUCK")]
    Stuck,
}

/// A kind of a stream's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    Copy,
    Kernel,
    Nccl,
    /// A non-blocking communicator's work in the background, which is not on a stream.
    Submit,
}

/// A fault.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fault {
    /// The function.
    pub(crate) call: String,
    /// The only affected rank, if any.
    #[serde(default)]
    pub(crate) rank: Option<u32>,
    /// This many calls succeed first: of the rank if one is given, else of the process.
    #[serde(default)]
    after: u64,
    /// This many calls fail; later ones succeed.
    #[serde(default = "forever")]
    times: u64,
    pub(crate) does: Effect,
}

fn forever() -> u64 {
    u64::MAX
}

/// The effect of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Effect {
    /// The call returns this number and does nothing.
    Code(u32),
    /// The call never returns.
    Block,
    /// The call returns at once, but its work on the stream never ends; NCCL's work ends with an abort of the communicator.
    Hang,
    /// NCCL's work on the stream never ends, and the communicator reports this number.
    Async(u32),
    /// The process ends at once with this exit code.
    Exit(i32),
    /// The call returns when no stream of this process runs NCCL's work, as if it needed a lock whose holder waits for that
    /// work.
    WhileBusy,
}

/// A communicator's reaction to a dead peer; in both cases its work never ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PeerDeath {
    /// It reports `ncclRemoteError`.
    Error,
    /// It reports nothing.
    Hang,
}

impl Machine {
    /// Reads a machine, and refuses entries that would have no effect.
    pub(crate) fn parse(json: &[u8]) -> Result<Self, String> {
        let machine: Self =
            serde_json::from_slice(json).map_err(|error| format!("no machine: {error}"))?;
        let count = machine.devices.count();
        if count > DEVICES_MAX {
            return Err(format!("{count} devices, and {DEVICES_MAX} are the most"));
        }
        let known = |name: &str| {
            crate::DRIVER_FUNCTIONS
                .iter()
                .chain(crate::NCCL_FUNCTIONS)
                .any(|known| *known == name)
        };
        if let Some(fault) = machine.faults.iter().find(|fault| !known(&fault.call)) {
            return Err(format!("no function {}", fault.call));
        }
        if let Peers::Each(rows) = &machine.peers {
            let words = rows.iter().map(|row| row.split_whitespace().count());
            if rows.len() != count || words.into_iter().any(|words| words != count) {
                return Err(format!("peers are not {count} rows of {count} words"));
            }
        }
        for (from, to) in (0..count).flat_map(|from| (0..count).map(move |to| (from, to))) {
            machine.link(from, to)?;
        }
        for index in 0..count {
            machine.device(index).uuid(index)?;
        }
        Ok(machine)
    }

    /// The link between two devices, by their positions in the machine.
    pub(crate) fn link(&self, from: usize, to: usize) -> Result<Link, String> {
        let rows = match &self.peers {
            _ if from == to => return Ok(Link::Ok),
            Peers::All(link) => return Ok(*link),
            Peers::Each(rows) => rows,
        };
        let word = rows
            .get(from)
            .and_then(|row| row.split_whitespace().nth(to));
        let link = word.and_then(|word| serde_json::from_value(word.into()).ok());
        link.ok_or_else(|| {
            format!("peers from {from} to {to} must be OK, NS, BAD, BAD_KERNEL or STUCK")
        })
    }

    pub(crate) fn device(&self, index: usize) -> Device {
        match &self.devices {
            Devices::Count(_) => Device::default(),
            Devices::Each(devices) => devices.get(index).cloned().unwrap_or_default(),
        }
    }

    pub(crate) fn delay(&self, kind: Kind) -> Duration {
        Duration::from_millis(self.delays_ms.get(&kind).copied().unwrap_or(0))
    }

    /// The fault of a call. `before` is the number of earlier calls of the process, and `rank` has those of the rank.
    pub(crate) fn fault(
        &self,
        call: &str,
        before: u64,
        rank: Option<(u32, u64)>,
    ) -> Option<Effect> {
        let is_meant = |fault: &&Fault| {
            let before = match (fault.rank, rank) {
                (None, _) => before,
                (Some(meant), Some((rank, before))) if meant == rank => before,
                (Some(_), _) => return false,
            };
            fault.call == call && before >= fault.after && before - fault.after < fault.times
        };
        self.faults.iter().find(is_meant).map(|fault| fault.does)
    }
}

impl Devices {
    pub(crate) fn count(&self) -> usize {
        match self {
            Self::Count(count) => *count,
            Self::Each(devices) => devices.len(),
        }
    }
}

impl Device {
    /// Its 16 bytes.
    pub(crate) fn uuid(&self, index: usize) -> Result<[u8; 16], String> {
        let Some(text) = &self.uuid else {
            let mut bytes = *b"paceline-fake-00";
            bytes[14] += (index / 10) as u8;
            bytes[15] += (index % 10) as u8;
            return Ok(bytes);
        };
        let digits: String = text.trim_start_matches("GPU-").split('-').collect();
        let number = (digits.len() == 32)
            .then(|| u128::from_str_radix(&digits, 16).ok())
            .flatten();
        number
            .map(u128::to_be_bytes)
            .ok_or_else(|| format!("no UUID: {text}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistake_in_a_machine_is_told_when_it_is_read() {
        let check = |json: &str, expect: &str| {
            let error = Machine::parse(json.as_bytes()).expect_err(json);
            assert!(error.contains(expect), "{error}");
        };
        check("{", "no machine");
        check(r#"{"device": 2}"#, "unknown field `device`");
        check(r#"{"devices": 65}"#, "64 are the most");
        check(r#"{"devices": [{"uuid": "GPU-12"}]}"#, "no UUID: GPU-12");
        check(r#"{"devices": 2, "peers": ["X OK"]}"#, "2 rows of 2 words");
        check(
            r#"{"devices": 2, "peers": ["X OK", "FINE X"]}"#,
            "peers from 1 to 0",
        );
        check(
            r#"{"faults": [{"call": "cuFly", "does": "hang"}]}"#,
            "no function cuFly",
        );
    }

    #[test]
    fn links_have_a_direction_and_a_device_reaches_itself() {
        let machine =
            Machine::parse(br#"{"devices": 2, "peers": ["X BAD", "NS X"]}"#).expect("a machine");
        let links =
            [(0, 1), (1, 0), (0, 0)].map(|(from, to)| machine.link(from, to).expect("a link"));
        assert_eq!(links, [Link::Corrupting, Link::NotSupported, Link::Ok]);
    }

    #[test]
    fn a_call_goes_wrong_when_and_for_whom_it_is_told_to() {
        let check = |fault: &str, expect: [bool; 4]| {
            let json =
                format!(r#"{{"faults": [{{"call": "ncclAllReduce", "does": "hang", {fault}}}]}}"#);
            let machine = Machine::parse(json.as_bytes()).expect(&json);
            // Two ranks in one process, in turn.
            let calls = [(0, (0, 0)), (1, (1, 0)), (2, (0, 1)), (3, (1, 1))];
            let got = calls
                .map(|(before, rank)| machine.fault("ncclAllReduce", before, Some(rank)).is_some());
            assert_eq!(got, expect, "{fault}");
            assert_eq!(machine.fault("ncclSend", 3, None), None);
        };
        check(r#""after": 0"#, [true; 4]);
        check(r#""after": 1, "times": 2"#, [false, true, true, false]);
        check(r#""rank": 1"#, [false, true, false, true]);
        check(r#""rank": 0, "after": 1"#, [false, false, true, false]);
    }
}
