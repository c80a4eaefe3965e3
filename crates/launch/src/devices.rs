//! Which GPUs the ranks will see and in which order, and which NUMA node each is on, without any driver library.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use crate::binding::{BindError, files};

/// No machine has as many GPUs.
const GPUS_MAX: usize = 1024;

const CUDA: &str = "CUDA_VISIBLE_DEVICES";
const HIP: &str = "HIP_VISIBLE_DEVICES";
const ROCR: &str = "ROCR_VISIBLE_DEVICES";

/// A rank's environment as far as the launcher does not set it.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// What is known about where the GPUs are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Near {
    /// The NUMA node of each GPU that the ranks see, in the order in which they see them; at least one.
    Nodes(Vec<usize>),
    /// Nothing, and why.
    Unknown(String),
}

/// A list of visible devices that is too short for the ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TooFew {
    pub(crate) variable: &'static str,
    pub(crate) value: String,
}

impl Near {
    /// Looks at the GPUs, with `root` for `/`.
    ///
    /// *Errors*: a file that cannot be read or makes no sense.
    pub(crate) fn read(root: &Path, var: Lookup<'_>) -> Result<Self, BindError> {
        let mut gpus = nvidia(root)?;
        let mut lists = vec![CUDA];
        let is_amd = gpus.is_empty();
        if is_amd {
            gpus = amd(root)?;
            // The runtime below HIP takes its choice first; HIP counts what that leaves.
            lists = vec![ROCR, if set(var, HIP).is_some() { HIP } else { CUDA }];
        }
        if gpus.is_empty() {
            return Ok(Self::Unknown("no GPU was found".to_owned()));
        }
        let by_speed = !is_amd
            && gpus.iter().any(|gpu| gpu.model != gpus[0].model)
            && var("CUDA_DEVICE_ORDER").as_deref() != Some("PCI_BUS_ID");
        let mut seen: Vec<&Gpu> = gpus.iter().collect();
        let mut is_numbered = true;
        for name in lists {
            let Some(value) = var(name) else { continue };
            match select(&seen, &value) {
                Ok(chosen) => seen = chosen,
                Err(entry) => {
                    return Ok(Self::Unknown(format!(
                        "{name} has `{entry}`, whose GPU is not known"
                    )));
                }
            }
            is_numbered = value
                .split(',')
                .any(|entry| entry.trim().parse::<usize>().is_ok());
            if seen.is_empty() {
                return Ok(Self::Unknown(format!("{name}={value} shows no GPU")));
            }
        }
        if by_speed && is_numbered {
            let why = "GPUs of different models are numbered by speed; CUDA_DEVICE_ORDER=PCI_BUS_ID changes that";
            return Ok(Self::Unknown(why.to_owned()));
        }
        let nodes = seen.iter().map(|gpu| gpu.node).collect::<Option<_>>();
        Ok(nodes.map_or_else(
            || Self::Unknown("the system does not know where the GPUs are".to_owned()),
            Self::Nodes,
        ))
    }
}

/// The variables by which the rank with this number sees one GPU, its own, as the first.
///
/// *Source*: torchrun's `--virtual-local-rank`. An empty list, which hides all GPUs, stays as it is.
pub(crate) fn single(
    local_rank: usize,
    var: Lookup<'_>,
) -> Result<Vec<(&'static str, String)>, TooFew> {
    let hip = set(var, HIP);
    let (variable, value) = if hip.is_some() {
        (HIP, hip)
    } else {
        (CUDA, var(CUDA))
    };
    let own = match value {
        None => local_rank.to_string(),
        Some(value) if value.trim().is_empty() => return Ok(Vec::new()),
        Some(value) => match value.split(',').nth(local_rank) {
            Some(entry) => entry.trim().to_owned(),
            None => return Err(TooFew { variable, value }),
        },
    };
    let mut vars = vec![(CUDA, own.clone())];
    if variable == HIP {
        vars.push((HIP, own));
    }
    Ok(vars)
}

fn set(var: Lookup<'_>, name: &str) -> Option<String> {
    var(name).filter(|value| !value.is_empty())
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Gpu {
    /// In lower case, with `gpu-` before it.
    uuid: String,
    model: String,
    node: Option<usize>,
}

/// What a list of visible devices leaves, or the entry that cannot be told. As CUDA does, an entry that does not exist
/// ends the list.
fn select<'a>(gpus: &[&'a Gpu], value: &str) -> Result<Vec<&'a Gpu>, String> {
    let mut chosen = Vec::new();
    for entry in value.split(',').map(str::trim).take(GPUS_MAX) {
        let name = entry.to_lowercase();
        let found = if let Ok(number) = entry.parse::<usize>() {
            gpus.get(number).copied()
        } else if name.starts_with("mig-") {
            // A part of a GPU; its newer names do not say of which.
            return Err(entry.to_owned());
        } else {
            // A name may be shortened as long as it is one GPU's only.
            let mut fitting = gpus
                .iter()
                .filter(|gpu| !name.is_empty() && gpu.uuid.starts_with(&name));
            fitting.next().filter(|_| fitting.next().is_none()).copied()
        };
        match found {
            Some(gpu) => chosen.push(gpu),
            None => break,
        }
    }
    Ok(chosen)
}

/// NVIDIA's GPUs in the order of their places on the PCI bus, which is CUDA's for equal ones.
fn nvidia(root: &Path) -> Result<Vec<Gpu>, BindError> {
    let folder = root.join("proc/driver/nvidia/gpus");
    let mut gpus = Vec::new();
    for name in names(&folder)? {
        let path = folder.join(&name).join("information");
        let Some(text) = files::text(&path)? else {
            continue;
        };
        let field = |wanted: &str| {
            let mut fields = text.lines().filter_map(|line| line.split_once(':'));
            let found = fields.find(|(name, _)| name.trim() == wanted);
            found.map(|(_, value)| value.trim().to_owned())
        };
        if field("GPU Excluded").as_deref() == Some("Yes") {
            continue;
        }
        let place = name.to_lowercase();
        let gpu = Gpu {
            uuid: field("GPU UUID").unwrap_or_default().to_lowercase(),
            model: field("Model").unwrap_or_default(),
            node: node(root, &place)?,
        };
        gpus.push((place, gpu));
    }
    gpus.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(gpus.into_iter().map(|(_, gpu)| gpu).collect())
}

/// AMD's GPUs in the order of the kernel's list of compute nodes, which is HIP's.
fn amd(root: &Path) -> Result<Vec<Gpu>, BindError> {
    let folder = root.join("sys/class/kfd/kfd/topology/nodes");
    let mut numbers: Vec<usize> = names(&folder)?
        .iter()
        .filter_map(|name| name.parse().ok())
        .collect();
    numbers.sort_unstable();
    let mut gpus = Vec::new();
    for number in numbers {
        let path = folder.join(number.to_string()).join("properties");
        let text = match files::text(&path) {
            Ok(Some(text)) => text,
            Ok(None) => continue,
            // A GPU that was not given to this container.
            Err(BindError::Read { source, .. }) if source.kind() == ErrorKind::PermissionDenied => {
                continue;
            }
            Err(error) => return Err(error),
        };
        let field = |wanted: &str| {
            let mut fields = text.lines().filter_map(|line| line.split_once(' '));
            let found = fields.find(|(name, _)| *name == wanted);
            let value = found.map_or(Ok(0), |(_, value)| value.trim().parse::<u64>());
            value.map_err(|_| files::malformed(&path, &text, "a number for each property"))
        };
        if field("simd_count")? == 0 {
            continue;
        }
        // Eight bits of bus, five of device; the last three count the parts of one GPU.
        let location = field("location_id")?;
        let place = format!(
            "{:04x}:{:02x}:{:02x}.0",
            field("domain")?,
            location >> 8 & 0xff,
            location >> 3 & 0x1f
        );
        gpus.push(Gpu {
            uuid: format!("gpu-{:016x}", field("unique_id")?),
            model: String::new(),
            node: node(root, &place)?,
        });
    }
    Ok(gpus)
}

/// The NUMA node of a PCI device; -1 in the file means that the firmware does not say.
fn node(root: &Path, place: &str) -> Result<Option<usize>, BindError> {
    let path = root
        .join("sys/bus/pci/devices")
        .join(place)
        .join("numa_node");
    Ok(files::number(&path)?.and_then(|node| usize::try_from(node).ok()))
}

/// The entries of a folder that may not be there.
fn names(folder: &Path) -> Result<Vec<String>, BindError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => {
            return Err(BindError::Read {
                path: folder.to_owned(),
                source,
            });
        }
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    Ok(names
        .filter_map(|name| name.into_string().ok())
        .take(GPUS_MAX)
        .collect())
}

#[cfg(test)]
mod tests;
