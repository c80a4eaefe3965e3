//! The caller's memory as slices of numbers.
#![allow(unsafe_code)]

use std::ops::Range;
use std::ptr::NonNull;

use paceline_collective::{DType, Element, Error};

/// A piece of the caller's memory. Several pieces that follow one another are one run of numbers.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Span {
    /// Its first byte. May be null if there are none.
    pub data: *mut u8,
    /// Bytes.
    pub bytes: usize,
}

// SAFETY: a number and a pointer; the contract of a call says who may use the memory, on whichever thread.
unsafe impl Send for Span {}

impl Span {
    fn range(&self) -> Range<usize> {
        let start = self.data.addr();
        start..start.saturating_add(self.bytes)
    }

    fn overlaps(&self, other: &Self) -> bool {
        let (own, other) = (self.range(), other.range());
        own.start < other.end && other.start < own.end
    }
}

/// The memory of one side of a call.
///
/// Its maker promises that until the call is over the spans are readable, those of an output writable too, and that nobody else writes what
/// the call reads or touches what it writes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Memory(Vec<Span>);

impl Memory {
    /// # Safety
    ///
    /// The promise of [`Memory`].
    pub(crate) unsafe fn new(spans: &[Span]) -> Self {
        Self(spans.to_vec())
    }

    /// Elements of each span.
    ///
    /// *Errors*: a span that ends within an element, or is not there.
    pub(crate) fn counts(&self, dtype: DType) -> Result<Vec<usize>, String> {
        let count = |span: &Span| match span.bytes % dtype.bytes() {
            0 if !span.data.is_null() || span.bytes == 0 => Ok(span.bytes / dtype.bytes()),
            0 => Err(format!("a tensor of {} bytes is at address 0", span.bytes)),
            _ => Err(format!(
                "{} bytes are no whole number of {dtype}",
                span.bytes
            )),
        };
        self.0.iter().map(count).collect()
    }

    /// To read: the memory itself, or a copy of it where it lies in pieces, badly aligned, or over memory that the call writes.
    pub(crate) fn read<T: Element>(&self, written: &Self) -> Result<Run<T>, Error> {
        let is_written = |span: &Span| written.filled().any(|other| span.overlaps(other));
        let shared = self.filled().any(is_written);
        match self.whole::<T>().filter(|_| !shared) {
            Some(lent) => Ok(lent),
            None => self.copy(),
        }
    }

    /// To read and write: the memory itself, or a copy that has to be [put back](Self::land).
    pub(crate) fn update<T: Element>(&self) -> Result<Run<T>, Error> {
        self.whole().map_or_else(|| self.copy(), Ok)
    }

    /// Puts a run that was written into the memory, unless it is the memory itself.
    pub(crate) fn land<T: Element>(&self, run: &Run<T>) {
        let Run::Copy(scratch) = run else {
            return;
        };
        let mut from = scratch.as_ptr().cast::<u8>();
        for span in self.filled() {
            // SAFETY: the promise of `Memory`; the copy has the bytes of all spans together.
            unsafe {
                from.copy_to_nonoverlapping(span.data, span.bytes);
                from = from.add(span.bytes);
            }
        }
    }

    /// The spans as one slice, if they follow one another and are aligned. Bytes of a `bool` may be neither 0 nor 1, so it is none.
    fn whole<T: Element>(&self) -> Option<Run<T>> {
        let start = match self.filled().next() {
            Some(first) => NonNull::new(first.data.cast::<T>())?,
            None => NonNull::dangling(),
        };
        let mut end = start.as_ptr().addr();
        let follow = self.filled().all(|span| {
            let follows = span.data.addr() == end;
            end = span.range().end;
            follows
        });
        let fits = follow && start.is_aligned() && T::DTYPE != DType::Bool;
        fits.then(|| Run::Lent(start, self.bytes() / size_of::<T>()))
    }

    fn filled(&self) -> impl Iterator<Item = &Span> {
        self.0.iter().filter(|span| span.bytes > 0)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.0.iter().map(|span| span.bytes).sum()
    }

    /// A copy, with every element fit to be read.
    pub(crate) fn copy<T: Element>(&self) -> Result<Run<T>, Error> {
        let bytes = self.bytes();
        let mut scratch: Vec<T> = Vec::new();
        if scratch.try_reserve_exact(bytes / size_of::<T>()).is_err() {
            return Err(Error::Memory {
                bytes,
                used: 0,
                size: isize::MAX as usize,
            });
        }
        scratch.resize(bytes / size_of::<T>(), T::default());
        let mut to = scratch.as_mut_ptr().cast::<u8>();
        let start = to;
        for span in self.filled() {
            // SAFETY: the promise of `Memory`; the copy has room for the bytes of all spans.
            unsafe {
                span.data.copy_to_nonoverlapping(to, span.bytes);
                to = to.add(span.bytes);
            }
        }
        if T::DTYPE == DType::Bool {
            for at in 0..bytes {
                // SAFETY: inside the copy, and written as bytes before anybody reads it as a `bool`.
                unsafe { start.add(at).write(u8::from(start.add(at).read() != 0)) };
            }
        }
        Ok(Run::Copy(scratch))
    }
}

/// The numbers of a [`Memory`].
pub(crate) enum Run<T> {
    /// The caller's own memory, and how many elements there are.
    Lent(NonNull<T>, usize),
    Copy(Vec<T>),
}

impl<T: Element> Run<T> {
    pub(crate) fn as_slice(&self) -> &[T] {
        match self {
            // SAFETY: aligned and of this length, as `whole` has checked, and readable while the call runs, which is as long as runs live.
            Self::Lent(start, len) => unsafe { std::slice::from_raw_parts(start.as_ptr(), *len) },
            Self::Copy(scratch) => scratch,
        }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        match self {
            // SAFETY: as above; of memory that is written, nobody else has a slice.
            Self::Lent(start, len) => unsafe {
                std::slice::from_raw_parts_mut(start.as_ptr(), *len)
            },
            Self::Copy(scratch) => scratch,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts of some bytes, which the tests keep and use for nothing else meanwhile.
    fn parts(bytes: *mut u8, parts: &[(usize, usize)]) -> Memory {
        let span = |(start, len): &(usize, usize)| Span {
            data: bytes.wrapping_add(*start),
            bytes: *len,
        };
        let spans: Vec<Span> = parts.iter().map(span).collect();
        // SAFETY: as above.
        unsafe { Memory::new(&spans) }
    }

    #[test]
    fn pieces_that_follow_one_another_are_lent_and_others_copied_and_put_back() {
        let mut numbers = [0_u64; 3];
        let bytes = numbers.as_mut_ptr().cast::<u8>();
        let is_lent = |ranges: &[(usize, usize)]| {
            let run = parts(bytes, ranges).update::<f32>().unwrap();
            matches!(run, Run::Lent(..))
        };
        assert!(is_lent(&[(0, 8), (8, 8)]) && is_lent(&[(4, 0), (4, 4)]) && is_lent(&[]));
        assert!(!is_lent(&[(8, 8), (0, 8)]) && !is_lent(&[(1, 4)]));
        let apart = parts(bytes, &[(8, 2), (2, 2)]);
        let mut run = apart.update::<u8>().unwrap();
        run.as_mut_slice().copy_from_slice(&[1, 2, 3, 4]);
        apart.land(&run);
        assert_eq!(numbers, [0x0403_0000, 0x0201, 0].map(u64::from_le));
    }

    #[test]
    fn what_is_read_is_copied_if_the_call_writes_there() {
        let mut bytes = [7_u8; 16];
        let bytes = bytes.as_mut_ptr();
        let input = parts(bytes, &[(4, 4)]);
        let is_lent = |written: (usize, usize)| {
            let run = input.read::<u8>(&parts(bytes, &[written])).unwrap();
            matches!(run, Run::Lent(..))
        };
        assert!(!is_lent((0, 16)) && !is_lent((7, 1)) && is_lent((8, 8)) && is_lent((6, 0)));
    }

    #[test]
    fn bytes_become_truth_values() {
        let mut bytes = [0_u8, 2, 255];
        let run = parts(bytes.as_mut_ptr(), &[(0, 3)])
            .update::<bool>()
            .unwrap();
        assert_eq!(run.as_slice(), [false, true, true]);
    }

    #[test]
    fn spans_hold_whole_elements_and_are_somewhere() {
        let mut bytes = [0_u8; 8];
        let memory = parts(bytes.as_mut_ptr(), &[(0, 7)]);
        assert_eq!(memory.counts(DType::U8).unwrap(), [7]);
        let reason = memory.counts(DType::F32).unwrap_err();
        assert_eq!(reason, "7 bytes are no whole number of f32");
        let nowhere = parts(std::ptr::null_mut(), &[(0, 0), (0, 4)]);
        let reason = nowhere.counts(DType::F32).unwrap_err();
        assert_eq!(reason, "a tensor of 4 bytes is at address 0");
    }
}
