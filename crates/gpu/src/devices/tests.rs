use super::*;

fn check_require(asked: usize, found: Result<usize, String>, expect: &str) {
    let text = match require(asked, found) {
        Ok(()) => "ok".to_string(),
        Err(error) => format!("{error}; {}", error.hint().expect("a hint")),
    };
    assert_eq!(text, expect);
}

#[test]
fn asking_for_what_there_is_is_fine() {
    check_require(0, Err("no driver".into()), "ok");
    check_require(2, Ok(2), "ok");
}

#[test]
fn asking_for_more_says_how_many_there_are() {
    check_require(
        4,
        Ok(2),
        "4 GPUs asked for, 2 found; use at most --use-gpu 2",
    );
    check_require(
        1,
        Err("no driver".into()),
        "1 GPU asked for, 0 found (no driver); \
         train on the CPU with --use-gpu 0, or check the driver with nvidia-smi",
    );
}

#[test]
fn counting_answers_on_any_host() {
    // With or without a driver: an answer or a reason, never a panic.
    if let Err(reason) = count() {
        assert!(!reason.is_empty());
    }
}

#[test]
fn why_there_are_no_gpus_is_said_in_words() {
    let check = |trouble: DriverError, library: Option<&str>, expect: &str| {
        let places = Places {
            library: library.map(Into::into),
            ..Places::default()
        };
        assert_eq!(reason(&trouble, &places), expect);
    };
    let missing = || DriverError::NoLibrary("x.so: no such file".to_owned());
    check(
        missing(),
        None,
        "NVIDIA's driver library libnvidia-ml.so.1 is not installed",
    );
    check(
        missing(),
        Some("x.so"),
        "NVIDIA's driver library cannot be loaded: x.so: no such file",
    );
    check(
        DriverError::NoDriver,
        None,
        "NVIDIA's kernel module is not loaded",
    );
}

/// Four GPUs, the driver's numbers 0 to 3 in the order of the bus; the last has two MIG instances.
fn four(models: [&str; 4]) -> Vec<Gpu> {
    let gpu = |(index, model): (u32, &str)| Gpu {
        index,
        uuid: format!("GPU-a{index}00-cafe"),
        name: model.to_owned(),
        pci: format!("0000:{index}0:00.0"),
        mig: Vec::new(),
    };
    let mut gpus: Vec<Gpu> = (0..).zip(models).map(gpu).collect();
    gpus[3].mig = vec!["MIG-b100".to_owned(), "MIG-b200".to_owned()];
    gpus
}

fn check_visible(models: [&str; 4], list: Option<&str>, order: Option<&str>, expect: &str) {
    let variable = |name: &str| {
        let value = match name {
            "CUDA_VISIBLE_DEVICES" => list,
            "CUDA_DEVICE_ORDER" => order,
            _ => None,
        };
        value.map(str::to_owned)
    };
    let text = match visible(&four(models), &variable) {
        Ok(indexes) => indexes.iter().map(|i| format!("{i} ")).collect::<String>(),
        Err(why) => why,
    };
    assert_eq!(text.trim(), expect, "{list:?} {order:?}");
}

#[test]
fn a_list_leaves_some_gpus_in_its_order() {
    let check = |list: &str, expect: &str| check_visible(["A"; 4], Some(list), None, expect);
    check("0,1", "0 1");
    check("2, 0", "2 0");
    check("1,1", "1");
    check("", "");
    check("-1", "");
    check("0,9,1", "0");
    check("0,nonsense,1", "0");
    check("GPU-a200", "2");
    check("gpu-a3,0", "3 0");
    check("GPU-a,0", ""); // not one GPU's only
    check("MIG-b2", "3");
    check("MIG-GPU-a100-cafe/1/0", "1");
    check(
        "MIG-c9",
        "CUDA_VISIBLE_DEVICES has `mig-c9`, whose GPU is not known",
    );
    check_visible(["A"; 4], None, None, "0 1 2 3");
}

#[test]
fn numbers_of_different_models_need_an_order() {
    let check = |list: &str, order: Option<&str>, expect: &str| {
        check_visible(["A", "A", "A", "B"], Some(list), order, expect);
    };
    let by_speed =
        "GPUs of different models are numbered by speed; CUDA_DEVICE_ORDER=PCI_BUS_ID changes that";
    check("0,1", None, by_speed);
    check("0,1", Some("FASTEST_FIRST"), by_speed);
    check("0,1", Some("PCI_BUS_ID"), "0 1");
    check("GPU-a1,GPU-a0", None, "1 0");
    check_visible(["A", "B", "A", "B"], None, None, "0 1 2 3");
}

#[test]
fn numbers_follow_the_bus_and_not_the_driver() {
    let mut gpus = four(["A"; 4]);
    gpus.reverse();
    let variable = |name: &str| (name == "CUDA_VISIBLE_DEVICES").then(|| "0".to_owned());
    assert_eq!(visible(&gpus, &variable), Ok(vec![0]));
}
