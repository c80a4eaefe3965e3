//! Jobs that went wrong, and what the dumps of their ranks come to.

mod forming;
mod pairs;

use super::*;
use paceline_collective::flight::{FORMAT, GroupDump, Record, State};

const SECOND: u64 = 1_000_000_000;
/// When every dump of these tests was taken, after its rank's start.
const TAKEN: u64 = 100 * SECOND;

/// One rank's dump; its start was at 1000 s since 1970.
fn dump(rank: usize, world: usize, groups: Vec<GroupDump>) -> Dump {
    Dump {
        paceline_flight: FORMAT,
        version: "0.1.0".into(),
        job: "j".into(),
        run_id: "none".into(),
        restart: 0,
        rank,
        world,
        host: "b".into(),
        pid: 4710 + rank as u32,
        taken_unix_ns: 1000 * SECOND + TAKEN,
        taken_ns: TAKEN,
        doing: format!("is in the data loader at step 812 since {rank} s"),
        groups,
    }
}

fn group(name: &str, ranks: &[usize], records: Vec<Record>) -> GroupDump {
    GroupDump {
        name: name.into(),
        ranks: ranks.into(),
        transport: "shm".into(),
        submitted: records.last().map_or(0, |record| record.seq),
        forming: None,
        failure: None,
        records,
        p2p: vec![],
        unclaimed: vec![],
    }
}

/// A job of one group; `records` are its ranks'.
fn job(records: Vec<Vec<Record>>) -> Vec<Dump> {
    let world = records.len();
    let ranks: Vec<usize> = (0..world).collect();
    let dumps = records.into_iter().enumerate();
    dumps
        .map(|(rank, records)| dump(rank, world, vec![group("world", &ranks, records)]))
        .collect()
}

fn record(seq: u64, state: State) -> Record {
    let joined = state != State::Submitted;
    Record {
        seq,
        op: "all-reduce".into(),
        reduce: Some("sum".into()),
        dtype: Some("f32".into()),
        elements: 64,
        bytes: 256,
        bucket: None,
        step: None,
        root: None,
        peer: None,
        tag: None,
        leaves: Some(4),
        algorithm: "direct".into(),
        state,
        submitted_ns: 30 * SECOND,
        started_ns: joined.then_some(40 * SECOND),
        arrived_ns: (state == State::Finished).then_some(41 * SECOND),
        ended_ns: (state == State::Finished).then_some(42 * SECOND),
    }
}

/// Operations `first..=last`, all finished.
fn finished(first: u64, last: u64) -> Vec<Record> {
    (first..=last)
        .map(|seq| record(seq, State::Finished))
        .collect()
}

/// Operations up to `last`, and one more that is waited in.
fn waiting(last: u64) -> Vec<Record> {
    let mut records = finished(1, last);
    records.push(record(last + 1, State::Started));
    records
}

/// The same failure on each of these ranks, in the first group; the first rank had it first.
fn fail(dumps: &mut [Dump], ranks: &[usize], kind: FailureKind, text: &str, culprit: usize) {
    for (later, rank) in (0..).zip(ranks) {
        let dump = dumps.iter_mut().find(|dump| dump.rank == *rank).unwrap();
        dump.groups[0].failure = Some(Failure {
            kind,
            text: text.into(),
            culprits: vec![culprit],
            at_ns: TAKEN - SECOND + later,
        });
    }
}

/// The first finding is this one, and a fault unless nothing diverged.
#[track_caller]
fn check(dumps: &[Dump], cause: Cause, culprits: &[usize], sentence: &str) -> FlightReport {
    let diagnosis = diagnose(dumps, Lang::En);
    let first = &diagnosis.findings[0];
    assert_eq!(first.sentence, sentence);
    assert_eq!((first.cause, &*first.culprits), (cause, culprits));
    let harmless = matches!(cause, Cause::Nothing | Cause::Slow);
    assert_eq!(diagnosis.has_fault(), !harmless);
    diagnosis
}

/// One of the details of the first finding contains these words.
#[track_caller]
fn detail(diagnosis: &FlightReport, words: &str) {
    let details = &diagnosis.findings[0].details;
    assert!(details.iter().any(|d| d.contains(words)), "{details:?}");
}

#[test]
fn a_damaged_dump_that_is_accepted_is_still_diagnosed() {
    let mut records = waiting(2);
    records[2].ended_ns = Some(43 * SECOND);
    let mut dumps = job(vec![records, finished(1, 2)]);
    fail(&mut dumps, &[0], FailureKind::Deadline, "too late", 1);
    dumps[0].groups[0].p2p = finished(1, 1);
    let bytes = dumps[0].to_json();
    let mut accepted = 0;
    for place in 0..bytes.len() {
        for byte in [b'0', b'9', b'-', b' ', b'a', b'"', 0xff] {
            let mut damaged = bytes.clone();
            damaged[place] = byte;
            if let Ok(damaged) = Dump::parse(&damaged) {
                accepted += 1;
                let report = diagnose(&[damaged, dumps[1].clone()], Lang::En);
                assert!(!report.findings.is_empty());
            }
        }
    }
    assert!(accepted > 0);
}

#[test]
fn nothing_is_found_where_all_finished_the_same() {
    check(
        &job(vec![finished(1, 4411); 4]),
        Cause::Nothing,
        &[],
        "all 4 ranks finished the same 4411 operations; nothing diverged",
    );
    check(&[], Cause::Nothing, &[], "there is no record of any rank");
}

#[test]
fn dumps_of_a_job_that_runs_are_not_of_one_moment() {
    let mut dumps = job(vec![finished(1, 9), waiting(9), finished(1, 10)]);
    // Waited for less than 10 s when the dump was taken.
    dumps[1].groups[0].records[9].started_ns = Some(TAKEN - SECOND);
    check(
        &dumps,
        Cause::Nothing,
        &[],
        "all 3 ranks finished 9 to 10 operations, in the same order; nothing diverged",
    );
}

#[test]
fn a_rank_that_never_came_is_named_and_not_those_that_waited() {
    let mut late = waiting(4410);
    let last = late.last_mut().unwrap();
    (last.bucket, last.step) = (Some(3), Some(812));
    let mut dumps = job(vec![late.clone(), late.clone(), finished(1, 4410), late]);
    let text = "all-reduce #4411 timed out after 60 s on rank 0: rank 2 is in the data loader";
    fail(&mut dumps, &[0, 1, 2, 3], FailureKind::Deadline, text, 2);
    let diagnosis = check(
        &dumps,
        Cause::NeverJoined,
        &[2],
        "rank 2 (host b, pid 4712) never joined all-reduce #4411 (bucket 3, step 812): its last finished operation is \
         #4410; ranks 0, 1, 3 waited in #4411 for 60 s",
    );
    detail(&diagnosis, "is in the data loader at step 812 since 2 s");
    detail(&diagnosis, "rank 0 says: all-reduce #4411 timed out");
    let states: Vec<&str> = diagnosis.ranks.iter().map(|r| r.state.as_str()).collect();
    assert_eq!(states[0], "in all-reduce #4411 (bucket 3, step 812)");
    assert_eq!(states[2], "is in the data loader at step 812 since 2 s");
    let finished: Vec<Option<u64>> = diagnosis.ranks.iter().map(|r| r.finished).collect();
    assert_eq!(finished, [Some(4410); 4]);
}

#[test]
fn what_a_rank_saw_itself_is_believed_before_what_it_was_told() {
    let mut dumps = job(vec![waiting(3), finished(1, 3), waiting(3)]);
    // Rank 1 wrote its record before the rank that told it.
    let told = "rank 0 gave up: all-reduce #4 timed out";
    fail(&mut dumps, &[1, 2], FailureKind::Aborted, told, 1);
    fail(
        &mut dumps,
        &[0],
        FailureKind::Deadline,
        "all-reduce #4 timed out",
        1,
    );
    dumps[0].groups[0].failure.as_mut().unwrap().at_ns += SECOND / 2;
    detail(
        &diagnose(&dumps, Lang::En),
        "rank 0 says: all-reduce #4 timed out",
    );
}

#[test]
fn a_wait_that_nobody_calls_a_failure_is_one_once_it_is_long() {
    check(
        &job(vec![waiting(0), vec![], vec![]]),
        Cause::NeverJoined,
        &[1, 2],
        "ranks 1, 2 never joined all-reduce #1: it is the first operation of the group; rank 0 waited in #1 for 60 s",
    );
}

#[test]
fn an_operation_that_is_queued_is_not_joined() {
    let mut behind = finished(1, 3);
    behind.push(record(4, State::Submitted));
    let mut dumps = job(vec![waiting(3), behind]);
    fail(&mut dumps, &[0], FailureKind::Deadline, "too late", 1);
    check(
        &dumps,
        Cause::NeverJoined,
        &[1],
        "rank 1 (host b, pid 4711) never joined all-reduce #4: its last finished operation is #3; rank 0 waited in #4 \
         for 60 s",
    );
}

#[test]
fn of_ranks_at_different_operations_the_one_behind_is_named() {
    // The root of a broadcast goes on before all have come.
    let mut dumps = job(vec![waiting(11), finished(1, 9), finished(1, 11)]);
    fail(&mut dumps, &[0], FailureKind::Deadline, "too late", 1);
    check(
        &dumps,
        Cause::NeverJoined,
        &[1],
        "rank 1 (host b, pid 4711) never joined all-reduce #10: its last finished operation is #9; rank 0 waited in \
         #12 for 60 s",
    );
}

#[test]
fn the_odd_call_is_named_with_both_calls() {
    let mut odd = waiting(6);
    let last = odd.last_mut().unwrap();
    (last.op, last.reduce, last.root) = ("broadcast".into(), None, Some(0));
    let mut dumps = job(vec![waiting(6), odd, waiting(6), waiting(6)]);
    fail(
        &mut dumps,
        &[0, 1, 2, 3],
        FailureKind::Mismatch,
        "operation #7 differs",
        1,
    );
    let diagnosis = check(
        &dumps,
        Cause::Mismatch,
        &[1],
        "rank 1 called broadcast #7 of 64 f32 where ranks 0, 2, 3 called all-reduce #7 of 64 f32",
    );
    assert_eq!(diagnosis.findings.len(), 1);
}

#[test]
fn lengths_types_and_what_is_only_compared_tell_calls_apart() {
    let with = |change: fn(&mut Record)| {
        let mut odd = waiting(0);
        change(&mut odd[0]);
        job(vec![waiting(0), waiting(0), odd])
    };
    check(
        &with(|record| record.elements = 65),
        Cause::Mismatch,
        &[2],
        "rank 2 called all-reduce #1 of 65 f32 where ranks 0, 1 called all-reduce #1 of 64 f32",
    );
    check(
        &with(|record| record.dtype = Some("f64".into())),
        Cause::Mismatch,
        &[2],
        "rank 2 called all-reduce #1 of 64 f64 where ranks 0, 1 called all-reduce #1 of 64 f32",
    );
    check(
        &with(|record| record.leaves = Some(8)),
        Cause::Mismatch,
        &[2],
        "rank 2 called all-reduce #1 of 64 f32 (reduction sum, leaves 8) where ranks 0, 1 called all-reduce #1 of 64 \
         f32 (reduction sum, leaves 4)",
    );
}

#[test]
fn of_two_ranks_that_differ_nobody_is_to_blame() {
    let mut other = waiting(0);
    other[0].elements = 1;
    check(
        &job(vec![waiting(0), other]),
        Cause::Mismatch,
        &[],
        "the ranks differ in operation #1: rank 0 called all-reduce #1 of 64 f32; rank 1 called all-reduce #1 of 1 f32",
    );
}

#[test]
fn calls_in_another_order_left_out_or_too_many_are_recognised() {
    // What each rank called as #1, #2, #3, by length; the queue shows what comes behind the failure.
    let calls = |lengths: [u64; 3]| {
        let mut records = vec![
            record(1, State::Started),
            record(2, State::Submitted),
            record(3, State::Submitted),
        ];
        records
            .iter_mut()
            .zip(lengths)
            .for_each(|(r, n)| r.elements = n);
        records
    };
    let with = |odd| {
        let right = || calls([10, 20, 30]);
        diagnose(&job(vec![right(), calls(odd), right()]), Lang::En)
    };
    detail(
        &with([20, 10, 30]),
        "rank 1 called #1 and #2 in the other order",
    );
    detail(
        &with([20, 30, 40]),
        "rank 1 left out an operation: its #1 is what rank 0 has as #2",
    );
    detail(
        &with([5, 10, 20]),
        "rank 1 called one operation too many: its #2 is what rank 0 has as #1",
    );
    assert_eq!(with([7, 8, 9]).findings[0].details, Vec::<String>::new());
}

#[test]
fn the_first_of_two_differences_counts() {
    let (mut early, mut late) = (finished(1, 9), finished(1, 9));
    early[2].elements = 1;
    late[7].elements = 1;
    let diagnosis = diagnose(
        &job(vec![finished(1, 9), late, early, finished(1, 9)]),
        Lang::En,
    );
    let first = &diagnosis.findings[0];
    assert_eq!((first.seq, &*first.culprits), (Some(3), &[2][..]));
}

#[test]
fn a_dead_rank_has_no_record_and_the_others_say_why() {
    let mut dumps = job(vec![waiting(11), waiting(11), finished(1, 11), vec![]]);
    dumps.pop();
    let text = "rank 3 (host b, pid 8) died while this rank was in all-reduce #12";
    fail(&mut dumps, &[0, 1, 2], FailureKind::Died, text, 3);
    // Rank 2 computed and had not come yet, which is no fault of its.
    let diagnosis = check(
        &dumps,
        Cause::NoRecord,
        &[3],
        "rank 3 left no record: it died or was killed before it could write; rank 0 says: rank 3 (host b, pid 8) died \
         while this rank was in all-reduce #12; ranks 0, 1 waited in all-reduce #12 for 60 s",
    );
    assert_eq!(diagnosis.notes, ["there is no record of rank 3"]);
    assert_eq!(diagnosis.ranks[3].state, "left no record");
}

#[test]
fn a_death_while_all_compute_is_known_from_the_errors() {
    let mut dumps = job(vec![finished(1, 5), finished(1, 5), vec![]]);
    dumps.pop();
    fail(
        &mut dumps,
        &[1, 0],
        FailureKind::Died,
        "rank 2 (host b, pid 8) died",
        2,
    );
    let diagnosis = check(
        &dumps,
        Cause::NoRecord,
        &[2],
        "rank 2 left no record: it died or was killed before it could write; rank 1 says: rank 2 (host b, pid 8) died",
    );
    detail(
        &diagnosis,
        "the 2 ranks of 3 that left a record finished the same 5 operations",
    );
}

#[test]
fn ranks_without_a_record_and_without_a_word_about_them_are_suspected_only() {
    let mut dumps = job(vec![waiting(1), vec![], vec![]]);
    dumps.truncate(1);
    fail(&mut dumps, &[0], FailureKind::Deadline, "too late", 0);
    dumps[0].groups[0]
        .failure
        .as_mut()
        .unwrap()
        .culprits
        .clear();
    check(
        &dumps,
        Cause::NoRecord,
        &[1, 2],
        "ranks 1, 2 left no record, and no other rank says why; rank 0 waited in all-reduce #2 for 60 s",
    );
}

#[test]
fn a_rank_that_left_in_order_is_told_from_one_that_died() {
    let mut dumps = job(vec![waiting(5), vec![]]);
    dumps.pop();
    let text = "rank 1 left the group after operation #5, while all-reduce #6 needs it";
    fail(&mut dumps, &[0], FailureKind::Left, text, 1);
    check(
        &dumps,
        Cause::NoRecord,
        &[1],
        "rank 1 left no record: it left while needed; rank 0 says: rank 1 left the group after operation #5, while \
         all-reduce #6 needs it; rank 0 waited in all-reduce #6 for 60 s",
    );
}

#[test]
fn a_rank_that_panicked_is_named_although_another_had_not_come_either() {
    let mut dumps = job(vec![waiting(5), finished(1, 5), finished(1, 5)]);
    fail(
        &mut dumps,
        &[0, 2],
        FailureKind::Aborted,
        "rank 1 gave up: it panicked",
        1,
    );
    fail(
        &mut dumps,
        &[1],
        FailureKind::GaveUp,
        "rank 1 gave up: it panicked",
        1,
    );
    check(
        &dumps,
        Cause::GaveUp,
        &[1],
        "rank 1 gave up: it panicked (host b, pid 4711); rank 0 waited in all-reduce #6 for 60 s",
    );
}

#[test]
fn a_rank_that_gave_up_while_nobody_waited_is_named_too() {
    let mut dumps = job(vec![finished(1, 5), finished(1, 5)]);
    let text = "rank 0 gave up: the loss is not a number";
    fail(&mut dumps, &[1], FailureKind::Aborted, text, 0);
    fail(&mut dumps, &[0], FailureKind::GaveUp, text, 0);
    let diagnosis = check(
        &dumps,
        Cause::GaveUp,
        &[0],
        "rank 0 gave up: the loss is not a number (host b, pid 4710); nobody waited for it",
    );
    detail(&diagnosis, "all 2 ranks finished the same 5 operations");
}

#[test]
fn where_all_have_joined_the_first_error_speaks() {
    let mut dumps = job(vec![waiting(4), waiting(4)]);
    let text = "rank 1 broke the protocol: a head of 7 bytes";
    fail(&mut dumps, &[0, 1], FailureKind::Other, text, 1);
    check(
        &dumps,
        Cause::Stuck,
        &[1],
        "ranks 0, 1 did not finish all-reduce #5 within 60 s, although all 2 ranks of the group had joined it; rank 0 \
         says first: rank 1 broke the protocol: a head of 7 bytes",
    );
}

#[test]
fn a_rank_without_a_record_is_not_suspected_where_all_had_arrived() {
    let mut dumps = job(vec![waiting(4), waiting(4), vec![]]);
    dumps.pop();
    dumps[0].groups[0].records[4].arrived_ns = Some(50 * SECOND);
    let diagnosis = diagnose(&dumps, Lang::En);
    assert_eq!(diagnosis.findings[0].cause, Cause::Stuck);
    assert_eq!(diagnosis.findings[0].culprits, Vec::<usize>::new());
}

#[test]
fn an_error_that_no_record_shows_is_repeated() {
    let mut dumps = job(vec![finished(1, 5), finished(1, 5)]);
    let text = "the launcher ended the job: out of time";
    fail(&mut dumps, &[1, 0], FailureKind::Revoked, text, 0);
    check(
        &dumps,
        Cause::Failed,
        &[0],
        "the launcher ended the job: out of time (in the words of rank 1)",
    );
}

#[test]
fn a_ring_that_has_moved_on_is_said_to_know_nothing() {
    check(
        &job(vec![waiting(1900), finished(3000, 4023)]),
        Cause::Wrapped,
        &[],
        "what rank 1 (host b, pid 4711) called as all-reduce #1901 is not known, because it kept only later operations; \
         rank 0 waited in it for 60 s",
    );
}

#[test]
fn a_recorder_that_was_off_is_noted() {
    let mut dumps = job(vec![waiting(4), vec![]]);
    dumps[1].groups[0].submitted = 4;
    let diagnosis = diagnose(&dumps, Lang::En);
    assert_eq!(diagnosis.findings[0].cause, Cause::NoRecord);
    assert_eq!(
        diagnosis.notes,
        ["rank 1 recorded no operations of group world: PACELINE_FLIGHT_RECORDS is 0"]
    );
}

#[test]
fn a_rank_that_is_stuck_in_another_group_is_followed_there() {
    let open = |seq, since| {
        let mut records = finished(1, seq - 1);
        let mut last = record(seq, State::Started);
        last.started_ns = Some(since);
        records.push(last);
        records
    };
    let mut broadcast = open(31, 39 * SECOND);
    broadcast[30].op = "broadcast".into();
    let dumps = vec![
        dump(0, 6, vec![group("dp1", &[0, 2], open(9, 40 * SECOND))]),
        dump(
            2,
            6,
            vec![
                group("dp1", &[0, 2], finished(1, 8)),
                group("pp0", &[2, 5], broadcast),
            ],
        ),
        dump(5, 6, vec![group("pp0", &[2, 5], finished(1, 30))]),
    ];
    let diagnosis = check(
        &dumps,
        Cause::NeverJoined,
        &[5],
        "rank 5 (host b, pid 4715) never joined broadcast #31 of group pp0: its last finished operation is #30; rank 2 \
         waited in #31 for 61 s",
    );
    detail(
        &diagnosis,
        "rank 2 is not in all-reduce #9 of group dp1 because it waits in broadcast #31 of group pp0 for rank 5",
    );
    assert_eq!(diagnosis.findings.len(), 1, "who waits is not to blame");
}

#[test]
fn a_sound_group_that_was_at_work_when_another_failed_is_not_suspected() {
    let all = [0, 1, 2];
    let mut dumps = vec![
        dump(
            0,
            3,
            vec![
                group("world", &all, finished(1, 4)),
                // Rank 1 would have come, had rank 2 lived.
                group("tp", &[0, 1], waiting(7)),
            ],
        ),
        dump(
            1,
            3,
            vec![
                group("world", &all, waiting(4)),
                group("tp", &[0, 1], finished(1, 7)),
            ],
        ),
    ];
    fail(&mut dumps, &[0, 1], FailureKind::Died, "rank 2 died", 2);
    let diagnosis = check(
        &dumps,
        Cause::NoRecord,
        &[2],
        "rank 2 left no record: it died or was killed before it could write; rank 0 says: rank 2 died; rank 1 waited in \
         all-reduce #5 for 60 s",
    );
    assert_eq!(diagnosis.findings.len(), 1, "{:?}", diagnosis.findings);
}

#[test]
fn groups_taken_in_different_orders_are_a_deadlock() {
    let both = [0, 1];
    let dumps = vec![
        dump(
            0,
            2,
            vec![
                group("a", &both, waiting(3)),
                group("b", &both, finished(1, 6)),
            ],
        ),
        dump(
            1,
            2,
            vec![
                group("a", &both, finished(1, 3)),
                group("b", &both, waiting(6)),
            ],
        ),
    ];
    let diagnosis = check(
        &dumps,
        Cause::Deadlock,
        &[0, 1],
        "deadlock: rank 0 waits in all-reduce #4 of group a for rank 1, which waits in all-reduce #7 of group b for \
         rank 0",
    );
    detail(&diagnosis, "one order");
    assert_eq!(diagnosis.findings.len(), 1);
}

#[test]
fn a_circle_of_three_groups_is_one_deadlock() {
    let member = |rank: usize, waits: (&str, [usize; 2]), absent: (&str, [usize; 2])| {
        let groups = vec![
            group(waits.0, &waits.1, waiting(0)),
            group(absent.0, &absent.1, vec![]),
        ];
        dump(rank, 3, groups)
    };
    let (x, y, z) = (("x", [0, 1]), ("y", [1, 2]), ("z", [0, 2]));
    check(
        &[member(0, x, z), member(1, y, x), member(2, z, y)],
        Cause::Deadlock,
        &[0, 1, 2],
        "deadlock: rank 0 waits in all-reduce #1 of group x for rank 1, which waits in all-reduce #1 of group y for rank \
         2, which waits in all-reduce #1 of group z for rank 0",
    );
}

#[test]
fn ranks_that_formed_a_group_of_other_ranks_are_named() {
    let dumps = vec![
        dump(0, 3, vec![group("dp", &[0, 1], vec![])]),
        dump(1, 3, vec![group("dp", &[0, 1], vec![])]),
        dump(2, 3, vec![group("dp", &[1, 2], vec![])]),
    ];
    check(
        &dumps,
        Cause::Membership,
        &[],
        "rank 2 formed group dp of other ranks than rank 0, which took ranks 0, 1 into it",
    );
}

#[test]
fn the_rank_that_keeps_coming_last_is_measured_without_comparing_clocks() {
    let mut dumps = job(vec![finished(1, 100); 3]);
    // All saw the last rank come at the same moment; rank 2's clock is an hour off.
    for (rank, wait_ms) in [(0, 14), (1, 12), (2, 0)] {
        for record in &mut dumps[rank].groups[0].records {
            let arrived = record.arrived_ns.unwrap();
            record.started_ns = Some(arrived - wait_ms * 1_000_000);
        }
    }
    dumps[2].taken_unix_ns += 3600 * SECOND;
    dumps[2].groups[0].records[50].started_ns = Some(40 * SECOND);
    let diagnosis = check(
        &dumps,
        Cause::Slow,
        &[2],
        "rank 2 (host b, pid 4712) comes last in 99 of 100 operations, behind the first by 14.0 ms (p50) and 14.0 ms \
         (p99)",
    );
    let lag = diagnosis.ranks[1].lag.unwrap();
    assert_eq!((lag.operations, lag.last), (100, 1));
    assert_eq!(lag.p50_ns, 2_000_000);
}

#[test]
fn a_mismatch_in_one_group_explains_who_waits_for_it_in_another() {
    let mut other = waiting(2);
    other[2].elements = 1;
    let dumps = vec![
        dump(
            0,
            3,
            vec![
                group("a", &[0, 1], waiting(2)),
                group("b", &[0, 2], finished(1, 4)),
            ],
        ),
        dump(1, 3, vec![group("a", &[0, 1], other)]),
        dump(2, 3, vec![group("b", &[0, 2], waiting(4))]),
    ];
    let diagnosis = diagnose(&dumps, Lang::En);
    assert_eq!(diagnosis.findings[0].cause, Cause::Mismatch);
    assert_eq!(diagnosis.findings.len(), 1, "{:?}", diagnosis.findings);
    detail(
        &diagnosis,
        "rank 0 is not in all-reduce #5 of group b because it waits in all-reduce #3 of group a",
    );
}
