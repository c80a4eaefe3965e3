//! The list of functions: names and types are the bindings', bodies say which field answers.

use super::gpm;
use super::tell::*;
use super::write::bits;
use super::*;
use crate::model::CAPABILITIES;

exported! {
    numbers {
        nvmlDeviceGetMinorNumber: c_uint = minor;
        nvmlDeviceGetPowerUsage: c_uint = power_mw;
        nvmlDeviceGetEnforcedPowerLimit: c_uint = power_limit_mw;
        nvmlDeviceGetPowerManagementDefaultLimit: c_uint = power_limit_mw;
        nvmlDeviceGetCurrPcieLinkGeneration: c_uint = pcie_generation;
        nvmlDeviceGetMaxPcieLinkGeneration: c_uint = pcie_generation_max;
        nvmlDeviceGetCurrPcieLinkWidth: c_uint = pcie_lanes;
        nvmlDeviceGetMaxPcieLinkWidth: c_uint = pcie_lanes_max;
        nvmlDeviceGetPcieReplayCounter: c_uint = pcie_replays;
        nvmlDeviceGetMaxMigDeviceCount: c_uint = mig_max;
    }
    settings {
        nvmlDeviceGetArchitecture: nvmlDeviceArchitecture_t = architecture;
        nvmlDeviceGetRetiredPagesPendingStatus: nvmlEnableState_t = retirement_pending;
        nvmlDeviceGetComputeMode: nvmlComputeMode_t = compute_mode;
        nvmlDeviceGetPersistenceMode: nvmlEnableState_t = persistence;
        nvmlDeviceGetDisplayMode: nvmlEnableState_t = display_connected;
        nvmlDeviceGetDisplayActive: nvmlEnableState_t = display_active;
    }
    settings_now_and_then {
        nvmlDeviceGetEccMode: nvmlEnableState_t = ecc;
        nvmlDeviceGetMigMode: c_uint = mig;
    }
    processes {
        nvmlDeviceGetComputeRunningProcesses: nvmlProcessInfo_v1_t = compute, process_v1;
        nvmlDeviceGetComputeRunningProcesses_v2: nvmlProcessInfo_v2_t = compute, process_v2;
        nvmlDeviceGetComputeRunningProcesses_v3: nvmlProcessInfo_t = compute, process_v2;
        nvmlDeviceGetGraphicsRunningProcesses: nvmlProcessInfo_v1_t = graphics, process_v1;
        nvmlDeviceGetGraphicsRunningProcesses_v2: nvmlProcessInfo_v2_t = graphics, process_v2;
        nvmlDeviceGetGraphicsRunningProcesses_v3: nvmlProcessInfo_t = graphics, process_v2;
    }
    machine {
        fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) = |state| {
            put_text(state.machine()?.driver.at(state.tick())?, version, length)
        };
        fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: c_uint) = |state| {
            put_text(state.machine()?.nvml.at(state.tick())?, version, length)
        };
        fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) = |state| {
            let (major, minor) = state.machine()?.cuda.at(state.tick())?;
            put(version, major.wrapping_mul(1000).wrapping_add(minor.wrapping_mul(10)) as c_int)
        };
        fn nvmlDeviceGetCount_v2(count: *mut c_uint) = |state| {
            let told = state.machine()?.count.as_ref();
            let devices = state.devices().len() as c_uint;
            put(count, told.map_or(Ok(devices), |told| told.at(state.tick()).copied())?)
        };
    }
    devices {
        fn nvmlDeviceGetName(to: *mut c_char, length: c_uint) = |device, tick| {
            put_text(device.name.at(tick)?, to, length)
        };
        fn nvmlDeviceGetPciInfo_v3(to: *mut nvmlPciInfo_t) = |device, tick| {
            put_pci(device.pci.at(tick)?, device.pci_id.at(tick).map_or(0, |id| id.0), to)
        };
        fn nvmlDeviceGetCudaComputeCapability(major: *mut c_int, minor: *mut c_int) = |device, tick| {
            let capability = device.capability.at(tick)?;
            put(major, capability.0)?;
            put(minor, capability.1)
        };
        fn nvmlDeviceGetUtilizationRates(to: *mut nvmlUtilization_t) = |device, tick| {
            let (gpu, memory) = *device.utilization.at(tick)?;
            put(to, nvmlUtilization_t { gpu, memory })
        };
        fn nvmlDeviceGetTotalEnergyConsumption(to: *mut c_ulonglong) = |device, tick| {
            put(to, device.energy_mj.at(tick)?.at(tick))
        };
        fn nvmlDeviceGetTemperature(_sensor: nvmlTemperatureSensors_t, to: *mut c_uint) = |device, tick| {
            put(to, *device.temperature_c.at(tick)?)
        };
        fn nvmlDeviceGetTemperatureThreshold(kind: nvmlTemperatureThresholds_t, to: *mut c_uint) = |device, tick| {
            let limits = device.temperature_limits_c.at(tick)?;
            put(to, *limits.get(kind as usize).ok_or(Code::NOT_SUPPORTED)?)
        };
        fn nvmlDeviceGetClockInfo(kind: nvmlClockType_t, to: *mut c_uint) = |device, tick| {
            let clocks = device.clocks_mhz.at(tick)?;
            put(to, *clocks.get(kind as usize).ok_or(Code::INVALID_ARGUMENT)?)
        };
        fn nvmlDeviceGetCurrentClocksThrottleReasons(to: *mut c_ulonglong) = |device, tick| {
            put(to, device.throttles.at(tick)?.mask())
        };
        fn nvmlDeviceGetCurrentClocksEventReasons(to: *mut c_ulonglong) = |device, tick| {
            put(to, device.throttles.at(tick)?.mask())
        };
        fn nvmlDeviceGetPcieThroughput(counter: nvmlPcieUtilCounter_t, to: *mut c_uint) = |device, tick| match counter {
            0 => put(to, *device.pcie_tx_kb_s.at(tick)?),
            1 => put(to, *device.pcie_rx_kb_s.at(tick)?),
            _ => Err(Code::INVALID_ARGUMENT),
        };
        fn nvmlDeviceGetTotalEccErrors(
            kind: nvmlMemoryErrorType_t, counter: nvmlEccCounterType_t, to: *mut c_ulonglong,
        ) = |device, tick| {
            let kinds = [&device.ecc_corrected, &device.ecc_uncorrected];
            let counts = kinds.get(kind as usize).ok_or(Code::INVALID_ARGUMENT)?.at(tick)?;
            put(to, *counts.get(counter as usize).ok_or(Code::INVALID_ARGUMENT)?)
        };
        fn nvmlDeviceGetRetiredPages(
            cause: nvmlPageRetirementCause_t, count: *mut c_uint, addresses: *mut c_ulonglong,
        ) = |device, tick| {
            retired_pages(device, tick, cause, (count, addresses))
        };
        fn nvmlDeviceGetRemappedRows(
            corrected: *mut c_uint, uncorrected: *mut c_uint, pending: *mut c_uint, failed: *mut c_uint,
        ) = |device, tick| {
            let rows = device.remapped_rows.at(tick)?;
            put(corrected, rows.0)?;
            put(uncorrected, rows.1)?;
            put(pending, rows.2.0)?;
            put(failed, rows.3.0)
        };
        fn nvmlDeviceGetNvLinkState(link: c_uint, to: *mut nvmlEnableState_t) = |device, tick| {
            put(to, device.nvlink(link, tick)?.active.at(tick)?.0)
        };
        fn nvmlDeviceGetNvLinkVersion(link: c_uint, to: *mut c_uint) = |device, tick| {
            put(to, *device.nvlink(link, tick)?.version.at(tick)?)
        };
        fn nvmlDeviceGetNvLinkRemotePciInfo_v2(link: c_uint, to: *mut nvmlPciInfo_t) = |device, tick| {
            put_pci(device.nvlink(link, tick)?.remote_pci.at(tick)?, 0, to)
        };
        fn nvmlDeviceGetNvLinkRemoteDeviceType(link: c_uint, to: *mut nvmlIntNvLinkDeviceType_t) = |device, tick| {
            put(to, device.nvlink(link, tick)?.remote.at(tick)?.0)
        };
        fn nvmlDeviceGetNvLinkErrorCounter(
            link: c_uint, counter: nvmlNvLinkErrorCounter_t, to: *mut c_ulonglong,
        ) = |device, tick| {
            let errors = device.nvlink(link, tick)?.errors.at(tick)?;
            put(to, *errors.get(counter as usize).ok_or(Code::INVALID_ARGUMENT)?)
        };
        fn nvmlDeviceGetFieldValues(count: c_int, values: *mut nvmlFieldValue_t) = |device, tick| {
            fields(device, tick, count, values)
        };
        fn nvmlGpmQueryDeviceSupport(to: *mut nvmlGpmSupport_t) = |device, _tick| gpm::support(device, to);
        fn nvmlDeviceGetCpuAffinity(length: c_uint, to: *mut c_ulong) = |device, tick| {
            bits(&device.cpus.at(tick)?.0, to, length)
        };
        fn nvmlDeviceGetMemoryAffinity(length: c_uint, to: *mut c_ulong, _scope: nvmlAffinityScope_t) = |device, tick| {
            bits(&[*device.numa_node.at(tick)? as usize], to, length)
        };
    }
    others {
        fn nvmlInit_v2() = |name| start(name);
        fn nvmlShutdown() = |name| answer(name, Subject::Machine, State::shut_down);
        fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut nvmlDevice_t) = |name| {
            // A lost device has no handle any more, and errors may be meant for one device alone.
            answer(name, Subject::Device(index), |_| put(device, handle(index, None)))
        };
        fn nvmlDeviceGetUUID(device: nvmlDevice_t, to: *mut c_char, length: c_uint) = |name| {
            let subject = subject(device);
            answer(name, subject, |state| {
                let uuid = match subject {
                    Subject::Device(index) => &state.device(index)?.uuid,
                    Subject::Mig(index, mig) => &state.mig(index, mig)?.uuid,
                    _ => return Err(Code::INVALID_ARGUMENT),
                };
                put_text(uuid.at(state.tick())?, to, length)
            })
        };
        fn nvmlDeviceGetMemoryInfo(device: nvmlDevice_t, to: *mut nvmlMemory_t) = |name| {
            memory(name, device, |total, reserved, used| {
                // The first version of this counts what is reserved as used.
                let used = used.saturating_add(reserved);
                put(to, nvmlMemory_t { total, free: total.saturating_sub(used), used })
            })
        };
        fn nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, to: *mut nvmlMemory_v2_t) = |name| {
            memory(name, device, |total, reserved, used| {
                let free = total.saturating_sub(used).saturating_sub(reserved);
                // SAFETY: the caller gives a structure with its version filled in.
                let version = unsafe { to.as_ref() }.ok_or(Code::INVALID_ARGUMENT)?.version;
                put(to, nvmlMemory_v2_t { version, total, reserved, free, used })
            })
        };
        fn nvmlDeviceGetMigDeviceHandleByIndex(device: nvmlDevice_t, index: c_uint, to: *mut nvmlDevice_t) = |name| {
            let asked = subject(device);
            of_device(name, device, |device, _| match asked {
                Subject::Device(number) if (index as usize) < device.mig_devices.len() => {
                    put(to, handle(number, Some(index)))
                }
                _ => Err(Code::NOT_FOUND),
            })
        };
        fn nvmlGpmSampleAlloc(to: *mut nvmlGpmSample_t) = |name| {
            of_machine(name, |state| put(to, gpm::handle(state.gpm.allocate())))
        };
        fn nvmlGpmSampleFree(sample: nvmlGpmSample_t) = |name| {
            of_machine(name, |state| state.gpm.free(sample.addr()))
        };
        fn nvmlGpmSampleGet(device: nvmlDevice_t, sample: nvmlGpmSample_t) = |name| {
            gpm::fill(name, subject(device), sample)
        };
        fn nvmlGpmMetricsGet(request: *mut nvmlGpmMetricsGet_t) = |name| gpm::metrics(name, request);
        fn nvmlDeviceGetP2PStatus(
            one: nvmlDevice_t,
            other: nvmlDevice_t,
            capability: nvmlGpuP2PCapsIndex_t,
            to: *mut nvmlGpuP2PStatus_t
        ) = |name| {
            between(name, (one, other), to, |state, from, other| {
                let capability = CAPABILITIES[..5].get(capability as usize).ok_or(Code::INVALID_ARGUMENT)?;
                let p2p = &state.machine()?.p2p;
                let pairs = p2p.get(*capability).or_else(|| p2p.get("all"));
                pairs.ok_or(Code::NOT_SUPPORTED)?.between(from, other, p2p_status)
            })
        };
        fn nvmlDeviceGetTopologyCommonAncestor(
            one: nvmlDevice_t,
            other: nvmlDevice_t,
            to: *mut nvmlGpuTopologyLevel_t
        ) = |name| {
            between(name, (one, other), to, |state, from, other| {
                state.machine()?.ancestors.between(from, other, level)
            })
        };
    }
}
