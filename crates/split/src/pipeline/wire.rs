//! Tensors between stages, through the host or from device to device: asynchronous sends, and receives that check what comes.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor, TensorData};
use paceline_collective::{Error, ProcessGroup, SendTicket};
use paceline_ddp::{Arrival, DdpError, DeviceExchange};

use super::error::PipelineError;

/// Longest tensor.
///
/// *Units*: bytes, those of a message.
const TENSOR_BYTES_MAX: u64 = 1 << 30;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Content {
    /// The output of the stage before.
    Input = 0,
    /// The gradient of the output.
    Gradient = 1,
    /// A parameter that another stage holds.
    Weight = 2,
    /// Its gradient.
    WeightGradient = 3,
}

/// The address of a message: the stage that gets it, and the number among those for it (a micro-batch or a tied parameter).
#[derive(Clone, Copy, Debug)]
pub(super) struct Address {
    pub(super) content: Content,
    pub(super) stage: usize,
    pub(super) number: usize,
}

impl Address {
    /// Most stages and numbers that a tag can tell apart.
    pub(super) const STAGES_MAX: usize = 1 << 10;
    pub(super) const NUMBERS_MAX: usize = 1 << 20;

    fn tag(self) -> u32 {
        self.content as u32 | (self.stage as u32) << 2 | (self.number as u32) << 12
    }
}

/// A tensor that was asked for.
pub(super) struct Asked<const D: usize> {
    from: usize,
    address: Address,
    /// Its shape and type, if they do not come with it.
    known: Option<Known<D>>,
    /// Where it comes to, if not to the host.
    arrival: Option<(Box<dyn Arrival>, [usize; D])>,
}

/// Shape and type of a tensor.
pub(super) type Known<const D: usize> = ([usize; D], DType);

/// One rank's messages to and from the other stages of its pipeline.
pub(super) struct Wire {
    group: ProcessGroup,
    device: Device,
    /// For activations and their gradients. Shapes, and all that concerns parameters, go through the host.
    pub(super) on_device: Option<Arc<dyn DeviceExchange>>,
    sent: VecDeque<SendTicket<u8>>,
    /// Sends that may be on their way at once; one more waits for the oldest.
    sent_max: usize,
    /// By content, stage and number of a parameter: type and dimensions after the first, from the first message on.
    agreed: HashMap<(Content, usize, usize), (DType, Vec<usize>)>,
}

impl Wire {
    pub(super) fn new(group: ProcessGroup, device: Device, sent_max: usize) -> Self {
        Self {
            group,
            device,
            on_device: None,
            sent: VecDeque::new(),
            sent_max,
            agreed: HashMap::new(),
        }
    }

    /// Sends a tensor whose shape the receiver knows, while the caller computes.
    pub(super) fn send(
        &mut self,
        data: &TensorData,
        to: usize,
        address: Address,
    ) -> Result<(), PipelineError> {
        while self.sent.front().is_some_and(SendTicket::is_done) || self.sent.len() >= self.sent_max
        {
            let ticket = self.sent.pop_front().expect("a send is on its way");
            ticket.wait().map_err(|error| self.failed(error))?;
        }
        let bytes = data.as_bytes();
        let buffer = self.group.buffer::<u8>(bytes.len());
        let mut buffer = buffer.map_err(|error| self.failed(error))?;
        buffer.copy_from_slice(bytes);
        let ticket = self.group.send_async(buffer, to, address.tag());
        self.sent
            .push_back(ticket.map_err(|error| self.failed(error))?);
        Ok(())
    }

    /// Sends a tensor with its shape and type.
    pub(super) fn send_described(
        &mut self,
        data: &TensorData,
        to: usize,
        address: Address,
    ) -> Result<(), PipelineError> {
        self.describe((data.shape(), data.dtype()), to, address)?;
        self.send(data, to, address)
    }

    /// Sends a tensor of the device, and before it its shape and type unless the receiver knows them.
    pub(super) fn send_tensor<const D: usize>(
        &mut self,
        tensor: Tensor<D>,
        is_known: bool,
        to: usize,
        address: Address,
    ) -> Result<(), PipelineError> {
        if !is_known {
            self.describe((&tensor.dims(), tensor.dtype()), to, address)?;
        }
        match &self.on_device {
            Some(exchange) => Ok(exchange.send(tensor.reshape([-1]), to)?),
            None => self.send(&tensor.into_data(), to, address),
        }
    }

    fn describe(
        &self,
        (shape, dtype): (&[usize], DType),
        to: usize,
        address: Address,
    ) -> Result<(), PipelineError> {
        let dims = shape.iter().map(|dim| *dim as i64);
        let header: Vec<i64> = std::iter::once(code(dtype)?).chain(dims).collect();
        let sent = self.group.send(&header, to, address.tag());
        sent.map_err(|error| self.failed(error))
    }

    /// Asks for a tensor. The device then receives it by itself; on the host it only waits in [`take`](Self::take), because there
    /// messages have room before they are asked for.
    ///
    /// *Blocks*: for the device, until the shape has come: the sender's host has submitted what computes the tensor.
    pub(super) fn ask<const D: usize>(
        &mut self,
        known: Option<Known<D>>,
        from: usize,
        address: Address,
    ) -> Result<Asked<D>, PipelineError> {
        let mut asked = Asked {
            from,
            address,
            known,
            arrival: None,
        };
        if let Some(exchange) = self.on_device.clone() {
            let (shape, dtype) = match known {
                Some(known) => known,
                None => self.receive_shape(from, address)?,
            };
            let arrival = exchange.receive(shape.iter().product(), dtype, from)?;
            asked.arrival = Some((arrival, shape));
        }
        Ok(asked)
    }

    /// A tensor that was asked for, on the rank's device, off every tape.
    pub(super) fn take<const D: usize>(
        &mut self,
        asked: Asked<D>,
    ) -> Result<Tensor<D>, PipelineError> {
        let Asked { from, address, .. } = asked;
        if let Some((arrival, shape)) = asked.arrival {
            let tensor = Tensor::from_inner(arrival.tensor()?.reshape(shape));
            return Ok(match self.device.gradient_checkpointing_strategy() {
                Some(strategy) => tensor.with_gradient_checkpointing_strategy(strategy),
                None => tensor.inner(),
            });
        }
        let (shape, dtype) = match asked.known {
            Some(known) => known,
            None => self.receive_shape(from, address)?,
        };
        let data = self.receive(&shape, dtype, from, address)?;
        Ok(Tensor::from_data(data, (&self.device, dtype)))
    }

    /// Receives a tensor of a known shape and type.
    pub(super) fn receive(
        &self,
        shape: &[usize],
        dtype: DType,
        from: usize,
        address: Address,
    ) -> Result<TensorData, PipelineError> {
        let mut bytes = vec![0; shape.iter().product::<usize>() * dtype.size()];
        let received = self.group.recv(&mut bytes, from, address.tag());
        received.map_err(|error| self.failed(error))?;
        Ok(TensorData::from_bytes_vec(bytes, shape.to_vec(), dtype))
    }

    /// Receives a tensor of `rank` dimensions with its shape and type. They must be those of the first one of its kind, except
    /// for the number of rows.
    pub(super) fn receive_described(
        &mut self,
        rank: usize,
        from: usize,
        address: Address,
    ) -> Result<TensorData, PipelineError> {
        let (shape, dtype) = self.receive_header(rank, from, address)?;
        self.receive(&shape, dtype, from, address)
    }

    fn receive_header(
        &mut self,
        rank: usize,
        from: usize,
        address: Address,
    ) -> Result<(Vec<usize>, DType), PipelineError> {
        let mut header = vec![0; 1 + rank];
        let received = self.group.recv(&mut header, from, address.tag());
        received.map_err(|error| self.failed(error))?;
        let number = match address.content {
            Content::Weight => address.number,
            _ => 0,
        };
        let key = (address.content, address.stage, number);
        let agreed = self.agreed.get(&key);
        let (dtype, shape) =
            checked(&header, agreed).map_err(|(expected, got)| PipelineError::Shape {
                stage: address.stage,
                expected,
                got,
            })?;
        self.agreed
            .entry(key)
            .or_insert_with(|| (dtype, shape[1..].to_vec()));
        Ok((shape, dtype))
    }

    /// The shape and type of a tensor of `D` dimensions, which come before it.
    fn receive_shape<const D: usize>(
        &mut self,
        from: usize,
        address: Address,
    ) -> Result<Known<D>, PipelineError> {
        let (shape, dtype) = self.receive_header(D, from, address)?;
        let shape = shape.try_into().expect("a header of this length");
        Ok((shape, dtype))
    }

    /// Waits until all sends of the host have left.
    pub(super) fn flush(&mut self) -> Result<(), PipelineError> {
        for ticket in std::mem::take(&mut self.sent) {
            ticket.wait().map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    fn failed(&self, error: Error) -> PipelineError {
        PipelineError::Ddp(DdpError::along(&self.group, error))
    }
}

const DTYPES: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::F64];

fn code(dtype: DType) -> Result<i64, PipelineError> {
    let code = DTYPES.iter().position(|known| *known == dtype);
    code.map(|code| code as i64)
        .ok_or_else(|| PipelineError::Type {
            dtype: format!("{dtype:?}"),
        })
}

/// The type and shape in a header. *Errors*: what was expected, and what came.
fn checked(
    header: &[i64],
    agreed: Option<&(DType, Vec<usize>)>,
) -> Result<(DType, Vec<usize>), (String, String)> {
    let written = |dtype: &dyn std::fmt::Debug, dims: &[i64]| format!("{dtype:?} {dims:?}");
    let (code, dims) = header.split_first().expect("a header has a type");
    let dtype = usize::try_from(*code)
        .ok()
        .and_then(|code| DTYPES.get(code));
    let shape: Option<Vec<usize>> = dims.iter().map(|dim| usize::try_from(*dim).ok()).collect();
    let (Some(dtype), Some(shape)) = (dtype, shape) else {
        return Err(("a type and a shape".into(), written(code, dims)));
    };
    let bytes = shape.iter().try_fold(dtype.size() as u64, |bytes, dim| {
        bytes.checked_mul(*dim as u64)
    });
    if bytes.is_none_or(|bytes| bytes > TENSOR_BYTES_MAX) {
        return Err((
            format!("at most {TENSOR_BYTES_MAX} bytes"),
            written(dtype, dims),
        ));
    }
    match agreed {
        Some((known, rest)) if known != dtype || *rest != shape[1..] => {
            let rest: Vec<_> = std::iter::once("any".to_string())
                .chain(rest.iter().map(ToString::to_string))
                .collect();
            Err((
                format!("{known:?} [{}]", rest.join(", ")),
                written(dtype, dims),
            ))
        }
        _ => Ok((*dtype, shape)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_agreed_once_and_bounded() {
        let check = |header: &[i64],
                     agreed: Option<(DType, Vec<usize>)>,
                     expect: Result<Vec<usize>, &str>| {
            let checked = checked(header, agreed.as_ref());
            let shape = checked.map(|(_, shape)| shape);
            let message =
                shape.map_err(|(expected, got)| format!("expected {expected}, got {got}"));
            assert_eq!(message, expect.map_err(String::from));
        };
        let agreed = || Some((DType::BF16, vec![7, 16]));
        check(&[0, 4, 7, 16], None, Ok(vec![4, 7, 16]));
        check(&[2, 4, 7, 16], agreed(), Ok(vec![4, 7, 16]));
        check(&[2, 1, 7, 16], agreed(), Ok(vec![1, 7, 16]));
        check(
            &[2, 4, 8, 16],
            agreed(),
            Err("expected BF16 [any, 7, 16], got BF16 [4, 8, 16]"),
        );
        check(
            &[0, 4, 7, 16],
            agreed(),
            Err("expected BF16 [any, 7, 16], got F32 [4, 7, 16]"),
        );
        check(
            &[9, 4, 7, 16],
            None,
            Err("expected a type and a shape, got 9 [4, 7, 16]"),
        );
        check(
            &[0, 4, -7, 16],
            None,
            Err("expected a type and a shape, got 0 [4, -7, 16]"),
        );
        check(
            &[0, 1 << 20, 1 << 20, 1 << 40],
            None,
            Err("expected at most 1073741824 bytes, got F32 [1048576, 1048576, 1099511627776]"),
        );
    }

    #[test]
    fn tags_tell_messages_apart() {
        let address = |content, stage, number| {
            Address {
                content,
                stage,
                number,
            }
            .tag()
        };
        let (stage, number) = (Address::STAGES_MAX - 1, Address::NUMBERS_MAX - 1);
        let tags = [
            address(Content::Input, 0, 0),
            address(Content::WeightGradient, 0, 0),
            address(Content::Input, stage, 0),
            address(Content::Input, 0, number),
            address(Content::WeightGradient, stage, number),
        ];
        let distinct: std::collections::HashSet<_> = tags.into_iter().collect();
        assert_eq!(distinct.len(), 5);
        assert_eq!(tags[4], u32::MAX);
    }
}
