//! A minimal client of torch's TCPStore, just enough to leave an address in the store of torchrun's agent.
//!
//! ```text
//! validate  u8 0   u32 0x3C85F7CE                        no answer
//! set       u8 1   text key   text value                 no answer
//! get       u8 3   text key                              text value
//! wait      u8 6   u64 count  text key ...               u8 0 when all are there
//! text      u64 bytes   bytes                            numbers in the sender's order, that is little-endian
//! ```
//!
//! torch puts "/" before every key of its users, so `/paceline/...` here is `paceline/...` in Python. That store knows
//! no authentication: what is read from it is a hint where to dial, and is proven there.
//!
//! Source: torch/csrc/distributed/c10d/TCPStore.cpp and TCPStoreBackend.hpp. Checked by hand against torch 2.15.0: both
//! of its servers, and `torchrun --no-python .../examples/meet` with one agent, with two, and with a static endpoint.

use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpStream};
use std::time::{Duration, Instant};

use super::StoreError;
use crate::net::{self, DeadlineStream};

const VALIDATE: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 3;
const WAIT: u8 = 6;
const MAGIC: u32 = 0x3C85_F7CE;
const STOP_WAITING: u8 = 0;

/// Longest value that is read: an address list, from a peer that nobody vouches for.
const VALUE_BYTES_MAX: u64 = 4096;

/// A connection to torch's store. Dropped after an error.
pub(super) struct TorchStore {
    server: String,
    stream: TcpStream,
}

impl TorchStore {
    /// One attempt to connect.
    pub(super) fn connect(server: &str, timeout: Duration) -> Result<Self, StoreError> {
        let started = Instant::now();
        let connected = net::resolve(server, timeout).and_then(|addrs| {
            let mut outcome = Err(io::Error::new(
                io::ErrorKind::NotFound,
                "the name has no address",
            ));
            for addr in addrs {
                let left = timeout
                    .saturating_sub(started.elapsed())
                    .max(Duration::from_millis(1));
                outcome = TcpStream::connect_timeout(&addr, left);
                if outcome.is_ok() {
                    break;
                }
            }
            let stream = outcome?;
            stream.set_nodelay(true)?;
            let mut message = vec![VALIDATE];
            message.extend_from_slice(&MAGIC.to_le_bytes());
            DeadlineStream::new(&stream, timeout).write_all(&message)?;
            Ok(stream)
        });
        match connected {
            Ok(stream) => Ok(Self {
                server: server.to_owned(),
                stream,
            }),
            Err(error) => Err(failed(server, "connect", started, &error)),
        }
    }

    /// The address of this machine that the server's machine can reach.
    pub(super) fn local_ip(&self) -> Option<IpAddr> {
        Some(self.stream.local_addr().ok()?.ip())
    }

    /// Sets a key. torch's server does not confirm that; reading the value back does.
    pub(super) fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        let started = Instant::now();
        let mut message = vec![SET];
        text(&mut message, key.as_bytes());
        text(&mut message, value);
        let mut stream = DeadlineStream::new(&self.stream, timeout);
        stream
            .write_all(&message)
            .map_err(|error| failed(&self.server, "publish an address", started, &error))?;
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
    pub(super) fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        let started = Instant::now();
        self.wait_and_get(key, timeout)
            .map_err(|error| failed(&self.server, "read rank 0's address", started, &error))
    }

    fn wait_and_get(&self, key: &str, timeout: Duration) -> io::Result<Vec<u8>> {
        let mut stream = DeadlineStream::new(&self.stream, timeout);
        let mut message = vec![WAIT];
        message.extend_from_slice(&1_u64.to_le_bytes());
        text(&mut message, key.as_bytes());
        stream.write_all(&message)?;
        let mut status = [0];
        stream.read_exact(&mut status)?;
        if status != [STOP_WAITING] {
            let reason = format!(
                "the answer to a wait is {}, expected {STOP_WAITING}",
                status[0]
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        let mut message = vec![GET];
        text(&mut message, key.as_bytes());
        stream.write_all(&message)?;
        let mut bytes = [0; 8];
        stream.read_exact(&mut bytes)?;
        let bytes = u64::from_le_bytes(bytes);
        if bytes > VALUE_BYTES_MAX {
            let reason =
                format!("a value of {bytes} bytes, at most {VALUE_BYTES_MAX} are expected");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        // Below VALUE_BYTES_MAX, so it fits.
        let mut value = vec![0; bytes as usize];
        stream.read_exact(&mut value)?;
        Ok(value)
    }
}

fn text(message: &mut Vec<u8>, bytes: &[u8]) {
    message.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    message.extend_from_slice(bytes);
}

fn failed(server: &str, step: &'static str, started: Instant, error: &io::Error) -> StoreError {
    StoreError::AgentStore {
        server: server.to_owned(),
        step,
        waited: started.elapsed(),
        reason: error.to_string(),
    }
}

#[cfg(test)]
mod tests;
