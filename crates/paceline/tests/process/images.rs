//! Folders of images by class: the same bits on any number of ranks and after a resume, a trained model's use, and broken images.

use std::fs;

use tempfile::{TempDir, tempdir};

use super::support::{checkpoints, hash_of, metrics, paceline};

/// A JPEG image that is turned by its EXIF data.
const JPEG: &[u8] = include_bytes!("../../../train/src/data/images/turned.jpg");

const JOB: &str = "--data pictures --model tiny --image-size 8 --epochs 2 --global-batch 8 --shards 4 --random-crop resized";

/// An image of noise in one channel.
fn png(number: usize, channel: usize) -> Vec<u8> {
    let (width, height) = (10 + number % 3, 9);
    let mut pixels = vec![0; 3 * width * height];
    for (at, pixel) in pixels.chunks_mut(3).enumerate() {
        pixel[channel] = 100 + ((at * 37 + number * 11) % 150) as u8;
    }
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width as u32, height as u32);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header().expect("memory");
    writer.write_image_data(&pixels).expect("memory");
    drop(writer);
    bytes
}

/// A folder with images of three classes in `pictures`, one of which has a single image and none held out.
fn pictures() -> TempDir {
    let folder = tempdir().expect("a folder");
    for (part, count) in [("train", 12), ("val", 4)] {
        for (class, name) in ["blue", "green"].into_iter().enumerate() {
            let class_folder = folder.path().join("pictures").join(part).join(name);
            fs::create_dir_all(&class_folder).expect("a folder");
            for number in 0..count {
                let path = class_folder.join(format!("{number}.png"));
                fs::write(path, png(number, 2 - class)).expect("a file");
            }
        }
    }
    let both = folder.path().join("pictures/train/both");
    fs::create_dir(&both).expect("a folder");
    fs::write(both.join("photo.JPG"), JPEG).expect("a file");
    folder
}

#[test]
fn images_give_the_same_bits_on_any_ranks_and_after_a_resume_and_their_model_is_used() {
    let folder = pictures();
    let run = |run: &str, more: &str| {
        let line = format!("train {JOB} --run-dir {run} {more}");
        hash_of(folder.path(), &line)
    };
    let whole = run("one", "--nproc-per-node 1");
    assert_eq!(run("two", "--nproc-per-node 2 --workers 3"), whole);
    assert_ne!(run("plain", "--nproc-per-node 1 --hflip 0"), whole);
    // As if the job had been killed in its second epoch.
    let newest = checkpoints(&folder.path().join("one")).pop().expect("one");
    fs::remove_dir_all(newest).expect("removed");
    let line = "train --resume one --nproc-per-node 2";
    assert_eq!(hash_of(folder.path(), line), whole);

    let found = paceline(folder.path(), "eval one --json");
    found.check(0, &[]);
    let found: serde_json::Value = serde_json::from_str(&found.out).expect("an object");
    let records = metrics(&folder.path().join("one")).into_iter();
    let mut epochs = records.filter(|record| record["kind"] == "epoch");
    let own = epochs.next_back().expect("an epoch");
    assert_eq!(
        (&found["loss"], &found["predictions"]),
        (&own["held_out_loss"], &8.into())
    );
    let ended = paceline(folder.path(), "predict one pictures/val");
    ended.check(0, &[]);
    let lines: Vec<&str> = ended.out.lines().collect();
    assert_eq!(lines[0], "path,class,probability,p(blue),p(both),p(green)");
    assert!(
        lines[1].starts_with("pictures/val/blue/0.png,"),
        "{}",
        ended.out
    );
    assert_eq!(lines.len(), 9);
    let ended = paceline(folder.path(), "predict one pictures/train/both/photo.JPG");
    assert_eq!(ended.out.lines().count(), 2, "{}{}", ended.out, ended.err);
}

#[test]
fn a_vision_transformer_gives_the_same_bits_on_any_ranks_and_with_gathered_blocks() {
    let folder = pictures();
    let run = |more: &str| {
        let line = "train --data pictures --model vit-tiny --image-size 8 --epochs 1 --global-batch 8 --shards 2";
        hash_of(folder.path(), &format!("{line} {more}"))
    };
    let whole = run("--nproc-per-node 1");
    assert_eq!(run("--nproc-per-node 2 --zero 3 --recompute blocks"), whole);
}

#[test]
fn a_broken_image_ends_the_job_on_all_ranks_with_its_path() {
    let folder = pictures();
    let path = |name: &str| folder.path().join("pictures").join(name);
    let cut = |name: &str| {
        let whole = fs::read(path(name)).expect("a file");
        fs::write(path(name), &whole[..whole.len() / 2]).expect("a file");
    };
    let fails = |more: &str, says: &[&str]| {
        let line = format!("train {JOB} --run-dir run{} {more}", says.len());
        paceline(folder.path(), &line).check(2, says);
    };
    fs::create_dir(path("train/none")).expect("a folder");
    fails("", &["train/none: an empty class"]);
    fs::remove_dir(path("train/none")).expect("removed");
    fails(
        "--std 1,1,0",
        &["`std` is 1,1,0 (flag --std)", "no std is 0", "hint"],
    );
    cut("train/green/7.png");
    let says = [
        "train/green/7.png: the PNG image is truncated",
        "copied",
        "rank",
        "error",
    ];
    fails("--nproc-per-node 2", &says);
}

#[test]
fn bad_images_that_are_left_out_change_nothing_of_the_others() {
    let folder = pictures();
    let path = |name: &str| folder.path().join("pictures").join(name);
    let line = format!("train {JOB} --run-dir without --nproc-per-node 1");
    let without = hash_of(folder.path(), &line);
    let whole = fs::read(path("train/green/7.png")).expect("a file");
    fs::write(path("train/blue/13.png"), &whole[..whole.len() / 2]).expect("a file");
    fs::write(path("train/green/0.jpeg"), "<html>404</html>").expect("a file");
    fs::write(path("val/blue/9.png"), "").expect("a file");
    let left_out = "pictures: 3 bad images are left out, the first is train/blue/13.png: the PNG image is truncated";
    for ranks in [1, 2] {
        let line = format!(
            "train {JOB} --run-dir ranks{ranks} --nproc-per-node {ranks} --bad-samples skip"
        );
        let ended = paceline(folder.path(), &line);
        ended.check(0, &["every image is decoded once", left_out]);
        assert_eq!(ended.hash(), without);
    }
    let listed = fs::read_to_string(folder.path().join("ranks2/bad-images.jsonl")).expect("a list");
    let paths: Vec<String> = (listed.lines())
        .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("an object"))
        .map(|image| image["path"].as_str().expect("a path").to_owned())
        .collect();
    assert_eq!(
        paths,
        ["train/blue/13.png", "train/green/0.jpeg", "val/blue/9.png"]
    );
    // A run that goes on keeps to the images that it began with, even if a file was mended since.
    fs::write(path("train/blue/13.png"), &whole).expect("a file");
    let newest = checkpoints(&folder.path().join("ranks2"))
        .pop()
        .expect("one");
    fs::remove_dir_all(newest).expect("removed");
    let ended = paceline(folder.path(), "train --resume ranks2 --nproc-per-node 1");
    ended.check(0, &[left_out]);
    assert_eq!(ended.hash(), without);
    let ended = paceline(folder.path(), "eval ranks2 --json");
    ended.check(0, &[]);
    let found: serde_json::Value = serde_json::from_str(&ended.out).expect("an object");
    assert_eq!(found["predictions"], 8);
    // Nothing is left of a class.
    fs::write(path("train/both/photo.JPG"), "GIF89a").expect("a file");
    let line = format!("train {JOB} --run-dir none --bad-samples skip");
    let says = [
        "pictures/train/both: a class without an image that can be used, the first is train/both/photo.JPG: neither PNG nor JPEG",
    ];
    paceline(folder.path(), &line).check(2, &says);
}
