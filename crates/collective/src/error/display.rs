//! Numbers as words in messages.

use std::fmt;
use std::time::Duration;

use super::Operation;

/// Most runs of ranks in a message.
const RUNS_MAX: usize = 16;

/// Ranks in a message: "rank 3" or "ranks 0, 2, 4 to 7", and of very many that are scattered the first ones.
#[derive(Debug, Clone, Copy)]
pub struct Ranks<'a>(pub &'a [usize]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.len() == 1 { "rank " } else { "ranks " })?;
        let mut named = 0;
        for (i, run) in self.0.chunk_by(|a, b| a + 1 == *b).enumerate() {
            if i == RUNS_MAX {
                return write!(f, " and {} more", self.0.len() - named);
            }
            f.write_str(if i == 0 { "" } else { ", " })?;
            match run {
                [first, _, _, .., last] => write!(f, "{first} to {last}")?,
                [first, rest @ ..] => {
                    write!(f, "{first}")?;
                    rest.iter().try_for_each(|rank| write!(f, ", {rank}"))?;
                }
                [] => {}
            }
            named += run.len();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_in_a_row_are_a_range_and_scattered_ones_are_cut() {
        let check = |ranks: &[usize], expect: &str| {
            assert_eq!(Ranks(ranks).to_string(), expect);
        };
        check(&[3], "rank 3");
        check(&[0, 1], "ranks 0, 1");
        check(&[0, 1, 2, 5], "ranks 0, 1, 2, 5");
        check(&[0, 2, 4, 5, 6, 7], "ranks 0, 2, 4 to 7");
        let all: Vec<usize> = (0..512).filter(|rank| *rank != 7).collect();
        check(&all, "ranks 0 to 6, 8 to 511");
        let odd: Vec<usize> = (0..1000).map(|i| 2 * i + 1).collect();
        assert!(Ranks(&odd).to_string().ends_with(", 29, 31 and 984 more"));
    }
}
