//! Rounds over several nodes: which nodes take part, in which order, and what follows when one is lost.
//!
//! Every node runs an agent; the agents share a store that one of them hosts, and each keeps one ready to take its place.
//!
//! ```text
//!  agent                            store (in one of the agents)               other agents
//!    page: state, beat      ---->   agent/<id>       one page for each   <----
//!    look: record, pages    <----   record           the round           ---->     look
//!    compare-and-set        ---->   record           one of them wins    <----     compare-and-set
//! ```
//!
//! | module | owns |
//! |---|---|
//! | `record` | the data in the store |
//! | `leases` | how long each agent has been silent, by the observer's own clock |
//! | `clocks` | how far apart the agents' clocks are |
//! | `arrange` | rank order |
//! | `decide` | what to do: pure, and the reasons why a partition cannot run the job twice |
//! | `agent`, `messages` | one agent as a state machine, its inputs and commands |
//! | `link` | the threads between an agent and a store |

pub(crate) mod agent;
pub(crate) mod arrange;
pub(crate) mod clocks;
pub(crate) mod decide;
pub(crate) mod leases;
pub(crate) mod link;
pub(crate) mod messages;
pub(crate) mod record;
#[cfg(test)]
pub(crate) mod simulation;
