//! Resolved settings as text.

use proptest::prelude::*;

use super::*;

#[test]
fn the_explanation_is_a_table_of_values_and_their_sources() {
    let inputs = inputs(
        &[("epochs", "3"), ("clip_norm", "1")],
        &[("PACELINE_LR", "0.01")],
        Some("# a comment\nseed = 7\nshards = 8\n"),
    );
    let expect = "\
setting             value                        from
task                digits                       default
data                none                         default
held_out            0.2                          default
split_seed          0                            default
bad_samples         stop                         default
label_column        none                         default (the column named label)
objective           classification               default
test_data           none                         default
drop_columns        none                         default
categorical         none                         default
separator           none                         default (told from the first line)
missing_values      error                        default
model               small                        default
epochs              3                            flag --epochs
global_batch        64                           default
drop_last           false                        default
lr                  0.01                         environment PACELINE_LR
lr_schedule         cosine                       default
min_lr              none                         default (0; with one-cycle --lr / 250000)
lr_step_size        none                         default (a third of the epochs)
lr_gamma            0.1                          default
warmup              0.1                          default
optimizer           adamw                        default
momentum            none                         default (0 with sgd, 0.95 with muon)
weight_decay        0.01                         default
label_smoothing     0                            default
mixup               0                            default
ema                 none                         default
init                none                         default (random weights)
freeze              none                         default
patience            none                         default (all epochs are trained)
monitor             held_out_loss                default
seed                7                            file train.toml:2
accumulate          1                            default
clip_norm           1                            flag --clip-norm
precision           f32                          default
non_finite          stop                         default
class_weights       none                         default
recompute           none                         default
image_size          none                         default (224 with resnet18, resnet50 and vit-tiny, else 32)
random_crop         pad                          default
hflip               0.5                          default
mean                none                         default (ImageNet's: 0.485,0.456,0.406)
std                 none                         default (ImageNet's: 0.229,0.224,0.225)
text_column         none                         default (the column named text)
tokenizer           none                         default (bytes)
vocab               none                         default (1024)
context             none                         default (from --model)
layers              none                         default (from --model)
heads               none                         default (from --model)
width               none                         default (from --model)
dropout             none                         default (from --model)
nproc_per_node      2                            default (auto: one per core, at most two)
use_gpu             0                            default
device              cpu                          default (auto: no GPU requested)
shards              8                            file train.toml:3
strategy            ddp                          default
devices             2                            default
transport           auto                         default
backend             auto                         default
reduction           tree                         default
same_bits           warn                         default
comm_hook           none                         default
zero                0                            default
dp                  2                            default (auto: as many as the ranks make)
tp                  none                         default (whole matrices)
sequence_parallel   off                          default
pp                  none                         default (whole models)
schedule            1f1b                         default
pp_chunks           2                            default
pp_cuts             none                         default (even stages)
threads_per_rank    0                            default
run_dir             runs/digits-20261121-093005  default (task and start, UTC)
checkpoint_dir      none                         default
mlflow              none                         default
resume              false                        default
evaluate_every      0                            default
save_every          0                            default
memory_checkpoint   0                            default
snapshot_every      0                            default
keep                3                            default
max_restarts        0                            default
recovery            live                         default (auto: replicas on the CPU)
exclude_stragglers  none                         default
record              none                         default
timeout_seconds     60                           default
workers             1                            default
bucket_cap_mb       25                           default
fingerprint_every   1                            default
trace               none                         default
usage               auto                         default
usage_json          none                         default
usage_csv           none                         default
usage_svg           none                         default
lang                none                         default (the locale's, else en)
";
    let text = resolve(&inputs).expect("valid").explain();
    let (settings, _) = text.split_once("\nvariable").expect("two tables");
    assert_eq!(settings, expect);
}

#[test]
fn a_path_longer_than_a_column_does_not_widen_it() {
    let long = "x".repeat(80);
    let table = with_flags(&[("run_dir", &long)]).expect("valid").explain();
    assert!(
        table.lines().any(
            |line| line.split_whitespace().eq(["task", "digits", "default"]) && line.len() < 60
        ),
        "{table}"
    );
}

#[test]
fn the_explanation_is_json_too() {
    let resolved = with_flags(&[("lr", "0.5")]).expect("valid");
    let json: serde_json::Value =
        serde_json::from_str(&resolved.explain_json()).expect("valid JSON");
    assert_eq!(
        json["lr"],
        serde_json::json!({"value": 0.5, "from": "flag --lr"})
    );
    assert_eq!(
        json["clip_norm"],
        serde_json::json!({"value": null, "from": "default"})
    );
    let entries = json.as_object().expect("an object");
    assert!(OPTIONS.iter().all(|row| entries.contains_key(row.key)));
    assert_eq!(
        json["PACELINE_TLS"],
        serde_json::json!({"value": "off", "from": "default"})
    );
}

#[test]
fn the_saved_file_says_where_each_value_came_from() {
    let inputs = inputs(
        &[("epochs", "3")],
        &[("PACELINE_LR", "1")],
        Some("model = \"tiny\""),
    );
    let text = resolve(&inputs).expect("valid").to_toml();
    for line in [
        "epochs = 3 # flag --epochs",
        "lr = 1.0 # environment PACELINE_LR",
        "model = \"tiny\" # file train.toml:1",
        "seed = 0 # default",
        "# clip_norm is not set # default",
        "resume = false # default",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
    }
}

#[test]
fn a_newline_in_a_file_name_does_not_end_its_comment() {
    let inputs = Inputs {
        file: Some(file("odd\nlr = 9 #.toml", "seed = 7")),
        ..Inputs::default()
    };
    let text = resolve(&inputs).expect("valid").to_toml();
    let read = Resolved::from_saved(&file("config.toml", &text)).expect("valid");
    assert_eq!(read.config().lr, 0.003);
}

#[test]
fn settings_of_several_machines_read_back_as_they_were() {
    // `nproc_per_node` is the number of one machine.
    for (world, local_world, flags) in [
        (4, 2, vec![]),
        (6, 2, vec![("pp", "3"), ("task", "lm"), ("accumulate", "3")]),
        (
            6,
            3,
            vec![
                ("tp", "3"),
                ("dp", "2"),
                ("task", "lm"),
                ("heads", "3"),
                ("width", "96"),
            ],
        ),
        (2, 1, vec![("tp", "4"), ("task", "lm")]),
    ] {
        let job = Some(JobShape {
            world,
            local_world,
            recovers_live: true,
        });
        let surroundings = Surroundings {
            job,
            ..surroundings()
        };
        let given = Given::read(&inputs(&flags, &[], None)).expect("readable");
        let resolved = given.resolve(None, &surroundings).expect("valid");
        let read = Resolved::from_saved(&file("config.toml", &resolved.to_toml())).expect("valid");
        assert_eq!(read.config(), resolved.config(), "{flags:?}");
    }
}

proptest! {
    #[test]
    fn saved_settings_read_back_as_they_were(
        lr in 1e-12_f64..100.0, weight_decay in 0.0_f64..=1.0, clip_norm in prop::option::of(1e-9_f64..1e9),
        seed in 0..=i64::MAX as u64, trace in prop::option::of(0_u64..1 << 40),
        data in "[^/\0.][^/\0]{0,20}", label in "[^\0]{1,20}",
    ) {
        let or_none = |value: Option<String>| value.unwrap_or_else(|| "none".to_owned());
        let resolved = with_flags(&[
            ("lr", &lr.to_string()),
            ("weight_decay", &weight_decay.to_string()),
            ("clip_norm", &or_none(clip_norm.map(|value| value.to_string()))),
            ("seed", &seed.to_string()),
            ("trace", &or_none(trace.map(|value| value.to_string()))),
            ("task", "csv"),
            ("data", &data),
            ("label_column", &label),
        ]).expect("valid");
        let read = Resolved::from_saved(&file("config.toml", &resolved.to_toml())).expect("valid");
        prop_assert_eq!(read.config(), resolved.config());
        prop_assert_eq!(read.config().lr, lr);
        prop_assert_eq!(read.config().data.clone(), Some(Path::new("/home/ada").join(&data)));
    }
}
