//! Valid and broken folders.

use std::fs;
use std::io::Write;

use flate2::{Compression, write::GzEncoder};

use super::*;

/// Three 2 x 3 images of which each pixel is its own number, times `step`.
fn images(count: u32, step: u8) -> Vec<u8> {
    let mut bytes = header(0x803, &[count, 2, 3]);
    bytes.extend((0..count as usize * 6).map(|pixel| pixel as u8 * step));
    bytes
}

fn labels(labels: &[u8]) -> Vec<u8> {
    let mut bytes = header(0x801, &[labels.len() as u32]);
    bytes.extend(labels);
    bytes
}

fn header(magic: u32, dimensions: &[u32]) -> Vec<u8> {
    let words = [&[magic], dimensions].concat();
    words.into_iter().flat_map(u32::to_be_bytes).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).expect("memory");
    encoder.finish().expect("memory")
}

/// A folder with three training images and two held-out ones.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().expect("a folder"));
        folder
            .write("train-images-idx3-ubyte", &images(3, 1))
            .write("train-labels-idx1-ubyte", &labels(&[0, 1, 2]))
            .write("t10k-images-idx3-ubyte", &images(2, 2))
            .write("t10k-labels-idx1-ubyte", &labels(&[2, 0]));
        folder
    }

    fn write(&self, name: &str, bytes: &[u8]) -> &Self {
        fs::write(self.0.path().join(name), bytes).expect("a file");
        self
    }

    fn rename(&self, from: &str, to: &str, change: impl Fn(&[u8]) -> Vec<u8>) {
        let bytes = fs::read(self.0.path().join(from)).expect("a file");
        fs::remove_file(self.0.path().join(from)).expect("a file");
        self.write(to, &change(&bytes));
    }

    fn load(&self) -> Result<Dataset, DataError> {
        load(self.0.path())
    }

    /// The error's text, with the folder left out.
    fn error(&self) -> String {
        let error = self.load().expect_err("a broken folder").to_string();
        error.replace(&format!("{}/", self.0.path().display()), "")
    }
}

#[test]
fn both_parts_are_joined_and_the_files_are_the_split() {
    let set = Folder::new().load().expect("a data set");
    assert_eq!(set.len(), 5);
    assert_eq!(
        set.schema.features,
        Features::Image {
            height: 2,
            width: 3,
            channels: 1
        }
    );
    assert_eq!(set.schema.target.classes().len(), 3);
    assert_eq!((set.train().len(), set.held_out().len()), (3, 2));
    let (pixels, label) = (
        set.held_out().sample(0),
        set.held_out().labels(&[0]).classes()[0],
    );
    let pixels: Vec<_> = pixels.iter().map(|pixel| pixel * 255.0).collect();
    assert_eq!((pixels, label), (vec![0., 2., 4., 6., 8., 10.], 2));
}

#[test]
fn samples_are_the_same_in_memory_and_in_a_temporary_file() {
    let folder = Folder::new();
    let small = folder.load().expect("a data set");
    assert!(matches!(small.values, Values::Memory(_)));
    // No byte, some, and all 30 in memory.
    for memory in [0, 20, 119] {
        let large = load_with(folder.0.path(), memory).expect("a data set");
        assert!(matches!(large.values, Values::Pixels(_)));
        assert_eq!(
            (&large.schema, &large.labels),
            (&small.schema, &small.labels)
        );
        let mut values = [0.0; 6];
        for index in (0..large.len()).rev() {
            large.read(index, None, &mut values).expect("an image");
            assert_eq!(values, small.sample(index), "{memory} {index}");
        }
    }
}

#[test]
fn both_spellings_are_read_plain_and_compressed() {
    let plain = Folder::new().load().expect("a data set");
    let folder = Folder::new();
    folder.rename(
        "train-images-idx3-ubyte",
        "train-images-idx3-ubyte.gz",
        gzip,
    );
    folder.rename(
        "train-labels-idx1-ubyte",
        "train-labels.idx1-ubyte.gz",
        gzip,
    );
    folder.rename(
        "t10k-images-idx3-ubyte",
        "t10k-images.idx3-ubyte",
        <[u8]>::to_vec,
    );
    let mixed = folder.load().expect("a data set");
    assert_eq!((plain.values, plain.labels), (mixed.values, mixed.labels));
}

#[test]
fn a_missing_file_is_named_with_the_nearest_one() {
    let folder = Folder::new();
    folder.rename(
        "train-images-idx3-ubyte",
        "train-image-idx3-ubyte",
        <[u8]>::to_vec,
    );
    let error = folder.load().expect_err("a missing file");
    assert!(
        error
            .to_string()
            .ends_with("train-images-idx3-ubyte: no such file or folder")
    );
    assert_eq!(
        error.hint().as_deref(),
        Some("did you mean train-image-idx3-ubyte?")
    );
}

#[test]
fn for_a_missing_file_none_of_the_other_three_is_suggested() {
    for file in FILES {
        let folder = Folder::new();
        fs::remove_file(folder.0.path().join(file)).expect("a file");
        let hint = folder.load().expect_err("a missing file").hint();
        let expect = format!("task idx reads {}, each plain or .gz", FILES.join(", "));
        assert_eq!(hint, Some(expect), "{file}");
    }
    let empty = tempfile::tempdir().expect("a folder");
    let hint = load(empty.path()).expect_err("no files").hint();
    let hint = hint.expect("a hint");
    assert!(hint.starts_with("task idx reads train-images"), "{hint}");
    assert!(
        hint.ends_with("an image folder has a folder for each class"),
        "{hint}"
    );
}

#[test]
fn a_file_in_place_of_a_folder_is_told() {
    let folder = Folder::new();
    folder.write("ok.csv", b"a,label\n1,0\n");
    let error = load(&folder.0.path().join("ok.csv")).expect_err("a file");
    let expect = "ok.csv: a file, but task idx reads a folder";
    assert!(error.to_string().ends_with(expect), "{error}");
    assert!(error.hint().expect("a hint").contains("without --task"));
}

#[test]
fn a_missing_folder_is_named_itself() {
    let folder = Folder::new();
    let missing = folder.0.path().join("mnist");
    let error = load(&missing).expect_err("no folder");
    assert_eq!(
        error.to_string(),
        format!("{}: no such file or folder", missing.display())
    );
}

#[test]
fn swapped_files_are_told_by_their_first_bytes() {
    let folder = Folder::new();
    folder.write("train-images-idx3-ubyte", &labels(&[1, 2, 3]));
    assert_eq!(
        folder.error(),
        "train-images-idx3-ubyte: starts with 0x00000801, but IDX images start with 0x00000803"
    );
}

#[test]
fn a_file_that_ends_early_says_at_which_byte() {
    let whole = images(3, 1);
    let folder = Folder::new();
    for (kept, expected) in [(0, 16), (3, 16), (11, 16), (16, 34), (33, 34)] {
        folder.write("train-images-idx3-ubyte", &whole[..kept]);
        assert_eq!(
            folder.error(),
            format!(
                "train-images-idx3-ubyte: ends at byte {kept}, but {expected} bytes are expected"
            )
        );
    }
}

#[test]
fn a_file_that_goes_on_says_after_which_byte() {
    let folder = Folder::new();
    folder.write(
        "t10k-labels-idx1-ubyte",
        &[labels(&[2, 0]), vec![9]].concat(),
    );
    assert_eq!(
        folder.error(),
        "t10k-labels-idx1-ubyte: continues after byte 10, where its header says it ends"
    );
}

#[test]
fn a_truncated_gzip_file_is_damaged_and_not_short() {
    let folder = Folder::new();
    let packed = gzip(&images(3, 1));
    // Even if all bytes can be unpacked and only the final checksum is cut off.
    for cut in [1, 8, 12] {
        folder.rename("train-images-idx3-ubyte", "train-images-idx3-ubyte", |_| {
            packed[..packed.len() - cut].to_vec()
        });
        let error = folder.error();
        assert!(
            error.starts_with("train-images-idx3-ubyte: damaged after uncompressed byte"),
            "{cut}: {error}"
        );
    }
}

#[test]
fn a_changed_gzip_file_fails_its_checksum() {
    let folder = Folder::new();
    let mut packed = gzip(&images(3, 1));
    let sum = packed.len() - 8;
    packed[sum] ^= 1;
    folder.write("train-images-idx3-ubyte", &packed);
    assert!(folder.error().contains(": damaged"), "{}", folder.error());
}

#[test]
fn senseless_dimensions_are_refused_with_their_place() {
    let folder = Folder::new();
    let huge = |dimensions: [u32; 3]| {
        folder.write("train-images-idx3-ubyte", &header(0x803, &dimensions));
        folder.error()
    };
    assert_eq!(
        huge([3, 0, 3]),
        "train-images-idx3-ubyte: number of rows at byte 8 is 0, outside 1..=4096"
    );
    assert_eq!(
        huge([u32::MAX, 28, 28]),
        "train-images-idx3-ubyte: number of images at byte 4 is 4294967295, outside 1..=100000000"
    );
    // Each within its bounds, but 1.7 petabytes together: refused without an allocation.
    assert_eq!(
        huge([100_000_000, 4096, 4096]),
        "train-images-idx3-ubyte: 1677721600000000 values, more than the 1099511627776 supported"
    );
    // This header announces half a gigabyte, but memory is only used for existing bytes.
    assert_eq!(
        huge([32, 4096, 4096]),
        "train-images-idx3-ubyte: ends at byte 16, but 536870928 bytes are expected"
    );
}

#[test]
fn images_and_labels_must_be_as_many() {
    let folder = Folder::new();
    folder.write("train-labels-idx1-ubyte", &labels(&[0, 1]));
    assert_eq!(
        folder.error(),
        "train-images-idx3-ubyte: 3 images, but train-labels-idx1-ubyte has 2 labels"
    );
}

#[test]
fn held_out_images_must_be_of_the_same_size() {
    let folder = Folder::new();
    let mut other = header(0x803, &[2, 3, 2]);
    other.extend([0; 12]);
    folder.write("t10k-images-idx3-ubyte", &other);
    assert_eq!(
        folder.error(),
        "t10k-images-idx3-ubyte: images are 3 x 2 pixels (height x width), but training images are 2 x 3"
    );
}

#[test]
fn folders_of_images_by_class_are_told_from_a_missing_file() {
    let folder = tempfile::tempdir().expect("a folder");
    for class in ["cat", "dog"] {
        fs::create_dir(folder.path().join(class)).expect("a folder");
    }
    let error = load(folder.path()).expect_err("no IDX files");
    let expect =
        ": 2 folders, perhaps one per image class, but neither an IDX file nor an image in them";
    assert!(error.to_string().ends_with(expect), "{error}");
    assert!(error.hint().expect("advice").contains("task images"));
}
