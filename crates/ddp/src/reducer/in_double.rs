//! Buckets of models with f64 parameters: tensors in ordinary memory, reduced in f64 by the process group.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use burn::tensor::{DType, Device, Tensor, TensorData};
use paceline_collective::{AllGather, AllReduce, OpTiming, ProcessGroup, ReduceOp, Ticket, Tree};

use super::{DeviceCall, DeviceGroup, DeviceTicket, Setup, lock, sent};
use crate::error::DdpError;

/// The process group as collectives on tensors.
pub(crate) struct InDouble {
    group: ProcessGroup,
    tree: Arc<Tree>,
    device: Device,
}

impl InDouble {
    pub(crate) fn new(setup: &Setup, device: &Device) -> Self {
        Self {
            group: setup.group.clone(),
            tree: setup.tree.clone(),
            device: device.clone().inner(),
        }
    }

    fn sent(&self, ticket: Ticket<f64>, part: Range<usize>) -> Box<dyn DeviceTicket> {
        Box::new(InFlight {
            part,
            device: self.device.clone(),
            state: Mutex::new(State::Sent(ticket)),
        })
    }
}

impl DeviceGroup for InDouble {
    fn device(&self) -> &Device {
        &self.device
    }

    fn dtype(&self) -> DType {
        DType::F64
    }

    /// Ordinary memory has no kernels that could be merged.
    fn computed(&self, tensor: Tensor<1>) -> Tensor<1> {
        tensor
    }

    fn reduce(
        &self,
        call: DeviceCall,
        blocks: Vec<Tensor<1>>,
    ) -> Result<Box<dyn DeviceTicket>, DdpError> {
        let len = blocks[0].dims()[0];
        let mut memory = self.group.buffer::<f64>(len * blocks.len())?;
        for (block, place) in blocks.into_iter().zip(memory.chunks_mut(len.max(1))) {
            let block = block.into_data();
            place.copy_from_slice(block.as_slice().expect("blocks are f64"));
        }
        let part = call.part(self.group.rank(), len);
        let sum = AllReduce {
            op: ReduceOp::Sum,
            tree: Some(self.tree.clone()),
            len,
            bucket: call.bucket.map(|bucket| bucket as u32),
            step: call.step,
        };
        let ticket = sent::reduce(&self.group, memory, sum, call.counts);
        Ok(self.sent(ticket, part))
    }

    fn all_gather(
        &self,
        call: DeviceCall,
        values: Tensor<1>,
    ) -> Result<Box<dyn DeviceTicket>, DdpError> {
        let len = values.dims()[0];
        let mut memory = self.group.buffer::<f64>(len)?;
        let values = values.into_data();
        memory.copy_from_slice(values.as_slice().expect("weights are f64"));
        let call = AllGather {
            counts: call.counts,
            bucket: call.bucket.map(|bucket| bucket as u32),
            step: call.step,
        };
        Ok(self.sent(self.group.all_gather_async(memory, call), 0..len))
    }

    /// The tail follows these sums in the group.
    fn synchronize(&self) -> Result<(), DdpError> {
        Ok(())
    }

    fn abort(&self) -> Result<(), DdpError> {
        Ok(())
    }
}

struct InFlight {
    /// The elements that this rank gets.
    part: Range<usize>,
    device: Device,
    state: Mutex<State>,
}

enum State {
    Sent(Ticket<f64>),
    /// Somebody waits for it, or it failed.
    Taken,
    Arrived(OpTiming),
}

impl DeviceTicket for InFlight {
    /// Waits for the other ranks, at most for the group's timeout.
    fn result(&self) -> Result<Tensor<1>, DdpError> {
        let mut state = lock(&self.state);
        let State::Sent(ticket) = std::mem::replace(&mut *state, State::Taken) else {
            return Err(DdpError::Backend("a sum was taken twice"));
        };
        let done = ticket.wait()?;
        *state = State::Arrived(done.timing);
        let values = done.buffer[self.part.clone()].to_vec();
        let values = TensorData::new(values, [self.part.len()]);
        Ok(Tensor::from_data(values, (&self.device, DType::F64)))
    }

    fn times(&self) -> Option<(Instant, Instant)> {
        match &*lock(&self.state) {
            State::Arrived(timing) => Some((timing.started, timing.finished)),
            State::Sent(_) | State::Taken => None,
        }
    }
}
