//! Checks between nodes: they meet in a store, introduce themselves, and try to reach one another.

pub(crate) mod card;
pub(crate) mod judge;
mod meet;
mod not_met;
mod probe;
pub(crate) mod table;

use std::collections::BTreeMap;

use paceline_words::{Lang, joined, say};
use serde::Serialize;

pub use self::card::{Card, Measured, Miss, MissKind, Outcome, Reach, Row};
pub(crate) use self::meet::{Met, meet};
pub(crate) use self::probe::Speech;

/// All nodes that came, and whom they reach.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Nodes {
    /// Fewest that are enough.
    pub min: usize,
    /// How many were waited for.
    pub expected: usize,
    /// Which one this is.
    pub me: usize,
    /// The nodes that came, by number.
    pub cards: BTreeMap<usize, Card>,
    /// Whom they reach, as far as they have said so.
    pub rows: BTreeMap<usize, Row>,
    /// Connections to the meeting that did not know the token, where this node hosts it.
    pub turned_away: u64,
}

impl Nodes {
    /// "node 1 (b)", "노드 1(b)".
    pub(crate) fn name(&self, node: usize, lang: Lang) -> String {
        match self.cards.get(&node).map(|card| &card.host) {
            Some(host) => say!(lang, "node {node} ({host})", "노드 {node}({host})"),
            None => say!(lang, "node {node}", "노드 {node}"),
        }
    }

    /// Several names in one phrase, at most ten.
    pub(crate) fn names(&self, nodes: &[usize], lang: Lang) -> String {
        const NAMED_MAX: usize = 10;
        let names = nodes.iter().map(|node| self.name(*node, lang));
        joined(names.collect(), NAMED_MAX, lang)
    }
}
