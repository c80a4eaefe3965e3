//! Numbers in sentences: how many of a thing there are, and numbers in a row.

/// `1 GPU`, `2 GPUs`, `3 processes`.
#[must_use]
pub fn count(number: usize, noun: &str) -> String {
    let plural = match noun {
        _ if number == 1 => "",
        _ if noun.ends_with('s') || noun.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{number} {noun}{plural}")
}

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
