//! Before the first step: ranks verify that their models and settings agree.

use paceline_collective::ProcessGroup;
use serde::{Deserialize, Serialize};

use crate::buffer::{Entry, Role};
use crate::error::DdpError;

/// An item that must be equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Item {
    /// For example `parameter 3`.
    pub(crate) what: String,
    /// For example `conv1.weight [8, 1, 3, 3] F32`.
    pub(crate) value: String,
}

impl Item {
    pub(crate) fn new(what: impl Into<String>, value: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            value: value.into(),
        }
    }
}

/// All items of a rank, in the order in which differences are reported.
pub(crate) fn manifest(entries: &[Entry], plan: &str, settings: &[(String, String)]) -> Vec<Item> {
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
    items
}

/// The first place where `mine` differs from `rank0`, as (position, what, rank 0's value, my value).
pub(crate) fn first_difference(rank0: &[Item], mine: &[Item]) -> Option<(usize, Item, String)> {
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
pub(crate) fn verdict(found: &[Option<(usize, Item, String)>]) -> Result<(), DdpError> {
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

/// Compares manifests over all ranks: every rank returns the same error.
///
/// *Cost*: one broadcast of the manifest and one small all-gather.
pub(crate) fn compare(group: &ProcessGroup, mine: &[Item]) -> Result<(), DdpError> {
    if group.world() == 1 {
        return Ok(());
    }
    let encoded = encode(&mine);
    let rank0 = group.broadcast_bytes((group.rank() == 0).then_some(&encoded[..]), 0)?;
    // A manifest that cannot be decoded is a difference too: rank 0 runs another version.
    let rank0: Vec<Item> = serde_json::from_slice(&rank0).unwrap_or_default();
    let found = first_difference(&rank0, mine);
    let all = group.all_gather_bytes(&encode(&found))?;
    let all: Vec<Option<(usize, Item, String)>> = all
        .iter()
        .map(|bytes| serde_json::from_slice(bytes).unwrap_or_default())
        .collect();
    verdict(&all)
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("strings and numbers always encode")
}

#[cfg(test)]
mod tests {
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
