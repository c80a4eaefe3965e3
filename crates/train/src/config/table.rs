//! The table of settings: one row each, the source of flags, variables, file keys, checks and help.

use std::path::PathBuf;

use paceline_ddp::device::DeviceKind;
use paceline_ddp::{Backend, CommHook, Precision, Reduction, SameBits};
use paceline_split::pipeline::Schedule;
use paceline_usage::Lang;
use serde::{Deserialize, Serialize};

use super::kind::Kind;
use super::{
    BadSamples, ClassWeights, LrSchedule, MissingValues, ModelSize, NonFinite, Objective,
    Optimizer, RandomCrop, Recovery, Strategy, Switch, Task, TimeoutSeconds, Zero,
};

/// Maximum number of ranks, shards or micro-batches in a setting.
const PARTS_MAX: u64 = 65_536;
/// Maximum number of steps or samples in a setting: far above any use, far below overflow.
const STEPS_MAX: u64 = 1 << 40;

/// One setting.
#[derive(Debug)]
pub struct OptionRow {
    /// The key in a file; the flag is `--name-with-dashes`, the variable `PACELINE_NAME`.
    pub key: &'static str,
    /// Heading in the help.
    pub group: &'static str,
    /// The format of its value.
    pub kind: Kind,
    /// Its value if not set.
    pub fallback: Fallback,
    /// One line of help, with the unit.
    pub help: &'static str,
    /// Whether all ranks of a job must have the same value.
    pub must_agree: bool,
    /// Why a resumed run keeps its value; `None` if it may change.
    pub(super) fixed: Option<&'static str>,
    /// What the setting has no effect without.
    pub(super) needs: Option<Need>,
    /// The programs that have it.
    pub(super) of: Of,
    /// A second name of its flag.
    pub alias: Option<&'static str>,
    /// Other tools' names, which edit distance would not find.
    pub(super) synonyms: &'static [&'static str],
}

/// The programs that have a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Of {
    /// All.
    Every,
    /// Those that train on labelled samples of the kinds that `paceline train` reads.
    Data,
    /// `paceline train` alone: one of its models.
    BuiltIn,
}

/// A user's program with a task of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserProgram {
    /// Its name.
    pub name: String,
    /// Whether it trains on labelled samples of the kinds that `paceline train` reads.
    pub reads_data: bool,
}

/// The value of a setting that is not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// This value, written as in a flag.
    Value(&'static str),
    /// Nothing; the text says what that means.
    Unset(&'static str),
    /// Derived from other settings or the machine, as described.
    Derived(&'static str),
}

/// What a setting may need to have an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    LanguageModel,
    /// A classification of samples.
    Classes,
    /// A model of blocks.
    Blocks,
    Columns,
    /// Rows of a table.
    Rows,
    /// Samples that are read one by one.
    Each,
    /// Data without a split of its own.
    Split,
    /// Images in files.
    Images,
    Group,
    /// A strategy that uses several devices of one rank.
    SeveralDevices,
    /// Matrices that are cut.
    Parts,
    /// A pipeline.
    Stages,
    /// This process starts the ranks.
    Launcher,
    /// Ranks that are started again.
    Restarts,
    /// One of these words of another setting.
    Word(&'static str, &'static [&'static str]),
}

impl OptionRow {
    /// Those that a program has: that of a user, or `paceline train`.
    pub fn all_of(program: Option<&UserProgram>) -> impl Iterator<Item = &'static Self> {
        OPTIONS.iter().filter(move |row| row.is_of(program))
    }

    /// Whether a program has it.
    #[must_use]
    pub fn is_of(&self, program: Option<&UserProgram>) -> bool {
        program.is_none_or(|program| match self.of {
            Of::Every => true,
            Of::Data => program.reads_data,
            Of::BuiltIn => false,
        })
    }

    /// The flag, with its dashes: `--global-batch`.
    #[must_use]
    pub fn flag(&self) -> String {
        format!("--{}", self.key.replace('_', "-"))
    }

    /// The environment variable: `PACELINE_GLOBAL_BATCH`.
    #[must_use]
    pub fn variable(&self) -> String {
        format!("{VARIABLE_PREFIX}{}", self.key.to_uppercase())
    }

    /// The default in words: `64`, `none`, `one per rank`.
    #[must_use]
    pub fn fallback_text(&self) -> &'static str {
        match self.fallback {
            Fallback::Value(text) | Fallback::Derived(text) | Fallback::Unset(text) => text,
        }
    }
}

/// The row of a key.
#[must_use]
pub fn option(key: &str) -> Option<&'static OptionRow> {
    OPTIONS.iter().find(|row| row.key == key)
}

/// The row for another tool's name.
#[must_use]
pub fn synonym(name: &str) -> Option<&'static OptionRow> {
    let name = name.to_lowercase().replace('-', "_");
    OPTIONS.iter().find(|row| row.synonyms.contains(&&*name))
}

/// The default of a feature that is off.
pub(super) const NONE: &str = "none";

/// The prefix of all the project's variables.
pub(super) const VARIABLE_PREFIX: &str = "PACELINE_";

const TASK: &str = "Task and data";
const TABLES: &str = "Tables";
const LEARNING: &str = "Learning";
const IMAGES: &str = "Image folder";
const MODEL: &str = "Language model";
const RANKS: &str = "Ranks and devices";
const RUN: &str = "Run directory and checkpoints";
const TUNING: &str = "Tuning and diagnosis";
const USAGE: &str = "Usage";

const SAMPLES: &str = "the run's samples come from that data";
const SCHEDULE: &str = "the learning-rate schedule spans the whole run";
const WEIGHTS: &str = "the saved weights belong to that model";
const AUGMENTED: &str = "all steps of the run crop and flip in the same way";
const OPTIMIZER: &str = "all steps of the run use the same optimizer settings";
const BEST: &str = "the best epoch so far is the best by that figure";
const LOSS: &str = "all steps of the run have the same loss";
const ORDER: &str = "it decides which samples the remaining steps read";
const BITS: &str = "it decides the order of additions, and with it the bits of the result";

/// A row with the most common properties; each method below changes one.
const fn row(group: &'static str, kind: Kind, help: &'static str) -> OptionRow {
    OptionRow {
        key: "",
        group,
        kind,
        fallback: Fallback::Unset(NONE),
        help,
        must_agree: true,
        fixed: None,
        needs: None,
        of: Of::Every,
        alias: None,
        synonyms: &[],
    }
}

impl OptionRow {
    const fn or(mut self, value: &'static str) -> Self {
        self.fallback = Fallback::Value(value);
        self
    }

    const fn unset(mut self, meaning: &'static str) -> Self {
        self.fallback = Fallback::Unset(meaning);
        self
    }

    const fn derived(mut self, how: &'static str) -> Self {
        self.fallback = Fallback::Derived(how);
        self
    }

    const fn fixed(mut self, why: &'static str) -> Self {
        self.fixed = Some(why);
        self
    }

    /// Each rank, or each machine, may have its own value.
    const fn local(mut self) -> Self {
        self.must_agree = false;
        self
    }

    const fn needs(mut self, need: Need) -> Self {
        self.needs = Some(need);
        self
    }

    const fn of_data(mut self) -> Self {
        self.of = Of::Data;
        self
    }

    const fn built_in(mut self) -> Self {
        self.of = Of::BuiltIn;
        self
    }

    const fn alias(mut self, name: &'static str) -> Self {
        self.alias = Some(name);
        self
    }

    const fn also(mut self, synonyms: &'static [&'static str]) -> Self {
        self.synonyms = synonyms;
        self
    }
}

/// Makes the fields of [`TrainConfig`] and the rows of [`OPTIONS`] from one declaration per setting.
macro_rules! settings {
    ($($key:ident: $type:ty = $row:expr;)*) => {
        /// The settings of a job as the trainer uses them; [`OPTIONS`] describes each one.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        #[allow(missing_docs, reason = "a field is named like its row in OPTIONS, which holds its one description")]
        pub struct TrainConfig {
            $(pub $key: $type,)*
        }

        /// Every setting of a training job, in the order of the help.
        pub static OPTIONS: &[OptionRow] = &[$(OptionRow { key: stringify!($key), ..$row }),*];
    };
}

// One declaration per setting.
settings! {
    task: Task = row(TASK, Kind::Word(&["digits", "idx", "csv", "images", "lm"]),
        "Task: built-in digits, an MNIST-format IDX folder, a table as CSV, JSON lines or Parquet, a folder of images for each class, or a language model")
        .derived("digits, or guessed from --data").fixed(SAMPLES).of_data();
    data: Option<PathBuf> = row(TASK, Kind::Path,
        "Training data: an IDX folder, a table (.csv, .tsv, .jsonl, .ndjson, .parquet), an image folder, or a text file or folder")
        .local().fixed(SAMPLES)
        .also(&["dataset"]).of_data();
    held_out: f64 = row(TASK, Kind::Number { min: 0.0, max: 0.99 },
        "Share of the samples that are evaluated and not trained on, for data without a split of its own; the same ones with every --seed, see --split-seed")
        .or("0.2").fixed(SAMPLES).needs(Need::Split).of_data()
        .also(&["test_size", "val_split", "validation_split", "train_test_split"]);
    split_seed: u64 = row(TASK, Kind::Count { min: 0, max: i64::MAX as u64 },
        "Which samples --held-out takes: another seed takes others")
        .or("0").fixed(SAMPLES).needs(Need::Split).of_data()
        .also(&["random_state", "split_random_state"]);
    bad_samples: BadSamples = row(TASK, Kind::Word(&["stop", "skip"]),
        "Lines and image files that cannot be used: stop names the first one, skip leaves them out and counts them")
        .or("stop").fixed(SAMPLES).needs(Need::Each).of_data()
        .also(&["on_bad_lines", "error_bad_lines"]);
    label_column: Option<String> = row(TABLES, Kind::Text,
        "Column with the class, or with the number to predict")
        .unset("the column named label").fixed(SAMPLES).needs(Need::Columns).of_data()
        .also(&["target", "target_column"]);
    objective: Objective = row(TABLES, Kind::Word(&["classification", "regression"]),
        "What the label is: a class, or a number to predict with the least mean squared error")
        .or("classification").fixed(WEIGHTS).needs(Need::Columns).of_data();
    test_data: Option<PathBuf> = row(TABLES, Kind::Path,
        "Another table with the same columns to evaluate on; all of --data is then trained on")
        .local().fixed(SAMPLES).needs(Need::Columns).of_data()
        .also(&["val_data", "eval_data", "validation_file", "test_file"]);
    drop_columns: Option<String> = row(TABLES, Kind::Optional(&Kind::Text),
        "Columns that are no features, with commas between: id,name")
        .fixed(SAMPLES).needs(Need::Columns).of_data()
        .also(&["ignore_columns", "exclude_columns"]);
    categorical: Option<String> = row(TABLES, Kind::Optional(&Kind::Text),
        "Columns whose numbers are categories, as words are, with commas between: zip,class")
        .fixed(SAMPLES).needs(Need::Columns).of_data()
        .also(&["categorical_features", "categorical_feature", "cat_features"]);
    separator: Option<String> = row(TABLES, Kind::Optional(&Kind::Text),
        "What separates cells: comma, semicolon, tab, pipe, space, or another character")
        .unset("told from the first line").fixed(SAMPLES).needs(Need::Rows).of_data()
        .also(&["sep", "delimiter"]);
    missing_values: MissingValues = row(TABLES, Kind::Word(&["error", "fill"]),
        "Features without a value, such as empty cells and NA: error refuses them; fill takes a column's mean over the training rows, and makes \
         missing words a category")
        .or("error").fixed(SAMPLES).needs(Need::Columns).of_data();
    model: ModelSize = row(LEARNING, Kind::Word(&["tiny", "small", "base", "resnet20", "resnet18", "resnet50", "vit-tiny", "gpt-1m", "gpt-10m", "gpt-124m"]),
        "Size of the network: tiny, small, base; a residual network or a Vision Transformer for images; a GPT with about this many parameters for lm")
        .derived("small; resnet20 for image folders, resnet18 from --image-size 64 on; gpt-1m for lm").fixed(WEIGHTS).built_in();
    epochs: usize = row(LEARNING, Kind::Count { min: 1, max: 1_000_000 },
        "Passes over the training data")
        .or("15").fixed(SCHEDULE)
        .also(&["num_epochs", "max_epochs", "num_train_epochs"]);
    global_batch: usize = row(LEARNING, Kind::Count { min: 1, max: 1 << 24 },
        "Samples in one optimizer step, all ranks together")
        .derived("64, or 8 for lm").fixed(ORDER)
        .also(&["batch", "batch_size", "train_batch_size", "per_device_train_batch_size"]);
    drop_last: bool = row(LEARNING, Kind::Switch,
        "Leave out the end of an epoch that does not fill a step of --global-batch samples")
        .or("false").fixed(ORDER)
        .also(&["dataloader_drop_last"]);
    lr: f64 = row(LEARNING, Kind::NumberAbove { min: 0.0, max: 100.0 },
        "Highest learning rate, reached after the warm-up")
        .or("0.003").fixed(SCHEDULE)
        .also(&["learning_rate"]);
    lr_schedule: LrSchedule = row(LEARNING, Kind::Word(&["cosine", "linear", "step", "one-cycle", "constant"]),
        "How the learning rate falls after the warm-up: cosine or linear down to --min-lr, step by --lr-gamma, one-cycle, which also \
         rises like a cosine, or not")
        .or("cosine").fixed(SCHEDULE)
        .also(&["lr_scheduler", "lr_scheduler_type", "sched"]);
    min_lr: Option<f64> = row(LEARNING, Kind::Optional(&Kind::Number { min: 0.0, max: 100.0 }),
        "Learning rate at the end")
        .unset("0; with one-cycle --lr / 250000").fixed(SCHEDULE).needs(Need::Word("lr_schedule", &["cosine", "linear", "one-cycle"]))
        .also(&["eta_min"]);
    lr_step_size: Option<u64> = row(LEARNING, Kind::Optional(&Kind::Count { min: 1, max: 1_000_000 }),
        "Epochs after which --lr-schedule step multiplies the learning rate, again and again")
        .unset("a third of the epochs").fixed(SCHEDULE).needs(Need::Word("lr_schedule", &["step"]))
        .also(&["step_size", "decay_epochs"]);
    lr_gamma: f64 = row(LEARNING, Kind::NumberAbove { min: 0.0, max: 1.0 },
        "Factor of --lr-schedule step")
        .or("0.1").fixed(SCHEDULE).needs(Need::Word("lr_schedule", &["step"]))
        .also(&["gamma", "decay_rate"]);
    warmup: f64 = row(LEARNING, Kind::Number { min: 0.0, max: 1.0 },
        "Fraction of all steps over which the learning rate rises")
        .or("0.1").fixed(SCHEDULE)
        .also(&["warmup_ratio", "pct_start"]);
    optimizer: Optimizer = row(LEARNING, Kind::Word(&["adamw", "sgd", "lion", "muon"]),
        "Optimizer; muon steps the matrices of hidden layers, with updates of AdamW's size, and AdamW the other parameters")
        .or("adamw").fixed(OPTIMIZER)
        .also(&["optim", "opt"]);
    momentum: Option<f64> = row(LEARNING, Kind::Optional(&Kind::Number { min: 0.0, max: 0.9999 }),
        "Momentum of sgd, or of muon, where it is Nesterov's")
        .unset("0 with sgd, 0.95 with muon").fixed(OPTIMIZER).needs(Need::Word("optimizer", &["sgd", "muon"]));
    weight_decay: f64 = row(LEARNING, Kind::Number { min: 0.0, max: 1.0 },
        "Weight decay: with adamw, lion and muon decoupled, a fraction of the weight per unit of learning rate; with sgd an L2 penalty, \
         added to the gradient")
        .derived("0.01, or 0 with sgd").fixed(OPTIMIZER);
    label_smoothing: f64 = row(LEARNING, Kind::Number { min: 0.0, max: 0.99 },
        "Share of each label that is spread over all classes in the training loss of a classification")
        .or("0").fixed(LOSS).needs(Need::Classes).of_data();
    mixup: f64 = row(LEARNING, Kind::Number { min: 0.0, max: 4.0 },
        "Mix pairs of training samples and their labels in a classification, by shares from the Beta distribution with this alpha; 0 mixes none")
        .or("0").fixed(LOSS).needs(Need::Classes).of_data()
        .also(&["mixup_alpha"]);
    ema: Option<f64> = row(LEARNING, Kind::Optional(&Kind::Number { min: 0.0, max: 0.999_999_9 }),
        "Decay of an exponential moving average of the weights, which evaluations and the commands for trained models use, such as 0.999")
        .fixed(OPTIMIZER)
        .also(&["ema_decay", "model_ema", "model_ema_decay"]);
    init: Option<PathBuf> = row(LEARNING, Kind::Path,
        "Weights to begin with: a safetensors file in PyTorch's names and layout, or a run's model.safetensors")
        .unset("random weights").local().fixed("the run has begun with those weights")
        .also(&["initial_checkpoint", "pretrained", "weights"]);
    freeze: Option<String> = row(LEARNING, Kind::Optional(&Kind::Text),
        "Parameters that stay as they are: patterns of their paths, such as '*.blocks.*,*.stem.*'")
        .fixed("all steps of the run update the same parameters");
    patience: Option<u64> = row(LEARNING, Kind::Optional(&Kind::Count { min: 1, max: 1_000_000 }),
        "Epochs in a row without a better --monitor after which the job ends")
        .unset("all epochs are trained")
        .also(&["early_stopping_patience", "early_stopping"]);
    monitor: String = row(LEARNING, Kind::Text,
        "Figure of the held-out data by which the best epoch is kept: held_out_loss, accuracy, or another one of metrics.jsonl")
        .or("held_out_loss").fixed(BEST)
        .also(&["metric_for_best_model", "monitor_metric"]);
    // TOML integers end at i64::MAX, and a seed must survive saving.
    seed: u64 = row(LEARNING, Kind::Count { min: 0, max: i64::MAX as u64 },
        "Seed of the weights, the sample order and all other randomness")
        .or("0").fixed(ORDER);
    accumulate: usize = row(LEARNING, Kind::Count { min: 1, max: PARTS_MAX },
        "Micro-batches per shard, to save memory or to fill a pipeline; the global batch stays the same")
        .or("1").fixed(BITS).alias("micro-batches");
    clip_norm: Option<f64> = row(LEARNING, Kind::Optional(&Kind::NumberAbove { min: 0.0, max: 1e9 }),
        "Largest norm of the whole gradient; larger gradients are scaled down to it")
        .fixed(OPTIMIZER)
        .also(&["gradient_clipping"]);
    precision: Precision = row(LEARNING, Kind::Word(&["f32", "bf16", "fp16"]),
        "Compute type of the layers; weights stay f32; fp16 scales the loss")
        .or("f32").fixed(OPTIMIZER);
    non_finite: NonFinite = row(LEARNING, Kind::Word(&["stop", "skip", "back"]),
        "After an infinite or NaN loss or gradient: stop the job, skip the step on all ranks, or go back to the last --snapshot-every and on \
         with the next samples; up to 9 times in a row")
        .or("stop").fixed(OPTIMIZER)
        .also(&["error_if_nonfinite", "check_for_nan_in_loss_and_grad", "terminate_on_nan"]);
    class_weights: ClassWeights = row(LEARNING, Kind::Word(&["none", "balanced"]),
        "Weights of the classes in the training loss: balanced gives a rare class as much weight as a frequent one, \
         samples / (classes * samples of the class)")
        .or("none").fixed(OPTIMIZER).needs(Need::Classes).of_data()
        .also(&["class_weight"]);
    recompute: Option<String> = row(LEARNING, Kind::Optional(&Kind::Recompute),
        "Blocks that compute their forward pass again in the backward pass, to save memory: none, blocks for all, N for every \
         N-th, or burn for Burn's own strategy")
        .unset(NONE).needs(Need::Blocks);
    image_size: Option<usize> = row(IMAGES, Kind::Optional(&Kind::Count { min: 1, max: 4096 }),
        "Side of the square that an image is resized and cropped to, in pixels")
        .unset("224 with resnet18, resnet50 and vit-tiny, else 32").fixed(SAMPLES).needs(Need::Images).of_data()
        .also(&["img_size", "image_height", "crop_size", "train_crop_size"]);
    random_crop: RandomCrop = row(IMAGES, Kind::Word(&["pad", "resized", "none"]),
        "Crops in training: pad moves the image by up to an eighth of its side, resized takes a part of a random size and shape, none \
         takes the centre, as evaluations do")
        .derived("resized from --image-size 64 on, else pad").fixed(AUGMENTED).needs(Need::Images).of_data();
    hflip: f64 = row(IMAGES, Kind::Number { min: 0.0, max: 1.0 },
        "Probability that an image is flipped from left to right in training")
        .or("0.5").fixed(AUGMENTED).needs(Need::Images).of_data()
        .also(&["horizontal_flip", "hflip_prob"]);
    mean: Option<String> = row(IMAGES, Kind::Optional(&Kind::Text),
        "Mean of the red, green and blue intensities, from 0 to 1, such as 0.5,0.5,0.5")
        .unset("ImageNet's: 0.485,0.456,0.406").fixed(SAMPLES).needs(Need::Images).of_data();
    std: Option<String> = row(IMAGES, Kind::Optional(&Kind::Text),
        "Standard deviation of the intensities, which they are divided by")
        .unset("ImageNet's: 0.229,0.224,0.225").fixed(SAMPLES).needs(Need::Images).of_data();
    text_column: Option<String> = row(MODEL, Kind::Optional(&Kind::Text),
        "Column of a table with the texts to train on, a document in each row")
        .unset("the column named text").fixed(SAMPLES).needs(Need::LanguageModel).built_in()
        .also(&["dataset_text_field", "text_field"]);
    tokenizer: Option<String> = row(MODEL, Kind::Text,
        "Tokens of the text: bytes, bpe trained on it, or a tokenizer.json in Hugging Face's format")
        .unset("bytes").fixed(WEIGHTS).needs(Need::LanguageModel).built_in();
    vocab: Option<usize> = row(MODEL, Kind::Optional(&Kind::Count { min: 257, max: 1 << 20 }),
        "Different tokens of --tokenizer bpe")
        .unset("1024").fixed(WEIGHTS).needs(Need::LanguageModel).built_in();
    context: Option<usize> = row(MODEL, Kind::Optional(&Kind::Count { min: 1, max: 1 << 20 }),
        "Tokens of a sequence")
        .unset("from --model").fixed(WEIGHTS).needs(Need::LanguageModel).built_in();
    layers: Option<usize> = row(MODEL, Kind::Optional(&Kind::Count { min: 1, max: 4096 }),
        "Transformer blocks")
        .unset("from --model").fixed(WEIGHTS).needs(Need::LanguageModel).built_in();
    heads: Option<usize> = row(MODEL, Kind::Optional(&Kind::Count { min: 1, max: 4096 }),
        "Attention heads of a block; they divide the width")
        .unset("from --model").fixed(WEIGHTS).needs(Need::LanguageModel).built_in();
    width: Option<usize> = row(MODEL, Kind::Optional(&Kind::Count { min: 1, max: 1 << 16 }),
        "Values that represent a token between blocks")
        .unset("from --model").fixed(WEIGHTS).needs(Need::LanguageModel).built_in();
    dropout: Option<f64> = row(MODEL, Kind::Optional(&Kind::Number { min: 0.0, max: 0.99 }),
        "Share of values that dropout sets to zero")
        .unset("from --model").fixed(OPTIMIZER).needs(Need::LanguageModel).built_in();
    nproc_per_node: usize = row(RANKS, Kind::Auto(&Kind::Count { min: 1, max: PARTS_MAX }),
        "Ranks on this machine; auto is one per core, at most two, or one per GPU")
        .or("auto").local()
        .also(&["nproc"]);
    use_gpu: usize = row(RANKS, Kind::Count { min: 0, max: 1024 },
        "GPUs to train on, one rank each; 0 trains on the CPU or the kind in --device")
        .or("0").local()
        .also(&["gpus"]);
    // Not fixed: the GPU model and its driver affect the result's bits too, and those cannot be fixed.
    device: DeviceKind = row(RANKS, Kind::Word(&["auto", "cpu", "cuda", "vulkan", "metal", "rocm"]),
        "Kind of device; auto is the CPU, or the best kind of GPU with --use-gpu")
        .or("auto")
        .also(&["accelerator"]);
    shards: usize = row(RANKS, Kind::Count { min: 1, max: PARTS_MAX },
        "Shards per step; any number of ranks up to it gives the same bits")
        .derived("one per rank").fixed(BITS);
    strategy: Strategy = row(RANKS, Kind::Word(&["ddp", "dp", "model", "single"]),
        "Parallelism: ddp averages gradients over ranks; single is one rank on one device; to compare with, dp runs a replica on \
         each device of one rank, and model puts its layers on them")
        .or("ddp");
    devices: usize = row(RANKS, Kind::Count { min: 1, max: 1024 },
        "Devices of the one rank of --strategy dp and model; on the CPU they are threads")
        .derived("the number of --use-gpu, or 2").local().needs(Need::SeveralDevices);
    transport: String = row(RANKS, Kind::Word(&["auto", "shm", "tcp", "mpi"]),
        "Transport between ranks: shared memory, TCP, MPI between hosts, or auto by host")
        .or("auto").needs(Need::Group);
    backend: Backend = row(RANKS, Kind::Word(&["auto", "host", "nccl"]),
        "Path of gradients, and of sums between parts, from GPU to GPU: NCCL or host memory; auto is NCCL on CUDA devices")
        .or("auto");
    reduction: Reduction = row(RANKS, Kind::Word(&["tree", "ring"]),
        "Order of NCCL's additions: tree gives the same bits on any number of ranks, ring is NCCL's own order")
        .or("tree").fixed(BITS);
    same_bits: SameBits = row(RANKS, Kind::Word(&["warn", "strict"]),
        "If the CPUs of the ranks compute different bits: warn names the operations, strict ends the job; strict compares GPUs too")
        .or("warn").needs(Need::Group);
    comm_hook: CommHook = row(RANKS, Kind::CommHook,
        "How gradients travel between ranks: none (f32), bf16, fp16, int8, topk[:FRACTION], powersgd[:RANK[:START]]; or only \
         weights, after every PERIOD steps: localsgd:PERIOD[:START], diloco:PERIOD[:START:LR:MOMENTUM]")
        .or(NONE).fixed(BITS);
    zero: Zero = row(RANKS, Kind::Word(&["0", "1", "2", "3"]),
        "Stage of ZeRO: 1 deals the optimizer's state to the ranks, 2 the gradients too, 3 the weights of blocks too; \
         the bits stay the same")
        .or("0").needs(Need::Group);
    dp: usize = row(RANKS, Kind::Auto(&Kind::Count { min: 1, max: PARTS_MAX }),
        "Replicas of the model (data parallelism); auto is as many as the ranks make with --pp and --tp. With fewer, several ranks \
         have the parts of one")
        .or("auto");
    tp: Option<usize> = row(RANKS, Kind::Optional(&Kind::Count { min: 1, max: PARTS_MAX }),
        "Parts of each matrix (tensor parallelism; language models and programs that can), on as many ranks or fewer; the bits depend on the parts, \
         not on the ranks")
        .unset("whole matrices").fixed(BITS).needs(Need::LanguageModel);
    sequence_parallel: Switch = row(RANKS, Kind::Word(&["off", "on"]),
        "Cut the sequences between the matrices of --tp into parts too, to save memory")
        .or("off").fixed(BITS).needs(Need::Parts);
    pp: Option<usize> = row(RANKS, Kind::Optional(&Kind::Count { min: 1, max: PARTS_MAX }),
        "Ranks that share the blocks of a model and work on different micro-batches at once (pipeline parallelism; language models and \
         programs that can); the bits stay the same")
        .unset("whole models").needs(Need::LanguageModel);
    schedule: Schedule = row(RANKS, Kind::Word(&["gpipe", "1f1b", "interleaved", "zb-h1"]),
        "Order of a pipeline's work: gpipe, 1f1b with less memory, interleaved with shorter waits, or zb-h1, which computes gradients \
         of weights in waits")
        .or("1f1b").needs(Need::Stages);
    pp_chunks: usize = row(RANKS, Kind::Count { min: 1, max: PARTS_MAX },
        "Stages of each rank of a pipeline with --schedule interleaved")
        .or("2").needs(Need::Stages);
    pp_cuts: Option<String> = row(RANKS, Kind::Optional(&Kind::Text),
        "First block of each stage but the first, such as 2,4, where block 0 is the embedding and the last one the head; or cost for \
         stages that take the same time, as measured before the first step")
        .unset("even stages").needs(Need::Stages);
    threads_per_rank: usize = row(RANKS, Kind::Count { min: 0, max: 1024 },
        "Compute threads per rank; 0 divides the cores by the ranks")
        .or("0").local();
    run_dir: PathBuf = row(RUN, Kind::Path,
        "Folder for settings, metrics, logs and checkpoints")
        .derived("runs/<task>-<date>-<time>").local()
        .also(&["output_dir", "log_dir"]);
    checkpoint_dir: Option<String> = row(RUN, Kind::Optional(&Kind::Text),
        "URL of an object store that also gets each checkpoint: s3://BUCKET/PATH, gs://BUCKET/PATH or file:///FOLDER; \
         each run needs its own (build with --features object-store)")
        .unset("none").local()
        .also(&["ckpt_dir", "dirpath", "storage_path"]);
    mlflow: Option<String> = row(RUN, Kind::Optional(&Kind::Text),
        "URL of an MLflow tracking server that also gets settings and metrics: http://HOST:PORT")
        .local()
        .also(&["mlflow_tracking_uri", "tracking_uri"]);
    resume: bool = row(RUN, Kind::PathOrSwitch,
        "Resume the run in this folder or at this --checkpoint-dir, else in --run-dir, else the newest below runs/; \
         auto resumes in --run-dir if it or --checkpoint-dir has a checkpoint, else starts a new run there")
        .or("false").local()
        .also(&["resume_from_checkpoint"]);
    evaluate_every: u64 = row(RUN, Kind::Count { min: 0, max: STEPS_MAX },
        "Steps between evaluations within an epoch; 0 evaluates only at the end of each epoch")
        .or("0");
    save_every: u64 = row(RUN, Kind::Count { min: 0, max: STEPS_MAX },
        "Steps between checkpoints within an epoch; 0 saves only at the end of each epoch")
        .or("0")
        .also(&["save_steps"]);
    memory_checkpoint: u64 = row(RUN, Kind::Count { min: 0, max: STEPS_MAX },
        "Steps between checkpoints in memory, from which ranks that start again go on; with several nodes another one has a copy; 0 makes none")
        .or("0").needs(Need::Restarts);
    snapshot_every: u64 = row(RUN, Kind::Count { min: 0, max: STEPS_MAX },
        "Steps between copies of the state in memory, to which all ranks go back if one has wrong weights; 0 keeps none; \
         100 with --non-finite back")
        .or("0");
    keep: usize = row(RUN, Kind::Count { min: 1, max: 10_000 },
        "Newest checkpoints to keep, besides the best one")
        .or("3").local();
    max_restarts: u32 = row(RUN, Kind::Count { min: 0, max: 10_000 },
        "Number of restarts of a failed job from its newest checkpoint, and of replacements of lost ranks with --recovery live")
        .or("0").local().needs(Need::Launcher);
    recovery: Recovery = row(RUN, Kind::Word(&["auto", "live", "restart", "none"]),
        "When a rank is lost: live has the others go on (replicas on the CPU; else as restart), \
         restart starts all again as often as --max-restarts says, none ends the job; auto is live where it can be")
        .or("auto").needs(Need::Group);
    exclude_stragglers: Option<usize> = row(RUN, Kind::Optional(&Kind::Count { min: 1, max: PARTS_MAX }),
        "With --recovery live, a rank leaves that stays so slow that the others are faster without it, as long as N ranks are left")
        .needs(Need::Group);
    record: Option<u64> = row(RUN, Kind::Optional(&Kind::Count { min: 1, max: STEPS_MAX }),
        "Steps whose gradients each rank keeps as digests, the last ones, for `paceline replay`").built_in();
    timeout_seconds: TimeoutSeconds = row(TUNING, Kind::Auto(&Kind::Count { min: 1, max: 86_400 }),
        "Seconds that a rank waits for the others before one counts as hung; auto follows the duration of the steps, evaluation and \
         saving included")
        .or("60").local();
    workers: usize = row(TUNING, Kind::Count { min: 1, max: 64 },
        "Threads per rank that load samples")
        .or("1").local()
        .also(&["num_workers"]);
    bucket_cap_mb: f64 = row(TUNING, Kind::NumberAbove { min: 0.0, max: 4096.0 },
        "Size of a gradient bucket in MiB")
        .or("25").needs(Need::Group);
    fingerprint_every: u64 = row(TUNING, Kind::Count { min: 1, max: STEPS_MAX },
        "Steps between checks that all ranks hold the same weights")
        .or("1").needs(Need::Group);
    trace: Option<u64> = row(TUNING, Kind::Optional(&Kind::Count { min: 0, max: STEPS_MAX }),
        "Step to record as a trace for Perfetto, counted from 0")
        .local();
    usage: String = row(USAGE, Kind::Word(&["auto", "on", "off"]),
        "Print at the end how long devices and ranks were busy at the same time; auto does so for jobs of at least 10 s")
        .or("auto").local().needs(Need::Launcher);
    usage_json: Option<PathBuf> = row(USAGE, Kind::Path, "Write the usage summary and more as JSON").local().needs(Need::Launcher);
    usage_csv: Option<PathBuf> = row(USAGE, Kind::Path,
        "Write every sample as CSV, ten per second: about 0.1 GB per day and device")
        .local().needs(Need::Launcher);
    usage_svg: Option<PathBuf> = row(USAGE, Kind::Path, "Draw utilisation over time as SVG").local().needs(Need::Launcher);
    lang: Option<String> = row(USAGE, Kind::Optional(&Kind::Word(&Lang::NAMES)),
        "Language of the usage summary and picture, of notices, and of the report of a failure")
        .unset("the locale's, else en").local().needs(Need::Launcher);
}
