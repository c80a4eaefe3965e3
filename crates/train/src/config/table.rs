//! The table of settings: one row each, the source of flags, variables, file keys, checks and help.

use paceline_usage::Lang;

use super::kind::{Bounds, Kind};

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
    /// Whether a resumed run may change it.
    pub on_resume: OnResume,
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

/// Whether a resumed run may change a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnResume {
    /// It keeps the run's value; the text says why.
    Fixed(&'static str),
    /// It keeps the run's value unless another is set.
    Free,
}

impl OptionRow {
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

/// The default of a feature that is off.
pub(super) const NONE: &str = "none";

/// The prefix of all the project's variables.
pub(super) const VARIABLE_PREFIX: &str = "PACELINE_";

const TASK: &str = "Task and data";
const LEARNING: &str = "Learning";
const MODEL: &str = "Language model";
const RANKS: &str = "Ranks and devices";
const RUN: &str = "Run directory and checkpoints";
const TUNING: &str = "Tuning and diagnosis";
const USAGE: &str = "Usage";

const SAMPLES: &str = "the run's samples come from that data";
const SCHEDULE: &str = "the learning-rate schedule spans the whole run";
const WEIGHTS: &str = "the saved weights belong to that model";
const OPTIMIZER: &str = "all steps of the run use the same optimizer settings";
const ORDER: &str = "it decides which samples the remaining steps read";
const BITS: &str = "it decides the order of additions, and with it the bits of the result";

/// A row with the most common properties; each method below changes one.
const fn row(key: &'static str, group: &'static str, kind: Kind, help: &'static str) -> OptionRow {
    OptionRow {
        key,
        group,
        kind,
        fallback: Fallback::Unset(NONE),
        help,
        must_agree: true,
        on_resume: OnResume::Free,
    }
}

impl OptionRow {
    const fn or(self, value: &'static str) -> Self {
        Self {
            fallback: Fallback::Value(value),
            ..self
        }
    }

    const fn unset(self, meaning: &'static str) -> Self {
        Self {
            fallback: Fallback::Unset(meaning),
            ..self
        }
    }

    const fn derived(self, how: &'static str) -> Self {
        Self {
            fallback: Fallback::Derived(how),
            ..self
        }
    }

    const fn fixed(self, why: &'static str) -> Self {
        Self {
            on_resume: OnResume::Fixed(why),
            ..self
        }
    }

    /// Each rank, or each machine, may have its own value.
    const fn local(self) -> Self {
        Self {
            must_agree: false,
            ..self
        }
    }
}

/// Every setting of a training job, in the order of the help.
#[rustfmt::skip] // a table: one row a setting
pub static OPTIONS: [OptionRow; 48] = [
    row("task", TASK, Kind::Word(&["digits", "idx", "csv", "lm"]),
        "Task: built-in digits, an MNIST-format IDX folder, a CSV file with a header, or a language model")
        .derived("digits, or guessed from --data").fixed(SAMPLES),
    row("data", TASK, Kind::Path,
        "Training data: an IDX folder, a CSV file, or a text file or folder")
        .local().fixed(SAMPLES),
    row("label_column", TASK, Kind::Text,
        "CSV column with the label")
        .unset("the column named label").fixed(SAMPLES),
    row("model", LEARNING, Kind::Word(&["tiny", "small", "base", "gpt-1m", "gpt-10m", "gpt-124m"]),
        "Size of the network: tiny, small, base; a GPT with about this many parameters for lm")
        .derived("small, or gpt-1m for lm").fixed(WEIGHTS),
    row("epochs", LEARNING, Kind::Count { min: 1, max: 1_000_000 },
        "Passes over the training data")
        .or("15").fixed(SCHEDULE),
    row("global_batch", LEARNING, Kind::Count { min: 1, max: 1 << 24 },
        "Samples in one optimizer step, all ranks together")
        .derived("64, or 8 for lm").fixed(ORDER),
    row("lr", LEARNING, Kind::Number(Bounds::above(0.0, 100.0)),
        "Highest learning rate, reached after the warm-up")
        .or("0.003").fixed(SCHEDULE),
    row("weight_decay", LEARNING, Kind::Number(Bounds::from(0.0, 1.0)),
        "AdamW's decoupled weight decay, a fraction of the weight per unit of learning rate")
        .or("0.01").fixed(OPTIMIZER),
    row("warmup", LEARNING, Kind::Number(Bounds::from(0.0, 1.0)),
        "Fraction of all steps over which the learning rate rises")
        .or("0.1").fixed(SCHEDULE),
    // TOML integers end at i64::MAX, and a seed must survive saving.
    row("seed", LEARNING, Kind::Count { min: 0, max: i64::MAX as u64 },
        "Seed of the weights, the sample order and all other randomness")
        .or("0").fixed(ORDER),
    row("accumulate", LEARNING, Kind::Count { min: 1, max: PARTS_MAX },
        "Micro-batches per shard, to save memory; the global batch stays the same")
        .or("1").fixed(BITS),
    row("clip_norm", LEARNING, Kind::Optional(&Kind::Number(Bounds::above(0.0, 1e9))),
        "Largest norm of the whole gradient; larger gradients are scaled down to it")
        .fixed(OPTIMIZER),
    row("precision", LEARNING, Kind::Word(&["f32", "bf16", "fp16"]),
        "Compute type of the layers; weights stay f32; fp16 scales the loss")
        .or("f32").fixed(OPTIMIZER),
    row("tokenizer", MODEL, Kind::Text,
        "Tokens of the text: bytes, bpe trained on it, or a tokenizer.json in Hugging Face's format")
        .unset("bytes").fixed(WEIGHTS),
    row("vocab", MODEL, Kind::Optional(&Kind::Count { min: 257, max: 1 << 20 }),
        "Different tokens of --tokenizer bpe")
        .unset("1024").fixed(WEIGHTS),
    row("context", MODEL, Kind::Optional(&Kind::Count { min: 1, max: 1 << 20 }),
        "Tokens of a sequence")
        .unset("from --model").fixed(WEIGHTS),
    row("layers", MODEL, Kind::Optional(&Kind::Count { min: 1, max: 4096 }),
        "Transformer blocks")
        .unset("from --model").fixed(WEIGHTS),
    row("heads", MODEL, Kind::Optional(&Kind::Count { min: 1, max: 4096 }),
        "Attention heads of a block; they divide the width")
        .unset("from --model").fixed(WEIGHTS),
    row("width", MODEL, Kind::Optional(&Kind::Count { min: 1, max: 1 << 16 }),
        "Values that represent a token between blocks")
        .unset("from --model").fixed(WEIGHTS),
    row("dropout", MODEL, Kind::Optional(&Kind::Number(Bounds::from(0.0, 0.99))),
        "Share of values that dropout sets to zero")
        .unset("from --model").fixed(OPTIMIZER),
    row("recompute", MODEL, Kind::Text,
        "Blocks that compute their forward pass again in the backward pass, to save memory: none, blocks for all, N for every \
         N-th, or burn for Burn's own strategy")
        .unset(NONE),
    row("nproc_per_node", RANKS, Kind::CountOr { word: "auto", min: 1, max: PARTS_MAX },
        "Ranks on this machine; auto is one per core, at most two, or one per GPU")
        .or("auto").local(),
    row("use_gpu", RANKS, Kind::Count { min: 0, max: 1024 },
        "GPUs to train on, one rank each; 0 trains on the CPU or the kind in --device")
        .or("0").local(),
    // Not fixed: the GPU model and its driver affect the result's bits too, and those cannot be fixed.
    row("device", RANKS, Kind::Word(&["auto", "cpu", "cuda", "vulkan", "metal", "rocm"]),
        "Kind of device; auto is the CPU, or the best kind of GPU with --use-gpu")
        .or("auto"),
    row("shards", RANKS, Kind::Count { min: 1, max: PARTS_MAX },
        "Shards per step; any number of ranks up to it gives the same bits")
        .derived("one per rank").fixed(BITS),
    row("strategy", RANKS, Kind::Word(&["ddp", "single"]),
        "Parallelism: ddp averages gradients over ranks, single uses one rank without a group")
        .or("ddp"),
    row("transport", RANKS, Kind::Word(&["auto", "shm", "tcp"]),
        "Transport between ranks: shared memory, TCP, or auto by host")
        .or("auto"),
    row("backend", RANKS, Kind::Word(&["auto", "host", "nccl"]),
        "Path of gradients between GPUs: NCCL or host memory; auto is NCCL on CUDA devices")
        .or("auto"),
    row("reduction", RANKS, Kind::Word(&["tree", "ring"]),
        "Order of NCCL's additions: tree gives the same bits on any number of ranks, ring is NCCL's own order")
        .or("tree").fixed(BITS),
    row("wire", RANKS, Kind::Word(&["f32", "bf16"]),
        "Number format of gradients between ranks; bf16 halves the bytes but rounds")
        .or("f32").fixed(BITS),
    row("zero", RANKS, Kind::Word(&["0", "1", "2"]),
        "Stage of ZeRO: 1 deals the optimizer's state to the ranks, 2 the gradients too; the bits stay the same")
        .or("0"),
    row("threads_per_rank", RANKS, Kind::Count { min: 0, max: 1024 },
        "Compute threads per rank; 0 divides the cores by the ranks")
        .or("0").local(),
    row("run_dir", RUN, Kind::Path,
        "Folder for settings, metrics, logs and checkpoints")
        .derived("runs/<task>-<date>-<time>").local(),
    row("resume", RUN, Kind::PathOrSwitch,
        "Resume the run in this folder, else in --run-dir, else the newest below runs/; \
         auto resumes in --run-dir if it has a checkpoint, else starts a new run there")
        .or("false").local(),
    row("evaluate_every", RUN, Kind::Count { min: 0, max: STEPS_MAX },
        "Steps between evaluations within an epoch; 0 evaluates only at the end of each epoch")
        .or("0"),
    row("save_every", RUN, Kind::Count { min: 0, max: STEPS_MAX },
        "Steps between checkpoints within an epoch; 0 saves only at the end of each epoch")
        .or("0"),
    row("keep", RUN, Kind::Count { min: 1, max: 10_000 },
        "Newest checkpoints to keep")
        .or("3").local(),
    row("max_restarts", RUN, Kind::Count { min: 0, max: 10_000 },
        "Number of restarts of a failed job from its newest checkpoint")
        .or("0").local(),
    row("timeout_seconds", TUNING, Kind::Count { min: 1, max: 86_400 },
        "Seconds that a rank waits for the others before the job fails")
        .or("60").local(),
    row("workers", TUNING, Kind::Count { min: 1, max: 64 },
        "Threads per rank that load samples")
        .or("1").local(),
    row("bucket_cap_mb", TUNING, Kind::Number(Bounds::above(0.0, 4096.0)),
        "Size of a gradient bucket in MiB")
        .or("25"),
    row("fingerprint_every", TUNING, Kind::Count { min: 1, max: STEPS_MAX },
        "Steps between checks that all ranks hold the same weights")
        .or("1"),
    row("trace", TUNING, Kind::Optional(&Kind::Count { min: 0, max: STEPS_MAX }),
        "Step to record as a trace for Perfetto, counted from 0")
        .local(),
    row("usage", USAGE, Kind::Word(&["auto", "on", "off"]),
        "Print at the end how long devices and ranks were busy at the same time; auto does so for jobs of at least 10 s")
        .or("auto").local(),
    row("usage_json", USAGE, Kind::Path, "Write the usage summary and more as JSON").local(),
    row("usage_csv", USAGE, Kind::Path,
        "Write every sample as CSV, ten per second: about 0.1 GB per day and device")
        .local(),
    row("usage_svg", USAGE, Kind::Path, "Draw utilisation over time as SVG").local(),
    row("lang", USAGE, Kind::Optional(&Kind::Word(&Lang::NAMES)),
        "Language of the usage summary and picture")
        .unset("the locale's, else en").local(),
];
