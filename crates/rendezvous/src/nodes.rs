//! How many nodes a job may have, and their numbers.

/// Most nodes of a job.
pub const NODES_MAX: usize = 1024;

/// Invalid numbers of nodes.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodesError {
    /// The numbers of nodes are not a range.
    #[error("{min} to {max} nodes, expected 1 to {NODES_MAX} and the smaller number first")]
    Range {
        /// Fewest.
        min: usize,
        /// Most.
        max: usize,
    },
    /// The node rank does not exist.
    #[error("node rank {got} of {nodes} nodes, expected a number below {nodes}")]
    Rank {
        /// The number that was asked for.
        got: usize,
        /// Number of nodes.
        nodes: usize,
    },
}

impl NodesError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Range { .. } => None,
            Self::Rank { .. } => Some("node ranks count from 0".to_owned()),
        }
    }
}

crate::debug_with_hint!(NodesError);

/// Checks that a job may have `min` to `max` nodes, and a node with this number where nodes are numbered.
///
/// *Errors*: the first check that fails.
pub fn check(min: usize, max: usize, node_rank: Option<usize>) -> Result<(), NodesError> {
    if min == 0 || min > max || max > NODES_MAX {
        return Err(NodesError::Range { min, max });
    }
    match node_rank {
        Some(got) if got >= max => Err(NodesError::Rank { got, nodes: max }),
        _ => Ok(()),
    }
}

/// Fewest and most nodes as torchrun writes them: `N` or `MIN:MAX`.
///
/// *Errors*: what is expected.
///
/// ```
/// use paceline_rendezvous::nodes;
///
/// assert_eq!(nodes::parse("2:4"), Ok((2, 4)));
/// assert!(nodes::parse("4:2").is_err());
/// ```
pub fn parse(text: &str) -> Result<(usize, usize), String> {
    let (min, max) = text.split_once(':').unwrap_or((text, text));
    match (min.parse(), max.parse()) {
        (Ok(min), Ok(max)) if check(min, max, None).is_ok() => Ok((min, max)),
        (Ok(min), Ok(max)) if check(max, min, None).is_ok() => Err(format!(
            "MIN is {min} and MAX is {max}; expected MIN:MAX with the smaller number first, {max}:{min}"
        )),
        _ => Err(format!(
            "expected N or MIN:MAX, whole numbers from 1 to {NODES_MAX}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_is_upside_down_is_told_the_right_way() {
        let expect = "MIN is 4 and MAX is 2; expected MIN:MAX with the smaller number first, 2:4";
        assert_eq!(parse("4:2"), Err(expect.to_owned()));
        for text in ["0:2", "2:x", "2:5000", ""] {
            let why = parse(text).expect_err(text);
            assert!(why.starts_with("expected N or MIN:MAX"), "{why}");
        }
    }

    #[test]
    fn ranges_and_numbers_that_no_job_has_are_refused() {
        let check = |min, max, rank, expect: Option<&str>| {
            let error = check(min, max, rank).err().map(|error| error.to_string());
            assert_eq!(error.as_deref(), expect, "{min}:{max} {rank:?}");
        };
        check(1, 1, None, None);
        check(2, 1024, Some(1023), None);
        let expect = "0 to 1 nodes, expected 1 to 1024 and the smaller number first";
        check(0, 1, None, Some(expect));
        let expect = "2 to 1025 nodes, expected 1 to 1024 and the smaller number first";
        check(2, 1025, None, Some(expect));
        let expect = "node rank 2 of 2 nodes, expected a number below 2";
        check(1, 2, Some(2), Some(expect));
    }
}
