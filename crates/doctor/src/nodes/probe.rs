//! Tries connections between nodes: which node answers at an address, how soon, how fast, and what its clock shows.
//!
//! ```text
//! dialer                                             listener
//!   both prove the job's token, through TLS where the job speaks it
//!   'P'                                  ------>
//!          <------  id, nanoseconds since 1970       8 + 8 bytes, little-endian
//!   'B'  bytes to come, 4 bytes  data    ------>
//!          <------  'K'                              when all of it is there
//! ```

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use paceline_rendezvous::auth::{AuthError, Proved, Side};
use paceline_rendezvous::net;
use paceline_rendezvous::token::Token;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::card::{Measured, Miss, MissKind, Outcome, Reach};

/// How the nodes of this job speak.
#[derive(Debug, Clone)]
pub(crate) struct Speech {
    pub(crate) token: Token,
    pub(crate) tls: bool,
}

/// What both ends prove the token for.
const PURPOSE: &str = "doctor 1";
/// As long as ranks wait for an address of a peer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// From a connection's begin to its end.
const TALK_TIMEOUT: Duration = Duration::from_secs(10);
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Addresses of one name that are tried.
const NAME_ADDRESSES_MAX: usize = 4;
const PINGS: usize = 11;
/// Sent before the sample that is timed, for the connection to come up to speed.
const WARM_BYTES: u32 = 512 << 10;
const SAMPLE_BYTES: u32 = 1 << 20;
/// The best one counts: on a busy machine one of them may lose its turn for longer than it takes.
const SAMPLES: usize = 3;
const BULK_BYTES_MAX: u32 = 4 << 20;
const CHUNK_BYTES: usize = 64 << 10;
/// Connections that are answered at a time.
const GUESTS_MAX: usize = 256;

/// Answers probes until it is dropped.
#[derive(Debug)]
pub(crate) struct Listener {
    port: u16,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Listens at a free port of `addr`, or of all IPv4 addresses where this machine has no IPv6.
    pub(crate) fn start(addr: SocketAddr, speech: &Speech, id: u64) -> io::Result<Self> {
        let listener = bind(addr).or_else(|_| bind((Ipv4Addr::UNSPECIFIED, 0).into()))?;
        let port = listener.local_addr()?.port();
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (speech, ends) = (speech.clone(), stop.clone());
        let thread = Builder::new()
            .name("doctor/listen".into())
            .spawn(move || listen(&listener, &ends, &speech, id))?;
        Ok(Self {
            port,
            stop,
            thread: Some(thread),
        })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Fails only when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // One that panicked has said so; the report does not depend on it.
            let _ = thread.join();
        }
    }
}

/// A listener that never waits. On the unspecified IPv6 address it serves IPv4 as well, whatever the machine's default.
fn bind(addr: SocketAddr) -> io::Result<TcpListener> {
    let family = match addr {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    if addr.is_ipv6() && addr.ip().is_unspecified() {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    rustix::net::bind(&socket, &addr)?;
    rustix::net::listen(&socket, GUESTS_MAX as i32)?;
    Ok(socket.into())
}

/// A connection that is being answered.
struct Guest {
    stream: TcpStream,
    thread: JoinHandle<()>,
}

fn listen(listener: &TcpListener, stop: &OwnedFd, speech: &Speech, id: u64) {
    let mut guests: Vec<Guest> = Vec::new();
    loop {
        let mut ready = [
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN),
        ];
        match poll(&mut ready, None) {
            Ok(_) if !ready[1].revents().is_empty() => break,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => break,
        }
        let (done, here): (Vec<_>, Vec<_>) = guests
            .into_iter()
            .partition(|guest| guest.thread.is_finished());
        done.into_iter().for_each(join);
        guests = here;
        if let Ok((stream, _)) = listener.accept()
            && guests.len() < GUESTS_MAX
        {
            guests.extend(welcome(stream, speech.clone(), id));
        }
    }
    for guest in guests {
        let _ = guest.stream.shutdown(Shutdown::Both);
        join(guest);
    }
}

fn join(guest: Guest) {
    let _ = guest.thread.join();
}

/// Answers one connection on a thread of its own, which ends by its deadline.
fn welcome(stream: TcpStream, speech: Speech, id: u64) -> Option<Guest> {
    stream.set_nonblocking(false).ok()?;
    stream.set_nodelay(true).ok()?;
    let (mine, hangs_up) = (stream.try_clone().ok()?, stream.try_clone().ok()?);
    let answer = move || {
        let deadline = Instant::now() + TALK_TIMEOUT;
        let Speech { token, tls } = speech;
        // A peer that fails here learns it at its end, and its own doctor reports it.
        if let Ok(guest) = Proved::meet(mine, &token, Side::Listener, PURPOSE, tls, deadline) {
            let _ = serve(guest, id);
        }
        // The listener has a handle on it too, for its own end.
        let _ = hangs_up.shutdown(Shutdown::Both);
    };
    let thread = Builder::new().name("doctor/answer".into()).spawn(answer);
    thread.ok().map(|thread| Guest { stream, thread })
}

fn serve(mut guest: Proved, id: u64) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let mut word = [0];
        if guest.read(&mut word)? == 0 {
            return Ok(());
        }
        match word {
            [b'P'] => {
                let mut answer = [0; 16];
                answer[..8].copy_from_slice(&id.to_le_bytes());
                answer[8..].copy_from_slice(&wall_ns().to_le_bytes());
                guest.write_all(&answer)?;
            }
            [b'B'] => {
                let mut bytes = [0; 4];
                guest.read_exact(&mut bytes)?;
                let bytes = u32::from_le_bytes(bytes);
                if bytes > BULK_BYTES_MAX {
                    return Err(ErrorKind::InvalidData.into());
                }
                let mut left = bytes as usize;
                while left > 0 {
                    let most = left.min(chunk.len());
                    match guest.read(&mut chunk[..most])? {
                        0 => return Err(ErrorKind::UnexpectedEof.into()),
                        count => left -= count,
                    }
                }
                guest.write_all(b"K")?;
            }
            _ => return Err(ErrorKind::InvalidData.into()),
        }
    }
}

/// A node to be reached.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) node: usize,
    pub(crate) id: u64,
    pub(crate) addrs: Vec<String>,
    pub(crate) port: u16,
}

/// Tries every address of a node, in order; the first that works is measured for speed too.
pub(crate) fn reach(target: &Target, speech: &Speech, deadline: Instant) -> Vec<Reach> {
    let mut wants_speed = true;
    let attempt = |addr: &String| {
        let (at, outcome) = try_address(target, addr, speech, wants_speed, deadline);
        wants_speed &= matches!(outcome, Outcome::Failed(_));
        Reach {
            to: target.node,
            addr: addr.clone(),
            at,
            outcome,
        }
    };
    target.addrs.iter().map(attempt).collect()
}

fn try_address(
    target: &Target,
    addr: &str,
    speech: &Speech,
    wants_speed: bool,
    deadline: Instant,
) -> (Option<SocketAddr>, Outcome) {
    let left = || deadline.saturating_duration_since(Instant::now());
    if left().is_zero() {
        return (
            None,
            miss(MissKind::Untried, "there was no time left to try"),
        );
    }
    let name = net::join(addr, target.port);
    let addrs = match net::resolve(&name, left().min(RESOLVE_TIMEOUT)) {
        Ok(addrs) if !addrs.is_empty() => addrs,
        Ok(_) => return (None, miss(MissKind::Unresolved, "the name has no address")),
        Err(error) => return (None, miss(MissKind::Unresolved, error)),
    };
    let mut last = (None, miss(MissKind::Untried, "the name has no address"));
    for at in addrs.into_iter().take(NAME_ADDRESSES_MAX) {
        let outcome = match connect(at, left().min(CONNECT_TIMEOUT)) {
            Ok(stream) => talk(stream, target.id, speech, wants_speed, deadline),
            Err(miss) => Outcome::Failed(miss),
        };
        let reached = matches!(outcome, Outcome::Reached(_));
        last = (Some(at), outcome);
        if reached {
            break;
        }
    }
    last
}

fn connect(at: SocketAddr, timeout: Duration) -> Result<TcpStream, Miss> {
    let stream = TcpStream::connect_timeout(&at, timeout.max(Duration::from_millis(1)));
    let stream = stream.map_err(|error| of_connecting(&error, timeout))?;
    // A port without a listener may be chosen for this very end, and TCP then connects a socket to itself.
    if stream.local_addr().ok() == Some(at) {
        let text = "no program listens there".to_owned();
        return Err(Miss {
            kind: MissKind::Refused,
            text,
        });
    }
    Ok(stream)
}

fn of_connecting(error: &io::Error, timeout: Duration) -> Miss {
    let (kind, text) = match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => (
            MissKind::Silent,
            format!("no answer within {:.0} s", timeout.as_secs_f64().ceil()),
        ),
        ErrorKind::ConnectionRefused => (MissKind::Refused, "connection refused".to_owned()),
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => {
            (MissKind::NoRoute, error.to_string())
        }
        _ => (MissKind::Broken, error.to_string()),
    };
    Miss { kind, text }
}

fn talk(
    stream: TcpStream,
    id: u64,
    speech: &Speech,
    wants_speed: bool,
    deadline: Instant,
) -> Outcome {
    let _ = stream.set_nodelay(true);
    let deadline = deadline.min(Instant::now() + TALK_TIMEOUT);
    let Speech { token, tls } = speech;
    let mut line = match Proved::meet(stream, token, Side::Dialer, PURPOSE, *tls, deadline) {
        Ok(line) => line,
        Err(error) => {
            let kind = match error {
                AuthError::Broken { .. } => MissKind::Broken,
                // The connection stood and then nothing came: what a middle box does that only lets begin.
                AuthError::TimedOut { .. } => MissKind::Silent,
                _ => MissKind::Stranger,
            };
            return miss(kind, error);
        }
    };
    match measure(&mut line, id, wants_speed) {
        Ok(Some(measured)) => Outcome::Reached(measured),
        Ok(None) => miss(MissKind::Stranger, "another node of this job answers there"),
        Err(error) => miss(MissKind::Broken, format!("connected, but then: {error}")),
    }
}

/// Nothing where another node answers.
fn measure(line: &mut Proved, id: u64, wants_speed: bool) -> io::Result<Option<Measured>> {
    let mut trips = Vec::with_capacity(PINGS);
    for _ in 0..PINGS {
        let (begun, sent_at) = (Instant::now(), wall_ns());
        line.write_all(b"P")?;
        let mut answer = [0; 16];
        line.read_exact(&mut answer)?;
        let took = begun.elapsed();
        let (who, clock) = answer.split_at(8);
        if who != id.to_le_bytes() {
            return Ok(None);
        }
        let clock = u64::from_le_bytes(clock.try_into().unwrap_or_default());
        trips.push((took, offset_us(sent_at, took, clock)));
    }
    trips.sort();
    let (shortest, offset) = trips[0];
    let median = trips[PINGS / 2].0;
    let bytes_per_second = match wants_speed {
        true => {
            send(line, WARM_BYTES)?;
            let mut shortest = Duration::MAX;
            for _ in 0..SAMPLES {
                let begun = Instant::now();
                send(line, SAMPLE_BYTES)?;
                shortest = shortest.min(begun.elapsed());
            }
            let seconds = shortest.as_secs_f64().max(1e-9);
            Some((f64::from(SAMPLE_BYTES) / seconds) as u64)
        }
        false => None,
    };
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    Ok(Some(Measured {
        round_trip_us: us(median),
        clock_offset_us: offset,
        clock_error_us: us(shortest).div_ceil(2),
        bytes_per_second,
    }))
}

/// The far clock less the near one, as if the answer had been written in the middle of the round trip. *Source*: NTP.
fn offset_us(sent_at_ns: u64, took: Duration, far_ns: u64) -> i64 {
    let middle = i128::from(sent_at_ns) + i128::try_from(took.as_nanos() / 2).unwrap_or(0);
    let micros = (i128::from(far_ns) - middle) / 1000;
    i64::try_from(micros).unwrap_or(if micros < 0 { i64::MIN } else { i64::MAX })
}

fn send(line: &mut Proved, bytes: u32) -> io::Result<()> {
    let chunk = vec![0x5a; CHUNK_BYTES];
    line.write_all(b"B")?;
    line.write_all(&bytes.to_le_bytes())?;
    let mut left = bytes as usize;
    while left > 0 {
        let count = left.min(chunk.len());
        line.write_all(&chunk[..count])?;
        left -= count;
    }
    let mut done = [0];
    line.read_exact(&mut done)
}

fn wall_ns() -> u64 {
    let since = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn miss(kind: MissKind, text: impl ToString) -> Outcome {
    let text = text.to_string();
    Outcome::Failed(Miss { kind, text })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speech(seed: &str, tls: bool) -> Speech {
        Speech {
            token: Token::derived(seed),
            tls,
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn target(port: u16, id: u64) -> Target {
        Target {
            node: 3,
            id,
            addrs: vec!["127.0.0.1".into(), "localhost".into()],
            port,
        }
    }

    fn listener(speech: &Speech) -> Listener {
        Listener::start((Ipv4Addr::LOCALHOST, 0).into(), speech, 9).expect("listens")
    }

    fn kind(reach: &Reach) -> Option<MissKind> {
        match &reach.outcome {
            Outcome::Reached(_) => None,
            Outcome::Failed(miss) => Some(miss.kind),
        }
    }

    #[test]
    fn a_node_is_reached_and_measured_with_tls_and_without() {
        for tls in [false, true] {
            let speech = speech("a", tls);
            let listener = listener(&speech);
            let reaches = reach(&target(listener.port(), 9), &speech, soon());
            let [first, second] = &reaches[..] else {
                panic!("{reaches:?}");
            };
            let (Outcome::Reached(first), Outcome::Reached(second)) =
                (&first.outcome, &second.outcome)
            else {
                panic!("{reaches:?}");
            };
            assert!(first.bytes_per_second > Some(0) && second.bytes_per_second.is_none());
            // Both ends read one clock.
            let far = first.clock_offset_us.unsigned_abs();
            assert!(far <= first.clock_error_us + 1, "{first:?}");
        }
    }

    #[test]
    fn each_way_of_not_being_reached_has_its_name() {
        let ours = speech("a", false);
        let listener = listener(&ours);
        let port = listener.port();
        let first =
            |target: &Target, speech: &Speech, deadline| kind(&reach(target, speech, deadline)[0]);
        let stranger = Some(MissKind::Stranger);
        assert_eq!(first(&target(port, 8), &ours, soon()), stranger);
        assert_eq!(
            first(&target(port, 9), &speech("b", false), soon()),
            stranger
        );
        assert_eq!(
            first(&target(port, 9), &speech("a", true), soon()),
            stranger
        );
        let untried = Some(MissKind::Untried);
        assert_eq!(first(&target(port, 9), &ours, Instant::now()), untried);
        drop(listener);
        let refused = Some(MissKind::Refused);
        assert_eq!(first(&target(port, 9), &ours, soon()), refused);
        let nameless = Target {
            addrs: vec!["no such name".into()],
            ..target(port, 9)
        };
        assert_eq!(first(&nameless, &ours, soon()), Some(MissKind::Unresolved));
    }

    #[test]
    fn a_guest_that_floods_or_stalls_ends_with_the_listener() {
        let speech = speech("a", false);
        let listener = listener(&speech);
        let dial = || TcpStream::connect((Ipv4Addr::LOCALHOST, listener.port())).expect("there");
        let prove = |stream| {
            let token = &speech.token;
            Proved::meet(stream, token, Side::Dialer, PURPOSE, false, soon()).expect("proved")
        };
        let mut flood = prove(dial());
        flood.write_all(b"B\xff\xff\xff\xff").expect("sent");
        let ended = flood.read(&mut [0]).map_err(|error| error.kind());
        assert!(
            matches!(ended, Ok(0) | Err(ErrorKind::ConnectionReset)),
            "it hangs up: {ended:?}"
        );
        let _silent = dial();
        let mut stalled = prove(dial());
        stalled.write_all(b"B").expect("sent");
        let begun = Instant::now();
        drop(listener);
        assert!(begun.elapsed() < TALK_TIMEOUT, "it does not wait for them");
    }

    #[test]
    fn clocks_are_compared_at_the_middle_of_the_round_trip() {
        let check = |sent, took_us, far, expect| {
            let took = Duration::from_micros(took_us);
            assert_eq!(offset_us(sent, took, far), expect);
        };
        check(1_000_000, 100, 1_050_000, 0);
        check(1_000_000, 0, 13_000_000_000, 12_999_000);
        check(u64::MAX, 0, 0, -18_446_744_073_709_551);
    }
}
