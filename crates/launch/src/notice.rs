//! What the launcher itself says on stderr.

use std::fmt::Display;
use std::io::{self, Write};

use crate::output::bar;

/// Says a line. A terminal that is gone takes none, and the job goes on, because it may still have to be saved.
pub(crate) fn line(line: impl Display) {
    bar::clear();
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Says text of whole lines, in the same way.
pub(crate) fn lines(text: impl Display) {
    bar::clear();
    let _ = write!(io::stderr().lock(), "{text}");
}
