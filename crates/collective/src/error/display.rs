//! Numbers as words in messages.

use std::fmt;
use std::time::Duration;

use super::Operation;

/// Ranks in a message: "rank 3" or "ranks 0, 1, 4".
#[derive(Debug, Clone, Copy)]
pub struct Ranks<'a>(pub &'a [usize]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.len() == 1 { "rank " } else { "ranks " })?;
        for (i, rank) in self.0.iter().enumerate() {
            write!(f, "{}{rank}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// A duration in a message: "14 s" or "1.5 s".
#[derive(Debug, Clone, Copy)]
pub struct Seconds(pub Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs_f64();
        if seconds < 9.95 {
            write!(f, "{seconds:.1} s")
        } else {
            write!(f, "{seconds:.0} s")
        }
    }
}

/// Nothing, or the operation that an error fell into.
pub(super) struct During<'a>(pub(super) &'a Option<Operation>);

impl fmt::Display for During<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |operation| {
            write!(f, " while this rank was in {operation}")
        })
    }
}
