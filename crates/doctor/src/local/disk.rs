//! The folder that logs go to: whether it can be written, and how much fits.

use std::path::{Path, PathBuf};

use paceline_words::{Text, count, say};
use rustix::fs::{Access, StatVfs, StatVfsMountFlags};

use crate::checks;
use crate::finding::{Notes, size};
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
    pub(crate) writable: Result<(), Text>,
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
        _ if read_only => Err(Text::new(|lang| {
            say!(
                lang,
                "the file system is mounted read-only",
                "파일 시스템이 읽기 전용으로 마운트됨"
            )
        })),
        Ok(()) => Ok(()),
        Err(error) => Err(Text::new(|_| error.to_string())),
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

/// The outcome of looking at the folder.
#[derive(Debug)]
pub(crate) enum Look {
    /// No logs are kept.
    NotKept,
    /// It, or a folder above it, is there.
    There(Disk),
    /// Its file system has not answered within so many seconds. A write to a file server that does not answer never returns.
    Silent(PathBuf, u64),
}

pub(crate) fn judge(look: &Look, options: &Options, notes: &mut Notes) {
    let lang = notes.lang;
    match look {
        Look::NotKept => notes
            .sheet(checks::LOGS)
            .fact(say!(lang, "none are kept", "남기지 않음")),
        Look::There(disk) => judge_disk(disk, options, notes),
        Look::Silent(folder, seconds) => judge_silent(folder, *seconds, notes),
    }
}

fn judge_silent(folder: &Path, seconds: u64, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::LOGS);
    let folder = folder.display();
    sheet.fact(say!(
        lang,
        "{folder}, which does not answer",
        "{folder}, 응답하지 않음"
    ));
    sheet.error(
        say!(
            lang,
            "logs go to {folder}, and its file system has not answered within {seconds} s",
            "로그 폴더 {folder}의 파일 시스템이 {seconds}초 안에 응답하지 않음"
        ),
        say!(
            lang,
            "a launcher that writes there hangs, and so does every program that looks there",
            "여기에 쓰는 런처가 멈추고, 이 폴더를 보는 다른 프로그램도 멈춥니다"
        ),
        say!(
            lang,
            "see whether its server is there (`mount`, `df`), or choose another folder: --log-dir DIR",
            "파일 서버가 동작하는지 확인하거나(`mount`, `df`), 다른 폴더를 고르세요: --log-dir DIR"
        ),
    );
}

fn judge_disk(disk: &Disk, options: &Options, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::LOGS);
    let (folder, nearest) = (disk.folder.display(), disk.nearest.display());
    let free = match disk.free_bytes {
        Some(bytes) => size(bytes),
        None => say!(lang, "an unknown amount", "알 수 없는 크기"),
    };
    let files = disk.free_files;
    let files = files.map(|files| say!(lang, " and {files} files", ", 파일 {files}개"));
    let files = files.unwrap_or_default();
    sheet.fact(say!(
        lang,
        "{folder}, {free}{files} free",
        "{folder}, {free}{files} 남음"
    ));
    let unusable = match &disk.writable {
        _ if !disk.is_folder => Some(say!(
            lang,
            "logs go to {folder}, but {nearest} is no folder",
            "로그 폴더는 {folder}인데 폴더가 아님: {nearest}"
        )),
        Err(reason) => {
            let reason = reason.of(lang);
            Some(say!(
                lang,
                "logs go to {folder}, but {nearest} cannot be written: {reason}",
                "로그 폴더는 {folder}인데 쓸 수 없음: {nearest}, {reason}"
            ))
        }
        Ok(()) => None,
    };
    if let Some(what) = unusable {
        sheet.error(
            what,
            say!(
                lang,
                "the launcher keeps what every rank prints there, and does not start without it",
                "런처는 모든 랭크의 출력을 여기에 남기며, 쓸 수 없으면 시작하지 않습니다"
            ),
            say!(
                lang,
                "choose another folder: --log-dir DIR",
                "다른 폴더를 고르세요: --log-dir DIR"
            ),
        );
        return;
    }
    if let Some(bytes) = disk.free_bytes.filter(|bytes| *bytes < BYTES_LOW) {
        let what = say!(
            lang,
            "{free} are free where logs go, {folder}",
            "로그 폴더 {folder}의 남은 공간이 {free}뿐임"
        );
        let why = say!(
            lang,
            "what ranks print is lost when the disk is full, and checkpoints on the same disk fail",
            "디스크가 가득 차면 랭크의 출력을 잃고, 같은 디스크에 쓰는 체크포인트도 실패합니다"
        );
        let fix = say!(
            lang,
            "free some space, or choose another folder: --log-dir DIR",
            "공간을 비우거나 다른 폴더를 고르세요: --log-dir DIR"
        );
        match bytes < BYTES_MIN {
            true => sheet.error(what, why, fix),
            false => sheet.warning(what, why, fix),
        }
    }
    let needed = FILES_OF_RANK * options.ranks as u64 + 16;
    if let Some(files) = disk.free_files.filter(|files| *files < needed) {
        let ranks = count(lang, options.ranks, "rank", "랭크");
        sheet.error(
            say!(
                lang,
                "{files} more files can be made where logs go, {folder}; {ranks} need {needed}",
                "로그 폴더 {folder}에 더 만들 수 있는 파일이 {files}개인데 {ranks}에 필요한 파일은 {needed}개"
            ),
            say!(
                lang,
                "the file system is out of inodes: no file can be made although there is room",
                "파일 시스템의 inode가 모자랍니다. 공간이 남아도 파일을 만들 수 없습니다"
            ),
            say!(
                lang,
                "remove files that are not needed (`df -i` shows it), or choose another folder: --log-dir DIR",
                "필요 없는 파일을 지우거나(`df -i`로 확인), 다른 폴더를 고르세요: --log-dir DIR"
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::{found, job, noted};

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
            let look = Look::There(disk);
            let notes = noted(|notes| judge(&look, &job(4, 1), notes));
            assert_eq!(found(&notes), expect, "{look:?}");
        };
        check(sound(), &[]);
        let denied = Disk {
            writable: Err(Text::new(|_| "Permission denied".to_owned())),
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
        let look = Look::Silent("/nfs".into(), 5);
        let notes = noted(|notes| judge(&look, &job(1, 1), notes));
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
