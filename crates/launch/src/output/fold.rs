//! Folds equal lines of several ranks into one, within a window of time; pure, without a clock and without I/O.
//!
//! Lines wait in the order in which they came. A line of another rank with the same text joins one that waits, unless
//! that would put it before a line that this rank printed earlier on the same stream: a rank's own order never
//! changes. The front leaves when all ranks have joined it or when its window is over.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::stream::Stream;

/// Longest wait of a line for its equals.
pub const FOLD_WINDOW: Duration = Duration::from_millis(50);
/// Most lines that wait.
const LINES_MAX: usize = 4096;
/// Most bytes that wait.
const BYTES_MAX: usize = 1024 * 1024;

/// A line and the ranks, by their places on this machine in ascending order, that printed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Folded {
    pub(crate) stream: Stream,
    pub(crate) text: Arc<[u8]>,
    pub(crate) ranks: Vec<usize>,
    /// When the first of them printed it.
    pub(crate) at: SystemTime,
}

/// The lines that wait.
#[derive(Debug)]
pub(crate) struct Fold {
    /// How many ranks may print a line: with all of them it waits no longer.
    ranks: usize,
    waiting: VecDeque<Waiting>,
    /// The number of the line at the front.
    front: u64,
    bytes: usize,
    /// The lines that wait for a stream and text, by number.
    by_text: HashMap<(Stream, Arc<[u8]>), VecDeque<u64>>,
    /// The number behind the last line of each rank's streams.
    cursors: HashMap<(usize, Stream), u64>,
}

#[derive(Debug)]
struct Waiting {
    line: Folded,
    until: Duration,
}

impl Fold {
    /// For lines of that many ranks.
    pub(crate) fn new(ranks: usize) -> Self {
        Self {
            ranks,
            waiting: VecDeque::new(),
            front: 0,
            bytes: 0,
            by_text: HashMap::new(),
            cursors: HashMap::new(),
        }
    }

    /// Takes a line that came `now`, a time since any fixed moment.
    pub(crate) fn push(
        &mut self,
        now: Duration,
        at: SystemTime,
        rank: usize,
        stream: Stream,
        text: &[u8],
    ) {
        let text: Arc<[u8]> = text.into();
        let cursor = self.cursors.entry((rank, stream)).or_default();
        let numbers = self.by_text.entry((stream, Arc::clone(&text))).or_default();
        let later = numbers.partition_point(|number| number < cursor);
        if let Some(&number) = numbers.get(later) {
            *cursor = number + 1;
            let place = usize::try_from(number - self.front).unwrap_or(usize::MAX);
            if let Some(waiting) = self.waiting.get_mut(place) {
                let ranks = &mut waiting.line.ranks;
                ranks.insert(ranks.partition_point(|other| *other < rank), rank);
            }
            return;
        }
        let number = self.front + self.waiting.len() as u64;
        numbers.push_back(number);
        *cursor = number + 1;
        self.bytes += text.len();
        self.waiting.push_back(Waiting {
            line: Folded {
                stream,
                text,
                ranks: vec![rank],
                at,
            },
            until: now + FOLD_WINDOW,
        });
    }

    /// The next line that has waited long enough.
    pub(crate) fn pop(&mut self, now: Duration) -> Option<Folded> {
        let front = self.waiting.front()?;
        let is_full = self.waiting.len() > LINES_MAX || self.bytes > BYTES_MAX;
        if is_full || front.until <= now || front.line.ranks.len() >= self.ranks {
            self.pop_any()
        } else {
            None
        }
    }

    /// The next line, however long it has waited.
    pub(crate) fn pop_any(&mut self) -> Option<Folded> {
        let Waiting { line, .. } = self.waiting.pop_front()?;
        self.front += 1;
        self.bytes -= line.text.len();
        let key = (line.stream, Arc::clone(&line.text));
        if let Some(numbers) = self.by_text.get_mut(&key) {
            numbers.pop_front();
            if numbers.is_empty() {
                self.by_text.remove(&key);
            }
        }
        Some(line)
    }

    /// When [`pop`](Self::pop) will have a line even if nothing more comes.
    pub(crate) fn due(&self) -> Option<Duration> {
        self.waiting.front().map(|front| front.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes `(ms, rank, text)` and pops as time goes by; `O` is standard output and `E` standard error. Expects
    /// `ms: ranks text`.
    fn check(ranks: usize, input: &[(u64, usize, &str)], expect: &[&str]) {
        let mut fold = Fold::new(ranks);
        let mut seen = Vec::new();
        let end = input.last().map_or(0, |(ms, ..)| ms + 200);
        let mut input = input.iter().peekable();
        for ms in 0..=end {
            let now = Duration::from_millis(ms);
            while let Some((_, rank, text)) = input.next_if(|(at, ..)| *at == ms) {
                let stream = if text.starts_with('E') {
                    Stream::Err
                } else {
                    Stream::Out
                };
                fold.push(
                    now,
                    SystemTime::UNIX_EPOCH + now,
                    *rank,
                    stream,
                    text.as_bytes(),
                );
            }
            while let Some(line) = fold.pop(now) {
                let text = String::from_utf8_lossy(&line.text).into_owned();
                seen.push(format!("{ms}: {:?} {text}", line.ranks));
            }
        }
        assert_eq!(seen, expect);
        assert!(fold.due().is_none() && fold.by_text.is_empty() && fold.bytes == 0);
    }

    #[test]
    fn a_line_of_all_ranks_leaves_at_once_and_as_one() {
        check(
            3,
            &[(0, 2, "Oa"), (1, 0, "Oa"), (4, 1, "Oa")],
            &["4: [0, 1, 2] Oa"],
        );
    }

    #[test]
    fn a_line_of_some_ranks_waits_for_its_window_and_no_longer() {
        check(3, &[(0, 0, "Oa"), (49, 1, "Oa")], &["50: [0, 1] Oa"]);
        check(
            3,
            &[(0, 0, "Oa"), (51, 1, "Oa")],
            &["50: [0] Oa", "101: [1] Oa"],
        );
    }

    #[test]
    fn errors_are_folded_apart_from_output() {
        check(2, &[(0, 0, "Ex"), (1, 1, "Ex")], &["1: [0, 1] Ex"]);
    }

    #[test]
    fn a_rank_that_says_the_same_twice_is_printed_twice() {
        check(
            2,
            &[(0, 0, "Oa"), (0, 0, "Oa"), (1, 1, "Oa"), (2, 1, "Oa")],
            &["1: [0, 1] Oa", "2: [0, 1] Oa"],
        );
    }

    #[test]
    fn the_order_of_a_rank_is_kept() {
        // Rank 1 says b before a: its a may not join the a that waits before its b.
        check(
            2,
            &[(0, 0, "Oa"), (0, 0, "Ob"), (1, 1, "Ob"), (2, 1, "Oa")],
            &["50: [0] Oa", "50: [0, 1] Ob", "52: [1] Oa"],
        );
    }

    #[test]
    fn a_line_that_differs_does_not_hold_up_the_others_beyond_its_window() {
        check(
            2,
            &[(0, 0, "Oown"), (1, 0, "Oa"), (1, 1, "Oa")],
            &["50: [0] Oown", "50: [0, 1] Oa"],
        );
    }

    #[test]
    fn what_waits_is_bounded() {
        let mut fold = Fold::new(2);
        let line = vec![b'x'; 64 * 1024];
        for number in 0..100_u64 {
            let mut line = line.clone();
            line.extend_from_slice(&number.to_le_bytes());
            fold.push(
                Duration::ZERO,
                SystemTime::UNIX_EPOCH,
                0,
                Stream::Out,
                &line,
            );
            while fold.pop(Duration::ZERO).is_some() {}
            assert!(fold.bytes <= BYTES_MAX);
        }
        assert!(!fold.waiting.is_empty());
        for _ in 0..3 * LINES_MAX {
            fold.push(Duration::ZERO, SystemTime::UNIX_EPOCH, 0, Stream::Out, b"x");
            while fold.pop(Duration::ZERO).is_some() {}
            assert!(fold.waiting.len() <= LINES_MAX);
        }
    }
}
