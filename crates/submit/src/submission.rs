//! A job's description, for any scheduler.

use std::env::VarError;
use std::fmt;

use clap::builder::RangedU64ValueParser;
use paceline_rendezvous::nodes;
use paceline_rendezvous::token::TOKEN_VARIABLE;

use crate::error::SubmitError;
use crate::units::{Memory, TimeLimit};

/// A job for a scheduler: the program, its resources and its time limit. The texts of its options are their help.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
pub struct Submission {
    /// Name of the job [default: the program's]
    #[arg(long = "job-name", short = 'J', value_name = "NAME")]
    #[arg(default_value = "")]
    #[arg(hide_default_value = true)]
    pub name: String,
    /// Nodes of the job; with a range it starts with MIN and goes on when nodes are lost
    #[arg(long, short = 'N', alias = "nnodes", value_name = "N|MIN:MAX")]
    #[arg(default_value = "1")]
    #[arg(value_parser = Nodes::parse)]
    pub nodes: Nodes,
    /// How many ranks each node has.
    #[arg(skip = Ranks::Count(1))]
    pub ranks: Ranks,
    /// CPUs of each rank [default: 1]
    #[arg(long, value_name = "N", value_parser = positive())]
    pub cpus_per_rank: Option<usize>,
    /// GPUs of each node
    #[arg(long, value_name = "N", value_parser = positive())]
    pub gpus_per_node: Option<usize>,
    /// Memory of each node, such as 500M or 64G
    #[arg(long = "mem", value_name = "SIZE")]
    pub memory: Option<Memory>,
    /// Longest time: MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS
    #[arg(long = "time", short = 't', value_name = "TIME")]
    pub time_limit: Option<TimeLimit>,
    /// A variable for the program; without a value the one that it has here
    #[arg(long, value_name = "NAME[=VALUE]", value_parser = variable)]
    pub env: Vec<(String, String)>,
    /// `paceline` on the nodes
    #[arg(long, value_name = "PATH", default_value = "paceline")]
    #[arg(hide_default_value = true)]
    pub launcher: String,
    /// Seconds between asking a rank to stop and killing it; what the scheduler's own grace leaves if not given.
    #[arg(skip)]
    pub shutdown_timeout: Option<u64>,
    /// Further options of `paceline run`.
    #[arg(skip)]
    pub run_options: Vec<String>,
    /// The program.
    #[arg(skip)]
    pub program: String,
    /// Its arguments.
    #[arg(skip)]
    pub args: Vec<String>,
}

/// Number of nodes: minimum and maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nodes {
    min: usize,
    max: usize,
}

/// How many ranks a node has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ranks {
    /// This many.
    Count(usize),
    /// A word of `paceline run --nproc-per-node`, by which the node itself tells: `auto`.
    Named(String),
}

impl Submission {
    /// A job of one rank on one node.
    pub fn new(name: impl Into<String>, program: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            nodes: Nodes { min: 1, max: 1 },
            ranks: Ranks::Count(1),
            cpus_per_rank: None,
            gpus_per_node: None,
            memory: None,
            time_limit: None,
            env: Vec::new(),
            launcher: "paceline".to_owned(),
            shutdown_timeout: None,
            run_options: Vec::new(),
            program: program.into(),
            args: Vec::new(),
        }
    }

    /// Refuses a job that no scheduler can start.
    pub(crate) fn check(&self) -> Result<(), SubmitError> {
        for (name, value) in &self.env {
            if !is_variable(name) {
                return Err(SubmitError::usage(format!(
                    "`{name}` cannot be the name of an environment variable"
                )));
            }
            if name == TOKEN_VARIABLE {
                return Err(SubmitError::usage(format!(
                    "`{name}` cannot be set: every job makes its own"
                )));
            }
            without_nul(value)?;
        }
        for word in self.words() {
            without_nul(word)?;
        }
        for (setting, word) in [("PROGRAM", &self.program), ("--launcher", &self.launcher)] {
            if word.is_empty() {
                return Err(SubmitError::setting(
                    setting,
                    "",
                    "a program's name or path",
                ));
            }
        }
        Ok(())
    }

    fn words(&self) -> impl Iterator<Item = &String> {
        let rest = self.run_options.iter().chain(&self.args);
        [&self.launcher, &self.program].into_iter().chain(rest)
    }

    /// CPUs of a node, unless the node itself decides the number of ranks.
    ///
    /// *Errors*: CPUs for each of an unknown number of ranks.
    pub(crate) fn cpus_per_node(&self) -> Result<Option<usize>, SubmitError> {
        match (&self.ranks, self.cpus_per_rank) {
            (Ranks::Count(ranks), cpus) => Ok(Some(ranks.saturating_mul(cpus.unwrap_or(1)))),
            (Ranks::Named(_), None) => Ok(None),
            (Ranks::Named(word), Some(cpus)) => Err(SubmitError::Usage {
                message: format!(
                    "{cpus} CPUs for each rank, but the number of `{word}` ranks is not known yet"
                ),
                hint: Some(
                    "give --nproc-per-node a number, or ask for whole nodes without --cpus-per-rank".to_owned(),
                ),
            }),
        }
    }

    /// The options of `paceline run` that both schedulers give it.
    pub(crate) fn options(&self, shutdown_timeout: Option<u64>) -> Vec<String> {
        let mut options = vec!["--nproc-per-node".to_owned(), self.ranks.to_string()];
        if let Some(seconds) = shutdown_timeout {
            options.extend(["--shutdown-timeout".to_owned(), seconds.to_string()]);
        }
        options.extend(self.run_options.iter().cloned());
        options
    }

    /// The program and its arguments, with `--` before a name that looks like an option.
    pub(crate) fn command(&self) -> impl Iterator<Item = &str> {
        let dashes = self.program.starts_with('-').then_some("--");
        let words = std::iter::once(&self.program).chain(&self.args);
        dashes.into_iter().chain(words.map(String::as_str))
    }
}

impl Nodes {
    /// From `min` to `max` nodes; `None` unless that is a range within 1 to [`NODES_MAX`](nodes::NODES_MAX).
    pub fn new(min: usize, max: usize) -> Option<Self> {
        nodes::check(min, max, None).ok()?;
        Some(Self { min, max })
    }

    /// `N`, `MIN:MAX` as torchrun writes it, or `MIN-MAX` as sbatch does.
    ///
    /// *Errors*: what is expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (min, max) = nodes::parse(&text.replacen('-', ":", 1))?;
        Ok(Self { min, max })
    }

    /// Fewest.
    pub fn min(self) -> usize {
        self.min
    }

    /// Most.
    pub fn max(self) -> usize {
        self.max
    }

    /// Whether nodes may be fewer than they were.
    pub fn is_elastic(self) -> bool {
        self.min < self.max
    }
}

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => count.fmt(f),
            Self::Named(word) => f.write_str(word),
        }
    }
}

fn positive() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=4096)
}

fn variable(text: &str) -> Result<(String, String), String> {
    if let Some((name, value)) = text.split_once('=') {
        return Ok((name.to_owned(), value.to_owned()));
    }
    match std::env::var(text) {
        Ok(value) => Ok((text.to_owned(), value)),
        Err(VarError::NotPresent) => Err(format!("{text} is not set here, expected NAME=VALUE")),
        Err(VarError::NotUnicode(_)) => Err(format!("the value of {text} is no text")),
    }
}

fn is_variable(name: &str) -> bool {
    let first = name.bytes().next();
    first.is_some_and(|byte| !byte.is_ascii_digit())
        && name
            .bytes()
            .all(|byte| byte == b'_' || byte.is_ascii_alphanumeric())
}

/// Refuses a word that no command line and no variable can have.
pub(crate) fn without_nul(word: &str) -> Result<(), SubmitError> {
    if word.contains('\0') {
        let word = word.replace('\0', "");
        return Err(SubmitError::usage(format!("`{word}` contains a NUL byte")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_written_as_torchrun_or_as_sbatch_does() {
        for (text, expect) in [("3", (3, 3)), ("1:4", (1, 4)), ("2-8", (2, 8))] {
            let nodes = Nodes::parse(text).expect(text);
            assert_eq!((nodes.min(), nodes.max()), expect, "{text}");
        }
        for text in ["", "0", "4:1", "0:2", "2:", "-2", "1025", "1:2:3", "a"] {
            assert!(Nodes::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn cpus_follow_the_ranks_where_their_number_is_known() {
        let mut job = Submission::new("job", "prog");
        job.ranks = Ranks::Count(4);
        assert_eq!(job.cpus_per_node().ok(), Some(Some(4)));
        job.cpus_per_rank = Some(8);
        assert_eq!(job.cpus_per_node().ok(), Some(Some(32)));
        job.ranks = Ranks::Named("auto".to_owned());
        let error = job.cpus_per_node().expect_err("unknown").to_string();
        assert!(
            error.contains("8 CPUs") && error.contains("auto"),
            "{error}"
        );
        job.cpus_per_rank = None;
        assert_eq!(job.cpus_per_node().ok(), Some(None));
    }

    #[test]
    fn a_job_that_no_scheduler_could_start_is_refused() {
        let check = |change: fn(&mut Submission), text: &str| {
            let mut job = Submission::new("job", "prog");
            job.check().expect("it is fine so far");
            change(&mut job);
            let error = job.check().expect_err(text).to_string();
            assert!(error.contains(text), "{error}");
        };
        check(|job| job.env.push(("1A".into(), String::new())), "1A");
        check(|job| job.env.push(("A B".into(), String::new())), "A B");
        check(|job| job.env.push((String::new(), String::new())), "``");
        check(|job| job.env.push(("A".into(), "x\0".into())), "NUL");
        check(
            |job| job.env.push((TOKEN_VARIABLE.into(), "x".into())),
            "makes its own",
        );
        check(|job| job.args.push("a\0b".into()), "`ab` contains a NUL");
        check(|job| job.program.clear(), "PROGRAM");
        check(|job| job.launcher.clear(), "--launcher");
    }
}
