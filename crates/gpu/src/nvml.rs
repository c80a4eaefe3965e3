//! NVIDIA's driver, asked through its management library. The library may be missing, older or newer than this program, or
//! fail at any call: what cannot be had is a gap, and nothing that it says is believed without bounds.

mod device;
mod gap;
mod links;
mod now;
mod processes;
mod raw;

use std::ffi::OsStr;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::{NvmlError, nvml_sym};

use crate::places::Places;
use crate::snapshot::{Driver, DriverError, Gap, Reading};

pub(crate) use self::device::{gpu, read as read_device};
pub(crate) use self::gap::is_lasting;
pub(crate) use self::links::read as read_links;
pub(crate) use self::now::{Answer, Ask, Counters, Group, Pace};
pub(crate) use self::raw::Library;

/// Names under which systems have the library: the second comes with development packages and in some containers.
const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// Loads the library and counts its devices.
///
/// *Blocks*: as long as the driver does; a dead one may take for ever.
pub(crate) fn open(places: &Places) -> Result<Library, DriverError> {
    if cfg!(target_feature = "crt-static") {
        // Without the kernel's module there would be nothing to see anyway.
        let has_module = places.root.join("proc/driver/nvidia").exists();
        return Err(match has_module || places.library.is_some() {
            true => DriverError::Static,
            false => DriverError::NoDriver,
        });
    }
    let nvml = load(places).map_err(gap::trouble)?;
    let count = nvml.device_count().map_err(gap::trouble)?;
    Ok(Library::new(nvml, count))
}

fn load(places: &Places) -> Result<Nvml, NvmlError> {
    let with = |path: &OsStr| can_end(Nvml::builder().lib_path(path).init()?);
    if let Some(path) = &places.library {
        return with(path.as_os_str());
    }
    let [first, second] = NAMES;
    match with(first.as_ref()) {
        // The words about the name that should be there say more.
        Err(NvmlError::LibloadingError(missing)) => match with(second.as_ref()) {
            Err(NvmlError::LibloadingError(_)) => Err(NvmlError::LibloadingError(missing)),
            other => other,
        },
        other => other,
    }
}

/// The wrapper panics at its end where the library has no function for it; then it is no NVML and stays loaded.
fn can_end(nvml: Nvml) -> Result<Nvml, NvmlError> {
    let found = nvml_sym(nvml.lib().nvmlShutdown.as_ref()).map(|_| ());
    if let Err(missing) = found {
        std::mem::forget(nvml);
        return Err(missing);
    }
    Ok(nvml)
}

/// Versions of driver, library and CUDA.
pub(crate) fn driver(library: &Library) -> Driver {
    let nvml = library.nvml();
    let cuda = nvml.sys_cuda_driver_version().map_err(gap::gap);
    Driver {
        trouble: None,
        version: raw::driver_version(nvml).map_err(gap::gap).into(),
        nvml: raw::library_version(nvml).map_err(gap::gap).into(),
        cuda: cuda.and_then(cuda_version).into(),
    }
}

fn cuda_version(number: i32) -> Result<(u32, u32), Gap> {
    let number = u32::try_from(number).ok().filter(|number| *number >= 1000);
    let number = number.ok_or_else(|| Gap::other("the driver names no version of CUDA"))?;
    Ok((number / 1000, number % 1000 / 10))
}

/// A number that makes sense up to `most`.
fn up_to<T: PartialOrd + std::fmt::Display>(most: T, what: &str, value: T) -> Result<T, Gap> {
    if value > most {
        return Err(Gap::other(format!(
            "the driver says {value} {what}, more than {most}"
        )));
    }
    Ok(value)
}

/// What the wrapper says, as a reading.
fn reading<T>(answer: Result<T, NvmlError>) -> Reading<T> {
    answer.map_err(gap::gap).into()
}

#[cfg(test)]
mod tests;
