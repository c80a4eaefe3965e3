//! The thread that uploads checkpoints: always the newest one next, and none before those of undone steps are removed.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use paceline_rendezvous::notice;
use tokio::sync::watch;

use super::Remote;
use super::transfer::Source;
use crate::files::STATE;
use crate::folder;

/// A checkpoint to upload. Its files are open, so they can be read even once the folder no longer keeps it.
#[derive(Debug)]
pub(super) struct Upload {
    pub(super) step: u64,
    /// All but `state.json`.
    pub(super) files: Vec<(String, Source)>,
    pub(super) state: Source,
    pub(super) ledger: Option<Source>,
}

impl Upload {
    /// The checkpoint in the folder `place`.
    pub(super) fn open(step: u64, place: &Path, ledger: Option<File>) -> io::Result<Self> {
        let mut files = Vec::new();
        for entry in fs::read_dir(place)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name != STATE {
                files.push((name, Source::new(File::open(entry.path())?)?));
            }
        }
        Ok(Self {
            step,
            files,
            state: Source::new(File::open(place.join(STATE))?)?,
            ledger: ledger.map(Source::new).transpose()?,
        })
    }
}

/// The thread.
#[derive(Debug)]
pub(crate) struct Uploader {
    url: String,
    to: watch::Sender<Option<Arc<Upload>>>,
    undone: Arc<Mutex<Option<u64>>>,
    /// Step of the last checkpoint that the thread is done with.
    done: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Uploader {
    /// Starts the thread, which keeps the newest `keep` checkpoints at `remote`.
    pub(crate) fn start(remote: Arc<Remote>, keep: usize, rank: usize) -> io::Result<Self> {
        let (to, from) = watch::channel(None);
        let done = Arc::new(AtomicU64::new(u64::MAX));
        let (url, is_done) = (remote.url().to_owned(), done.clone());
        let undone = Arc::<Mutex<_>>::default();
        let to_remove = undone.clone();
        let thread = thread::Builder::new().name(format!("rank{rank}/upload"));
        let run = move || {
            let uploads = run(&remote, keep, from, &to_remove, &is_done);
            remote.runtime.block_on(uploads);
        };
        Ok(Self {
            url,
            to,
            undone,
            done,
            thread: thread.spawn(run)?,
        })
    }

    /// Hands over the checkpoint in the folder `place`. One that still waits makes way for it.
    pub(crate) fn put(&self, step: u64, place: &Path, ledger: Option<File>) -> io::Result<()> {
        let upload = Upload::open(step, place, ledger)?;
        self.to.send_replace(Some(Arc::new(upload)));
        Ok(())
    }

    /// Has the thread remove the checkpoints of later steps, which are undone, before it uploads another one.
    pub(crate) fn remove_after(&self, step: u64) {
        let mut undone = self.undone.lock().unwrap_or_else(PoisonError::into_inner);
        *undone = undone.take().into_iter().chain([step]).min();
        drop(undone);
        // One that still waits may be undone, and soon has a successor.
        self.to.send_replace(None);
    }

    /// Waits until the newest checkpoint is uploaded, or has failed to.
    pub(crate) fn finish(self) {
        drop(self.to);
        if let Err(panic) = self.thread.join() {
            std::panic::resume_unwind(panic);
        }
    }

    /// Leaves the thread to itself: a job that failed must not wait for a network.
    pub(crate) fn abandon(self) {
        let newest = self.to.borrow().as_ref().map(|upload| upload.step);
        if let Some(step) = newest.filter(|step| *step != self.done.load(Relaxed)) {
            let (name, url) = (folder::name_of(step), self.url);
            notice!(
                WARN,
                "{name} may not be uploaded to {url}: the job ended before that"
            );
        }
    }
}

/// Uploads and removes checkpoints until the sender is gone.
async fn run(
    remote: &Remote,
    keep: usize,
    mut from: watch::Receiver<Option<Arc<Upload>>>,
    undone: &Mutex<Option<u64>>,
    done: &AtomicU64,
) {
    let (mut has_failed, mut to_remove) = (false, None);
    while from.changed().await.is_ok() {
        let upload = from.borrow_and_update().clone();
        // What could not be removed is tried again.
        let news = undone.lock().unwrap_or_else(PoisonError::into_inner).take();
        to_remove = to_remove.into_iter().chain(news).min();
        let carried_out = async {
            if let Some(step) = to_remove {
                remote.remove_after(step).await?;
            }
            to_remove = None;
            match &upload {
                Some(upload) => remote.upload(upload, keep).await,
                None => Ok(()),
            }
        };
        let carried_out = carried_out.await;
        let step = upload.map(|upload| upload.step);
        if let Err(error) = &carried_out
            && !has_failed
        {
            let what = step.map_or("the newest checkpoint".into(), folder::name_of);
            notice!(
                WARN,
                "{error}; {what} is on disk only, training goes on, and the next checkpoint is uploaded if it can be"
            );
        }
        has_failed = carried_out.is_err();
        step.inspect(|step| done.store(*step, Relaxed));
    }
}
