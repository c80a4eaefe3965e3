//! Where the shards of all ranks meet to normalise together.
//!
//! Shards of one rank have a thread each, of which one runs at a time: the next one begins when this one waits in a layer. The
//! last one adds up over the ranks, and the first one goes on.
//!
//! ```text
//!  shard 0   compute | wait                            | compute | wait ...
//!  shard 1           | compute | wait                  |         | compute ...
//!  shard 2                     | compute, all_reduce   |
//! ```
//!
//! The operations have a process group of their own, beside those of the gradients, which another thread may submit.

use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use burn::module::Module;
use paceline_collective::{AllReduce, ProcessGroup, ReduceOp, Tree};

use super::Find;
use crate::error::DdpError;
use crate::stack::Stack;

/// The ranks that normalise together.
#[derive(Debug)]
pub(crate) struct Ranks {
    group: ProcessGroup,
    tree: Arc<Tree>,
}

impl Ranks {
    /// The ranks of `group` if `model` has a layer that needs them. All ranks call it.
    pub(crate) fn connect<M: Module>(
        group: &ProcessGroup,
        tree: &Arc<Tree>,
        model: &M,
    ) -> Result<Option<Arc<Self>>, DdpError> {
        let mut find = Find(false);
        model.visit(&mut find);
        if !find.0 || tree.leaves() == 1 {
            return Ok(None);
        }
        // One colour for all.
        let beside = group.split(Some(0), 0)?;
        Ok(beside.map(|group| {
            let tree = tree.clone();
            Arc::new(Self { group, tree })
        }))
    }

    /// Tells the ranks that this one cannot go on.
    pub(crate) fn abort(&self, why: &str) {
        self.group.abort(why);
    }

    /// The sum of what all shards bring, along their tree.
    fn sum(&self, parts: Vec<Vec<f64>>) -> Result<Vec<f64>, DdpError> {
        let (rank, len) = (self.group.rank(), parts[0].len());
        let mut stack = Stack::default();
        for (shard, part) in self.tree.range(rank).zip(parts) {
            stack.push(&self.tree, rank, shard, part);
        }
        let call = AllReduce {
            tree: Some(self.tree.clone()),
            ..AllReduce::new(ReduceOp::Sum, len)
        };
        let buffer = stack.buffer(&self.group, len)?;
        let sum = self.group.all_reduce_buffer(buffer, call)?.buffer;
        Ok(sum[..len].to_vec())
    }
}

/// The shards of this rank in one step.
#[derive(Debug)]
pub(crate) struct Meeting {
    ranks: Arc<Ranks>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The shard that runs, by its turn.
    running: usize,
    places: Vec<Place>,
    /// Of the last layer.
    sum: Vec<f64>,
    /// The first shard that ended, by its turn.
    ended: Option<usize>,
    failed: Option<DdpError>,
}

#[derive(Debug)]
enum Place {
    Computes,
    /// Waits in a layer with what it brings.
    Waits(Vec<f64>),
    Ended,
}

impl Meeting {
    pub(crate) fn new(ranks: &Arc<Ranks>) -> Arc<Self> {
        let shards = ranks.tree.range(ranks.group.rank());
        let places = shards.map(|_| Place::Computes).collect();
        Arc::new(Self {
            ranks: ranks.clone(),
            state: Mutex::new(State {
                running: 0,
                places,
                sum: Vec::new(),
                ended: None,
                failed: None,
            }),
            changed: Condvar::new(),
        })
    }

    /// Waits until it is this shard's turn. The thread's layers find the meeting until the result is dropped.
    pub(crate) fn attend(self: &Arc<Self>, turn: usize) -> Attendance {
        let state = self.lock();
        drop(self.wait(state, |state| state.running == turn));
        let member = Arc::new(Member {
            meeting: self.clone(),
            turn,
            weight: Mutex::new(1.0),
        });
        let outer = CURRENT.with_borrow_mut(|current| current.replace(member.clone()));
        Attendance { member, outer }
    }

    /// Lets all shards that wait fail.
    pub(crate) fn give_up(&self) {
        let mut state = self.lock();
        let shard = self.ranks.tree.range(self.ranks.group.rank()).start;
        let failed = &mut state.failed;
        *failed = failed.take().or(Some(DdpError::NotNormalised { shard }));
        self.changed.notify_all();
    }

    /// The turn of the shard that ended first, which the others may have waited for.
    pub(crate) fn ended_first(&self) -> Option<usize> {
        self.lock().ended
    }

    fn meet(&self, turn: usize, values: Vec<f64>) -> Result<Vec<f64>, DdpError> {
        let mut state = self.lock();
        state.places[turn] = Place::Waits(values);
        self.pass_on(&mut state);
        let state = self.wait(state, |state| {
            state.running == turn && matches!(state.places[turn], Place::Computes)
        });
        match &state.failed {
            Some(error) => Err(error.clone()),
            None => Ok(state.sum.clone()),
        }
    }

    fn end(&self, turn: usize) {
        let mut state = self.lock();
        state.places[turn] = Place::Ended;
        state.ended = state.ended.or(Some(turn));
        self.pass_on(&mut state);
    }

    /// Gives the turn to the next shard, or begins the next round.
    fn pass_on(&self, state: &mut State) {
        let computes = |place: &Place| matches!(place, Place::Computes);
        let has_ended = |place: &Place| matches!(place, Place::Ended);
        if let Some(next) = state.places.iter().position(computes) {
            state.running = next;
        } else if state.places.iter().any(has_ended) {
            let is_over = state.places.iter().all(has_ended);
            let first = self.ranks.tree.range(self.ranks.group.rank()).start;
            let shard = first + state.ended.unwrap_or(0);
            if !is_over && state.failed.is_none() {
                state.failed = Some(DdpError::NotNormalised { shard });
            }
        } else {
            let parts = state.places.iter_mut().map(|place| {
                match std::mem::replace(place, Place::Computes) {
                    Place::Waits(values) => values,
                    Place::Computes | Place::Ended => Vec::new(),
                }
            });
            let parts = parts.collect();
            state.running = 0;
            match self.ranks.sum(parts) {
                Ok(sum) => state.sum = sum,
                Err(error) => state.failed = Some(error),
            }
        }
        self.changed.notify_all();
    }

    /// Waits for `is_due` or a failure. Bounded, because the other shards compute or end, and their operations have deadlines.
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        is_due: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        let waits = |state: &mut State| state.failed.is_none() && !is_due(state);
        let woken = self.changed.wait_while(state, waits);
        woken.unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // After a panic the step has failed.
        let state = self.state.lock();
        state.unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// One shard in a meeting.
#[derive(Debug)]
pub(super) struct Member {
    meeting: Arc<Meeting>,
    turn: usize,
    /// Of the running backward pass.
    weight: Mutex<f32>,
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<Member>>> = const { RefCell::new(None) };
}

impl Member {
    /// The shard that this thread computes.
    pub(super) fn current() -> Option<Arc<Self>> {
        CURRENT.with_borrow(Clone::clone)
    }

    pub(super) fn weight(&self) -> f64 {
        f64::from(*self.weight.lock().expect("no holder panics"))
    }

    /// The sum of `weight * values` over all shards, divided by this shard's weight.
    pub(super) fn sum(&self, mut values: Vec<f64>, weight: f64) -> Result<Vec<f64>, DdpError> {
        values.iter_mut().for_each(|value| *value *= weight);
        let mut values = self.meeting.meet(self.turn, values)?;
        // A shard whose gradients have no weight gets none.
        let share = if weight == 0.0 { 0.0 } else { 1.0 / weight };
        values.iter_mut().for_each(|value| *value *= share);
        Ok(values)
    }
}

/// Sets the weight of the backward pass that begins on this thread.
pub(crate) fn set_weight(weight: f32) {
    if let Some(member) = Member::current() {
        *member.weight.lock().expect("no holder panics") = weight;
    }
}

/// A shard's presence at a meeting; ends when it is dropped.
pub(crate) struct Attendance {
    member: Arc<Member>,
    outer: Option<Arc<Member>>,
}

impl Drop for Attendance {
    fn drop(&mut self) {
        CURRENT.with_borrow_mut(|current| *current = self.outer.take());
        self.member.meeting.end(self.member.turn);
    }
}
