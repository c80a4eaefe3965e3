//! What a signal to the launcher means for the job, which ends of ranks follow from it, and whether a round was stopped
//! by request. Pure decisions.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use paceline_rendezvous::page::Stopped;
use paceline_words::{Lang, say};
use serde::{Deserialize, Serialize};

use crate::judge::Ending;
use crate::signals::{self, name};

/// The signals that the launcher handles; any other one does to it what it does to any program.
///
/// Default: SIGTERM, SIGINT, SIGHUP and SIGQUIT, which end the job; SIGUSR1, which asks it to stop without a deadline;
/// SIGUSR2, which is passed on to the ranks. A list that leaves one out leaves its meaning out, and whatever else is in a
/// list ends the job.
///
/// ```
/// use paceline_launch::HandledSignals;
///
/// let signals: HandledSignals = "SIGTERM,SIGUSR1".parse().unwrap();
/// assert_eq!(signals.to_string(), "SIGUSR1,SIGTERM");
/// assert!("SIGKILL".parse::<HandledSignals>().is_err());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandledSignals(BTreeSet<i32>);

/// A list of signals that cannot be handled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` is no signal that the launcher can handle")]
pub struct SignalNameError {
    name: String,
}

impl SignalNameError {
    /// What to do about it.
    pub fn hint(&self) -> String {
        let names: Vec<_> = CAUGHT.iter().map(|signal| name(*signal)).collect();
        format!(
            "give a list such as SIGTERM,SIGUSR1 of {}",
            names.join(", ")
        )
    }
}

/// The signals that a list may name: those that a person, a scheduler or a limit sends, and that a program survives.
const CAUGHT: [i32; 9] = [
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGXCPU,
    libc::SIGPWR,
];

impl HandledSignals {
    pub(crate) fn numbers(&self) -> impl Iterator<Item = i32> {
        self.0.iter().copied()
    }
}

impl Default for HandledSignals {
    fn default() -> Self {
        Self(CAUGHT[..6].iter().copied().collect())
    }
}

/// Names with commas between them, as torchrun's `--signals-to-handle` takes them.
impl FromStr for HandledSignals {
    type Err = SignalNameError;

    fn from_str(list: &str) -> Result<Self, Self::Err> {
        let number = |word: &str| {
            let word = word.trim();
            let found = CAUGHT.iter().find(|signal| name(**signal) == word);
            found.copied().ok_or_else(|| SignalNameError {
                name: word.to_owned(),
            })
        };
        list.split(',')
            .map(number)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl fmt::Display for HandledSignals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.numbers().map(name).collect();
        f.write_str(&names.join(","))
    }
}

/// What a signal to the launcher means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// The job is to end, within the grace.
    End,
    /// The job is asked to stop, whenever it is ready to: a scheduler's notice some time before the end.
    Ask,
    /// It is for the ranks.
    Pass,
}

pub(crate) fn meaning(signal: i32) -> Meaning {
    match signal {
        libc::SIGUSR1 => Meaning::Ask,
        libc::SIGUSR2 => Meaning::Pass,
        _ => Meaning::End,
    }
}

/// What the job was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) signal: i32,
    /// The ranks look at the job page; otherwise they got the signal.
    pub(crate) on_page: bool,
}

impl Asked {
    pub(crate) fn is_ending(self) -> bool {
        meaning(self.signal) == Meaning::End
    }
}

/// Why a job was stopped that had not failed, and how far it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stop {
    pub(crate) signal: i32,
    /// The step after which all ranks stopped, if they said so.
    pub(crate) step: Option<u64>,
}

impl Stop {
    /// For people.
    pub(crate) fn text(self, lang: Lang) -> String {
        let signal = signals::name(self.signal);
        match self.step {
            Some(step) => say!(
                lang,
                "stopped after step {step} by {signal}",
                "{signal}: 스텝 {step} 후 중단됨"
            ),
            None => say!(lang, "stopped by {signal}", "{signal}: 중단됨"),
        }
    }
}

/// Whether a rank's end is what it was asked for, and so no failure.
///
/// A rank that looks at the page and reports an error instead has failed: what it should have saved may be missing.
pub(crate) fn is_excused(how: Ending, asked: Option<Asked>, stopped: Option<Stopped>) -> bool {
    if stopped.is_some() && is_well(how, stopped) {
        return true;
    }
    let Some(asked) = asked else {
        return false;
    };
    let signal = asked.signal;
    match (asked.is_ending(), asked.on_page, how) {
        (true, false, _) => true,
        (true, true, Ending::Code(code)) => {
            code == 0 || code == 128 + signal || code == 128 + libc::SIGTERM
        }
        (true, true, Ending::Signal { number, .. }) => {
            [signal, libc::SIGTERM, libc::SIGKILL].contains(&number)
        }
        // It goes on until it ends by itself; one that does not know the signal is ended by it.
        (false, _, Ending::Code(code)) => code == 128 + signal,
        (false, _, Ending::Signal { number, .. }) => number == signal,
    }
}

/// Whether a rank did all that it was there for: what it was started for, or what it was asked for.
pub(crate) fn is_well(how: Ending, stopped: Option<Stopped>) -> bool {
    let code = stopped.map(|stopped| i32::from(stopped.signal.exit_code()));
    how.is_success() || matches!((how, code), (Ending::Code(own), Some(code)) if own == code)
}

/// How a round was stopped by request, from what it was asked for and the ends of its ranks on this node.
pub(crate) fn stop_of(
    asked: Option<Asked>,
    ranks: &[(Option<Ending>, Option<Stopped>)],
) -> Option<Stop> {
    if let Some(stopped) = ranks.iter().find_map(|(_, stopped)| *stopped) {
        return Some(Stop {
            signal: stopped.signal.number(),
            step: Some(stopped.step),
        });
    }
    let asked = asked?;
    let have_finished = ranks
        .iter()
        .all(|(how, _)| how.is_some_and(Ending::is_success));
    // Ranks that look at the page and end well without a word were done before they came to look.
    let is_stop = !(asked.on_page && have_finished);
    is_stop.then_some(Stop {
        signal: asked.signal,
        step: None,
    })
}

#[cfg(test)]
mod tests {
    use paceline_rendezvous::stop::StopSignal;

    use super::*;

    const TERM: i32 = libc::SIGTERM;
    const USR1: i32 = libc::SIGUSR1;

    fn on_page(signal: i32) -> Option<Asked> {
        Some(Asked {
            signal,
            on_page: true,
        })
    }

    fn forwarded(signal: i32) -> Option<Asked> {
        Some(Asked {
            signal,
            on_page: false,
        })
    }

    fn by(signal: i32) -> Option<Stopped> {
        let signal = StopSignal::new(signal).unwrap();
        Some(Stopped { signal, step: 7 })
    }

    fn killed_by(number: i32) -> Ending {
        Ending::Signal {
            number,
            core: false,
        }
    }

    #[test]
    fn only_an_end_that_was_asked_for_is_excused() {
        let check = |how, asked, stopped, expect| {
            let got = is_excused(how, asked, stopped);
            assert_eq!(got, expect, "{how:?} after {asked:?} {stopped:?}");
        };
        let code = Ending::Code;
        check(code(1), None, None, false);
        check(killed_by(TERM), None, None, false);
        for how in [code(1), code(0), killed_by(11)] {
            check(how, forwarded(2), None, true);
        }
        check(code(0), on_page(TERM), None, true);
        check(code(130), on_page(2), None, true);
        check(code(143), on_page(1), None, true);
        check(code(1), on_page(TERM), None, false);
        check(code(1), on_page(TERM), by(TERM), false);
        check(killed_by(TERM), on_page(1), None, true);
        check(killed_by(9), on_page(TERM), None, true);
        check(killed_by(11), on_page(TERM), None, false);
        for asked in [on_page(USR1), forwarded(USR1)] {
            check(code(138), asked, None, true);
            check(killed_by(USR1), asked, None, true);
            check(code(1), asked, None, false);
            check(killed_by(9), asked, None, false);
        }
        // The launcher was not asked: a single rank got the signal, and all agreed.
        check(code(138), None, by(USR1), true);
        check(code(0), None, by(USR1), true);
        check(code(143), None, by(USR1), false);
        check(killed_by(USR1), None, by(USR1), false);
    }

    #[test]
    fn a_round_was_stopped_where_its_ranks_say_so_or_nobody_can_tell() {
        let check = |asked, ranks: &[(Option<Ending>, Option<Stopped>)], expect: Option<&str>| {
            let got = stop_of(asked, ranks).map(|stop| stop.text(Lang::En));
            assert_eq!(got.as_deref(), expect, "{asked:?} {ranks:?}");
        };
        let done = (Some(Ending::Code(0)), None);
        check(None, &[done, done], None);
        check(forwarded(TERM), &[done], Some("stopped by SIGTERM"));
        check(forwarded(USR1), &[done], Some("stopped by SIGUSR1"));
        check(on_page(TERM), &[done, done], None);
        check(on_page(USR1), &[done], None);
        let killed = (Some(killed_by(9)), None);
        check(on_page(TERM), &[done, killed], Some("stopped by SIGTERM"));
        let left = (Some(Ending::Code(0)), by(USR1));
        let expect = Some("stopped after step 7 by SIGUSR1");
        check(None, &[done, left], expect);
        check(on_page(TERM), &[left, left], expect);
    }

    #[test]
    fn a_list_of_signals_is_read_as_torchrun_reads_it_or_refused_by_name() {
        let check = |list: &str, expect: Result<&str, &str>| {
            let got = list.parse::<HandledSignals>();
            let got = got.map(|list| list.to_string()).map_err(|e| e.name);
            let expect = expect.map(str::to_owned).map_err(str::to_owned);
            assert_eq!(got, expect, "{list}");
        };
        check(
            "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            Ok("SIGHUP,SIGINT,SIGQUIT,SIGTERM"),
        );
        check("SIGUSR1, SIGTERM,SIGTERM", Ok("SIGUSR1,SIGTERM"));
        for name in ["SIGKILL", "SIGSTOP", "SIGSEGV", "TERM", "15", ""] {
            check(name, Err(name));
        }
        let default = HandledSignals::default().to_string();
        assert_eq!(default, "SIGHUP,SIGINT,SIGQUIT,SIGUSR1,SIGUSR2,SIGTERM");
        assert_eq!(default.parse(), Ok(HandledSignals::default()));
    }
}
