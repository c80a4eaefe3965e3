//! Says what went wrong in a job from the dumps of its ranks, any of which may be missing.
//!
//! Ranks that wait are not to blame. Per group, the ranks' records are laid side by side by number: the first number at
//! which calls differ is a mismatch (`calls.rs`); the first that some ranks have joined and others have not makes the
//! former wait for the latter (`waits.rs`). Sends and receives are laid beside those of their other end (`pairs.rs`), and
//! ranks whose group did not come about beside those that came (`forming.rs`). A rank that is waited for may itself wait in another group: the chain is
//! followed to its end, which is the culprit, or around, which is a deadlock. What records cannot tell, the errors do.
//!
//! All of it is a pure function of the dumps. Where they do not suffice it says so instead of guessing.

mod calls;
mod folder;
mod forming;
mod lag;
mod pairs;
mod view;
mod waits;

use std::collections::BTreeSet;

use paceline_collective::flight::{Dump, Failure, FailureKind};
use paceline_words::{Lang, count, say};
use serde::Serialize;

use self::view::{View, named};

pub use self::folder::{Folder, JobDumps, Skipped, dump_files, read_folder};
pub use self::lag::Lag;

/// What the dumps of one job come to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FlightReport {
    /// Ranks of the job; 0 when there is no dump at all.
    pub world: usize,
    /// The first divergence first; never empty.
    pub findings: Vec<Diagnosis>,
    /// What limits the findings, one sentence each.
    pub notes: Vec<String>,
    /// All ranks of the job that a dump speaks of, in order.
    pub ranks: Vec<RankReport>,
}

impl FlightReport {
    /// Whether something is wrong.
    pub fn has_fault(&self) -> bool {
        self.findings.iter().any(|finding| finding.is_fault)
    }
}

/// One thing that the dumps show.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Diagnosis {
    /// What it is.
    pub cause: Cause,
    /// Whether it is a fault, or only worth knowing.
    pub is_fault: bool,
    /// Who did what: one sentence without a full stop.
    pub sentence: String,
    /// What supports it, one sentence each.
    pub details: Vec<String>,
    /// Global ranks to blame, when they are known.
    pub culprits: Vec<usize>,
    /// The group in which it happened.
    pub group: Option<String>,
    /// The operation at which it happened.
    pub seq: Option<u64>,
    /// When it began, since 1970, by the clocks of the ranks' hosts.
    ///
    /// *Units*: ns.
    pub since_unix_ns: u64,
}

impl Diagnosis {
    /// A fault of which only the cause and the sentence are known.
    fn fault(cause: Cause, sentence: String) -> Self {
        Self {
            cause,
            is_fault: true,
            sentence,
            details: Vec::new(),
            culprits: Vec::new(),
            group: None,
            seq: None,
            since_unix_ns: 0,
        }
    }
}

/// What a finding is about, in the order of certainty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// Ranks do not agree who is in a group.
    Membership,
    /// A group did not come about.
    NeverFormed,
    /// Ranks called different operations.
    Mismatch,
    /// Ranks wait for each other in different groups.
    Deadlock,
    /// A rank gave up by itself.
    GaveUp,
    /// Ranks did not join an operation in which others waited.
    NeverJoined,
    /// Ranks that left no record are waited for.
    NoRecord,
    /// All ranks joined an operation and it did not end.
    Stuck,
    /// A rank's ring no longer holds what would tell.
    Wrapped,
    /// The records show no divergence; the first error speaks.
    Failed,
    /// One rank keeps coming last.
    Slow,
    /// Nothing diverged.
    Nothing,
}

/// One rank, for the table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankReport {
    /// Global rank.
    pub rank: usize,
    /// Whether it left a dump.
    pub has_record: bool,
    /// Its host; empty without a dump.
    pub host: String,
    /// Its process; 0 without a dump.
    pub pid: u32,
    /// Number of the last operation that it finished in the group of the first finding.
    pub finished: Option<u64>,
    /// The operation that it was in, or what else it was doing.
    pub state: String,
    /// The first failure that it knows of.
    pub failure: Option<String>,
    /// How late it came to operations.
    pub lag: Option<Lag>,
}

/// Waits shorter than this are no fault where no rank reports one: dumps on demand are not taken at one moment.
const LONG_WAIT_NS: u64 = 10_000_000_000;
/// Ranks that are described one by one; of more only the number is told.
const DESCRIBED_MAX: usize = 8;

/// Says what went wrong in one job. `dumps` are those of its ranks, at most one each, in any order; ranks may be missing.
/// The ranks' own words stay English.
///
/// *Cost*: about one pass over all records for each group.
///
/// # Example
///
/// ```no_run
/// use paceline_doctor::flight::{diagnose, read_folder};
/// use paceline_words::Lang;
///
/// for job in read_folder("flight".as_ref())?.jobs {
///     println!("{}", diagnose(&job.dumps, Lang::En).findings[0].sentence);
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn diagnose(dumps: &[Dump], lang: Lang) -> FlightReport {
    let view = View::new(dumps, lang);
    let mut findings = view.quarrels();
    findings.extend(forming::findings(&view));
    findings.extend(calls::mismatches(&view));
    let settled: BTreeSet<&str> = findings.iter().filter_map(|f| f.group.as_deref()).collect();
    let (waits, chains) = waits::findings(&view, &settled);
    findings.extend(waits);
    if findings.is_empty() {
        findings.extend(by_the_errors(&view));
    }
    findings.sort_by_key(|finding| (finding.since_unix_ns, finding.cause));
    if let Some(first) = findings.first_mut() {
        first.details.extend(chains);
    }
    let lags = lag::of(&view);
    findings.extend(lag::slow(&view, &lags));
    if findings.is_empty() {
        findings.push(nothing(&view));
    }
    let group = findings[0].group.clone();
    FlightReport {
        world: view.world,
        notes: view.notes(),
        ranks: view.ranks(group.as_deref(), &lags),
        findings,
    }
}

/// Failures that no record shows: the ranks' own words, the earliest first.
fn by_the_errors(view: &View<'_>) -> Option<Diagnosis> {
    let failures = view.failures();
    let (_, first_group, first) = failures.first()?;
    let gave_up = failures
        .iter()
        .find(|(dump, _, failure)| has_given_up(dump, failure));
    let (dump, group, failure) = gave_up.unwrap_or(&failures[0]);
    let culprits = failure.culprits.iter().copied();
    let silent: Vec<usize> = culprits.filter(|rank| view.dump(*rank).is_none()).collect();
    let (cause, sentence) = if gave_up.is_some() {
        let place = view.place(dump.rank);
        let text = &failure.text;
        (
            Cause::GaveUp,
            say!(
                view.lang,
                "{text} ({place}); nobody waited for it",
                "{text} ({place}); 기다린 랭크는 없음"
            ),
        )
    } else if silent.is_empty() {
        let (text, rank) = (&first.text, failures[0].0.rank);
        (
            Cause::Failed,
            say!(
                view.lang,
                "{text} (in the words of rank {rank})",
                "{text} (랭크 {rank}의 메시지)"
            ),
        )
    } else {
        (
            Cause::NoRecord,
            no_record(&silent, failure, dump.rank, view.lang),
        )
    };
    let group = if gave_up.is_some() {
        group
    } else {
        first_group
    };
    Some(Diagnosis {
        details: vec![progress(view)],
        culprits: failure.culprits.clone(),
        group: Some((*group).into()),
        since_unix_ns: dump.unix_ns(failure.at_ns),
        ..Diagnosis::fault(cause, sentence)
    })
}

/// Whether a rank says of itself that it gave up.
fn has_given_up(dump: &Dump, failure: &Failure) -> bool {
    failure.kind == FailureKind::GaveUp && failure.culprits.contains(&dump.rank)
}

/// "rank 3 left no record: ..." with what `by` says of it.
fn no_record(silent: &[usize], failure: &Failure, by: usize, lang: Lang) -> String {
    let has_left = failure.kind == FailureKind::Left;
    let why = match (lang, silent.len(), has_left) {
        (Lang::En, 1, true) => "it left while needed",
        (Lang::En, _, true) => "they left while needed",
        (Lang::En, 1, false) => "it died or was killed before it could write",
        (Lang::En, _, false) => "they died or were killed before they could write",
        (Lang::Ko, _, true) => "아직 필요한데 먼저 종료됨",
        (Lang::Ko, _, false) => "기록을 쓰기 전에 죽었거나 강제 종료됨",
    };
    let (ranks, text) = (named(silent, lang), &failure.text);
    say!(
        lang,
        "{ranks} left no record: {why}; rank {by} says: {text}",
        "{ranks}: 기록 없음; {why}; 랭크 {by}의 메시지: {text}"
    )
}

fn nothing(view: &View<'_>) -> Diagnosis {
    Diagnosis {
        is_fault: false,
        group: view.groups.first().map(|group| group.name.to_owned()),
        ..Diagnosis::fault(Cause::Nothing, progress(view))
    }
}

/// How far the ranks came, where nothing diverged.
fn progress(view: &View<'_>) -> String {
    let (lang, here, world) = (view.lang, view.dumps.len(), view.world);
    let who = match (here, world) {
        (0, _) => {
            return say!(
                lang,
                "there is no record of any rank",
                "기록을 남긴 랭크가 없음"
            );
        }
        (1, 1) => say!(lang, "the only rank", "하나뿐인 랭크"),
        _ if here == world => say!(lang, "all {world} ranks", "랭크 {world}개 모두"),
        (1, _) => say!(
            lang,
            "the 1 rank of {world} that left a record",
            "랭크 {world}개 중 기록을 남긴 1개"
        ),
        _ => say!(
            lang,
            "the {here} ranks of {world} that left a record",
            "랭크 {world}개 중 기록을 남긴 {here}개"
        ),
    };
    let range = |group: &view::Group<'_>| {
        let finished = group.members.iter().filter_map(view::Member::finished);
        Some((finished.clone().min()?, finished.max()?))
    };
    let ranges: Vec<(&str, u64, u64)> = view
        .groups
        .iter()
        .filter_map(|group| range(group).map(|(least, most)| (group.name, least, most)))
        .collect();
    match ranges.as_slice() {
        [] => say!(
            lang,
            "{who} recorded no operations",
            "{who}: 기록된 연산이 없음"
        ),
        [(_, least, most)] if least == most => {
            let number = usize::try_from(*least).unwrap_or(usize::MAX);
            let operations = count(lang, number, "operation", "연산");
            say!(
                lang,
                "{who} finished the same {operations}; nothing diverged",
                "{who}: 같은 {operations}를 끝냈고 어긋난 곳이 없음"
            )
        }
        [(_, least, most)] => say!(
            lang,
            "{who} finished {least} to {most} operations, in the same order; nothing diverged",
            "{who}: 연산 {least}~{most}개를 같은 순서로 끝냈고 어긋난 곳이 없음"
        ),
        many => {
            let groups: Vec<String> = many
                .iter()
                .take(DESCRIBED_MAX)
                .map(|(name, least, most)| match least == most {
                    true => say!(lang, "{least} of group {name}", "그룹 {name} {least}개"),
                    false => say!(
                        lang,
                        "{least} to {most} of group {name}",
                        "그룹 {name} {least}~{most}개"
                    ),
                })
                .collect();
            let groups = groups.join(", ");
            say!(
                lang,
                "{who} finished the same operations, {groups}; nothing diverged",
                "{who}: 같은 연산을 끝냈고 어긋난 곳이 없음({groups})"
            )
        }
    }
}

#[cfg(test)]
mod tests;
