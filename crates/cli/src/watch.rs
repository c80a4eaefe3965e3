//! `paceline watch`: runs as they train, on a terminal.

mod devices;
mod draw;
mod plot;
mod state;

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use clap::Args;
use paceline_report::Run;
use paceline_words::Lang;
use ratatui::buffer::Buffer;

use self::state::State;
use crate::exit::{Exit, Failure};
use crate::flags;
use crate::jobs::Jobs;
use crate::report::{RunsArgs, failed};
use crate::terminal::{self, Screen, Signals, Theme};
use crate::usage::{lang, langs};

/// How often files and ranks are looked at.
const INTERVAL: Duration = Duration::from_millis(500);
/// How long keys are waited for before signals are looked at.
const KEYS_TIMEOUT: Duration = Duration::from_millis(100);
/// Lines of a frame that is printed.
const ONCE_HEIGHT: usize = 40;

/// What `paceline watch` is told.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct WatchArgs {
    /// What is watched.
    #[command(flatten)]
    pub runs: RunsArgs,
    /// Print one frame as text
    #[arg(long)]
    pub once: bool,
    /// Language of the picture [default: the locale's, else en]
    #[arg(long, value_name = "LANG", value_parser = langs())]
    pub lang: Option<Lang>,
}

const EXAMPLES: &str = "\
It reads what a run writes, so it works beside a job, after its end, and with a folder that
other machines share; nothing in the job waits for it. Curves of several runs lie over each
other. Ranks that run on this machine are shown with what each does now, and so are the GPUs
that they hold.

Keys: tab or 1 to 9 choose the chart, z zooms to the last steps, ? tells more, q quits.

Examples:
  paceline watch
  paceline watch runs/one-rank runs/two-ranks
  ssh -t node1 paceline watch /shared/runs/wine
  paceline watch --once";

/// The command as clap knows it.
#[must_use]
pub fn command() -> clap::Command {
    flags::command::<WatchArgs>("watch")
        .about("Watch runs as they train: curves, progress, ranks, incidents")
        .after_help(EXAMPLES)
}

/// Shows the runs, until it is told to end.
///
/// *Errors*: a folder without a run; stdout is no terminal, or fails.
pub(crate) fn run(args: &WatchArgs) -> Result<Exit, Failure> {
    if !args.once && !io::stdout().is_terminal() {
        let message = "stdout is not a terminal";
        let hint = "`paceline watch --once` prints one frame as text";
        return Err(Failure::new(Exit::Usage, message, Some(hint.to_owned())));
    }
    let folders = args.runs.folders()?;
    let runs = folders.iter().map(|folder| Run::read(folder));
    let runs: Result<Vec<Run>, _> = runs.collect();
    let mut state = State::new(runs.map_err(failed)?, lang(args.lang));
    let mut jobs = Jobs::new();
    state.look(&mut jobs);
    if args.once {
        state.wait_for_devices();
    }
    let variable = |name: &str| std::env::var(name).ok();
    let theme = Theme::of(variable);
    if !args.once {
        return terminal::show(|screen, signals| follow(state, jobs, theme, screen, signals));
    }
    // Printed text has no colours.
    let theme = Theme {
        has_colors: false,
        ..theme
    };
    let draw = |area, buffer: &mut Buffer| draw::draw(&state, theme, area, buffer);
    let lines = terminal::text(terminal::width(variable), ONCE_HEIGHT, draw);
    flags::print(|out| lines.iter().try_for_each(|line| writeln!(out, "{line}")))
}

/// Draws what is new, and does what keys say, until one says quit or a signal comes.
fn follow(
    mut state: State,
    mut jobs: Jobs,
    theme: Theme,
    screen: &mut Screen,
    signals: &Signals,
) -> io::Result<()> {
    let mut looked_at = Instant::now();
    let mut is_drawn = false;
    while signals.received().is_none() {
        if looked_at.elapsed() >= INTERVAL {
            state.look(&mut jobs);
            looked_at = Instant::now();
            is_drawn = false;
        }
        if !is_drawn {
            screen.draw(|area, buffer| draw::draw(&state, theme, area, buffer))?;
            is_drawn = true;
        }
        for input in screen.input(KEYS_TIMEOUT, state::key)? {
            is_drawn = false;
            if !input.is_none_or(|key| state.press(key)) {
                return Ok(());
            }
        }
    }
    Ok(())
}
