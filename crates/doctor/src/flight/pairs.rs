//! Sends and receives that did not end: what the records of both ends tell of one.

use super::view::{Group, Member};
use paceline_collective::flight::{Record, State};
use paceline_words::{Lang, say};

/// A send or receive in which a rank waits.
#[derive(Debug)]
pub(super) struct Pair<'a> {
    pub(super) waiter: &'a Member<'a>,
    pub(super) record: &'a Record,
    pub(super) story: Story<'a>,
}

/// Why it did not end.
#[derive(Debug, PartialEq)]
pub(super) enum Story<'a> {
    /// The other rank is in its part, or has done it.
    OnItsWay,
    /// The other rank did not send it; its last send to the one that waits, and the tags of what it sent and nobody
    /// asked for.
    NeverSent(Option<&'a Record>, Vec<u64>),
    /// The other rank did not receive it.
    NeverTaken,
    /// None of these ranks sent it, by their numbers in the job; and the tags of what nobody asked for.
    FromNobody(Vec<usize>, Vec<u64>),
    /// The other rank has no record.
    Silent,
}

/// All sends and receives of a group in which a rank waits; one for each rank, peer and tag.
pub(super) fn pairs<'a>(group: &'a Group<'a>) -> Vec<Pair<'a>> {
    let mut pairs: Vec<Pair<'a>> = Vec::new();
    for (place, waiter) in group.members.iter().enumerate() {
        for record in waiter.p2p().filter(|record| record.is_open()) {
            let same = |known: &Pair<'_>| {
                let key = |record: &Record| (record.op.clone(), record.peer, record.tag);
                known.waiter.rank == waiter.rank && key(known.record) == key(record)
            };
            if pairs.iter().any(same) {
                continue;
            }
            pairs.extend(
                story(group, place as u64, waiter, record).map(|story| Pair {
                    waiter,
                    record,
                    story,
                }),
            );
        }
    }
    pairs
}

fn story<'a>(
    group: &'a Group<'a>,
    place: u64,
    waiter: &'a Member<'a>,
    record: &'a Record,
) -> Option<Story<'a>> {
    let is_send = record.op == "send";
    let unclaimed = |from: Option<u64>| -> Vec<u64> {
        let unclaimed = waiter.group.map_or(&[][..], |group| &group.unclaimed);
        let theirs = unclaimed
            .iter()
            .filter(|message| from.is_none_or(|from| from == message.from));
        theirs.map(|message| message.tag).collect()
    };
    let Some(peer_place) = record.peer else {
        let idle = |member: &&Member<'_>| {
            member.rank != waiter.rank
                && member.open().is_none()
                && !member.p2p().any(Record::is_open)
        };
        let idle = group.members.iter().filter(idle).map(|member| member.rank);
        return Some(Story::FromNobody(idle.collect(), unclaimed(None)));
    };
    let peer = group.member(peer_place)?;
    if peer.group.is_none() {
        return Some(Story::Silent);
    }
    let other = if is_send { "recv" } else { "send" };
    let theirs = |wanted: &Record| wanted.op == other && wanted.tag == record.tag;
    let answers = |wanted: &Record| {
        theirs(wanted) && wanted.is_open() && wanted.peer.is_none_or(|peer| peer == place)
    };
    if peer.p2p().any(answers) {
        return Some(Story::OnItsWay);
    }
    if is_send {
        return Some(Story::NeverTaken);
    }
    let sent: Vec<&Record> = peer
        .p2p()
        .filter(|theirs| theirs.op == "send" && theirs.peer == Some(place))
        .collect();
    let with_tag = sent.iter().filter(|theirs| theirs.tag == record.tag);
    let got = waiter.p2p().filter(|mine| {
        let same = (mine.peer, mine.tag) == (record.peer, record.tag);
        mine.op == "recv" && same && mine.state == State::Finished
    });
    // The n-th of a tag is for the n-th, where the records know of all.
    if is_whole(peer) && is_whole(waiter) && with_tag.count() > got.count() {
        return Some(Story::OnItsWay);
    }
    Some(Story::NeverSent(
        sent.last().copied(),
        unclaimed(record.peer),
    ))
}

/// Whether none of a rank's sends and receives has been pushed out of its ring.
fn is_whole(member: &Member<'_>) -> bool {
    (1..).zip(member.p2p()).all(|(n, record)| record.seq == n)
}

impl Pair<'_> {
    /// Global ranks that are waited for; none where it is not known who.
    pub(super) fn targets(&self, group: &Group<'_>) -> Vec<usize> {
        match &self.story {
            Story::OnItsWay => Vec::new(),
            Story::FromNobody(idle, _) => idle.clone(),
            _ => self.peer(group).into_iter().collect(),
        }
    }

    /// The rank at the other end, by its number in the job.
    fn peer(&self, group: &Group<'_>) -> Option<usize> {
        Some(group.member(self.record.peer?)?.rank)
    }

    /// "what rank 0 sent has tag 8, for which nobody asked", where that is so.
    pub(super) fn other_tags(&self, group: &Group<'_>) -> Option<String> {
        let lang = group.lang;
        let (Story::NeverSent(_, tags) | Story::FromNobody(_, tags)) = &self.story else {
            return None;
        };
        let sender = match self.peer(group) {
            Some(peer) => say!(lang, "what rank {peer} sent", "랭크 {peer}에서 보낸 메시지"),
            None => say!(lang, "what others sent", "다른 랭크가 보낸 메시지"),
        };
        let list: Vec<String> = tags.iter().take(8).map(u64::to_string).collect();
        let (list, are_many) = (list.join(", "), tags.len() > 1);
        let tags = match (lang, are_many) {
            (Lang::En, true) => format!("the tags {list}"),
            (Lang::En, false) => format!("tag {list}"),
            (Lang::Ko, _) => format!("태그 {list}"),
        };
        (!list.is_empty()).then(|| {
            say!(
                lang,
                "{sender} has {tags}, for which nobody asked",
                "{sender}의 {tags}: 아무도 받으려 하지 않음"
            )
        })
    }

    /// "rank 1 waited for 1.2 s in recv #3 from rank 0, tag 7"
    pub(super) fn waits(&self, group: &Group<'_>, waited: &str) -> String {
        let (op, rank) = (group.p2p_operation(self.record), self.waiter.rank);
        say!(
            group.lang,
            "rank {rank} waited for {waited} in {op}",
            "랭크 {rank}: {op}에서 {waited} 대기"
        )
    }

    /// Who did what; `who` are the ranks that are waited for, in words.
    pub(super) fn sentence(&self, group: &Group<'_>, who: &str, waited: &str) -> String {
        let (me, waits, lang) = (self.waiter.rank, self.waits(group, waited), group.lang);
        let never_sent = say!(
            lang,
            "{who} never sent what rank {me} waits for",
            "{who}: 랭크 {me}에서 기다리는 메시지를 보내지 않음"
        );
        match (&self.story, self.other_tags(group)) {
            (Story::NeverSent(..) | Story::FromNobody(..), Some(tags)) => {
                let mark = if lang == Lang::En { ':' } else { ';' };
                format!("{never_sent}{mark} {tags}; {waits}")
            }
            (Story::NeverSent(Some(last), _), None) => {
                let (tag, seq) = (last.tag.unwrap_or(0), last.seq);
                say!(
                    lang,
                    "{never_sent}: its last to rank {me} is send #{seq}, tag {tag}; {waits}",
                    "{never_sent}; 랭크 {me}에 마지막으로 보낸 것은 send #{seq}, 태그 {tag}; {waits}"
                )
            }
            (Story::NeverSent(None, _), None) => say!(
                lang,
                "{who} never sent rank {me} anything; {waits}",
                "{who}: 랭크 {me}에 아무것도 보내지 않음; {waits}"
            ),
            (Story::FromNobody(idle, _), None) if idle.is_empty() => say!(
                lang,
                "nobody sent what rank {me} waits for; {waits}",
                "랭크 {me}에서 기다리는 메시지를 아무도 보내지 않음; {waits}"
            ),
            (Story::FromNobody(..), None) => format!("{never_sent}; {waits}"),
            (Story::NeverTaken, _) => say!(
                lang,
                "{who} never took what rank {me} sent; {waits}",
                "{who}: 랭크 {me}에서 보낸 메시지를 받지 않음; {waits}"
            ),
            (Story::OnItsWay, _) => {
                let peer = self.peer(group).unwrap_or(me);
                match self.record.op.as_str() {
                    "send" => say!(
                        lang,
                        "{waits}, although rank {peer} receives it",
                        "{waits}. 랭크 {peer}에서는 받고 있음"
                    ),
                    _ => say!(
                        lang,
                        "{waits}, although rank {peer} has sent it",
                        "{waits}. 랭크 {peer}에서는 이미 보냈음"
                    ),
                }
            }
            (Story::Silent, _) => waits,
        }
    }

    /// Whether a rank's failure is about this operation.
    pub(super) fn is_blamed(&self, culprits: &[usize], targets: &[usize]) -> bool {
        culprits.contains(&self.waiter.rank) || targets.iter().any(|rank| culprits.contains(rank))
    }
}
