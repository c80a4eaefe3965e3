//! From settings to the sampler, the options of `Ddp`, threads, and the settings that must be equal on all ranks.

use std::num::{NonZeroU64, NonZeroUsize};

use burn::tensor::Device;
use paceline_checkpoint::Checkpoints;
use paceline_collective::ProcessGroup;
use paceline_ddp::device;
use paceline_ddp::loader::LoaderOptions;
use paceline_ddp::sampler::{
    BatchOptions, DistributedSampler, SamplerOptions, SamplerState, ShardedBatches,
};
use paceline_ddp::{BucketCaps, DdpOptions, GradScaler, Precision};
use paceline_nn::Kernels;
use paceline_rendezvous::env::Timeout;

use crate::config::{self, NonFinite, Recovery, Strategy, TrainConfig};
use crate::error::TrainError;
use crate::run_dir;
use crate::task::{Part, TrainTask};

pub(crate) fn sharded_batches(
    config: &TrainConfig,
    samples: usize,
    state: Option<&SamplerState>,
) -> Result<ShardedBatches, TrainError> {
    let sampler = DistributedSampler::new(SamplerOptions {
        len: samples,
        shards: config.shards,
        seed: config.seed,
        drop_last: config.drop_last,
        ..SamplerOptions::default()
    })?;
    let options = BatchOptions::new(config.global_batch).epochs(config.epochs as u64);
    let mut batches = ShardedBatches::new(sampler, options)?;
    if let Some(state) = state {
        batches.load_state_dict(state)?;
    }
    Ok(batches)
}

/// How samples are read ahead: no batch may take longer than a rank may let the others wait.
pub(crate) fn loader_options(config: &TrainConfig) -> LoaderOptions {
    let defaults = LoaderOptions::default();
    LoaderOptions {
        timeout: match config.timeout() {
            Timeout::After(timeout) => timeout,
            Timeout::Auto => defaults.timeout,
        },
        ..defaults
    }
}

pub(crate) fn ddp_options<T: TrainTask>(config: &TrainConfig, task: &T) -> DdpOptions {
    let bytes = config.bucket_bytes();
    let mut settings = agreed_settings(config);
    let samples = task.len(Part::Train) + task.len(Part::HeldOut);
    let data = format!("{} of {samples} samples", task.name());
    settings.push(("data".into(), data));
    settings.extend(task.digest().map(|digest| ("data digest".into(), digest)));
    DdpOptions {
        shards: Some(config.shards),
        accumulate: config.accumulate,
        seed: config.seed,
        caps: BucketCaps {
            first_bytes: BucketCaps::default().first_bytes.min(bytes),
            bytes,
        },
        backend: config.backend,
        reduction: config.reduction,
        same_bits: config.same_bits,
        comm_hook: config.comm_hook,
        clip_norm: config.clip_norm,
        precision: config.precision,
        recompute: config.recompute(),
        // Only f16 has so small a range that losses must be scaled.
        scaler: (config.precision == Precision::F16).then(GradScaler::default),
        skip_non_finite: config.non_finite != NonFinite::Stop,
        fingerprint_every: config.fingerprint_every,
        settings,
        stop_on_signal: true,
        deferred_init: config.zero_stage().is_some(),
        recovery: match config.recovery {
            Recovery::Live => paceline_ddp::Recovery::Live,
            Recovery::Restart | Recovery::None => paceline_ddp::Recovery::None,
        },
        exclude_stragglers: config.exclude_stragglers.and_then(NonZeroUsize::new),
        record: config.record.and_then(NonZeroU64::new),
        ..DdpOptions::default()
    }
}

/// The devices of a rank, with autodiff; the first one holds the model.
pub(crate) fn open_devices(
    config: &TrainConfig,
    group: &ProcessGroup,
) -> Result<Vec<Device>, TrainError> {
    Kernels::of_process().map_err(|error| TrainError::Usage {
        message: format!("PACELINE_ISA: {error}"),
        hint: Some("or unset it: the kernels then take the widest".into()),
    })?;
    let devices = match config.strategy {
        Strategy::Ddp | Strategy::Single => {
            vec![device::open_for_rank(config.device, group.local_rank())?]
        }
        Strategy::Dp | Strategy::Model => {
            let devices = (0..config.devices).map(|index| device::open(config.device, index));
            devices.collect::<Result<_, _>>()?
        }
    };
    Ok(devices.into_iter().map(Device::autodiff).collect())
}

/// The run's checkpoints. Their metadata is the task's. Copies of them are [added](copied) once a run has resumed.
pub(crate) fn open_checkpoints<T: TrainTask>(
    config: &TrainConfig,
    task: &T,
    group: &ProcessGroup,
) -> Result<Checkpoints, TrainError> {
    let folder = run_dir::checkpoints(&config.run_dir);
    let checkpoints = Checkpoints::open(folder, group)?.keep(config.keep);
    let checkpoints = checkpoints.snapshot_every(config.snapshot_every);
    let metadata = task.metadata(config).into_iter();
    Ok(metadata.fold(checkpoints, |checkpoints, (name, value)| {
        checkpoints.metadata(name, &value)
    }))
}

/// The checkpoints, with copies at `checkpoint_dir`. A run has downloaded the newest copy before its ranks start.
pub(crate) fn copied(
    config: &TrainConfig,
    checkpoints: Checkpoints,
) -> Result<Checkpoints, TrainError> {
    match &config.checkpoint_dir {
        Some(url) => Ok(checkpoints.upload_to(url)?),
        None => Ok(checkpoints),
    }
}

/// The settings that must be the same on every rank, as `Ddp::new` compares them.
fn agreed_settings(config: &TrainConfig) -> Vec<(String, String)> {
    let values = serde_json::to_value(config).expect("settings always encode");
    let agreed = config::OPTIONS.iter().filter(|row| row.must_agree);
    agreed
        .map(|row| (row.key.to_string(), values[row.key].to_string()))
        .collect()
}

/// Sets the number of threads for Burn's kernels, if they have not started any yet.
pub fn use_threads(count: usize) {
    // An existing pool stays: the number only affects speed, and the header prints the actual one.
    let _ = (rayon::ThreadPoolBuilder::new().num_threads(count)).build_global();
}
