//! Precedence of sources.

use super::*;

/// The sources that set `workers`, each to a value of its own.
#[derive(Clone, Copy)]
struct Set {
    flag: bool,
    environment: bool,
    file: bool,
    run: bool,
}

fn workers(set: Set) -> (usize, String) {
    let mut flags = Vec::new();
    if set.flag {
        flags.push(("workers", "5"));
    }
    if set.run {
        flags.push(("resume", "runs/x"));
    }
    let variable = [("PACELINE_WORKERS", "4")];
    let environment = if set.environment { &variable[..] } else { &[] };
    let inputs = inputs(&flags, environment, set.file.then_some("\nworkers = 3"));
    let saved = set.run.then(|| saved_run("runs/x", &[("workers", "2")]));
    let resolved = Given::read(&inputs)
        .and_then(|given| given.resolve(saved.as_ref(), &surroundings()))
        .expect("valid");
    (
        resolved.config().workers,
        resolved.setting("workers").origin(),
    )
}

#[test]
fn a_flag_wins_over_the_environment_over_a_file_over_the_run_over_the_default() {
    for combination in 0..16_u8 {
        let has = |bit: u8| combination & (1 << bit) != 0;
        let set = Set {
            flag: has(3),
            environment: has(2),
            file: has(1),
            run: has(0),
        };
        let expect = match combination {
            8.. => (5, "flag --workers"),
            4.. => (4, "environment PACELINE_WORKERS"),
            2.. => (3, "file train.toml:2"),
            1 => (2, "run runs/x/config.toml"),
            0 => (1, "default"),
        };
        assert_eq!(
            workers(set),
            (expect.0, expect.1.to_owned()),
            "{combination:04b}"
        );
    }
}

#[test]
fn a_mistake_is_refused_also_where_a_stronger_source_overrides_it() {
    let inputs = inputs(&[("lr", "0.1")], &[("PACELINE_LR", "fast")], None);
    assert_eq!(
        complaint(resolve(&inputs)).lines().next(),
        Some(
            "invalid value `fast` for `lr` (environment PACELINE_LR): expected a number above 0, up to 100"
        )
    );
}

#[test]
fn an_empty_variable_counts_as_not_set() {
    let resolved = resolve(&inputs(&[], &[("PACELINE_LR", "")], None)).expect("valid");
    assert_eq!(resolved.setting("lr").origin(), "default");
}

#[test]
fn a_variable_that_is_no_setting_gives_a_warning_with_the_nearest_one() {
    let environment = [
        ("PACELINE_EPOCH", "3"),
        ("PACELINE_STORE", "host:1"),
        ("PACELINE_JOB_TOKEN", "00"),
        ("PACELINE_PAGE_FD", "3"),
        ("PACELINE_TLS", "on"),
        ("PACELINE_TLSX", "on"),
        ("PACELINE_BATCH_SIZE", "8"),
        ("PACELINE_LAUNCHER", "1:2"),
        ("PACELINE_XYZZY", "1"),
        ("HOME", "/home/ada"),
    ];
    let resolved = resolve(&inputs(&[], &environment, None)).expect("valid");
    assert_eq!(
        resolved.warnings(),
        [
            "environment variable PACELINE_EPOCH is not a setting and has no effect (did you mean PACELINE_EPOCHS?)",
            "environment variable PACELINE_TLSX is not a setting and has no effect (did you mean PACELINE_TLS?)",
            "environment variable PACELINE_BATCH_SIZE is not a setting and has no effect (did you mean PACELINE_GLOBAL_BATCH?)",
            "environment variable PACELINE_XYZZY is not a setting and has no effect",
        ]
    );
    let lines: Vec<Vec<String>> = (resolved.explain().lines())
        .map(|line| line.split_whitespace().map(str::to_owned).collect())
        .collect();
    for [name, value] in [
        ["PACELINE_TLS", "on"],
        ["PACELINE_STORE", "host:1"],
        ["PACELINE_LAUNCHER", "1:2"],
    ] {
        assert!(lines.contains(&[name, value, "environment"].map(str::to_owned).to_vec()));
    }
    assert!(!resolved.explain().contains("XYZZY"));
}

fn mine(reads_data: bool) -> UserProgram {
    UserProgram {
        name: "mine".into(),
        reads_data,
    }
}

#[test]
fn a_users_program_may_have_the_settings_of_built_in_data_and_never_those_of_models() {
    let own = |flags: &[(&str, &str)]| Inputs {
        program: Some(mine(true)),
        ..inputs(flags, &[], None)
    };
    let flags = [("task", "images"), ("data", "pets"), ("mixup", "0.2")];
    let resolved = resolve(&own(&flags)).expect("valid");
    let config = resolved.config();
    assert_eq!((config.task, config.mixup), (Task::Images, 0.2));
    assert_eq!(config.random_crop, RandomCrop::Pad);
    let text = resolved.to_toml();
    assert!(
        text.contains("task = ") && !text.contains("model = "),
        "{text}"
    );
    let saved = Resolved::from_saved(&file("config.toml", &text)).expect("valid");
    assert_eq!(saved.program(), Some(&mine(true)));
    assert_eq!(saved.config(), config);
    assert_eq!(
        resolve(&own(&[])).expect("valid").config().task,
        Task::Digits
    );
    assert_eq!(
        complaint(resolve(&own(&[("task", "lm"), ("data", "a.txt")]))),
        "`task` is lm (flag --task), but the model of mine is of labelled samples\n\
         hint: choose --task digits, idx, csv or images"
    );
    assert_eq!(
        complaint(resolve(&own(&[("model", "small")]))),
        "`model` (flag --model) is a setting of `paceline train`, and mine has a model of its own\n\
         hint: remove it"
    );
}

#[test]
fn a_users_program_has_no_settings_of_built_in_data_and_models() {
    let own = |environment: &[(&str, &str)], text| Inputs {
        program: Some(mine(false)),
        ..inputs(&[("epochs", "3")], environment, text)
    };
    let resolved = resolve(&own(&[("PACELINE_TASK", "lm")], None)).expect("valid");
    let warning = "environment variable PACELINE_TASK is not a setting and has no effect";
    assert!(resolved.warnings()[0].starts_with(warning));
    assert_eq!(
        resolved.config().run_dir,
        Path::new("runs/mine-20261121-093005")
    );
    let text = resolved.to_toml();
    assert!(!text.contains("task"), "{text}");
    let saved = Resolved::from_saved(&file("config.toml", &text)).expect("valid");
    assert_eq!(saved.program(), Some(&mine(false)));
    assert_eq!(saved.config(), resolved.config());
    assert_eq!(
        complaint(resolve(&own(&[], Some("task = \"lm\"")))),
        "`task` (file train.toml:1) is a setting of `paceline train`, and mine has data and a model of its own\n\
         hint: remove it"
    );
}
