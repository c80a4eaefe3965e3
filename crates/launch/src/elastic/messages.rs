//! An agent's inputs and commands.

use std::time::Duration;

use paceline_rendezvous::page::Generation;
use paceline_words::Text;

use super::record::{AgentId, Complaint, Ending, Page, Places, Ports, Record, Report, RoundId};
use crate::stop::Stop;

/// Something that happened.
#[derive(Debug, Clone)]
pub(crate) enum Input {
    /// Time went by.
    Tick,
    /// Stores were dialed.
    Found(Vec<Found>),
    /// The store was entered; so many had come to it before.
    Attached { store: String, joined: i64 },
    /// The store as it was at one moment, and when it was seen.
    Look {
        store: String,
        at: Duration,
        record: Option<Record>,
        pages: Vec<Page>,
    },
    /// The store took the page that was sent then.
    Beaten { store: String, sent: Duration },
    /// A compare-and-set is done: this is the record now.
    Published { store: String, record: Record },
    /// The connection is of no more use.
    Broken { store: String },
    /// These ranks go on in the round; none where they cannot. Their generation has ended, unless the round is an invitation.
    Regrouped {
        round: RoundId,
        slots: Option<Vec<usize>>,
    },
    /// What is to say of the places of lost ranks has changed.
    Places(Places),
    /// The ranks have followed the invitation to the round.
    Begun(RoundId),
    /// The ports for a round are open.
    Opened(RoundId, Ports),
    /// A rank has failed first on this node.
    RankFailed(Box<Report>),
    /// These ranks wait for the next generation, and each blames another one, or none.
    Complaints(Vec<Complaint>),
    /// All ranks have ended; whether they all did well.
    RanksEnded { well: bool },
    /// The ranks of the round were asked to stop, or say that they have.
    Stop(Stop),
    /// The last lines of the failed rank are known.
    Lines(Box<Report>),
    /// This agent is to stop.
    Signal(i32),
}

/// The result of dialing one store.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) store: String,
    pub(crate) answer: Answer,
}

/// How a candidate for the store answers.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    /// It is a store of this job, with this record.
    Store(Option<Box<Record>>),
    /// Its machine refuses the connection.
    Refused,
    /// The name of its host has no address: in words, for people.
    Unresolved(String),
    /// It has another job token: in words, for people.
    WrongToken(String),
    /// Another program listens there, or `PACELINE_TLS` differs: in words, for people.
    Stranger(String),
    /// No answer, or a useless one: in words, for people.
    Silent(String),
}

/// Something for the runtime to do.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Command {
    /// Dial these stores.
    Scan(Vec<String>),
    /// Enter this store, and leave the one before.
    Attach(String),
    /// Set this agent's page; when `urgent`, wake the others.
    Page { page: Box<Page>, urgent: bool },
    /// Put `new` in place of `expected`.
    Publish {
        expected: Option<Box<Record>>,
        new: Box<Record>,
    },
    /// Leave this page in a store that this agent is not at.
    Tell { store: String, page: Box<Page> },
    /// Remove the page of an agent that is gone.
    Forget(AgentId),
    /// Say which ranks go on in this round, which continues theirs. Their generation ends, unless the round is an invitation.
    Regroup(Box<Record>),
    /// Open the ports for a round in which this agent may come first.
    Open(RoundId),
    /// Start the ranks of this round, or have them go on in it.
    Start(Box<Record>),
    /// Start ranks that the others of this record's round are to admit, the first with this number.
    Join(Box<Record>, usize),
    /// The others have followed the invitation to the ranks here, which may begin.
    Begin,
    /// Ranks that wait for more nodes go on without them.
    Release,
    /// End the ranks.
    EndRanks(How),
    /// Tell people.
    Notice(String),
    /// The agent ends.
    Exit(Exit),
}

/// What the ranks of this node are to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Order {
    End(How),
    /// Their generation ends, as far as it is known because of this rank, which is killed if it lives. The supervisor says which
    /// of them can go on.
    Regroup(Option<usize>),
    /// They go on in this generation.
    GoOn {
        next: Generation,
        /// Why there is one, for people.
        why: Text,
    },
    /// They work on. The supervisor says which ranks there are.
    Stay,
    /// The ranks that all are newcomers may begin.
    Begin,
    /// Those that wait for more nodes go on without them.
    Release,
    /// They are invited to a generation with newcomers.
    Invite {
        /// None if there is no newcomer.
        next: Option<Generation>,
        /// How many processes may have been started in place of lost ones.
        replacements: u32,
        /// What people are told when the ranks have followed.
        incidents: Vec<String>,
    },
}

/// How ranks are ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// For the next round, which has all members of this one: ranks that can agree on a step after which they save do so
    /// first.
    Save,
    /// For the next round: without delay, and in good order.
    Next,
    /// The job is over: ranks may still report.
    Over,
    /// At once.
    Kill,
}

/// How an agent ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Exit {
    /// With the job.
    Job(Ending),
    /// By a signal.
    Signal(i32),
}
