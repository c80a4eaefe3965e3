//! The wall clock: whether it is plausible, and whether something keeps it right.
#![allow(unsafe_code)]

use std::time::{Duration, SystemTime};

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
    let mut sheet = notes.sheet("clock");
    sheet.fact(match clock.synchronized {
        Some((true, error)) => format!(
            "follows a time server, right within {:.0} ms",
            error.as_secs_f64() * 1e3
        ),
        Some((false, _)) => "nothing keeps it right".to_owned(),
        None => "the kernel does not tell whether it is kept right".to_owned(),
    });
    if clock.now < PLAUSIBLE_FROM {
        sheet.warning(
            "this machine's clock shows a time before 2025",
            "logs and file times are wrong, and certificates look as if they were not valid yet; leases and deadlines do not depend \
             on it",
            "set it: `timedatectl set-ntp true`, or `date -s`",
        );
    }
    if several_nodes && matches!(clock.synchronized, Some((false, _))) {
        sheet.note(
            "no time server keeps this machine's clock right",
            "leases and deadlines do not depend on it; the times in logs of several nodes are hard to compare when clocks drift apart",
            "`timedatectl set-ntp true`, or chrony on every node (on the host, if this is a container)",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::found;

    #[test]
    fn a_clock_that_was_never_set_or_is_not_followed_is_said() {
        let now = Duration::from_secs(1_800_000_000);
        let check = |now, synchronized, several, expect: &[&str]| {
            let mut notes = Notes::default();
            judge(&Clock { now, synchronized }, several, &mut notes);
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
