//! Many small tensors as one operation: one meeting and one message for all of them.

use crate::calls::Ask;
use crate::element::{Element, ReduceOp};
use crate::error::{Error, OpKind};
use crate::group::ProcessGroup;
use crate::plan::Pattern;

impl ProcessGroup {
    /// [`all_reduce`](Self::all_reduce) of several tensors as one operation.
    ///
    /// *Shape*: the same number of tensors and the same lengths on all ranks. *Cost*: a copy of everything into the group's
    /// memory and back, and one operation. *Errors*: there is no room for that copy, or as the operation.
    pub fn all_reduce_coalesced<T: Element>(
        &self,
        tensors: &mut [&mut [T]],
        op: ReduceOp,
    ) -> Result<(), Error> {
        self.coalesced(tensors, |len| {
            Ask::new(OpKind::AllReduce, Pattern::AllReduce { len }).reducing(op)
        })
    }

    /// [`broadcast`](Self::broadcast) of several tensors as one operation.
    ///
    /// *Shape*, *Cost* and *Errors*: as [`all_reduce_coalesced`](Self::all_reduce_coalesced), and a root that is no rank.
    pub fn broadcast_coalesced<T: Element>(
        &self,
        tensors: &mut [&mut [T]],
        root: usize,
    ) -> Result<(), Error> {
        self.check_root(OpKind::Broadcast, root)?;
        self.coalesced(tensors, |len| {
            Ask::new(OpKind::Broadcast, Pattern::Broadcast { len, root })
        })
    }

    fn coalesced<T: Element>(
        &self,
        tensors: &mut [&mut [T]],
        ask: impl FnOnce(usize) -> Ask,
    ) -> Result<(), Error> {
        let len = tensors.iter().map(|tensor| tensor.len()).sum();
        let mut buffer = self.buffer::<T>(len).map_err(|error| self.give_up(error))?;
        let mut rest = &mut buffer[..];
        for tensor in tensors.iter() {
            let (part, others) = rest.split_at_mut(tensor.len());
            part.copy_from_slice(tensor);
            rest = others;
        }
        let buffer = self.run_buffer(buffer, ask(len), [0; 2])?.buffer;
        let mut rest = &buffer[..];
        for tensor in tensors.iter_mut() {
            let (part, others) = rest.split_at(tensor.len());
            tensor.copy_from_slice(part);
            rest = others;
        }
        Ok(())
    }
}
