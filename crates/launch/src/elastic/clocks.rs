//! How far apart the agents' clocks are, from the pages that they write anyway: no clock but an agent's own monotonic one
//! is ever read, and the store needs none.
//!
//! A page says when it was sent, by its agent's clock. The agent that sees it notes how much later that was by its own: the
//! difference of the two clocks plus the way, so never less than the difference. Two agents that see each other's pages
//! have the difference between two bounds:
//!
//! ```text
//!   a's clock   ----- sent ----------------- seen -----      seen - sent  >=  a - b
//!                        \                  /
//!   b's clock   ---------- seen ---- sent ----------         seen - sent  >=  b - a
//! ```
//!
//! Half of both sums is the error bound. The smallest of all ways is used, and a failure makes new ones: its page and
//! the answers to it go out at once and wake the watchers, while an ordinary page waits to be looked at.
//!
//! *Source*: Cristian, "Probabilistic clock synchronization" (1989); NTP keeps the smallest delay likewise.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::record::{AgentId, Page, RoundId};

/// How much two monotonic clocks may drift apart in a second: quartz is good to 50 millionths, and both may be slewed
/// meanwhile. So much is added to a way for each second of its age.
const DRIFT_MILLIONTHS: i64 = 200;

/// The smallest way from each agent to this one, by the two clocks.
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    heard: BTreeMap<AgentId, Heard>,
}

#[derive(Debug)]
struct Heard {
    least_us: i64,
    at: Duration,
}

impl Heard {
    fn now(&self, now: Duration) -> i64 {
        let age = micros(now.saturating_sub(self.at));
        let drift = age.saturating_mul(DRIFT_MILLIONTHS) / 1_000_000;
        self.least_us.saturating_add(drift)
    }
}

/// The way from the round's first member to an agent whose rank failed, as that agent reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Reading {
    /// The first member had noticed a failure of this round before.
    pub(crate) round: RoundId,
    pub(crate) least_us: i64,
}

/// A moment on the clock of the round's first member: `at_us`, give or take `bound_us`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) at_us: i64,
    pub(crate) bound_us: i64,
}

impl Clocks {
    /// Takes note of a page that was seen at this time.
    pub(crate) fn hear(&mut self, seen: Duration, page: &Page) {
        let Some(sent_us) = page.sent_us else {
            return;
        };
        let sent_us = i64::try_from(sent_us).unwrap_or(i64::MAX);
        let least_us = micros(seen).saturating_sub(sent_us);
        let heard = Heard { least_us, at: seen };
        let best = self.heard.get(&page.id).map(|heard| heard.now(seen));
        if best.is_none_or(|best| least_us <= best) {
            self.heard.insert(page.id, heard);
        }
    }

    /// The most that this agent's clock can be ahead of that agent's.
    pub(crate) fn least_us(&self, now: Duration, id: AgentId) -> Option<i64> {
        self.heard.get(&id).map(|heard| heard.now(now))
    }

    /// Forgets agents that have no page any more.
    pub(crate) fn keep(&mut self, pages: &[Page]) {
        self.heard
            .retain(|id, _| pages.iter().any(|page| page.id == *id));
    }
}

impl Moment {
    /// By the first member's own clock.
    pub(crate) fn own(at_us: u64) -> Self {
        Self {
            at_us: i64::try_from(at_us).unwrap_or(i64::MAX),
            bound_us: 0,
        }
    }

    /// By another agent's clock: the first member has seen its pages after `there_us` at least, and it has seen the first
    /// member's after `back_us`.
    pub(crate) fn translated(at_us: u64, there_us: i64, back_us: i64) -> Self {
        let at = Self::own(at_us).at_us;
        let (earliest, latest) = (at.saturating_sub(back_us), at.saturating_add(there_us));
        Self {
            at_us: earliest / 2 + latest / 2,
            bound_us: (latest.saturating_sub(earliest) / 2).max(0),
        }
    }

    /// How far two moments may be wrong together.
    pub(crate) fn bound_with(&self, other: &Self) -> i64 {
        self.bound_us.saturating_add(other.bound_us)
    }
}

pub(crate) fn micros(time: Duration) -> i64 {
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: AgentId = AgentId(1);
    const B: AgentId = AgentId(2);

    fn page(id: AgentId, sent_us: u64) -> Page {
        Page {
            sent_us: Some(sent_us),
            ..Page::new(id)
        }
    }

    const fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    /// Pages of `B` as `(sent, seen)`; then this is the least way at `now`.
    fn check(pages: &[(u64, u64)], now: u64, expect: Option<i64>) {
        let mut clocks = Clocks::default();
        for (sent, seen) in pages {
            clocks.hear(us(*seen), &page(B, *sent));
        }
        assert_eq!(clocks.least_us(us(now), B), expect, "{pages:?}");
    }

    #[test]
    fn the_smallest_way_counts() {
        check(&[], 0, None);
        check(&[(100, 700), (200, 500), (300, 900)], 900, Some(300));
        // The same page looked at twice came by the shorter way.
        check(&[(100, 700), (100, 1700)], 1700, Some(600));
        // The other clock is ahead.
        check(&[(9_000, 700)], 700, Some(-8_300));
    }

    #[test]
    fn a_way_of_long_ago_counts_for_less() {
        // 300 us then; ten seconds later the clocks may have drifted apart by 2 ms.
        check(&[(200, 500)], 10_000_500, Some(2_300));
        check(
            &[(200, 500), (10_000_000, 10_000_900)],
            10_000_900,
            Some(900),
        );
        check(
            &[(200, 500), (10_000_000, 10_009_000)],
            10_009_000,
            Some(2_301),
        );
    }

    #[test]
    fn a_page_without_a_time_and_one_with_an_absurd_time_do_no_harm() {
        let mut clocks = Clocks::default();
        clocks.hear(us(5), &Page::new(B));
        assert_eq!(clocks.least_us(us(5), B), None);
        clocks.hear(us(5), &page(B, u64::MAX));
        let moment = Moment::translated(u64::MAX, i64::MAX, i64::MIN);
        assert!(moment.bound_us >= 0);
        assert!(clocks.least_us(us(u64::MAX / 2), B).is_some());
        clocks.keep(&[Page::new(A)]);
        assert_eq!(clocks.least_us(us(5), B), None);
    }

    #[test]
    fn the_true_moment_lies_within_the_bound_whatever_the_ways_were() {
        // The other clock is ahead by `ahead`; the ways there and back took so long.
        for (ahead, there, back) in [(0, 300, 300), (5_000_000, 900, 100), (-70_000, 1, 40_000)] {
            let on_first = 1_000_000_000_i64;
            let at_us = u64::try_from(on_first + ahead).unwrap();
            let moment = Moment::translated(at_us, there - ahead, back + ahead);
            let error = (moment.at_us - on_first).abs();
            assert!(error <= moment.bound_us + 1, "{moment:?} for {ahead}");
            assert_eq!(moment.bound_us, (there + back) / 2);
        }
    }
}
