//! `paceline replay`: whether one rank gets the gradients that the ranks of a run recorded.

use std::io::{self, Write};

use paceline_checkpoint::digests::Difference;
use paceline_cli::exit::{Exit, Failure};
use paceline_cli::flags::finish;
use paceline_train::{Replayed, replay};
use paceline_words::counted;

use super::Program;
use super::train::{saved_run, settings_of};
use crate::cli::ReplayArgs;

/// Most tensors in an error.
const TENSORS_MAX: usize = 4;

/// Prints what the replay has found.
///
/// *Errors*: a shard that differs; nothing to compare with.
pub(crate) fn run(args: &ReplayArgs) -> Result<Exit, Failure> {
    let mut config = settings_of(&Program::PACELINE, saved_run(args.run.clone())?)?;
    config.data = args.data.clone().or(config.data);
    let replayed = replay(&config, args.replay)
        .map_err(|error| Failure::new(Exit::Usage, &error, error.hint()))?;
    let text = match args.json {
        true => serde_json::to_string(&replayed).expect("plain data encodes") + "\n",
        false => report(&replayed),
    };
    let printed = finish(io::stdout().lock().write_all(text.as_bytes()))?;
    match &replayed.difference {
        None => Ok(printed),
        Some(difference) => Err(Failure::new(Exit::JobFailed, told(difference), None)),
    }
}

fn report(replayed: &Replayed) -> String {
    let Replayed {
        from,
        step,
        steps_compared,
        shards_compared,
        shards_unrecorded,
        difference,
    } = replayed;
    let start = match from {
        0 => "the start of the run".into(),
        from => format!("the checkpoint of step {from}"),
    };
    let mut text = format!(
        "replayed  steps {} to {step} on one rank, from {start}\n",
        from + 1
    );
    let shards = counted(*shards_compared, "shard");
    let steps = counted(*steps_compared as usize, "step");
    text += &format!("compared  {shards} of {steps}\n");
    if *shards_unrecorded > 0 {
        let shards = counted(*shards_unrecorded, "shard");
        text += &format!(
            "{shards} not recorded: the rank was lost before it wrote, or its file is on another host\n"
        );
    }
    if difference.is_none() {
        text += "same bits\n";
    }
    text
}

fn told(difference: &Difference) -> String {
    let Difference {
        step,
        shard,
        rank,
        tensors,
        ..
    } = difference;
    let first = tensors.iter().take(TENSORS_MAX).cloned();
    let mut named = first.collect::<Vec<_>>().join(", ");
    if tensors.len() > TENSORS_MAX {
        named += &format!(" and {} more", tensors.len() - TENSORS_MAX);
    }
    format!(
        "step {step}, shard {shard}: rank {rank} recorded other bits for the gradients of {named}"
    )
}
