//! A frame: the runs, a chart, the ranks, incidents.

use paceline_rendezvous::page::RunningJob;
use paceline_report::words;
use paceline_report::{Curve, Seen, charts, number};
use paceline_usage::figures::{clock, thousands};
use paceline_words::Word;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};

use super::plot::{self, Steps};
use super::state::{State, Watched, Zoom};
use crate::activity::doing;
use crate::terminal::{Room, Theme, Tone};

/// Most incidents that are shown, the last ones.
const INCIDENTS_MAX: usize = 3;
/// Least lines of a chart. Ranks and incidents get what is left.
const CHART_HEIGHT: u16 = 8;
/// Characters of a bar.
const BAR_WIDTH: usize = 12;
/// The metric that has a place beside the losses.
const ACCURACY: &str = "accuracy";

/// Draws everything.
pub(super) fn draw(state: &State, theme: Theme, area: Rect, buffer: &mut Buffer) {
    if area.is_empty() {
        return;
    }
    let frame = Frame { state, theme };
    let width = usize::from(area.width);
    let mut room = Room { area, buffer };
    room.top(frame.title(width));
    if state.has_help {
        let help = state.word(words::HELP).split('|');
        let lines = help.map(|line| Line::raw(theme.cut(line, width)));
        return room.fill(lines.collect());
    }
    for (place, watched) in state.runs.iter().enumerate() {
        room.top(frame.run(place, watched));
    }
    room.bottom(Line::styled(
        theme.cut(state.word(words::KEYS), width),
        theme.style(Tone::Dim),
    ));
    let below = [frame.incidents(width), frame.ranks(width)];
    let free = room.area.height.saturating_sub(CHART_HEIGHT);
    for lines in below {
        let free = usize::from(free.min(room.area.height.saturating_sub(CHART_HEIGHT)));
        let left_out = lines.len().saturating_sub(free);
        let shown = lines.len() - left_out;
        for line in lines.into_iter().take(shown).rev() {
            room.bottom(line);
        }
    }
    frame.chart(room);
}

impl State {
    fn word(&self, word: Word) -> &'static str {
        word.of(self.lang)
    }
}

struct Frame<'a> {
    state: &'a State,
    theme: Theme,
}

impl Frame<'_> {
    fn title(&self, width: usize) -> Line<'static> {
        let zoom = match self.state.zoom {
            Zoom::Whole => self.state.word(words::WHOLE).to_owned(),
            zoom => {
                let share = zoom.percent().to_string();
                words::LAST_SHARE.filled(self.state.lang, &[&share])
            }
        };
        let name = "paceline watch";
        let rest = format!("{}{zoom}", self.theme.dot());
        Line::from(vec![
            Span::styled(name, self.theme.style(Tone::Title)),
            Span::raw(self.theme.cut(&rest, width.saturating_sub(name.len()))),
        ])
    }

    /// A run in a line: what matters most comes first, because the end may be cut off.
    fn run(&self, place: usize, watched: &Watched) -> Line<'static> {
        let seen = &watched.run.seen;
        let (state, tone) = match (&seen.end, &watched.job) {
            (Some(_), _) => (words::ENDED, Tone::Plain),
            (None, Some(_)) => (words::TRAINING, Tone::Good),
            (None, None) => (words::NOT_ENDED, Tone::Plain),
        };
        let mut parts: Vec<Span<'static>> = vec![
            plot::mark(place, self.theme),
            Span::raw(format!(" {}  ", watched.run.name)),
            Span::styled(self.state.word(state), self.theme.style(tone)),
        ];
        if let Some(trouble) = &watched.trouble {
            let trouble = format!("  {trouble}");
            parts.push(Span::styled(trouble, self.theme.style(Tone::Bad)));
            return Line::from(parts);
        }
        for figure in self.figures(seen) {
            parts.push(Span::raw("  "));
            parts.push(Span::raw(figure));
        }
        Line::from(parts)
    }

    fn figures(&self, seen: &Seen) -> Vec<String> {
        let word = |word: Word| self.state.word(word);
        let filled = |text: Word, value: &str| text.filled(self.state.lang, &[value]);
        let mut figures = Vec::new();
        let steps = thousands(seen.steps);
        match &seen.start {
            Some(start) if start.steps > 0 => {
                let share = seen.steps as f64 / start.steps as f64;
                let (full, rest) = self.theme.bar(share, BAR_WIDTH);
                let of = thousands(start.steps);
                let percent = share.min(1.0) * 100.0;
                figures.push(format!(
                    "{} {steps}/{of} {full}{rest} {percent:.0} %",
                    word(words::STEP)
                ));
                let (epoch, of) = (
                    seen.epochs.saturating_add(1).min(start.epochs),
                    start.epochs,
                );
                figures.push(format!("{} {epoch}/{of}", word(words::EPOCH)));
            }
            _ => figures.push(format!("{} {steps}", word(words::STEP))),
        }
        let mut last = |name: Word, curve: Option<&Curve>, render: &dyn Fn(f64) -> String| {
            let value = curve.and_then(Curve::last).map(render);
            figures.extend(value.map(|value| match word(name).contains("{}") {
                true => filled(name, &value),
                false => format!("{} {value}", word(name)),
            }));
        };
        last(words::TRAIN_LOSS, Some(&seen.loss), &number);
        last(words::HELD_OUT_LOSS, Some(&seen.held_out_loss), &number);
        let percent = |share: f64| format!("{:.2} %", share * 100.0);
        last(words::ACCURACY_SHORT, seen.metric(ACCURACY), &percent);
        let rate = |rate: f64| thousands(rate as u64);
        let unit = match seen.has_tokens {
            true => words::TOKENS_PER_SECOND,
            false => words::SAMPLES_PER_SECOND,
        };
        last(unit, Some(&seen.rate), &rate);
        last(words::WAITED_SHORT, Some(&seen.waited), &|share| {
            format!("{share:.1}")
        });
        if let Some(left) = seen.time_left() {
            figures.push(filled(words::LEFT, &clock(left)));
        }
        figures
    }

    /// What the ranks do that are seen here.
    fn ranks(&self, width: usize) -> Vec<Line<'static>> {
        let runs = self.state.runs.iter().enumerate();
        let jobs = runs.filter_map(|(place, watched)| Some((place, watched.job.as_ref()?)));
        let lines = jobs.flat_map(|(place, job)| self.ranks_of(place, job, width));
        let mut lines: Vec<_> = lines.collect();
        if !lines.is_empty() {
            lines.insert(0, self.heading(words::RANKS));
        }
        lines
    }

    fn ranks_of(&self, place: usize, job: &RunningJob, width: usize) -> Vec<Line<'static>> {
        let line = |(local, rank): (usize, &paceline_rendezvous::page::RunningRank)| {
            let number = rank.rank.unwrap_or(local);
            let what = match &rank.activity {
                Some((activity, since)) => format!(
                    "{} {:>7}  {:>7.1} s  {}",
                    self.state.word(words::STEP),
                    thousands(activity.step),
                    since.as_secs_f64(),
                    doing(activity, self.state.lang),
                ),
                None => "–".to_owned(),
            };
            let tone = match rank.pid {
                Some(_) => Tone::Plain,
                None => Tone::Bad,
            };
            let text = format!(" {} {number:<4} {what}", self.state.word(words::RANK));
            Line::from(vec![
                plot::mark(place, self.theme),
                Span::styled(
                    self.theme.cut(&text, width.saturating_sub(1)),
                    self.theme.style(tone),
                ),
            ])
        };
        job.ranks.iter().enumerate().map(line).collect()
    }

    /// The last incidents.
    fn incidents(&self, width: usize) -> Vec<Line<'static>> {
        let mut lines = Vec::new();
        for (place, watched) in self.state.runs.iter().enumerate() {
            let incidents = &watched.run.seen.incidents;
            let last = &incidents[incidents.len().saturating_sub(INCIDENTS_MAX)..];
            lines.extend(last.iter().map(|incident| {
                let text = format!(" {}", incident.text(self.state.lang));
                Line::from(vec![
                    plot::mark(place, self.theme),
                    Span::styled(
                        self.theme.cut(&text, width.saturating_sub(1)),
                        self.theme.style(Tone::Warn),
                    ),
                ])
            }));
        }
        if !lines.is_empty() {
            lines.insert(0, self.heading(words::INCIDENTS));
        }
        lines
    }

    fn heading(&self, word: Word) -> Line<'static> {
        Line::styled(self.state.word(word), self.theme.style(Tone::Title))
    }

    /// The chart that was chosen, and the names of all.
    fn chart(&self, mut room: Room<'_>) {
        let seen = self.state.seen();
        let charts = charts(&seen, self.state.lang);
        let place = self.state.chart.min(charts.len().saturating_sub(1));
        let mut names = Vec::new();
        for (at, chart) in charts.iter().enumerate() {
            let style = match at == place {
                true => self.theme.selected(),
                false => self.theme.style(Tone::Dim),
            };
            let name = match at == place {
                true => format!(" {} {} ", at + 1, chart.title),
                false => format!(" {} ", at + 1),
            };
            names.push(Span::styled(name, style));
        }
        room.top(Line::from(names));
        let last = seen.iter().map(|run| run.steps).max().unwrap_or(0);
        let first = self.state.zoom.first(last);
        let is_drawn = charts.get(place).is_some_and(|chart| {
            let steps = Steps { first, last };
            plot::plot(chart, steps, self.theme, room.area, room.buffer)
        });
        if !is_drawn {
            room.top(Line::raw(self.state.word(words::NO_VALUE)));
        }
    }
}

#[cfg(test)]
mod tests;
