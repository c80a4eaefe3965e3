//! Before the first step: ranks verify that their models and settings agree, and that they compute the same bits.

use paceline_collective::ProcessGroup;
use serde::{Deserialize, Serialize};

use crate::buffer::{Entry, Role};
use crate::error::DdpError;
use crate::numerics::{self, SameBits};

/// An item that must be equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Item {
    /// For example `parameter 3`.
    what: String,
    /// For example `conv1.weight [8, 1, 3, 3] F32`.
    value: String,
}

impl Item {
    fn new(what: impl Into<String>, value: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            value: value.into(),
        }
    }
}

/// What a rank brings to the comparison.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// In the order in which differences are reported.
    items: Vec<Item>,
    /// The numeric fingerprint; empty where bits are not compared.
    fingerprint: Vec<i64>,
}

/// Where a rank differs from another one.
#[derive(Clone, Default, Serialize, Deserialize)]
struct Found {
    item: Difference,
    /// The places of operations.
    operations: Vec<usize>,
}

/// Position, what, the other rank's value, my value.
type Difference = Option<(usize, Item, String)>;

pub(crate) fn manifest(
    entries: &[Entry],
    plan: &str,
    settings: &[(String, String)],
    fingerprint: Vec<i64>,
) -> Manifest {
    let mut items: Vec<Item> = settings
        .iter()
        .map(|(key, value)| Item::new(format!("setting {key}"), value))
        .collect();
    for (index, entry) in entries.iter().enumerate() {
        let kind = match entry.role {
            Role::Parameter => "parameter",
            Role::Buffer => "buffer",
            Role::Constant => "constant",
        };
        let value = format!("{kind} {} {:?} {:?}", entry.path, entry.shape, entry.dtype);
        items.push(Item::new(format!("tensor {index} of the model"), value));
    }
    items.push(Item::new(
        "the number of tensors in the model",
        entries.len().to_string(),
    ));
    items.push(Item::new("the bucket plan", plan));
    let operations = numerics::names();
    items.push(Item::new(
        "the operations of the numeric fingerprint",
        operations,
    ));
    Manifest { items, fingerprint }
}

/// The first place where `mine` differs from `rank0`.
fn first_difference(rank0: &[Item], mine: &[Item]) -> Difference {
    let missing = || "nothing".to_string();
    (0..rank0.len().max(mine.len())).find_map(|at| match (rank0.get(at), mine.get(at)) {
        (Some(a), Some(b)) if a == b => None,
        (Some(a), Some(b)) if a.what == b.what => Some((at, a.clone(), b.value.clone())),
        (Some(a), other) => {
            let mine = other.map_or_else(missing, |b| format!("{} ({})", b.value, b.what));
            Some((at, a.clone(), mine))
        }
        (None, Some(b)) => Some((at, Item::new(b.what.clone(), missing()), b.value.clone())),
        (None, None) => None,
    })
}

/// Merges the ranks' findings into one verdict: the earliest difference and every rank that has it.
fn verdict(found: &[Difference]) -> Result<(), DdpError> {
    let Some(first) = found.iter().flatten().map(|(at, ..)| *at).min() else {
        return Ok(());
    };
    let mut what = String::new();
    let mut rank0 = String::new();
    let mut differing = Vec::new();
    for (rank, difference) in found.iter().enumerate() {
        if let Some((at, item, mine)) = difference
            && *at == first
        {
            what.clone_from(&item.what);
            rank0.clone_from(&item.value);
            differing.push((rank, mine.clone()));
        }
    }
    Err(DdpError::Mismatch {
        what,
        rank0,
        differing,
    })
}

/// Compares manifests over all ranks: every rank returns the same error. Rank 0 prints the warning.
///
/// *Cost*: one broadcast of the manifest and one small all-gather.
pub(crate) fn compare(
    group: &ProcessGroup,
    mine: &Manifest,
    same_bits: SameBits,
) -> Result<(), DdpError> {
    if group.world() == 1 {
        return Ok(());
    }
    let encoded = encode(mine);
    let rank0 = group.broadcast_bytes((group.rank() == 0).then_some(&encoded[..]), 0)?;
    // A manifest that cannot be decoded is a difference too: rank 0 runs another version.
    let rank0: Manifest = serde_json::from_slice(&rank0).unwrap_or_default();
    let all = group.all_gather_bytes(&encode(&rank0.find(mine)))?;
    let all = all
        .iter()
        .map(|bytes| serde_json::from_slice(bytes).unwrap_or_default());
    decide(0, all.collect(), same_bits, group.rank() == 0)
}

impl Manifest {
    /// Compares it, that of rank `than`, with a new rank's, which prints the warning.
    pub(crate) fn admit(
        &self,
        than: usize,
        group: &ProcessGroup,
        new: &Self,
        same_bits: SameBits,
    ) -> Result<(), DdpError> {
        let mut all = vec![Found::default(); group.world()];
        all[group.rank()] = self.find(new);
        decide(than, all, same_bits, true)
    }

    fn find(&self, mine: &Self) -> Found {
        Found {
            item: first_difference(&self.items, &mine.items),
            operations: numerics::differences(&self.fingerprint, &mine.fingerprint),
        }
    }
}

fn decide(
    than: usize,
    found: Vec<Found>,
    same_bits: SameBits,
    warns: bool,
) -> Result<(), DdpError> {
    let found = found
        .into_iter()
        .map(|found| (found.item, found.operations));
    let (items, operations): (Vec<_>, Vec<_>) = found.unzip();
    verdict(&items)?;
    match (numerics::judge(than, &operations), same_bits) {
        (Err(error), SameBits::Warn) if warns => {
            paceline_rendezvous::notice!(
                WARN,
                "{error}: weights of a model that uses these depend on which rank computes what; take machines of one kind, or \
                 layers of paceline::nn in place of Burn's; --same-bits strict (DdpOptions::same_bits) makes this an error"
            );
            Ok(())
        }
        (_, SameBits::Warn) => Ok(()),
        (judged, SameBits::Strict) => judged,
    }
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("strings and numbers always encode")
}

#[cfg(test)]
mod tests {
    use paceline_collective::GroupOptions;
    use paceline_testing::on_threads;

    use super::*;

    fn items(values: &[(&str, &str)]) -> Vec<Item> {
        values.iter().map(|(w, v)| Item::new(*w, *v)).collect()
    }

    fn check(found: Vec<Option<(usize, Item, String)>>, expect: &str) {
        let text = verdict(&found).map_or_else(|e| e.to_string(), |()| "agreed".into());
        assert_eq!(text, expect);
    }

    #[test]
    fn equal_manifests_agree() {
        let a = items(&[("setting seed", "1"), ("tensor 0", "w [2] F32")]);
        assert_eq!(first_difference(&a, &a), None);
        check(vec![None, None], "agreed");
    }

    #[test]
    fn the_first_difference_is_reported_with_all_ranks_that_have_it() {
        let rank0 = items(&[("tensor 0", "w [2] F32"), ("tensor 1", "b [2] F32")]);
        let other = items(&[("tensor 0", "w [2] F32"), ("tensor 1", "b [3] F32")]);
        let found = first_difference(&rank0, &other);
        check(
            vec![None, found.clone(), None, found],
            "ranks do not agree on tensor 1: rank 0 has b [2] F32, rank 1 has b [3] F32, rank 3 has b [3] F32",
        );
    }

    #[test]
    fn an_earlier_difference_of_another_rank_comes_first() {
        let rank0 = items(&[("setting seed", "1"), ("setting lr", "0.1")]);
        let lr = first_difference(
            &rank0,
            &items(&[("setting seed", "1"), ("setting lr", "0.2")]),
        );
        let seed = first_difference(
            &rank0,
            &items(&[("setting seed", "2"), ("setting lr", "0.1")]),
        );
        check(
            vec![None, lr, seed],
            "ranks do not agree on setting seed: rank 0 has 1, rank 2 has 2",
        );
    }

    /// Rank 2 computes other bits in the second operation; as it starts, or as it replaces a lost rank.
    #[test]
    fn other_bits_on_one_rank_are_an_error_on_all_only_if_asked_for() {
        let groups = ProcessGroup::local(3, &GroupOptions::default()).expect("a local group");
        let text = |judged: Result<(), DdpError>| judged.err().map(|error| error.to_string());
        let said = on_threads(groups, |group| {
            let is_other = group.rank() == 2;
            let own = manifest(&[], "", &[], vec![7, 7 + i64::from(is_other)]);
            let of_rank_1 = manifest(&[], "", &[], vec![7, 7]);
            [SameBits::Warn, SameBits::Strict].map(|policy| {
                let started = text(compare(&group, &own, policy));
                (started, text(of_rank_1.admit(1, &group, &own, policy)))
            })
        });
        let error = |than| {
            let what = "matmul over 2500 products";
            Some(format!(
                "ranks [2] compute other bits than rank {than} in {what}"
            ))
        };
        for (rank, [warned, strict]) in said.into_iter().enumerate() {
            assert_eq!(warned, (None, None));
            assert_eq!(strict, (error(0), error(1).filter(|_| rank == 2)));
        }
    }

    #[test]
    fn a_longer_or_shorter_list_is_a_difference() {
        let short = items(&[("tensor 0", "w")]);
        let long = items(&[("tensor 0", "w"), ("tensor 1", "b")]);
        let (at, item, mine) = first_difference(&short, &long).expect("differs");
        assert_eq!(
            (at, item.value.as_str(), mine.as_str()),
            (1, "nothing", "b")
        );
        let (at, item, mine) = first_difference(&long, &short).expect("differs");
        assert_eq!(
            (at, item.value.as_str(), mine.as_str()),
            (1, "b", "nothing")
        );
    }
}
