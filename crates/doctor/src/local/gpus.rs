//! GPUs: how many, and whether the rules about them find errors. What they find is told by `paceline gpu doctor`.

use paceline_gpu::devices;
use paceline_gpu::places::Places;
use paceline_gpu::snapshot::{DriverError, Snapshot};
use paceline_words::{Lang, Text, count, say};

use crate::checks;
use crate::finding::{Notes, Severity, plain};
use crate::gpu::{diagnose, models, trouble};

/// The machine's devices, or the reason why they are unknown.
pub(crate) type Seen = Result<Snapshot, Text>;

/// Asks the driver; where there is none that ends after one look for its library.
///
/// *Blocks*: as long as the driver does, with a broken one for ever.
pub(crate) fn look(places: &Places) -> Seen {
    devices::count_at(places).map_err(|error| {
        Text::new(|lang| match (lang, &error) {
            (Lang::En, error) => devices::reason(error, places),
            (Lang::Ko, DriverError::NoLibrary(words)) if places.library.is_some() => {
                format!("NVIDIA 드라이버 라이브러리를 로드할 수 없음: {words}")
            }
            (Lang::Ko, error) => trouble(error, lang),
        })
    })?;
    Ok(paceline_gpu::take(places))
}

/// `seen` is nothing where the driver took too long.
pub(crate) fn judge(seen: Option<&Seen>, seconds: u64, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::GPUS);
    let snapshot = match seen {
        Some(Ok(snapshot)) => snapshot,
        Some(Err(reason)) => {
            let reason = plain(reason.of(lang));
            return sheet.fact(say!(lang, "none: {reason}", "없음: {reason}"));
        }
        None => {
            sheet.fact(say!(
                lang,
                "the driver did not answer within {seconds} s",
                "드라이버가 {seconds}초 안에 응답하지 않음"
            ));
            return sheet.warning(
                say!(
                    lang,
                    "NVIDIA's driver did not answer within {seconds} s",
                    "NVIDIA 드라이버가 {seconds}초 안에 응답하지 않음"
                ),
                say!(
                    lang,
                    "a job that uses GPUs would hang like this look did",
                    "GPU를 쓰는 작업도 지금의 점검처럼 멈추게 됩니다"
                ),
                say!(
                    lang,
                    "`sudo dmesg | grep -i -e xid -e nvrm` says why; most often the machine must be started again",
                    "이유는 `sudo dmesg | grep -i -e xid -e nvrm`에 나옵니다. 대개 머신을 재시작해야 합니다"
                ),
            );
        }
    };
    let version = snapshot.driver.version.known();
    let version = version.map_or(String::new(), |version| {
        let version = plain(version);
        say!(lang, ", driver {version}", ", 드라이버 {version}")
    });
    let models = models(snapshot, lang);
    sheet.fact(match snapshot.devices.is_empty() {
        true => say!(lang, "none{version}", "없음{version}"),
        false => say!(
            lang,
            "{models}{version}; `paceline gpu doctor` says more",
            "{models}{version}; 자세한 내용은 `paceline gpu doctor`"
        ),
    });
    let report = diagnose(snapshot, lang);
    let errors = report
        .findings
        .iter()
        .filter(|finding| finding.severity == Severity::Error);
    let words: Vec<&str> = errors.map(|finding| finding.what.as_str()).collect();
    let Some(first) = words.first() else {
        return;
    };
    let things = count(lang, words.len(), "thing", "문제");
    sheet.warning(
        match words.len() {
            1 => say!(
                lang,
                "something is wrong with the GPUs: {first}",
                "GPU에 문제가 있음: {first}"
            ),
            _ => say!(
                lang,
                "{things} are wrong with the GPUs, first: {first}",
                "GPU에 {things}가 있음, 첫 번째: {first}"
            ),
        },
        say!(
            lang,
            "a job that uses them is likely to fail",
            "GPU를 쓰는 작업은 실패할 가능성이 큽니다"
        ),
        say!(
            lang,
            "`paceline gpu doctor` says what comes of it and what to do",
            "영향과 조치는 `paceline gpu doctor`에 나옵니다"
        ),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::machine;
    use crate::local::tests::{found, noted};
    use paceline_gpu::snapshot::DriverError;

    fn check(seen: Option<Seen>, fact: &str, expect: &[&str]) {
        let notes = noted(|notes| judge(seen.as_ref(), 5, notes));
        assert_eq!(notes.facts[0].value, fact);
        assert_eq!(found(&notes), expect);
    }

    #[test]
    fn a_machine_without_a_driver_has_a_line_and_no_finding() {
        let error = DriverError::NoDriver;
        let reason = Text::new(|lang| trouble(&error, lang));
        let line = "none: NVIDIA's kernel module is not loaded";
        check(Some(Err(reason)), line, &[]);
    }

    #[test]
    fn devices_are_named_and_only_errors_are_told() {
        let line = "2 x Test GPU, driver 580.65.06; `paceline gpu doctor` says more";
        let sound = machine(2);
        check(Some(Ok(sound.clone())), line, &[]);
        let mut slow = sound.clone();
        slow.devices[0].persistence = false.into();
        check(Some(Ok(slow)), line, &[]);
        let mut ill = sound;
        ill.devices[0].errors.uncorrected = 2.into();
        check(
            Some(Ok(ill)),
            line,
            &["warning: GPUs: `paceline gpu doctor`"],
        );
    }

    #[test]
    fn a_driver_that_hangs_is_told() {
        check(
            None,
            "the driver did not answer within 5 s",
            &["warning: GPUs: `sudo dmesg"],
        );
    }
}
