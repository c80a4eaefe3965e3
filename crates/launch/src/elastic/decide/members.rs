//! The members of a round: which are gone, and which failed first.

use std::time::Duration;

use paceline_words::{Text, say};

use super::{Known, Seen};
use crate::elastic::clocks::{Moment, micros};
use crate::elastic::record::{AgentId, Complaint, Member, Phase, Record, Report, State, Why};
use crate::report::AlsoFailed;
use crate::stop::Stop;

/// Most other failures that a report names.
const ALSO_MAX: usize = 8;

/// A member that is gone. One that only lost its ranks can take part in the next round.
#[derive(Debug)]
pub(super) struct Gone {
    pub(super) id: AgentId,
    pub(super) why: Text,
    pub(super) is_able: bool,
    /// The signal that it was asked to leave by.
    pub(super) signal: Option<i32>,
}

/// What a rank that waits for the next generation says of another.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Blame {
    pub(super) complaint: Complaint,
    /// Whether the blamed rank waits too, and all ranks may form the group again. A group that works does steps: once in each.
    pub(super) is_cut: bool,
    /// How much longer it has to end by itself.
    pub(super) left: Duration,
}

pub(super) enum Cause {
    None,
    Wait(Duration),
    Found(Box<Report>),
}

/// A member with a failed rank.
struct Failed<'a> {
    /// Its place in the round.
    place: usize,
    seen: &'a Seen,
    report: &'a Report,
    at: Option<Moment>,
}

impl Known<'_> {
    /// Whether a member's ranks are ending because of a signal to it: failures meanwhile follow from that, and the next round
    /// begins when they have ended.
    pub(super) fn is_one_leaving(&self, record: &Record) -> bool {
        record.members.iter().any(|member| {
            self.page(member.id).is_some_and(|seen| {
                matches!(seen.page.state, State::Leaving(..)) && seen.ages.silent < self.rules.lease
            })
        })
    }

    /// Members that cannot go on with the record's round, and why.
    pub(super) fn departed(&self, record: &Record) -> Vec<Gone> {
        record
            .members
            .iter()
            .filter_map(|member| self.gone(record, member))
            .collect()
    }

    fn gone(&self, record: &Record, member: &Member) -> Option<Gone> {
        let (id, host) = (member.id, &member.host);
        let gone = |why: Text| Gone {
            id,
            why,
            is_able: false,
            signal: None,
        };
        let left = || Text::new(|lang| say!(lang, "host {host} has left", "호스트 {host}: 떠남"));
        let Some(seen) = self.page(id) else {
            return Some(gone(left()));
        };
        let cut_off = || Gone {
            is_able: true,
            ..gone(Text::new(|lang| {
                say!(
                    lang,
                    "host {host} was cut off for a while",
                    "호스트 {host}: 한동안 연결이 끊김"
                )
            }))
        };
        let is_running = matches!(record.phase, Phase::Running(_));
        let silent = seen.ages.silent;
        Some(match &seen.page.state {
            State::Left(Some(signal)) => {
                let name = crate::signals::name(*signal);
                Gone {
                    // An agent that cannot go on ends itself by SIGKILL.
                    signal: Some(*signal).filter(|signal| *signal != libc::SIGKILL),
                    ..gone(Text::new(|lang| {
                        say!(
                            lang,
                            "host {host} was stopped by {name}",
                            "호스트 {host}: {name} 시그널로 중단됨"
                        )
                    }))
                }
            }
            State::Left(None) => gone(left()),
            State::Done(round) if *round == record.id || record.is_invitation() => return None,
            _ if self.dead.contains(&id) => gone(Text::new(|lang| {
                say!(
                    lang,
                    "the agent on host {host} is gone",
                    "호스트 {host}: 에이전트가 사라짐"
                )
            })),
            _ if silent >= self.rules.lease => {
                let seconds = silent.as_secs_f64();
                gone(Text::new(|lang| {
                    say!(
                        lang,
                        "host {host} has given no sign of life for {seconds:.1} s",
                        "호스트 {host}: {seconds:.1}초 동안 신호 없음"
                    )
                }))
            }
            state if is_running && state.round() != Some(record.id) => cut_off(),
            State::Idle if record.is_invitation() && seen.page.joins.is_none() => cut_off(),
            _ => return None,
        })
    }

    /// The request to stop that the ranks of the round got, or that they have stopped for.
    pub(super) fn stop(&self, record: &Record) -> Option<Stop> {
        let pages = record.members.iter().filter_map(|m| self.page(m.id));
        let stops = pages.filter_map(|seen| seen.page.stop);
        stops.max_by_key(|stop| stop.step.is_some())
    }

    /// The first failure of the round over all nodes, once no earlier one can turn up.
    pub(super) fn first_failure(&self, record: &Record) -> Cause {
        let reports: Vec<Failed<'_>> = (record.members.iter().enumerate())
            .filter_map(|(place, member)| self.report_of(record, place, member.id))
            .collect();
        if reports.is_empty() {
            return Cause::None;
        }
        // A member that has noticed the failure has also reported its own; one that has not may be the cause itself, and its
        // lease decides.
        let unheard = record.members.iter().any(|member| {
            let seen = self.page(member.id);
            let failed = reports
                .iter()
                .any(|failed| failed.seen.page.id == member.id);
            !failed && seen.is_some_and(|seen| seen.page.noticed != Some(record.id))
        });
        if unheard {
            return Cause::Wait(self.rules.beat_every());
        }
        let is_compared = reports.len() == 1 || reports.iter().all(|failed| failed.at.is_some());
        let newest = reports.iter().map(|failed| failed.seen.ages.state).min();
        if !is_compared && newest < Some(self.rules.lease) {
            // Its page is on its way, or it falls silent and is given up.
            return Cause::Wait(self.rules.beat_every());
        }
        // Clocks that were not compared leave the time since each node started the round: all were told to at once.
        let time = |failed: &Failed<'_>| match failed.at {
            Some(moment) if is_compared => moment.at_us,
            _ => micros(failed.report.failure.after),
        };
        let first = (reports.iter()).min_by_key(|failed| (failed.report.is_later, time(failed)));
        let Some(first) = first else {
            return Cause::None;
        };
        let mut cause = first;
        for _ in 0..reports.len() {
            let blamed = cause
                .report
                .failure
                .blames
                .and_then(|rank| record.node_of(rank));
            let Some(blamed) = blamed else {
                break;
            };
            match reports.iter().find(|failed| failed.place == blamed) {
                Some(failed) if failed.place != first.place => cause = failed,
                Some(_) => break,
                None => {
                    let ages = first.seen.ages;
                    let left = self.rules.blamed_may_end.saturating_sub(ages.state);
                    if !left.is_zero() {
                        return Cause::Wait(left);
                    }
                    break;
                }
            }
        }
        // A rank that blames another, or that failed when its node knew of a failure, is not the cause.
        let others = reports.iter().filter(|failed| {
            let says_why = failed.report.failure.blames.is_some() || failed.report.is_later;
            failed.place != cause.place && !says_why
        });
        let also = others.map(|failed| {
            let node = failed.report.failure.node.clone().unwrap_or_default();
            AlsoFailed {
                rank: failed.report.failure.rank,
                node_rank: node.rank,
                host: node.host,
                later_us: u64::try_from(time(failed).saturating_sub(time(cause))).unwrap_or(0),
                bound_us: (cause.at.zip(failed.at).filter(|_| is_compared))
                    .and_then(|(one, other)| u64::try_from(one.bound_with(&other)).ok()),
            }
        });
        let mut also: Vec<_> = also.collect();
        also.sort_by_key(|also| (also.later_us, also.rank));
        also.truncate(ALSO_MAX);
        let mut report = cause.report.clone();
        report.failure.also = also;
        Cause::Found(Box::new(report))
    }

    /// What ranks that wait for the next generation say of others. A rank that waits itself does not hang: if only such ranks are blamed,
    /// their connections have failed.
    pub(super) fn hung(&self, record: &Record) -> Option<Blame> {
        let seen = (record.members.iter()).filter_map(|member| self.page(member.id));
        let all = seen.flat_map(|seen| seen.page.complaints.iter().map(move |one| (seen, *one)));
        let all: Vec<_> = all.filter(|(_, one)| one.round == record.id).collect();
        let waits = |rank| all.iter().any(|(_, one)| one.by == rank);
        let blames = all.iter().map(|(_, one)| *one);
        let blames = blames.filter(|one| one.of != one.by);
        let complaint = blames.min_by_key(|one| (waits(one.of), one.by))?;
        let is_first = match record.why {
            Why::Cut(before) => complaint.step > before.step,
            _ => true,
        };
        let said = all.iter().map(|(seen, _)| seen.ages.complaints).max()?;
        Some(Blame {
            complaint,
            is_cut: waits(complaint.of) && is_first,
            left: self.rules.blamed_may_end.saturating_sub(said),
        })
    }

    /// A member's failure in the record's round, and when it was on the clock of the round's first member.
    fn report_of(&self, record: &Record, place: usize, id: AgentId) -> Option<Failed<'_>> {
        let seen = self.page(id)?;
        let State::Failed(round, report) = &seen.page.state else {
            return None;
        };
        if *round != record.id {
            return None;
        }
        let first = record.members.first()?.id;
        let at = if id == first {
            Some(Moment::own(report.at_us))
        } else {
            let way = seen.page.way.filter(|way| way.round == record.id);
            let first = &self.page(first)?.page;
            let there = first.ways.iter().find(|(of, _)| *of == id);
            way.zip(there)
                .filter(|_| first.noticed == Some(record.id))
                .map(|(back, there)| Moment::translated(report.at_us, there.1, back.least_us))
        };
        Some(Failed {
            place,
            seen,
            report,
            at,
        })
    }
}

#[cfg(test)]
mod tests;
