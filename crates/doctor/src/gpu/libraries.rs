//! CUDA of the driver against the CUDA that NCCL was built with.
//!
//! *Source*: NVIDIA's "CUDA Compatibility", minor version compatibility: the oldest driver for each major version; a newer
//! driver runs what was built for an older CUDA.

use std::collections::BTreeSet;

use paceline_gpu::snapshot::{Nccl, Snapshot};
use paceline_words::{Lang, say};

use super::words::joined;
use crate::checks;
use crate::finding::{Notes, plain};

/// Major version of CUDA, and the oldest Linux driver that runs it.
const OLDEST_DRIVERS: [(u32, (u32, u32)); 3] = [(11, (450, 80)), (12, (525, 60)), (13, (580, 0))];

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::NCCL);
    let found = &snapshot.system.nccl;
    let described = |nccl: &Nccl| described(nccl, lang);
    sheet.fact(match found.is_empty() {
        true => say!(
            lang,
            "none found where programs look; PyTorch brings its own",
            "프로그램이 찾는 경로에 없음; PyTorch에는 포함되어 있음"
        ),
        false => joined(found.iter().map(described).collect(), lang),
    });
    if let Some(worst) = found
        .iter()
        .filter(|nccl| is_too_new(nccl, snapshot))
        .max_by_key(|nccl| nccl.cuda)
    {
        let (major, minor) = worst.cuda.unwrap_or_default();
        let oldest = OLDEST_DRIVERS.iter().find(|(cuda, _)| *cuda == major);
        let oldest = oldest.map(|(_, driver)| {
            let driver = version(*driver);
            say!(lang, ", {driver} or newer", "({driver} 이상)")
        });
        let oldest = oldest.unwrap_or_default();
        let has = match snapshot.driver.version.known() {
            Some(version) => plain(version),
            None => say!(lang, "of unknown version", "버전을 알 수 없음"),
        };
        let runs = snapshot.driver.cuda.known().map(|(major, minor)| {
            say!(
                lang,
                ", which runs CUDA up to {major}.{minor}",
                ", CUDA {major}.{minor}까지 지원"
            )
        });
        let (runs, path) = (runs.unwrap_or_default(), plain(&worst.path));
        sheet.error(
            say!(
                lang,
                "the driver ({has}{runs}) is too old for the NCCL in {path}, built for CUDA {major}.{minor}",
                "드라이버({has}{runs})가 CUDA {major}.{minor}용 NCCL({path})을 쓰기에는 너무 오래됨"
            ),
            say!(
                lang,
                "a job with it fails at its first collective: \"CUDA driver version is insufficient for CUDA runtime version\"",
                "이 라이브러리를 쓰는 작업은 첫 집합 통신에서 실패합니다: \"CUDA driver version is insufficient for CUDA runtime version\""
            ),
            say!(
                lang,
                "install a newer driver{oldest}; or programs that were built for the driver's CUDA, such as PyTorch's wheels of an older one",
                "더 새로운 드라이버{oldest}를 설치하세요. 또는 더 낮은 CUDA용 PyTorch 휠처럼, 드라이버가 지원하는 CUDA로 빌드된 프로그램을 쓰세요"
            ),
        );
    }
    let versions: BTreeSet<_> = found.iter().filter_map(|nccl| nccl.version).collect();
    if versions.len() > 1 {
        let number = versions.len();
        sheet.note(
            say!(
                lang,
                "{number} different versions of NCCL are installed",
                "서로 다른 NCCL 버전이 {number}개 설치되어 있음"
            ),
            say!(
                lang,
                "ranks that load different ones refuse to talk to each other (\"mismatched NCCL version\")",
                "서로 다른 버전을 로드한 랭크들은 통신을 거부합니다(\"mismatched NCCL version\")"
            ),
            say!(
                lang,
                "start all ranks from one environment; `NCCL_DEBUG=VERSION` prints which one a program loads",
                "모든 랭크를 같은 환경에서 시작하세요. `NCCL_DEBUG=VERSION`을 주면 프로그램이 로드한 버전이 출력됩니다"
            ),
        );
    }
}

fn described(nccl: &Nccl, lang: Lang) -> String {
    let number = match nccl.version {
        Some((major, minor, patch)) => format!("{major}.{minor}.{patch}"),
        None => say!(lang, "of unknown version", "버전을 알 수 없음"),
    };
    match nccl.cuda {
        Some((major, minor)) => say!(
            lang,
            "{number} for CUDA {major}.{minor}",
            "{number}(CUDA {major}.{minor}용)"
        ),
        None => number,
    }
}

fn version((major, minor): (u32, u32)) -> String {
    match minor {
        0 => major.to_string(),
        _ => format!("{major}.{minor}"),
    }
}

fn is_too_new(nccl: &Nccl, snapshot: &Snapshot) -> bool {
    let Some((major, _)) = nccl.cuda else {
        return false;
    };
    if let Some((runs, _)) = snapshot.driver.cuda.known() {
        return *runs < major;
    }
    let oldest = OLDEST_DRIVERS.iter().find(|(cuda, _)| *cuda == major);
    let installed = snapshot
        .driver
        .version
        .known()
        .and_then(|text| parsed(text));
    match (oldest, installed) {
        (Some((_, oldest)), Some(installed)) => installed < *oldest,
        _ => false,
    }
}

/// The first two numbers of a driver's version.
fn parsed(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.trim().split('.');
    let major = numbers.next()?.parse().ok()?;
    Some((major, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};
    use paceline_gpu::snapshot::{Gap, Reading};

    fn nccl(cuda: Option<(u32, u32)>, version: (u32, u32, u32)) -> Nccl {
        Nccl {
            path: "/usr/lib/libnccl.so.2".to_owned(),
            version: Some(version),
            cuda,
        }
    }

    fn with(driver: &str, runs: Option<(u32, u32)>, libraries: Vec<Nccl>) -> Snapshot {
        let mut snapshot = machine(1);
        snapshot.driver.version = driver.to_owned().into();
        snapshot.driver.cuda = match runs {
            Some(runs) => runs.into(),
            None => Reading::missing(Gap::NoFunction),
        };
        snapshot.system.nccl = libraries;
        snapshot
    }

    #[test]
    fn nccl_needs_a_driver_of_its_major_cuda() {
        let speaks = |driver, runs, cuda, expect: &[&str]| {
            let snapshot = with(driver, runs, vec![nccl(Some(cuda), (2, 27, 3))]);
            check(judge, &snapshot, expect);
        };
        let too_old = ["error: NCCL: install a newer driver, 580 or newer"];
        speaks("550.54.14", Some((12, 4)), (13, 0), &too_old);
        speaks("550.54.14", Some((12, 4)), (12, 9), &[]);
        speaks("580.65.06", Some((13, 0)), (12, 9), &[]);
        speaks(
            "470.82.01",
            Some((11, 4)),
            (12, 2),
            &["error: NCCL: install a newer driver, 525.60 or newer"],
        );
        speaks(
            "570.1",
            Some((12, 8)),
            (14, 0),
            &["error: NCCL: install a newer driver; or"],
        );
    }

    #[test]
    fn the_drivers_own_version_decides_where_it_does_not_tell_its_cuda() {
        let speaks = |driver, expect: &[&str]| {
            let snapshot = with(driver, None, vec![nccl(Some((12, 2)), (2, 18, 3))]);
            check(judge, &snapshot, expect);
        };
        speaks("525.60.13", &[]);
        speaks("525.53", &["error: NCCL: install"]);
        speaks("odd", &[]);
    }

    #[test]
    fn different_versions_are_noted() {
        let two = vec![nccl(None, (2, 18, 3)), nccl(None, (2, 27, 3))];
        check(
            judge,
            &with("550.1", Some((12, 4)), two),
            &["note: NCCL: start all ranks"],
        );
        let same = vec![nccl(None, (2, 18, 3)); 2];
        check(judge, &with("550.1", Some((12, 4)), same), &[]);
    }
}
