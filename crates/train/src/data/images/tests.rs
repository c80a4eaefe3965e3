//! Image folders: what is read of them, every reason to refuse one, and what an image becomes.

use std::io::Write;

use tempfile::TempDir;

use super::resize::Area;
use super::*;

/// 6 x 4 pixels, left half red and right half blue, as a JPEG turned by EXIF orientation 6: upright it is 4 x 6, red above.
const TURNED: &[u8] = include_bytes!("turned.jpg");

fn png(
    width: u32,
    height: u32,
    color: png::ColorType,
    depth: png::BitDepth,
    data: &[u8],
) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(color);
    encoder.set_depth(depth);
    let mut writer = encoder.write_header().expect("memory");
    writer.write_image_data(data).expect("memory");
    writer.finish().expect("memory");
    bytes
}

fn red() -> Vec<u8> {
    png(
        2,
        2,
        png::ColorType::Rgb,
        png::BitDepth::Eight,
        &[200, 0, 0].repeat(4),
    )
}

fn preparation(side: usize, crop: RandomCrop) -> Preparation {
    Preparation {
        side,
        mean: [0.0; 3],
        deviation: [1.0; 3],
        crop,
        hflip: 0.5,
        seed: 1,
    }
}

/// A folder with these files, each an image unless it has other bytes.
fn folder(files: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for file in files {
        write(&folder, file, &red());
    }
    folder
}

fn write(folder: &TempDir, file: &str, bytes: &[u8]) {
    let path = folder.path().join(file);
    fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    let mut file = fs::File::create(path).expect("a file");
    file.write_all(bytes).expect("a file");
}

fn open(folder: &TempDir) -> Result<Dataset, DataError> {
    let preparation = preparation(2, RandomCrop::None);
    load(folder.path(), preparation, (0.2, 0), Inspection::None)
}

/// The error and its advice, with the folder left out.
fn refusal(folder: &TempDir) -> String {
    let error = open(folder).expect_err("refused");
    let text = format!("{error}\n{}", error.hint().unwrap_or_default());
    text.replace(&format!("{}", folder.path().display()), "DIR")
}

#[test]
fn classes_and_files_are_sorted_and_the_parts_are_kept() {
    let parts = folder(&[
        "train/b/2.PNG",
        "train/b/1.jpeg",
        "train/a/x.jpg",
        "val/b/z.png",
        "test/a/unused.png",
        "train/b/.hidden",
        "train/b/notes.txt",
    ]);
    let set = open(&parts).expect("a data set");
    assert_eq!(set.schema.target.classes(), ["a", "b"]);
    assert_eq!(set.labels, Labels::Classes(vec![0, 1, 1, 1]));
    assert_eq!((set.train().len(), set.held_out().len()), (3, 1));
    let Values::Images(images) = &set.values else {
        panic!("in files");
    };
    let names: Vec<&str> = images.names.iter().map(|name| &**name).collect();
    assert_eq!(names, ["x.jpg", "1.jpeg", "2.PNG", "z.png"]);
    let [warning] = &set.warnings[..] else {
        panic!("a file is left out: {:?}", set.warnings);
    };
    assert!(warning.contains("notes.txt is left out"), "{warning}");
    assert_eq!(set.schema.check(), Ok(()));
    let mut values = [0.0; 12];
    set.read(3, None, &mut values).expect("an image");
    assert_eq!(values[..4], [200.0 / 255.0; 4]);
    assert_eq!(values[4..], [0.0; 8]);
    // Without parts, a share.
    let names: Vec<String> = (0..10)
        .map(|image| format!("{}/{image}.png", image % 2))
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let set = open(&folder(&names)).expect("a data set");
    assert_eq!(set.split, Split::random(10, 0.2, 0));
    // Held-out images of another folder, as a model of these classes reads them.
    let other = folder(&["1/a.png"]);
    let set = load_as(other.path(), &set.schema, Inspection::None).expect("it fits");
    assert_eq!(
        (set.labels.classes(), &set.split.held_out[..]),
        (&[1][..], &[0][..])
    );
}

#[test]
fn folders_that_are_none_of_images_by_class_are_refused_by_name() {
    let check = |files: &[&str], says: &str| {
        let refused = refusal(&folder(files));
        assert!(refused.starts_with(says), "{refused}");
    };
    check(
        &[],
        "DIR: no folder in it, but an image folder has one for each class",
    );
    check(&["a.png"], "DIR: no folder in it");
    check(
        &["a/1.png", "b/2.txt"],
        "DIR/b: a class without an image: none of its 1 files is .png",
    );
    check(
        &["train/a/1.png"],
        "DIR: a folder train, but neither val nor test\nadd one of them",
    );
    check(
        &["train/cat/1.png", "val/cats/1.png"],
        "DIR/val/cats: no class that was trained on\ndid you mean cat? The classes are cat",
    );
    check(
        &["train/a/1.png", "val/a/1.txt"],
        "DIR/val: no image in any of its folders",
    );
    check(
        &["a/deep/1.png"],
        "DIR/a/deep: a folder within that of a class\nimages lie in DIR/CLASS",
    );
    let empty = folder(&["a/1.png"]);
    fs::create_dir(empty.path().join("b")).expect("a folder");
    assert!(refusal(&empty).starts_with("DIR/b: an empty class"));
    let preparation = preparation(2, RandomCrop::None);
    let nowhere = load(
        Path::new("nowhere"),
        preparation,
        (0.2, 0),
        Inspection::None,
    );
    let error = nowhere.expect_err("refused");
    assert_eq!(error.to_string(), "nowhere: no such file or folder");
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        let name = OsStr::from_bytes(b"\xff.png");
        fs::write(empty.path().join("a").join(name), "").expect("a file");
        assert!(refusal(&empty).contains("the name is not UTF-8"));
    }
    assert!(is_image_folder(folder(&["a/1.png"]).path()));
    assert!(is_image_folder(folder(&["train/a/1.txt"]).path()));
    assert!(!is_image_folder(
        folder(&["raw/train-images-idx3-ubyte", ".thumbnails/1.png"]).path()
    ));
    let both = folder(&["plots/loss.png", "train-images.idx3-ubyte.gz"]);
    assert!(crate::data::idx::is_idx_folder(both.path()));
}

#[cfg(unix)]
#[test]
fn links_and_pipes_end_no_walk_and_no_read() {
    let set = folder(&["a/1.png", "b/2.png"]);
    let root = set.path();
    std::os::unix::fs::symlink(root, root.join("a").join("up")).expect("a link");
    std::os::unix::fs::symlink(root.join("b"), root.join("a").join("b.png")).expect("a link");
    assert_eq!(files_at(root).expect("files").len(), 2);
    let error = Pixels::read(Path::new("/dev/null")).expect_err("refused");
    assert!(error.of(root).to_string().ends_with("it is no file"));
}

#[test]
fn every_kind_of_pixel_becomes_rgb_and_images_stand_upright() {
    use png::{BitDepth, ColorType};
    let check = |bytes: &[u8], rgb: &[u8]| {
        let pixels = Pixels::decode(bytes).expect("an image");
        assert_eq!(pixels.rgb, rgb);
    };
    let eight = BitDepth::Eight;
    check(
        &png(2, 1, ColorType::Grayscale, eight, &[7, 9]),
        &[7, 7, 7, 9, 9, 9],
    );
    check(
        &png(1, 1, ColorType::Rgba, eight, &[1, 2, 3, 0]),
        &[1, 2, 3],
    );
    check(
        &png(1, 1, ColorType::GrayscaleAlpha, eight, &[5, 0]),
        &[5, 5, 5],
    );
    check(
        &png(
            1,
            1,
            ColorType::Rgb,
            BitDepth::Sixteen,
            &[1, 99, 2, 99, 3, 99],
        ),
        &[1, 2, 3],
    );
    check(
        &png(2, 1, ColorType::Grayscale, BitDepth::One, &[0x40]),
        &[0, 0, 0, 255, 255, 255],
    );
    let turned = Pixels::decode(TURNED).expect("an image");
    assert_eq!((turned.width, turned.height), (4, 6));
    let (above, below) = (&turned.rgb[..3], &turned.rgb[5 * 4 * 3..][..3]);
    assert!(above[0] > 200 && above[2] < 60, "{above:?}");
    assert!(below[2] > 200 && below[0] < 60, "{below:?}");
    // Some cameras append a film.
    let longer = [TURNED, b"\xff\xda\0film"].concat();
    assert_eq!(Pixels::decode(&longer).expect("an image"), turned);
}

#[test]
fn files_that_are_no_whole_image_are_refused() {
    let check = |bytes: &[u8], says: &str| {
        let problem = Pixels::decode(bytes).expect_err("refused");
        let error = problem.of(Path::new("a.png")).to_string();
        assert!(error.contains(says), "{error}");
    };
    let whole = red();
    check(b"", "a.png: the file is empty");
    check(
        b"GIF89a",
        "neither PNG nor JPEG: it starts with 47 49 46 38",
    );
    // Every cut is noticed, and none panics.
    for end in 8..whole.len() - 12 {
        check(&whole[..end], "PNG image");
    }
    for end in 3..TURNED.len() - 1 {
        check(&TURNED[..end], "JPEG image");
    }
    let mut huge = whole.clone();
    huge[16..24].fill(0x7f);
    check(&huge, "PNG image");
    // Wrong bytes may make another image, but no panic.
    for at in 0..TURNED.len() {
        for value in [0, 0xff, TURNED[at] ^ 0x55] {
            let mut bytes = TURNED.to_vec();
            bytes[at] = value;
            let _ = Pixels::decode(&bytes);
        }
    }
}

#[test]
fn training_changes_an_image_by_seed_epoch_and_index_and_evaluation_does_not() {
    let image = Pixels {
        width: 9,
        height: 7,
        rgb: (0..9 * 7 * 3).map(|byte| (byte * 5 % 251) as u8).collect(),
    };
    let values = |preparation: &Preparation, training| {
        let mut values = vec![0.0; 3 * 64];
        preparation.apply(&image, training, &mut values);
        values
    };
    for crop in [RandomCrop::Pad, RandomCrop::Resized] {
        let one = preparation(8, crop);
        let other = Preparation {
            seed: 2,
            ..one.clone()
        };
        assert_eq!(values(&one, Some((1, 5))), values(&one, Some((1, 5))));
        let differ = |one: &dyn Fn(usize) -> Vec<f32>, other: &dyn Fn(usize) -> Vec<f32>| {
            (0..20).filter(|index| one(*index) != other(*index)).count() > 10
        };
        let first = |index| values(&one, Some((0, index)));
        assert!(differ(&first, &|index| values(&one, Some((1, index)))));
        assert!(differ(&first, &|index| values(&other, Some((0, index)))));
        assert!(differ(&first, &|index| values(&one, Some((0, index + 20)))));
        assert_eq!(values(&one, None), values(&other, None));
    }
    // The centre: half a pixel is rounded to the even number.
    let side = 7;
    let centre = preparation(side, RandomCrop::None);
    let mut square = vec![0.0; 3 * side * side];
    centre.apply(&image, None, &mut square);
    let area = Area {
        x: 1,
        y: 0,
        width: side,
        height: side,
    };
    let expected = resize::resized(&image, area, [side, side], [0, 0], side);
    let red: Vec<f32> = expected
        .iter()
        .step_by(3)
        .map(|byte| f32::from(*byte) / 255.0)
        .collect();
    assert_eq!(square[..side * side], red);
    // Long strips are cropped before they are resized, so they cost no more memory.
    let strip = Pixels {
        width: 100_000,
        height: 1,
        rgb: vec![9; 300_000],
    };
    let mut values = vec![0.0; 3 * 64 * 64];
    for crop in [RandomCrop::None, RandomCrop::Resized] {
        preparation(64, crop).apply(&strip, Some((0, 0)), &mut values);
        assert!(values.iter().all(|value| *value == 9.0 / 255.0));
    }
}
