//! Panics on the threads on which CubeCL compiles and launches kernels.
//!
//! After a panic such a thread goes on with its next task, and the kernel's output holds stale memory. A step checks here
//! first, so that it does not use that memory as gradients.

use std::panic;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use crate::error::DdpError;
use crate::panic_text::one_line;

/// Messages of panics on device threads.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Records panics from its creation on.
pub(crate) struct DeviceThreads {
    before: usize,
}

impl DeviceThreads {
    /// Starts recording. The program's own panic hook is still called.
    pub(crate) fn watch() -> Self {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let theirs = panic::take_hook();
            panic::set_hook(Box::new(move |panic| {
                if std::thread::current().name().is_some_and(is_of_device) {
                    let text = panic.payload_as_str().unwrap_or("without a message");
                    panics().push(one_line(text));
                }
                theirs(panic);
            }));
        });
        Self {
            before: panics().len(),
        }
    }

    /// *Errors*: a kernel was not compiled or launched, and results since then are wrong.
    pub(crate) fn check(&self) -> Result<(), DdpError> {
        match panics().get(self.before) {
            None => Ok(()),
            Some(text) => Err(DdpError::Device(format!(
                "a kernel was not run, because Burn's back end panicked: {text}"
            ))),
        }
    }
}

/// *Source*: cubecl-common 0.11.3, `device/handle/channel.rs`: `DSU-` or `DSD-`, the kind of device and its number.
fn is_of_device(thread: &str) -> bool {
    thread.starts_with("DSU-") || thread.starts_with("DSD-")
}

fn panics() -> MutexGuard<'static, Vec<String>> {
    PANICS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panic_on(thread: &str) {
        let thread = std::thread::Builder::new().name(thread.into());
        let joined = thread.spawn(|| panic!("no such\nregister"));
        assert!(joined.expect("a thread").join().is_err());
    }

    #[test]
    fn a_panic_on_a_devices_thread_is_an_error_for_those_who_listened() {
        let early = DeviceThreads::watch();
        panic_on("rank0/stage");
        assert!(early.check().is_ok());
        panic_on("DSD-0-0");
        let error = early.check().expect_err("a device's thread has panicked");
        assert_eq!(
            error.to_string(),
            "device: a kernel was not run, because Burn's back end panicked: no such register"
        );
        assert!(DeviceThreads::watch().check().is_ok());
    }
}
