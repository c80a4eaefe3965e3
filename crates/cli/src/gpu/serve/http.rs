//! One page over HTTP/1.1, for any number of clients of any kind: one thread, bounded memory, and nobody waits for anybody.
//!
//! Each connection has one request of bounded size, a bounded time for it and for taking the answer, and is closed then. When
//! there are too many, the one that has been there longest goes, so that whoever asks and takes the answer at once, as
//! Prometheus does, always gets it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Longest request; browsers send up to about 2 KiB.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// Most headers of a request.
const HEADERS_MAX: usize = 64;
/// Most connections at once.
const CONNECTIONS_MAX: usize = 64;
/// Longest that a connection lives.
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(10);
/// Bytes of one connection that are read in one turn.
const TURN_BYTES: usize = 4 << 10;

/// Where the numbers are.
const PATH: &str = "/metrics";

/// One client.
struct Connection {
    stream: TcpStream,
    since: Instant,
    state: State,
}

enum State {
    /// What has arrived of the request.
    Asking(Vec<u8>),
    /// What is to be sent, and how much of it has been.
    Answering {
        head: Vec<u8>,
        body: Arc<[u8]>,
        sent: usize,
    },
    /// Everything is sent. A connection that is closed while something unread has arrived is reset, and the client may lose the
    /// answer; so the client closes first.
    Leaving,
}

/// What becomes of a connection.
#[derive(PartialEq, Eq)]
enum Fate {
    Stays,
    Ends,
}

/// Serves `page` until `stop` can be read.
///
/// *Errors*: only what is wrong with the listener or the system; a client can do nothing to end it.
pub(super) fn serve(
    listener: TcpListener,
    stop: UnixStream,
    mut page: impl FnMut() -> Arc<[u8]>,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let mut connections: Vec<Connection> = Vec::new();
    loop {
        let now = Instant::now();
        connections.retain(|connection| now < connection.since + CONNECTION_TIME_MAX);
        let ready = wait(&listener, &stop, &connections, now)?;
        if ready.is_stopped {
            return Ok(());
        }
        let mut is_ready = ready.connections.into_iter();
        connections.retain_mut(|connection| {
            let is_ready = is_ready.next().unwrap_or(false);
            !is_ready || connection.go_on(&mut page) == Fate::Stays
        });
        if ready.has_new {
            accept(&listener, &mut connections)?;
        }
    }
}

struct Ready {
    is_stopped: bool,
    has_new: bool,
    connections: Vec<bool>,
}

/// Waits until something can be done, or the oldest connection's time is over.
fn wait(
    listener: &TcpListener,
    stop: &UnixStream,
    connections: &[Connection],
    now: Instant,
) -> io::Result<Ready> {
    let oldest = connections.iter().map(|connection| connection.since).min();
    let left = oldest.map(|since| (since + CONNECTION_TIME_MAX).saturating_duration_since(now));
    let timeout = left.map(|left| Timespec {
        tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    let own = [
        (stop.as_fd(), PollFlags::IN),
        (listener.as_fd(), PollFlags::IN),
    ];
    let theirs = connections.iter().map(|connection| {
        let wanted = match connection.state {
            State::Answering { .. } => PollFlags::OUT,
            State::Asking(_) | State::Leaving => PollFlags::IN,
        };
        (connection.stream.as_fd(), wanted)
    });
    let mut fds: Vec<PollFd<'_>> = own
        .into_iter()
        .chain(theirs)
        .map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags))
        .collect();
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => {
            let connections = vec![false; connections.len()];
            return Ok(Ready {
                is_stopped: false,
                has_new: false,
                connections,
            });
        }
        Err(error) => return Err(error.into()),
    }
    let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
    Ok(Ready {
        is_stopped: ready.next().unwrap_or(false),
        has_new: ready.next().unwrap_or(false),
        connections: ready.collect(),
    })
}

/// Takes a client in; when there are too many, the oldest one goes.
fn accept(listener: &TcpListener, connections: &mut Vec<Connection>) -> io::Result<()> {
    // One at a time: those that wait for an answer come first.
    let stream = match listener.accept() {
        Ok((stream, _)) => stream,
        Err(error) if is_the_clients(&error) => return Ok(()),
        // No descriptor is left. The oldest connection gives its own back, so that this does not go round and round.
        Err(_) if !connections.is_empty() => {
            connections.remove(0);
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    if stream.set_nonblocking(true).is_ok() {
        if connections.len() >= CONNECTIONS_MAX {
            connections.remove(0);
        }
        connections.push(Connection {
            stream,
            since: Instant::now(),
            state: State::Asking(Vec::new()),
        });
    }
    Ok(())
}

/// Whether a failed accept says nothing about this side: the client was gone before it was taken in, or nothing had come.
fn is_the_clients(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionReset | Interrupted | WouldBlock
    )
}

impl Connection {
    /// Does what can be done now, a bounded part of it.
    fn go_on(&mut self, page: &mut impl FnMut() -> Arc<[u8]>) -> Fate {
        let done = match &mut self.state {
            State::Asking(request) => match receive(&mut self.stream, request) {
                Ok(has_ended) => match answer(request, page) {
                    Some((head, body)) => {
                        self.state = State::Answering {
                            head,
                            body,
                            sent: 0,
                        };
                        self.send()
                    }
                    None if has_ended => return Fate::Ends,
                    None => Ok(()),
                },
                Err(error) => Err(error),
            },
            State::Answering { .. } => self.send(),
            State::Leaving => {
                let mut rest = [0; TURN_BYTES];
                match self.stream.read(&mut rest) {
                    Ok(0) => return Fate::Ends,
                    Ok(_) => Ok(()),
                    Err(error) => Err(error),
                }
            }
        };
        match done {
            Err(error) if !is_the_clients(&error) => Fate::Ends,
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Fate::Ends,
            _ => Fate::Stays,
        }
    }

    fn send(&mut self) -> io::Result<()> {
        let State::Answering { head, body, sent } = &mut self.state else {
            return Ok(());
        };
        while *sent < head.len() + body.len() {
            let left = match sent.checked_sub(head.len()) {
                None => &head[*sent..],
                Some(of_body) => &body[of_body..],
            };
            match self.stream.write(left)? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                count => *sent += count,
            }
        }
        self.state = State::Leaving;
        self.stream.shutdown(Shutdown::Write)
    }
}

/// Takes what has arrived; whether nothing more will come.
fn receive(stream: &mut TcpStream, request: &mut Vec<u8>) -> io::Result<bool> {
    let mut chunk = [0; TURN_BYTES];
    let room = (REQUEST_BYTES_MAX - request.len().min(REQUEST_BYTES_MAX)).min(TURN_BYTES);
    let count = stream.read(&mut chunk[..room])?;
    request.extend_from_slice(&chunk[..count]);
    Ok(count == 0)
}

/// The answer to a request, once all of it is there.
fn answer(request: &[u8], page: &mut impl FnMut() -> Arc<[u8]>) -> Option<(Vec<u8>, Arc<[u8]>)> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut headers);
    let plain = "text/plain; charset=utf-8";
    let said = |status: &str, extra: &str, text: &str| {
        let body: Arc<[u8]> = text.as_bytes().into();
        (head(status, plain, extra, body.len()), body)
    };
    match parsed.parse(request) {
        Ok(httparse::Status::Partial) if request.len() < REQUEST_BYTES_MAX => return None,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            let status = "431 Request Header Fields Too Large";
            return Some(said(status, "", "the request is too long\n"));
        }
        Err(_) => return Some(said("400 Bad Request", "", "this is no HTTP request\n")),
        Ok(httparse::Status::Complete(_)) => {}
    }
    if parsed.method != Some("GET") {
        return Some(said(
            "405 Method Not Allowed",
            "Allow: GET\r\n",
            "only GET is understood\n",
        ));
    }
    let path = parsed.path.unwrap_or_default();
    match path.split('?').next() {
        Some(PATH) => {
            let body = page();
            // Version 0.0.4 is that of the text format.
            let kind = "text/plain; version=0.0.4; charset=utf-8";
            Some((head("200 OK", kind, "", body.len()), body))
        }
        Some("/") => Some(said("200 OK", "", "the numbers are at /metrics\n")),
        _ => Some(said("404 Not Found", "", "the numbers are at /metrics\n")),
    }
}

fn head(status: &str, kind: &str, extra: &str, bytes: usize) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {bytes}\r\n{extra}Connection: close\r\n\
         X-Content-Type-Options: nosniff\r\n\r\n"
    )
    .into_bytes()
}

#[cfg(test)]
mod tests;
