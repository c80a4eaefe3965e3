//! The library's machine in this process, the number of calls of each function, and their effects.

mod samples;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use self::samples::Samples;
use crate::model::{Code, Device, Machine, MigDevice};

/// Variable that names the machine's `nvml.json`.
pub(crate) const MACHINE_VARIABLE: &str = "PACELINE_FAKE_NVML";

/// Name of the machine's file beside the library, where the variable is not set.
pub(crate) const MACHINE_FILE: &str = "nvml.json";

/// Each call of this function on one device is one tick of the timeline.
const TICKS: &str = "nvmlDeviceGetUtilizationRates";

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

/// The state of one copy of the library.
#[derive(Default)]
pub(crate) struct State {
    /// `None` before the first `nvmlInit` or until a test loads one.
    machine: Option<Machine>,
    /// The devices after this many changes of the timeline.
    devices: (usize, Vec<Device>),
    initialized: u32,
    tick: u64,
    /// Calls of each function.
    calls: BTreeMap<&'static str, u64>,
    /// Calls of each function on each device.
    device_calls: BTreeMap<(&'static str, u32), u64>,
    /// Number of processes that have appeared, if they grow.
    pub(crate) grown: u32,
    /// Samples of performance counters.
    pub(crate) gpm: Samples,
}

/// The subject of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Subject {
    /// The library, or the machine.
    Machine,
    /// A device.
    Device(u32),
    /// A MIG instance of a device.
    Mig(u32, u32),
    /// An invalid handle.
    Stranger,
}

impl State {
    /// The state of this copy of the library.
    pub(crate) fn lock() -> MutexGuard<'static, Self> {
        STATE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the machine and resets the call counts.
    pub(crate) fn load(&mut self, json: &[u8]) -> Result<(), String> {
        let machine = Machine::parse(json)?;
        let devices = (0, machine.devices_after(0)?);
        *self = Self {
            machine: Some(machine),
            devices,
            initialized: self.initialized,
            // A program keeps its samples while tests replace the machine.
            gpm: std::mem::take(&mut self.gpm),
            ..Self::default()
        };
        self.turn_to(0);
        Ok(())
    }

    /// Loads the machine's file, unless a machine is loaded.
    pub(crate) fn initialize(&mut self, library: Option<&Path>) -> Result<(), Code> {
        if self.machine.is_none() {
            let named = std::env::var_os(MACHINE_VARIABLE).map(PathBuf::from);
            let path = named.or_else(|| Some(library?.with_file_name(MACHINE_FILE)));
            let path = path.ok_or(Code::UNKNOWN)?;
            let calls = std::mem::take(&mut self.calls);
            let loaded = std::fs::read(&path)
                .map_err(|error| error.to_string())
                .and_then(|json| self.load(&json));
            if let Err(error) = loaded {
                eprintln!("fake nvml: {}: {error}", path.display());
                return Err(Code::UNKNOWN);
            }
            // The current call was already counted.
            self.calls = calls;
        }
        self.initialized = self.initialized.saturating_add(1);
        Ok(())
    }

    pub(crate) fn shut_down(&mut self) -> Result<(), Code> {
        self.initialized = self.initialized.checked_sub(1).ok_or(Code::UNINITIALIZED)?;
        Ok(())
    }

    /// Counts a call, and returns its error if it is to fail.
    pub(crate) fn enter(&mut self, function: &'static str, subject: Subject) -> Result<(), Code> {
        let number = match subject {
            Subject::Device(device) | Subject::Mig(device, _) => Some(device),
            Subject::Machine | Subject::Stranger => None,
        };
        let count = self.calls.entry(function).or_default();
        let mut before = *count;
        *count += 1;
        if let Some(device) = number {
            let count = self.device_calls.entry((function, device)).or_default();
            before = *count;
            *count += 1;
            if function == TICKS && before > self.tick {
                self.turn_to(before);
            }
        }
        if function.starts_with("nvmlInit") && self.machine.is_none() {
            // The failures are unknown until the file is read.
            return Ok(());
        }
        let machine = self.machine.as_ref().ok_or(Code::UNINITIALIZED)?;
        if let Some(code) = machine.failure(function, number, before) {
            return Err(code);
        }
        match subject {
            Subject::Machine => Ok(()),
            Subject::Stranger => Err(Code::INVALID_ARGUMENT),
            Subject::Device(_) | Subject::Mig(..) if self.initialized == 0 => {
                Err(Code::UNINITIALIZED)
            }
            Subject::Device(device) | Subject::Mig(device, _) => {
                self.device(device)?.lost.map_or(Ok(()), Err)
            }
        }
    }

    /// Number of calls of a function.
    pub(crate) fn calls(&self, function: &str) -> u64 {
        self.calls.get(function).copied().unwrap_or(0)
    }

    pub(crate) fn tick(&self) -> u64 {
        self.tick
    }

    pub(crate) fn is_initialized(&self) -> bool {
        self.initialized > 0
    }

    pub(crate) fn machine(&self) -> Result<&Machine, Code> {
        self.machine.as_ref().ok_or(Code::UNINITIALIZED)
    }

    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices.1
    }

    pub(crate) fn device(&self, index: u32) -> Result<&Device, Code> {
        self.devices()
            .get(index as usize)
            .ok_or(Code::INVALID_ARGUMENT)
    }

    pub(crate) fn mig(&self, device: u32, index: u32) -> Result<&MigDevice, Code> {
        let instances = &self.device(device)?.mig_devices;
        instances.get(index as usize).ok_or(Code::INVALID_ARGUMENT)
    }

    /// Advances to a tick.
    fn turn_to(&mut self, tick: u64) {
        self.tick = tick;
        let Some(machine) = &self.machine else { return };
        let changes = machine.changes_at(tick);
        if changes != self.devices.0
            && let Ok(devices) = machine.devices_after(changes)
        {
            self.devices = (changes, devices);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(json: &str) -> State {
        let mut state = State::default();
        state.load(json.as_bytes()).expect(json);
        state.initialize(None).expect("a machine is there");
        state
    }

    #[test]
    fn a_device_is_lost_at_its_tick_and_the_others_go_on() {
        let mut state = state(
            r#"{"devices": [{}, {}], "timeline": [{"at": 2, "device": 1, "set": {"lost": "GPU_IS_LOST"}}]}"#,
        );
        let mut sample = |device| state.enter(TICKS, Subject::Device(device));
        for _ in 0..2 {
            assert_eq!((sample(0), sample(1)), (Ok(()), Ok(())));
        }
        assert_eq!((sample(0), sample(1)), (Ok(()), Err(Code(15))));
        assert_eq!(
            state.enter("nvmlDeviceGetName", Subject::Device(1)),
            Err(Code(15))
        );
        assert_eq!(state.calls(TICKS), 6);
    }

    #[test]
    fn a_function_fails_where_and_as_often_as_it_is_told_to() {
        let check = |fail: &str, expect: [u32; 4]| {
            let json =
                format!(r#"{{"devices": [{{}}, {{}}], "fail": {{"nvmlDeviceGetName": {fail}}}}}"#);
            let mut state = state(&json);
            let got = [0, 1, 1, 1].map(|device| {
                let entered = state.enter("nvmlDeviceGetName", Subject::Device(device));
                entered.map_or_else(|code| code.0, |()| 0)
            });
            assert_eq!(got, expect, "{fail}");
        };
        check("999", [999; 4]);
        check(r#""TIMEOUT""#, [10; 4]);
        check(r#"{"code": 12345, "device": 1}"#, [0, 12345, 12345, 12345]);
        check(r#"{"code": 15, "device": 1, "after": 1}"#, [0, 0, 15, 15]);
        check(
            r#"{"code": 15, "device": 1, "after": 1, "times": 1}"#,
            [0, 0, 15, 0],
        );
    }

    #[test]
    fn a_mistake_in_a_machine_is_told_when_it_is_loaded() {
        let check = |json: &str, expect: &str| {
            let error = State::default().load(json.as_bytes()).expect_err(json);
            assert!(error.contains(expect), "{error}");
        };
        check("{", "no machine");
        check(
            r#"{"devices": [{"nmae": ""}]}"#,
            "device 0: unknown field `nmae`",
        );
        check(
            r#"{"devices": [{}], "timeline": [{"at": 9, "set": {"lost": "GONE"}}]}"#,
            "no code GONE",
        );
    }
}
