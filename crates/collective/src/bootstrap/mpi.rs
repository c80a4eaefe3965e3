//! Forms the data lanes of a group over MPI: between ranks that have proved the token to each other over TCP.
//!
//! Each rank publishes its number in MPI's job, the tag by which it receives, and a word. The first message on every line must
//! be the word of the rank that it is meant to come from, so a process that MPI has in that place but that is no rank of this
//! group stays outside, and nothing of it is used.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use paceline_rendezvous::token::Token;
use serde::{Deserialize, Serialize};

use super::notice::Behind;
use super::record::{Record, read_json};
use super::swap::lost;
use super::{Forming, Transport};
use crate::error::Error;
use crate::mesh::Advice as _;
use crate::mpi::{self, Address, Line, World, message_bytes};
use crate::plan::Hosts;
use crate::socket::{Socket, has_ended, poll_sockets, present};

/// Longest wait between two looks at MPI, which wakes nobody.
const LOOK: Duration = Duration::from_millis(1);
const WORD_BYTES: usize = 64;

/// Where a rank is to be found in MPI's job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Seat {
    process: i32,
    /// What other ranks send it for this group has this tag.
    tag: i32,
    /// How it makes itself known. Only those with the token can read it.
    word: String,
}

impl Seat {
    fn decode(bytes: &[u8], world: usize) -> Result<Self, String> {
        let seat: Self = read_json(bytes, "place in MPI")?;
        let process = usize::try_from(seat.process).is_ok_and(|process| process < world);
        match process && seat.tag > 0 && seat.word.len() == WORD_BYTES {
            true => Ok(seat),
            false => Err(format!(
                "it is process {} of MPI's job with tag {}, expected one of {world}",
                seat.process, seat.tag
            )),
        }
    }
}

impl Forming<'_> {
    /// The MPI library that this rank would use, or why it has none; nothing where MPI was not asked for.
    pub(super) fn mpi_library(&self) -> Option<Result<String, String>> {
        let is_asked_for = self.options.transport == Transport::Mpi;
        is_asked_for.then(|| {
            if self.env.page_fd.is_some() {
                return Err(
                    "Paceline's launcher started it, and only MPI's own makes an MPI job of processes".into(),
                );
            }
            let is_whole = self.subgroup.is_none() && self.succession.is_none();
            match mpi::launcher() {
                Some((launcher, started)) if is_whole && started != self.env.world => Err(format!(
                    "{launcher} has started {started} processes, and the job has {} ranks",
                    self.env.world
                )),
                _ => mpi::library().map(|library| library.version.clone()),
            }
        })
    }

    /// Lines to the ranks of other hosts; `messages` are the connections to all ranks.
    ///
    /// *Blocks*: until all ranks have started MPI and have been heard, at most until the deadline.
    pub(super) fn mpi_lines(
        &self,
        records: &[Record],
        hosts: &Hosts,
        messages: &[Option<Socket>],
    ) -> Result<Vec<Option<Line>>, Error> {
        let lines = self.lines(records, hosts, messages);
        lines.inspect_err(|error| {
            mpi::give_up();
            self.part(messages, error);
        })
    }

    fn lines(
        &self,
        records: &[Record],
        hosts: &Hosts,
        messages: &[Option<Socket>],
    ) -> Result<Vec<Option<Line>>, Error> {
        let me = self.env.rank;
        let world = self.mpi_world(records, messages)?;
        let failed = |reason: String| Error::system(me, "form its lines over MPI", reason);
        let word = Token::generate().map_err(|error| failed(error.to_string()))?;
        let seat = Seat {
            process: world.process,
            tag: world.tag().map_err(failed)?,
            word: word.to_hex(),
        };
        let bytes = serde_json::to_vec(&seat).expect("a seat has string keys only");
        let seats = self.exchange("mpi", &bytes, "start MPI", |_, bytes| {
            Seat::decode(bytes, world.processes)
        })?;
        self.check_distinct(&seats)?;
        let at = |seat: &Seat, tag: i32| Address {
            process: seat.process,
            tag,
        };
        let mpi = world.open();
        let line = |(peer, other): (usize, &Seat)| {
            let (to, from) = (at(other, other.tag), at(other, seat.tag));
            let is_apart = hosts.host(peer) != hosts.host(me);
            is_apart.then(|| Line::new(mpi.clone(), to, from, message_bytes(seats.len())))
        };
        let mut lines: Vec<_> = seats.iter().enumerate().map(line).collect();
        for line in lines.iter_mut().flatten() {
            line.greet(&seat.word).map_err(failed)?;
        }
        self.hear(records, messages, &seats, &mut lines)?;
        Ok(lines)
    }

    /// MPI, once it has started.
    fn mpi_world(
        &self,
        records: &[Record],
        messages: &[Option<Socket>],
    ) -> Result<&'static World, Error> {
        self.formation.enter("start MPI");
        let others = present(messages).map(|(peer, _)| peer);
        let others: Vec<usize> = others.collect();
        loop {
            if let Some(world) = mpi::world(self.env.rank, self.env.world) {
                return world.map_err(|reason| self.impossible(reason));
            }
            self.look(records, messages, &others, "start MPI with it")?;
        }
    }

    /// Processes of two MPI jobs may have the same number.
    fn check_distinct(&self, seats: &[Seat]) -> Result<(), Error> {
        let mut taken = HashMap::new();
        for (rank, seat) in seats.iter().enumerate() {
            if let Some(other) = taken.insert(seat.process, rank) {
                return Err(self.impossible(format!(
                    "ranks {other} and {rank} are both process {} of their MPI job, so they are of different ones",
                    seat.process
                )));
            }
        }
        Ok(())
    }

    /// Waits for the words of all ranks with a line.
    fn hear(
        &self,
        records: &[Record],
        messages: &[Option<Socket>],
        seats: &[Seat],
        lines: &mut [Option<Line>],
    ) -> Result<(), Error> {
        self.formation.enter("hear all ranks over MPI");
        let mut heard = vec![false; lines.len()];
        loop {
            let mut silent = Vec::new();
            for (peer, line) in lines.iter_mut().enumerate() {
                let Some(line) = line.as_mut().filter(|_| !heard[peer]) else {
                    continue;
                };
                let word = line.hear(&seats[peer].word);
                heard[peer] = word.map_err(|reason| self.peer(peer, reason))?;
                if !heard[peer] {
                    silent.push(peer);
                }
            }
            if silent.is_empty() {
                return Ok(());
            }
            self.look(records, messages, &silent, "answer over MPI")?;
        }
    }

    /// Waits a moment for ranks that are to do something, and looks at whether they still can.
    fn look(
        &self,
        records: &[Record],
        messages: &[Option<Socket>],
        ranks: &[usize],
        what: &'static str,
    ) -> Result<(), Error> {
        self.health()?;
        if Instant::now() >= self.deadline {
            return Err(self.absent(ranks.to_vec(), what, String::new()));
        }
        let links: Vec<_> = present(messages)
            .filter(|(peer, _)| ranks.contains(peer))
            .collect();
        let (_, said) = poll_sockets(&[], &links, LOOK)
            .map_err(|error| self.system("wait for its peers", &error))?;
        for ((peer, link), _) in links.iter().zip(said).filter(|(_, said)| *said) {
            match self.behind_the_end_of(*peer) {
                Behind::Cause(error) => return Err(error),
                Behind::Itself | Behind::Unknown if has_ended(link) => {
                    return Err(lost(&records[*peer]));
                }
                // It has said something that will be heard when the group is formed.
                Behind::Itself | Behind::Unknown => std::thread::sleep(LOOK),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_outside_of_mpis_job_is_refused() {
        let seat = Seat {
            process: 1,
            tag: 7,
            word: "a".repeat(WORD_BYTES),
        };
        let decoded = |seat: &Seat, world| Seat::decode(&serde_json::to_vec(seat).unwrap(), world);
        assert_eq!(decoded(&seat, 2).as_ref(), Ok(&seat));
        assert_eq!(
            decoded(&seat, 1).unwrap_err(),
            "it is process 1 of MPI's job with tag 7, expected one of 1"
        );
        for wrong in [
            Seat {
                process: -1,
                ..seat.clone()
            },
            Seat {
                tag: 0,
                ..seat.clone()
            },
            Seat {
                word: String::new(),
                ..seat
            },
        ] {
            assert!(decoded(&wrong, 2).is_err(), "{wrong:?}");
        }
        assert!(Seat::decode(b"{}", 2).is_err());
    }
}
