//! Whole jobs on threads, with a rank whose weights go wrong.

use std::path::Path;
use std::sync::Mutex;

use burn::module::Module;
use burn::tensor::TensorData;
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::weights;

use super::{End, train};
use crate::config::{Given, Inputs, JobShape, Surroundings, TrainConfig};
use crate::console::Output;
use crate::run_dir;

/// The rank and the step whose weights get another bit, once.
static FAULT: Mutex<Option<(usize, u64)>> = Mutex::new(None);

/// `net` at the start of a step.
pub(super) fn disturbed<M: Module>(net: M, rank: usize, step: u64) -> M {
    let mut fault = FAULT.lock().expect("no test has panicked");
    if fault.take_if(|fault| *fault == (rank, step)).is_none() {
        return net;
    }
    let (path, data) = weights::export(&net).swap_remove(0);
    let mut values: Vec<f32> = data.try_to_vec().expect("f32");
    values[0] = f32::from_bits(values[0].to_bits() ^ (1 << 20));
    let wrong = TensorData::new(values, data.shape().clone());
    weights::import(net, [(path, wrong)].into())
}

fn config(run: &Path, world: usize) -> TrainConfig {
    let flags = [
        ("model", "tiny"),
        ("epochs", "2"),
        ("shards", "3"),
        ("snapshot_every", "10"),
        ("save_every", "4"),
        ("run_dir", run.to_str().expect("a plain path")),
    ];
    let inputs = Inputs {
        flags: flags.map(|(key, value)| (key.into(), value.into())).into(),
        ..Inputs::default()
    };
    let surroundings = Surroundings {
        job: Some(JobShape {
            world,
            local_world: world,
            recovers_live: false,
        }),
        ..Surroundings::of_process()
    };
    let resolved = Given::read(&inputs).expect("valid");
    let resolved = resolved.resolve(None, &surroundings).expect("valid");
    resolved.config().clone()
}

#[test]
fn a_job_goes_back_from_wrong_weights_and_each_step_counts_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = config(folder.path(), 3);
    *FAULT.lock().expect("no test has panicked") = Some((2, 25));
    let groups = ProcessGroup::local(3, &GroupOptions::default()).expect("a local group");
    // Weights that differ at the end would be an error.
    let ends = paceline_testing::on_threads(groups, |group| {
        train(&config, group, Output::Json).expect("it ends well")
    });
    assert_eq!(ends, [End::Finished; 3]);
    let lines = std::fs::read_to_string(folder.path().join("metrics.jsonl")).expect("metrics");
    let records = lines.lines().map(|line| {
        let record: serde_json::Value = serde_json::from_str(line).expect("JSON");
        record
    });
    let steps = records.filter(|record| record["kind"] == "step");
    let steps: Vec<u64> = steps.filter_map(|record| record["step"].as_u64()).collect();
    assert_eq!(steps, (1..=46).collect::<Vec<_>>());
    let ledger = paceline_checkpoint::ledger::audit(&run_dir::checkpoints(folder.path()));
    let ledger = ledger.expect("a ledger");
    assert_eq!(ledger.faults, []);
    assert_eq!(ledger.steps, 46);
    assert!(ledger.rolled_back > 0, "it has gone back");
}
