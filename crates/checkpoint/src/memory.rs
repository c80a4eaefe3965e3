//! Checkpoints in the memory of hosts: copies of a finished one on other hosts, and the newest of all hosts for rank 0.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use paceline_collective::ProcessGroup;
use paceline_rendezvous::notice;
use serde::{Deserialize, Serialize};

use crate::error::{CheckpointError, failed_in};
use crate::files::is_plain;
use crate::folder::{self, Writing};

/// Bytes of a file that a message has.
const PIECE_BYTES: usize = 4 << 20;
/// Most files of a checkpoint.
const FILES_MAX: usize = 1 << 17;
/// Of these messages; a program may have others on their way.
const TAG: u32 = u32::MAX;
/// No file system in memory, or no checkpoint in it, in place of a checkpoint's step.
const NO_FOLDER: i64 = -2;
const NO_COPY: i64 = -1;

/// A checkpoint that one rank sends to another.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    step: u64,
    /// Length of each file by name.
    files: BTreeMap<String, u64>,
}

/// What all copies of a job in memory have in common.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    /// The first rank on another host than rank 0's, which keeps a second copy; unknown before the first.
    neighbour: Option<Option<usize>>,
    has_warned: Arc<AtomicBool>,
}

impl Copies {
    /// Begins a copy of the job's state in this host's `folder`. All ranks call it. `group` has the same ranks, for what they send in the
    /// background.
    pub(crate) fn begin(
        &mut self,
        job: &ProcessGroup,
        group: ProcessGroup,
        folder: &Path,
    ) -> Result<Copying, CheckpointError> {
        let neighbour = match self.neighbour {
            Some(neighbour) => neighbour,
            None => *self.neighbour.insert(neighbour(&group)?),
        };
        Ok(Copying {
            job: job.clone(),
            group,
            neighbour,
            folder: folder.to_path_buf(),
            has_warned: self.has_warned.clone(),
        })
    }

    /// Sends rank 0 the newest checkpoint in the memory of any rank's host, unless its own is as new. Says on rank 0 whether one has
    /// come. All ranks call it.
    pub(crate) fn bring(
        &self,
        group: &ProcessGroup,
        folder: Option<&Path>,
    ) -> Result<bool, CheckpointError> {
        let newest = folder.map(|folder| folder::list(folder).pop());
        let own = match &newest {
            None => NO_FOLDER,
            Some(None) => NO_COPY,
            Some(Some(path)) => folder::step_of(path).map_or(NO_COPY, |step| step as i64),
        };
        let mut steps = vec![NO_COPY; group.world()];
        group.all_gather(&[own], &mut steps)?;
        let most = steps.iter().copied().max().unwrap_or(NO_COPY);
        if steps[0] == NO_FOLDER || most <= steps[0] {
            return Ok(false);
        }
        let holder = steps.iter().position(|step| *step == most).unwrap_or(0);
        match folder {
            Some(folder) if group.rank() == 0 => {
                let received = receive(group, holder, folder)?;
                Ok(received.is_ok_and(|found| found.is_some()))
            }
            _ if group.rank() == holder => {
                send(group, 0, newest.flatten().as_deref())?;
                Ok(false)
            }
            _ => Ok(false),
        }
    }
}

/// A copy that is being made. The job goes on if that fails.
#[derive(Debug)]
pub(crate) struct Copying {
    job: ProcessGroup,
    group: ProcessGroup,
    neighbour: Option<usize>,
    folder: PathBuf,
    has_warned: Arc<AtomicBool>,
}

impl Copying {
    pub(crate) fn has_neighbour(&self) -> bool {
        self.neighbour.is_some()
    }

    /// Whether this rank gets the second copy.
    pub(crate) fn is_on_this_rank(&self) -> bool {
        self.neighbour == Some(self.group.rank())
    }

    /// Sends the checkpoint that rank 0 has written to the neighbour, if there is one.
    pub(crate) fn finish(self, written: Result<Option<PathBuf>, CheckpointError>) {
        let checkpoint = written.as_ref().ok().and_then(Option::as_deref);
        let sent = match self.neighbour {
            Some(neighbour) if self.group.rank() == 0 => send(&self.group, neighbour, checkpoint),
            Some(_) if self.is_on_this_rank() => {
                receive(&self.group, 0, &self.folder).and_then(|received| received.map(drop))
            }
            _ => Ok(()),
        };
        for error in [written.map(drop), sent]
            .into_iter()
            .filter_map(Result::err)
        {
            // A job that has failed says so at its next step.
            let is_news = !matches!(error, CheckpointError::Ddp(_)) || self.job.health().is_ok();
            if is_news && !self.has_warned.swap(true, Ordering::Relaxed) {
                notice!(WARN, "no checkpoint in memory: {error}");
            }
        }
    }
}

/// Makes sure that this job has `folder` for itself, without anything half-written, and that `bytes` more fit there.
pub(crate) fn prepare(folder: &Path, bytes: u64) -> io::Result<()> {
    make(folder)?;
    folder::remove_leftovers(folder);
    has_room(folder, bytes)
}

/// Makes sure that this job has `folder` for itself.
pub(crate) fn make(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let found = fs::symlink_metadata(folder)?;
            if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() {
                return Err(io::Error::other("it is not a folder of this user"));
            }
        }
        made => made?,
    }
    Ok(())
}

/// *Errors*: `bytes` more do not fit into `folder`.
pub(crate) fn has_room(folder: &Path, bytes: u64) -> io::Result<()> {
    let space = rustix::fs::statvfs(folder)?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if free < bytes {
        let told = format!("{bytes} bytes are needed, {free} are free");
        return Err(io::Error::new(io::ErrorKind::StorageFull, told));
    }
    Ok(())
}

/// The first rank on another host than rank 0's.
fn neighbour(group: &ProcessGroup) -> Result<Option<usize>, CheckpointError> {
    if group.env().node_count == 1 {
        return Ok(None);
    }
    let mut nodes = vec![0; group.world()];
    group.all_gather(&[group.env().node_rank as i64], &mut nodes)?;
    Ok(nodes.iter().position(|node| *node != nodes[0]))
}

/// Sends a finished checkpoint to another rank, or says that it has none.
fn send(group: &ProcessGroup, to: usize, checkpoint: Option<&Path>) -> Result<(), CheckpointError> {
    // One that cannot be read is none: this host's memory is a second copy at best.
    let opened = checkpoint.and_then(|path| Some((folder::step_of(path)?, open(path).ok()?)));
    let told = opened.as_ref().map(|(step, files)| Told {
        step: *step,
        files: (files.iter())
            .map(|(name, (_, len))| (name.clone(), *len))
            .collect(),
    });
    let told = serde_json::to_vec(&told).expect("plain data encodes");
    group.send_bytes(&told, to, TAG)?;
    let mut piece = vec![0; PIECE_BYTES];
    for (file, len) in opened
        .into_iter()
        .flat_map(|(_, files)| files.into_values())
    {
        let mut file = file.take(len);
        for len in pieces(len) {
            // Of a file that cannot be read any more the rest is zeros, which the checksums show.
            let _ = file.read_exact(&mut piece[..len]);
            group.send_bytes(&piece[..len], to, TAG)?;
        }
    }
    Ok(())
}

/// The files of a checkpoint and their lengths, by name.
fn open(checkpoint: &Path) -> io::Result<BTreeMap<String, (File, u64)>> {
    let entries = fs::read_dir(checkpoint)?.map(|entry| {
        let entry = entry?;
        let file = File::open(entry.path())?;
        let len = file.metadata()?.len();
        Ok((
            entry.file_name().to_string_lossy().into_owned(),
            (file, len),
        ))
    });
    entries.collect()
}

/// The lengths of a file's pieces.
fn pieces(len: u64) -> impl Iterator<Item = usize> {
    let piece = PIECE_BYTES as u64;
    (0..len.div_ceil(piece)).map(move |at| (len - at * piece).min(piece) as usize)
}

/// Puts a checkpoint that another rank sends into `folder`, and returns its place if one has come.
///
/// *Errors*: the group's; inside, why it cannot be kept.
fn receive(
    group: &ProcessGroup,
    from: usize,
    folder: &Path,
) -> Result<Result<Option<PathBuf>, CheckpointError>, CheckpointError> {
    let told = group.recv_bytes(from, TAG)?;
    let told: Option<Told> = serde_json::from_slice(&told).unwrap_or_default();
    let Some(told) = told else {
        return Ok(Ok(None));
    };
    let begin = || {
        if told.files.len() > FILES_MAX || !told.files.keys().all(|name| is_plain(name)) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let bytes = told.files.values();
        let bytes = bytes.fold(0_u64, |sum, len| sum.saturating_add(*len));
        prepare(folder, bytes)
    };
    let begun = begin().map_err(failed_in(folder));
    let mut writing = begun.and_then(|()| Writing::begin(folder, told.step));
    for (name, len) in &told.files {
        let created = writing.as_ref().ok();
        let mut file = created.map(|writing| File::create(writing.path().join(name)));
        for _ in pieces(*len) {
            // It is taken even if it cannot be kept.
            let piece = group.recv_bytes(from, TAG)?;
            if let Some(Ok(open)) = &mut file
                && let Err(error) = open.write_all(&piece)
            {
                file = Some(Err(error));
            }
        }
        if let Some(Err(error)) = file {
            writing = Err(failed_in(folder)(error));
        }
    }
    Ok(writing.and_then(|writing| writing.publish(1)).map(Some))
}

#[cfg(test)]
mod tests;
