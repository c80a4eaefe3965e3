//! What people are told about decisions.

use std::time::Duration;

use paceline_words::{Lang, Text, Word, say};

use super::Decision;
use super::members::Gone;

/// Why there is nothing to do yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait {
    /// For people: the end of "waiting: ...".
    pub(crate) why: Word,
    /// Ask again after so long; absent where only news can change the answer.
    pub(crate) left: Option<Duration>,
}

impl Wait {
    pub(super) fn for_news(why: Word) -> Decision {
        Decision::Wait(Self { why, left: None })
    }

    pub(super) fn at_most(left: Duration, why: Word) -> Decision {
        Decision::Wait(Self {
            why,
            left: Some(left),
        })
    }
}

/// Why an agent kills its own ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fence {
    /// No sign of life has reached the store.
    NoContact,
    /// This agent was stopped, and its lease ran out meanwhile.
    WasAway,
    /// Too few of the round's agents are in sight.
    NoQuorum,
}

impl Fence {
    /// For people; `is_outside` is whether the store is in etcd.
    pub(crate) fn word(self, is_outside: bool) -> Word {
        const NO_ETCD: Word = Word::new(
            "etcd was not reached for too long",
            "너무 오래 etcd에 연결하지 못함",
        );
        const ALONE: Word = Word::new(
            "this node has lost the others",
            "이 노드와 다른 노드의 연결이 끊김",
        );
        const STOPPED: Word = Word::new(
            "this node was stopped for too long",
            "이 노드가 너무 오래 정지되어 있었음",
        );
        const STOPPED_LEASE: Word = Word::new(
            "this node was stopped for longer than its lease",
            "이 노드가 리스보다 오래 정지되어 있었음",
        );
        const OUT_OF_SIGHT: Word = Word::new(
            "most nodes of the round are out of sight",
            "라운드의 노드가 대부분 보이지 않음",
        );
        match (self, is_outside) {
            (Self::NoContact, true) => NO_ETCD,
            (Self::NoContact, false) => ALONE,
            (Self::WasAway, true) => STOPPED,
            (Self::WasAway, false) => STOPPED_LEASE,
            (Self::NoQuorum, _) => OUT_OF_SIGHT,
        }
    }
}

pub(super) const OWN_RECORD: Word = Word::new(
    "its own record is on the way to the store",
    "이 노드의 기록이 스토어로 가는 중",
);
pub(super) const MORE_MAY_COME: Word = Word::new("more nodes may come", "노드가 더 올 수 있음");
pub(super) const NOT_ALL_CAME: Word =
    Word::new("not all nodes have come", "아직 오지 않은 노드가 있음");
pub(super) const PORTS: Word = Word::new(
    "the first node has not opened its ports",
    "첫 노드가 아직 포트를 열지 않음",
);
pub(super) const NOT_READY: Word = Word::new(
    "not all nodes are ready for the round",
    "라운드 준비가 안 된 노드가 있음",
);
pub(super) const WHICH_FIRST: Word = Word::new(
    "it is open which rank failed first",
    "어느 랭크가 먼저 실패했는지 아직 모름",
);
pub(super) const RANKS_RUN: Word = Word::new("the ranks run", "랭크가 실행 중");
pub(super) const MAY_COME_BACK: Word = Word::new(
    "the node with the job's store may come back",
    "작업의 스토어가 있는 노드가 돌아올 수 있음",
);
pub(super) const MAY_STILL_RUN: Word = Word::new(
    "the node with the lost store may still run its ranks",
    "스토어를 잃은 노드의 랭크가 아직 실행 중일 수 있음",
);
pub(super) const MAY_END: Word = Word::new(
    "a rank that is blamed may end by itself",
    "원인으로 지목된 랭크가 스스로 끝날 수 있음",
);
pub(super) const OTHER_SETTINGS: Word = Word::new(
    "a node with other settings has come, or has left its page behind",
    "설정이 다른 노드가 왔거나 기록을 남겨 둠",
);
pub(super) const NO_LAUNCHER: Word =
    Word::new("no launcher of the job answers", "응답하는 런처가 없음");
pub(super) const NO_STORE: Word = Word::new(
    "the job's store does not answer",
    "작업의 스토어가 응답하지 않음",
);
pub(super) const NO_QUORUM: Word = Word::new(
    "too few nodes of the last round are in sight",
    "보이는 마지막 라운드 노드가 너무 적음",
);
pub(super) const LEAVING: Word = Word::new(
    "the ranks of a node that leaves are ending",
    "떠나는 노드의 랭크가 끝나는 중",
);
pub(super) const OTHERS_END: Word = Word::new(
    "the ranks of other nodes end",
    "다른 노드의 랭크가 끝나는 중",
);
pub(super) const TOO_FEW: Word = Word::new("too few nodes are left", "남은 노드가 너무 적음");

pub(super) fn words(gone: &[Gone]) -> Vec<Text> {
    gone.iter().map(|gone| gone.why.clone()).collect()
}

/// Words about several nodes, with commas.
pub(crate) fn listed(words: &[Text], lang: Lang) -> String {
    let words: Vec<&str> = words.iter().map(|word| word.of(lang)).collect();
    words.join(", ")
}

pub(super) fn too_few(have: usize, need: usize, within: Duration) -> Text {
    let seconds = within.as_secs_f64();
    Text::new(|lang| {
        say!(
            lang,
            "{have} of at least {need} nodes came within {seconds:.0} s",
            "{seconds:.0}초 안에 온 노드 {have}개, 최소 {need}개 필요"
        )
    })
}
