//! `DataParallel`: one process, a replica of the model on each device, and a thread for each replica.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::mem::take;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, Gradients, Tensor};
use paceline_ddp::{Ddp, DdpError, Reduced, ShardStep};
use paceline_nn::tape::{Point, plain, untracked, untracked_like};
use paceline_nn::{Kind, MapParams, MapTensors, Pass, Tensors, map_params};

/// Data parallelism within one process, as PyTorch's `DataParallel`: to compare with, and for programs that cannot start ranks.
///
/// Each step copies the model to every device, cuts the batch into chunks, runs a replica on each chunk, and adds the gradients
/// on the first device. [`Ddp`] does none of these: its ranks keep their weights, each reads its own samples, and gradients are
/// reduced while the backward pass runs.
///
/// Burn has one source of random numbers for a process, so forward passes take turns, and a run is repeatable. Backward passes
/// run side by side.
///
/// *Memory*: the first device holds the whole batch, all outputs, and the gradients of all replicas until they are added.
///
/// *Source*: `torch.nn.DataParallel`.
///
/// *Example*:
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use paceline_split::DataParallel;
///
/// let device = Device::flex().autodiff();
/// let model: Linear = LinearConfig::new(8, 3).init(&device);
/// let parallel = DataParallel::new(vec![device.clone(), device.clone()]); // Device::cuda(0), Device::cuda(1)
/// let output = parallel.forward(&model, Tensor::<2>::ones([5, 8], &device), Linear::forward); // chunks of 3 and 2
/// assert_eq!(output.dims(), [5, 3]);
/// let gradients = output.mean().backward();
/// assert!(model.weight.grad(&gradients).is_some());
/// ```
#[derive(Clone, Debug)]
pub struct DataParallel {
    devices: Vec<Device>,
}

impl DataParallel {
    /// A replica on each of `devices`, which have autodiff; the first is that of the model. A device may be there several
    /// times.
    #[must_use]
    pub fn new(devices: Vec<Device>) -> Self {
        Self { devices }
    }

    /// `f(model, input)`, computed by replicas on chunks of the input, with the outputs gathered on the first device.
    ///
    /// Every tensor of the input is cut along its first dimension, and every output is joined along its first. The batch is cut
    /// as `torch.chunk` does: chunks of `ceil(rows / devices)`, the last one smaller, and perhaps fewer than there are devices.
    /// A single chunk runs on the model itself.
    ///
    /// *Numerics*: replicas' gradients are added from the first to the last. The running statistics are those of the first
    /// replica, as in PyTorch.
    ///
    /// *Cost*: copies the weights to each other device.
    pub fn forward<M, I, O>(&self, model: &M, input: I, f: impl Fn(&M, I) -> O) -> O
    where
        M: Module,
        I: Tensors,
        O: Tensors,
    {
        let mut rows = Rows(None);
        let input = input.map(&mut rows);
        let chunks = chunks(rows.0.unwrap_or(0), self.devices.len());
        if chunks.len() < 2 {
            return f(model, input);
        }
        let mut parents = Parents {
            replicas: chunks.len(),
            ..Parents::default()
        };
        let mut replicas = Vec::with_capacity(chunks.len());
        let mut outputs = Vec::with_capacity(chunks.len());
        for (at, (chunk, device)) in chunks.into_iter().zip(&self.devices).enumerate() {
            // The first shares the model's running statistics.
            let copy = match at {
                0 => model.clone(),
                _ => model.valid().train().fork(device),
            };
            if at == 0 {
                map_params(copy.clone(), &mut parents);
            }
            let mut leaves = Leaves {
                at,
                device,
                parents: &mut parents,
                collect: Vec::new(),
            };
            let copy = map_params(copy, &mut leaves);
            let part = input.clone().map(&mut Scatter {
                chunk,
                leaves: &mut leaves,
            });
            replicas.push(Replica {
                start: Vec::new(),
                collect: leaves.collect,
            });
            let run = || f(&copy, part);
            outputs.push(match Pass::current() {
                Some(pass) => pass.in_turns().enter(run),
                None => run(),
            });
        }
        let tip = parents
            .deposits
            .into_iter()
            .fold(None, |tip, deposit| Some(deposit(tip)));
        let replicas = Arc::new(Mutex::new(replicas));
        let started = replicas.clone();
        let point = tip.map(|tip: Point| tip.then(move || backward(take(&mut *lock(&started)))));
        let mut taken = Taken::default();
        let mut outputs = outputs.into_iter();
        let first = outputs.next().expect("several chunks");
        for output in outputs {
            let _ = output.map(&mut taken);
            taken.next();
        }
        first.map(&mut Gather {
            point,
            others: taken.done,
            replicas: &replicas,
        })
    }

    /// [`Ddp::step`] with this rank's shards on replicas, one thread for each of the devices: the same bits as one device.
    ///
    /// Unlike [`forward`](Self::forward), replicas compute their losses, and outputs are not gathered.
    ///
    /// *Memory*, *Cost*, *Errors*: as [`Ddp::step_on_replicas`].
    pub fn step<M, E>(
        &self,
        ddp: &mut Ddp,
        model: &M,
        run: impl Fn(&mut ShardStep<'_, M>) -> Result<(), E> + Sync,
    ) -> Result<Reduced, E>
    where
        M: Module,
        E: From<DdpError> + fmt::Display + Send,
    {
        ddp.step_on_replicas(model, &self.devices, run)
    }
}

/// The rows of each chunk, as `torch.chunk` cuts.
fn chunks(rows: usize, count: usize) -> Vec<Range<usize>> {
    let size = rows.div_ceil(count.max(1)).max(1);
    let starts = (0..rows).step_by(size);
    starts.map(|start| start..rows.min(start + size)).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder panics")
}

/// Looks for the first tensor's rows.
struct Rows(Option<usize>);

impl MapTensors for Rows {
    fn any<const D: usize, K: Kind>(&mut self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        self.0 = self.0.or(Some(tensor.dims()[0]));
        tensor
    }
}

/// A parent's gradient from each replica.
type Parts<const D: usize> = Arc<Mutex<Vec<Option<Tensor<D>>>>>;

/// The tensors of the outer tape that get gradients.
#[derive(Default)]
struct Parents {
    replicas: usize,
    params: HashMap<ParamId, Box<dyn Any>>,
    deposits: Vec<Box<dyn FnOnce(Option<Point>) -> Point>>,
}

impl Parents {
    /// Where replicas leave the gradient of `tensor`.
    fn add<const D: usize>(&mut self, tensor: Tensor<D>) -> Parts<D> {
        let parts: Parts<D> = Arc::new(Mutex::new(vec![None; self.replicas]));
        let left = parts.clone();
        let device = tensor.device().inner();
        self.deposits.push(Box::new(move |tip| {
            let tip = tip.unwrap_or_else(|| Point::origin(&tensor));
            tip.deposit(tensor, move || {
                let parts = take(&mut *lock(&left)).into_iter().flatten();
                let parts = parts.map(|part| part.to_device(&device));
                parts.reduce(|sum, part| sum + part)
            })
        }));
        parts
    }
}

impl MapParams for Parents {
    fn map<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Param<Tensor<D>>> {
        let tensor = param.base();
        if tensor.is_tracked() {
            let parts = self.add(tensor.clone());
            self.params.insert(param.id, Box::new(parts));
        }
        None
    }
}

/// Takes one replica's gradient of a leaf out of all gradients of its tape.
type Collect = Box<dyn FnOnce(&mut Gradients) + Send>;

/// Makes leaves of a replica's own tape.
struct Leaves<'a> {
    at: usize,
    device: &'a Device,
    parents: &'a mut Parents,
    collect: Vec<Collect>,
}

impl Leaves<'_> {
    /// A leaf with the values of `tensor`, whose gradient goes to `parts`.
    fn leaf<const D: usize>(&mut self, tensor: Tensor<D>, parts: Parts<D>) -> Tensor<D> {
        let leaf = untracked(tensor).require_grad();
        let (same, at) = (leaf.clone(), self.at);
        self.collect.push(Box::new(move |all| {
            lock(&parts)[at] = same.grad_remove(all);
        }));
        leaf
    }
}

impl MapParams for Leaves<'_> {
    fn map<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Param<Tensor<D>>> {
        let parts: &Parts<D> = self.parents.params.get(&param.id)?.downcast_ref()?;
        let parts = parts.clone();
        let (id, tensor, mapper) = param.clone().consume();
        Some(Param::from_mapped_value(
            id,
            self.leaf(tensor, parts),
            mapper,
        ))
    }
}

/// Cuts a chunk out of the input and copies it to the replica's device.
struct Scatter<'a, 'b> {
    chunk: Range<usize>,
    leaves: &'a mut Leaves<'b>,
}

impl MapTensors for Scatter<'_, '_> {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let part = self.any(tensor);
        if !part.is_tracked() {
            return part;
        }
        let parts = self.leaves.parents.add(part.clone());
        self.leaves.leaf(part, parts)
    }

    fn any<const D: usize, K: Kind>(&mut self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        let part = tensor.narrow(0, self.chunk.start, self.chunk.len());
        part.to_device(self.leaves.device)
    }
}

/// Adds a step to a tape, on top of the steps so far.
type Start = Box<dyn FnOnce(Option<Point>) -> Option<Point> + Send>;

/// A replica between its forward and its backward pass.
struct Replica {
    /// Puts the gradient of each output on its tape.
    start: Vec<Start>,
    collect: Vec<Collect>,
}

impl Replica {
    fn backward(self) {
        let start = self.start.into_iter();
        let tip = start.fold(None, |tip, start| start(tip));
        if let Some(mut gradients) = tip.and_then(Point::backward) {
            let collect = self.collect.into_iter();
            collect.for_each(|collect| collect(&mut gradients));
        }
    }
}

/// The backward passes of all replicas, one thread each.
fn backward(replicas: Vec<Replica>) {
    thread::scope(|scope| {
        let replicas = replicas.into_iter();
        let threads: Vec<_> = replicas.map(|one| scope.spawn(|| one.backward())).collect();
        for thread in threads {
            thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        }
    });
}

/// Output tensors of the replicas after the first.
#[derive(Default)]
struct Taken {
    done: Vec<VecDeque<Box<dyn Any>>>,
    current: VecDeque<Box<dyn Any>>,
}

impl Taken {
    fn next(&mut self) {
        let tensors = take(&mut self.current);
        self.done.push(tensors);
    }
}

impl MapTensors for Taken {
    fn any<const D: usize, K: Kind>(&mut self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        self.current.push_back(Box::new(tensor.clone()));
        tensor
    }
}

/// Joins the outputs on the first replica's device, as outputs of `point`.
struct Gather<'a> {
    point: Option<Point>,
    others: Vec<VecDeque<Box<dyn Any>>>,
    replicas: &'a Mutex<Vec<Replica>>,
}

impl Gather<'_> {
    /// The same output of each replica.
    fn all<T: 'static>(&mut self, first: T) -> Vec<T> {
        let others = self.others.iter_mut().map(|tensors| {
            let tensor = tensors
                .pop_front()
                .and_then(|tensor| tensor.downcast().ok());
            *tensor.expect("all replicas return the same structure")
        });
        std::iter::once(first).chain(others).collect()
    }
}

impl MapTensors for Gather<'_> {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let home = tensor.device();
        let all = self.all(tensor);
        let values = all.iter().map(|part| plain(part.clone()).to_device(&home));
        let values = untracked_like(Tensor::cat(values.collect(), 0), &all[0]);
        let Some(point) = self
            .point
            .as_ref()
            .filter(|_| all.iter().any(Tensor::is_tracked))
        else {
            return values;
        };
        let gradient = Arc::new(Mutex::new(None));
        let mut from = 0;
        for (part, replica) in all.into_iter().zip(lock(self.replicas).iter_mut()) {
            let (rows, gradient) = (part.dims()[0], gradient.clone());
            let start = from;
            from += rows;
            replica.start.push(Box::new(move |tip| {
                let whole: Option<Tensor<D>> = lock(&gradient).clone();
                let (Some(whole), true) = (whole, part.is_tracked()) else {
                    return tip;
                };
                let own = whole
                    .narrow(0, start, rows)
                    .to_device(&part.device().inner());
                let tip = tip.unwrap_or_else(|| Point::origin(&part));
                Some(tip.deposit(part, move || Some(own)))
            }));
        }
        point.output(values, move |whole| *lock(&gradient) = Some(whole))
    }

    fn any<const D: usize, K: Kind>(&mut self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        let home = tensor.device();
        let all = self.all(tensor).into_iter();
        Tensor::cat(all.map(|part| part.to_device(&home)).collect(), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_those_of_torch() {
        let sizes =
            |rows, count| -> Vec<usize> { chunks(rows, count).iter().map(Range::len).collect() };
        assert_eq!(sizes(5, 2), [3, 2]);
        assert_eq!(sizes(10, 4), [3, 3, 3, 1]);
        assert_eq!(sizes(6, 4), [2, 2, 2]);
        assert_eq!(sizes(1, 4), [1]);
        assert_eq!(sizes(0, 2), [0; 0]);
        assert_eq!(sizes(3, 0), [3]);
    }
}
