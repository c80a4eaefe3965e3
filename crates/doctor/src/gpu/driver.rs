//! NVIDIA's driver: there, loaded, allowed, of one version, and with devices.
//!
//! *Source*: return codes of `nvmlInit_v2` in NVIDIA's NVML reference.

use paceline_gpu::bus::Bus;
use paceline_gpu::snapshot::{DriverError, Gap, PciKind, Snapshot};

use super::rules::{self, Rule, rules};
use super::words::{joined, models};
use crate::finding::{Notes, plain};

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let mut sheet = notes.sheet("driver");
    let driver = &snapshot.driver;
    let cuda = driver.cuda.known();
    let cuda = cuda.map(|(major, minor)| format!(", up to CUDA {major}.{minor}"));
    sheet.fact(match (driver.version.known(), &driver.trouble) {
        (Some(version), _) => format!("{}{}", plain(version), cuda.unwrap_or_default()),
        (None, Some(_)) => "does not answer".to_owned(),
        (None, None) => "of unknown version".to_owned(),
    });
    let mut sheet = notes.sheet("GPUs");
    sheet.fact(match snapshot.devices.is_empty() {
        true => "none that the driver shows".to_owned(),
        false => joined(models(snapshot)),
    });
    match &driver.trouble {
        Some(error) => judge_error(snapshot, error, notes),
        None if snapshot.devices.is_empty() => judge_none(snapshot, notes),
        None => rules::judge(DENIED, &snapshot.devices, notes),
    }
}

/// Devices that this user may not open.
const DENIED: &[Rule] = rules! {
    Warning "GPUs", |device| [device.name.gap(), device.memory.gap()].contains(&Some(&Gap::NoPermission)) =>
        "this user may not use {}",
        "CUDA programs do not see it, so a job that counts on it finds too few GPUs; a scheduler that gave the job other GPUs means it so",
        "`ls -l /dev/nvidia*` shows which group may: join it (often `video` or `render`) and log in again, or ask the scheduler for more GPUs";
};

fn judge_error(snapshot: &Snapshot, error: &DriverError, notes: &mut Notes) {
    let bus = Bus::of(&snapshot.system);
    let cards: Vec<_> = bus.of_nvidia(PciKind::Gpu).collect();
    let mut sheet = notes.sheet("driver");
    const NO_GPU: &str = "programs find no GPU: a job that asks for one fails when it starts, or trains on the CPU without a word";
    match error {
        DriverError::NoLibrary(_) | DriverError::NoDriver if !bus.is_empty() && cards.is_empty() => sheet.note(
            "there is no NVIDIA GPU in this machine, and no driver for one",
            "nothing here can use CUDA: jobs train on the CPU, or on another maker's devices",
            "nothing, if you know that; a card that should be here is not seen by the bus: check its seat and its power cables",
        ),
        DriverError::NoLibrary(words) => sheet.error(
            format!("{error} ({})", plain(words)),
            NO_GPU,
            match snapshot.system.is_container() {
                true => {
                    "give the container the GPUs, which brings the library: `docker run --gpus all` (needs the NVIDIA Container \
                     Toolkit), `resources: limits: nvidia.com/gpu: N` in Kubernetes"
                }
                false => {
                    "install the NVIDIA driver of your distribution; if the library lies in an unusual place, name it in \
                     PACELINE_NVML_LIBRARY"
                }
            },
        ),
        DriverError::NoDriver => {
            let other = cards.iter().find_map(|card| card.driver.as_deref());
            let other = other.filter(|driver| *driver != "nvidia");
            sheet.error(
                match other {
                    None => error.to_string(),
                    Some(other) => format!("{error}; {} has the GPU", plain(other)),
                },
                NO_GPU,
                match other {
                    Some("vfio-pci") => {
                        "the GPU is set aside for a virtual machine: train there, or take it off vfio-pci (`vfio-pci.ids=` on the \
                         kernel's command line, /etc/modprobe.d) and start the machine again"
                    }
                    Some("nouveau") => {
                        "install the NVIDIA driver, which shuts nouveau out in /etc/modprobe.d, and start the machine again"
                    }
                    _ => {
                        "`sudo modprobe nvidia`; if that fails `sudo dmesg | grep -i nvrm` says why: after an update of the kernel the \
                         module must be built anew (`sudo dkms autoinstall`), Secure Boot takes only signed ones"
                    }
                },
            );
        }
        DriverError::NoPermission => sheet.error(
            error.to_string(),
            NO_GPU,
            "`ls -l /dev/nvidia*` shows which group may: join it (often `video` or `render`) and log in again; under a scheduler ask \
             for a GPU, since it hides those that the job was not given",
        ),
        DriverError::VersionMismatch => sheet.error(
            error.to_string(),
            "the driver was updated while its old module runs: every program that starts fails to use a GPU, those that run go on",
            "start the machine again; or end what uses the GPUs, then `sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo \
             modprobe nvidia`",
        ),
        DriverError::Other(_) => sheet.error(
            plain(&error.to_string()),
            NO_GPU,
            "`nvidia-smi` says more, or `sudo dmesg | grep -i nvrm`; in a container that worked before, start the container again",
        ),
    }
}

fn judge_none(snapshot: &Snapshot, notes: &mut Notes) {
    let cards = Bus::of(&snapshot.system).of_nvidia(PciKind::Gpu).count();
    notes.sheet("GPUs").error(
        match cards {
            0 => "NVIDIA's driver runs and has no GPU".to_owned(),
            1 => "NVIDIA's driver shows no GPU, although one is on the bus".to_owned(),
            _ => format!("NVIDIA's driver shows no GPU, although {cards} are on the bus"),
        },
        "a job that asks for a GPU fails when it starts",
        match cards {
            0 => "check the card's seat and power cables, and that the firmware shows it; in a virtual machine, that it is passed through",
            _ => {
                "in a container or under a scheduler ask for a GPU; otherwise `sudo dmesg | grep -i nvrm` says why the driver does not \
                 start it"
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};
    use paceline_gpu::snapshot::{PciDevice, Reading};

    fn without(trouble: DriverError) -> Snapshot {
        let mut snapshot = Snapshot::default();
        snapshot.driver.trouble = Some(trouble);
        snapshot
    }

    fn on_bus(mut snapshot: Snapshot, maker: u16, driver: Option<&str>) -> Snapshot {
        snapshot.system.pci = vec![PciDevice {
            address: "0000:01:00.0".to_owned(),
            kind: PciKind::Gpu,
            id: (maker, 1),
            driver: driver.map(str::to_owned),
            ..PciDevice::default()
        }];
        snapshot
    }

    #[test]
    fn each_trouble_has_its_own_remedy() {
        let library = || DriverError::NoLibrary("no such file".to_owned());
        check(judge, &machine(1), &[]);
        check(
            judge,
            &without(library()),
            &["error: driver: install the NVIDIA driver"],
        );
        let mut container = without(library());
        container.system.confined_by = vec!["docker".to_owned()];
        check(
            judge,
            &container,
            &["error: driver: give the container the GPUs"],
        );
        check(
            judge,
            &without(DriverError::NoDriver),
            &["error: driver: `sudo modprobe nvidia`"],
        );
        check(
            judge,
            &without(DriverError::NoPermission),
            &["error: driver: `ls -l /dev/nvidia*`"],
        );
        check(
            judge,
            &without(DriverError::VersionMismatch),
            &["error: driver: start the machine again"],
        );
        check(
            judge,
            &without(DriverError::Other("odd".to_owned())),
            &["error: driver: `nvidia-smi` says more"],
        );
    }

    #[test]
    fn a_machine_without_a_card_is_no_fault() {
        let library = || DriverError::NoLibrary(String::new());
        let other = on_bus(without(library()), 0x8086, None);
        check(judge, &other, &["note: driver: nothing"]);
        let card = on_bus(without(library()), 0x10de, None);
        check(judge, &card, &["error: driver: install"]);
    }

    #[test]
    fn another_driver_that_has_the_card_is_named() {
        let check_driver = |driver: &str, expect: &str| {
            check(
                judge,
                &on_bus(without(DriverError::NoDriver), 0x10de, Some(driver)),
                &[expect],
            );
        };
        check_driver("vfio-pci", "error: driver: the GPU is set aside");
        check_driver("nouveau", "error: driver: install");
        check_driver("nvidia", "error: driver: `sudo modprobe");
    }

    #[test]
    fn a_device_that_this_user_may_not_open_is_named() {
        let mut snapshot = machine(2);
        snapshot.devices[1].memory = Reading::missing(Gap::NoPermission);
        check(judge, &snapshot, &["warning: GPUs: `ls -l /dev/nvidia*`"]);
    }

    #[test]
    fn a_driver_without_devices_is_a_fault() {
        check(
            judge,
            &Snapshot::default(),
            &["error: GPUs: check the card's seat"],
        );
        let hidden = on_bus(Snapshot::default(), 0x10de, Some("nvidia"));
        check(judge, &hidden, &["error: GPUs: in a container"]);
    }
}
