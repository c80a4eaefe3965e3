//! A rank that fails: the other ranks and the launcher name it and the cause at once, and nothing is left behind.

use std::fs;
use std::path::Path;
use std::time::Duration;

use tempfile::tempdir;

use super::support::{Ended, LIMIT, PACELINE, Running, command, example, probe};

/// The other ranks know of a fault within this time, even on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(15);
/// The timeout of collective operations, for faults that only a timeout detects. The ranks also have to form their group within it.
const DEADLINE: Duration = Duration::from_secs(4);

/// A fault of rank 1 of 3, and its consequences.
struct Case {
    fault: &'static str,
    /// The launcher's exit code.
    code: i32,
    /// The launcher's report, besides rank 1 and its process.
    report: &'static [&'static str],
    /// The error on each of the other ranks.
    others: &'static str,
    /// The time limit for that error after the fault.
    within: Duration,
    deadline: Duration,
}

impl Case {
    const fn new(
        fault: &'static str,
        code: i32,
        report: &'static [&'static str],
        others: &'static str,
    ) -> Self {
        Self {
            fault,
            code,
            report,
            others,
            within: AT_ONCE,
            deadline: LIMIT,
        }
    }

    /// For a rank that is alive, so that only a timeout detects the fault.
    const fn after_deadline(self) -> Self {
        Self {
            within: DEADLINE.saturating_add(AT_ONCE),
            deadline: DEADLINE,
            ..self
        }
    }

    #[track_caller]
    fn check(&self) {
        for transport in ["shm", "tcp"] {
            let folder = tempdir().expect("a folder");
            let ended = run(folder.path(), self, transport);
            let report = format!("error: rank 1 (pid {}) ", read(folder.path(), "rank1.pid"));
            ended
                .check(self.code, &[report.as_str()])
                .check(self.code, self.report);
            let (at, _) = moment(folder.path(), "fault.at");
            for rank in [0, 2] {
                let (noticed, text) = moment(folder.path(), &format!("rank{rank}.noticed"));
                assert!(
                    text.contains(self.others),
                    "rank {rank} over {transport}: {text}"
                );
                if self.deadline == DEADLINE {
                    let waited = waited(&text);
                    assert!(waited >= Some(DEADLINE.as_secs_f64()), "{text}");
                }
                let took = noticed.saturating_sub(at);
                assert!(
                    took < self.within,
                    "rank {rank} over {transport} took {took:?}"
                );
            }
        }
    }
}

fn run(folder: &Path, case: &Case, transport: &str) -> Ended {
    let line = format!(
        "run --nproc-per-node 3 --timeout-seconds {} {} --dir . --fault {}",
        case.deadline.as_secs(),
        probe("fault"),
        case.fault
    );
    let mut command = command(folder, PACELINE, line.split_whitespace());
    command.env("PACELINE_TRANSPORT", transport);
    Running::start(command).ended(LIMIT)
}

fn read(folder: &Path, name: &str) -> String {
    fs::read_to_string(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The time of an event since 1970, and the rank's message.
fn moment(folder: &Path, name: &str) -> (Duration, String) {
    let line = read(folder, name);
    let (nanos, text) = line.split_once(' ').expect("a moment and a text");
    (
        Duration::from_nanos(nanos.parse().expect("nanoseconds")),
        text.to_owned(),
    )
}

/// The seconds after which an operation timed out, from its error.
fn waited(text: &str) -> Option<f64> {
    let (_, after) = text.split_once("timed out after ")?;
    after.split(' ').next()?.parse().ok()
}

#[test]
fn without_a_fault_all_ranks_finish_with_the_same_weights() {
    let folder = tempdir().expect("a folder");
    let ended = run(folder.path(), &Case::new("none", 0, &[], ""), "shm");
    let hash = ended.is_well().hash();
    assert_eq!(ended.out.matches(hash).count(), 3, "{}", ended.out);
}

#[test]
fn a_slow_rank_is_no_failure() {
    let folder = tempdir().expect("a folder");
    let case = Case {
        deadline: Duration::from_secs(20),
        ..Case::new("slow", 0, &[], "")
    };
    let ended = run(folder.path(), &case, "tcp");
    ended.is_well();
    assert!(
        ended.took > Duration::from_millis(1_500),
        "{:?}",
        ended.took
    );
}

#[test]
fn a_straggler_is_named_and_leaves_and_the_deadline_follows_the_steps() {
    let folder = tempdir().expect("a folder");
    let undisturbed = run(folder.path(), &Case::new("none", 0, &[], ""), "shm");
    let line = format!(
        "run --nproc-per-node 3 --recovery live --timeout-seconds auto {} --dir . --fault straggles --recovery live",
        probe("fault")
    );
    let ended = super::support::paceline(folder.path(), &line);
    let says = [
        "note: ranks wait 20 s for one another from now on, because the longest of the recent steps took ",
        "warning: rank 1 is slow: ",
        "warning: rank 1 leaves the job: 2 ranks are faster without it",
        "it leaves the job as a straggler: rank 1 was slow and left: ",
        "; 2 ranks go on",
    ];
    ended.check(0, &says);
    let hash = undisturbed.hash();
    assert_eq!(ended.out.matches(hash).count(), 2, "{}", ended.out);
}

#[test]
fn the_others_go_on_without_a_rank_that_hangs_or_sleeps() {
    let folder = tempdir().expect("a folder");
    let undisturbed = run(folder.path(), &Case::new("none", 0, &[], ""), "shm");
    let hash = undisturbed.hash();
    for (fault, transport) in [("hangs", "shm"), ("sleeps", "tcp")] {
        let line = format!(
            "run --nproc-per-node 3 --recovery live --timeout-seconds {} {} --dir . --fault {fault} --recovery live",
            DEADLINE.as_secs(),
            probe("fault")
        );
        let mut command = command(folder.path(), PACELINE, line.split_whitespace());
        command.env("PACELINE_TRANSPORT", transport);
        let ended = Running::start(command).ended(LIMIT);
        let lost = format!("rank 1 (pid {}) ", read(folder.path(), "rank1.pid"));
        ended.check(0, &[&lost, " stalled after ", "; 2 ranks go on"]);
        assert_eq!(ended.out.matches(hash).count(), 2, "{}", ended.out);
    }
}

#[test]
fn a_killed_rank_is_named_at_once() {
    Case::new(
        "killed",
        137,
        &["was killed by signal 9 (SIGKILL)", "at step 5", "hint: "],
        "rank 1 (",
    )
    .check();
}

#[test]
fn a_rank_that_crashes_is_named_at_once() {
    Case::new(
        "segfault",
        139,
        &["was killed by signal 11 (SIGSEGV"],
        "rank 1 (",
    )
    .check();
    Case::new(
        "abort",
        134,
        &["was killed by signal 6 (SIGABRT"],
        "rank 1 (",
    )
    .check();
}

#[test]
fn a_rank_that_panics_is_named_at_once_with_its_message() {
    Case::new(
        "panic",
        101,
        &[
            "exited with code 101",
            "[rank 1] a panic in the middle of step 5",
        ],
        "rank 1 ",
    )
    .check();
}

#[test]
fn a_rank_that_returns_an_error_is_named_at_once_with_its_error() {
    Case::new(
        "error",
        1,
        &[
            "exited with code 1",
            "[rank 1] Error: \"sample 5 cannot be read\"",
        ],
        "rank 1 ",
    )
    .check();
}

#[test]
fn a_rank_that_exits_is_named_at_once_with_its_code() {
    Case::new("exit-7", 7, &["exited with code 7"], "rank 1 (").check();
}

#[test]
fn a_rank_that_leaves_early_with_code_0_is_named_at_once() {
    Case::new(
        "exit-0",
        1,
        &["left early", "it exited with code 0 while rank "],
        "rank 1 (",
    )
    .check();
}

#[test]
fn a_stopped_rank_is_named_within_the_deadline() {
    Case::new(
        "stopped",
        4,
        &[
            "stalled",
            "its process is stopped by a signal (T)",
            "kill -CONT",
        ],
        "timed out after ",
    )
    .after_deadline()
    .check();
}

#[test]
fn a_rank_that_computes_without_end_is_named_within_the_deadline() {
    Case::new(
        "hangs",
        4,
        &[
            "stalled",
            "it was in its step's closure before the forward pass at step 5",
        ],
        "timed out after ",
    )
    .after_deadline()
    .check();
}

#[test]
fn a_rank_that_sleeps_between_two_steps_is_said_to_be_in_its_own_code() {
    Case::new(
        "sleeps",
        4,
        &[
            "stalled",
            "it was in the program's own code (optimizer, evaluation, saving), after step 5",
        ],
        "timed out after ",
    )
    .after_deadline()
    .check();
}

#[test]
fn a_rank_with_another_model_is_named_with_the_first_difference() {
    let difference = "ranks do not agree on tensor 0 of the model: rank 0 has parameter hidden.weight [4, 16] F32, \
                      rank 1 has parameter hidden.weight [4, 17] F32";
    Case::new("other-model", 1, &["exited with code 1"], difference).check();
}

#[test]
fn an_error_that_main_returns_is_printed_as_its_message_and_its_hint() {
    let folder = tempdir().expect("a folder");
    let ended = run(folder.path(), &Case::new("other-model", 1, &[], ""), "shm");
    let error = "] Error: ranks do not agree on tensor 0 of the model: rank 0 has parameter hidden.weight [4, 16] F32, \
                 rank 1 has parameter hidden.weight [4, 17] F32\n";
    let hint = "] hint: start every rank with the same program, model and settings\n";
    ended.check(1, &[error, hint, "its last lines are above"]);
}

#[test]
fn a_wrong_setting_is_not_tried_again() {
    let folder = tempdir().expect("a folder");
    let says = "warning: the rank says that a setting of its program is wrong, so the job is not started again";
    let check = |line: &str, variable: (&str, &str), error: &str| {
        let line = format!("run --nproc-per-node 2 --max-restarts 3 {line}");
        let mut command = command(folder.path(), PACELINE, line.split_whitespace());
        command.env(variable.0, variable.1);
        let ended = Running::start(command).ended(LIMIT);
        ended.check(1, &[error, says]);
        assert!(!ended.err.contains("; restart "), "{}", ended.err);
    };
    let none = ("PACELINE_TIMEOUT_SECONDS", "60");
    let probe = format!("{} --dir . --fault", probe("fault"));
    let few = "1 shards are too few for 2 ranks";
    check(&format!("{probe} few-shards"), none, few);
    let minimal = example("minimal").display().to_string();
    let device = ("PACELINE_DEVICE", "abacus");
    check(&minimal, device, "unknown kind of device `abacus`");
    let transport = ("PACELINE_TRANSPORT", "pigeon");
    check(&minimal, transport, "pigeon");
    // The same rank is started again for a failure of another kind, although it had a setting right before.
    let line = format!("run --nproc-per-node 2 --max-restarts 1 {probe} panic --rank 1",);
    let ended = super::support::paceline(folder.path(), &line);
    assert!(
        ended.err.contains("; restart 1 of 1 took "),
        "{}",
        ended.err
    );
}

#[test]
fn a_rank_with_another_setting_is_named_with_it() {
    let difference = "ranks do not agree on setting seed: rank 0 has 0, rank 1 has 1";
    Case::new("other-seed", 1, &["exited with code 1"], difference).check();
}

#[test]
fn a_rank_whose_weights_drift_is_named() {
    let difference = "weights differ between ranks at step ";
    Case::new("drift", 1, &["exited with code 1"], difference).check();
}

#[test]
fn a_rank_that_never_comes_is_named_long_before_the_deadline() {
    let folder = tempdir().expect("a folder");
    let ended = run(folder.path(), &Case::new("absent", 1, &[], ""), "shm");
    let report = format!(
        "error: rank 1 (pid {}) left early",
        read(folder.path(), "rank1.pid")
    );
    ended.check(1, &[&report, "it exited with code 0 while rank "]);
    assert!(ended.took < LIMIT / 2, "{:?}", ended.took);
}

#[test]
fn rank_0_is_a_rank_like_the_others() {
    let folder = tempdir().expect("a folder");
    let line = format!(
        "run --nproc-per-node 2 {} --dir . --fault killed --rank 0",
        probe("fault")
    );
    let ended = super::support::paceline(folder.path(), &line);
    let report = format!(
        "error: rank 0 (pid {}) was killed",
        read(folder.path(), "rank0.pid")
    );
    ended.check(137, &[&report]);
    let (at, _) = moment(folder.path(), "fault.at");
    let (noticed, text) = moment(folder.path(), "rank1.noticed");
    assert!(text.contains("rank 0 ("), "{text}");
    assert!(
        noticed.saturating_sub(at) < AT_ONCE,
        "{noticed:?} after {at:?}"
    );
}
