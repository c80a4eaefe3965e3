//! Sums and exchanges of plain tensors between the ranks that share the parts.

use std::sync::Arc;

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use paceline_collective::{AllGather, AllReduce, Buffer, Error, ReduceOp, ReduceScatter};
use paceline_ddp::DdpError;

use super::TensorParallel;

impl TensorParallel {
    /// The sum of all parts' tensors, one of which is given for each part of this rank.
    ///
    /// *Numerics*: in f32, along the tree.
    pub(super) fn sum<const D: usize>(&self, parts: Vec<Tensor<D>>) -> Result<Tensor<D>, DdpError> {
        let like = Like::of(&parts[0]);
        let mut blocks = self.blocks(parts);
        if self.group.world() == 1 {
            let total = blocks.pop().expect("one block holds all parts");
            return Ok(total.cast(like.dtype));
        }
        let len = like.elements();
        let mut buffer = self.buffer(len * blocks.len())?;
        write(&mut buffer, blocks);
        let call = AllReduce {
            op: ReduceOp::Sum,
            tree: Some(self.tree.clone()),
            len,
            bucket: None,
            step: 0,
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
        if self.group.world() == 1 {
            return self.sum(parts);
        }
        let rows = self.share_of_rank(like.shape[0], self.group.rank());
        let blocks = self.blocks(parts);
        let mut buffer = self.buffer(like.elements() * blocks.len())?;
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
        if self.group.world() == 1 {
            return Ok(rows);
        }
        let like = Like::of(&rows);
        let mut shape = like.shape;
        shape[0] = total;
        let counts = self.counts(shape);
        let start: usize = counts[..self.group.rank()].iter().sum();
        let mut buffer = self.buffer(shape.iter().product())?;
        write(&mut buffer[start..], vec![rows.cast(FloatDType::F32)]);
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
        if self.group.world() == 1 {
            return Ok(values);
        }
        let like = Like::of(&values);
        let mut all = floats(values);
        let done = self.group.all_reduce(&mut all, ReduceOp::Max);
        done.map_err(|error| self.failed(error))?;
        Ok(like.tensor(&all, like.shape))
    }

    fn buffer(&self, len: usize) -> Result<Buffer<f32>, DdpError> {
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

    /// Adds the parts of this rank as far as the tree does, in f32: what is left are the rank's blocks of the tree.
    fn blocks<const D: usize>(&self, parts: Vec<Tensor<D>>) -> Vec<Tensor<D>> {
        let rank = self.group.rank();
        assert_eq!(
            parts.len(),
            self.local().len(),
            "expected one tensor for each part of this rank"
        );
        let mut stack: Vec<Tensor<D>> = Vec::new();
        for (part, tensor) in self.local().zip(parts) {
            stack.push(tensor.cast(FloatDType::F32));
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

    /// With another size of the first dimension.
    pub(super) fn with_rows(mut self, rows: usize) -> Self {
        self.shape[0] = rows;
        self
    }

    pub(super) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    fn tensor(&self, values: &[f32], shape: [usize; D]) -> Tensor<D> {
        let data = TensorData::new(values.to_vec(), shape);
        let tensor = Tensor::<D>::from_data(data, (&self.device, DType::F32));
        tensor.cast(self.dtype)
    }
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    let data = tensor.cast(FloatDType::F32).into_data();
    data.try_into_vec().expect("it was cast to f32")
}

fn write<const D: usize>(buffer: &mut [f32], blocks: Vec<Tensor<D>>) {
    let mut start = 0;
    for block in blocks {
        let data = block.into_data();
        let values = data.as_slice::<f32>().expect("blocks are f32");
        buffer[start..start + values.len()].copy_from_slice(values);
        start += values.len();
    }
}
