//! `paceline gpu top`: devices and the ranks of running jobs, side by side, as they work.

mod devices;
mod draw;
mod json;
mod keys;
mod pace;
mod ranks;
mod state;
mod table;
mod words;

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::buffer::Buffer;

use self::state::State;
use super::live::Feed;
use super::source::WatchArgs;
use crate::exit::{Exit, Failure};
use crate::terminal::{self, Screen, Signals, Theme};

/// How long keys are waited for before the looks are looked at again.
const KEYS_TIMEOUT: Duration = Duration::from_millis(100);
/// Longest frame that is printed, in lines.
const ONCE_LINES_MAX: usize = 8192;
/// How long `--once` waits for a driver that does not answer.
const ONCE_TIMEOUT: Duration = Duration::from_secs(10);

/// What `paceline gpu top` is told.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct TopArgs {
    /// The machine, and how often to look at it.
    #[command(flatten)]
    pub watch: WatchArgs,
    /// Print one frame as text, after one interval
    #[arg(long)]
    pub once: bool,
    /// Print one JSON object, after one interval
    #[arg(long, conflicts_with = "once")]
    pub json: bool,
}

pub(super) const EXAMPLES: &str = "\
Jobs that `paceline run` and `paceline train` have started on this machine appear by
themselves, with the step and phase that each rank reports; ranks of other programs, such
as Python, are shown with what they use. Jobs of other users are seen by root alone.

Examples:
  Watch over ssh:
    ssh -t node1 paceline gpu top
  Look once, from a script:
    paceline gpu top --json";

/// Shows it, until it is told to end.
///
/// *Errors*: stdout is no terminal, or fails.
pub(super) fn run(args: &TopArgs) -> Result<Exit, Failure> {
    let (is_live, interval) = (!args.once && !args.json, args.watch.interval);
    if is_live && !io::stdout().is_terminal() {
        let message = "stdout is not a terminal";
        let hint = "`paceline gpu top --once` prints one frame as text, `--json` as data";
        return Err(Failure::new(Exit::Usage, message, Some(hint.to_owned())));
    }
    let feed = Feed::start(&args.watch.places.find(), interval)
        .map_err(|error| Failure::environment(format!("cannot start a thread: {error}")))?;
    if is_live {
        return watch(&feed, interval);
    }
    let state = second_look(&feed, interval);
    crate::flags::print(|out| match args.json {
        true => json::write(&state, out),
        false => {
            let variable = |name: &str| std::env::var(name).ok();
            print(&state, Theme::of(variable), terminal::width(variable), out)
        }
    })
}

fn watch(feed: &Feed, interval: Duration) -> Result<Exit, Failure> {
    let theme = Theme::of(|name| std::env::var(name).ok());
    terminal::show(|screen, signals| follow(feed, interval, theme, screen, signals))
}

/// Draws what is new, and does what keys say, until one says quit or a signal comes.
fn follow(
    feed: &Feed,
    interval: Duration,
    theme: Theme,
    screen: &mut Screen,
    signals: &Signals,
) -> io::Result<()> {
    let mut state = State::new(interval);
    let mut drawn_at: Option<Instant> = None;
    loop {
        let is_news = take(feed, &mut state);
        // What does not answer is said by the second.
        if is_news || drawn_at.is_none_or(|at| at.elapsed() >= Duration::from_secs(1)) {
            screen.draw(|area, buffer| draw::draw(&state, theme, area, buffer))?;
            drawn_at = Some(Instant::now());
        }
        if signals.received().is_some() {
            return Ok(());
        }
        for input in screen.input(KEYS_TIMEOUT, keys::key)? {
            drawn_at = None;
            if !input.is_none_or(|key| state.press(key)) {
                return Ok(());
            }
        }
    }
}

/// Takes in what was seen last; whether it is new.
fn take(feed: &Feed, state: &mut State) -> bool {
    let known = |state: &State| {
        let devices = state.devices.as_ref().map(|look| look.at);
        (devices, state.jobs.as_ref().map(|look| look.at))
    };
    let before = known(state);
    let jobs = feed.jobs();
    state.see_jobs(jobs.latest, jobs.looking_for);
    let devices = feed.devices();
    state.see_devices(devices.latest, devices.looking_for);
    known(state) != before
}

/// What two looks come to, so that there are rates. A driver that does not answer is not waited for, and reported.
fn second_look(feed: &Feed, interval: Duration) -> State {
    let mut state = State::new(interval);
    for _ in 0..2 {
        let seen_until = [
            state.devices.as_ref().map(|l| l.at),
            state.jobs.as_ref().map(|l| l.at),
        ];
        let at = seen_until.into_iter().flatten().max().unwrap_or_default();
        feed.wait_later_than(at, ONCE_TIMEOUT.max(interval * 3));
        take(feed, &mut state);
    }
    state
}

/// Prints a frame that has room for everything.
fn print(state: &State, theme: Theme, width: u16, out: &mut impl Write) -> io::Result<()> {
    let height = draw::height(state).min(ONCE_LINES_MAX);
    let draw = |area, buffer: &mut Buffer| draw::draw(state, theme, area, buffer);
    for line in terminal::text(width, height, draw) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::PlacesArgs;

    #[test]
    fn without_a_terminal_the_error_says_what_to_do() {
        // Tests run without one on stdout wherever it is captured.
        if io::stdout().is_terminal() {
            return;
        }
        let args = TopArgs {
            watch: WatchArgs {
                interval: Duration::from_secs(1),
                places: PlacesArgs::default(),
            },
            once: false,
            json: false,
        };
        let failure = run(&args).expect_err("no terminal");
        assert_eq!(failure.exit(), Exit::Usage);
        assert!(format!("{failure:?}").contains("--once"), "{failure:?}");
    }
}
