//! `paceline indices`: prints the samples that a rank reads.

use std::io::{self, Write};

use paceline_cli::flags::finish;

use paceline_ddp::sampler::{
    BatchOptions, DistributedSampler, SamplerError, SamplerOptions, ShardedBatches,
};
use serde::Serialize;

use crate::cli::IndicesArgs;
use paceline_cli::exit::{Exit, Failure};

/// Prints the indices on stdout.
///
/// *Errors*: options that the sampler refuses are usage errors; a failed write to stdout is an environment error.
pub(crate) fn indices(args: &IndicesArgs) -> Result<Exit, Failure> {
    let report =
        Report::new(args).map_err(|error| Failure::new(Exit::Usage, &error, error.hint()))?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    let written = report.write(args.json, &mut out).and_then(|()| out.flush());
    finish(written)
}

/// The output; its fields are those of the JSON object.
#[derive(Serialize)]
struct Report {
    len: usize,
    world: usize,
    rank: usize,
    seed: u64,
    epoch: u64,
    shuffle: bool,
    drop_last: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    global_batch: Option<usize>,
    indices: Vec<usize>,
}

impl Report {
    fn new(args: &IndicesArgs) -> Result<Self, SamplerError> {
        let IndicesArgs {
            len,
            world,
            rank,
            seed,
            epoch,
            shuffle,
            drop_last,
            global_batch,
            json: _,
        } = *args;
        let sampler = DistributedSampler::new(SamplerOptions {
            len,
            shards: world,
            seed,
            shuffle,
            drop_last,
        })?;
        Ok(Self {
            len,
            world,
            rank,
            seed,
            epoch,
            shuffle,
            drop_last,
            global_batch,
            indices: match global_batch {
                None => sampler.indices(epoch, rank)?,
                Some(batch) => of_steps(sampler, batch, epoch, rank)?,
            },
        })
    }

    /// One index per line, for any tool, or one JSON object on one line.
    fn write(&self, json: bool, out: &mut impl Write) -> io::Result<()> {
        if json {
            serde_json::to_writer(&mut *out, self)?;
            return writeln!(out);
        }
        self.indices
            .iter()
            .try_for_each(|index| writeln!(out, "{index}"))
    }
}

/// The samples that a shard reads in the steps of an epoch, in order.
fn of_steps(
    sampler: DistributedSampler,
    global_batch: usize,
    epoch: u64,
    shard: usize,
) -> Result<Vec<usize>, SamplerError> {
    let mut steps = ShardedBatches::new(sampler, BatchOptions::new(global_batch))?;
    steps.set_epoch(epoch);
    let count = steps.steps_per_epoch() as usize;
    let read = steps
        .take(count)
        .flat_map(|mut step| step.shards.swap_remove(shard));
    Ok(read.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The case printed by PyTorch: 11 samples, 4 ranks, seed 3, epoch 2.
    fn args(rank: usize) -> IndicesArgs {
        IndicesArgs {
            len: 11,
            world: 4,
            rank,
            seed: 3,
            epoch: 2,
            shuffle: true,
            drop_last: false,
            global_batch: None,
            json: false,
        }
    }

    fn printed(args: &IndicesArgs) -> String {
        let mut out = Vec::new();
        let report = Report::new(args).expect("valid");
        report.write(args.json, &mut out).expect("memory");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn a_rank_gets_what_pytorch_gives_it_one_index_a_line() {
        let all = [0, 1, 2, 3].map(|rank| printed(&args(rank)));
        assert_eq!(all, ["9\n10\n7\n", "5\n2\n1\n", "0\n3\n4\n", "8\n6\n9\n"]);
        let cut = IndicesArgs {
            shuffle: false,
            drop_last: true,
            ..args(3)
        };
        assert_eq!(printed(&cut), "3\n7\n");
    }

    #[test]
    fn the_steps_of_a_job_repeat_no_sample_and_may_leave_out_the_end() {
        let steps = |rank, drop_last| {
            printed(&IndicesArgs {
                drop_last,
                shuffle: false,
                global_batch: Some(8),
                ..args(rank)
            })
        };
        assert_eq!(
            [0, 3].map(|rank| steps(rank, false)),
            ["0\n4\n8\n", "3\n7\n"]
        );
        assert_eq!([0, 3].map(|rank| steps(rank, true)), ["0\n4\n", "3\n7\n"]);
    }

    #[test]
    fn json_is_one_object_with_what_was_asked_and_what_came_out() {
        let json = IndicesArgs {
            json: true,
            ..args(1)
        };
        assert_eq!(
            printed(&json),
            "{\"len\":11,\"world\":4,\"rank\":1,\"seed\":3,\"epoch\":2,\"shuffle\":true,\"drop_last\":false,\
             \"indices\":[5,2,1]}\n"
        );
    }
}
