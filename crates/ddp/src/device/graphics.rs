//! GPUs through a graphics API, Vulkan or Metal: its adapters, and opening one without a panic.

use burn::tensor::wgpu::{WgpuBackend, WgpuInitError, wgpu};
use burn::tensor::{Device, DeviceKind as Selector, try_read_sync};

use super::adapters::{Adapter, Sort, Usable, usable, why_none};
use super::error::DeviceError;
use super::{DeviceKind, Survey};

/// The adapters that ranks may compute on.
pub(super) fn survey(kind: DeviceKind) -> Result<Survey, DeviceError> {
    let found = found(kind)?;
    let software = found.iter().find(|usable| usable.sort == Sort::Software);
    Ok(Survey {
        kind,
        count: found.len(),
        software: software.map(|usable| usable.name.clone()),
    })
}

/// Opens one of them.
pub(super) fn open(kind: DeviceKind, index: usize) -> Result<Device, DeviceError> {
    let found = found(kind)?;
    let Some(chosen) = found.get(index) else {
        return Err(DeviceError::NoSuchDevice {
            kind,
            index,
            count: found.len(),
        });
    };
    let options = || {
        Device::wgpu_options()
            .device_kind(selector(chosen))
            .graphics_api(api(kind).0)
    };
    match options().init() {
        Ok(device) => Ok(device),
        // This process opened it before, through this function or a tensor.
        Err(WgpuInitError::Registration { .. }) => Ok(again(kind, selector(chosen))),
        Err(error) => Err(DeviceError::Refused {
            kind,
            reason: error.to_string(),
        }),
    }
}

/// A device that is already open.
fn again(kind: DeviceKind, selector: Selector) -> Device {
    match kind {
        #[cfg(feature = "metal")]
        DeviceKind::Metal => Device::metal(selector),
        #[cfg(feature = "vulkan")]
        _ => Device::vulkan(selector),
        #[cfg(not(feature = "vulkan"))]
        _ => Device::metal(selector),
    }
}

/// The graphics API of a kind, as Burn and as wgpu name it.
fn api(kind: DeviceKind) -> (WgpuBackend, wgpu::Backend) {
    match kind {
        DeviceKind::Metal => (WgpuBackend::Metal, wgpu::Backend::Metal),
        _ => (WgpuBackend::Vulkan, wgpu::Backend::Vulkan),
    }
}

fn selector(chosen: &Usable) -> Selector {
    match chosen.sort {
        Sort::Discrete => Selector::DiscreteGpu(chosen.index),
        Sort::Integrated => Selector::IntegratedGpu(chosen.index),
        Sort::Virtual => Selector::VirtualGpu(chosen.index),
        Sort::Software | Sort::Other => Selector::Cpu,
    }
}

fn found(kind: DeviceKind) -> Result<Vec<Usable>, DeviceError> {
    let (_, api) = api(kind);
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends: api.into(),
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    // Outside a browser the answer is immediate.
    let adapters = try_read_sync(instance.enumerate_adapters(api.into())).unwrap_or_default();
    let adapters: Vec<Adapter> = adapters.iter().map(described).collect();
    let usable = usable(&adapters);
    if !usable.is_empty() {
        return Ok(usable);
    }
    let any = wgpu::RequestAdapterOptions::default();
    let said = match try_read_sync(instance.request_adapter(&any)) {
        Some(Err(error)) => error.to_string(),
        Some(Ok(_)) | None => String::new(),
    };
    Err(DeviceError::NoDevice {
        kind,
        reason: why_none(&adapters, kind.name(), &said),
    })
}

fn described(adapter: &wgpu::Adapter) -> Adapter {
    let info = adapter.get_info();
    Adapter {
        sort: match info.device_type {
            wgpu::DeviceType::DiscreteGpu => Sort::Discrete,
            wgpu::DeviceType::IntegratedGpu => Sort::Integrated,
            wgpu::DeviceType::VirtualGpu => Sort::Virtual,
            wgpu::DeviceType::Cpu => Sort::Software,
            wgpu::DeviceType::Other => Sort::Other,
        },
        name: info.name,
        pci: info.device_pci_bus_id,
    }
}
