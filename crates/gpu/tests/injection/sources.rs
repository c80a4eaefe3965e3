//! Which function tells what: the one table that the tests hold the snapshot and the samples to.

/// Functions without which there is no driver.
pub(crate) const BEGINNINGS: [&str; 2] = ["nvmlInit_v2", "nvmlDeviceGetCount_v2"];

/// What a function feeds.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    paths: Vec<String>,
    is_hidden: bool,
}

impl Source {
    /// Whether a difference at a path may come from the function.
    pub(crate) fn feeds(&self, path: &str) -> bool {
        let is_at = |own: &String| {
            path.strip_prefix(own.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.paths.iter().any(is_at)
    }

    /// Whether it feeds anything.
    pub(crate) fn feeds_something(&self) -> bool {
        !self.paths.is_empty()
    }

    /// Whether its error must show: nothing stands in for it.
    pub(crate) fn shows(&self) -> bool {
        self.feeds_something() && !self.is_hidden
    }

    /// The same in the list of a sample's devices.
    pub(crate) fn of_a_sample(&self) -> Self {
        let own = self.paths.iter().filter_map(|path| match path.as_str() {
            "driver" => Some("*".to_owned()),
            "devices" => Some(String::new()),
            "devices/*" => Some("*".to_owned()),
            other => Some(format!("*/{}", other.strip_prefix("devices/*/now/")?)),
        });
        let mut paths: Vec<String> = own.collect();
        // Nothing may be left of the devices at all.
        if paths.iter().any(String::is_empty) {
            paths.push("*".to_owned());
        }
        Self {
            paths,
            ..self.clone()
        }
    }
}

/// What a function feeds; nothing where nobody asks it.
pub(crate) fn source(function: &str) -> Source {
    let (paths, is_hidden) = paths(function);
    Source {
        paths: paths.iter().map(|path| (*path).to_owned()).collect(),
        is_hidden,
    }
}

/// Paths in a snapshot, and whether something else stands in for the function.
fn paths(function: &str) -> (&'static [&'static str], bool) {
    let paths: &[&str] = match function {
        "nvmlInit_v2" | "nvmlDeviceGetCount_v2" => &["driver", "devices", "links"],
        "nvmlSystemGetDriverVersion" => &["driver/version"],
        "nvmlSystemGetNVMLVersion" => &["driver/nvml"],
        "nvmlSystemGetCudaDriverVersion_v2" => &["driver/cuda"],
        "nvmlDeviceGetHandleByIndex_v2" => &["devices/*", "links/*/p2p", "links/*/ancestor"],
        "nvmlDeviceGetName" => &["devices/*/name"],
        "nvmlDeviceGetUUID" => &["devices/*/uuid"],
        "nvmlDeviceGetPciInfo_v3" => &["devices/*/pci"],
        "nvmlDeviceGetArchitecture" => &["devices/*/architecture"],
        "nvmlDeviceGetCudaComputeCapability" => &["devices/*/capability"],
        // The first version counts what is reserved as used.
        "nvmlDeviceGetMemoryInfo_v2" => &["devices/*/memory", "devices/*/now/memory"],
        "nvmlDeviceGetUtilizationRates" => &[
            "devices/*/now/utilization_percent",
            "devices/*/now/memory_utilization_percent",
        ],
        "nvmlDeviceGetPowerUsage" => &["devices/*/now/power_mw"],
        "nvmlDeviceGetEnforcedPowerLimit" => &["devices/*/now/power_limit_mw"],
        "nvmlDeviceGetPowerManagementDefaultLimit" => &["devices/*/power_default_mw"],
        "nvmlDeviceGetTotalEnergyConsumption" => &["devices/*/now/energy_mj"],
        "nvmlDeviceGetTemperature" => &["devices/*/now/temperature_c"],
        "nvmlDeviceGetTemperatureThreshold" => &["devices/*/slowdown_c"],
        "nvmlDeviceGetClockInfo" => &[
            "devices/*/now/sm_clock_mhz",
            "devices/*/now/memory_clock_mhz",
        ],
        "nvmlDeviceGetCurrentClocksEventReasons" => &["devices/*/now/throttles"],
        "nvmlDeviceGetCurrPcieLinkGeneration"
        | "nvmlDeviceGetMaxPcieLinkGeneration"
        | "nvmlDeviceGetCurrPcieLinkWidth"
        | "nvmlDeviceGetMaxPcieLinkWidth" => &["devices/*/pcie"],
        "nvmlDeviceGetPcieThroughput" => &[
            "devices/*/now/pcie_tx_bytes_s",
            "devices/*/now/pcie_rx_bytes_s",
        ],
        "nvmlDeviceGetPcieReplayCounter" => &["devices/*/errors/pcie_replays"],
        "nvmlDeviceGetEccMode" => &["devices/*/ecc"],
        "nvmlDeviceGetTotalEccErrors" => &[
            "devices/*/errors/corrected",
            "devices/*/errors/uncorrected",
            "devices/*/errors/uncorrected_ever",
        ],
        "nvmlDeviceGetRetiredPages" => &["devices/*/errors/retired_pages"],
        "nvmlDeviceGetRetiredPagesPendingStatus" => &["devices/*/errors/retirement_pending"],
        "nvmlDeviceGetRemappedRows" => &[
            "devices/*/errors/retired_pages",
            "devices/*/errors/retirement_pending",
            "devices/*/errors/retirement_failed",
        ],
        "nvmlDeviceGetComputeMode" => &["devices/*/compute_mode"],
        "nvmlDeviceGetPersistenceMode" => &["devices/*/persistence"],
        "nvmlDeviceGetDisplayMode" => &["devices/*/has_display"],
        "nvmlDeviceGetMigMode" => &["devices/*/mig"],
        "nvmlDeviceGetMaxMigDeviceCount" | "nvmlDeviceGetMigDeviceHandleByIndex" => {
            &["devices/*/mig_devices"]
        }
        "nvmlDeviceGetMemoryAffinity" => &["devices/*/numa_node"],
        "nvmlDeviceGetCpuAffinity" => &["devices/*/cpus"],
        "nvmlDeviceGetComputeRunningProcesses_v3" | "nvmlDeviceGetGraphicsRunningProcesses_v3" => {
            &["devices/*/processes", "devices/*/now/processes"]
        }
        "nvmlDeviceGetNvLinkState"
        | "nvmlDeviceGetNvLinkVersion"
        | "nvmlDeviceGetNvLinkRemotePciInfo_v2"
        | "nvmlDeviceGetNvLinkRemoteDeviceType"
        | "nvmlDeviceGetNvLinkErrorCounter" => &["devices/*/nvlinks"],
        "nvmlDeviceGetFieldValues" => &[
            "devices/*/nvlinks",
            "devices/*/now/nvlink_tx_bytes_s",
            "devices/*/now/nvlink_rx_bytes_s",
            // Newer devices have counters of their own for these; another function tells them where a device has none.
            "devices/*/now/power_mw",
            "devices/*/now/pcie_tx_bytes_s",
            "devices/*/now/pcie_rx_bytes_s",
        ],
        "nvmlGpmQueryDeviceSupport"
        | "nvmlGpmSampleAlloc"
        | "nvmlGpmSampleGet"
        | "nvmlGpmMetricsGet" => &[
            "devices/*/now/sm_active_percent",
            "devices/*/now/sm_occupancy_percent",
            "devices/*/now/tensor_active_percent",
            "devices/*/now/dram_active_percent",
        ],
        "nvmlDeviceGetP2PStatus" => &["links/*/p2p"],
        "nvmlDeviceGetTopologyCommonAncestor" => &["links/*/ancestor"],
        _ => &[],
    };
    // What it said is in a sum with what others said, or another one is asked instead.
    let is_hidden = matches!(
        function,
        "nvmlDeviceGetDisplayMode" | "nvmlDeviceGetRetiredPagesPendingStatus"
    );
    (paths, is_hidden)
}
