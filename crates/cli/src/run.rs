//! `paceline run`: torchrun's way of starting a program.

mod agent;
mod alone;
mod args;
mod failures;
mod folder;
mod hosts;
mod logs;
mod nodes;
mod over_ssh;
mod placement;
mod program;
mod ranks;
mod scheduler;
mod sense;
mod start;
mod store;
mod torch_only;

pub(crate) use agent::{
    NAME as AGENT, begin as begin_agent, command as agent_command, serve as serve_agent,
};
pub use args::{Given, RunArgs, command, read, shared};
pub(crate) use args::{options, words};
pub use hosts::{Host, Hosts, HostsArgs};
pub use nodes::{Conf, Nodes, NodesArgs, RdzvBackend};
pub use placement::Placement;
pub use ranks::Processes;
pub use start::run as start;
pub(crate) use start::{cluster, repeat};
pub(crate) use store::{NAME as STORE, command as store_command, serve as serve_store};
