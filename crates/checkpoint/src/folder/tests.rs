use std::collections::BTreeMap;
use std::fs::File;

use burn::optim::SgdConfig;
use burn::tensor::{DType, TensorData};
use paceline_ddp::DdpState;
use paceline_ddp::sampler::{BatchLayout, Padding, SamplerState};

use super::*;
use crate::checkpoint::write_tensors;
use crate::saved::SavedModel;
use crate::tensors::Stored;

/// What a test saves.
pub(crate) struct Parts {
    pub(crate) weights: Vec<(String, TensorData)>,
    metadata: BTreeMap<String, String>,
    optimizers: Vec<Vec<u8>>,
    hook: Vec<(String, TensorData)>,
    schedule: Vec<u8>,
    pub(crate) state: State,
}

pub(crate) fn save(folder: &Path, keep: usize, parts: Parts) -> Result<PathBuf, CheckpointError> {
    let writing = Writing::begin(folder, parts.state.ddp.step)?;
    let place = |name: &str| writing.path().join(name);
    let write = || {
        let create = |name| File::create(place(name));
        write_tensors(&create(files::WEIGHTS)?, &parts.weights, parts.metadata)?;
        write_tensors(&create(files::HOOK)?, &parts.hook, BTreeMap::new())?;
        for (rank, state) in parts.optimizers.iter().enumerate() {
            fs::write(place(&files::optimizer_of(rank)), state)?;
        }
        fs::write(place(files::SCHEDULE), parts.schedule)
    };
    write().map_err(writing.failed())?;
    writing.finish(keep, parts.state)
}

/// The tensors in the order of their paths.
fn read(stored: &[Stored]) -> Vec<(String, TensorData)> {
    let read = stored
        .iter()
        .map(|tensor| (tensor.name.clone(), tensor.read().expect("read")));
    let mut read: Vec<_> = read.collect();
    read.sort_by(|(a, _), (b, _)| a.cmp(b));
    read
}

pub(crate) fn contents(step: u64) -> Parts {
    Parts {
        weights: vec![
            ("a".into(), TensorData::new(vec![1.0f32, step as f32], [2])),
            ("b".into(), TensorData::new(vec![1i64, 2, 3, 4], [2, 2])),
            ("mask".into(), TensorData::new(vec![true, false], [2])),
        ],
        metadata: [("classes".to_string(), "[\"cat\"]".to_string())].into(),
        optimizers: vec![vec![7; 100], vec![9; 100]],
        hook: vec![("factor/a".into(), TensorData::new(vec![0.5f32, -0.0], [2]))],
        schedule: vec![8; 10],
        state: State {
            ddp: DdpState {
                step,
                seed: u64::MAX,
                scaler: None,
            },
            sampler: Some(SamplerState {
                seed: 1,
                epoch: 2,
                consumed: 3,
                layout: BatchLayout {
                    len: 10,
                    shards: 1,
                    global_batch: 1,
                    shuffle: true,
                    drop_last: false,
                    padding: Padding::None,
                },
            }),
            value: serde_json::json!({ "best": 0.1 }),
            parameters: [("a".to_string(), u64::MAX)].into(),
            ..State::default()
        },
    }
}

fn folder_with(steps: &[u64]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for step in steps {
        save(folder.path(), 10, contents(*step)).expect("saved");
    }
    folder
}

fn found(folder: &Path) -> Newest<Contents> {
    newest(&[folder], u64::MAX)
        .expect("readable")
        .expect("a checkpoint")
}

#[test]
fn a_saved_checkpoint_is_read_back() {
    let folder = folder_with(&[5]);
    let found = found(folder.path());
    assert!(found.path.ends_with("step-0000000005"));
    assert!(found.damaged.is_empty());
    let (found, saved) = (found.contents, contents(5));
    assert_eq!(read(&found.weights), saved.weights);
    assert_eq!(found.metadata, saved.metadata);
    let optimizers = found.optimizers.iter();
    let optimizers = optimizers.map(|path| fs::read(path).expect("read"));
    assert_eq!(optimizers.collect::<Vec<_>>(), saved.optimizers);
    assert_eq!(read(&found.hook), saved.hook);
    assert_eq!(found.schedule.as_deref(), Some(&saved.schedule[..]));
    assert_eq!(found.state.ddp, saved.state.ddp);
    assert_eq!(found.state.sampler, saved.state.sampler);
    assert_eq!(found.state.value, saved.state.value);
    assert_eq!(found.state.parameters, saved.state.parameters);
}

#[test]
fn a_checkpoint_of_version_1_has_its_values_beside_the_others() {
    let folder = folder_with(&[5]);
    let place = folder.path().join("step-0000000005/state.json");
    let text = fs::read(&place).expect("a state");
    let mut state: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&text).expect("JSON");
    state.remove("value");
    state.remove("parameters");
    state.insert("version".into(), 1.into());
    state.insert("total_steps".into(), 100.into());
    state.insert("epoch_sums".into(), serde_json::json!([0.1, 2.0]));
    fs::write(&place, serde_json::to_vec(&state).expect("JSON")).expect("written");

    let state = found(folder.path()).contents.state;
    assert_eq!(state.value["epoch_sums"], serde_json::json!([0.1, 2.0]));
    assert!(state.parameters.is_empty());
    assert_eq!(state.sampler, contents(5).state.sampler);
}

#[test]
fn the_newest_whole_checkpoint_is_found_whatever_happened_to_later_ones() {
    type Damage = fn(&Path);
    let damage: [(&str, Damage, &str); 6] = [
        (
            "truncated",
            |path| {
                let mut file = fs::OpenOptions::new();
                let file = file.write(true).open(path.join("model.safetensors"));
                file.expect("open").set_len(10).expect("cut");
            },
            "model.safetensors does not have the checksum",
        ),
        (
            "flipped",
            |path| {
                let place = path.join("optimizer.burnpack");
                let mut bytes = fs::read(&place).expect("read");
                bytes[50] ^= 1;
                fs::write(place, bytes).expect("write");
            },
            "optimizer.burnpack does not have the checksum",
        ),
        (
            "no state",
            |path| fs::remove_file(path.join("state.json")).expect("remove"),
            "state.json: No such file",
        ),
        (
            "half a state",
            |path| fs::write(path.join("state.json"), b"{\"version\": 1,").expect("write"),
            "state.json is damaged",
        ),
        (
            "another version",
            |path| {
                let place = path.join("state.json");
                let text = fs::read_to_string(&place).expect("read");
                let text = text.replace("\"version\": 2", "\"version\": 99");
                fs::write(place, text).expect("write");
            },
            "state.json has version 99, but this program reads 1 to 2",
        ),
        (
            "a huge state",
            |path| {
                let mut file = fs::OpenOptions::new();
                let file = file.write(true).open(path.join("state.json"));
                file.expect("open").set_len(1 << 40).expect("a sparse file");
            },
            "state.json has 1099511627776 bytes, more than",
        ),
    ];
    for (what, damage, reason) in damage {
        let folder = folder_with(&[9, 10, 100]);
        damage(&folder.path().join("step-0000000100"));
        let found = found(folder.path());
        assert!(found.path.ends_with("step-0000000010"), "{what}");
        assert_eq!(found.contents.state.ddp.step, 10);
        assert_eq!(found.damaged.len(), 1, "{what}");
        assert!(found.damaged[0].contains(reason), "{:?}", found.damaged);
    }
}

#[test]
fn a_folder_without_a_whole_checkpoint_says_what_is_wrong_with_each() {
    let folder = folder_with(&[1]);
    let weights = folder.path().join("step-0000000001/model.safetensors");
    fs::remove_file(weights).expect("remove");
    let error = newest(&[folder.path()], u64::MAX)
        .err()
        .expect("nothing to read");
    let error = error.to_string();
    assert!(
        error.contains("no valid checkpoint") && error.contains("model.safetensors"),
        "{error}"
    );
    let nowhere = newest(&[Path::new("/nonexistent")], u64::MAX).expect("no checkpoint, no error");
    assert!(nowhere.is_none());
}

#[test]
fn old_checkpoints_and_leftovers_of_interrupted_writes_go() {
    let folder = folder_with(&[1, 2, 3]);
    fs::create_dir(folder.path().join(".writing-abc")).expect("leftover");
    save(folder.path(), 2, contents(4)).expect("saved");
    let names: Vec<String> = fs::read_dir(folder.path())
        .expect("list")
        .map(|entry| entry.expect("entry").file_name().to_string_lossy().into())
        .collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(names.contains(&"step-0000000003".into()));
    assert!(names.contains(&"step-0000000004".into()));
}

#[test]
fn the_best_checkpoint_is_kept_besides_the_newest_until_there_is_a_better_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let save = |step, best_step| {
        let mut parts = contents(step);
        parts.state.best_step = best_step;
        let optimizer = SgdConfig::new().init().into_bytes().expect("it encodes");
        parts.optimizers = vec![optimizer.to_vec()];
        save(folder.path(), 2, parts).expect("saved");
        let steps = list(folder.path());
        steps
            .iter()
            .filter_map(|path| step_of(path))
            .collect::<Vec<_>>()
    };
    let best = || {
        let best = SavedModel::best(folder.path())?;
        Ok::<_, CheckpointError>(best.and_then(|best| step_of(best.path())))
    };
    assert_eq!(save(1, None), [1]);
    assert_eq!(best().expect("readable"), None);
    assert_eq!(save(2, Some(2)), [1, 2]);
    assert_eq!(save(3, Some(2)), [2, 3]);
    assert_eq!(save(4, Some(2)), [2, 3, 4]);
    assert_eq!(save(5, Some(5)), [4, 5]);
    assert_eq!(save(6, Some(6)), [5, 6]);
    assert_eq!(best().expect("readable"), Some(6));
    // The job goes back, and what was the best before is so again.
    remove_after(folder.path(), 5);
    assert_eq!(best().expect("readable"), Some(5));
    fs::remove_file(folder.path().join("step-0000000005/model.safetensors")).expect("torn");
    best().expect_err("the best is damaged");
}

#[test]
fn a_best_checkpoint_that_is_gone_is_an_error_and_not_an_older_one() {
    let folder = tempfile::tempdir().expect("a folder");
    for (step, best) in [(1, 1), (3, 2)] {
        let mut parts = contents(step);
        parts.state.best_step = Some(best);
        save(folder.path(), 3, parts).expect("saved");
    }
    let error = SavedModel::best(folder.path()).expect_err("step 2 was never saved");
    assert!(
        error.to_string().contains("step-0000000002, the best: "),
        "{error}"
    );
}

#[test]
fn a_step_saved_twice_is_replaced() {
    let folder = folder_with(&[4]);
    fs::remove_file(folder.path().join("step-0000000004/state.json")).expect("torn");
    save(folder.path(), 3, contents(4)).expect("saved again");
    assert_eq!(found(folder.path()).contents.state.ddp.step, 4);
}

#[test]
fn the_only_checkpoint_counts_until_another_one_of_its_step_has_its_place() {
    let folder = folder_with(&[4]);
    let place = folder.path().join("step-0000000004");
    // What a save leaves that is killed between two renames.
    fs::rename(&place, folder.path().join("step-0000000004.old")).expect("renamed");
    fs::create_dir(folder.path().join(".writing-abc")).expect("the new one");
    let newest = found(folder.path());
    assert_eq!(newest.contents.state.ddp.step, 4);
    assert!(newest.damaged.is_empty());
    save(folder.path(), 1, contents(4)).expect("saved again");
    assert_eq!(list(folder.path()), [place]);
    assert_eq!(fs::read_dir(folder.path()).expect("list").count(), 1);
}

#[test]
fn a_reader_finds_a_whole_checkpoint_while_a_job_keeps_one_only() {
    let folder = folder_with(&[0]);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for step in 1..60 {
                // Every second one replaces another of its step.
                save(folder.path(), 1, contents(step / 2)).expect("saved");
            }
        });
        while !writer.is_finished() {
            let newest = newest_by(&[folder.path()], u64::MAX, |path| {
                let contents = files::read(path)?;
                let weights = contents.weights.iter().map(Stored::read);
                let weights: io::Result<Vec<_>> = weights.collect();
                weights.map_err(|error| error.to_string())
            });
            let newest = newest.expect("one is whole").expect("a checkpoint");
            assert_eq!(newest.damaged, [""; 0]);
        }
    });
}

#[test]
fn a_failed_write_leaves_the_earlier_checkpoint() {
    let folder = folder_with(&[1]);
    let mut bad = contents(2);
    let flex32 = TensorData::from_bytes_vec(vec![0; 4], [1], DType::Flex32);
    bad.weights.push(("c".into(), flex32));
    let error = save(folder.path(), 1, bad).expect_err("a type that cannot be saved");
    assert!(
        error.to_string().starts_with("cannot write checkpoint"),
        "{error}"
    );
    assert_eq!(found(folder.path()).contents.state.ddp.step, 1);
    assert_eq!(fs::read_dir(folder.path()).expect("list").count(), 1);
}
