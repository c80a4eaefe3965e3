//! Settings of a process group.

use std::time::Duration;

use paceline_rendezvous::env::{Timeout, WorkerEnv};

use crate::error::Error;
use crate::plan::Override;

/// How bytes travel between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// `Shm` when all ranks are on one host and reach each other there, `Hierarchical` when they are on several and
    /// those of each host do, else `Tcp`.
    #[default]
    Auto,
    /// Shared memory of one host.
    Shm,
    /// TCP connections for each pair of ranks.
    Tcp,
    /// Shared memory between ranks of one host, TCP between hosts. Where all ranks are on one host that is `Shm`, where
    /// each has a host of its own `Tcp`.
    Hierarchical,
    /// Shared memory between ranks of one host, an MPI library between hosts: ranks that its `mpirun` has started. Messages
    /// between two ranks go over TCP. Where all ranks are on one host that is `Shm`.
    Mpi,
}

impl Transport {
    /// The name in `PACELINE_TRANSPORT` and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Hierarchical => "hierarchical",
            Self::Mpi => "mpi",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        [
            Self::Auto,
            Self::Shm,
            Self::Tcp,
            Self::Hierarchical,
            Self::Mpi,
        ]
        .into_iter()
        .find(|transport| transport.name() == name)
    }
}

/// Settings of a process group. The environment's `PACELINE_TIMEOUT_SECONDS`, `PACELINE_TRANSPORT` and
/// `PACELINE_ALGORITHM` win over the fields they correspond to, so that a job can be changed without a rebuild.
#[derive(Debug, Clone)]
pub struct GroupOptions {
    /// Deadline of forming the group, and of each operation from the moment it starts. Default: 60 s.
    pub timeout: Duration,
    /// Whether `timeout` holds only until the program knows better: `Ddp` [sets](crate::ProcessGroup::set_timeout) one that
    /// follows the job's steps. Default: no.
    pub auto_timeout: bool,
    /// How bytes travel. Default: [`Transport::Auto`].
    pub transport: Transport,
    /// How operations are done, in place of the table that chooses by size, world and transport. The same on all ranks.
    /// Default: the table. `PACELINE_ALGORITHM` wins over it.
    pub algorithm: Override,
    /// Address space for this rank's buffers under `shm`, `hierarchical` and `local`; memory is taken only as buffers are made.
    /// Default: the machine's memory, at most 64 GiB.
    ///
    /// *Units*: bytes.
    pub arena_bytes: Option<usize>,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            auto_timeout: false,
            transport: Transport::Auto,
            algorithm: Override::default(),
            arena_bytes: None,
        }
    }
}

impl GroupOptions {
    /// The settings with the environment's on top.
    pub(crate) fn under(&self, env: &WorkerEnv) -> Result<Self, Error> {
        let transport = match env.transport.as_deref() {
            None => self.transport,
            Some(name) => Transport::from_name(name).ok_or_else(|| Error::Setting {
                name: "PACELINE_TRANSPORT",
                value: name.into(),
                expected: "auto, shm, tcp, hierarchical or mpi",
            })?,
        };
        if transport == Transport::Mpi && env.tls {
            return Err(Error::Setting {
                name: "PACELINE_TLS",
                value: "on".into(),
                expected: "off where data goes over MPI, which does not encrypt",
            });
        }
        let algorithm = match env.algorithm.as_deref() {
            None => self.algorithm,
            Some(text) => Override::parse(text).map_err(|source| Error::Algorithm { source })?,
        };
        let (timeout, auto_timeout) = match env.timeout {
            None => (self.timeout, self.auto_timeout),
            Some(Timeout::After(timeout)) => (timeout, false),
            Some(Timeout::Auto) => (self.timeout, true),
        };
        Ok(Self {
            algorithm,
            timeout,
            auto_timeout,
            transport,
            ..self.clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_wins() {
        let mut env = WorkerEnv::alone();
        env.transport = Some("tcp".into());
        env.timeout = Some(Timeout::Auto);
        let options = GroupOptions::default().under(&env).unwrap();
        assert!(options.auto_timeout);
        env.timeout = Some(Timeout::After(Duration::from_secs(5)));
        let options = options.under(&env).unwrap();
        assert_eq!(
            (options.transport, options.timeout, options.auto_timeout),
            (Transport::Tcp, Duration::from_secs(5), false)
        );
    }

    #[test]
    fn mpi_is_refused_where_all_is_to_be_encrypted() {
        let mut env = WorkerEnv::alone();
        env.tls = true;
        let mpi = GroupOptions {
            transport: Transport::Mpi,
            ..GroupOptions::default()
        };
        let error = mpi.under(&env).unwrap_err().to_string();
        assert!(error.starts_with("PACELINE_TLS is \"on\""), "{error}");
        env.tls = false;
        assert!(mpi.under(&env).is_ok());
    }

    #[test]
    fn an_unknown_algorithm_is_named_with_those_there_are() {
        let mut env = WorkerEnv::alone();
        env.algorithm = Some("allreduce:butterfly".into());
        let error = GroupOptions::default().under(&env).unwrap_err().to_string();
        assert!(
            error.starts_with(
                "PACELINE_ALGORITHM cannot be followed: no algorithm is called \"butterfly\""
            ),
            "{error}"
        );
        assert!(error.contains("hierarchical"), "{error}");
    }

    #[test]
    fn an_unknown_transport_is_named() {
        let mut env = WorkerEnv::alone();
        env.transport = Some("carrier pigeon".into());
        let error = GroupOptions::default().under(&env).unwrap_err().to_string();
        assert_eq!(
            error,
            "PACELINE_TRANSPORT is \"carrier pigeon\", expected auto, shm, tcp, hierarchical or mpi"
        );
    }
}
