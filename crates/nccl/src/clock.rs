//! The device's events on the host's clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::driver::{Event, Stream};
use crate::error::NcclError;
use crate::pool::{Pool, PooledEvent};

/// How long an event is measured from: differences come in single precision, which after 10 s still tells microseconds.
const KEPT: Duration = Duration::from_secs(10);
/// How often both clocks are looked at; the quickest look counts.
const LOOKS: usize = 3;

/// A moment that both clocks know.
#[derive(Debug)]
pub(crate) struct Clock {
    event: PooledEvent,
    at: Instant,
}

impl Clock {
    /// Looks at both clocks. The stream has nothing to do.
    pub(crate) fn new(stream: &Stream, pool: &Arc<Pool>) -> Result<Self, NcclError> {
        let mut best = Self::looked(stream, pool)?;
        for _ in 1..LOOKS {
            let other = Self::looked(stream, pool)?;
            if other.1 < best.1 {
                best = other;
            }
        }
        Ok(best.0)
    }

    /// Looks at both again where it has been long. The stream has nothing to do.
    pub(crate) fn renew(&mut self, stream: &Stream, pool: &Arc<Pool>) -> Result<(), NcclError> {
        if self.at.elapsed() >= KEPT {
            *self = Self::new(stream, pool)?;
        }
        Ok(())
    }

    /// One look, and how long it took: the event happened in the middle of that, as far as the host knows.
    fn looked(stream: &Stream, pool: &Arc<Pool>) -> Result<(Self, Duration), NcclError> {
        let event = pool.take()?;
        let begun = Instant::now();
        stream.record(&event)?;
        while !event.has_happened()? {
            std::hint::spin_loop();
        }
        let took = begun.elapsed();
        let at = begun + took / 2;
        Ok((Self { event, at }, took))
    }

    /// When an event happened that has.
    pub(crate) fn time_of(&self, event: &Event) -> Result<Instant, NcclError> {
        Ok(self.at + event.since(&self.event)?)
    }
}
