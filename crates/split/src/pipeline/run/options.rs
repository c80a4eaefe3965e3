//! The layout of a pipeline.

use std::ops::Range;

use super::super::cut::cut;
use super::super::error::PipelineError;
use super::super::schedule::{PipelineSize, Schedule};

/// The layout of a [`Pipeline`](super::Pipeline), the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineOptions {
    /// Ranks of a pipeline. The job's ranks make up as many pipelines as fit; each runs shards of its own.
    pub ranks: usize,
    /// The order of the work.
    pub schedule: Schedule,
    /// Stages of each rank: 1, or more with [`Schedule::Interleaved`].
    pub chunks: usize,
    /// The first block of each stage but the first. `None` cuts evenly.
    pub cuts: Option<Vec<usize>>,
}

impl PipelineOptions {
    /// The pipeline's size with so many micro-batches.
    pub fn size(&self, micro_batches: usize) -> PipelineSize {
        PipelineSize {
            ranks: self.ranks,
            micro_batches,
            chunks: self.chunks,
        }
    }

    /// Whether so many micro-batches can be run.
    ///
    /// *Errors*: those of [`PipelineSize::check`].
    pub fn check(&self, micro_batches: usize) -> Result<(), PipelineError> {
        self.size(micro_batches).check(self.schedule)
    }

    /// The blocks of each stage.
    ///
    /// *Errors*: more stages than blocks; cuts that do not fit.
    pub fn stages(&self, blocks: usize) -> Result<Vec<Range<usize>>, PipelineError> {
        let stages = self.ranks * self.chunks;
        let Some(cuts) = &self.cuts else {
            return cut(&vec![1.0; blocks], stages);
        };
        let ends = cuts.iter().copied().chain([blocks]);
        let starts = std::iter::once(0).chain(cuts.iter().copied());
        let runs: Vec<_> = starts.zip(ends).map(|(start, end)| start..end).collect();
        if runs.len() != stages || runs.iter().any(Range::is_empty) {
            return Err(PipelineError::Cuts {
                cuts: cuts.clone(),
                blocks,
                expected: stages - 1,
            });
        }
        Ok(runs)
    }
}
