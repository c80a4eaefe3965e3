//! A Gantt chart of a step: a row for each rank, from the spans that the run has recorded.

use std::fmt::Write as _;
use std::time::Duration;

use paceline_usage::busy::{BusyTime, Interval};
use paceline_usage::figures::thousands;
use paceline_words::{Lang, Word};
use serde::Deserialize;

use crate::chart::{Axis, Scale, number};
use crate::page::table;
use crate::words;

/// Most rows: of more ranks, the half that worked longest and the half that worked least are drawn.
pub(crate) const ROWS_MAX: usize = 16;

const WIDTH: f64 = 640.0;
const LEFT: f64 = 72.0;
/// Of a digit of a rank's number, from the third on.
const DIGIT: f64 = 9.0;
const RIGHT: f64 = 12.0;
const ROW: f64 = 26.0;
const BAR: f64 = 18.0;
/// Of operations between ranks, below the bar.
const STRIP: f64 = 6.0;
/// The colour of an operation once all ranks have come; before, it is that of a wait.
const MOVING_COLOR: usize = 4;
/// Most operations that are listed.
const BUCKETS_MAX: usize = 16;
const BOTTOM: f64 = 42.0;

/// What a rank does, with its word and the number of its colour.
const KINDS: [(Kind, Word, usize); 7] = [
    (Kind::Data, words::DATA, 6),
    (Kind::Forward, words::FORWARD, 0),
    (Kind::Backward, words::BACKWARD, 3),
    (Kind::Wait, words::WAITS, 1),
    (Kind::Optimizer, words::OPTIMIZER, 2),
    (Kind::Evaluation, words::EVALUATION, 5),
    (Kind::Save, words::CHECKPOINT, 7),
];

/// What a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    Data,
    Forward,
    Backward,
    Wait,
    Optimizer,
    Evaluation,
    Save,
    /// Of a later version.
    #[serde(other)]
    Unknown,
}

impl Kind {
    /// Whether it follows the optimizer's step.
    fn follows(self) -> bool {
        matches!(self, Self::Evaluation | Self::Save)
    }
}

/// A span with its begin and end in seconds.
type Span = (Kind, f64, f64);

/// What the ranks did in one step.
#[derive(Clone, Debug, Deserialize)]
pub struct Spans {
    pub(crate) step: u64,
    ranks: Vec<Vec<Span>>,
    /// For each rank, what it had on its way between ranks.
    #[serde(default)]
    buckets: Vec<Vec<Bucket>>,
}

/// An operation between ranks: bytes, and the seconds of its start, of the last rank's coming and of its end.
type Bucket = (u64, f64, f64, f64);

/// What a rank had on its way, in seconds.
struct Communication {
    /// In which some operation was on its way.
    total: f64,
    /// In which one was, and not all ranks had come to it.
    late: f64,
    /// In which the rank computed meanwhile.
    hidden: f64,
}

impl Spans {
    /// Whether it can be drawn: there are spans, and none ends before it begins.
    pub(crate) fn is_sound(&self) -> bool {
        let is_sound = |(_, start, end): &Span| 0.0 <= *start && start <= end && end.is_finite();
        let mut spans = self.ranks.iter().flatten().peekable();
        let buckets = self.buckets.iter().flatten();
        let mut buckets = buckets.map(|(_, start, ready, end)| [*start, *ready, *end]);
        spans.peek().is_some()
            && spans.all(is_sound)
            && self.buckets.len() <= self.ranks.len()
            && buckets.all(|times| times.is_sorted() && times[0] >= 0.0 && times[2].is_finite())
    }

    /// Whether nothing follows the optimizer in it.
    pub(crate) fn is_plain(&self) -> bool {
        !self.ranks.iter().flatten().any(|(kind, ..)| kind.follows())
    }

    /// How long each rank worked, up to the end of the optimizer's step: what it did not wait for others.
    ///
    /// Ranks without spans are left out.
    fn worked(&self) -> Vec<(usize, f64)> {
        let worked = |spans: &[Span]| {
            let spans = || spans.iter().filter(|(kind, ..)| !kind.follows());
            let start = spans().map(|(_, start, _)| *start).reduce(f64::min)?;
            let end = spans().map(|(.., end)| *end).reduce(f64::max)?;
            let waits = spans().filter(|(kind, ..)| *kind == Kind::Wait);
            let waited: f64 = waits.map(|(_, start, end)| end - start).sum();
            Some((end - start - waited).max(0.0))
        };
        let ranks = self.ranks.iter().enumerate();
        ranks
            .filter_map(|(rank, spans)| Some((rank, worked(spans)?)))
            .collect()
    }

    /// Steps done with this one.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// What the operations between ranks took, on average over the ranks, in a sentence; none where they are not known.
    #[must_use]
    pub fn communication(&self, lang: Lang) -> Option<String> {
        let first = self.buckets.iter().find(|buckets| !buckets.is_empty())?;
        let bytes: u64 = first.iter().map(|(bytes, ..)| bytes).sum();
        let ranks = self.ranks.iter().zip(&self.buckets);
        let ranks: Vec<Communication> = ranks
            .filter(|(_, buckets)| !buckets.is_empty())
            .map(|(spans, buckets)| communicated(spans, buckets))
            .collect();
        let mean = |of: &dyn Fn(&Communication) -> f64| {
            ranks.iter().map(of).sum::<f64>() / ranks.len() as f64
        };
        let total = mean(&|rank| rank.total);
        let hidden = mean(&|rank| rank.hidden) / total.max(f64::MIN_POSITIVE) * 100.0;
        let values = [
            &*format!("{hidden:.0}"),
            &*thousands(first.len() as u64),
            &*megabytes(bytes),
            &*milliseconds(total),
            &*milliseconds(mean(&|rank| rank.late)),
        ];
        Some(words::COMMUNICATED.filled(lang, &values))
    }

    /// The operations one by one, with means over the ranks, as a table of a page.
    fn buckets(&self, lang: Lang) -> String {
        let most = self.buckets.iter().map(Vec::len).max().unwrap_or(0);
        if most == 0 {
            return String::new();
        }
        let row = |place: usize| {
            let of_ranks = self.buckets.iter().filter_map(|buckets| buckets.get(place));
            let of_ranks: Vec<&Bucket> = of_ranks.collect();
            let mean = |of: &dyn Fn(&Bucket) -> f64| {
                let sum: f64 = of_ranks.iter().map(|bucket| of(bucket)).sum();
                milliseconds(sum / of_ranks.len() as f64)
            };
            vec![
                (place + 1).to_string(),
                of_ranks
                    .first()
                    .map_or(String::new(), |(bytes, ..)| megabytes(*bytes)),
                mean(&|(_, start, _, end)| end - start),
                mean(&|(_, start, ready, _)| ready - start),
            ]
        };
        let mut rows: Vec<Vec<String>> = (0..most.min(BUCKETS_MAX)).map(row).collect();
        if most > BUCKETS_MAX {
            let more = (most - BUCKETS_MAX).to_string();
            rows.push(vec![words::BUCKETS_LEFT_OUT.filled(lang, &[&more])]);
        }
        let head = [
            words::BUCKET,
            words::BUCKET_SIZE,
            words::BUCKET_TIME,
            words::BUCKET_LATE,
        ];
        table(&head.map(|word| word.of(lang)), &rows)
    }

    /// The ranks that are drawn, in order.
    fn rows(&self) -> Vec<usize> {
        extremes(self.worked(), ROWS_MAX)
    }

    /// The rank that worked longest, its time, and the mean of the others.
    fn slowest(&self) -> Option<(usize, f64, f64)> {
        let worked = self.worked();
        let (rank, most) = *worked
            .iter()
            .max_by(|one, other| one.1.total_cmp(&other.1))?;
        let others = worked.iter().filter(|(other, _)| *other != rank);
        let sum: f64 = others.map(|(_, worked)| worked).sum();
        (worked.len() > 1).then(|| (rank, most, sum / (worked.len() - 1) as f64))
    }
}

fn communicated(spans: &[Span], buckets: &[Bucket]) -> Communication {
    let interval = |start: f64, end: f64| Interval {
        start_ns: (start * 1e9).round() as u64,
        end_ns: (end * 1e9).round() as u64,
    };
    let moving = buckets
        .iter()
        .map(|(_, start, _, end)| interval(*start, *end));
    let late = buckets
        .iter()
        .map(|(_, start, ready, _)| interval(*start, *ready));
    let waits = spans.iter().filter(|(kind, ..)| *kind == Kind::Wait);
    let waits = waits.map(|(_, start, end)| interval(*start, *end));
    let window = interval(
        0.0,
        buckets.iter().map(|(.., end)| *end).fold(0.0, f64::max),
    );
    // Where both are idle, an operation is on its way and the rank waits.
    let mut both = BusyTime::new(2);
    both.add(window, &[moving.collect(), waits.collect()]);
    let mut ready = BusyTime::new(1);
    ready.add(window, &[late.collect()]);
    let idle = |time: &BusyTime| (time.total() - time.busy(0)).as_secs_f64();
    let total = idle(&both);
    Communication {
        total,
        late: idle(&ready),
        hidden: total - Duration::from_nanos(both.at_once_ns[0]).as_secs_f64(),
    }
}

/// The chart as a figure of a page.
pub(crate) fn figure(spans: &Spans, lang: Lang) -> String {
    let title = words::STEP_OF_RANKS.filled(lang, &[&thousands(spans.step)]);
    let drawn = |kind: Kind| spans.ranks.iter().flatten().any(|span| span.0 == kind);
    let keys = KINDS.iter().filter(|(kind, ..)| drawn(*kind));
    let keys = keys.map(|(_, word, color)| (*word, *color));
    let has_buckets = spans.buckets.iter().any(|buckets| !buckets.is_empty());
    let moving = has_buckets.then_some((words::COMMUNICATION, MOVING_COLOR));
    let keys: String = keys
        .chain(moving)
        .map(|(word, color)| {
            let word = word.of(lang);
            format!("<span><span class=\"key c{color}\"></span>{word}</span> ")
        })
        .collect();
    let mut notes = Vec::new();
    let slowest = spans.slowest();
    if let Some((rank, worked, others)) = slowest {
        let times = [worked, others].map(milliseconds);
        let values = [&*rank.to_string(), &*times[0], &*times[1]];
        notes.push(words::SLOWEST_RANK.filled(lang, &values));
    }
    notes.extend(spans.communication(lang));
    let ranks = spans.ranks.iter().filter(|spans| !spans.is_empty()).count();
    notes.extend(left_out(ranks, ROWS_MAX, lang));
    let svg = draw(spans, slowest.map(|(rank, ..)| rank), &title, lang);
    let (notes, buckets) = (notes.join(" "), spans.buckets(lang));
    format!(
        "<figure><figcaption>{title}</figcaption><p class=\"keys\">{keys}</p>{svg}<p>{notes}</p>{buckets}</figure>\n"
    )
}

/// Of ranks and how long they worked, so many that worked longest and that worked least, by their numbers.
pub(crate) fn extremes(mut worked: Vec<(usize, f64)>, most: usize) -> Vec<usize> {
    worked.sort_by(|one, other| other.1.total_cmp(&one.1));
    if worked.len() > most {
        worked.drain(most / 2..worked.len() - most / 2);
    }
    let mut ranks: Vec<usize> = worked.into_iter().map(|(rank, _)| rank).collect();
    ranks.sort_unstable();
    ranks
}

/// Says that not all ranks are shown, if so.
pub(crate) fn left_out(ranks: usize, most: usize, lang: Lang) -> Option<String> {
    let half = (most / 2).to_string();
    let all = ranks.to_string();
    (ranks > most).then(|| words::ROWS_LEFT_OUT.filled(lang, &[&all, &half, &half]))
}

fn megabytes(bytes: u64) -> String {
    number((bytes as f64 / 1e4).round() / 1e2)
}

fn milliseconds(seconds: f64) -> String {
    number((seconds * 1e5).round() / 1e2)
}

fn draw(spans: &Spans, slowest: Option<usize>, title: &str, lang: Lang) -> String {
    let rows = spans.rows();
    let of_rows = || rows.iter().flat_map(|rank| &spans.ranks[*rank]);
    let last = of_rows().map(|(.., end)| *end).fold(0.0, f64::max);
    let buckets_of = |rank: usize| spans.buckets.get(rank).map_or(&[][..], Vec::as_slice);
    let has_buckets = rows.iter().any(|rank| !buckets_of(*rank).is_empty());
    let row_height = ROW + if has_buckets { STRIP } else { 0.0 };
    let times = Axis::over(0.0, last * 1e3, Scale::FromZero);
    let digits = rows.last().map_or(0, |rank| rank.to_string().len());
    let beside = LEFT + DIGIT * digits.saturating_sub(2) as f64;
    let x = |seconds: f64| beside + times.at(seconds * 1e3) * (WIDTH - beside - RIGHT);
    let floor = row_height * rows.len() as f64;
    let height = floor + BOTTOM;
    let mut svg =
        format!(r#"<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">"#);
    for mark in times.marks() {
        let at = x(mark / 1e3);
        let _ = write!(
            svg,
            r#"<path class="grid" d="M{at:.1} 0V{floor}"/><text x="{at:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
            floor + 18.0,
            number(mark)
        );
    }
    let _ = write!(
        svg,
        r#"<text x="{:.1}" y="{:.1}" text-anchor="end">ms</text>"#,
        WIDTH - RIGHT,
        height - 3.0
    );
    for (row, rank) in rows.iter().enumerate() {
        let top = row_height * row as f64 + (ROW - BAR) / 2.0;
        let class = match slowest == Some(*rank) {
            true => r#" class="slowest""#,
            false => "",
        };
        let _ = write!(
            svg,
            r#"<text{class} x="{:.1}" y="{:.1}" text-anchor="end">{} {rank}</text>"#,
            beside - 6.0,
            top + BAR - 5.0,
            words::RANK.of(lang)
        );
        // Waits may lie within passes.
        for (kind, start, end) in &spans.ranks[*rank] {
            let known = KINDS.iter().find(|(other, ..)| other == kind);
            let Some((_, word, color)) = known else {
                continue;
            };
            let (left, right) = (x(*start), x(*end));
            let _ = write!(
                svg,
                r#"<rect class="span c{color}" x="{left:.1}" y="{top}" width="{:.1}" height="{BAR}"><title>{} {} ms</title></rect>"#,
                (right - left).max(0.4),
                word.of(lang),
                milliseconds(end - start)
            );
        }
        for (bytes, start, ready, end) in buckets_of(*rank) {
            let parts = [
                (words::WAITS, 1, *start, *ready),
                (words::COMMUNICATION, MOVING_COLOR, *ready, *end),
            ];
            for (word, color, from, to) in parts {
                let (left, right) = (x(from), x(to.min(last)));
                let _ = write!(
                    svg,
                    r#"<rect class="span c{color}" x="{left:.1}" y="{}" width="{:.1}" height="{STRIP}"><title>{} MB: {} {} ms</title></rect>"#,
                    top + BAR + 1.0,
                    (right - left).max(0.0),
                    megabytes(*bytes),
                    word.of(lang),
                    milliseconds(to - from)
                );
            }
        }
    }
    svg + "</svg>"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(ranks: &[&[(&str, f64, f64)]]) -> Spans {
        let line = serde_json::json!({ "kind": "spans", "step": 1_234, "ranks": ranks });
        serde_json::from_value(line).expect("spans")
    }

    #[test]
    fn the_rank_that_the_others_wait_for_is_named() {
        let quick = [
            ("data", 0.0, 0.001),
            ("forward", 0.001, 0.004),
            ("wait", 0.004, 0.010),
            ("optimizer", 0.010, 0.011),
        ];
        let slow = [
            ("data", 0.0, 0.001),
            ("forward", 0.001, 0.010),
            ("optimizer", 0.010, 0.011),
            ("save", 0.011, 9.0),
        ];
        let spans = spans(&[&quick, &[], &slow]);
        assert!(spans.is_sound() && !spans.is_plain());
        let html = figure(&spans, Lang::En);
        assert!(
            html.contains("Rank 2 worked longest: 11 ms, the others 5 ms on average."),
            "{html}"
        );
        assert!(
            html.contains(">rank 0<") && html.contains(r#"class="slowest""#),
            "{html}"
        );
        assert!(!html.contains(">rank 1<"), "{html}");
        assert!(html.contains("<title>waiting 6 ms</title>"), "{html}");
        assert!(html.contains("step 1,234"), "{html}");
    }

    #[test]
    fn of_many_ranks_the_slowest_and_the_fastest_are_drawn() {
        let rows: Vec<Vec<(&str, f64, f64)>> = (1..=100)
            .map(|rank| vec![("forward", 0.0, f64::from(rank) / 1e3)])
            .collect();
        let rows: Vec<&[_]> = rows.iter().map(Vec::as_slice).collect();
        let spans = spans(&rows);
        let expected: Vec<usize> = (0..8).chain(92..100).collect();
        assert_eq!(spans.rows(), expected);
        let html = figure(&spans, Lang::En);
        assert_eq!(html.matches("<rect").count(), ROWS_MAX);
        assert!(html.contains("Of 100 ranks"), "{html}");
    }

    #[test]
    fn operations_between_ranks_are_drawn_listed_and_summed_up() {
        let line = serde_json::json!({
            "kind": "spans", "step": 7,
            "ranks": [
                [["backward", 0.0, 0.010], ["wait", 0.006, 0.010], ["optimizer", 0.010, 0.011]],
                [["backward", 0.0, 0.010], ["wait", 0.008, 0.010], ["optimizer", 0.010, 0.011]],
            ],
            "buckets": [
                [[2_000_000, 0.001, 0.003, 0.005], [1_500_000, 0.005, 0.005, 0.009]],
                [[2_000_000, 0.003, 0.003, 0.005], [1_500_000, 0.005, 0.005, 0.009]],
            ],
        });
        let read = |line: &serde_json::Value| serde_json::from_value::<Spans>(line.clone());
        let spans = read(&line).expect("spans");
        assert!(spans.is_sound() && spans.is_plain());
        // 8 and 6 ms on their way, of which 3 and 1 in waits.
        let told = "71 % of the communication hidden behind computing (operations: 2, 3.5 MB, 7 ms, of these 1 ms until the last rank had come).";
        assert_eq!(spans.communication(Lang::En).as_deref(), Some(told));
        let html = figure(&spans, Lang::En);
        for part in [
            told,
            "</span>communication</span>",
            "<title>2 MB: waiting 2 ms</title>",
            "<title>1.5 MB: communication 4 ms</title>",
            "<td>1</td><td>2</td><td>3</td><td>1</td>",
        ] {
            assert!(html.contains(part), "{part}: {html}");
        }
        for (from, to) in [
            ("0.005,0.009", "0.005,0.001"),
            ("[[2000000,0.001", "[[2000000,-1"),
        ] {
            let damaged = line.to_string().replacen(from, to, 1);
            assert_ne!(damaged, line.to_string());
            let damaged = serde_json::from_str::<Spans>(&damaged);
            assert!(!damaged.is_ok_and(|spans| spans.is_sound()), "{to}");
        }
    }

    #[test]
    fn damaged_spans_are_refused_and_unknown_ones_left_out() {
        assert!(!spans(&[]).is_sound());
        assert!(!spans(&[&[("data", 1.0, 0.5)]]).is_sound());
        assert!(!spans(&[&[("data", -1.0, 0.5)]]).is_sound());
        let later = spans(&[&[("dream", 0.0, 0.5), ("data", 0.5, 1.0)]]);
        assert!(later.is_sound());
        let html = figure(&later, Lang::Ko);
        assert_eq!(html.matches("<rect").count(), 1, "{html}");
        let still = spans(&[&[("data", 0.0, 0.0)]]);
        assert!(!figure(&still, Lang::En).contains("NaN"));
    }
}
