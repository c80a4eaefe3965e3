//! Ranks that do something wrong leave records, and the records name the right rank: over real transports, from the
//! failing call to the files and back.

mod common;

use std::path::Path;
use std::time::Duration;

use common::{Wire, envs, options, server};
use paceline_collective::flight::{
    Cause, Diagnosis, FailureKind, Finding, Folder, State, diagnose, dump_files, read_folder,
};
use paceline_collective::{AllReduce, GroupOptions, ProcessGroup, ReduceOp};
use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::page::Phase;
use paceline_rendezvous::token::Token;

/// Transports between processes; what happens on them happens on all.
const WIRES: [Wire; 2] = [Wire::Shm, Wire::Tcp];

/// Runs `rank_main` on `world` ranks that record into `dir`.
fn recorded(
    wire: Wire,
    world: usize,
    dir: &Path,
    timeout: Duration,
    rank_main: impl Fn(ProcessGroup) + Sync,
) {
    let token = Token::generate().unwrap();
    let server = server(wire, &token);
    let options = GroupOptions {
        timeout,
        ..options(wire)
    };
    let (options, rank_main) = (&options, &rank_main);
    std::thread::scope(|scope| {
        for env in envs(world, &server, &token) {
            let env = WorkerEnv {
                flight_dir: Some(dir.display().to_string()),
                ..env
            };
            scope.spawn(move || rank_main(ProcessGroup::connect(env, options).unwrap()));
        }
    });
}

fn all_reduce(group: &ProcessGroup, len: usize) -> Result<(), paceline_collective::Error> {
    group.all_reduce(&mut vec![1.0_f32; len], ReduceOp::Sum)
}

/// The only job in the folder, with a dump of each of these ranks, diagnosed.
#[track_caller]
fn diagnosed(dir: &Path, ranks: &[usize]) -> (Folder, Diagnosis) {
    let folder = read_folder(dir).unwrap();
    assert_eq!(folder.skipped, []);
    assert_eq!(folder.jobs.len(), 1);
    let dumps = &folder.jobs[0].dumps;
    assert_eq!(
        dumps.iter().map(|dump| dump.rank).collect::<Vec<_>>(),
        ranks
    );
    let diagnosis = diagnose(dumps);
    (folder, diagnosis)
}

#[track_caller]
fn assert_first(finding: &Finding, cause: Cause, culprits: &[usize], words: &[&str]) {
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

#[test]
fn a_rank_that_calls_something_else_is_named_by_the_records() {
    for wire in WIRES {
        let dir = tempfile::tempdir().unwrap();
        recorded(wire, 4, dir.path(), Duration::from_secs(30), |group| {
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
    for wire in WIRES {
        let dir = tempfile::tempdir().unwrap();
        let gate = std::sync::Barrier::new(3);
        recorded(wire, 3, dir.path(), Duration::from_millis(500), |group| {
            all_reduce(&group, 8).unwrap();
            group.set_phase(Phase::DataLoader, 812);
            if group.rank() == 2 {
                // Comes when the others have given up; its own call then fails at once and writes its record.
                gate.wait();
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
            "ranks 0, 1 waited in #2 for 0.",
        ];
        assert_first(&diagnosis.findings[0], Cause::NeverJoined, &[2], &words);
        let details = diagnosis.findings[0].details.join("; ");
        assert!(
            details.contains("is in the data loader at step 812"),
            "{details}"
        );
    }
}

#[test]
fn a_rank_that_panics_is_named_and_its_record_is_there() {
    for wire in WIRES {
        let dir = tempfile::tempdir().unwrap();
        recorded(wire, 3, dir.path(), Duration::from_secs(30), |group| {
            let rank = group.rank();
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                all_reduce(&group, 8).unwrap();
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
    for wire in WIRES {
        let dir = tempfile::tempdir().unwrap();
        recorded(wire, 2, dir.path(), Duration::from_secs(30), |group| {
            all_reduce(&group, 8).unwrap();
            if group.rank() == 0 {
                group.abort("the loss is not a number");
            } else {
                // Makes no call any more: the watch thread alone learns of it, and writes.
                let started = std::time::Instant::now();
                let written = || dump_files(dir.path()).is_ok_and(|files| files.len() == 2);
                while !written() {
                    assert!(started.elapsed() < Duration::from_secs(20), "no record");
                    std::thread::yield_now();
                }
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
    recorded(Wire::Shm, 2, dir.path(), Duration::from_secs(30), |group| {
        for _ in 0..3 {
            all_reduce(&group, 8).unwrap();
        }
        dumps.lock().unwrap().push(group.dump_flight());
        group.barrier().unwrap();
    });
    assert_eq!(
        dump_files(dir.path()).unwrap(),
        Vec::<std::path::PathBuf>::new()
    );
    let dumps = dumps.into_inner().unwrap();
    let diagnosis = diagnose(&dumps);
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
    assert!(!diagnose(&[dump]).has_fault());
}
