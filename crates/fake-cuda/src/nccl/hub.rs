//! Where the ranks of a communicator meet: a thread of the process that made the identity, which passes on what they send to
//! each other, and tells who leaves without a word.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use super::wire::{About, Frame, Member};
use crate::process::lock;

/// Most ranks of a communicator.
pub(super) const RANKS_MAX: u32 = 64;

/// What an identity begins with.
const MAGIC: &[u8; 16] = b"paceline-fake-id";

/// What an identity's 128 bytes say: where the hub is, and that it is this one.
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

    /// Nothing where the bytes are no identity of a fake NCCL.
    pub(crate) fn of_bytes(bytes: &[u8; 128]) -> Option<Self> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let port = u16::from_le_bytes(*rest.first_chunk()?);
        let nonce = u64::from_le_bytes(*rest[2..].first_chunk()?);
        Some(Self { port, nonce })
    }
}

/// What is sent to a rank, by whoever has something for it.
type Writer = Arc<Mutex<TcpStream>>;

/// The ranks that have come.
#[derive(Debug, Default)]
struct Hub {
    members: Mutex<BTreeMap<u32, (Member, Writer)>>,
}

/// Opens a hub, which takes ranks for as long as some are missing.
pub(crate) fn open_hub() -> io::Result<Id> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    let nonce = RandomState::new().build_hasher().finish();
    let id = Id { port, nonce };
    let hub = Arc::new(Hub::default());
    // As NCCL's root it belongs to the process: an identity that nobody uses is waited for until its end.
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
                    // One that cannot be told notices that it is alone.
                    let _ = refused.send(&mut stream);
                }
            }
        }
    }

    /// Adds a rank, and tells all once they are complete.
    fn admit(&self, hello: &Frame, id: Id, stream: &TcpStream) -> Result<u32, String> {
        let rank = hello.from;
        let member: Member =
            serde_json::from_slice(&hello.bytes).map_err(|error| error.to_string())?;
        let world = member.world;
        if hello.about != About::Hello || member.nonce != id.nonce {
            return Err("the identity is of another communicator".to_owned());
        }
        let stream = stream.try_clone().map_err(|error| error.to_string())?;
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
                // Whoever is gone is told of by the thread that reads from it.
                let _ = frame.send(&mut *lock(stream));
            }
        }
        Ok(world)
    }

    fn is_complete(&self, world: u32) -> bool {
        lock(&self.members).len() == world as usize
    }

    /// Passes on what a rank sends, until it leaves.
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
            // Whoever is gone is told of by the thread that reads from it.
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
