//! A frame: the runs, a chart, the ranks, devices, incidents.

mod head;

use paceline_rendezvous::page::RunningJob;
use paceline_report::words;
use paceline_report::{Chart, charts};
use paceline_usage::figures::thousands;
use paceline_words::Word;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};

use super::plot::{self, Steps};
use super::state::{State, Watched, Zoom};
use crate::activity::doing;
use crate::gpu::Device;
use crate::terminal::{Room, Theme, Tone};

/// Most incidents that are shown, the last ones.
const INCIDENTS_MAX: usize = 3;
/// Least lines of a chart. Ranks and incidents get what is left.
const CHART_HEIGHT: u16 = 8;
/// Lines that a chart keeps for itself, if the names of all need several.
const PLOT_HEIGHT: usize = 5;
/// Characters of a bar.
const BAR_WIDTH: usize = 12;
const GIB: f64 = (1_u64 << 30) as f64;
/// Most devices of a run that are shown.
const DEVICES_MAX: usize = 8;

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
        for line in frame.run(place, watched, width) {
            room.top(line);
        }
    }
    room.bottom(Line::styled(
        theme.cut(state.word(words::KEYS), width),
        theme.style(Tone::Dim),
    ));
    let below = [
        frame.incidents(width),
        frame.devices(width),
        frame.communication(width),
        frame.ranks(width),
    ];
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
                    match rank.pid {
                        Some(_) => doing(activity, self.state.lang),
                        None => self.state.word(words::GONE).to_owned(),
                    },
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

    /// What the ranks had on its way in the last step of which that is known.
    fn communication(&self, width: usize) -> Vec<Line<'static>> {
        let runs = self.state.runs.iter().enumerate();
        let line = |(place, watched): (usize, &Watched)| {
            let spans = watched.run.seen.plain_step.as_ref()?;
            let (word, step) = (self.state.word(words::STEP), thousands(spans.step()));
            let text = format!(" {word} {step}: {}", spans.communication(self.state.lang)?);
            Some(Line::from(vec![
                plot::mark(place, self.theme),
                Span::raw(self.theme.cut(&text, width.saturating_sub(1))),
            ]))
        };
        let mut lines: Vec<_> = runs.filter_map(line).collect();
        if !lines.is_empty() {
            lines.insert(0, self.heading(words::BETWEEN_RANKS));
        }
        lines
    }

    /// The devices that the ranks hold: their use and memory.
    fn devices(&self, width: usize) -> Vec<Line<'static>> {
        let mut lines = Vec::new();
        for (place, watched) in self.state.runs.iter().enumerate() {
            let devices = watched.devices.iter().take(DEVICES_MAX);
            let mut texts: Vec<String> = devices.map(|device| self.device(device)).collect();
            let more = watched.devices.len() - texts.len();
            if more > 0 {
                let more = words::MORE_DEVICES.filled(self.state.lang, &[&more.to_string()]);
                texts.push(format!(" {more}"));
            }
            lines.extend(texts.into_iter().map(|text| {
                Line::from(vec![
                    plot::mark(place, self.theme),
                    Span::raw(self.theme.cut(&text, width.saturating_sub(1))),
                ])
            }));
        }
        if !lines.is_empty() {
            lines.insert(0, self.heading(words::DEVICES));
        }
        lines
    }

    fn device(&self, device: &Device) -> String {
        let now = &device.now;
        let gib = |bytes: u64| format!("{:.1}", bytes as f64 / GIB);
        let mut text = format!(" GPU {:<3}", now.index);
        if let Some(percent) = now.utilization_percent.known() {
            let (full, rest) = self.theme.bar(f64::from(*percent) / 100.0, BAR_WIDTH);
            let used = words::UTILIZATION.filled(self.state.lang, &[&format!("{percent:>3}")]);
            text += &format!(" {full}{rest} {used}");
        }
        if let Some(memory) = now.memory.known() {
            let sizes = [gib(memory.used_bytes), gib(memory.total_bytes)];
            let used = words::MEMORY_USED.filled(self.state.lang, &[&sizes[0], &sizes[1]]);
            text += &format!("  {used}");
        }
        if let Some(name) = device.name.known() {
            text += &format!("  {name}");
        }
        text
    }

    /// The last incidents.
    fn incidents(&self, width: usize) -> Vec<Line<'static>> {
        let mut lines = Vec::new();
        for (place, watched) in self.state.runs.iter().enumerate() {
            let last = watched.run.incidents(INCIDENTS_MAX, self.state.lang);
            lines.extend(last.into_iter().map(|incident| {
                let text = format!(" {incident}");
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

    /// The names of the charts, that of the chosen one in full. Where there is room for one line alone, it is the one with that name.
    fn names(&self, charts: &[Chart<'_>], chosen: usize, area: Rect) -> Vec<Line<'static>> {
        let width = usize::from(area.width);
        let mut lines = vec![Line::default()];
        let mut of_chosen = 0;
        for (at, chart) in charts.iter().enumerate() {
            let (name, style) = match at == chosen {
                true => (&chart.title, self.theme.selected()),
                false => (&chart.short, self.theme.style(Tone::Dim)),
            };
            let name = Span::styled(format!(" {} {name} ", at + 1), style);
            let line = lines.last().expect("never empty");
            if line.width() > 0 && line.width() + name.width() > width {
                lines.push(Line::default());
            }
            if at == chosen {
                of_chosen = lines.len() - 1;
            }
            lines.last_mut().expect("never empty").push_span(name);
        }
        match usize::from(area.height) >= lines.len() + PLOT_HEIGHT {
            true => lines,
            false => vec![lines.swap_remove(of_chosen)],
        }
    }

    /// The chart that was chosen, and the names of all.
    fn chart(&self, mut room: Room<'_>) {
        let seen = self.state.seen();
        let charts = charts(&seen, self.state.lang);
        let place = self.state.chart.min(charts.len().saturating_sub(1));
        for line in self.names(&charts, place, room.area) {
            room.top(line);
        }
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
