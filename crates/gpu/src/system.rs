//! The system around the devices, read from `/proc`, `/sys` and `/dev` below a root. Nothing that cannot be read hides
//! the rest, and every read has a bound.

mod confined;
mod driver;
pub(crate) mod holders;
mod iommu;
mod list;
mod nccl;
mod nics;
mod numa;
pub(crate) mod others;
mod pci;
mod shm;
mod variables;
mod xids;

use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::host::Host;
use crate::snapshot::{Gap, OtherDevice, Reading, System};
use paceline_words::plain;

/// Files of one line; sysfs never gives more than a page.
const LINE_BYTES_MAX: u64 = 4096;
/// Names and settings that are shown as they are.
const CHARS_MAX: usize = 200;

/// Reads everything.
pub(crate) fn read(host: &Host<'_>) -> System {
    let pci = pci::read(host);
    let nics = nics::read(host);
    let iommu = iommu::read(host, &pci);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok();
    System {
        kernel: line(host, "/proc/sys/kernel/osrelease").unwrap_or_default(),
        confined_by: confined::read(host),
        allowed_cpus: numa::cpus_allowed(host).into(),
        numa: numa::read(host),
        pci,
        nics,
        iommu,
        shm: shm::read(host),
        memlock_bytes: memlock(host).into(),
        xids: xids::read(host, now).into(),
        nccl: nccl::read(host),
        variables: variables::read(host),
        driver_parameters: driver::parameters(host),
        has_peermem: driver::has_peermem(host).into(),
        has_fabric_manager: driver::has_fabric_manager(host).into(),
    }
}

/// GPUs of other makers than NVIDIA.
pub(crate) fn others(host: &Host<'_>) -> Vec<OtherDevice> {
    others::read(host)
}

/// Why a file could not be read.
fn gap(error: &io::Error) -> Gap {
    match error.kind() {
        io::ErrorKind::PermissionDenied => Gap::NoPermission,
        // Attributes that a device does not have are missing, or answer EINVAL or EOPNOTSUPP.
        io::ErrorKind::NotFound | io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => {
            Gap::NotSupported
        }
        _ => Gap::other(error),
    }
}

/// The beginning of a file, or why it cannot be read.
fn text(host: &Host<'_>, path: &str, most: u64) -> Result<String, Gap> {
    let bytes = host.read(path, most).map_err(|error| gap(&error))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A file of one line, or why it cannot be read.
fn try_line(host: &Host<'_>, path: &str) -> Result<String, Gap> {
    let text = text(host, path, LINE_BYTES_MAX)?;
    Ok(plain(text.trim(), CHARS_MAX))
}

/// A file of one line that is not empty.
fn line(host: &Host<'_>, path: &str) -> Option<String> {
    try_line(host, path).ok().filter(|line| !line.is_empty())
}

/// A file of one number.
fn number(host: &Host<'_>, path: &str) -> Result<u64, Gap> {
    let text = try_line(host, path)?;
    text.parse()
        .map_err(|_| Gap::other(format_args!("`{text}` in {path}")))
}

/// The NUMA node of a device; the kernel writes -1 where the firmware does not tell.
fn numa_node(host: &Host<'_>, folder: &str) -> Reading<u32> {
    let text = try_line(host, &format!("{folder}/numa_node"));
    text.and_then(|text| text.parse().map_err(|_| Gap::NotSupported))
        .into()
}

/// How much memory this process may lock.
fn memlock(host: &Host<'_>) -> Result<Option<u64>, Gap> {
    let limits = text(host, "/proc/self/limits", 16 << 10)?;
    let soft = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))
        .and_then(|rest| rest.split_whitespace().next());
    match soft {
        Some("unlimited") => Ok(None),
        Some(bytes) => bytes.parse().map(Some).map_err(Gap::other),
        None => Err(Gap::NotSupported),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::recorded::Recorded;

    #[test]
    fn the_limit_of_locked_memory_is_the_soft_one() {
        let check = |row: &str, expect: Result<Option<u64>, Gap>| {
            let head =
                "Limit                     Soft Limit           Hard Limit           Units\n";
            let recorded = Recorded::new(&[("/proc/self/limits", &format!("{head}{row}\n"))]);
            assert_eq!(memlock(&recorded.host()), expect, "{row}");
        };
        let row = "Max locked memory         8388608              unlimited            bytes";
        check(row, Ok(Some(8 << 20)));
        let row = "Max locked memory         unlimited            unlimited            bytes";
        check(row, Ok(None));
        check(
            "Max file locks  unlimited unlimited locks",
            Err(Gap::NotSupported),
        );
        let none = Recorded::new(&[]);
        assert_eq!(memlock(&none.host()), Err(Gap::NotSupported));
    }

    #[test]
    fn an_empty_machine_tells_nothing_and_this_one_does_not_hurt() {
        let empty = Recorded::new(&[]);
        let system = read(&empty.host());
        assert_eq!(system.kernel, "");
        assert!(system.pci.is_empty() && system.nics.is_empty() && system.numa.is_empty());
        assert_eq!(system.shm.gap(), Some(&Gap::NotSupported));
        assert_eq!(system.xids.gap(), Some(&Gap::NotSupported));
        assert!(others(&empty.host()).is_empty());

        let variable = |name: &str| std::env::var(name).ok();
        let real = Host::new("/", &variable);
        let system = read(&real);
        assert!(!system.kernel.is_empty());
        others(&real);
    }
}
