//! Events for reuse: creating one takes the driver longer than recording it.

use std::ops::Deref;
use std::sync::{Arc, Mutex};

use crate::driver::{Context, Event};
use crate::error::NcclError;
use crate::shared::unpoisoned;

/// Maximum number of unused events to keep.
const KEPT_MAX: usize = 1024;

/// The unused events of a context.
#[derive(Debug)]
pub(crate) struct Pool {
    context: Context,
    timed: bool,
    free: Mutex<Vec<Event>>,
}

impl Pool {
    /// An empty pool; `timed` if its events record when they happened.
    pub(crate) fn new(context: &Context, timed: bool) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            timed,
            free: Mutex::default(),
        })
    }

    /// An event, exclusive to the caller until it is dropped.
    pub(crate) fn take(self: &Arc<Self>) -> Result<PooledEvent, NcclError> {
        let kept = unpoisoned(self.free.lock()).pop();
        let event = match kept {
            Some(event) => event,
            None => self.context.event(self.timed)?,
        };
        Ok(PooledEvent {
            event: Some(event),
            pool: self.clone(),
        })
    }
}

/// An event that returns to its pool on drop.
#[derive(Debug)]
pub(crate) struct PooledEvent {
    /// Present until the drop.
    event: Option<Event>,
    pool: Arc<Pool>,
}

impl PooledEvent {
    pub(crate) fn context(&self) -> &Context {
        &self.pool.context
    }
}

impl Deref for PooledEvent {
    type Target = Event;

    fn deref(&self) -> &Event {
        let event = self.event.as_ref();
        event.expect("an event is only taken out when this is dropped")
    }
}

impl Drop for PooledEvent {
    fn drop(&mut self) {
        let mut free = unpoisoned(self.pool.free.lock());
        if free.len() < KEPT_MAX {
            free.extend(self.event.take());
        }
    }
}
