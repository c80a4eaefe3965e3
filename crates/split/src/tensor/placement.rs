//! Where the slices of a model's parameters are: whole tensors for checkpoints and hashes, and slices of saved ones.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Tensor, TensorData};
use paceline_collective::{Error, ProcessGroup};
use paceline_ddp::{DdpError, Pieces, Placement, weights};

use super::TensorParallel;

/// The slices that this rank has of a model made of this module's layers. `Ddp::set_placement` takes it, so that exports, hashes
/// and checkpoints are those of the whole model, and [`pieces`](Self::pieces) tells `Ddp::join_parts` what the gradient's norm
/// counts once.
#[derive(Debug)]
pub struct TensorPlacement {
    world: ProcessGroup,
    tp: TensorParallel,
    cuts: HashMap<u64, Cut>,
}

/// A parameter that is cut.
#[derive(Clone, Copy, Debug)]
struct Cut {
    axis: usize,
    /// Size of the whole parameter along the axis.
    total: usize,
}

impl TensorPlacement {
    /// Finds the slices of `model`, before [`Ddp::new`](paceline_ddp::Ddp::new) takes out weights that are made later. All ranks
    /// of `world`, the whole job, call it.
    ///
    /// *Errors*: failed collectives.
    pub fn new<M: Module>(
        world: &ProcessGroup,
        tp: &TensorParallel,
        model: &M,
    ) -> Result<Arc<Self>, Error> {
        let mut found = Find::default();
        model.visit(&mut found);
        let own: Vec<i64> = found.cuts.iter().map(|(.., len)| *len as i64).collect();
        let mut all = vec![0; own.len() * tp.group.world()];
        tp.group.all_gather(&own, &mut all)?;
        let cuts = found.cuts.into_iter().enumerate();
        let cuts = cuts.map(|(at, (id, axis, _))| {
            let lens = all.iter().skip(at).step_by(own.len());
            let total = lens.sum::<i64>() as usize;
            (id, Cut { axis, total })
        });
        Ok(Arc::new(Self {
            world: world.clone(),
            tp: tp.clone(),
            cuts: cuts.collect(),
        }))
    }

    /// The parts that this rank has of a parameter, for `Ddp::join_parts`; `None` if the parameter is not cut.
    pub fn pieces(&self, id: ParamId) -> Option<Pieces> {
        let cut = self.cuts.get(&id.val())?;
        let lens = self.tp.local();
        let lens = lens.map(|part| self.tp.share(cut.total, part).len());
        let (axis, lens) = (cut.axis, lens.collect());
        Some(Pieces { axis, lens })
    }

    fn range(&self, cut: Cut, rank: usize) -> Range<usize> {
        self.tp.share_of_rank(cut.total, rank)
    }
}

impl Placement for TensorPlacement {
    fn group(&self) -> &ProcessGroup {
        &self.world
    }

    fn shape(&self, _: ParamId) -> Vec<usize> {
        Vec::new()
    }

    fn whole_shape(&self, id: ParamId, mut own: Vec<usize>) -> Vec<usize> {
        if let Some(cut) = self.cuts.get(&id.val()) {
            own[cut.axis] = cut.total;
        }
        own
    }

    fn slice(&self, id: ParamId) -> Option<(usize, Range<usize>)> {
        let cut = self.cuts.get(&id.val())?;
        Some((cut.axis, self.range(*cut, self.tp.group.rank())))
    }

    fn whole(&self, id: ParamId, own: TensorData) -> Result<TensorData, DdpError> {
        let Some(cut) = self.cuts.get(&id.val()) else {
            return Ok(own);
        };
        let (dtype, mut shape) = (own.dtype(), own.shape().to_vec());
        let rest = own.as_bytes().len() / shape[cut.axis];
        let ranks = 0..self.tp.group.world();
        let counts = ranks.map(|rank| self.range(*cut, rank).len() * rest);
        let counts: Vec<usize> = counts.collect();
        let mut all = vec![0_u8; counts.iter().sum()];
        let group = &self.tp.group;
        let done = group.all_gather_v(own.as_bytes(), &mut all, &counts);
        done.map_err(|error| self.tp.failed(error))?;
        let mut left = &all[..];
        let slices = counts.iter().enumerate().map(|(rank, count)| {
            let (bytes, after) = left.split_at(*count);
            left = after;
            shape[cut.axis] = self.range(*cut, rank).len();
            TensorData::from_bytes_vec(bytes.to_vec(), shape.clone(), dtype)
        });
        let slices: Vec<TensorData> = slices.collect();
        Ok(weights::concat(&slices, cut.axis))
    }

    fn replace(&self, id: ParamId, whole: TensorData) -> Option<TensorData> {
        let own = match self.slice(id) {
            Some((axis, range)) => weights::slice(&whole, axis, range),
            None => whole,
        };
        Some(own)
    }
}

/// Finds the cut parameters of this module's layers: id, axis and size along it.
#[derive(Default)]
struct Find {
    /// Module and name of what the visitor is in.
    path: Vec<[String; 2]>,
    cuts: Vec<(u64, usize, usize)>,
}

impl ModuleVisitor for Find {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.push([container_type, name].map(str::to_owned));
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some([module, name]) = self.path.last() else {
            return;
        };
        let axis = match (module.as_str(), name.as_str()) {
            ("Struct:ColumnParallelLinear", "weight") => 1,
            ("Struct:ColumnParallelLinear", "bias") => 0,
            ("Struct:RowParallelLinear" | "Struct:ParallelEmbedding", "weight") => 0,
            _ => return,
        };
        let id = param.id.val();
        if self.cuts.iter().all(|(known, ..)| *known != id) {
            self.cuts.push((id, axis, param.lazy_shape()[axis]));
        }
    }
}
