//! What became of the members of a round: who is gone, who failed first.

use std::time::Duration;

use super::{Known, Seen};
use crate::elastic::record::{AgentId, Member, Page, Phase, Record, Report, State};

/// A member that is gone. One that only lost its ranks can take part in the next round.
#[derive(Debug)]
pub(super) struct Gone {
    pub(super) id: AgentId,
    pub(super) why: String,
    pub(super) is_able: bool,
}

pub(super) enum Cause {
    None,
    Wait(Duration),
    Found(Box<Report>),
}

impl Known<'_> {
    /// Whether a member's ranks are ending because of a signal to it: what fails meanwhile fails because of that, and
    /// the next round begins when they have ended.
    pub(super) fn is_one_leaving(&self, record: &Record) -> bool {
        record.members.iter().any(|member| {
            self.page(member.id).is_some_and(|seen| {
                matches!(seen.page.state, State::Leaving(..)) && seen.ages.silent < self.rules.lease
            })
        })
    }

    /// Members that cannot go on with the record's round, and why.
    pub(super) fn departed(&self, record: &Record) -> Vec<Gone> {
        let gone = |member: &Member| {
            let host = &member.host;
            let Some(seen) = self.page(member.id) else {
                return Some((format!("host {host} has left"), false));
            };
            let is_done = matches!(&seen.page.state, State::Done(round) if *round == record.id);
            let silent = seen.ages.silent;
            let is_running = matches!(record.phase, Phase::Running(_));
            match &seen.page.state {
                State::Left(Some(signal)) => {
                    let name = crate::signals::name(*signal);
                    Some((format!("host {host} was stopped by {name}"), false))
                }
                State::Left(None) => Some((format!("host {host} has left"), false)),
                _ if is_done => None,
                _ if self.dead.contains(&member.id) => {
                    Some((format!("the agent on host {host} is gone"), false))
                }
                _ if silent >= self.rules.lease => {
                    let seconds = silent.as_secs_f64();
                    let why = format!("host {host} has given no sign of life for {seconds:.1} s");
                    Some((why, false))
                }
                state if is_running && state.round() != Some(record.id) => {
                    Some((format!("host {host} was cut off for a while"), true))
                }
                _ => None,
            }
        };
        record
            .members
            .iter()
            .filter_map(|member| {
                let (why, is_able) = gone(member)?;
                let id = member.id;
                Some(Gone { id, why, is_able })
            })
            .collect()
    }

    /// The first failure of the round over all nodes, once no earlier one can turn up.
    pub(super) fn first_failure(&self, record: &Record) -> Cause {
        let report = |member: &Member| match self.page(member.id) {
            Some(Seen {
                page:
                    Page {
                        state: State::Failed(round, report),
                        ..
                    },
                ages,
            }) if *round == record.id => Some((report, ages)),
            _ => None,
        };
        let reports: Vec<_> = record.members.iter().filter_map(report).collect();
        let first = reports.iter().min_by_key(|(report, _)| report.after_us);
        let Some((first, ages)) = first else {
            return Cause::None;
        };
        // Whoever has noticed the failure has said with it what it knew; who does not is perhaps the cause itself,
        // and its lease decides.
        let unheard = record.members.iter().any(|member| {
            let seen = self.page(member.id);
            report(member).is_none()
                && seen.is_some_and(|seen| seen.page.noticed != Some(record.id))
        });
        if unheard {
            return Cause::Wait(self.rules.beat_every());
        }
        let mut cause: &Report = first;
        for _ in 0..reports.len() {
            let Some(blamed) = cause.blames.and_then(|rank| record.node_of(rank)) else {
                break;
            };
            match report(&record.members[blamed]) {
                Some((report, _)) if report.rank != first.rank => cause = report,
                Some(_) => break,
                None => {
                    let left = self.rules.blamed_may_end.saturating_sub(ages.state);
                    if !left.is_zero() {
                        return Cause::Wait(left);
                    }
                    break;
                }
            }
        }
        Cause::Found(Box::new(cause.clone()))
    }
}
