//! GPUs: how many, and whether the rules about them find errors. What they find is told by `paceline gpu doctor`.

use paceline_gpu::devices;
use paceline_gpu::places::Places;
use paceline_gpu::snapshot::Snapshot;

use crate::finding::{Notes, Severity, count, plain};
use crate::gpu::{diagnose, models};

/// The machine's devices, or the reason why they are unknown.
pub(crate) type Seen = Result<Snapshot, String>;

/// Asks the driver; where there is none that ends after one look for its library.
///
/// *Blocks*: as long as the driver does, with a broken one for ever.
pub(crate) fn look(places: &Places) -> Seen {
    devices::count()?;
    Ok(paceline_gpu::take(places))
}

/// `seen` is nothing where the driver took too long.
pub(crate) fn judge(seen: Option<&Seen>, seconds: u64, notes: &mut Notes) {
    let mut sheet = notes.sheet("GPUs");
    let snapshot = match seen {
        Some(Ok(snapshot)) => snapshot,
        Some(Err(reason)) => return sheet.fact(format!("none: {}", plain(reason))),
        None => {
            sheet.fact(format!("the driver did not answer within {seconds} s"));
            return sheet.warning(
                format!("NVIDIA's driver did not answer within {seconds} s"),
                "a job that uses GPUs would hang like this look did",
                "`sudo dmesg | grep -i -e xid -e nvrm` says why; most often the machine must be started again",
            );
        }
    };
    let version = snapshot.driver.version.known();
    let version = version.map_or(String::new(), |version| {
        format!(", driver {}", plain(version))
    });
    sheet.fact(match snapshot.devices.is_empty() {
        true => format!("none{version}"),
        false => format!(
            "{}{version}; `paceline gpu doctor` says more",
            models(snapshot)
        ),
    });
    let report = diagnose(snapshot);
    let errors = report
        .findings
        .iter()
        .filter(|finding| finding.severity == Severity::Error);
    let words: Vec<&str> = errors.map(|finding| finding.what.as_str()).collect();
    let Some(first) = words.first() else {
        return;
    };
    sheet.warning(
        match words.len() {
            1 => format!("something is wrong with the GPUs: {first}"),
            number => format!(
                "{} are wrong with the GPUs, first: {first}",
                count(number, "thing")
            ),
        },
        "a job that uses them is likely to fail",
        "`paceline gpu doctor` says what comes of it and what to do",
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::machine;
    use crate::local::tests::found;

    fn check(seen: Option<Seen>, fact: &str, expect: &[&str]) {
        let mut notes = Notes::default();
        judge(seen.as_ref(), 5, &mut notes);
        assert_eq!(notes.facts[0].value, fact);
        assert_eq!(found(&notes), expect);
    }

    #[test]
    fn a_machine_without_a_driver_has_a_line_and_no_finding() {
        let reason = "NVIDIA's driver library libnvidia-ml.so.1 is not installed";
        check(
            Some(Err(reason.to_owned())),
            &format!("none: {reason}"),
            &[],
        );
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
