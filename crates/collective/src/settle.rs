//! What holds when a generation begins: which commit, and who gives what to whom. A pure decision, which programs of any kind share.
//!
//! All ranks run the same *commits* in the same order, and count those that they have completed. The last operation of a commit needs
//! something of every rank, so no two ranks are further apart than one. `ddp/src/recovery.rs` has the proof for steps of Burn, and
//! `python/paceline/torch/live.py` that for steps of PyTorch.

/// Where a rank is in the program when a generation begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a commit, which it repeats.
    Within,
    /// Between two commits: it can hand its state over.
    Between,
    /// It replaces a lost rank, and has no state.
    New,
}

/// How far a rank has come when a generation begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Where it is.
    pub place: Place,
    /// The commits that it has completed.
    pub completed: u64,
}

impl Standing {
    /// What it tells the other ranks.
    pub fn encode(self) -> [u8; 9] {
        let mut bytes = [self.place as u8; 9];
        bytes[..8].copy_from_slice(&self.completed.to_le_bytes());
        bytes
    }

    /// Bytes that `encode` did not write stand for a rank that has completed nothing.
    pub fn decode(bytes: &[u8]) -> Self {
        let (completed, place) = bytes.split_first_chunk().unwrap_or((&[0; 8], &[]));
        Self {
            place: match place {
                [place] if *place == Place::Between as u8 => Place::Between,
                [place] if *place == Place::New as u8 => Place::New,
                _ => Place::Within,
            },
            completed: u64::from_le_bytes(*completed),
        }
    }
}

/// Who gives what to whom when a generation begins.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Settlement {
    /// The commits that hold.
    pub completed: u64,
    /// The rank that lends the last commit's result to those that lack it; `None` if all have it.
    pub lender: Option<usize>,
    /// The rank that hands its state over to the new ones.
    pub giver: Option<usize>,
    /// The ranks without state.
    pub new: Vec<usize>,
}

/// Ranks that are further apart than one commit, which only a program causes whose ranks run different commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "rank {rank} has completed {completed} steps and other agreements, but another rank {most}: expected a difference of at most one"
)]
pub struct Apart {
    /// The rank that is behind.
    pub rank: usize,
    /// Its number of commits.
    pub completed: u64,
    /// The largest number.
    pub most: u64,
}

/// Settles by how far each rank has come.
///
/// *Errors*: ranks that are further apart than one commit.
pub fn settle(all: &[Standing]) -> Result<Settlement, Apart> {
    let ranks = || all.iter().enumerate();
    let old = || ranks().filter(|(_, standing)| standing.place != Place::New);
    let most = old().map(|(_, standing)| standing.completed).max();
    let most = most.unwrap_or(0);
    if let Some((rank, standing)) = old().find(|(_, standing)| standing.completed + 1 < most) {
        let completed = standing.completed;
        return Err(Apart {
            rank,
            completed,
            most,
        });
    }
    let is_behind = old().any(|(_, standing)| standing.completed < most);
    let lender = old().find(|(_, standing)| standing.completed == most);
    let giver = old().find(|(_, standing)| standing.place == Place::Between);
    let new = ranks().filter(|(_, standing)| standing.place == Place::New);
    Ok(Settlement {
        completed: most,
        lender: lender.map(|(rank, _)| rank).filter(|_| is_behind),
        giver: giver.map(|(rank, _)| rank),
        new: new.map(|(rank, _)| rank).collect(),
    })
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
