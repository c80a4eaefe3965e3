//! Xid lines: what the driver wrote into the kernel's log about failing devices.
//!
//! *Source*: NVIDIA's catalogue of Xid errors (what each code means, what to do at once and later), and `nverror.h` of
//! NVIDIA's open kernel modules.

use std::collections::BTreeMap;

use paceline_gpu::snapshot::{Snapshot, Xid};

use super::words::{age, gpus};
use crate::finding::{Notes, Severity, count, plain};

/// What a code means.
struct Known {
    code: u32,
    severity: Severity,
    /// What happened, after "Xid 79:".
    what: &'static str,
    why: &'static str,
    fix: &'static str,
}

/// A line that is older than this counts one severity less: the machine has worked since.
const OLD_FROM_S: u64 = 24 * 60 * 60;

/// Kinds of lines that are told; the log of a broken machine has thousands of lines of few kinds.
const TOLD_MAX: usize = 12;

const PROGRAM: &str = "it is nearly always a fault of the program, seldom of the card: the program was ended or should be";
const RESET: &str = "when nothing runs on it `sudo nvidia-smi -r -i N`, or start the machine again; if it comes back, have the card replaced";
const REPLACE: &str = "take the card out of training, start the machine again, run `dcgmi diag -r 3`; if it comes back, have the card replaced";

/// Codes, with what they mean, why it matters and what to do.
macro_rules! known {
    ($($code:literal $severity:ident: $what:expr, $why:expr, $fix:expr;)*) => {
        &[$(Known { code: $code, severity: Severity::$severity, what: $what, why: $why, fix: $fix }),*]
    };
}

const KNOWN: &[Known] = known! {
    13 Warning: "a kernel did what the multiprocessors do not allow (index out of bounds, illegal instruction)", PROGRAM,
        "run the program under `compute-sanitizer`; if other programs get it on this card only, suspect the card";
    31 Warning: "a program used an address that is not mapped", PROGRAM,
        "run the program under `compute-sanitizer`; if other programs get it on this card only, suspect the card";
    43 Warning: "a program's work was stopped after an error of its own",
        "the card is well, but the program has lost what it computed",
        "look for the Xid before it and for what the program said; start it again";
    45 Note: "a program's work was cleared away: it ended, was killed, or another error came first",
        "harmless after Ctrl-C or a kill; otherwise it follows the real error",
        "look for the Xid before it, in the same second";
    46 Error: "the device stopped processing", "everything that runs on it hangs", RESET;
    48 Error: "a memory error that could not be corrected", "the program that met it was ended, or computed with wrong numbers",
        RESET;
    61 Error: "the device's own controller met a breakpoint or a warning",
        "clocks and power may be stuck until a reset: slow, or hanging", RESET;
    62 Error: "the device's own controller halted", "clocks and power are not governed any more: programs hang", RESET;
    63 Warning: "bad memory was marked to be put out of use",
        "it happens at the next reset; results were not harmed by this line itself",
        "when nothing runs on it `sudo nvidia-smi -r -i N`, or start the machine again";
    64 Error: "bad memory could not be put out of use", "programs may meet it again and again", REPLACE;
    74 Error: "NVLink failed", "a job that used the link hangs or is ended, on both of its ends",
        "reset all GPUs that the link joins, or start the machine again; check the bridge or the board's seat; `nvidia-smi nvlink -e` \
        counts what follows";
    79 Error: "the device fell off the bus", "it cannot be reached any more: every program on it hangs or fails",
        "switch the machine off and on; check power cables, riser, cooling and the slot; if it comes again, have the card replaced";
    92 Warning: "very many corrected memory errors", "nothing was wrong so far; what follows often cannot be corrected",
        "watch `nvidia-smi -q -d ECC`, check the cooling; if the count grows on, have the card replaced";
    94 Warning: "a memory error that could not be corrected, and hit one program only",
        "that program was ended; others on the device may go on",
        "start the program again; reset the device when nothing runs on it, so that the bad memory is put out of use";
    95 Error: "a memory error that could not be corrected, and may have hit every program on the device",
        "all of them were ended, and nothing runs on it before a reset", RESET;
    109 Error: "the device could not change from one program's work to another's in time",
        "what runs on it hangs until it is reset", "end what runs on it and reset it; a newer driver if it comes again";
    119 Error: "the device's system processor (GSP) did not answer in time",
        "programs and `nvidia-smi` hang until the device is reset",
        "reset it, or switch the machine off and on; a newer driver if it comes again";
    120 Error: "the device's system processor (GSP) failed", "programs and `nvidia-smi` hang until the device is reset",
        "reset it, or switch the machine off and on; a newer driver if it comes again";
    140 Error: "a memory error that could not be corrected left the device's own checks", "results of that time may be wrong",
        RESET;
    143 Error: "the device could not be started", "no program can use it",
        "switch the machine off and on; if it comes again, have the card replaced";
    154 Warning: "the driver says what the device needs to recover",
        "the line itself names it: nothing, a reset, or a start of the machine",
        "find the line with `sudo dmesg | grep Xid` and do what it says";
};

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let Some(lines) = snapshot.system.xids.known() else {
        // What could not be read is said once, with everything else that could not.
        return;
    };
    let mut sheet = notes.sheet("kernel log");
    sheet.fact(match lines.len() {
        0 => "no Xid line".to_owned(),
        number => count(number, "Xid line"),
    });
    let mut groups: BTreeMap<(u32, &str), Vec<&Xid>> = BTreeMap::new();
    for line in lines {
        groups.entry((line.code, &line.pci)).or_default().push(line);
    }
    for ((code, pci), lines) in groups.iter().take(TOLD_MAX) {
        let known = KNOWN.iter().find(|known| known.code == *code);
        let youngest = lines.iter().filter_map(|line| line.age_s).min();
        let severity = known.map_or(Severity::Note, |known| known.severity);
        let severity = match youngest {
            Some(age) if age >= OLD_FROM_S => milder(severity),
            _ => severity,
        };
        let times = match lines.len() {
            1 => String::new(),
            number => format!(" {number} times"),
        };
        let last = youngest.map_or(String::new(), |youngest| {
            let word = if lines.len() == 1 { "" } else { "last " };
            format!(", {word}{} ago", age(youngest))
        });
        let whom = place(snapshot, pci);
        let example = lines.first().map_or("", |line| line.text.trim());
        sheet.add(
            severity,
            match known {
                Some(known) => format!("Xid {code} on {whom}{times}{last}: {}", known.what),
                None => format!("Xid {code} on {whom}{times}{last}: {}", plain(example)),
            },
            known
                .map_or("a failure that this program has no words for", |known| {
                    known.why
                })
                .to_owned(),
            known
                .map_or(
                    "look the number up in NVIDIA's catalogue of Xid errors",
                    |known| known.fix,
                )
                .to_owned(),
        );
    }
    if groups.len() > TOLD_MAX {
        sheet.warning(
            format!("{} more kinds of Xid lines", groups.len() - TOLD_MAX),
            "so many kinds of failures have one cause more often than many",
            "`sudo dmesg | grep Xid` shows them; begin with the oldest",
        );
    }
}

fn milder(severity: Severity) -> Severity {
    match severity {
        Severity::Error => Severity::Warning,
        Severity::Warning | Severity::Note => Severity::Note,
    }
}

/// The device at a place. The log names it without the function's number.
fn place(snapshot: &Snapshot, pci: &str) -> String {
    let slot = |address: &str| {
        let address = address.trim().to_ascii_lowercase();
        address.split('.').next().unwrap_or_default().to_owned()
    };
    let here = slot(pci);
    let device = snapshot
        .devices
        .iter()
        .find(|device| device.pci.known().is_some_and(|known| slot(known) == here));
    match device {
        Some(device) => gpus(&[device.index]),
        None => format!("the device at {}", plain(pci)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};
    use paceline_gpu::snapshot::{Gap, Reading};

    fn line(code: u32, age_s: Option<u64>) -> Xid {
        Xid {
            code,
            pci: "0000:a1:00".to_owned(),
            age_s,
            text: "pid=7, name=python".to_owned(),
        }
    }

    fn with(lines: Vec<Xid>) -> Snapshot {
        let mut snapshot = machine(2);
        snapshot.system.xids = lines.into();
        snapshot
    }

    #[test]
    fn each_known_code_has_its_remedy() {
        for known in KNOWN {
            let expect = format!(
                "{}: kernel log: {}",
                known.severity.word(paceline_words::Lang::En),
                known.fix
            );
            check(
                judge,
                &with(vec![line(known.code, Some(60))]),
                &[expect.as_str()],
            );
        }
        check(
            judge,
            &with(vec![line(7, None)]),
            &["note: kernel log: look the number up"],
        );
        check(judge, &with(Vec::new()), &[]);
        let mut unread = machine(1);
        unread.system.xids = Reading::missing(Gap::NoPermission);
        check(judge, &unread, &[]);
    }

    #[test]
    fn lines_of_one_kind_are_said_once_with_the_device() {
        let snapshot = with(vec![
            line(79, Some(7_300)),
            line(79, Some(120)),
            line(79, None),
        ]);
        let mut notes = Notes::default();
        judge(&snapshot, &mut notes);
        assert_eq!(notes.findings.len(), 1);
        assert_eq!(
            notes.findings[0].what,
            "Xid 79 on GPU 1 3 times, last 2 min ago: the device fell off the bus"
        );
    }

    #[test]
    fn what_is_older_than_a_day_counts_less() {
        check(
            judge,
            &with(vec![line(79, Some(90_000))]),
            &["warning: kernel log: switch the machine off"],
        );
        check(
            judge,
            &with(vec![line(31, Some(90_000))]),
            &["note: kernel log: run"],
        );
    }

    #[test]
    fn a_flooded_log_stays_short() {
        let lines = (200..300).map(|code| line(code, None)).collect();
        let mut notes = Notes::default();
        judge(&with(lines), &mut notes);
        assert_eq!(notes.findings.len(), TOLD_MAX + 1);
    }
}
