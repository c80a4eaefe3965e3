//! Starting a job and telling people how it ended; shared by `train` and `run`.

use std::collections::HashSet;
use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use paceline_doctor::flight;
use paceline_launch::{Job, LaunchError, Outcome};
use paceline_rendezvous::token::Token;
use paceline_words::{Lang, count, say};

use crate::exit::{Exit, Failure, hint_in, tell, warn};
use crate::usage::{Usage, UsageArgs, lang};

/// Tells the ranks where to leave their flight records.
pub(crate) const FLIGHT_DIR: &str = "PACELINE_FLIGHT_DIR";

/// This program's own file.
///
/// *Errors*: the system does not know it.
pub fn own_program() -> Result<PathBuf, Failure> {
    env::current_exe().map_err(|error| {
        Failure::environment(format!("cannot find this program's own file: {error}"))
    })
}

/// A job of `processes` ranks of `program` with a token of its own.
///
/// *Errors*: the system has no randomness to give.
pub fn new(program: &Path, processes: usize) -> Result<Job, Failure> {
    let token = Token::generate()
        .map_err(|error| Failure::environment(format!("no job token can be made: {error}")))?;
    Ok(Job::new(program, processes, token))
}

/// Runs the job, and says how its devices were used and what became of it.
///
/// *Errors*: it could not be started.
pub fn run(mut job: Job, usage: &UsageArgs) -> Result<Exit, Failure> {
    let lang = lang(usage.lang);
    job.lang = lang;
    let usage = Usage::start(usage, &mut job)?;
    let flight_dir = flight_dir(&job.env, env::var_os(FLIGHT_DIR).map(PathBuf::from));
    let before = flight_dir.as_deref().map(dumps).unwrap_or_default();
    let outcome = paceline_launch::run(job).map_err(refused)?;
    for note in &outcome.notes {
        warn(note);
    }
    // Before the failure, which is what people look for at the end.
    if let Some(summary) = usage.and_then(Usage::finish) {
        tell(summary.trim_end());
    }
    let exit = report(&outcome, lang);
    if let Some(dir) = flight_dir.filter(|_| outcome.failure.is_some()) {
        match dumps(&dir).difference(&before).count() {
            0 => {}
            count => hint_in(lang, &how_to_read(count, &dir, lang)),
        }
    }
    Ok(exit)
}

/// Where the ranks leave their flight records: what the job's own variables say, else the launcher's.
fn flight_dir(job: &[(String, String)], own: Option<PathBuf>) -> Option<PathBuf> {
    let of_job = job.iter().rfind(|(name, _)| name == FLIGHT_DIR);
    let dir = of_job.map(|(_, dir)| PathBuf::from(dir)).or(own);
    dir.filter(|dir| !dir.as_os_str().is_empty())
}

/// The flight records of a folder and when each was written; none when they cannot be listed.
fn dumps(dir: &Path) -> HashSet<(PathBuf, Option<SystemTime>)> {
    let written = |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).ok();
    let files = flight::dump_files(dir).unwrap_or_default();
    files
        .into_iter()
        .map(|path| (path.clone(), written(&path)))
        .collect()
}

fn how_to_read(ranks: usize, dir: &Path, lang: Lang) -> String {
    let (ranks, dir) = (count(lang, ranks, "rank", "랭크"), dir.display());
    say!(
        lang,
        "{ranks} left a flight record: `paceline doctor --flight {dir}` says what they show",
        "{ranks}가 플라이트 레코드를 남겼습니다. `paceline doctor --flight {dir}`로 내용을 볼 수 있습니다"
    )
}

fn report(outcome: &Outcome, lang: Lang) -> Exit {
    let exit = ending(outcome);
    let (text, hint) = match (&outcome.failure, &outcome.lost) {
        (Some(failure), _) => (failure.text(lang), failure.hint(lang)),
        (None, Some(lost)) => (lost.why.of(lang).to_owned(), lost.hint(lang)),
        (None, None) => return exit,
    };
    Failure::new(exit, text, hint).report_in(lang)
}

fn ending(outcome: &Outcome) -> Exit {
    match (outcome.exit_code(), outcome.stopped_by) {
        (code, Some(_)) if code > 128 => Exit::Signal(code - 128),
        (4, _) => Exit::Deadline,
        (code, _) => Exit::of_child(i32::from(code)),
    }
}

/// A job that could not be started, as people read it.
#[must_use]
pub fn refused(error: LaunchError) -> Failure {
    let exit = if error.exit_code() == Exit::Usage.code() {
        Exit::Usage
    } else {
        Exit::Environment
    };
    Failure::new(exit, in_full(&error), error.hint())
}

/// The error and its causes, as far as it does not say them itself.
fn in_full(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let why = error.to_string();
        if !text.contains(&why) {
            text = format!("{text}: {why}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_jobs_own_folder_for_flight_records_counts_before_the_launchers() {
        let own = || Some(PathBuf::from("own"));
        let job = |dir: &str| {
            vec![
                ("X".to_owned(), "y".to_owned()),
                (FLIGHT_DIR.into(), dir.into()),
            ]
        };
        assert_eq!(flight_dir(&job("job"), own()), Some("job".into()));
        assert_eq!(flight_dir(&[], own()), own());
        assert_eq!(flight_dir(&job(""), None), None);
        assert_eq!(flight_dir(&[], None), None);
    }

    #[test]
    fn an_error_is_said_with_its_causes_and_each_once() {
        use std::io;
        let source = || io::Error::other("the disk is full");
        let log = LaunchError::Machine {
            message: "log `logs` cannot be written".into(),
            hint: None,
            source: Some(source()),
        };
        let expect = "log `logs` cannot be written: the disk is full";
        assert_eq!(in_full(&log), expect);
        assert_eq!(in_full(&io::Error::other(source())), "the disk is full");
    }

    #[test]
    fn only_the_flight_records_of_this_job_are_counted() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path();
        let write = |name: &str| fs::write(dir.join(name), "{}").expect("written");
        write("rank_0.none.0.json");
        let before = dumps(dir);
        for name in ["rank_0.none.0.2.json", "rank_1.none.0.json", "notes.txt"] {
            write(name);
        }
        assert_eq!(dumps(dir).difference(&before).count(), 2);
        assert!(dumps(&dir.join("none")).is_empty());
        let expect =
            "2 ranks left a flight record: `paceline doctor --flight f` says what they show";
        assert_eq!(how_to_read(2, Path::new("f"), Lang::En), expect);
    }
}
