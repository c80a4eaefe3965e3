//! Which rank holds up an operation whose deadline is over: the missing ranks are asked what they are doing.

use std::time::Duration;

use super::board::activity;
use super::{ELSEWHERE, Status};
use crate::error::Ranks;
use crate::message::{Answer, Message};

/// How long a rank waits for a peer's answer at least and at most. A lost packet is sent again after 200 ms and a round trip.
const ANSWER_TIMEOUT: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(5)];
/// In between it is this part of the deadline: who lets operations take long has a network on which answers do, too.
const ANSWER_PART: u32 = 30;
/// Ranks asked beside those that are waited for: if none answers either, this rank is cut off.
const WITNESSES_MAX: usize = 8;
/// Ranks described one by one in a report; the others are only named.
const DESCRIBED_MAX: usize = 8;

/// The ranks that an operation waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Missing {
    pub(crate) ranks: Vec<usize>,
    /// They have said that they take part in this very operation: what they have sent can only be on its way.
    pub(crate) have_come: bool,
    /// Data of each has moved lately: however late their answers are, they are not gone.
    pub(crate) are_heard: bool,
}

impl Missing {
    pub(crate) fn not_come(ranks: Vec<usize>) -> Self {
        Self {
            ranks,
            have_come: false,
            are_heard: false,
        }
    }
}

/// How long a peer's answer may take where operations have this deadline.
pub(crate) fn answer_timeout(deadline: Duration) -> Duration {
    (deadline / ANSWER_PART).clamp(ANSWER_TIMEOUT[0], ANSWER_TIMEOUT[1])
}

impl Status {
    /// Which of the ranks that an operation waits for hold it up, what they are doing, in words, and whether that is
    /// certain: a rank of three or more that hears of nobody is more likely cut off than the last one alive. None do if all ranks
    /// have come and answer, or still send: then it is the network. In sends and receives, `is_alone`, nobody else waits.
    ///
    /// See [`culprits`] for which ranks are, and [`is_certain`].
    pub(super) fn find_culprits(
        &self,
        Missing {
            ranks,
            have_come,
            are_heard,
        }: &Missing,
        seq: u64,
        is_alone: bool,
        limit: Duration,
    ) -> (Vec<usize>, String, bool) {
        if *are_heard {
            return (Vec::new(), String::new(), false);
        }
        let mut answers = self.ask(ranks, limit);
        let seq_of = |answers: &[Option<Answer>], rank: usize| {
            answers[rank].as_ref().map(|answer| answer.seq)
        };
        let mut culprits = culprits(ranks, seq, |rank| seq_of(&answers, rank));
        // All of them wait in this very operation, so for somebody else: in a later round, or on another host. Or they are done with
        // it: the operations of all ranks have the same numbers.
        let is_in = |answers: &[Option<Answer>], rank: usize| {
            let theirs = seq_of(answers, rank).flatten();
            theirs.is_some_and(|at| at == seq || !is_alone && (seq..ELSEWHERE).contains(&at))
        };
        let has_come = |rank: &usize| match have_come {
            true => answers[*rank].is_some(),
            false => is_in(&answers, *rank),
        };
        if culprits.iter().all(has_come) {
            let asked = |rank: &usize| {
                *rank != self.rank && !ranks.contains(rank) && self.left_after(*rank).is_none()
            };
            let others: Vec<usize> = (0..self.world()).filter(asked).collect();
            let further = self.ask(&others, limit);
            let all_have_come =
                *have_come || !is_alone && others.iter().all(|rank| is_in(&further, *rank));
            let is_silent = |rank: &usize| further[*rank].is_none();
            let silent: Vec<usize> = others.into_iter().filter(is_silent).collect();
            if !silent.is_empty() {
                (answers, culprits) = (further, silent);
            } else if all_have_come {
                return (Vec::new(), String::new(), false);
            }
        }
        let is_cut_off = self.world() > 2 && answers.iter().all(Option::is_none);
        let certain = !is_cut_off && is_certain(&culprits, |rank| seq_of(&answers, rank));
        let described = &culprits[..culprits.len().min(DESCRIBED_MAX)];
        let mut sentences: Vec<String> = described
            .iter()
            .map(|rank| {
                format!(
                    "rank {rank} ({}) {}",
                    self.place(*rank),
                    self.describe(*rank, &answers[*rank])
                )
            })
            .collect();
        if culprits.len() > DESCRIBED_MAX {
            sentences.push(format!(
                "{} have not come either",
                Ranks(&culprits[DESCRIBED_MAX..])
            ));
        }
        (culprits, sentences.join("; "), certain)
    }

    /// Waits until something is latched, at most for `limit`.
    pub(super) fn wait_for_word(&self, limit: Duration) {
        let mut latch = self.latch.lock();
        self.changed
            .wait_while_for(&mut latch, |latch| latch.is_none(), limit);
    }

    /// What a rank says it is doing, or what the page says of a rank that is stopped or gone.
    fn describe(&self, rank: usize, answer: &Option<Answer>) -> String {
        let slot = self.peers[rank]
            .slot
            .filter(|slot| *slot < self.page.slots());
        match (answer, slot) {
            (Some(answer), _) => answer.text.clone(),
            (None, Some(slot)) => {
                format!("{}, and does not answer", activity(&self.page.slot(slot)))
            }
            (None, None) => "has not come and does not answer".into(),
        }
    }

    /// Asks a rank what it is doing. *Blocks*: no.
    pub(super) fn ask_one(&self, rank: usize) {
        self.answers.lock()[rank] = None;
        if let Some(courier) = self.courier.get() {
            courier.send(rank, &Message::Ask);
        }
    }

    /// Whether a rank that was asked has answered.
    pub(super) fn has_answered(&self, rank: usize) -> bool {
        self.answers.lock()[rank].is_some()
    }

    /// Asks ranks what they are doing, and some others whether they hear this one. *Blocks* until all of `ranks` have
    /// answered, at most for `limit`.
    fn ask(&self, ranks: &[usize], limit: Duration) -> Vec<Option<Answer>> {
        self.answers.lock().fill(None);
        // Threads as ranks answer within `send`, which takes the lock.
        if let Some(courier) = self.courier.get() {
            let others =
                (0..self.world()).filter(|rank| *rank != self.rank && !ranks.contains(rank));
            let all = ranks.iter().copied().chain(others.take(WITNESSES_MAX));
            all.for_each(|rank| courier.send(rank, &Message::Ask));
        }
        let mut answers = self.answers.lock();
        let waiting =
            |answers: &mut Vec<Option<Answer>>| ranks.iter().any(|rank| answers[*rank].is_none());
        self.answered.wait_while_for(&mut answers, waiting, limit);
        answers.clone()
    }
}

/// Which of the `missing` ranks to blame for operation `seq`; `answer` is what a rank said, if it did: the operation that
/// it is in, if it is in one.
///
/// A rank that does not answer, or that is in no operation, keeps the others waiting. One that is in an operation waits
/// itself, maybe for one of those: it is to blame only if all the missing ones wait, and in an earlier operation before one in
/// the same.
pub(super) fn culprits(
    missing: &[usize],
    seq: u64,
    answer: impl Fn(usize) -> Option<Option<u64>>,
) -> Vec<usize> {
    let those = |wanted: &dyn Fn(Option<Option<u64>>) -> bool| -> Vec<usize> {
        let ranks = missing.iter().copied();
        ranks.filter(|rank| wanted(answer(*rank))).collect()
    };
    let away = those(&|answer| answer.flatten().is_none());
    let behind = those(&|answer| answer.flatten() != Some(seq));
    [away, behind, missing.to_vec()]
        .into_iter()
        .find(|ranks| !ranks.is_empty())
        .unwrap_or_default()
}

/// Whether a rank that hears others should say at once whom it blames, or leave the first word to them: culprits that
/// wait themselves know better for whom.
pub(super) fn is_certain(
    culprits: &[usize],
    answer: impl Fn(usize) -> Option<Option<u64>>,
) -> bool {
    let mut culprits = culprits.iter();
    culprits.any(|rank| answer(*rank).flatten().is_none())
}
