//! `Turn`: threads of one process draw random numbers one after the other.

use std::fmt;

use parking_lot::{ReentrantMutex, ReentrantMutexGuard};

static RANDOM_NUMBERS: ReentrantMutex<()> = ReentrantMutex::new(());

/// The right to use this process's random numbers, until it is dropped.
///
/// Burn's back ends keep one generator for a process. A thread that takes a turn, seeds its device and draws therefore gets the
/// same numbers in every run, if all other threads that draw take turns too. A thread may take a turn inside its own.
///
/// *Blocks*: while another thread has its turn.
pub struct Turn {
    _guard: ReentrantMutexGuard<'static, ()>,
}

impl Turn {
    /// Waits for a turn.
    #[must_use]
    pub fn take() -> Self {
        Self {
            _guard: RANDOM_NUMBERS.lock(),
        }
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Turn")
    }
}
