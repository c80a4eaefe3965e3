//! What the figures of a comparison say, in sentences.

use paceline_words::counted;

use super::figures::{Figures, Wait, percent};
use super::records::Busy;

/// A wait of this share is told.
const WAIT_TOLD: f64 = 0.1;
/// A wait of this share is advised on.
const WAIT_LONG: f64 = 0.2;
/// From this efficiency on there is nothing to advise.
const EFFICIENT: f64 = 0.8;
/// All were busy for most of the time, or for little of it.
const BUSY_MOST: f64 = 0.8;
const BUSY_LITTLE: f64 = 0.6;
/// Of the gain that more ranks could bring, this share counts as none.
const GAIN_NONE: f64 = 0.2;
/// Digits of a hash that tell weights apart for people.
const HASH_DIGITS: usize = 16;

/// A sentence or more on each row after the first, and one on the trained weights. `cores` are those of the machine.
pub(super) fn verdict(rows: &[Figures], cores: usize) -> Vec<String> {
    let Some((first, others)) = rows.split_first() else {
        return Vec::new();
    };
    let mut lines: Vec<String> = (others.iter().map(|row| of_row(first, row, cores))).collect();
    lines.extend(weights(rows));
    lines
}

fn of_row(first: &Figures, row: &Figures, cores: usize) -> String {
    let parts = [
        Some(difference(first, row)),
        activity(row),
        advice(first, row, cores),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    parts.join(" ")
}

/// How the times differ, if that is more than noise.
fn difference(first: &Figures, row: &Figures) -> String {
    let (name, base) = (&row.name, &first.name);
    if row.may_equal(first) {
        let (own, other) = (row.seconds.range(), first.seconds.range());
        return format!(
            "No difference between {base} and {name} was shown: their times overlap ({other} and {own})."
        );
    }
    let ratio = row.seconds.median / first.seconds.median;
    let took = match ratio {
        ..=1.0 => format!("{name} took {ratio:.2} of the time of {base}"),
        _ => format!("{name} took {ratio:.2} times as long as {base}"),
    };
    let (speed_up, ideal) = (row.speed_up, row.ideal(first));
    let best = match ideal {
        ..=1.0 => String::new(),
        _ if speed_up > ideal => format!(", above the ideal {}", number(ideal)),
        _ => format!(" of at most {}", number(ideal)),
    };
    let noise = match first.has_spread() && row.has_spread() {
        true => "",
        false => "; one round shows nothing of the noise",
    };
    format!("{took} (speed-up {speed_up:.2}{best}{noise}).")
}

/// `2`, `1.5`
fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// How long all were busy, and who waited.
fn activity(row: &Figures) -> Option<String> {
    let share = row.all_busy_share.filter(|_| row.ranks > 1)?;
    let who = match row.ranks {
        2 => "Both".to_owned(),
        ranks => format!("All {ranks}"),
    };
    let busy = match row.busy {
        Busy::Ranks => format!("{who} were busy at once {}", percent(share)),
        Busy::Gpus => format!("All GPUs were busy at once {}", percent(share)),
        Busy::Computing => format!("{who} computed at once {}", percent(share)),
    };
    let told = |wait: Option<Wait>, what: &str| {
        let wait = wait.filter(|wait| wait.share >= WAIT_TOLD)?;
        Some(format!(
            "; rank {} waited {} for {what}",
            wait.rank,
            percent(wait.share)
        ))
    };
    let data = told(row.waited_for_data, "data").unwrap_or_default();
    let ranks = told(row.waited_for_ranks, "other ranks").unwrap_or_default();
    Some(format!("{busy} of the time{data}{ranks}."))
}

/// What to do about a row that brings less than its ranks could, as far as the figures support it.
fn advice(first: &Figures, row: &Figures, cores: usize) -> Option<String> {
    let ideal = row.ideal(first);
    if let Some(gpu) = row.idle_gpus.first() {
        return Some(format!(
            "GPU {gpu} did no work: give each rank the device of its LOCAL_RANK."
        ));
    }
    if ideal <= 1.0 || row.efficiency >= EFFICIENT {
        return None;
    }
    let is_long = |wait: Option<Wait>| wait.is_some_and(|wait| wait.share >= WAIT_LONG);
    let (busy, gain) = (row.all_busy_share, (row.speed_up - 1.0) / (ideal - 1.0));
    let text = if row.busy != Busy::Gpus && row.ranks > cores {
        let cores = counted(cores, "core");
        return Some(format!(
            "This machine has {cores}, so the ranks take turns."
        ));
    } else if is_long(row.waited_for_data) {
        "Data comes too slowly: try more --workers, or faster storage."
    } else if is_long(row.waited_for_ranks) {
        "The ranks wait for one another: try a larger batch, so that they meet less often."
    } else if busy.is_some_and(|share| share < BUSY_LITTLE) {
        "For much of the time not all were busy: `paceline run --usage-svg FILE` shows when."
    } else if gain < GAIN_NONE
        && busy.is_some_and(|share| share >= BUSY_MOST)
        && row.busy != Busy::Computing
    {
        "They were busy without a gain: check that the program divides its data by RANK and WORLD_SIZE, and does not spin \
         while it waits."
    } else {
        return None;
    };
    Some(text.to_owned())
}

/// Whether all rows ended with the same weights, if all have recorded theirs.
fn weights(rows: &[Figures]) -> Option<String> {
    let short = |hash: &String| hash.chars().take(HASH_DIGITS).collect::<String>();
    let first = rows.first()?.weights_sha256.first()?;
    if rows.iter().any(|row| row.weights_sha256.is_empty()) {
        return None;
    }
    if rows
        .iter()
        .flat_map(|row| &row.weights_sha256)
        .all(|hash| hash == first)
    {
        return Some(format!(
            "All runs ended with the same weights, sha256 {}.",
            short(first)
        ));
    }
    let of_row = |row: &Figures| {
        let hashes: Vec<String> = row.weights_sha256.iter().map(short).collect();
        format!("{} {}", row.name, hashes.join(" or "))
    };
    let each: Vec<String> = rows.iter().map(of_row).collect();
    Some(format!("The weights differ: {}.", each.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::super::figures::Spread;
    use super::*;

    /// A row of some ranks whose rounds took these times.
    fn row(ranks: usize, seconds: [f64; 2], all_busy_share: f64) -> Figures {
        let [least, most] = seconds;
        Figures {
            name: counted(ranks, "rank"),
            ranks,
            rounds: 3,
            seconds: Spread {
                median: f64::midpoint(least, most),
                least,
                most,
            },
            all_busy_share: Some(all_busy_share),
            ..Figures::default()
        }
    }

    fn of(first: &Figures, mut row: Figures, cores: usize) -> String {
        row.speed_up = first.seconds.median / row.seconds.median;
        row.efficiency = row.speed_up / row.ideal(first);
        verdict(&[first.clone(), row], cores).join("\n")
    }

    #[test]
    fn the_published_case_is_told_as_it_was() {
        let first = row(1, [2090.0, 2110.0], 1.0);
        let two = Figures {
            busy: Busy::Computing,
            waited_for_data: Some(Wait {
                rank: 1,
                share: 0.48,
            }),
            ..row(2, [1922.0, 1942.0], 0.4632)
        };
        assert_eq!(
            of(&first, two, 8),
            "2 ranks took 0.92 of the time of 1 rank (speed-up 1.09 of at most 2). Both computed at once 46 % of the time; \
             rank 1 waited 48 % for data. Data comes too slowly: try more --workers, or faster storage."
        );
    }

    #[test]
    fn a_difference_is_told_only_if_it_is_more_than_noise() {
        let first = || row(1, [9.0, 11.0], 1.0);
        let check = |two: Figures, expect: &str| {
            let text = of(&first(), two, 8);
            assert!(text.starts_with(expect), "{text}");
        };
        let noise = "No difference between 1 rank and 2 ranks was shown: their times overlap (9.00 s to 11.0 s and \
                     7.00 s to 9.00 s).";
        check(row(2, [7.0, 9.0], 0.9), noise);
        check(
            row(2, [4.8, 5.2], 0.9),
            "2 ranks took 0.50 of the time of 1 rank (speed-up 2.00 of at most 2). Both were busy at once 90 % of the time.",
        );
        check(
            row(3, [2.0, 3.0], 0.9),
            "3 ranks took 0.25 of the time of 1 rank (speed-up 4.00, above the ideal 3). All 3 were busy",
        );
        check(
            row(2, [19.0, 21.0], 0.9),
            "2 ranks took 2.00 times as long as 1 rank (speed-up 0.50 of at most 2).",
        );
        let mut once = row(2, [10.0, 10.0], 0.9);
        once.rounds = 1;
        check(
            once,
            "2 ranks took 1.00 of the time of 1 rank (speed-up 1.00 of at most 2; one round shows nothing of the noise).",
        );
        let fewer = "1 rank took 2.00 times as long as 1 rank (speed-up 0.50).";
        check(row(1, [20.0, 20.0], 1.0), fewer);
    }

    #[test]
    fn advice_is_what_the_figures_support() {
        let first = row(1, [10.0, 10.0], 1.0);
        let check = |two: Figures, cores, expect: Option<&str>| {
            let text = of(&first, two, cores);
            let advice = text.split_once("of the time. ").map(|(_, advice)| advice);
            assert_eq!(advice, expect, "{text}");
        };
        let wait = |share| Some(Wait { rank: 0, share });
        check(row(2, [5.1, 5.2], 0.3), 8, None);
        check(row(2, [8.0, 8.1], 0.7), 8, None);
        let turns = "This machine has 1 core, so the ranks take turns.";
        check(row(2, [9.8, 9.9], 0.9), 1, Some(turns));
        let idle =
            "For much of the time not all were busy: `paceline run --usage-svg FILE` shows when.";
        check(row(2, [8.0, 8.1], 0.4), 8, Some(idle));
        let spin = "They were busy without a gain: check that the program divides its data by RANK and WORLD_SIZE, and does \
                    not spin while it waits.";
        check(row(2, [9.8, 9.9], 0.95), 8, Some(spin));
        let alone = Figures {
            idle_gpus: vec![1],
            busy: Busy::Gpus,
            ..row(2, [9.8, 9.9], 0.0)
        };
        let device = "GPU 1 did no work: give each rank the device of its LOCAL_RANK.";
        check(alone, 1, Some(device));
        let meet = Figures {
            waited_for_ranks: wait(0.4),
            waited_for_data: wait(0.15),
            busy: Busy::Computing,
            ..row(2, [8.0, 8.1], 0.5)
        };
        let text = of(&first, meet, 8);
        let end = "Both computed at once 50 % of the time; rank 0 waited 15 % for data; rank 0 waited 40 % for other ranks. \
                   The ranks wait for one another: try a larger batch, so that they meet less often.";
        assert!(text.ends_with(end), "{text}");
    }

    #[test]
    fn weights_are_compared_where_all_rows_have_them() {
        let of = |hashes: &[&[&str]]| {
            let row = |(place, hashes): (usize, &&[&str])| Figures {
                name: format!("row {place}"),
                weights_sha256: hashes.iter().map(ToString::to_string).collect(),
                ..Figures::default()
            };
            let rows: Vec<Figures> = hashes.iter().enumerate().map(row).collect();
            weights(&rows)
        };
        let same = "All runs ended with the same weights, sha256 0123456789abcdef.";
        let long = "0123456789abcdef01";
        assert_eq!(of(&[&[long], &[long]]).as_deref(), Some(same));
        let differ = "The weights differ: row 0 a, row 1 a or b.";
        assert_eq!(of(&[&["a"], &["a", "b"]]).as_deref(), Some(differ));
        assert_eq!(of(&[&["a"], &[]]), None);
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn a_single_row_is_compared_with_nothing() {
        assert_eq!(verdict(&[row(1, [1.0, 1.0], 1.0)], 1), Vec::<String>::new());
    }
}
