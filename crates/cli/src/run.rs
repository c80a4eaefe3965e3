//! `paceline run`: torchrun's way of starting a program.

mod alone;
mod args;
mod failures;
mod folder;
mod logs;
mod nodes;
mod placement;
mod program;
mod ranks;
mod scheduler;
mod sense;
mod start;
mod torch_only;

pub use args::{Given, RunArgs, command, read, shared};
pub(crate) use args::{options, words};
pub use nodes::{Conf, Nodes, NodesArgs, RdzvBackend};
pub use placement::Placement;
pub use ranks::Processes;
pub use start::run as start;
pub(crate) use start::{cluster, repeat};
