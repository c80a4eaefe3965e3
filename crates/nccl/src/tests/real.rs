//! The real NCCL, where there is one: finding it, its version, its identity on the way between ranks. It needs no device;
//! what it says without one is checked as well. `PACELINE_TEST_NCCL` names its file, else these tests say that they are skipped.

use std::path::PathBuf;

use super::{PATIENCE, on_ranks};
use crate::nccl::{LEAST, Nccl};
use crate::{Communicator, NcclError, NcclOptions, Places};

/// NCCL's file, or none, which is said.
fn file() -> Option<PathBuf> {
    let file = std::env::var_os("PACELINE_TEST_NCCL").map(PathBuf::from);
    if file.is_none() {
        paceline_testing::skipped("PACELINE_TEST_NCCL does not name a libnccl.so.2");
    }
    file
}

fn places(file: PathBuf) -> Places {
    Places {
        nccl: Some(file),
        ..Places::from_lookup(&|_| None)
    }
}

#[test]
fn its_version_is_told() {
    let Some(file) = file() else { return };
    let nccl = Nccl::load(&places(file)).unwrap();
    eprintln!("{nccl:?}");
    assert!(nccl.version >= LEAST);
}

#[test]
fn it_is_found_in_a_wheels_folder() {
    let Some(file) = file() else { return };
    let root = tempfile::tempdir().unwrap();
    let folder = root
        .path()
        .join("venv/lib/python3.12/site-packages/nvidia/nccl/lib");
    std::fs::create_dir_all(&folder).unwrap();
    std::os::unix::fs::symlink(&file, folder.join("libnccl.so.2")).unwrap();
    let mut places = Places::from_lookup(&|name| {
        (name == "VIRTUAL_ENV").then(|| root.path().join("venv").into_os_string())
    });
    places.root = root.path().into();
    Nccl::load(&places).unwrap();
}

#[test]
fn identities_differ_and_all_ranks_get_rank_0s() {
    let Some(file) = file() else { return };
    let nccl = Nccl::load(&places(file)).unwrap();
    let [one, other] = [nccl.unique_id().unwrap(), nccl.unique_id().unwrap()];
    assert!(one != other);
    let all = on_ranks(4, PATIENCE, |group| {
        let own = (group.rank() == 0).then_some(&one.0[..]);
        group.broadcast_bytes(own, 0).unwrap()
    });
    for came in all {
        assert_eq!(came, one.0);
    }
}

#[test]
fn without_a_driver_every_rank_is_told_so() {
    let Some(file) = file() else { return };
    let errors = on_ranks(2, PATIENCE, |group| {
        let options = NcclOptions {
            places: Places {
                cuda: Some("/nowhere/libcuda.so.1".into()),
                ..places(file.clone())
            },
            ..NcclOptions::default()
        };
        Communicator::join(&group, group.rank(), &options).unwrap_err()
    });
    assert!(matches!(
        &errors[0],
        NcclError::Library {
            library: "libcuda.so.1",
            ..
        }
    ));
    assert!(matches!(
        &errors[1],
        NcclError::Library {
            library: "libcuda.so.1",
            ..
        }
    ));
}

/// The driver is made up, so that NCCL is asked to connect at all: it has no part in that driver's devices.
#[test]
fn without_a_device_its_own_words_are_passed_on() {
    let Some(file) = file() else { return };
    if Places::from_lookup(&|_| None).open_cuda().is_ok() {
        paceline_testing::skipped("this machine has a driver, whose devices NCCL would use");
        return;
    }
    let library = super::machine(2, "");
    let errors = on_ranks(2, PATIENCE, |group| {
        let options = NcclOptions {
            places: Places {
                cuda: Some(library.driver()),
                ..places(file.clone())
            },
            ..NcclOptions::default()
        };
        Communicator::join(&group, group.rank(), &options).unwrap_err()
    });
    for error in &errors {
        eprintln!("{error}");
    }
    let own = |error: &NcclError| matches!(error, NcclError::Nccl { .. });
    assert!(errors.iter().any(own), "{errors:?}");
    for error in &errors {
        assert!(
            error.to_string().contains("a CUDA call inside NCCL failed"),
            "{error}"
        );
    }
}
