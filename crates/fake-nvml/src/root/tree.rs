//! Files and links below a folder; the first that cannot be made is kept and told at the end.

use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A folder that is being filled.
#[derive(Debug)]
pub(super) struct Tree {
    folder: PathBuf,
    failure: Option<String>,
}

impl Tree {
    pub(super) fn below(folder: &Path) -> Self {
        Self {
            folder: folder.into(),
            failure: None,
        }
    }

    pub(super) fn folder(&mut self, path: &str) {
        let place = self.place(path);
        self.note(path, std::fs::create_dir_all(place));
    }

    /// A file of one line.
    pub(super) fn text(&mut self, path: &str, line: &str) {
        self.file(path, format!("{line}\n").as_bytes());
    }

    pub(super) fn file(&mut self, path: &str, content: &[u8]) {
        let made = self
            .parent(path)
            .and_then(|place| std::fs::write(place, content));
        self.note(path, made);
    }

    /// A link whose target is written as it is.
    pub(super) fn plain_link(&mut self, path: &str, target: &str) {
        let made = self.parent(path).and_then(|place| symlink(target, place));
        self.note(path, made);
    }

    /// A link; a target that begins with `/` is meant below the folder, and is there whatever the folder is called.
    pub(super) fn link(&mut self, path: &str, target: &str) {
        let target = match target.strip_prefix('/') {
            Some(below) => {
                let depth = path.trim_matches('/').matches('/').count();
                format!("{}{below}", "../".repeat(depth))
            }
            None => target.to_owned(),
        };
        self.plain_link(path, &target);
    }

    pub(super) fn done(self) -> Result<(), String> {
        self.failure.map_or(Ok(()), Err)
    }

    fn place(&self, path: &str) -> PathBuf {
        self.folder.join(path.trim_start_matches('/'))
    }

    fn parent(&self, path: &str) -> io::Result<PathBuf> {
        let place = self.place(path);
        if let Some(parent) = place.parent() {
            std::fs::create_dir_all(parent)?;
        }
        Ok(place)
    }

    fn note(&mut self, path: &str, made: io::Result<()>) {
        if let (Err(error), None) = (made, &self.failure) {
            self.failure = Some(format!("{path}: {error}"));
        }
    }
}
