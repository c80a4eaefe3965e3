//! Models as lists of blocks, and the part of one that a stage holds.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Int, Tensor, TensorData};
use paceline_collective::ProcessGroup;
use paceline_ddp::{DdpError, Placement};
use paceline_nn::gpt::{Gpt, GptBlock, GptEmbedding};
use paceline_nn::visited_block;

/// Bytes of a tensor sent in one broadcast.
const BROADCAST_BYTES: usize = 16 << 20;

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
}

/// The embedding, the transformer blocks, and the head, which reads the embedding's matrix too.
impl Sequential<3> for Gpt {
    type Input = Tensor<2, Int>;
    type Output = Tensor<3>;

    fn block_count(&self) -> usize {
        self.blocks().len() + 2
    }

    fn parameters_of(&self, block: usize) -> Vec<ParamId> {
        let is_head = block + 1 == self.block_count();
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
        self.visit(&mut found);
        let tied = self.embedding().module().tokens.weight.id;
        found.1.extend(is_head.then_some(tied));
        found.1
    }

    fn first(&self, input: Tensor<2, Int>) -> Tensor<3> {
        self.embedding().forward(input, GptEmbedding::forward)
    }

    fn middle(&self, block: usize, x: Tensor<3>) -> Tensor<3> {
        self.blocks()[block - 1].forward(x, GptBlock::forward)
    }

    fn last(&self, x: Tensor<3>) -> Tensor<3> {
        self.head(x)
    }
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

    pub(super) fn holder(&self, id: ParamId) -> Option<usize> {
        self.holder.get(&id).copied()
    }

    /// `model` with placeholders for the parameters that stages on other ranks hold. Parameters are made one by one in
    /// registration order, so that random ones are those of the whole model.
    ///
    /// *Memory*: the stages' own parameters and one more.
    pub(super) fn place<M: Module>(
        &self,
        model: M,
        is_own: impl Fn(usize) -> bool,
    ) -> (M, HashMap<ParamId, Vec<usize>>) {
        let mut place = Place {
            is_held: |id| self.holder(id).is_none_or(&is_own),
            shapes: HashMap::new(),
        };
        let model = model.map(&mut place);
        (model, place.shapes)
    }
}

struct Place<F> {
    is_held: F,
    shapes: HashMap<ParamId, Vec<usize>>,
}

impl<F: Fn(ParamId) -> bool> ModuleMapper for Place<F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let requires_grad = param.is_require_grad();
        let (id, tensor, mapper) = param.consume();
        self.shapes.insert(id, tensor.dims().to_vec());
        if (self.is_held)(id) {
            return Param::from_mapped_value(id, tensor, mapper);
        }
        let none = Tensor::zeros([0; D], (&tensor.device(), tensor.dtype()));
        Param::from_mapped_value(id, none.set_require_grad(requires_grad), mapper)
    }
}

/// Where the tensors of the stages are.
pub(super) struct Placed {
    pub(super) world: ProcessGroup,
    /// The job's rank that sends a parameter, and its shape.
    pub(super) owners: HashMap<ParamId, (usize, Vec<usize>)>,
    /// The parameters that this rank holds.
    pub(super) own: HashSet<ParamId>,
}

impl Placement for Placed {
    fn group(&self) -> &ProcessGroup {
        &self.world
    }

    fn shape(&self, id: ParamId) -> Vec<usize> {
        self.owners[&id].1.clone()
    }

    fn whole(&self, id: ParamId, own: TensorData) -> Result<TensorData, DdpError> {
        // A tensor that no block reads is on all ranks.
        let Some((owner, shape)) = self.owners.get(&id) else {
            return Ok(own);
        };
        if self.world.world() == 1 {
            return Ok(own);
        }
        let dtype = own.dtype();
        let total = shape.iter().product::<usize>() * dtype.size();
        let is_owner = *owner == self.world.rank();
        let mut bytes = Vec::with_capacity(total);
        for start in (0..total).step_by(BROADCAST_BYTES) {
            let end = (start + BROADCAST_BYTES).min(total);
            let piece = is_owner.then(|| &own.as_bytes()[start..end]);
            bytes.extend(self.world.broadcast_bytes(piece, *owner)?);
        }
        Ok(TensorData::from_bytes_vec(bytes, shape.clone(), dtype))
    }

    fn replace(&self, id: ParamId, whole: TensorData) -> Option<TensorData> {
        let is_held = self.own.contains(&id) || !self.owners.contains_key(&id);
        is_held.then_some(whole)
    }
}
