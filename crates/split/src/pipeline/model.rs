//! Models as lists of blocks, and the part of one that a stage holds.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Int, Tensor, TensorData};
use paceline_collective::ProcessGroup;
use paceline_ddp::{DdpError, Placement};
use paceline_nn::gpt::{Gpt, GptEmbedding};
use paceline_nn::{TransformerBlock, visited_block};

use crate::tensor::{
    ParallelGpt, ParallelGptBlock, ParallelGptEmbedding, TensorParallel, TensorPlacement,
};

/// A model that is a list of blocks, each of which takes the output of the one before: what a pipeline can cut.
///
/// All randomness (dropout) is inside [`Block`](paceline_nn::Block)s, so that it does not depend on the stage.
///
/// *Shape*: between blocks flows one tensor of `D` dimensions.
pub trait Sequential<const D: usize>: Module + 'static {
    /// What the first block takes.
    type Input;
    /// What the last block returns.
    type Output;

    /// Number of blocks, at least 2.
    fn block_count(&self) -> usize;

    /// The parameters that a block reads. Several blocks may read the same one.
    fn parameters_of(&self, block: usize) -> Vec<ParamId>;

    /// Block 0.
    fn first(&self, input: Self::Input) -> Tensor<D>;

    /// A block between the first and the last.
    fn middle(&self, block: usize, x: Tensor<D>) -> Tensor<D>;

    /// The last block.
    fn last(&self, x: Tensor<D>) -> Self::Output;

    /// All blocks, one after another.
    fn forward_blocks(&self, input: Self::Input) -> Self::Output {
        let middle = 1..self.block_count() - 1;
        let x = middle.fold(self.first(input), |x, block| self.middle(block, x));
        self.last(x)
    }

    /// The parts that its tensors are cut into, if they are: the stages of a pipeline are then cut too.
    fn tensor_parallel(&self) -> Option<&TensorParallel> {
        None
    }
}

/// The embedding, the transformer blocks, and the head, which reads the embedding's matrix too.
impl Sequential<3> for Gpt {
    type Input = Tensor<2, Int>;
    type Output = Tensor<3>;

    fn block_count(&self) -> usize {
        self.blocks.len() + 2
    }

    fn parameters_of(&self, block: usize) -> Vec<ParamId> {
        let tied = self.embedding.module().tokens.weight.id;
        parameters_of(self, block, tied)
    }

    fn first(&self, input: Tensor<2, Int>) -> Tensor<3> {
        self.embedding.forward(input, GptEmbedding::forward)
    }

    fn middle(&self, block: usize, x: Tensor<3>) -> Tensor<3> {
        self.blocks[block - 1].forward(x, TransformerBlock::forward)
    }

    fn last(&self, x: Tensor<3>) -> Tensor<3> {
        self.head(x)
    }
}

/// The same with its tensors cut into parts. What a rank sends to the next stage is what it has between blocks: the whole
/// activations, or with sequence parallelism its parts' share of every sequence.
impl Sequential<3> for ParallelGpt {
    type Input = Tensor<2, Int>;
    /// Scores of each part's tokens.
    type Output = Vec<Tensor<3>>;

    fn block_count(&self) -> usize {
        self.blocks().len() + 2
    }

    fn parameters_of(&self, block: usize) -> Vec<ParamId> {
        parameters_of(self, block, self.embedding().module().tokens.id())
    }

    fn first(&self, input: Tensor<2, Int>) -> Tensor<3> {
        let x = (self.embedding()).forward(input, ParallelGptEmbedding::forward);
        self.parts().join(x)
    }

    fn middle(&self, block: usize, x: Tensor<3>) -> Tensor<3> {
        let x = self.parts().part(x);
        let x = self.blocks()[block - 1].forward(x, ParallelGptBlock::forward);
        self.parts().join(x)
    }

    fn last(&self, x: Tensor<3>) -> Vec<Tensor<3>> {
        self.head(self.parts().part(x))
    }

    fn tensor_parallel(&self) -> Option<&TensorParallel> {
        Some(self.parts())
    }
}

/// The parameters of a language model's block. The last one, the head, has those outside of blocks and `tied`.
fn parameters_of<M: Sequential<3>>(model: &M, block: usize, tied: ParamId) -> Vec<ParamId> {
    let is_head = block + 1 == model.block_count();
    let mut found = Visit(
        |id| {
            let is_in = match visited_block() {
                Some(index) => index == block,
                None => is_head,
            };
            is_in.then_some(id)
        },
        Vec::new(),
    );
    model.visit(&mut found);
    found.1.extend(is_head.then_some(tied));
    found.1
}

struct Visit<F>(F, Vec<ParamId>);

impl<F: FnMut(ParamId) -> Option<ParamId>> ModuleVisitor for Visit<F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.1.extend((self.0)(param.id));
    }
}

/// Who holds which parameters of a model that is cut into stages.
#[derive(Debug)]
pub(super) struct Holdings {
    /// The stage that holds each parameter: the first one that reads it.
    holder: HashMap<ParamId, usize>,
    /// Parameters that other stages read too, in registration order of the blocks, with these stages in ascending order.
    pub(super) tied: Vec<(ParamId, Vec<usize>)>,
}

impl Holdings {
    pub(super) fn new<const D: usize, M: Sequential<D>>(model: &M, cuts: &[Range<usize>]) -> Self {
        let mut readers: HashMap<ParamId, Vec<usize>> = HashMap::new();
        let mut order = Vec::new();
        for (stage, blocks) in cuts.iter().enumerate() {
            for id in blocks.clone().flat_map(|block| model.parameters_of(block)) {
                let stages = readers.entry(id).or_default();
                if stages.is_empty() {
                    order.push(id);
                }
                if stages.last() != Some(&stage) {
                    stages.push(stage);
                }
            }
        }
        let tied = order.into_iter().filter(|id| readers[id].len() > 1);
        Self {
            tied: tied.map(|id| (id, readers[&id][1..].to_vec())).collect(),
            holder: readers
                .into_iter()
                .map(|(id, stages)| (id, stages[0]))
                .collect(),
        }
    }

    /// The stage that holds each parameter.
    pub(super) fn holders(&self) -> &HashMap<ParamId, usize> {
        &self.holder
    }

    pub(super) fn holder(&self, id: ParamId) -> Option<usize> {
        self.holder.get(&id).copied()
    }

    /// `model` with placeholders for the parameters that stages on other ranks hold. Parameters are made one by one in
    /// registration order, so that random ones are those of the whole model.
    ///
    /// *Memory*: the stages' own parameters and one more.
    pub(super) fn place<M: Module>(&self, model: M, is_own: impl Fn(usize) -> bool) -> Whole<M> {
        let mut place = Place {
            is_held: |id| self.holder(id).is_none_or(&is_own),
            shapes: HashMap::new(),
            trained: Vec::new(),
        };
        Whole {
            model: model.map(&mut place),
            shapes: place.shapes,
            trained: place.trained,
        }
    }
}

/// A model with placeholders, and what all ranks know of the whole one.
pub(super) struct Whole<M> {
    pub(super) model: M,
    pub(super) shapes: HashMap<ParamId, Vec<usize>>,
    /// The parameters that are not frozen.
    pub(super) trained: Vec<ParamId>,
}

struct Place<F> {
    is_held: F,
    shapes: HashMap<ParamId, Vec<usize>>,
    trained: Vec<ParamId>,
}

impl<F: Fn(ParamId) -> bool> ModuleMapper for Place<F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let requires_grad = param.is_require_grad();
        let (id, tensor, mapper) = param.consume();
        self.shapes.insert(id, tensor.dims().to_vec());
        self.trained.extend(requires_grad.then_some(id));
        if (self.is_held)(id) {
            return Param::from_mapped_value(id, tensor, mapper);
        }
        let none = Tensor::zeros([0; D], (&tensor.device(), tensor.dtype()));
        Param::from_mapped_value(id, none.set_require_grad(requires_grad), mapper)
    }
}

/// Where the tensors of the stages are, and their slices if they are cut.
pub(super) struct Placed {
    pub(super) world: ProcessGroup,
    /// The stages of this rank's pipeline.
    pub(super) pipe: ProcessGroup,
    /// The rank of `pipe` that sends a parameter, and the shape that a stage holds.
    pub(super) owners: HashMap<ParamId, (usize, Vec<usize>)>,
    /// The stages that hold parameters.
    pub(super) stages: HashMap<ParamId, usize>,
    /// Where a stage's slices are.
    pub(super) slices: Option<Arc<TensorPlacement>>,
}

impl Placed {
    fn is_held(&self, id: ParamId) -> bool {
        let owner = self.owners.get(&id);
        owner.is_none_or(|(owner, _)| *owner == self.pipe.rank())
    }

    /// A parameter as the stage that holds it has it.
    fn of_stage(&self, id: ParamId, own: TensorData) -> Result<TensorData, DdpError> {
        // A tensor that no block reads is on all ranks.
        let Some((owner, shape)) = self.owners.get(&id) else {
            return Ok(own);
        };
        if self.pipe.world() == 1 {
            return Ok(own);
        }
        let dtype = own.dtype();
        let total = shape.iter().product::<usize>() * dtype.size();
        let is_owner = *owner == self.pipe.rank();
        let bytes = is_owner.then(|| own.as_bytes());
        let sent = self.pipe.broadcast_long(bytes, total, *owner);
        let sent = sent.map_err(|error| DdpError::along(&self.pipe, error))?;
        Ok(match sent {
            Some(bytes) => TensorData::from_bytes_vec(bytes, shape.clone(), dtype),
            None => own,
        })
    }
}

impl Placement for Placed {
    fn group(&self) -> &ProcessGroup {
        &self.world
    }

    fn shape(&self, id: ParamId) -> Vec<usize> {
        let shape = self.owners[&id].1.clone();
        match &self.slices {
            Some(slices) => slices.whole_shape(id, shape),
            None => shape,
        }
    }

    fn whole_shape(&self, id: ParamId, own: Vec<usize>) -> Vec<usize> {
        match (&self.slices, self.owners.contains_key(&id)) {
            (_, true) => self.shape(id),
            (Some(slices), false) => slices.whole_shape(id, own),
            (None, false) => own,
        }
    }

    fn slice(&self, id: ParamId) -> Option<(usize, Range<usize>)> {
        let slices = self.slices.as_ref().filter(|_| self.is_held(id));
        slices?.slice(id)
    }

    fn stage(&self, id: ParamId) -> usize {
        self.stages.get(&id).copied().unwrap_or(0)
    }

    fn whole(&self, id: ParamId, own: TensorData) -> Result<TensorData, DdpError> {
        let own = self.of_stage(id, own)?;
        match &self.slices {
            Some(slices) => slices.whole(id, own),
            None => Ok(own),
        }
    }

    fn replace(&self, id: ParamId, whole: TensorData) -> Option<TensorData> {
        let whole = self.is_held(id).then_some(whole)?;
        match &self.slices {
            Some(slices) => slices.replace(id, whole),
            None => Some(whole),
        }
    }
}
