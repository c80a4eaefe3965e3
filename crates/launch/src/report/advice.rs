//! What the person in front of the screen can do about a failed rank.

use std::path::Path;

use paceline_words::{Lang, Word, say};

use super::{Failure, FailureKind, known};

/// The advice; every failure has some.
pub(super) fn of(failure: &Failure, lang: Lang) -> String {
    if let Some(own) = (failure.error.as_ref()).and_then(|error| error.hint(lang)) {
        return own.to_owned();
    }
    if let Some(known) = known(failure) {
        return known.of(lang).to_owned();
    }
    match &failure.kind {
        FailureKind::ExitCode(code) => of_code(*code, failure, lang),
        FailureKind::Signal { number, .. } => of_signal(*number, lang),
        FailureKind::LeftEarly => say!(
            lang,
            "every rank has to make the same collective calls; does one have fewer batches, or call `exit`?",
            "모든 랭크가 같은 집합 통신을 호출해야 합니다. 배치 수가 적거나 `exit`을 호출하는 랭크가 있는지 확인하세요"
        ),
        FailureKind::Stalled { state } => of_stalled(state.of(Lang::En), failure, lang),
    }
}

fn of_stalled(state: &str, failure: &Failure, lang: Lang) -> String {
    if state.contains("(T)") {
        return say!(
            lang,
            "`kill -CONT` lets a stopped process go on",
            "정지된 프로세스는 `kill -CONT`로 다시 진행시킬 수 있습니다"
        );
    }
    if state.starts_with("running (R)") {
        return say!(
            lang,
            "it computes without an end or waits in a loop; its stack shows where",
            "끝나지 않는 계산을 하거나 반복문 안에서 기다리고 있습니다. 스택을 보면 위치를 알 수 있습니다"
        );
    }
    match failure.reported_by {
        // Found by what it did not do, not by another rank that waited for it.
        None => say!(
            lang,
            "a rank that waits is seldom the one at fault: compare what the others did",
            "기다리는 랭크가 원인인 경우는 드뭅니다. 다른 랭크가 하던 일과 비교하세요"
        ),
        Some(_) => say!(
            lang,
            "`gdb -p` or `py-spy dump --pid` show where a process hangs",
            "`gdb -p`나 `py-spy dump --pid`로 프로세스가 멈춘 위치를 볼 수 있습니다"
        ),
    }
}

/// The last lines tell why a rank ended by itself. A signal from outside has nothing to do with them.
pub(super) fn known(failure: &Failure) -> Option<Word> {
    let is_own_end = match failure.kind {
        FailureKind::ExitCode(_) => true,
        FailureKind::Signal { number, .. } => {
            matches!(number, libc::SIGABRT | libc::SIGBUS | libc::SIGSEGV)
        }
        FailureKind::LeftEarly | FailureKind::Stalled { .. } => false,
    };
    known::advice(failure).filter(|_| is_own_end)
}

fn of_signal(number: i32, lang: Lang) -> String {
    match number {
        libc::SIGKILL => say!(
            lang,
            "when memory runs out, the kernel sends SIGKILL: see `dmesg` or the container's memory limit",
            "메모리가 부족하면 커널이 SIGKILL을 보냅니다. `dmesg`나 컨테이너의 메모리 한도를 확인하세요"
        ),
        libc::SIGBUS => say!(
            lang,
            "SIGBUS often means that a file mapped into memory was cut short, or that /dev/shm is full",
            "SIGBUS는 대개 메모리에 매핑한 파일이 잘렸거나 /dev/shm이 가득 찼다는 뜻입니다"
        ),
        libc::SIGILL => say!(
            lang,
            "was the program built for another processor?",
            "다른 CPU용으로 빌드한 프로그램인지 확인하세요"
        ),
        libc::SIGSEGV | libc::SIGABRT | libc::SIGFPE => say!(
            lang,
            "PYTHONFAULTHANDLER=1 shows where in Python a process crashes; where in native code, `gdb` with the core \
         file that `ulimit -c unlimited` allows",
            "Python 코드의 어디에서 죽었는지는 PYTHONFAULTHANDLER=1로, 네이티브 코드라면 `ulimit -c unlimited`로 코어 파일을 남긴 뒤 \
         `gdb`로 볼 수 있습니다"
        ),
        libc::SIGXCPU => say!(
            lang,
            "the limit on processor time is used up, see `ulimit -t`",
            "CPU 시간 한도를 모두 썼습니다. `ulimit -t`를 확인하세요"
        ),
        _ => say!(
            lang,
            "it came from outside of the job: a scheduler at its time limit, or `kill`",
            "작업 밖에서 보낸 시그널입니다. 스케줄러의 시간 제한이나 `kill` 명령을 확인하세요"
        ),
    }
}

fn of_code(code: i32, failure: &Failure, lang: Lang) -> String {
    match code {
        126 => {
            return say!(
                lang,
                "126 is how a shell says that a command may not be executed",
                "126은 명령을 실행할 권한이 없다는 셸의 종료 코드입니다"
            );
        }
        127 => {
            return say!(
                lang,
                "127 is how a shell says that there is no such command, and the loader that a library is missing: \
                 try `command -v` and `ldd`",
                "127은 명령이 없다는 셸의 종료 코드이거나, 라이브러리가 없다는 로더의 종료 코드입니다. `command -v`와 `ldd`로 \
                 확인하세요"
            );
        }
        129..=159 => {
            let signal = code - 128;
            let advice = of_signal(signal, lang);
            return say!(
                lang,
                "{code} is how a shell says that signal {signal} ended its command; of that one: {advice}",
                "{code}: 시그널 {signal} 때문에 명령이 끝났다는 셸의 종료 코드입니다. {advice}"
            );
        }
        _ => {}
    }
    if failure.last_lines.is_empty() {
        return say!(
            lang,
            "the program chose this code and did not say why: look in it for an exit with {code}, or start one rank \
             under `strace -f -e trace=exit_group`",
            "프로그램이 이유를 출력하지 않고 이 코드로 끝났습니다. 프로그램에서 이 코드(종료 코드 {code})를 쓰는 곳을 찾거나, 랭크 \
             하나를 `strace -f -e trace=exit_group` 아래에서 실행하세요"
        );
    }
    match failure.log.as_deref().and_then(Path::parent) {
        Some(folder) => {
            let place = failure.place(folder, lang);
            say!(
                lang,
                "everything that this rank printed is in {place}",
                "이 랭크의 모든 출력: {place}"
            )
        }
        None if failure.node.is_some() => say!(
            lang,
            "the launcher of its node says where its output is",
            "출력의 위치는 그 노드의 런처가 알려 줍니다"
        ),
        None => say!(
            lang,
            "--log-dir DIR keeps everything that the ranks print",
            "--log-dir DIR을 주면 랭크의 모든 출력을 남깁니다"
        ),
    }
}

#[cfg(test)]
mod tests {
    use paceline_words::Text;

    use super::*;

    fn check(kind: FailureKind, last_lines: &[&str], log: Option<&str>, expect: &str) {
        let failure = Failure {
            last_lines: last_lines.iter().map(|line| (*line).to_owned()).collect(),
            log: log.map(Into::into),
            ..Failure::example(kind)
        };
        let got = of(&failure, Lang::En);
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
            state: Text::new(|_| state.to_owned()),
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
        assert!(of(&accused, Lang::En).contains("py-spy"));
    }
}
