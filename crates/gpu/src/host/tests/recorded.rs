//! Recorded machines for tests.

use super::Host;

/// Files below a folder that goes with it.
pub struct Recorded {
    folder: tempfile::TempDir,
}

impl Recorded {
    /// A machine that has only these files, of path and text.
    pub fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        for (path, text) in files {
            let path = folder.path().join(path.trim_start_matches('/'));
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            std::fs::write(path, text).expect("written");
        }
        Self { folder }
    }

    /// Adds symbolic links, of path and target as it is to be written.
    pub fn linked(self, links: &[(&str, &str)]) -> Self {
        for (path, target) in links {
            let path = self.host().path(path);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            std::os::unix::fs::symlink(target, path).expect("linked");
        }
        self
    }

    /// The machine, without variables.
    pub fn host(&self) -> Host<'_> {
        Host::new(self.folder.path(), &|_| None)
    }

    /// The machine, with these variables.
    pub fn host_with<'a>(&self, variable: &'a dyn Fn(&str) -> Option<String>) -> Host<'a> {
        Host::new(self.folder.path(), variable)
    }
}
