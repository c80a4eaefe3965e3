//! What lines need of MPI: messages between two processes, none of which waits.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::fmt::Debug;

/// A process of the MPI job, and the number that tells apart what it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) process: c_int,
    pub(crate) tag: c_int,
}

/// A message on its way.
#[derive(Debug)]
pub(crate) struct Request(pub(super) usize);

/// Messages arrive in the order in which they were sent to one address.
pub(crate) trait Messages: Send + Sync + Debug {
    /// Begins to send.
    ///
    /// # Safety
    ///
    /// The bytes stay where they are, and nobody writes to them, until the request is [done](Self::test).
    unsafe fn send(&self, to: Address, bytes: *const u8, len: usize) -> Result<Request, String>;

    /// Begins to receive a message of at most `len` bytes, from this process with this tag.
    ///
    /// # Safety
    ///
    /// The room stays where it is, and nobody else touches it, until the request is [done](Self::test).
    unsafe fn receive(&self, from: Address, room: *mut u8, len: usize) -> Result<Request, String>;

    /// Whether a request is done; the length of the message, if it is one that was received. A request that is done does not
    /// exist any more.
    fn test(&self, request: &mut Request) -> Result<Option<usize>, String>;

    /// Ends a request that nobody waits for any more; one that receives is cancelled. Whether MPI is done with its memory: a
    /// message that is on its way cannot be called back.
    fn end(&self, request: Request, receives: bool) -> bool;
}
