//! Device memory: addresses that are invalid on the host, and their bytes.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::Device;
use crate::code::Code;
use crate::process::lock;

/// The first address. It is not canonical, so that dereferencing it fails as with a device address.
const FIRST: u64 = 0x4000_0000_0000_0000;

/// Alignment of allocations. *Source*: `cuMemAlloc`.
const ALIGNMENT: u64 = 256;

/// Memory of all devices, and pinned host memory.
#[derive(Debug)]
pub(crate) struct Memory {
    blocks: Mutex<BTreeMap<u64, Arc<Block>>>,
    next: AtomicU64,
    /// Length by address.
    pinned: Mutex<BTreeMap<usize, usize>>,
}

/// One allocation.
#[derive(Debug)]
struct Block {
    device: Arc<Device>,
    bytes: Mutex<Vec<u8>>,
}

/// A part of one allocation, which it keeps alive.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    block: Arc<Block>,
    offset: usize,
    pub(crate) length: usize,
}

/// A part of host memory that the caller keeps alive until a piece of work is done.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostSpan {
    address: *mut u8,
    length: usize,
}

// SAFETY: it is an address; each dereference has its own justification.
unsafe impl Send for HostSpan {}

impl Memory {
    pub(crate) fn new() -> Self {
        Self {
            blocks: Mutex::default(),
            next: AtomicU64::new(FIRST),
            pinned: Mutex::default(),
        }
    }

    /// Allocates `length` bytes on a device.
    pub(crate) fn allocate(&self, device: &Arc<Device>, length: usize) -> Result<u64, Code> {
        if length == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let size = length as u64;
        let fits = |used: u64| {
            used.checked_add(size)
                .filter(|used| *used <= device.memory_bytes)
        };
        let taken = device
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        taken.map_err(|_| Code::OUT_OF_MEMORY)?;
        let bytes = Mutex::new(vec![device.fresh; length]);
        let stride = size.next_multiple_of(ALIGNMENT) + ALIGNMENT;
        let address = self.next.fetch_add(stride, Ordering::Relaxed);
        lock(&self.blocks).insert(
            address,
            Arc::new(Block {
                device: device.clone(),
                bytes,
            }),
        );
        Ok(address)
    }

    /// The device of the allocation that begins at an address.
    pub(crate) fn owner(&self, address: u64) -> Option<Arc<Device>> {
        lock(&self.blocks)
            .get(&address)
            .map(|block| block.device.clone())
    }

    /// Frees an allocation.
    pub(crate) fn free(&self, address: u64) -> Result<(), Code> {
        let block = lock(&self.blocks)
            .remove(&address)
            .ok_or(Code::INVALID_VALUE)?;
        let size = lock(&block.bytes).len() as u64;
        block.device.used.fetch_sub(size, Ordering::Relaxed);
        Ok(())
    }

    /// `length` bytes at an address, if all are in one allocation.
    pub(crate) fn span(&self, address: u64, length: usize) -> Option<Span> {
        let blocks = lock(&self.blocks);
        let (first, block) = blocks.range(..=address).next_back()?;
        let offset = usize::try_from(address - first).ok()?;
        let end = offset.checked_add(length)?;
        let is_inside = end <= lock(&block.bytes).len();
        is_inside.then(|| Span {
            block: block.clone(),
            offset,
            length,
        })
    }

    /// Allocates pinned host memory.
    pub(crate) fn pin(&self, length: usize) -> Result<*mut c_void, Code> {
        if length == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let bytes = vec![0_u128; length.div_ceil(16)].into_boxed_slice();
        let address = Box::into_raw(bytes).cast::<c_void>();
        lock(&self.pinned).insert(address.addr(), length);
        Ok(address)
    }

    pub(crate) fn unpin(&self, address: *mut c_void) -> Result<(), Code> {
        let length = lock(&self.pinned)
            .remove(&address.addr())
            .ok_or(Code::INVALID_VALUE)?;
        let slice = std::ptr::slice_from_raw_parts_mut(address.cast::<u128>(), length.div_ceil(16));
        // SAFETY: `pin` made a box of this length, and the table shows that it has not been freed.
        drop(unsafe { Box::from_raw(slice) });
        Ok(())
    }

    /// Whether the memory is pinned, so that a copy may run after its call.
    pub(crate) fn is_pinned(&self, span: HostSpan) -> bool {
        let address = span.address.addr();
        let pinned = lock(&self.pinned);
        let below = pinned.range(..=address).next_back();
        below.is_some_and(|(first, length)| address.saturating_add(span.length) <= first + length)
    }
}

impl Span {
    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.block.device
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        lock(&self.block.bytes)[self.offset..self.offset + self.length].to_vec()
    }

    /// Writes to the beginning; excess bytes are dropped.
    pub(crate) fn write(&self, bytes: &[u8]) {
        let length = self.length.min(bytes.len());
        lock(&self.block.bytes)[self.offset..self.offset + length]
            .copy_from_slice(&bytes[..length]);
    }

    /// Fills it with a pattern.
    pub(crate) fn fill(&self, pattern: &[u8]) {
        let bytes: Vec<u8> = pattern.iter().copied().cycle().take(self.length).collect();
        self.write(&bytes);
    }
}

impl HostSpan {
    /// Memory lent by the caller of a C function; null is invalid.
    pub(crate) fn new(address: *mut c_void, length: usize) -> Result<Self, Code> {
        if address.is_null() && length > 0 {
            return Err(Code::INVALID_VALUE);
        }
        Ok(Self {
            address: address.cast(),
            length,
        })
    }

    pub(crate) fn read(self) -> Vec<u8> {
        if self.length == 0 {
            return Vec::new();
        }
        // SAFETY: the caller of the copy keeps these bytes until it is done, and writes none of them.
        unsafe { std::slice::from_raw_parts(self.address, self.length) }.to_vec()
    }

    pub(crate) fn write(self, bytes: &[u8]) {
        let length = self.length.min(bytes.len());
        // SAFETY: the caller of the copy keeps these bytes until it is done, and reads none of them.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.address, length) };
    }
}
