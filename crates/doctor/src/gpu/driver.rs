//! NVIDIA's driver: there, loaded, allowed, of one version, and with devices.
//!
//! *Source*: return codes of `nvmlInit_v2` in NVIDIA's NVML reference.

use paceline_gpu::bus::Bus;
use paceline_gpu::snapshot::{DriverError, Gap, PciKind, Snapshot};
use paceline_words::{Lang, say};

use super::rules::{self, Rule, rules};
use super::words::models;
use crate::checks;
use crate::finding::{Notes, plain};

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let lang = notes.lang;
    let driver = &snapshot.driver;
    let cuda = driver.cuda.known().map(|(major, minor)| {
        say!(
            lang,
            ", up to CUDA {major}.{minor}",
            ", CUDA {major}.{minor}까지 지원"
        )
    });
    let said = match (driver.version.known(), &driver.trouble) {
        (Some(version), _) => format!("{}{}", plain(version), cuda.unwrap_or_default()),
        (None, Some(_)) => say!(lang, "does not answer", "응답하지 않음"),
        (None, None) => say!(lang, "of unknown version", "버전을 알 수 없음"),
    };
    notes.sheet(checks::DRIVER).fact(said);
    notes
        .sheet(checks::GPUS)
        .fact(match snapshot.devices.is_empty() {
            true => say!(
                lang,
                "none that the driver shows",
                "드라이버에 보이는 GPU 없음"
            ),
            false => models(snapshot, lang),
        });
    match &driver.trouble {
        Some(error) => judge_error(snapshot, error, notes),
        None if snapshot.devices.is_empty() => judge_none(snapshot, notes),
        None => rules::judge(DENIED, &snapshot.devices, notes),
    }
}

/// Devices that this user may not open.
const DENIED: &[Rule] = rules! {
    Warning GPUS, |device| [device.name.gap(), device.memory.gap()].contains(&Some(&Gap::NoPermission)) =>
        ("this user may not use {}", "{}: 이 사용자에게 사용 권한이 없음"),
        ("CUDA programs do not see it, so a job that counts on it finds too few GPUs; a scheduler that gave the job other GPUs means it so",
         "CUDA 프로그램에는 보이지 않으므로, 이 GPU까지 쓰려는 작업은 GPU가 모자랍니다. 스케줄러가 다른 GPU를 배정했다면 의도된 상태입니다"),
        ("`ls -l /dev/nvidia*` shows which group may: join it (often `video` or `render`) and log in again, or ask the scheduler for more GPUs",
         "권한이 있는 그룹을 `ls -l /dev/nvidia*`로 확인하세요. 그 그룹(대개 `video`나 `render`)에 들어간 뒤 다시 로그인하거나, 스케줄러에 GPU를 더 요청하세요");
};

fn judge_error(snapshot: &Snapshot, error: &DriverError, notes: &mut Notes) {
    let bus = Bus::of(&snapshot.system);
    let cards: Vec<_> = bus.of_nvidia(PciKind::Gpu).collect();
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::DRIVER);
    let what = trouble(error, lang);
    let no_gpu = say!(
        lang,
        "programs find no GPU: a job that asks for one fails when it starts, or trains on the CPU without a word",
        "프로그램이 GPU를 찾지 못합니다. GPU를 요청한 작업은 시작할 때 실패하거나, 알림 없이 CPU로 학습합니다"
    );
    match error {
        DriverError::NoLibrary(_) | DriverError::NoDriver if !bus.is_empty() && cards.is_empty() => sheet.note(
            say!(
                lang,
                "there is no NVIDIA GPU in this machine, and no driver for one",
                "이 머신에는 NVIDIA GPU도, 드라이버도 없음"
            ),
            say!(
                lang,
                "nothing here can use CUDA: jobs train on the CPU, or on another maker's devices",
                "이 머신에서는 CUDA를 쓸 수 없습니다. 작업은 CPU나 다른 제조사의 장치에서 학습합니다"
            ),
            say!(
                lang,
                "nothing, if you know that; a card that should be here is not seen by the bus: check its seat and its power cables",
                "알고 있었다면 할 일이 없습니다. 카드가 있어야 하는 머신이라면 버스에서 보이지 않는 것이니, 장착 상태와 전원 케이블을 확인하세요"
            ),
        ),
        DriverError::NoLibrary(words) => sheet.error(
            format!("{what} ({})", plain(words)),
            no_gpu,
            match snapshot.system.is_container() {
                true => say!(
                    lang,
                    "give the container the GPUs, which brings the library: `docker run --gpus all` (needs the NVIDIA Container \
                     Toolkit), `resources: limits: nvidia.com/gpu: N` in Kubernetes",
                    "컨테이너에 GPU를 주면 라이브러리도 함께 들어옵니다. `docker run --gpus all`(NVIDIA Container Toolkit 필요), \
                     Kubernetes에서는 `resources: limits: nvidia.com/gpu: N`을 쓰세요"
                ),
                false => say!(
                    lang,
                    "install the NVIDIA driver of your distribution; if the library lies in an unusual place, name it in \
                     PACELINE_NVML_LIBRARY",
                    "배포판의 NVIDIA 드라이버를 설치하세요. 라이브러리가 다른 곳에 있다면 PACELINE_NVML_LIBRARY로 경로를 지정하세요"
                ),
            },
        ),
        DriverError::NoDriver => {
            let other = cards.iter().find_map(|card| card.driver.as_deref());
            let other = other.filter(|driver| *driver != "nvidia");
            sheet.error(
                match other.map(plain) {
                    None => what,
                    Some(other) => {
                        say!(lang, "{what}; {other} has the GPU", "{what}; GPU를 잡고 있는 드라이버: {other}")
                    }
                },
                no_gpu,
                match other {
                    Some("vfio-pci") => say!(
                        lang,
                        "the GPU is set aside for a virtual machine: train there, or take it off vfio-pci (`vfio-pci.ids=` on the \
                         kernel's command line, /etc/modprobe.d) and start the machine again",
                        "가상 머신에 넘기려고 떼어 둔 GPU입니다. 그 가상 머신에서 학습하거나, vfio-pci 설정(커널 명령줄의 `vfio-pci.ids=`, \
                         /etc/modprobe.d)에서 빼고 머신을 재시작하세요"
                    ),
                    Some("nouveau") => say!(
                        lang,
                        "install the NVIDIA driver, which shuts nouveau out in /etc/modprobe.d, and start the machine again",
                        "NVIDIA 드라이버를 설치하고 머신을 재시작하세요. 설치하면 /etc/modprobe.d에서 nouveau가 차단됩니다"
                    ),
                    _ => say!(
                        lang,
                        "`sudo modprobe nvidia`; if that fails `sudo dmesg | grep -i nvrm` says why: after an update of the kernel the \
                         module must be built anew (`sudo dkms autoinstall`), Secure Boot takes only signed ones",
                        "`sudo modprobe nvidia`를 실행하세요. 실패한 이유는 `sudo dmesg | grep -i nvrm`에 나옵니다. 커널을 업데이트했다면 모듈을 \
                         다시 빌드해야 하고(`sudo dkms autoinstall`), Secure Boot에서는 서명된 모듈만 로드됩니다"
                    ),
                },
            );
        }
        DriverError::Static => sheet.note(
            what,
            say!(
                lang,
                "nothing is known about the GPUs here, and the report of a job will not have them; programs of others are not affected",
                "이 머신의 GPU를 알 수 없고, 작업 보고서에도 나오지 않습니다. 다른 프로그램에는 영향이 없습니다"
            ),
            say!(
                lang,
                "use the program of the Python package, or one that `cargo install` built",
                "Python 패키지의 프로그램이나 `cargo install`로 빌드한 프로그램을 쓰세요"
            ),
        ),
        DriverError::NoPermission => sheet.error(
            what,
            no_gpu,
            say!(
                lang,
                "`ls -l /dev/nvidia*` shows which group may: join it (often `video` or `render`) and log in again; under a scheduler ask \
                 for a GPU, since it hides those that the job was not given",
                "권한이 있는 그룹을 `ls -l /dev/nvidia*`로 확인하세요. 그 그룹(대개 `video`나 `render`)에 들어간 뒤 다시 로그인하세요. 스케줄러를 \
                 쓴다면 GPU를 요청하세요. 배정받지 않은 GPU는 보이지 않습니다"
            ),
        ),
        DriverError::VersionMismatch => sheet.error(
            what,
            say!(
                lang,
                "the driver was updated while its old module runs: every program that starts fails to use a GPU, those that run go on",
                "이전 모듈이 로드된 상태에서 드라이버가 업데이트되었습니다. 새로 시작하는 프로그램은 GPU를 쓰지 못하고, 실행 중인 프로그램은 계속됩니다"
            ),
            say!(
                lang,
                "start the machine again; or end what uses the GPUs, then `sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo \
                 modprobe nvidia`",
                "머신을 재시작하거나, GPU를 쓰는 프로그램을 끝낸 뒤 `sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe \
                 nvidia`를 실행하세요"
            ),
        ),
        DriverError::Other(_) => sheet.error(
            plain(&what),
            no_gpu,
            say!(
                lang,
                "`nvidia-smi` says more, or `sudo dmesg | grep -i nvrm`; in a container that worked before, start the container again",
                "`nvidia-smi`나 `sudo dmesg | grep -i nvrm`에서 자세한 내용을 확인하세요. 잘 되던 컨테이너라면 컨테이너를 다시 시작하세요"
            ),
        ),
    }
}

/// The reason why the driver does not answer.
pub(crate) fn trouble(error: &DriverError, lang: Lang) -> String {
    match (lang, error) {
        (Lang::En, error) => error.to_string(),
        (Lang::Ko, DriverError::NoLibrary(_)) => {
            "NVIDIA 드라이버 라이브러리 libnvidia-ml.so.1이 설치되어 있지 않음".to_owned()
        }
        (Lang::Ko, DriverError::NoDriver) => "NVIDIA 커널 모듈이 로드되어 있지 않음".to_owned(),
        (Lang::Ko, DriverError::Static) => {
            "정적으로 링크된 프로그램이어서 NVIDIA 드라이버 라이브러리를 로드할 수 없음".to_owned()
        }
        (Lang::Ko, DriverError::NoPermission) => {
            "이 사용자에게 NVIDIA 드라이버를 조회할 권한이 없음".to_owned()
        }
        (Lang::Ko, DriverError::VersionMismatch) => {
            "NVIDIA 라이브러리와 커널 모듈의 버전이 다름".to_owned()
        }
        (Lang::Ko, DriverError::Other(words)) => format!("NVIDIA 드라이버 메시지: {words}"),
    }
}

fn judge_none(snapshot: &Snapshot, notes: &mut Notes) {
    let cards = Bus::of(&snapshot.system).of_nvidia(PciKind::Gpu).count();
    let lang = notes.lang;
    notes.sheet(checks::GPUS).error(
        match cards {
            0 => say!(lang, "NVIDIA's driver runs and has no GPU", "NVIDIA 드라이버는 동작하지만 GPU가 없음"),
            1 => say!(
                lang,
                "NVIDIA's driver shows no GPU, although one is on the bus",
                "버스에는 GPU가 1개 있지만 NVIDIA 드라이버에는 보이지 않음"
            ),
            _ => say!(
                lang,
                "NVIDIA's driver shows no GPU, although {cards} are on the bus",
                "버스에는 GPU가 {cards}개 있지만 NVIDIA 드라이버에는 보이지 않음"
            ),
        },
        say!(
            lang,
            "a job that asks for a GPU fails when it starts",
            "GPU를 요청한 작업은 시작할 때 실패합니다"
        ),
        match cards {
            0 => say!(
                lang,
                "check the card's seat and power cables, and that the firmware shows it; in a virtual machine, that it is passed through",
                "카드의 장착 상태와 전원 케이블을 확인하고, 펌웨어에 카드가 보이는지 확인하세요. 가상 머신이라면 패스스루 설정을 확인하세요"
            ),
            _ => say!(
                lang,
                "in a container or under a scheduler ask for a GPU; otherwise `sudo dmesg | grep -i nvrm` says why the driver does not \
                 start it",
                "컨테이너나 스케줄러에서는 GPU를 요청하세요. 그 외에는 드라이버가 GPU를 초기화하지 못한 이유가 `sudo dmesg | grep -i nvrm`에 나옵니다"
            ),
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
        let library = || DriverError::NoLibrary("not there".to_owned());
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
