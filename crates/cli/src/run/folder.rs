//! Where `paceline run` keeps what the ranks print.

use std::path::Path;

use paceline_launch::{DEFAULT_FILE_BYTES_MAX, Job, LogOptions, RunFolder};

use crate::exit::{Failure, warn};

/// Tells the job what to do with its output, and makes the folder of this run: below `log_dir`, or one of the few that
/// are kept for this user, with bounded files. `/dev/null` keeps no files. The folder is the run's while the result
/// lives.
///
/// *Errors*: the job cannot be started, or the folder that was asked for cannot be made.
pub(crate) fn prepare(
    job: &mut Job,
    options: &LogOptions,
    log_dir: Option<&Path>,
) -> Result<Option<RunFolder>, Failure> {
    // Before a folder is made that would push out one with something in it.
    job.plan().map_err(crate::job::refused)?;
    job.logs.clone_from(options);
    let folder = match log_dir {
        Some(dir) if dir == Path::new("/dev/null") => None,
        Some(dir) => {
            let folder = RunFolder::create(dir, &job.run_id);
            Some(folder.map_err(crate::job::refused)?)
        }
        None => {
            job.logs.file_bytes_max = Some(DEFAULT_FILE_BYTES_MAX);
            match RunFolder::create_default(&job.run_id, &|name| std::env::var_os(name)) {
                Ok(folder) => Some(folder),
                // Files were not asked for, so a machine that has no place for them still runs jobs.
                Err(error) => {
                    warn(&format!("the ranks' output is kept in no file: {error}"));
                    None
                }
            }
        }
    };
    job.log_dir = folder.as_ref().map(|folder| folder.path().to_owned());
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Exit;

    #[test]
    fn a_run_has_a_folder_of_its_own_below_the_one_asked_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().join("logs");
        let mut job = crate::job::new(Path::new("true"), 1).expect("a job");
        let made = prepare(&mut job, &LogOptions::default(), Some(&dir)).expect("made");
        let path = made.as_ref().map(RunFolder::path);
        assert_eq!(job.log_dir.as_deref(), path);
        assert_eq!(path.and_then(Path::parent), Some(&*dir));
        assert_eq!(job.logs.file_bytes_max, None);
    }

    #[test]
    fn a_job_that_cannot_start_makes_no_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().join("logs");
        let mut job = crate::job::new(Path::new("./nothing-here"), 1).expect("a job");
        let refused = prepare(&mut job, &LogOptions::default(), Some(&dir));
        assert_eq!(
            refused.err().map(|failure| failure.exit()),
            Some(Exit::Usage)
        );
        assert!(!dir.exists());
    }

    #[test]
    fn no_files_are_kept_at_dev_null_and_a_file_is_no_folder() {
        let mut job = crate::job::new(Path::new("true"), 1).expect("a job");
        let options = LogOptions::default();
        let made = prepare(&mut job, &options, Some(Path::new("/dev/null"))).expect("nothing");
        assert!(made.is_none() && job.log_dir.is_none());
        let file = tempfile::NamedTempFile::new().expect("a file");
        let refused = prepare(&mut job, &options, Some(file.path()));
        let refused = refused.expect_err("it is a file");
        assert_eq!(refused.exit(), Exit::Environment);
        let path = file.path().display();
        let expect = format!("log `{path}` cannot be written: it is a file, not a folder");
        assert_eq!(refused.to_string(), expect);
    }
}
