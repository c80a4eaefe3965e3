//! What the launcher itself says on stderr.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::OnceLock;

use crate::output::bar;

/// Begins each line in which a launcher that another one has started says something about the job: all nodes say the same.
pub(crate) const OF_JOB: u8 = 0x1e;

/// The same for something about its machine alone.
pub(crate) const OF_MACHINE: u8 = 0x1f;

static IS_MARKED: OnceLock<()> = OnceLock::new();

/// From now on this process marks its own lines, so that the launcher that has started it over ssh can tell them from those of
/// ranks.
pub fn mark_lines() {
    let _ = IS_MARKED.set(());
}

/// Lines for stderr with marks, if there are to be any; `is_of_job` if the launchers of other nodes say the same.
pub fn marked(text: &str, is_of_job: bool) -> Option<String> {
    IS_MARKED.get()?;
    let mark = char::from(if is_of_job { OF_JOB } else { OF_MACHINE });
    let lines = text.split_inclusive('\n');
    Some(lines.map(|line| format!("{mark}{line}")).collect())
}

/// Whether a line has such a mark.
pub(crate) fn is_marked(line: &[u8]) -> bool {
    matches!(line.first(), Some(&OF_JOB | &OF_MACHINE))
}

/// Says a line. A terminal that is gone takes none, and the job goes on, because it may still have to be saved.
pub(crate) fn line(line: impl Display) {
    lines(format_args!("{line}\n"));
}

/// Says text of whole lines, in the same way.
pub(crate) fn lines(text: impl Display) {
    bar::clear();
    let text = text.to_string();
    let text = marked(&text, true).unwrap_or(text);
    let _ = io::stderr().lock().write_all(text.as_bytes());
}
