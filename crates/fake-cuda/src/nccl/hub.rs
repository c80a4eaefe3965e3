//! The hub of a communicator: a thread in the process that created the id. It forwards the ranks' messages and reports dead
//! ranks.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use super::wire::{About, Frame, Member};
use crate::process::lock;

/// Maximum number of ranks of a communicator.
pub(super) const RANKS_MAX: u32 = 64;

/// The first bytes of an id.
const MAGIC: &[u8; 16] = b"paceline-fake-id";

/// The content of an id's 128 bytes: the hub's port, and a nonce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id {
    pub(super) port: u16,
    pub(super) nonce: u64,
}

impl Id {
    pub(crate) fn to_bytes(self) -> [u8; 128] {
        let mut bytes = [0; 128];
        bytes[..16].copy_from_slice(MAGIC);
        bytes[16..18].copy_from_slice(&self.port.to_le_bytes());
        bytes[18..26].copy_from_slice(&self.nonce.to_le_bytes());
        bytes
    }

    /// `None` if the bytes are not an id of this library.
    pub(crate) fn of_bytes(bytes: &[u8; 128]) -> Option<Self> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let port = u16::from_le_bytes(*rest.first_chunk()?);
        let nonce = u64::from_le_bytes(*rest[2..].first_chunk()?);
        Some(Self { port, nonce })
    }
}

/// The connection to a rank, for any sender.
type Writer = Arc<Mutex<TcpStream>>;

/// The joined ranks.
#[derive(Debug, Default)]
struct Hub {
    members: Mutex<BTreeMap<u32, (Member, Writer)>>,
}

/// Opens a hub, which accepts ranks until all have joined.
pub(crate) fn open_hub() -> io::Result<Id> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    let nonce = RandomState::new().build_hasher().finish();
    let id = Id { port, nonce };
    let hub = Arc::new(Hub::default());
    // As NCCL's root does, it waits until the process ends if the id is never used.
    std::thread::Builder::new()
        .name("fake-nccl/hub".to_owned())
        .spawn(move || hub.take_in(&listener, id))?;
    Ok(id)
}

impl Hub {
    fn take_in(self: &Arc<Self>, listener: &TcpListener, id: Id) {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            let Ok(hello) = Frame::receive(&mut stream) else {
                continue;
            };
            let rank = hello.from;
            match self.admit(&hello, id, &stream) {
                Ok(world) => {
                    let hub = self.clone();
                    let name = format!("fake-nccl/hub-{rank}");
                    let served = std::thread::Builder::new()
                        .name(name)
                        .spawn(move || hub.serve(rank, stream));
                    if served.is_err() || self.is_complete(world) {
                        break;
                    }
                }
                Err(why) => {
                    let refused = Frame {
                        bytes: why.into_bytes(),
                        ..Frame::empty(About::Refused, rank)
                    };
                    // If it cannot be told, its connection is gone anyway.
                    let _ = refused.send(&mut stream);
                }
            }
        }
    }

    /// Adds a rank, and sends the roster once all have joined.
    fn admit(&self, hello: &Frame, id: Id, stream: &TcpStream) -> Result<u32, String> {
        let rank = hello.from;
        let member: Member =
            serde_json::from_slice(&hello.bytes).map_err(|error| error.to_string())?;
        let world = member.world;
        if hello.about != About::Hello || member.nonce != id.nonce {
            return Err("the identity is of another communicator".to_owned());
        }
        let stream = stream.try_clone().and_then(|stream| {
            // A message must not wait for the acknowledgement of the one before it.
            stream.set_nodelay(true)?;
            Ok(stream)
        });
        let stream = stream.map_err(|error| error.to_string())?;
        let mut members = lock(&self.members);
        if members.values().any(|(other, _)| other.world != world)
            || rank >= world
            || world > RANKS_MAX
        {
            return Err(format!("rank {rank} of {world} does not fit to the others"));
        }
        let twin = members
            .iter()
            .find(|(_, (other, _))| other.host == member.host && other.uuid == member.uuid);
        if let Some((other, _)) = twin {
            let number = member.place;
            return Err(format!(
                "Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device {number}"
            ));
        }
        if members
            .insert(rank, (member, Arc::new(Mutex::new(stream))))
            .is_some()
        {
            return Err(format!("rank {rank} is there already"));
        }
        if members.len() == world as usize {
            let roster: Vec<&Member> = members.values().map(|(member, _)| member).collect();
            let bytes = serde_json::to_vec(&roster).map_err(|error| error.to_string())?;
            let frame = Frame {
                bytes,
                ..Frame::empty(About::Roster, rank)
            };
            for (_, stream) in members.values() {
                // The thread that reads from a dead rank reports it.
                let _ = frame.send(&mut *lock(stream));
            }
        }
        Ok(world)
    }

    fn is_complete(&self, world: u32) -> bool {
        lock(&self.members).len() == world as usize
    }

    /// Forwards a rank's messages until it leaves.
    fn serve(&self, rank: u32, stream: TcpStream) {
        let mut from = io::BufReader::new(stream);
        loop {
            match Frame::receive(&mut from) {
                Ok(Frame {
                    about: About::Bye, ..
                }) => {
                    lock(&self.members).remove(&rank);
                    return;
                }
                Ok(frame) => self.pass(frame.to, &frame),
                Err(_) => break,
            }
        }
        let others: Vec<u32> = {
            let mut members = lock(&self.members);
            members.remove(&rank);
            members.keys().copied().collect()
        };
        for other in others {
            self.pass(other, &Frame::empty(About::Gone, rank));
        }
    }

    fn pass(&self, to: u32, frame: &Frame) {
        let stream = lock(&self.members)
            .get(&to)
            .map(|(_, stream)| stream.clone());
        if let Some(stream) = stream {
            // The thread that reads from a dead rank reports it.
            let _ = frame.send(&mut *lock(&stream));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_survives_its_bytes_and_others_are_none() {
        let id = Id {
            port: 4711,
            nonce: 0x0123_4567_89ab_cdef,
        };
        assert_eq!(Id::of_bytes(&id.to_bytes()), Some(id));
        assert_eq!(Id::of_bytes(&[7; 128]), None);
    }
}
