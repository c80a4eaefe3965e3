//! The parent's side: runs a child that tries one step after another, and kills it if one takes too long.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use super::{DEVICES_MAX, Line, LinkReport, Outcome, PairTest, Step, steps};
use crate::error::NcclError;

/// The driver's start may take this many times the limit of a step: it wakes sleeping devices.
const START_FACTOR: u32 = 3;

/// Time for a killed child to exit; the kernel keeps one that is inside a hanging driver.
const GRACE: Duration = Duration::from_secs(1);

/// Maximum number of further children, each after a step that killed or corrupted its process.
const RESTARTS_MAX: usize = 4;

/// Maximum length of a child's line.
const LINE_BYTES_MAX: u64 = 4 << 20;

/// Tests all links between this process's devices. `child` returns the command that [`serve`](super::serve)s from a step on.
///
/// *Cost*: the driver's start and a context on every device, some tenths of a second each. Then, for each step, of which two
/// devices have 4 and eight have 112, copies to the device, across and back, and a comparison: an estimated 10 ms with 4 MiB.
///
/// *Blocks*: up to the timeout for each hanging step, of which there are at most five, including steps that corrupt their
/// process; three times as long if the driver does not start. The remaining steps are then not tested.
///
/// *Errors*: there is no driver, or it does not answer.
pub fn test(
    test: &PairTest,
    child: &mut dyn FnMut(usize) -> Command,
) -> Result<LinkReport, NcclError> {
    let mut found = Found {
        report: None,
        next: 0,
    };
    for _ in 0..=RESTARTS_MAX {
        let before = found.next;
        match attempt(test, child(found.next), &mut found) {
            Ok(()) => break,
            Err(error) if found.report.is_none() => return Err(error),
            // A driver that has hung may not start again: without progress there is no further attempt.
            Err(_) if found.next == before || found.is_complete() => break,
            Err(_) => {}
        }
    }
    found
        .report
        .ok_or_else(|| NcclError::untestable("it ended without output", None))
}

/// The results so far.
struct Found {
    report: Option<LinkReport>,
    /// The first step that has not been tried.
    next: usize,
}

impl Found {
    /// Whether all steps have been tried.
    fn is_complete(&self) -> bool {
        let report = self.report.as_ref();
        report.is_some_and(|report| self.next >= steps(report.devices.len()).len())
    }

    fn set(&mut self, number: usize, outcome: Outcome) {
        let Some(report) = &mut self.report else {
            return;
        };
        let Some(Step { from, to, is_peer }) = steps(report.devices.len()).get(number).copied()
        else {
            return;
        };
        self.next = number + 1;
        let link = report
            .links
            .iter_mut()
            .find(|link| (link.from, link.to) == (from, to));
        if let Some(link) = link {
            *(if is_peer {
                &mut link.peer
            } else {
                &mut link.host
            }) = outcome;
        }
    }
}

/// Runs one child until it is done, fails, or takes too long.
fn attempt(test: &PairTest, mut command: Command, found: &mut Found) -> Result<(), NcclError> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let told = |reason: String| NcclError::untestable(&reason, None);
    let mut child = command
        .spawn()
        .map_err(|error| told(format!("no process can be started: {error}")))?;
    let Some(stdout) = child.stdout.take() else {
        return Err(told("a process was started without its output".into()));
    };
    let lines =
        listen(stdout).map_err(|error| told(format!("no thread can be started: {error}")))?;
    let mut current = None;
    let ended = loop {
        let patience = if current.is_some() {
            test.timeout
        } else {
            test.timeout.saturating_mul(START_FACTOR)
        };
        match lines.recv_timeout(patience) {
            Ok(Line::Devices(report)) if report.devices.len() <= DEVICES_MAX => {
                found.report.get_or_insert(report);
            }
            Ok(Line::Devices(report)) => {
                break Err(told(format!("it has {} devices", report.devices.len())));
            }
            Ok(Line::Begin(number)) => current = Some(number),
            Ok(Line::End(number, outcome)) => {
                found.set(number, outcome);
                current = None;
            }
            Ok(Line::Done) => break Ok(()),
            Ok(Line::Spent) => break Err(told("an error spoiled the process".into())),
            Ok(Line::Failed(reason, hint)) => {
                if let Some(number) = current {
                    let reason = reason.clone();
                    found.set(number, Outcome::Failed { reason });
                }
                break Err(NcclError::untestable(&reason, hint));
            }
            Err(RecvTimeoutError::Timeout) => {
                if let Some(number) = current {
                    found.set(number, Outcome::Stuck);
                }
                break Err(told(format!(
                    "the driver has not answered for {} s",
                    patience.as_secs()
                )));
            }
            Err(RecvTimeoutError::Disconnected) => {
                // Its exit status is kept.
                let _ = child.kill();
                let how = child
                    .wait()
                    .map_or_else(|error| error.to_string(), |status| status.to_string());
                let reason = format!("the process that asks the driver ended early ({how})");
                if let Some(number) = current {
                    found.set(
                        number,
                        Outcome::Failed {
                            reason: reason.clone(),
                        },
                    );
                }
                break Err(told(reason));
            }
        }
    };
    end(child, &lines);
    ended
}

/// Reads a child's lines in a thread that ends with the child's output.
fn listen(stdout: ChildStdout) -> std::io::Result<Receiver<Line>> {
    let (sender, receiver) = channel();
    let read = move || {
        let mut lines = BufReader::new(stdout);
        loop {
            let mut text = Vec::new();
            let read = (&mut lines)
                .take(LINE_BYTES_MAX)
                .read_until(b'\n', &mut text);
            // An invalid or overlong line ends the child like an error of its own.
            let nonsense = || Line::Failed("a child said what is no line of it".into(), None);
            let heard = read.ok().filter(|length| *length > 0);
            let line = heard.map(|_| serde_json::from_slice(&text).unwrap_or_else(|_| nonsense()));
            let is_heard = line.is_some_and(|line| sender.send(line).is_ok());
            if !is_heard {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("gpu-p2p/listen".to_owned())
        .spawn(read)?;
    Ok(receiver)
}

/// Kills a child, and waits briefly for its exit.
fn end(mut child: Child, lines: &Receiver<Line>) {
    // It may have ended already.
    let _ = child.kill();
    let until = std::time::Instant::now() + GRACE;
    // Its output ends with it; remaining lines are discarded.
    while let Ok(_line) =
        lines.recv_timeout(until.saturating_duration_since(std::time::Instant::now()))
    {}
    // A detached thread waits for a child that the kernel keeps inside the driver.
    if !matches!(child.try_wait(), Ok(Some(_))) {
        let reap = std::thread::Builder::new().name("gpu-p2p/reap".to_owned());
        let _ = reap.spawn(move || child.wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairs::{Link, PairDevice};
    use crate::version::Version;

    /// What a child says first on a machine with two devices.
    fn devices() -> String {
        let place = |number| PairDevice {
            name: "GPU".into(),
            bus: format!("0000:0{number}:00.0"),
            uuid: format!("GPU-{number}"),
        };
        let link = |(from, to)| Link {
            from,
            to,
            says_ok: true,
            rank: Some(0),
            peer: Outcome::NotTried,
            host: Outcome::NotTried,
        };
        let report = LinkReport {
            cuda: Version::of_cuda(12080),
            devices: vec![place(1), place(2)],
            message_bytes: 4,
            links: [(0, 1), (1, 0)].map(link).to_vec(),
        };
        serde_json::to_string(&Line::Devices(report)).expect("JSON")
    }

    /// A child that is a script; `$1` is the step that it begins with.
    fn script(text: String) -> impl FnMut(usize) -> Command {
        move |first| {
            let mut command = Command::new("sh");
            command.args(["-c", &text, "sh", &first.to_string()]);
            command
        }
    }

    fn options() -> PairTest {
        PairTest {
            timeout: Duration::from_secs(2),
            ..PairTest::default()
        }
    }

    #[test]
    fn a_way_that_never_ends_is_stuck_and_the_next_child_goes_on_behind_it() {
        let fine = r#"{"end":[N,{"is":"fine","gb_per_second":2.0}]}"#;
        let text = format!(
            "echo '{}'; n=$1; while [ $n -lt 4 ]; do echo \"{{\\\"begin\\\":$n}}\"; [ $n = 2 ] && exec sleep 60; \
             echo '{fine}' | sed s/N/$n/; n=$((n + 1)); done; echo '\"done\"'",
            devices()
        );
        let report = test(&options(), &mut script(text)).expect("a report");
        let fine = Outcome::Fine { gb_per_second: 2.0 };
        let got: Vec<_> = report
            .links
            .iter()
            .map(|link| (&link.host, &link.peer))
            .collect();
        assert_eq!(got, [(&fine, &Outcome::Stuck), (&fine, &fine)]);
    }

    #[test]
    fn a_process_that_ends_within_a_way_says_so_and_too_many_end_the_test() {
        let text = format!(
            "echo '{}'; echo \"{{\\\"begin\\\":$1}}\"; exit 9",
            devices()
        );
        let report = test(&options(), &mut script(text)).expect("a report");
        let hosts: Vec<_> = report.links.iter().map(|link| link.host.is_bad()).collect();
        assert_eq!(hosts, [true, true]);
        let Outcome::Failed { reason } = &report.links[0].host else {
            panic!("{report:?}")
        };
        assert_eq!(
            reason,
            "the process that asks the driver ended early (exit status: 9)"
        );
    }

    #[test]
    fn behind_a_way_that_spoils_its_process_another_goes_on_and_behind_the_last_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let begun = folder.path().join("begun");
        let text = format!(
            "echo $1 >> {}; echo '{}'; echo \"{{\\\"begin\\\":$1}}\"; \
             echo '{{\"end\":[N,{{\"is\":\"failed\",\"reason\":\"it burns\"}}]}}' | sed s/N/$1/; echo '\"spent\"'; exec sleep 60",
            begun.display(),
            devices()
        );
        let report = test(&options(), &mut script(text)).expect("a report");
        for link in &report.links {
            assert!(link.host.is_bad() && link.peer.is_bad(), "{report:?}");
        }
        let begun = std::fs::read_to_string(begun).expect("children");
        assert_eq!(begun, "0\n1\n2\n3\n");
    }

    #[test]
    fn a_child_that_cannot_begin_is_an_error_in_its_own_words() {
        let check = |text: &str, expect: &str| {
            let error = test(&options(), &mut script(text.into())).expect_err("nothing was found");
            assert_eq!(
                error.to_string(),
                format!("links between devices cannot be tested: {expect}")
            );
        };
        check(
            r#"echo '{"failed":["no driver","install one"]}'"#,
            "no driver",
        );
        check(
            "echo garbage; exec sleep 60",
            "a child said what is no line of it",
        );
        check(
            "exit 3",
            "the process that asks the driver ended early (exit status: 3)",
        );
    }
}
