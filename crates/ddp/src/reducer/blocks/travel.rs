//! Buckets leave for the other ranks in order, and come back.

use std::time::Instant;

use paceline_collective::{AllReduce, ReduceOp};

use super::super::sent::Memory;
use super::{Blocks, Flight, IN_FLIGHT, Landed};
use crate::error::DdpError;
use crate::timeline::BucketTiming;

impl Blocks {
    /// The number of buckets sent in this step.
    pub(in crate::reducer) fn launched(&self) -> usize {
        self.next
    }

    /// A bucket that was sent whole. Its caller waits for it without a lock on all others.
    pub(in crate::reducer) fn take(&mut self, bucket: usize) -> Result<Flight, DdpError> {
        self.failed.take().map_or(Ok(()), Err)?;
        let flight = self.live[bucket].flight.take();
        Ok(flight.expect("every bucket is launched when the last shard ends"))
    }

    /// This rank's slice of a bucket that was sent.
    pub(in crate::reducer) fn take_own(
        &mut self,
        bucket: usize,
    ) -> Result<(Landed, BucketTiming), DdpError> {
        self.reap(bucket)?;
        let own = self.live[bucket].own.take();
        Ok(own.expect("a bucket that was reaped has left a slice"))
    }

    /// Starts the second exchange of compressed buckets, once all have been sent.
    pub(in crate::reducer) fn resend(&mut self) -> Result<(), DdpError> {
        self.failed.take().map_or(Ok(()), Err)?;
        let buckets = 0..self.plan.tail();
        for bucket in buckets {
            if let Some(compressor) = &mut self.compressor {
                compressor.resend(bucket)?;
            }
        }
        Ok(())
    }

    /// A compressed bucket.
    pub(in crate::reducer) fn receive(
        &mut self,
        bucket: usize,
    ) -> Result<(Landed, BucketTiming), DdpError> {
        let wait_start = Instant::now();
        let compressor = self.compressor.as_mut();
        let received = compressor
            .expect("the bucket is compressed")
            .receive(bucket)?;
        let ready = self.live[bucket].ready.take().unwrap_or(wait_start);
        let timing = received.timing;
        let times = timing.map(|[first, last]| {
            [
                first.submitted,
                first.started,
                first.peers_ready,
                last.finished,
            ]
        });
        let [submitted, started, peers_ready, finished] = times.unwrap_or([ready; 4]);
        let timing = BucketTiming {
            bucket: self.first + bucket,
            bytes: received.bytes,
            operation: "exchange",
            ready,
            submitted,
            started,
            peers_ready,
            finished,
            waited: (wait_start, Instant::now()),
            device: None,
        };
        let landed = match received.own {
            Some(own) => Landed::Own(received.values, own),
            None => Landed::Slice(received.values, 0),
        };
        Ok((landed, timing))
    }

    /// Waits for a bucket, keeps this rank's slice of it, and gives its memory back.
    fn reap(&mut self, bucket: usize) -> Result<(), DdpError> {
        if self.live[bucket].own.is_some() {
            return Ok(());
        }
        let (memory, timing) = self.take(bucket)?.land()?;
        let shares = self.shares.as_ref().expect("only slices are reaped");
        let own = shares.span(bucket, self.group.rank());
        let slice = Landed::Slice(memory.blocks()[own.clone()].to_vec(), own.start);
        self.live[bucket].own = Some((slice, timing));
        Ok(())
    }

    /// Lends a bucket's memory between two steps.
    pub(in crate::reducer) fn lend(&mut self, bucket: usize) -> Result<Memory, DdpError> {
        self.hold(bucket)?;
        let memory = self.live[bucket].memory.take();
        Ok(memory.expect("a bucket has its memory between two steps"))
    }

    /// Takes a bucket's memory back for the next step.
    pub(in crate::reducer) fn give_back(&self, bucket: usize, memory: Memory) {
        self.live[bucket].pool.put(memory);
    }

    pub(super) fn launch_ready(&mut self) {
        let open = self.open.unwrap_or(usize::MAX);
        let end = self.live.len().min(open.saturating_sub(self.first));
        while self.failed.is_none() && self.next < end && self.live[self.next].sealed {
            #[cfg(test)]
            crate::recovery::faults::before_send(self.step, self.first + self.next, &self.group);
            if self.is_compressed(self.next) {
                let sent = self.compressor.as_mut().map(|all| all.send(self.next));
                self.failed = sent.and_then(|sent| sent.err().map(DdpError::from));
                self.next += 1;
                continue;
            }
            let live = &mut self.live[self.next];
            let Some(memory) = live.memory.take() else {
                return;
            };
            let stride = self.plan.buckets[self.next].stride;
            let call = AllReduce {
                op: ReduceOp::Sum,
                tree: Some(self.tree.clone()),
                len: stride,
                bucket: Some((self.first + self.next) as u32),
                step: self.step,
            };
            let len = stride * self.tree.blocks(self.group.rank()).len();
            let shares = self
                .shares
                .as_ref()
                .filter(|_| self.next < self.plan.tail());
            let counts = shares.map(|shares| shares.counts(self.next).clone());
            live.flight = Some(Flight {
                operation: match &counts {
                    Some(_) => "reduce_scatter",
                    None => "all_reduce",
                },
                sent: memory.send(&self.group, call, counts, len),
                pool: live.pool.clone(),
                bucket: self.first + self.next,
                stride,
                ready: live.ready.take().unwrap_or_else(Instant::now),
            });
            self.next += 1;
            let oldest = self.next.checked_sub(IN_FLIGHT + 1);
            if let Some(oldest) = oldest.filter(|_| self.is_pooled) {
                self.failed = self.reap(oldest).err();
            }
        }
    }
}
