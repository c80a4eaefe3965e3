//! The thread that executes an operation.

use std::time::Duration;

/// The thread that executes an operation, which decides how long it may spin before it sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runner {
    /// The caller of a synchronous operation; it has nothing else to do.
    Caller,
    /// The communication thread; what it spins it takes from the thread that computes.
    CommThread,
}

impl Runner {
    /// Longest time to spin where every rank has a core, unless somebody has [just been woken](crate::pace).
    ///
    /// A futex costs about 5 us to sleep on and wake from: spinning for a few times that pays for a caller. The
    /// communication thread stays below what a context switch would cost the computing thread.
    pub(crate) fn spin(self) -> Duration {
        match self {
            Self::Caller => Duration::from_micros(30),
            Self::CommThread => Duration::from_micros(2),
        }
    }
}
