//! Tables of scenes and verdicts.

use std::fmt;

use super::*;

/// The verdict in words.
impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running(None) => write!(f, "running"),
            Self::Running(Some(until)) => {
                write!(f, "running, look again at {} ms", until.as_millis())
            }
            Self::Finished => write!(f, "finished"),
            Self::Waiting { on, until } => {
                write!(
                    f,
                    "waiting until {} ms for rank {on}, which is blamed, to end",
                    until.as_millis()
                )
            }
            Self::AllGoOn { by, because_of } => {
                write!(f, "all go on, says rank {by}")?;
                because_of.map_or(Ok(()), |rank| write!(f, " of rank {rank}"))
            }
            Self::Failed {
                rank,
                fault,
                reported_by,
            } => {
                write!(f, "rank {rank} ")?;
                match fault {
                    Fault::Ended(Ending::Code(code)) => write!(f, "exited with code {code}")?,
                    Fault::Ended(Ending::Signal { number, .. }) => {
                        write!(f, "was killed by signal {number}")?
                    }
                    Fault::LeftEarly => write!(f, "left early")?,
                    Fault::Stalled => write!(f, "stalled")?,
                }
                match reported_by {
                    Some(rank) => write!(f, ", says rank {rank}"),
                    None => Ok(()),
                }
            }
        }
    }
}

fn number(text: &str) -> u64 {
    text.parse()
        .unwrap_or_else(|_| panic!("`{text}` is no number"))
}

fn ms(text: &str) -> Duration {
    Duration::from_millis(number(text))
}

/// One worker in words: `run`, `exit 7 @10`, `signal 9 @10`, then any of `blames 1`, `excused`, `early`,
/// `collective @5`, `stopped 5` (for so many ms, of 100 at most), `waits @5` for the next generation, `out` of the newest one.
fn worker(text: &str) -> WorkerState {
    let mut state = WorkerState::default();
    let mut how = None;
    let mut words = text.split_whitespace();
    while let Some(word) = words.next() {
        let mut argument = || words.next().expect("the word needs an argument");
        match word {
            "run" => {}
            "exit" => how = Some(Ending::Code(number(argument()) as i32)),
            "signal" => {
                how = Some(Ending::Signal {
                    number: number(argument()) as i32,
                    core: false,
                })
            }
            "blames" => state.blames = Some(number(argument()) as usize),
            "collective" => {
                state.in_collective_since = Some(ms(argument().trim_start_matches('@')))
            }
            "stopped" => {
                state.stopped_for = Some(ms(argument()));
                state.stopped_max = Some(ms("100"));
            }
            "waits" => state.waits_since = Some(ms(argument().trim_start_matches('@'))),
            "out" => state.is_out = true,
            "excused" => {
                state
                    .exit
                    .as_mut()
                    .expect("`excused` follows an end")
                    .excused = true
            }
            "early" => {
                state
                    .exit
                    .as_mut()
                    .expect("`early` follows an end")
                    .is_early = true
            }
            at => {
                let how = how.expect("a time follows an end");
                state.exit = Some(Exit {
                    at: ms(at.trim_start_matches('@')),
                    how,
                    excused: false,
                    is_early: false,
                });
            }
        }
    }
    state
}

/// The workers are separated by `|`; `; revoked 1` may follow.
fn check(scene: &str, now_ms: u64, expect: &str) {
    check_with(&Limits::default(), scene, now_ms, expect);
}

fn check_with(limits: &Limits, scene: &str, now_ms: u64, expect: &str) {
    let (workers, revoked) = scene
        .split_once("; revoked ")
        .map_or((scene, None), |(w, r)| (w, Some(r)));
    let workers: Vec<_> = workers.split('|').map(worker).collect();
    let revoked = revoked.map(|rank| number(rank) as usize);
    let verdict = judge(&workers, revoked, Duration::from_millis(now_ms), limits);
    assert_eq!(verdict.to_string(), expect, "{scene} at {now_ms} ms");
}

#[test]
fn a_job_runs_until_the_last_rank_has_ended() {
    check("run | run", 10, "running");
    check("exit 0 @5 | run", 9_000, "running");
    check("exit 0 @5 | exit 0 @7", 10, "finished");
}

#[test]
fn a_rank_that_promised_to_say_when_it_is_done_has_failed_without_that_word() {
    check("exit 0 @5 early", 10, "rank 0 left early");
    check("exit 0 @5 | exit 0 @7 early", 10, "rank 1 left early");
    check(
        "exit 0 @5 early | run blames 0 waits @6",
        10,
        "rank 0 left early",
    );
    check("exit 0 @5 early | exit 7 @7", 10, "rank 0 left early");
    check("exit 0 @5 early excused", 10, "finished");
    check("exit 0 @5 early out | run", 10, "running");
}

#[test]
fn the_first_failure_in_time_is_the_cause() {
    check("exit 7 @10 | run", 10, "rank 0 exited with code 7");
    check("exit 7 @10 | exit 8 @9", 10, "rank 1 exited with code 8");
    check(
        "exit 0 @1 | exit 8 @9 | signal 11 @8",
        10,
        "rank 2 was killed by signal 11",
    );
    check("exit 7 @10 | exit 8 @10", 10, "rank 0 exited with code 7");
    check(
        "exit 7 @10 | signal 9 @10",
        10,
        "rank 1 was killed by signal 9",
    );
}

#[test]
fn a_victim_is_never_the_cause_while_the_rank_it_blames_ends() {
    check(
        "exit 1 @10 blames 1 | signal 9 @12",
        12,
        "rank 1 was killed by signal 9",
    );
    check(
        "exit 1 @10 blames 1 | run",
        12,
        "waiting until 1010 ms for rank 1, which is blamed, to end",
    );
    check(
        "exit 1 @10 blames 1 | run",
        1_010,
        "rank 1 stalled, says rank 0",
    );
    check(
        "exit 1 @10 blames 1 | exit 101 @500",
        500,
        "rank 1 exited with code 101",
    );
    check(
        "exit 1 @10 blames 1 | exit 0 @5",
        10,
        "rank 1 left early, says rank 0",
    );
}

#[test]
fn blame_is_followed_to_its_end() {
    check(
        "exit 1 @10 blames 1 | exit 1 @11 blames 2 | signal 6 @12",
        12,
        "rank 2 was killed by signal 6",
    );
    check(
        "exit 1 @10 blames 1 | run blames 2 | run",
        2_000,
        "rank 2 stalled, says rank 1",
    );
    check(
        "exit 1 @10 blames 1 | exit 1 @9 blames 0",
        12,
        "rank 1 exited with code 1",
    );
    check(
        "exit 1 @10 blames 1 | run blames 0",
        2_000,
        "rank 0 exited with code 1",
    );
}

#[test]
fn blame_that_leads_nowhere_leaves_the_first_failure() {
    check("exit 3 @10 blames 0 | run", 12, "rank 0 exited with code 3");
    check("exit 3 @10 blames 9 | run", 12, "rank 0 exited with code 3");
}

#[test]
fn a_revocation_makes_victims_of_the_others() {
    check(
        "exit 1 @10 | run; revoked 1",
        12,
        "waiting until 1010 ms for rank 1, which is blamed, to end",
    );
    check(
        "exit 1 @10 | exit 101 @14; revoked 1",
        14,
        "rank 1 exited with code 101",
    );
    check(
        "run | exit 101 @14; revoked 1",
        14,
        "rank 1 exited with code 101",
    );
    check(
        "signal 11 @10 | run; revoked 1",
        12,
        "rank 0 was killed by signal 11",
    );
}

#[test]
fn an_end_that_was_asked_for_is_no_failure() {
    check("signal 15 @10 excused | exit 0 @11", 12, "finished");
    check("signal 15 @10 excused | run", 12, "running");
    check(
        "signal 15 @10 excused | exit 5 @11",
        12,
        "rank 1 exited with code 5",
    );
}

#[test]
fn a_rank_that_is_gone_while_another_waits_in_a_collective_left_early() {
    check(
        "exit 0 @100 | run collective @50",
        200,
        "running, look again at 2100 ms",
    );
    check(
        "exit 0 @100 | run collective @50",
        2_100,
        "rank 0 left early, says rank 1",
    );
    check(
        "exit 0 @100 | run collective @2000",
        2_100,
        "running, look again at 4000 ms",
    );
    check(
        "exit 0 @100 | run collective @50 stopped 9",
        9_000,
        "running",
    );
    check("run | run collective @50", 9_000, "running");
}

#[test]
fn a_rank_that_stays_stopped_hangs_even_if_no_rank_waits_for_it() {
    check("run stopped 99 | run stopped 99", 99, "running");
    check("run stopped 99 | run stopped 100", 100, "rank 1 stalled");
    check("exit 0 @10 | run stopped 100", 100, "rank 1 stalled");
    check("run | run stopped 100 out", 100, "running");
    // An end says more.
    check(
        "run stopped 100 | signal 9 @90",
        100,
        "rank 1 was killed by signal 9",
    );
}

#[test]
fn a_rank_that_waits_for_the_next_generation_speaks_for_the_one_it_blames() {
    let waits = "run waits @100 blames 1 | run | run waits @150 blames 1";
    check(
        waits,
        200,
        "waiting until 1100 ms for rank 1, which is blamed, to end",
    );
    check(waits, 1100, "rank 1 stalled, says rank 0");
    check(
        "run waits @100 blames 1 | signal 9 @100 | run",
        101,
        "rank 1 was killed by signal 9",
    );
    check("run waits @100 | run", 5_000, "running");
    // Rank 0 is not one of those that blame each other.
    check(
        "run waits @100 blames 1 | run waits @150 blames 2 | run waits @160 blames 1",
        1100,
        "rank 1 stalled, says rank 2",
    );
}

#[test]
fn what_a_rank_does_after_the_others_went_on_without_it_is_no_failure() {
    check("run | signal 9 @10 out", 20, "running");
    check("run collective @10 | exit 0 @10 out", 9_000, "running");
    check("exit 0 @30 | signal 9 @10 out", 40, "finished");
    check(
        "exit 1 @30 blames 1 | signal 9 @10 out",
        40,
        "rank 0 exited with code 1",
    );
    check(
        "run waits @30 blames 1 | signal 9 @10 out",
        9_000,
        "running",
    );
}

#[test]
fn ranks_that_blame_each_other_and_live_all_go_on_if_they_can() {
    let limits = Limits {
        all_may_go_on: true,
        ..Limits::default()
    };
    let check = |scene, now_ms, expect| check_with(&limits, scene, now_ms, expect);
    // Both ends of a broken connection say so, and one of them still computes.
    check(
        "run waits @100 blames 1 | run blames 0 | run",
        100,
        "all go on, says rank 0 of rank 1",
    );
    // The other end has not noticed, but has heard of it.
    let waits = "run waits @100 blames 1 | run waits @120 | run";
    check(waits, 120, "all go on, says rank 0 of rank 1");
    let elsewhere = "run waits @100 blames 1 | run waits @120 blames 2 | run waits @130";
    check(elsewhere, 130, "all go on, says rank 1 of rank 2");
    // One has not formed the group, because of no other rank.
    check("run | run waits @100", 100, "all go on, says rank 1");
    // One that does not come hangs.
    let hangs = "run waits @100 blames 1 | run | run waits @130";
    check(
        hangs,
        200,
        "waiting until 1100 ms for rank 1, which is blamed, to end",
    );
    check(hangs, 1100, "rank 1 stalled, says rank 0");
    // An end says more, and those who are out say nothing.
    check(
        "run waits @100 blames 1 | run blames 0 | signal 9 @90",
        100,
        "rank 2 was killed by signal 9",
    );
    check(
        "run waits @100 blames 1 | exit 7 @110 | run",
        110,
        "rank 1 exited with code 7",
    );
    check("run | run waits @100 out", 200, "running");
    check("run | exit 0 @110", 200, "running");
}
