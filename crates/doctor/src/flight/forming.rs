//! Groups that did not come about: who did not come, and what ranks refused.

use std::time::Duration;

use super::view::{Group, Member, View, named, precedence, seconds};
use super::{Cause, DESCRIBED_MAX, Diagnosis};
use paceline_collective::flight::{Dump, Failure, FailureKind, Forming};
use paceline_words::say;

/// A rank that could not form a group.
#[derive(Debug, Clone, Copy)]
struct Waiter<'a> {
    rank: usize,
    dump: &'a Dump,
    forming: &'a Forming,
    failure: &'a Failure,
}

/// One finding for each group that some ranks could not form.
pub(super) fn findings(view: &View<'_>) -> Vec<Diagnosis> {
    let finding = |group: &Group<'_>| finding(view, group);
    view.groups.iter().filter_map(finding).collect()
}

fn finding(view: &View<'_>, group: &Group<'_>) -> Option<Diagnosis> {
    let mut waiters: Vec<Waiter<'_>> = group.members.iter().filter_map(waiter).collect();
    waiters.sort_by_key(|waiter| precedence(waiter.dump, waiter.failure));
    let first = waiters.first()?;
    let came = |rank: usize| {
        waiters
            .iter()
            .any(|waiter| waiter.forming.arrived.contains(&rank))
    };
    let missing = missing(view, &waiters);
    // A reason that is no lack of time is what broke it: the others only waited for whoever said so.
    let refused = waiters.iter().find(|waiter| {
        !matches!(
            waiter.failure.kind,
            FailureKind::Deadline | FailureKind::Aborted
        )
    });
    let lang = view.lang;
    let name = match group.name {
        "world" => say!(lang, "the group of all ranks", "전체 랭크 그룹"),
        name => say!(lang, "group {name}", "그룹 {name}"),
    };
    let (sentence, culprits) = match (refused, missing.as_slice()) {
        (Some(waiter), _) if !waiter.failure.culprits.is_empty() => (
            say!(
                lang,
                "{name} was not formed: {}",
                "{name}: 만들어지지 않음: {}",
                waiter.failure.text
            ),
            waiter.failure.culprits.clone(),
        ),
        (Some(_), _) | (None, []) => {
            let Waiter { rank, failure, .. } = refused.unwrap_or(first);
            let text = &failure.text;
            let sentence = say!(
                lang,
                "{name} was not formed: {text} (in the words of rank {rank})",
                "{name}: 만들어지지 않음: {text} (랭크 {rank}의 메시지)"
            );
            (sentence, Vec::new())
        }
        (None, missing) => {
            let those: Vec<&Waiter<'_>> = waiters
                .iter()
                .filter(|waiter| !missing.contains(&waiter.rank))
                .collect();
            let ranks: Vec<usize> = those.iter().map(|waiter| waiter.rank).collect();
            let waited = those.iter().map(|waiter| waiter.forming.waited_ns).max();
            let waited = seconds(Duration::from_nanos(waited.unwrap_or(0)), lang);
            let phase = those.first().map_or("", |waiter| &waiter.forming.phase);
            let who = view.who(missing);
            let them = named(&sorted(ranks), lang);
            let sentence = match missing.iter().all(|rank| came(*rank)) {
                true => say!(
                    lang,
                    "{who} reported in, and then was gone or not to be reached: {them} waited {waited} for {name} to \
                     {phase}",
                    "{who}: 왔다가 사라졌거나 연결되지 않음; {them}: {name}에서 {waited} 대기, 실패한 단계 `{phase}`"
                ),
                false => say!(
                    lang,
                    "{who} did not come to {name}: {them} waited {waited} for all to {phase}",
                    "{who}: {name}에 오지 않음; {them}: {waited} 대기, 실패한 단계 `{phase}`"
                ),
            };
            (sentence, missing.to_vec())
        }
    };
    let details = waiters.iter().take(DESCRIBED_MAX).map(|waiter| {
        let Forming { phase, arrived, .. } = waiter.forming;
        let arrived = match arrived.as_slice() {
            [] => say!(
                lang,
                "it knew of nobody that had come",
                "온 랭크를 하나도 알지 못함"
            ),
            ranks => {
                let ranks = named(ranks, lang);
                say!(lang, "{ranks} had come", "이미 온 쪽은 {ranks}")
            }
        };
        let (rank, place) = (waiter.rank, view.place(waiter.rank));
        say!(
            lang,
            "rank {rank} ({place}) could not {phase}; {arrived}",
            "랭크 {rank}({place}): 실패한 단계 `{phase}`; {arrived}"
        )
    });
    Some(Diagnosis {
        details: details.collect(),
        culprits,
        group: Some(group.name.into()),
        since_unix_ns: first
            .dump
            .unix_ns(first.failure.at_ns)
            .saturating_sub(first.forming.waited_ns),
        ..Diagnosis::fault(Cause::NeverFormed, sentence)
    })
}

fn waiter<'a>(member: &Member<'a>) -> Option<Waiter<'a>> {
    let group = member.group?;
    Some(Waiter {
        rank: member.rank,
        dump: member.dump?,
        forming: group.forming.as_ref()?,
        failure: group.failure.as_ref()?,
    })
}

/// The ranks that were missed and are to blame: those that left no record before those that waited too.
fn missing(view: &View<'_>, waiters: &[Waiter<'_>]) -> Vec<usize> {
    let mut missed: Vec<usize> = waiters
        .iter()
        .flat_map(|waiter| &waiter.failure.culprits)
        .copied()
        .collect();
    missed = sorted(missed);
    let waits = |rank: &usize| waiters.iter().any(|waiter| waiter.rank == *rank);
    let those = |wanted: &dyn Fn(&usize) -> bool| -> Vec<usize> {
        missed.iter().copied().filter(wanted).collect()
    };
    let silent = those(&|rank| view.dump(*rank).is_none());
    let elsewhere = those(&|rank| !waits(rank));
    [silent, elsewhere, missed.clone()]
        .into_iter()
        .find(|ranks| !ranks.is_empty())
        .unwrap_or_default()
}

fn sorted(mut ranks: Vec<usize>) -> Vec<usize> {
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}
