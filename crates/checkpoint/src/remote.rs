//! `Remote`: the copy of a job's checkpoints in an object store.
//!
//! ```text
//! URL/step-0000000345/   the files of the checkpoint; it counts once it has `state.json`, which is uploaded last
//! URL/ledger.jsonl       the run's ledger, at least up to the newest checkpoint
//! ```

mod http;
mod transfer;
mod upload;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path as Key;
use object_store::{
    BackoffConfig, Error, ObjectStore, ObjectStoreExt, ObjectStoreScheme, RetryConfig,
};
use paceline_rendezvous::notice;
use tokio::runtime::{Builder, Runtime};

use crate::error::CheckpointError;
use crate::files::{self, STATE, STATE_BYTES_MAX};
use crate::folder::{self, Writing};
use crate::ledger;
use http::Connector;
pub use http::tls;
use upload::Upload;
pub(crate) use upload::Uploader;

/// Retries of a request, 0.2 s to 5 s apart.
const RETRIES: usize = 5;
/// Time after which a request is not tried again.
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);

/// The part of a server's answer that an error quotes.
const SAID_CHARS_MAX: usize = 300;

/// A URL below which an object store has a copy of a job's checkpoints.
#[derive(Debug)]
pub struct Remote {
    url: String,
    scheme: ObjectStoreScheme,
    store: Arc<dyn ObjectStore>,
    root: Key,
    runtime: Runtime,
}

impl Remote {
    /// The place at a URL: `s3://BUCKET/PATH`, `gs://BUCKET/PATH` or `file:///PATH`. Credentials, region and endpoint come from the
    /// environment, as `object_store` reads it.
    ///
    /// *Errors*: not such a URL; settings that contradict each other.
    pub fn open(url: &str) -> Result<Self, CheckpointError> {
        let text = |value: OsString| value.into_string().ok();
        let variables = std::env::vars_os();
        let variables = variables.filter_map(|(name, value)| Some((text(name)?, text(value)?)));
        let first = Duration::from_millis(200);
        Self::open_with(url, &variables.collect::<Vec<_>>(), first)
    }

    /// As `open`, with these variables and this time before the first retry.
    fn open_with(
        url: &str,
        variables: &[(String, String)],
        init_backoff: Duration,
    ) -> Result<Self, CheckpointError> {
        let url = url.trim_end_matches('/').to_owned();
        let refused = |what: String, hint: &str| CheckpointError::Remote {
            action: "use",
            url: url.clone(),
            what,
            hint: Some(hint.into()),
        };
        const FORMS: &str = "write s3://BUCKET/PATH, gs://BUCKET/PATH or file:///FOLDER";
        let parsed = url::Url::parse(&url).map_err(|error| refused(error.to_string(), FORMS))?;
        let (scheme, root) = ObjectStoreScheme::parse(&parsed)
            .map_err(|_| refused("it is not the URL of an object store".into(), FORMS))?;
        let retry = RetryConfig {
            backoff: BackoffConfig {
                init_backoff,
                max_backoff: Duration::from_secs(5),
                base: 2.0,
            },
            max_retries: RETRIES,
            retry_timeout: RETRY_TIMEOUT,
        };
        let store: Result<Arc<dyn ObjectStore>, Error> = match scheme {
            ObjectStoreScheme::AmazonS3 => configured(variables, "AWS_")
                .fold(AmazonS3Builder::new(), |builder, (key, value)| {
                    builder.with_config(key, value)
                })
                .with_url(&url)
                .with_retry(retry)
                .with_http_connector(Connector)
                .build()
                .map(|store| Arc::new(store) as _),
            ObjectStoreScheme::GoogleCloudStorage => configured(variables, "GOOGLE_")
                .fold(GoogleCloudStorageBuilder::new(), |builder, (key, value)| {
                    builder.with_config(key, value)
                })
                .with_url(&url)
                .with_retry(retry)
                .with_http_connector(Connector)
                .build()
                .map(|store| Arc::new(store) as _),
            ObjectStoreScheme::Local => Ok(Arc::new(
                LocalFileSystem::new().with_automatic_cleanup(true),
            )),
            _ => {
                let what = format!("{}:// is not supported", parsed.scheme());
                return Err(refused(what, FORMS));
            }
        };
        let store = store.map_err(|error| failed(&url, &scheme, "use", error))?;
        let runtime = Builder::new_current_thread().enable_time().build();
        let runtime = runtime
            .map_err(|error| refused(error.to_string(), "raise the limits of the system"))?;
        Ok(Self {
            url,
            scheme,
            store,
            root,
            runtime,
        })
    }

    /// The URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Step of the newest checkpoint there; `None` if the store has no checkpoint.
    ///
    /// *Blocks*: as long as requests and their retries take.
    ///
    /// *Errors*: the store's.
    pub fn newest_step(&self) -> Result<Option<u64>, CheckpointError> {
        Ok(published(&self.list()?).next())
    }

    /// A small text that [`write`](Self::write) put there; `None` if the store has no such object.
    ///
    /// *Errors*: the store's; a text that is too long or not UTF-8.
    pub fn read(&self, name: &str) -> Result<Option<String>, CheckpointError> {
        let key = self.root.clone().join(name);
        let read = match self.runtime.block_on(self.get_small(&key)) {
            Err(Failed::Store(Error::NotFound { .. })) => return Ok(None),
            read => read.and_then(|bytes| {
                let unusable = |_| Failed::Damaged(format!("{name} is not UTF-8"));
                String::from_utf8(bytes).map_err(unusable)
            }),
        };
        read.map(Some)
            .map_err(|error| self.failed("read from", error))
    }

    /// Puts a small text there.
    ///
    /// *Errors*: the store's.
    pub fn write(&self, name: &str, text: &str) -> Result<(), CheckpointError> {
        let key = self.root.clone().join(name);
        let written = self.store.put(&key, text.to_owned().into());
        let written = self.runtime.block_on(written);
        written.map_err(|error| self.failed("write to", error))?;
        Ok(())
    }

    /// Downloads the newest whole checkpoint, and the ledger, into `folder`, unless `folder` has a whole one that is as new. Damaged ones
    /// are skipped with a warning. Returns whether there was one to download.
    ///
    /// *Memory*: a few parts of a file.
    ///
    /// *Errors*: the store's and the disk's; `NoneValid` if all checkpoints there are damaged and `folder` has none.
    pub fn download(&self, folder: &Path) -> Result<bool, CheckpointError> {
        let here = folder::newest(&[folder], u64::MAX).ok().flatten();
        let here = here.and_then(|found| folder::step_of(&found.path));
        let files = self.list()?;
        let mut reasons = Vec::new();
        for step in published(&files).filter(|step| Some(*step) > here) {
            match self.runtime.block_on(self.fetch(step, folder)) {
                Ok(()) => {
                    for reason in reasons {
                        notice!(WARN, "skipped a damaged checkpoint: {reason}");
                    }
                    return Ok(true);
                }
                Err(Failed::Damaged(why)) => {
                    reasons.push(format!("{}/{}: {why}", self.url, folder::name_of(step)));
                }
                Err(error) => return Err(self.failed("download from", error)),
            }
        }
        match here.is_some() || reasons.is_empty() {
            true => Ok(false),
            false => Err(CheckpointError::NoneValid {
                path: self.url.clone().into(),
                reasons,
            }),
        }
    }

    fn list(&self) -> Result<BTreeMap<u64, Vec<Key>>, CheckpointError> {
        let files = self.runtime.block_on(self.files());
        files.map_err(|error| self.failed("look for checkpoints in", error))
    }

    /// Downloads, verifies and publishes one checkpoint.
    async fn fetch(&self, step: u64, folder: &Path) -> Result<(), Failed> {
        let from = self.key_of(step);
        let text = self.get_small(&from.clone().join(STATE)).await;
        let text = text.map_err(|error| error.in_checkpoint(STATE))?;
        let names = files::names(&text).map_err(Failed::Damaged)?;
        let writing = Writing::begin(folder, step).map_err(Failed::Disk)?;
        for name in names {
            let (key, to) = (from.clone().join(&*name), writing.path().join(&name));
            let downloaded = transfer::download(&self.store, &key, &to).await;
            downloaded.map_err(|error| error.in_checkpoint(&name))?;
        }
        fs::write(writing.path().join(STATE), text).map_err(transfer::on_disk(folder))?;
        let read = files::read(writing.path()).map_err(Failed::Damaged)?;
        if read.state.ddp.step != step {
            let found = read.state.ddp.step;
            return Err(Failed::Damaged(format!("{STATE} says step {found}")));
        }
        // A run that resumes from the checkpoint finds all its steps in the ledger.
        let place = ledger::path(folder);
        let beside = place.with_extension("download");
        match transfer::download(&self.store, &self.ledger(), &beside).await {
            Ok(()) => fs::rename(&beside, &place).map_err(transfer::on_disk(&place))?,
            // The program keeps none.
            Err(Failed::Store(Error::NotFound { .. })) => {}
            Err(error) => return Err(error),
        }
        writing.publish(usize::MAX).map(drop).map_err(Failed::Disk)
    }

    /// Uploads a checkpoint, and removes all but the newest `keep`.
    async fn upload(&self, upload: &Upload, keep: usize) -> Result<(), CheckpointError> {
        let put = self.put(upload).await;
        put.map_err(|error| self.failed("upload a checkpoint to", error))?;
        // What cannot be removed now is removed after a later checkpoint.
        let _ = self.prune(upload.step, keep).await;
        Ok(())
    }

    async fn put(&self, upload: &Upload) -> Result<(), Failed> {
        let to = self.key_of(upload.step);
        let state = to.clone().join(STATE);
        // Another checkpoint of this step does not count while its files are replaced.
        self.remove(&state).await?;
        for (name, file) in &upload.files {
            transfer::upload(&self.store, &to.clone().join(name.as_str()), file).await?;
        }
        if let Some(ledger) = &upload.ledger {
            transfer::upload(&self.store, &self.ledger(), ledger).await?;
        }
        transfer::upload(&self.store, &state, &upload.state).await
    }

    /// Removes all but the checkpoint of step `written` and the newest others, `keep` together, and what interrupted uploads left.
    async fn prune(&self, written: u64, keep: usize) -> Result<(), Error> {
        let files = self.files().await?;
        let others = published(&files).filter(|step| *step != written);
        let kept: Vec<u64> = others.take(keep.saturating_sub(1)).collect();
        let is_old = |step| step != written && !kept.contains(&step);
        self.remove_steps(&files, is_old).await
    }

    /// Removes the checkpoints of later steps.
    async fn remove_after(&self, step: u64) -> Result<(), CheckpointError> {
        let removed = match self.files().await {
            Ok(files) => self.remove_steps(&files, |of| of > step).await,
            Err(error) => Err(error),
        };
        removed.map_err(|error| self.failed("remove undone steps from", error))
    }

    async fn remove_steps(
        &self,
        files: &BTreeMap<u64, Vec<Key>>,
        is_wanted: impl Fn(u64) -> bool,
    ) -> Result<(), Error> {
        for (step, keys) in files.iter().filter(|(step, _)| is_wanted(**step)) {
            self.remove(&self.key_of(*step).join(STATE)).await?;
            for key in keys {
                self.remove(key).await?;
            }
        }
        Ok(())
    }

    /// Removes an object, if it exists.
    async fn remove(&self, key: &Key) -> Result<(), Error> {
        match self.store.delete(key).await {
            Err(Error::NotFound { .. }) => Ok(()),
            removed => removed,
        }
    }

    /// The files of each step, from one listing.
    async fn files(&self) -> Result<BTreeMap<u64, Vec<Key>>, Error> {
        let mut files = BTreeMap::<u64, Vec<Key>>::new();
        let mut listing = self.store.list(Some(&self.root));
        while let Some(object) = listing.try_next().await? {
            if let Some(step) = self.step_of(&object.location) {
                files.entry(step).or_default().push(object.location);
            }
        }
        Ok(files)
    }

    /// An object of at most as many bytes as `state.json` may have.
    async fn get_small(&self, key: &Key) -> Result<Vec<u8>, Failed> {
        let len = self.store.head(key).await?.size;
        if len > STATE_BYTES_MAX {
            return Err(Failed::Damaged(format!(
                "{key} has {len} bytes, more than the {STATE_BYTES_MAX} allowed"
            )));
        }
        Ok(self.store.get_range(key, 0..len).await?.to_vec())
    }

    /// The step of a checkpoint's file.
    fn step_of(&self, key: &Key) -> Option<u64> {
        let mut below = key.prefix_match(&self.root)?;
        let folder = below.next()?;
        below.next()?;
        folder::step_of(Path::new(folder.as_ref()))
    }

    fn key_of(&self, step: u64) -> Key {
        self.root.clone().join(folder::name_of(step))
    }

    fn ledger(&self) -> Key {
        let name = ledger::path(Path::new(""));
        self.root.clone().join(name.to_string_lossy().into_owned())
    }

    fn failed(&self, action: &'static str, error: impl Into<Failed>) -> CheckpointError {
        match error.into() {
            Failed::Store(error) => failed(&self.url, &self.scheme, action, error),
            Failed::Disk(error) => error,
            Failed::Damaged(what) => CheckpointError::Remote {
                action,
                url: self.url.clone(),
                what,
                hint: None,
            },
        }
    }
}

/// The steps of which there is a checkpoint, newest first.
fn published(files: &BTreeMap<u64, Vec<Key>>) -> impl Iterator<Item = u64> {
    let counts = |keys: &Vec<Key>| keys.iter().any(|key| key.filename() == Some(STATE));
    let steps = files.iter().rev().filter(move |(_, keys)| counts(keys));
    steps.map(|(step, _)| *step)
}

/// Why a transfer failed.
enum Failed {
    Store(Error),
    /// The objects are not those of a checkpoint.
    Damaged(String),
    Disk(CheckpointError),
}

impl Failed {
    /// A file of a checkpoint that is missing is damage.
    fn in_checkpoint(self, name: &str) -> Self {
        match self {
            Self::Store(Error::NotFound { .. }) => Self::Damaged(format!("{name} is missing")),
            other => other,
        }
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Store(error)
    }
}

/// The settings of a store in the variables whose names have this prefix; it does not know all of them.
fn configured<'a, K: FromStr>(
    variables: &'a [(String, String)],
    prefix: &'a str,
) -> impl Iterator<Item = (K, &'a str)> {
    let own = variables
        .iter()
        .filter(move |(name, _)| name.starts_with(prefix));
    own.filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, &**value)))
}

/// An error of the store, with advice.
fn failed(
    url: &str,
    scheme: &ObjectStoreScheme,
    action: &'static str,
    error: Error,
) -> CheckpointError {
    let (variables, prefix) = match scheme {
        ObjectStoreScheme::AmazonS3 => (
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL where needed; \
             files in ~/.aws are not read)",
            "AWS_ACCESS_KEY_ID",
        ),
        _ => (
            "GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SERVICE_ACCOUNT with the path of a service account's key",
            "GOOGLE_",
        ),
    };
    let mut cause: &dyn std::error::Error = &error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    let cause = cause.to_string();
    // The only place where errors of all operations have the status.
    let status = cause.split_once("status code: ");
    let status = status.and_then(|(_, rest)| rest.split(' ').next());
    let has_variables =
        std::env::vars_os().any(|(name, _)| name.to_string_lossy().starts_with(prefix));
    let said = said(&cause);
    let (what, hint) = match status {
        Some("401" | "403") => (
            format!("permission denied ({said})"),
            Some(format!(
                "the credentials must allow to list, read, write and delete below this URL; they are read from {variables}"
            )),
        ),
        Some("404") => (
            format!("there is no such bucket ({said})"),
            Some("create the bucket, or check its name and the region".into()),
        ),
        _ if *scheme == ObjectStoreScheme::Local || has_variables => (said, None),
        _ => (said, Some(format!("set {variables}"))),
    };
    CheckpointError::Remote {
        action,
        url: url.into(),
        what,
        hint,
    }
}

/// What a server says, on one line: code and message of an XML document if there is one.
fn said(text: &str) -> String {
    let of = |tag: &str| {
        let (_, rest) = text.split_once(&format!("<{tag}>"))?;
        Some(rest.split_once(&format!("</{tag}>"))?.0)
    };
    let parts: Vec<&str> = ["Code", "Message"].into_iter().filter_map(of).collect();
    let text = match parts.is_empty() {
        true => text.to_owned(),
        false => parts.join(": "),
    };
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").chars().take(SAID_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests;
