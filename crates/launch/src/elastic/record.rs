//! The data that agents share through the store: each agent's own page, and the one record of the round.
//!
//! A [`Page`] is written by its agent alone; it is the agent's registration, its lease (`beat`) and its state in one.
//! The [`Record`] is the one thing that several agents write, so it only ever changes by compare-and-set: of two that
//! would begin round 7, one does.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use paceline_words::{Lang, Text, say};
use serde::{Deserialize, Serialize};

use super::clocks::Reading;
use crate::report::Failure;
use crate::stop::Stop;

/// One agent for its whole life: a random number, so that an agent that was started again is another one.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub(crate) struct AgentId(pub(crate) u64);

impl fmt::Display for AgentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A round: its number and the agent that began it, since two stores may each see a round 7 begun.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub(crate) struct RoundId {
    pub(crate) number: u64,
    pub(crate) by: AgentId,
}

/// One agent's own account of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Page {
    pub(crate) id: AgentId,
    /// The machine: agents of one host are neighbours in rank order.
    pub(crate) host: String,
    /// The address under which the other agents reach this machine.
    pub(crate) addr: String,
    /// `host:port` of the store that this agent keeps ready.
    pub(crate) standby: String,
    pub(crate) nproc: usize,
    pub(crate) settings: Settings,
    /// The place that was asked for; only with a static rendezvous.
    pub(crate) node_rank: Option<usize>,
    /// How many agents had come to this store before.
    pub(crate) joined: i64,
    /// Grows with every sign of life; only a change matters, not the value.
    pub(crate) beat: u64,
    /// When the page was sent, by its agent's clock.
    pub(crate) sent_us: Option<u64>,
    /// The highest round this agent has said yes to.
    pub(crate) accepted: RoundId,
    /// Whether the store that holds this page runs in this agent.
    pub(crate) hosts: bool,
    pub(crate) state: State,
    /// The ranks that go on in the round that it is ready for, by their local numbers, if the round continues another.
    pub(crate) slots: Vec<usize>,
    /// All its ranks failed, and the others went on without them.
    pub(crate) is_spent: bool,
    /// What it says of the places of lost ranks.
    pub(crate) places: Places,
    /// The newest round that its ranks have begun: an invitation begins when they follow it.
    pub(crate) begun: RoundId,
    /// Whether its ranks admit newcomers.
    pub(crate) admits: bool,
    /// Its ranks are to join a job that runs.
    pub(crate) joins: Option<Joins>,
    /// How often its processes have all ended before they had joined.
    pub(crate) failed_joins: u32,
    /// Ranks here that wait for the next generation, and the rank that each blames.
    pub(crate) complaints: Vec<Complaint>,
    /// The newest record this agent knows, if the store that it is at does not have it: the job has gone on elsewhere.
    pub(crate) memory: Option<Box<Record>>,
    /// The round in which this agent knows of a failure: it has then said all it knew itself.
    pub(crate) noticed: Option<RoundId>,
    /// Of the round's first member: the least way from each member that has a failed rank.
    pub(crate) ways: Vec<(AgentId, i64)>,
    /// Of a member that has a failed rank: the least way from the round's first member.
    pub(crate) way: Option<Reading>,
    /// This agent's last failure with its last lines, kept while the agent is on its way out.
    pub(crate) told: Option<Box<Report>>,
    /// The request to stop that the ranks of the present round got on this node, or that they stopped for.
    pub(crate) stop: Option<Stop>,
}

/// The places of lost ranks on a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Places {
    /// How many processes it would start there, beside those that it may.
    pub(crate) wanted: u32,
    /// Processes that wait for the others to admit them.
    pub(crate) newcomers: Vec<Newcomer>,
    /// Whether all ranks take part in the training by now, which tells the others how to admit newcomers.
    pub(crate) admits: bool,
    /// Whether ranks that the others have admitted have not the job's state yet.
    pub(crate) is_admitting: bool,
}

/// A node whose ranks are to join a job that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Joins {
    /// The round that has started the processes of the others.
    pub(crate) since: RoundId,
    /// The rank with which the first of its processes was started.
    pub(crate) first: usize,
}

/// A process that has no part in the job yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Newcomer {
    /// Its local number.
    pub(crate) slot: usize,
    pub(crate) pid: u32,
}

/// The options that must be the same on all nodes, as one agent was told.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) nodes_min: usize,
    pub(crate) nodes_max: usize,
    pub(crate) is_static: bool,
    pub(crate) max_restarts: u32,
    pub(crate) recovers_live: bool,
    pub(crate) lease: Duration,
    /// With a store outside of the job only.
    pub(crate) outage: Option<Duration>,
}

impl Settings {
    /// The first option that differs, as each of the two was told.
    pub(crate) fn difference(&self, other: &Self) -> Option<(String, String)> {
        let mine = self.options().into_iter();
        mine.zip(other.options())
            .find(|(mine, other)| mine != other)
    }

    fn options(&self) -> [String; 6] {
        let nodes = match (self.nodes_min, self.nodes_max) {
            (min, max) if min == max => max.to_string(),
            (min, max) => format!("{min}:{max}"),
        };
        let backend = match (self.is_static, self.outage) {
            (true, _) => "static",
            (false, None) => "c10d",
            (false, Some(_)) => "etcd",
        };
        let recovery = match self.recovers_live {
            true => "auto or live",
            false => "restart or none",
        };
        let outage = self.outage.unwrap_or_default().as_secs_f64();
        [
            format!("--nnodes {nodes}"),
            format!("--rdzv-backend {backend}"),
            format!("--max-restarts {}", self.max_restarts),
            format!("--recovery {recovery}"),
            format!("--rdzv-conf lease={}", self.lease.as_secs_f64()),
            format!("--rdzv-conf outage_timeout={outage}"),
        ]
    }
}

impl Page {
    /// The page of an agent that has just come and says nothing of itself yet.
    pub(crate) fn new(id: AgentId) -> Self {
        Self {
            id,
            nproc: 1,
            ..Self::default()
        }
    }
}

/// How far an agent is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum State {
    /// No rank runs here; fit for a round.
    #[default]
    Idle,
    /// The round may start. Nothing of an older one runs here any more; if it continues another, the generation of its ranks
    /// has ended.
    Ready(RoundId, Ports),
    /// The ranks cannot go on in this round, which continues another.
    Unable(RoundId),
    /// The ranks run.
    Running(RoundId),
    /// A rank has failed first; others may still be ending.
    Failed(RoundId, Box<Report>),
    /// All ranks have ended well.
    Done(RoundId),
    /// A signal ends it, and its ranks are still ending.
    Leaving(RoundId, i32),
    /// It leaves, because of a signal or at the job's end. None of its ranks runs.
    Left(Option<i32>),
}

impl State {
    /// The round it belongs to.
    pub(crate) fn round(&self) -> Option<RoundId> {
        match self {
            Self::Ready(round, _)
            | Self::Unable(round)
            | Self::Running(round)
            | Self::Failed(round, _)
            | Self::Done(round)
            | Self::Leaving(round, _) => Some(*round),
            Self::Idle | Self::Left(_) => None,
        }
    }
}

/// Where the ranks of a round meet, if this agent comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Ports {
    /// `MASTER_PORT`: free on that machine a moment ago.
    pub(crate) master: u16,
    /// The ranks' own store, new for each round.
    pub(crate) store: u16,
}

/// The state of the job, by which all agents go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) id: RoundId,
    pub(crate) phase: Phase,
    /// The round that has started the processes which go on in this one, if it continues another. Its members are a
    /// generation of their ranks: live recovery.
    pub(crate) continues: Option<RoundId>,
    /// In the order of their ranks. The store's candidates too: the first that lives takes over.
    pub(crate) members: Vec<Member>,
    /// The members of the last round that was started before this one.
    pub(crate) before: Vec<AgentId>,
    /// The store took the place of a lost one, and no round was started in it before this one.
    pub(crate) taken_over: bool,
    /// Restarts of the job's budget that are spent, and those that were when its processes were started.
    pub(crate) restarts: u32,
    pub(crate) restarts_before: u32,
    /// Why this round was begun.
    pub(crate) why: Why,
}

/// How far a round is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// The members end what they have and say that they are ready.
    Forming,
    /// All were ready: the ranks run. A round that was not seen in this phase was never started.
    Running(Ports),
    /// Too few agents for a round; the ranks end, the others wait for more.
    Short,
    /// Nothing more will happen.
    Ended(Ending),
}

/// One agent of a round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Member {
    pub(crate) id: AgentId,
    pub(crate) host: String,
    pub(crate) addr: String,
    pub(crate) standby: String,
    pub(crate) nproc: usize,
    /// The rank with which the first of its processes was started.
    pub(crate) first: usize,
    /// Its processes in the round, by their local numbers. Of a round that continues another they are known once it runs.
    pub(crate) slots: Vec<usize>,
    /// Those of them that the others are to admit in this round, at the end.
    pub(crate) newcomers: Vec<Newcomer>,
    /// How many processes it may have started in place of lost ones since then.
    pub(crate) replacements: u32,
}

/// A rank that waits for the next generation, and the one because of which, on whatever node; itself if it knows none. Both are ranks
/// that processes were started with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Complaint {
    /// Of the agent's page.
    pub(crate) round: RoundId,
    pub(crate) by: usize,
    pub(crate) of: usize,
    /// The step that the rank was in.
    pub(crate) step: u64,
}

/// Why a round was begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Why {
    /// It is the first.
    Start,
    /// A rank failed, and the budget had a restart left.
    Failure(Box<Report>),
    /// A rank hangs, as another one says. Its node kills it.
    Hung(Complaint),
    /// Ranks that all live have lost each other.
    Cut(Complaint),
    /// Agents are gone; in words for people.
    Lost(Vec<Text>),
    /// Agents have come: so many more nodes than before.
    Joined(usize),
    /// Processes wait for the others to admit them, or a node asks whether it may start some.
    Admission,
    /// The store's agent is gone, and this agent's store took its place.
    StoreLost,
}

/// How a job ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Ending {
    /// All ranks of a round ended well.
    Finished,
    /// It was asked to stop, and did.
    Stopped(Stop),
    /// A rank failed and no restart was left.
    Failed(Box<Report>),
    /// Nodes are gone for good; in words for people.
    Lost(Text),
    /// Not enough nodes came; in words for people.
    TooFew(Text),
    /// The agents' places or numbers of nodes contradict each other; in words for people.
    Misplaced(Text),
    /// This agent's token is not the job's; in words for people. It is never published.
    Refused(Text),
}

/// A failed rank, as its agent tells the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Report {
    /// The error and the last lines are there only in the report that is told at the end.
    pub(crate) failure: Failure,
    /// When, by its agent's clock.
    pub(crate) at_us: u64,
    /// Its agent knew of a failure on another node before.
    pub(crate) is_later: bool,
    /// The rank had said that the others go on without it.
    pub(crate) recovers: bool,
}

impl Record {
    pub(crate) fn world(&self) -> usize {
        self.members.iter().map(|member| member.slots.len()).sum()
    }

    pub(crate) fn position(&self, id: AgentId) -> Option<usize> {
        self.members.iter().position(|member| member.id == id)
    }

    /// The rank of the first process on the node at `position`.
    pub(crate) fn first_rank(&self, position: usize) -> usize {
        self.members
            .iter()
            .take(position)
            .map(|member| member.slots.len())
            .sum()
    }

    /// The node with the process that was started as this rank.
    pub(crate) fn node_of(&self, started: usize) -> Option<usize> {
        let has = |member: &Member| member.started().contains(&started);
        self.members.iter().position(has)
    }

    /// Whether it ends nothing: its ranks work on until they follow the invitation to its newcomers, if it has any.
    pub(crate) fn is_invitation(&self) -> bool {
        self.continues.is_some() && self.why == Why::Admission
    }

    /// Whether its ranks are another generation than before.
    pub(crate) fn has_newcomers(&self) -> bool {
        (self.members.iter()).any(|member| !member.newcomers.is_empty())
    }

    /// The number of the generation of ranks that the round is. It grows as long as the same processes go on.
    pub(crate) fn generation(&self) -> u32 {
        let since = self.since().number;
        u32::try_from(self.id.number.saturating_sub(since)).unwrap_or(u32::MAX)
    }

    /// The round that has started its processes.
    pub(crate) fn since(&self) -> RoundId {
        self.continues.unwrap_or(self.id)
    }

    /// Numbers the processes of a round that starts them.
    pub(crate) fn with_new_processes(mut self) -> Self {
        self.restarts_before = self.restarts;
        let mut next = 0;
        for member in &mut self.members {
            member.first = next;
            member.slots = (0..member.nproc).collect();
            member.newcomers.clear();
            member.replacements = 0;
            next += member.nproc;
        }
        self
    }

    /// Whether half of the voters is enough in its store: not before a store that took another's place has proven with a
    /// started round that it is the job's.
    pub(crate) fn breaks_ties(&self) -> bool {
        !self.taken_over || matches!(self.phase, Phase::Running(_))
    }

    /// How far the job has come; it never falls in one store.
    pub(crate) fn stage(&self) -> (u64, u8) {
        let phase = match self.phase {
            Phase::Forming | Phase::Short => 1,
            Phase::Running(_) => 2,
            Phase::Ended(_) => 3,
        };
        (self.id.number, phase)
    }

    pub(crate) fn ids(&self) -> Vec<AgentId> {
        self.members.iter().map(|member| member.id).collect()
    }
}

impl Member {
    /// The ranks that its processes were started with.
    pub(crate) fn started(&self) -> Range<usize> {
        self.first..self.first + self.nproc
    }
}

impl Report {
    /// Whether both are about the same end of the same process.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let end = |report: &Self| {
            let failure = &report.failure;
            (
                failure.rank,
                failure.pid,
                failure.after,
                failure.node.clone(),
            )
        };
        end(self) == end(other)
    }
}

impl Page {
    /// The ranks that its processes were started with, if they are to join a job that runs.
    pub(crate) fn joining(&self) -> Option<Range<usize>> {
        self.joins
            .map(|joins| joins.first..joins.first + self.nproc)
    }

    /// The node for people.
    pub(crate) fn name(&self, lang: Lang) -> String {
        let host = &self.host;
        match self.node_rank {
            Some(rank) => say!(lang, "node {rank} on {host}", "노드 {rank}({host})"),
            None => host.clone(),
        }
    }

    pub(crate) fn as_member(&self) -> Member {
        Member {
            id: self.id,
            host: self.host.clone(),
            addr: self.addr.clone(),
            standby: self.standby.clone(),
            nproc: self.nproc,
            first: 0,
            slots: Vec::new(),
            newcomers: Vec::new(),
            replacements: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_counted_over_nodes_of_any_size() {
        let member = |id: u64, nproc| Member {
            id: AgentId(id),
            host: "a".into(),
            addr: String::new(),
            standby: String::new(),
            nproc,
            first: 0,
            slots: Vec::new(),
            newcomers: Vec::new(),
            replacements: 0,
        };
        let record = Record {
            id: RoundId::default(),
            phase: Phase::Forming,
            continues: None,
            members: vec![member(7, 2), member(5, 3), member(9, 1)],
            before: Vec::new(),
            taken_over: false,
            restarts: 0,
            restarts_before: 0,
            why: Why::Start,
        }
        .with_new_processes();
        assert_eq!(record.world(), 6);
        let firsts = [0, 1, 2].map(|node| record.first_rank(node));
        assert_eq!(firsts, [0, 2, 5]);
        let nodes: Vec<_> = (0..7).map(|rank| record.node_of(rank)).collect();
        let (a, b, c) = (Some(0), Some(1), Some(2));
        assert_eq!(nodes, [a, a, b, b, b, c, None]);
        assert_eq!(record.position(AgentId(9)), c);
    }
}
