//! Rank 0's text output: pure functions from figures to text.

use std::fmt::Write as _;
use std::time::Duration;

use paceline_ddp::Precision;
use paceline_usage::busy::{BusyTime, share};
use paceline_usage::figures::{clock, thousands};
use serde::Serialize;

use crate::classes::{ClassFigures, Confused, class_table, most_confused};
use crate::observe::RankTotals;
use crate::records::HeldOut;

/// Figures of the header.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename = "start")]
pub(crate) struct Header {
    /// Name and size of the data.
    pub(crate) data: String,
    /// Ranks.
    pub(crate) world: usize,
    /// Their mesh, if a replica has several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mesh: Option<String>,
    /// Their device.
    pub(crate) device: String,
    /// Compute threads of each rank.
    pub(crate) threads: usize,
    /// Name of the transport between ranks.
    pub(crate) transport: String,
    /// Name of the network.
    pub(crate) model: String,
    /// Trained values of the model.
    pub(crate) parameters: usize,
    /// Whether `--freeze` leaves others as they are.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) freezes: bool,
    /// The layers' compute type.
    pub(crate) precision: Precision,
    /// Samples of a step over all ranks.
    pub(crate) global_batch: usize,
    /// Fewest and most samples of a step on one rank.
    pub(crate) per_rank: (usize, usize),
    /// Shards of a step.
    pub(crate) shards: usize,
    /// Micro-batches per shard.
    pub(crate) accumulate: usize,
    /// Epochs and steps of the job.
    pub(crate) epochs: usize,
    /// Steps of the job.
    pub(crate) steps: u64,
    /// The run directory.
    pub(crate) run_dir: String,
    /// The step after which a resumed job starts, and where its state came from.
    pub(crate) resumed: Option<(u64, String)>,
}

impl Header {
    /// Several lines.
    pub(crate) fn render(&self) -> String {
        let per_rank = match self.per_rank {
            (least, most) if least == most => thousands(least as u64),
            (least, most) => format!("{} to {}", thousands(least as u64), thousands(most as u64)),
        };
        let precision = match self.precision {
            Precision::F32 => String::new(),
            mixed => format!(", layers in {mixed}"),
        };
        let accumulate = match self.accumulate {
            1 => String::new(),
            n => format!(", {n} micro-batches each"),
        };
        let mesh = self.mesh.as_ref();
        let mesh = mesh.map_or(String::new(), |mesh| format!(", mesh {mesh}"));
        let mut text = format!(
            "data      {}\nranks     {} on {}, {} each, transport {}{mesh}\nmodel     {}: {}{precision}\n\
             batch     {} = {per_rank} per rank, {}{accumulate}\njob       {}, {}\nrun       {}\n",
            self.data,
            self.world,
            self.device,
            plural(self.threads as u64, "compute thread"),
            self.transport,
            self.model,
            match self.freezes {
                false => plural(self.parameters as u64, "parameter"),
                true => format!(
                    "{}, the others frozen",
                    plural(self.parameters as u64, "trained parameter")
                ),
            },
            thousands(self.global_batch as u64),
            plural(self.shards as u64, "shard"),
            plural(self.epochs as u64, "epoch"),
            plural(self.steps, "step"),
            self.run_dir,
        );
        if let Some((step, path)) = &self.resumed {
            let _ = writeln!(text, "resumed   after step {step}, from {path}");
        }
        text
    }
}

/// Figures of an epoch's line.
#[derive(Clone, Debug)]
pub(crate) struct Epoch {
    /// The epoch, from 1.
    pub(crate) epoch: usize,
    /// Epochs of the job.
    pub(crate) epochs: usize,
    /// Mean training loss.
    pub(crate) train_loss: f64,
    /// Figures of the held-out data, if there is any.
    pub(crate) held_out: Option<HeldOut>,
    /// Predictions in training per second, of all ranks.
    pub(crate) per_second: f64,
    /// What a prediction is called.
    pub(crate) unit: &'static str,
}

impl Epoch {
    /// One line.
    pub(crate) fn render(&self) -> String {
        let width = self.epochs.to_string().len();
        let held_out = self.held_out.as_ref();
        let held_out = held_out.map(|held_out| format!("{}   ", held_out.render()));
        format!(
            "epoch {:>width$}/{}   train loss {:.4}   {}{:>8} {}/s",
            self.epoch,
            self.epochs,
            self.train_loss,
            held_out.unwrap_or_default(),
            thousands(self.per_second as u64),
            self.unit,
        )
    }
}

/// Most classes listed at the end; of more, only the worst ones.
const CLASSES_MAX: usize = 20;
const WORST: usize = 10;
/// Most pairs of confused classes listed there.
const PAIRS_MAX: usize = 3;

/// Most ranks with a line of their own at the end; of more, only so many of those that computed least, and most.
const RANKS_MAX: usize = 16;
const EXTREMES: usize = 4;

/// The figures of each class at the end, and what was taken for what; nothing without classes.
pub(crate) fn classes(classes: &[ClassFigures], confusion: &[Confused]) -> String {
    if classes.is_empty() {
        return String::new();
    }
    let mut text = match classes.len() {
        ..=CLASSES_MAX => class_table(classes, CLASSES_MAX),
        count => format!(
            "the {WORST} worst of {count} classes\n{}",
            class_table(classes, WORST)
        ),
    };
    let pairs = most_confused(classes, confusion, PAIRS_MAX);
    if !pairs.is_empty() {
        let _ = writeln!(text, "confused most often: {}", pairs.join(", "));
    }
    text
}

/// The summary at the end: the time in which no rank waited for data or for another rank. In the usage summary, "busy" means
/// processor time or utilisation instead.
pub(crate) fn summary(usage: &BusyTime, totals: &[RankTotals]) -> String {
    let total = usage.total();
    let mut text = format!("{:<26}{}\n", "total time", clock(total));
    let line = |label: &str, time: Duration| {
        format!(
            "{label:<25} {} ({:.2} %)\n",
            clock(time),
            share(time, total) * 100.0
        )
    };
    let all = match totals.len() {
        1 => "the rank computed".to_string(),
        n => format!("all {n} ranks computing"),
    };
    text.push_str(&line(&all, usage.all_busy()));
    let shown = told_ranks(totals.len(), |rank| usage.busy(rank));
    for (rank, totals) in (totals.iter().enumerate()).filter(|(rank, _)| shown.contains(rank)) {
        let busy = usage.busy(rank);
        let _ = write!(
            text,
            "rank {rank:<3} computing {:>6.2} %   waited {} for other ranks, {} for data   peak memory {}",
            share(busy, total) * 100.0,
            seconds(totals.waited_for_ranks_ns),
            seconds(totals.waited_for_data_ns),
            totals
                .peak_bytes
                .map_or_else(|| "unknown".into(), megabytes),
        );
        if let Some(device) = &totals.device {
            let held = device
                .held_bytes
                .map_or_else(|| "unknown".into(), megabytes);
            let _ = write!(text, "   device memory {held} of {}", device.name);
        }
        text.push('\n');
    }
    if shown.len() < totals.len() {
        let more = totals.len() - shown.len();
        let _ = writeln!(text, "and {more} more ranks between them");
    }
    text
}

/// The ranks that the summary has a line of, ascending: all of a few, and of many those that computed least and most.
fn told_ranks(ranks: usize, busy: impl Fn(usize) -> Duration) -> Vec<usize> {
    let mut told: Vec<usize> = (0..ranks).collect();
    if ranks > RANKS_MAX {
        told.sort_by_key(|rank| busy(*rank));
        told.drain(EXTREMES..ranks - EXTREMES);
        told.sort_unstable();
    }
    told
}

fn seconds(nanos: u64) -> String {
    format!("{:.2} s", nanos as f64 / 1e9)
}

fn megabytes(bytes: u64) -> String {
    format!("{} MB", thousands(bytes / 1_000_000))
}

/// `1 step`, `1,234 steps`, `2 classes`
pub(crate) fn plural(count: u64, word: &str) -> String {
    let end = match (count, word.ends_with('s')) {
        (1, _) => "",
        (_, true) => "es",
        (_, false) => "s",
    };
    format!("{} {word}{end}", thousands(count))
}

#[cfg(test)]
mod tests {
    use paceline_usage::busy::Interval;

    use super::*;
    use crate::observe::DeviceTotals;

    #[test]
    fn the_summary_answers_whether_the_devices_worked_at_the_same_time() {
        let mut usage = BusyTime::new(2);
        let second = 1_000_000_000;
        let stretch = |a: u64, b: u64| Interval {
            start_ns: a * second,
            end_ns: b * second,
        };
        usage.add(stretch(0, 10), &[vec![stretch(0, 2)], vec![stretch(5, 6)]]);
        let totals = |data: u64| RankTotals {
            waited_for_ranks_ns: 1_500_000_000,
            waited_for_data_ns: data,
            peak_bytes: Some(88_000_000),
            sent_bytes: 0,
            device: None,
        };
        assert_eq!(
            summary(&usage, &[totals(0), totals(20_000_000)]),
            "total time                10.0 s\n\
             all 2 ranks computing     7.0 s (70.00 %)\n\
             rank 0   computing  80.00 %   waited 1.50 s for other ranks, 0.00 s for data   peak memory 88 MB\n\
             rank 1   computing  90.00 %   waited 1.50 s for other ranks, 0.02 s for data   peak memory 88 MB\n"
        );
    }

    #[test]
    fn of_many_ranks_the_busiest_and_the_idlest_are_told() {
        let busy = |rank: usize| Duration::from_secs([9, 1][rank % 2] + rank as u64);
        assert_eq!(told_ranks(16, busy), (0..16).collect::<Vec<_>>());
        assert_eq!(
            told_ranks(512, busy),
            [1, 3, 5, 7, 504, 506, 508, 510],
            "four at each end"
        );
    }

    #[test]
    fn a_rank_on_a_gpu_also_says_which_and_what_memory_it_holds() {
        let mut usage = BusyTime::new(1);
        usage.add(
            Interval {
                start_ns: 0,
                end_ns: 1_000_000_000,
            },
            &[Vec::new()],
        );
        let check = |held_bytes, expect: &str| {
            let totals = RankTotals {
                waited_for_ranks_ns: 0,
                waited_for_data_ns: 0,
                peak_bytes: Some(900_000_000),
                sent_bytes: 0,
                device: Some(DeviceTotals {
                    name: "NVIDIA H200".into(),
                    held_bytes,
                }),
            };
            let text = summary(&usage, &[totals]);
            let end = format!("peak memory 900 MB   device memory {expect} of NVIDIA H200\n");
            assert!(text.ends_with(&end), "{text}");
        };
        check(Some(1_234_000_000), "1,234 MB");
        check(None, "unknown");
    }

    #[test]
    fn the_header_says_what_runs_where() {
        let header = Header {
            data: "digits, 1,437 to train on, 360 held out".into(),
            world: 3,
            mesh: None,
            device: "CPU".into(),
            threads: 1,
            transport: "shm".into(),
            model: "small convolutional network".into(),
            parameters: 25_578,
            freezes: false,
            precision: Precision::Bf16,
            global_batch: 6144,
            per_rank: (1536, 2304),
            shards: 8,
            accumulate: 2,
            epochs: 1,
            steps: 23,
            run_dir: "runs/a".into(),
            resumed: Some((12, "runs/a/checkpoints/step-0000000012".into())),
        };
        assert_eq!(
            header.render(),
            "data      digits, 1,437 to train on, 360 held out\n\
             ranks     3 on CPU, 1 compute thread each, transport shm\n\
             model     small convolutional network: 25,578 parameters, layers in bf16\n\
             batch     6,144 = 1,536 to 2,304 per rank, 8 shards, 2 micro-batches each\n\
             job       1 epoch, 23 steps\n\
             run       runs/a\n\
             resumed   after step 12, from runs/a/checkpoints/step-0000000012\n"
        );
    }
}
