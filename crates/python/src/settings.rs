//! How a group of all ranks is formed: the settings that the caller gives, on top of the process's environment.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use paceline_collective::{Error, GroupOptions, ProcessGroup};
use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::page::Phase;
use paceline_rendezvous::store::{Server, find, host_anywhere};
use paceline_rendezvous::token::Token;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// What the caller knows of a group.
#[derive(Deserialize)]
pub(crate) struct Settings {
    /// Variables that win over those of the environment; an empty one counts as absent.
    variables: HashMap<String, String>,
    /// Deadline of forming, and of each operation.
    timeout_ms: u64,
    /// What rank 0 has published, unless the environment says where the store is.
    meeting: Option<Meeting>,
}

/// Where the ranks of a group meet, as rank 0 publishes it.
#[derive(Serialize, Deserialize)]
pub(crate) struct Meeting {
    addresses: String,
    /// The group's secret, unless all ranks have one from their launcher.
    token: Option<String>,
}

impl Settings {
    pub(crate) fn parse(json: &[u8]) -> Result<Self, Failure> {
        serde_json::from_slice(json)
            .map_err(|error| Failure::new("bug", format!("the settings of a group: {error}")))
    }

    /// Hosts the group's store, on rank 0.
    pub(crate) fn host(&self) -> Result<(Server, Meeting), Failure> {
        let mut env = self.env()?;
        let mut token = None;
        if !env.token_is_secret {
            let own = Token::generate();
            env.token = own.map_err(|error| Failure::new("other", error.to_string()))?;
            token = Some(env.token.to_hex());
        }
        let (server, addresses) = host_anywhere(&env, self.timeout())?;
        Ok((server, Meeting { addresses, token }))
    }

    /// Joins the group.
    ///
    /// *Blocks*: until all ranks have joined, at most for the timeout.
    pub(crate) fn join(&self) -> Result<ProcessGroup, Failure> {
        let mut env = self.env()?;
        if let Some(meeting) = &self.meeting {
            if let Some(hex) = &meeting.token {
                let token = Token::from_hex(hex);
                env.token = token.map_err(|error| Failure::new("other", error.to_string()))?;
            }
            env.store = Some(find(&env, &meeting.addresses, self.timeout())?);
        }
        let options = GroupOptions {
            timeout: self.timeout(),
            ..GroupOptions::default()
        };
        let group = ProcessGroup::connect(env, &options).map_err(|error| Failure::from(&error))?;
        // What else the program does is not known here.
        group.set_phase(Phase::BetweenSteps, 0);
        Ok(group)
    }

    fn env(&self) -> Result<WorkerEnv, Failure> {
        let env = WorkerEnv::from_lookup(&|name| {
            let own = self.variables.get(name).cloned();
            own.or_else(|| std::env::var(name).ok())
        });
        env.map_err(|error| Failure::from(&Error::from(Arc::new(error))))
    }

    fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }
}
