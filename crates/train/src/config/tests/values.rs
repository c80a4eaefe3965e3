//! Refused keys and values, and their messages.

use super::*;

fn in_file(text: &str) -> String {
    complaint(resolve(&inputs(&[], &[], Some(text))))
}

#[test]
fn unknown_keys_are_refused_with_the_nearest_one() {
    let check = |key: &str, nearest: Option<&str>| {
        let hint = match nearest {
            Some(known) => format!("did you mean `{known}`?"),
            None => "`--help` lists the settings".to_owned(),
        };
        assert_eq!(
            in_file(&format!("epochs = 2\n{key} = 1\n")),
            format!("unknown setting `{key}` (file train.toml:2)\nhint: {hint}")
        );
    };
    check("global_bacth", Some("global_batch"));
    check("global-batch", Some("global_batch"));
    check("GLOBAL_BATCH", Some("global_batch"));
    check("epoch", Some("epochs"));
    check("lrr", Some("lr"));
    check("batch_size", Some("global_batch"));
    check("learning_rate", Some("lr"));
    check("nproc", Some("nproc_per_node"));
    check("accelerator", Some("device"));
    check("xyzzy", None);
    check("x", None);
}

#[test]
fn an_unknown_flag_is_named_as_it_was_written() {
    assert_eq!(
        complaint(with_flags(&[("run_dri", "x")])),
        "unknown setting `run_dri` (flag --run-dri)\nhint: did you mean `run_dir`?"
    );
}

#[test]
fn a_table_in_the_file_and_a_key_without_a_value_are_told_as_such() {
    assert_eq!(
        in_file("[train]\nlr = 1\n"),
        "unknown table `[train]` (file train.toml:1): settings are top-level keys\n\
         hint: remove the line `[train]`"
    );
    for line in ["epochs =", "epochs = # later"] {
        assert_eq!(
            in_file(&format!("seed = 1\n{line}\n")),
            "train.toml:2: `epochs` has no value\n\
             hint: add a value, or remove the line; `epochs`: Passes over the training data [default: 15]"
        );
    }
}

#[test]
fn values_are_taken_up_to_their_bounds_and_refused_beyond() {
    let refused = |key, text| {
        let message = complaint(with_flags(&[(key, text)]));
        let start = format!("invalid value `{text}` for `{key}` (flag --");
        assert!(message.starts_with(&start), "{message}");
    };
    let taken = |key, text| {
        let given = Given::read(&inputs(&[(key, text)], &[], None));
        assert!(given.is_ok(), "{key} {text}: {given:?}");
    };
    // key, smallest, largest, below, above
    let counts = [
        ("epochs", "1", "1000000", "0", "1000001"),
        ("global_batch", "1", "16777216", "0", "16777217"),
        (
            "seed",
            "0",
            "9223372036854775807",
            "-1",
            "9223372036854775808",
        ),
        ("accumulate", "1", "65536", "0", "65537"),
        ("nproc_per_node", "1", "65536", "0", "65537"),
        ("use_gpu", "0", "1024", "-1", "1025"),
        ("shards", "1", "65536", "0", "65537"),
        ("threads_per_rank", "0", "1024", "-1", "1025"),
        ("save_every", "0", "1099511627776", "-1", "1099511627777"),
        (
            "memory_checkpoint",
            "0",
            "1099511627776",
            "-1",
            "1099511627777",
        ),
        ("keep", "1", "10000", "0", "10001"),
        ("timeout_seconds", "1", "86400", "0", "86401"),
        ("exclude_stragglers", "1", "65536", "0", "65537"),
        ("workers", "1", "64", "0", "65"),
        (
            "fingerprint_every",
            "1",
            "1099511627776",
            "0",
            "1099511627777",
        ),
        ("trace", "0", "1099511627776", "-1", "1099511627777"),
        ("lr", "1e-300", "100", "0", "100.1"),
        ("weight_decay", "0", "1", "-0.1", "1.1"),
        ("warmup", "0", "1", "-0.1", "1.1"),
        ("min_lr", "0", "0.003", "-0.1", "100.1"),
        ("lr_step_size", "1", "1000000", "0", "1000001"),
        ("lr_gamma", "1e-300", "1", "0", "1.1"),
        ("momentum", "0", "0.9999", "-0.1", "1"),
        ("label_smoothing", "0", "0.99", "-0.1", "1"),
        ("patience", "1", "1000000", "0", "1000001"),
        ("clip_norm", "1e-300", "1e9", "0", "1.1e9"),
        ("bucket_cap_mb", "0.001", "4096", "0", "4097"),
        ("recompute", "1", "64", "0", "-1"),
    ];
    for (key, smallest, largest, below, above) in counts {
        taken(key, smallest);
        taken(key, largest);
        refused(key, below);
        refused(key, above);
        refused(key, "");
        refused(key, "many");
    }
    for key in ["lr", "weight_decay", "warmup", "clip_norm", "bucket_cap_mb"] {
        refused(key, "nan");
        refused(key, "inf");
    }
    for key in ["data", "run_dir", "label_column", "resume"] {
        refused(key, "");
    }
    for row in OPTIONS
        .iter()
        .filter(|row| matches!(row.kind, Kind::Word(_)))
    {
        refused(row.key, "other");
        row.kind
            .words()
            .iter()
            .for_each(|word| taken(row.key, word));
    }
    taken("nproc_per_node", "auto");
    taken("clip_norm", "none");
    taken("trace", "none");
}

#[test]
fn an_error_says_what_is_expected_where_and_helps_on() {
    let check = |text: &str, expect: &str| assert_eq!(in_file(text), expect, "{text}");
    check(
        "# batch\nglobal_batch = \"64\"",
        "invalid value `\"64\"` for `global_batch` (file train.toml:2): expected a whole number from 1 to 16777216\n\
         hint: `global_batch`: Samples in one optimizer step, all ranks together [default: 64, or 8 for lm]",
    );
    check(
        "transport = \"smh\"",
        "invalid value `\"smh\"` for `transport` (file train.toml:1): expected one of auto, shm, tcp, mpi\n\
         hint: did you mean `shm`?",
    );
    check(
        "epochs = 1.5",
        "invalid value `1.5` for `epochs` (file train.toml:1): expected a whole number from 1 to 1000000\n\
         hint: `epochs`: Passes over the training data [default: 15]",
    );
    check(
        "data = [\n  \"a\",\n]",
        "invalid value `[` for `data` (file train.toml:1): expected a path\n\
         hint: `data`: Training data: an IDX folder, a table (.csv, .tsv, .jsonl, .ndjson, .parquet), an image folder, or a text file or folder [default: none]",
    );
    check(
        "seed = true",
        "invalid value `true` for `seed` (file train.toml:1): expected a whole number from 0 to 2^63 - 1\n\
         hint: `seed`: Seed of the weights, the sample order and all other randomness [default: 0]",
    );
    check(
        "clip_norm = false",
        "invalid value `false` for `clip_norm` (file train.toml:1): expected none or a number above 0, up to 1000000000\n\
         hint: `clip_norm`: Largest norm of the whole gradient; larger gradients are scaled down to it [default: none]",
    );
}

#[test]
fn a_file_that_is_no_toml_is_refused_with_line_and_column() {
    let check = |text: &str, start: &str| {
        let message = in_file(text);
        assert!(message.starts_with(start), "{message}");
    };
    check("lr = 0.1\nseed = = 3", "train.toml:2:8: not valid TOML: ");
    check(
        "lr = 0.1\nlr = 0.2",
        "train.toml:2:1: not valid TOML: duplicate key",
    );
    check("task = \"ä\" x", "train.toml:1:12: not valid TOML: ");
}

#[test]
fn of_two_mistakes_the_first_in_the_file_is_reported() {
    let message = in_file("warmup = 2\nepochs = 0\n");
    assert!(message.contains("`warmup`"), "{message}");
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let missing = FileText::read(Path::new("/nowhere/train.toml")).expect_err("missing");
    let message = missing.to_string();
    assert!(
        message.starts_with("cannot read the settings in /nowhere/train.toml: "),
        "{message}"
    );
}

#[test]
fn whole_numbers_do_for_numbers_and_underscores_part_thousands_in_a_file() {
    let resolved = resolve(&inputs(&[], &[], Some("lr = 1\nseed = 1_000"))).expect("valid");
    assert_eq!((resolved.config().lr, resolved.config().seed), (1.0, 1000));
}

#[test]
fn every_row_has_its_own_key_a_one_line_help_and_a_field() {
    for (place, row) in OPTIONS.iter().enumerate() {
        assert!(
            OPTIONS[..place].iter().all(|other| other.key != row.key),
            "{} twice",
            row.key
        );
        assert!(
            !row.help.ends_with('.') && !row.help.contains('\n'),
            "{}",
            row.help
        );
    }
    let config = with_flags(&[])
        .expect("defaults are valid")
        .config()
        .clone();
    let fields = serde_json::to_value(config).expect("serialisable");
    for row in OPTIONS {
        assert!(fields.get(row.key).is_some(), "no field for {}", row.key);
    }
    assert_eq!(
        fields.as_object().map(serde_json::Map::len),
        Some(OPTIONS.len())
    );
}

#[test]
fn a_device_is_auto_or_one_of_the_kinds() {
    let words = option("device").expect("a row").kind.words();
    let kinds = DeviceKind::ALL.map(DeviceKind::name);
    assert_eq!(words.split_first(), Some((&"auto", &kinds[..])));
}
