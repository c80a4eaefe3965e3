//! Files of digests that are cut, torn, repeated and damaged.

use super::*;

/// A step of shards 2 and 3 on rank 1, whose digests are told apart by `salt`.
fn shards(step: u64, salt: u64) -> Vec<ShardDigests> {
    let shard = |shard| ShardDigests {
        shard,
        rank: 1,
        tensors: vec![step, shard as u64, salt, u64::MAX],
    };
    [2, 3].map(shard).to_vec()
}

fn open(folder: &Path, keep: u64) -> Recorder {
    let keep = NonZeroU64::new(keep).expect("not 0");
    Recorder::open(folder, 1, keep).expect("opened")
}

fn read(folder: &Path) -> Recorded {
    Recorded::read(folder, 0..=u64::MAX).expect("readable")
}

#[test]
fn the_last_steps_are_kept_over_restarts_and_no_more_than_twice_as_many() {
    let folder = tempfile::tempdir().expect("a folder");
    assert_eq!(read(folder.path()).steps(), None);
    let mut recorder = open(folder.path(), 5);
    for step in 1..=23 {
        if step % 7 == 0 {
            recorder = open(folder.path(), 5);
        }
        recorder.append(step, 0, shards(step, 0)).expect("written");
        let (first, last) = read(folder.path()).steps().expect("some");
        let kept = last + 1 - first;
        assert_eq!(last, step);
        assert!((step.min(5)..=10).contains(&kept), "{kept} after {step}");
    }
    let some = Recorded::read(folder.path(), 20..=21).expect("readable");
    assert_eq!(some.steps(), Some((16, 23)));
    let steps: Vec<_> = some.shards.keys().copied().collect();
    assert_eq!(steps, [(20, 2), (20, 3), (21, 2), (21, 3)]);
    assert_eq!(some.shards[&(21, 3)].digests, [21, 3, 0, u64::MAX]);
    assert_eq!((some.ranks(21), some.ranks(22)), (vec![1], vec![]));
}

#[test]
fn a_step_that_is_done_again_counts_as_it_was_done_last() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("digests/rank-1.jsonl");
    let mut recorder = open(folder.path(), 100);
    for step in 1..=4 {
        let written = recorder.append(step, 0, shards(step, 0));
        written.expect("written");
    }
    // Killed while it wrote, and resumed after step 2.
    let text = fs::read(&path).expect("a file");
    fs::write(&path, &text[..text.len() - 9]).expect("written");
    let torn = read(folder.path());
    assert!(torn.shards.contains_key(&(4, 2)) && !torn.shards.contains_key(&(4, 3)));
    let mut recorder = open(folder.path(), 100);
    recorder.append(3, 2, shards(3, 7)).expect("written");
    let recorded = read(folder.path());
    let again = &recorded.shards[&(3, 2)];
    assert_eq!((again.digests[2], again.generation), (7, 2));
    assert_eq!(recorded.shards[&(4, 2)].digests[2], 0);
}

#[test]
fn a_damaged_file_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("digests/rank-1.jsonl");
    let mut recorder = open(folder.path(), 100);
    recorder.append(1, 0, shards(1, 0)).expect("written");
    let text = fs::read_to_string(&path).expect("a file");
    fs::write(&path, text.replacen("ffff", "fffe", 1)).expect("written");
    let error = Recorded::read(folder.path(), 1..=1).expect_err("damaged");
    let error = error.to_string();
    assert!(
        error.contains("rank-1.jsonl: line 2 was changed"),
        "{error}"
    );
    for odd in ["12", "0123456789abcdeg", "+123456789abcdef"] {
        let read: Result<Digests, _> = serde_json::from_value(odd.into());
        assert!(read.is_err(), "{odd}");
    }
}
