//! The device's events on the host's clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::driver::{Event, Stream};
use crate::error::NcclError;
use crate::pool::{Pool, PooledEvent};

/// Maximum age of the reference event: differences are single-precision, which resolves microseconds up to 10 s.
const KEPT: Duration = Duration::from_secs(10);
/// Number of readings of both clocks; the fastest counts.
const LOOKS: usize = 3;

/// A moment on both clocks.
#[derive(Debug)]
pub(crate) struct Clock {
    event: PooledEvent,
    at: Instant,
}

impl Clock {
    /// Reads both clocks. The stream must be idle.
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

    /// Reads both again if the reference is too old. The stream must be idle.
    pub(crate) fn renew(&mut self, stream: &Stream, pool: &Arc<Pool>) -> Result<(), NcclError> {
        if self.at.elapsed() >= KEPT {
            *self = Self::new(stream, pool)?;
        }
        Ok(())
    }

    /// One reading and its duration. The event is assumed to have happened in its middle.
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

    /// The host time of an event that has happened.
    pub(crate) fn time_of(&self, event: &Event) -> Result<Instant, NcclError> {
        Ok(self.at + event.since(&self.event)?)
    }
}
