//! A run in a line or two.

use paceline_report::{ACCURACY, Curve, Seen, State as RunState, number, words};
use paceline_usage::figures::{clock, thousands};
use paceline_words::Word;
use ratatui::text::{Line, Span};

use super::super::plot;
use super::super::state::Watched;
use super::Frame;
use crate::terminal::Tone;

/// From this width on a run has one line, in which there is room for nearly all of its figures.
const ONE_LINE_FROM: usize = 140;
/// Characters of a bar.
const BAR_WIDTH: usize = 12;
/// A name is cut to no less than this for the sake of the bar.
const NAME_MIN: usize = 10;

impl Frame<'_> {
    /// A run in one line, or in two on a narrow screen: name, state, time left and progress, then the figures for which there is room,
    /// what matters most first. The time left is never cut: before it is, the bar goes, then the end of the name.
    pub(super) fn run(&self, place: usize, watched: &Watched, width: usize) -> Vec<Line<'static>> {
        let state = watched.run.state();
        let is_over = state != RunState::Open;
        let (state, tone) = match (&state, &watched.job) {
            (RunState::Open, Some(_)) => (self.state.word(words::TRAINING).to_owned(), Tone::Good),
            (RunState::Failed, _) => (state.text(self.state.lang), Tone::Bad),
            (RunState::Stopped(_), _) => (state.text(self.state.lang), Tone::Warn),
            _ => (state.text(self.state.lang), Tone::Plain),
        };
        let name = &watched.run.name;
        let mark = plot::mark(place, self.theme);
        let after_name = |name: String, rest: Vec<Span<'static>>| {
            let begin = [mark.clone(), Span::raw(format!(" {name}  "))];
            Line::from_iter(begin.into_iter().chain(rest))
        };
        if let Some(trouble) = &watched.trouble {
            let trouble = Span::styled(trouble.clone(), self.theme.style(Tone::Bad));
            return vec![after_name(name.clone(), vec![trouble])];
        }
        let seen = &watched.run.seen;
        let rest = |has_bar| {
            let state = Span::styled(state.clone(), self.theme.style(tone));
            let progress = self.progress(seen, is_over, has_bar).into_iter();
            let progress = progress.map(|part| Span::raw(format!("  {part}")));
            let rest: Vec<Span<'static>> = std::iter::once(state).chain(progress).collect();
            let taken: usize = rest.iter().map(Span::width).sum();
            // Beside the mark, and blanks before and after the name.
            let room = width.saturating_sub(taken + mark.width() + 3);
            (rest, room)
        };
        let (mut parts, mut room) = rest(true);
        if room < NAME_MIN.min(name.chars().count()) {
            (parts, room) = rest(false);
        }
        let mut first = after_name(self.theme.cut(name, room), parts);
        let figures = self.figures(seen);
        if width >= ONE_LINE_FROM {
            fill(&mut first, figures, width);
            return vec![first];
        }
        let mut second = Line::from(" ");
        fill(&mut second, figures, width);
        match second.spans.len() {
            1 => vec![first],
            _ => vec![first, second],
        }
    }

    /// The time left, and how far it is.
    fn progress(&self, seen: &Seen, is_over: bool, has_bar: bool) -> Vec<String> {
        let lang = self.state.lang;
        let mut parts = Vec::new();
        if let Some(left) = seen.time_left().filter(|_| !is_over) {
            parts.push(words::LEFT.filled(lang, &[&clock(left)]));
        }
        let (step, steps) = (self.state.word(words::STEP), thousands(seen.steps));
        match &seen.start {
            Some(start) if start.steps > 0 => {
                parts.push(format!("{step} {steps}/{}", thousands(start.steps)));
                let share = (seen.steps as f64 / start.steps as f64).min(1.0);
                let (full, rest) = self.theme.bar(share, BAR_WIDTH);
                let percent = share * 100.0;
                if has_bar {
                    parts.push(format!("{full}{rest} {percent:.0} %"));
                }
            }
            _ => parts.push(format!("{step} {steps}")),
        }
        parts
    }

    /// The last figures, what matters most first.
    fn figures(&self, seen: &Seen) -> Vec<String> {
        let word = |word: Word| self.state.word(word);
        let filled = |text: Word, value: &str| text.filled(self.state.lang, &[value]);
        let mut figures = Vec::new();
        let mut last = |name: Word, curve: Option<&Curve>, render: &dyn Fn(f64) -> String| {
            let value = curve.and_then(Curve::last).map(render);
            figures.extend(value.map(|value| match word(name).contains("{}") {
                true => filled(name, &value),
                false => format!("{} {value}", word(name)),
            }));
        };
        let unit = match seen.has_tokens {
            true => words::TOKENS_PER_SECOND,
            false => words::SAMPLES_PER_SECOND,
        };
        last(words::TRAIN_LOSS, Some(&seen.loss), &number);
        last(unit, Some(&seen.rate), &|rate| thousands(rate as u64));
        last(words::HELD_OUT_LOSS, Some(&seen.held_out_loss), &number);
        let percent = |share: f64| format!("{:.2} %", share * 100.0);
        last(words::ACCURACY_SHORT, seen.metric(ACCURACY), &percent);
        let waited = |share| format!("{share:.1}");
        last(words::WAITED_SHORT, Some(&seen.waited), &waited);
        let epochs = seen.start.as_ref().map(|start| start.epochs);
        if let Some(of) = epochs.filter(|epochs| *epochs > 0) {
            let epoch = seen.epochs.saturating_add(1).min(of);
            figures.push(format!("{} {epoch}/{of}", word(words::EPOCH)));
        }
        figures
    }
}

/// Adds the figures for which there is room, whole ones only.
fn fill(line: &mut Line<'static>, figures: Vec<String>, width: usize) {
    for figure in figures {
        let figure = Span::raw(format!("  {figure}"));
        if line.width() + figure.width() <= width {
            line.push_span(figure);
        }
    }
}
