//! A rolling check that all replicas still hold the same weights.
//!
//! Every step hashes one window of the weights and compares it over all ranks, asynchronously; the
//! windows go round the whole model. A replica that has drifted is detected within `weights / window` steps at a cost that
//! does not grow with the model. A digest of the whole state, if the program has one, takes the place of one window. After a step
//! with numbers that are not finite, all weights are compared at once: one rank's may be the cause.
//!
//! By the time of its detection, a wrong replica may have sent wrong gradients, from which all ranks have computed the same wrong
//! weights. So the weights of the majority are right only if the difference is younger than one step. What all ranks had in
//! common before it is right in any case.

use std::ops::Range;

use burn::module::{Module, ParamId};
use burn::tensor::Tensor;
use paceline_collective::{AllGather, ProcessGroup, Ticket};
use paceline_nn::mix;

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
    /// A step that compares all weights.
    suspects: Option<u64>,
    chosen: Option<Chosen>,
    pending: Option<Pending>,
    /// A difference without a majority, to be looked at again if the ranks go back.
    undecided: Option<Compared>,
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
    what: What,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum What {
    /// Elements of a parameter, by its path.
    Window(String, Range<usize>),
    Weights,
    /// Weights, optimizer and position.
    State,
}

/// The hashes of all ranks.
struct Compared {
    subject: Subject,
    hashes: Vec<i64>,
}

/// What to compare next.
struct Chosen {
    subject: Subject,
    value: Value,
}

enum Value {
    Weights(Vec<Tensor<1>>),
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
            suspects: None,
            chosen: None,
            pending: None,
            undecided: None,
        }
    }

    /// Has `step` compare the digest of the whole state at its start.
    pub(crate) fn compare_state(&mut self, step: u64, digest: u64) {
        self.state = Some((step, digest.cast_signed()));
    }

    /// Has `step` compare all weights, which differ.
    pub(crate) fn suspect(&mut self, step: u64) {
        self.suspects = Some(step);
    }

    /// The newest step at whose start the whole state was the same on all ranks.
    pub(crate) fn agreed(&self) -> Option<u64> {
        self.agreed
    }

    /// Chooses what `step` compares, if it compares anything: the digest of the state, or a window of `model`. With a window, it shows
    /// others where some of the weights are.
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
        let chosen = |what, value| Chosen {
            subject: Subject { step, what },
            value,
        };
        let again = self.undecided.as_ref().map(|before| &before.subject);
        let again = again.is_some_and(|of| of.step == step && of.what == What::Weights);
        let is_whole = again || self.suspects == Some(step);
        self.chosen = match (self.state, self.window(step)) {
            (Some((_, digest)), _) => Some(chosen(What::State, Value::Digest(digest))),
            (None, _) if is_whole => {
                Some(chosen(What::Weights, Value::Weights(self.weights(model))))
            }
            (None, None) => None,
            (None, Some((id, path, elements))) => {
                let any = mix(step, 0, 0) % self.parameters.len() as u64;
                let shown = self.parameters[any as usize].id;
                let (values, memory) = buffer::window(model, id, elements.clone(), shown);
                if let Some(addresses) = memory {
                    group.slot().show_weights(&addresses);
                }
                let what = What::Window(path, elements);
                values.map(|values| chosen(what, Value::Weights(vec![values])))
            }
        };
    }

    /// All parameters, in one order on all ranks.
    fn weights<M: Module>(&self, model: &M) -> Vec<Tensor<1>> {
        let wanted = |id| self.parameters.iter().any(|of| of.id == id);
        let mut all = buffer::flat_parameters(model, wanted);
        let parameters = self.parameters.iter();
        parameters.filter_map(|of| all.remove(&of.id)).collect()
    }

    /// The hash of all weights, if the weights are compared at all.
    pub(crate) fn hash_of_weights<M: Module>(&self, model: &M) -> Result<Option<i64>, DdpError> {
        let is_on = self.every > 0 && !self.parameters.is_empty();
        is_on
            .then(|| hash(self.weights(model), "weights"))
            .transpose()
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
        (self.undecided, self.suspects) = (None, None);
        if let Some(sent) = &mut self.pending {
            sent.is_old = true;
        }
    }

    /// Forgets what was to be compared, because the ranks go back.
    pub(crate) fn go_back(&mut self) {
        (self.chosen, self.pending, self.state) = (None, None, None);
        self.suspects = None;
    }

    /// Sends the hash of what was chosen; a second call does nothing.
    pub(crate) fn send(&mut self, group: &ProcessGroup) -> Result<(), DdpError> {
        let Some(Chosen { subject, value }) = self.chosen.take() else {
            return Ok(());
        };
        let hash = match value {
            Value::Weights(values) => hash(values, "weights")?,
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
        let hashes = ticket.wait()?.buffer.to_vec();
        self.decide(group, Compared { subject, hashes })
    }

    /// Compares the hashes of all weights at the start of `step`.
    pub(crate) fn check_weights(
        &mut self,
        group: &ProcessGroup,
        step: u64,
        hashes: Vec<i64>,
    ) -> Result<(), DdpError> {
        let what = What::Weights;
        let subject = Subject { step, what };
        self.decide(group, Compared { subject, hashes })
    }

    fn decide(&mut self, group: &ProcessGroup, compared: Compared) -> Result<(), DdpError> {
        let Compared { subject, hashes } = &compared;
        let step = subject.step;
        if let Some(ranks) = odd_ranks(hashes) {
            let since = self.known_equal_at(subject);
            let what = match &subject.what {
                What::Window(path, at) => {
                    format!("elements {} to {} of {path}", at.start, at.end - 1)
                }
                What::Weights => "the weights".into(),
                What::State => "the whole state".into(),
            };
            self.undecided = ranks.is_empty().then_some(compared);
            let culprit = ranks.first().copied();
            let ranks = started(group, ranks);
            group.slot().set_differs(step, ranks.first().copied());
            return Err(DdpError::Diverged {
                step,
                what,
                since,
                culprit,
                ranks,
            });
        }
        if subject.what == What::State {
            (self.agreed, self.state) = (Some(step), None);
        }
        let before = self.undecided.take_if(|of| of.subject.step <= step);
        if let Some(before) = before.filter(|before| before.subject == *subject)
            && let Some(now) = hashes.first().filter(|_| group.rank() == 0)
        {
            let wrong = wrong(&before.hashes, *now);
            let wrong = wrong.map(|ranks| started(group, ranks));
            paceline_rendezvous::notice!(WARN, "{}", told(wrong));
        }
        Ok(())
    }

    /// The last step at whose start the subject is known to have been the same on all ranks.
    fn known_equal_at(&self, subject: &Subject) -> u64 {
        let last = match subject.what {
            What::Window(..) => subject.step.saturating_sub(self.windows * self.every),
            What::Weights | What::State => 0,
        };
        last.max(self.agreed.unwrap_or(0))
    }
}

/// One hash of all values. Errors call them `what`.
pub(crate) fn hash(values: Vec<Tensor<1>>, what: &str) -> Result<i64, DdpError> {
    let read = buffer::read(values, what)?;
    let digests = read.iter().map(|data| digest(data.as_bytes()));
    let digests: Vec<u8> = digests.flat_map(u64::to_le_bytes).collect();
    Ok(digest(&digests).cast_signed())
}

/// The ranks whose hash is not the most frequent one, if there is one such; `None` if all are the same.
pub fn odd_ranks<T: PartialEq>(hashes: &[T]) -> Option<Vec<usize>> {
    let count = |value: &T| hashes.iter().filter(|hash| *hash == value).count();
    let most = hashes.iter().map(count).max().unwrap_or(0);
    if most == hashes.len() {
        return None;
    }
    let mut frequent = hashes.iter().filter(|hash| count(hash) == most);
    let majority = frequent.next()?;
    let is_undecided = frequent.any(|hash| hash != majority);
    let odd = (0..hashes.len()).filter(|rank| !is_undecided && hashes[*rank] != *majority);
    Some(odd.collect())
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
        assert_eq!(odd_ranks(&[7, 7, 7]), None);
        assert_eq!(odd_ranks(&[7, 8, 7, 7]), Some(vec![1]));
        assert_eq!(odd_ranks(&[8, 7, 7]), Some(vec![0]));
        assert_eq!(odd_ranks(&[9, 7, 8, 7]), Some(vec![0, 2]));
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
        assert_eq!(odd_ranks(&[7, 8]), Some(vec![]));
        assert_eq!(odd_ranks(&[7, 8, 9]), Some(vec![]));
        assert_eq!(odd_ranks(&[7, 8, 8, 7]), Some(vec![]));
    }

    #[test]
    fn of_two_the_one_whose_answer_changes_is_named() {
        assert_eq!(wrong(&[7, 8], 7), Some(vec![1]));
        assert_eq!(wrong(&[7, 8], 8), Some(vec![0]));
        assert_eq!(wrong(&[7, 8], 9), None);
    }
}
