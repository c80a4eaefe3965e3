//! The plans of all ranks, run on symbols; and the document that is counted from them.

mod document;
mod simulate;
