//! What a user says about algorithms, in place of the table.

use std::fmt;
use std::str::FromStr;

use super::{Algorithm, Kind, PlanError};

/// Algorithms that a user asks for, for all operations or for some.
///
/// Written as `ALGORITHM`, as `OPERATION:ALGORITHM`, or as several of these with commas between; what is said of one
/// operation wins over what is said of all. Nothing, or `auto`, leaves all to the table.
///
/// *Errors*: [`PlanError`], which quotes the word that is not known and lists those that are.
///
/// # Example
///
/// ```
/// use paceline_collective::Override;
///
/// let wanted: Override = "allreduce:ring,broadcast:tree".parse().unwrap();
/// assert_eq!(wanted.to_string(), "all-reduce:ring,broadcast:tree");
/// let error = "allreduce:butterfly".parse::<Override>().unwrap_err();
/// assert!(error.to_string().starts_with("no algorithm is called \"butterfly\""));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Override {
    all: Option<Algorithm>,
    /// In the order of [`Kind::ALL`].
    some: [Option<Algorithm>; Kind::ALL.len()],
}

impl Override {
    /// One algorithm for all operations that have it.
    pub fn all(algorithm: Algorithm) -> Self {
        Self {
            all: Some(algorithm),
            ..Self::default()
        }
    }

    /// See [`Override`] for what may be written.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let mut wanted = Self::default();
        if matches!(text.trim(), "" | "auto") {
            return Ok(wanted);
        }
        for word in text.split(',').map(str::trim) {
            let (place, algorithm) = match word.split_once(':') {
                None => (&mut wanted.all, word),
                Some((operation, algorithm)) => {
                    let operation = operation.trim();
                    let kind = Kind::from_name(operation).ok_or_else(|| PlanError::Operation {
                        word: operation.into(),
                    })?;
                    (&mut wanted.some[kind as usize], algorithm.trim())
                }
            };
            let algorithm = algorithm.parse()?;
            if place.replace(algorithm).is_some() {
                return Err(PlanError::Twice { word: word.into() });
            }
        }
        Ok(wanted)
    }

    /// What is wanted for an operation, and whether it was named.
    pub(crate) fn of(&self, kind: Kind) -> Option<Wanted> {
        let named = self.some[kind as usize];
        let algorithm = named.or(self.all)?;
        Some(Wanted {
            algorithm,
            named: named.is_some(),
        })
    }
}

/// An algorithm that the user asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) algorithm: Algorithm,
    /// For this very operation, not for all of them.
    pub(crate) named: bool,
}

impl FromStr for Override {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        Self::parse(text)
    }
}

impl fmt::Display for Override {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.all.map(|algorithm| algorithm.to_string());
        let some = Kind::ALL.into_iter().filter_map(|kind| {
            let algorithm = self.some[kind as usize]?;
            Some(format!("{}:{algorithm}", kind.name()))
        });
        let words: Vec<String> = all.into_iter().chain(some).collect();
        if words.is_empty() {
            return f.write_str("auto");
        }
        f.write_str(&words.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn algorithm(text: &str, kind: Kind) -> Option<Algorithm> {
        let wanted = Override::parse(text).unwrap();
        wanted.of(kind).map(|wanted| wanted.algorithm)
    }

    #[test]
    fn words_are_for_one_operation_or_for_all() {
        use Algorithm::{Direct, OneShot, Ring, Tree};
        for (text, kind, expected) in [
            ("", Kind::AllReduce, None),
            ("auto", Kind::Broadcast, None),
            ("ring", Kind::AllReduce, Some(Ring)),
            ("ring", Kind::AllToAll, Some(Ring)),
            ("allreduce:ring,broadcast:tree", Kind::AllReduce, Some(Ring)),
            ("allreduce:ring,broadcast:tree", Kind::Broadcast, Some(Tree)),
            ("allreduce:ring,broadcast:tree", Kind::AllGather, None),
            ("direct, reduce : one-shot", Kind::Reduce, Some(OneShot)),
            ("direct, reduce : one-shot", Kind::AllGather, Some(Direct)),
            ("reduce-scatter:ring", Kind::ReduceScatter, Some(Ring)),
        ] {
            assert_eq!(algorithm(text, kind), expected, "{text:?} for {kind:?}");
        }
    }

    #[test]
    fn errors_quote_the_bad_word() {
        let word = |text: &str| Override::parse(text).unwrap_err();
        let algorithm = |word: &str| PlanError::Algorithm { word: word.into() };
        let operation = |word: &str| PlanError::Operation { word: word.into() };
        assert_eq!(word("rings"), algorithm("rings"));
        assert_eq!(word("allreduce:ring,"), algorithm(""));
        assert_eq!(word("allreduce:"), algorithm(""));
        assert_eq!(word("all:ring"), operation("all"));
        assert_eq!(
            word("ring,direct"),
            PlanError::Twice {
                word: "direct".into()
            }
        );
    }

    #[test]
    fn known_names_are_all_listed() {
        let text = PlanError::Operation { word: "".into() }.to_string();
        for kind in Kind::ALL {
            assert!(text.contains(&kind.name().replace('-', "")), "{text}");
        }
        let text = PlanError::Algorithm { word: "".into() }.to_string();
        for algorithm in Algorithm::ALL {
            assert!(text.contains(algorithm.name()), "{text}");
        }
    }

    #[test]
    fn what_is_printed_is_parsed_back() {
        for text in ["", "tree", "ring,gather:direct,all-reduce:tree"] {
            let wanted = Override::parse(text).unwrap();
            assert_eq!(Override::parse(&wanted.to_string()), Ok(wanted));
        }
    }
}
