//! Sends and receives that did not end: what the records of both ends tell of one.

use super::view::{Group, Member};
use paceline_collective::Ranks;
use paceline_collective::flight::{Record, State};

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
        let (Story::NeverSent(_, tags) | Story::FromNobody(_, tags)) = &self.story else {
            return None;
        };
        let sender = match self.peer(group) {
            Some(peer) => format!("what rank {peer} sent"),
            None => "what others sent".into(),
        };
        let tags = Tags(tags);
        (!tags.0.is_empty()).then(|| format!("{sender} has {tags}, for which nobody asked"))
    }

    /// "rank 1 waited in recv #3 from rank 0, tag 7 for 1.2 s"
    pub(super) fn waits(&self, group: &Group<'_>, waited: &str) -> String {
        let op = group.p2p_operation(self.record);
        format!("rank {} waited for {waited} in {op}", self.waiter.rank)
    }

    /// Who did what; `who` are the ranks that are waited for, in words.
    pub(super) fn sentence(&self, group: &Group<'_>, who: &str, waited: &str) -> String {
        let (me, waits) = (self.waiter.rank, self.waits(group, waited));
        let never_sent = format!("{who} never sent what rank {me} waits for");
        match (&self.story, self.other_tags(group)) {
            (Story::NeverSent(..) | Story::FromNobody(..), Some(tags)) => {
                format!("{never_sent}: {tags}; {waits}")
            }
            (Story::NeverSent(Some(last), _), None) => {
                let tag = last.tag.unwrap_or(0);
                let seq = last.seq;
                format!("{never_sent}: its last to rank {me} is send #{seq}, tag {tag}; {waits}")
            }
            (Story::NeverSent(None, _), None) => {
                format!("{who} never sent rank {me} anything; {waits}")
            }
            (Story::FromNobody(idle, _), None) if idle.is_empty() => {
                format!("nobody sent what rank {me} waits for; {waits}")
            }
            (Story::FromNobody(..), None) => format!("{never_sent}; {waits}"),
            (Story::NeverTaken, _) => format!("{who} never took what rank {me} sent; {waits}"),
            (Story::OnItsWay, _) => {
                let did = match self.record.op.as_str() {
                    "send" => "receives",
                    _ => "has sent",
                };
                let peer = self.peer(group).unwrap_or(me);
                format!("{waits}, although rank {peer} {did} it")
            }
            (Story::Silent, _) => waits,
        }
    }

    /// Whether a rank's failure is about this operation.
    pub(super) fn is_blamed(&self, culprits: &[usize], targets: &[usize]) -> bool {
        culprits.contains(&self.waiter.rank) || targets.iter().any(|rank| culprits.contains(rank))
    }
}

/// "tag 8" or "the tags 8, 9".
struct Tags<'a>(&'a [u64]);

impl std::fmt::Display for Tags<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            [tag] => write!(f, "tag {tag}"),
            tags => {
                let tags: Vec<usize> = tags.iter().take(8).map(|tag| *tag as usize).collect();
                let list = Ranks(&tags).to_string();
                write!(f, "the tags {}", list.trim_start_matches("ranks "))
            }
        }
    }
}
