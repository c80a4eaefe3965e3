//! Files to and from an object store: in parts, a few of them at once.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use object_store::path::Path as Key;
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt};
use tokio::task::JoinSet;

use super::Failed;
use crate::error::CheckpointError;

/// Bytes of a part.
const PART_BYTES: u64 = 8 << 20;
/// Parts that S3 takes; a larger file has larger parts.
const PARTS_MAX: u64 = 10_000;
/// Parts under way at once.
const AT_ONCE: usize = 4;

/// A file, and the bytes of it that are uploaded: its length now.
#[derive(Debug)]
pub(super) struct Source {
    file: File,
    len: u64,
}

impl Source {
    pub(super) fn new(file: File) -> io::Result<Self> {
        let len = file.metadata()?.len();
        Ok(Self { file, len })
    }

    fn read(&self, from: u64, len: u64) -> Result<Vec<u8>, Failed> {
        let mut bytes = vec![0; len as usize];
        let read = self.file.read_exact_at(&mut bytes, from);
        read.map_err(on_disk(Path::new("a checkpoint")))?;
        Ok(bytes)
    }
}

/// Uploads a file. It appears whole or not at all.
pub(super) async fn upload(
    store: &Arc<dyn ObjectStore>,
    key: &Key,
    from: &Source,
) -> Result<(), Failed> {
    if from.len <= PART_BYTES {
        store.put(key, from.read(0, from.len)?.into()).await?;
        return Ok(());
    }
    let mut upload = store.put_multipart(key).await?;
    let uploaded = upload_parts(&mut *upload, from).await;
    if uploaded.is_err() {
        // Parts that stay behind cost money until the bucket's lifecycle rule removes them.
        let _ = upload.abort().await;
    }
    uploaded
}

async fn upload_parts(upload: &mut dyn MultipartUpload, from: &Source) -> Result<(), Failed> {
    let part = PART_BYTES.max(from.len.div_ceil(PARTS_MAX));
    let mut parts = JoinSet::new();
    let mut at = 0;
    while at < from.len || !parts.is_empty() {
        if at < from.len && parts.len() < AT_ONCE {
            let len = part.min(from.len - at);
            parts.spawn(upload.put_part(from.read(at, len)?.into()));
            at += len;
        } else if let Some(put) = parts.join_next().await {
            put.expect("an upload does not panic")?;
        }
    }
    upload.complete().await?;
    Ok(())
}

/// Downloads a file.
pub(super) async fn download(
    store: &Arc<dyn ObjectStore>,
    key: &Key,
    to: &Path,
) -> Result<(), Failed> {
    let len = store.head(key).await?.size;
    let file = File::create(to).map_err(on_disk(to))?;
    let mut parts = JoinSet::new();
    let mut at = 0;
    while at < len || !parts.is_empty() {
        if at < len && parts.len() < AT_ONCE {
            let range = at..len.min(at + PART_BYTES);
            at = range.end;
            let (store, key) = (store.clone(), key.clone());
            parts.spawn(async move { (range.clone(), store.get_range(&key, range).await) });
        } else if let Some(got) = parts.join_next().await {
            let (range, bytes) = got.expect("a download does not panic");
            let bytes = bytes?;
            if bytes.len() as u64 != range.end - range.start {
                let what = format!("{key} lacks bytes of its range {range:?}");
                return Err(Failed::Damaged(what));
            }
            file.write_all_at(&bytes, range.start)
                .map_err(on_disk(to))?;
        }
    }
    file.sync_all().map_err(on_disk(to))
}

pub(super) fn on_disk(path: &Path) -> impl FnOnce(io::Error) -> Failed {
    move |source| {
        Failed::Disk(CheckpointError::File {
            action: "copy",
            path: path.to_path_buf(),
            source,
        })
    }
}
