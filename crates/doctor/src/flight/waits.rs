//! Who waits for whom, across groups, and where that ends.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::pairs::{Pair, Story, pairs};
use super::view::{Group, Member, View, named, precedence, seconds};
use super::{Cause, DESCRIBED_MAX, Diagnosis, LONG_WAIT_NS, has_given_up, no_record};
use paceline_collective::flight::{Failure, Record};
use paceline_words::{Lang, say};

/// What holds up the ranks that wait in one operation of one group.
#[derive(Debug)]
struct Hold<'a> {
    group: &'a Group<'a>,
    /// The first operation that did not come about.
    seq: u64,
    /// Global ranks that are in it or behind it.
    waiters: Vec<usize>,
    /// Global ranks that they wait for; none when all have joined.
    targets: Vec<usize>,
    why: Why,
    since_unix_ns: u64,
    /// The longest wait.
    waited: Duration,
    /// Why nobody can go on is known already.
    is_settled: bool,
    /// It is about a send or receive of one rank of the group, whatever the others do.
    pair: Option<Pair<'a>>,
}

/// What the records say of the ranks that are waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// They say themselves that they gave up.
    GaveUp,
    /// They have a record, without this operation.
    Absent,
    /// They have no record that would tell.
    Silent,
    /// There are none: all ranks have joined.
    AllJoined,
}

/// What waits come to, and how one leads to another, one sentence each.
///
/// Groups of the names in `settled` have a finding already: whoever waits in them is no mystery.
pub(super) fn findings(view: &View<'_>, settled: &BTreeSet<&str>) -> (Vec<Diagnosis>, Vec<String>) {
    let is_broken = !view.failures().is_empty();
    let mut holds: Vec<Hold<'_>> = view
        .groups
        .iter()
        .flat_map(|group| {
            let between_two = pairs(group).into_iter().map(|pair| Hold::of(group, pair));
            hold(view, group).into_iter().chain(between_two)
        })
        .filter(|hold| is_broken || hold.is_long())
        .collect();
    for hold in &mut holds {
        hold.is_settled = settled.contains(hold.group.name);
    }
    if is_broken {
        // Ranks that were in a sound group when another one failed only happened to be there, unless the failed group
        // waited for them.
        let reached = Waits::new(&holds).reached();
        let mut place = 0..;
        holds.retain(|_| place.next().is_some_and(|place| reached[place]));
    }
    holds.sort_by_key(|hold| hold.since_unix_ns);
    let waits = Waits::new(&holds);
    let mut found = waits.deadlocks(view);
    found.extend(waits.ends(view));
    (found, waits.chains())
}

/// What holds a group up, if anybody waits in it.
fn hold<'a>(view: &View<'_>, group: &'a Group<'a>) -> Option<Hold<'a>> {
    let open: Vec<(&Member<'_>, &Record)> = group
        .members
        .iter()
        .filter_map(|member| Some((member, member.open()?)))
        .collect();
    let first_open = open.iter().map(|(_, record)| record.seq).min()?;
    let last_open = open.iter().map(|(_, record)| record.seq).max()?;
    let members = group.members.iter();
    let closed = members.filter(|member| member.open().is_none());
    let absent: Vec<(u64, usize)> = closed
        .clone()
        .filter_map(|member| Some((member.next()?, member.rank)))
        .filter(|(next, _)| *next <= last_open)
        .collect();
    let silent: Vec<usize> = closed
        .filter(|member| member.next().is_none())
        .map(|member| member.rank)
        .collect();
    let named = failures(group).flat_map(|(_, failure)| &failure.culprits);
    let named: Vec<usize> = named.copied().collect();
    let named_silent = silent.iter().copied();
    let named_silent: Vec<usize> = named_silent.filter(|rank| named.contains(rank)).collect();
    let confessed: Vec<usize> = failures(group)
        .filter(|(rank, failure)| {
            let dump = view.dump(*rank);
            dump.is_some_and(|dump| has_given_up(dump, failure))
        })
        .map(|(rank, _)| rank)
        .collect();
    let has_arrived = |(_, record): &(&Member<'_>, &Record)| {
        record.seq == first_open && record.arrived_ns.is_some()
    };
    let first_absent = absent.iter().map(|(next, _)| *next).min();
    let (seq, targets, why) = if !confessed.is_empty() {
        (first_open, confessed, Why::GaveUp)
    } else if !named_silent.is_empty() {
        (first_open, named_silent, Why::Silent)
    } else if let Some(next) = first_absent.filter(|next| *next <= first_open) {
        let those = absent.iter().filter(|(theirs, _)| *theirs == next);
        (next, those.map(|(_, rank)| *rank).collect(), Why::Absent)
    } else if silent.is_empty() || open.iter().any(has_arrived) {
        (first_open, Vec::new(), Why::AllJoined)
    } else {
        (first_open, silent, Why::Silent)
    };
    let waiting: Vec<&(&Member<'_>, &Record)> = open
        .iter()
        .filter(|(member, record)| match why {
            Why::AllJoined => record.seq == seq,
            _ => !targets.contains(&member.rank),
        })
        .collect();
    Some(Hold {
        group,
        seq,
        waiters: waiting.iter().map(|(member, _)| member.rank).collect(),
        since_unix_ns: waiting
            .iter()
            .map(|(member, record)| member.joined_unix_ns(record))
            .min()?,
        waited: waiting
            .iter()
            .map(|(member, record)| member.waited(record))
            .max()?,
        targets,
        why,
        is_settled: false,
        pair: None,
    })
}

/// The first failure of the group on each rank that has one, with the rank.
fn failures<'a>(group: &'a Group<'a>) -> impl Iterator<Item = (usize, &'a Failure)> {
    let of = |member: &'a Member<'a>| Some((member.rank, member.group?.failure.as_ref()?));
    group.members.iter().filter_map(of)
}

/// The graph: a hold leads to those in which the ranks that it waits for wait themselves.
struct Waits<'a> {
    holds: &'a [Hold<'a>],
    /// Where each rank waits.
    places: BTreeMap<usize, Vec<usize>>,
}

impl<'a> Waits<'a> {
    fn new(holds: &'a [Hold<'a>]) -> Self {
        let mut places: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (place, hold) in holds.iter().enumerate() {
            for rank in &hold.waiters {
                places.entry(*rank).or_default().push(place);
            }
        }
        Self { holds, places }
    }

    /// Where a rank waits.
    fn of(&self, rank: usize) -> &[usize] {
        self.places.get(&rank).map_or(&[], Vec::as_slice)
    }

    /// The holds that a hold waits for.
    fn next(&self, place: usize) -> BTreeSet<usize> {
        let hold = &self.holds[place];
        if hold.is_settled {
            return BTreeSet::new();
        }
        let targets = hold.targets.iter();
        let next = targets.flat_map(|rank| self.of(*rank)).copied();
        next.filter(|next| *next != place).collect()
    }

    /// Which holds are in a group that failed, or are waited for by one of those.
    fn reached(&self) -> Vec<bool> {
        // A send or receive in which a rank happened to be when its group failed for another reason is no start.
        let is_about = |hold: &Hold<'_>, failure: &Failure| {
            let pair = hold.pair.as_ref();
            pair.is_none_or(|pair| pair.is_blamed(&failure.culprits, &hold.targets))
        };
        let is_start = |hold: &Hold<'_>| {
            let is_long = hold.pair.is_some() && hold.is_long();
            is_long || failures(hold.group).any(|(_, failure)| is_about(hold, failure))
        };
        let mut reached: Vec<bool> = self.holds.iter().map(is_start).collect();
        let mut ahead: Vec<usize> = (0..reached.len()).filter(|place| reached[*place]).collect();
        while let Some(place) = ahead.pop() {
            for next in self.next(place) {
                if !std::mem::replace(&mut reached[next], true) {
                    ahead.push(next);
                }
            }
        }
        reached
    }

    /// Circles of groups, at most one for each hold that is in one.
    fn deadlocks(&self, view: &View<'_>) -> Vec<Diagnosis> {
        let mut found = Vec::new();
        let mut done = vec![false; self.holds.len()];
        for start in 0..self.holds.len() {
            // The way from `start` with what is left to try at each place; not recursive, because files decide its depth.
            let mut way: Vec<(usize, Vec<usize>)> = Vec::new();
            let mut enter = Some(start).filter(|start| !done[*start]);
            loop {
                if let Some(place) = enter.take() {
                    done[place] = true;
                    way.push((place, self.next(place).into_iter().collect()));
                }
                let Some((_, left)) = way.last_mut() else {
                    break;
                };
                match left.pop() {
                    None => drop(way.pop()),
                    Some(next) => match way.iter().position(|(place, _)| *place == next) {
                        Some(at) => {
                            let circle: Vec<usize> = way[at..].iter().map(|(p, _)| *p).collect();
                            found.push(self.deadlock(view, &circle));
                        }
                        None if !done[next] => enter = Some(next),
                        None => {}
                    },
                }
            }
        }
        found
    }

    fn deadlock(&self, view: &View<'_>, circle: &[usize]) -> Diagnosis {
        // A message with another tag than the one that is waited for closes a circle, but it is no wrong order.
        let mut holds = circle.iter().map(|place| &self.holds[*place]);
        if let Some(mismatch) = holds.find_map(|hold| hold.mismatch()) {
            return mismatch;
        }
        let lang = view.lang;
        let is_of_pairs = circle.iter().any(|place| self.holds[*place].pair.is_some());
        // The rank by which each hold is reached from the one before it.
        let ranks: Vec<usize> = (0..circle.len())
            .map(|i| {
                let before = &self.holds[circle[(i + circle.len() - 1) % circle.len()]];
                let waits = |rank: &&usize| self.holds[circle[i]].waiters.contains(rank);
                *before.targets.iter().find(waits).expect("it led here")
            })
            .collect();
        let first = (0..ranks.len()).min_by_key(|i| ranks[*i]).unwrap_or(0);
        let links: Vec<String> = (0..circle.len())
            .map(|i| (first + i) % circle.len())
            .map(|i| {
                let hold = &self.holds[circle[i]];
                let (me, whom) = (ranks[i], ranks[(i + 1) % ranks.len()]);
                let pair = hold.pair.as_ref();
                let has_peer = pair.is_some_and(|pair| pair.record.peer.is_some());
                let op = hold.op();
                match has_peer {
                    true => say!(lang, "waits in {op}", "랭크 {me}: {op}에서 대기"),
                    false => say!(
                        lang,
                        "waits in {op} for rank {whom}",
                        "랭크 {me}: {op}에서 랭크 {whom} 대기"
                    ),
                }
            })
            .collect();
        let holds = circle.iter().map(|place| &self.holds[*place]);
        let mut culprits = ranks.clone();
        culprits.sort_unstable();
        let (rank, place) = (ranks[first], view.place(ranks[first]));
        let sentence = match lang {
            Lang::En => format!("deadlock: rank {rank} {}", links.join(", which ")),
            Lang::Ko => format!("교착 상태: {}", links.join("; ")),
        };
        Diagnosis {
            details: vec![
                say!(
                    lang,
                    "rank {rank} is at {place}",
                    "랭크 {rank}의 위치: {place}"
                ),
                match is_of_pairs {
                    true => say!(
                        lang,
                        "of ranks that wait for each other one has to send first",
                        "서로 기다리는 랭크 중 하나가 먼저 보내야 합니다"
                    ),
                    false => say!(
                        lang,
                        "every rank must take its groups in one order",
                        "모든 랭크가 그룹을 같은 순서로 써야 합니다"
                    ),
                },
            ],
            culprits,
            group: Some(self.holds[circle[first]].group.name.into()),
            seq: Some(self.holds[circle[first]].seq),
            since_unix_ns: holds.map(|hold| hold.since_unix_ns).min().unwrap_or(0),
            ..Diagnosis::fault(Cause::Deadlock, sentence)
        }
    }

    /// The ranks at the ends of the chains, each once.
    fn ends(&self, view: &View<'_>) -> Vec<Diagnosis> {
        let mut told: BTreeSet<usize> = BTreeSet::new();
        let mut found = Vec::new();
        for hold in self.holds.iter().filter(|hold| !hold.is_settled) {
            let is_end = |rank: &usize| hold.why == Why::GaveUp || self.of(*rank).is_empty();
            let ends = hold.targets.iter().copied().filter(is_end);
            let ends: Vec<usize> = ends.filter(|rank| told.insert(*rank)).collect();
            if !ends.is_empty() {
                found.push(hold.by(view, &ends));
            } else if hold.why == Why::AllJoined {
                found.push(hold.stuck(view));
            }
        }
        found
    }

    /// "rank 2 is not in ... because it waits in ... for rank 5".
    fn chains(&self) -> Vec<String> {
        let mut chains = Vec::new();
        for (place, hold) in self.holds.iter().enumerate() {
            for rank in &hold.targets {
                for other in self.of(*rank).iter().filter(|other| **other != place) {
                    let other = &self.holds[*other];
                    let lang = hold.group.lang;
                    let whom = match other.targets.as_slice() {
                        [] => String::new(),
                        ranks => {
                            let ranks = named(ranks, lang);
                            say!(lang, " for {ranks}", ", 기다리는 대상은 {ranks}")
                        }
                    };
                    let (op, other) = (hold.op(), other.op());
                    chains.push(say!(
                        lang,
                        "rank {rank} is not in {op} because it waits in {other}{whom}",
                        "랭크 {rank}: {op}에 없는 까닭은 {other}에서 대기 중이기 때문{whom}"
                    ));
                    if chains.len() == DESCRIBED_MAX {
                        return chains;
                    }
                }
            }
        }
        chains
    }
}

impl<'a> Hold<'a> {
    fn of(group: &'a Group<'a>, pair: Pair<'a>) -> Self {
        Self {
            group,
            seq: pair.record.seq,
            waiters: vec![pair.waiter.rank],
            targets: pair.targets(group),
            why: match pair.story {
                Story::Silent => Why::Silent,
                _ if pair.targets(group).is_empty() => Why::AllJoined,
                _ => Why::Absent,
            },
            since_unix_ns: pair.waiter.joined_unix_ns(pair.record),
            waited: pair.waiter.waited(pair.record),
            is_settled: false,
            pair: Some(pair),
        }
    }

    /// Whether it is worth a word where nothing has failed.
    fn is_long(&self) -> bool {
        self.waited.as_nanos() >= u128::from(LONG_WAIT_NS)
    }

    /// What is waited in, in words.
    fn op(&self) -> String {
        match &self.pair {
            Some(pair) => self.group.p2p_operation(pair.record),
            None => self.group.op(self.seq),
        }
    }
}

impl Hold<'_> {
    /// The finding about `ends`, some of the ranks that are waited for.
    fn by(&self, view: &View<'_>, ends: &[usize]) -> Diagnosis {
        let lang = view.lang;
        let waited = self.waiting();
        let accusation = failures(self.group)
            .filter(|(_, failure)| failure.culprits.iter().any(|rank| ends.contains(rank)))
            .min_by_key(|(rank, failure)| view.dump(*rank).map(|dump| precedence(dump, failure)));
        let (cause, sentence) = match self.why {
            Why::GaveUp => {
                let own = failures(self.group).find(|(rank, _)| *rank == ends[0]);
                let text = own.map_or("", |(_, failure)| &failure.text);
                let place = view.place(ends[0]);
                (Cause::GaveUp, format!("{text} ({place}); {waited}"))
            }
            Why::Silent => (
                Cause::NoRecord,
                format!("{}; {waited}", self.silence(view, ends, accusation)),
            ),
            Why::Absent | Why::AllJoined => (Cause::NeverJoined, self.absence(view, ends)),
        };
        let sentence = match (&self.pair, self.why) {
            (Some(pair), Why::Absent) => {
                pair.sentence(self.group, &view.who(ends), &seconds(self.waited, lang))
            }
            _ => sentence,
        };
        let mut details: Vec<String> = ends
            .iter()
            .filter_map(|rank| view.dump(*rank))
            .take(DESCRIBED_MAX)
            .map(|dump| {
                let (rank, place, doing) = (dump.rank, view.place(dump.rank), &dump.doing);
                say!(
                    lang,
                    "rank {rank} ({place}) {doing}",
                    "랭크 {rank}({place}): {doing}"
                )
            })
            .collect();
        if let Some((rank, failure)) = accusation.filter(|_| self.why == Why::Absent) {
            let text = &failure.text;
            details.push(say!(
                lang,
                "rank {rank} says: {text}",
                "랭크 {rank}의 메시지: {text}"
            ));
        }
        self.finding(cause, sentence, details, ends)
    }

    /// "ranks 0, 1 waited in all-reduce #4411 for 60 s"
    fn waiting(&self) -> String {
        let lang = self.group.lang;
        let (ranks, op) = (named(&self.waiters, lang), self.op());
        let waited = seconds(self.waited, lang);
        say!(
            lang,
            "{ranks} waited in {op} for {waited}",
            "{ranks}: {op}에서 {waited} 대기"
        )
    }

    /// "rank 2 (...) never joined all-reduce #4411: its last finished operation is #4410; ranks 0, 1, 3 waited ...".
    fn absence(&self, view: &View<'_>, ends: &[usize]) -> String {
        let lang = view.lang;
        let last = match (self.seq.saturating_sub(1), ends.len()) {
            (0, _) => say!(
                lang,
                "it is the first operation of the group",
                "그룹의 첫 연산임"
            ),
            (last, 1) => say!(
                lang,
                "its last finished operation is #{last}",
                "마지막으로 끝낸 연산은 #{last}"
            ),
            (last, _) => say!(
                lang,
                "their last finished operation is #{last}",
                "마지막으로 끝낸 연산은 #{last}"
            ),
        };
        let (who, op) = (view.who(ends), self.op());
        let (ranks, first) = (named(&self.waiters, lang), self.first_wait());
        let waited = seconds(self.waited, lang);
        say!(
            lang,
            "{who} never joined {op}: {last}; {ranks} waited in #{first} for {waited}",
            "{who}: {op}에 들어오지 않음; {last}; {ranks}: #{first}에서 {waited} 대기"
        )
    }

    /// The lowest number in which somebody waits; above `seq` only where an operation can end before all have come.
    fn first_wait(&self) -> u64 {
        let members = self.group.members.iter();
        let waiting = members.filter(|member| self.waiters.contains(&member.rank));
        let open = waiting.filter_map(|member| Some(member.open()?.seq));
        open.min().unwrap_or(self.seq)
    }

    /// Why ranks have nothing to say, as far as the others know.
    fn silence(
        &self,
        view: &View<'_>,
        ends: &[usize],
        accusation: Option<(usize, &Failure)>,
    ) -> String {
        let (known, gone): (Vec<usize>, Vec<usize>) =
            ends.iter().partition(|rank| view.dump(**rank).is_some());
        match (gone.as_slice(), accusation) {
            ([], _) => {
                let (who, name) = (view.who(&known), self.group.name);
                say!(
                    view.lang,
                    "{who} recorded nothing of group {name}: the group was left or never formed there, or \
                     PACELINE_FLIGHT_RECORDS is 0",
                    "{who}: 그룹 {name}의 기록이 없음. 그룹을 떠났거나 만들지 못했거나 PACELINE_FLIGHT_RECORDS가 0"
                )
            }
            (gone, Some((by, failure))) => no_record(gone, failure, by, view.lang),
            (gone, None) => {
                let ranks = named(gone, view.lang);
                say!(
                    view.lang,
                    "{ranks} left no record, and no other rank says why",
                    "{ranks}: 기록이 없고, 다른 랭크에도 이유가 없음"
                )
            }
        }
    }

    /// What another rank sent has another tag than what this one waits for.
    fn mismatch(&self) -> Option<Diagnosis> {
        let pair = self.pair.as_ref()?;
        let lang = self.group.lang;
        let waits = pair.waits(self.group, &seconds(self.waited, lang));
        let tags = pair.other_tags(self.group)?;
        let sentence = say!(lang, "{waits}, but {tags}", "{waits}. 그러나 {tags}");
        // Of two ranks nobody knows who is right.
        Some(self.finding(Cause::Mismatch, sentence, Vec::new(), &[]))
    }

    /// All have joined, and it did not end.
    fn stuck(&self, view: &View<'_>) -> Diagnosis {
        let (lang, waited) = (view.lang, seconds(self.waited, view.lang));
        if let Some(pair) = &self.pair {
            let sentence = pair.sentence(self.group, "", &waited);
            return self.finding(Cause::Stuck, sentence, Vec::new(), &[]);
        }
        let (op, ranks) = (self.op(), named(&self.waiters, lang));
        let wrapped: Vec<usize> = self
            .group
            .members
            .iter()
            .filter(|member| member.records().next().is_some_and(|r| r.seq > self.seq))
            .map(|member| member.rank)
            .collect();
        if !wrapped.is_empty() {
            let who = view.who(&wrapped);
            let it = if wrapped.len() == 1 { "it" } else { "they" };
            let sentence = match lang {
                Lang::En => format!(
                    "what {who} called as {op} is not known, because {it} kept only later operations; {ranks} waited in it for \
                     {waited}"
                ),
                Lang::Ko => format!(
                    "{who}: 이후의 연산만 기록에 남아 {op}에서 무엇을 호출했는지 알 수 없음; {ranks}: {waited} 대기"
                ),
            };
            let details = vec![say!(
                lang,
                "PACELINE_FLIGHT_RECORDS sets how many are kept",
                "남길 기록의 수는 PACELINE_FLIGHT_RECORDS로 정합니다"
            )];
            return self.finding(Cause::Wrapped, sentence, details, &[]);
        }
        let first = failures(self.group)
            .min_by_key(|(rank, failure)| view.dump(*rank).map(|dump| precedence(dump, failure)));
        let says = first.map_or(String::new(), |(rank, failure)| {
            let text = &failure.text;
            say!(
                lang,
                "; rank {rank} says first: {text}",
                "; 랭크 {rank}의 첫 메시지: {text}"
            )
        });
        let members = self.group.members.len();
        let sentence = say!(
            lang,
            "{ranks} did not finish {op} within {waited}, although all {members} ranks of the group had joined it{says}",
            "{ranks}: 그룹의 랭크 {members}개가 모두 들어왔지만 {waited} 안에 {op} 연산을 끝내지 못함{says}"
        );
        let culprits = first.map_or(&[][..], |(_, failure)| &failure.culprits);
        self.finding(Cause::Stuck, sentence, Vec::new(), culprits)
    }

    fn finding(
        &self,
        cause: Cause,
        sentence: String,
        details: Vec<String>,
        culprits: &[usize],
    ) -> Diagnosis {
        Diagnosis {
            details,
            culprits: culprits.to_vec(),
            group: Some(self.group.name.into()),
            seq: Some(self.seq),
            since_unix_ns: self.since_unix_ns,
            ..Diagnosis::fault(cause, sentence)
        }
    }
}
