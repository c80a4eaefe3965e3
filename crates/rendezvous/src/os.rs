//! Everything that only Linux has: memfd and its seals, futex, epoll with a waker, limits. The rest of the crate is portable.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::event::EventfdFlags;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fs::{FileType, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustix::thread::futex;
use rustix::time::{ClockId, Timespec};

/// Anonymous shared memory of exactly `bytes` zero bytes, which can neither shrink nor grow: no process that holds it can
/// make another's access fault. Closed on exec; see `page::allow_inherit`.
pub(crate) fn memfd(name: &str, bytes: u64) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, bytes)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Whether the file can no longer shrink. Fails for files without seals, which are all but memfds.
pub(crate) fn cannot_shrink(fd: impl AsFd) -> io::Result<bool> {
    Ok(rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK))
}

/// Nanoseconds of CLOCK_MONOTONIC, the same clock in all processes of a machine.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Processor time of this thread, which does not pass while others have the processor.
pub(crate) fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Sleeps while `word` is `expected`, at most for `timeout`. May wake early without a reason: check the word.
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    // A timeout beyond the clock's range means no timeout.
    let timeout = Timespec::try_from(timeout).ok();
    // Any error (value changed, signal, timeout) means the same to the caller: look again.
    let _ = futex::wait(word, futex::Flags::empty(), expected, timeout.as_ref());
}

/// Most words of one call, by the kernel.
const WAITV_MAX: usize = 128;

/// As [`futex_wait`] for `first` and as many `others` as the kernel takes at once. Linux before 5.16 takes none, nor do some containers.
pub(crate) fn futex_wait_any(
    first: (&AtomicU32, u32),
    others: &[(&AtomicU32, u32)],
    timeout: Duration,
) {
    let words = std::iter::once(&first).chain(others).take(WAITV_MAX);
    let words = words.map(|(word, expected)| {
        let mut wait = futex::Wait::new();
        wait.val = u64::from(*expected);
        wait.uaddr = futex::WaitPtr::new(word.as_ptr().cast());
        wait.flags = futex::WaitFlags::SIZE_U32;
        wait
    });
    let now = Duration::from_nanos(monotonic_ns());
    let until = now.checked_add(timeout).map(Timespec::try_from);
    let until = until.and_then(Result::ok);
    let words: Vec<_> = words.collect();
    let waited = futex::waitv(
        &words,
        futex::WaitvFlags::empty(),
        until.as_ref(),
        ClockId::Monotonic,
    );
    if !matches!(
        waited,
        Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT)
    ) {
        futex_wait(first.0, first.1, timeout);
    }
}

/// Wakes all threads that sleep on `word`, in every process that maps it.
pub(crate) fn futex_wake_all(word: &AtomicU32) {
    // Fails only for an invalid address, which a reference is not.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

/// Size of the file behind a descriptor.
pub(crate) fn file_bytes(fd: impl AsFd) -> io::Result<u64> {
    Ok(u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0))
}

/// A file that was found by its place in `/proc`, held without having been opened: whatever it turns out to be, holding it
/// does nothing to it.
pub(crate) struct Found {
    held: OwnedFd,
    /// Which file it is, whatever name it was found by.
    pub(crate) identity: (u64, u64),
}

impl Found {
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        let held = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let status = rustix::fs::fstat(&held)?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self {
            held,
            identity: (status.st_dev, status.st_ino),
        })
    }

    /// Opens the very file that is held, for reading only.
    pub(crate) fn open_to_read(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.held.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Ok(rustix::fs::open(path, flags, Mode::empty())?)
    }
}

/// The event that a poller watches a descriptor for. A broken connection is always reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interest {
    /// Bytes to read, a connection to accept, or the end.
    Read,
    /// Room to write.
    Write,
    /// Only that the peer went away.
    Hangup,
}

impl Interest {
    fn flags(self) -> EventFlags {
        match self {
            Self::Read => EventFlags::IN,
            Self::Write => EventFlags::OUT,
            Self::Hangup => EventFlags::RDHUP,
        }
    }
}

/// Watches many descriptors at once, level-triggered; can be woken from another thread.
pub(crate) struct Poller {
    epoll: OwnedFd,
    waker: OwnedFd,
}

/// The key under which a poller's own waker is reported; no descriptor may use it.
pub(crate) const WAKER_KEY: u64 = u64::MAX;

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let waker = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(
            &epoll,
            &waker,
            EventData::new_u64(WAKER_KEY),
            EventFlags::IN,
        )?;
        Ok(Self { epoll, waker })
    }

    /// Makes the wait under way, or the next one, return. Stays set: a woken poller is about to stop.
    pub(crate) fn wake(&self) {
        // Fails only when the counter is full, and then the poller is awake.
        let _ = rustix::io::write(&self.waker, &1_u64.to_ne_bytes());
    }

    pub(crate) fn add(&self, source: impl AsFd, key: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(
            &self.epoll,
            source,
            EventData::new_u64(key),
            interest.flags(),
        )?)
    }

    pub(crate) fn modify(&self, source: impl AsFd, key: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(
            &self.epoll,
            source,
            EventData::new_u64(key),
            interest.flags(),
        )?)
    }

    pub(crate) fn remove(&self, source: impl AsFd) {
        // Fails only for a descriptor that is not watched, which is what is asked for.
        let _ = epoll::delete(&self.epoll, source);
    }

    /// Waits for at most `timeout` and puts the keys of the ready descriptors into `ready`, at most 256 at a time.
    pub(crate) fn wait(&self, ready: &mut Vec<u64>, timeout: Option<Duration>) -> io::Result<()> {
        ready.clear();
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut events = Vec::with_capacity(256);
        match epoll::wait(
            &self.epoll,
            rustix::buffer::spare_capacity(&mut events),
            timeout.as_ref(),
        ) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        ready.extend(events.iter().map(|event: &epoll::Event| event.data.u64()));
        Ok(())
    }
}

/// A non-blocking listener with room for `backlog` connections that are not accepted yet (the standard library has 128,
/// less than a world that starts at one moment). On the unspecified IPv6 address it serves IPv4 as well, whatever the
/// machine's default.
pub(crate) fn listen(addr: SocketAddr, backlog: usize) -> io::Result<TcpListener> {
    let family = if addr.is_ipv6() {
        AddressFamily::INET6
    } else {
        AddressFamily::INET
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    // Connections of a server that just ended linger for a minute and must not keep the next one away.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if addr.is_ipv6() && addr.ip().is_unspecified() {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    rustix::net::bind(&socket, &addr)?;
    rustix::net::listen(&socket, i32::try_from(backlog).unwrap_or(i32::MAX))?;
    Ok(socket.into())
}

/// Has the kernel notice within about a minute that a silent peer's machine is gone. Before that it sends a lost request or answer again at equal
/// intervals: if these doubled, a store would be heard of up to twice as late as an outage lasts, and a lease might be over.
pub(crate) fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_tcp_thin_linear_timeouts(stream, true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(30))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
    Ok(sockopt::set_tcp_keepcnt(stream, 3)?)
}

/// How many descriptors this process may have open.
pub(crate) fn descriptors_max() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(usize::MAX, |limit| {
        usize::try_from(limit).unwrap_or(usize::MAX)
    })
}

/// Reads what has arrived, without waiting: `WouldBlock` when that is nothing.
pub(crate) fn receive_now(stream: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    Ok(rustix::net::recv(stream, buffer, rustix::net::RecvFlags::DONTWAIT)?.0)
}
