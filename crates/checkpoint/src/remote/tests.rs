use std::collections::BTreeSet;

use burn::tensor::TensorData;
use paceline_testing::bucket::{Bucket, Fault};

use super::*;
use crate::folder::tests::{contents, save};

/// A remote at `s3://bucket/run` that a server of the test has.
fn remote_on(bucket: &Bucket) -> Remote {
    let variables = [
        ("AWS_ENDPOINT_URL", bucket.endpoint()),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
    ];
    open("s3://bucket/run", &variables).expect("a remote")
}

fn open(url: &str, variables: &[(&str, &str)]) -> Result<Remote, CheckpointError> {
    let variables = variables.iter();
    let variables = variables.map(|(name, value)| (name.to_string(), value.to_string()));
    Remote::open_with(
        url,
        &variables.collect::<Vec<_>>(),
        Duration::from_millis(1),
    )
}

/// Saves a checkpoint of 20 MB on disk and uploads it.
fn save_and_upload(
    remote: &Remote,
    folder: &Path,
    step: u64,
    keep: usize,
) -> Result<(), CheckpointError> {
    let mut parts = contents(step);
    let values: Vec<f32> = (0..5_000_000).map(|at| (at ^ step) as f32).collect();
    parts
        .weights
        .push(("large".into(), TensorData::new(values, [5_000_000])));
    let place = save(folder, 10, parts).expect("saved");
    upload(remote, step, &place, keep)
}

fn upload(remote: &Remote, step: u64, place: &Path, keep: usize) -> Result<(), CheckpointError> {
    fs::write(place.with_file_name("ledger.jsonl"), format!("to {step}")).expect("written");
    let ledger = fs::File::open(place.with_file_name("ledger.jsonl")).expect("a ledger");
    let upload = Upload::open(step, place, Some(ledger)).expect("readable");
    remote.runtime.block_on(remote.upload(&upload, keep))
}

/// The files of a step's checkpoint in a folder.
fn files_of(folder: &Path, step: u64) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder.join(folder::name_of(step))).expect("a checkpoint");
    let files = entries.map(|entry| {
        let path = entry.expect("an entry").path();
        let name = path
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        (name, fs::read(path).expect("readable"))
    });
    let mut files: Vec<_> = files.collect();
    files.sort();
    files
}

#[test]
fn a_checkpoint_arrives_whole_though_each_request_fails_and_is_cut_once() {
    let bucket = Bucket::start(Some("key"));
    let mut seen = BTreeSet::new();
    bucket.set_faults(move |method, line| match () {
        () if seen.insert(format!("{method} {line}")) => Some(Fault::Failed),
        // Deleting and completing again would find nothing.
        () if method == "POST" || method == "DELETE" => None,
        () if seen.insert(format!("again {method} {line}")) => Some(Fault::Cut),
        () => None,
    });
    let remote = remote_on(&bucket);
    let [here, there] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    for step in [1, 2, 3] {
        save_and_upload(&remote, here.path(), step, 2).expect("uploaded");
    }
    assert_eq!(remote.newest_step().expect("listed"), Some(3));
    assert!(remote.download(there.path()).expect("downloaded"));
    assert_eq!(files_of(there.path(), 3), files_of(here.path(), 3));
    let ledger = fs::read_to_string(there.path().join("ledger.jsonl"));
    assert_eq!(ledger.expect("a ledger"), "to 3");
    assert!(
        !remote
            .download(there.path())
            .expect("the same is not loaded twice")
    );

    let steps: BTreeSet<String> = bucket.objects().into_keys().collect();
    let steps: BTreeSet<&str> = steps
        .iter()
        .filter_map(|name| name.split('/').nth(1))
        .collect();
    let expected = ["ledger.jsonl", "step-0000000002", "step-0000000003"];
    assert_eq!(steps, BTreeSet::from(expected), "the newest two are kept");
    // A file of 20 MB goes and comes in parts, and `state.json` is the last file of all.
    let requests = bucket.requests();
    assert!(
        requests.iter().any(|line| line.contains("partNumber=3")),
        "{requests:?}"
    );
    let mut puts = requests.iter().filter(|line| line.starts_with("PUT"));
    assert!(
        puts.next_back()
            .is_some_and(|line| line.contains("step-0000000003/state.json"))
    );
}

#[test]
fn what_is_torn_or_changed_in_the_store_is_passed_over_and_never_leaves_its_folder() {
    let bucket = Bucket::start(None);
    let remote = remote_on(&bucket);
    let [here, there] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    for step in 1..=5 {
        let place = save(here.path(), 10, contents(step)).expect("saved");
        upload(&remote, step, &place, 10).expect("uploaded");
    }
    let of = |step, name: &str| format!("run/{}/{name}", folder::name_of(step));
    // An upload that was interrupted.
    bucket.set(&of(5, STATE), None);
    let state = String::from_utf8(bucket.objects()[&of(4, STATE)].clone()).expect("text");
    let foreign = state.replacen("hook.safetensors", "../hook.safetensors", 1);
    bucket.set(&of(4, STATE), Some(foreign.into()));
    bucket.set(&of(3, "schedule.burnpack"), None);
    let mut weights = bucket.objects()[&of(2, files::WEIGHTS)].clone();
    *weights.last_mut().expect("bytes") ^= 1;
    bucket.set(&of(2, files::WEIGHTS), Some(weights));

    assert!(remote.download(there.path()).expect("downloaded"));
    assert_eq!(
        folder::list(there.path()),
        [there.path().join(folder::name_of(1))]
    );
    assert_eq!(files_of(there.path(), 1), files_of(here.path(), 1));

    bucket.set(&of(1, STATE), Some(b"{}".to_vec()));
    let empty = tempfile::tempdir().expect("a folder");
    let error = remote.download(empty.path()).expect_err("all are damaged");
    let text = error.to_string();
    assert!(matches!(error, CheckpointError::NoneValid { .. }), "{text}");
    for part in [
        "s3://bucket/run/step-0000000004: state.json names \"../hook.safetensors\"",
        "s3://bucket/run/step-0000000003: schedule.burnpack is missing",
        "s3://bucket/run/step-0000000002: model.safetensors does not have the checksum",
        "s3://bucket/run/step-0000000001: state.json is damaged",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert_eq!(fs::read_dir(empty.path()).expect("a folder").count(), 0);
    // The next upload clears what an interrupted one left.
    let place = here.path().join(folder::name_of(5));
    let before = bucket.requests().len();
    upload(&remote, 5, &place, 1).expect("uploaded");
    let requests = bucket.requests().split_off(before);
    let reads = requests
        .iter()
        .filter(|line| !line.starts_with("PUT") && !line.starts_with("POST"));
    let reads: Vec<_> = reads.filter(|line| !line.starts_with("DELETE")).collect();
    assert_eq!(reads.len(), 1, "one listing: {reads:?}");
    let left = bucket.objects().into_keys();
    let left: Vec<String> = left.filter(|name| !name.contains("0005/")).collect();
    assert_eq!(left, ["run/ledger.jsonl"]);
}

#[test]
fn a_folder_and_google_cloud_storage_take_copies_too() {
    let (bucket, folder) = (Bucket::start(None), tempfile::tempdir().expect("a folder"));
    let account = serde_json::json!({
        "gcs_base_url": bucket.endpoint(), "disable_oauth": true,
        "client_email": "", "private_key": "", "private_key_id": "",
    });
    let account = [("GOOGLE_SERVICE_ACCOUNT_KEY", &*account.to_string())];
    let to_folder = format!("file://{}/copies", folder.path().display());
    for (url, variables) in [("gs://bucket/run", &account[..]), (&to_folder, &[])] {
        let remote = open(url, variables).expect("a remote");
        assert_eq!(remote.newest_step().expect("listed"), None, "{url}");
        let [here, there] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
        for step in [1, 2] {
            save_and_upload(&remote, here.path(), step, 1).expect(url);
        }
        remote.write("config.toml", "a = 1").expect(url);
        assert_eq!(
            remote.read("config.toml").expect(url).as_deref(),
            Some("a = 1")
        );
        assert_eq!(remote.read("other").expect(url), None);
        assert!(remote.download(there.path()).expect(url), "{url}");
        assert_eq!(files_of(there.path(), 2), files_of(here.path(), 2), "{url}");
    }
    let copies = fs::read_dir(folder.path().join("copies")).expect("copies");
    assert_eq!(copies.count(), 3, "settings, ledger, and one checkpoint");
}

#[test]
fn checkpoints_of_undone_steps_are_removed_before_another_one_is_uploaded() {
    let folder = tempfile::tempdir().expect("a folder");
    let bucket = Bucket::start(Some("key"));
    let remote = Arc::new(remote_on(&bucket));
    let uploader = Uploader::start(remote.clone(), 10, 0).expect("a thread");
    let put = |step: u64| {
        let place = save(folder.path(), 10, contents(step)).expect("saved");
        uploader.put(step, &place, None).expect("readable");
    };
    let has = |steps: &[u64]| {
        let names = steps.iter().map(|step| folder::name_of(*step));
        let state: Vec<String> = names.map(|name| format!("run/{name}/{STATE}")).collect();
        let limit = Duration::from_secs(60);
        bucket.wait_for(limit, |found| {
            state.iter().all(|name| found.contains(&&**name))
        })
    };
    put(5);
    assert!(has(&[5]), "{:?}", bucket.objects().keys());
    put(10);
    assert!(has(&[5, 10]), "{:?}", bucket.objects().keys());
    // What cannot be removed at first is removed before the next upload.
    let (denied, was_denied) = std::sync::mpsc::channel();
    let mut denied = Some(denied);
    bucket.set_faults(move |_, line| {
        let denied = denied.take_if(|_| line.contains("?delete"))?;
        denied.send(()).expect("the test waits");
        Some(Fault::Denied)
    });
    uploader.remove_after(7);
    let is_tried = was_denied.recv_timeout(Duration::from_secs(60));
    is_tried.expect("it is removed");
    put(9);
    uploader.finish();
    let left: Vec<u64> = published(&remote.list().expect("a listing")).collect();
    assert_eq!(left, [9, 5]);
    let mut names = bucket.objects().into_keys();
    assert!(!names.any(|name| name.contains("-0000000010")));
}

#[test]
fn errors_say_what_to_change() {
    let bucket = Bucket::start(Some("key"));
    let at = |url: &str, key: &str| {
        let variables = [
            ("AWS_ENDPOINT_URL", bucket.endpoint()),
            ("AWS_ACCESS_KEY_ID", key),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
        ];
        open(url, &variables)?.newest_step()
    };
    let nowhere = [
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
        ("AWS_SKIP_SIGNATURE", "true"),
    ];
    let metadata = [("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")];
    let cases = [
        (
            at("s3://bucket/run", "other"),
            "permission denied (AccessDenied: says the test)",
            "AWS_SECRET_ACCESS_KEY",
        ),
        (
            at("s3://buckle/run", "key"),
            "there is no such bucket (NoSuchBucket: says the test)",
            "create the bucket",
        ),
        (
            at("runs/mine", "key"),
            "relative URL without a base",
            "file:///FOLDER",
        ),
        (
            at("ftp://host/run", "key"),
            "it is not the URL of an object store",
            "s3://BUCKET/PATH",
        ),
        (
            at("https://host/run", "key"),
            "https:// is not supported",
            "s3://BUCKET/PATH",
        ),
        (
            open("s3://bucket/run", &nowhere).and_then(|remote| remote.newest_step()),
            "Connection refused",
            "",
        ),
        (
            open("s3://bucket/run", &metadata).and_then(|remote| remote.newest_step()),
            "Connection refused",
            "set AWS_ACCESS_KEY_ID",
        ),
    ];
    for (result, what, hint) in cases {
        let error = result.expect_err(what);
        assert!(error.to_string().contains(what), "no {what:?} in {error}");
        let advice = error.hint().unwrap_or_default();
        assert!(
            advice.contains(hint),
            "no {hint:?} in {advice:?} of {error}"
        );
    }
    assert_eq!(at("s3://bucket/run", "key").expect("allowed"), None);
}
