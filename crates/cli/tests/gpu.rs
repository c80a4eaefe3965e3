//! `paceline gpu` on machines that are not there: each fixture's driver and system, and what is printed of them.
//!
//! What is printed is compared with the files under `tests/gpu/expected/`. After a change that is meant, write them anew
//! and read what changed:
//!
//!     PACELINE_EXPECT=write cargo test -p paceline-cli --test gpu
//!     git diff crates/cli/tests/gpu/expected
//!
//! A test that writes fails, so that nobody takes it for one that compared.

mod gpu {
    mod doctor;
    mod p2p;
    mod support;
    mod topo;
    mod usage;
}
