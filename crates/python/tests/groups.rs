//! The C functions, with threads as ranks.
#![allow(unsafe_code)]

use std::ffi::CStr;

use paceline_python::{
    Call, FAILED, Kind, OK, PENDING, Span, paceline_close, paceline_declare, paceline_forget,
    paceline_host, paceline_join, paceline_next_finished, paceline_next_generation,
    paceline_notify, paceline_outlook, paceline_run, paceline_settle, paceline_subgroup,
    paceline_submit, paceline_text, paceline_wait,
};
use paceline_rendezvous::page::JobPage;
use paceline_rendezvous::store::Server;
use paceline_rendezvous::token::Token;
use paceline_testing::{Meeting, on_threads, wait_until};
use serde_json::{Value, json};

const F32: u32 = 1;
const BOOL: u32 = 8;
const MAX: u32 = 4;

/// One rank's group, by its number.
#[derive(Debug, Clone, Copy)]
struct Rank {
    rank: usize,
    group: u64,
}

fn text() -> Value {
    // SAFETY: the text lives until the next call on this thread.
    let text = unsafe { CStr::from_ptr(paceline_text()) };
    serde_json::from_slice(text.to_bytes()).unwrap()
}

/// A report, if the call failed.
fn checked(status: i32) -> Result<(), Value> {
    match status {
        FAILED => Err(text()),
        status => {
            assert_eq!(status, OK);
            Ok(())
        }
    }
}

fn join(rank: usize, world: usize, meeting: Option<Value>, server: u64) -> Rank {
    join_with(rank, &settings(rank, world, meeting), server)
}

fn join_with(rank: usize, settings: &str, server: u64) -> Rank {
    let mut group = 0;
    // SAFETY: the settings and the number outlive the call.
    let status = unsafe { paceline_join(settings.as_ptr(), settings.len(), server, &mut group) };
    checked(status).unwrap();
    Rank { rank, group }
}

fn settings(rank: usize, world: usize, meeting: Option<Value>) -> String {
    let variables = json!({
        "RANK": rank.to_string(), "WORLD_SIZE": world.to_string(), "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": "", "GROUP_RANK": "",
        "GROUP_WORLD_SIZE": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "PACELINE_STORE": "", "PACELINE_PAGE_FD": "",
        "PACELINE_JOB_TOKEN": "",
    });
    json!({ "variables": variables, "timeout_ms": 20_000, "meeting": meeting }).to_string()
}

/// Runs ranks that are threads of this process, and ends their groups.
fn ranks<R: Send>(world: usize, run: impl Fn(Rank) -> R + Sync) -> Vec<R> {
    let settings = settings(0, world, None);
    let mut server = 0;
    // SAFETY: as above.
    checked(unsafe { paceline_host(settings.as_ptr(), settings.len(), &mut server) }).unwrap();
    let meeting = text();
    assert_eq!(meeting["token"].as_str().unwrap().len(), 64);
    on_threads(0..world, |rank| {
        let server = if rank == 0 { server } else { 0 };
        let rank = join(rank, world, Some(meeting.clone()), server);
        let result = run(rank);
        rank.close("");
        result
    })
}

fn span<T>(numbers: &mut [T]) -> Span {
    Span {
        data: numbers.as_mut_ptr().cast(),
        bytes: size_of_val(numbers),
    }
}

/// A call, and the spans that it points to.
struct Asked {
    call: Call,
    _spans: [Vec<Span>; 2],
}

fn ask(kind: Kind, dtype: u32, peer: i64, inputs: Vec<Span>, outputs: Vec<Span>) -> Asked {
    let call = Call {
        kind: kind as u32,
        dtype,
        reduction: 0,
        tag: 7,
        peer,
        factor: 0.0,
        timeout_ms: 0,
        inputs: inputs.as_ptr(),
        inputs_len: inputs.len(),
        outputs: outputs.as_ptr(),
        outputs_len: outputs.len(),
    };
    let _spans = [inputs, outputs];
    Asked { call, _spans }
}

impl Rank {
    fn run(self, asked: &Asked) -> Result<i64, Value> {
        let mut source = -2;
        // SAFETY: the numbers of the spans outlive the call, and are left alone.
        checked(unsafe { paceline_run(self.group, &asked.call, &mut source) })?;
        Ok(source)
    }

    fn submit(self, asked: &Asked) -> u64 {
        let mut work = 0;
        // SAFETY: as above, until the work is waited for.
        checked(unsafe { paceline_submit(self.group, &asked.call, &mut work) }).unwrap();
        work
    }

    fn close(self, why: &str) {
        // SAFETY: the text outlives the call.
        checked(unsafe { paceline_close(self.group, why.as_ptr(), why.len()) }).unwrap();
    }
}

fn wait(work: u64, timeout_ms: i64) -> i32 {
    // SAFETY: null is allowed.
    unsafe { paceline_wait(work, timeout_ms, std::ptr::null_mut()) }
}

#[test]
fn operations_work_on_pieces_of_memory() {
    ranks(3, |rank| {
        let own = rank.rank as f32;
        // Two pieces that do not follow one another are one tensor.
        let (mut left, mut right) = ([own, 1.0], [10.0 * own]);
        let pieces = vec![span(&mut left), span(&mut right)];
        rank.run(&ask(Kind::AllReduce, F32, -1, vec![], pieces))
            .unwrap();
        assert_eq!((left, right), ([3.0, 3.0], [30.0]));

        let mut flags = [rank.rank == 1, false];
        let mut any = ask(Kind::AllReduce, BOOL, -1, vec![], vec![span(&mut flags)]);
        any.call.reduction = MAX;
        rank.run(&any).unwrap();
        assert_eq!(flags, [true, false]);

        // In place: the input is a part of the output.
        let mut all = [0.0, 0.0, 0.0];
        all[rank.rank] = own + 1.0;
        let input = span(&mut all[rank.rank..=rank.rank]);
        let outputs = (0..3).map(|i| Span {
            data: input.data.wrapping_sub(4 * rank.rank).wrapping_add(4 * i),
            bytes: 4,
        });
        rank.run(&ask(
            Kind::AllGather,
            F32,
            -1,
            vec![input],
            outputs.collect(),
        ))
        .unwrap();
        assert_eq!(all, [1.0, 2.0, 3.0]);

        // Lengths that differ between ranks.
        let mut mine = vec![own; rank.rank];
        let mut of_all = [9.0_f32; 3];
        let (one, two) = of_all.split_at_mut(1);
        let outputs = vec![span::<f32>(&mut []), span(one), span(two)];
        rank.run(&ask(
            Kind::AllGather,
            F32,
            -1,
            vec![span(&mut mine)],
            outputs,
        ))
        .unwrap();
        assert_eq!(of_all, [1.0, 2.0, 2.0]);

        // The numbers of ranks that are not the root stay as they are.
        let mut numbers = [own];
        rank.run(&ask(Kind::Reduce, F32, 2, vec![], vec![span(&mut numbers)]))
            .unwrap();
        assert_eq!(numbers, [if rank.rank == 2 { 3.0 } else { own }]);
    });
}

#[test]
fn sends_and_receives_make_progress_without_their_waits() {
    ranks(2, |rank| {
        let other = 1 - rank.rank as i64;
        // More than may be on its way at a time.
        let mut sent: Vec<Vec<u64>> = (0..3)
            .map(|i| vec![i + 10 * rank.rank as u64; 3 << 20])
            .collect();
        let mut got: Vec<Vec<u64>> = (0..3).map(|_| vec![0; 3 << 20]).collect();
        let sends = sent
            .iter_mut()
            .map(|data| rank.submit(&ask(Kind::Send, 4, other, vec![span(data)], vec![])));
        let sends: Vec<u64> = sends.collect();
        let receives = got
            .iter_mut()
            .map(|data| rank.submit(&ask(Kind::Recv, 4, other, vec![], vec![span(data)])));
        let receives: Vec<u64> = receives.collect();
        for work in sends.iter().chain(&receives) {
            assert_eq!(wait(*work, -1), OK);
            checked(paceline_forget(*work)).unwrap();
        }
        for (i, data) in got.iter().enumerate() {
            assert!(
                data.iter()
                    .all(|number| *number == i as u64 + 10 * other as u64)
            );
        }
        let mut one = [0_u64];
        if rank.rank == 0 {
            assert_eq!(
                rank.run(&ask(Kind::Recv, 4, -1, vec![], vec![span(&mut one)])),
                Ok(1)
            );
        } else {
            rank.run(&ask(Kind::Send, 4, 0, vec![span(&mut [5_u64])], vec![]))
                .unwrap();
        }
    });
}

#[test]
fn works_are_polled_waited_for_and_told_of() {
    ranks(2, |rank| {
        let (mut early, mut late) = ([1.0_f32], [2.0_f32]);
        if rank.rank == 0 {
            let work = rank.submit(&ask(Kind::Recv, F32, 1, vec![], vec![span(&mut early)]));
            assert_eq!(wait(work, 0), PENDING);
            checked(paceline_notify(work)).unwrap();
            rank.run(&ask(Kind::Send, F32, 1, vec![span(&mut late)], vec![]))
                .unwrap();
            let mut told = 0;
            // SAFETY: the number outlives the call.
            checked(unsafe { paceline_next_finished(20_000, &mut told) }).unwrap();
            assert_eq!((told, early), (work, [2.0]));
            assert_eq!((wait(work, 0), wait(work, 0)), (OK, OK));
            checked(paceline_forget(work)).unwrap();
            let report = checked(wait(work, 0)).unwrap_err();
            assert_eq!(report["kind"], "handle");
        } else {
            let receive = ask(Kind::Recv, F32, 0, vec![], vec![span(&mut late)]);
            rank.run(&receive).unwrap();
            rank.run(&ask(Kind::Send, F32, 0, vec![span(&mut late)], vec![]))
                .unwrap();
        }
    });
}

#[test]
fn a_failure_names_the_rank() {
    let reports = ranks(3, |rank| {
        let mut numbers = vec![1.0_f32; if rank.rank == 1 { 5 } else { 4 }];
        let report = rank.run(&ask(
            Kind::AllReduce,
            F32,
            -1,
            vec![],
            vec![span(&mut numbers)],
        ));
        report.unwrap_err()
    });
    for report in reports {
        assert_eq!(
            (&report["kind"], &report["culprits"]),
            (&json!("mismatch"), &json!([1]))
        );
        assert_eq!(report["operation"], "all-reduce");
        assert_eq!(report["hosts"].as_array().unwrap().len(), 1);
        assert!(
            report["message"]
                .as_str()
                .unwrap()
                .contains("rank 1 called all-reduce (sum) of 5 f32"),
            "{report}"
        );
    }
}

#[test]
fn a_rank_that_ends_for_a_reason_tells_it() {
    let reports = ranks(3, |rank| {
        if rank.rank == 0 {
            // SAFETY: the text outlives the call.
            let why = "ValueError: no such file";
            return checked(unsafe {
                paceline_python::paceline_abort(rank.group, why.as_ptr(), why.len())
            })
            .err();
        }
        rank.run(&ask(Kind::Barrier, F32, -1, vec![], vec![])).err()
    });
    assert_eq!(reports[0], None);
    for report in reports[1..].iter().flatten() {
        assert_eq!(
            (&report["kind"], &report["culprits"]),
            (&json!("aborted"), &json!([0]))
        );
        assert_eq!(
            report["message"],
            "rank 0 gave up: ValueError: no such file"
        );
    }
}

#[test]
fn sub_groups_are_formed_by_their_members_alone() {
    ranks(4, |rank| {
        if rank.rank == 1 {
            return;
        }
        let members: [u64; 3] = [3, 0, 2];
        let mut group = 0;
        let name = "odd ones";
        // SAFETY: name, members and number outlive the call.
        let status = unsafe {
            paceline_subgroup(
                rank.group,
                name.as_ptr(),
                name.len(),
                members.as_ptr(),
                3,
                20_000,
                &mut group,
            )
        };
        checked(status).unwrap();
        let part = Rank { group, ..rank };
        let mut numbers = [rank.rank as f32];
        part.run(&ask(
            Kind::Broadcast,
            F32,
            0,
            vec![],
            vec![span(&mut numbers)],
        ))
        .unwrap();
        assert_eq!(numbers, [3.0]);
        part.close("");
    });
}

/// 0 in order, 1 lost, 2 invited, 3 joining.
fn outlook(rank: Rank) -> u32 {
    let mut outlook = 9;
    // SAFETY: the number outlives the call.
    checked(unsafe { paceline_outlook(rank.group, &mut outlook) }).unwrap();
    outlook
}

/// The rank in the generation after this one, and what it is told of its place.
fn succeed(rank: Rank) -> (Rank, Value) {
    let mut group = 0;
    // SAFETY: as above.
    checked(unsafe { paceline_next_generation(rank.group, &mut group) }).unwrap();
    let place = text();
    rank.close("");
    (Rank { group, ..rank }, place)
}

fn settled(rank: Rank, place: u32, completed: u64) -> Value {
    checked(paceline_settle(rank.group, place, completed)).unwrap();
    text()
}

/// Threads that a launcher's page and store take for its ranks. Rank 1 is lost within a commit that rank 2 has completed, and replaced.
#[test]
fn a_group_goes_on_without_a_lost_rank_and_takes_its_replacement_in() {
    const RECOVERS: u32 = 1;
    const ADMITS: u32 = 2;
    const JOINED: u32 = 3;
    let token = Token::generate().unwrap();
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), &token).unwrap();
    let page = JobPage::create_memfd(3).unwrap();
    page.set_recovers();
    let settings = |rank: usize, replacement: u32| {
        let variables = json!({
            "RANK": rank.to_string(), "WORLD_SIZE": "3", "LOCAL_RANK": rank.to_string(), "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1", "PACELINE_STORE": server.addr().to_string(), "PACELINE_PAGE_FD": page.raw_fd().unwrap().to_string(),
            "PACELINE_JOB_TOKEN": token.to_hex(), "PACELINE_REPLACEMENT": replacement.to_string(),
        });
        json!({ "variables": variables, "timeout_ms": 20_000, "meeting": null }).to_string()
    };
    let sum_to = |rank: Rank, expected: f32| {
        let mut ones = [1.0_f32];
        rank.run(&ask(
            Kind::AllReduce,
            F32,
            -1,
            vec![],
            vec![span(&mut ones)],
        ))
        .unwrap();
        assert_eq!(ones, [expected]);
    };
    let (all_are_ready, two_are_left) = (Meeting::new(3), Meeting::new(3));
    on_threads(0..3, |started| {
        let rank = join_with(started, &settings(started, 0), 0);
        checked(paceline_declare(rank.group, RECOVERS)).unwrap();
        checked(paceline_declare(rank.group, ADMITS)).unwrap();
        assert_eq!(outlook(rank), 0);
        all_are_ready.wait();
        let rank = if started == 1 {
            rank.close("");
            page.end_generation(0, 1);
            page.publish_generation(&[0, 2]);
            two_are_left.wait();
            page.clear_slot(1);
            let new = join_with(1, &settings(1, 1), 0);
            let report = new
                .run(&ask(Kind::Barrier, F32, -1, vec![], vec![]))
                .unwrap_err();
            assert_eq!(
                (&report["message"], outlook(new)),
                (
                    &json!("rank 1 replaces a lost rank and has not joined the others yet"),
                    3
                )
            );
            let (new, place) = std::thread::scope(|scope| {
                let joined = scope.spawn(|| succeed(new));
                wait_until("it is ready", || page.slot(1).is_ready_to_join());
                page.invite_generation(&[0, 2, 1]);
                joined.join().unwrap()
            });
            assert_eq!(place, json!({ "rank": 2, "world": 3 }));
            let held = settled(new, 2, 0);
            assert_eq!(held, json!({ "completed": 8, "giver": 0, "new": [2] }));
            assert_eq!(outlook(new), 3);
            checked(paceline_declare(new.group, JOINED)).unwrap();
            new
        } else {
            rank.run(&ask(Kind::Barrier, F32, -1, vec![], vec![]))
                .unwrap_err();
            assert_eq!(outlook(rank), 1);
            let (rank, place) = succeed(rank);
            assert_eq!(place, json!({ "rank": started / 2, "world": 2 }));
            let completed = if started == 2 { 8 } else { 7 };
            let held = settled(rank, 0, completed);
            assert_eq!(held, json!({ "completed": 8, "giver": null, "new": [] }));
            sum_to(rank, 2.0);
            two_are_left.wait();
            // They leave together, because the invitation is over once one has left.
            wait_until("one is invited", || {
                let mut wish = [f32::from(u8::from(outlook(rank) == 2))];
                let mut any = ask(Kind::AllReduce, F32, -1, vec![], vec![span(&mut wish)]);
                any.call.reduction = MAX;
                rank.run(&any).unwrap();
                wish == [1.0]
            });
            let (rank, _) = succeed(rank);
            let held = settled(rank, 1, 8);
            assert_eq!(held["new"], json!([2]));
            rank
        };
        assert_eq!(outlook(rank), 0);
        sum_to(rank, 3.0);
        rank.close("");
    });
}

#[test]
fn without_a_launcher_nothing_follows_and_ranks_that_are_apart_are_named() {
    let reports = ranks(2, |rank| {
        assert_eq!(paceline_declare(rank.group, 1), PENDING);
        let apart = checked(paceline_settle(rank.group, 0, 5 * rank.rank as u64)).unwrap_err();
        let mut next = 0;
        // SAFETY: the number outlives the call.
        let none = checked(unsafe { paceline_next_generation(rank.group, &mut next) }).unwrap_err();
        [apart, none]
    });
    for [apart, none] in reports {
        let says = "rank 0 has completed 0 steps and other agreements, but another rank 5: expected a difference of at most one";
        assert_eq!(apart["message"], says);
        assert!(
            none["message"]
                .as_str()
                .unwrap()
                .contains("--recovery live"),
            "{none}"
        );
    }
}
