//! Sums and exchanges of plain tensors between the ranks that share the parts: on their device, or through the host.

use std::sync::Arc;

use burn::tensor::{DType, Device, Element, FloatDType, Tensor, TensorData};
use paceline_collective::{AllGather, AllReduce, Buffer, Error, ReduceOp, ReduceScatter};
use paceline_ddp::{DdpError, DeviceExchange};

use super::TensorParallel;

/// A type that sums are in.
trait Number: paceline_collective::Element + Element {}

impl Number for f32 {}
impl Number for f64 {}

/// The type that tensors of `dtype` are summed in.
pub(super) fn sums_of(dtype: FloatDType) -> FloatDType {
    match dtype {
        FloatDType::F64 => FloatDType::F64,
        _ => FloatDType::F32,
    }
}

/// Calls a method for the type that tensors are summed in.
macro_rules! in_sums {
    ($like:expr, $self:ident.$method:ident($($argument:expr),*)) => {
        match sums_of($like.dtype) {
            FloatDType::F64 => $self.$method::<f64, D>($($argument),*),
            _ => $self.$method::<f32, D>($($argument),*),
        }
    };
}

impl TensorParallel {
    /// The sum of all parts' tensors, one of which is given for each part of this rank.
    ///
    /// *Numerics*: in f32, or f64 for tensors of f64, along the tree.
    pub(super) fn sum<const D: usize>(&self, parts: Vec<Tensor<D>>) -> Result<Tensor<D>, DdpError> {
        let like = Like::of(&parts[0]);
        if let Some(device) = self.on_device(&like) {
            let sum = device.sum(flat(self.blocks(parts)), None)?;
            return Ok(like.shaped(sum, like.shape));
        }
        in_sums!(like, self.sum_in(like, parts))
    }

    fn sum_in<T: Number, const D: usize>(
        &self,
        like: Like<D>,
        parts: Vec<Tensor<D>>,
    ) -> Result<Tensor<D>, DdpError> {
        let mut blocks = self.blocks(parts);
        if self.group.world() == 1 {
            let total = blocks.pop().expect("one block holds all parts");
            return Ok(total.cast(like.dtype));
        }
        let len = like.elements();
        let mut buffer = self.buffer::<T>(len * blocks.len())?;
        write(&mut buffer, blocks);
        let call = AllReduce {
            tree: Some(self.tree.clone()),
            ..AllReduce::new(ReduceOp::Sum, len)
        };
        let done = self.group.all_reduce_buffer(buffer, call);
        let done = done.map_err(|error| self.failed(error))?;
        Ok(like.tensor(&done.buffer[..len], like.shape))
    }

    /// The sum of all parts' tensors, of which this rank gets the rows (along the first dimension) of its parts.
    pub(super) fn sum_rows<const D: usize>(
        &self,
        parts: Vec<Tensor<D>>,
    ) -> Result<Tensor<D>, DdpError> {
        let like = Like::of(&parts[0]);
        if let Some(device) = self.on_device(&like) {
            let sum = device.sum(flat(self.blocks(parts)), Some(self.counts(like.shape)))?;
            let rows = self.share_of_rank(like.shape[0], self.group.rank());
            let shape = like.clone().with_rows(rows.len()).shape;
            return Ok(like.shaped(sum, shape));
        }
        match self.group.world() {
            1 => self.sum(parts),
            _ => in_sums!(like, self.sum_rows_in(like, parts)),
        }
    }

    fn sum_rows_in<T: Number, const D: usize>(
        &self,
        like: Like<D>,
        parts: Vec<Tensor<D>>,
    ) -> Result<Tensor<D>, DdpError> {
        let rows = self.share_of_rank(like.shape[0], self.group.rank());
        let blocks = self.blocks(parts);
        let mut buffer = self.buffer::<T>(like.elements() * blocks.len())?;
        write(&mut buffer, blocks);
        let call = ReduceScatter {
            op: ReduceOp::Sum,
            tree: Some(self.tree.clone()),
            counts: Some(self.counts(like.shape)),
            bucket: None,
            step: 0,
        };
        let done = self.group.reduce_scatter_async(buffer, call).wait();
        let done = done.map_err(|error| self.failed(error))?;
        let row = like.elements() / like.shape[0];
        let mut shape = like.shape;
        shape[0] = rows.len();
        Ok(like.tensor(&done.buffer[rows.start * row..rows.end * row], shape))
    }

    /// All ranks' rows, along the first dimension, of a tensor that has `total` of them.
    pub(super) fn gather_rows<const D: usize>(
        &self,
        rows: Tensor<D>,
        total: usize,
    ) -> Result<Tensor<D>, DdpError> {
        let like = Like::of(&rows);
        if let Some(device) = self.on_device(&like) {
            let whole = like.clone().with_rows(total).shape;
            let rows = flat(vec![rows.cast(sums_of(like.dtype))]).remove(0);
            let all = device.gather(rows, self.counts(whole))?;
            return Ok(like.shaped(all, whole));
        }
        match self.group.world() {
            1 => Ok(rows),
            _ => in_sums!(like, self.gather_rows_in(like, rows, total)),
        }
    }

    fn gather_rows_in<T: Number, const D: usize>(
        &self,
        like: Like<D>,
        rows: Tensor<D>,
        total: usize,
    ) -> Result<Tensor<D>, DdpError> {
        let mut shape = like.shape;
        shape[0] = total;
        let counts = self.counts(shape);
        let start: usize = counts[..self.group.rank()].iter().sum();
        let mut buffer = self.buffer::<T>(shape.iter().product())?;
        write(&mut buffer[start..], vec![rows.cast(sums_of(like.dtype))]);
        let call = AllGather {
            counts: Some(counts),
            ..AllGather::default()
        };
        let done = self.group.all_gather_async(buffer, call).wait();
        let done = done.map_err(|error| self.failed(error))?;
        Ok(like.tensor(&done.buffer, shape))
    }

    /// The largest of all ranks' values, element by element.
    pub(super) fn max<const D: usize>(&self, values: Tensor<D>) -> Result<Tensor<D>, DdpError> {
        let like = Like::of(&values);
        if let Some(device) = self.on_device(&like) {
            let values = flat(vec![values.cast(sums_of(like.dtype))]).remove(0);
            return Ok(like.shaped(device.max(values)?, like.shape));
        }
        match self.group.world() {
            1 => Ok(values),
            _ => in_sums!(like, self.max_in(like, values)),
        }
    }

    fn max_in<T: Number, const D: usize>(
        &self,
        like: Like<D>,
        values: Tensor<D>,
    ) -> Result<Tensor<D>, DdpError> {
        let data = values.cast(sums_of(like.dtype)).into_data();
        let mut all: Vec<T> = data.try_into_vec().expect("it was cast");
        let done = self.group.all_reduce(&mut all, ReduceOp::Max);
        done.map_err(|error| self.failed(error))?;
        Ok(like.tensor(&all, like.shape))
    }

    /// The way of such tensors over their device, if they have one. NCCL's sums along the tree are in f32.
    fn on_device<const D: usize>(&self, like: &Like<D>) -> Option<&Arc<dyn DeviceExchange>> {
        self.device.get().filter(|_| !like.is_double())
    }

    fn buffer<T: Number>(&self, len: usize) -> Result<Buffer<T>, DdpError> {
        let buffer = self.group.buffer(len);
        buffer.map_err(|error| self.failed(error))
    }

    /// The error of a failed operation, with the job's number of the rank to blame.
    pub(super) fn failed(&self, error: Error) -> DdpError {
        DdpError::along(&self.group, error)
    }

    /// Elements of a tensor's rows that each rank has.
    fn counts<const D: usize>(&self, shape: [usize; D]) -> Arc<[usize]> {
        let row: usize = shape[1..].iter().product();
        let rows = |rank| self.share_of_rank(shape[0], rank).len();
        (0..self.group.world())
            .map(|rank| rows(rank) * row)
            .collect()
    }

    /// Adds the parts of this rank as far as the tree does: what is left are the rank's blocks of the tree.
    fn blocks<const D: usize>(&self, parts: Vec<Tensor<D>>) -> Vec<Tensor<D>> {
        let rank = self.group.rank();
        assert_eq!(
            parts.len(),
            self.local().len(),
            "expected one tensor for each part of this rank"
        );
        let mut stack: Vec<Tensor<D>> = Vec::new();
        for (part, tensor) in self.local().zip(parts) {
            let dtype = sums_of(tensor.dtype().into());
            stack.push(tensor.cast(dtype));
            for _ in 0..self.tree.merges_after(rank, part) {
                let right = stack.pop().expect("a merge takes two");
                let left = stack.pop().expect("a merge takes two");
                stack.push(left + right);
            }
        }
        stack
    }
}

/// What the result of an exchange looks like, without autodiff.
#[derive(Clone, Debug)]
pub(super) struct Like<const D: usize> {
    shape: [usize; D],
    device: Device,
    dtype: FloatDType,
}

impl<const D: usize> Like<D> {
    pub(super) fn of(tensor: &Tensor<D>) -> Self {
        Self {
            shape: tensor.dims(),
            device: tensor.device().inner(),
            dtype: tensor.dtype().into(),
        }
    }

    /// In place of a result after a failure.
    pub(super) fn zeros(&self) -> Tensor<D> {
        Tensor::zeros(self.shape, (&self.device, self.dtype.into()))
    }

    pub(super) fn is_double(&self) -> bool {
        self.dtype == FloatDType::F64
    }

    /// With another size of the first dimension.
    pub(super) fn with_rows(mut self, rows: usize) -> Self {
        self.shape[0] = rows;
        self
    }

    pub(super) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The result that came on the device.
    fn shaped(&self, values: Tensor<1>, shape: [usize; D]) -> Tensor<D> {
        values.reshape(shape).cast(self.dtype)
    }

    fn tensor<T: Number>(&self, values: &[T], shape: [usize; D]) -> Tensor<D> {
        let data = TensorData::new(values.to_vec(), shape);
        let dtype = DType::from(sums_of(self.dtype));
        let tensor = Tensor::<D>::from_data(data, (&self.device, dtype));
        tensor.cast(self.dtype)
    }
}

fn flat<const D: usize>(blocks: Vec<Tensor<D>>) -> Vec<Tensor<1>> {
    let blocks = blocks.into_iter();
    blocks.map(|block| block.reshape([-1])).collect()
}

fn write<T: Number, const D: usize>(buffer: &mut [T], blocks: Vec<Tensor<D>>) {
    let mut start = 0;
    for block in blocks {
        let data = block.into_data();
        let values = data.as_slice::<T>().expect("blocks were cast");
        buffer[start..start + values.len()].copy_from_slice(values);
        start += values.len();
    }
}

#[cfg(test)]
mod tests;
