//! The keys of a job in etcd, through the JSON gateway of its API v3.
//!
//! ```text
//!   /paceline/<job>/<key>     HMAC of the job's token | value      all with one etcd lease
//! ```
//!
//! | file | owns |
//! |---|---|
//! | `etcd.rs` | where etcd is, the user, the lease |
//! | `operations.rs` | those of [`Store`](super::Store) |
//! | `gateway.rs` | HTTP: members, deadlines, bounds |
//! | `messages.rs` | JSON |
//! | `seal.rs` | the proof that a value is the job's |
//!
//! Reads are linearizable, changes are transactions on the revision that was read. A read goes to the next member when one
//! does not answer; a change that may have been done is not sent again, its error says so.
//!
//! All keys of a job have the same etcd lease, with an id that follows from token and job. Every process that uses the
//! store keeps it alive, so the keys are there as long as one of them is and are removed by etcd some time after the last;
//! [`Etcd::end_job`] removes them at once.

mod error;
mod gateway;
mod messages;
mod operations;
mod seal;

use std::fmt;
use std::time::{Duration, Instant};

use serde_json::json;

use self::gateway::{Again, Endpoints, Gateway};
use self::messages::{AuthenticateAnswer, KeepAliveAnswer, Number, PlainAnswer, Streamed};
use super::StoreError;
use crate::net::deadline_after;
use crate::token::Token;

pub use self::error::{EndpointError, EtcdError};
pub use self::operations::EtcdStore;

/// gRPC's code of something that is there already, or not as it must be.
const FAILED_PRECONDITION: u32 = 9;
/// gRPC's code of something that is not there.
const NOT_FOUND: u32 = 5;

/// A job's part of an etcd, and its address. Clones share which member answered last.
#[derive(Clone)]
pub struct Etcd {
    endpoints: Endpoints,
    prefix: String,
    token: Token,
    lease: i64,
    ttl: Duration,
    user: Option<(String, String)>,
}

impl Etcd {
    /// The part of `job` in the etcd with these endpoints, `host[:port][,host[:port]...]`.
    ///
    /// Keys are removed when no process has used them for `ttl`, in whole seconds.
    pub fn new(
        endpoints: &str,
        job: &str,
        token: &Token,
        ttl: Duration,
    ) -> Result<Self, EndpointError> {
        let prefix = format!("/paceline/{}/", escaped(job));
        Ok(Self {
            endpoints: Endpoints::parse(endpoints)?,
            lease: seal::lease_id(token, prefix.as_bytes()),
            prefix,
            token: token.clone(),
            ttl: ttl.max(Duration::from_secs(1)),
            user: None,
        })
    }

    /// The user and password, if this etcd requires them.
    #[must_use]
    pub fn with_user(mut self, name: String, password: String) -> Self {
        self.user = Some((name, password));
        self
    }

    /// The members as `host:port`.
    pub fn endpoints(&self) -> &[String] {
        self.endpoints.names()
    }

    /// Its name in errors.
    pub fn name(&self) -> String {
        self.endpoints.names().join(",")
    }

    /// Connects to etcd and makes sure that the job's lease exists. Every operation of the store that does not wait for keys
    /// has `answer_timeout`.
    ///
    /// *Blocks*: at most for `answer_timeout`.
    pub fn connect(&self, answer_timeout: Duration) -> Result<EtcdStore, StoreError> {
        let started = Instant::now();
        let deadline = deadline_after(answer_timeout);
        let mut gateway = Gateway::new(self.endpoints.clone());
        let mut enter = || -> Result<(), EtcdError> {
            if let Some((name, password)) = &self.user {
                let request = json!({ "name": name, "password": password });
                let path = "/v3/auth/authenticate";
                match gateway.call::<AuthenticateAnswer>(path, &request, Again::May, deadline) {
                    Ok(answer) => gateway.authorize(answer.token),
                    // This etcd wants no user.
                    Err(EtcdError::Refused { code, .. }) if code == FAILED_PRECONDITION => {}
                    Err(error) => return Err(error),
                }
            }
            self.refresh(&gateway, deadline)
        };
        match enter() {
            Ok(()) => Ok(EtcdStore::new(self, gateway, answer_timeout, started)),
            Err(source) => Err(self.error("connect", "", started, source)),
        }
    }

    /// Keeps the lease alive, or makes it.
    fn refresh(&self, gateway: &Gateway, deadline: Instant) -> Result<(), EtcdError> {
        let id = Number(self.lease);
        let alive: Streamed<KeepAliveAnswer> = gateway.call(
            "/v3/lease/keepalive",
            &json!({ "ID": id }),
            Again::May,
            deadline,
        )?;
        if alive.result.ttl.0 > 0 {
            return Ok(());
        }
        let ttl = Number(i64::try_from(self.ttl.as_secs()).unwrap_or(i64::MAX));
        let grant = json!({ "ID": id, "TTL": ttl });
        match gateway.call::<PlainAnswer>("/v3/lease/grant", &grant, Again::May, deadline) {
            Ok(_) => Ok(()),
            // Another process of the job was quicker.
            Err(EtcdError::Refused { code, .. }) if code == FAILED_PRECONDITION => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn error(
        &self,
        operation: &'static str,
        key: &str,
        started: Instant,
        source: EtcdError,
    ) -> StoreError {
        StoreError::Etcd {
            operation,
            key: key.to_owned(),
            server: self.name(),
            waited: started.elapsed(),
            source,
        }
    }
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd")
            .field("endpoints", &self.endpoints())
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

/// A job's name as one unambiguous part of a key.
fn escaped(job: &str) -> String {
    use fmt::Write as _;
    let mut text = String::new();
    for byte in job.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.".contains(&byte) {
            text.push(char::from(byte));
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

#[cfg(test)]
mod tests;
