//! A rank's life: a word of its slot that the kernel changes first of all when the process ends.
//!
//! The kernel takes a process apart in this order: robust futexes, memory, descriptors. Only then its peers see the end of their
//! connections, and its parent its end: after 1 ms if it has 10 MB, after 30 ms if it has 400 MB. So a thread of the rank holds the
//! word as a robust futex, and within microseconds the kernel says that this thread has ended. Whether others still run is for the
//! launcher to [find out](crate::process::status_without_memory).
//!
//! ```text
//! 0  --hold-->  thread id, waiters  --kernel-->  waiters, owner died  --first reader-->  owner died
//! ```

use std::ptr;
use std::sync::Once;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;

use rustix::thread::futex::{OWNER_DIED, WAITERS};

use super::{JobPage, Slot};

/// The kernel's list of a thread's robust futexes, with one of them.
#[repr(C)]
struct Robust {
    first: *const Link,
    /// From a link to its futex.
    offset: isize,
    pending: *const Link,
    life: Link,
}

/// Its address stands for it; the last one points back to the list.
#[repr(C)]
struct Link(*const Link);

/// Bytes of `Robust` that are the list's head.
const HEAD_BYTES: usize = std::mem::offset_of!(Robust, life);

impl Slot {
    /// Has the launcher learn at once when this process ends. The first call counts. It starts a thread that ends with the process;
    /// without one, and on kernels without robust futexes, the launcher learns of the end when the system has freed the memory.
    pub fn hold_life(&self) {
        static HELD: Once = Once::new();
        HELD.call_once(|| {
            let slot = self.clone();
            let thread = thread::Builder::new().name("life".into());
            let _ = thread.spawn(move || {
                slot.hold();
                loop {
                    thread::park();
                }
            });
        });
    }

    /// Whether the process that [holds](Self::hold_life) this slot's life has ended, or is about to.
    pub fn has_let_go(&self) -> bool {
        self.raw().life.load(SeqCst) & OWNER_DIED != 0
    }

    /// Holds it until this thread ends.
    fn hold(&self) {
        let word = &self.raw().life;
        // The kernel reads it when the thread ends, in whatever frame that is.
        let robust = Box::leak(Box::new(Robust {
            first: ptr::null(),
            offset: 0,
            pending: ptr::null(),
            life: Link(ptr::null()),
        }));
        let link = &raw const robust.life;
        robust.first = link;
        robust.offset = word.as_ptr().addr().wrapping_sub(link.addr()).cast_signed();
        robust.life.0 = (&raw const robust.first).cast();
        // SAFETY: the list is well formed, lives for ever and belongs to this thread, which has no other robust futex. The futex is a word
        // of the page, which `self` keeps mapped until the thread ends.
        if unsafe { libc::syscall(libc::SYS_set_robust_list, &raw const *robust, HEAD_BYTES) } == 0
        {
            let thread = rustix::thread::gettid().as_raw_pid().cast_unsigned();
            word.store(thread | WAITERS, SeqCst);
            self.page.changed();
        }
    }
}

impl JobPage {
    /// The words whose change says that a rank has ended, with what they are now. Makes a [change](Self::wait_changed) of each end.
    pub(super) fn lives(&self) -> impl Iterator<Item = (&AtomicU32, u32)> {
        (0..self.slots()).filter_map(|slot| {
            let word = &self.0.slot(slot).life;
            let now = word.load(SeqCst);
            if now & OWNER_DIED == 0 {
                return (now != 0).then_some((word, now));
            }
            let is_new = now & WAITERS != 0;
            let noted = word.compare_exchange(now, OWNER_DIED, SeqCst, SeqCst);
            if is_new && noted.is_ok() {
                self.changed();
            }
            None
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn the_end_of_a_thread_that_holds_a_life_is_a_change() {
        let page = JobPage::create_memfd(3).unwrap();
        let slot = page.slot(1);
        let (held, end) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        thread::scope(|scope| {
            scope.spawn(|| {
                slot.hold();
                held.wait();
                end.wait();
            });
            held.wait();
            let seen = page.wait_changed(0, SOON);
            assert!(!slot.has_let_go());
            let (page, slot) = (&page, &slot);
            let waiter = scope.spawn(move || {
                let began = Instant::now();
                while !slot.has_let_go() && began.elapsed() < SOON {
                    page.wait_changed(seen, SOON);
                }
                page.wait_changed(seen, SOON) - seen
            });
            end.wait();
            assert_eq!(waiter.join().unwrap(), 1, "one end is one change");
        });
        assert!(slot.has_let_go() && !page.slot(0).has_let_go());
        page.clear_slot(1);
        assert!(!slot.has_let_go());
    }
}
