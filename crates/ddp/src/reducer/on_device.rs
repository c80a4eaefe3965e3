//! Buckets that are tensors on their device: packed, summed over the rank's shards, and reduced there by a collective on device
//! memory. Gradients of models with f64 parameters take this path in ordinary memory, see [`InDouble`](super::InDouble).
//!
//! With a sharded optimizer each rank gets its slice of the sum, and the updated weights are gathered the same way.
//!
//! All other data of a step (used flags, weights, sums) goes through host memory in the tail bucket, so no rank waits for a
//! device to get it. On that path the process group detects and names a stuck or dead rank.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use burn::tensor::{DType, Device, Tensor};
use paceline_collective::{ProcessGroup, Tree};

use super::host::Tail;
use super::{
    Event, Finished, Gathered, HostReducer, IN_FLIGHT, LATE, Means, Micro, Reducer, Setup, lock,
};
use crate::buffer::Value;
use crate::error::DdpError;
use crate::hook::GradientSink;
use crate::plan::{BucketPlan, DEVICE_ALIGN};
use crate::timeline::BucketTiming;
use crate::zero::{Shares, ZeroStage};

/// Collectives on the memory of one kind of device.
pub(crate) trait DeviceGroup: Send + Sync {
    /// The device, without autodiff.
    fn device(&self) -> &Device;

    /// The type of the sums.
    fn dtype(&self) -> DType {
        DType::F32
    }

    /// Returns the same tensor, forcing its kernels to end here.
    ///
    /// A fusing back end may merge a product and the following sum into one kernel, which rounds once instead of twice. The
    /// rounding must not depend on which operations follow.
    fn computed(&self, tensor: Tensor<1>) -> Tensor<1>;

    /// Sums blocks over all ranks in the device's execution order; with [`DeviceCall::counts`] this rank gets its part of the
    /// sum. Returns at once.
    fn reduce(
        &self,
        call: DeviceCall,
        blocks: Vec<Tensor<1>>,
    ) -> Result<Box<dyn DeviceTicket>, DdpError>;

    /// Collects the parts of all ranks, of [`DeviceCall::counts`] elements; `values` has this rank's part in place. Returns at
    /// once.
    fn all_gather(
        &self,
        call: DeviceCall,
        values: Tensor<1>,
    ) -> Result<Box<dyn DeviceTicket>, DdpError>;

    /// Waits for all calls.
    ///
    /// *Errors*: the first failure.
    fn synchronize(&self) -> Result<(), DdpError>;

    /// Ends all calls. Results of earlier ones stay; later ones fail.
    ///
    /// *Errors*: the device cannot be used any more.
    fn abort(&self) -> Result<(), DdpError>;

    /// The way of other groups of this rank to the device, if they have one.
    fn port(&self) -> Option<&dyn DevicePort> {
        None
    }
}

/// The way to a device for all groups of a rank.
pub(crate) trait DevicePort {
    /// Joins the other ranks of a group, all of which call it. Sums are in the order of `tree`. `None` if ranks share a device.
    fn join(
        &self,
        group: &ProcessGroup,
        tree: &Arc<Tree>,
    ) -> Result<Option<Arc<dyn DeviceExchange>>, DdpError>;
}

/// Exchanges between the ranks of a group of values that stay on their device, in the order in which the ranks call them.
///
/// *Blocks*: no. Later kernels wait for the results, and no kernel of the device runs before them. [`Ddp::synchronize`] waits for
/// calls that have no other use.
///
/// *Errors*: the first failure of this rank's device; that of a call that has returned comes with a later one.
///
/// [`Ddp::synchronize`]: crate::Ddp::synchronize
pub trait DeviceExchange: fmt::Debug + Send + Sync {
    /// Sums all ranks' blocks; with `counts` this rank gets its part of the sum.
    ///
    /// *Shape*: the blocks of this rank in [`Tree::blocks`], of one length; `counts` are the elements of each rank's part, in rank
    /// order. *Numerics*: in f32, in the order of the tree.
    fn sum(
        &self,
        blocks: Vec<Tensor<1>>,
        counts: Option<Arc<[usize]>>,
    ) -> Result<Tensor<1>, DdpError>;

    /// All ranks' values, in rank order.
    ///
    /// *Shape*: `counts` are the elements of each rank, in rank order; the values are in f32.
    fn gather(&self, values: Tensor<1>, counts: Arc<[usize]>) -> Result<Tensor<1>, DdpError>;

    /// The largest of all ranks' values, element by element.
    ///
    /// *Shape*: of one length, in f32. *Numerics*: exact; where a value is NaN, the result is any of the ranks' values.
    fn max(&self, values: Tensor<1>) -> Result<Tensor<1>, DdpError>;

    /// Sends values to another rank of the group, which asks for as many. On the device the message waits for that, and later calls
    /// for the message: there must be one order of the messages of all groups of which every rank submits its own.
    fn send(&self, values: Tensor<1>, to: usize) -> Result<(), DdpError>;

    /// Asks for the next `len` values that another rank of the group sends.
    fn receive(&self, len: usize, dtype: DType, from: usize) -> Result<Box<dyn Arrival>, DdpError>;
}

/// Values on their way to this rank.
pub trait Arrival: Send {
    /// The values. Later kernels wait for them; the host does not.
    fn tensor(self: Box<Self>) -> Result<Tensor<1>, DdpError>;
}

/// A collective, of a bucket if it has one.
#[derive(Clone, Debug)]
pub(crate) struct DeviceCall {
    pub(crate) bucket: Option<usize>,
    pub(crate) step: u64,
    /// Elements of each rank's part, in rank order, if the ranks have parts of the bucket.
    pub(crate) counts: Option<Arc<[usize]>>,
}

impl DeviceCall {
    /// The elements of a block of `len` that a rank gets.
    pub(crate) fn part(&self, rank: usize, len: usize) -> Range<usize> {
        let Some(counts) = &self.counts else {
            return 0..len;
        };
        let start: usize = counts[..rank].iter().sum();
        start..start + counts[rank]
    }
}

/// A call in flight.
pub(crate) trait DeviceTicket: Send + Sync {
    /// Takes the result. Does not wait; later kernels that use it do.
    fn result(&self) -> Result<Tensor<1>, DdpError>;

    /// When the device began and ended. Waits for the device.
    fn times(&self) -> Option<(Instant, Instant)>;
}

pub(crate) struct DeviceReducer {
    device: Arc<dyn DeviceGroup>,
    plan: Arc<BucketPlan>,
    tree: Arc<Tree>,
    shares: Option<Arc<Shares>>,
    rank: usize,
    /// Whether this rank sends its tail only when it has all gradients.
    keeps_tail: bool,
    /// The tail bucket, in host memory.
    tail: HostReducer,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    step: u64,
    live: Vec<Live>,
    merges: usize,
    is_last_shard: bool,
    is_last_micro: bool,
    /// See [`Micro::is_ordered`].
    is_ordered: bool,
    factor: f32,
    /// By parameter: whether the current shard used it.
    used: Vec<bool>,
    /// Next bucket to launch; launches are strictly in order.
    next: usize,
    /// Buckets that may be launched, see [`Event::Open`]; `None` if all may as soon as they are complete.
    open: Option<usize>,
    /// Whether all gradients of the step have come, and only its tail may lack.
    has_gradients: bool,
    error: Option<DdpError>,
}

#[derive(Default)]
struct Live {
    /// Gradients of this backward pass, by position.
    pending: Vec<Option<Tensor<1>>>,
    missing: usize,
    /// Sum over the backward passes of the current shard.
    sum: Option<Tensor<1>>,
    /// Partial sums of earlier shards.
    stack: Vec<Tensor<1>>,
    is_merged: bool,
    ready: Option<Instant>,
    ticket: Option<Arc<dyn DeviceTicket>>,
    /// This rank's slice of the sum, in memory of its own.
    own: Option<Tensor<1>>,
    /// Its parameters on their way to all ranks.
    weights: Option<Arc<dyn DeviceTicket>>,
}

impl DeviceReducer {
    pub(crate) fn new(setup: Setup, device: Arc<dyn DeviceGroup>) -> Self {
        let plan = setup.plan.clone();
        let stage = setup.shares.as_ref().map(|shares| shares.stage());
        let is_gated = stage.is_some_and(ZeroStage::shards_parameters);
        let state = State {
            live: (0..plan.tail()).map(|_| Live::default()).collect(),
            used: vec![false; plan.places.len()],
            open: is_gated.then_some(0),
            ..State::default()
        };
        Self {
            device,
            state: Mutex::new(state),
            plan,
            tree: setup.tree.clone(),
            shares: setup.shares.clone(),
            rank: setup.group.rank(),
            keeps_tail: setup.keeps_tail,
            tail: HostReducer::of_tail(setup),
        }
    }

    fn begin_step(&self, step: u64) {
        let mut state = lock(&self.state);
        state.step = step;
        state.next = 0;
        state.open = state.open.map(|_| 0);
        state.is_last_shard = false;
        state.has_gradients = false;
        state.error = None;
        for live in &mut state.live {
            *live = Live::default();
        }
    }

    fn begin_shard(&self, shard: usize) {
        let mut state = lock(&self.state);
        state.merges = self.tree.merges_after(self.rank, shard);
        state.is_last_shard = shard + 1 == self.tree.range(self.rank).end;
        state.used.fill(false);
        for live in &mut state.live {
            live.sum = None;
            live.is_merged = false;
        }
    }

    fn begin_micro(&self, micro: Micro) {
        let mut state = lock(&self.state);
        state.factor = micro.factor;
        state.is_last_micro = micro.is_last;
        state.is_ordered = micro.is_ordered && state.open.is_none();
        for (live, bucket) in state.live.iter_mut().zip(&self.plan.buckets) {
            live.pending = vec![None; bucket.segments.len()];
            live.missing = bucket.segments.len();
        }
    }

    fn end_micro(&self) {
        let mut state = lock(&self.state);
        state.is_ordered = false;
        for bucket in 0..self.plan.tail() {
            if state.live[bucket].missing > 0 {
                self.pack(&mut state, bucket);
            }
        }
    }

    /// No more gradients come for the buckets before this one. Returns whether all could be sent.
    fn open(&self, buckets: usize) -> bool {
        let mut state = lock(&self.state);
        if state.is_last_shard {
            self.complete(&mut state, buckets.min(self.plan.tail()));
        }
        state.open = state.open.map(|_| buckets);
        self.launch_ready(&mut state);
        state.error.is_none()
    }

    /// Ends a shard; returns the parameters that it used, or `None` if a bucket could not be sent.
    fn end_shard(&self) -> Option<Vec<usize>> {
        let mut state = lock(&self.state);
        for bucket in 0..self.plan.tail() {
            self.merge(&mut state, bucket);
        }
        if self.keeps_tail && state.is_last_shard && state.error.is_none() {
            state.error = self.device.synchronize().err();
            state.has_gradients = state.error.is_none();
        }
        let used = state.used.iter().enumerate();
        let used = used.filter(|(_, used)| **used).map(|(at, _)| at);
        state.error.is_none().then(|| used.collect())
    }

    /// The averages, once every bucket has been launched. `flags` marks the parameters that any rank used.
    fn means(
        &self,
        flags: &[f32],
        weight: f32,
        timings: &mut Vec<BucketTiming>,
    ) -> Result<Vec<Option<Tensor<1>>>, DdpError> {
        let mut state = lock(&self.state);
        let mut means = vec![None; self.plan.places.len()];
        for at in 0..self.plan.tail() {
            let bucket = &self.plan.buckets[at];
            let live = &mut state.live[at];
            let ticket = live.ticket.take();
            let ticket = ticket.expect("every bucket is launched when the last shard ends");
            let asked = Instant::now();
            let sum = match live.own.take() {
                Some(own) => own,
                None => ticket.result()?,
            };
            let operation = match self.shares {
                Some(_) => "reduce_scatter",
                None => "all_reduce",
            };
            timings.push(BucketTiming::on_device(
                (at, bucket.stride * self.device.dtype().size(), operation),
                live.ready.unwrap_or(asked),
                (asked, Instant::now()),
                ticket,
            ));
            if weight == 0.0 || sum.dims()[0] == 0 {
                // A step in which no shard had a sample changes nothing.
                continue;
            }
            // Dividing by 1 changes nothing, so a single rank without shards keeps its tensor.
            let mean = if weight == 1.0 {
                sum
            } else {
                sum.div_scalar(weight)
            };
            for segment in &bucket.segments {
                let (own, first) = match &self.shares {
                    Some(shares) => (
                        shares.owned(&self.plan, segment.index, self.rank),
                        shares.span(at, self.rank).start,
                    ),
                    None => (0..segment.len, 0),
                };
                if flags[segment.index] > 0.0 && (self.shares.is_none() || !own.is_empty()) {
                    let at = segment.offset + own.start - first;
                    means[segment.index] = Some(cut(&mean, at, own.len()));
                }
            }
        }
        Ok(means)
    }

    /// The step's result, once its tail has come.
    fn finished(&self, mut tail: Tail) -> Result<Finished, DdpError> {
        let flags = tail.extras.split_off(self.sums());
        let mut timings = Vec::with_capacity(self.plan.buckets.len());
        let means = self.means(&flags, tail.weight, &mut timings)?;
        timings.extend(tail.timing);
        Ok(Finished {
            means: Means::Device(means),
            used: flags
                .iter()
                .map(|flag| *flag > 0.0 && tail.weight != 0.0)
                .collect(),
            statistics: tail.statistics,
            extras: tail.extras,
            timings,
            tail: tail.values,
        })
    }

    /// Ends the buckets before this one: they may have parameters without a gradient.
    fn complete(&self, state: &mut State, buckets: usize) {
        for bucket in state.next..buckets {
            if state.live[bucket].missing > 0 {
                self.pack(state, bucket);
            }
            self.merge(state, bucket);
        }
    }

    /// Packs the gradients of one backward pass into a block and adds it to the blocks of earlier passes.
    fn pack(&self, state: &mut State, bucket: usize) {
        let layout = &self.plan.buckets[bucket];
        let live = &mut state.live[bucket];
        live.missing = 0;
        let pending = std::mem::take(&mut live.pending);
        if pending.iter().all(Option::is_none) {
            return;
        }
        let mut block = self.zeros(layout.stride);
        for (segment, gradient) in layout.segments.iter().zip(pending) {
            if let Some(gradient) = gradient {
                let place = segment.offset..segment.offset + segment.len;
                block = block.slice_assign([place], gradient.cast(self.device.dtype()));
            }
        }
        if state.factor != 1.0 {
            let packed = self.device.computed(block);
            block = packed.mul_scalar(state.factor);
        }
        block = self.device.computed(block);
        live.sum = Some(match live.sum.take() {
            None => block,
            Some(sum) => self.device.computed(sum + block),
        });
    }

    /// Pushes a shard's block on the stack and adds siblings of the tree; after the last shard the bucket may be launched.
    fn merge(&self, state: &mut State, bucket: usize) {
        let merges = state.merges;
        let live = &mut state.live[bucket];
        if std::mem::replace(&mut live.is_merged, true) {
            return;
        }
        let stride = self.plan.buckets[bucket].stride;
        // A rank without samples for a whole shard still takes part.
        let block = live.sum.take();
        live.stack.push(block.unwrap_or_else(|| self.zeros(stride)));
        for _ in 0..merges {
            let right = live.stack.pop().expect("a merge has two blocks");
            let left = live.stack.pop().expect("a merge has two blocks");
            live.stack.push(self.device.computed(left + right));
        }
        if state.is_last_shard {
            live.ready = Some(Instant::now());
            self.launch_ready(state);
        }
    }

    /// The number of the program's sums; one flag per parameter follows them.
    fn sums(&self) -> usize {
        self.plan.buckets[self.plan.tail()].extras.len()
    }

    fn zeros(&self, len: usize) -> Tensor<1> {
        Tensor::zeros([len], (self.device.device(), self.device.dtype()))
    }

    fn call(&self, bucket: usize, step: u64) -> DeviceCall {
        let shares = self.shares.as_ref();
        DeviceCall {
            bucket: Some(bucket),
            step,
            counts: shares.map(|shares| shares.counts(bucket).clone()),
        }
    }

    fn launch_ready(&self, state: &mut State) {
        let end = state.live.len().min(state.open.unwrap_or(usize::MAX));
        while state.error.is_none() && state.next < end {
            let bucket = state.next;
            let live = &mut state.live[bucket];
            if live.ready.is_none() {
                return;
            }
            #[cfg(test)]
            self.tail.before_send(state.step, bucket);
            let call = self.call(bucket, state.step);
            match self.device.reduce(call, std::mem::take(&mut live.stack)) {
                Ok(ticket) => live.ticket = Some(ticket.into()),
                Err(error) => state.error = Some(error),
            }
            state.next += 1;
            let shares = self.shares.as_ref();
            if shares.is_some_and(|shares| shares.stage().shards_gradients())
                && let Some(oldest) = state.next.checked_sub(IN_FLIGHT + 1)
                && state.error.is_none()
            {
                state.error = reap(&mut state.live[oldest]).err();
            }
        }
    }
}

/// Copies this rank's slice of a bucket, whose memory is then free for another one.
fn reap(live: &mut Live) -> Result<(), DdpError> {
    let Some(ticket) = &live.ticket else {
        return Ok(());
    };
    live.own = Some(padded_copy(ticket.result()?));
    Ok(())
}

/// A tensor in memory of its own, and zeros behind it.
pub(crate) fn padded_copy(tensor: Tensor<1>) -> Tensor<1> {
    // `cat` copies what it joins; a tensor alone would stay a view.
    let more = Tensor::zeros([DEVICE_ALIGN], (&tensor.device(), tensor.dtype()));
    Tensor::cat(vec![tensor, more], 0)
}

impl Reducer for DeviceReducer {
    fn reserve(&self) -> Result<(), DdpError> {
        self.tail.reserve()
    }

    fn apply(&self, event: Event) {
        match &event {
            Event::Step { step, .. } => self.begin_step(*step),
            Event::Shard(shard) => self.begin_shard(*shard),
            Event::Micro(micro) => self.begin_micro(*micro),
            Event::MicroEnd => self.end_micro(),
            // The tail must not tell the other ranks that this rank goes on.
            Event::Open(buckets) if !self.open(*buckets) => return,
            Event::Open(_) | Event::Extra { .. } | Event::Commit => {}
            Event::ShardEnd(_) => {
                let Some(used) = self.end_shard() else {
                    return;
                };
                let first = self.sums();
                for index in used {
                    let slot = first + index;
                    self.tail.apply(Event::Extra { slot, value: 1.0 });
                }
            }
        }
        self.tail.apply(event);
    }

    fn launched(&self) -> usize {
        lock(&self.state).next + self.tail.launched()
    }

    fn finish(&self) -> Result<Finished, DdpError> {
        if let Some(error) = &lock(&self.state).error {
            return Err(error.clone());
        }
        let tail = self.tail.finish_tail()?;
        self.finished(tail)
    }

    fn finish_with(&self, tail: Vec<f32>) -> Option<Finished> {
        let has_gradients = lock(&self.state).has_gradients;
        let tail = self.tail.lent_tail(tail).filter(|_| has_gradients)?;
        self.finished(tail).ok()
    }

    fn is_on_host(&self) -> bool {
        false
    }

    fn port(&self) -> Option<&dyn DevicePort> {
        self.device.port()
    }

    fn with_setup(&self, setup: &Setup) -> Option<Arc<dyn Reducer>> {
        Some(Arc::new(Self::new(setup.clone(), self.device.clone())))
    }

    fn send_weights(&self, bucket: usize, own: &HashMap<usize, Value>) -> Result<(), DdpError> {
        let shares = self.shares.as_ref().expect("the weights are dealt");
        let mut state = lock(&self.state);
        let layout = &self.plan.buckets[bucket];
        let mut values = self.zeros(layout.stride);
        for segment in &layout.segments {
            let Some(Value::Device(own)) = own.get(&segment.index) else {
                continue;
            };
            let first = segment.offset + shares.owned(&self.plan, segment.index, self.rank).start;
            let place = first..first + own.dims()[0];
            values = values.slice_assign([place], own.clone().cast(self.device.dtype()));
        }
        let call = self.call(bucket, state.step);
        let values = self.device.computed(values);
        state.live[bucket].weights = Some(self.device.all_gather(call, values)?.into());
        Ok(())
    }

    fn receive_weights(&self, bucket: usize) -> Result<Gathered, DdpError> {
        let sent = lock(&self.state).live[bucket].weights.take();
        let sent = sent.expect("the bucket's weights were sent");
        let asked = Instant::now();
        let values = sent.result()?;
        let layout = &self.plan.buckets[bucket];
        let bytes = layout.stride * self.device.dtype().size();
        let waited = (asked, Instant::now());
        let timing = BucketTiming::on_device((bucket, bytes, "all_gather"), asked, waited, sent);
        let segments = layout.segments.iter();
        let weights = segments.map(|segment| {
            let weight = cut(&values, segment.offset, segment.len);
            (segment.index, Value::Device(Box::new(weight)))
        });
        Ok(Gathered {
            values: weights.collect(),
            timing,
        })
    }

    fn synchronize(&self) -> Result<(), DdpError> {
        self.device.synchronize()
    }

    fn abort(&self) -> Result<(), DdpError> {
        self.device.abort()
    }
}

impl GradientSink for DeviceReducer {
    fn gradient(&self, index: usize, gradient: Tensor<1>) {
        let (bucket, position) = self.plan.places[index];
        let mut state = lock(&self.state);
        let Some(slot) = state.live[bucket].pending.get_mut(position) else {
            if state.is_ordered {
                state.error.get_or_insert(DdpError::Backend(LATE));
            }
            // Else it is outside a backward pass of a step: a hooked model used on its own.
            return;
        };
        *slot = Some(gradient);
        state.used[index] = true;
        if state.is_ordered {
            self.complete(&mut state, bucket);
        }
        state.live[bucket].missing -= 1;
        if state.live[bucket].missing == 0 {
            self.pack(&mut state, bucket);
            if state.is_last_micro {
                self.merge(&mut state, bucket);
            }
        }
    }
}

/// Slices `len` values of a block from `offset`, the start of a segment.
///
/// A device slices without a copy only between aligned offsets. If the end is not aligned, the values before the padding are
/// copied.
pub(crate) fn cut(block: &Tensor<1>, offset: usize, len: usize) -> Tensor<1> {
    let padded = len
        .next_multiple_of(DEVICE_ALIGN)
        .min(block.dims()[0] - offset);
    let whole = block.clone().narrow(0, offset, padded);
    if padded == len {
        whole
    } else {
        whole.narrow(0, 0, len)
    }
}
