//! Carries faults out on processes, each held by its pidfd, so that a signal reaches the process that was meant or none.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::net::{AddressFamily, Shutdown, SocketType, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal};

use super::plan::{Fault, Strike};

/// A slow rank runs one look in so many.
const SLOW_RUNS_ONE_IN: u32 = 10;

/// A process that is stopped or slow. Dropping it lets the process run.
#[derive(Debug)]
pub(super) struct Held {
    pidfd: OwnedFd,
    pub(super) pid: u32,
    until: Instant,
    is_slow: bool,
    looks: u32,
}

impl Held {
    /// Stops it or lets it run, at each look. Says whether its time is not over.
    pub(super) fn turn(&mut self, now: Instant) -> bool {
        self.looks += 1;
        if self.is_slow {
            let runs = self.looks.is_multiple_of(SLOW_RUNS_ONE_IN);
            let signal = if runs { Signal::CONT } else { Signal::STOP };
            // It may have ended.
            let _ = rustix::process::pidfd_send_signal(&self.pidfd, signal);
        }
        now < self.until
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::CONT);
    }
}

/// Hits a process. `is_ours` is asked once the process is held, because its number may have been given to another.
/// Returns what lasts.
///
/// *Errors*: the process has ended, or has no connection to cut.
pub(super) fn hit(
    strike: &Strike,
    pid: u32,
    is_ours: impl FnOnce() -> bool,
) -> io::Result<Option<Held>> {
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let number = number.ok_or(io::ErrorKind::InvalidInput)?;
    let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty())?;
    if !is_ours() {
        return Err(io::ErrorKind::NotFound.into());
    }
    let signal = match strike.fault {
        Fault::Kill | Fault::Agent => Signal::KILL,
        Fault::Abort => Signal::ABORT,
        Fault::Stop | Fault::Slow => Signal::STOP,
        Fault::Cut => return cut(&pidfd, pid, strike.pick).map(|()| None),
    };
    rustix::process::pidfd_send_signal(&pidfd, signal)?;
    Ok(strike.fault.lasts().then(|| Held {
        pidfd,
        pid,
        until: Instant::now() + strike.hold,
        is_slow: strike.fault == Fault::Slow,
        looks: 0,
    }))
}

/// Shuts down one of a process's TCP connections through a copy of its descriptor. Both ends then see it broken.
fn cut(pidfd: &OwnedFd, pid: u32, pick: u64) -> io::Result<()> {
    let mut connections = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        let is_socket = fs::read_link(&path).is_ok_and(|target| {
            target
                .as_os_str()
                .as_encoded_bytes()
                .starts_with(b"socket:")
        });
        let number = path
            .file_name()
            .and_then(|name| name.to_str()?.parse().ok());
        let Some(number) = number.filter(|_| is_socket) else {
            continue;
        };
        let copy = rustix::process::pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty())?;
        if is_connection(&copy) {
            connections.push(copy);
        }
    }
    if connections.is_empty() {
        return Err(io::Error::other("it has no TCP connection"));
    }
    let one = (pick % connections.len() as u64) as usize;
    Ok(rustix::net::shutdown(&connections[one], Shutdown::Both)?)
}

fn is_connection(socket: &OwnedFd) -> bool {
    let family = sockopt::socket_domain(socket);
    let is_inet =
        family.is_ok_and(|one| [AddressFamily::INET, AddressFamily::INET6].contains(&one));
    let is_stream = sockopt::socket_type(socket).is_ok_and(|one| one == SocketType::STREAM);
    is_inet && is_stream && rustix::net::getpeername(socket).is_ok_and(|peer| peer.is_some())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;
    use std::process::Command;
    use std::time::Duration;

    use super::*;
    use crate::chaos::plan::Moment;

    fn strike(fault: Fault) -> Strike {
        Strike {
            fault,
            moment: Moment::At(0.0),
            pick: 0,
            hold: Duration::ZERO,
        }
    }

    #[test]
    fn a_cut_connection_is_at_its_end_on_both_sides() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let script = format!("exec 3<>/dev/tcp/127.0.0.1/{port}; cat <&3");
        let mut reader = Command::new("bash")
            .args(["-c", &script])
            .spawn()
            .expect("bash");
        let (mut there, _) = listener.accept().expect("a connection");
        hit(&strike(Fault::Cut), reader.id(), || true).expect("a connection was cut");
        assert_eq!(there.read(&mut [0; 8]).expect("an end"), 0);
        assert!(
            reader.wait().expect("a child").success(),
            "it has read to the end"
        );
    }

    #[test]
    fn a_process_without_a_connection_says_so() {
        let mut sleeper = Command::new("sleep").arg("60").spawn().expect("sleep");
        let refused = hit(&strike(Fault::Cut), sleeper.id(), || true);
        sleeper.kill().expect("a child");
        sleeper.wait().expect("a child");
        assert_eq!(
            refused.expect_err("refused").to_string(),
            "it has no TCP connection"
        );
    }

    #[test]
    fn a_process_that_is_not_the_jobs_is_left_alone() {
        let mut sleeper = Command::new("sleep").arg("60").spawn().expect("sleep");
        let refused = hit(&strike(Fault::Kill), sleeper.id(), || false);
        assert_eq!(
            refused.expect_err("refused").kind(),
            io::ErrorKind::NotFound
        );
        assert!(sleeper.try_wait().expect("a child").is_none());
        hit(&strike(Fault::Kill), sleeper.id(), || true).expect("hit");
        assert!(!sleeper.wait().expect("a child").success());
    }
}
