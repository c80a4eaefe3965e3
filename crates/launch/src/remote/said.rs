//! What the launchers of several hosts say, for one terminal: what all of them say about the job is shown once.

use std::collections::HashMap;

use crate::notice::{OF_JOB, OF_MACHINE};

/// Different lines that are remembered; later ones are shown as often as they are said.
const LINES_MAX: usize = 10_000;

/// The lines about the job so far. Numbers in them do not count: each launcher measures for itself how long something took.
#[derive(Debug, Default)]
pub(super) struct Said {
    /// For each line how often it was shown, and how often each host has said it.
    lines: HashMap<Vec<u8>, (usize, HashMap<usize, usize>)>,
}

impl Said {
    /// The line as it is shown, if it is: a rank's as it is, one about a machine with its name.
    pub(super) fn shown(&mut self, host: usize, name: &str, line: &[u8]) -> Option<Vec<u8>> {
        let line = match line.split_first() {
            Some((&OF_MACHINE, line)) => return Some([name.as_bytes(), b": ", line].concat()),
            Some((&OF_JOB, line)) => line.to_vec(),
            _ => return Some(line.to_vec()),
        };
        let mut key = line.clone();
        key.retain(|byte| !byte.is_ascii_digit());
        if self.lines.len() >= LINES_MAX && !self.lines.contains_key(&key) {
            return Some(line);
        }
        let (shown, by_host) = self.lines.entry(key).or_default();
        let said = by_host.entry(host).or_default();
        *said += 1;
        let is_new = *said > *shown;
        *shown = (*shown).max(*said);
        is_new.then_some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_hosts_say_of_the_job_is_shown_once_and_again_when_it_happens_again() {
        let mut said = Said::default();
        let mut check = |host, line: &str, expect: Option<&str>| {
            let shown = said.shown(host, ["a", "b"][host], line.as_bytes());
            assert_eq!(
                shown.as_deref(),
                expect.map(str::as_bytes),
                "{host}: {line}"
            );
        };
        check(0, "[rank 0] x", Some("[rank 0] x"));
        check(1, "[rank 0] x", Some("[rank 0] x"));
        check(0, "\u{1e}took 1.5 s", Some("took 1.5 s"));
        check(1, "\u{1e}took 1.6 s", None);
        check(1, "\u{1e}took 2.1 s", Some("took 2.1 s"));
        check(0, "\u{1e}took 2.2 s", None);
        check(0, "\u{1f}warning: hot", Some("a: warning: hot"));
        check(1, "\u{1f}warning: hot", Some("b: warning: hot"));
    }
}
