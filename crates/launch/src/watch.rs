//! Tells a listener which processes are the ranks, as they come and go.

use std::fmt;
use std::sync::Arc;

/// A rank's process on this machine began or ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankEvent {
    /// Its number in the job.
    pub rank: usize,
    /// Its process.
    pub pid: u32,
    /// Whether it runs now; after `false` the number of the process may become another's.
    pub is_running: bool,
}

/// A listener that learns which processes the ranks are. Called from the thread that supervises them, so it must return at
/// once.
#[derive(Clone)]
pub struct RankWatch(Arc<dyn Fn(RankEvent) + Send + Sync>);

impl RankWatch {
    /// Calls `told` for each rank that begins and ends.
    pub fn new(told: impl Fn(RankEvent) + Send + Sync + 'static) -> Self {
        Self(Arc::new(told))
    }

    pub(crate) fn tell(&self, event: RankEvent) {
        (self.0)(event);
    }
}

impl fmt::Debug for RankWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RankWatch")
    }
}
