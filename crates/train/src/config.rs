//! The settings of a training job: their table, the source of each value, and the resolved result.
//!
//! Precedence: flag, environment variable, file, saved settings of a resumed run, default. Every value keeps its source, for
//! `--explain`, for errors and for the saved file. Only [`FileText::read`] and [`Surroundings::of_process`] do I/O or read a
//! clock.

mod advice;
mod check;
mod derive;
mod error;
mod kind;
mod layers;
mod render;
mod resolve;
mod resume;
mod settings;
mod table;
#[cfg(test)]
mod tests;
mod value;

use std::path::{Path, PathBuf};
use std::time::Duration;

use paceline_ddp::ZeroStage;
use paceline_nn::Recompute;
use paceline_nn::gpt::GptConfig;
use paceline_rendezvous::env::{Listed, Timeout};
use paceline_split::pipeline::{PipelineOptions, Schedule};
use serde::{Deserialize, Serialize};

use crate::data::images::Preparation;
pub use error::ConfigError;
pub use kind::Kind;
pub use layers::{FileText, environment};
pub use resolve::{Given, Inputs, JobShape, PathKind, ResumeTarget, SavedRun, Surroundings};
use settings::Settings;
pub use table::{Fallback, OPTIONS, OptionRow, TrainConfig, UserProgram, option, synonym};
pub use value::{Setting, Source, Value};

/// The effective settings of a job, each with its source.
///
/// ```
/// use paceline_train::config::{Given, Inputs, Surroundings};
///
/// let inputs = Inputs {
///     flags: vec![("epochs".into(), "3".into())],
///     environment: vec![("PACELINE_LR".into(), "0.01".into())],
///     ..Inputs::default()
/// };
/// let resolved = Given::read(&inputs)?.resolve(None, &Surroundings::of_process())?;
/// assert_eq!(resolved.config().epochs, 3);
/// assert_eq!(resolved.setting("lr").origin(), "environment PACELINE_LR");
/// # Ok::<(), paceline_train::config::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Resolved {
    settings: Settings,
    variables: Vec<Listed>,
    warnings: Vec<String>,
    config: TrainConfig,
}

impl Resolved {
    /// The settings as the trainer uses them.
    #[must_use]
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// Whether the run directory's name was generated.
    #[must_use]
    pub fn makes_up_run_dir(&self) -> bool {
        self.setting("run_dir").source == Source::Default
    }

    /// The user's program whose job it is; `None` for `paceline train`.
    #[must_use]
    pub fn program(&self) -> Option<&UserProgram> {
        self.settings.program.as_ref()
    }

    /// All settings that the program has, in the order of the help.
    pub fn settings(&self) -> impl Iterator<Item = (&'static OptionRow, &Setting)> {
        self.settings.shown()
    }

    /// Replaces the run directory by the one created.
    pub fn set_run_dir(&mut self, path: &Path) {
        let mut setting = self.setting("run_dir").clone();
        setting.value = Value::Path(path.to_owned());
        self.settings.set("run_dir", setting);
        self.config.run_dir = path.to_owned();
    }

    /// The settings without effect, one sentence each.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The setting of a key of the table.
    ///
    /// # Panics
    ///
    /// If the table has no such key.
    #[must_use]
    pub fn setting(&self, key: &'static str) -> &Setting {
        self.settings.need(key)
    }
}

impl TrainConfig {
    /// How long a rank waits for the others.
    #[must_use]
    pub fn timeout(&self) -> Timeout {
        match self.timeout_seconds {
            TimeoutSeconds::Seconds(seconds) => Timeout::After(Duration::from_secs(seconds)),
            TimeoutSeconds::Word(Auto::Auto) => Timeout::Auto,
        }
    }

    /// Size of a gradient bucket in bytes, at least 1.
    #[must_use]
    pub fn bucket_bytes(&self) -> usize {
        // The table bounds the setting to 4 GiB, where an f64 still represents single bytes.
        ((self.bucket_cap_mb * f64::from(1 << 20)) as usize).max(1)
    }

    /// How images in files become samples.
    pub(crate) fn preparation(&self) -> Preparation {
        let channels = |text: &Option<String>, otherwise| {
            let given = text.as_deref().and_then(check::channels);
            given.unwrap_or(otherwise)
        };
        Preparation {
            side: self.image_size.unwrap_or(self.model.image_size()),
            mean: channels(&self.mean, IMAGENET_MEAN),
            deviation: channels(&self.std, IMAGENET_STD),
            crop: self.random_crop,
            hflip: self.hflip,
            seed: self.seed,
        }
    }

    /// The shape of the language model for a tokenizer with this many tokens.
    pub(crate) fn gpt(&self, vocabulary: usize) -> GptConfig {
        let size = gpt_size(self.model);
        GptConfig {
            vocabulary,
            context: self.context.unwrap_or(size.context),
            layers: self.layers.unwrap_or(size.layers),
            heads: self.heads.unwrap_or(size.heads),
            width: self.width.unwrap_or(size.width),
            dropout: self.dropout.unwrap_or(size.dropout),
        }
    }

    /// The pipeline, if ranks share the model's blocks.
    pub(crate) fn pipeline(&self) -> Option<PipelineOptions> {
        let ranks = self.pp.filter(|ranks| *ranks > 1)?;
        Some(PipelineOptions {
            ranks,
            schedule: self.schedule,
            chunks: match self.schedule {
                Schedule::Interleaved => self.pp_chunks,
                _ => 1,
            },
            cuts: self.pp_cuts.as_deref().and_then(check::cuts),
        })
    }

    /// What is dealt to the ranks; nothing where a strategy has one rank.
    pub(crate) fn zero_stage(&self) -> Option<ZeroStage> {
        let stage = match self.zero {
            Zero::Off => return None,
            Zero::Optimizer => ZeroStage::Optimizer,
            Zero::Gradients => ZeroStage::Gradients,
            Zero::Parameters => ZeroStage::Parameters,
        };
        (self.strategy == Strategy::Ddp).then_some(stage)
    }

    /// Whether the ranks leave their state when one is lost: each replica of the model's parts has all of theirs.
    pub(crate) fn leaves_state(&self) -> bool {
        let is_split = self.tp.is_some() || self.pipeline().is_some();
        is_split && self.zero == Zero::Off && self.recovery == Recovery::Restart
    }

    /// Whether the pipeline is cut by the measured time of the blocks.
    pub(crate) fn measures_blocks(&self) -> bool {
        self.pipeline().is_some() && self.pp_cuts.as_deref() == Some(check::BY_COST)
    }

    /// The recomputed blocks.
    pub(crate) fn recompute(&self) -> Recompute {
        let text = self.recompute.as_deref();
        text.and_then(|text| text.parse().ok()).unwrap_or_default()
    }

    pub(crate) fn tokenizer_choice(&self) -> TokenizerChoice {
        match self.tokenizer.as_deref() {
            None | Some("bytes") => TokenizerChoice::Bytes,
            Some("bpe") => TokenizerChoice::Bpe,
            Some(path) => TokenizerChoice::File(path.into()),
        }
    }

    fn from_settings(settings: &Settings) -> Self {
        let values = settings
            .iter()
            .filter_map(|(row, setting)| Some((row.key.to_owned(), setting.value.to_toml()?)));
        toml::Table::from_iter(values)
            .try_into()
            .expect("resolved settings have every field, each of its kind")
    }
}

/// Mean and standard deviation of ImageNet's channels, those of torchvision's documentation.
const IMAGENET_MEAN: [f64; 3] = [0.485, 0.456, 0.406];
const IMAGENET_STD: [f64; 3] = [0.229, 0.224, 0.225];

/// The shape of a named size, without a vocabulary.
fn gpt_size(model: ModelSize) -> GptConfig {
    let (dropout, [layers, heads, width, context]) = match model {
        ModelSize::Gpt124m => (0.1, [12, 12, 768, 1024]),
        ModelSize::Gpt10m => (0.1, [6, 6, 384, 256]),
        // So small a model does not learn its text by heart.
        _ => (0.0, [4, 4, 128, 128]),
    };
    GptConfig {
        vocabulary: 0,
        context,
        layers,
        heads,
        width,
        dropout,
    }
}

/// How a model is trained on several devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// Ranks with a copy of the model each.
    Ddp,
    /// One rank, with a replica on each of its devices.
    Dp,
    /// One rank, with the model's layers on its devices.
    Model,
    /// One rank on one device.
    Single,
}

/// The learning rate after the warm-up, by its names in PyTorch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LrSchedule {
    /// It falls like half a cosine.
    Cosine,
    /// It falls like a straight line.
    Linear,
    /// It is multiplied by a factor every few epochs.
    Step,
    /// It rises and falls like a cosine.
    OneCycle,
    /// It stays.
    Constant,
}

/// The built-in optimizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// Adam with decoupled weight decay.
    AdamW,
    /// Stochastic gradient descent, with momentum or without.
    Sgd,
    /// The sign of a momentum.
    Lion,
    /// Orthogonal updates of matrices, and AdamW for other parameters.
    Muon,
}

/// Whether something is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// It is not.
    Off,
    /// It is.
    On,
}

/// Seconds that a rank waits for the others, or `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TimeoutSeconds {
    /// So many.
    Seconds(u64),
    /// As the steps suggest.
    Word(Auto),
}

/// The word for a value that the program chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Auto {
    /// `auto`
    Auto,
}

/// What happens to a job that loses a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recovery {
    /// The other ranks go on, and end with the same weights.
    Live,
    /// All ranks start again from the newest checkpoint, as often as `max_restarts` says.
    Restart,
    /// The job ends.
    None,
}

/// What follows a loss or gradient that is not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NonFinite {
    /// The job ends.
    Stop,
    /// The step changes nothing.
    Skip,
    /// The steps since a state in memory change nothing.
    Back,
}

/// The built-in tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// The built-in handwritten digits.
    Digits,
    /// Images and labels in MNIST's IDX format.
    Idx,
    /// A table with a label column.
    Csv,
    /// A folder of PNG and JPEG images for each class.
    Images,
    /// Text, to be continued.
    Lm,
}

/// What the label of a table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Objective {
    /// A class.
    Classification,
    /// A number.
    Regression,
}

/// What becomes of features without a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MissingValues {
    /// They are refused.
    Error,
    /// Numbers are the mean of the training rows, words a category.
    Fill,
}

/// What becomes of samples that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BadSamples {
    /// The job ends.
    Stop,
    /// They are left out.
    Skip,
}

/// The weights of classes in the loss of training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClassWeights {
    /// All are 1.
    None,
    /// All classes weigh the same together.
    Balanced,
}

/// Sizes of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelSize {
    /// For tests.
    Tiny,
    /// The default.
    Small,
    /// Several times the default.
    Base,
    /// A GPT with about a million parameters, the default of the task `lm`.
    #[serde(rename = "gpt-1m")]
    Gpt1m,
    /// A GPT with about ten million parameters.
    #[serde(rename = "gpt-10m")]
    Gpt10m,
    /// A GPT of the size of the smallest GPT-2.
    #[serde(rename = "gpt-124m")]
    Gpt124m,
    /// A residual network for images of 32x32 pixels.
    Resnet20,
    /// A residual network for images of 224x224 pixels.
    Resnet18,
    /// A larger one.
    Resnet50,
    /// A Vision Transformer for images.
    #[serde(rename = "vit-tiny")]
    VitTiny,
}

impl ModelSize {
    /// As in the settings.
    pub(crate) fn name(self) -> String {
        let name = serde_json::to_value(self).expect("it always encodes");
        name.as_str().expect("a word").to_owned()
    }

    /// Whether it is a residual network or a Vision Transformer, which are only for images.
    pub(crate) fn is_of_images(self) -> bool {
        self == Self::Resnet20 || self.is_of_large_images()
    }

    /// Whether it is made for images of ImageNet's size.
    fn is_of_large_images(self) -> bool {
        matches!(self, Self::Resnet18 | Self::Resnet50 | Self::VitTiny)
    }

    /// Side of the images that it is made for, in pixels.
    fn image_size(self) -> usize {
        match self.is_of_large_images() {
            true => 224,
            false => 32,
        }
    }
}

/// What is cropped of an image in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RandomCrop {
    /// The image itself, up to an eighth of its side away from the centre.
    Pad,
    /// A part of a random size and shape, resized.
    Resized,
    /// The centre.
    None,
}

/// How text becomes tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TokenizerChoice {
    Bytes,
    Bpe,
    File(PathBuf),
}

/// The state that is dealt to the ranks instead of kept whole by each: stages of ZeRO.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Zero {
    /// None.
    #[serde(rename = "0")]
    Off,
    /// The optimizer's.
    #[serde(rename = "1")]
    Optimizer,
    /// The optimizer's and the gradients.
    #[serde(rename = "2")]
    Gradients,
    /// The optimizer's, the gradients and the parameters of blocks.
    #[serde(rename = "3")]
    Parameters,
}
