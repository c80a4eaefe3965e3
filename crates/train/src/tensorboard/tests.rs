//! Event files, read back by a decoder of its own and by TensorBoard's.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use super::*;
use crate::records::StepRecord;
use crate::run_dir::Metrics;

/// Values by tag, as (step, value).
type Scalars = BTreeMap<String, Vec<(u64, f32)>>;

/// The checksum by its definition, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 {
                (crc >> 1) ^ 0x82f6_3b78
            } else {
                crc >> 1
            };
        }
    }
    !crc
}

fn unmasked(masked: &[u8]) -> u32 {
    let masked = u32::from_le_bytes(masked.try_into().expect("4 bytes"));
    masked.wrapping_sub(0xa282_ead8).rotate_left(15)
}

/// The records of a file; what a crash has torn ends it.
fn records(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut found = Vec::new();
    while let Some((head, rest)) = bytes.split_at_checked(12) {
        let (len, crc) = head.split_at(8);
        assert_eq!(unmasked(crc), crc32c(len));
        let len = u64::from_le_bytes(len.try_into().expect("8 bytes")) as usize;
        let Some((record, rest)) = rest.split_at_checked(len) else {
            break;
        };
        let Some((crc, rest)) = rest.split_at_checked(4) else {
            break;
        };
        assert_eq!(unmasked(crc), crc32c(record));
        found.push(record);
        bytes = rest;
    }
    found
}

/// A field of a message.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message by number.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Field<'_>)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let (byte, rest) = bytes.split_first().expect("a varint");
            *bytes = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                break;
            }
        }
        value
    }
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let len = match key & 7 {
            0 => {
                found.push((key >> 3, Field::Number(varint(&mut bytes))));
                continue;
            }
            1 => 8,
            2 => varint(&mut bytes) as usize,
            5 => 4,
            other => panic!("wire type {other}"),
        };
        let (value, rest) = bytes.split_at(len);
        found.push((key >> 3, Field::Bytes(value)));
        bytes = rest;
    }
    found
}

/// The scalars that TensorBoard shows of a run: in the order of files, each session's start drops what is at its step and later.
fn shown(run: &Path) -> Scalars {
    let entries = fs::read_dir(run).expect("a folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let is_events = |path: &PathBuf| path.to_string_lossy().contains("tfevents");
    let mut paths: Vec<PathBuf> = paths.filter(is_events).collect();
    paths.sort();
    let mut shown = Scalars::new();
    for path in paths {
        let bytes = fs::read(path).expect("a file");
        let records = records(&bytes);
        let [(1, Field::Bytes(_)), _, (3, Field::Bytes(version))] = fields(records[0])[..] else {
            panic!("no version");
        };
        assert_eq!(version, b"brain.Event:2");
        for record in &records[1..] {
            let [
                (1, Field::Bytes(_)),
                (2, Field::Number(step)),
                (content, Field::Bytes(bytes)),
            ] = fields(record)[..]
            else {
                panic!("no event");
            };
            if content == 7 {
                assert_eq!(bytes, [8, 1]);
                shown
                    .values_mut()
                    .for_each(|values| values.retain(|(at, _)| *at < step));
                continue;
            }
            for (_, value) in fields(bytes) {
                let Field::Bytes(value) = value else {
                    panic!("no value");
                };
                let [(1, Field::Bytes(tag)), (2, Field::Bytes(scalar))] = fields(value)[..] else {
                    panic!("no scalar");
                };
                let tag = String::from_utf8(tag.to_vec()).expect("a tag");
                let scalar = f32::from_le_bytes(scalar.try_into().expect("4 bytes"));
                shown.entry(tag).or_default().push((step, scalar));
            }
        }
    }
    shown
}

/// A run that was resumed after its step 300, with figures of each kind; the same steps have other losses the second time.
fn resumed_run() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let mut metrics = Metrics::open(folder.path(), None, &[]).expect("open");
    for number in 1..=302 {
        metrics
            .write_step(StepRecord::of(number, 1.0))
            .expect("write");
    }
    metrics.flush().expect("flush");
    drop(metrics);
    let mut metrics = Metrics::open(folder.path(), Some(300), &[]).expect("open");
    let epoch = serde_json::json!({
        "kind": "epoch", "step": 301, "epoch": 1, "train_loss": 2.0, "held_out_loss": 3.0, "mae": 4.0, "samples_per_second": 256.0,
    });
    let ranks = serde_json::json!({"kind": "ranks", "step": 301, "before": 4, "now": 3});
    metrics.write_step(StepRecord::of(301, 2.0)).expect("write");
    for record in [epoch, ranks] {
        metrics.write(&record).expect("write");
    }
    metrics.flush().expect("flush");
    folder
}

#[test]
fn every_figure_has_its_tag_and_a_resumed_run_replaces_what_it_does_again() {
    let folder = resumed_run();
    let shown = shown(folder.path());
    let losses = &shown["train/loss"];
    assert_eq!(losses.len(), 301);
    assert_eq!(losses[299..], [(300, 1.0), (301, 2.0)]);
    let last = |tag: &str| shown[tag].last().copied();
    for (tag, value) in [
        ("train/lr", 0.5),
        ("train/epoch", 1.0),
        ("train/step_seconds", 0.25),
        ("train/samples_per_second", 256.0),
        ("train/waited_share", 0.5),
        ("train/ranks", 3.0),
        ("held_out/loss", 3.0),
        ("held_out/mae", 4.0),
        ("epoch/train_loss", 2.0),
        ("epoch/samples_per_second", 256.0),
    ] {
        assert_eq!(last(tag), Some((301, value)), "{tag}");
    }
    assert_eq!(shown.len(), 11, "{:?}", shown.keys());
}

#[test]
fn a_run_that_goes_back_or_loses_rank_0_shows_each_step_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path();
    let mut lost = Metrics::open(run, None, &[]).expect("open");
    let mut understudy = Metrics::understudy(run);
    for number in 1..=3 {
        lost.write_step(StepRecord::of(number, 1.0)).expect("write");
        understudy
            .write_step(StepRecord::of(number, 1.0))
            .expect("kept");
    }
    lost.flush().expect("flush");
    lost.go_back(1).expect("back");
    understudy.go_back(1).expect("back");
    lost.write_step(StepRecord::of(2, 2.0)).expect("write");
    lost.flush().expect("flush");
    understudy.write_step(StepRecord::of(2, 2.0)).expect("kept");
    // Lost before it has written this one.
    understudy.write_step(StepRecord::of(3, 2.0)).expect("kept");
    understudy.take_over(3).expect("take over");
    understudy
        .write_step(StepRecord::of(4, 2.0))
        .expect("write");
    understudy.flush().expect("flush");
    let losses = &shown(run)["train/loss"];
    assert_eq!(losses[..], [(1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]);
}

#[test]
fn events_that_a_killed_rank_0_left_unwritten_are_written_by_the_next() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path();
    let mut lost = Metrics::open(run, None, &[]).expect("open");
    let mut understudy = Metrics::understudy(run);
    for number in 1..=200 {
        lost.write_step(StepRecord::of(number, 1.0)).expect("write");
        understudy
            .write_step(StepRecord::of(number, 1.0))
            .expect("kept");
        if number == 150 {
            lost.flush().expect("flush");
        }
    }
    // A killed process drops nothing. The end of the last event is torn.
    std::mem::forget(lost);
    let (_, events) = newest(run).expect("a file");
    let written = fs::read(&events).expect("a file");
    fs::write(&events, &written[..written.len() - 1]).expect("a file");
    understudy.take_over(200).expect("take over");
    understudy.flush().expect("flush");
    let losses = &shown(run)["train/loss"];
    let all: Vec<(u64, f32)> = (1..=200).map(|step| (step, 1.0)).collect();
    assert_eq!(*losses, all);
}

#[test]
fn spans_of_earlier_steps_do_not_hide_the_steps_before_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path();
    let spans = |of: u64| serde_json::json!({ "kind": "spans", "step": of, "ranks": [] });
    let mut lost = Metrics::open(run, None, &[]).expect("open");
    let mut understudy = Metrics::understudy(run);
    for rank in [&mut lost, &mut understudy] {
        for step in 1..=3 {
            rank.write_step(StepRecord::of(step, 1.0)).expect("write");
        }
        rank.write(&spans(1)).expect("write");
    }
    lost.flush().expect("flush");
    // Lost before it has written this one, from whose step on events are written again.
    understudy.write(&spans(3)).expect("kept");
    understudy.take_over(3).expect("take over");
    understudy.flush().expect("flush");
    let losses = &shown(run)["train/loss"];
    assert_eq!(losses[..], [(1, 1.0), (2, 1.0), (3, 1.0)]);
}

#[test]
fn a_run_from_before_there_were_event_files_is_shown_from_its_beginning() {
    let folder = tempfile::tempdir().expect("a folder");
    let line = |step| serde_json::to_string(&StepRecord::of(step, 1.0)).expect("numbers");
    let lines = [1, 2].map(|step| line(step) + "\n");
    fs::write(folder.path().join("metrics.jsonl"), lines.concat()).expect("write");
    Metrics::open(folder.path(), Some(2), &[])
        .and_then(|mut metrics| metrics.flush())
        .expect("open");
    let losses = &shown(folder.path())["train/loss"];
    assert_eq!(losses[..], [(1, 1.0), (2, 1.0)]);
}

#[test]
fn the_checksum_is_that_of_the_standard() {
    assert_eq!(
        unmasked(&masked_crc32c(b"123456789").to_le_bytes()),
        0xe306_9283
    );
}

const READ_BACK: &str = "
import sys
from tensorboard.backend.event_processing import event_accumulator
run = event_accumulator.EventAccumulator(sys.argv[1], size_guidance={'scalars': 0})
run.Reload()
for tag in sorted(run.Tags()['scalars']):
    for event in run.Scalars(tag):
        print(tag, event.step, event.value)
";

#[test]
fn tensorboard_reads_what_our_decoder_reads() {
    let Some(python) = paceline_testing::python_with(&["tensorboard"]) else {
        return;
    };
    let folder = resumed_run();
    let read = Command::new(&python)
        .args(["-c", READ_BACK])
        .arg(folder.path())
        .output()
        .expect("it runs");
    let (out, err) = (read.stdout, String::from_utf8_lossy(&read.stderr));
    assert!(read.status.success(), "{err}");
    let mut theirs = Scalars::new();
    for line in String::from_utf8_lossy(&out).lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let value = (
            words[1].parse().expect("a step"),
            words[2].parse().expect("a value"),
        );
        theirs.entry(words[0].to_owned()).or_default().push(value);
    }
    assert_eq!(theirs, shown(folder.path()), "{err}");
}
