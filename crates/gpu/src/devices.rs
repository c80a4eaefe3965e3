//! The GPUs of this host, as NVIDIA's driver reports them, and which of them CUDA programs see.

use crate::nvml;
use crate::places::Places;
use crate::snapshot::{DEVICES_MAX, Device, DriverError, Reading};
use paceline_words::counted;

/// Fewer GPUs than asked for.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{} asked for, {found} found{}", counted(*.asked, "GPU"), .reason.as_ref().map(|r| format!(" ({r})")).unwrap_or_default())]
pub struct DeviceError {
    asked: usize,
    found: usize,
    /// Why none were found, where the driver did not answer.
    reason: Option<String>,
}

impl DeviceError {
    /// What a user can do about it.
    pub fn hint(&self) -> Option<String> {
        Some(match self.found {
            0 => "train on the CPU with --use-gpu 0, or check the driver with nvidia-smi".into(),
            found => format!("use at most --use-gpu {found}"),
        })
    }
}

/// The number of GPUs, or why the driver cannot say.
///
/// *Blocks*: as long as the driver does; nothing wakes the devices.
pub fn count() -> Result<usize, String> {
    let places = Places::from_env();
    count_at(&places).map_err(|error| reason(&error, &places))
}

/// The same at these places, with the driver's own error.
///
/// *Blocks*: as [`count`].
pub fn count_at(places: &Places) -> Result<usize, DriverError> {
    nvml::open(places).map(|library| library.count() as usize)
}

/// Why the driver at these places cannot say, in words.
pub fn reason(error: &DriverError, places: &Places) -> String {
    match error {
        DriverError::NoLibrary(words) if places.library.is_some() => {
            format!("NVIDIA's driver library cannot be loaded: {words}")
        }
        error => error.to_string(),
    }
}

/// A GPU as CUDA's variables name it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gpu {
    /// The driver's number.
    pub index: u32,
    /// Such as `GPU-5e8c...`; nothing where the driver does not tell, as the others.
    pub uuid: String,
    /// Its model.
    pub name: String,
    /// Place on the bus: `0000:18:00.0`.
    pub pci: String,
    /// Names of its MIG instances: `MIG-7c1d...`.
    pub mig: Vec<String>,
}

impl Gpu {
    /// A device of a snapshot, which does not have the names of MIG instances.
    #[must_use]
    pub fn of(device: &Device) -> Self {
        let text = |reading: &Reading<String>| reading.known().cloned().unwrap_or_default();
        Self {
            index: device.index,
            uuid: text(&device.uuid),
            name: text(&device.name),
            pci: text(&device.pci),
            mig: Vec::new(),
        }
    }
}

/// The GPUs in the order of the driver, those that do not answer too.
///
/// *Blocks*: as long as the driver does, which wakes each device.
pub fn list(places: &Places) -> Result<Vec<Gpu>, DriverError> {
    let library = nvml::open(places)?;
    let gpus = (0..library.count()).map(|index| nvml::gpu(&library, index));
    Ok(gpus.collect())
}

/// The driver's numbers of the GPUs that CUDA programs see, in the order in which they see them, or why that is not known.
/// `variable` is the environment that they will have.
///
/// *Source*: CUDA's `CUDA_VISIBLE_DEVICES`: numbers count the GPUs in CUDA's own order, which is that of speed unless
/// `CUDA_DEVICE_ORDER` is `PCI_BUS_ID`; names may be shortened; an entry that is no GPU ends the list.
///
/// *Example*:
/// ```
/// use paceline_gpu::devices::{Gpu, visible};
///
/// let gpu = |index| Gpu { index, ..Gpu::default() };
/// let variable = |name: &str| (name == "CUDA_VISIBLE_DEVICES").then(|| "1,0".to_owned());
/// assert_eq!(visible(&[gpu(0), gpu(1)], &variable), Ok(vec![1, 0]));
/// ```
pub fn visible(
    gpus: &[Gpu],
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<Vec<u32>, String> {
    let mut numbered: Vec<&Gpu> = gpus.iter().take(DEVICES_MAX).collect();
    // The driver counts in this order already on all machines that are known; it promises nothing.
    numbered.sort_by(|a, b| a.pci.cmp(&b.pci));
    let Some(list) = variable("CUDA_VISIBLE_DEVICES") else {
        return Ok(numbered.iter().map(|gpu| gpu.index).collect());
    };
    let is_mixed = numbered.windows(2).any(|pair| pair[0].name != pair[1].name);
    let by_speed = is_mixed && variable("CUDA_DEVICE_ORDER").as_deref() != Some("PCI_BUS_ID");
    let mut seen: Vec<u32> = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let Some(gpu) = named(&numbered, entry, by_speed)? else {
            break;
        };
        if !seen.contains(&gpu.index) {
            seen.push(gpu.index);
        }
    }
    Ok(seen)
}

/// The GPU of an entry; none where it is no GPU.
fn named<'a>(numbered: &[&'a Gpu], entry: &str, by_speed: bool) -> Result<Option<&'a Gpu>, String> {
    if let Ok(number) = entry.parse::<usize>() {
        if by_speed {
            return Err(
                "GPUs of different models are numbered by speed; CUDA_DEVICE_ORDER=PCI_BUS_ID changes that"
                    .to_owned(),
            );
        }
        return Ok(numbered.get(number).copied());
    }
    let entry = entry.to_lowercase();
    if entry.is_empty() {
        return Ok(None);
    }
    // Older names of MIG instances say which GPU they are of: `MIG-GPU-5e8c.../1/0`.
    let name = entry
        .strip_prefix("mig-gpu-")
        .map_or(entry.clone(), |rest| {
            let uuid = rest.split_once('/').map_or(rest, |(uuid, _)| uuid);
            format!("gpu-{uuid}")
        });
    let fits = |gpu: &&&Gpu| {
        let mut names = std::iter::once(&gpu.uuid).chain(&gpu.mig);
        names.any(|own| own.to_lowercase().starts_with(&name))
    };
    let mut fitting = numbered.iter().filter(fits);
    match (fitting.next(), fitting.next()) {
        (Some(gpu), None) => Ok(Some(gpu)),
        (None, _) if name.starts_with("mig-") => Err(format!(
            "CUDA_VISIBLE_DEVICES has `{}`, whose GPU is not known",
            entry.escape_default()
        )),
        _ => Ok(None),
    }
}

/// Checks that `asked` GPUs exist; `found` is what [`count`] returned.
///
/// *Errors*: there are fewer.
pub fn require(asked: usize, found: Result<usize, String>) -> Result<(), DeviceError> {
    let (found, reason) = match found {
        Ok(found) => (found, None),
        Err(reason) => (0, Some(reason)),
    };
    if asked > found {
        return Err(DeviceError {
            asked,
            found,
            reason,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
