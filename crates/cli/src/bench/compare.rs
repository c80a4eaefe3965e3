//! The raw lines of several rounds and libraries as Markdown tables: ours beside each peer's.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use serde::Deserialize;

use super::quantile::median;
use super::sizes::bytes_text;

/// The library that the others are compared with.
const OURS: &str = "paceline";

/// A line of raw results, of whichever library. What is not needed here is left out.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Line {
    record: String,
    started: String,
    round: u32,
    library: String,
    operation: String,
    transport: String,
    memory: Option<String>,
    world: usize,
    bytes: usize,
    p50_us: f64,
    wrong: Option<u64>,
    gb_s: f64,
    shares: Vec<ShareLine>,
}

impl Line {
    fn round(&self) -> (String, u32) {
        (self.started.clone(), self.round)
    }
}

#[derive(Debug, Clone, Deserialize)]
struct ShareLine {
    bytes: usize,
    share: f64,
}

/// What one table is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Setting {
    operation: String,
    world: usize,
    transport: String,
    memory: String,
}

/// By round: when the measurement that it belongs to began, and its number there.
type Rounds = BTreeMap<(String, u32), f64>;

/// By library, transport and size, the medians of the rounds.
type Peers<'a> = BTreeMap<(&'a str, &'a str, usize), Rounds>;

/// Makes the tables of a file of raw results: JSON lines of [`Record`](super::record::Record)s, each with the number of its `round`
/// and when the measurement was `started`, and the same fields from other libraries. Every size that was measured is in
/// them, even if another library is faster.
///
/// *Units*: microseconds; ratios are a peer's time by ours of the same round.
///
/// *Errors*: a line that is no record, or no timing of this library.
pub(super) fn compare(raw: &str) -> Result<String, String> {
    let mut lines = Vec::new();
    for (index, text) in raw.lines().enumerate() {
        if text.trim().is_empty() {
            continue;
        }
        let line = serde_json::from_str(text).ok();
        let line = line.filter(|line: &Line| !line.record.is_empty());
        let line = line.ok_or_else(|| format!("line {} is no record", index + 1))?;
        lines.push(line);
    }
    let timings = || lines.iter().filter(|line| line.record == "timing");
    let mut settings: BTreeMap<Setting, BTreeMap<usize, Rounds>> = BTreeMap::new();
    for line in timings().filter(|line| line.library == OURS) {
        let setting = Setting {
            operation: line.operation.clone(),
            world: line.world,
            transport: line.transport.clone(),
            memory: line.memory.clone().unwrap_or_default(),
        };
        let sizes = settings.entry(setting).or_default();
        sizes
            .entry(line.bytes)
            .or_default()
            .insert(line.round(), line.p50_us);
    }
    if settings.is_empty() {
        return Err("there is no timing of `paceline`".into());
    }
    let mut text = String::new();
    for (setting, ours) in &settings {
        let mut peers = Peers::new();
        for line in timings().filter(|line| {
            line.library != OURS
                && line.operation == setting.operation
                && line.world == setting.world
        }) {
            let rounds = peers
                .entry((&line.library, &line.transport, line.bytes))
                .or_default();
            rounds.insert(line.round(), line.p50_us);
        }
        table(&mut text, setting, ours, &peers);
        bound(&mut text, setting, &lines);
        text.push('\n');
    }
    let wrong: u64 = timings().filter_map(|line| line.wrong).sum();
    if wrong > 0 {
        let _ = writeln!(
            text,
            "**{wrong} elements of all results together are wrong.**"
        );
    }
    Ok(text)
}

fn table(text: &mut String, setting: &Setting, ours: &BTreeMap<usize, Rounds>, peers: &Peers<'_>) {
    let Setting {
        operation,
        world,
        transport,
        memory,
    } = setting;
    let columns = columns(transport, peers);
    let memory = if memory.is_empty() {
        String::new()
    } else {
        format!(", {memory} memory")
    };
    let _ = writeln!(
        text,
        "### {operation}, {world} ranks, {transport}{memory}\n"
    );
    let _ = write!(text, "| size | paceline, us |");
    for (library, transport) in &columns {
        let _ = write!(
            text,
            " {library} ({transport}), us | {library} / paceline |"
        );
    }
    let _ = writeln!(text, "\n|---:|---:|{}", "---:|---:|".repeat(columns.len()));
    for (bytes, own) in ours {
        let _ = write!(text, "| {} | {} |", bytes_text(*bytes), cell(own));
        for (library, transport) in &columns {
            match peers.get(&(*library, *transport, *bytes)) {
                None => text.push_str(" - | - |"),
                Some(theirs) => {
                    let ratios = ratios(own, theirs);
                    let _ = write!(text, " {} | {} |", cell(theirs), cell(&ratios));
                }
            }
        }
        text.push('\n');
    }
}

/// The peers to show: over the same transport, or over what they have when they lack it.
fn columns<'a>(transport: &str, peers: &Peers<'a>) -> Vec<(&'a str, &'a str)> {
    let all: BTreeSet<(&str, &str)> = peers
        .keys()
        .map(|(library, transport, _)| (*library, *transport))
        .collect();
    let has_same = |library: &str| all.contains(&(library, transport));
    all.iter()
        .copied()
        .filter(|(library, theirs)| *theirs == transport || !has_same(library))
        .collect()
}

/// A peer's time by ours, round by round, so that a machine that changes its speed does not decide; by the medians where
/// no round has both.
fn ratios(ours: &Rounds, theirs: &Rounds) -> Rounds {
    let by_round: Rounds = ours
        .iter()
        .filter_map(|(round, own)| Some((round.clone(), theirs.get(round)? / own)))
        .collect();
    if !by_round.is_empty() {
        return by_round;
    }
    BTreeMap::from([(Default::default(), middle(theirs) / middle(ours))])
}

fn bound(text: &mut String, setting: &Setting, lines: &[Line]) {
    let is_of_setting = setting.memory == "arena" && setting.transport == "shm";
    let mut rates = Rounds::new();
    let mut shares: BTreeMap<usize, Rounds> = BTreeMap::new();
    for line in lines.iter().filter(|line| {
        line.record == "streaming" && line.world == setting.world && !line.shares.is_empty()
    }) {
        rates.insert(line.round(), line.gb_s);
        for share in &line.shares {
            shares
                .entry(share.bytes)
                .or_default()
                .insert(line.round(), share.share);
        }
    }
    if !is_of_setting || setting.operation != "all-reduce" || rates.is_empty() {
        return;
    }
    let _ = write!(
        text,
        "\nAll {} ranks streaming at once: {} GB/s.",
        setting.world,
        cell(&rates)
    );
    for (bytes, rounds) in &shares {
        let _ = write!(
            text,
            " {} reaches {} of it.",
            bytes_text(*bytes),
            cell(rounds)
        );
    }
    text.push('\n');
}

/// The median of the rounds, and between which values they lie.
fn cell(rounds: &Rounds) -> String {
    let low = rounds.values().copied().fold(f64::INFINITY, f64::min);
    let high = rounds.values().copied().fold(f64::NEG_INFINITY, f64::max);
    if rounds.len() < 2 {
        return number(middle(rounds));
    }
    format!(
        "{} ({} to {})",
        number(middle(rounds)),
        number(low),
        number(high)
    )
}

fn middle(rounds: &Rounds) -> f64 {
    median(&mut rounds.values().copied().collect::<Vec<_>>())
}

/// Three digits that count, at most four behind the point, and all that stand before it.
fn number(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 99.95 => 0,
        size if size >= 9.995 => 1,
        size if size >= 0.9995 => 2,
        size if size >= 0.099_95 => 3,
        _ => 4,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timing(round: u32, library: &str, transport: &str, bytes: usize, p50_us: f64) -> String {
        let memory = if library == OURS { "\"arena\"" } else { "null" };
        format!(
            "{{\"round\":{round},\"record\":\"timing\",\"library\":\"{library}\",\"operation\":\"all-reduce\",\
             \"transport\":\"{transport}\",\"memory\":{memory},\"world\":2,\"bytes\":{bytes},\"p50_us\":{p50_us},\
             \"wrong\":0,\"anything\":\"else\"}}\n"
        )
    }

    #[test]
    fn medians_spreads_and_ratios_of_rounds_stand_in_a_table() {
        let raw = [
            timing(1, OURS, "shm", 8, 2.0),
            timing(1, "mpi", "shm", 8, 1.0),
            timing(1, "mpi", "tcp", 8, 50.0),
            timing(1, "gloo", "tcp", 8, 100.0),
            timing(2, OURS, "shm", 8, 4.0),
            timing(2, "mpi", "shm", 8, 1.0),
            timing(2, "gloo", "tcp", 8, 100.0),
            timing(3, OURS, "shm", 8, 2.5),
            timing(3, "gloo", "tcp", 8, 1000.0),
            timing(1, OURS, "shm", 1 << 20, 123.4),
            "{\"record\":\"run\",\"library\":\"paceline\",\"round\":1}\n".into(),
        ]
        .concat();
        let expect = "\
### all-reduce, 2 ranks, shm, arena memory

| size | paceline, us | gloo (tcp), us | gloo / paceline | mpi (shm), us | mpi / paceline |
|---:|---:|---:|---:|---:|---:|
| 8 B | 2.50 (2.00 to 4.00) | 100 (100 to 1000) | 50.0 (25.0 to 400) | 1.00 (1.00 to 1.00) | 0.375 (0.250 to 0.500) |
| 1 MiB | 123 | - | - | - | - |

";
        assert_eq!(compare(&raw).unwrap(), expect);
    }

    #[test]
    fn numbers_have_three_digits_that_count() {
        for (value, text) in [
            (1234.5, "1234"),
            (123.4, "123"),
            (99.96, "100"),
            (12.34, "12.3"),
            (1.0, "1.00"),
            (0.5, "0.500"),
            (0.01234, "0.0123"),
            (0.0, "0.0000"),
        ] {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn the_bound_is_told_below_the_table_that_it_is_for() {
        let streaming = |round, rate, share| {
            format!(
                "{{\"round\":{round},\"record\":\"streaming\",\"world\":2,\"gb_s\":{rate},\
                 \"shares\":[{{\"bytes\":1048576,\"share\":{share}}}]}}\n"
            )
        };
        let raw = [
            timing(1, OURS, "shm", 1 << 20, 100.0),
            timing(1, OURS, "tcp", 1 << 20, 900.0),
            streaming(1, 40.0, 0.8),
            streaming(2, 30.0, 0.9),
        ]
        .concat();
        let text = compare(&raw).unwrap();
        let bound = "All 2 ranks streaming at once: 35.0 (30.0 to 40.0) GB/s. 1 MiB reaches 0.850 (0.800 to 0.900) of it.";
        assert_eq!(text.matches(bound).count(), 1, "{text}");
        assert!(text.find("### all-reduce, 2 ranks, tcp") > text.find(bound));
    }

    #[test]
    fn wrong_elements_are_not_kept_quiet() {
        let raw = timing(1, OURS, "shm", 8, 2.0).replace("\"wrong\":0", "\"wrong\":3");
        assert!(
            compare(&raw)
                .unwrap()
                .contains("**3 elements of all results together are wrong.**")
        );
    }

    #[test]
    fn a_file_without_our_rows_or_with_other_lines_is_refused() {
        let peers = timing(1, "gloo", "tcp", 8, 1.0);
        assert_eq!(
            compare(&peers).unwrap_err(),
            "there is no timing of `paceline`"
        );
        let error = compare(&format!("{peers}\nnonsense\n")).unwrap_err();
        assert_eq!(error, "line 3 is no record");
    }
}
