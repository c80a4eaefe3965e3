//! A network that can fail: all TCP connections of a job go through here, once the ranks' records in the store say so.
//!
//! Each rank's port is replaced by one of this process. The hello in front of a connection tells who dials and on which
//! lane; from then on the connection follows the rules of the rank that the fault is about. Through TLS no hello can be read:
//! only the one who is dialed is known, and a trap is on all lanes.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_rendezvous::store::Store as _;
use rustix::net::sockopt::set_socket_linger;

use crate::common::job::{Job, PATIENCE};

/// Longest sleep between two looks at the rules, where nothing else wakes.
const SLICE: Duration = Duration::from_millis(20);
/// What begins a hello, and its length: magic, group, rank, world, lane.
const HELLO_MAGIC: &[u8] = b"PACEMESH";
const HELLO_BYTES: usize = 28;
/// Most that precedes a hello: the proof of the token.
const PROOF_BYTES_MAX: usize = 4096;
/// Lane of the messages.
pub const MESSAGES: u32 = 0;
/// Lane of sends and receives.
pub const PARCELS: u32 = 1;
/// Lane of the data: on one host there is one.
pub const DATA: u32 = 2;

/// What happens to all connections of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weather {
    Fair,
    /// Both directions are swallowed, and nobody is told: the machine is gone.
    Gone(usize),
    /// What the rank sends is held back.
    HoldsOut(usize),
    /// What is sent to the rank is held back.
    HoldsIn(usize),
    /// The connections are reset.
    Resets(usize),
}

/// What happens to a rank's bytes on a lane when some have passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// They are held until [`Proxy::release`].
    Hold,
    /// The next byte has a flipped bit.
    Flip,
    /// Nothing more comes but the end of the connection.
    Cut,
    /// The connection is reset.
    Reset,
}

/// Where an [`Act`] happens: on every connection for itself.
#[derive(Debug, Clone, Copy)]
pub struct Trap {
    pub sender: usize,
    pub lane: u32,
    /// Bytes that pass after the trap is set.
    pub after: usize,
    pub act: Act,
}

#[derive(Debug)]
pub struct Proxy {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    rules: Mutex<Rules>,
    changed: Condvar,
    pumps: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Rules {
    weather: Weather,
    trap: Option<Trap>,
    /// Counts the traps that have been set.
    generation: u64,
    sprung: bool,
    closed: bool,
}

impl Proxy {
    pub fn new() -> Self {
        let rules = Rules {
            weather: Weather::Fair,
            trap: None,
            generation: 0,
            sprung: false,
            closed: false,
        };
        let shared = Shared {
            rules: Mutex::new(rules),
            changed: Condvar::new(),
            pumps: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
            threads: Vec::new(),
        }
    }

    /// Waits for the record of `rank` and has its port lead here. Nobody who dials may have read it before.
    pub fn take_port(&mut self, job: &Job, rank: usize) {
        let store = job.store();
        let key = format!("paceline/collective/{}/0/1/record/{rank}", job.run_id);
        let record = store.get(&key, PATIENCE).unwrap();
        let mut record: serde_json::Value = serde_json::from_slice(&record).unwrap();
        let port = record["port"].as_u64().unwrap() as u16;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        record["port"] = listener.local_addr().unwrap().port().into();
        store
            .set(&key, &serde_json::to_vec(&record).unwrap())
            .unwrap();
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name(format!("proxy{rank}"));
        let thread = thread.spawn(move || accept(&shared, &listener, rank, port));
        self.threads.push(thread.unwrap());
    }

    pub fn weather(&self, weather: Weather) {
        self.shared.rules().weather = weather;
        self.shared.changed.notify_all();
    }

    pub fn set_trap(&self, trap: Trap) {
        let mut rules = self.shared.rules();
        rules.trap = Some(trap);
        rules.generation += 1;
        rules.sprung = false;
    }

    /// Waits until a trap has sprung; whether it did.
    pub fn sprung(&self, limit: Duration) -> bool {
        let waiting = |rules: &mut Rules| !rules.sprung;
        let waited = self
            .shared
            .changed
            .wait_timeout_while(self.shared.rules(), limit, waiting);
        waited.unwrap().0.sprung
    }

    /// What is held at a trap passes.
    pub fn release(&self) {
        self.shared.rules().trap = None;
        self.shared.changed.notify_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.rules().closed = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
        let pumps = std::mem::take(&mut *self.shared.pumps.lock().unwrap());
        for pump in pumps {
            pump.join().unwrap();
        }
    }
}

impl Shared {
    fn rules(&self) -> MutexGuard<'_, Rules> {
        self.rules.lock().unwrap()
    }
}

fn accept(shared: &Arc<Shared>, listener: &TcpListener, rank: usize, port: u16) {
    listener.set_nonblocking(true).unwrap();
    while !shared.rules().closed {
        let Ok((dialer, _)) = listener.accept() else {
            let _ = rustix::event::poll(
                &mut [rustix::event::PollFd::new(
                    listener,
                    rustix::event::PollFlags::IN,
                )],
                Some(&rustix::time::Timespec {
                    tv_sec: 0,
                    tv_nsec: SLICE.as_nanos() as i64,
                }),
            );
            continue;
        };
        // The rank behind is dead: so is the connection.
        let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else {
            continue;
        };
        for socket in [&dialer, &server] {
            socket.set_nonblocking(false).unwrap();
            socket.set_nodelay(true).unwrap();
            socket.set_read_timeout(Some(SLICE)).unwrap();
            socket.set_write_timeout(Some(SLICE)).unwrap();
        }
        let link = Arc::new(Link {
            listener: rank,
            hello: Mutex::new(None),
            sockets: [dialer, server],
            is_reset: AtomicBool::new(false),
        });
        let mut pumps = shared.pumps.lock().unwrap();
        for inward in [true, false] {
            let pump = Pump {
                shared: shared.clone(),
                link: link.clone(),
                inward,
                early: Vec::new(),
                counted: (0, 0),
                done: 0,
            };
            let thread = std::thread::Builder::new().name(format!("proxy{rank}/pump"));
            pumps.push(thread.spawn(move || pump.run()).unwrap());
        }
    }
}

/// One connection of a rank, made of two.
#[derive(Debug)]
struct Link {
    listener: usize,
    /// Who dialed, on which lane.
    hello: Mutex<Option<(usize, u32)>>,
    /// To the one who dialed, and to the listener.
    sockets: [TcpStream; 2],
    /// A trap has reset it: both directions let go of it.
    is_reset: AtomicBool,
}

/// One direction of a connection.
struct Pump {
    shared: Arc<Shared>,
    link: Arc<Link>,
    /// From the one who dialed to the listener.
    inward: bool,
    /// What has come before the hello was complete.
    early: Vec<u8>,
    /// Generation of the trap, and bytes that have passed since it was set.
    counted: (u64, usize),
    /// The last trap that has sprung here.
    done: u64,
}

enum Step {
    Forward(usize),
    Flip,
    Swallow,
    Cut,
    Reset,
    Close,
}

impl Pump {
    fn run(mut self) {
        let link = self.link.clone();
        let [dialer, server] = &link.sockets;
        let (mut from, to) = if self.inward {
            (dialer, server)
        } else {
            (server, dialer)
        };
        let mut bytes = [0; 16 << 10];
        loop {
            let n = match from.read(&mut bytes) {
                Ok(0) => {
                    // An end travels like bytes do.
                    if !self.is_silent() {
                        let _ = to.shutdown(Shutdown::Write);
                    }
                    return;
                }
                Ok(n) => n,
                Err(error) if is_slice(&error) => match self.idle() {
                    Step::Reset => return self.reset(),
                    Step::Close => return,
                    _ => continue,
                },
                Err(_) => {
                    if !self.is_silent() {
                        let _ = to.shutdown(Shutdown::Both);
                    }
                    return;
                }
            };
            self.listen(&bytes[..n]);
            let mut rest = &mut bytes[..n];
            while !rest.is_empty() {
                let pass = match self.step(rest.len()) {
                    Step::Forward(n) => n,
                    Step::Flip => {
                        rest[0] ^= 0x20;
                        1
                    }
                    Step::Swallow => break,
                    Step::Cut => {
                        let _ = to.shutdown(Shutdown::Write);
                        return self.drain(from);
                    }
                    Step::Reset => return self.reset(),
                    Step::Close => return,
                };
                if !self.write(to, &rest[..pass]) {
                    return;
                }
                self.counted.1 += pass;
                rest = &mut rest[pass..];
            }
        }
    }

    /// Learns from the hello who dials.
    fn listen(&mut self, bytes: &[u8]) {
        if !self.inward || self.link.hello.lock().unwrap().is_some() {
            return;
        }
        if self.early.len() > PROOF_BYTES_MAX {
            return;
        }
        self.early.extend(bytes);
        let windows = &mut self.early.windows(HELLO_MAGIC.len());
        let Some(at) = windows.position(|window| window == HELLO_MAGIC) else {
            return;
        };
        let Some(hello) = self.early.get(at..at + HELLO_BYTES) else {
            return;
        };
        let number = |at: usize| u32::from_le_bytes(hello[at..at + 4].try_into().unwrap());
        *self.link.hello.lock().unwrap() = Some((number(16) as usize, number(24)));
    }

    /// Sender, receiver and lane; before the hello the dialer is nobody.
    fn ends(&self) -> (usize, usize, Option<u32>) {
        let hello = *self.link.hello.lock().unwrap();
        let dialer = hello.map_or(usize::MAX, |(dialer, _)| dialer);
        let lane = hello.map(|(_, lane)| lane);
        match self.inward {
            true => (dialer, self.link.listener, lane),
            false => (self.link.listener, dialer, lane),
        }
    }

    /// What to do with the next `len` bytes. Blocks while they are held.
    fn step(&mut self, len: usize) -> Step {
        let (sender, receiver, lane) = self.ends();
        let shared = self.shared.clone();
        let mut rules = shared.rules();
        loop {
            if rules.closed {
                return Step::Close;
            }
            let held = match rules.weather {
                Weather::Gone(rank) if rank == sender || rank == receiver => return Step::Swallow,
                Weather::Resets(rank) if rank == sender || rank == receiver => return Step::Reset,
                Weather::HoldsOut(rank) => rank == sender,
                Weather::HoldsIn(rank) => rank == receiver,
                _ => false,
            };
            if !held {
                let fits = |trap: &Trap| {
                    trap.sender == sender && lane.is_none_or(|lane| lane == trap.lane)
                };
                let Some(trap) = rules.trap.filter(fits) else {
                    return Step::Forward(len);
                };
                let generation = rules.generation;
                if self.counted.0 != generation {
                    self.counted = (generation, 0);
                }
                if self.done == generation {
                    return Step::Forward(len);
                }
                if self.counted.1 < trap.after {
                    return Step::Forward(len.min(trap.after - self.counted.1));
                }
                rules.sprung = true;
                shared.changed.notify_all();
                match trap.act {
                    Act::Hold => {}
                    Act::Flip => {
                        self.done = generation;
                        return Step::Flip;
                    }
                    Act::Cut => return Step::Cut,
                    Act::Reset => {
                        self.link.is_reset.store(true, Ordering::Relaxed);
                        return Step::Reset;
                    }
                }
            }
            rules = shared.changed.wait_timeout(rules, SLICE).unwrap().0;
        }
    }

    /// Nothing has come for a while.
    fn idle(&self) -> Step {
        let (sender, receiver, _) = self.ends();
        let rules = self.shared.rules();
        match rules.weather {
            _ if rules.closed => Step::Close,
            _ if self.link.is_reset.load(Ordering::Relaxed) => Step::Reset,
            Weather::Resets(rank) if rank == sender || rank == receiver => Step::Reset,
            _ => Step::Forward(0),
        }
    }

    /// Whether the end of the connection is not to be seen at the other end.
    fn is_silent(&self) -> bool {
        let (sender, receiver, _) = self.ends();
        match self.shared.rules().weather {
            Weather::Gone(rank) => rank == sender || rank == receiver,
            Weather::HoldsOut(rank) => rank == sender,
            Weather::HoldsIn(rank) => rank == receiver,
            _ => false,
        }
    }

    fn write(&self, mut to: &TcpStream, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            match to.write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(error) if is_slice(&error) => match self.idle() {
                    Step::Reset => {
                        self.reset();
                        return false;
                    }
                    Step::Close => return false,
                    _ => {}
                },
                Err(_) => {
                    // Whoever sends has to see that nobody takes it.
                    for socket in &self.link.sockets {
                        let _ = socket.shutdown(Shutdown::Both);
                    }
                    return false;
                }
            }
        }
        true
    }

    /// Takes what still comes, so that the sender notices nothing.
    fn drain(&self, mut from: &TcpStream) {
        let mut bytes = [0; 4096];
        loop {
            match from.read(&mut bytes) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if is_slice(&error) && !self.shared.rules().closed => {}
                Err(_) => return,
            }
        }
    }

    /// Closing a socket that does not linger resets it; the other direction's pump lets go of it too.
    fn reset(&self) {
        for socket in &self.link.sockets {
            let _ = set_socket_linger(socket, Some(Duration::ZERO));
        }
    }
}

fn is_slice(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}
