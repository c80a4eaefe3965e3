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

const KNOWN: [Known; 21] = [
    Known {
        code: 13,
        severity: Severity::Warning,
        what: "a kernel did what the multiprocessors do not allow (index out of bounds, illegal instruction)",
        why: PROGRAM,
        fix: "run the program under `compute-sanitizer`; if other programs get it on this card only, suspect the card",
    },
    Known {
        code: 31,
        severity: Severity::Warning,
        what: "a program used an address that is not mapped",
        why: PROGRAM,
        fix: "run the program under `compute-sanitizer`; if other programs get it on this card only, suspect the card",
    },
    Known {
        code: 43,
        severity: Severity::Warning,
        what: "a program's work was stopped after an error of its own",
        why: "the card is well, the program has lost what it computed",
        fix: "look for the Xid before it and for what the program said; start it again",
    },
    Known {
        code: 45,
        severity: Severity::Note,
        what: "a program's work was cleared away: it ended, was killed, or another error came first",
        why: "harmless after Ctrl-C or a kill; otherwise it follows the real error",
        fix: "look for the Xid before it, in the same second",
    },
    Known {
        code: 46,
        severity: Severity::Error,
        what: "the device stopped processing",
        why: "everything that runs on it hangs",
        fix: RESET,
    },
    Known {
        code: 48,
        severity: Severity::Error,
        what: "a memory error that could not be corrected",
        why: "the program that met it was ended, or computed with wrong numbers",
        fix: RESET,
    },
    Known {
        code: 61,
        severity: Severity::Error,
        what: "the device's own controller met a breakpoint or a warning",
        why: "clocks and power may be stuck until a reset: slow, or hanging",
        fix: RESET,
    },
    Known {
        code: 62,
        severity: Severity::Error,
        what: "the device's own controller halted",
        why: "clocks and power are not governed any more: programs hang",
        fix: RESET,
    },
    Known {
        code: 63,
        severity: Severity::Warning,
        what: "bad memory was marked to be put out of use",
        why: "it happens at the next reset; results were not harmed by this line itself",
        fix: "when nothing runs on it `sudo nvidia-smi -r -i N`, or start the machine again",
    },
    Known {
        code: 64,
        severity: Severity::Error,
        what: "bad memory could not be put out of use",
        why: "programs may meet it again and again",
        fix: REPLACE,
    },
    Known {
        code: 74,
        severity: Severity::Error,
        what: "NVLink failed",
        why: "a job that used the link hangs or is ended, on both of its ends",
        fix: "reset all GPUs that the link joins, or start the machine again; check the bridge or the board's seat; `nvidia-smi nvlink -e` \
              counts what follows",
    },
    Known {
        code: 79,
        severity: Severity::Error,
        what: "the device fell off the bus",
        why: "it cannot be reached any more: every program on it hangs or fails",
        fix: "switch the machine off and on; check power cables, riser, cooling and the slot; if it comes again, have the card replaced",
    },
    Known {
        code: 92,
        severity: Severity::Warning,
        what: "very many corrected memory errors",
        why: "nothing was wrong so far; what follows often cannot be corrected",
        fix: "watch `nvidia-smi -q -d ECC`, check the cooling; if the count grows on, have the card replaced",
    },
    Known {
        code: 94,
        severity: Severity::Warning,
        what: "a memory error that could not be corrected, and hit one program only",
        why: "that program was ended; others on the device may go on",
        fix: "start the program again; reset the device when nothing runs on it, so that the bad memory is put out of use",
    },
    Known {
        code: 95,
        severity: Severity::Error,
        what: "a memory error that could not be corrected, and may have hit every program on the device",
        why: "all of them were ended, and nothing runs on it before a reset",
        fix: RESET,
    },
    Known {
        code: 109,
        severity: Severity::Error,
        what: "the device could not change from one program's work to another's in time",
        why: "what runs on it hangs until it is reset",
        fix: "end what runs on it and reset it; a newer driver if it comes again",
    },
    Known {
        code: 119,
        severity: Severity::Error,
        what: "the device's system processor (GSP) did not answer in time",
        why: "programs and `nvidia-smi` hang until the device is reset",
        fix: "reset it, or switch the machine off and on; a newer driver if it comes again",
    },
    Known {
        code: 120,
        severity: Severity::Error,
        what: "the device's system processor (GSP) failed",
        why: "programs and `nvidia-smi` hang until the device is reset",
        fix: "reset it, or switch the machine off and on; a newer driver if it comes again",
    },
    Known {
        code: 140,
        severity: Severity::Error,
        what: "a memory error that could not be corrected left the device's own checks",
        why: "results of that time may be wrong",
        fix: RESET,
    },
    Known {
        code: 143,
        severity: Severity::Error,
        what: "the device could not be started",
        why: "no program can use it",
        fix: "switch the machine off and on; if it comes again, have the card replaced",
    },
    Known {
        code: 154,
        severity: Severity::Warning,
        what: "the driver says what the device needs to recover",
        why: "the line itself names it: nothing, a reset, or a start of the machine",
        fix: "find the line with `sudo dmesg | grep Xid` and do what it says",
    },
];

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
        for known in &KNOWN {
            let expect = format!("{}: kernel log: {}", known.severity.word(), known.fix);
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
