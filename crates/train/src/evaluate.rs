//! Evaluation on held-out data: every sample exactly once, split over the ranks.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Device;
use paceline_collective::ProcessGroup;
use paceline_ddp::Ddp;
use paceline_ddp::loader::{Loader, LoaderOptions};
use paceline_ddp::sampler::{EvalOptions, eval_split};

use crate::config::TrainConfig;
use crate::error::{TrainError, loader_error};
use crate::setup::loader_options;
use crate::stages::Stages;
use crate::task::{Compute, Part, Sums, TrainTask};

/// Evaluates `net`, which is on `device`, on the held-out samples, of which there are some, in the precision of training.
///
/// *Numerics*: batches belong to shards and sums are added in shard order, so the result does not depend on the
/// number of ranks.
///
/// *Blocks*: until all ranks have evaluated their part.
pub(crate) fn evaluate<T: TrainTask>(
    ddp: &mut Ddp,
    task: &Arc<T>,
    net: &T::Model,
    device: &Device,
    config: &TrainConfig,
    stages: Option<&mut (dyn Stages<T> + 'static)>,
    group: &ProcessGroup,
) -> Result<Sums, TrainError> {
    let split = split(&**task, Part::HeldOut, ddp.shard_count())?;
    let device = device.clone().inner();
    let compute = Compute::new(&device, config.precision);
    if let Some(stages) = stages {
        let shards = &split[ddp.shards()];
        let mine = stages.evaluate(ddp, net, task, shards, compute)?;
        let all = group.all_gather_bytes(&encode(&mine))?.concat();
        return Ok(total(&all));
    }
    let all = ddp.with_recovery(|ddp| {
        let mine: Result<Vec<Sums>, TrainError> = ddp.evaluate(net, |net| {
            let shards = &split[ddp.shards()];
            of_shards(task, Part::HeldOut, shards, config, |batch| {
                task.evaluate(net, batch, compute)
            })
        })?;
        let all = ddp.group().all_gather_bytes(&encode(&mine?))?;
        Ok::<_, TrainError>(all.concat())
    })?;
    Ok(total(&all))
}

/// The batches of each shard, of a part that is not empty.
pub(crate) fn split<T: TrainTask>(
    task: &T,
    part: Part,
    shards: usize,
) -> Result<Vec<Vec<Range<usize>>>, TrainError> {
    Ok(eval_split(&EvalOptions {
        len: task.len(part),
        shards,
        batch: task.evaluation_batch(),
    })?)
}

/// The sums over the batches of each of some shards, in order. While one batch is evaluated, a thread reads the next one.
pub(crate) fn of_shards<T: TrainTask>(
    task: &Arc<T>,
    part: Part,
    shards: &[Vec<Range<usize>>],
    config: &TrainConfig,
    mut one_batch: impl FnMut(&T::Batch) -> Result<Sums, TrainError>,
) -> Result<Vec<Sums>, TrainError> {
    let numbered = shards.iter().enumerate();
    let jobs =
        numbered.flat_map(|(shard, batches)| batches.iter().map(move |b| (shard, b.clone())));
    let jobs: Vec<(usize, Range<usize>)> = jobs.collect();
    let options = LoaderOptions {
        workers: usize::from(jobs.len() > 1),
        ..loader_options(config)
    };
    let task = task.clone();
    let load = move |(_, samples): &(usize, Range<usize>)| task.batch(part, None, samples.clone());
    let loader = Loader::new(options, jobs.into_iter(), load).map_err(loader_error)?;
    let mut sums = vec![Sums::default(); shards.len()];
    for loaded in loader {
        let ((shard, _), batch) = loaded.map_err(loader_error)?;
        let so_far = std::mem::take(&mut sums[shard]);
        sums[shard] = so_far.add(one_batch(&batch)?);
    }
    Ok(sums)
}

/// The sums of all ranks' shards, which are in the order of ranks.
fn total(all: &[u8]) -> Sums {
    decode(all).into_iter().fold(Sums::default(), Sums::add)
}

/// Encodes sums as bytes: exact, unlike text. Each has its loss, its count, the numbers of its states and of the pairs of classes, and these.
fn encode(sums: &[Sums]) -> Vec<u8> {
    let words = sums.iter().flat_map(|sums| {
        let [states, pairs] = [sums.states.len(), sums.confusion.len()].map(|len| len as u64);
        let head = [sums.loss.to_bits(), sums.count, states, pairs];
        let states = sums.states.iter().map(|state| state.to_bits());
        let pairs = sums.confusion.iter();
        let pairs = pairs.flat_map(|(pair, count)| [pair[0].into(), pair[1].into(), *count]);
        head.into_iter().chain(states).chain(pairs)
    });
    words.flat_map(u64::to_le_bytes).collect()
}

fn decode(bytes: &[u8]) -> Vec<Sums> {
    let (words, _) = bytes.as_chunks::<8>();
    let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
    let next = || {
        let [loss, count, states, pairs] = next_of(&mut words)?;
        let states = words.by_ref().take(states as usize);
        let states = states.map(f64::from_bits).collect();
        let pairs = (0..pairs).map_while(|_| {
            let [of, taken_for, count] = next_of(&mut words)?;
            Some(([of as u32, taken_for as u32], count))
        });
        Some(Sums {
            loss: f64::from_bits(loss),
            count,
            states,
            confusion: pairs.collect(),
        })
    };
    std::iter::from_fn(next).collect()
}

fn next_of<const N: usize>(words: &mut impl Iterator<Item = u64>) -> Option<[u64; N]> {
    let next: Vec<u64> = words.take(N).collect();
    next.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_travel_exactly() {
        let sums = vec![
            Sums {
                loss: 0.1 + 0.2,
                count: u64::MAX,
                states: vec![3.0, -0.0],
                confusion: [([0, 2], 5), ([2, 2], u64::MAX)].into(),
            },
            Sums::default(),
            Sums::default().with(f64::MIN_POSITIVE),
        ];
        assert_eq!(decode(&encode(&sums)), sums);
    }
}
