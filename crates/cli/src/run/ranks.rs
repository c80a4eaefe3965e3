//! How many ranks `paceline run` starts on this node, and what each of them may use.

use std::fmt;

use clap::Arg;
use paceline_launch::NPROC_MAX;

use crate::exit::{Exit, Failure};
use crate::flags::{valued, whole};

const HEADING: &str = "Ranks";

/// How many ranks to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Processes {
    /// This many.
    Count(usize),
    /// One for each core.
    PerCore,
    /// One for each GPU.
    PerGpu,
    /// One for each GPU; on a machine without GPUs one for each core.
    Auto,
}

impl Processes {
    /// The number on this machine.
    ///
    /// *Errors*: one rank per GPU was asked for, and there is no GPU.
    pub fn here(self) -> Result<usize, Failure> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        self.on(cores, gpus)
    }

    /// The number on a machine with this many cores and what `gpus` says of its GPUs.
    ///
    /// *Errors*: one rank per GPU was asked for, and there is no GPU.
    pub fn on(
        self,
        cores: usize,
        gpus: impl FnOnce() -> Result<usize, String>,
    ) -> Result<usize, Failure> {
        let count = match self {
            Self::Count(count) => count,
            Self::PerCore => cores,
            Self::PerGpu => match gpus() {
                Ok(0) => return Err(no_gpu("there is none".to_owned())),
                Ok(count) => count,
                Err(why) => return Err(no_gpu(why)),
            },
            Self::Auto => gpus().ok().filter(|count| *count > 0).unwrap_or(cores),
        };
        Ok(count.clamp(1, NPROC_MAX))
    }

    /// A number, or a word for what there is to be one rank for each of.
    ///
    /// *Errors*: what is expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "cpu" => return Ok(Self::PerCore),
            "gpu" => return Ok(Self::PerGpu),
            "auto" => return Ok(Self::Auto),
            _ => {}
        }
        if let Ok(count) = text.parse()
            && (1..=NPROC_MAX).contains(&count)
        {
            return Ok(Self::Count(count));
        }
        // xpu, and whatever else a device that torch has a plug-in for is called.
        let is_word = text.starts_with(char::is_alphabetic);
        let why = if is_word {
            "; other devices are not counted here, give their number"
        } else {
            ""
        };
        Err(format!(
            "expected auto, gpu, cpu, or a whole number from 1 to {NPROC_MAX}{why}"
        ))
    }
}

/// As it is written on the command line.
impl fmt::Display for Processes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => count.fmt(f),
            Self::PerCore => f.write_str("cpu"),
            Self::PerGpu => f.write_str("gpu"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

fn no_gpu(why: String) -> Failure {
    let hint = "does `nvidia-smi` list them here? otherwise give a number of ranks, or `auto`, which is one per core \
                where there is no GPU";
    let message = format!("--nproc-per-node gpu: {why}");
    Failure::new(Exit::Environment, message, Some(hint.to_owned()))
}

/// The GPUs that the ranks would see, or why that is not known.
///
/// *Errors*: there is no driver to ask.
fn gpus() -> Result<usize, String> {
    let found = paceline_gpu::devices::count()?;
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => match visible(found, &list) {
            0 => Err(format!(
                "CUDA_VISIBLE_DEVICES is {list:?}, which leaves none"
            )),
            count => Ok(count),
        },
        Err(_) => Ok(found),
    }
}

/// How many of the GPUs a list leaves. As for CUDA, an entry that makes no sense ends the list.
fn visible(found: usize, list: &str) -> usize {
    let is_device = |entry: &str| match entry.parse::<usize>() {
        Ok(number) => number < found,
        Err(_) => entry.starts_with("GPU-") || entry.starts_with("MIG-"),
    };
    let entries = list.split(',').map(str::trim);
    entries.take_while(|entry| is_device(entry)).count()
}

/// The options.
pub(crate) fn args() -> Vec<Arg> {
    [
        valued("nproc_per_node", "N|auto|gpu|cpu", Processes::parse)
            .default_value("1")
            .help(
                "Ranks to start on this node; gpu is one per GPU, cpu one per core, auto one per GPU or else per core [under Slurm: one per GPU of the step]",
            ),
        valued("threads_per_rank", "N", whole::<usize>(1..=1024)).help(
            "Compute threads of a rank, for OMP_NUM_THREADS and RAYON_NUM_THREADS [default: what these say, else \
             cores / ranks, or the cores that a rank is bound to]",
        ),
    ]
    .map(|arg| arg.help_heading(HEADING))
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_a_number_or_one_for_each_device_or_core() {
        let check = |text: &str, gpus: Result<usize, &str>, expect| {
            let processes = Processes::parse(text).expect(text);
            let count = processes.on(6, || gpus.map_err(str::to_owned));
            assert_eq!(count.ok(), expect, "{text}");
        };
        let none = Err("no driver");
        check("3", none, Some(3));
        check("cpu", Ok(2), Some(6));
        check("gpu", Ok(2), Some(2));
        check("auto", Ok(2), Some(2));
        check("auto", Ok(0), Some(6));
        check("auto", none, Some(6));
        check("gpu", Ok(0), None);
        check("gpu", none, None);
    }

    #[test]
    fn a_rank_for_each_gpu_where_there_is_none_is_refused_with_the_reason() {
        let refused = Processes::PerGpu.on(6, || Err("no driver".to_owned()));
        let expect = "--nproc-per-node gpu: no driver";
        let hint = "does `nvidia-smi` list them here? otherwise give a number of ranks, or `auto`, which is one per core \
                    where there is no GPU";
        let failure = Failure::new(Exit::Environment, expect, Some(hint.to_owned()));
        assert_eq!(refused, Err(failure));
    }

    #[test]
    fn what_is_no_number_of_ranks_is_refused() {
        for text in ["0", "-1", "1025", "1.5", "", "xpu", "GPU"] {
            let why = Processes::parse(text).expect_err(text);
            assert!(
                why.contains("expected auto, gpu, cpu, or a whole number from 1 to 1024"),
                "{why}"
            );
            assert_eq!(
                why.contains("give their number"),
                text.starts_with(['x', 'G']),
                "{why}"
            );
        }
    }

    #[test]
    fn the_list_of_visible_devices_is_read_as_cuda_reads_it() {
        let check = |list: &str, expect| assert_eq!(visible(4, list), expect, "{list}");
        check("0,1", 2);
        check("3, 0,2", 3);
        check("0,7,1", 1);
        check("-1", 0);
        check("", 0);
        check("GPU-1e5e,GPU-77aa", 2);
        check("NoDevFiles", 0);
    }
}
