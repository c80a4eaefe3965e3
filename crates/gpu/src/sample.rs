//! What a device does at one moment.

use serde::{Deserialize, Serialize};

use crate::snapshot::{Gap, Memory, Reading, all_missing};

/// One device at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceSample {
    /// The driver's number.
    pub index: u32,
    /// Share of the driver's last measuring period in which any kernel ran, 0 to 100.
    pub utilization_percent: Reading<u32>,
    /// Share of that period in which memory was read or written, 0 to 100.
    pub memory_utilization_percent: Reading<u32>,
    /// Share of the multiprocessors' time in which they ran anything, 0 to 100. Like the three below it comes from the device's
    /// performance counters and is a mean over a second or more; devices before Hopper do not have them.
    pub sm_active_percent: Reading<f64>,
    /// Threads that were resident on the multiprocessors, of the most that they can hold, 0 to 100.
    pub sm_occupancy_percent: Reading<f64>,
    /// Share of the time in which the multiprocessors' tensor cores worked, 0 to 100.
    pub tensor_active_percent: Reading<f64>,
    /// Bandwidth of device memory that was used, of the most that there is, 0 to 100.
    pub dram_active_percent: Reading<f64>,
    /// Device memory.
    pub memory: Reading<Memory>,
    /// Power now, in milliwatts.
    pub power_mw: Reading<u32>,
    /// The limit that power is held below, in milliwatts.
    pub power_limit_mw: Reading<u32>,
    /// Energy since the driver was loaded, in millijoules.
    pub energy_mj: Reading<u64>,
    /// Temperature of the chip, in degrees Celsius.
    pub temperature_c: Reading<u32>,
    /// Clock of the multiprocessors, in MHz.
    pub sm_clock_mhz: Reading<u32>,
    /// Clock of the memory, in MHz.
    pub memory_clock_mhz: Reading<u32>,
    /// Bytes per second sent over PCIe by the device.
    pub pcie_tx_bytes_s: Reading<u64>,
    /// Bytes per second that the device received over PCIe.
    pub pcie_rx_bytes_s: Reading<u64>,
    /// Bytes per second sent over all NVLinks.
    pub nvlink_tx_bytes_s: Reading<u64>,
    /// Bytes per second received over all NVLinks.
    pub nvlink_rx_bytes_s: Reading<u64>,
    /// Why the clocks are held down.
    pub throttles: Reading<Vec<Throttle>>,
    /// Memory of each process on the device.
    pub processes: Reading<Vec<ProcessMemory>>,
}

impl DeviceSample {
    /// A device that tells nothing.
    #[must_use]
    pub fn missing(index: u32, gap: &Gap) -> Self {
        all_missing!(gap, Self {
            utilization_percent, memory_utilization_percent, sm_active_percent, sm_occupancy_percent, tensor_active_percent,
            dram_active_percent, memory, power_mw, power_limit_mw, energy_mj, temperature_c, sm_clock_mhz, memory_clock_mhz,
            pcie_tx_bytes_s, pcie_rx_bytes_s, nvlink_tx_bytes_s, nvlink_rx_bytes_s, throttles, processes; index
        })
    }

    /// Whether the device fell off the bus.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        let gaps = [
            self.memory.gap(),
            self.utilization_percent.gap(),
            self.temperature_c.gap(),
        ];
        gaps.contains(&Some(&Gap::Lost))
    }
}

/// Why clocks are held down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Throttle {
    /// The power limit.
    PowerCap,
    /// Too hot: software slows it down.
    Thermal,
    /// Too hot: hardware slows it down, by half or more.
    HardwareThermal,
    /// The power supply asks for less.
    PowerBrake,
    /// Hardware slows it down, by half or more, for one of the reasons above or another.
    Hardware,
    /// Another device of its group is slower.
    SyncBoost,
    /// Clocks that a user has set.
    ClocksSetting,
    /// The clock of its display.
    DisplayClock,
}

impl Throttle {
    /// All of them, with the names that data has for them.
    pub const NAMED: [(Self, &str); 8] = [
        (Self::PowerCap, "power_cap"),
        (Self::Thermal, "thermal"),
        (Self::HardwareThermal, "hardware_thermal"),
        (Self::PowerBrake, "power_brake"),
        (Self::Hardware, "hardware"),
        (Self::SyncBoost, "sync_boost"),
        (Self::ClocksSetting, "clocks_setting"),
        (Self::DisplayClock, "display_clock"),
    ];
}

/// Memory of a process on a device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessMemory {
    /// The process, in the driver's namespace.
    pub pid: u32,
    /// Its memory.
    pub used_bytes: Reading<u64>,
}
