//! Conflicting settings and derived settings.

use super::*;

fn refused(flags: &[(&str, &str)], expect: &str) {
    assert_eq!(complaint(with_flags(flags)), expect);
}

#[test]
fn a_batch_must_give_every_shard_and_every_part_a_sample() {
    refused(
        &[("global_batch", "4"), ("shards", "8")],
        "global batch 4 (flag --global-batch) is smaller than shards 8 (flag --shards)\n\
         hint: every shard needs a sample: raise --global-batch or lower --shards",
    );
    refused(
        &[("shards", "16"), ("accumulate", "5")],
        "global batch 64 (default) is smaller than shards 16 (flag --shards) times accumulate 5 (flag --accumulate)\n\
         hint: every micro-batch needs a sample: raise --global-batch or lower --accumulate",
    );
    assert!(with_flags(&[("shards", "16"), ("accumulate", "4")]).is_ok());
    assert!(with_flags(&[("global_batch", "8"), ("shards", "8")]).is_ok());
}

#[test]
fn lost_ranks_are_recovered_live_where_they_can_be() {
    let check = |flags: &[(&str, &str)], job, how: &str, why: &str| {
        let surroundings = Surroundings {
            job,
            ..surroundings()
        };
        let given = Given::read(&inputs(flags, &[], None)).expect("readable");
        let resolved = given.resolve(None, &surroundings).expect("valid");
        let setting = resolved.setting("recovery");
        assert_eq!(setting.value.to_string(), how, "{flags:?}");
        assert_eq!(setting.origin(), format!("default (auto: {why})"));
    };
    let of_job = |recovers_live| {
        Some(JobShape {
            world: 2,
            local_world: 2,
            recovers_live,
        })
    };
    check(&[], None, "live", "replicas on the CPU");
    check(&[], of_job(true), "live", "replicas on the CPU");
    check(&[], of_job(false), "restart", "as the launcher");
    let single = [("nproc_per_node", "1")];
    check(&single, None, "restart", "one rank");
    let zero = [("zero", "1")];
    check(&zero, None, "restart", "not live with --zero 1");
    let hook = [("comm_hook", "bf16")];
    check(&hook, None, "restart", "not live with --comm-hook bf16");
    let gpus = [("device", "cuda")];
    check(&gpus, None, "restart", "live costs time with --device cuda");
    assert!(with_flags(&[("device", "cuda"), ("recovery", "live")]).is_ok());
    assert!(with_flags(&[("exclude_stragglers", "2")]).is_ok());
    refused(
        &[("exclude_stragglers", "2"), ("recovery", "restart")],
        "`exclude_stragglers` is 2 (flag --exclude-stragglers), which does not go with recovery restart (flag --recovery)\n\
         hint: use --recovery live, or omit --exclude-stragglers: slow ranks are named in any case",
    );
    refused(
        &[("recovery", "live"), ("zero", "1")],
        "`recovery` is live (flag --recovery), which does not go with zero 1 (flag --zero)\n\
         hint: use --recovery restart with --max-restarts: the ranks then start again from the newest checkpoint",
    );
}

#[test]
fn every_rank_must_have_a_shard() {
    refused(
        &[("shards", "2"), ("nproc_per_node", "3")],
        "shards 2 (flag --shards) are fewer than ranks 3 (flag --nproc-per-node)\n\
         hint: every rank needs a shard: lower --nproc-per-node, or raise --shards in a new run",
    );
}

#[test]
fn a_pipeline_must_fit_the_ranks_the_blocks_and_the_micro_batches() {
    let refuse = |flags: &[(&str, &str)], expect: &str| {
        let flags: Vec<_> = [("task", "lm"), ("layers", "4"), ("nproc_per_node", "4")]
            .into_iter()
            .chain(flags.iter().copied())
            .collect();
        refused(&flags, expect);
    };
    refuse(
        &[("pp", "3")],
        "`pp` is 3 (flag --pp), but the job has 4 (flag --nproc-per-node) ranks: not a whole number of pipelines\n\
         hint: start a multiple of 3 ranks, or choose another --pp",
    );
    refuse(
        &[
            ("pp", "4"),
            ("schedule", "interleaved"),
            ("accumulate", "4"),
        ],
        "pipeline: 8 stages for 6 blocks\nhint: use at most 6 stages",
    );
    refuse(
        &[
            ("pp", "2"),
            ("schedule", "interleaved"),
            ("accumulate", "3"),
            ("shards", "2"),
        ],
        "pipeline: schedule interleaved needs a number of micro-batches that is a multiple of its 2 ranks, got 3\n\
         hint: use 4 micro-batches, or schedule 1f1b, which takes any number",
    );
    refuse(
        &[("pp", "4"), ("pp_cuts", "1,2")],
        "pipeline: cuts [1, 2] of 6 blocks: expected 3 ascending numbers from 1 to 5\n\
         hint: choose --pp-cuts for this number of stages, or --pp-cuts none for even ones",
    );
    refuse(
        &[("pp", "2"), ("pp_cuts", "two")],
        "`pp_cuts` is two (flag --pp-cuts): expected cost or numbers of blocks\n\
         hint: name the first block of each stage but the first, such as 2,4",
    );
    with_flags(&[("task", "lm"), ("pp", "2"), ("zero", "3")]).expect("it fits");
    with_flags(&[("task", "lm"), ("tp", "2"), ("zero", "1")]).expect("it fits");
    let parts = [
        ("task", "lm"),
        ("tp", "2"),
        ("pp", "2"),
        ("nproc_per_node", "8"),
    ];
    for hook in ["int8", "powersgd", "localsgd:8", "diloco:8"] {
        with_flags(&[&parts[..], &[("comm_hook", hook)]].concat()).expect(hook);
    }
    with_flags(&[("task", "lm"), ("pp", "2"), ("comm_hook", "topk")])
        .expect("stages share nothing");
    refuse(
        &[("task", "lm"), ("tp", "2"), ("comm_hook", "topk")],
        "`comm_hook` is topk (flag --comm-hook), which does not go with tp 2 (flag --tp)\n\
         hint: it takes the largest elements of whole buckets, so ranks with other slices would take others of what all have whole: \
         choose another --comm-hook, or omit --tp",
    );
    refuse(
        &[("zero", "1"), ("comm_hook", "powersgd")],
        "`comm_hook` is powersgd (flag --comm-hook), which does not go with zero 1 (flag --zero)\n\
         hint: the hook compresses whole gradients, of which a rank gets only its slices: \
         choose --comm-hook bf16, fp16 or none, or omit --zero",
    );
    refuse(
        &[("zero", "2"), ("comm_hook", "localsgd:8")],
        "`comm_hook` is localsgd:8 (flag --comm-hook), which does not go with zero 2 (flag --zero)\n\
         hint: replicas take steps by themselves, for which each needs its whole optimizer state: \
         choose --comm-hook bf16, fp16 or none, or omit --zero",
    );
    refuse(
        &[("precision", "fp16"), ("comm_hook", "topk:0.1")],
        "`comm_hook` is topk:0.1 (flag --comm-hook), which does not go with precision fp16 (flag --precision)\n\
         hint: what the hook has not sent yet has the scale of an earlier step: \
         choose --comm-hook bf16, fp16 or none, or omit --precision",
    );
    refuse(
        &[("pp", "2"), ("tp", "2"), ("nproc_per_node", "6")],
        "`tp` is 2 (flag --tp), but 6 (flag --nproc-per-node) ranks are 3 for each stage of `pp` 2 (flag --pp): neither divides the other\n\
         hint: start 4 ranks or a multiple of them, or 2 with all parts of a stage on one",
    );
    refuse(
        &[("dp", "3"), ("tp", "2")],
        "`dp` 3 (flag --dp) and `tp` 2 (flag --tp) need 6 ranks, but the job has 4 (flag --nproc-per-node)\n\
         hint: start 6 ranks, or omit --dp",
    );
    let asked = [("task", "lm"), ("dp", "2"), ("tp", "4"), ("pp", "2")];
    let ranks = |more: &[(&str, &str)]| {
        let resolved = with_flags(&[&asked[..], more].concat()).expect("it fits");
        let config = resolved.config();
        (config.nproc_per_node, config.dp, config.shards)
    };
    assert_eq!(ranks(&[]), (16, 2, 2));
    assert_eq!(
        ranks(&[("nproc_per_node", "8")]),
        (8, 2, 2),
        "two parts on each rank"
    );
    assert_eq!(ranks(&[("nproc_per_node", "8"), ("dp", "auto")]), (8, 1, 1));
    let both = &[("task", "lm"), ("pp", "2"), ("tp", "4")];
    let resolved = with_flags(both).expect("it fits");
    assert_eq!(
        resolved.config().nproc_per_node,
        2,
        "all parts of a stage on one"
    );
    assert_eq!(resolved.config().shards, 1, "one per replica");
    let resolved = with_flags(&[("task", "lm"), ("pp", "4")]).expect("it fits");
    assert_eq!(resolved.config().nproc_per_node, 4, "one per stage");
    assert_eq!(resolved.config().shards, 1, "one per replica");
}

#[test]
fn devices_and_ranks_must_agree() {
    refused(
        &[("strategy", "single"), ("nproc_per_node", "2")],
        "strategy single (flag --strategy) uses one rank, but the job has 2 (flag --nproc-per-node)\n\
         hint: use --strategy ddp for several ranks, or --nproc-per-node auto",
    );
    refused(
        &[("strategy", "dp"), ("nproc_per_node", "2")],
        "strategy dp (flag --strategy) uses one rank, but the job has 2 (flag --nproc-per-node)\n\
         hint: choose the devices of that rank with --devices, and omit --nproc-per-node",
    );
    refused(
        &[("strategy", "dp"), ("devices", "4"), ("shards", "2")],
        "shards 2 (flag --shards) are fewer than devices 4 (flag --devices)\n\
         hint: every replica needs a shard: lower --devices, or raise --shards in a new run",
    );
    refused(
        &[("use_gpu", "2"), ("nproc_per_node", "3")],
        "`use_gpu` 2 (flag --use-gpu) and `nproc_per_node` 3 (flag --nproc-per-node) differ: every rank has one GPU\n\
         hint: use --nproc-per-node auto for one rank per GPU",
    );
    refused(
        &[("device", "cpu"), ("use_gpu", "2")],
        "device cpu (flag --device) has no GPUs, but `use_gpu` is 2 (flag --use-gpu)\n\
         hint: omit --device to train on GPUs, or use --use-gpu 0 to train on the CPU",
    );
}

#[test]
fn a_task_and_its_data_must_fit() {
    refused(
        &[("task", "csv")],
        "task csv (flag --task) needs `data`\nhint: name the IDX folder, the table or the image folder with --data",
    );
    refused(
        &[("task", "digits"), ("data", "wine.csv")],
        "task digits (flag --task) uses built-in data, but `data` is /home/ada/wine.csv (flag --data)\n\
         hint: omit --task to guess it from the data, or omit --data",
    );
    refused(
        &[("data", "notes.txt")],
        "cannot tell the task from `data` /home/ada/notes.txt (flag --data): it is a file, but not called .csv, .tsv, .jsonl, .ndjson or .parquet\n\
         hint: name the task: --task idx, csv, images or lm",
    );
}

#[test]
fn a_vision_transformer_needs_images_of_whole_patches_and_has_blocks() {
    let vit = [
        ("task", "images"),
        ("data", "flowers"),
        ("model", "vit-tiny"),
    ];
    let with = |more: &[(&'static str, &'static str)]| [&vit[..], more].concat();
    for good in ["8", "36", "72", "224"] {
        let config = with_flags(&with(&[("image_size", good), ("recompute", "blocks")]));
        assert!(config.is_ok(), "{good}");
    }
    assert_eq!(
        with_flags(&vit).expect("valid").config().preparation().side,
        224
    );
    refused(
        &with(&[("image_size", "100")]),
        "`image_size` is 100 (flag --image-size), but vit-tiny cuts images of 100 x 100 pixels into patches of 8 x 8, which do not divide \
         them\nhint: choose --image-size 104, or another --model",
    );
    refused(
        &[("recompute", "blocks")],
        "`recompute` is blocks (flag --recompute), but model small (default) is no list of blocks\n\
         hint: omit --recompute, or choose --model vit-tiny for images or --task lm",
    );
    refused(
        &[("task", "csv"), ("data", "wine.csv"), ("model", "vit-tiny")],
        "`model` is vit-tiny (flag --model), but task csv (flag --task) has tiny, small or base\n\
         hint: omit --model for the default",
    );
}

#[test]
fn a_separator_is_a_name_or_a_character() {
    for good in ["tab", "comma", ";", "|", "\\t", "space", ":"] {
        let flags = [("data", "wine.csv"), ("separator", good)];
        assert!(with_flags(&flags).is_ok(), "{good}");
    }
    refused(
        &[("data", "wine.csv"), ("separator", "semi")],
        "`separator` is semi (flag --separator), which separates no cells\n\
         hint: write comma, semicolon, tab, pipe, space, or one character in quotes, such as ';'",
    );
}

#[test]
fn the_task_is_guessed_from_the_data_where_none_is_named() {
    let check = |flags: &[(&str, &str)], task, origin: &str| {
        let resolved = with_flags(flags).expect("valid");
        assert_eq!(resolved.config().task, task);
        assert_eq!(resolved.setting("task").origin(), origin);
    };
    check(&[], Task::Digits, "default");
    check(
        &[("data", "mnist")],
        Task::Idx,
        "default (guessed from data)",
    );
    check(
        &[("data", "wine.csv")],
        Task::Csv,
        "default (guessed from data)",
    );
    check(
        &[("data", "wine.csv"), ("task", "idx")],
        Task::Idx,
        "flag --task",
    );
}

#[test]
fn auto_starts_as_many_ranks_as_can_work() {
    let check = |cores, flags: &[(&str, &str)], ranks, origin: &str| {
        let surroundings = Surroundings {
            cores,
            ..surroundings()
        };
        let resolved = Given::read(&inputs(flags, &[], None))
            .and_then(|given| given.resolve(None, &surroundings))
            .expect("valid");
        assert_eq!(resolved.config().nproc_per_node, ranks, "{flags:?}");
        assert_eq!(
            resolved.setting("nproc_per_node").origin(),
            origin,
            "{flags:?}"
        );
    };
    let per_core = "default (auto: one per core, at most two)";
    let share = "default (auto: limited by the batch)";
    check(1, &[], 1, per_core);
    check(2, &[], 2, per_core);
    check(64, &[], 2, per_core);
    check(
        64,
        &[("nproc_per_node", "auto")],
        2,
        "flag --nproc-per-node (auto: one per core, at most two)",
    );
    check(1, &[("nproc_per_node", "3")], 3, "flag --nproc-per-node");
    check(8, &[("shards", "1")], 1, share);
    check(8, &[("global_batch", "1")], 1, share);
    check(8, &[("global_batch", "3"), ("accumulate", "2")], 1, share);
    check(8, &[("use_gpu", "4")], 4, "default (auto: one per GPU)");
    check(8, &[("device", "cuda")], 2, "default (auto: one per GPU)");
    check(8, &[("device", "cuda"), ("shards", "1")], 1, share);
    check(
        8,
        &[("device", "vulkan")],
        1,
        "default (auto: one per GPU, and none was found)",
    );
    check(
        8,
        &[("strategy", "single")],
        1,
        "default (auto: strategy single)",
    );
}

#[test]
fn the_device_follows_from_the_gpus_asked_for() {
    let check = |flags: &[(&str, &str)], device: DeviceKind, origin: &str| {
        let resolved = with_flags(flags).expect("valid");
        assert_eq!(resolved.config().device, device, "{flags:?}");
        assert_eq!(resolved.setting("device").origin(), origin, "{flags:?}");
    };
    let cpu = "default (auto: no GPU requested)";
    let best = "default (auto: the best kind of GPU found or built in)";
    check(&[], DeviceKind::Cpu, cpu);
    check(&[("use_gpu", "0")], DeviceKind::Cpu, cpu);
    check(&[("use_gpu", "1")], DeviceKind::Cuda, best);
    check(
        &[("device", "auto")],
        DeviceKind::Cpu,
        "flag --device (auto: no GPU requested)",
    );
    check(&[("device", "cpu")], DeviceKind::Cpu, "flag --device");
    check(
        &[("device", "rocm"), ("use_gpu", "1")],
        DeviceKind::Rocm,
        "flag --device",
    );
    check(
        &[("device", "vulkan"), ("nproc_per_node", "2")],
        DeviceKind::Vulkan,
        "flag --device",
    );
}

#[test]
fn shards_are_one_per_rank_unless_set() {
    let resolved = with_flags(&[("nproc_per_node", "4")]).expect("valid");
    assert_eq!(resolved.config().shards, 4);
    assert_eq!(
        resolved.setting("shards").origin(),
        "default (one per rank)"
    );
    let resolved = with_flags(&[("nproc_per_node", "4"), ("shards", "8")]).expect("valid");
    assert_eq!(resolved.config().shards, 8);
}

#[test]
fn a_run_directory_is_named_after_task_and_start() {
    let resolved = with_flags(&[("data", "mnist")]).expect("valid");
    assert_eq!(
        resolved.config().run_dir,
        Path::new("runs/idx-20261121-093005")
    );
}

#[test]
fn data_is_kept_as_an_absolute_path() {
    let check = |given: &str, expect: &str| {
        let resolved = with_flags(&[("task", "idx"), ("data", given)]).expect("valid");
        assert_eq!(resolved.config().data.as_deref(), Some(Path::new(expect)));
    };
    check("mnist", "/home/ada/mnist");
    check("./mnist/", "/home/ada/mnist");
    check("/data/mnist", "/data/mnist");
}

#[test]
fn settings_without_effect_give_a_warning() {
    let check = |flags: &[(&str, &str)], expect: &[&str]| {
        assert_eq!(with_flags(flags).expect("valid").warnings(), expect);
    };
    check(
        &[("label_column", "kind")],
        &[
            "`label_column` is kind (flag --label-column) and has no effect: the task has no columns",
        ],
    );
    check(
        &[("strategy", "single"), ("transport", "tcp")],
        &["`transport` is tcp (flag --transport) and has no effect: strategy single has one rank"],
    );
    check(&[("data", "wine.csv"), ("label_column", "kind")], &[]);
    let table = [("data", "wine.csv"), ("class_weights", "balanced")];
    check(&table, &[]);
    check(
        &[&table[..], &[("objective", "regression")]].concat(),
        &[
            "`class_weights` is balanced (flag --class-weights) and has no effect: numbers have no classes",
        ],
    );
    check(
        &[
            ("data", "wine.csv"),
            ("test_data", "t.csv"),
            ("held_out", "0.5"),
        ],
        &[
            "`held_out` is 0.5 (flag --held-out) and has no effect: the samples of --test-data are held out",
        ],
    );
    check(&[("strategy", "single")], &[]);
    check(
        &[("devices", "3")],
        &[
            "`devices` is 3 (flag --devices) and has no effect: only the strategies dp and model have several devices in a rank",
        ],
    );
    check(
        &[("strategy", "dp"), ("zero", "3")],
        &["`zero` is 3 (flag --zero) and has no effect: strategies dp and model have one rank"],
    );
    check(&[("strategy", "dp"), ("devices", "3")], &[]);
    check(&[("strategy", "model"), ("devices", "3")], &[]);
}

#[test]
fn layouts_that_work_but_not_as_they_read_give_a_warning() {
    let check = |flags: &[(&str, &str)], expect: &[&str]| {
        let flags = [&[("task", "lm"), ("nproc_per_node", "4")], flags].concat();
        assert_eq!(with_flags(&flags).expect("valid").warnings(), expect);
    };
    let pp = ("pp", "4");
    check(
        &[pp],
        &[
            "`accumulate` is 1 (default), fewer micro-batches than `pp` has stages: each of 4 ranks waits for at least 67 % of a \
             step, and with --micro-batches 16 for 11 %, which needs a --global-batch of 16; the bits depend on that number",
        ],
    );
    check(&[pp, ("accumulate", "4")], &[]);
    check(&[pp, ("accumulate", "4"), ("pp_cuts", "none")], &[]);
    check(
        &[pp, ("accumulate", "4"), ("zero", "3")],
        &[
            "`zero` is 3 (flag --zero), but there is one replica: it keeps all of its state, and computes every block again",
        ],
    );
    let batch = [pp, ("accumulate", "2"), ("global_batch", "64")];
    check(
        &[&batch[..], &[("schedule", "zb-h1")]].concat(),
        &[
            "`accumulate` is 2 (flag --accumulate), fewer micro-batches than `pp` has stages: each of 4 ranks waits for at least \
             45 % of a step, and with --micro-batches 16 for 6 %; the bits depend on that number",
        ],
    );
    let full = [("pp", "2"), ("accumulate", "2"), ("schedule", "zb-h1")];
    check(&full, &[]);
    check(
        &[&full[..], &[("tp", "2")]].concat(),
        &[
            "`schedule` is zb-h1 (flag --schedule), which gains nothing over 1f1b with `tp` 2 (flag --tp): blocks whose weights are \
             cut compute the gradients of inputs and weights at once",
        ],
    );
    check(
        &[("pp", "2"), ("zero", "3"), ("schedule", "zb-h1")],
        &[
            "`schedule` is zb-h1 (flag --schedule), which gains nothing over 1f1b with `zero` 3 (flag --zero): blocks whose weights \
             are gathered compute the gradients of inputs and weights at once",
            "`accumulate` is 1 (default), fewer micro-batches than `pp` has stages: each of 2 ranks waits for at least 50 % of a \
             step, and with --micro-batches 8 for 11 %, which needs a --global-batch of 16; the bits depend on that number",
        ],
    );
    for recompute in ["none", "2", "burn"] {
        check(
            &[("zero", "3"), ("recompute", recompute)],
            &[&format!(
                "`recompute` is {recompute} (flag --recompute), but `zero` 3 (flag --zero) computes every block again: it keeps no \
                 block's weights for the backward pass"
            )],
        );
    }
    check(&[("zero", "3"), ("recompute", "blocks")], &[]);
    check(&[("zero", "3")], &[]);
    check(&[("zero", "2"), ("recompute", "none")], &[]);
}

#[test]
fn units_are_turned_into_types() {
    let resolved =
        with_flags(&[("timeout_seconds", "5"), ("bucket_cap_mb", "0.5")]).expect("valid");
    let timeout = Timeout::After(Duration::from_secs(5));
    assert_eq!(resolved.config().timeout(), timeout);
    assert_eq!(resolved.config().bucket_bytes(), 512 * 1024);
    let given = [("timeout_seconds", "auto"), ("bucket_cap_mb", "1e-9")];
    let resolved = with_flags(&given).expect("valid");
    assert_eq!(resolved.config().timeout(), Timeout::Auto);
    assert_eq!(resolved.config().bucket_bytes(), 1);
}

#[test]
fn averages_need_whole_weights_and_mixtures_equal_classes() {
    let ema = ("ema", "0.999");
    assert!(with_flags(&[ema, ("zero", "2"), ("nproc_per_node", "2")]).is_ok());
    refused(
        &[ema, ("zero", "3"), ("nproc_per_node", "2")],
        "`ema` is 0.999 (flag --ema), which does not go with zero 3 (flag --zero)\n\
         hint: omit --ema or --zero",
    );
    refused(
        &[ema, ("comm_hook", "localsgd:8")],
        "`ema` is 0.999 (flag --ema), which does not go with comm_hook localsgd:8 (flag --comm-hook)\n\
         hint: omit --ema or --comm-hook",
    );
    let smoothing = ("label_smoothing", "0.1");
    assert!(with_flags(&[("mixup", "0.2"), smoothing]).is_ok());
    assert!(with_flags(&[("class_weights", "balanced"), smoothing]).is_ok());
    refused(
        &[("mixup", "0.2"), ("class_weights", "balanced")],
        "`class_weights` is balanced (flag --class-weights), which does not go with mixup 0.2 (flag --mixup)\n\
         hint: both change the loss of a class: omit one of them",
    );
}

#[test]
fn a_job_that_goes_back_keeps_states_to_go_back_to() {
    let back = ("non_finite", "back");
    let resolved = with_flags(&[back]).expect("valid");
    let setting = resolved.setting("snapshot_every");
    assert_eq!(setting.value.to_string(), "100");
    assert_eq!(setting.origin(), "default (as `non_finite` is back)");
    let resolved = with_flags(&[back, ("snapshot_every", "7")]).expect("valid");
    assert_eq!(resolved.config().snapshot_every, 7);
    assert_eq!(with_flags(&[]).expect("valid").config().snapshot_every, 0);
    refused(
        &[back, ("snapshot_every", "0")],
        "`non_finite` is back (flag --non-finite), but `snapshot_every` is 0 (flag --snapshot-every): there is no state to go back to\n\
         hint: omit --snapshot-every for 100, or set the number of steps that may be given up at once",
    );
    refused(
        &[back, ("zero", "1"), ("nproc_per_node", "2")],
        "`non_finite` is back (flag --non-finite), which does not go with zero 1 (flag --zero)\n\
         hint: use --non-finite skip: the step then changes nothing, and no state is needed to go back to",
    );
}

#[test]
fn a_tracking_server_has_a_url_without_a_password() {
    refused(
        &[("mlflow", "mlruns")],
        "`mlflow` is mlruns (flag --mlflow), which is not the URL of a server\n\
         hint: write http://HOST:PORT; for a folder or a database start `mlflow server --backend-store-uri` with it",
    );
    refused(
        &[("mlflow", "https://me:secret@host:5000/")],
        "`mlflow` has a password in its URL (flag --mlflow)\n\
         hint: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead: the run keeps its URL in a file",
    );
    assert!(with_flags(&[("mlflow", "http://host:5000/team@a")]).is_ok());
    assert!(with_flags(&[("mlflow", "none")]).is_ok());
}
