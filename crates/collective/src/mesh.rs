//! Connects every pair of ranks: dials the lower ones, accepts the higher ones, and believes nobody without the token.
//!
//! After the proof ([`auth`]) both sides send a [`hello`], the dialer first, and the dialer ends with one byte: a listener
//! whose hello was lost would take the pair for connected and stop listening, while the dialer tries again.

mod hello;
mod visits;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;
use std::time::{Duration, Instant};

use paceline_rendezvous::auth::{self, Claim, Side};
use paceline_rendezvous::tls::Tls;
use paceline_rendezvous::token::Token;
use paceline_rendezvous::wait::wait_for;
use rustix::event::PollFlags;

use self::hello::Hello;
use self::visits::Visits;
use crate::error::Error;
use crate::message::{Abort, Message};
use crate::socket::{Listener, Socket, Within};

/// What the token is proved for.
const PURPOSE: &str = "collective 2";
/// The dialer's last byte.
const HEARD: u8 = 0xA5;
/// Longest time for one connection's proof and hello; a stranger that says nothing is dropped after it.
const DOOR_TIMEOUT: Duration = Duration::from_secs(10);
/// The same for each rank of the group: all of them connect at the same moment, on one host maybe with few cores.
const DOOR_TIMEOUT_PER_RANK: Duration = Duration::from_millis(100);
/// Connections that may be at the door at the same time; more wait in the listener's queue.
const DOOR_MAX: usize = 64;
/// How long peers that are connecting to a rank that gives up may take, so that they can be told why.
const DOOR_REST: Duration = Duration::from_millis(50);
/// Longest wait between two looks at whether the deadline is over or dialing has failed.
const SLICE: Duration = Duration::from_millis(20);
/// The same while somebody is at the door.
const TURN: Duration = Duration::from_millis(1);
/// Pause before a peer that could not be reached is dialed again.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// What one rank needs to know to connect to the others.
#[derive(Clone, Copy)]
pub(crate) struct Mesh<'a> {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    /// Tells groups apart that share a store and a token.
    pub(crate) group: u64,
    /// By rank, how many connections there are to it; as many as it has to this rank.
    pub(crate) lanes: &'a [usize],
    pub(crate) token: &'a Token,
    /// Whether what goes over TCP goes through TLS.
    pub(crate) tls: bool,
    pub(crate) deadline: Instant,
    pub(crate) advice: &'a dyn Advice,
}

/// What a rank learns and tells beside the mesh while it connects: through the launcher's page and the job's store.
pub(crate) trait Advice: Sync {
    /// Says why connecting makes no sense any more, if so.
    fn revoked(&self) -> Result<(), Error>;

    /// Says why a peer that could not be reached has given up, if it did.
    fn gave_up(&self, peer: usize) -> Result<(), Error>;

    /// The error of a rank whose deadline is over while these have not connected; `detail` is what it has seen itself.
    fn absent(&self, missing: Vec<usize>, detail: String) -> Error;

    /// Tells the peers why this rank gives up, before its connections end. `links` are those for messages.
    fn part(&self, links: &[Option<Socket>], error: &Error);
}

/// A mesh's connections by lane and peer; none to oneself. A peer with fewer lanes than others has the first ones.
pub(crate) type Connections = Vec<Vec<Option<Socket>>>;

/// A connection that was accepted, or why one was not.
type Arrival = Result<(usize, usize, Socket), Refusal>;

/// Why a connection did not come about.
type Refusal = Box<dyn std::error::Error + Send + Sync>;

/// The connections that there are, and what became of the others.
type Outcome = (Connections, Result<(), Failure>);

/// Why one side of the mesh has failed. Neither the dialing nor the accepting side reports it: a rank gives one reason.
enum Failure {
    Known(Error),
    /// The deadline is over, and these have not connected; what was seen of them.
    Missing(Vec<usize>, String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Known(error)
    }
}

impl Mesh<'_> {
    /// Connects to all peers with lanes. `dial(peer, i)` opens a connection to the `i`-th address of a lower rank, or says
    /// why it cannot, and returns nothing when there are no more; then it begins again, until the deadline.
    ///
    /// *Errors*: names the ranks that did not connect, and what was seen at the door meanwhile.
    pub(crate) fn connect(
        &self,
        listener: &Listener,
        mut dial: impl FnMut(usize, usize) -> Option<Result<Socket, String>>,
    ) -> Result<Connections, Error> {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let name = format!("rank{}/door", self.rank);
            let door = std::thread::Builder::new()
                .name(name)
                .spawn_scoped(scope, || self.accept_all(listener, &stop));
            let door = door.map_err(|error| Error::system(self.rank, "start a thread", error))?;
            let (mut connections, dialed) = self.dial_all(&mut dial);
            if dialed.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            let gone = |_| {
                let error = Error::ThreadGone { rank: self.rank };
                (self.nobody(), Err(error.into()))
            };
            let (arrived, accepted) = door.join().unwrap_or_else(gone);
            for (lane, sockets) in arrived.into_iter().enumerate() {
                for (peer, socket) in sockets
                    .into_iter()
                    .enumerate()
                    .filter(|(_, socket)| socket.is_some())
                {
                    connections[lane][peer] = socket;
                }
            }
            // A rank that cannot be reached keeps higher ranks away as well, because they dial it before this one.
            let error = match dialed.and(accepted) {
                Ok(()) => return Ok(connections),
                Err(Failure::Known(error)) => error,
                Err(Failure::Missing(ranks, detail)) => self.advice.absent(ranks, detail),
            };
            self.advice.part(&connections[0], &error);
            Err(error)
        })
    }

    fn nobody(&self) -> Connections {
        let most = self.lanes.iter().copied().max().unwrap_or(0);
        (0..most)
            .map(|_| (0..self.world).map(|_| None).collect())
            .collect()
    }

    fn dial_all(
        &self,
        dial: &mut impl FnMut(usize, usize) -> Option<Result<Socket, String>>,
    ) -> Outcome {
        let mut connections = self.nobody();
        for peer in 0..self.rank {
            // What one lane has found out about the peer's addresses need not be waited for again.
            let mut reached = 0;
            for lane in 0..self.lanes[peer] {
                match self.dial_until(peer, lane, &mut reached, dial) {
                    Ok(socket) => connections[lane][peer] = Some(socket),
                    Err(error) => return (connections, Err(error)),
                }
            }
        }
        (connections, Ok(()))
    }

    fn dial_until(
        &self,
        peer: usize,
        lane: usize,
        reached: &mut usize,
        dial: &mut impl FnMut(usize, usize) -> Option<Result<Socket, String>>,
    ) -> Result<Socket, Failure> {
        let mut seen = None;
        loop {
            let first = std::mem::take(reached);
            let dialed = (first..).map_while(|attempt| Some((attempt, dial(peer, attempt)?)));
            for (attempt, socket) in dialed {
                let knocked = socket.map_err(Refusal::from);
                match knocked.and_then(|socket| self.knock(socket, peer, lane)) {
                    Ok(socket) => {
                        *reached = attempt;
                        return Ok(socket);
                    }
                    // What the deadline cuts off says less than what was seen before.
                    Err(_) if seen.is_some() && Instant::now() >= self.deadline => {}
                    Err(reason) => seen = Some(reason.to_string()),
                }
            }
            self.advice.revoked()?;
            self.advice.gave_up(peer)?;
            if Instant::now() + RETRY_PAUSE >= self.deadline {
                let seen = seen.as_deref().unwrap_or("it offers no address");
                let detail = format!("; the last attempt failed: {seen}");
                return Err(Failure::Missing(vec![peer], detail));
            }
            std::thread::sleep(RETRY_PAUSE);
        }
    }

    /// The dialer's side of the door.
    fn knock(&self, socket: Socket, peer: usize, lane: usize) -> Result<Socket, Refusal> {
        let deadline = self.door_deadline();
        let socket = self.prove(socket, Side::Dialer, deadline)?;
        let mut stream = Within::new(&socket, deadline);
        stream.write_all(&self.hello(lane).encode())?;
        let hello = Hello::read(&mut stream)?;
        self.check(&hello, lane)?;
        if hello.rank as usize != peer {
            return Err(format!("rank {} answered for rank {peer}", hello.rank).into());
        }
        stream.write_all(&[HEARD])?;
        Ok(socket)
    }

    /// What both sides of the door begin with: TLS where the job asks for it, and that the peer belongs to the job.
    fn prove(&self, socket: Socket, side: Side, deadline: Instant) -> Result<Socket, Refusal> {
        socket.check_user()?;
        let socket = match socket {
            Socket::Tcp(stream) if self.tls => {
                Socket::Tls(Box::new(Tls::handshake(stream, side, deadline)?))
            }
            socket => socket,
        };
        let claim = Claim {
            purpose: PURPOSE,
            binding: socket.binding()?,
        };
        let mut stream = Within::new(&socket, deadline);
        auth::prove(&mut stream, self.token, side, &claim)?;
        Ok(socket)
    }

    /// Accepts until all higher ranks have connected, or `stop` is set.
    fn accept_all(&self, listener: &Listener, stop: &AtomicBool) -> Outcome {
        let mut visits = Visits {
            connections: self.nobody(),
            awaited: self.lanes[self.rank + 1..].iter().sum(),
            at_the_door: HashMap::new(),
            refused: 0,
            last: String::new(),
        };
        let (sender, arrivals) = channel();
        let outcome = std::thread::scope(|scope| {
            let outcome = self.accept_until(listener, stop, scope, &sender, &arrivals, &mut visits);
            if outcome.is_err() || stop.load(Ordering::Relaxed) {
                visits.admit(&arrivals, DOOR_REST);
            }
            // Connections that are still waiting are not needed: their threads return at once and the scope ends.
            visits.at_the_door.values().for_each(Socket::shutdown);
            outcome
        });
        (visits.connections, outcome)
    }

    fn accept_until<'scope>(
        &'scope self,
        listener: &Listener,
        stop: &AtomicBool,
        scope: &'scope Scope<'scope, '_>,
        sender: &Sender<(usize, Arrival)>,
        arrivals: &Receiver<(usize, Arrival)>,
        visits: &mut Visits,
    ) -> Result<(), Failure> {
        for visit in 0.. {
            arrivals
                .try_iter()
                .for_each(|(visit, arrival)| visits.enter(visit, arrival));
            if visits.awaited == 0 || stop.load(Ordering::Relaxed) {
                break;
            }
            self.advice.revoked()?;
            if Instant::now() >= self.deadline {
                let missing = visits.missing(self.rank, self.lanes);
                return Err(Failure::Missing(missing, visits.detail()));
            }
            if visits.at_the_door.len() >= DOOR_MAX {
                if let Ok((visit, arrival)) = arrivals.recv_timeout(SLICE) {
                    visits.enter(visit, arrival);
                }
                continue;
            }
            // Two things are waited for, the listener and the threads at the door; while there are any, in short turns.
            let slice = match visits.at_the_door.len() {
                0 => SLICE,
                open if open < visits.awaited => TURN,
                // All that are missing may be at the door. If strangers are among them, others wait in the listener's queue.
                _ => {
                    if let Ok((visit, arrival)) = arrivals.recv_timeout(TURN) {
                        visits.enter(visit, arrival);
                        continue;
                    }
                    Duration::ZERO
                }
            };
            match wait_for(listener.as_fd(), PollFlags::IN, Instant::now() + slice) {
                Ok(false) => continue,
                Ok(true) => {}
                Err(error) => {
                    return Err(Error::system(self.rank, "listen for its peers", error).into());
                }
            }
            let accepted = listener.accept();
            let (visitor, socket) = match accepted.and_then(|it| Ok((it.try_clone()?, it))) {
                Ok(both) => both,
                // The dialer was gone again, or another thread of the process took the last descriptor for a moment.
                Err(error) => {
                    visits.enter(usize::MAX, Err(error.into()));
                    continue;
                }
            };
            visits.at_the_door.insert(visit, visitor);
            let sender = sender.clone();
            let thread = std::thread::Builder::new().name(format!("rank{}/door{visit}", self.rank));
            let spawned = thread.spawn_scoped(scope, move || {
                let arrival = self.open(socket);
                // The receiver outlives the scope.
                let _ = sender.send((visit, arrival));
            });
            spawned.map_err(|error| Error::system(self.rank, "start a thread", error))?;
        }
        Ok(())
    }

    /// The listener's side of the door: who it is, and on which lane.
    fn open(&self, socket: Socket) -> Arrival {
        let deadline = self.door_deadline();
        let socket = self.prove(socket, Side::Listener, deadline)?;
        let mut stream = Within::new(&socket, deadline);
        let hello = Hello::read(&mut stream)?;
        // Answered in any case: the dialer reports the difference better than a closed connection.
        stream.write_all(&self.hello(hello.lane as usize).encode())?;
        let (peer, lane) = (hello.rank as usize, hello.lane as usize);
        self.check(&hello, lane)?;
        if peer <= self.rank || peer >= self.world || lane >= self.lanes[peer] {
            return Err(format!("rank {peer} dialed rank {} on lane {lane}", self.rank).into());
        }
        let mut heard = [0];
        stream.read_exact(&mut heard)?;
        if heard != [HEARD] {
            return Err(format!("rank {peer} ends its greeting with {heard:02x?}").into());
        }
        Ok((peer, lane, socket))
    }

    fn check(&self, hello: &Hello, lane: usize) -> Result<(), Refusal> {
        let expected = Hello {
            rank: hello.rank,
            ..self.hello(lane)
        };
        if *hello == expected {
            return Ok(());
        }
        Err(format!(
            "it is rank {} of {} in group {:016x}, this is rank {} of {} in group {:016x}",
            hello.rank, hello.world, hello.group, self.rank, self.world, self.group
        )
        .into())
    }

    fn hello(&self, lane: usize) -> Hello {
        Hello {
            group: self.group,
            rank: self.rank as u32,
            world: self.world as u32,
            lane: lane as u32,
        }
    }

    fn door_deadline(&self) -> Instant {
        let timeout = DOOR_TIMEOUT + DOOR_TIMEOUT_PER_RANK * self.world as u32;
        self.deadline.min(Instant::now() + timeout)
    }
}

/// Tells those who are connected already why this rank gives up: they may have formed the group, and would take its end
/// for a death. `links` are the connections for messages.
pub(crate) fn farewell(rank: usize, links: &[Option<Socket>], error: &Error) {
    let notice = Message::Abort(Abort::of(rank, error)).encode();
    for link in links.iter().flatten() {
        // Fits the buffers of a connection that has carried nothing else; a peer that is gone need not hear it.
        link.post(&notice);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::sync::Mutex;

    use super::*;

    /// Nobody says anything elsewhere.
    struct Alone;

    impl Advice for Alone {
        fn revoked(&self) -> Result<(), Error> {
            Ok(())
        }

        fn gave_up(&self, _: usize) -> Result<(), Error> {
            Ok(())
        }

        fn absent(&self, missing: Vec<usize>, detail: String) -> Error {
            Error::Absent {
                rank: 0,
                missing,
                what: "connect",
                waited: Duration::ZERO,
                detail,
            }
        }

        fn part(&self, _: &[Option<Socket>], _: &Error) {}
    }

    fn mesh<'a>(rank: usize, world: usize, token: &'a Token, limit: Duration) -> Mesh<'a> {
        Mesh {
            rank,
            world,
            group: 7,
            lanes: &[2; 5][..world],
            token,
            tls: false,
            deadline: Instant::now() + limit,
            advice: &Alone,
        }
    }

    fn listeners(world: usize) -> (Vec<Listener>, Vec<std::net::SocketAddr>) {
        let listeners: Vec<_> = (0..world)
            .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
            .collect();
        let addrs = listeners
            .iter()
            .map(|listener| listener.local_addr().unwrap())
            .collect();
        let listeners: Vec<_> = listeners.into_iter().map(Listener::Tcp).collect();
        listeners
            .iter()
            .for_each(|listener| listener.prepare(64).unwrap());
        (listeners, addrs)
    }

    fn dial(addr: std::net::SocketAddr, attempt: usize) -> Option<Result<Socket, String>> {
        (attempt == 0).then(|| {
            TcpStream::connect(addr)
                .map(Socket::Tcp)
                .map_err(|error| error.to_string())
        })
    }

    #[test]
    fn every_pair_is_connected_on_every_lane_whatever_strangers_do() {
        all_connect(false);
    }

    #[test]
    fn every_pair_is_connected_on_every_lane_through_tls() {
        all_connect(true);
    }

    fn all_connect(tls: bool) {
        let token = Token::generate().unwrap();
        let (listeners, addrs) = listeners(5);
        // Strangers: one that says nothing, one that says nonsense, one that leaves at once.
        let silent = TcpStream::connect(addrs[0]).unwrap();
        let mut loud = TcpStream::connect(addrs[0]).unwrap();
        loud.write_all(&[0xFF; 100]).unwrap();
        drop(TcpStream::connect(addrs[0]).unwrap());
        std::thread::scope(|scope| {
            for (rank, listener) in listeners.iter().enumerate() {
                let (token, addrs) = (&token, &addrs);
                scope.spawn(move || {
                    let mesh = Mesh {
                        tls,
                        ..mesh(rank, 5, token, Duration::from_secs(30))
                    };
                    let connections = mesh
                        .connect(listener, |peer, i| dial(addrs[peer], i))
                        .unwrap();
                    for (lane, sockets) in connections.iter().enumerate() {
                        for (peer, socket) in sockets.iter().enumerate() {
                            assert_eq!(socket.is_some(), peer != rank);
                            let Some(socket) = socket.as_ref() else {
                                continue;
                            };
                            assert_eq!(matches!(socket, Socket::Tls(_)), tls);
                            let mut socket = Within {
                                socket,
                                deadline: mesh.deadline,
                            };
                            socket.write_all(&[rank as u8, lane as u8]).unwrap();
                            let mut answer = [0; 2];
                            socket.read_exact(&mut answer).unwrap();
                            assert_eq!(answer, [peer as u8, lane as u8]);
                        }
                    }
                });
            }
        });
        drop(silent);
    }

    #[test]
    fn later_lanes_begin_with_the_address_that_was_reached() {
        let token = Token::generate().unwrap();
        let (listeners, addrs) = listeners(2);
        let mut dialed = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mesh = mesh(0, 2, &token, Duration::from_secs(30));
                mesh.connect(&listeners[0], |_, _| None).unwrap();
            });
            let mesh = mesh(1, 2, &token, Duration::from_secs(30));
            let connected = mesh.connect(&listeners[1], |_, attempt| {
                dialed.push(attempt);
                match attempt {
                    0 | 1 => Some(Err("no route".into())),
                    2 => dial(addrs[0], 0),
                    _ => None,
                }
            });
            assert!(connected.is_ok());
        });
        assert_eq!(dialed, [0, 1, 2, 2]);
    }

    #[test]
    fn a_rank_with_another_token_stays_outside_and_is_missed() {
        let (listeners, addrs) = listeners(2);
        let (ours, theirs) = (Token::generate().unwrap(), Token::generate().unwrap());
        let limit = Duration::from_secs(3);
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                mesh(0, 2, &ours, limit).connect(&listeners[0], |peer, i| dial(addrs[peer], i))
            });
            let outside = scope.spawn(|| {
                mesh(1, 2, &theirs, limit).connect(&listeners[1], |peer, i| dial(addrs[peer], i))
            });
            let error = inside.join().unwrap().unwrap_err();
            assert!(
                matches!(&error, Error::Absent { missing, .. } if *missing == [1]),
                "{error}"
            );
            assert!(error.to_string().contains("refused meanwhile"), "{error}");
            assert!(outside.join().unwrap().unwrap_err().is_deadline());
        });
    }

    #[test]
    fn a_rank_of_another_group_stays_outside() {
        let (listeners, addrs) = listeners(2);
        let token = Token::generate().unwrap();
        let limit = Duration::from_secs(3);
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                mesh(0, 2, &token, limit).connect(&listeners[0], |peer, i| dial(addrs[peer], i))
            });
            let other = Mesh {
                group: 8,
                ..mesh(1, 2, &token, limit)
            };
            let error = other
                .connect(&listeners[1], |peer, i| dial(addrs[peer], i))
                .unwrap_err()
                .to_string();
            assert!(
                error.contains(
                    "in group 0000000000000007, this is rank 1 of 2 in group 0000000000000008"
                ),
                "{error}"
            );
            assert!(inside.join().unwrap().is_err());
        });
    }

    /// Hears what a rank says at its deadline.
    #[derive(Default)]
    struct Said(Mutex<Vec<Vec<usize>>>);

    impl Advice for Said {
        fn revoked(&self) -> Result<(), Error> {
            Alone.revoked()
        }

        fn gave_up(&self, peer: usize) -> Result<(), Error> {
            Alone.gave_up(peer)
        }

        fn absent(&self, missing: Vec<usize>, detail: String) -> Error {
            self.0.lock().unwrap().push(missing.clone());
            Alone.absent(missing, detail)
        }

        fn part(&self, links: &[Option<Socket>], error: &Error) {
            Alone.part(links, error);
        }
    }

    /// The others conclude from it which rank waits for which: a second notice would hide the first.
    #[test]
    fn a_rank_that_is_let_in_by_nobody_and_sees_nobody_come_says_one_word() {
        let token = Token::generate().unwrap();
        let (listeners, _) = listeners(3);
        let said = Said::default();
        let mesh = Mesh {
            advice: &said,
            ..mesh(1, 3, &token, Duration::ZERO)
        };
        let error = mesh.connect(&listeners[1], |_, _| None).unwrap_err();
        assert_eq!(error.culprit(), Some(0), "{error}");
        assert_eq!(said.0.into_inner().unwrap(), [[0]]);
    }
}
