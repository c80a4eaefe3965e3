//! `Layout`: the mesh of a job's ranks, and what each of them has of the model.

use burn::module::Module;
use paceline_collective::{DeviceMesh, ProcessGroup};
use paceline_ddp::{Ddp, DdpError, DdpOptions};
use paceline_split::pipeline::PipelineOptions;
use paceline_split::tensor::{TensorParallel, TensorPlacement};

use crate::config::{Switch, TrainConfig};
use crate::error::TrainError;

/// The ranks of a job, by what they have.
///
/// The mesh has the dimensions `dp` (replicas of the model), `pp` (its stages) and `tp` (parts of its matrices). The last one varies
/// fastest: the ranks that share a stage's parts are neighbours, and so are the stages of a replica. Without parts and stages
/// there is no mesh, and every rank is a replica.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    world: ProcessGroup,
    mesh: Option<DeviceMesh>,
    tp: Option<TensorParallel>,
    pp: Option<PipelineOptions>,
}

impl Layout {
    /// Arranges the ranks of the job. All ranks call it.
    ///
    /// *Errors*: parts that do not fit the ranks; failed collectives.
    pub(crate) fn new(config: &TrainConfig, world: &ProcessGroup) -> Result<Self, TrainError> {
        let mut layout = Self {
            world: world.clone(),
            mesh: None,
            tp: None,
            pp: config.pipeline(),
        };
        if layout.pp.is_none() && config.tp.is_none() {
            return Ok(layout);
        }
        let pp = layout.pp.as_ref().map_or(1, |pp| pp.ranks);
        let pipelines = world.world() / pp;
        let tp = config
            .tp
            .map_or(1, |_| pipelines / config.dp.clamp(1, pipelines));
        let dims = [("dp", pipelines / tp), ("pp", pp), ("tp", tp)];
        let mesh = DeviceMesh::new(world, &dims)?;
        if let Some(parts) = config.tp {
            let tp = TensorParallel::new(mesh.group("tp")?.clone(), parts)?;
            layout.tp = Some(match config.sequence_parallel {
                Switch::Off => tp,
                Switch::On => tp.with_sequence_parallel(),
            });
        }
        layout.mesh = Some(mesh);
        Ok(layout)
    }

    /// Goes on with the ranks that are left, without a mesh.
    pub(crate) fn follow(&mut self, world: &ProcessGroup) {
        self.world = world.clone();
    }

    /// The ranks with replicas of what this rank has, among which gradients are averaged.
    pub(crate) fn replicas(&self) -> &ProcessGroup {
        let mesh = self.mesh.as_ref();
        mesh.and_then(|mesh| mesh.get("dp")).unwrap_or(&self.world)
    }

    /// Whether this is the first rank of the job.
    pub(crate) fn is_first(&self) -> bool {
        self.world.rank() == 0
    }

    /// Whether this rank joins others, in place of a lost one.
    pub(crate) fn is_joining(&self) -> bool {
        self.world.is_joining()
    }

    /// The parts of the model's matrices, if they are cut.
    pub(crate) fn tensor_parallel(&self) -> Option<&TensorParallel> {
        self.tp.as_ref()
    }

    /// The mesh and the stages of a pipeline, if there is one.
    pub(crate) fn pipeline(&self) -> Option<(DeviceMesh, PipelineOptions)> {
        Some((self.mesh.clone()?, self.pp.clone()?))
    }

    /// Trains what this rank has of the model together with its replicas, without stages. All ranks call it.
    pub(crate) fn wrap<M: Module>(
        &self,
        net: M,
        options: DdpOptions,
    ) -> Result<(Ddp, M), DdpError> {
        // Before weights that are made later leave placeholders in the model.
        let placement = (self.tp.as_ref()).map(|tp| TensorPlacement::new(&self.world, tp, &net));
        let placement = placement.transpose()?;
        let (mut ddp, net) = Ddp::new(self.replicas().clone(), net, options)?;
        if let (Some(tp), Some(placement)) = (&self.tp, placement) {
            ddp.join_parts(tp.group(), &net, |id| placement.pieces(id))?;
            tp.connect(&ddp)?;
            ddp.set_placement(placement);
        }
        Ok((ddp, net))
    }

    /// Tells the ranks along each dimension of the mesh why this one gives up.
    pub(crate) fn abort_parts(&self, why: &str) {
        let mesh = self.mesh.iter();
        let groups = mesh.flat_map(|mesh| mesh.dims().iter().filter_map(|dim| mesh.get(dim)));
        let groups = groups.filter(|group| group.world() > 1);
        groups.for_each(|group| group.abort(why));
    }

    /// The mesh in words, if there is one: `dp 2, tp 2 with 4 parts`.
    pub(crate) fn describe(&self) -> Option<String> {
        let mesh = self.mesh.as_ref()?;
        let size = |dim| mesh.size(dim).unwrap_or(1);
        let mut text = format!("dp {}", size("dp"));
        if let Some(pp) = &self.pp {
            let (ranks, stages) = (pp.ranks, pp.ranks * pp.chunks);
            text += &format!(
                ", pp {ranks} with {stages} stages, schedule {}",
                pp.schedule
            );
        }
        if let Some(tp) = &self.tp {
            text += &format!(", tp {} with {} parts", size("tp"), tp.parts());
        }
        Some(text)
    }
}
