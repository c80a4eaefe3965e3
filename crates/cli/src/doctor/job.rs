//! `paceline doctor RUN`: what is the matter with a job that runs or has ended, why, and what to do.

mod judge;

use std::io::Write;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use paceline_doctor::{Finding, Severity};
use paceline_rendezvous::page::{RunningJob, RunningRank};
use paceline_rendezvous::process::Stat;
use paceline_report::{JobFailure, Run};
use paceline_words::{Lang, say};
use serde::Serialize;

use self::judge::{Facts, Rank, judge};
use crate::exit::{Exit, Failure};
use crate::flags::print;
use crate::jobs::Jobs;
use crate::report::failed;

/// How long a running job is watched.
const WINDOW: Duration = Duration::from_secs(3);

/// Which job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// That of a run directory.
    Run(PathBuf),
    /// That of a rank or a launcher which runs.
    Pid(u32),
}

/// Prints what was found, the worst first.
///
/// *Blocks*: for the time in which a running job is watched.
///
/// *Errors*: no run in the folder; no job with such a process.
pub(super) fn explain(subject: &Subject, lang: Lang, json: bool) -> Result<Exit, Failure> {
    let mut jobs = Jobs::new();
    let mut find = || {
        jobs.look();
        let job = match subject {
            Subject::Run(folder) => jobs.of(folder),
            Subject::Pid(pid) => jobs.of_process(*pid),
        };
        job.map(Look::at)
    };
    let first = find();
    if first.is_some() {
        sleep(WINDOW);
    }
    let last = first.as_ref().and_then(|_| find());
    // The failure of a job that has left no metrics.
    let mut early = None;
    let run = match (subject, &last) {
        (Subject::Pid(pid), None) => {
            let why = match first {
                None => say!(
                    lang,
                    "no job of Paceline's has a rank or a launcher with pid {pid} on this machine",
                    "이 머신에는 pid {pid}인 랭크나 런처가 있는 Paceline 작업이 없습니다"
                ),
                Some(_) => say!(
                    lang,
                    "the job of pid {pid} ended while it was looked at",
                    "살펴보는 동안 pid {pid}의 작업이 끝났습니다"
                ),
            };
            return Err(Failure::usage(why));
        }
        (Subject::Pid(_), Some(_)) => None,
        // A job that starts has no metrics yet.
        (Subject::Run(folder), Some(_)) => Run::read(folder).ok(),
        (Subject::Run(folder), None) => match Run::read(folder) {
            Ok(run) => Some(run),
            Err(error) => {
                early = Some(JobFailure::read(folder).ok_or_else(|| failed(error))?);
                None
            }
        },
    };
    let ranks = match (&first, &last) {
        (Some(first), Some(last)) => last.since(first),
        _ => Vec::new(),
    };
    let facts = Facts {
        folder: match subject {
            Subject::Run(folder) => Some(folder),
            Subject::Pid(_) => None,
        },
        seen: run.as_ref().map(|run| &run.seen),
        failed: match &run {
            Some(run) => run.failure.as_ref(),
            None => early.as_ref(),
        },
        ranks,
        lang,
    };
    let report = Report {
        state: facts.state(),
        findings: judge(&facts),
    };
    print(|out| report.write(lang, json, out)).map(|_| report.exit())
}

/// What is printed; its fields are those of the JSON object.
#[derive(Serialize)]
struct Report {
    /// How far the job is, in words.
    state: String,
    findings: Vec<Finding>,
}

impl Report {
    fn exit(&self) -> Exit {
        let is_fault = |finding: &Finding| finding.severity == Severity::Error;
        match self.findings.iter().any(is_fault) {
            true => Exit::JobFailed,
            false => Exit::Done,
        }
    }

    fn write(&self, lang: Lang, json: bool, out: &mut impl Write) -> std::io::Result<()> {
        if json {
            serde_json::to_writer(&mut *out, self)?;
            return writeln!(out);
        }
        writeln!(out, "{}", self.state)?;
        for finding in &self.findings {
            write!(out, "\n{}", finding.text(lang))?;
        }
        if self.findings.is_empty() {
            let sound = say!(lang, "nothing wrong was found", "발견된 문제 없음");
            writeln!(out, "\n{sound}")?;
        }
        Ok(())
    }
}

/// A job at one moment.
struct Look {
    at: Instant,
    job: RunningJob,
    /// Of each rank's process.
    stats: Vec<Option<Stat>>,
}

impl Look {
    fn at(job: &RunningJob) -> Self {
        let stats = job.ranks.iter().map(|rank| Stat::read(rank.pid?));
        Self {
            at: Instant::now(),
            stats: stats.collect(),
            job: job.clone(),
        }
    }

    /// The ranks now, and what they have done since.
    fn since(&self, first: &Self) -> Vec<Rank> {
        let seconds = (self.at - first.at).as_secs_f64();
        let ranks = self.job.ranks.iter().zip(&self.stats).enumerate();
        let activity = |rank: &RunningRank| rank.activity.map(|(activity, _)| activity);
        let rank = |(place, (now, stat)): (usize, (&RunningRank, &Option<Stat>))| {
            let before = first.job.ranks.get(place);
            let before_stat = first.stats.get(place).copied().flatten();
            let before = before.filter(|before| before.pid == now.pid);
            let cpu = stat.map(|stat| stat.cpu());
            let cpu_before = before_stat.map(|stat| stat.cpu());
            let ran = cpu
                .unwrap_or_default()
                .saturating_sub(cpu_before.unwrap_or_default());
            Rank {
                rank: now.rank.unwrap_or(place),
                pid: now.pid,
                activity: now.activity,
                has_moved: before.is_none_or(|before| activity(before) != activity(now)),
                stat: *stat,
                cores: ran.as_secs_f64() / seconds,
                differences: now.differences,
            }
        };
        ranks.map(rank).collect()
    }
}
