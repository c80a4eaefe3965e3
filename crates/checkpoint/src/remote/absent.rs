//! `Remote` in a build without the feature `object-store`: none can be opened.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::error::CheckpointError;

/// A URL below which an object store has a copy of a job's checkpoints; needs the feature `object-store`.
#[derive(Debug)]
pub enum Remote {}

impl Remote {
    /// The place at a URL.
    ///
    /// *Errors*: this build cannot use any.
    pub fn open(url: &str) -> Result<Self, CheckpointError> {
        Err(CheckpointError::Remote {
            action: "use",
            url: url.into(),
            what: "this program was built without object stores".into(),
            hint: Some(
                "build it with the feature: cargo build --release --features object-store".into(),
            ),
        })
    }

    /// The URL.
    pub fn url(&self) -> &str {
        match *self {}
    }

    /// Step of the newest checkpoint there.
    pub fn newest_step(&self) -> Result<Option<u64>, CheckpointError> {
        match *self {}
    }

    /// A small text there.
    pub fn read(&self, _name: &str) -> Result<Option<String>, CheckpointError> {
        match *self {}
    }

    /// Puts a small text there.
    pub fn write(&self, _name: &str, _text: &str) -> Result<(), CheckpointError> {
        match *self {}
    }

    /// Downloads the newest whole checkpoint.
    pub fn download(&self, _folder: &Path) -> Result<bool, CheckpointError> {
        match *self {}
    }
}

#[derive(Debug)]
pub(crate) enum Uploader {}

impl Uploader {
    pub(crate) fn start(remote: Arc<Remote>, _keep: usize, _rank: usize) -> io::Result<Self> {
        match *remote {}
    }

    pub(crate) fn put(&self, _step: u64, _place: &Path, _ledger: Option<File>) -> io::Result<()> {
        match *self {}
    }

    pub(crate) fn remove_after(&self, _step: u64) {
        match *self {}
    }

    pub(crate) fn finish(self) {
        match self {}
    }

    pub(crate) fn abandon(self) {
        match self {}
    }
}
