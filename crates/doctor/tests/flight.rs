//! Ranks that do something wrong leave records, and the records name the right rank: over real transports, from the
//! failing call to the files and back.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use paceline_collective::flight::{FailureKind, State};
use paceline_collective::{AllReduce, GroupOptions, ProcessGroup, ReduceOp, Transport};
use paceline_doctor::flight::{
    Cause, Diagnosis, FlightReport, Folder, diagnose, dump_files, read_folder,
};
use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::page::Phase;
use paceline_rendezvous::store::Server;
use paceline_rendezvous::token::Token;
use paceline_testing::{Meeting, seconds_after, wait_until};
use paceline_words::Lang;

/// Transports between processes; what happens on them happens on all.
const TRANSPORTS: [Transport; 2] = [Transport::Shm, Transport::Tcp];
/// A deadline that passes: long enough for what comes before the wait, on a busy machine too.
const SHORT: Duration = Duration::from_secs(3);

/// The environments of `world` ranks that meet at `server` and record into `dir`.
fn envs(world: usize, server: &Server, token: &Token, dir: &Path) -> Vec<WorkerEnv> {
    static JOB: AtomicU32 = AtomicU32::new(0);
    let job = JOB.fetch_add(1, Ordering::Relaxed);
    let run_id = format!("flight-{}-{job}", std::process::id());
    let env = |rank| WorkerEnv {
        rank,
        world,
        local_rank: rank,
        local_world: world,
        master_addr: server.addr().ip().to_string(),
        master_port: server.addr().port(),
        store: Some(server.addr().to_string()),
        token: token.clone(),
        token_is_secret: true,
        run_id: run_id.clone(),
        flight_dir: Some(dir.display().to_string()),
        ..WorkerEnv::alone()
    };
    (0..world).map(env).collect()
}

fn options(transport: Transport, timeout: Duration) -> GroupOptions {
    GroupOptions {
        timeout,
        transport,
        arena_bytes: Some(256 << 20),
        ..GroupOptions::default()
    }
}

/// Runs `rank_main` on `world` ranks that record into `dir`.
fn recorded(
    transport: Transport,
    world: usize,
    dir: &Path,
    timeout: Duration,
    rank_main: impl Fn(ProcessGroup) + Sync,
) {
    let token = Token::generate().unwrap();
    let server = Server::bind(([127, 0, 0, 1], 0).into(), &token).unwrap();
    let options = options(transport, timeout);
    let (options, rank_main) = (&options, &rank_main);
    std::thread::scope(|scope| {
        for env in envs(world, &server, &token, dir) {
            scope.spawn(move || rank_main(ProcessGroup::connect(env, options).unwrap()));
        }
    });
}

/// Waits until this rank has heard that its group has failed.
fn until_failed(group: &ProcessGroup) {
    wait_until("the group fails", || group.health().is_err());
}

fn all_reduce(group: &ProcessGroup, len: usize) -> Result<(), paceline_collective::Error> {
    group.all_reduce(&mut vec![1.0_f32; len], ReduceOp::Sum)
}

/// The only job in the folder, with a dump of each of these ranks, diagnosed.
#[track_caller]
fn diagnosed(dir: &Path, ranks: &[usize]) -> (Folder, FlightReport) {
    let folder = read_folder(dir).unwrap();
    assert_eq!(folder.skipped, []);
    assert_eq!(folder.jobs.len(), 1);
    let dumps = &folder.jobs[0].dumps;
    assert_eq!(
        dumps.iter().map(|dump| dump.rank).collect::<Vec<_>>(),
        ranks
    );
    let diagnosis = diagnose(dumps, Lang::En);
    (folder, diagnosis)
}

#[track_caller]
fn assert_first(finding: &Diagnosis, cause: Cause, culprits: &[usize], words: &[&str]) {
    let sentence = &finding.sentence;
    assert_eq!(
        (finding.cause, &*finding.culprits),
        (cause, culprits),
        "{sentence}"
    );
    for word in words {
        assert!(sentence.contains(word), "{sentence:?} lacks {word:?}");
    }
}

/// The sentence says behind `words` how long somebody waited.
#[track_caller]
fn assert_waited(finding: &Diagnosis, words: &str) {
    let waited = seconds_after(&finding.sentence, words);
    assert!(waited < 10.0, "{}", finding.sentence);
}

#[test]
fn a_rank_that_calls_something_else_is_named_by_the_records() {
    for transport in TRANSPORTS {
        let dir = tempfile::tempdir().unwrap();
        recorded(transport, 4, dir.path(), Duration::from_secs(30), |group| {
            for _ in 0..6 {
                all_reduce(&group, 64).unwrap();
            }
            let last = match group.rank() {
                1 => group.broadcast(&mut [0.0_f32; 64], 0),
                _ => all_reduce(&group, 64),
            };
            last.unwrap_err();
        });
        let (folder, diagnosis) = diagnosed(dir.path(), &[0, 1, 2, 3]);
        let finding = &diagnosis.findings[0];
        assert_eq!(
            finding.sentence,
            "rank 1 called broadcast #7 of 64 f32 where ranks 0, 2, 3 called all-reduce #7 of 64 f32"
        );
        assert_first(finding, Cause::Mismatch, &[1], &[]);
        for dump in &folder.jobs[0].dumps {
            let group = &dump.groups[0];
            assert_eq!(group.failure.as_ref().unwrap().kind, FailureKind::Mismatch);
            assert_eq!((group.name.as_str(), group.records.len()), ("world", 7));
            assert_eq!(group.ranks, [0, 1, 2, 3]);
            let last = group.records.last().unwrap();
            assert!(last.is_open() && last.started_ns.is_some(), "{last:?}");
        }
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_by_the_records_of_those_that_waited() {
    for transport in TRANSPORTS {
        let dir = tempfile::tempdir().unwrap();
        let gate = Meeting::new(3);
        recorded(transport, 3, dir.path(), Duration::from_secs(30), |group| {
            all_reduce(&group, 8).unwrap();
            group.set_phase(Phase::DataLoader, 812);
            gate.wait();
            group.set_timeout(SHORT);
            if group.rank() == 2 {
                // Comes when the others have given up and it has heard of that: its own call then fails at once and
                // writes its record.
                gate.wait();
                until_failed(&group);
            }
            let buffer = group.buffer::<f32>(8).unwrap();
            let call = AllReduce {
                op: ReduceOp::Sum,
                tree: None,
                len: 8,
                bucket: Some(3),
                step: 812,
            };
            group.all_reduce_async(buffer, call).wait().unwrap_err();
            if group.rank() != 2 {
                gate.wait();
            }
        });
        let (_, diagnosis) = diagnosed(dir.path(), &[0, 1, 2]);
        let words = [
            "never joined all-reduce #2 (bucket 3, step 812): its last finished operation is #1",
            "ranks 0, 1 waited in #2 for ",
        ];
        assert_first(&diagnosis.findings[0], Cause::NeverJoined, &[2], &words);
        assert_waited(&diagnosis.findings[0], words[1]);
        let details = diagnosis.findings[0].details.join("; ");
        assert!(
            details.contains("is in the data loader at step 812"),
            "{details}"
        );
    }
}

#[test]
fn a_message_with_another_tag_than_the_one_that_is_waited_for_is_told() {
    for transport in TRANSPORTS {
        let dir = tempfile::tempdir().unwrap();
        recorded(transport, 3, dir.path(), SHORT, |group| {
            let mut data = [1.0_f32; 8];
            let failed = match group.rank() {
                0 => group.send(&data, 1, 8).and_then(|()| group.barrier()),
                1 => group.recv(&mut data, 0, 7),
                _ => group.barrier(),
            };
            failed.unwrap_err();
        });
        let (folder, diagnosis) = diagnosed(dir.path(), &[0, 1, 2]);
        let words = [
            "rank 1 waited for ",
            " s in recv #1 from rank 0, tag 7, but what rank 0 sent has tag 8, for which nobody asked",
        ];
        assert_first(&diagnosis.findings[0], Cause::Mismatch, &[], &words);
        let p2p = |rank: usize| &folder.jobs[0].dumps[rank].groups[0].p2p;
        let sent = &p2p(0)[0];
        assert_eq!(
            (&*sent.op, sent.peer, sent.tag, sent.bytes, sent.state),
            ("send", Some(1), Some(8), 32, State::Finished)
        );
        assert!(p2p(1)[0].is_open() && p2p(2).is_empty());
    }
}

#[test]
fn a_rank_that_does_not_send_is_named_by_the_records() {
    for transport in TRANSPORTS {
        let dir = tempfile::tempdir().unwrap();
        let gate = Meeting::new(2);
        recorded(transport, 2, dir.path(), SHORT, |group| {
            let mut data = [1.0_f32; 8];
            if group.rank() == 0 {
                // By a ticket, by a call, and from any: all of them are recorded.
                let buffer = group.buffer::<f32>(8).unwrap();
                group.send_async(buffer, 1, 7).unwrap().wait().unwrap();
                group.send(&data, 1, 7).unwrap();
                group.send_bytes(b"three", 1, 9).unwrap();
                group.set_phase(Phase::DataLoader, 812);
                gate.wait();
                // A rank that has left before it knew of a failure has no reason to leave records.
                until_failed(&group);
            } else {
                let buffer = group.buffer::<f32>(8).unwrap();
                group.recv_async(buffer, 0, 7).unwrap().wait().unwrap();
                assert_eq!(group.recv_any(&mut data, 7).unwrap(), 0);
                assert_eq!(group.recv_bytes(0, 9).unwrap(), b"three");
                group.recv(&mut data, 0, 7).unwrap_err();
                gate.wait();
            }
        });
        let (folder, diagnosis) = diagnosed(dir.path(), &[0, 1]);
        let words = [
            "never sent what rank 1 waits for: its last to rank 1 is send #3, tag 9; rank 1 waited for ",
            " in recv #4 from rank 0, tag 7",
        ];
        assert_first(&diagnosis.findings[0], Cause::NeverJoined, &[0], &words);
        assert_waited(&diagnosis.findings[0], words[0]);
        let p2p = &folder.jobs[0].dumps[1].groups[0].p2p;
        let got: Vec<_> = p2p
            .iter()
            .map(|record| (record.peer, record.tag, record.bytes))
            .collect();
        let expect = [(7, 32), (7, 32), (9, 5), (7, 32)];
        assert_eq!(got, expect.map(|(tag, bytes)| (Some(0), Some(tag), bytes)));
    }
}

/// Connects those of `world` ranks that `adapt` wants; none of them forms the group.
fn unformed(
    transport: Transport,
    world: usize,
    dir: &Path,
    adapt: impl Fn(&mut WorkerEnv) -> bool,
) {
    let token = Token::generate().unwrap();
    let server = Server::bind(([127, 0, 0, 1], 0).into(), &token).unwrap();
    let options = options(transport, SHORT);
    std::thread::scope(|scope| {
        for mut env in envs(world, &server, &token, dir) {
            if adapt(&mut env) {
                let options = &options;
                scope.spawn(move || ProcessGroup::connect(env, options).unwrap_err());
            }
        }
    });
}

#[test]
fn a_rank_that_never_comes_is_named_by_the_records_of_those_that_waited() {
    for transport in TRANSPORTS {
        let dir = tempfile::tempdir().unwrap();
        unformed(transport, 3, dir.path(), |env| env.rank != 2);
        let (_, diagnosis) = diagnosed(dir.path(), &[0, 1]);
        let words = [
            "rank 2 (no record) did not come to the group of all ranks: ranks 0, 1 waited ",
            "for all to report in",
        ];
        let finding = &diagnosis.findings[0];
        assert_first(finding, Cause::NeverFormed, &[2], &words);
        assert_waited(finding, words[0]);
        assert!(finding.details[0].ends_with("could not report in; ranks 0, 1 had come"));
    }
}

#[test]
fn ranks_with_other_settings_say_so_in_the_records() {
    let dir = tempfile::tempdir().unwrap();
    unformed(Transport::Tcp, 2, dir.path(), |env| {
        env.sockets_per_peer = Some(1 + env.rank);
        true
    });
    let (_, diagnosis) = diagnosed(dir.path(), &[0, 1]);
    let words = [
        "was not formed",
        "rank 0 asks for 1 sockets per peer, rank 1 for 2",
    ];
    assert_first(&diagnosis.findings[0], Cause::NeverFormed, &[1], &words);
}

#[test]
fn groups_of_one_colour_made_again_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let dumps = std::sync::Mutex::new(Vec::new());
    recorded(
        Transport::Shm,
        3,
        dir.path(),
        Duration::from_secs(30),
        |group| {
            // Rank 2 is in the second one alone, and gives it the name that the others do.
            let first = group.split((group.rank() < 2).then_some(4), 0).unwrap();
            let second = group.split(Some(4), 0).unwrap().unwrap();
            assert_eq!(second.name(), "world/4#2");
            assert!(first.is_none_or(|first| first.name() == "world/4"));
            all_reduce(&second, 8).unwrap();
            dumps.lock().unwrap().push(group.dump_flight());
            group.barrier().unwrap();
        },
    );
    for dump in dumps.into_inner().unwrap() {
        let group = dump.group("world/4#2").unwrap();
        assert_eq!((&*group.ranks, group.records.len()), (&[0, 1, 2][..], 1));
    }
}

#[test]
fn a_rank_that_panics_is_named_and_its_record_is_there() {
    for transport in TRANSPORTS {
        let dir = tempfile::tempdir().unwrap();
        let all_have_reduced = &Meeting::new(3);
        recorded(transport, 3, dir.path(), Duration::from_secs(30), |group| {
            let rank = group.rank();
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                all_reduce(&group, 8).unwrap();
                all_have_reduced.wait();
                assert!(group.rank() != 1, "this rank is meant to panic");
                all_reduce(&group, 8).unwrap_err();
            }));
            assert_eq!(outcome.is_err(), rank == 1);
        });
        let (_, diagnosis) = diagnosed(dir.path(), &[0, 1, 2]);
        let finding = &diagnosis.findings[0];
        assert_first(
            finding,
            Cause::GaveUp,
            &[1],
            &["rank 1 gave up: it panicked (host "],
        );
    }
}

#[test]
fn a_rank_that_computes_writes_its_record_when_a_peer_gives_up() {
    for transport in TRANSPORTS {
        let dir = tempfile::tempdir().unwrap();
        let both_have_reduced = Meeting::new(2);
        recorded(transport, 2, dir.path(), Duration::from_secs(30), |group| {
            all_reduce(&group, 8).unwrap();
            both_have_reduced.wait();
            if group.rank() == 0 {
                group.abort("the loss is not a number");
            } else {
                // Makes no call any more: the watch thread alone learns of it, and writes.
                let written = || dump_files(dir.path()).is_ok_and(|files| files.len() == 2);
                wait_until("a record is written", written);
            }
        });
        let (_, diagnosis) = diagnosed(dir.path(), &[0, 1]);
        let words = ["rank 0 gave up: the loss is not a number"];
        assert_first(&diagnosis.findings[0], Cause::GaveUp, &[0], &words);
    }
}

#[test]
fn a_job_that_ends_well_leaves_no_files_and_a_sound_record() {
    let dir = tempfile::tempdir().unwrap();
    let dumps = std::sync::Mutex::new(Vec::new());
    recorded(
        Transport::Shm,
        2,
        dir.path(),
        Duration::from_secs(30),
        |group| {
            for _ in 0..3 {
                all_reduce(&group, 8).unwrap();
            }
            dumps.lock().unwrap().push(group.dump_flight());
            group.barrier().unwrap();
        },
    );
    assert_eq!(
        dump_files(dir.path()).unwrap(),
        Vec::<std::path::PathBuf>::new()
    );
    let dumps = dumps.into_inner().unwrap();
    let diagnosis = diagnose(&dumps, Lang::En);
    let expect = "all 2 ranks finished the same 3 operations; nothing diverged";
    assert_eq!(diagnosis.findings[0].sentence, expect);
    assert!(!diagnosis.has_fault());
    for record in dumps.iter().flat_map(|dump| &dump.groups[0].records) {
        let times = [record.started_ns, record.arrived_ns, record.ended_ns];
        let [Some(started), Some(arrived), Some(ended)] = times else {
            panic!("{record:?}");
        };
        assert!(record.submitted_ns <= started && started <= ended && arrived <= ended);
        assert_eq!((record.state, record.bytes), (State::Finished, 32));
    }
}

#[test]
fn a_rank_alone_records_too() {
    let group = ProcessGroup::connect(WorkerEnv::alone(), &GroupOptions::default()).unwrap();
    all_reduce(&group, 4).unwrap();
    let dump = group.dump_flight();
    assert_eq!((dump.rank, dump.world), (0, 1));
    assert_eq!(dump.groups[0].records[0].algorithm, "direct");
    assert!(!diagnose(&[dump], Lang::En).has_fault());
}
