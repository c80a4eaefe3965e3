//! Ctrl-C and SIGTERM as a wish to stop, which ranks agree on at the next step boundary.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use paceline_rendezvous::page::JobPage;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Whether this rank has been asked to stop, by a signal or by its launcher.
pub(crate) struct StopWish {
    signal: Arc<AtomicUsize>,
}

impl StopWish {
    /// Starts to listen: the first SIGINT or SIGTERM is remembered, the second one ends the process at once with its
    /// default action.
    ///
    /// *Errors* - the system refuses the handler.
    pub(crate) fn listen() -> io::Result<Self> {
        let signal = Arc::new(AtomicUsize::new(0));
        for number in [SIGINT, SIGTERM] {
            let armed = Arc::new(std::sync::atomic::AtomicBool::new(false));
            // Order matters: on the first signal the default action is not armed yet, and is then.
            flag::register_conditional_default(number, armed.clone())?;
            flag::register(number, armed)?;
            flag::register_usize(number, signal.clone(), number as usize)?;
        }
        Ok(Self { signal })
    }

    /// The signal that asked to stop, if one did.
    pub(crate) fn wished(&self, page: &JobPage) -> Option<i32> {
        match self.signal.load(Ordering::Relaxed) {
            0 => page.stop_requested(),
            number => Some(number as i32),
        }
    }
}
