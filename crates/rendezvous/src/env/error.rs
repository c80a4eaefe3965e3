//! Errors in the environment, and advice.

use super::variables::{self, VARIABLES};
use crate::scheduler::{Scheduler, name_master};
use crate::token::TokenError;

/// What is wrong with the environment.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnvError {
    /// Some variables say that this process is part of a job, and others are missing.
    #[error("{} missing in the environment{}", list(missing), also(present))]
    Missing {
        /// All that are missing.
        missing: Vec<&'static str>,
        /// Those of the required ones that are set.
        present: Vec<&'static str>,
    },
    /// A value is malformed or out of range.
    #[error("{name} is {value:?}, expected {expected}")]
    Invalid {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What a valid value looks like.
        expected: &'static str,
    },
    /// A number is not below the size it counts in.
    #[error("{name} is {value}, expected a number below {of}, which is {bound}")]
    NotBelow {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: usize,
        /// The variable with the bound.
        of: &'static str,
        /// The bound.
        bound: usize,
    },
    /// A scheduler started this rank and does not say where rank 0 is.
    #[error("{scheduler} started this process, but its variables do not name rank 0's machine")]
    NoMaster {
        /// The scheduler that started it.
        scheduler: Scheduler,
    },
    /// The job's token is malformed. Its value is not repeated.
    #[error("PACELINE_JOB_TOKEN is malformed: {0}")]
    Token(#[from] TokenError),
}

impl EnvError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Missing { missing, .. } => {
                let mut hint = String::from(
                    "start the program with `paceline run --nproc-per-node 2 PROGRAM`, which sets all variables, or \
                     export them on every rank:",
                );
                for variable in VARIABLES
                    .iter()
                    .filter(|variable| missing.contains(&variable.name))
                {
                    hint.push_str(&format!(
                        "\n  {}: {} ({})",
                        variable.name, variable.meaning, variable.expected
                    ));
                }
                hint.push_str("\nto run alone, unset all of them");
                Some(hint)
            }
            Self::Invalid { name, .. } => {
                let variable = variables::find(name)?;
                Some(format!("{name}: {}", variable.meaning))
            }
            Self::NotBelow { name, of, .. } => Some(format!(
                "{name} counts from 0, so the last one is {of} - 1; each process has its own"
            )),
            Self::NoMaster { scheduler } => Some(name_master(*scheduler)),
            Self::Token(error) => error.hint(),
        }
    }
}

crate::debug_with_hint!(EnvError);

fn list(names: &[&str]) -> String {
    let verb = if names.len() == 1 { "is" } else { "are" };
    format!("{} {verb}", names.join(", "))
}

fn also(present: &[&str]) -> String {
    if present.is_empty() {
        String::new()
    } else {
        format!(", although {} set", list(present))
    }
}
