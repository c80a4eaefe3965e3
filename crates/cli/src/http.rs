//! Pages over HTTP/1.1: a thread for each connection, up to a bound, so that no client waits for another.
//!
//! A connection has one request of bounded size and a bounded time in all. When there are too many, the oldest is shut down: a
//! client that asks and reads at once, as Prometheus does, always gets its page.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::exit::{Exit, Failure};

/// Longest request; browsers send up to about 2 KiB.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// Most headers of a request.
const HEADERS_MAX: usize = 64;
/// Most connections at once.
const CONNECTIONS_MAX: usize = 64;
/// Longest that a request and its answer may take.
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(10);
/// Longest that an answer lives that goes on; browsers then ask again.
const STREAM_TIME_MAX: Duration = Duration::from_secs(3600);

/// What a client asks for with GET.
pub(crate) struct Request<'a> {
    /// The path, as it was sent.
    pub(crate) path: &'a str,
    /// What follows `?`.
    pub(crate) query: &'a str,
    headers: &'a [httparse::Header<'a>],
}

impl Request<'_> {
    /// The value of a header, if it is text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        let found = headers.find(|header| header.name.eq_ignore_ascii_case(name))?;
        std::str::from_utf8(found.value).ok()
    }

    /// The value of a parameter of the query.
    pub(crate) fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters(name).next()
    }

    /// The values of all parameters of this name, as they were sent.
    pub(crate) fn parameters(&self, name: &str) -> impl Iterator<Item = &str> {
        let pairs = self.query.split('&');
        pairs
            .filter_map(|pair| pair.split_once('='))
            .filter(move |(key, _)| *key == name)
            .map(|(_, value)| value)
    }
}

/// What it gets.
pub(crate) struct Answer {
    status: &'static str,
    kind: &'static str,
    /// More headers, each with its line end.
    extra: String,
    body: Body,
}

/// The parts of an answer that goes on, one after the other; each call may take some hundred milliseconds.
type Stream = Box<dyn FnMut() -> Option<Vec<u8>>>;

enum Body {
    Whole(Arc<[u8]>),
    Stream(Stream),
}

impl Answer {
    /// What was asked for.
    pub(crate) fn found(kind: &'static str, body: impl Into<Arc<[u8]>>) -> Self {
        Self {
            status: "200 OK",
            kind,
            extra: String::new(),
            body: Body::Whole(body.into()),
        }
    }

    /// A line of text.
    pub(crate) fn text(status: &'static str, text: &str) -> Self {
        Self {
            status,
            ..Self::found(
                "text/plain; charset=utf-8",
                format!("{text}\n").into_bytes(),
            )
        }
    }

    /// What is sent while it comes into being.
    pub(crate) fn stream(kind: &'static str, next: Stream) -> Self {
        Self {
            body: Body::Stream(next),
            ..Self::found(kind, Vec::new())
        }
    }

    /// The same with another header.
    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self.extra += &format!("{name}: {value}\r\n");
        self
    }

    fn head(&self) -> Vec<u8> {
        let Self {
            status,
            kind,
            extra,
            body,
        } = self;
        let length = match body {
            Body::Whole(body) => format!("Content-Length: {}\r\n", body.len()),
            Body::Stream(_) => String::new(),
        };
        format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{length}{extra}Connection: close\r\n\
             X-Content-Type-Options: nosniff\r\n\r\n"
        )
        .into_bytes()
    }
}

/// A connection with its thread, which owns the stream.
struct Connection<'scope> {
    stream: Weak<TcpStream>,
    thread: ScopedJoinHandle<'scope, ()>,
}

impl Connection<'_> {
    /// Has its thread return: at once if it reads or writes the stream, and after the part of a body that it waits for.
    fn shut_down(&self) {
        if let Some(stream) = self.stream.upgrade() {
            // A client that has gone already is as good.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Ends it now.
    fn end(self) {
        self.shut_down();
        // A panic there has been printed, and concerns no other client.
        let _ = self.thread.join();
    }
}

/// Listens at an address.
///
/// *Errors*: the address cannot be had.
pub(crate) fn listen(address: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).map_err(|error| refused(address, &error))
}

/// Readable once a signal has come that ends the server.
pub(crate) fn stop_signal() -> io::Result<UnixStream> {
    let (stop, told) = UnixStream::pair()?;
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::low_level::pipe::register(signal, told.try_clone()?)?;
    }
    Ok(stop)
}

fn refused(address: SocketAddr, error: &io::Error) -> Failure {
    let hint = match error.kind() {
        io::ErrorKind::AddrInUse => {
            Some("another program has the port; give another one, as in `--listen 127.0.0.1:9401`")
        }
        io::ErrorKind::AddrNotAvailable => Some("`ip addr` shows the addresses of this machine"),
        io::ErrorKind::PermissionDenied => Some("ports below 1024 are root's; give a higher one"),
        _ => None,
    };
    let message = format!("cannot listen at {address}: {error}");
    Failure::new(Exit::Environment, message, hint.map(str::to_owned))
}

/// Serves what `answer` gives until `stop` can be read.
///
/// *Errors*: only those of the listener or the system; a client can do nothing to end it.
pub(crate) fn serve(
    listener: TcpListener,
    stop: UnixStream,
    answer: impl Fn(&Request<'_>) -> Answer + Sync,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let answer = &answer;
    thread::scope(|scope| {
        let mut connections: Vec<Connection<'_>> = Vec::new();
        let ended = loop {
            match wait(&listener, &stop) {
                Ok(true) => break Ok(()),
                Ok(false) => {}
                Err(error) => break Err(error),
            }
            connections.retain(|connection| !connection.thread.is_finished());
            let stream = match listener.accept() {
                Ok((stream, _)) => Arc::new(stream),
                Err(error) if is_the_clients(&error) => continue,
                // No descriptor is left. The oldest connection gives its own back, so that this does not go round and round.
                Err(_) if !connections.is_empty() => {
                    connections.remove(0).end();
                    continue;
                }
                Err(error) => break Err(error),
            };
            if connections.len() >= CONNECTIONS_MAX {
                connections.remove(0).end();
            }
            let weak = Arc::downgrade(&stream);
            let name = thread::Builder::new().name("serve".to_owned());
            let thread = name.spawn_scoped(scope, move || {
                // What goes wrong with a client ends its connection and nothing else.
                let _ = converse(&stream, answer);
            });
            if let Ok(thread) = thread {
                connections.push(Connection {
                    stream: weak,
                    thread,
                });
            }
        };
        connections.iter().for_each(Connection::shut_down);
        connections.into_iter().for_each(Connection::end);
        ended
    })
}

/// Waits until a client comes, or the server is stopped: then it is true.
fn wait(listener: &TcpListener, stop: &UnixStream) -> io::Result<bool> {
    let mut fds = [
        PollFd::new(stop, PollFlags::IN),
        PollFd::new(listener, PollFlags::IN),
    ];
    match poll(&mut fds, None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(!fds[0].revents().is_empty()),
        Err(error) => Err(error.into()),
    }
}

/// Whether a failed accept says nothing about this side: the client was gone before it was taken in, or nothing had come.
fn is_the_clients(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionReset | Interrupted | WouldBlock
    )
}

/// Whether the client has gone, or this side has [shut the connection down](Connection::shut_down).
fn is_closed(stream: &TcpStream) -> io::Result<bool> {
    stream.set_nonblocking(true)?;
    let peeked = stream.peek(&mut [0]);
    stream.set_nonblocking(false)?;
    Ok(matches!(peeked, Ok(0)))
}

/// Takes one request and answers it.
fn converse(stream: &TcpStream, answer: &dyn Fn(&Request<'_>) -> Answer) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let deadline = Instant::now() + CONNECTION_TIME_MAX;
    let mut request = Vec::new();
    let answer = loop {
        if let Some(answer) = answered(&request, answer) {
            break answer;
        }
        if receive(stream, deadline, &mut request)? == 0 {
            return Ok(());
        }
    };
    send(stream, deadline, &answer.head())?;
    match answer.body {
        Body::Whole(body) => send(stream, deadline, &body)?,
        Body::Stream(mut next) => {
            let end = Instant::now() + STREAM_TIME_MAX;
            while Instant::now() < end
                && let Some(part) = next()
            {
                if part.is_empty() && is_closed(stream)? {
                    return Ok(());
                }
                send(stream, Instant::now() + CONNECTION_TIME_MAX, &part)?;
            }
        }
    }
    // A connection that is closed while something unread has arrived is reset, and the client may lose the answer; so the
    // client closes first.
    stream.shutdown(Shutdown::Write)?;
    while {
        request.clear();
        receive(stream, deadline, &mut request)? > 0
    } {}
    Ok(())
}

fn send(stream: &TcpStream, deadline: Instant, mut part: &[u8]) -> io::Result<()> {
    while !part.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        match (&mut &*stream).write(part)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            sent => part = &part[sent..],
        }
    }
    Ok(())
}

/// Takes what arrives next, and says how much it was.
fn receive(stream: &TcpStream, deadline: Instant, request: &mut Vec<u8>) -> io::Result<usize> {
    stream.set_read_timeout(Some(left(deadline)?))?;
    let mut chunk = [0; REQUEST_BYTES_MAX];
    let room = REQUEST_BYTES_MAX.saturating_sub(request.len());
    let count = (&mut &*stream).read(&mut chunk[..room])?;
    request.extend_from_slice(&chunk[..count]);
    Ok(count)
}

/// The time until the deadline; an error once it is over.
fn left(deadline: Instant) -> io::Result<Duration> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        left => Ok(left),
    }
}

/// The answer to a request, once all of it is there.
fn answered(request: &[u8], answer: &dyn Fn(&Request<'_>) -> Answer) -> Option<Answer> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut headers);
    match parsed.parse(request) {
        Ok(httparse::Status::Partial) if request.len() < REQUEST_BYTES_MAX => return None,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            let status = "431 Request Header Fields Too Large";
            return Some(Answer::text(status, "the request is too long"));
        }
        Err(_) => return Some(Answer::text("400 Bad Request", "this is no HTTP request")),
        Ok(httparse::Status::Complete(_)) => {}
    }
    if parsed.method != Some("GET") {
        let answer = Answer::text("405 Method Not Allowed", "only GET is understood");
        return Some(answer.with("Allow", "GET"));
    }
    let target = parsed.path.unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    Some(answer(&Request {
        path,
        query,
        headers: parsed.headers,
    }))
}

#[cfg(test)]
mod tests;
