//! The state of one copy of the library in one process: its machine, call counts, and everything with a handle.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::code::Code;
use crate::device::{Device, Event, Function, Memory, Module, Stream};
use crate::machine::{Effect, Machine};
use crate::nccl::Comm;

/// Variable with the machine's description, or the path of its file.
pub(crate) const MACHINE_VARIABLE: &str = "PACELINE_FAKE_CUDA";

/// Name of the machine's file beside the library, used if the variable is not set; without either there is one good device.
pub(crate) const MACHINE_FILE: &str = "cuda.json";

static PROCESS: LazyLock<Process> = LazyLock::new(Process::new);

/// The state of this copy of the library.
#[derive(Debug)]
pub(crate) struct Process {
    told: Mutex<Told>,
    /// The visible devices, once the driver is initialized.
    devices: Mutex<Option<Vec<Arc<Device>>>>,
    pub(crate) memory: Memory,
    pub(crate) streams: Table<Stream>,
    pub(crate) events: Table<Event>,
    pub(crate) modules: Table<Module>,
    pub(crate) functions: Table<Function>,
    pub(crate) comms: Table<Comm>,
    is_held: Mutex<bool>,
    let_go: Condvar,
}

/// The machine, and the calls since it was loaded.
#[derive(Debug, Default)]
struct Told {
    machine: Option<Arc<Machine>>,
    calls: BTreeMap<&'static str, u64>,
    rank_calls: BTreeMap<(&'static str, u32), u64>,
}

/// Objects by their handles, which are plain numbers.
#[derive(Debug)]
pub(crate) struct Table<T> {
    things: Mutex<BTreeMap<u64, Arc<T>>>,
    next: AtomicU64,
}

/// Locks a mutex even if a holder panicked.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Table<T> {
    /// Each table has its own range of handles, so that one table's handle is never valid in another.
    fn from(first: u64) -> Self {
        Self {
            things: Mutex::default(),
            next: AtomicU64::new(first),
        }
    }

    pub(crate) fn put(&self, thing: Arc<T>) -> u64 {
        // Handles are aligned, as pointers are.
        let handle = self.next.fetch_add(16, Ordering::Relaxed);
        lock(&self.things).insert(handle, thing);
        handle
    }

    pub(crate) fn get(&self, handle: u64) -> Option<Arc<T>> {
        lock(&self.things).get(&handle).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        lock(&self.things).values().cloned().collect()
    }

    pub(crate) fn take(&self, handle: u64) -> Option<Arc<T>> {
        lock(&self.things).remove(&handle)
    }
}

impl Process {
    fn new() -> Self {
        Self {
            told: Mutex::default(),
            devices: Mutex::default(),
            memory: Memory::new(),
            streams: Table::from(1 << 40),
            events: Table::from(2 << 40),
            modules: Table::from(3 << 40),
            functions: Table::from(4 << 40),
            comms: Table::from(5 << 40),
            is_held: Mutex::default(),
            let_go: Condvar::new(),
        }
    }

    pub(crate) fn here() -> &'static Self {
        &PROCESS
    }

    /// Replaces the machine and resets the call counts. Handles stay valid.
    pub(crate) fn load(&self, json: &[u8]) -> Result<(), String> {
        let machine = Arc::new(Machine::parse(json)?);
        let mut told = lock(&self.told);
        *told = Told {
            machine: Some(machine.clone()),
            ..Told::default()
        };
        let mut devices = lock(&self.devices);
        if devices.is_some() {
            *devices = Some(visible(&machine));
        }
        Ok(())
    }

    /// The loaded machine, else the one from the environment or the file beside the library.
    pub(crate) fn machine(&self) -> Result<Arc<Machine>, String> {
        let mut told = lock(&self.told);
        if let Some(machine) = &told.machine {
            return Ok(machine.clone());
        }
        let machine = Arc::new(describe(crate::c_abi::library().as_deref())?);
        told.machine = Some(machine.clone());
        Ok(machine)
    }

    /// Counts a call and returns its fault. Faults that end, block or delay the call take effect here.
    pub(crate) fn enter(&self, call: &'static str, rank: Option<u32>) -> Option<Effect> {
        let machine = match self.machine() {
            Ok(machine) => machine,
            Err(error) => {
                eprintln!("fake cuda: {error}");
                return Some(Effect::Code(Code::UNKNOWN.0));
            }
        };
        let effect = {
            let mut told = lock(&self.told);
            let count = |count: &mut u64| std::mem::replace(count, *count + 1);
            let before = count(told.calls.entry(call).or_default());
            let mut of_rank = |rank| count(told.rank_calls.entry((call, rank)).or_default());
            let rank = rank.map(|rank| (rank, of_rank(rank)));
            machine.fault(call, before, rank)
        };
        match effect? {
            Effect::Block => loop {
                std::thread::park();
            },
            Effect::Exit(code) => crate::c_abi::end(code),
            Effect::WhileBusy => {
                self.comms
                    .all()
                    .iter()
                    .for_each(|comm| comm.wait_until_idle());
                None
            }
            effect => Some(effect),
        }
    }

    /// Number of calls of a function.
    pub(crate) fn calls(&self, call: &str) -> u64 {
        lock(&self.told).calls.get(call).copied().unwrap_or(0)
    }

    /// Finds the devices on the first call.
    pub(crate) fn initialize(&self) -> Result<(), Code> {
        let machine = self.machine().map_err(|_| Code::UNKNOWN)?;
        let mut devices = lock(&self.devices);
        let devices = devices.get_or_insert_with(|| visible(&machine));
        if devices.is_empty() {
            Err(Code::NO_DEVICE)
        } else {
            Ok(())
        }
    }

    pub(crate) fn devices(&self) -> Result<Vec<Arc<Device>>, Code> {
        lock(&self.devices).clone().ok_or(Code::NOT_INITIALIZED)
    }

    pub(crate) fn device(&self, ordinal: i32) -> Result<Arc<Device>, Code> {
        let ordinal = usize::try_from(ordinal).map_err(|_| Code::INVALID_DEVICE)?;
        self.devices()?
            .get(ordinal)
            .cloned()
            .ok_or(Code::INVALID_DEVICE)
    }

    /// Stops all streams from starting further work, or lets them continue.
    pub(crate) fn hold(&self, is_held: bool) {
        *lock(&self.is_held) = is_held;
        self.let_go.notify_all();
    }

    /// Waits while streams are held.
    pub(crate) fn wait_until_let_go(&self) {
        let held = lock(&self.is_held);
        drop(self.let_go.wait_while(held, |is_held| *is_held));
    }
}

/// The machine from the environment, else from the file beside the library.
fn describe(library: Option<&Path>) -> Result<Machine, String> {
    let given = std::env::var_os(MACHINE_VARIABLE);
    if let Some(text) = given.as_ref().and_then(|given| given.to_str())
        && text.trim_start().starts_with('{')
    {
        return Machine::parse(text.as_bytes());
    }
    let beside = || {
        library
            .map(|library| library.with_file_name(MACHINE_FILE))
            .filter(|path| path.is_file())
    };
    let Some(path) = given.map(PathBuf::from).or_else(beside) else {
        return Ok(Machine::default());
    };
    let told = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let json = std::fs::read(&path).map_err(|error| told(&error))?;
    Machine::parse(&json).map_err(|error| told(&error))
}

/// The devices in the order of `CUDA_VISIBLE_DEVICES`; an invalid entry ends the list.
fn visible(machine: &Machine) -> Vec<Arc<Device>> {
    let count = machine.devices.count();
    let places: Vec<usize> = match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => {
            let places = list
                .split(',')
                .map(|item| item.trim().parse().ok().filter(|place| *place < count));
            places.map_while(|place| place).collect()
        }
        Err(_) => (0..count).collect(),
    };
    let devices = places.into_iter().enumerate();
    devices
        .map(|(ordinal, place)| Arc::new(Device::new(ordinal, place, machine)))
        .collect()
}
