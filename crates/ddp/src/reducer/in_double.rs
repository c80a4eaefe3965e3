//! Buckets of models with f64 parameters: tensors in ordinary memory, reduced in f64 by the process group.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use burn::tensor::{DType, Device, Tensor, TensorData};
use paceline_collective::{AllReduce, OpTiming, ProcessGroup, ReduceOp, Ticket, Tree};

use super::{DeviceCall, DeviceGroup, DeviceTicket, Setup, lock};
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

    fn all_reduce(
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
        let call = AllReduce {
            op: ReduceOp::Sum,
            tree: Some(self.tree.clone()),
            len,
            bucket: Some(call.bucket as u32),
            step: call.step,
        };
        let ticket = self.group.all_reduce_async(memory, call);
        Ok(Box::new(InFlight {
            len,
            device: self.device.clone(),
            state: Mutex::new(State::Sent(ticket)),
        }))
    }

    fn synchronize(&self) -> Result<(), DdpError> {
        Ok(())
    }
}

struct InFlight {
    len: usize,
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
        let sum = TensorData::new(done.buffer[..self.len].to_vec(), [self.len]);
        Ok(Tensor::from_data(sum, (&self.device, DType::F64)))
    }

    fn times(&self) -> Option<(Instant, Instant)> {
        match &*lock(&self.state) {
            State::Arrived(timing) => Some((timing.started, timing.finished)),
            State::Sent(_) | State::Taken => None,
        }
    }
}
