//! The variables with their effective values and the origin of each, for `--explain`.

use std::fmt;

use super::source::Source;
use super::variables::{TOOL_VARIABLES, VARIABLES, Variable, names};
use crate::scheduler::Scheduler;

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The environment.
    Environment,
    /// A scheduler's variables, which are read where torchrun's are absent.
    Scheduler(Scheduler),
    /// It is not set.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Environment => f.write_str("environment"),
            Self::Scheduler(scheduler) => write!(f, "{scheduler}"),
            Self::Default => f.write_str("default"),
        }
    }
}

/// A variable with its effective value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its row of the table.
    pub variable: &'static Variable,
    /// The value, unchecked; a secret is not shown.
    pub value: String,
    /// Where it comes from.
    pub origin: Origin,
}

/// Every variable of [`VARIABLES`] and [`TOOL_VARIABLES`] with its effective value and origin.
///
/// `get` looks a variable up, with [`std::env::var`] for this process. The caller handles options that override a variable,
/// and settings of the same name: `train --explain` lists `PACELINE_TRANSPORT`, `PACELINE_TIMEOUT_SECONDS`,
/// `PACELINE_DEVICE` and `PACELINE_USE_GPU` as settings, so it skips them here.
///
/// ```
/// use paceline_rendezvous::env::{Origin, list};
///
/// let get = |name: &str| (name == "PACELINE_TLS").then(|| "on".to_owned());
/// let tls = list(&get).into_iter().find(|listed| listed.variable.name == "PACELINE_TLS").expect("a row");
/// assert_eq!((tls.value.as_str(), tls.origin), ("on", Origin::Environment));
/// println!("{} = {} ({}): {}", tls.variable.name, tls.value, tls.origin, tls.variable.meaning);
/// ```
pub fn list(get: &dyn Fn(&str) -> Option<String>) -> Vec<Listed> {
    let get = |name: &str| get(name).filter(|value| !value.trim().is_empty());
    let source = Source::choose(&get);
    let all = VARIABLES.iter().chain(TOOL_VARIABLES);
    all.map(|variable| {
        let (value, origin) = match source.found(variable.name) {
            Some(_) if variable.name == names::PACELINE_JOB_TOKEN => {
                ("(secret)".to_owned(), Origin::Environment)
            }
            Some(found) => found,
            None => (variable.absent.to_owned(), Origin::Default),
        };
        Listed {
            variable,
            value,
            origin,
        }
    })
    .collect()
}
