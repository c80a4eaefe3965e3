//! How a job will be run, decided before anything is started, so that it can be shown first.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use paceline_words::counted;

use crate::binding::Bound;
use crate::command;
use crate::devices;
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
    /// The CPUs of each rank, if the job binds them.
    pub bound: Option<Bound>,
    /// For each rank the variables that show it one device only, if the job asks for that.
    pub(crate) visible: Vec<Vec<(&'static str, String)>>,
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
    /// *Errors*: a number of ranks out of range, a variable that cannot be one, a program that is not there, a binding that
    /// this machine does not allow, fewer visible devices than ranks that are to see one each.
    pub fn plan(&self) -> Result<Plan, LaunchError> {
        self.check()?;
        let var = |name: &str| self.var(name);
        let executable = command::resolve(&self.program, self.run_as, &var)?;
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let var = |name: &str| self.variable(name);
        let bound = (self.binding)
            .map(|binding| Bound::plan(binding, self.nproc, &var))
            .transpose()?;
        let share = share(cores, self.nproc, bound.as_ref());
        let threads = THREAD_VARIABLES.map(|name| threads(share, self.threads_per_rank, var(name)));
        let ranks = (0..self.nproc).filter(|_| self.virtual_local_rank);
        let visible = ranks.map(|rank| devices::single(rank, &var));
        let visible = visible
            .collect::<Result<_, _>>()
            .map_err(|few| LaunchError::Usage {
                message: format!(
                    "{} ranks with a device each, and {} is `{}`",
                    self.nproc, few.variable, few.value
                ),
                hint: Some(format!(
                    "start as many ranks as {} has devices, or name one for each rank",
                    few.variable
                )),
            })?;
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
            bound,
            visible,
            threads,
        })
    }

    fn check(&self) -> Result<(), LaunchError> {
        if !(1..=NPROC_MAX).contains(&self.nproc) {
            let got = self.nproc;
            return Err(LaunchError::usage(format!(
                "nproc is {got}, expected 1 to {NPROC_MAX}"
            )));
        }
        if let (Some(rank), None) = (self.stdin, &self.cluster)
            && rank >= self.nproc
        {
            let world = self.nproc;
            let hint = match world {
                1 => "its only rank is 0; `--stdin none` gives standard input to no rank".into(),
                _ => format!("its ranks are 0 to {}", world - 1),
            };
            return Err(LaunchError::Usage {
                message: format!("the job has no rank {rank}"),
                hint: Some(hint),
            });
        }
        for (name, value) in &self.env {
            if name.is_empty() || name.contains(['=', '\0']) {
                return Err(LaunchError::usage(format!(
                    "`{name}` cannot be the name of an environment variable"
                )));
            }
            if value.contains('\0') {
                return Err(nul_byte(name));
            }
        }
        let has_nul = |arg: &OsString| arg.as_encoded_bytes().contains(&0);
        if self.args.iter().any(has_nul) {
            return Err(nul_byte("arguments"));
        }
        Ok(())
    }
}

fn nul_byte(name: &str) -> LaunchError {
    LaunchError::usage(format!("the value of `{name}` contains a NUL byte"))
}

/// Threads that keep a rank's cores busy: an equal share of what the launcher may use, and of a bound rank the cores it
/// is bound to. A quota counts for bound ranks too: more threads than it pays for would only be stopped.
fn share(cores: usize, nproc: usize, bound: Option<&Bound>) -> usize {
    let equal = (cores / nproc.max(1)).max(1);
    match bound {
        None => equal,
        Some(bound) if cores < bound.cpus_allowed => equal.min(bound.cores_each),
        Some(bound) => bound.cores_each,
    }
}

/// A number asked for wins, then the user's environment, then the rank's share of the cores.
fn threads(share: usize, asked: Option<usize>, user: Option<String>) -> Threads {
    match (asked, user) {
        (Some(asked), _) => Threads::Set(asked.max(1)),
        (None, Some(user)) if !user.is_empty() => Threads::Kept(user),
        (None, _) => Threads::Set(share),
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranks, cores) = (counted(self.nproc, "rank"), counted(self.cores, "core"));
        write!(f, "{ranks} on {cores}")?;
        match &self.threads {
            [Threads::Set(a), Threads::Set(b)] if a == b => {
                write!(f, ", {} each", counted(*a, "compute thread"))?;
            }
            threads => {
                for (name, value) in THREAD_VARIABLES.iter().zip(threads) {
                    match value {
                        Threads::Set(count) => write!(f, ", {name}={count}")?,
                        Threads::Kept(value) => write!(f, ", {name}={value} from the environment")?,
                    }
                }
            }
        }
        match &self.bound {
            Some(bound) => write!(f, ", {bound}"),
            None => Ok(()),
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
            threads(share(cores, nproc, None), asked, user.map(str::to_owned)),
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
    fn a_bound_rank_has_the_threads_of_its_cores_and_no_more_than_a_quota_pays_for() {
        let bound = Bound::example();
        assert_eq!((bound.cores_each, bound.cpus_allowed), (4, 16));
        assert_eq!(share(16, 2, Some(&bound)), 4);
        assert_eq!(share(6, 2, Some(&bound)), 3);
        assert_eq!(share(1, 2, Some(&bound)), 1);
    }

    #[test]
    fn a_plan_says_what_was_chosen() {
        let mut plan = Plan {
            program: "true".into(),
            args: Vec::new(),
            nproc: 2,
            cores: 8,
            bound: None,
            visible: Vec::new(),
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
        plan.threads[0] = Threads::Set(4);
        plan.bound = Some(Bound::example());
        assert_eq!(
            plan.to_string(),
            "2 ranks on 8 cores, 4 compute threads each, bound to exclusive cores: rank 0 to CPUs 0-7; rank 1 to CPUs 8-15"
        );
    }
}
