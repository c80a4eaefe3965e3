//! The wall clock: whether it is plausible, and whether something keeps it right.
#![allow(unsafe_code)]

use std::time::{Duration, SystemTime};

use paceline_words::say;

use crate::checks;
use crate::finding::Notes;

/// What was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Clock {
    /// Since 1970.
    pub(crate) now: Duration,
    /// Whether the kernel says that the clock follows another one, and how far off it may be. `None` where it does not tell.
    pub(crate) synchronized: Option<(bool, Duration)>,
}

/// 2025-01-01: no clock that was ever set shows an earlier time.
const PLAUSIBLE_FROM: Duration = Duration::from_secs(1_735_689_600);

pub(crate) fn read() -> Clock {
    Clock {
        now: SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default(),
        synchronized: synchronized(),
    }
}

fn synchronized() -> Option<(bool, Duration)> {
    // SAFETY: all fields are numbers, for which zeros are a value; `modes` 0 asks and sets nothing.
    let mut answer: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a timex of our own that lives through the call.
    let state = unsafe { libc::adjtimex(&mut answer) };
    if state < 0 {
        return None;
    }
    let followed = state != libc::TIME_ERROR && answer.status & libc::STA_UNSYNC == 0;
    let error = u64::try_from(answer.maxerror).unwrap_or(0);
    Some((followed, Duration::from_micros(error)))
}

pub(crate) fn judge(clock: &Clock, several_nodes: bool, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::CLOCK);
    sheet.fact(match clock.synchronized {
        Some((true, error)) => say!(
            lang,
            "follows a time server, right within {:.0} ms",
            "시간 서버와 동기화됨, 오차 {:.0} ms 이내",
            error.as_secs_f64() * 1e3
        ),
        Some((false, _)) => say!(lang, "nothing keeps it right", "동기화되지 않음"),
        None => say!(
            lang,
            "the kernel does not tell whether it is kept right",
            "동기화 여부를 커널이 알려 주지 않음"
        ),
    });
    if clock.now < PLAUSIBLE_FROM {
        sheet.warning(
            say!(
                lang,
                "this machine's clock shows a time before 2025",
                "이 머신의 시계가 2025년 이전을 가리킴"
            ),
            say!(
                lang,
                "logs and file times are wrong, and certificates look as if they were not valid yet; leases and deadlines do not depend \
                 on it",
                "로그와 파일의 시간이 틀리고, 인증서가 아직 유효하지 않은 것처럼 보입니다. 리스와 제한 시간은 시계에 의존하지 않습니다"
            ),
            say!(
                lang,
                "set it: `timedatectl set-ntp true`, or `date -s`",
                "`timedatectl set-ntp true`나 `date -s`로 시계를 맞추세요"
            ),
        );
    }
    if several_nodes && matches!(clock.synchronized, Some((false, _))) {
        sheet.note(
            say!(
                lang,
                "no time server keeps this machine's clock right",
                "이 머신의 시계가 시간 서버와 동기화되지 않음"
            ),
            say!(
                lang,
                "leases and deadlines do not depend on it; the times in logs of several nodes are hard to compare when clocks drift apart",
                "리스와 제한 시간은 시계에 의존하지 않습니다. 다만 시계가 어긋나면 여러 노드의 로그 시간을 비교하기 어렵습니다"
            ),
            say!(
                lang,
                "`timedatectl set-ntp true`, or chrony on every node (on the host, if this is a container)",
                "모든 노드에서 `timedatectl set-ntp true`를 실행하거나 chrony를 쓰세요(컨테이너라면 호스트에서)"
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::{found, noted};

    #[test]
    fn a_clock_that_was_never_set_or_is_not_followed_is_said() {
        let now = Duration::from_secs(1_800_000_000);
        let check = |now, synchronized, several, expect: &[&str]| {
            let clock = Clock { now, synchronized };
            let notes = noted(|notes| judge(&clock, several, notes));
            assert_eq!(found(&notes), expect);
        };
        let free = Some((false, Duration::from_secs(16)));
        check(now, Some((true, Duration::from_millis(4))), true, &[]);
        check(now, None, true, &[]);
        check(now, free, false, &[]);
        check(
            now,
            free,
            true,
            &["note: clock: `timedatectl set-ntp true`"],
        );
        check(Duration::ZERO, None, false, &["warning: clock: set it"]);
    }

    #[test]
    fn this_machines_clock_can_be_read() {
        assert!(read().now > PLAUSIBLE_FROM);
    }
}
