//! An authenticated connection, with or without TLS, and one deadline for all reads and writes.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use super::{AuthError, Side, prove};
use crate::net::{DeadlineStream, Wire};
use crate::tls::{Tls, Within};
use crate::token::Token;

/// An authenticated connection to a process of the same job. Reads and writes block, until its deadline.
#[derive(Debug)]
pub struct Proved {
    wire: Wire,
    deadline: Instant,
}

impl Proved {
    /// Authenticates both ends of a fresh connection, over TLS if `tls` is set.
    ///
    /// *Blocks*: until `deadline` at most, which also bounds all later reads and writes.
    pub fn meet(
        stream: TcpStream,
        token: &Token,
        side: Side,
        purpose: &str,
        tls: bool,
        deadline: Instant,
    ) -> Result<Self, AuthError> {
        let wire = match tls {
            true => Wire::Tls(Box::new(Tls::handshake(stream, side, deadline)?)),
            false => Wire::Plain(stream),
        };
        let claim = wire.claim(purpose)?;
        let mut proved = Self { wire, deadline };
        let outcome = prove(&mut proved, token, side, &claim);
        if let Wire::Plain(stream) = &proved.wire {
            // Fails only on a dead socket, which the next use reports.
            let _ = stream.set_read_timeout(None);
            let _ = stream.set_write_timeout(None);
        }
        outcome.map(|()| proved)
    }

    /// The connection, without the deadline.
    pub(crate) fn into_wire(self) -> Wire {
        self.wire
    }
}

impl Read for Proved {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let deadline = self.deadline;
        match &self.wire {
            Wire::Plain(stream) => DeadlineStream::until(stream, deadline).read(buffer),
            Wire::Tls(tls) => Within { tls, deadline }.read(buffer),
        }
    }
}

impl Write for Proved {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let deadline = self.deadline;
        match &self.wire {
            Wire::Plain(stream) => DeadlineStream::until(stream, deadline).write(buffer),
            Wire::Tls(tls) => Within { tls, deadline }.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// What the dialer and the listener came to.
    fn both(
        tokens: [&str; 2],
        tls: [bool; 2],
    ) -> (Result<Proved, AuthError>, Result<Proved, AuthError>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        let meet = move |stream, seed: &str, side, tls| {
            Proved::meet(stream, &Token::derived(seed), side, "test", tls, deadline)
        };
        thread::scope(|scope| {
            let far = scope.spawn(move || {
                let (stream, _) = listener.accept().unwrap();
                meet(stream, tokens[1], Side::Listener, tls[1])
            });
            let stream = TcpStream::connect(addr).unwrap();
            let near = meet(stream, tokens[0], Side::Dialer, tls[0]);
            (near, far.join().unwrap())
        })
    }

    #[test]
    fn processes_of_one_job_talk_with_tls_and_without() {
        for tls in [false, true] {
            let (near, far) = both(["a", "a"], [tls, tls]);
            let (mut near, mut far) = (near.unwrap(), far.unwrap());
            near.write_all(b"ping").unwrap();
            let mut got = [0; 4];
            far.read_exact(&mut got).unwrap();
            assert_eq!(&got, b"ping");
        }
    }

    #[test]
    fn another_token_is_refused_and_another_tls_setting_is_named() {
        for tls in [false, true] {
            let (near, far) = both(["a", "b"], [tls, tls]);
            assert_eq!(near.unwrap_err(), AuthError::Refused);
            assert_eq!(far.unwrap_err(), AuthError::WrongProof);
        }
        let (near, far) = both(["a", "a"], [true, false]);
        assert_eq!(near.unwrap_err(), AuthError::PlainPeer);
        assert_eq!(far.unwrap_err(), AuthError::TlsPeer);
    }

    #[test]
    fn a_silent_peer_costs_no_more_than_the_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (token, now) = (Token::derived("a"), Instant::now());
        let late = Proved::meet(stream, &token, Side::Dialer, "test", false, now).unwrap_err();
        assert!(matches!(late, AuthError::TimedOut { .. }), "{late}");
    }
}
