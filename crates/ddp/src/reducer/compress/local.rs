//! `CommHook::LocalSgd`: gradients stay on their rank, after some first steps in which they are summed over all ranks.

use paceline_collective::{Error, Ticket};

use super::{Compressor, Context, Leaf, Own, Received, Stack};

pub(super) struct Local {
    context: Context,
    start_iter: u64,
    live: Vec<Live>,
}

#[derive(Default)]
struct Live {
    stack: Stack<f32>,
    weight: f32,
    used: Vec<bool>,
    sent: Option<Ticket<f32>>,
}

impl Local {
    pub(super) fn new(context: Context, start_iter: u64) -> Self {
        let live = (0..context.buckets()).map(|_| Live::default()).collect();
        Self {
            context,
            start_iter,
            live,
        }
    }

    fn is_active(&self) -> bool {
        self.context.step >= self.start_iter
    }
}

impl Compressor for Local {
    fn begin(&mut self, step: u64) {
        self.context.step = step;
        self.live.fill_with(Live::default);
    }

    fn add(&mut self, leaf: Leaf<'_>) -> Result<(), Error> {
        let live = &mut self.live[leaf.bucket];
        live.weight += leaf.weight;
        live.used.resize(leaf.used.len(), false);
        for (any, used) in live.used.iter_mut().zip(leaf.used) {
            *any |= *used > 0.0;
        }
        let own = self.context.group.rank();
        let message = leaf.values.to_vec();
        live.stack
            .push(&self.context.tree, own, leaf.shard, message);
        Ok(())
    }

    fn send(&mut self, bucket: usize) -> Result<(), Error> {
        if !self.is_active() {
            let stack = std::mem::take(&mut self.live[bucket].stack);
            let len = self.context.len(bucket);
            let sent = self.context.all_reduce(bucket, stack, len)?;
            self.live[bucket].sent = Some(sent);
        }
        Ok(())
    }

    fn resend(&mut self, _bucket: usize) -> Result<(), Error> {
        Ok(())
    }

    fn receive(&mut self, bucket: usize) -> Result<Received, Error> {
        let len = self.context.len(bucket);
        let live = &mut self.live[bucket];
        if let Some(ticket) = live.sent.take() {
            let done = ticket.wait()?;
            return Ok(Received {
                values: done.buffer[..len].to_vec(),
                bytes: len * size_of::<f32>(),
                timing: Some([done.timing; 2]),
                own: None,
            });
        }
        let sum = std::mem::take(&mut live.stack).total();
        Ok(Received {
            values: sum.expect("every rank has a shard"),
            bytes: 0,
            timing: None,
            own: Some(Own {
                weight: live.weight,
                used: std::mem::take(&mut live.used),
            }),
        })
    }
}
