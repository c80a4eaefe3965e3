//! Names, choices and errors of devices, tested on any machine, with or without a GPU.

use super::*;

fn found(kind: DeviceKind) -> Survey {
    Survey {
        kind,
        count: 1,
        software: None,
    }
}

#[test]
fn every_kind_has_a_name_that_reads_back() {
    for kind in DeviceKind::ALL {
        assert_eq!(kind.to_string().parse(), Ok(kind));
        assert_eq!(
            serde_json::to_string(&kind).expect("encodes"),
            format!("\"{kind}\"")
        );
        assert_eq!(kind.feature().is_some(), kind.is_gpu());
    }
    let error = "gpu".parse::<DeviceKind>().expect_err("no kind");
    assert_eq!(error.to_string(), "unknown kind of device `gpu`");
    assert_eq!(
        error.hint().as_deref(),
        Some("it is one of auto, cpu, cuda, vulkan, metal, rocm")
    );
}

#[test]
fn the_processor_is_always_there() {
    assert_eq!(count(DeviceKind::Cpu), Ok(1));
    for local_rank in [0, 7] {
        let device = open_for_rank(DeviceKind::Cpu, local_rank).expect("a processor");
        assert_eq!(device, Device::flex());
        assert_eq!(name(&device), None);
    }
}

#[test]
fn what_was_not_built_in_is_named_with_the_command_that_builds_it() {
    for kind in DeviceKind::ALL {
        if kind.is_built() || kind == DeviceKind::Metal {
            continue;
        }
        let error = open(kind, 0).expect_err("not built");
        assert_eq!(error, DeviceError::NotBuilt { kind });
        assert_eq!(count(kind), Err(error.clone()));
        assert_eq!(
            error.to_string(),
            format!("this program was built without {kind}")
        );
        assert_eq!(
            error.hint(),
            Some(format!(
                "build it with the feature: cargo build --release --features {kind}"
            ))
        );
    }
}

#[test]
#[cfg(not(target_os = "macos"))]
fn metal_is_refused_away_from_its_system() {
    assert_eq!(
        open(DeviceKind::Metal, 0).expect_err("not here"),
        DeviceError::NotMacOs
    );
}

#[test]
fn a_rank_gets_the_device_with_its_number_or_the_only_one() {
    let check = |local_rank, count, expect| {
        assert_eq!(
            pick::place(local_rank, count),
            expect,
            "{local_rank} of {count}"
        );
    };
    check(0, 1, Some(0));
    // The launcher exposes one each, or all ranks share one: the number is 0 in both cases.
    check(3, 1, Some(0));
    check(0, 4, Some(0));
    check(3, 4, Some(3));
    check(4, 4, None);
    check(0, 0, None);
}

#[test]
fn ranks_have_a_device_each_or_share_the_only_one() {
    let check = |count, ranks, first_without: Option<usize>| {
        let survey = Survey {
            count,
            ..found(DeviceKind::Cuda)
        };
        let expect = first_without.map_or(Ok(()), |local_rank| {
            Err(DeviceError::NoDeviceForRank {
                kind: DeviceKind::Cuda,
                local_rank,
                count,
            })
        });
        assert_eq!(
            check_ranks(&survey, ranks),
            expect,
            "{ranks} ranks, {count} devices"
        );
    };
    check(1, 1, None);
    check(1, 8, None);
    check(4, 4, None);
    check(4, 2, None);
    check(2, 3, Some(2));
    check(2, 0, None);
}

#[test]
fn a_rank_without_a_device_learns_how_ranks_can_share_one() {
    let error = DeviceError::NoDeviceForRank {
        kind: DeviceKind::Cuda,
        local_rank: 2,
        count: 2,
    };
    assert_eq!(
        error.to_string(),
        "the rank with local rank 2 has no cuda device: there are 2"
    );
    assert_eq!(
        error.hint().as_deref(),
        Some(
            "start at most 2 ranks on this machine, or show one to all of them with CUDA_VISIBLE_DEVICES=0"
        )
    );
}

#[test]
fn the_environment_names_the_kind_or_leaves_it_open() {
    let check = |text: Option<&str>, expect: Result<Option<DeviceKind>, &str>| {
        let variable = |name: &str| (name == "PACELINE_DEVICE").then(|| text.map(str::to_owned))?;
        let found = pick::asked(&variable).map_err(|error| error.to_string());
        assert_eq!(found, expect.map_err(str::to_owned), "{text:?}");
    };
    check(None, Ok(None));
    check(Some(""), Ok(None));
    check(Some("auto"), Ok(None));
    check(Some("cuda"), Ok(Some(DeviceKind::Cuda)));
    check(Some("cpu"), Ok(Some(DeviceKind::Cpu)));
    check(Some("CUDA"), Err("unknown kind of device `CUDA`"));
    check(Some("cuda:0"), Err("unknown kind of device `cuda:0`"));
}

#[test]
fn gpus_are_wished_for_by_number() {
    let check = |text: Option<&str>, expect| {
        let variable =
            |name: &str| (name == "PACELINE_USE_GPU").then(|| text.map(str::to_owned))?;
        assert_eq!(pick::wants_gpu(&variable), expect, "{text:?}");
    };
    check(None, false);
    check(Some("0"), false);
    check(Some("many"), false);
    check(Some("2"), true);
}

#[test]
fn auto_is_the_first_kind_with_a_gpu_and_else_the_first_that_was_built() {
    use DeviceKind::{Cpu, Cuda, Metal, Rocm, Vulkan};
    let none = |kind| {
        Err(DeviceError::NoDevice {
            kind,
            reason: String::new(),
        })
    };
    let check = |answers: &[(DeviceKind, Result<Survey, DeviceError>)], expect: DeviceKind| {
        let survey = |kind| {
            let answer = answers.iter().find(|(of, _)| *of == kind);
            answer.map_or(Err(DeviceError::NotBuilt { kind }), |(_, answer)| {
                answer.clone()
            })
        };
        assert_eq!(auto(true, &survey), expect, "{answers:?}");
        assert_eq!(auto(false, &survey), Cpu);
    };
    let software = Survey {
        software: Some("llvmpipe".into()),
        ..found(Vulkan)
    };
    let broken = DeviceError::NoLibdevice {
        searched: Vec::new(),
    };

    check(
        &[(Cuda, Ok(found(Cuda))), (Vulkan, Ok(found(Vulkan)))],
        Cuda,
    );
    check(&[(Cuda, none(Cuda)), (Vulkan, Ok(found(Vulkan)))], Vulkan);
    check(
        &[(Rocm, Ok(found(Rocm))), (Vulkan, Ok(found(Vulkan)))],
        Rocm,
    );
    check(&[(Metal, Ok(found(Metal)))], Metal);
    // A GPU with missing software is reported, not passed over.
    check(&[(Cuda, Err(broken)), (Vulkan, Ok(found(Vulkan)))], Cuda);
    // Software is no GPU: the error of the intended kind is more useful.
    check(&[(Cuda, none(Cuda)), (Vulkan, Ok(software.clone()))], Cuda);
    check(&[(Vulkan, Ok(software))], Vulkan);
    check(&[(Vulkan, none(Vulkan))], Vulkan);
    check(
        &[],
        if cfg!(target_os = "macos") {
            Metal
        } else {
            Cuda
        },
    );
}

#[test]
fn software_is_used_with_a_warning() {
    let survey = Survey {
        software: Some("llvmpipe (LLVM 15.0.6, 256 bits)".into()),
        ..found(DeviceKind::Vulkan)
    };
    assert_eq!(
        survey.warning().as_deref(),
        Some(
            "vulkan has no GPU here, only llvmpipe (LLVM 15.0.6, 256 bits), which computes on the processor: fine for a \
             trial, but slow"
        )
    );
    assert_eq!(found(DeviceKind::Cuda).warning(), None);
}

#[test]
fn errors_say_what_is_missing_and_what_to_install() {
    let check = |error: DeviceError, message: &str, hint: &str| {
        assert_eq!(error.to_string(), message);
        let found = error.hint().unwrap_or_default();
        assert!(found.contains(hint), "{found}");
    };
    check(
        DeviceError::NoLibrary {
            kind: DeviceKind::Rocm,
            library: "libamdhip64.so",
            reason: "no such file".into(),
        },
        "rocm needs libamdhip64.so, which cannot be used: no such file",
        "install ROCm",
    );
    check(
        DeviceError::NoDevice {
            kind: DeviceKind::Vulkan,
            reason: "drivers/libraries could not be loaded".into(),
        },
        "vulkan finds no device: drivers/libraries could not be loaded",
        "libvulkan1",
    );
    check(
        DeviceError::NoLibdevice {
            searched: vec!["/opt/a".into(), "/opt/b".into()],
        },
        "cuda needs the file libdevice.10.bc, which is not at /opt/a or /opt/b",
        "CUDA_PATH",
    );
    check(
        DeviceError::NoSuchDevice {
            kind: DeviceKind::Cuda,
            index: 1,
            count: 1,
        },
        "cuda device 1 does not exist: there is 1",
        "counted from 0",
    );
    check(
        DeviceError::Refused {
            kind: DeviceKind::Cuda,
            reason: "out of memory".into(),
        },
        "cuda does not work here: out of memory",
        "",
    );
    check(
        DeviceError::NoAnswer {
            kind: DeviceKind::Cuda,
            waited: std::time::Duration::from_secs(60),
        },
        "the driver of cuda has not answered for 60 s",
        "dmesg",
    );
}
