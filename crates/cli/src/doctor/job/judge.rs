//! What the facts about a job come to. Pure functions.

use std::path::Path;
use std::time::Duration;

use paceline_doctor::{Finding, Severity};
use paceline_gpu::words;
use paceline_rendezvous::page::{Activity, Differences, Phase, op_name};
use paceline_rendezvous::process::Stat;
use paceline_report::{End, Incident, Piece, Seen};
use paceline_usage::busy::share;

/// Ranks that have done nothing for so long wait for something, unless their steps are long.
const STILL: Duration = Duration::from_secs(5);
/// The same where nothing is known of the duration of steps.
const STILL_UNKNOWN: Duration = Duration::from_secs(30);
/// So many steps without a move are no step.
const STEPS_STILL: f64 = 10.0;
/// A rank that waited for a larger share of its time is worth a word.
const WAITED_MAX: f64 = 0.25;
/// The same for data, which should be there before it is asked for.
const WAITED_FOR_DATA_MAX: f64 = 0.1;
/// A rank that uses so many cores does something.
const WORKS: f64 = 0.5;
/// A difference in busy shares between ranks that is no accident.
const SPREAD: f64 = 0.15;
/// So many of the last pieces of a curve are what happens now.
const LAST: usize = 32;
/// Shares of a shorter time say nothing.
const SHORT: Duration = Duration::from_secs(2);

/// What is known of a job.
pub(super) struct Facts<'a> {
    /// Its run directory.
    pub(super) folder: Option<&'a Path>,
    /// What its metrics say.
    pub(super) seen: Option<&'a Seen>,
    /// How it has failed, if its launcher has said so.
    pub(super) failed: Option<Failed>,
    /// Its ranks, if it runs on this machine.
    pub(super) ranks: Vec<Rank>,
    /// Cores of this machine.
    pub(super) cores: usize,
}

/// A failure, as the launcher has reported it.
pub(super) struct Failed {
    pub(super) cause: String,
    pub(super) error: Option<String>,
    pub(super) hint: Option<String>,
    pub(super) log: Option<String>,
}

/// A rank that runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rank {
    pub(super) rank: usize,
    /// Its process; `None` if it has ended.
    pub(super) pid: Option<u32>,
    /// What it does, and since when; `None` for programs that do not say.
    pub(super) activity: Option<(Activity, Duration)>,
    /// Whether it has done anything while it was watched.
    pub(super) has_moved: bool,
    pub(super) stat: Option<Stat>,
    /// Processor time in cores.
    pub(super) cores: f64,
    /// What it has found about the weights of others.
    pub(super) differences: Differences,
}

impl Facts<'_> {
    /// How far the job is, in words.
    pub(super) fn state(&self) -> String {
        let ranks = words::count(self.ranks.len(), "rank");
        let Some(seen) = self.seen else {
            return format!("it runs: {ranks} on this machine");
        };
        let total = seen
            .start
            .as_ref()
            .map(|start| format!(" of {}", start.steps));
        let steps = format!("step {}{}", seen.steps, total.unwrap_or_default());
        let is_stopped = matches!(seen.incidents.last(), Some(Incident::Stopped { .. }));
        match &seen.end {
            Some(_) => format!("done: {steps}"),
            None if !self.ranks.is_empty() => format!("it runs: {steps}, {ranks} on this machine"),
            None if is_stopped => format!("stopped on request: {steps}"),
            None => format!("it does not run on this machine, and was not done: {steps}"),
        }
    }
}

/// All that is worth a word, the worst first.
pub(super) fn judge(facts: &Facts<'_>) -> Vec<Finding> {
    let mut findings = stopped(&facts.ranks);
    // Ranks of a job that is done leave, and the last one may still save.
    if facts.seen.is_none_or(|seen| seen.end.is_none()) {
        if findings.is_empty() {
            findings.extend(still(facts));
        }
        findings.extend(lost(&facts.ranks));
    }
    findings.extend(different(facts));
    findings.extend(ended(facts));
    if let Some(seen) = facts.seen {
        findings.extend(slow(seen));
        findings.extend(alone(seen, facts.cores));
        findings.extend(skipped(seen));
    }
    findings.sort_by_key(|finding| finding.severity);
    findings
}

fn finding(
    severity: Severity,
    check: &str,
    what: String,
    why: impl Into<String>,
    fix: impl Into<String>,
) -> Finding {
    Finding {
        severity,
        check: check.to_owned(),
        what,
        why: why.into(),
        fix: fix.into(),
        nodes: Vec::new(),
    }
}

/// Ranks that a signal or a debugger holds.
fn stopped(ranks: &[Rank]) -> Vec<Finding> {
    let held = ranks
        .iter()
        .filter(|rank| rank.stat.is_some_and(Stat::is_stopped));
    let held = held.filter_map(|rank| Some((rank.rank, rank.pid?, rank.stat?)));
    let held = held.map(|(rank, pid, stat)| {
        finding(
            Severity::Error,
            "waits forever",
            format!("rank {rank} (pid {pid}) is {}", stat.state_text()),
            "it does nothing until it goes on, and the other ranks wait for it",
            format!("kill -CONT {pid}"),
        )
    });
    held.collect()
}

/// A job in which nothing moves.
fn still(facts: &Facts<'_>) -> Option<Finding> {
    let ranks: Vec<_> = facts
        .ranks
        .iter()
        .filter(|rank| rank.pid.is_some())
        .collect();
    let limit = match facts.seen.and_then(|seen| seen.step_seconds) {
        Some(step) => {
            let steps = Duration::try_from_secs_f64(step * STEPS_STILL);
            STILL.max(steps.unwrap_or(Duration::MAX))
        }
        None => STILL_UNKNOWN,
    };
    let is_still =
        |rank: &&Rank| !rank.has_moved && rank.activity.is_some_and(|(_, since)| since >= limit);
    if ranks.is_empty() || !ranks.iter().all(is_still) {
        return None;
    }
    let doing = ranks
        .iter()
        .filter_map(|rank| Some((*rank, rank.activity?)));
    let (waiting, others): (Vec<_>, Vec<_>) =
        doing.partition(|(_, (activity, _))| activity.op.is_some());
    let named = |(rank, (activity, since)): &(&Rank, (Activity, Duration))| {
        let place = match activity.op {
            Some(op) => format!("waits in {} #{}", op_name(op.code), op.seq),
            None => format!("is {}", activity.phase),
        };
        format!(
            "rank {} {place} at step {} for {:.0} s",
            rank.rank,
            activity.step,
            since.as_secs_f64()
        )
    };
    let list = |ranks: &[(&Rank, (Activity, Duration))]| {
        let named: Vec<String> = ranks.iter().map(named).collect();
        named.join("; ")
    };
    let check = "waits forever";
    Some(match (&waiting[..], &others[..]) {
        ([_, ..], [(rank, (activity, _)), ..]) => {
            let state = rank.stat.map_or("gone".to_owned(), Stat::state_text);
            let why = format!(
                "rank {} has not come to the operation; its process is {state} and uses {:.1} cores. {}",
                rank.rank,
                rank.cores,
                reason(activity.phase)
            );
            let pid = rank.pid.unwrap_or_default();
            let fix = format!(
                "look at what it does: `gdb -p {pid} -batch -ex 'thread apply all bt'`, for Python `py-spy dump --pid {pid}`"
            );
            // It may be long and come to an end.
            let is_busy = matches!(activity.phase, Phase::Evaluation | Phase::Checkpoint)
                && rank.cores >= WORKS;
            let severity = match is_busy {
                true => Severity::Warning,
                false => Severity::Error,
            };
            finding(
                severity,
                check,
                format!("{}; {}", list(&others), list(&waiting)),
                why,
                fix,
            )
        }
        ([(_, (first, _)), rest @ ..], []) => {
            let same = rest.iter().all(|(_, (activity, _))| {
                activity.op.map(|op| (op.code, op.seq)) == first.op.map(|op| (op.code, op.seq))
            });
            let (why, fix) = match same {
                true => (
                    "all ranks of this machine are in the same operation: a rank of another machine, or a connection, is missing",
                    "run `paceline doctor` with the same RUN on the other machines, and `paceline doctor --nnodes N --rdzv-endpoint HOST` between them",
                ),
                false => (
                    "ranks are in different operations: one took another branch, or skipped one that the others issue",
                    "start it with --flight-dir DIR; after the deadline, `paceline doctor --flight DIR` names the rank that left the order",
                ),
            };
            finding(Severity::Error, check, list(&waiting), why, fix)
        }
        _ if others.iter().any(|(rank, _)| rank.cores >= WORKS) => return None,
        _ => {
            let phase = others
                .first()
                .map_or(Phase::Starting, |(_, (activity, _))| activity.phase);
            finding(
                Severity::Warning,
                check,
                list(&others),
                reason(phase),
                "wait, or look at what they do with gdb or py-spy",
            )
        }
    })
}

/// What keeps a rank in a part of a step.
fn reason(phase: Phase) -> &'static str {
    match phase {
        Phase::DataLoader => {
            "Its samples do not come: the storage hangs, or a worker of the loader does"
        }
        Phase::Evaluation => {
            "It evaluates: if the others do not, they wait, because every rank has to come to each operation"
        }
        Phase::Checkpoint => "It saves or loads: the disk or its server is slow or hangs",
        Phase::Starting | Phase::Rendezvous => {
            "It still starts: the others may be fewer than the job waits for"
        }
        Phase::Forward | Phase::Backward => {
            "It computes: its work is larger than that of the others, or never ends"
        }
        _ => {
            "It is in the program's own code, which may wait for something, or end without the others"
        }
    }
}

/// Ranks without a process.
fn lost(ranks: &[Rank]) -> Option<Finding> {
    // One that has not started has no activity either.
    let gone = ranks
        .iter()
        .filter(|rank| rank.pid.is_none() && rank.activity.is_some());
    let gone: Vec<String> = gone.map(|rank| rank.rank.to_string()).collect();
    let are_all = gone.len() == ranks.len();
    (!gone.is_empty() && !are_all).then(|| {
        finding(
            Severity::Warning,
            "only some work",
            format!("of {}, these have no process: {}", words::count(ranks.len(), "rank"), gone.join(", ")),
            "they have ended, and were not replaced",
            "their output is in the run's folder logs; --max-restarts N gives a job new ranks in place of lost ones",
        )
    })
}

/// Ranks whose weights differ.
fn different(facts: &Facts<'_>) -> Option<Finding> {
    let found = facts.ranks.iter().map(|rank| rank.differences);
    let worst = found.max_by_key(|differences| differences.times)?;
    (worst.times > 0).then(|| {
        let odd = worst.odd.map_or("without a majority".to_owned(), |rank| format!("rank {rank} against the others"));
        finding(
            Severity::Error,
            "not in step",
            format!("the weights of ranks differed at step {}: {odd}; {} in all", worst.step, words::count(worst.times as usize, "time")),
            "a bit flipped in memory, an operation of the model gives other bits on one machine, or a rank changed its model by itself",
            "--same-bits strict finds machines that compute other bits; --record 200 and `paceline replay RUN --step N` name the tensor",
        )
    })
}

/// A job that is over before it was done.
fn ended(facts: &Facts<'_>) -> Option<Finding> {
    let seen = facts.seen?;
    if seen.end.is_some() || !facts.ranks.is_empty() {
        return None;
    }
    let resume = facts.folder.map_or(String::new(), |folder| {
        format!("start it again with --resume {}", folder.display())
    });
    let check = "ended early";
    if let Some(Incident::Stopped { step, signal }) = seen.incidents.last() {
        let what = format!("the job stopped after step {step}, because {signal} asked it to");
        return Some(finding(
            Severity::Note,
            check,
            what,
            "it has saved before",
            resume,
        ));
    }
    Some(match &facts.failed {
        Some(failed) => {
            let error = failed
                .error
                .as_ref()
                .filter(|error| **error != failed.cause);
            let what = error.map_or(failed.cause.clone(), |error| {
                format!("{}: {error}", failed.cause)
            });
            let log = failed
                .log
                .as_ref()
                .map(|log| format!("; its output is in {log}"));
            let why = format!("that ended the job{}", log.unwrap_or_default());
            finding(
                Severity::Error,
                check,
                what,
                why,
                failed.hint.clone().unwrap_or(resume),
            )
        }
        None => finding(
            Severity::Error,
            check,
            format!("the job ended after step {} without a word", seen.steps),
            "its launcher was killed too, or it was started by `paceline run`, torchrun or srun, whose output has the reason; or it runs on another machine",
            resume,
        ),
    })
}

/// Time that was lost.
fn slow(seen: &Seen) -> Option<Finding> {
    let check = "slow";
    let Some(end) = &seen.end else {
        let last: Vec<f64> = seen
            .waited
            .pieces()
            .iter()
            .rev()
            .take(LAST)
            .map(Piece::mean)
            .collect();
        let waited = last.iter().sum::<f64>() / last.len().max(1) as f64 / 100.0;
        return (waited > WAITED_MAX).then(|| {
            finding(
                Severity::Warning,
                check,
                format!(
                    "rank 0 waited for other ranks in {:.0} % of its last steps",
                    waited * 100.0
                ),
                "another rank is slower, or there is little to compute between two all-reduces",
                "the end of the job says which; `paceline watch` shows the waits of all steps",
            )
        });
    };
    let total = end.usage.total();
    if end.ranks.len() < 2 && data_share(end) <= WAITED_FOR_DATA_MAX || total < SHORT {
        return None;
    }
    let busy: Vec<f64> = (0..end.ranks.len())
        .map(|rank| share(end.usage.busy(rank), total))
        .collect();
    let (most, least) = (
        busy.iter().copied().fold(0.0, f64::max),
        busy.iter().copied().fold(1.0, f64::min),
    );
    let busiest = busy.iter().position(|share| *share == most)?;
    if data_share(end) > WAITED_FOR_DATA_MAX {
        return Some(finding(
            Severity::Warning,
            check,
            format!(
                "a rank waited for data in {:.0} % of the time",
                data_share(end) * 100.0
            ),
            "samples are read and decoded more slowly than they are used",
            "--workers N reads with more threads for each rank; put the data on a faster disk, or make it smaller once",
        ));
    }
    let at_once = end.usage.all_busy_share();
    if least > 1.0 - WAITED_MAX {
        return None;
    }
    Some(match most - least > SPREAD {
        true => finding(
            Severity::Warning,
            check,
            format!(
                "all ranks computed at once in {:.0} % of the time; rank {busiest} was busy for {:.0} %, another one for {:.0} %",
                at_once * 100.0,
                most * 100.0,
                least * 100.0
            ),
            format!(
                "the others waited for rank {busiest}: its device or its cores are slower or shared, or it has more samples"
            ),
            "look at its machine with `paceline doctor` and `paceline gpu top`; --exclude-stragglers goes on without a slow rank",
        ),
        false => finding(
            Severity::Warning,
            check,
            format!(
                "all ranks computed at once in {:.0} % of the time, and waited for each other equally",
                at_once * 100.0
            ),
            "a step has little to compute beside what it sends",
            "a larger --global-batch, --accumulate, or --comm-hook bf16; `paceline compare 1 2 -- PROGRAM` shows whether more ranks pay",
        ),
    })
}

/// The largest share of the time in which a rank waited for data.
fn data_share(end: &End) -> f64 {
    let waited = end
        .ranks
        .iter()
        .map(|rank| Duration::from_nanos(rank.waited_for_data_ns));
    share(waited.max().unwrap_or_default(), end.usage.total())
}

/// One rank where there could be several.
fn alone(seen: &Seen, cores: usize) -> Option<Finding> {
    (seen.ranks == Some(1) && cores > 1).then(|| {
        finding(
            Severity::Note,
            "only some work",
            format!("the job has one rank, and this machine {cores} cores"),
            "other devices have nothing to do",
            "--nproc-per-node N, or --use-gpu N for GPUs; `paceline gpu top` shows which GPUs a job uses",
        )
    })
}

/// Steps that changed nothing.
fn skipped(seen: &Seen) -> Option<Finding> {
    let is_lost = |incident: &&Incident| {
        matches!(
            incident,
            Incident::Skipped { .. } | Incident::WentBack { .. }
        )
    };
    let count = seen.incidents.iter().filter(is_lost).count();
    let at_least = if seen.incidents_left_out > 0 {
        "at least "
    } else {
        ""
    };
    (count > 0).then(|| {
        finding(
            Severity::Warning,
            "wrong numbers",
            format!(
                "{at_least}{} had a loss or a gradient that was infinite or NaN",
                words::count(count, "step")
            ),
            "the learning rate is too high, a sample is broken, or fp16 overflowed",
            "a lower --lr, a longer --warmup, --clip-norm 1, or --precision bf16 in place of fp16",
        )
    })
}

#[cfg(test)]
mod tests;
