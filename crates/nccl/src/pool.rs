//! Events that are used again: making one takes the driver longer than recording it.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{Context, Event};
use crate::error::NcclError;

/// Most events that are kept for later.
const KEPT_MAX: usize = 1024;

/// Events of one context that nobody uses.
#[derive(Debug)]
pub(crate) struct Pool {
    context: Context,
    timed: bool,
    free: Mutex<Vec<Event>>,
}

impl Pool {
    /// Without any event yet; `timed` if they are to tell when they happened.
    pub(crate) fn new(context: &Context, timed: bool) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            timed,
            free: Mutex::default(),
        })
    }

    /// One that is this caller's until it is dropped.
    pub(crate) fn take(self: &Arc<Self>) -> Result<PooledEvent, NcclError> {
        let kept = self
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
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

/// An event that goes back to its pool.
#[derive(Debug)]
pub(crate) struct PooledEvent {
    /// There until the end.
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
        let mut free = self
            .pool
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if free.len() < KEPT_MAX {
            free.extend(self.event.take());
        }
    }
}
