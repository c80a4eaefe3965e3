//! Leases: how long each agent has not been heard of, measured by this agent's own monotonic clock alone.
//!
//! An agent's page carries a counter. Times of different machines are never compared: an agent's silence is how long, on the
//! observer's clock, the counter has stayed the same while the observer was looking. An observer that was itself stopped or
//! cut off starts anew, so it never takes its own absence for the others'.

use std::collections::BTreeMap;
use std::time::Duration;

use super::record::{AgentId, Page, RoundId, State};

/// When each agent was seen last. Times are the observer's own, from any fixed moment.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    seen: BTreeMap<AgentId, Sight>,
    last_look: Option<Duration>,
}

#[derive(Debug)]
struct Sight {
    beat: u64,
    first: Duration,
    changed: Duration,
    confirmed: bool,
    state: StateKey,
    state_changed: Duration,
    /// Since when it has complaints of this round.
    complains: Option<(RoundId, Duration)>,
}

/// Tells states apart: a report that gets its last lines later is the same failure.
type StateKey = (std::mem::Discriminant<State>, Option<RoundId>);

/// How long ago something happened, as far as this observer knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Ages {
    /// Since the last sign of life, as far as was looked.
    pub(crate) silent: Duration,
    /// Whether a sign of life was seen at all: a page may have been left behind by a dead agent.
    pub(crate) confirmed: bool,
    /// Since the agent was first seen.
    pub(crate) known: Duration,
    /// Since its state changed.
    pub(crate) state: Duration,
    /// Since its ranks began to complain of others.
    pub(crate) complaints: Duration,
}

impl Leases {
    /// Takes note of a look at all pages. After a pause of more than `gap` no agent has been silent.
    pub(crate) fn look(&mut self, now: Duration, pages: &[Page], gap: Duration) {
        let was_away = self
            .last_look
            .is_none_or(|last| now.saturating_sub(last) > gap);
        self.last_look = Some(now);
        self.seen
            .retain(|id, _| pages.iter().any(|page| page.id == *id));
        for page in pages {
            let key = (std::mem::discriminant(&page.state), page.state.round());
            let sight = self.seen.entry(page.id).or_insert_with(|| Sight {
                beat: page.beat,
                first: now,
                changed: now,
                confirmed: false,
                state: key,
                state_changed: now,
                complains: None,
            });
            let round = page.complaints.first().map(|complaint| complaint.round);
            let before = sight.complains.filter(|(of, _)| Some(*of) == round);
            sight.complains = before.or(round.map(|round| (round, now)));
            if was_away || sight.beat != page.beat {
                // After an absence a page is as good as one seen for the first time.
                sight.confirmed = !was_away && (sight.confirmed || sight.beat != page.beat);
                sight.beat = page.beat;
                sight.changed = now;
            }
            if sight.state != key {
                sight.state = key;
                sight.state_changed = now;
            }
        }
    }

    /// Another store was entered: everything is seen for the first time.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }

    /// The ages at `now`; silence is measured up to the last look only, since nothing is known of the time after it.
    pub(crate) fn ages(&self, now: Duration, id: AgentId) -> Ages {
        let looked = self.last_look.unwrap_or(now);
        self.seen.get(&id).map_or_else(Ages::default, |sight| Ages {
            silent: looked.saturating_sub(sight.changed),
            confirmed: sight.confirmed,
            known: now.saturating_sub(sight.first),
            state: now.saturating_sub(sight.state_changed),
            complaints: sight
                .complains
                .map_or(Duration::ZERO, |(_, at)| now.saturating_sub(at)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GAP: Duration = Duration::from_millis(1500);

    fn page(id: u64, beat: u64) -> Page {
        Page {
            beat,
            ..Page::new(AgentId(id))
        }
    }

    /// Looks at `(seconds, beats of agents 0, 1, ...)` one after another; then agent 0 has been silent for so long.
    fn check(looks: &[(f64, &[u64])], silent: f64) {
        let mut leases = Leases::default();
        let mut now = Duration::ZERO;
        for (seconds, beats) in looks {
            now = Duration::from_secs_f64(*seconds);
            let pages: Vec<_> = beats.iter().zip(0..).map(|(b, id)| page(id, *b)).collect();
            leases.look(now, &pages, GAP);
        }
        let ages = leases.ages(now, AgentId(0));
        assert_eq!(ages.silent.as_secs_f64(), silent, "{looks:?}");
    }

    #[test]
    fn silence_is_how_long_the_counter_stood_still_while_it_was_looked_at() {
        check(&[(5.0, &[1])], 0.0);
        check(&[(5.0, &[1]), (6.0, &[1]), (7.0, &[1])], 2.0);
        check(&[(5.0, &[1]), (6.0, &[2]), (7.0, &[2])], 1.0);
        check(&[(5.0, &[9]), (6.0, &[2])], 0.0);
    }

    #[test]
    fn the_observers_own_absence_is_held_against_nobody() {
        check(&[(5.0, &[1]), (6.0, &[1]), (60.0, &[1])], 0.0);
        check(&[(5.0, &[1]), (60.0, &[1]), (61.0, &[1])], 1.0);
    }

    #[test]
    fn who_comes_back_is_new() {
        check(&[(5.0, &[1]), (6.0, &[]), (7.0, &[1])], 0.0);
    }
}
