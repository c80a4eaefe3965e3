//! The first error inside a forward or backward pass, on its way to the caller of the pass.

use std::error::Error;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::pass::Pass;

/// Any error that can leave a pass.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Where the closures of a pass leave their first error, because Burn's forward and backward functions return none.
///
/// A closure that fails returns zeros in place of a result, and later closures of the pass do not run. The caller of the pass
/// takes the error out and must not use the gradients.
#[derive(Clone, Debug)]
pub struct Failure(Option<Arc<Mutex<State>>>);

impl Default for Failure {
    fn default() -> Self {
        Self(Some(Arc::default()))
    }
}

#[derive(Debug, Default)]
struct State {
    has_failed: bool,
    error: Option<BoxError>,
}

impl Failure {
    /// Where the pass of this thread leaves its first error. Outside of a pass an error would be lost, so it panics.
    pub fn current() -> Self {
        Pass::current().map_or_else(Self::unheard, |pass| pass.failure().clone())
    }

    /// For a pass without a caller that takes its error: the first one panics.
    pub(crate) fn unheard() -> Self {
        Self(None)
    }

    /// Runs `f` and returns its value, or `None` if it or an earlier closure failed.
    pub fn attempt<T, E: Into<BoxError>>(&self, f: impl FnOnce() -> Result<T, E>) -> Option<T> {
        if self.has_failed() {
            return None;
        }
        f().map_err(|error| self.set(error)).ok()
    }

    /// Keeps `error` unless there is an earlier one.
    pub fn set(&self, error: impl Into<BoxError>) {
        let error = error.into();
        let Some(mut state) = self.state() else {
            panic!("{error}");
        };
        if !state.has_failed {
            state.has_failed = true;
            state.error = Some(error);
        }
    }

    /// Whether a closure failed, even if its error has been taken.
    pub fn has_failed(&self) -> bool {
        self.state().is_some_and(|state| state.has_failed)
    }

    /// Takes the error out. The pass stays failed.
    pub fn take(&self) -> Option<BoxError> {
        self.state()?.error.take()
    }

    fn state(&self) -> Option<MutexGuard<'_, State>> {
        let state = self.0.as_ref()?;
        Some(state.lock().expect("no holder panics"))
    }
}
