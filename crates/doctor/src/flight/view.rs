//! The dumps of a job laid side by side: groups, their members, and how far each has come.

use std::collections::BTreeMap;
use std::time::Duration;

use super::lag::Lag;
use super::{Cause, DESCRIBED_MAX, Diagnosis, RankReport};
use paceline_collective::flight::{Dump, Failure, FailureKind, GroupDump, Record};
use paceline_collective::{Ranks, Seconds};
use paceline_words::{Lang, say};

/// The dumps of one job.
#[derive(Debug)]
pub(super) struct View<'a> {
    /// The language of what is said about them.
    pub(super) lang: Lang,
    pub(super) dumps: Vec<&'a Dump>,
    pub(super) world: usize,
    pub(super) groups: Vec<Group<'a>>,
}

/// One group as all of its members saw it.
#[derive(Debug)]
pub(super) struct Group<'a> {
    pub(super) lang: Lang,
    pub(super) name: &'a str,
    /// In the order of the ranks in the group.
    pub(super) members: Vec<Member<'a>>,
    /// Ranks that have another list of members than the first one.
    quarrel: Vec<usize>,
}

/// One rank in one group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Member<'a> {
    pub(super) rank: usize,
    pub(super) dump: Option<&'a Dump>,
    pub(super) group: Option<&'a GroupDump>,
}

impl<'a> View<'a> {
    pub(super) fn new(dumps: &'a [Dump], lang: Lang) -> Self {
        let mut by_rank: BTreeMap<usize, &Dump> = BTreeMap::new();
        for dump in dumps {
            by_rank.entry(dump.rank).or_insert(dump);
        }
        let dumps: Vec<&Dump> = by_rank.values().copied().collect();
        let mut groups: Vec<Group<'a>> = Vec::new();
        for group in dumps.iter().flat_map(|dump| &dump.groups) {
            if groups.iter().any(|known| known.name == group.name) {
                continue;
            }
            let member = |rank: &usize| {
                let dump = by_rank.get(rank).copied();
                Member {
                    rank: *rank,
                    dump,
                    group: dump.and_then(|dump| dump.group(&group.name)),
                }
            };
            let differs = |dump: &&&Dump| {
                let theirs = dump.group(&group.name);
                theirs.is_some_and(|theirs| theirs.ranks != group.ranks)
            };
            groups.push(Group {
                lang,
                name: &group.name,
                members: group.ranks.iter().map(member).collect(),
                quarrel: dumps.iter().filter(differs).map(|dump| dump.rank).collect(),
            });
        }
        let world = dumps.iter().map(|dump| dump.world).max().unwrap_or(0);
        Self {
            lang,
            dumps,
            world,
            groups,
        }
    }

    pub(super) fn dump(&self, rank: usize) -> Option<&'a Dump> {
        let place = self.dumps.binary_search_by_key(&rank, |dump| dump.rank);
        Some(self.dumps[place.ok()?])
    }

    /// "host b, pid 4711", or nothing known.
    pub(super) fn place(&self, rank: usize) -> String {
        match self.dump(rank) {
            Some(Dump { host, pid, .. }) => {
                say!(
                    self.lang,
                    "host {host}, pid {pid}",
                    "호스트 {host}, pid {pid}"
                )
            }
            None => say!(self.lang, "no record", "기록 없음"),
        }
    }

    /// "rank 2 (host b, pid 4711)" for one, "ranks 2, 3" for more.
    pub(super) fn who(&self, ranks: &[usize]) -> String {
        match ranks {
            [rank] => {
                let place = self.place(*rank);
                say!(self.lang, "rank {rank} ({place})", "랭크 {rank}({place})")
            }
            ranks => named(ranks, self.lang),
        }
    }

    /// The first failure of each group on each rank: who says it, of which group. In the order
    /// of [`precedence`].
    pub(super) fn failures(&self) -> Vec<(&'a Dump, &'a str, &'a Failure)> {
        let of = |dump: &&'a Dump| {
            let dump: &'a Dump = dump;
            let failures = dump.groups.iter();
            failures.filter_map(move |group| Some((dump, &*group.name, group.failure.as_ref()?)))
        };
        let mut failures: Vec<_> = self.dumps.iter().flat_map(of).collect();
        failures.sort_by_key(|(dump, _, failure)| precedence(dump, failure));
        failures
    }

    /// Groups about whose members the ranks do not agree.
    pub(super) fn quarrels(&self) -> Vec<Diagnosis> {
        let quarrels = self.groups.iter().filter(|group| !group.quarrel.is_empty());
        let finding = |group: &Group<'_>| {
            let ranks: Vec<usize> = group.members.iter().map(|member| member.rank).collect();
            let ranks = named(&ranks, self.lang);
            let (name, those) = (group.name, named(&group.quarrel, self.lang));
            let first = self.first_to_name(name);
            Diagnosis {
                details: vec![say!(
                    self.lang,
                    "make every group with the same ranks, in the same order, on all of them",
                    "모든 랭크에서 각 그룹을 같은 랭크로, 같은 순서로 만드세요"
                )],
                group: Some(group.name.into()),
                ..Diagnosis::fault(
                    Cause::Membership,
                    say!(
                        self.lang,
                        "{those} formed group {name} of other ranks than rank {first}, which took {ranks} into it",
                        "그룹 {name}의 랭크 구성이 서로 다름; {those}의 구성과 달리 랭크 {first}의 구성은 {ranks}",
                    ),
                )
            }
        };
        quarrels.map(finding).collect()
    }

    fn first_to_name(&self, group: &str) -> usize {
        let named = |dump: &&&Dump| dump.group(group).is_some();
        self.dumps.iter().find(named).map_or(0, |dump| dump.rank)
    }

    /// What limits the findings.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let silent: Vec<usize> = (0..self.world)
            .filter(|rank| self.dump(*rank).is_none())
            .take(DESCRIBED_MAX + 1)
            .collect();
        match silent.as_slice() {
            [] => {}
            few if few.len() <= DESCRIBED_MAX => {
                let ranks = named(few, self.lang);
                notes.push(say!(
                    self.lang,
                    "there is no record of {ranks}",
                    "{ranks}의 기록이 없음"
                ));
            }
            _ => {
                let (here, world) = (self.dumps.len(), self.world);
                notes.push(say!(
                    self.lang,
                    "there is a record of only {here} of {world} ranks",
                    "랭크 {world}개 중 {here}개의 기록만 있음"
                ));
            }
        }
        for group in &self.groups {
            let empty = |member: &&Member<'_>| {
                let records = member
                    .group
                    .map(|group| (group.submitted, group.records.len()));
                matches!(records, Some((1.., 0)))
            };
            let off: Vec<usize> = group.members.iter().filter(empty).map(|m| m.rank).collect();
            if !off.is_empty() {
                let (ranks, name) = (named(&off, self.lang), group.name);
                notes.push(say!(
                    self.lang,
                    "{ranks} recorded no operations of group {name}: PACELINE_FLIGHT_RECORDS is 0",
                    "{ranks}에 그룹 {name}의 연산 기록이 없음: PACELINE_FLIGHT_RECORDS가 0"
                ));
            }
        }
        notes
    }

    /// The table of ranks. `finished` is about the group of this name.
    pub(super) fn ranks(
        &self,
        group: Option<&str>,
        lags: &BTreeMap<usize, Lag>,
    ) -> Vec<RankReport> {
        let group = self.groups.iter().find(|known| Some(known.name) == group);
        let finished = |rank: usize| {
            let members = &group?.members;
            members
                .iter()
                .find(|member| member.rank == rank)?
                .finished()
        };
        let known = |rank: &usize| {
            let in_group = |group: &Group<'_>| group.members.iter().any(|m| m.rank == *rank);
            self.dump(*rank).is_some() || self.groups.iter().any(in_group)
        };
        let report = |rank: usize| {
            let dump = self.dump(rank);
            RankReport {
                rank,
                has_record: dump.is_some(),
                host: dump.map_or_else(String::new, |dump| dump.host.clone()),
                pid: dump.map_or(0, |dump| dump.pid),
                finished: finished(rank),
                state: self.state(rank),
                failure: dump
                    .and_then(|dump| dump.groups.iter().find_map(|group| group.failure.as_ref()))
                    .map(|failure| failure.text.clone()),
                lag: lags.get(&rank).copied(),
            }
        };
        (0..self.world).filter(known).map(report).collect()
    }

    /// The operation that a rank is in, or what else it is doing.
    fn state(&self, rank: usize) -> String {
        let Some(dump) = self.dump(rank) else {
            return say!(self.lang, "left no record", "기록 없음");
        };
        let mut open = self.groups.iter().filter_map(|group| {
            let mut members = group.members.iter();
            let member = members.find(|member| member.rank == rank)?;
            let p2p = || member.p2p().find(|record| record.is_open());
            let op = match member.open() {
                Some(record) => group.operation(record),
                None => group.p2p_operation(p2p()?),
            };
            Some(say!(self.lang, "in {op}", "{op}에서 대기"))
        });
        open.next().unwrap_or_else(|| dump.doing.clone())
    }
}

impl<'a> Group<'a> {
    /// "recv #3 from rank 0, tag 7 of group dp0", with the job's number of the rank.
    pub(super) fn p2p_operation(&self, record: &Record) -> String {
        let lang = self.lang;
        let peer = match record.peer {
            Some(peer) => match self.member(peer) {
                Some(Member { rank, .. }) => say!(lang, "rank {rank}", "랭크 {rank}"),
                None => say!(lang, "a rank that is none", "없는 랭크"),
            },
            None => say!(lang, "any rank", "아무 랭크"),
        };
        let (tag, of) = (record.tag.unwrap_or(0), self.of());
        let (op, seq) = (&record.op, record.seq);
        match (lang, op.as_str()) {
            (Lang::En, "send") => format!("{op} #{seq} to {peer}, tag {tag}{of}"),
            (Lang::En, _) => format!("{op} #{seq} from {peer}, tag {tag}{of}"),
            (Lang::Ko, "send") => format!("{op} #{seq}(받는 쪽 {peer}, 태그 {tag}{of})"),
            (Lang::Ko, _) => format!("{op} #{seq}(보내는 쪽 {peer}, 태그 {tag}{of})"),
        }
    }

    /// The member of this number in the group.
    pub(super) fn member(&self, place: u64) -> Option<&Member<'a>> {
        self.members.get(usize::try_from(place).ok()?)
    }

    /// Any member's record of this number, for its words.
    pub(super) fn record(&self, seq: u64) -> Option<&'a Record> {
        self.members.iter().find_map(|member| member.record(seq))
    }

    /// The same by its number, of any member's record of it.
    pub(super) fn op(&self, seq: u64) -> String {
        match self.record(seq) {
            Some(record) => self.operation(record),
            None => {
                let of = self.of();
                say!(self.lang, "operation #{seq}{of}", "연산 #{seq}{of}")
            }
        }
    }

    /// "all-reduce #12 (bucket 3, step 812) of group dp0".
    fn operation(&self, record: &Record) -> String {
        let bucket = record
            .bucket
            .map(|bucket| say!(self.lang, "bucket {bucket}", "버킷 {bucket}"));
        let step = record
            .step
            .map(|step| say!(self.lang, "step {step}", "스텝 {step}"));
        let marks: Vec<String> = bucket.into_iter().chain(step).collect();
        let marks = match marks.is_empty() {
            true => String::new(),
            false => format!(" ({})", marks.join(", ")),
        };
        format!("{} #{}{marks}{}", record.op, record.seq, self.of())
    }

    /// " of group dp0"; the group of all ranks goes without saying.
    pub(super) fn of(&self) -> String {
        match self.name {
            "world" => String::new(),
            name => say!(self.lang, " of group {name}", ", 그룹 {name}"),
        }
    }
}

impl<'a> Member<'a> {
    /// The rank's operations that all members of the group take part in.
    pub(super) fn records(&self) -> impl Iterator<Item = &'a Record> + use<'a> {
        self.group.map_or(&[][..], |group| &group.records).iter()
    }

    /// The rank's sends and receives.
    pub(super) fn p2p(&self) -> impl Iterator<Item = &'a Record> + use<'a> {
        self.group.map_or(&[][..], |group| &group.p2p).iter()
    }

    pub(super) fn record(&self, seq: u64) -> Option<&'a Record> {
        let records = &self.group?.records;
        let place = records.binary_search_by_key(&seq, |record| record.seq);
        Some(&records[place.ok()?])
    }

    /// The operation that the rank is in, or was in when the group failed.
    pub(super) fn open(&self) -> Option<&'a Record> {
        self.records().find(|record| record.is_open())
    }

    /// The first operation that the rank has not finished; nothing if its recorder was off.
    pub(super) fn next(&self) -> Option<u64> {
        let group = self.group?;
        if group.records.is_empty() {
            return (group.submitted == 0).then_some(1);
        }
        let unfinished = self
            .records()
            .find(|record| record.state != paceline_collective::flight::State::Finished);
        let last = self.records().last();
        unfinished
            .map(|record| record.seq)
            .or(last.map(|record| record.seq.saturating_add(1)))
    }

    /// Number of the last operation that the rank has finished.
    pub(super) fn finished(&self) -> Option<u64> {
        self.next().map(|next| next.saturating_sub(1))
    }

    /// How long the rank has been in an operation, up to its end or the dump.
    pub(super) fn waited(&self, record: &Record) -> Duration {
        let taken = self.dump.map_or(0, |dump| dump.taken_ns);
        let until = record.ended_ns.unwrap_or(taken);
        Duration::from_nanos(until.saturating_sub(record.started_ns.unwrap_or(until)))
    }

    /// When the rank joined an operation, since 1970.
    pub(super) fn joined_unix_ns(&self, record: &Record) -> u64 {
        match (self.dump, record.started_ns) {
            (Some(dump), Some(started)) => dump.unix_ns(started),
            _ => u64::MAX,
        }
    }
}

/// Which of two failures to believe: what a rank saw itself before what it was told, then the earlier one.
pub(super) fn precedence(dump: &Dump, failure: &Failure) -> (bool, u64, usize) {
    let was_told = failure.kind == FailureKind::Aborted;
    (was_told, dump.unix_ns(failure.at_ns), dump.rank)
}

/// "rank 3" or "ranks 0, 1, 4".
pub(super) fn named(ranks: &[usize], lang: Lang) -> String {
    match lang {
        Lang::En => Ranks(ranks).to_string(),
        Lang::Ko => format!(
            "랭크 {}",
            ranks
                .iter()
                .map(usize::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        ),
    }
}

/// "60.0 s", with more digits where it is short.
pub(super) fn seconds(duration: Duration, lang: Lang) -> String {
    if duration < Duration::from_millis(100) {
        return format!("{:.1} ms", duration.as_secs_f64() * 1e3);
    }
    let text = Seconds(duration).to_string();
    match lang {
        Lang::En => text,
        Lang::Ko => text.replace(" s", "초"),
    }
}
