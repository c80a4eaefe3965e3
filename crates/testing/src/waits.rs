//! Waits that end, so that a test fails instead of hanging; and the seconds that a text says somebody has waited.

use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// No wait takes as long, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
/// Pause between two looks.
const LOOK: Duration = Duration::from_millis(1);

/// A barrier, as [`std::sync::Barrier`], that fails if a thread does not come, for example because it has panicked.
///
/// Ranks that are threads meet here before one of them fails: a barrier of their group ends on one rank while another is still
/// in it.
pub struct Meeting {
    size: usize,
    met: Mutex<Met>,
    changed: Condvar,
}

struct Met {
    /// Threads that wait.
    come: usize,
    /// Meetings that are over.
    over: u64,
}

impl Meeting {
    /// Of so many threads.
    pub fn new(size: usize) -> Self {
        Self {
            size,
            met: Mutex::new(Met { come: 0, over: 0 }),
            changed: Condvar::new(),
        }
    }

    /// Waits until all threads have called this. The next call begins another meeting.
    ///
    /// *Panics*: if they have not after a minute.
    #[track_caller]
    pub fn wait(&self) {
        let mut met = self.met.lock().expect("no holder panics");
        met.come += 1;
        if met.come == self.size {
            met.come = 0;
            met.over += 1;
            self.changed.notify_all();
            return;
        }
        let over = met.over;
        let waited = self
            .changed
            .wait_timeout_while(met, LIMIT, |met| met.over == over);
        let (met, waited) = waited.expect("no holder panics");
        let come = met.come;
        drop(met);
        assert!(
            !waited.timed_out(),
            "{come} of {} threads came to a meeting in {LIMIT:?}",
            self.size
        );
    }
}

/// Waits until `is_so`.
///
/// *Panics*: if that takes more than a minute.
#[track_caller]
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        std::thread::sleep(LOOK);
    }
}

/// The seconds that `text` tells behind `words`, such as 1.5 in "it timed out after 1.5 s".
///
/// *Panics*: if it tells none there.
#[track_caller]
pub fn seconds_after(text: &str, words: &str) -> f64 {
    let told = text.split_once(words);
    let number = told.and_then(|(_, behind)| behind.split_once(" s"));
    let seconds = number.and_then(|(number, _)| number.parse::<f64>().ok());
    let Some(seconds) = seconds else {
        panic!("no seconds behind {words:?}: {text}");
    };
    seconds
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn nobody_leaves_a_meeting_before_all_have_come() {
        let (meeting, come) = (Meeting::new(3), AtomicUsize::new(0));
        crate::on_threads(0..3, |_| {
            for round in 1..=100 {
                come.fetch_add(1, Ordering::SeqCst);
                meeting.wait();
                assert_eq!(come.load(Ordering::SeqCst), 3 * round);
                meeting.wait();
            }
        });
    }

    #[test]
    fn seconds_are_read_behind_the_words() {
        let text = "rank 0 waited 0.3 s; all-reduce #1 timed out after 12 s on rank 0";
        assert_eq!(seconds_after(text, "timed out after "), 12.0);
        assert_eq!(seconds_after(text, "waited "), 0.3);
    }
}
