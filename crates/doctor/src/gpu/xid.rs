//! Xid lines: what the driver wrote into the kernel's log about failing devices.
//!
//! *Source*: NVIDIA's catalogue of Xid errors (what each code means, what to do at once and later), and `nverror.h` of
//! NVIDIA's open kernel modules.

use std::collections::BTreeMap;

use paceline_gpu::snapshot::{Snapshot, Xid};
use paceline_words::{Lang, Word, count, say};

use super::words::{age, gpus};
use crate::checks;
use crate::finding::{Notes, Severity, plain};

/// What a code means.
struct Known {
    code: u32,
    severity: Severity,
    /// What happened, after "Xid 79:".
    what: Word,
    why: Word,
    fix: Word,
}

/// A line that is older than this counts one severity less: the machine has worked since.
const OLD_FROM_S: u64 = 24 * 60 * 60;

/// Kinds of lines that are told; the log of a broken machine has thousands of lines of few kinds.
const TOLD_MAX: usize = 12;

/// A sentence in English and Korean.
type Pair = (&'static str, &'static str);

const PROGRAM: Pair = (
    "it is nearly always a fault of the program, seldom of the card: the program was ended or should be",
    "거의 언제나 카드가 아니라 프로그램의 문제입니다. 프로그램이 종료되었거나, 종료해야 합니다",
);
const SANITIZER: Pair = (
    "run the program under `compute-sanitizer`; if other programs get it on this card only, suspect the card",
    "`compute-sanitizer`로 프로그램을 실행해 보세요. 다른 프로그램도 이 카드에서만 같은 오류가 난다면 카드를 의심하세요",
);
const RESET: Pair = (
    "when nothing runs on it `sudo nvidia-smi -r -i N`, or start the machine again; if it comes back, have the card replaced",
    "실행 중인 것이 없을 때 `sudo nvidia-smi -r -i N`을 실행하거나 머신을 재시작하세요. 다시 나타나면 카드를 교체하세요",
);
const REPLACE: Pair = (
    "take the card out of training, start the machine again, run `dcgmi diag -r 3`; if it comes back, have the card replaced",
    "카드를 학습에서 빼고, 머신을 재시작한 뒤 `dcgmi diag -r 3`을 실행하세요. 다시 나타나면 카드를 교체하세요",
);
const GSP_HANGS: Pair = (
    "programs and `nvidia-smi` hang until the device is reset",
    "장치를 리셋할 때까지 프로그램과 `nvidia-smi`가 멈춥니다",
);
const GSP_RESET: Pair = (
    "reset it, or switch the machine off and on; a newer driver if it comes again",
    "장치를 리셋하거나 머신의 전원을 껐다 켜세요. 다시 나타나면 드라이버를 업데이트하세요",
);

const UNKNOWN_WHY: Word = Word::new(
    "a failure that this program has no words for",
    "이 프로그램에 설명이 없는 오류입니다",
);
const UNKNOWN_FIX: Word = Word::new(
    "look the number up in NVIDIA's catalogue of Xid errors",
    "NVIDIA의 Xid 오류 목록에서 번호를 찾아보세요",
);

/// Codes, with what they mean, why it matters and what to do.
macro_rules! known {
    ($($code:literal $severity:ident: $what:expr, $why:expr, $fix:expr;)*) => {
        &[$(Known {
            code: $code,
            severity: Severity::$severity,
            what: Word::new($what.0, $what.1),
            why: Word::new($why.0, $why.1),
            fix: Word::new($fix.0, $fix.1),
        }),*]
    };
}

const KNOWN: &[Known] = known! {
    13 Warning:
        ("a kernel did what the multiprocessors do not allow (index out of bounds, illegal instruction)",
         "커널이 허용되지 않는 동작을 함(인덱스 범위 초과, 잘못된 명령)"),
        PROGRAM, SANITIZER;
    31 Warning: ("a program used an address that is not mapped", "프로그램이 매핑되지 않은 주소에 접근함"), PROGRAM, SANITIZER;
    43 Warning: ("a program's work was stopped after an error of its own", "프로그램 자신의 오류로 작업이 중단됨"),
        ("the card is well, but the program has lost what it computed", "카드는 정상이지만 프로그램이 계산하던 것을 잃었습니다"),
        ("look for the Xid before it and for what the program said; start it again",
         "바로 앞의 Xid와 프로그램의 출력을 확인하고, 프로그램을 다시 시작하세요");
    45 Note:
        ("a program's work was cleared away: it ended, was killed, or another error came first",
         "프로그램의 작업이 정리됨: 끝났거나, 강제 종료되었거나, 앞서 다른 오류가 있었음"),
        ("harmless after Ctrl-C or a kill; otherwise it follows the real error",
         "Ctrl-C나 kill 뒤라면 문제가 없습니다. 그 외에는 진짜 오류에 뒤따라 나옵니다"),
        ("look for the Xid before it, in the same second", "같은 시각에 먼저 나온 Xid를 찾으세요");
    46 Error: ("the device stopped processing", "장치가 처리를 멈춤"),
        ("everything that runs on it hangs", "이 장치에서 실행 중인 모든 것이 멈춥니다"), RESET;
    48 Error: ("a memory error that could not be corrected", "정정할 수 없는 메모리 오류"),
        ("the program that met it was ended, or computed with wrong numbers",
         "오류가 발생한 프로그램은 종료되었거나 잘못된 값으로 계산했습니다"), RESET;
    61 Error: ("the device's own controller met a breakpoint or a warning", "장치의 내부 컨트롤러가 중단점이나 경고에 걸림"),
        ("clocks and power may be stuck until a reset: slow, or hanging",
         "리셋할 때까지 클럭과 전력이 고정될 수 있습니다. 느려지거나 멈춥니다"), RESET;
    62 Error: ("the device's own controller halted", "장치의 내부 컨트롤러가 멈춤"),
        ("clocks and power are not governed any more: programs hang", "클럭과 전력을 더 이상 제어하지 못합니다. 프로그램이 멈춥니다"), RESET;
    63 Warning: ("bad memory was marked to be put out of use", "불량 메모리를 사용에서 제외하도록 표시함"),
        ("it happens at the next reset; results were not harmed by this line itself",
         "다음 리셋 때 제외됩니다. 이 기록 자체로 결과가 손상되지는 않았습니다"),
        ("when nothing runs on it `sudo nvidia-smi -r -i N`, or start the machine again",
         "실행 중인 것이 없을 때 `sudo nvidia-smi -r -i N`을 실행하거나 머신을 재시작하세요");
    64 Error: ("bad memory could not be put out of use", "불량 메모리를 사용에서 제외하지 못함"),
        ("programs may meet it again and again", "프로그램이 불량 메모리에 계속 다시 접근할 수 있습니다"), REPLACE;
    74 Error: ("NVLink failed", "NVLink 장애"),
        ("a job that used the link hangs or is ended, on both of its ends", "이 링크를 쓰던 작업은 양쪽 모두 멈추거나 종료됩니다"),
        ("reset all GPUs that the link joins, or start the machine again; check the bridge or the board's seat; `nvidia-smi nvlink -e` \
        counts what follows",
         "링크에 연결된 GPU를 모두 리셋하거나 머신을 재시작하세요. 브리지나 보드의 장착 상태를 확인하세요. 이후의 오류는 `nvidia-smi nvlink -e`에 집계됩니다");
    79 Error: ("the device fell off the bus", "장치가 버스에서 떨어져 나감"),
        ("it cannot be reached any more: every program on it hangs or fails",
         "더 이상 접근할 수 없습니다. 이 장치를 쓰는 프로그램은 모두 멈추거나 실패합니다"),
        ("switch the machine off and on; check power cables, riser, cooling and the slot; if it comes again, have the card replaced",
         "머신의 전원을 껐다 켜세요. 전원 케이블, 라이저, 냉각, 슬롯을 확인하고, 다시 나타나면 카드를 교체하세요");
    92 Warning: ("very many corrected memory errors", "정정된 메모리 오류가 매우 많음"),
        ("nothing was wrong so far; what follows often cannot be corrected",
         "아직 잘못된 결과는 없습니다. 다만 정정할 수 없는 오류가 뒤따르는 경우가 많습니다"),
        ("watch `nvidia-smi -q -d ECC`, check the cooling; if the count grows on, have the card replaced",
         "`nvidia-smi -q -d ECC`로 지켜보고 냉각을 확인하세요. 횟수가 계속 늘어나면 카드를 교체하세요");
    94 Warning: ("a memory error that could not be corrected, and hit one program only", "정정할 수 없는 메모리 오류, 프로그램 하나만 영향을 받음"),
        ("that program was ended; others on the device may go on", "그 프로그램은 종료되었습니다. 이 장치의 다른 프로그램은 계속될 수 있습니다"),
        ("start the program again; reset the device when nothing runs on it, so that the bad memory is put out of use",
         "프로그램을 다시 시작하세요. 실행 중인 것이 없을 때 장치를 리셋하면 불량 메모리가 사용에서 제외됩니다");
    95 Error:
        ("a memory error that could not be corrected, and may have hit every program on the device",
         "정정할 수 없는 메모리 오류, 이 장치의 모든 프로그램이 영향을 받았을 수 있음"),
        ("all of them were ended, and nothing runs on it before a reset", "프로그램이 모두 종료되었고, 리셋 전에는 아무것도 실행되지 않습니다"), RESET;
    109 Error:
        ("the device could not change from one program's work to another's in time",
         "장치가 프로그램 사이의 작업 전환을 제때 하지 못함"),
        ("what runs on it hangs until it is reset", "리셋할 때까지 이 장치에서 실행 중인 것이 멈춥니다"),
        ("end what runs on it and reset it; a newer driver if it comes again",
         "실행 중인 것을 끝내고 장치를 리셋하세요. 다시 나타나면 드라이버를 업데이트하세요");
    119 Error: ("the device's system processor (GSP) did not answer in time", "장치의 시스템 프로세서(GSP)가 제때 응답하지 않음"),
        GSP_HANGS, GSP_RESET;
    120 Error: ("the device's system processor (GSP) failed", "장치의 시스템 프로세서(GSP) 장애"), GSP_HANGS, GSP_RESET;
    140 Error: ("a memory error that could not be corrected left the device's own checks", "정정할 수 없는 메모리 오류가 장치의 자체 검사를 벗어남"),
        ("results of that time may be wrong", "그 시간에 얻은 결과가 틀렸을 수 있습니다"), RESET;
    143 Error: ("the device could not be started", "장치를 초기화하지 못함"),
        ("no program can use it", "어떤 프로그램도 이 장치를 쓸 수 없습니다"),
        ("switch the machine off and on; if it comes again, have the card replaced",
         "머신의 전원을 껐다 켜세요. 다시 나타나면 카드를 교체하세요");
    154 Warning: ("the driver says what the device needs to recover", "장치 복구에 필요한 조치를 드라이버가 알림"),
        ("the line itself names it: nothing, a reset, or a start of the machine",
         "필요한 조치는 로그에 적혀 있습니다. 조치 없음, 리셋, 머신 재시작 중 하나입니다"),
        ("find the line with `sudo dmesg | grep Xid` and do what it says", "`sudo dmesg | grep Xid`에서 그 줄을 찾아 적힌 대로 하세요");
};

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let Some(lines) = snapshot.system.xids.known() else {
        // What could not be read is said once, with everything else that could not.
        return;
    };
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::KERNEL_LOG);
    sheet.fact(match lines.len() {
        0 => say!(lang, "no Xid line", "Xid 줄 없음"),
        number => count(lang, number, "Xid line", "Xid 줄"),
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
            number => say!(lang, " {number} times", " {number}회"),
        };
        let last = youngest.map_or(String::new(), |youngest| {
            let age = age(youngest, lang);
            match lines.len() {
                1 => say!(lang, ", {age} ago", ", {age} 전"),
                _ => say!(lang, ", last {age} ago", ", 마지막은 {age} 전"),
            }
        });
        let whom = place(snapshot, pci, lang);
        let said = match known {
            Some(known) => known.what.of(lang).to_owned(),
            None => plain(lines.first().map_or("", |line| line.text.trim())),
        };
        sheet.add(
            severity,
            say!(
                lang,
                "Xid {code} on {whom}{times}{last}: {said}",
                "{whom}의 Xid {code}{times}{last}: {said}"
            ),
            known.map_or(UNKNOWN_WHY, |known| known.why).of(lang),
            known.map_or(UNKNOWN_FIX, |known| known.fix).of(lang),
        );
    }
    if groups.len() > TOLD_MAX {
        let more = groups.len() - TOLD_MAX;
        sheet.warning(
            say!(
                lang,
                "{more} more kinds of Xid lines",
                "다른 종류의 Xid가 {more}가지 더 있음"
            ),
            say!(
                lang,
                "so many kinds of failures have one cause more often than many",
                "오류의 종류가 이렇게 많을 때는 원인이 하나인 경우가 더 많습니다"
            ),
            say!(
                lang,
                "`sudo dmesg | grep Xid` shows them; begin with the oldest",
                "`sudo dmesg | grep Xid`로 확인하고, 가장 오래된 것부터 살펴보세요"
            ),
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
fn place(snapshot: &Snapshot, pci: &str, lang: Lang) -> String {
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
        Some(device) => gpus(&[device.index], lang),
        None => {
            let place = plain(pci);
            say!(lang, "the device at {place}", "{place} 장치")
        }
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
                known.severity.word(Lang::En),
                known.fix.of(Lang::En)
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
