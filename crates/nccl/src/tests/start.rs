//! Joining: what is absent, too old or shared is an error that says so on all ranks, and leaves the group sound.

use std::time::Duration;

use paceline_collective::{ProcessGroup, ReduceOp};
use paceline_fake_cuda::Library;
use paceline_testing::seconds_after;

use super::{PATIENCE, machine, on_ranks, options, words};
use crate::{Communicator, NcclError, NcclOptions, Places, Probe, Version, installed};

/// Every rank's error, and that the group works afterwards.
fn refused(
    world: usize,
    timeout: Duration,
    join: impl Fn(&ProcessGroup) -> Result<Communicator, NcclError> + Sync,
) -> Vec<NcclError> {
    on_ranks(world, timeout, |group| {
        let error = join(&group).unwrap_err();
        let mut data = [1.0_f32];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [world as f32]);
        error
    })
}

fn said(errors: &[NcclError]) -> Vec<String> {
    errors.iter().map(ToString::to_string).collect()
}

#[test]
fn a_device_that_is_not_there_is_told_on_all_ranks() {
    let library = machine(2, "");
    let errors = refused(3, PATIENCE, |group| {
        Communicator::join(group, group.rank(), &options(&library))
    });
    let absent = "there is no CUDA device 2: the driver has 2";
    let told = format!("rank 2 cannot use NCCL: {absent}");
    assert_eq!(said(&errors), [&told, &told, absent]);
    assert_eq!(errors[0].culprit(), Some(2));
    assert!(errors[2].hint().unwrap().contains("CUDA_VISIBLE_DEVICES"));
}

#[test]
fn a_machine_without_a_driver_is_told_on_all_ranks() {
    let library = machine(2, "");
    let errors = refused(2, PATIENCE, |group| {
        let mut options = options(&library);
        if group.rank() == 1 {
            options.places.cuda = Some("/nowhere/libcuda.so.1".into());
        }
        Communicator::join(group, group.rank(), &options)
    });
    assert_eq!(
        said(&errors),
        [
            "rank 1 cannot use NCCL: libcuda.so.1 cannot be loaded; looked for /nowhere/libcuda.so.1 (no such file)",
            "libcuda.so.1 cannot be loaded; looked for /nowhere/libcuda.so.1 (no such file)",
        ]
    );
}

#[test]
fn a_driver_without_devices_says_what_to_look_at() {
    let library = machine(0, "");
    let errors = refused(1, PATIENCE, |group| {
        Communicator::join(group, 0, &options(&library))
    });
    let NcclError::Driver {
        call: "cuInit",
        code: 100,
        ..
    } = &errors[0]
    else {
        panic!("{:?}", errors[0]);
    };
    assert!(errors[0].hint().unwrap().contains("nvidia-smi"));
}

#[test]
fn an_old_nccl_is_refused_before_its_functions_are_missed() {
    let library = Library::without(&["ncclCommInitRankConfig"]);
    library.load(r#"{"devices": 1, "nccl": 21705}"#);
    let errors = refused(1, PATIENCE, |group| {
        Communicator::join(group, 0, &options(&library))
    });
    let text = errors[0].to_string();
    assert!(
        text.ends_with("is NCCL 2.17.5, but 2.18.0 or newer is needed"),
        "{text}"
    );
    assert!(errors[0].hint().unwrap().contains("pip install --upgrade"));
}

/// Folders with NCCL that are all there is. Where the test's machine has one itself, that comes first, and `None` is given.
fn found_in(folders: &[&Library]) -> Option<Result<Version, NcclError>> {
    let places = Places {
        folders: folders.iter().map(|it| it.folder().into()).collect(),
        root: "/nowhere".into(),
        ..Places::from_lookup(&|_| None)
    };
    let none = Places {
        folders: Vec::new(),
        ..places.clone()
    };
    if installed(&none).is_ok() {
        paceline_testing::skipped("the loader finds an NCCL on this machine");
        return None;
    }
    Some(installed(&places))
}

#[test]
fn a_library_that_cannot_be_used_is_passed_over_for_the_next() {
    let old = machine(1, r#", "nccl": 21705"#);
    let poor = Library::without(&["ncclSend"]);
    let good = machine(1, r#", "nccl": 22809"#);
    let newest = machine(1, r#", "nccl": 23007"#);
    let Some(found) = found_in(&[&old, &poor, &good, &newest]) else {
        return;
    };
    assert_eq!(found.unwrap().to_string(), "2.28.9");
    let error = found_in(&[&old, &poor]).unwrap().unwrap_err();
    let text = error.to_string();
    for (library, reason) in [
        (&old, "version 2.17.5, but 2.18.0 or newer is needed"),
        (&poor, "it has no function ncclSend"),
    ] {
        let told = format!("{} ({reason})", library.nccl().display());
        assert!(text.contains(&told), "{text}");
    }
    assert!(
        text.contains("libnccl.so as the loader finds it ("),
        "{text}"
    );
    assert!(error.hint().unwrap().contains("2.18 or newer"));
}

#[test]
fn a_library_that_lacks_a_function_is_named_with_it() {
    for function in ["ncclCommGetAsyncError", "cuLaunchKernel"] {
        let library = Library::without(&[function]);
        let errors = refused(1, PATIENCE, |group| {
            Communicator::join(group, 0, &options(&library))
        });
        let text = errors[0].to_string();
        assert!(
            text.ends_with(&format!("has no function {function}")),
            "{text}"
        );
    }
}

#[test]
fn different_versions_are_refused_on_all_ranks() {
    let (old, new) = (
        machine(2, r#", "nccl": 22707"#),
        machine(2, r#", "nccl": 23007"#),
    );
    let errors = refused(2, PATIENCE, |group| {
        let library = if group.rank() == 0 { &old } else { &new };
        Communicator::join(group, group.rank(), &options(library))
    });
    assert_eq!(
        said(&errors),
        ["rank 0 has NCCL 2.27.7, rank 1 has 2.30.7"; 2]
    );
}

#[test]
fn two_ranks_on_one_device_are_refused_with_the_ways_out() {
    let library = machine(2, "");
    let errors = refused(3, PATIENCE, |group| {
        Communicator::join(group, group.rank() % 2, &options(&library))
    });
    for error in &errors {
        let NcclError::OneDevice {
            first: 0,
            second: 2,
            ..
        } = error
        else {
            panic!("{error:?}");
        };
        let hint = error.hint().unwrap();
        assert!(hint.contains("NCCL_HOSTID") && hint.contains("NCCL_MULTI_RANK_GPU_ENABLE"));
    }
}

#[test]
fn an_identity_that_cannot_be_made_is_told_on_all_ranks() {
    let faults = r#", "faults": [{"call": "ncclGetUniqueId", "does": {"code": 2}}]"#;
    let library = machine(2, faults);
    let errors = refused(2, PATIENCE, |group| {
        Communicator::join(group, group.rank(), &options(&library))
    });
    let own = errors[0].to_string();
    assert!(
        own.starts_with("ncclGetUniqueId failed: a call to the system inside NCCL failed"),
        "{own}"
    );
    assert_eq!(
        errors[1].to_string(),
        format!("rank 0 cannot use NCCL: {own}")
    );
}

#[test]
fn a_full_device_is_an_error_at_the_start() {
    let faults = r#", "faults": [{"call": "cuStreamCreateWithPriority", "does": {"code": 2}}]"#;
    let library = machine(1, faults);
    let errors = refused(1, PATIENCE, |group| {
        Communicator::join(group, 0, &options(&library))
    });
    let text = errors[0].to_string();
    assert!(
        text.starts_with("cuStreamCreateWithPriority failed: CUDA_ERROR_OUT_OF_MEMORY"),
        "{text}"
    );
}

#[test]
fn a_rank_that_cannot_connect_fails_the_others_at_once() {
    let faults =
        r#", "faults": [{"call": "ncclCommInitRankConfig", "rank": 1, "does": {"code": 2}}]"#;
    let library = machine(3, faults);
    let errors = on_ranks(3, PATIENCE, |group| {
        words(Communicator::join(&group, group.rank(), &options(&library)))
    });
    assert!(
        errors[1].starts_with("ncclCommInitRankConfig failed: a call to the system"),
        "{errors:?}"
    );
    for other in [&errors[0], &errors[2]] {
        assert!(
            other.starts_with("rank 1 gave up: ncclCommInitRankConfig failed"),
            "{other}"
        );
    }
}

#[test]
fn a_rank_that_never_connects_is_a_deadline() {
    let faults = r#", "faults": [{"call": "ncclCommInitRankConfig", "rank": 1, "does": "hang"}]"#;
    let library = machine(2, faults);
    let errors = on_ranks(2, Duration::from_secs(1), |group| {
        Communicator::join(&group, group.rank(), &options(&library)).unwrap_err()
    });
    let deadline = |error: &NcclError| matches!(error, NcclError::Deadline { doing, source: None, .. } if doing == "ncclCommInitRankConfig");
    assert!(errors.iter().any(deadline), "{errors:?}");
    for error in &errors {
        let text = error.to_string();
        let seconds = seconds_after(&text, "ncclCommInitRankConfig timed out after ");
        assert!((1.5..20.0).contains(&seconds), "{text}");
    }
}

#[test]
fn a_function_that_never_returns_lets_the_caller_go() {
    let faults = r#", "faults": [{"call": "ncclCommInitRankConfig", "rank": 1, "does": "block"}]"#;
    let library = machine(2, faults);
    let errors = on_ranks(2, Duration::from_secs(1), |group| {
        Communicator::join(&group, group.rank(), &options(&library)).unwrap_err()
    });
    let wedged = |error: &NcclError| {
        matches!(
            error,
            NcclError::Wedged {
                rank: 1,
                function: "ncclCommInitRankConfig",
                ..
            }
        )
    };
    assert!(wedged(&errors[1]), "{errors:?}");
}

#[test]
fn memory_that_never_comes_lets_the_caller_go() {
    let library = machine(
        1,
        r#", "faults": [{"call": "cuMemAlloc_v2", "does": "block"}]"#,
    );
    let errors = on_ranks(1, Duration::from_secs(1), |group| {
        let options = NcclOptions {
            probe: Probe::Check,
            ..options(&library)
        };
        Communicator::join(&group, 0, &options).unwrap_err()
    });
    let NcclError::Wedged {
        function: "cuMemAlloc",
        ..
    } = &errors[0]
    else {
        panic!("{errors:?}");
    };
}

fn probed(library: &Library) -> NcclOptions {
    NcclOptions {
        probe: Probe::Pairs,
        ..options(library)
    }
}

#[test]
fn a_probe_measures_every_pair() {
    for world in [1, 2, 3, 4] {
        let library = machine(world, "");
        on_ranks(world, PATIENCE, |group| {
            let comm = Communicator::join(&group, group.rank(), &probed(&library)).unwrap();
            let report = comm.report();
            assert_eq!(report.ranks.len(), world);
            assert_eq!(comm.place().device, group.rank());
            for from in 0..world {
                for to in 0..world {
                    let speed = report.gb_per_second[from][to];
                    assert_eq!(speed.is_some(), from != to, "{from} to {to}");
                    assert!(speed.is_none_or(|speed| speed > 0.0));
                }
            }
            assert!(report.failures.is_empty() && report.advice().is_none());
            assert_eq!(report.slowest().is_some(), world > 1);
        });
    }
}

#[test]
fn a_probe_names_the_pair_whose_data_is_spoiled() {
    let peers = r#", "peers": ["X OK OK", "OK X BAD", "OK BAD X"]"#;
    let library = machine(3, peers);
    let errors = refused(3, PATIENCE, |group| {
        Communicator::join(group, group.rank(), &probed(&library))
    });
    for error in &errors {
        assert_eq!(
            error.to_string(),
            "NCCL does not work between rank 2 and rank 1 (other data arrived than was sent), rank 1 and rank 2 (other data \
             arrived than was sent)"
        );
        assert!(error.hint().unwrap().contains("NCCL_P2P_DISABLE=1"));
        let NcclError::Probe { report } = error else {
            panic!("{error:?}");
        };
        assert!(report.gb_per_second[0][1].is_some());
        assert!(report.gb_per_second[1][2].is_none());
    }
}

#[test]
fn a_probe_names_the_pair_whose_data_never_comes() {
    let peers = r#", "peers": ["X OK STUCK", "OK X OK", "STUCK OK X"]"#;
    let library = machine(3, peers);
    let errors = refused(3, Duration::from_secs(2), |group| {
        Communicator::join(group, group.rank(), &probed(&library))
    });
    for error in &errors {
        let NcclError::Probe { report } = error else {
            panic!("{error:?}");
        };
        let pairs: Vec<_> = report.failures.iter().map(|it| (it.from, it.to)).collect();
        assert_eq!(pairs, [(2, 0), (0, 2)]);
        assert!(report.failures[0].reason.contains("did not arrive in time"));
    }
}

#[test]
fn a_check_alone_finds_that_something_is_wrong() {
    let library = machine(2, r#", "peers": "BAD""#);
    let errors = refused(2, PATIENCE, |group| {
        let options = NcclOptions {
            probe: Probe::Check,
            ..options(&library)
        };
        Communicator::join(group, group.rank(), &options)
    });
    for error in errors {
        assert!(matches!(error, NcclError::WrongResult { .. }), "{error:?}");
        assert!(error.hint().unwrap().contains("NCCL_SHM_DISABLE=1"));
    }
}
