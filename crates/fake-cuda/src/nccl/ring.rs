//! Sums and maxima around a ring in the order of NCCL's ring, which depends on the number of ranks.
//!
//! Each of `n` ranks receives the previous one's sums of a part, adds its own numbers and passes them on. After `n - 1` steps
//! each has the complete sum of one part; `n - 1` more steps distribute the parts.

use std::ops::Range;

use super::comm::{Aborted, Comm};
use super::number::{Fold, Type};
use super::op::Talk;

/// All ranks' numbers folded into one, on all ranks.
pub(super) fn all_reduce(
    comm: &Comm,
    talk: &Talk,
    mut own: Vec<u8>,
    (fold, kind): (Fold, Type),
) -> Result<Vec<u8>, Aborted> {
    let world = comm.world as usize;
    let count = own.len() / kind.size();
    let part = |number: usize| -> Range<usize> {
        let number = number % world;
        let at = |number: usize| count * number / world * kind.size();
        at(number)..at(number + 1)
    };
    let rank = comm.rank as usize;
    for step in 0..world - 1 {
        // One less than the rank, so that each rank ends with the part of its number.
        pass_on(comm, talk, step, &own[part(rank + 2 * world - 1 - step)])?;
        let arrived = part(rank + 2 * world - 2 - step);
        fold_in(comm, talk, step, &mut own[arrived], (fold, kind))?;
    }
    for step in 0..world - 1 {
        pass_on(comm, talk, world + step, &own[part(rank + world - step)])?;
        let arrived = part(rank + 2 * world - 1 - step);
        let bytes = talk.receive(comm, previous(comm), (world + step) as u64)?;
        own[arrived].copy_from_slice(&bytes);
    }
    Ok(own)
}

fn previous(comm: &Comm) -> u32 {
    (comm.rank + comm.world - 1) % comm.world
}

fn pass_on(comm: &Comm, talk: &Talk, step: usize, bytes: &[u8]) -> Result<(), Aborted> {
    talk.send(comm, (comm.rank + 1) % comm.world, step as u64, bytes)
}

/// Adds the previous rank's sums so far.
fn fold_in(
    comm: &Comm,
    talk: &Talk,
    step: usize,
    own: &mut [u8],
    (fold, kind): (Fold, Type),
) -> Result<(), Aborted> {
    let mut sums = talk.receive(comm, previous(comm), step as u64)?;
    fold.fold(&mut sums, own, kind);
    own.copy_from_slice(&sums);
    Ok(())
}
