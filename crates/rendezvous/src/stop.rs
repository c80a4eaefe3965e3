//! The request to stop, as a rank receives it: on the page that it shares with its launcher, or as a signal.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::flag;

use crate::page::JobPage;

/// Signals that a rank itself takes for a request to stop, once it [listens](listen).
const HEARD: [i32; 3] = [SIGINT, SIGTERM, SIGUSR1];

/// The signals that ranks can agree on; any other one counts as the last.
pub const VOTES: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGTERM];

/// A signal that asks a job to stop. The highest number counts, so SIGTERM before SIGUSR1 before SIGINT.
///
/// ```
/// use paceline_rendezvous::stop::StopSignal;
///
/// let signal = StopSignal::new(10).unwrap();
/// assert_eq!((signal.to_string().as_str(), signal.exit_code()), ("SIGUSR1", 138));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StopSignal(u8);

impl StopSignal {
    /// The signal with this number, if there can be one.
    pub fn new(number: i32) -> Option<Self> {
        let number = u8::try_from(number).ok()?;
        (1..=64).contains(&number).then_some(Self(number))
    }

    /// Its number.
    pub fn number(self) -> i32 {
        i32::from(self.0)
    }

    /// Exit code of a program that stopped because of it, as shells write it: 128 + number.
    pub fn exit_code(self) -> u8 {
        128 + self.0
    }

    /// Its place in [`VOTES`].
    pub fn vote(self) -> usize {
        let place = VOTES.iter().position(|number| *number == self.number());
        place.unwrap_or(VOTES.len() - 1)
    }

    /// The signal that ranks agree on by these votes.
    pub fn elected(votes: [bool; VOTES.len()]) -> Option<Self> {
        let place = votes.iter().rposition(|vote| *vote)?;
        Self::new(VOTES[place])
    }
}

impl fmt::Display for StopSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&signal_name(self.number()))
    }
}

/// The signal's name, `SIGKILL` for 9; `signal 64` for one that has none.
pub fn signal_name(number: i32) -> String {
    match signal_hook::low_level::signal_name(number) {
        Some(name) => name.to_owned(),
        None => format!("signal {number}"),
    }
}

/// The signals that have arrived, in the order of [`HEARD`].
static ARRIVED: Mutex<Option<[Arc<AtomicBool>; HEARD.len()]>> = Mutex::new(None);

/// From now on SIGTERM, SIGINT and SIGUSR1 no longer end this process: they are remembered.
///
/// With a launcher of ours, which kills ranks that do not end, that is so for good. Without one a second SIGTERM, or a
/// second SIGINT, ends the process at once. A second SIGUSR1 never does: schedulers send it to every process of a job,
/// and a launcher passes it on besides.
///
/// *Errors*: the system refuses the handler.
pub fn listen(has_launcher: bool) -> io::Result<()> {
    let mut arrived = ARRIVED.lock().unwrap_or_else(PoisonError::into_inner);
    if arrived.is_some() {
        return Ok(());
    }
    let flags: [Arc<AtomicBool>; HEARD.len()] = Default::default();
    for (number, flag) in HEARD.into_iter().zip(&flags) {
        if !has_launcher && number != SIGUSR1 {
            // Order matters: on the first signal the flag is not set yet, and is then.
            flag::register_conditional_default(number, flag.clone())?;
        }
        flag::register(number, flag.clone())?;
    }
    *arrived = Some(flags);
    Ok(())
}

/// Whether this rank has been asked to stop: by its launcher, or by a signal since it [listens](listen).
///
/// That is this rank's own knowledge. Ranks that would act on it each for itself would stop in different steps.
pub fn wish(page: &JobPage) -> Option<StopSignal> {
    let arrived = ARRIVED.lock().unwrap_or_else(PoisonError::into_inner);
    let own = HEARD.iter().zip(arrived.iter().flatten());
    let own = own.filter(|(_, flag)| flag.load(Ordering::Relaxed));
    own.map(|(number, _)| *number)
        .chain(page.stop_requested())
        .filter_map(StopSignal::new)
        .max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_has_a_name_and_an_exit_code() {
        let check = |number, expect: Option<(&str, u8)>| {
            let signal = StopSignal::new(number);
            let got = signal.map(|signal| (signal.to_string(), signal.exit_code()));
            let got = got.as_ref().map(|(name, code)| (name.as_str(), *code));
            assert_eq!(got, expect, "{number}");
        };
        check(SIGTERM, Some(("SIGTERM", 143)));
        check(SIGUSR1, Some(("SIGUSR1", 138)));
        check(64, Some(("signal 64", 192)));
        for number in [0, -1, 65, 256 + SIGTERM] {
            check(number, None);
        }
    }

    #[test]
    fn of_different_votes_the_highest_number_counts_on_every_rank() {
        let check = |votes: &[i32], expect: Option<i32>| {
            let mut counted = [false; VOTES.len()];
            for number in votes {
                counted[StopSignal::new(*number).unwrap().vote()] = true;
            }
            let elected = StopSignal::elected(counted).map(StopSignal::number);
            assert_eq!(elected, expect, "{votes:?}");
        };
        check(&[], None);
        for number in VOTES {
            check(&[number], Some(number));
        }
        check(&[SIGUSR1, SIGTERM, SIGINT], Some(SIGTERM));
        check(&[SIGINT, SIGUSR1], Some(SIGUSR1));
        check(&[24], Some(SIGTERM));
    }

    #[test]
    fn what_the_launcher_asks_for_is_a_wish_and_rubbish_is_none() {
        let page = JobPage::private(1).unwrap();
        assert_eq!(wish(&page), None);
        page.request_stop(SIGUSR1);
        assert_eq!(wish(&page), StopSignal::new(SIGUSR1));
        page.request_stop(1 << 20);
        assert_eq!(wish(&page), None);
    }
}
