//! Resuming a run.

use super::*;

/// Resumes a run that was started with `first`.
fn resume(first: &[(&str, &str)], now: &[(&str, &str)]) -> Result<Resolved, ConfigError> {
    let saved = saved_run("runs/x", first);
    let mut flags = vec![("resume", "runs/x")];
    flags.extend(now);
    Given::read(&inputs(&flags, &[], None))?.resolve(Some(&saved), &surroundings())
}

#[test]
fn the_run_to_resume_is_named_or_the_one_in_run_dir_or_the_newest() {
    let check = |flags: &[(&str, &str)], expect: ResumeTarget| {
        let given = Given::read(&inputs(flags, &[], None)).expect("readable");
        assert_eq!(given.resume(), expect, "{flags:?}");
    };
    let run = |path: &str| ResumeTarget::Run(PathBuf::from(path));
    check(&[], ResumeTarget::No);
    check(&[("run_dir", "runs/a")], ResumeTarget::No);
    check(&[("resume", "false")], ResumeTarget::No);
    check(&[("resume", "true")], ResumeTarget::Newest);
    check(&[("resume", "1")], ResumeTarget::Newest);
    check(&[("resume", "true"), ("run_dir", "runs/a")], run("runs/a"));
    check(&[("resume", "runs/b")], run("runs/b"));
    let url = || "s3://bucket/b".to_owned();
    check(
        &[("resume", "s3://bucket/b")],
        ResumeTarget::At(url(), None),
    );
    check(
        &[("resume", "s3://bucket/b"), ("run_dir", "c")],
        ResumeTarget::At(url(), Some("c".into())),
    );
    let auto = [("resume", "auto"), ("run_dir", "c")];
    check(&auto, ResumeTarget::Auto("c".into(), None));
    check(
        &[&auto[..], &[("checkpoint_dir", "s3://bucket/b")]].concat(),
        ResumeTarget::Auto("c".into(), Some(url())),
    );
    let in_file = inputs(&[], &[], Some("resume = true\nrun_dir = \"runs/c\""));
    assert_eq!(
        Given::read(&in_file).expect("readable").resume(),
        run("runs/c")
    );
}

#[test]
fn a_run_goes_on_as_it_began() {
    let first = [
        ("global_batch", "32"),
        ("lr", "0.01"),
        ("clip_norm", "1"),
        ("data", "mnist"),
    ];
    let resolved = resume(&first, &[]).expect("valid");
    let config = resolved.config();
    assert_eq!(
        (config.global_batch, config.lr, config.clip_norm),
        (32, 0.01, Some(1.0))
    );
    assert_eq!(config.task, Task::Idx);
    assert!(config.resume);
    assert_eq!(config.run_dir, Path::new("runs/x"));
    assert_eq!(resolved.setting("run_dir").origin(), "flag --resume");
    assert_eq!(resolved.setting("lr").origin(), "run runs/x/config.toml");
}

#[test]
fn a_run_that_recovered_live_goes_on_in_a_layout_that_cannot() {
    let how = |now: &[(&str, &str)]| {
        let resolved = resume(&[("nproc_per_node", "2")], now).expect("valid");
        let setting = resolved.setting("recovery");
        (setting.value.to_string(), setting.origin())
    };
    let run = "run runs/x/config.toml";
    assert_eq!(how(&[]), ("live".to_owned(), run.to_owned()));
    let changed = format!("{run} (auto: not live with --zero 1)");
    assert_eq!(how(&[("zero", "1")]), ("restart".to_owned(), changed));
}

#[test]
fn shards_stay_while_the_number_of_ranks_changes() {
    let resolved = resume(&[("nproc_per_node", "4")], &[("nproc_per_node", "3")]).expect("valid");
    let config = resolved.config();
    assert_eq!((config.nproc_per_node, config.shards), (3, 4));
    let automatic =
        resume(&[("nproc_per_node", "4")], &[("nproc_per_node", "auto")]).expect("valid");
    assert_eq!(
        (automatic.config().nproc_per_node, automatic.config().shards),
        (2, 4)
    );
    assert_eq!(
        complaint(resume(
            &[("nproc_per_node", "2")],
            &[("nproc_per_node", "3")]
        )),
        "shards 2 (run runs/x/config.toml) are fewer than ranks 3 (flag --nproc-per-node)\n\
         hint: every rank needs a shard: lower --nproc-per-node, or raise --shards in a new run"
    );
}

#[test]
fn settings_that_a_run_keeps_are_refused_all_at_once_with_the_reason() {
    assert_eq!(
        complaint(resume(
            &[],
            &[
                ("seed", "1"),
                ("global_batch", "32"),
                ("clip_norm", "2"),
                ("keep", "9")
            ]
        )),
        "cannot resume runs/x with other settings\n  \
         `global_batch` was 64 and is now 32 (flag --global-batch): it decides which samples the remaining steps read\n  \
         `seed` was 0 and is now 1 (flag --seed): it decides which samples the remaining steps read\n  \
         `clip_norm` was none and is now 2 (flag --clip-norm): all steps of the run use the same optimizer settings\n\
         hint: omit them to keep the run's settings, or start a new run without --resume"
    );
}

/// Resumes a run with one setting changed, which is `kept` as it was or free to change.
#[track_caller]
fn change(first: &[(&str, &str)], (key, now): (&'static str, &str), kept: bool) {
    match resume(first, &[(key, now)]) {
        Ok(resolved) => {
            assert!(!kept, "{key} was changed");
            assert_eq!(
                resolved.setting(key).origin(),
                format!("flag --{}", key.replace('_', "-"))
            );
        }
        Err(error) => {
            let message = error.to_string();
            assert!(kept, "{key} was refused: {message}");
            let start = format!("cannot resume runs/x with other settings\n  `{key}` was ");
            assert!(message.starts_with(&start), "{message}");
            assert_eq!(message.lines().count(), 2, "{message}");
        }
    }
}

#[test]
fn each_setting_is_kept_or_free_as_its_row_says() {
    // Eight shards leave room for ranks, and a table has columns.
    let first = [("shards", "8"), ("data", "wine.csv"), ("label_column", "a")];
    for changed in [
        ("task", "idx"),
        ("data", "mnist"),
        ("label_column", "b"),
        ("model", "base"),
        ("epochs", "16"),
        ("global_batch", "65"),
        ("lr", "0.1"),
        ("weight_decay", "0"),
        ("warmup", "0"),
        ("lr_schedule", "linear"),
        ("min_lr", "0.001"),
        ("lr_step_size", "2"),
        ("lr_gamma", "0.5"),
        ("optimizer", "lion"),
        ("momentum", "0.9"),
        ("label_smoothing", "0.1"),
        ("init", "weights.safetensors"),
        ("freeze", "*"),
        ("monitor", "accuracy"),
        ("seed", "1"),
        ("accumulate", "2"),
        ("clip_norm", "1"),
        ("precision", "bf16"),
        ("non_finite", "skip"),
        ("shards", "2"),
        ("reduction", "ring"),
        ("comm_hook", "bf16"),
    ] {
        change(&first, changed, true);
    }
    for changed in [
        ("nproc_per_node", "3"),
        ("use_gpu", "2"),
        ("device", "cuda"),
        ("transport", "tcp"),
        ("backend", "host"),
        ("same_bits", "strict"),
        ("zero", "3"),
        ("threads_per_rank", "1"),
        ("save_every", "10"),
        ("recovery", "none"),
        ("exclude_stragglers", "2"),
        ("record", "100"),
        ("keep", "9"),
        ("patience", "3"),
        ("timeout_seconds", "5"),
        ("workers", "2"),
        ("bucket_cap_mb", "1"),
        ("fingerprint_every", "10"),
        ("trace", "3"),
    ] {
        change(&first, changed, false);
    }
}

#[test]
fn each_setting_of_a_language_model_is_kept_or_free_as_its_row_says() {
    let whole = [("task", "lm"), ("nproc_per_node", "4"), ("shards", "4")];
    let parts = [&whole[..], &[("tp", "2")]].concat();
    let stages = [&parts[..], &[("pp", "2"), ("accumulate", "2")]].concat();
    change(&whole, ("tp", "2"), true);
    change(&stages, ("accumulate", "1"), true);
    for changed in [
        ("tp", "4"),
        ("sequence_parallel", "on"),
        ("tokenizer", "bpe"),
        ("context", "64"),
        ("layers", "2"),
        ("heads", "2"),
        ("width", "64"),
        ("dropout", "0.5"),
    ] {
        change(&parts, changed, true);
        change(&stages, changed, true);
    }
    for changed in [
        ("zero", "1"),
        ("zero", "3"),
        ("dp", "1"),
        ("pp", "2"),
        ("pp", "1"),
        ("schedule", "zb-h1"),
        ("pp_chunks", "3"),
        ("pp_cuts", "cost"),
        ("recompute", "blocks"),
    ] {
        change(&stages, changed, false);
    }
    change(&whole, ("pp", "4"), false);
    change(&parts, ("dp", "2"), false);
}

#[test]
fn a_run_goes_on_with_its_device_unless_another_is_asked_for() {
    let check = |first: &[(&str, &str)], now: &[(&str, &str)], device: &str, warned: bool| {
        let resolved = resume(first, now).expect("valid");
        assert_eq!(resolved.config().device.name(), device, "{first:?} {now:?}");
        assert_eq!(!resolved.warnings().is_empty(), warned, "{now:?}");
    };
    let gpus: &[(&str, &str)] = &[("use_gpu", "2"), ("shards", "8")];
    check(&[], &[], "cpu", false);
    check(gpus, &[], "cuda", false);
    check(gpus, &[("device", "auto")], "cuda", false);
    check(
        &[("device", "vulkan")],
        &[("use_gpu", "1")],
        "vulkan",
        false,
    );
    check(gpus, &[("use_gpu", "0")], "cpu", true);
    check(gpus, &[("use_gpu", "0"), ("device", "cpu")], "cpu", true);
    check(&[], &[("use_gpu", "2")], "cuda", true);
    check(&[], &[("use_gpu", "2"), ("device", "auto")], "cuda", true);
    check(gpus, &[("device", "vulkan")], "vulkan", true);
    let resolved = resume(gpus, &[("use_gpu", "0")]).expect("valid");
    assert_eq!(
        resolved.warnings(),
        [
            "`device` was cuda and is now cpu (flag --use-gpu): it rounds differently, which changes the bits of the result"
        ]
    );
}

#[test]
fn the_same_value_again_is_no_conflict() {
    let first = [("data", "mnist"), ("lr", "0.01")];
    assert!(
        resume(
            &first,
            &[("lr", "1e-2"), ("data", "./mnist"), ("seed", "0")]
        )
        .is_ok()
    );
}

#[test]
fn a_run_is_resumed_in_its_own_folder() {
    assert_eq!(
        complaint(resume(&[], &[("run_dir", "runs/y")])),
        "cannot resume runs/x in another folder: `run_dir` is runs/y (flag --run-dir)\n\
         hint: omit `run_dir`: a run resumes in its own folder"
    );
    assert!(resume(&[], &[("run_dir", "./runs/x/")]).is_ok());
}

#[test]
fn a_run_that_was_resumed_itself_can_be_resumed_again() {
    let once = resume(&[("workers", "2")], &[]).expect("valid");
    let saved = SavedRun {
        folder: PathBuf::from("runs/x"),
        settings: file("runs/x/config.toml", &once.to_toml()),
    };
    let twice = Given::read(&inputs(&[("resume", "runs/x")], &[], None))
        .and_then(|given| given.resolve(Some(&saved), &surroundings()))
        .expect("valid");
    assert_eq!(twice.config(), once.config());
}

#[test]
fn saved_settings_of_an_earlier_version_have_defaults_for_what_is_new() {
    let without = |key: &str| {
        let saved = saved_run("runs/x", &[]);
        let lines = saved
            .settings
            .text
            .lines()
            .filter(|line| !line.starts_with(key));
        let text: String = lines.map(|line| format!("{line}\n")).collect();
        Resolved::from_saved(&file("runs/x/config.toml", &text))
    };
    assert_eq!(
        without("keep ").expect("valid").setting("keep").origin(),
        "default"
    );
    assert_eq!(
        without("device ").expect("valid").config().device,
        DeviceKind::Cpu
    );
    assert_eq!(
        without("random_crop ").expect("valid").config().random_crop,
        RandomCrop::None
    );
    assert_eq!(
        complaint(without("shards ")),
        "runs/x/config.toml lacks `shards`\nhint: the file is damaged: restore it, or start a new run"
    );
}

#[test]
fn a_saved_file_that_was_edited_is_refused_where_it_leaves_something_open() {
    let check = |from: &str, to: &str, expect: &str| {
        let text = saved_run("runs/x", &[]).settings.text;
        assert!(text.contains(from), "{from} in\n{text}");
        let edited = file("runs/x/config.toml", &text.replace(from, to));
        let message = complaint(Resolved::from_saved(&edited));
        assert_eq!(message.lines().next(), Some(expect));
    };
    check(
        "nproc_per_node = 2",
        "nproc_per_node = \"auto\"",
        "`nproc_per_node` is auto (runs/x/config.toml), but saved settings must be resolved",
    );
    check(
        "device = \"cpu\"",
        "device = \"auto\"",
        "`device` is auto (runs/x/config.toml), but saved settings must be resolved",
    );
    check(
        "resume = false",
        "resume = \"runs/y\"",
        "`resume` is runs/y (runs/x/config.toml), but saved settings must be resolved",
    );
    check(
        "shards = 2",
        "shards = 65",
        "global batch 64 (run runs/x/config.toml) is smaller than shards 65 (run runs/x/config.toml)",
    );
}

#[test]
#[should_panic(expected = "a saved run is required if and only if one is resumed")]
fn forgetting_the_saved_run_is_a_bug() {
    let _ = with_flags(&[("resume", "runs/x")]);
}
