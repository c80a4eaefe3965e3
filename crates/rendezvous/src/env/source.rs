//! One process's variables under torchrun's names, from the environment or a scheduler, read within the table's bounds.

use std::collections::HashMap;
use std::str::FromStr;
use std::time::Duration;

use super::variables::{self, Need, VARIABLES, Variable, names};
use super::{EnvError, Origin, Timeout};
use crate::scheduler::{self, Scheduler};

/// Longest deadline in the environment: 30 days.
const TIMEOUT_SECONDS_MAX: f64 = 30.0 * 24.0 * 3600.0;

/// The variables of this process under torchrun's names.
pub(super) struct Source<'a> {
    get: &'a dyn Fn(&str) -> Option<String>,
    /// The scheduler that started this rank and its values, where these identify the rank.
    scheduler: Option<(Scheduler, HashMap<&'static str, String>)>,
}

impl<'a> Source<'a> {
    pub(super) fn choose(get: &'a dyn Fn(&str) -> Option<String>) -> Self {
        let torch = [
            names::RANK,
            names::WORLD_SIZE,
            names::LOCAL_RANK,
            names::LOCAL_WORLD_SIZE,
        ];
        let is_named = torch.iter().any(|name| get(name).is_some());
        let scheduler = if is_named {
            None
        } else {
            scheduler::rank_vars(get)
        };
        Self { get, scheduler }
    }

    pub(super) fn text(&self, name: &str) -> Option<String> {
        self.found(name).map(|(value, _)| value)
    }

    /// The value and where it comes from.
    pub(super) fn found(&self, name: &str) -> Option<(String, Origin)> {
        if let Some(value) = (self.get)(name) {
            return Some((value, Origin::Environment));
        }
        let (scheduler, values) = self.scheduler.as_ref()?;
        let value = values.get(name)?.clone();
        Some((value, Origin::Scheduler(*scheduler)))
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    /// Whether any variable claims that this process is part of a job.
    pub(super) fn says_anything(&self) -> bool {
        let claims = [
            names::RANK,
            names::WORLD_SIZE,
            names::LOCAL_RANK,
            names::LOCAL_WORLD_SIZE,
            names::GROUP_RANK,
            names::MASTER_ADDR,
            names::MASTER_PORT,
            names::PACELINE_STORE,
        ];
        claims.iter().any(|name| self.has(name))
    }

    /// Names all missing variables at once, not one per attempt.
    pub(super) fn check_complete(&self) -> Result<(), EnvError> {
        let needed = |variable: &&Variable| match variable.need {
            Need::Always => true,
            Need::UnlessStore => !self.has(names::PACELINE_STORE),
            Need::With(other) => self.has(other),
            Need::Optional => false,
        };
        let (present, missing): (Vec<_>, Vec<_>) = VARIABLES
            .iter()
            .filter(needed)
            .map(|variable| variable.name)
            .partition(|name| self.has(name));
        match &self.scheduler {
            _ if missing.is_empty() => Ok(()),
            Some((scheduler, _)) if missing == [names::MASTER_ADDR] => Err(EnvError::NoMaster {
                scheduler: *scheduler,
            }),
            _ => Err(EnvError::Missing { missing, present }),
        }
    }

    pub(super) fn parsed<T: FromStr>(&self, name: &'static str) -> Result<Option<T>, EnvError> {
        let parse = |text: String| text.trim().parse().map_err(|_| self.bad(name));
        self.text(name).map(parse).transpose()
    }

    /// A value that is valid.
    pub(super) fn valid<T: FromStr>(
        &self,
        name: &'static str,
        is_valid: impl Fn(&T) -> bool,
    ) -> Result<Option<T>, EnvError> {
        match self.parsed(name)? {
            Some(value) if !is_valid(&value) => Err(self.bad(name)),
            value => Ok(value),
        }
    }

    pub(super) fn number(&self, name: &'static str, max: usize) -> Result<Option<usize>, EnvError> {
        self.valid(name, |number| *number <= max)
    }

    pub(super) fn flag(&self, name: &'static str) -> Result<bool, EnvError> {
        self.either(name, ["false", "0"], ["true", "1"])
    }

    pub(super) fn switch(&self, name: &'static str) -> Result<bool, EnvError> {
        self.either(name, ["off", "0"], ["on", "1"])
    }

    fn either(&self, name: &'static str, no: [&str; 2], yes: [&str; 2]) -> Result<bool, EnvError> {
        let text = self.text(name).map(|text| text.trim().to_ascii_lowercase());
        match text.as_deref() {
            None => Ok(false),
            Some(text) if no.contains(&text) => Ok(false),
            Some(text) if yes.contains(&text) => Ok(true),
            Some(_) => Err(self.bad(name)),
        }
    }

    pub(super) fn store(&self) -> Result<Option<String>, EnvError> {
        let port = |store: &String| {
            let (host, port) = store.rsplit_once(':')?;
            port.parse::<u16>().ok().filter(|_| !host.is_empty())
        };
        match self.text(names::PACELINE_STORE) {
            Some(store) if matches!(port(&store), None | Some(0)) => {
                Err(self.bad(names::PACELINE_STORE))
            }
            store => Ok(store),
        }
    }

    pub(super) fn timeout(&self) -> Result<Option<Timeout>, EnvError> {
        if self.text(names::PACELINE_TIMEOUT_SECONDS).as_deref() == Some("auto") {
            return Ok(Some(Timeout::Auto));
        }
        let duration = |seconds: f64| Duration::try_from_secs_f64(seconds).ok();
        let is_valid = |seconds: &f64| {
            *seconds <= TIMEOUT_SECONDS_MAX
                && duration(*seconds).is_some_and(|time| !time.is_zero())
        };
        let seconds = self.valid(names::PACELINE_TIMEOUT_SECONDS, is_valid)?;
        Ok(seconds.and_then(duration).map(Timeout::After))
    }

    pub(super) fn bad(&self, name: &'static str) -> EnvError {
        let value = self.text(name).unwrap_or_default();
        EnvError::Invalid {
            name,
            value,
            expected: variables::find(name).map_or("another value", |variable| variable.expected),
        }
    }

    pub(super) fn check_below(
        &self,
        name: &'static str,
        value: usize,
        of: &'static str,
        bound: usize,
    ) -> Result<(), EnvError> {
        if value < bound {
            Ok(())
        } else {
            Err(EnvError::NotBelow {
                name,
                value,
                of,
                bound,
            })
        }
    }
}
