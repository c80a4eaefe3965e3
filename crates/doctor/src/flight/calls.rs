//! The first operation at which the ranks of a group called different things.

use std::collections::BTreeSet;

use super::view::{Group, Member, View, named};
use super::{Cause, Diagnosis};
use paceline_collective::flight::Record;
use paceline_words::{Lang, Word, say};

/// What has to be equal on all ranks.
type Signature<'a> = (&'a str, [Option<&'a str>; 2], u64, [Option<u64>; 4]);

/// One finding for each group in which calls differ.
pub(super) fn mismatches(view: &View<'_>) -> Vec<Diagnosis> {
    view.groups.iter().filter_map(mismatch).collect()
}

fn mismatch(group: &Group<'_>) -> Option<Diagnosis> {
    let lang = group.lang;
    let (seq, calls) = first_difference(group)?;
    let mut sides: Vec<(&Record, Vec<usize>)> = Vec::new();
    for (rank, record) in &calls {
        match sides
            .iter_mut()
            .find(|(known, _)| signature(known) == signature(record))
        {
            Some((_, ranks)) => ranks.push(*rank),
            None => sides.push((record, vec![*rank])),
        }
    }
    // The largest side counts as right, as `call::agree` has it; of two equal ones neither.
    sides.sort_by_key(|(_, ranks)| (usize::MAX - ranks.len(), ranks[0]));
    let has_majority = sides[0].1.len() > sides[1].1.len();
    let odd: Vec<usize> = sides[1..].iter().flat_map(|(_, r)| r).copied().collect();
    let words = words(&sides, lang);
    let of = group.of();
    let called = sides.iter().zip(&words).map(|((_, ranks), call)| {
        let ranks = named(ranks, lang);
        match lang {
            Lang::En => format!("{ranks} called {call}"),
            Lang::Ko => format!("{ranks}: {call}"),
        }
    });
    let called: Vec<String> = called.collect();
    let sentence = match (lang, has_majority) {
        (Lang::En, true) => format!("{} where {}{of}", called[1..].join(" and "), called[0]),
        (Lang::En, false) => format!(
            "the ranks differ in operation #{seq}{of}: {}",
            called.join("; ")
        ),
        (Lang::Ko, true) => format!(
            "연산 #{seq}{of}의 호출이 다른 랭크 있음: {}; 나머지 {}",
            called[1..].join("; "),
            called[0]
        ),
        (Lang::Ko, false) => format!(
            "연산 #{seq}{of}의 호출이 랭크마다 다름: {}",
            called.join("; ")
        ),
    };
    let right = sides[0].1[0];
    let details = odd
        .iter()
        .filter_map(|rank| shift(group, right, *rank, seq));
    let since = group.members.iter().filter_map(|member| {
        let record = member.record(seq)?;
        Some(member.joined_unix_ns(record))
    });
    Some(Diagnosis {
        details: details.collect(),
        culprits: if has_majority { odd } else { Vec::new() },
        group: Some(group.name.into()),
        seq: Some(seq),
        since_unix_ns: since.min().unwrap_or(u64::MAX),
        ..Diagnosis::fault(Cause::Mismatch, sentence)
    })
}

/// The lowest number at which two ranks' calls differ, and everybody's call of that number.
fn first_difference<'a>(group: &Group<'a>) -> Option<(u64, Vec<(usize, &'a Record)>)> {
    let numbers: BTreeSet<u64> = group
        .members
        .iter()
        .flat_map(Member::records)
        .map(|record| record.seq)
        .collect();
    numbers.into_iter().find_map(|seq| {
        let call = |member: &Member<'a>| Some((member.rank, member.record(seq)?));
        let mut calls = group.members.iter().filter_map(call);
        let (_, first) = calls.next()?;
        calls
            .any(|(_, record)| signature(record) != signature(first))
            .then(|| (seq, group.members.iter().filter_map(call).collect()))
    })
}

fn signature(record: &Record) -> Signature<'_> {
    (
        &record.op,
        [record.reduce.as_deref(), record.dtype.as_deref()],
        record.elements,
        [record.bucket, record.step, record.root, record.leaves],
    )
}

/// The sides' calls in words; as few as tell them apart.
fn words(sides: &[(&Record, Vec<usize>)], lang: Lang) -> Vec<String> {
    let short: Vec<String> = sides
        .iter()
        .map(|(call, _)| describe(call, false, lang))
        .collect();
    if short.iter().collect::<BTreeSet<_>>().len() == sides.len() {
        return short;
    }
    let long = sides.iter().map(|(call, _)| describe(call, true, lang));
    long.collect()
}

/// "all-reduce #7 of 64 f32", or with all that is compared.
fn describe(record: &Record, all: bool, lang: Lang) -> String {
    let mut text = format!("{} #{}", record.op, record.seq);
    if let Some(dtype) = &record.dtype {
        let elements = record.elements;
        text += &say!(lang, " of {elements} {dtype}", " ({dtype} {elements}개)");
    }
    if all {
        const REDUCTION: Word = Word::new("reduction", "리덕션");
        const BUCKET: Word = Word::new("bucket", "버킷");
        const STEP: Word = Word::new("step", "스텝");
        const ROOT: Word = Word::new("root", "루트");
        const LEAVES: Word = Word::new("leaves", "조각 수");
        let marks = [
            (REDUCTION, record.reduce.clone()),
            (BUCKET, record.bucket.map(|bucket| bucket.to_string())),
            (STEP, record.step.map(|step| step.to_string())),
            (ROOT, record.root.map(|root| root.to_string())),
            (LEAVES, record.leaves.map(|leaves| leaves.to_string())),
        ];
        let marks: Vec<String> = marks
            .into_iter()
            .filter_map(|(name, value)| Some(format!("{} {}", name.of(lang), value?)))
            .collect();
        if !marks.is_empty() {
            text += &format!(" ({})", marks.join(", "));
        }
    }
    text
}

/// How the odd rank's calls relate to the others' from the difference on, where the records show it.
fn shift(group: &Group<'_>, right: usize, odd: usize, seq: u64) -> Option<String> {
    let lang = group.lang;
    let at = |rank: usize, seq: u64| {
        let member = group.members.iter().find(|member| member.rank == rank)?;
        member.record(seq).map(signature)
    };
    // Both sides are needed: two operations that were not recorded are not equal.
    let same = |mine: u64, theirs: u64| {
        at(odd, mine).is_some_and(|call| at(right, theirs).is_some_and(|other| call == other))
    };
    let next = seq.checked_add(1)?;
    let text = if same(seq, next) && same(next, seq) {
        say!(
            lang,
            "rank {odd} called #{seq} and #{next} in the other order",
            "랭크 {odd}: #{seq}, #{next}의 순서를 바꿔 호출함"
        )
    } else if same(seq, next) {
        say!(
            lang,
            "rank {odd} left out an operation: its #{seq} is what rank {right} has as #{next}",
            "랭크 {odd}: 연산 하나를 빠뜨림. 이 랭크의 #{seq} 호출이 랭크 {right}에서는 #{next}"
        )
    } else if same(next, seq) {
        say!(
            lang,
            "rank {odd} called one operation too many: its #{next} is what rank {right} has as #{seq}",
            "랭크 {odd}: 연산을 하나 더 호출함. 이 랭크의 #{next} 호출이 랭크 {right}에서는 #{seq}"
        )
    } else {
        return None;
    };
    Some(text)
}
