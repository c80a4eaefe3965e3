//! Collective operations between the ranks of a job, whose results have the same bytes on any number of ranks.
//!
//! A [`ProcessGroup`] connects the ranks: threads of one process ([`ProcessGroup::local`]), processes of one host over
//! shared memory, or processes anywhere over TCP. It knows no tensors and no launcher; what it needs to know about the job
//! comes from the environment contract in `paceline-rendezvous`.
//!
//! # Operations
//!
//! `n` is the size of one rank's buffer in bytes, `W` the number of ranks, `B` the number of blocks that a rank brings (1
//! unless a [`Tree`] has more leaves than there are ranks). Steps are messages that follow one another; bytes are those
//! that leave and enter each rank on a network. In shared memory nothing is sent: every rank reads the others' buffers
//! where they are, and each operation costs two meetings.
//!
//! | operation | what it does | steps | bytes for each rank |
//! |---|---|---|---|
//! | all-reduce | every rank folds its slice of all ranks' blocks, then hands it to all | 2 | `(B + 1) n (W-1)/W` |
//! | reduce-scatter | every rank folds its slice | 1 | `n (W-1)/W` |
//! | all-gather | every rank hands its slice to all | 1 | `n (W-1)/W` |
//! | broadcast | the root hands all to all | 1 | `n (W-1)` out of the root, `n` into the others |
//! | barrier | every rank tells all that it has come | 1 | a head of 72 bytes for each peer |
//!
//! | send, recv | one rank hands a message to one other | 1 | `n` out of the one, `n` into the other |
//!
//! Direct exchange costs the bytes of a ring in 2 steps instead of `2 (W-1)`, and it is what makes the order of additions
//! independent of `W`: whoever owns a slice has all blocks of it at hand. *Source*: reduce-scatter and all-gather by
//! direct exchange, Chan et al., "Collective communication: theory, practice, and experience", 2007.
//!
//! # Numerics
//!
//! Additions follow a fixed binary [`Tree`] over leaves, not over ranks. Which rank holds which leaves only decides who
//! adds, so one job gives the same bytes on 1, 2, 5 or 8 ranks and over every transport; `tests/trees.rs` holds that.
//! Every addition rounds once in the element's own type; nothing is fused or reordered. [`ReduceOp::Average`] divides the
//! finished sum once by the number of leaves, a correctly rounded division. Of a NaN only that it is one is
//! promised, not its sign and payload.
//!
//! # Errors
//!
//! Operations begin with a comparison of all ranks' calls; a difference is the same [`Error::Mismatch`] on every rank. A
//! rank that dies is noticed by the end of its connections, one that panics or gives up says so, and one that stalls is
//! named at the deadline with what it is doing. The first failure latches: a failed group never works again.
//!
//! # Order
//!
//! Operations run in the order of their submission, on the thread `rank3/comm` or, for a synchronous call with nothing in
//! front of it, on the caller's own. All ranks must submit the same operations in the same order.
//!
//! [`send`](ProcessGroup::send) and [`recv`](ProcessGroup::recv) stand beside that order: they concern two ranks, run on
//! their callers' threads at the same time as anything else, and are matched by source and tag.
//!
//! # Groups of some ranks
//!
//! [`split`](ProcessGroup::split) makes groups of some of a group's ranks, and [`DeviceMesh`] one along each dimension of
//! a grid. Each has its own order, threads, connections and first failure.

mod async_calls;
pub mod bench;
mod bootstrap;
mod buffer;
mod call;
mod calls;
mod coalesced;
mod device_mesh;
mod element;
mod engine;
mod error;
mod executor;
pub mod flight;
mod fold;
mod group;
mod handover;
mod local;
mod memory;
mod mesh;
mod message;
mod options;
mod parcel;
mod plan;
mod socket;
mod status;
mod stream;
mod strings;
mod subgroup;
mod team;
mod ticket;
mod tree;
mod watch;

pub use async_calls::AllReduce;
pub use buffer::Buffer;
pub use device_mesh::DeviceMesh;
pub use element::{DType, Element, ReduceOp};
pub use error::{Error, OpKind, Operation, Route};
pub use group::{ProcessGroup, WORLD_MAX};
pub use half::{bf16, f16};
pub use options::{GroupOptions, Transport};
pub use parcel::{Received, RecvTicket, SendTicket};
pub use plan::{Algorithm, Override, PlanError};
pub use ticket::{Done, OpTiming, Ticket};
pub use tree::{LEAVES_MAX, Tree};
