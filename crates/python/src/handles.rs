//! The things that callers know by number.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use paceline_rendezvous::store::Server;
use parking_lot::{Mutex, RwLock};

use crate::failure::Failure;
use crate::group::Group;
use crate::recorder::Recorder;
use crate::track::Tracked;
use crate::work::{Finished, Work};

/// Bits of a handle that count; above them is the process, of which Linux has at most 2^22.
const COUNT_BITS: u32 = 40;

/// Everything that callers in this process know.
pub(crate) struct Tables {
    pid: u32,
    last: AtomicU64,
    pub(crate) groups: Table<Group>,
    pub(crate) works: Table<Work>,
    pub(crate) servers: Table<Mutex<Option<Server>>>,
    pub(crate) finished: Finished,
    pub(crate) tracked: Mutex<Option<Tracked>>,
    pub(crate) recorder: RwLock<Option<Recorder>>,
}

/// The tables of this process. A forked child begins with empty ones: a lock of the parent's may be held by a thread that the child lacks.
pub(crate) fn tables() -> &'static Tables {
    static CURRENT: AtomicPtr<Tables> = AtomicPtr::new(std::ptr::null_mut());
    let pid = std::process::id();
    loop {
        let known = CURRENT.load(Ordering::Acquire);
        // SAFETY: null, or from a box that was leaked below and is never freed.
        if let Some(tables) = unsafe { known.as_ref() }
            && tables.pid == pid
        {
            return tables;
        }
        let fresh = Box::into_raw(Box::new(Tables {
            pid,
            last: AtomicU64::new(0),
            groups: Table::new("group"),
            works: Table::new("work"),
            servers: Table::new("server"),
            finished: Finished::default(),
            tracked: Mutex::default(),
            recorder: RwLock::default(),
        }));
        let set = CURRENT.compare_exchange(known, fresh, Ordering::AcqRel, Ordering::Acquire);
        if set.is_err() {
            // SAFETY: from the box above, and nobody has seen it.
            drop(unsafe { Box::from_raw(fresh) });
        }
    }
}

impl Tables {
    /// Tells the recorder, if there is one.
    pub(crate) fn record(&self, tell: impl FnOnce(&Recorder)) {
        if let Some(recorder) = &*self.recorder.read() {
            tell(recorder);
        }
    }

    /// A number that no other thing of this process or its relatives has.
    pub(crate) fn number(&self) -> u64 {
        let count = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        u64::from(self.pid) << COUNT_BITS | count & ((1 << COUNT_BITS) - 1)
    }
}

/// Things of one kind by their numbers.
pub(crate) struct Table<T> {
    what: &'static str,
    things: Mutex<HashMap<u64, Arc<T>>>,
}

impl<T> Table<T> {
    fn new(what: &'static str) -> Self {
        let things = Mutex::default();
        Self { what, things }
    }

    pub(crate) fn insert(&self, handle: u64, thing: Arc<T>) {
        self.things.lock().insert(handle, thing);
    }

    pub(crate) fn get(&self, handle: u64) -> Result<Arc<T>, Failure> {
        let thing = self.things.lock().get(&handle).cloned();
        thing.ok_or_else(|| self.unknown(handle))
    }

    pub(crate) fn remove(&self, handle: u64) -> Result<Arc<T>, Failure> {
        let thing = self.things.lock().remove(&handle);
        thing.ok_or_else(|| self.unknown(handle))
    }

    fn unknown(&self, handle: u64) -> Failure {
        let (what, pid) = (self.what, std::process::id());
        match handle >> COUNT_BITS == u64::from(pid) {
            true => Failure::new("handle", format!("this {what} has been destroyed")),
            false => Failure::new(
                "handle",
                format!(
                    "this {what} belongs to process {}, and this is process {pid}",
                    handle >> COUNT_BITS
                ),
            )
            .hint("a group does not survive a fork: form it in the process that uses it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_number_says_whose_it_is() {
        let tables = tables();
        let handle = tables.number();
        let failure = |handle| tables.works.get(handle).err().unwrap();
        assert_eq!(&*failure(handle).message, "this work has been destroyed");
        tables.works.insert(handle, Arc::default());
        assert!(tables.works.get(handle).is_ok());
        let foreign = failure(handle + (1 << COUNT_BITS));
        let pid = std::process::id();
        let expected = format!(
            "this work belongs to process {}, and this is process {pid}",
            pid + 1
        );
        assert_eq!(*foreign.message, *expected);
        assert!(foreign.hint.is_some());
    }
}
