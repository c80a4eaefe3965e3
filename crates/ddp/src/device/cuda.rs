//! NVIDIA's GPUs: checks the run-time requirements of Burn's CUDA back end before it starts.

use std::path::{Path, PathBuf};

use super::error::DeviceError;
#[cfg(feature = "cuda")]
use super::{DeviceKind, Survey};

/// Path below a toolkit's folder of the bitcode with `exp`, `log`, `tanh` and the like, which kernels are linked with.
const LIBDEVICE: &str = "nvvm/libdevice/libdevice.10.bc";

/// Toolkits searched if `CUDA_PATH` is not set.
///
/// *Source*: cubecl-llvm 0.11.3, `nvptx/libdevice.rs`, which searches there when the first kernel needs the file, and panics
/// without it.
#[cfg(feature = "cuda")]
const TOOLKITS: [&str; 4] = ["/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda", "/usr"];

/// The GPUs that the driver exposes to this process.
#[cfg(feature = "cuda")]
pub(super) fn survey() -> Result<Survey, DeviceError> {
    // Burn treats every driver error as a machine without devices.
    let places = paceline_nccl::Places::from_env();
    let count = paceline_nccl::devices(&places).map_err(why_not)?;
    if count == 0 {
        return Err(none());
    }
    let burns = burn::tensor::Device::enumerate(burn::tensor::DeviceType::Cuda).len();
    if burns != count {
        return Err(DeviceError::Refused {
            kind: DeviceKind::Cuda,
            reason: format!("the driver has {count} devices, but Burn finds {burns}"),
        });
    }
    let toolkit = std::env::var("CUDA_PATH").ok().map(PathBuf::from);
    libdevice(toolkit.as_deref(), &TOOLKITS.map(PathBuf::from))?;
    Ok(Survey {
        kind: DeviceKind::Cuda,
        count,
        software: None,
    })
}

/// The driver's error code for no device; it also returns it if `CUDA_VISIBLE_DEVICES` hides all devices.
#[cfg(feature = "cuda")]
const NO_DEVICE: i32 = 100;

/// Only a missing driver or a driver without devices counts as absence; other errors are reported.
#[cfg(feature = "cuda")]
fn why_not(error: paceline_nccl::NcclError) -> DeviceError {
    let kind = DeviceKind::Cuda;
    match &error {
        paceline_nccl::NcclError::Library { library, looked } => DeviceError::NoLibrary {
            kind,
            library,
            reason: format!("looked for {looked}"),
        },
        paceline_nccl::NcclError::Driver {
            code: NO_DEVICE, ..
        } => none(),
        _ => DeviceError::Refused {
            kind,
            reason: match error.hint() {
                Some(hint) => format!("{error}; {hint}"),
                None => error.to_string(),
            },
        },
    }
}

#[cfg(feature = "cuda")]
fn none() -> DeviceError {
    let hidden = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    DeviceError::NoDevice {
        kind: DeviceKind::Cuda,
        reason: why_none(hidden.as_deref()),
    }
}

/// The likely reason why the driver exposes no device.
fn why_none(visible: Option<&str>) -> String {
    match visible {
        Some(list) => format!(
            "the driver exposes none, and CUDA_VISIBLE_DEVICES is `{}`",
            list.escape_default()
        ),
        None => "the driver exposes none".into(),
    }
}

/// The bitcode file: in the named toolkit, else in the first of `toolkits` that has its folder.
fn libdevice(named: Option<&Path>, toolkits: &[PathBuf]) -> Result<PathBuf, DeviceError> {
    let toolkits = match named {
        Some(named) => vec![named.to_owned()],
        None => toolkits.to_vec(),
    };
    let has_folder = |toolkit: &&PathBuf| toolkit.join("nvvm/libdevice").is_dir();
    let file = toolkits
        .iter()
        .find(has_folder)
        .map(|toolkit| toolkit.join(LIBDEVICE));
    file.filter(|file| file.is_file())
        .ok_or_else(|| DeviceError::NoLibdevice {
            searched: toolkits
                .iter()
                .map(|toolkit| toolkit.join(LIBDEVICE))
                .collect(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder in which the toolkits `with` have the file, and those `without` only have its folder.
    fn toolkits(with: &[&str], without: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (names, has_file) in [(with, true), (without, false)] {
            for name in names {
                let file = root.path().join(name).join(LIBDEVICE);
                std::fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
                if has_file {
                    std::fs::write(file, "bitcode").expect("a file");
                }
            }
        }
        root
    }

    #[test]
    fn the_mathematics_of_kernels_are_found_where_the_compiler_will_look() {
        let root = toolkits(&["b", "c", "named"], &["empty"]);
        let at = |name: &str| root.path().join(name);
        let check = |named: Option<&str>, toolkits: &[&str], expect: Result<&str, &[&str]>| {
            let named = named.map(at);
            let toolkits: Vec<PathBuf> = toolkits.iter().map(|name| at(name)).collect();
            let expect = expect
                .map(|name| at(name).join(LIBDEVICE))
                .map_err(|names| DeviceError::NoLibdevice {
                    searched: names.iter().map(|name| at(name).join(LIBDEVICE)).collect(),
                });
            assert_eq!(libdevice(named.as_deref(), &toolkits), expect);
        };
        check(None, &["a", "b", "c"], Ok("b"));
        check(None, &["c", "b"], Ok("c"));
        check(Some("named"), &["b"], Ok("named"));
        // A named toolkit is the only one searched; otherwise only the first that has the folder.
        check(Some("a"), &["b"], Err(&["a"]));
        check(None, &["empty", "b"], Err(&["empty", "b"]));
        check(None, &["a", "d"], Err(&["a", "d"]));
        check(None, &[], Err(&[]));
    }

    #[test]
    fn a_variable_that_may_hide_all_gpus_is_quoted() {
        assert_eq!(
            why_none(Some("-1")),
            "the driver exposes none, and CUDA_VISIBLE_DEVICES is `-1`"
        );
        assert!(!why_none(None).contains("CUDA_VISIBLE_DEVICES"));
    }
}
