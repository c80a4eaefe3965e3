//! One page over HTTP/1.1: a thread for each connection, up to a bound, so that no client waits for another.
//!
//! A connection has one request of bounded size and a bounded time in all. When there are too many, the oldest is shut down: a
//! client that asks and reads at once, as Prometheus does, always gets the page.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

/// Longest request; browsers send up to about 2 KiB.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// Most headers of a request.
const HEADERS_MAX: usize = 64;
/// Most connections at once.
const CONNECTIONS_MAX: usize = 64;
/// Longest that a connection lives.
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(10);

/// Where the numbers are.
const PATH: &str = "/metrics";

/// A connection with its thread, which owns the stream.
struct Connection<'scope> {
    stream: Weak<TcpStream>,
    thread: ScopedJoinHandle<'scope, ()>,
}

impl Connection<'_> {
    /// Ends it now: a thread that reads or writes the stream returns at once.
    fn end(self) {
        if let Some(stream) = self.stream.upgrade() {
            // A client that has gone already is as good.
            let _ = stream.shutdown(Shutdown::Both);
        }
        // A panic there has been printed, and concerns no other client.
        let _ = self.thread.join();
    }
}

/// Serves `page` until `stop` can be read.
///
/// *Errors*: only those of the listener or the system; a client can do nothing to end it.
pub(super) fn serve(
    listener: TcpListener,
    stop: UnixStream,
    page: impl FnMut() -> Arc<[u8]> + Send,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let page = Mutex::new(page);
    let page = || page.lock().unwrap_or_else(PoisonError::into_inner)();
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
                let _ = converse(&stream, &page);
            });
            if let Ok(thread) = thread {
                connections.push(Connection {
                    stream: weak,
                    thread,
                });
            }
        };
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

/// Takes one request and answers it.
fn converse(stream: &TcpStream, page: &dyn Fn() -> Arc<[u8]>) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let deadline = Instant::now() + CONNECTION_TIME_MAX;
    let mut request = Vec::new();
    let (head, body) = loop {
        if let Some(answer) = answer(&request, page) {
            break answer;
        }
        if receive(stream, deadline, &mut request)? == 0 {
            return Ok(());
        }
    };
    for mut part in [&head[..], &body[..]] {
        while !part.is_empty() {
            stream.set_write_timeout(Some(left(deadline)?))?;
            match (&mut &*stream).write(part)? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                sent => part = &part[sent..],
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
fn answer(request: &[u8], page: &dyn Fn() -> Arc<[u8]>) -> Option<(Vec<u8>, Arc<[u8]>)> {
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
