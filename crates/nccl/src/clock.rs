//! The device's events on the host's clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::driver::{Event, Stream};
use crate::error::NcclError;
use crate::pool::{Pool, PooledEvent};

/// How long an event is measured from: differences come in single precision, which after 10 s still tells microseconds.
const KEPT: Duration = Duration::from_secs(10);
/// How long an idle stream may take to let an event happen.
const PATIENCE: Duration = Duration::from_millis(2);

/// A moment that both clocks know.
#[derive(Debug)]
pub(crate) struct Clock {
    event: PooledEvent,
    at: Instant,
}

impl Clock {
    /// Looks at both clocks. The stream has nothing to do.
    pub(crate) fn new(stream: &Stream, pool: &Arc<Pool>) -> Result<Self, NcclError> {
        let event = pool.take()?;
        stream.record(&event)?;
        stream.synchronize()?;
        Ok(Self {
            event,
            at: Instant::now(),
        })
    }

    /// Looks at both again where it has been long. The stream has nothing to do.
    pub(crate) fn renew(&mut self, stream: &Stream, pool: &Arc<Pool>) -> Result<(), NcclError> {
        if self.at.elapsed() < KEPT {
            return Ok(());
        }
        let event = pool.take()?;
        stream.record(&event)?;
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if event.has_happened()? {
                self.at = Instant::now();
                self.event = event;
                return Ok(());
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// When an event happened that has.
    pub(crate) fn time_of(&self, event: &Event) -> Result<Instant, NcclError> {
        Ok(self.at + event.since(&self.event)?)
    }
}
