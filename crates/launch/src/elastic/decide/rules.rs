//! The settings of a job's agents, and the limits of time that follow from them.

use std::time::Duration;

use paceline_words::Lang;

use crate::elastic::record::{Record, Settings};

/// Settings of one agent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Rules {
    pub(crate) nodes_min: usize,
    pub(crate) nodes_max: usize,
    /// Places are given by `--node-rank`; the set of nodes never changes.
    pub(crate) is_static: bool,
    pub(crate) max_restarts: u32,
    /// The ranks that are left go on after a loss, where they can.
    pub(crate) recovers_live: bool,
    pub(crate) lease: Duration,
    /// With enough nodes but not all: the round begins when no further one has come for so long.
    pub(crate) last_call: Duration,
    pub(crate) join_timeout: Duration,
    /// How long the agent with the store waits at the end until all others know about it.
    pub(crate) close_timeout: Duration,
    /// How long members of a new round may take to end what they have.
    pub(crate) ready_timeout: Duration,
    /// How long a rank of another node that is blamed may take to fail by itself.
    pub(crate) blamed_may_end: Duration,
    /// The store is not one of the agents', and ranks run on for so long without it.
    pub(crate) outage: Option<Duration>,
    /// How long this node waits for others before it says so.
    pub(crate) notice_after: Duration,
    /// What follows the endpoint in that notice: where it comes from, if nobody named it.
    pub(crate) endpoint_note: &'static str,
    /// The language of notices.
    pub(crate) lang: Lang,
}

impl Rules {
    /// Those that must be the same on all nodes.
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            nodes_min: self.nodes_min,
            nodes_max: self.nodes_max,
            is_static: self.is_static,
            max_restarts: self.max_restarts,
            recovers_live: self.recovers_live,
            lease: self.lease,
            outage: self.outage,
        }
    }

    /// Whether the ranks of a round wait for more nodes.
    pub(crate) fn is_short(&self, record: &Record) -> bool {
        record.continues.is_some() && record.members.len() < self.nodes_min
    }

    /// Time between two signs of life.
    pub(crate) fn beat_every(&self) -> Duration {
        self.lease / 6
    }

    /// An agent that has been silent for so long does not count for a decision; it is given up after the lease.
    pub(crate) fn silent_after(&self) -> Duration {
        self.lease * 2 / 3
    }

    /// Without contact for so long, an agent ends its own ranks: before the others give it up, or, with a store outside of
    /// the job, before they no longer count it.
    pub(crate) fn fence_after(&self) -> Duration {
        self.outage.unwrap_or(self.silent_after())
    }

    /// With a store outside of the job: an agent that has been silent for so long has no ranks any more.
    pub(crate) fn gone_after(&self) -> Option<Duration> {
        self.outage.map(|outage| outage * 5 / 4)
    }

    /// A store that has refused an agent's token for so long is not the end of an earlier job.
    pub(super) fn refused_for(&self) -> Duration {
        self.lease * 3
    }

    /// How long to look for a store that was lost, or for enough of the others.
    pub(super) fn patience(&self) -> Duration {
        let gone = self.gone_after().map(|gone| gone + self.lease);
        self.join_timeout.max(gone.unwrap_or_default())
    }

    /// After so long the store's agent has ended its ranks, if it lives and has lost the others.
    pub(crate) fn take_over_after(&self) -> Duration {
        self.lease * 5 / 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Rules {
        /// Rules for tests, which change what they are about.
        pub(crate) fn example() -> Self {
            Self {
                nodes_min: 1,
                nodes_max: 2,
                is_static: false,
                max_restarts: 0,
                recovers_live: false,
                lease: Duration::from_secs(3),
                last_call: Duration::ZERO,
                join_timeout: Duration::ZERO,
                close_timeout: Duration::ZERO,
                ready_timeout: Duration::ZERO,
                blamed_may_end: Duration::from_secs(1),
                outage: None,
                notice_after: Duration::from_secs(2),
                endpoint_note: "",
                lang: Lang::En,
            }
        }
    }

    #[test]
    fn an_agent_gives_itself_up_before_the_others_do_and_they_take_over_after_that() {
        let rules = Rules::example();
        let beat = rules.beat_every();
        assert!(rules.fence_after() + beat < rules.lease);
        // The last sign of life may have been on its way for a beat, and be looked at a beat later.
        assert!(rules.fence_after() + 2 * beat < rules.take_over_after());
        assert!(
            rules.fence_after() > 3 * beat,
            "a lost beat or two fence nobody"
        );
        let outside = Rules {
            outage: Some(Duration::from_secs(60)),
            ..rules
        };
        assert_eq!(outside.fence_after(), Duration::from_secs(60));
        assert!(outside.gone_after() > Some(outside.fence_after() + 2 * beat));
        assert!(outside.silent_after() < outside.lease);
    }
}
