//! Cutting a list of blocks into stages. Pure.

use std::ops::Range;

use super::PipelineError;

/// Cuts blocks into `stages` runs, so that the costliest run costs as little as possible.
///
/// `costs` are those of the blocks, in any unit; for an even cut they are all 1. Of equally good cuts it takes the one with the longest first
/// stage, and cuts the rest alike.
///
/// *Errors*: more stages than blocks, or no stages.
pub fn cut(costs: &[f64], stages: usize) -> Result<Vec<Range<usize>>, PipelineError> {
    let blocks = costs.len();
    if stages == 0 || stages > blocks {
        return Err(PipelineError::TooManyStages { stages, blocks });
    }
    let mut sums = vec![0.0];
    for cost in costs {
        sums.push(sums[sums.len() - 1] + cost);
    }
    // least[s][b]: the costliest of `s + 1` stages over the blocks from `b` on; `ends` has the first stage's end.
    let mut least: Vec<f64> = (0..=blocks)
        .map(|first| sums[blocks] - sums[first])
        .collect();
    let mut ends = vec![vec![blocks; blocks + 1]];
    for stage in 1..stages {
        let (mut now, mut end_of) = (vec![f64::INFINITY; blocks + 1], vec![blocks; blocks + 1]);
        for first in 0..blocks - stage {
            for end in first + 1..=blocks - stage {
                let costliest = (sums[end] - sums[first]).max(least[end]);
                if costliest <= now[first] {
                    (now[first], end_of[first]) = (costliest, end);
                }
            }
        }
        least = now;
        ends.push(end_of);
    }
    let mut first = 0;
    let runs = ends.iter().rev().map(|end_of| {
        let run = first..end_of[first];
        first = run.end;
        run
    });
    Ok(runs.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costliest(costs: &[f64], runs: &[Range<usize>]) -> f64 {
        let sums = runs.iter().map(|run| costs[run.clone()].iter().sum());
        sums.fold(0.0, f64::max)
    }

    /// By trying all cuts.
    fn best(costs: &[f64], stages: usize) -> f64 {
        if stages == 1 {
            return costs.iter().sum();
        }
        let ends = 1..=costs.len() - (stages - 1);
        let tried = ends.map(|end| {
            let (first, rest) = costs.split_at(end);
            first.iter().sum::<f64>().max(best(rest, stages - 1))
        });
        tried.fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn the_costliest_stage_is_as_cheap_as_possible() {
        let mut state = 1_u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f64::from(state >> 28)
        };
        for blocks in 1..=9 {
            for stages in 1..=blocks {
                let costs: Vec<f64> = (0..blocks).map(|_| random()).collect();
                let runs = cut(&costs, stages).expect("there are enough blocks");
                assert_eq!(runs.len(), stages);
                assert!(runs.iter().all(|run| !run.is_empty()), "{runs:?}");
                assert_eq!((runs[0].start, runs[stages - 1].end), (0, blocks));
                assert!(
                    runs.windows(2).all(|pair| pair[0].end == pair[1].start),
                    "{runs:?}"
                );
                assert_eq!(
                    costliest(&costs, &runs),
                    best(&costs, stages),
                    "{costs:?} {runs:?}"
                );
            }
        }
    }

    #[test]
    fn equal_blocks_are_dealt_evenly() {
        let lens = |blocks, stages| {
            let runs = cut(&vec![1.0; blocks], stages).expect("there are enough blocks");
            runs.iter().map(ExactSizeIterator::len).collect::<Vec<_>>()
        };
        assert_eq!(lens(8, 4), [2, 2, 2, 2]);
        assert_eq!(lens(10, 4), [3, 3, 2, 2]);
        assert_eq!(lens(3, 3), [1, 1, 1]);
    }

    #[test]
    fn more_stages_than_blocks_are_refused() {
        let error = cut(&[1.0; 3], 4).unwrap_err().to_string();
        assert_eq!(error, "pipeline: 4 stages for 3 blocks");
    }
}
