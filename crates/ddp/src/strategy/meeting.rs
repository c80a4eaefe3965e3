//! Between epochs the ranks exchange their states and reach the same verdict.

use burn::train::Interrupter;
use paceline_collective::ProcessGroup;
use serde::{Deserialize, Serialize};

use crate::error::DdpError;

/// The state of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Word {
    /// It can go on.
    Ready,
    /// Rank 0 is still validating.
    Busy,
    /// Rank 0's early stopping ends the training.
    Finished,
    /// It was asked to stop, with this reason.
    Stopped(Option<String>),
    /// It has this error.
    Failed(String),
}

/// The next action of all ranks.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Exchange states again.
    Wait,
    /// Train another epoch, if there is one.
    Continue,
    /// End the training before its last epoch.
    Finish,
    /// A rank was asked to stop.
    Stop { rank: usize, reason: Option<String> },
    /// These ranks have these errors.
    Fail(Vec<(usize, String)>),
}

/// Exchanges `word`, or the reason that stopped this rank, with the other ranks.
///
/// *Blocks*: until all ranks have arrived, at most the group's timeout.
pub(super) fn meet(
    group: &ProcessGroup,
    interrupter: &Interrupter,
    word: Word,
) -> Result<Verdict, DdpError> {
    let word = match interrupter.error() {
        Some(error) => Word::Failed(error.to_string()),
        None if interrupter.should_stop() => Word::Stopped(interrupter.get_message()),
        None => word,
    };
    let encoded = serde_json::to_vec(&word).expect("strings always encode");
    let words = group.all_gather_bytes(&encoded)?;
    let decode = |bytes: &Vec<u8>| {
        serde_json::from_slice(bytes)
            .unwrap_or_else(|error| Word::Failed(format!("its state cannot be decoded: {error}")))
    };
    Ok(judge(&words.iter().map(decode).collect::<Vec<_>>()))
}

/// The verdict on the ranks' states, in rank order. Errors take precedence over stops, and stops over all else.
fn judge(words: &[Word]) -> Verdict {
    let failed = words
        .iter()
        .enumerate()
        .filter_map(|(rank, word)| match word {
            Word::Failed(error) => Some((rank, error.clone())),
            _ => None,
        });
    let failed: Vec<_> = failed.collect();
    if !failed.is_empty() {
        return Verdict::Fail(failed);
    }
    let stopped = words
        .iter()
        .enumerate()
        .find_map(|(rank, word)| match word {
            Word::Stopped(reason) => Some((rank, reason.clone())),
            _ => None,
        });
    if let Some((rank, reason)) = stopped {
        Verdict::Stop { rank, reason }
    } else if words.contains(&Word::Busy) {
        Verdict::Wait
    } else if words.contains(&Word::Finished) {
        Verdict::Finish
    } else {
        Verdict::Continue
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_take_precedence_over_stops_and_stops_over_all_else() {
        let stop = || Word::Stopped(Some("enough".into()));
        let fail = |text: &str| Word::Failed(text.into());
        let check = |words: &[Word], expect: Verdict| assert_eq!(judge(words), expect, "{words:?}");
        check(&[Word::Ready, Word::Ready], Verdict::Continue);
        check(&[Word::Busy, Word::Ready], Verdict::Wait);
        check(&[Word::Finished, Word::Ready], Verdict::Finish);
        let stopped = |rank| Verdict::Stop {
            rank,
            reason: Some("enough".into()),
        };
        check(&[Word::Busy, Word::Ready, stop()], stopped(2));
        check(&[Word::Finished, stop(), stop()], stopped(1));
        check(
            &[stop(), fail("no file"), Word::Ready, fail("no disk")],
            Verdict::Fail(vec![(1, "no file".into()), (3, "no disk".into())]),
        );
    }
}
