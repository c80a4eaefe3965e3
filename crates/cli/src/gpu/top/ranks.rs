//! The ranks' part of a frame.

use std::ops::Range;
use std::time::Duration;

use paceline_rendezvous::page::Phase;
use paceline_words::Lang;
use paceline_words::plain;
use ratatui::text::{Line, Span};

use super::super::live::Job;
use super::draw::visible;
use super::state::{Focus, RankRow, State};
use super::table::{self, Align, Cell, Column, column};
use super::words;
use crate::activity;
use crate::terminal::{Theme, Tone};

/// Waiting in one operation for longer than this is worth a look.
const LONG_WAIT: Duration = Duration::from_secs(10);

const COLUMNS: [Column; 9] = [
    column("RANK", 0, Align::Right),
    column("GPU", 3, Align::Right),
    column("STEP", 0, Align::Right),
    column("STEP/S", 1, Align::Right),
    column("CPU", 4, Align::Right),
    column("MEM", 5, Align::Right),
    column("PID", 6, Align::Right),
    column("FOR", 2, Align::Right),
    column("DOING", 0, Align::Fill(8)),
];

/// The job that is shown, in at most `height` lines.
pub(super) fn lines(
    state: &State,
    theme: Theme,
    width: usize,
    height: usize,
) -> Vec<Line<'static>> {
    let Some(job) = state.job() else {
        return Vec::new();
    };
    if height == 0 {
        return Vec::new();
    }
    let rows = state.rank_rows();
    let selected = state.selected[Focus::Ranks as usize];
    let has_focus = state.focus() == Focus::Ranks;
    // With little room ranks come before titles.
    let has_titles = height > 3;
    let room = height - 1 - usize::from(has_titles);
    let shown = visible(rows.len(), room, selected);
    let mut lines = vec![title(state, job, shown.clone(), theme, width)];
    let cells: Vec<Vec<Cell>> = rows[shown.clone()]
        .iter()
        .map(|row| cells(row).into_iter().collect())
        .collect();
    let mut table = table::lines(&COLUMNS, &cells, width, theme).into_iter();
    lines.extend(table.next().filter(|_| has_titles));
    for (index, line) in shown.zip(table) {
        lines.push(match has_focus && index == selected {
            true => line.style(theme.selected()),
            false => line,
        });
    }
    lines
}

fn title(
    state: &State,
    job: &Job,
    shown: Range<usize>,
    theme: Theme,
    width: usize,
) -> Line<'static> {
    let running = &job.running;
    let here = running.ranks.len();
    let mut parts: Vec<String> = Vec::new();
    let count = state.jobs.as_ref().map_or(0, |jobs| jobs.jobs.len());
    if count > 1 {
        parts.push(format!("{} of {count}", state.job_index().unwrap_or(0) + 1));
    }
    parts.push(match running.world {
        Some(world) if world != here => format!("{here} of {world} ranks are here"),
        _ => format!("{here} rank{}", if here == 1 { "" } else { "s" }),
    });
    if shown.len() < here {
        parts.push(format!("{} to {} shown", shown.start + 1, shown.end));
    }
    match running.restarts {
        0 => {}
        1 => parts.push("started again once".to_owned()),
        times => parts.push(format!("started again {times} times")),
    }
    if let Some(signal) = running.stopping {
        parts.push(format!("asked to stop by signal {signal}"));
    }
    if let Some(revocation) = &running.revocation {
        parts.push(format!("over: {}", plain(&revocation.text, usize::MAX)));
    }
    parts.push(running.command.clone());
    let name = format!("job {}", job.label);
    let rest = format!("{}{}", theme.dot(), parts.join(theme.dot()));
    let name = theme.cut(&name, width);
    let used = Span::raw(name.as_str()).width();
    let is_over = running.revocation.is_some() || running.stopping.is_some();
    let tone = if is_over { Tone::Bad } else { Tone::Title };
    Line::from(vec![
        Span::styled(name, theme.style(tone)),
        Span::raw(theme.cut(&rest, width.saturating_sub(used))),
    ])
}

fn cells(row: &RankRow<'_>) -> [Cell; 9] {
    let rank = row.rank;
    let text = |text: Option<String>| match text {
        Some(text) => Cell::new(text, Tone::Plain),
        None => Cell::new("-", Tone::Dim),
    };
    let devices: Vec<String> = row.used.devices.iter().map(u32::to_string).collect();
    let activity = rank.activity.as_ref();
    let (doing, tone) = doing(row);
    let resident = row.used.resident_bytes.known();
    let running = activity.filter(|_| rank.pid.is_some());
    [
        text(rank.rank.map(|rank| rank.to_string())),
        text(Some(devices.join(",")).filter(|text| !text.is_empty())),
        text(activity.map(|(activity, _)| activity.step.to_string())),
        text(row.steps_per_second.map(words::pace)),
        text(row.cpu_percent.map(|percent| format!("{percent:.0}%"))),
        text(resident.map(|bytes| words::bytes(*bytes))),
        text(rank.pid.map(|pid| pid.to_string())),
        text(running.map(|(_, since)| words::time(*since))),
        Cell::new(doing, tone),
    ]
}

fn doing(row: &RankRow<'_>) -> (String, Tone) {
    let rank = row.rank;
    match (&rank.activity, rank.pid) {
        (None, Some(_)) => ("no step reported".to_owned(), Tone::Dim),
        (None, None) => ("no process".to_owned(), Tone::Dim),
        (Some((activity, _)), None) if activity.phase == Phase::Finished => {
            ("finished".to_owned(), Tone::Dim)
        }
        (Some((activity, _)), None) => (
            format!("ended: {}", activity::doing(activity, Lang::En)),
            Tone::Bad,
        ),
        (Some((activity, since)), Some(_)) => {
            let is_late = activity.op.is_some() && *since >= LONG_WAIT;
            let tone = if is_late { Tone::Warn } else { Tone::Plain };
            (activity::doing(activity, Lang::En), tone)
        }
    }
}

/// What there is to say about the selected rank.
pub(super) fn sentence(state: &State) -> Option<String> {
    let rows = state.rank_rows();
    let selected = state.selected[Focus::Ranks as usize];
    let rank = rows.get(selected)?.rank;
    let who = match rank.rank {
        Some(number) => format!("rank {number}"),
        None => format!("local rank {selected}"),
    };
    let mut text = match (&rank.activity, rank.pid) {
        (None, Some(_)) => format!("{who} runs, and reports no step"),
        (None, None) => format!("{who} has no process"),
        (Some((activity, _)), None) => format!("{who} has ended; at last it was {activity}"),
        (Some((activity, since)), Some(_)) => {
            format!("{who} is {activity}, for {}", words::time(*since))
        }
    };
    if let Some(culprit) = rank.victim_of {
        text.push_str(&format!("; it fails because of rank {culprit}"));
    }
    if let Some(stopped) = rank.stopped {
        let step = stopped.step;
        text.push_str(&format!(
            "; it stopped after step {step} as it was asked to"
        ));
    }
    Some(text)
}
