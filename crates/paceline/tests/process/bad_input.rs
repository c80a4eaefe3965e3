//! Bad input is refused with a clear message and the right exit code, and no checkpoint is lost.

use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::{TempDir, tempdir};

use super::support::{
    LIMIT, PACELINE, Running, checkpoints, command, metrics, paceline, start, steps,
};

const USAGE: i32 = 2;
const ENVIRONMENT: i32 = 3;

fn folder_with(name: &str, text: &str) -> TempDir {
    let folder = tempdir().expect("a folder");
    fs::write(folder.path().join(name), text).expect("a file");
    folder
}

/// Training on `table.csv` with this text is refused with these messages, before anything is created.
#[track_caller]
fn refused_table(text: &str, says: &[&str]) {
    let folder = folder_with("table.csv", text);
    let ended = paceline(folder.path(), "train --data table.csv --run-dir run");
    ended.check(USAGE, says).check(USAGE, &["table.csv"]);
    assert_eq!(ended.out, "");
    assert!(!folder.path().join("run").exists());
}

/// The command line is refused with these messages.
#[track_caller]
fn refused(line: &str, says: &[&str]) {
    let folder = tempdir().expect("a folder");
    let ended = paceline(folder.path(), line);
    ended.check(USAGE, says);
    assert_eq!(ended.out, "");
    assert_eq!(
        fs::read_dir(folder.path()).expect("a folder").count(),
        0,
        "{line} left something"
    );
}

#[test]
fn data_that_is_not_there_is_named_with_the_nearest_name() {
    refused(
        "train --data nothing.csv",
        &["nothing.csv: no such file or folder"],
    );
    let folder = folder_with("wine.csv", "a,label\n");
    let ended = paceline(folder.path(), "train --data wines.csv");
    ended.check(
        USAGE,
        &[
            "wines.csv: no such file or folder",
            "did you mean wine.csv?",
        ],
    );
}

#[test]
fn a_malformed_table_is_named_with_line_and_column() {
    refused_table(
        "a,b,label\n1,2,0\n3,x,1\n",
        &["table.csv: line 3: column \"b\" is \"x\""],
    );
    refused_table(
        "a,b,label\n1,2,0\n3,,1\n",
        &["line 3: no value in column \"b\"", "--missing-values fill"],
    );
    refused_table(
        "a,b,label\n1,2,0\n\n3,4\n",
        &["line 4: 2 cells, but the header names 3"],
    );
    refused_table("a,b,lable\n1,2,0\n", &["no column \"label\"", "lable"]);
    refused_table("", &["empty; the first line must name the columns"]);
    refused_table("a,label\n1,0\n", &["1 sample; at least 2 are needed"]);
}

#[test]
fn a_label_out_of_range_is_named_with_its_line() {
    refused_table(
        "a,label\n1,0\n2,-1\n",
        &["line 3: \"-1\" in column \"label\" is no class"],
    );
    refused_table(
        "a,label\n1,0\n2,1.5\n",
        &["line 3: \"1.5\" in column \"label\" is no class"],
    );
    refused_table(
        "a,label\n1,0\n2,99999\n",
        &["line 3: label 99999 is out of range"],
    );
}

#[test]
fn settings_that_do_not_go_together_are_refused_before_anything_starts() {
    refused(
        "train --global-batch 4 --shards 8",
        &["global batch 4 (flag --global-batch) is smaller than shards 8 (flag --shards)"],
    );
    refused(
        "train --nproc-per-node 4 --shards 2",
        &["shards 2", "every rank needs a shard"],
    );
    refused(
        "train --strategy single --nproc-per-node 2",
        &["single", "--strategy ddp"],
    );
    refused(
        "train --strategy model --devices 5",
        &["4 parts for 5 devices", "use at most --devices 4"],
    );
    refused("train --task digits --data x.csv", &["digits", "x.csv"]);
}

#[test]
fn an_unknown_option_is_named_with_the_nearest_known_one() {
    refused(
        "train --global-bach 3",
        &["'--global-bach'", "'--global-batch'"],
    );
    refused(
        "train --model tinny",
        &["`tinny` for `model`", "did you mean `tiny`?"],
    );
    refused(
        "train --lr 1e30",
        &["`1e30` for `lr` (flag --lr): expected a number above 0, up to 100"],
    );
    refused("train --epochs 0", &["`0` for `epochs` (flag --epochs)"]);
    refused("trian", &["'trian'", "'train'"]);
}

#[test]
fn an_unknown_key_is_named_with_its_line_and_the_nearest_known_one() {
    let folder = folder_with("my.toml", "epochs = 2\n\nglobal_bach = 3\n");
    paceline(folder.path(), "train --config my.toml").check(
        USAGE,
        &[
            "unknown setting `global_bach` (file my.toml:3)",
            "did you mean `global_batch`?",
        ],
    );
    let folder = folder_with("my.toml", "epochs = \n");
    paceline(folder.path(), "train --config my.toml")
        .check(USAGE, &["my.toml:1: `epochs` has no value", "add a value"]);
    let folder = folder_with("my.toml", "[train]\nepochs = 3\n");
    paceline(folder.path(), "train --config my.toml").check(
        USAGE,
        &[
            "unknown table `[train]` (file my.toml:1)",
            "remove the line `[train]`",
        ],
    );
    paceline(folder.path(), "train --config your.toml")
        .check(USAGE, &["cannot read the settings in your.toml"]);
}

#[test]
fn words_of_other_tools_are_answered_with_the_one_that_is_meant() {
    let check = |line: &str, tip: &str| {
        refused(line, &[&format!("tip: {tip}")]);
        let folder = tempdir().expect("a folder");
        let ended = paceline(folder.path(), line);
        assert_eq!(ended.err.matches("tip: ").count(), 1, "{}", ended.err);
        assert!(!ended.err.contains("hint: "), "{}", ended.err);
    };
    check(
        "train --batch-size 8",
        "'--batch-size' is called '--global-batch' here: Samples in one",
    );
    check(
        "train --batch 8",
        "'--batch' is called '--global-batch' here: Samples in one",
    );
    check(
        "train --output-dir a",
        "'--output-dir' is called '--run-dir' here: Folder",
    );
    let hint = "for a folder of this machine use --run-dir";
    refused("train --checkpoint-dir a", &[hint]);
    check(
        "train --dry-run",
        "'--dry-run' is called '--explain' here: Print every setting",
    );
    check(
        "train --learning-rate 1",
        "'--learning-rate' is called '--lr' here: Highest learning rate",
    );
    check(
        "train --gpus 2",
        "'--gpus' is called '--use-gpu' here: GPUs to train on",
    );
    for option in ["--gpus", "-n"] {
        check(
            &format!("run {option} 2 prog"),
            &format!("'{option}' is called '--nproc-per-node' here"),
        );
    }
    check(
        "run --lr 1 paceline train",
        "'--lr' is an option of `paceline train` and goes after it: `paceline run ... paceline train --lr",
    );
    for line in ["train epochs = 3", "train epochs=3", "train epochs 3"] {
        check(line, "pass a setting as an option: '--epochs 3'");
    }
    check(
        "train --nnodes 2",
        "'--nnodes' is an option of `paceline run`, which starts ranks on several nodes",
    );
    check(
        "train wine.csv --epochs 3",
        "pass the data as an option: '--data wine.csv'",
    );
    check(
        "infer model.safetensors",
        "`paceline predict` classifies new samples",
    );
    check(
        "evaluate",
        "`paceline eval` evaluates what a run has trained",
    );
}

#[test]
fn folders_of_classes_without_an_image_are_no_data() {
    let folder = tempdir().expect("a folder");
    for class in ["cat", "dog"] {
        fs::create_dir_all(folder.path().join("photos").join(class)).expect("a folder");
    }
    paceline(folder.path(), "train --data photos").check(
        USAGE,
        &[
            "photos: 2 folders, perhaps one per image class",
            "PNG or JPEG files for each class",
        ],
    );
}

#[test]
fn a_number_to_predict_is_told_from_a_class() {
    refused_table(
        "a,label\n1,0.5\n2,1.5\n",
        &[
            "\"0.5\" in column \"label\" is no class",
            "to predict a number, add --objective regression",
        ],
    );
    refused_table(
        "a,label\n1,250000\n2,310000\n",
        &[
            "line 2: label 250000 is out",
            "to predict a number, add --objective regression",
        ],
    );
}

#[test]
fn tables_with_semicolons_are_read() {
    let folder = folder_with(
        "table.csv",
        "a;b;label\n1;2;0\n3;4;1\n5;6;0\n7;8;1\n2;2;0\n",
    );
    let ended = paceline(
        folder.path(),
        "train --data table.csv --epochs 1 --global-batch 4 --model tiny",
    );
    ended.is_well();
    assert!(
        ended
            .out
            .contains("4 samples to train on, 1 held out, 2 classes"),
        "{}",
        ended.out
    );
}

#[test]
fn jobs_that_are_hardly_meant_are_warned_of() {
    let check = |text: &str, options: &str, warning: &str| {
        let folder = folder_with("table.csv", text);
        let line =
            format!("train --data table.csv --epochs 1 --model tiny --nproc-per-node 1 {options}");
        let ended = paceline(folder.path(), &line);
        ended.check(0, &[&format!("warning: {warning}")]);
        assert_eq!(ended.err.matches(warning).count(), 1, "{}", ended.err);
    };
    let table = "a,label\n1,0\n2,1\n3,0\n4,1\n5,1\n";
    check(
        table,
        "--global-batch 64",
        "global batch 64 is larger than the training data of 4 samples: every step uses all of it",
    );
    check(
        table,
        "--global-batch 2 --trace 2",
        "`trace` is 2, but the job has only 2 steps, counted from 0",
    );
    check(
        "a,label\n1,3\n2,3\n3,3\n",
        "--global-batch 2",
        "every label of table is 3: with one class there is nothing to learn",
    );
    check(
        "a,label\n1,0\n2,50\n3,0\n",
        "--global-batch 2",
        "table has 51 classes for 2 training samples: labels are class numbers from 0, and the largest is 50",
    );
}

#[test]
fn more_ranks_than_cores_are_noted() {
    let folder = tempdir().expect("a folder");
    let cores = std::thread::available_parallelism().expect("cores").get();
    let ranks = cores + 1;
    let line = format!("train --model tiny --epochs 1 --nproc-per-node {ranks}");
    paceline(folder.path(), &line).check(
        0,
        &[&format!("note: {ranks} ranks take turns on {cores} core")],
    );
}

#[test]
fn help_version_and_the_man_page_are_printed() {
    let folder = tempdir().expect("a folder");
    let check = |line: &str, begins: &str, says: &str| {
        let ended = paceline(folder.path(), line);
        let out = &ended.is_well().out;
        assert!(out.starts_with(begins) && out.contains(says), "{out}");
    };
    check("version", "paceline 0", "");
    check(
        "help",
        "Data-parallel training",
        "Usage: paceline [OPTIONS] <COMMAND>",
    );
    check("help train", "Train a built-in network", "--global-batch");
    check("train --print-man", ".ie", ".TH paceline-train 1");
    check(
        "train --print-completion bash",
        "_paceline()",
        "--global-batch",
    );
}

#[test]
fn an_unknown_variable_is_warned_of() {
    let folder = tempdir().expect("a folder");
    let mut command = command(folder.path(), PACELINE, ["train", "--explain"]);
    command.env("PACELINE_EPOCH", "3");
    Running::start(command).ended(LIMIT).check(
        0,
        &[
            "PACELINE_EPOCH is not a setting",
            "did you mean PACELINE_EPOCHS?",
        ],
    );
}

#[test]
fn a_run_directory_in_use_keeps_a_second_job_out() {
    let folder = tempdir().expect("a folder");
    let first = start(
        folder.path(),
        "train --run-dir run --model tiny --epochs 1000",
    );
    first.has_printed("epoch    1/1000");
    let message = &["run directory run is in use by another job"];
    paceline(folder.path(), "train --run-dir run --model tiny").check(USAGE, message);
    paceline(folder.path(), "train --resume run").check(USAGE, message);
    first.signal(rustix::process::Signal::TERM);
    first.ended(LIMIT).check(143, &[]);
    // The refused job has changed nothing: the run goes on.
    let settings = fs::read_to_string(folder.path().join("run/config.toml")).expect("settings");
    assert!(settings.contains("epochs = 1000"), "{settings}");
}

#[test]
fn a_run_directory_that_is_a_file_is_named_as_one() {
    let folder = folder_with("run", "text");
    let ended = paceline(folder.path(), "train --run-dir run --model tiny");
    ended.check(
        ENVIRONMENT,
        &["cannot create run directory run: it is a file, not a directory"],
    );
    let text = fs::read_to_string(folder.path().join("run")).expect("a file");
    assert_eq!(text, "text");
}

#[test]
fn a_run_directory_that_holds_a_run_is_not_written_over() {
    let folder = tempdir().expect("a folder");
    let line = "train --run-dir run --model tiny --epochs 1";
    paceline(folder.path(), line).is_well();
    paceline(folder.path(), line).check(USAGE, &["already holds a run", "add --resume"]);
    paceline(folder.path(), "train --resume other").check(USAGE, &["other holds no run"]);
}

#[test]
fn gpus_that_are_not_there_are_counted() {
    let folder = tempdir().expect("a folder");
    let ended = paceline(folder.path(), "train --use-gpu 64");
    ended.check(ENVIRONMENT, &["64 GPUs asked for, ", " found", "hint: "]);
}

#[test]
#[cfg(not(feature = "cuda"))]
fn a_kind_of_device_that_was_not_built_in_is_told_with_what_builds_it() {
    let folder = tempdir().expect("a folder");
    paceline(folder.path(), "train --device cuda").check(
        ENVIRONMENT,
        &[
            "error: this program was built without cuda",
            "hint: build it with the feature: cargo build --release --features cuda",
        ],
    );
    assert!(
        !folder.path().join("runs").exists(),
        "nothing is begun that cannot go on"
    );
}

#[test]
fn a_device_that_is_no_gpu_goes_with_no_gpus() {
    let folder = tempdir().expect("a folder");
    paceline(folder.path(), "train --device cpu --use-gpu 2").check(
        USAGE,
        &["device cpu (flag --device) has no GPUs, but `use_gpu` is 2 (flag --use-gpu)"],
    );
    paceline(folder.path(), "train --device gpu").check(
        USAGE,
        &["invalid value `gpu` for `device` (flag --device): expected one of auto, cpu, cuda, "],
    );
}

#[test]
fn a_loss_that_is_not_finite_ends_the_job_and_keeps_the_checkpoints() {
    let folder = tempdir().expect("a folder");
    let ended = paceline(
        folder.path(),
        "train --run-dir run --model tiny --shards 2 --nproc-per-node 2 --save-every 1 \
         --lr 100 --weight-decay 1 --warmup 0 --epochs 20",
    );
    ended.check(
        1,
        &[
            "rank 0 (pid ",
            "exited with code 1",
            "the loss is NaN at step ",
            "lower --lr",
        ],
    );
    assert!(!ended.err.contains("goes on"), "{}", ended.err);
    let run = folder.path().join("run");
    let done = *steps(&metrics(&run), "step").last().expect("a step");
    let newest = checkpoints(&run).pop().expect("a checkpoint");
    assert!(
        newest.ends_with(format!("step-{done:010}")),
        "{}",
        newest.display()
    );
}

#[test]
fn a_folder_that_cannot_be_written_is_an_environments_fault() {
    let folder = folder_with("file", "");
    paceline(folder.path(), "train --run-dir file/run")
        .check(ENVIRONMENT, &["cannot create run directory file/run"]);
}

/// A job whose run directory is on its own small disk, and the same job again after the disk has grown.
const FULL_DISK: &str = "
set -u
mount -t tmpfs -o size=512k tmpfs disk || exit 77
\"$0\" train --run-dir disk/run --model tiny --shards 2 --nproc-per-node 2 --epochs 2 --save-every 1 --keep 1000
code=$?
ls disk/run/checkpoints > kept
mount -o remount,size=64m disk || exit 77
\"$0\" train --resume disk/run || exit 78
exit $code
";

fn can_mount() -> bool {
    let probe = Command::new("unshare")
        .args([
            "--user",
            "--map-root-user",
            "--mount",
            "mount",
            "-t",
            "tmpfs",
            "tmpfs",
            "/mnt",
        ])
        .output();
    probe.is_ok_and(|output| output.status.success())
}

#[test]
fn a_disk_that_fills_up_ends_the_job_and_keeps_the_checkpoints() {
    if !can_mount() {
        paceline_testing::skipped("this user may not mount a small disk in a namespace");
        return;
    }
    let folder = tempdir().expect("a folder");
    fs::create_dir(folder.path().join("disk")).expect("a folder");
    let args = [
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        FULL_DISK,
        PACELINE,
    ];
    let ended = Running::start(command(folder.path(), "unshare", args)).ended(LIMIT);
    ended.check(
        ENVIRONMENT,
        &[
            "rank 0 (pid ",
            "exited with code 3",
            "No space left on device",
            "continue with --resume",
        ],
    );
    let kept = fs::read_to_string(folder.path().join("kept")).expect("a list");
    assert!(kept.lines().count() > 2, "{kept}");
    let unfinished = |name: &&str| !name.starts_with("step-") && *name != "ledger.jsonl";
    assert_eq!(kept.lines().find(unfinished), None, "{kept}");
    assert!(ended.out.contains("resumed   after step "), "{}", ended.out);
    assert_eq!(ended.hash(), whole(folder.path()));
}

/// The hash of the same job with enough disk space.
fn whole(folder: &Path) -> String {
    let line = "train --run-dir whole --model tiny --shards 2 --nproc-per-node 2 --epochs 2";
    paceline(folder, line).is_well().hash().to_owned()
}

#[test]
fn a_job_whose_loss_stays_infinite_ends_whatever_its_policy() {
    for (policy, says) in [
        ("stop", "training has diverged"),
        (
            "skip",
            "the last of 10 skipped in a row: training has diverged",
        ),
        ("back", "the last of 10 within 101 steps of each other"),
    ] {
        let folder = tempdir().expect("a folder");
        let line = "train --run-dir run --model tiny --precision fp16 --lr 100 --nproc-per-node 2";
        let ended = paceline(folder.path(), &format!("{line} --non-finite {policy}"));
        ended.check(1, &[says, "hint: lower --lr"]);
        let skipped = ended.out.matches(" skipped: the loss is").count();
        assert_eq!(skipped, if policy == "stop" { 0 } else { 9 });
        let told = paceline(folder.path(), "ledger verify run");
        let named = match policy {
            "stop" => "steps",
            "skip" => "changed nothing: the loss or a gradient",
            _ => "were given up: loss or gradient not finite",
        };
        assert!(told.out.contains(named), "{}", told.out);
    }
}

#[test]
fn a_job_that_goes_back_from_infinities_ends_with_the_same_bits_on_any_number_of_ranks() {
    let folder = tempdir().expect("a folder");
    // The rate is too high for f16 at first.
    let job = "--model tiny --precision fp16 --lr 10 --warmup 0 --epochs 1 --shards 4 --keep 100 \
               --record 100 --non-finite back --snapshot-every 5";
    let train = |run: &str, ranks: usize| {
        let line = format!("train --run-dir {run} {job} --nproc-per-node {ranks}");
        let ended = paceline(folder.path(), &line);
        ended.is_well();
        assert!(
            ended.out.contains("steps 1 to 2 are given up: "),
            "{}",
            ended.out
        );
        ended.hash().to_owned()
    };
    let hash = train("alone", 1);
    assert_eq!(train("four", 4), hash);
    let remove_after = |run: &str, last: &str| {
        let saved = checkpoints(&folder.path().join(run)).into_iter();
        for later in saved.filter(|path| path.file_name() > Some(last.as_ref())) {
            fs::remove_dir_all(later).expect("removed");
        }
    };
    remove_after("four", "step-0000000004");
    let resumed = paceline(folder.path(), "train --resume four --nproc-per-node 2");
    resumed.is_well();
    assert!(
        resumed.out.contains("resumed   after step 4"),
        "{}",
        resumed.out
    );
    assert_eq!(resumed.hash(), hash);
    let told = paceline(folder.path(), "ledger verify four");
    told.is_well();
    for text in [
        "epoch     1: each of 1437 samples was used exactly once",
        "128 samples of steps 1 to 2 were given up: loss or gradient not finite",
    ] {
        assert!(told.out.contains(text), "{text:?} is not in\n{}", told.out);
    }
    // From the start, through all steps that were given up.
    remove_after("alone", "step-");
    let replayed = paceline(folder.path(), "replay alone --step 23");
    replayed.is_well();
    assert!(replayed.out.contains("same bits"), "{}", replayed.out);
}
