//! Carries faults out on processes, each held by its pidfd, so that a signal reaches the process that was meant or none.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use paceline_rendezvous::process::Stat;
use rustix::net::{AddressFamily, Shutdown, SocketType, sockopt};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Resource, Rlimit, Signal, getrlimit, pidfd_getfd, pidfd_open,
    pidfd_send_signal, prlimit,
};
use socket2::{SockFilter, SockRef};

use super::plan::{Fault, Strike};

/// A slow rank runs one look in so many.
const SLOW_RUNS_ONE_IN: u32 = 10;
/// A process that was sent SIGSTOP stands still within this time.
const STOPS_WITHIN: Duration = Duration::from_millis(200);

/// A process that is disturbed for a while. Dropping it undoes that.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) pid: u32,
    until: Instant,
    looks: u32,
    undo: Undo,
}

#[derive(Debug)]
enum Undo {
    Continue { pidfd: OwnedFd, is_slow: bool },
    Limit(Pid, Rlimit),
    Filter(OwnedFd),
}

impl Held {
    /// Stops a slow process or lets it run, at each look. Says whether its time is not over.
    pub(super) fn turn(&mut self, now: Instant) -> bool {
        self.looks += 1;
        if let Undo::Continue {
            pidfd,
            is_slow: true,
        } = &self.undo
        {
            let runs = self.looks.is_multiple_of(SLOW_RUNS_ONE_IN);
            let signal = if runs { Signal::CONT } else { Signal::STOP };
            // It may have ended.
            let _ = pidfd_send_signal(pidfd, signal);
        }
        now < self.until
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // It may have ended.
        match &self.undo {
            Undo::Continue { pidfd, .. } => drop(pidfd_send_signal(pidfd, Signal::CONT)),
            Undo::Limit(pid, before) => drop(prlimit(Some(*pid), Resource::As, *before)),
            Undo::Filter(socket) => drop(SockRef::from(socket).detach_filter()),
        }
    }
}

/// Hits a process. `is_ours` is asked once the process is held, because its number may have been given to another, and `weights`
/// once it stands still: the addresses of some of its weights. Returns what lasts.
///
/// *Errors*: the process has ended, may not be touched, or has no connection.
pub(super) fn hit(
    strike: &Strike,
    pid: u32,
    is_ours: impl FnOnce() -> bool,
    weights: impl FnOnce() -> Option<Range<u64>>,
) -> io::Result<Option<Held>> {
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let number = number.ok_or(io::ErrorKind::InvalidInput)?;
    let pidfd = pidfd_open(number, PidfdFlags::empty())?;
    if !is_ours() {
        return Err(io::ErrorKind::NotFound.into());
    }
    let undo = match strike.fault {
        Fault::Kill | Fault::Agent => {
            pidfd_send_signal(&pidfd, Signal::KILL)?;
            None
        }
        Fault::Abort => {
            pidfd_send_signal(&pidfd, Signal::ABORT)?;
            None
        }
        Fault::Exit => {
            while_stopped(&pidfd, pid, || write_exit(pid))?;
            None
        }
        Fault::Corrupt => {
            while_stopped(&pidfd, pid, || {
                let shows_none = || io::Error::other("it shows no weights any more");
                flip(pid, weights().ok_or_else(shows_none)?, strike.pick)
            })?;
            None
        }
        Fault::Cut => {
            let socket = connection(&pidfd, pid, strike.pick)?;
            rustix::net::shutdown(socket, Shutdown::Both)?;
            None
        }
        Fault::Stop | Fault::Slow => {
            pidfd_send_signal(&pidfd, Signal::STOP)?;
            let is_slow = strike.fault == Fault::Slow;
            Some(Undo::Continue { pidfd, is_slow })
        }
        Fault::Memory => {
            // That of a descendant, unless it has set its own.
            let maximum = getrlimit(Resource::As).maximum;
            let current = Some(0);
            let none = Rlimit { current, maximum };
            let before = prlimit(Some(number), Resource::As, none)?;
            Some(Undo::Limit(number, before))
        }
        Fault::Stall => {
            let socket = connection(&pidfd, pid, strike.pick)?;
            // BPF_RET | BPF_K, 0: of every packet nothing is kept. The peer sends it again once the filter is gone.
            SockRef::from(&socket).attach_filter(&[SockFilter::new(0x06, 0, 0, 0)])?;
            Some(Undo::Filter(socket))
        }
    };
    Ok(undo.map(|undo| Held {
        pid,
        until: Instant::now() + strike.hold,
        looks: 0,
        undo,
    }))
}

/// A copy of the descriptor of one of a process's TCP connections.
fn connection(pidfd: &OwnedFd, pid: u32, pick: u64) -> io::Result<OwnedFd> {
    let mut connections = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        let target = fs::read_link(&path).unwrap_or_default();
        let number = (path.file_name()).and_then(|name| name.to_str()?.parse().ok());
        if let Some(number) = number
            && target
                .as_os_str()
                .as_encoded_bytes()
                .starts_with(b"socket:")
        {
            let copy = pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty())?;
            connections.extend(Some(copy).filter(is_connection));
        }
    }
    if connections.is_empty() {
        return Err(io::Error::other("it has no TCP connection"));
    }
    let one = (pick % connections.len() as u64) as usize;
    Ok(connections.swap_remove(one))
}

fn is_connection(socket: &OwnedFd) -> bool {
    let family = sockopt::socket_domain(socket);
    let is_inet =
        family.is_ok_and(|one| [AddressFamily::INET, AddressFamily::INET6].contains(&one));
    let is_stream = sockopt::socket_type(socket).is_ok_and(|one| one == SocketType::STREAM);
    is_inet && is_stream && rustix::net::getpeername(socket).is_ok_and(|peer| peer.is_some())
}

/// `exit_group(0)`, and before it an instruction that does nothing, as long as the one of a system call.
#[cfg(target_arch = "x86_64")]
const EXIT: (&[u8], &[u8]) = (&[0xeb, 0], &[0x31, 0xff, 0xb8, 231, 0, 0, 0, 0x0f, 0x05]);
#[cfg(target_arch = "aarch64")]
const EXIT: (&[u8], &[u8]) = (
    &[0x1f, 0x20, 0x03, 0xd5],
    &[
        0x00, 0x00, 0x80, 0xd2, 0xc8, 0x0b, 0x80, 0xd2, 0x01, 0x00, 0x00, 0xd4,
    ],
);

/// Does something to a process while none of its threads runs.
fn while_stopped(
    pidfd: &OwnedFd,
    pid: u32,
    work: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    pidfd_send_signal(pidfd, Signal::STOP)?;
    let done = await_stop(pid).and_then(|()| work());
    pidfd_send_signal(pidfd, Signal::CONT)?;
    done
}

fn await_stop(pid: u32) -> io::Result<()> {
    let until = Instant::now() + STOPS_WITHIN;
    loop {
        let mut threads = fs::read_dir(format!("/proc/{pid}/task"))?.flatten();
        // One that cannot be read has ended.
        let is_stopped = |stat: Option<Stat>| stat.is_none_or(Stat::is_stopped);
        if threads.all(|thread| is_stopped(Stat::read_from(&thread.path()))) {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn memory_of(pid: u32) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true);
    options.open(format!("/proc/{pid}/mem"))
}

/// Flips one of the bits at these addresses.
fn flip(pid: u32, addresses: Range<u64>, pick: u64) -> io::Result<()> {
    let bits = 8 * addresses.end.saturating_sub(addresses.start);
    // The remainder of `pick` itself has chosen the rank.
    let bit = (pick >> 8).checked_rem(bits);
    let bit = bit.ok_or(io::ErrorKind::InvalidInput)?;
    let (memory, at) = (memory_of(pid)?, addresses.start + bit / 8);
    let mut byte = [0];
    memory.read_exact_at(&mut byte, at)?;
    byte[0] ^= 1 << (bit % 8);
    memory.write_all_at(&byte, at)
}

/// Has a process end by itself with code 0: writes that system call where its main thread goes on.
fn write_exit(pid: u32) -> io::Result<()> {
    let place = place(&fs::read_to_string(format!("/proc/{pid}/syscall"))?);
    let (is_in_call, next) = place.ok_or(io::ErrorKind::TimedOut)?;
    let (skip, exit) = EXIT;
    let memory = memory_of(pid)?;
    if is_in_call {
        // The kernel may begin the call again: it goes back by one instruction.
        memory.write_all_at(skip, next - skip.len() as u64)?;
    }
    memory.write_all_at(exit, next)
}

/// Whether a thread is in a system call, and its next instruction, from `/proc/PID/syscall`; `None` while it runs.
fn place(text: &str) -> Option<(bool, u64)> {
    let next = text.split_whitespace().last()?.strip_prefix("0x")?;
    let is_in_call = !text.starts_with("-1 ");
    Some((is_in_call, u64::from_str_radix(next, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::process::{Child, Command, Stdio};

    use super::*;
    use crate::chaos::plan::Moment;

    fn strike(fault: Fault) -> Strike {
        Strike {
            index: 0,
            fault,
            moment: Moment::At(0.0),
            pick: 0,
            hold: Duration::from_millis(300),
        }
    }

    #[test]
    fn a_cut_connection_is_at_its_end_on_both_sides() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let script = format!("exec 3<>/dev/tcp/127.0.0.1/{port}; cat <&3");
        let mut reader = bash(&script);
        let (mut there, _) = listener.accept().expect("a connection");
        hit(&strike(Fault::Cut), reader.id(), || true, || None).expect("a connection was cut");
        assert_eq!(there.read(&mut [0; 8]).expect("an end"), 0);
        assert!(
            reader.wait().expect("a child").success(),
            "it has read to the end"
        );
    }

    #[test]
    fn a_stalled_connection_receives_later_and_sends_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let script = format!(
            "exec 3<>/dev/tcp/127.0.0.1/{port}; echo a >&3; read x; echo b >&3; read -u 3 y; echo $y >&3"
        );
        let mut program = bash(&script);
        let (mut there, _) = listener.accept().expect("a connection");
        let next = |mut there: &TcpStream| {
            let mut line = [0; 2];
            there.read_exact(&mut line).expect("a line");
            line
        };
        assert_eq!(&next(&there), b"a\n");
        let held =
            hit(&strike(Fault::Stall), program.id(), || true, || None).expect("a connection");
        there.write_all(b"c\n").expect("it is buffered");
        drop(program.stdin.take());
        let mut held = held.expect("it lasts");
        assert_eq!(&next(&there), b"b\n");
        while held.turn(Instant::now()) {
            assert!(
                program.try_wait().expect("a child").is_none(),
                "it has received"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(held);
        assert_eq!(&next(&there), b"c\n");
        assert!(program.wait().expect("a child").success());
    }

    fn bash(script: &str) -> Child {
        let mut command = Command::new("bash");
        let command = command.args(["-c", script]).stdin(Stdio::piped());
        let command = command.stdout(Stdio::piped()).stderr(Stdio::null());
        command.spawn().expect("bash")
    }

    #[test]
    fn a_process_exits_by_itself_in_a_call_and_while_it_computes() {
        for script in ["read x; exit 1", "while :; do :; done"] {
            let mut program = bash(script);
            hit(&strike(Fault::Exit), program.id(), || true, || None).expect("it runs");
            let code = program.wait().expect("a child").code();
            assert_eq!(code, Some(0), "{script}");
        }
    }

    #[test]
    fn a_process_gets_no_memory_until_the_limit_is_lifted() {
        for is_limited in [true, false] {
            let mut program = bash("echo; read x; exec sleep 0");
            // Without memory it would not start.
            let mut started = program.stdout.take().expect("piped");
            started.read_exact(&mut [0]).expect("a line");
            let held =
                hit(&strike(Fault::Memory), program.id(), || true, || None).expect("it runs");
            let held = held.filter(|_| is_limited);
            drop(program.stdin.take());
            let is_well = program.wait().expect("a child").success();
            assert_eq!(is_well, !is_limited);
            drop(held);
        }
    }

    #[test]
    fn one_bit_flips_where_it_should_and_the_process_goes_on() {
        let environment = "x=some words";
        let mut sleeper = Command::new("sleep");
        let (name, value) = environment.split_once('=').expect("a variable");
        let sleeper = sleeper.arg("60").env_clear().env(name, value).spawn();
        let mut sleeper = sleeper.expect("sleep");
        let pid = sleeper.id();
        let now = || fs::read(format!("/proc/{pid}/environ")).expect("it runs");
        while now() != format!("{environment}\0").as_bytes() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
        // Its addresses are fields 50 and 51, of which two come before the name's end.
        let fields = stat.rsplit_once(')').expect("a name").1;
        let fields = fields.split_whitespace().skip(47);
        let fields: Vec<u64> = fields.map_while(|field| field.parse().ok()).collect();
        let strike = Strike {
            pick: (8 * 3 + 1) << 8,
            ..strike(Fault::Corrupt)
        };
        hit(&strike, pid, || true, || Some(fields[0]..fields[1])).expect("it runs");
        assert_eq!(now(), b"x=smme words\0");
        let refused = hit(&strike, pid, || true, || None).expect_err("refused");
        assert_eq!(refused.to_string(), "it shows no weights any more");
        assert!(Stat::read(pid).is_some_and(|stat| !stat.is_stopped()));
        sleeper.kill().expect("a child");
        sleeper.wait().expect("a child");
    }

    #[test]
    fn a_process_without_a_connection_says_so() {
        let mut sleeper = Command::new("sleep").arg("60").spawn().expect("sleep");
        let refused = hit(&strike(Fault::Cut), sleeper.id(), || true, || None);
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
        let refused = hit(&strike(Fault::Kill), sleeper.id(), || false, || None);
        assert_eq!(
            refused.expect_err("refused").kind(),
            io::ErrorKind::NotFound
        );
        assert!(sleeper.try_wait().expect("a child").is_none());
        hit(&strike(Fault::Kill), sleeper.id(), || true, || None).expect("hit");
        assert!(!sleeper.wait().expect("a child").success());
    }
}
