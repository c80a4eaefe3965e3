//! The C functions, with threads as ranks.
#![allow(unsafe_code)]

use std::ffi::CStr;

use paceline_python::{
    Call, FAILED, Kind, OK, PENDING, Span, paceline_close, paceline_forget, paceline_host,
    paceline_join, paceline_next_finished, paceline_notify, paceline_run, paceline_subgroup,
    paceline_submit, paceline_text, paceline_wait,
};
use paceline_testing::on_threads;
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
    let settings = settings(rank, world, meeting);
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
