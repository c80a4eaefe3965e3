//! Warnings: an event for the program's subscriber, or a line on stderr where the program has none.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::sync::{LazyLock, Mutex, PoisonError};

#[doc(hidden)]
pub use tracing;
use tracing::Level;

/// Texts that are remembered, so that each is printed once; later ones are printed every time.
const REMEMBERED_MAX: usize = 4096;

/// Reports an event of this level (`INFO`, `WARN` or `ERROR`) with [`tracing`]; the rest is as for [`format!`].
///
/// A program that never set a subscriber still sees it: as one line on stderr, once for equal texts.
///
/// ```
/// let wanted = "shm";
/// paceline_rendezvous::notice!(WARN, "transport {wanted} is not used: the ranks are on two hosts");
/// ```
#[macro_export]
macro_rules! notice {
    ($level:ident, $($text:tt)+) => {{
        let text = ::std::format!($($text)+);
        $crate::notice::tracing::event!($crate::notice::tracing::Level::$level, "{text}");
        $crate::notice::print($crate::notice::tracing::Level::$level, &text);
    }};
}

/// Prints the line, unless the program ever had a subscriber: the event has gone there.
#[doc(hidden)]
pub fn print(level: Level, text: &str) {
    static PRINTED: Mutex<Option<HashSet<u64>>> = Mutex::new(None);
    static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

    if tracing::dispatcher::has_been_set() {
        return;
    }
    let mut printed = PRINTED.lock().unwrap_or_else(PoisonError::into_inner);
    let printed = printed.get_or_insert_default();
    let is_new = printed.len() >= REMEMBERED_MAX || printed.insert(HASHER.hash_one(text));
    if !is_new {
        return;
    }
    let severity = match level {
        Level::ERROR => "error",
        Level::INFO => "note",
        _ => "warning",
    };
    // One write, so that lines of several processes do not mix; a closed stderr is no reason to fail.
    let line = format!("{severity}: {text}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}
