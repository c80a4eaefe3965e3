//! How a job will be run, decided before anything is started, so that it can be shown first.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use crate::command;
use crate::error::LaunchError;
use crate::job::{Job, NPROC_MAX};

/// The variables by which compute libraries size their thread pools: OpenMP's (also MKL and OpenBLAS) and Rayon's.
pub const THREAD_VARIABLES: [&str; 2] = ["OMP_NUM_THREADS", "RAYON_NUM_THREADS"];

/// How a job will be run. Display says it in one line for people.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// The file that is executed.
    pub program: PathBuf,
    /// All its arguments.
    pub args: Vec<OsString>,
    /// How many ranks.
    pub nproc: usize,
    /// Cores this process may use: its affinity and its cgroup's quota count.
    pub cores: usize,
    /// Compute threads for each rank, one entry for each of [`THREAD_VARIABLES`].
    pub threads: [Threads; 2],
}

/// One thread variable and where its value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Threads {
    /// The launcher sets it to this number.
    Set(usize),
    /// The user's environment has this value, and it stays.
    Kept(String),
}

impl Job {
    /// Checks the job and decides how it will be run; starts nothing.
    ///
    /// *Errors* - a number of ranks out of range, a variable that cannot be one, a program that is not there.
    pub fn plan(&self) -> Result<Plan, LaunchError> {
        self.check()?;
        let var = |name: &str| self.var(name);
        let executable = command::resolve(&self.program, &var)?;
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = THREAD_VARIABLES.map(|name| {
            let user = self
                .var(name)
                .map(|value| value.to_string_lossy().into_owned());
            threads(cores, self.nproc, self.threads_per_rank, user)
        });
        let args = executable
            .leading_args
            .into_iter()
            .chain(self.args.iter().cloned())
            .collect();
        Ok(Plan {
            program: executable.file,
            args,
            nproc: self.nproc,
            cores,
            threads,
        })
    }

    /// The value a rank would find without the launcher's own variables.
    fn var(&self, name: &str) -> Option<OsString> {
        let extra = self
            .env
            .iter()
            .rev()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.into());
        extra.or_else(|| std::env::var_os(name))
    }

    fn check(&self) -> Result<(), LaunchError> {
        if !(1..=NPROC_MAX).contains(&self.nproc) {
            return Err(LaunchError::Nproc { got: self.nproc });
        }
        for (name, value) in &self.env {
            if name.is_empty() || name.contains(['=', '\0']) {
                return Err(LaunchError::VariableName { name: name.clone() });
            }
            if value.contains('\0') {
                return Err(LaunchError::NulByte { name: name.clone() });
            }
        }
        if self
            .args
            .iter()
            .any(|arg| arg.as_encoded_bytes().contains(&0))
        {
            return Err(LaunchError::NulByte {
                name: "arguments".to_owned(),
            });
        }
        Ok(())
    }
}

/// A number asked for wins, then the user's environment, then an equal share of the cores.
fn threads(cores: usize, nproc: usize, asked: Option<usize>, user: Option<String>) -> Threads {
    match (asked, user) {
        (Some(asked), _) => Threads::Set(asked.max(1)),
        (None, Some(user)) if !user.is_empty() => Threads::Kept(user),
        (None, _) => Threads::Set((cores / nproc.max(1)).max(1)),
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks = if self.nproc == 1 { "rank" } else { "ranks" };
        let cores = if self.cores == 1 { "core" } else { "cores" };
        write!(f, "{} {ranks} on {} {cores}", self.nproc, self.cores)?;
        match &self.threads {
            [Threads::Set(a), Threads::Set(b)] if a == b => {
                write!(
                    f,
                    ", {a} compute {} each",
                    if *a == 1 { "thread" } else { "threads" }
                )
            }
            threads => {
                for (name, value) in THREAD_VARIABLES.iter().zip(threads) {
                    match value {
                        Threads::Set(count) => write!(f, ", {name}={count}")?,
                        Threads::Kept(value) => write!(f, ", {name}={value} from the environment")?,
                    }
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(
        cores: usize,
        nproc: usize,
        asked: Option<usize>,
        user: Option<&str>,
        expect: Threads,
    ) {
        assert_eq!(
            threads(cores, nproc, asked, user.map(str::to_owned)),
            expect
        );
    }

    #[test]
    fn the_cores_are_shared_out_and_nobody_gets_none() {
        check(8, 2, None, None, Threads::Set(4));
        check(8, 3, None, None, Threads::Set(2));
        check(2, 64, None, None, Threads::Set(1));
        check(8, 2, None, Some(""), Threads::Set(4));
    }

    #[test]
    fn the_users_word_counts() {
        check(8, 2, None, Some("3"), Threads::Kept("3".to_owned()));
        check(8, 2, Some(5), Some("3"), Threads::Set(5));
        check(8, 2, Some(0), None, Threads::Set(1));
    }

    #[test]
    fn a_plan_says_what_was_chosen() {
        let mut plan = Plan {
            program: "true".into(),
            args: Vec::new(),
            nproc: 2,
            cores: 8,
            threads: [Threads::Set(4), Threads::Set(4)],
        };
        assert_eq!(
            plan.to_string(),
            "2 ranks on 8 cores, 4 compute threads each"
        );
        plan.threads[0] = Threads::Kept("6".to_owned());
        assert_eq!(
            plan.to_string(),
            "2 ranks on 8 cores, OMP_NUM_THREADS=6 from the environment, RAYON_NUM_THREADS=4"
        );
    }
}
