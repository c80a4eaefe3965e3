//! A rolling check that all replicas still hold the same weights.
//!
//! Every step hashes one window of the weights and compares it over all ranks, asynchronously; the
//! windows go round the whole model. A replica that has drifted is detected within `weights / window` steps at a cost that
//! does not grow with the model. A digest of the whole state, if the program has one, takes the place of one window.
//!
//! By the time of its detection, a wrong replica may have sent wrong gradients, from which all ranks have computed the same wrong
//! weights. So the weights of the majority are right only if the difference is younger than one step. What all ranks had in
//! common before it is right in any case.

use std::ops::Range;

use burn::module::{Module, ParamId};
use burn::tensor::Tensor;
use paceline_collective::{AllGather, ProcessGroup, Ticket};

use crate::buffer::{self, Entry};
use crate::error::DdpError;
use crate::record::digest;

/// Elements of one window: 64 KiB of f32, a few microseconds to hash.
const WINDOW_ELEMENTS: usize = 16 << 10;

/// Goes round the parameters window by window.
pub(crate) struct Fingerprint {
    parameters: Vec<Windows>,
    /// Windows of all parameters.
    windows: u64,
    every: u64,
    /// The digest of the whole state at the start of this step.
    state: Option<(u64, i64)>,
    /// The newest step at whose start the whole state was the same on all ranks.
    agreed: Option<u64>,
    chosen: Option<Chosen>,
    pending: Option<Pending>,
    /// A difference without a majority, to be looked at again if the ranks go back.
    undecided: Option<(Subject, Vec<i64>)>,
}

/// The windows of one parameter.
struct Windows {
    id: ParamId,
    path: String,
    len: usize,
    /// Number of the first one.
    first: u64,
}

/// What is compared, at the start of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Subject {
    step: u64,
    /// A part of a parameter, or else the whole state.
    window: Option<(String, Range<usize>)>,
}

/// What to compare next.
struct Chosen {
    subject: Subject,
    value: Value,
}

#[expect(clippy::large_enum_variant, reason = "one at a time")]
enum Value {
    Window(Tensor<1>),
    Digest(i64),
}

struct Pending {
    subject: Subject,
    ticket: Ticket<i64>,
    /// Whether it was sent in a group that has failed since.
    is_old: bool,
}

impl Fingerprint {
    /// Compares every `every` steps; 0 switches it off.
    pub(crate) fn new(parameters: &[&Entry], every: u64) -> Self {
        let mut windows = 0;
        let parameters = parameters.iter().filter(|entry| entry.len() > 0);
        let parameters = parameters.map(|entry| {
            let first = windows;
            windows += entry.len().div_ceil(WINDOW_ELEMENTS) as u64;
            Windows {
                id: entry.id,
                path: entry.path.clone(),
                len: entry.len(),
                first,
            }
        });
        Self {
            parameters: parameters.collect(),
            windows,
            every,
            state: None,
            agreed: None,
            chosen: None,
            pending: None,
            undecided: None,
        }
    }

    /// Has `step` compare the digest of the whole state at its start.
    pub(crate) fn compare_state(&mut self, step: u64, digest: u64) {
        self.state = Some((step, digest.cast_signed()));
    }

    /// The newest step at whose start the whole state was the same on all ranks.
    pub(crate) fn agreed(&self) -> Option<u64> {
        self.agreed
    }

    /// Chooses what `step` compares, if it compares anything: the digest of the state, or a window of `model`.
    ///
    /// The values are those of this moment but are read later: on a GPU, reading now would wait for all earlier work.
    pub(crate) fn choose<M: Module>(&mut self, group: &ProcessGroup, model: &M, step: u64) {
        self.chosen = None;
        // In the same group the other ranks have sent theirs too, and the weights of a repeated step are the same.
        self.pending = self.pending.take().filter(|sent| !sent.is_old);
        self.state = self.state.filter(|(of, _)| *of == step);
        if group.world() == 1 {
            self.agreed = self.state.take().map(|(of, _)| of).or(self.agreed);
            return;
        }
        if self.pending.is_some() {
            return;
        }
        let subject = |window| Subject { step, window };
        self.chosen = match self.state {
            Some((_, digest)) => Some(Chosen {
                subject: subject(None),
                value: Value::Digest(digest),
            }),
            None => self.window(step).and_then(|(id, path, elements)| {
                Some(Chosen {
                    value: Value::Window(buffer::window(model, id, elements.clone())?),
                    subject: subject(Some((path, elements))),
                })
            }),
        };
    }

    /// The window that is due at `step`.
    fn window(&self, step: u64) -> Option<(ParamId, String, Range<usize>)> {
        let is_due = self.every > 0 && step.is_multiple_of(self.every);
        if !is_due || self.parameters.is_empty() {
            return None;
        }
        let window = (step / self.every) % self.windows;
        let after = self.parameters.partition_point(|p| p.first <= window);
        let of = &self.parameters[after - 1];
        let start = (window - of.first) as usize * WINDOW_ELEMENTS;
        let end = (start + WINDOW_ELEMENTS).min(of.len);
        Some((of.id, of.path.clone(), start..end))
    }

    /// After a failed step. What was sent waits for the repeated step, or for the result that another rank lends.
    pub(crate) fn undo(&mut self) {
        self.chosen = None;
    }

    /// Goes on in another group. What was sent counts if another rank lends the step's result.
    pub(crate) fn change_group(&mut self) {
        self.undecided = None;
        if let Some(sent) = &mut self.pending {
            sent.is_old = true;
        }
    }

    /// Forgets what was to be compared, because the ranks go back.
    pub(crate) fn go_back(&mut self) {
        (self.chosen, self.pending, self.state) = (None, None, None);
    }

    /// Sends the hash of what was chosen; a second call does nothing.
    pub(crate) fn send(&mut self, group: &ProcessGroup) -> Result<(), DdpError> {
        let Some(Chosen { subject, value }) = self.chosen.take() else {
            return Ok(());
        };
        let hash = match value {
            Value::Window(values) => {
                let read = buffer::read([values], "weights")?;
                digest(read[0].as_bytes()).cast_signed()
            }
            Value::Digest(own) => own,
        };
        let mut hashes = group.buffer::<i64>(group.world())?;
        hashes[group.rank()] = hash;
        let ticket = group.all_gather_async(hashes, AllGather::default());
        self.pending = Some(Pending {
            subject,
            ticket,
            is_old: false,
        });
        Ok(())
    }

    /// Compares the hashes sent.
    pub(crate) fn check(&mut self, group: &ProcessGroup) -> Result<(), DdpError> {
        let Some(Pending {
            subject, ticket, ..
        }) = self.pending.take()
        else {
            return Ok(());
        };
        let hashes = ticket.wait()?.buffer;
        let verdict = judge(&hashes);
        if verdict != Verdict::Same {
            let since = self.known_equal_at(&subject);
            let step = subject.step;
            let what = match &subject.window {
                Some((path, at)) => format!("elements {} to {} of {path}", at.start, at.end - 1),
                None => "the whole state".into(),
            };
            self.undecided = (verdict == Verdict::Undecided).then(|| (subject, hashes.to_vec()));
            let ranks = match verdict {
                Verdict::Odd(ranks) => ranks,
                Verdict::Same | Verdict::Undecided => Vec::new(),
            };
            return Err(DdpError::Diverged {
                step,
                what,
                since,
                culprit: ranks.first().copied(),
                ranks: started(group, ranks),
            });
        }
        if subject.window.is_none() {
            (self.agreed, self.state) = (Some(subject.step), None);
        }
        if let Some((_, before)) = self.undecided.take_if(|(of, _)| of.step <= subject.step)
            && group.rank() == 0
        {
            let wrong = wrong(&before, hashes[0]);
            let wrong = wrong.map(|ranks| started(group, ranks));
            paceline_rendezvous::notice!(WARN, "{}", told(wrong));
        }
        Ok(())
    }

    /// The last step at whose start the subject is known to have been the same on all ranks.
    fn known_equal_at(&self, subject: &Subject) -> u64 {
        let round = self.windows * self.every;
        let last = subject.window.as_ref();
        let last = last.map_or(0, |_| subject.step.saturating_sub(round));
        last.max(self.agreed.unwrap_or(0))
    }
}

/// What hashes of all ranks say.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Same,
    /// These ranks differ from the most frequent hash.
    Odd(Vec<usize>),
    /// No hash is the most frequent one.
    Undecided,
}

fn judge(hashes: &[i64]) -> Verdict {
    let count = |value: i64| hashes.iter().filter(|hash| **hash == value).count();
    let most = hashes.iter().map(|hash| count(*hash)).max().unwrap_or(0);
    let mut frequent = hashes.iter().filter(|hash| count(**hash) == most);
    let Some(majority) = frequent.next() else {
        return Verdict::Same;
    };
    if frequent.any(|hash| hash != majority) {
        return Verdict::Undecided;
    }
    let odd = (0..hashes.len()).filter(|rank| hashes[*rank] != *majority);
    match odd.collect::<Vec<_>>() {
        odd if odd.is_empty() => Verdict::Same,
        odd => Verdict::Odd(odd),
    }
}

/// The numbers that these ranks of the group were started with, by which the launcher calls them.
fn started(group: &ProcessGroup, ranks: Vec<usize>) -> Vec<usize> {
    ranks
        .into_iter()
        .map(|rank| group.started_rank(rank))
        .collect()
}

/// Which ranks were wrong: those that come to another hash than `before` when all have gone back. `None` if it cannot be told.
fn wrong(before: &[i64], now: i64) -> Option<Vec<usize>> {
    let wrong = (0..before.len()).filter(|rank| before[*rank] != now);
    let wrong: Vec<usize> = wrong.collect();
    (wrong.len() < before.len()).then_some(wrong)
}

fn told(wrong: Option<Vec<usize>>) -> String {
    match wrong {
        None => "it cannot be told which rank was wrong: computed again, the weights are others on every rank, because a step \
                 had already used the wrong ones"
            .into(),
        Some(wrong) => format!("computed again, the weights are others on ranks {wrong:?}, which were wrong"),
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::LinearConfig;
    use burn::tensor::Device;
    use paceline_collective::GroupOptions;
    use paceline_testing::on_threads;

    use super::*;

    #[test]
    fn the_minority_is_named() {
        assert_eq!(judge(&[7, 7, 7]), Verdict::Same);
        assert_eq!(judge(&[7, 8, 7, 7]), Verdict::Odd(vec![1]));
        assert_eq!(judge(&[8, 7, 7]), Verdict::Odd(vec![0]));
        assert_eq!(judge(&[9, 7, 8, 7]), Verdict::Odd(vec![0, 2]));
    }

    #[test]
    fn after_a_loss_a_rank_has_the_number_that_it_was_started_with() {
        let groups = ProcessGroup::local(4, &GroupOptions::default()).expect("a local group");
        let said = on_threads(groups, |group| {
            if group.rank() == 0 {
                return None;
            }
            group.barrier().expect_err("rank 0 is lost");
            let group = group.next_generation().expect("three are left");
            let is_wrong = group.started_rank(group.rank()) == 2;
            let model = LinearConfig::new(1, 1).init(&Device::flex());
            let mut fingerprint = Fingerprint::new(&[], 1);
            fingerprint.compare_state(7, is_wrong.into());
            fingerprint.choose(&group, &model, 7);
            fingerprint.send(&group).expect("sent");
            let error = fingerprint.check(&group).expect_err("one differs");
            Some((error.to_string(), error.culprit()))
        });
        for (text, culprit) in said.into_iter().flatten() {
            assert!(text.contains("on ranks [2] differ"), "{text}");
            assert_eq!(culprit, Some(1), "in the group that is left");
        }
    }

    #[test]
    fn without_a_majority_no_rank_is_named() {
        assert_eq!(judge(&[7, 8]), Verdict::Undecided);
        assert_eq!(judge(&[7, 8, 9]), Verdict::Undecided);
        assert_eq!(judge(&[7, 8, 8, 7]), Verdict::Undecided);
    }

    #[test]
    fn of_two_the_one_whose_answer_changes_is_named() {
        assert_eq!(wrong(&[7, 8], 7), Some(vec![1]));
        assert_eq!(wrong(&[7, 8], 8), Some(vec![0]));
        assert_eq!(wrong(&[7, 8], 9), None);
    }
}
