//! Numbers as bytes, and bytes out of another rank's memory.
#![allow(unsafe_code)]

use crate::element::Element;
use crate::memory::Segment;

pub(super) fn bytes_of<T: Element>(numbers: &[T]) -> &[u8] {
    // SAFETY: an element has no padding, so all its bytes are initialised; a byte needs no alignment.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

pub(super) fn bytes_of_mut<T: Element>(numbers: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, every bit pattern is an element, and `numbers` is borrowed exclusively.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}

/// Copies from a peer's segment, which holds `into.len()` bytes at `offset` as the caller has checked.
pub(super) fn read(segment: &Segment, offset: usize, into: &mut [u8]) {
    assert!(offset + into.len() <= segment.bytes());
    // SAFETY: inside the mapping. The sender leaves these bytes alone until it hears that they were taken; a peer that
    // does not could as well have sent other numbers, which any bit pattern is.
    unsafe {
        segment
            .at(offset)
            .as_ptr()
            .copy_to_nonoverlapping(into.as_mut_ptr(), into.len());
    }
}
