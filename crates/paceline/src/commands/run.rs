//! `paceline run`: any program as the ranks of a job.

use std::fs;
use std::path::Path;

use paceline_launch::{Console, StopMode};

use super::{job, logs};
use crate::cli::RunArgs;
use crate::exit::{Exit, Failure};

/// Starts the program and waits for its end.
///
/// - Errors: it could not be started.
pub(crate) fn run(args: &RunArgs) -> Result<Exit, Failure> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut job = job::new(Path::new(&args.program), args.processes.on(cores))?;
    job.args.clone_from(&args.args);
    job.console = Console::Prefixed;
    job.stop = StopMode::Forward;
    job.grace = args.shutdown_timeout;
    job.threads_per_rank = args.threads_per_rank;
    if let Some(timeout) = args.timeout {
        let seconds = timeout.as_secs().to_string();
        job.env.push(("PACELINE_TIMEOUT_SECONDS".into(), seconds));
    }
    if let Some(dir) = &args.flight_dir {
        job.env
            .push((job::FLIGHT_DIR.into(), prepared_folder(dir)?));
    }
    // Other runs leave the folder alone as long as this lives.
    let _folder = logs::prepare(&mut job, &args.logs, args.log_dir.as_deref())?;
    job::run(job)
}

/// Makes a folder and says where it is, for ranks that may work in another one.
///
/// - Errors: it cannot be made, or its name does not fit into a variable of the job.
fn prepared_folder(dir: &Path) -> Result<String, Failure> {
    let made = fs::create_dir_all(dir).and_then(|()| std::path::absolute(dir));
    let path = made.map_err(|error| {
        let message = format!("cannot make the folder {}: {error}", dir.display());
        Failure::new(Exit::Environment, message, None)
    })?;
    path.into_os_string().into_string().map_err(|path| {
        let message = format!("the folder's name is no text: {}", path.display());
        Failure::new(Exit::Usage, message, None)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_for_flight_records_is_made_and_named_in_full() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().join("a").join("b");
        let path = prepared_folder(&dir).expect("made");
        assert!(Path::new(&path).is_absolute() && Path::new(&path).is_dir());
        assert_eq!(prepared_folder(&dir), Ok(path), "it may be there already");
        fs::write(folder.path().join("file"), "").expect("written");
        let refused = prepared_folder(&folder.path().join("file").join("b"));
        assert_eq!(
            refused.map_err(|failure| failure.exit()),
            Err(Exit::Environment)
        );
    }
}
