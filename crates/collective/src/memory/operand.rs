//! This rank's memory in one call: what it brings and where its result goes.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use super::region::{Home, Region};

/// The memory of one call, owned or lent by a waiting caller.
///
/// How many elements lie at both starts is the call's business; the maker of an operand has checked it.
#[derive(Debug)]
pub(crate) struct Operand {
    /// The memory itself, when the operation owns it.
    region: Option<Region>,
    input: NonNull<u8>,
    /// Equal to `input` in operations that work in place.
    output: NonNull<u8>,
    /// Where `input` and `output` begin in this rank's segment, when peers can work on them directly.
    shared: Option<[u64; 2]>,
}

// SAFETY: the memory is owned, or borrowed exclusively by a caller that waits until the operation is over; wherever it
// runs, nobody else touches it.
unsafe impl Send for Operand {}

impl Operand {
    /// A caller's own memory, in place.
    ///
    /// # Safety
    ///
    /// The caller keeps `data` borrowed until the operation is over.
    pub(crate) unsafe fn in_place<T>(data: &mut [T]) -> Self {
        let start = NonNull::from(data).cast();
        Self {
            region: None,
            input: start,
            output: start,
            shared: None,
        }
    }

    /// A caller's own memory.
    ///
    /// # Safety
    ///
    /// The caller keeps both borrowed until the operation is over.
    pub(crate) unsafe fn apart<T>(input: &[T], output: &mut [T]) -> Self {
        Self {
            region: None,
            input: NonNull::from(input).cast(),
            output: NonNull::from(output).cast(),
            shared: None,
        }
    }

    /// A region of the group's own memory. `input` and `output` are where the two begin.
    ///
    /// *Units*: bytes.
    pub(crate) fn region(mut region: Region, input: usize, output: usize) -> Self {
        assert!(input <= region.bytes() && output <= region.bytes());
        let start = NonNull::from(region.as_mut_slice()).cast::<u8>();
        let shared = match region.home() {
            Home::Heap(_) => None,
            Home::Arena { offset, .. } => Some([input, output].map(|at| (*offset + at) as u64)),
        };
        // SAFETY: both lie in the region, as just checked.
        let (input, output) = unsafe { (start.add(input), start.add(output)) };
        Self {
            region: Some(region),
            input,
            output,
            shared,
        }
    }

    /// No memory: calls without data.
    pub(crate) fn none() -> Self {
        Self {
            region: None,
            input: NonNull::dangling(),
            output: NonNull::dangling(),
            shared: None,
        }
    }

    pub(crate) fn input(&self) -> NonNull<u8> {
        self.input
    }

    pub(crate) fn output(&self) -> NonNull<u8> {
        self.output
    }

    pub(crate) fn shared(&self) -> Option<[u64; 2]> {
        self.shared
    }

    /// The owned memory back.
    pub(crate) fn into_region(self) -> Option<Region> {
        self.region
    }

    /// Peers may still write to the memory although the operation is over, because it failed.
    pub(crate) fn lose(&mut self, generation: u32) {
        if let Some(region) = &mut self.region {
            region.lose(Some(generation));
        }
    }
}
