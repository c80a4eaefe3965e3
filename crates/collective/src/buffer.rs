//! A typed buffer that operations can reduce in place.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::element::Element;
use crate::fold::premultiply;
use crate::memory::Region;

/// Numbers in memory that the group's transport works on without a copy: shared memory on one host, plain memory
/// between hosts. Made by [`ProcessGroup::buffer`](crate::ProcessGroup::buffer) and dereferences to a slice.
///
/// *Shape*: fixed when made; aligned to 64 bytes.
#[derive(Debug)]
pub struct Buffer<T: Element> {
    region: Region,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    /// The region has at least `len` elements' bytes.
    pub(crate) fn new(region: Region, len: usize) -> Self {
        assert!(
            len.checked_mul(size_of::<T>())
                .is_some_and(|bytes| bytes <= region.bytes())
        );
        Self {
            region,
            len,
            element: PhantomData,
        }
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// Multiplies all elements by the factor of a premultiplied sum.
    pub(crate) fn premultiply(&mut self, factor: f64) {
        let (start, len) = (self.as_mut_ptr().cast::<u8>(), self.len);
        // SAFETY: the buffer's own elements, onto themselves.
        unsafe { premultiply(T::DTYPE, start, start, len, factor) };
    }

    pub(crate) fn into_region(self) -> Region {
        self.region
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the region is initialised, aligned for every element type and long enough (see `new`); every bit
        // pattern is a valid element.
        unsafe { std::slice::from_raw_parts(self.region.as_ptr().cast::<T>(), self.len) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let len = self.len;
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe {
            std::slice::from_raw_parts_mut(self.region.as_mut_slice().as_mut_ptr().cast::<T>(), len)
        }
    }
}
