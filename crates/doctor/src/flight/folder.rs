//! Reads a folder of dumps: whatever is in there, sorted by job, nothing believed.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use paceline_collective::flight::{DUMP_BYTES_MAX, Dump};
use serde::Serialize;

/// Most files of one folder that are read.
const FILES_MAX: usize = 8192;

/// The dumps of a folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Folder {
    /// By job and restart; the job that wrote last comes first.
    pub jobs: Vec<JobDumps>,
    /// Files that look like dumps by their names and were not used.
    pub skipped: Vec<Skipped>,
}

/// The dumps of one start of one job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobDumps {
    /// Name of the job.
    pub run_id: String,
    /// How often it had been restarted.
    pub restart: u32,
    /// At most one for each rank, in the order of the ranks.
    pub dumps: Vec<Dump>,
}

/// A file that was not used, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// Its name.
    pub file: String,
    /// What is wrong with it.
    pub reason: String,
}

/// Reads all dumps of a folder.
///
/// *Cost*: one file at a time, of at most [`DUMP_BYTES_MAX`] bytes; the first 8192 files.
///
/// *Errors*: only a folder that cannot be listed; a bad file is in [`Folder::skipped`].
pub fn read_folder(dir: &Path) -> io::Result<Folder> {
    let mut folder = Folder::default();
    let mut dumps = Vec::new();
    let files = dump_files(dir)?;
    for path in &files[..files.len().min(FILES_MAX)] {
        let name = file_name(path);
        match read(path).and_then(|bytes| Dump::parse(&bytes)) {
            Ok(dump) => dumps.push((name, dump)),
            Err(reason) => folder.skipped.push(Skipped { file: name, reason }),
        }
    }
    if files.len() > FILES_MAX {
        folder.skipped.push(Skipped {
            file: format!("{} more files", files.len() - FILES_MAX),
            reason: format!("the first {FILES_MAX} were read"),
        });
    }
    sort(dumps, &mut folder);
    Ok(folder)
}

/// The files of a folder whose names are those of dumps, sorted.
///
/// *Errors*: the folder cannot be listed.
pub fn dump_files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = file_name(&path);
        if name.starts_with("rank_") && name.ends_with(".json") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// The bytes of a plain file, if they are not too many.
fn read(path: &Path) -> Result<Vec<u8>, String> {
    let words = |error: io::Error| error.to_string();
    // Looked at before it is opened: a pipe would be waited for.
    if !fs::metadata(path).map_err(words)?.is_file() {
        return Err("it is no plain file".into());
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(words)?;
    file.take(DUMP_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(words)?;
    if bytes.len() as u64 > DUMP_BYTES_MAX {
        return Err(format!("it has more than {DUMP_BYTES_MAX} bytes"));
    }
    Ok(bytes)
}

/// Sorts dumps by job; of two of one rank the later one counts.
fn sort(mut dumps: Vec<(String, Dump)>, folder: &mut Folder) {
    dumps.sort_by_key(|(_, dump)| std::cmp::Reverse(dump.taken_unix_ns));
    let mut keys: Vec<(String, u32, usize)> = Vec::new();
    for (file, dump) in dumps {
        let key = (dump.job.clone(), dump.restart, dump.world);
        let place = keys.iter().position(|known| *known == key);
        let place = place.unwrap_or_else(|| {
            keys.push(key);
            folder.jobs.push(JobDumps {
                run_id: dump.run_id.clone(),
                restart: dump.restart,
                dumps: Vec::new(),
            });
            keys.len() - 1
        });
        let job = &mut folder.jobs[place];
        if job.dumps.iter().any(|other| other.rank == dump.rank) {
            folder.skipped.push(Skipped {
                file,
                reason: format!(
                    "there is a later dump of rank {} of the same job",
                    dump.rank
                ),
            });
        } else {
            job.dumps.push(dump);
        }
    }
    for job in &mut folder.jobs {
        job.dumps.sort_by_key(|dump| dump.rank);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dump(job: &str, restart: u32, rank: usize, taken_unix_ns: u64) -> Dump {
        Dump {
            paceline_flight: paceline_collective::flight::FORMAT,
            version: "0".into(),
            job: job.into(),
            run_id: format!("run-{job}"),
            restart,
            rank,
            world: 3,
            host: "b".into(),
            pid: 1,
            taken_unix_ns,
            taken_ns: 0,
            doing: String::new(),
            groups: vec![],
        }
    }

    fn put(dir: &Path, name: &str, bytes: &[u8]) {
        fs::write(dir.join(name), bytes).unwrap();
    }

    #[test]
    fn jobs_and_restarts_are_told_apart_and_the_last_comes_first() {
        let dir = tempfile::tempdir().unwrap();
        for (name, dump) in [
            ("rank_0.a.json", dump("a", 0, 0, 10)),
            ("rank_1.a.json", dump("a", 0, 1, 11)),
            ("rank_0.a.1.json", dump("a", 1, 0, 30)),
            ("rank_2.b.json", dump("b", 0, 2, 20)),
        ] {
            put(dir.path(), name, &dump.to_json());
        }
        let folder = read_folder(dir.path()).unwrap();
        let jobs: Vec<(&str, u32, Vec<usize>)> = folder
            .jobs
            .iter()
            .map(|job| {
                let ranks = job.dumps.iter().map(|dump| dump.rank).collect();
                (job.run_id.as_str(), job.restart, ranks)
            })
            .collect();
        let expect = [
            ("run-a", 1, vec![0]),
            ("run-b", 0, vec![2]),
            ("run-a", 0, vec![0, 1]),
        ];
        assert_eq!(jobs, expect);
        assert_eq!(folder.skipped, []);
    }

    #[test]
    fn what_cannot_be_read_is_named_and_the_rest_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let whole = dump("a", 0, 1, 10).to_json();
        put(dir.path(), "rank_1.json", &whole);
        put(dir.path(), "rank_2.json", &whole[..whole.len() / 2]);
        put(dir.path(), "rank_3.json", b"\xff\x00");
        put(dir.path(), "rank_4.json", &dump("a", 0, 1, 9).to_json());
        put(dir.path(), "notes.txt", b"not a dump");
        fs::create_dir(dir.path().join("rank_5.json")).unwrap();
        let large = File::create(dir.path().join("rank_6.json")).unwrap();
        large.set_len(DUMP_BYTES_MAX + 1).unwrap();
        let folder = read_folder(dir.path()).unwrap();
        assert_eq!(folder.jobs[0].dumps, [dump("a", 0, 1, 10)]);
        let skipped: Vec<(&str, &str)> = folder
            .skipped
            .iter()
            .map(|s| (s.file.as_str(), s.reason.as_str()))
            .collect();
        let starts = [
            ("rank_2.json", "no flight record: "),
            ("rank_3.json", "no flight record: "),
            ("rank_5.json", "it is no plain file"),
            ("rank_6.json", "it has more than 67108864 bytes"),
            (
                "rank_4.json",
                "there is a later dump of rank 1 of the same job",
            ),
        ];
        assert_eq!(skipped.len(), starts.len(), "{skipped:?}");
        for ((file, reason), (name, start)) in skipped.into_iter().zip(starts) {
            assert!(
                file == name && reason.starts_with(start),
                "{file}: {reason}"
            );
        }
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read_folder(&dir.path().join("none")).is_err());
    }
}
