//! The processor time of a live process in nanoseconds, which no file has.

#![allow(unsafe_code)]

use std::mem::MaybeUninit;

/// The most that Linux numbers processes by.
const PID_MAX: libc::pid_t = 1 << 22;

/// Time of all threads of a process, also those that have ended; nothing where there is no such process.
pub(super) fn process_ns(pid: u32) -> Option<u64> {
    let pid = libc::pid_t::try_from(pid).ok()?;
    // Clocks are numbered by processes, shifted: a number that is too large comes out as another process.
    if !(1..=PID_MAX).contains(&pid) {
        return None;
    }
    let mut clock: libc::clockid_t = 0;
    // SAFETY: `clock` is a valid place to write to for the whole call, and nothing keeps its address.
    if unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) } != 0 {
        return None;
    }
    let mut time = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: `time` is a valid place to write to for the whole call, and nothing keeps its address.
    if unsafe { libc::clock_gettime(clock, time.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: the call has succeeded, so it has written all of `time`.
    let time = unsafe { time.assume_init() };
    let seconds = u64::try_from(time.tv_sec).ok()?;
    let rest = u64::try_from(time.tv_nsec).ok()?;
    seconds.checked_mul(1_000_000_000)?.checked_add(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_used_time_and_no_process_has_not() {
        let before = process_ns(std::process::id()).expect("its own clock");
        let after = process_ns(std::process::id()).expect("its own clock");
        assert!(0 < before && before <= after);
        assert_eq!(process_ns(0), None);
        assert_eq!(process_ns(u32::MAX), None);
        assert_eq!(process_ns(1 << 30), None);
    }
}
