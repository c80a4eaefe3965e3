//! What goes wrong with a rank or between ranks, at every moment: the others say who and what, in time, and end.
//!
//! Ranks are processes of this test binary; over TCP they connect through a proxy that can fail. Beside the matrix there
//! is a run of random faults from a seed. `PACELINE_FAULTS=1000 cargo test -p paceline-collective --test faults random --
//! --nocapture` plays a thousand of them (some minutes) instead of a few seconds' worth, `PACELINE_FAULTS_SEED` chooses
//! others, and `PACELINE_FAULTS_CASE` plays a single one of them again. The same variable sets how many kills the times
//! are measured of.

#![allow(unreachable_pub, reason = "modules of one test binary")]

#[path = "../common/mod.rs"]
mod common;

mod case;
mod matrix;
mod ops;
mod proxy;
mod random;
mod rank;
mod times;
