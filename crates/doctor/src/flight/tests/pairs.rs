//! Sends and receives that did not end, and what the records of both ends come to.

use super::*;
use paceline_collective::flight::Unclaimed;

/// A send or receive, by number, peer and tag.
fn p2p(op: &str, seq: u64, peer: Option<u64>, tag: u64, state: State) -> Record {
    Record {
        op: op.into(),
        reduce: None,
        peer,
        tag: Some(tag),
        leaves: None,
        ..record(seq, state)
    }
}

/// A job of one group; the ranks have called nothing but sends and receives.
fn messages(p2p: Vec<Vec<Record>>) -> Vec<Dump> {
    let mut dumps = job(vec![vec![]; p2p.len()]);
    for (dump, p2p) in dumps.iter_mut().zip(p2p) {
        dump.groups[0].p2p = p2p;
    }
    dumps
}

const RECV_7: &str = "rank 1 waited for 60 s in recv #2 from rank 0, tag 7";

/// Rank 1 has received a message with tag 7 and waits for another one.
fn receiver() -> Vec<Record> {
    vec![
        p2p("recv", 1, Some(0), 7, State::Finished),
        p2p("recv", 2, Some(0), 7, State::Started),
    ]
}

#[test]
fn a_rank_that_did_not_send_is_named_with_what_it_sent_last() {
    let sent = vec![p2p("send", 1, Some(1), 7, State::Finished)];
    let dumps = messages(vec![sent, receiver(), vec![]]);
    let diagnosis = check(
        &dumps,
        Cause::NeverJoined,
        &[0],
        &format!(
            "rank 0 (host b, pid 4710) never sent what rank 1 waits for: its last to rank 1 is send #1, tag 7; {RECV_7}"
        ),
    );
    detail(
        &diagnosis,
        "rank 0 (host b, pid 4710) is in the data loader",
    );
    assert_eq!(diagnosis.findings.len(), 1);
    assert_eq!(diagnosis.ranks[1].state, "in recv #2 from rank 0, tag 7");
    let nothing = messages(vec![vec![], receiver(), vec![]]);
    check(
        &nothing,
        Cause::NeverJoined,
        &[0],
        &format!("rank 0 (host b, pid 4710) never sent rank 1 anything; {RECV_7}"),
    );
}

#[test]
fn a_message_with_another_tag_is_told_and_of_two_that_wait_nobody_blamed() {
    let sent = |seq, tag| p2p("send", seq, Some(1), tag, State::Finished);
    let mut dumps = messages(vec![vec![sent(1, 7), sent(2, 8)], receiver()]);
    dumps[1].groups[0].unclaimed = vec![Unclaimed {
        from: 0,
        tag: 8,
        messages: 1,
    }];
    let tags = "what rank 0 sent has tag 8, for which nobody asked";
    check(
        &dumps,
        Cause::NeverJoined,
        &[0],
        &format!("rank 0 (host b, pid 4710) never sent what rank 1 waits for: {tags}; {RECV_7}"),
    );
    // The sender waits for the receiver in the next operation of all.
    dumps[0].groups[0].records = waiting(0);
    check(
        &dumps,
        Cause::Mismatch,
        &[],
        &format!("{RECV_7}, but {tags}"),
    );
}

#[test]
fn a_message_that_was_sent_and_did_not_come_is_nobodys_fault() {
    let sent = |seq| p2p("send", seq, Some(1), 7, State::Finished);
    check(
        &messages(vec![vec![sent(1), sent(2)], receiver()]),
        Cause::Stuck,
        &[],
        &format!("{RECV_7}, although rank 0 has sent it"),
    );
    // Where the sender's ring has lost its first ones, nobody can count.
    let dumps = messages(vec![vec![sent(2), sent(3)], receiver()]);
    assert_eq!(
        diagnose(&dumps, Lang::En).findings[0].cause,
        Cause::NeverJoined
    );
}

#[test]
fn whoever_does_not_take_a_message_or_left_no_record_is_named() {
    let full = p2p("send", 1, Some(1), 7, State::Started);
    let waits = "rank 0 waited for 60 s in send #1 to rank 1, tag 7";
    let mut dumps = messages(vec![vec![full], vec![]]);
    check(
        &dumps,
        Cause::NeverJoined,
        &[1],
        &format!("rank 1 (host b, pid 4711) never took what rank 0 sent; {waits}"),
    );
    dumps.truncate(1);
    let diagnosis = diagnose(&dumps, Lang::En);
    let finding = &diagnosis.findings[0];
    assert_eq!(
        (finding.cause, &*finding.culprits),
        (Cause::NoRecord, &[1][..])
    );
}

#[test]
fn ranks_that_receive_from_each_other_are_in_a_deadlock() {
    let recv = |peer| vec![p2p("recv", 1, Some(peer), 7, State::Started)];
    let diagnosis = check(
        &messages(vec![recv(1), recv(0)]),
        Cause::Deadlock,
        &[0, 1],
        "deadlock: rank 0 waits in recv #1 from rank 1, tag 7, which waits in recv #1 from rank 0, tag 7",
    );
    detail(&diagnosis, "one has to send first");
}

#[test]
fn a_receive_from_any_rank_waits_for_those_that_wait_for_nobody() {
    let any = || vec![p2p("recv", 1, None, 7, State::Started)];
    check(
        &messages(vec![any(), vec![], vec![]]),
        Cause::NeverJoined,
        &[1, 2],
        "ranks 1, 2 never sent what rank 0 waits for; rank 0 waited for 60 s in recv #1 from any rank, tag 7",
    );
    check(
        &messages(vec![any(), any()]),
        Cause::Stuck,
        &[],
        "nobody sent what rank 0 waits for; rank 0 waited for 60 s in recv #1 from any rank, tag 7",
    );
}

#[test]
fn a_receive_that_a_rank_happened_to_be_in_explains_nothing() {
    let mut dumps = messages(vec![
        vec![p2p("recv", 1, Some(2), 7, State::Failed)],
        vec![],
        vec![],
        vec![],
    ]);
    dumps[0].groups[0].p2p[0].ended_ns = Some(41 * SECOND);
    fail(&mut dumps, &[0, 2], FailureKind::Died, "rank 1 died", 1);
    dumps.remove(1);
    let diagnosis = diagnose(&dumps, Lang::En);
    assert_eq!(diagnosis.findings[0].culprits, [1]);
    assert_eq!(diagnosis.findings.len(), 1, "{:?}", diagnosis.findings);
}

#[test]
fn a_send_and_its_receive_wait_for_nobody_else() {
    let send = vec![p2p("send", 1, Some(1), 7, State::Started)];
    let recv = vec![p2p("recv", 1, Some(0), 7, State::Started)];
    let diagnosis = diagnose(&messages(vec![send, recv]), Lang::En);
    assert!(
        diagnosis
            .findings
            .iter()
            .all(|f| f.cause == Cause::Stuck && f.culprits.is_empty())
    );
}
