//! torch's TCPStore as a client sees it, as far as ranks beside torchrun's agent need it.
//!
//! ```text
//! query     u8    fields                       answer
//! validate  0     u32 0x3C85F7CE               -
//! set       1     text key   text value        -
//! get       3     text key                     text value (the key must be there)
//! wait      6     u64 count  text key ...      u8 0 when all are there
//! text      u64 bytes   bytes                  numbers in the sender's order, that is little-endian
//! ```
//!
//! torch puts "/" before every key of its users, so `/paceline/...` here is `paceline/...` in Python. That store has no
//! authentication: what is read from it is a hint where to dial, and is proven there.
//!
//! *Source*: torch/csrc/distributed/c10d/TCPStore.cpp and TCPStoreBackend.hpp, and the bytes that torch 2.15.0's own client
//! and server exchange. Checked by hand against torch 2.15.0: both of its servers, and
//! `torchrun --no-python .../examples/meet` with one agent, with two, and with a static endpoint.

mod agent;

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

pub(super) use self::agent::Agent;
use crate::net::{self, DeadlineStream};

const VALIDATE: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 3;
const WAIT: u8 = 6;
const MAGIC: u32 = 0x3C85_F7CE;
const STOP_WAITING: u8 = 0;

/// Most bytes allocated for an announced length before its bytes have come.
const BELIEVED_BYTES: usize = 64 << 10;

/// One attempt to connect.
fn dial(server: &str, timeout: Duration) -> io::Result<TcpStream> {
    let started = Instant::now();
    let mut outcome = Err(io::Error::new(
        io::ErrorKind::NotFound,
        "the name has no address",
    ));
    for addr in net::resolve(server, timeout)? {
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
    Exchange::new(&stream, timeout).send(&message)?;
    Ok(stream)
}

/// Messages and answers by one deadline.
struct Exchange<'a>(DeadlineStream<'a>);

impl<'a> Exchange<'a> {
    fn new(stream: &'a TcpStream, timeout: Duration) -> Self {
        Self(DeadlineStream::new(stream, timeout))
    }

    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        self.0.write_all(message)
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn text(&mut self, bytes_max: usize) -> io::Result<Vec<u8>> {
        let announced = u64::from_le_bytes(self.array()?);
        let bytes = usize::try_from(announced).unwrap_or(usize::MAX);
        if bytes > bytes_max {
            let reason = format!("a value of {announced} bytes, at most {bytes_max} are expected");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        let mut value = Vec::new();
        while value.len() < bytes {
            let start = value.len();
            value.resize(bytes.min(start + BELIEVED_BYTES), 0);
            self.0.read_exact(&mut value[start..])?;
        }
        Ok(value)
    }
}

fn key_message(query: u8, key: &str) -> Vec<u8> {
    let mut message = vec![query];
    text(&mut message, key.as_bytes());
    message
}

fn set_message(key: &str, value: &[u8]) -> Vec<u8> {
    let mut message = key_message(SET, key);
    text(&mut message, value);
    message
}

/// Waits for one key.
fn wait_message(key: &str) -> Vec<u8> {
    let mut message = vec![WAIT];
    message.extend_from_slice(&1_u64.to_le_bytes());
    text(&mut message, key.as_bytes());
    message
}

fn text(message: &mut Vec<u8>, bytes: &[u8]) {
    message.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    message.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests;
