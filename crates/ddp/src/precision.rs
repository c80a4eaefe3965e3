//! Mixed precision: the type that a model computes in, and the casts between hooks and layers.
//!
//! Weights stay f32, in the model and in the optimizer. The model of a forward pass holds casts made inside the autodiff
//! graph, so the backward pass casts each gradient back to f32 before its hook sees it:
//!
//! ```text
//! f32 weight -> hook -> cast -> layers in bf16 or f16 -> f32 logits -> loss
//! f32 gradient <- hook <- cast <- backward in bf16 or f16 <- (scaled) loss
//! ```

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use paceline_nn::{MapParams, map_params};
use serde::{Deserialize, Serialize};

use crate::error::DdpError;
use crate::panic_text::{one_line, panic_text};

/// Layers of burn-nn that PyTorch's autocast runs in f32 too: squares and sums lose the most in few digits.
pub const NORMS: [&str; 5] = [
    "BatchNorm",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "RmsNorm",
];

/// Layers that always stay in f32, because their running statistics are f32.
const ALWAYS_KEPT: [&str; 2] = ["BatchNorm", "SyncBatchNorm"];

/// The type that the forward and backward pass compute in. Weights, gradients between ranks and the optimizer's state are
/// always f32.
///
/// *Numerics*: bf16 has the range of f32 and 8 significant bits; f16 has 11, overflows above 65504 and is zero below 6e-8.
/// Small gradients vanish in f16 unless the loss is scaled up: use a [`GradScaler`](crate::GradScaler) with it.
///
/// *Example*: training in bf16; for f16 only add `scaler: Some(GradScaler::default())`
/// ```
/// use burn::module::Module;
/// use burn::nn::loss::CrossEntropyLossConfig;
/// use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{DType, Device, Int, Tensor};
/// use paceline_collective::{GroupOptions, ProcessGroup};
/// use paceline_ddp::{Ddp, DdpError, DdpOptions, Precision, in_f32};
///
/// #[derive(Module, Debug)]
/// struct Net {
///     first: Linear,
///     norm: BatchNorm,
///     last: Linear,
/// }
///
/// impl Net {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         let x = self.first.forward(x);
///         let x = in_f32(x, |x| self.norm.forward(x)); // norms stay in f32
///         self.last.forward(x)
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::flex().autodiff();
/// let group = ProcessGroup::local(1, &GroupOptions::default())?.remove(0);
/// let net = Net {
///     first: LinearConfig::new(8, 16).init(&device),
///     norm: BatchNormConfig::new(16).init(&device),
///     last: LinearConfig::new(16, 3).init(&device),
/// };
/// let precision = Precision::Bf16;
/// let options = DdpOptions { precision, ..DdpOptions::default() };
/// let (mut ddp, mut net) = Ddp::new(group, net, options)?;
/// let mut optimizer = AdamWConfig::new().init();
/// let cross_entropy = CrossEntropyLossConfig::new().init(&device);
/// for _ in 0..2 {
///     let reduced = ddp.step(&net, |shard| {
///         let x = Tensor::<2>::ones([4, 8], &device);
///         let y = Tensor::<1, Int>::zeros([4], &device);
///         let scores = shard.model()?.forward(precision.input(x)); // in bf16
///         let loss = cross_entropy.forward(precision.logits(scores), y); // in f32
///         shard.backward(loss, 4.0)
///     })?;
///     net = optimizer.step(1e-3, net, reduced.grads); // gradients and weights are f32
/// }
/// assert_eq!(net.first.weight.val().dtype(), DType::F32);
/// assert_eq!(ddp.valid(&net).first.weight.val().dtype(), DType::BF16); // for evaluation
/// # Ok(())
/// # }
/// ```
///
/// *Source*: PyTorch's automatic mixed precision. Burn does not promote types, so a program makes autocast's casts itself,
/// with [`input`](Self::input), [`logits`](Self::logits) and [`in_f32`](paceline_nn::in_f32).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Precision {
    /// 32-bit floats, without casts. NVIDIA GPUs multiply f32 matrices in TF32, see `docs/devices.md`.
    #[default]
    #[serde(rename = "f32")]
    F32,
    /// bfloat16, mixed.
    #[serde(rename = "bf16")]
    Bf16,
    /// IEEE half precision, mixed.
    #[serde(rename = "fp16")]
    F16,
}

impl fmt::Display for Precision {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "fp16",
        })
    }
}

impl Precision {
    /// The type that layers compute in.
    #[must_use]
    pub fn dtype(self) -> FloatDType {
        match self {
            Self::F32 => FloatDType::F32,
            Self::Bf16 => FloatDType::BF16,
            Self::F16 => FloatDType::F16,
        }
    }

    /// Casts the model's input to the type that layers compute in.
    #[must_use]
    pub fn input<const D: usize>(self, tensor: Tensor<D>) -> Tensor<D> {
        match self {
            Self::F32 => tensor,
            Self::Bf16 | Self::F16 => tensor.cast(self.dtype()),
        }
    }

    /// Casts the model's output to f32 for the loss: a softmax or a mean in fewer digits loses the signal.
    #[must_use]
    pub fn logits<const D: usize>(self, tensor: Tensor<D>) -> Tensor<D> {
        match self {
            Self::F32 => tensor,
            Self::Bf16 | Self::F16 => tensor.cast(FloatDType::F32),
        }
    }
}

/// The parameters that every forward pass casts, and the type to cast to: decided once, from the model alone.
pub(crate) struct Casts {
    precision: Precision,
    cast: HashSet<ParamId>,
}

impl Casts {
    /// Decides for `model` on `device`. `keep` names module types and paths that stay f32. `buffers` are never cast, because
    /// a model shares them with its copies.
    ///
    /// *Errors*: `device` does not support that type; `keep` has a name that the model lacks.
    pub(crate) fn new<M: Module>(
        model: &M,
        device: &Device,
        precision: Precision,
        keep: &[String],
        buffers: &HashMap<ParamId, usize>,
    ) -> Result<Self, DdpError> {
        if precision == Precision::F32 {
            return Ok(Self {
                precision,
                cast: HashSet::new(),
            });
        }
        if !device.supports_dtype(precision.dtype()) {
            return Err(DdpError::UnsupportedPrecision {
                precision,
                device: format!("{device:?}"),
            });
        }
        let mut sort = Sort {
            keep,
            buffers,
            place: Vec::new(),
            matched: vec![false; keep.len()],
            cast: HashSet::new(),
            kept: HashSet::new(),
        };
        model.visit(&mut sort);
        let unknown = keep.iter().zip(&sort.matched);
        let mut unknown = unknown.filter(|(name, matched)| !**matched && !is_norm(name));
        if let Some((name, _)) = unknown.next() {
            return Err(DdpError::NothingToKeep { name: name.clone() });
        }
        // A tensor used both in cast and in kept modules stays f32.
        sort.cast.retain(|id| !sort.kept.contains(id));
        Ok(Self {
            precision,
            cast: sort.cast,
        })
    }

    /// Whether nothing is ever cast.
    pub(crate) fn none(&self) -> bool {
        self.precision == Precision::F32
    }

    /// `model` with its parameters cast inside the graph.
    ///
    /// *Cost*: one cast for each parameter, and one back in the backward pass.
    pub(crate) fn apply<M: Module>(&self, model: M) -> M {
        if self.none() {
            return model;
        }
        map_params(model, &mut &*self)
    }

    /// Runs a user's pass. If Burn panics because types differ, returns an error that names the step.
    pub(crate) fn explain<R>(&self, step: u64, pass: impl FnOnce() -> R) -> Result<R, DdpError> {
        if self.none() {
            return Ok(pass());
        }
        // Unwind safe: the half-done step fails, and the caller undoes it.
        catch_unwind(AssertUnwindSafe(pass)).or_else(|payload| {
            let text = panic_text(&*payload).unwrap_or_default();
            if text.to_lowercase().contains("dtype") {
                let message = one_line(text);
                Err(DdpError::MixedTypes { step, message })
            } else {
                resume_unwind(payload)
            }
        })
    }

    /// Refuses a loss in reduced precision, which a scaler would make infinite.
    pub(crate) fn check_loss(&self, step: u64, loss: &Tensor<1>) -> Result<(), DdpError> {
        let dtype = loss.dtype();
        if self.none() || !matches!(dtype, DType::F16 | DType::BF16) {
            return Ok(());
        }
        Err(DdpError::LossType {
            step,
            dtype: format!("{dtype:?}"),
        })
    }
}

fn is_norm(name: &str) -> bool {
    NORMS.contains(&name)
}

/// Divides a model's parameters into cast and kept ones.
struct Sort<'a> {
    keep: &'a [String],
    buffers: &'a HashMap<ParamId, usize>,
    /// Field and owner's type, from the model down to the visitor's position.
    place: Vec<(String, String)>,
    matched: Vec<bool>,
    cast: HashSet<ParamId>,
    kept: HashSet<ParamId>,
}

impl Sort<'_> {
    /// Whether the visited parameter stays in f32; records the names that matched.
    fn keeps(&mut self) -> bool {
        let fields: Vec<&str> = self.place.iter().map(|(field, _)| field.as_str()).collect();
        let path = fields.join(".");
        let of_type = |name: &str| self.place.iter().any(|(_, owner)| owner == name);
        let mut keeps = ALWAYS_KEPT.into_iter().any(of_type);
        for (name, matched) in self.keep.iter().zip(&mut self.matched) {
            let below = path
                .strip_prefix(name.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
            if below || of_type(name) {
                *matched = true;
                keeps = true;
            }
        }
        keeps
    }
}

impl ModuleVisitor for Sort<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        // Burn writes `Struct:LayerNorm`.
        let owner = container_type.rsplit(':').next().unwrap_or_default();
        self.place.push((name.to_string(), owner.to_string()));
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.place.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let keeps = self.keeps();
        if keeps || self.buffers.contains_key(&param.id) {
            self.kept.insert(param.id);
        } else if param.base().dtype() == DType::F32 {
            // Other types are the user's own choice.
            self.cast.insert(param.id);
        }
    }
}

impl MapParams for &Casts {
    fn map<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Param<Tensor<D>>> {
        let is_cast = self.cast.contains(&param.id);
        is_cast.then(|| {
            param
                .clone()
                .map(|tensor| tensor.cast(self.precision.dtype()))
        })
    }
}

#[cfg(test)]
mod tests;
