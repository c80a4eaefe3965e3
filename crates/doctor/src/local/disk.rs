//! The folder that logs go to: whether it can be written, and how much fits.

use std::path::{Path, PathBuf};

use rustix::fs::{Access, StatVfs, StatVfsMountFlags};

use crate::finding::{Notes, count, size};
use crate::options::Options;
use paceline_gpu::host::Host;

/// What was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Disk {
    /// What was asked for.
    pub(crate) folder: PathBuf,
    /// The nearest folder above it that is there, or itself.
    pub(crate) nearest: PathBuf,
    pub(crate) is_folder: bool,
    pub(crate) writable: Result<(), String>,
    pub(crate) free_bytes: Option<u64>,
    /// Files that can still be made, where the file system counts them.
    pub(crate) free_files: Option<u64>,
}

/// Without this much a job's logs do not get far.
const BYTES_LOW: u64 = 1 << 30;
/// Without this much they do not begin.
const BYTES_MIN: u64 = 16 << 20;
/// Files of a rank: two streams, an error, a record of its last operations.
const FILES_OF_RANK: u64 = 4;

/// The folder that logs are to go to; none where none are kept.
pub(crate) fn folder(host: &Host<'_>, options: &Options) -> Option<PathBuf> {
    match &options.log_dir {
        Some(folder) if folder == Path::new("/dev/null") => None,
        Some(folder) => std::path::absolute(folder).ok(),
        None => Some(standard(&|name| host.variable(name))),
    }
}

/// Where `paceline run` keeps logs by default: the XDG specification's folder for state.
fn standard(variable: &dyn Fn(&str) -> Option<String>) -> PathBuf {
    let absolute = |name| {
        let path = variable(name).map(PathBuf::from);
        path.filter(|path| path.is_absolute())
    };
    let state = absolute("XDG_STATE_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".local/state")))
        .unwrap_or_else(std::env::temp_dir);
    state.join("paceline/runs")
}

pub(crate) fn look(folder: &Path) -> Disk {
    let nearest = folder.ancestors().find(|path| path.exists());
    let nearest = nearest.unwrap_or(Path::new("/")).to_owned();
    let found: Option<StatVfs> = rustix::fs::statvfs(&nearest).ok();
    let read_only = found
        .as_ref()
        .is_some_and(|found| found.f_flag.contains(StatVfsMountFlags::RDONLY));
    let writable = match rustix::fs::access(&nearest, Access::WRITE_OK | Access::EXEC_OK) {
        _ if read_only => Err("the file system is mounted read-only".to_owned()),
        Ok(()) => Ok(()),
        Err(error) => Err(error.to_string()),
    };
    Disk {
        folder: folder.to_owned(),
        is_folder: nearest.is_dir(),
        nearest,
        writable,
        free_bytes: found
            .as_ref()
            .map(|found| found.f_bavail.saturating_mul(found.f_frsize)),
        // Some file systems do not count: they make files as long as there is room.
        free_files: found
            .filter(|found| found.f_files > 0)
            .map(|found| found.f_favail),
    }
}

/// A write to a file server that does not answer never returns.
pub(crate) fn judge_silent(folder: &Path, seconds: u64, notes: &mut Notes) {
    let mut sheet = notes.sheet("logs");
    let folder = folder.display();
    sheet.fact(format!("{folder}, which does not answer"));
    sheet.error(
        format!("logs go to {folder}, and its file system has not answered within {seconds} s"),
        "a launcher that writes there hangs, and so does every program that looks there",
        "see whether its server is there (`mount`, `df`), or choose another folder: --log-dir DIR",
    );
}

pub(crate) fn judge(disk: Option<&Disk>, options: &Options, notes: &mut Notes) {
    let mut sheet = notes.sheet("logs");
    let Some(disk) = disk else {
        sheet.fact("none are kept");
        return;
    };
    let folder = disk.folder.display();
    let free = disk.free_bytes.map_or("an unknown amount".to_owned(), size);
    let files = disk.free_files.map(|files| format!(" and {files} files"));
    sheet.fact(format!(
        "{folder}, {free}{} free",
        files.unwrap_or_default()
    ));
    let elsewhere = "choose another folder: --log-dir DIR";
    if !disk.is_folder {
        sheet.error(
            format!(
                "logs go to {folder}, but {} is no folder",
                disk.nearest.display()
            ),
            "the launcher keeps what every rank prints there, and does not start without it",
            elsewhere,
        );
        return;
    }
    if let Err(reason) = &disk.writable {
        sheet.error(
            format!(
                "logs go to {folder}, but {} cannot be written: {reason}",
                disk.nearest.display()
            ),
            "the launcher keeps what every rank prints there, and does not start without it",
            elsewhere,
        );
        return;
    }
    if let Some(bytes) = disk.free_bytes.filter(|bytes| *bytes < BYTES_LOW) {
        let what = format!("{} are free where logs go, {folder}", size(bytes));
        let why =
            "what ranks print is lost when the disk is full, and checkpoints on the same disk fail";
        let fix = "free some space, or choose another folder: --log-dir DIR";
        match bytes < BYTES_MIN {
            true => sheet.error(what, why, fix),
            false => sheet.warning(what, why, fix),
        }
    }
    let needed = FILES_OF_RANK * options.ranks as u64 + 16;
    if let Some(files) = disk.free_files.filter(|files| *files < needed) {
        let ranks = count(options.ranks, "rank");
        sheet.error(
            format!("{files} more files can be made where logs go, {folder}; {ranks} need {needed}"),
            "the file system is out of inodes: no file can be made although there is room",
            "remove files that are not needed (`df -i` shows it), or choose another folder: --log-dir DIR",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::{found, job};

    fn sound() -> Disk {
        Disk {
            folder: "/logs/new".into(),
            nearest: "/logs".into(),
            is_folder: true,
            writable: Ok(()),
            free_bytes: Some(1 << 40),
            free_files: Some(1 << 20),
        }
    }

    #[test]
    fn what_does_not_fit_or_cannot_be_written_is_said() {
        let check = |disk: Disk, expect: &[&str]| {
            let mut notes = Notes::default();
            judge(Some(&disk), &job(4, 1), &mut notes);
            assert_eq!(found(&notes), expect, "{disk:?}");
        };
        check(sound(), &[]);
        let denied = Disk {
            writable: Err("Permission denied".into()),
            ..sound()
        };
        check(denied, &["error: logs: choose another folder"]);
        let file = Disk {
            is_folder: false,
            ..sound()
        };
        check(file, &["error: logs: choose another folder"]);
        let bytes = |bytes| Disk {
            free_bytes: Some(bytes),
            ..sound()
        };
        check(bytes(500 << 20), &["warning: logs: free some space"]);
        check(bytes(1 << 20), &["error: logs: free some space"]);
        let files = Disk {
            free_files: Some(20),
            ..sound()
        };
        check(files, &["error: logs: remove files that are not needed"]);
        let unknown = Disk {
            free_bytes: None,
            free_files: None,
            ..sound()
        };
        check(unknown, &[]);
    }

    #[test]
    fn a_folder_that_is_not_there_yet_is_judged_by_the_one_above() {
        let folder = tempfile::tempdir().expect("a folder");
        let disk = look(&folder.path().join("a/b"));
        assert_eq!(disk.nearest, folder.path());
        assert!(disk.is_folder && disk.writable.is_ok() && disk.free_bytes.is_some());
        std::fs::write(folder.path().join("file"), "").expect("written");
        assert!(!look(&folder.path().join("file/b")).is_folder);
    }

    #[test]
    fn a_file_system_that_does_not_answer_is_an_error() {
        let mut notes = Notes::default();
        judge_silent(Path::new("/nfs"), 5, &mut notes);
        assert_eq!(found(&notes), ["error: logs: see whether its server"]);
    }

    #[test]
    fn the_launchers_own_folder_is_that_of_the_users_state() {
        for (name, value, expect) in [
            ("XDG_STATE_HOME", "/s", "/s/paceline/runs"),
            ("HOME", "/h", "/h/.local/state/paceline/runs"),
        ] {
            let got = standard(&|asked| (asked == name).then(|| value.to_owned()));
            assert_eq!(got, Path::new(expect));
        }
    }
}
