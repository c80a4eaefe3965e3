//! Going on with the ranks that are left: the next generation of the group, and the commit that holds.

use std::sync::Arc;

use burn::module::Module;
use paceline_collective::{Place, ProcessGroup, Settlement, Standing, Tree};

use super::{Ddp, Reduced};
use crate::comm_hook::CommHook;
use crate::error::DdpError;
use crate::recovery::Recovery;
#[cfg(test)]
use crate::recovery::faults;
use crate::reducer::Reducer;
use crate::timeline::Timeline;

/// The next generation of a group, in tests.
#[cfg(test)]
pub(crate) type Successor =
    Box<dyn Fn(&ProcessGroup) -> Result<ProcessGroup, paceline_collective::Error> + Send + Sync>;

/// What a rank does after a failure.
enum Next {
    /// It fails.
    Fail,
    /// It repeats the commit that it was in.
    Repeat,
    /// It takes the result of that commit from another rank.
    Borrow {
        result: Vec<u8>,
        /// The reducer of the step that lacks the result.
        reducer: Arc<dyn Reducer>,
    },
}

impl Ddp {
    /// Runs `agree`, and again whenever a rank is lost meanwhile, until the ranks that are left succeed. With
    /// [`Recovery::None`] it runs once.
    ///
    /// Use it for operations between steps, on [`group`](Self::group), such as sums of an evaluation. `agree` returns the
    /// same bytes on all ranks, and its last operation needs something of every rank: an all-reduce, an all-gather or a barrier,
    /// but no broadcast. All ranks call this function in the same order. After a loss, [`shards`](Self::shards), the rank and
    /// the number of ranks may differ.
    ///
    /// *Cost*: without a failure, a copy of the result. *Blocks*: like `agree`; after a loss, until the ranks that are left have
    /// formed the next generation of the group.
    ///
    /// *Errors*: those of `agree`.
    ///
    /// *Example*:
    /// ```
    /// # use paceline_ddp::{Ddp, DdpError};
    /// # fn score(_: std::ops::Range<usize>) -> Vec<u8> { Vec::new() }
    /// # fn sum(ddp: &mut Ddp) -> Result<Vec<u8>, DdpError> {
    /// ddp.with_recovery(|ddp| {
    ///     let own = score(ddp.shards());
    ///     Ok(ddp.group().all_gather_bytes(&own)?.concat())
    /// })
    /// # }
    /// ```
    pub fn with_recovery<E: From<DdpError>>(
        &mut self,
        mut agree: impl FnMut(&Self) -> Result<Vec<u8>, E>,
    ) -> Result<Vec<u8>, E> {
        loop {
            if let Some(result) = self.agree_once(&mut agree)? {
                return Ok(result);
            }
        }
    }

    /// The same, or `None` if a rank was lost and no rank that is left has the result.
    pub(super) fn agree_once<E: From<DdpError>>(
        &mut self,
        mut agree: impl FnMut(&Self) -> Result<Vec<u8>, E>,
    ) -> Result<Option<Vec<u8>>, E> {
        let result = match agree(self) {
            Ok(result) => result,
            Err(error) => match self.recover()? {
                Next::Fail => return Err(error),
                Next::Repeat => return Ok(None),
                Next::Borrow { result, .. } => result,
            },
        };
        if self.is_live() {
            self.commits.complete(result.clone());
        }
        Ok(Some(result))
    }

    /// Runs a step, and again whenever a rank is lost meanwhile. `attempt` leaves everything as it was if it fails.
    pub(super) fn repeat_step<M, E>(
        &mut self,
        model: &M,
        mut attempt: impl FnMut(&mut Self) -> Result<Reduced, E>,
    ) -> Result<Reduced, E>
    where
        M: Module,
        E: From<DdpError>,
    {
        self.require_recoverable()?;
        let completed = self.commits.completed;
        loop {
            let error = match attempt(self) {
                Ok(reduced) => return Ok(reduced),
                Err(error) => error,
            };
            // The ranks have completed the step itself.
            if self.commits.completed != completed {
                return Err(error);
            }
            match self.recover()? {
                Next::Fail => return Err(error),
                Next::Repeat => {}
                Next::Borrow { result, reducer } => {
                    let (tail, _) = result.as_chunks::<4>();
                    let tail = tail.iter().map(|bytes| f32::from_le_bytes(*bytes));
                    let Some(finished) = reducer.finish_with(tail.collect()) else {
                        return Err(error);
                    };
                    let statistics = self.read_buffers(model)?;
                    let reduced =
                        self.conclude(model, &statistics, Timeline::default(), finished)?;
                    // The others have heard these times, and heeded an invitation, before they regrouped.
                    self.restart_pace();
                    self.is_invited = false;
                    return Ok(reduced);
                }
            }
        }
    }

    pub(super) fn is_live(&self) -> bool {
        self.options.recovery == Recovery::Live
    }

    /// *Errors*: live recovery, of a kind of training that is restarted from a checkpoint instead.
    pub(super) fn require_recoverable(&self) -> Result<(), DdpError> {
        if !self.is_live() {
            return Ok(());
        }
        let hook = self.options.comm_hook;
        let what = if hook != CommHook::None {
            "a communication hook: what the lost rank has not sent yet is lost"
        } else if self.norms.is_some() {
            "SyncBatchNorm, which needs one shard on each rank"
        } else if self.shares.is_some() || self.options.deferred_init {
            "a sharded optimizer: the lost rank's slices are lost"
        } else if self.parts.is_some() || self.placement.is_some() {
            "a model in parts or stages: the lost rank's part is lost"
        } else {
            return Ok(());
        };
        Err(DdpError::Recovery { what })
    }

    /// After a failure of the group, goes on with the ranks that are left.
    fn recover(&mut self) -> Result<Next, DdpError> {
        if !self.is_live() || !self.group.is_lost() {
            return Ok(Next::Fail);
        }
        let own = self.commits.completed;
        loop {
            let Ok(settled) = self.regroup(Place::Within)? else {
                return Ok(Next::Fail);
            };
            let borrows = |(completed, _): &(u64, Vec<u8>)| own < *completed;
            let lent = settled.lent.filter(borrows);
            let until_now = lent.is_some().then(|| self.reducer.clone());
            if !self.adopt()? {
                continue;
            }
            return Ok(match (lent, until_now) {
                (Some((_, result)), Some(reducer)) => Next::Borrow { result, reducer },
                _ => Next::Repeat,
            });
        }
    }

    /// Goes on with the next generation of the group, or the one after it if ranks are lost meanwhile. The inner error says why
    /// no generation follows.
    pub(super) fn regroup(
        &mut self,
        place: Place,
    ) -> Result<Result<Settled, paceline_collective::Error>, DdpError> {
        loop {
            // Later calls on the device wait for those that the lost rank has left there.
            self.reducer.abort()?;
            match self.next_group() {
                Ok(group) => self.group = group,
                Err(error) => {
                    paceline_rendezvous::notice!(WARN, "live recovery ends: {error}");
                    return Ok(Err(error));
                }
            }
            // An invitation to it is over.
            self.is_invited = false;
            let standing = Standing {
                place,
                completed: self.commits.completed,
            };
            match settle(&self.group, standing, &self.commits.result) {
                Ok(settled) => return Ok(Ok(settled)),
                // Another rank is lost.
                Err(_) if self.group.is_lost() => {}
                Err(error) => {
                    self.group.abort(&error.to_string());
                    return Err(error);
                }
            }
        }
    }

    fn next_group(&self) -> Result<ProcessGroup, paceline_collective::Error> {
        #[cfg(test)]
        if let Some(next) = &self.successor {
            return next(&self.group);
        }
        match self.group.health() {
            Ok(()) => self.group.admit(),
            Err(_) => self.group.next_generation(),
        }
    }

    /// Deals the shards and the memory of gradients anew, for the group's ranks; `false` if another rank is lost meanwhile.
    ///
    /// *Blocks*: on a device, until all ranks have come.
    pub(super) fn adopt(&mut self) -> Result<bool, DdpError> {
        match self.deal_anew() {
            Ok(()) => Ok(true),
            Err(_) if self.group.is_lost() => Ok(false),
            Err(error) => {
                self.group.abort(&error.to_string());
                Err(error)
            }
        }
    }

    fn deal_anew(&mut self) -> Result<(), DdpError> {
        #[cfg(test)]
        faults::in_recovery(faults::Fault::DiesDealing, &self.group);
        let (shards, world) = (self.shard_count(), self.group.world());
        self.tree = Tree::split(shards, world).map_err(|_| DdpError::Shards { shards, world })?;
        if self.options.stop_on_signal {
            let listens = self.group.stop_on_signal();
            listens.map_err(|error| DdpError::Signals(Arc::new(error)))?;
        }
        // The group's operations begin anew.
        self.undone = 0;
        self.fingerprint.change_group();
        self.restart_pace();
        let made = (self.make)(&self.device, self.setup(self.plan.clone()))?;
        self.replace_reducer(made);
        self.reducer.reserve()?;
        self.group.trim();
        Ok(())
    }
}

/// What the ranks of a new generation have settled.
pub(super) struct Settled {
    pub(super) settlement: Settlement,
    /// If some rank lacks the last commit's result: how many commits count, and that result.
    lent: Option<(u64, Vec<u8>)>,
}

/// Finds the commit that holds. All ranks of a new generation call it; `result` is that of this rank's last commit.
pub(super) fn settle(
    group: &ProcessGroup,
    standing: Standing,
    result: &[u8],
) -> Result<Settled, DdpError> {
    #[cfg(test)]
    faults::in_recovery(faults::Fault::DiesSettling, group);
    let all = group.all_gather_bytes(&standing.encode())?;
    let all: Vec<Standing> = all.iter().map(|bytes| Standing::decode(bytes)).collect();
    let settlement = paceline_collective::settle(&all)?;
    let lent = settlement.lender.map(|lender| {
        let own = (group.rank() == lender).then_some(result);
        let lent = group.broadcast_bytes(own, lender)?;
        Ok::<_, DdpError>((all[lender].completed, lent))
    });
    Ok(Settled {
        lent: lent.transpose()?,
        settlement,
    })
}
