//! What `watch` knows, and how files and keys change it.

use paceline_rendezvous::page::RunningJob;
use paceline_report::{Run, Seen};
use paceline_words::Lang;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::devices::Held;
use crate::gpu::Device;
use crate::jobs::Jobs;

/// Everything that a frame is drawn from.
pub(super) struct State {
    pub(super) runs: Vec<Watched>,
    pub(super) lang: Lang,
    /// The position of the chart among those that have values.
    pub(super) chart: usize,
    pub(super) zoom: Zoom,
    pub(super) has_help: bool,
    held: Held,
}

/// A run with its job.
pub(super) struct Watched {
    pub(super) run: Run,
    /// Its job, if a rank of it that writes the metrics runs here.
    pub(super) job: Option<RunningJob>,
    /// The devices that the ranks of its job hold.
    pub(super) devices: Vec<Device>,
    /// Why its files cannot be read any more.
    pub(super) trouble: Option<String>,
}

/// The steps that are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Zoom {
    #[default]
    Whole,
    Tenth,
    Hundredth,
}

impl Zoom {
    /// Their share of all steps, in percent.
    pub(super) fn percent(self) -> u64 {
        match self {
            Self::Whole => 100,
            Self::Tenth => 10,
            Self::Hundredth => 1,
        }
    }

    /// The first of `steps` steps that is shown.
    pub(super) fn first(self, steps: u64) -> u64 {
        match self {
            Self::Whole => 0,
            zoom => steps - steps.div_ceil(100 / zoom.percent()),
        }
    }

    fn closer(self) -> Self {
        match self {
            Self::Whole => Self::Tenth,
            Self::Tenth => Self::Hundredth,
            Self::Hundredth => Self::Whole,
        }
    }

    fn wider(self) -> Self {
        match self {
            Self::Hundredth => Self::Tenth,
            Self::Tenth | Self::Whole => Self::Whole,
        }
    }
}

/// What a key means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Quit,
    Help,
    /// So many charts on.
    Move(isize),
    /// The chart of this position.
    Chart(usize),
    Closer,
    Wider,
}

pub(super) fn key(pressed: &KeyEvent) -> Option<Key> {
    let has_control = pressed.modifiers.contains(KeyModifiers::CONTROL);
    Some(match pressed.code {
        KeyCode::Char('c' | 'd') if has_control => Key::Quit,
        _ if has_control => return None,
        KeyCode::Char('q') | KeyCode::Esc => Key::Quit,
        KeyCode::Char('?') | KeyCode::F(1) => Key::Help,
        KeyCode::Tab | KeyCode::Right | KeyCode::Char('l') => Key::Move(1),
        KeyCode::BackTab | KeyCode::Left | KeyCode::Char('h') => Key::Move(-1),
        KeyCode::Char(digit @ '1'..='9') => Key::Chart(digit as usize - '1' as usize),
        KeyCode::Char('z' | '+') => Key::Closer,
        KeyCode::Char('-') => Key::Wider,
        _ => return None,
    })
}

impl State {
    pub(super) fn new(runs: Vec<Run>, lang: Lang) -> Self {
        let watched = |run| Watched {
            run,
            job: None,
            devices: Vec::new(),
            trouble: None,
        };
        Self {
            runs: runs.into_iter().map(watched).collect(),
            lang,
            chart: 0,
            zoom: Zoom::default(),
            has_help: false,
            held: Held::default(),
        }
    }

    /// Takes in what files and ranks say now.
    pub(super) fn look(&mut self, jobs: &mut Jobs) {
        jobs.look();
        for watched in &mut self.runs {
            let updated = watched.run.update();
            watched.trouble = updated.err().map(|error| error.to_string());
            watched.job = jobs.of(watched.run.folder()).cloned();
        }
        self.held.look(&mut self.runs);
    }

    /// Has the devices of a single frame looked at.
    pub(super) fn wait_for_devices(&mut self) {
        self.held.wait();
        self.held.look(&mut self.runs);
    }

    pub(super) fn seen(&self) -> Vec<&Seen> {
        self.runs.iter().map(|watched| &watched.run.seen).collect()
    }

    /// Does what a key says; false to quit.
    pub(super) fn press(&mut self, key: Key) -> bool {
        if key == Key::Quit {
            return false;
        }
        if std::mem::take(&mut self.has_help) {
            return true;
        }
        let charts = paceline_report::charts(&self.seen(), self.lang).len();
        match key {
            Key::Help => self.has_help = true,
            Key::Move(by) => {
                let place = self.chart.min(charts.saturating_sub(1)) as isize + by;
                self.chart = place.rem_euclid(charts.max(1) as isize) as usize;
            }
            Key::Chart(place) if place < charts => self.chart = place,
            Key::Closer => self.zoom = self.zoom.closer(),
            Key::Wider => self.zoom = self.zoom.wider(),
            Key::Chart(_) | Key::Quit => {}
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_mean_what_the_help_says() {
        let check = |code, modifiers, expect| {
            assert_eq!(key(&KeyEvent::new(code, modifiers)), expect, "{code:?}");
        };
        let none = KeyModifiers::NONE;
        check(KeyCode::Char('q'), none, Some(Key::Quit));
        check(KeyCode::Char('c'), KeyModifiers::CONTROL, Some(Key::Quit));
        check(KeyCode::Char('c'), none, None);
        check(KeyCode::Tab, none, Some(Key::Move(1)));
        check(KeyCode::BackTab, KeyModifiers::SHIFT, Some(Key::Move(-1)));
        check(KeyCode::Char('3'), none, Some(Key::Chart(2)));
        check(KeyCode::Char('0'), none, None);
        check(KeyCode::Char('z'), none, Some(Key::Closer));
    }

    #[test]
    fn a_closer_look_ends_with_the_last_step() {
        let first =
            |steps| [Zoom::Whole, Zoom::Tenth, Zoom::Hundredth].map(|zoom| zoom.first(steps));
        assert_eq!(first(1_000_000), [0, 900_000, 990_000]);
        assert_eq!(first(50), [0, 45, 49]);
        assert_eq!(first(0), [0, 0, 0]);
        assert_eq!(first(u64::MAX)[0], 0);
    }
}
