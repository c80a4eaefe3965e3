use burn::tensor::TensorData;

use super::*;
use crate::share::Share;

fn piece(step: u64, part: usize, parts: usize) -> Piece {
    Piece { step, parts, part }
}

#[test]
fn only_the_newest_step_with_every_part_counts() {
    let check = |pieces: &[(u64, usize, usize)], expected: Option<u64>| {
        let pieces: Vec<_> = (pieces.iter())
            .map(|(step, part, parts)| piece(*step, *part, *parts))
            .collect();
        let found = newest_whole(&pieces);
        let step = found.as_ref().map(|pieces| pieces[0].step);
        assert_eq!(step, expected, "{pieces:?}");
        if let Some(pieces) = found {
            assert_eq!(pieces.len(), pieces[0].parts);
            assert!(pieces.iter().all(|piece| Some(piece.step) == expected));
        }
    };
    check(&[], None);
    check(&[(0, 0, 1)], Some(0));
    check(&[(7, 0, 2)], None);
    check(&[(7, 0, 2), (7, 4, 2)], Some(7));
    // One replica's parts have completed the step, and the other's lack one.
    check(&[(7, 0, 2), (8, 0, 2), (8, 4, 2)], Some(8));
    check(&[(7, 0, 2), (7, 4, 2), (8, 4, 2)], Some(7));
    // The parts of no step are all there.
    check(&[(7, 0, 2), (8, 4, 2)], None);
    check(&[(7, 0, 4), (7, 1, 4), (7, 3, 4), (8, 2, 4)], None);
    // Of other layouts.
    check(&[(7, 0, 2), (7, 4, 4)], None);
}

#[test]
fn names_are_read_back_and_files_that_are_being_written_are_no_pieces() {
    let own = piece(4130, 6, 8);
    assert_eq!(Piece::named(&own.name()), Some(own));
    for name in [
        format!("{}{UNFINISHED}", own.name()),
        "left-1-2".into(),
        "left-1-2-3-4".into(),
        "step-0000000001".into(),
    ] {
        assert_eq!(Piece::named(&name), None, "{name}");
    }
}

/// A file of two tensors.
fn left(path: &Path) {
    let own = |name: &str, values: Vec<f32>| {
        let mut own = Own::default();
        let shape = vec![values.len()];
        own.add(
            name.into(),
            shape.clone(),
            Share::Whole,
            TensorData::new(values, shape),
        );
        own
    };
    let (weights, optimizer) = (own("a", vec![1.0, 2.0]), own("0.m", vec![3.0]));
    let bytes = [
        [1.0_f32, 2.0].map(f32::to_le_bytes).concat(),
        3.0_f32.to_le_bytes().to_vec(),
    ];
    let header = Header {
        state: State::default(),
        schedule: None,
        model: vec![("a".into(), vec![2], DType::F32)],
        ids: vec![7],
        weights: weights.told,
        optimizer: optimizer.told,
        lens: bytes.iter().map(|bytes| bytes.len() as u64).collect(),
        unwritten: Vec::new(),
    };
    let file = File::create(path).expect("a file");
    put(file, &header, bytes.map(Bytes::from_bytes_vec).into()).expect("written");
}

#[test]
fn a_file_is_read_back_and_refused_if_any_byte_is_damaged_or_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("left");
    left(&path);
    let (_, mut dealt) = take(&path).expect("whole");
    let a = dealt.weights.tensors.remove("a").expect("a tensor");
    let expected = [1.0_f32, 2.0].map(f32::to_le_bytes).concat();
    assert_eq!(a.into_bytes().expect("bytes")[..], expected);
    let whole = fs::read(&path).expect("readable");
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        fs::write(&path, damaged).expect("written");
        assert!(
            take(&path).is_err(),
            "byte {at} of {} is another",
            whole.len()
        );
        fs::write(&path, &whole[..at]).expect("written");
        assert!(take(&path).is_err(), "cut to {at} bytes");
    }
}

#[test]
fn nothing_is_left_after_a_start_whatever_it_made_of_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = [
        piece(4, 0, 2).name(),
        piece(5, 0, 2).name(),
        piece(5, 1, 2).name() + UNFINISHED,
    ];
    let join = |also: &[String]| {
        for name in files.iter().chain(also) {
            left(&folder.path().join(name));
        }
        let joined = join(folder.path(), Some(3), BTreeMap::new(), |_| Ok(()));
        let left = fs::read_dir(folder.path()).expect("a folder");
        assert_eq!(left.count(), 0, "after {also:?}");
        joined
    };
    let other = piece(5, 1, 2).name();
    assert_eq!(join(&[]).expect("no step is whole"), None);
    assert_eq!(join(&[other, REFUSED.into()]).expect("refused"), None);
    assert_eq!(join(&[piece(3, 0, 1).name()]).expect("no news"), None);
}
