//! Collective operations between the ranks of a job, whose results have the same bytes on any number of ranks.
//!
//! A [`ProcessGroup`] connects the ranks: threads of one process ([`ProcessGroup::local`]), processes of one host over
//! shared memory, or processes anywhere over TCP or MPI. It knows no tensors and no launcher; what it needs to know about the job
//! comes from the environment contract in `paceline-rendezvous`.
//!
//! # Operations
//!
//! | operation | what it does | variable length |
//! |---|---|---|
//! | all-reduce, reduce | all ranks, or the root, get the reduction of all ranks' data | |
//! | broadcast | all get the root's data | |
//! | all-gather, gather | all, or the root, get all ranks' data | `all_gather_v` |
//! | reduce-scatter | each gets its slice of the reduction | `reduce_scatter_v` |
//! | scatter | each gets its slice of the root's data | |
//! | all-to-all | each gets its slice of every rank's data | `all_to_all_v` |
//! | barrier | returns when all have come | |
//! | send, receive | one rank's data to another, with a tag | |
//!
//! Synchronous calls take slices of ordinary memory. Calls that end in `_async` take a [`Buffer`] of the group's own memory,
//! which ranks of one host work on in place, and give a [`Ticket`]; they exist for every operation on numbers, with slices of
//! one length, and of any lengths in an all-gather and a reduce-scatter. Some ranks may bring a buffer and others ordinary
//! memory to one call, except to a long one between hosts. Byte strings of any length have calls of their own. The
//! algorithms, their rounds, messages and bytes are in `docs/algorithms.md`, printed from the plans.
//!
//! # Numerics
//!
//! Additions follow a fixed binary [`Tree`] over leaves, not over ranks. Which rank holds which leaves only decides who
//! adds, so one job gives the same bytes on 1, 2, 5 or 8 ranks and over every transport; `tests/trees.rs` holds that. The
//! ring alone has an order of its own, and is used only when a user asks for it and the call brings no tree.
//! Every addition rounds once in the element's own type; nothing is fused or reordered. [`struct@f16`] and [`bf16`] are added in `f32` and
//! rounded once at the end; what a rank brings of several leaves in them is rounded already, so there the bytes depend on
//! the number of ranks. [`ReduceOp::Average`] divides the finished sum once by the number of leaves, a correctly rounded
//! division. Of a NaN only that it is one is promised, not its sign and payload.
//!
//! # Errors
//!
//! Operations begin with a comparison of all ranks' calls; a difference is the same [`Error::Mismatch`] on every rank. A
//! rank that dies is noticed by the end of its connections, one that panics or gives up says so, and one that stalls is
//! named at the deadline with what it is doing. The first failure latches: a failed group never works again.
//!
//! # Order
//!
//! Operations run in the order of their submission. The thread `rank3/comm` executes them while the program computes; a
//! thread that would only wait, in a synchronous call or for a [`Ticket`], executes what has not been taken up yet itself.
//! All ranks must submit the same operations in the same order.
//!
//! [`send`](ProcessGroup::send) and [`recv`](ProcessGroup::recv) stand beside that order: they concern two ranks, run on
//! their callers' threads at the same time as anything else, and are matched by source and tag.
//!
//! # Groups of some ranks
//!
//! [`split`](ProcessGroup::split) makes groups of some of a group's ranks, [`subgroup`](ProcessGroup::subgroup) one that its members alone
//! make, and [`DeviceMesh`] one along each dimension of a grid. Each has its own order, threads, connections and first failure.

#![warn(clippy::print_stderr)] // it panics where the terminal is gone

mod async_calls;
mod bootstrap;
mod buffer;
mod call;
mod calls;
mod device_mesh;
mod element;
mod engine;
mod error;
mod executor;
pub mod flight;
mod fold;
mod generation;
mod group;
#[cfg(test)]
mod growth;
mod handover;
mod local;
mod memory;
mod memory_report;
mod mesh;
mod message;
mod mpi;
mod named;
mod options;
mod p2p;
mod pace;
mod plan;
mod runner;
mod settle;
mod socket;
mod status;
mod stop;
mod stream;
mod strings;
mod subgroup;
mod team;
mod ticket;
mod tree;
mod watch;
mod wiring;

pub use async_calls::{AllGather, AllReduce, ReduceScatter};
pub use buffer::Buffer;
pub use device_mesh::DeviceMesh;
pub use element::{DType, Element, ReduceOp};
pub use error::{Error, OpKind, Operation, Ranks, Route, Seconds};
pub use group::{ProcessGroup, WORLD_MAX};
pub use half::{bf16, f16};
pub use memory::{ArenaReport, Share};
pub use memory_report::MemoryReport;
pub use options::{GroupOptions, Transport};
pub use p2p::{MESSAGE_BYTES_MAX, PostedRecv, Received, RecvTicket, SendTicket};
pub use plan::{Algorithm, Override, PlanError};
pub use settle::{Apart, Place, Settlement, Standing, settle};
pub use ticket::{Done, OpTiming, Ticket};
pub use tree::{LEAVES_MAX, Step as TreeStep, Tree};
