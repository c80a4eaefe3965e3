//! The variables with the values that hold and where these come from, for `--explain`.

use std::fmt;

use super::source::Source;
use super::variables::{TOOL_VARIABLES, VARIABLES, Variable, names};
use crate::scheduler::Scheduler;

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The environment.
    Environment,
    /// A scheduler's variables, which hold where torchrun's are absent.
    Scheduler(Scheduler),
    /// Nobody set it.
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

/// A variable with the value that holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its row of the table.
    pub variable: &'static Variable,
    /// The value, unchecked; a secret is only said to be set.
    pub value: String,
    /// Where it comes from.
    pub origin: Origin,
}

/// Every variable of [`VARIABLES`] and [`TOOL_VARIABLES`] with the value that holds and its origin.
///
/// `get` looks a variable up: [`std::env::var`] for this process. An option that overrides a variable is the caller's to
/// know; so is a setting of `paceline train` of the same name (`PACELINE_TRANSPORT`, `PACELINE_TIMEOUT_SECONDS`,
/// `PACELINE_DEVICE`, `PACELINE_USE_GPU`), which `train --explain` lists as a setting and leaves out here.
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
                ("set, not shown".to_owned(), Origin::Environment)
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
