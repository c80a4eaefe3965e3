//! The bell: wakes the supervisor at once when a rank says on the job page that its group has failed, which no other event announces.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_rendezvous::page::JobPage;
use rustix::event::{EventfdFlags, eventfd};

/// Longest sleep of the thread, should a rank be killed between its word and the wake that goes with it.
const SLICE: Duration = Duration::from_secs(1);

/// Readable once something has changed on the page.
#[derive(Debug)]
pub(crate) struct Bell {
    clapper: Arc<OwnedFd>,
    page: JobPage,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Bell {
    /// *Errors*: no thread or descriptor is left. The supervisor then looks at the page from time to time.
    pub(crate) fn of(page: &JobPage) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let (clapper, stop) = (Arc::new(eventfd(0, flags)?), Arc::default());
        let thread = std::thread::Builder::new().name("launcher/bell".into());
        let thread = {
            let (clapper, stop, page) = (Arc::clone(&clapper), Arc::clone(&stop), page.clone());
            thread.spawn(move || ring(&page, &clapper, &stop))?
        };
        Ok(Self {
            clapper,
            page: page.clone(),
            stop,
            thread: Some(thread),
        })
    }

    /// Until the next change.
    pub(crate) fn silence(&self) {
        let _ = rustix::io::read(&*self.clapper, &mut [0; 8]);
    }
}

fn ring(page: &JobPage, clapper: &OwnedFd, stop: &AtomicBool) {
    let mut heard = 0;
    while !stop.load(Ordering::Acquire) {
        let changes = page.wait_changed(heard, SLICE);
        if changes != heard {
            heard = changes;
            // Fails only when the counter is full, and then it is readable.
            let _ = rustix::io::write(clapper, &1_u64.to_ne_bytes());
        }
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.clapper.as_fd()
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.page.changed();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::worker::wait_readable;

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn it_rings_when_a_rank_waits_for_the_next_generation() {
        let page = JobPage::create_memfd(2).expect("a page");
        let bell = Bell::of(&page).expect("a bell");
        for failed in 0..3 {
            bell.silence();
            page.slot(1).set_awaits(Some(failed));
            let began = Instant::now();
            wait_readable(&[bell.as_fd()], SOON);
            assert!(began.elapsed() < SOON, "it has not rung");
        }
    }
}
