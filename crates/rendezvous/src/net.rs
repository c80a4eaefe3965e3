//! Small pieces around TCP: a connection with TLS or without, a stream with one deadline for many reads and writes, and names
//! resolved within a deadline.

use std::io::{self, IoSlice, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs, UdpSocket};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::auth::{AuthError, Claim};
use crate::tls::Tls;

/// A connection of the store. With TLS its reads and writes never block; without, the socket's mode decides.
#[derive(Debug)]
pub(crate) enum Wire {
    Plain(TcpStream),
    Tls(Box<Tls>),
}

impl Wire {
    pub(crate) fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(tls) => tls.tcp(),
        }
    }

    /// The subject of a proof on this connection.
    pub(crate) fn claim<'p>(&self, purpose: &'p str) -> Result<Claim<'p>, AuthError> {
        let binding = match self {
            Self::Plain(_) => None,
            Self::Tls(tls) => Some(tls.binding()?),
        };
        Ok(Claim { purpose, binding })
    }
}

impl Read for &Wire {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Wire::Plain(stream) => (&mut &*stream).read(buffer),
            Wire::Tls(tls) => (&mut &**tls).read(buffer),
        }
    }
}

impl Write for &Wire {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Wire::Plain(stream) => (&mut &*stream).write(buffer),
            Wire::Tls(tls) => (&mut &**tls).write(buffer),
        }
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Wire::Plain(stream) => (&mut &*stream).write_vectored(parts),
            Wire::Tls(tls) => (&mut &**tls).write_vectored(parts),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A stream whose reads and writes all end at one moment.
pub(crate) struct DeadlineStream<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl<'a> DeadlineStream<'a> {
    pub(crate) fn new(stream: &'a TcpStream, timeout: Duration) -> Self {
        Self::until(stream, deadline_after(timeout))
    }

    pub(crate) fn until(stream: &'a TcpStream, deadline: Instant) -> Self {
        Self { stream, deadline }
    }
}

impl Read for DeadlineStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(left(self.deadline)?))?;
        let mut stream = self.stream;
        stream.read(buffer).map_err(timeout_by_its_name)
    }
}

impl Write for DeadlineStream<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(left(self.deadline)?))?;
        let mut stream = self.stream;
        stream.write(buffer).map_err(timeout_by_its_name)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The time until a moment that has not come.
///
/// *Errors*: `TimedOut` once it has.
pub(crate) fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        Err(io::ErrorKind::TimedOut.into())
    } else {
        Ok(left)
    }
}

/// A moment `timeout` from now; a timeout beyond the clock's range means a year.
pub fn deadline_after(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout)
        .unwrap_or(now + Duration::from_secs(365 * 24 * 3600))
}

/// The addresses of `host:port`. A numeric address is parsed at once. A name may take the resolver minutes, which would break
/// the caller's deadline, so a thread asks and is left behind when it is late.
pub fn resolve(addr: &str, timeout: Duration) -> io::Result<Vec<SocketAddr>> {
    if let Ok(addr) = addr.parse::<SocketAddr>() {
        return Ok(vec![addr]);
    }
    let (sender, receiver) = mpsc::sync_channel(1);
    let name = addr.to_owned();
    thread::Builder::new()
        .name("resolve".into())
        .spawn(move || {
            // The receiver is gone if the answer is late.
            let _ = sender.send(name.to_socket_addrs().map(Iterator::collect));
        })?;
    match receiver.recv_timeout(timeout) {
        Ok(answer) => answer,
        Err(_) => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the name was not resolved in time",
        )),
    }
}

/// This machine's address on the route to another one. Sends no packet.
pub(crate) fn route_to(addr: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = match addr {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(addr).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// What this machine is called.
pub fn nodename() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

/// Host and port as one text; an IPv6 address gets its brackets.
pub fn join(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// A socket's timeout reads as `WouldBlock` on Linux, which tells a user nothing.
fn timeout_by_its_name(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock {
        io::ErrorKind::TimedOut.into()
    } else {
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_local_names_resolve() {
        let second = Duration::from_secs(5);
        assert_eq!(
            resolve("127.0.0.1:80", second).unwrap(),
            ["127.0.0.1:80".parse().unwrap()]
        );
        assert_eq!(
            resolve("[::1]:80", second).unwrap(),
            ["[::1]:80".parse().unwrap()]
        );
        assert!(
            resolve("localhost:80", second)
                .unwrap()
                .iter()
                .all(|addr| addr.ip().is_loopback())
        );
        assert!(resolve("no port", second).is_err());
    }

    #[test]
    fn an_ipv6_host_gets_brackets_once() {
        for (host, expected) in [
            ("node1", "node1:1"),
            ("::1", "[::1]:1"),
            ("[::1]", "[::1]:1"),
        ] {
            assert_eq!(join(host, 1), expected);
        }
    }
}
