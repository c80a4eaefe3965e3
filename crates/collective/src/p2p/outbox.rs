//! Buffers that are sent while their owner computes: the thread `rank3/outbox`, where the data goes over a connection.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::PointToPoint;
use super::frame::Label;
use crate::error::{Error, Operation};
use crate::memory::Region;
use crate::status::OpWait;

/// Buffers that may wait in the queue; a thread that sends one more waits for room.
const JOBS_MAX: usize = 1024;

#[derive(Debug)]
pub(super) struct Job {
    pub(super) id: u64,
    pub(super) to: usize,
    pub(super) label: Label,
    pub(super) operation: Operation,
    pub(super) region: Region,
}

/// What is to be sent, in order.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    jobs: VecDeque<Job>,
    /// Whom the thread is sending to.
    busy: Option<usize>,
    closed: bool,
    thread: Option<JoinHandle<()>>,
}

impl Outbox {
    pub(super) fn close(&mut self) {
        self.closed = true;
    }

    pub(super) fn thread(&mut self) -> Option<JoinHandle<()>> {
        self.thread.take()
    }

    fn has_work_for(&self, to: usize) -> bool {
        self.busy == Some(to) || self.jobs.iter().any(|job| job.to == to)
    }
}

impl PointToPoint {
    pub(super) fn queue(self: &Arc<Self>, job: Job, wait: &OpWait<'_>) -> Result<(), Error> {
        let mut state = self.wait_until(wait, |state| match state.outbox.jobs.front() {
            Some(first) if state.outbox.jobs.len() >= JOBS_MAX => Err(vec![first.to]),
            _ => Ok(()),
        })?;
        if state.outbox.thread.is_none() {
            let served = self.clone();
            let thread = self.status.spawn("outbox", move || served.serve_outbox());
            state.outbox.thread = Some(thread?);
        }
        state.outbox.jobs.push_back(job);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until nothing to `to` is queued any more, so that a message does not overtake those before it.
    pub(super) fn drain_outbox(&self, to: usize, wait: &OpWait<'_>) -> Result<(), Error> {
        let drained = self.wait_until(wait, |state| match state.outbox.has_work_for(to) {
            true => Err(vec![to]),
            false => Ok(()),
        });
        drained.map(drop)
    }

    /// The thread: runs until the outbox is closed, and then what is still queued. After a failure that is at once.
    fn serve_outbox(&self) {
        let idle = |state: &mut super::State| state.outbox.jobs.is_empty() && !state.outbox.closed;
        loop {
            let mut state = self.state.lock();
            self.changed.wait_while(&mut state, idle);
            let Some(job) = state.outbox.jobs.pop_front() else {
                return;
            };
            state.outbox.busy = Some(job.to);
            drop(state);
            let wait = self.op_wait(job.operation);
            let noted = self.note(job.operation, &job.label, wait.started);
            let bytes = &job.region.as_slice()[..job.label.bytes()];
            let sent = self.status.health().and_then(|()| {
                let _entered = self.status.enter(job.operation);
                self.send_inline(bytes, job.label, job.to, &wait)
            });
            let sent = self.settle(sent);
            let mut state = self.state.lock();
            state.outbox.busy = None;
            if sent.is_ok() {
                noted.finished();
                state.ledger.keep(job.id, job.region);
                state.ledger.taken(job.id, job.to);
            }
            drop(state);
            self.changed.notify_all();
        }
    }
}
