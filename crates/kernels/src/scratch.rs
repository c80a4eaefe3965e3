//! Memory that calls of a kernel use one after another.

use std::cell::RefCell;

/// Values that a thread keeps between calls: the rest is freed, so that one large call does not cost memory for ever.
const KEPT: usize = 4 << 20;

thread_local! {
    static KEPT_BY_THREAD: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer of `len` values, which are anything.
pub(crate) struct Scratch {
    values: Vec<f32>,
    len: usize,
}

impl Scratch {
    pub(crate) fn new(len: usize) -> Self {
        let mut values = KEPT_BY_THREAD.with_borrow_mut(Vec::pop).unwrap_or_default();
        if values.len() < len {
            values.resize(len, 0.0);
        }
        Self { values, len }
    }
}

impl std::ops::Deref for Scratch {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values[..self.len]
    }
}

impl std::ops::DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values[..self.len]
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let values = std::mem::take(&mut self.values);
        KEPT_BY_THREAD.with_borrow_mut(|kept| {
            let has: usize = kept.iter().map(Vec::len).sum();
            if has + values.len() <= KEPT {
                kept.push(values);
            }
        });
    }
}
