//! Numbers in a row.

/// First and last of each run of numbers, which may come unsorted and several times.
#[must_use]
pub fn runs(numbers: &[u32]) -> Vec<(u32, u32)> {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let in_a_row = |a: &u32, b: &u32| a.checked_add(1) == Some(*b);
    let runs = sorted.chunk_by(in_a_row);
    runs.map(|run| (run[0], run[run.len() - 1])).collect()
}
