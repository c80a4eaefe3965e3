//! NCCL: communicators whose ranks are threads or processes on one machine, connected over loopback TCP.

mod comm;
mod group;
mod hub;
mod number;
mod op;
mod ring;
mod wire;

pub(crate) use self::comm::{Comm, Join};
pub(crate) use self::group::{Group, Task};
pub(crate) use self::hub::{Id, open_hub};
pub(crate) use self::number::{Fold, Type};
pub(crate) use self::op::Op;
