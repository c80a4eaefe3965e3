//! The seam between operations and transports.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use crate::call::Call;
use crate::element::ReduceOp;
use crate::error::Error;
use crate::fold::{Fold, Scratch};
use crate::memory::Region;
use crate::status::Vigil;

/// Who executes an operation, which decides how long it may spin before it sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runner {
    /// The caller of a synchronous operation; it has nothing else to do.
    Caller,
    /// The communication thread; what it spins it takes from the thread that computes.
    CommThread,
}

impl Runner {
    /// Longest time to spin where every rank has a core.
    ///
    /// A futex costs about 5 us to sleep on and wake from: spinning for a few times that pays for a caller. The
    /// communication thread stays below what a context switch would cost the computing thread.
    pub(crate) fn spin(self) -> Duration {
        match self {
            Self::Caller => Duration::from_micros(30),
            Self::CommThread => Duration::from_micros(2),
        }
    }
}

/// Executes operations, one at a time, in the same order on all ranks.
///
/// `execute` returns when the call is done as far as this rank is concerned and nobody touches the region any more, or
/// with an error after which nothing can be executed. It waits only while `vigil` lets it. The result is when the last
/// rank had arrived.
pub(crate) trait Engine: Send + std::fmt::Debug {
    fn execute(
        &mut self,
        call: &Call,
        region: &mut Region,
        vigil: &Vigil<'_>,
        runner: Runner,
    ) -> Result<Instant, Error>;
}

/// The engine of a world of one rank.
#[derive(Debug, Default)]
pub(crate) struct Solo {
    scratch: Scratch,
}

impl Engine for Solo {
    fn execute(
        &mut self,
        call: &Call,
        region: &mut Region,
        _: &Vigil<'_>,
        _: Runner,
    ) -> Result<Instant, Error> {
        let ready = Instant::now();
        // One rank owns the whole tree, so it has merged everything into one block; only the division is left.
        if let (Some(op @ ReduceOp::Average), Some(dtype)) = (call.header.reduce, call.header.dtype)
        {
            let memory = &mut region.as_mut_slice()[..call.bytes(0)];
            let start = memory.as_mut_ptr();
            let inputs = [start.cast_const()];
            let fold = Fold {
                tree: &call.tree,
                dtype,
                op,
                inputs: &inputs,
                len: call.elements(),
            };
            // SAFETY: the one input is the region's first block, `elements` long; `store` writes the chunk it is given
            // back to where it came from, and nobody else has the region.
            unsafe {
                fold.run(&mut self.scratch, |at, bytes| {
                    start
                        .add(at)
                        .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                });
            }
        }
        Ok(ready)
    }
}
