//! How much memory a group uses at the moment: numbers that every part keeps up to date for reports.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What an engine keeps between calls, readable while it executes.
///
/// *Units*: bytes.
#[derive(Debug, Default)]
pub(crate) struct Gauges {
    /// Copies of callers' memory that peers see.
    pub(crate) staging: AtomicUsize,
    /// Intermediate results.
    pub(crate) temp: AtomicUsize,
    /// What connections have read ahead, and pieces in flight.
    pub(crate) streams: AtomicUsize,
}

impl Gauges {
    pub(crate) fn set(&self, staging: usize, temp: usize, streams: usize) {
        // Relaxed: numbers for people, each by itself.
        self.staging.store(staging, Ordering::Relaxed);
        self.temp.store(temp, Ordering::Relaxed);
        self.streams.store(streams, Ordering::Relaxed);
    }
}

/// Memory that the ranks of one host share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaReport {
    /// Dealt out to buffers, staging and messages. What a failed operation's peers may still write to stays here.
    ///
    /// *Units*: bytes.
    pub used: usize,
    /// The most that ever was.
    ///
    /// *Units*: bytes.
    pub peak: usize,
    /// Address space reserved, and with it the bound of the other two.
    ///
    /// *Units*: bytes.
    pub size: usize,
    /// What the system has mapped with huge pages.
    ///
    /// *Units*: bytes.
    pub huge: usize,
}

/// A part, and the most it can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// What there is. *Units*: bytes, at least 4096 for each message; operations for [`MemoryReport::queued`](crate::MemoryReport::queued).
    pub now: usize,
    /// Its bound, which one message alone may exceed. *Units*: the same.
    pub limit: usize,
}

/// Bytes that the system has mapped with huge pages of the shared memory in a range of addresses, according to the text of
/// `/proc/self/smaps`.
pub(crate) fn huge_bytes(smaps: &str, range: &Range<usize>) -> usize {
    let (mut inside, mut sum) = (false, 0_usize);
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some((start, end)) = first.split_once('-') {
            let address = |text| usize::from_str_radix(text, 16);
            if let (Ok(start), Ok(end)) = (address(start), address(end)) {
                inside = start >= range.start && end <= range.end;
            }
        } else if inside && first == "ShmemPmdMapped:" {
            let kib: usize = words.next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
            sum = sum.saturating_add(kib.saturating_mul(1024));
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_counted_in_the_mappings_of_the_range_alone() {
        let smaps = "\
7f0000000000-7f0000200000 rw-s 00000000 00:01 7 /memfd:paceline (deleted)
Rss:                2048 kB
ShmemPmdMapped:        0 kB
VmFlags: rd wr sh
7f0000200000-7f0000800000 rw-s 00200000 00:01 7 /memfd:paceline (deleted)
ShmemPmdMapped:     4096 kB
7f0000800000-7f0000a00000 rw-s 00000000 00:01 8 /memfd:paceline (deleted)
ShmemPmdMapped:     2048 kB
";
        let range = 0x7f00_0000_0000..0x7f00_0080_0000;
        assert_eq!(huge_bytes(smaps, &range), 4 << 20);
        assert_eq!(huge_bytes("nonsense\n-\nShmemPmdMapped: x kB", &range), 0);
    }
}
