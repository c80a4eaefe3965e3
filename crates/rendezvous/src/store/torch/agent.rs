//! The store of torchrun's agent, just enough to leave an address there.

use std::io;
use std::net::{IpAddr, TcpStream};
use std::time::{Duration, Instant};

use super::{Exchange, GET, STOP_WAITING, dial, key_message, set_message, wait_message};
use crate::store::StoreError;

/// Longest value that is read: an address list, from an unauthenticated peer.
const VALUE_BYTES_MAX: usize = 4096;

/// A connection to the agent's store. Dropped after an error.
pub(in crate::store) struct Agent {
    server: String,
    stream: TcpStream,
}

impl Agent {
    /// One attempt to connect.
    pub(in crate::store) fn connect(server: &str, timeout: Duration) -> Result<Self, StoreError> {
        let started = Instant::now();
        let connected = dial(server, timeout);
        match connected {
            Ok(stream) => Ok(Self {
                server: server.to_owned(),
                stream,
            }),
            Err(error) => Err(failed(server, "connect", started, &error)),
        }
    }

    /// The address of this machine that the server's machine can reach.
    pub(in crate::store) fn local_ip(&self) -> Option<IpAddr> {
        Some(self.stream.local_addr().ok()?.ip())
    }

    /// Sets a key. torch's server does not confirm that; reading the value back does.
    pub(in crate::store) fn set(
        &self,
        key: &str,
        value: &[u8],
        timeout: Duration,
    ) -> Result<(), StoreError> {
        let started = Instant::now();
        let sent = Exchange::new(&self.stream, timeout).send(&set_message(key, value));
        sent.map_err(|error| failed(&self.server, "publish an address", started, &error))?;
        let stored = self.get(key, timeout)?;
        if stored != value {
            let error = io::Error::new(
                io::ErrorKind::InvalidData,
                "another process published one for the same key",
            );
            return Err(failed(&self.server, "publish an address", started, &error));
        }
        Ok(())
    }

    /// The value of a key, as soon as it exists.
    pub(in crate::store) fn get(
        &self,
        key: &str,
        timeout: Duration,
    ) -> Result<Vec<u8>, StoreError> {
        let started = Instant::now();
        self.wait_and_get(key, timeout)
            .map_err(|error| failed(&self.server, "read rank 0's address", started, &error))
    }

    fn wait_and_get(&self, key: &str, timeout: Duration) -> io::Result<Vec<u8>> {
        let mut exchange = Exchange::new(&self.stream, timeout);
        exchange.send(&wait_message(key))?;
        let [status] = exchange.array()?;
        if status != STOP_WAITING {
            let reason = format!("the answer to a wait is {status}, expected {STOP_WAITING}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        exchange.send(&key_message(GET, key))?;
        exchange.text(VALUE_BYTES_MAX)
    }
}

fn failed(server: &str, step: &'static str, started: Instant, error: &io::Error) -> StoreError {
    StoreError::AgentStore {
        server: server.to_owned(),
        step,
        waited: started.elapsed(),
        reason: error.to_string(),
    }
}
