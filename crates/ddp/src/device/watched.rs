//! Calls to a driver: with a deadline, because drivers hang, and with panics turned into errors.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::error::DeviceError;
use super::kind::DeviceKind;
use crate::panic_text::{one_line, panic_text};

/// The longest time that a driver may take: with many devices and no persistence daemon it needs about 20 s.
#[cfg(feature = "cube")]
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `ask`, which calls a driver, and returns its answer.
#[cfg(feature = "cube")]
pub(super) fn asked<T: Send + 'static>(
    kind: DeviceKind,
    ask: impl FnOnce() -> Result<T, DeviceError> + Send + 'static,
) -> Result<T, DeviceError> {
    asked_within(ANSWER_TIMEOUT, kind, ask)
}

/// The same with another deadline. A thread that hangs in the driver is abandoned, because nothing can end it.
fn asked_within<T: Send + 'static>(
    timeout: Duration,
    kind: DeviceKind,
    ask: impl FnOnce() -> Result<T, DeviceError> + Send + 'static,
) -> Result<T, DeviceError> {
    let refused = |reason: String| DeviceError::Refused { kind, reason };
    let (answer, answered) = mpsc::sync_channel(1);
    let thread = thread::Builder::new()
        .name(format!("device/{kind}"))
        .spawn(move || {
            // The caller may have timed out.
            let _ = answer.send(ask());
        })
        .map_err(|error| refused(format!("cannot start a thread to ask it: {error}")))?;
    match answered.recv_timeout(timeout) {
        Ok(answer) => {
            let _ = thread.join();
            answer
        }
        Err(RecvTimeoutError::Timeout) => Err(DeviceError::NoAnswer {
            kind,
            waited: timeout,
        }),
        Err(RecvTimeoutError::Disconnected) => Err(refused(match thread.join() {
            Ok(()) => "it gave no answer".to_owned(),
            Err(panic) => one_line(
                panic_text(&*panic).unwrap_or("Burn's back end panicked without a message"),
            ),
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A deadline that these tests never reach.
    const LONG: Duration = Duration::from_secs(3600);
    const KIND: DeviceKind = DeviceKind::Cuda;

    #[test]
    fn an_answer_and_an_error_are_passed_on() {
        assert_eq!(asked_within(LONG, KIND, || Ok(7)), Ok(7));
        let error = DeviceError::NotBuilt { kind: KIND };
        let expect = error.clone();
        assert_eq!(
            asked_within::<()>(LONG, KIND, move || Err(error)),
            Err(expect)
        );
    }

    #[test]
    fn a_panic_below_becomes_an_error_with_its_words() {
        let check = |ask: fn() -> Result<(), DeviceError>, reason: &str| {
            let refused = DeviceError::Refused {
                kind: KIND,
                reason: reason.into(),
            };
            assert_eq!(asked_within(LONG, KIND, ask), Err(refused));
        };
        check(
            || panic!("Unable to acquire\n    device {}", 3),
            "Unable to acquire device 3",
        );
        check(|| panic!("no driver"), "no driver");
        check(
            || std::panic::panic_any(7),
            "Burn's back end panicked without a message",
        );
    }

    #[test]
    fn a_driver_that_hangs_is_given_up() {
        let (_release, hangs) = mpsc::channel::<()>();
        let timeout = Duration::from_millis(1);
        let answer = asked_within(timeout, KIND, move || {
            let _ = hangs.recv();
            Ok(())
        });
        assert_eq!(
            answer,
            Err(DeviceError::NoAnswer {
                kind: KIND,
                waited: timeout
            })
        );
    }
}
