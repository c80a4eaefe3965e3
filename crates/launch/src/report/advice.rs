//! What the person in front of the screen can do about a failed rank.

use super::{Failure, FailureKind, known};

/// The advice; every failure has some.
pub(super) fn of(failure: &Failure) -> String {
    if let Some(own) = failure.error.as_ref().and_then(|error| error.parts().1) {
        return own.to_owned();
    }
    if let Some(known) = known(failure) {
        return known;
    }
    match &failure.kind {
        FailureKind::ExitCode(code) => of_code(*code, failure),
        FailureKind::Signal { number, .. } => of_signal(*number).to_owned(),
        FailureKind::LeftEarly => {
            "every rank has to make the same collective calls; does one have fewer batches, or call `exit`?"
                .to_owned()
        }
        FailureKind::Stalled { state } if state.contains("(T)") => {
            "`kill -CONT` lets a stopped process go on".to_owned()
        }
        FailureKind::Stalled { state } if state.starts_with("running (R)") => {
            "it computes without an end or waits in a loop; its stack shows where".to_owned()
        }
        // Found by what it did not do, not by another rank that waited for it.
        FailureKind::Stalled { .. } if failure.reported_by.is_none() => {
            "a rank that waits is seldom the one at fault: compare what the others did".to_owned()
        }
        FailureKind::Stalled { .. } => {
            "`gdb -p` or `py-spy dump --pid` show where a process hangs".to_owned()
        }
    }
}

/// The last lines tell why a rank ended by itself. A signal from outside has nothing to do with them.
pub(super) fn known(failure: &Failure) -> Option<String> {
    let is_own_end = match failure.kind {
        FailureKind::ExitCode(_) => true,
        FailureKind::Signal { number, .. } => {
            matches!(number, libc::SIGABRT | libc::SIGBUS | libc::SIGSEGV)
        }
        FailureKind::LeftEarly | FailureKind::Stalled { .. } => false,
    };
    let advice = known::advice(failure).filter(|_| is_own_end);
    advice.map(str::to_owned)
}

fn of_signal(number: i32) -> &'static str {
    match number {
        libc::SIGKILL => {
            "when memory runs out, the kernel sends SIGKILL: see `dmesg` or the container's memory limit"
        }
        libc::SIGBUS => {
            "SIGBUS often means that a file mapped into memory was cut short, or that /dev/shm is full"
        }
        libc::SIGILL => "was the program built for another processor?",
        libc::SIGSEGV | libc::SIGABRT | libc::SIGFPE => {
            "PYTHONFAULTHANDLER=1 shows where in Python a process crashes; where in native code, `gdb` with the core \
             file that `ulimit -c unlimited` allows"
        }
        libc::SIGXCPU => "the limit on processor time is used up, see `ulimit -t`",
        _ => "it came from outside of the job: a scheduler at its time limit, or `kill`",
    }
}

fn of_code(code: i32, failure: &Failure) -> String {
    match code {
        126 => return "126 is how a shell says that a command may not be executed".to_owned(),
        127 => {
            return "127 is how a shell says that there is no such command, and the loader that a library is missing: \
                    try `command -v` and `ldd`"
                .to_owned();
        }
        129..=159 => {
            return format!(
                "{code} is how a shell says that signal {} ended its command; of that one: {}",
                code - 128,
                of_signal(code - 128)
            );
        }
        _ => {}
    }
    if failure.last_lines.is_empty() {
        return format!(
            "the program chose this code and did not say why: look in it for an exit with {code}, or start one rank \
             under `strace -f -e trace=exit_group`"
        );
    }
    match failure.log.as_deref().and_then(std::path::Path::parent) {
        Some(folder) => format!(
            "everything that this rank printed is in {}",
            failure.place(folder)
        ),
        None if failure.node.is_some() => {
            "the launcher of its node says where its output is".to_owned()
        }
        None => "--log-dir DIR keeps everything that the ranks print".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(kind: FailureKind, last_lines: &[&str], log: Option<&str>, expect: &str) {
        let failure = Failure {
            last_lines: last_lines.iter().map(|line| (*line).to_owned()).collect(),
            log: log.map(Into::into),
            ..Failure::example(kind)
        };
        let got = of(&failure);
        assert!(got.contains(expect), "{expect:?} is not in {got:?}");
    }

    #[test]
    fn every_failure_comes_with_something_to_do() {
        let code = FailureKind::ExitCode;
        check(
            code(1),
            &[],
            Some("logs/0/stderr.log"),
            "look in it for an exit with 1",
        );
        check(
            code(1),
            &["no data"],
            Some("logs/0/stderr.log"),
            "is in logs/0",
        );
        check(code(1), &["no data"], None, "--log-dir DIR");
        let known = "OSError: [Errno 98] Address already in use";
        check(code(1), &[known], Some("logs/0/stderr.log"), "this port");
        check(
            FailureKind::signal(libc::SIGABRT, true),
            &["  what():  CUDA error: out of memory"],
            None,
            "the GPU's memory is full",
        );
        check(
            FailureKind::signal(libc::SIGKILL, false),
            &[known],
            None,
            "when memory runs out",
        );
        check(code(126), &["sh: ..."], None, "may not be executed");
        check(code(127), &[], None, "`ldd`");
        check(
            code(137),
            &["Killed"],
            None,
            "signal 9 ended its command; of that one: when memory",
        );
        let signal = |number| FailureKind::signal(number, false);
        check(signal(libc::SIGKILL), &[], None, "when memory runs out");
        check(signal(libc::SIGSEGV), &[], None, "PYTHONFAULTHANDLER=1");
        check(signal(libc::SIGABRT), &[], None, "PYTHONFAULTHANDLER=1");
        check(
            signal(libc::SIGTERM),
            &[],
            None,
            "a scheduler at its time limit",
        );
        check(
            FailureKind::LeftEarly,
            &[],
            None,
            "the same collective calls",
        );
        let stalled = |state: &str| FailureKind::Stalled {
            state: state.to_owned(),
        };
        check(stalled("stopped by a signal (T)"), &[], None, "kill -CONT");
        check(
            stalled("sleeping (S)"),
            &[],
            None,
            "compare what the others did",
        );
        let spins = "running (R); rank 1 spins";
        check(stalled(spins), &[], None, "waits in a loop");
        let accused = Failure {
            reported_by: Some(0),
            ..Failure::example(stalled("sleeping (S)"))
        };
        assert!(of(&accused).contains("py-spy"));
    }
}
