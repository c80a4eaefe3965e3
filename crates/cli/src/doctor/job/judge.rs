//! What the facts about a job come to. Pure functions.

use std::path::Path;
use std::time::Duration;

use paceline_doctor::{Finding, Severity};
use paceline_rendezvous::page::{Activity, Differences, Phase, op_name};
use paceline_rendezvous::process::{Stat, state_text};
use paceline_report::{End, Incident, JobFailure, Piece, Seen, Start};
use paceline_usage::busy::share;
use paceline_words::{Lang, advice, count, counted, say};

/// What findings are about.
const FOREVER: &str = "waits forever";
const ONLY_SOME: &str = "only some work";
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
/// The device of a rank that computes on the processor.
const CPU: &str = "CPU";
/// Shares of a shorter time say nothing.
const SHORT: Duration = Duration::from_secs(2);

/// What is known of a job.
pub(super) struct Facts<'a> {
    /// Its run directory.
    pub(super) folder: Option<&'a Path>,
    /// What its metrics say.
    pub(super) seen: Option<&'a Seen>,
    /// How it has failed, if its launcher has said so.
    pub(super) failed: Option<&'a JobFailure>,
    /// Its ranks, if it runs on this machine.
    pub(super) ranks: Vec<Rank>,
    /// The language of what is said about it.
    pub(super) lang: Lang,
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
        let lang = self.lang;
        let here = || ranks_here(self.ranks.len(), lang);
        let Some(seen) = self.seen else {
            let ranks = here();
            return match self.ranks.is_empty() {
                true => say!(lang, "it ended before its first step", "첫 스텝 전에 끝남"),
                false => say!(lang, "it runs: {ranks}", "실행 중: {ranks}"),
            };
        };
        let done = seen.steps;
        let steps = match &seen.start {
            Some(Start { steps, .. }) => {
                say!(lang, "step {done} of {steps}", "스텝 {done}/{steps}")
            }
            None => say!(lang, "step {done}", "스텝 {done}"),
        };
        let is_stopped = matches!(seen.incidents.last(), Some(Incident::Stopped { .. }));
        match &seen.end {
            Some(end) if end.stopped_early => say!(
                lang,
                "done: {steps}, stopped early",
                "완료: {steps}, 조기 종료"
            ),
            Some(_) => say!(lang, "done: {steps}", "완료: {steps}"),
            None if !self.ranks.is_empty() => {
                let ranks = here();
                say!(
                    lang,
                    "it runs: {steps}, {ranks}",
                    "실행 중: {steps}, {ranks}"
                )
            }
            None if is_stopped => say!(
                lang,
                "stopped on request: {steps}",
                "요청을 받아 중단됨: {steps}"
            ),
            None => say!(
                lang,
                "it does not run on this machine, and was not done: {steps}",
                "이 머신에서 실행되고 있지 않으며 끝나지 않았음: {steps}"
            ),
        }
    }
}

fn ranks_here(ranks: usize, lang: Lang) -> String {
    let ranks = count(lang, ranks, "rank", "랭크");
    say!(lang, "{ranks} on this machine", "이 머신의 {ranks}")
}

/// All that is worth a word, the worst first.
pub(super) fn judge(facts: &Facts<'_>) -> Vec<Finding> {
    let lang = facts.lang;
    let mut findings = stopped(&facts.ranks, lang);
    let mut gone = None;
    // Ranks of a job that is done leave, and the last one may still save.
    if facts.seen.is_none_or(|seen| seen.end.is_none()) {
        if findings.is_empty() {
            findings.extend(still(facts));
        }
        gone = lost(&facts.ranks, lang);
    }
    findings.extend(gone.or_else(|| fewer(facts.seen?, lang)));
    findings.extend(different(facts));
    findings.extend(ended(facts));
    if let Some(seen) = facts.seen {
        findings.extend(slow(seen, lang));
        findings.extend(alone(seen, lang));
        findings.extend(skipped(seen, lang));
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
fn stopped(ranks: &[Rank], lang: Lang) -> Vec<Finding> {
    let held = ranks
        .iter()
        .filter(|rank| rank.stat.is_some_and(Stat::is_stopped));
    let held = held.filter_map(|rank| Some((rank.rank, rank.pid?, rank.stat?)));
    let held = held.map(|(rank, pid, stat)| {
        let state = stat.state_text(lang);
        finding(
            Severity::Error,
            FOREVER,
            say!(
                lang,
                "rank {rank} (pid {pid}) is {state}",
                "랭크 {rank}(pid {pid})의 프로세스 상태: {state}"
            ),
            say!(
                lang,
                "it does nothing until it goes on, and the other ranks wait for it",
                "다시 진행하기 전까지 아무것도 하지 않으며, 다른 랭크는 이 랭크를 기다립니다"
            ),
            format!("kill -CONT {pid}"),
        )
    });
    held.collect()
}

/// A job in which nothing moves.
fn still(facts: &Facts<'_>) -> Option<Finding> {
    let lang = facts.lang;
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
        let (rank, step, seconds) = (rank.rank, activity.step, since.as_secs_f64());
        match (activity.op, activity.phase.text(lang)) {
            (Some(op), _) => {
                let (name, seq) = (op_name(op.code), op.seq);
                say!(
                    lang,
                    "rank {rank} waits in {name} #{seq} at step {step} for {seconds:.0} s",
                    "랭크 {rank}: 스텝 {step}의 {name} #{seq}에서 {seconds:.0}초째 대기 중"
                )
            }
            (None, phase) => say!(
                lang,
                "rank {rank} is {phase} at step {step} for {seconds:.0} s",
                "랭크 {rank}: 스텝 {step}의 {phase}에 {seconds:.0}초째 머무름"
            ),
        }
    };
    let list = |ranks: &[(&Rank, (Activity, Duration))]| {
        let named: Vec<String> = ranks.iter().map(named).collect();
        named.join("; ")
    };
    Some(match (&waiting[..], &others[..]) {
        ([_, ..], [(rank, (activity, _)), ..]) => {
            // It may be long and come to an end.
            let is_busy = matches!(activity.phase, Phase::Evaluation | Phase::Checkpoint)
                && rank.cores >= WORKS;
            let severity = match is_busy {
                true => Severity::Warning,
                false => Severity::Error,
            };
            let what = format!("{}; {}", list(&others), list(&waiting));
            missing(severity, what, rank, activity.phase, lang)
        }
        ([(_, (first, _)), rest @ ..], []) => {
            let same = rest.iter().all(|(_, (activity, _))| {
                activity.op.map(|op| (op.code, op.seq)) == first.op.map(|op| (op.code, op.seq))
            });
            let (why, fix) = match same {
                true => (
                    say!(
                        lang,
                        "all ranks of this machine are in the same operation: a rank of another machine, or a connection, is missing",
                        "이 머신의 모든 랭크가 같은 연산에 있습니다. 다른 머신의 랭크가 오지 않았거나 연결이 끊겼습니다"
                    ),
                    say!(
                        lang,
                        "run `paceline doctor` with the same RUN on the other machines, and `paceline doctor --nnodes N --rdzv-endpoint HOST` between them",
                        "다른 머신에서도 같은 RUN으로 `paceline doctor`를 실행하고, 머신 사이는 `paceline doctor --nnodes N --rdzv-endpoint HOST`로 점검하세요"
                    ),
                ),
                false => (
                    say!(
                        lang,
                        "ranks are in different operations: one took another branch, or skipped one that the others issue",
                        "랭크들이 서로 다른 연산에 있습니다. 한 랭크가 다른 분기로 갔거나, 다른 랭크가 호출하는 연산을 건너뛰었습니다"
                    ),
                    say!(
                        lang,
                        "start it with --flight-dir DIR; after the deadline, `paceline doctor --flight DIR` names the rank that left the order",
                        "--flight-dir DIR을 주고 다시 시작하세요. 제한 시간이 지나면 `paceline doctor --flight DIR`이 순서를 벗어난 랭크를 알려 줍니다"
                    ),
                ),
            };
            finding(Severity::Error, FOREVER, list(&waiting), why, fix)
        }
        _ if others.iter().any(|(rank, _)| rank.cores >= WORKS) => return None,
        _ => {
            let phase = others
                .first()
                .map_or(Phase::Starting, |(_, (activity, _))| activity.phase);
            finding(
                Severity::Warning,
                FOREVER,
                list(&others),
                reason(phase, lang),
                say!(
                    lang,
                    "wait, or look at what they do with gdb or py-spy",
                    "기다리거나, gdb나 py-spy로 무엇을 하는지 확인하세요"
                ),
            )
        }
    })
}

/// A rank that has not come to the operation in which others wait.
fn missing(severity: Severity, what: String, rank: &Rank, phase: Phase, lang: Lang) -> Finding {
    let state = state_text(rank.stat, lang);
    let (number, cores, reason) = (rank.rank, rank.cores, reason(phase, lang));
    let why = say!(
        lang,
        "rank {number} has not come to the operation; its process is {state} and uses {cores:.1} cores. {reason}",
        "랭크 {number}: 연산에 아직 오지 않음. 프로세스 상태: {state}, CPU {cores:.1}코어 사용. {reason}"
    );
    let pid = rank.pid.unwrap_or_default();
    let fix = say!(
        lang,
        "look at what it does: `gdb -p {pid} -batch -ex 'thread apply all bt'`, for Python `py-spy dump --pid {pid}`",
        "무엇을 하는지 확인하세요: `gdb -p {pid} -batch -ex 'thread apply all bt'`, Python이라면 `py-spy dump --pid {pid}`"
    );
    finding(severity, FOREVER, what, why, fix)
}

/// What keeps a rank in a part of a step.
fn reason(phase: Phase, lang: Lang) -> String {
    match phase {
        Phase::DataLoader => say!(
            lang,
            "Its samples do not come: the storage hangs, or a worker of the loader does",
            "샘플이 오지 않습니다. 저장 장치나 데이터 로더의 워커가 멈췄습니다"
        ),
        Phase::Evaluation => say!(
            lang,
            "It evaluates: if the others do not, they wait, because every rank has to come to each operation",
            "평가 중입니다. 모든 랭크가 모든 연산에 들어와야 하므로, 평가하지 않는 랭크는 기다리게 됩니다"
        ),
        Phase::Checkpoint => say!(
            lang,
            "It saves or loads: the disk or its server is slow or hangs",
            "체크포인트를 저장하거나 읽는 중입니다. 디스크나 파일 서버가 느리거나 멈췄습니다"
        ),
        Phase::Starting | Phase::Rendezvous => say!(
            lang,
            "It still starts: the others may be fewer than the job waits for",
            "아직 시작하는 중입니다. 작업에 필요한 랭크가 다 오지 않았을 수 있습니다"
        ),
        Phase::Forward | Phase::Backward => say!(
            lang,
            "It computes: its work is larger than that of the others, or never ends",
            "계산 중입니다. 다른 랭크보다 일이 많거나, 계산이 끝나지 않습니다"
        ),
        _ => say!(
            lang,
            "It is in the program's own code, which may wait for something, or end without the others",
            "프로그램 자체 코드에 있습니다. 무언가를 기다리고 있거나, 다른 랭크 없이 끝나려는 것일 수 있습니다"
        ),
    }
}

/// Ranks without a process.
fn lost(ranks: &[Rank], lang: Lang) -> Option<Finding> {
    // One that has not started has no activity either.
    let gone = ranks
        .iter()
        .filter(|rank| rank.pid.is_none() && rank.activity.is_some());
    let gone: Vec<String> = gone.map(|rank| rank.rank.to_string()).collect();
    let are_all = gone.len() == ranks.len();
    (!gone.is_empty() && !are_all).then(|| {
        let (of, gone) = (ranks.len(), gone.join(", "));
        finding(
            Severity::Warning,
            ONLY_SOME,
            say!(
                lang,
                "of {of} ranks, these have no process: {gone}",
                "랭크 {of}개 중 프로세스가 없는 랭크: {gone}"
            ),
            say!(
                lang,
                "they have ended, and were not replaced",
                "종료된 뒤 새 랭크로 바뀌지 않았습니다"
            ),
            replace_lost(lang),
        )
    })
}

/// What to do about them.
fn replace_lost(lang: Lang) -> String {
    say!(
        lang,
        "their output is in the run's folder logs; --max-restarts N gives a job new ranks in place of lost ones",
        "출력은 실행 폴더의 logs에 있습니다. --max-restarts N을 주면 잃은 랭크 대신 새 랭크를 띄웁니다"
    )
}

/// The job went on with fewer ranks than it had.
fn fewer(seen: &Seen, lang: Lang) -> Option<Finding> {
    let (had, now) = (seen.start.as_ref()?.world, seen.ranks?);
    let mut latest = seen.incidents.iter().rev();
    let loss = latest.find_map(|incident| match incident {
        Incident::Ranks {
            step,
            before,
            now,
            why,
        } if now < before => Some((step, why.as_deref())),
        _ => None,
    });
    let (step, why) = loss.filter(|_| now < had)?;
    Some(finding(
        Severity::Warning,
        ONLY_SOME,
        say!(
            lang,
            "the job began with {had} ranks, and has {now} since step {step}",
            "랭크 {had}개로 시작했으나 스텝 {step}부터 {now}개임"
        ),
        why.map_or_else(
            || {
                say!(
                    lang,
                    "ranks were lost, and not replaced",
                    "랭크를 잃었고 새 랭크로 바뀌지 않았습니다"
                )
            },
            str::to_owned,
        ),
        replace_lost(lang),
    ))
}

/// Ranks whose weights differ.
fn different(facts: &Facts<'_>) -> Option<Finding> {
    let lang = facts.lang;
    let found = facts.ranks.iter().map(|rank| rank.differences);
    let worst = found.max_by_key(|differences| differences.times)?;
    (worst.times > 0).then(|| {
        let (step, times) = (worst.step, worst.times);
        let odd = match worst.odd {
            Some(rank) => say!(
                lang,
                "rank {rank} against the others",
                "랭크 {rank}만 나머지와 다름"
            ),
            None => say!(lang, "without a majority", "다수결로 가릴 수 없음"),
        };
        let what = match lang {
            Lang::En => format!(
                "the weights of ranks differed at step {step}: {odd}; {} in all",
                counted(times as usize, "time")
            ),
            Lang::Ko => format!("스텝 {step}에서 랭크들의 가중치가 서로 다름: {odd}, 모두 {times}회"),
        };
        finding(
            Severity::Error,
            "not in step",
            what,
            say!(
                lang,
                "a bit flipped in memory, an operation of the model gives other bits on one machine, or a rank changed its model by itself",
                "메모리의 비트가 뒤집혔거나, 모델의 어떤 연산이 한 머신에서 다른 비트를 내거나, 한 랭크가 모델을 따로 바꾸었습니다"
            ),
            say!(
                lang,
                "--same-bits strict finds machines that compute other bits; --record 200 and `paceline replay RUN --step N` name the tensor",
                "다른 비트를 계산하는 머신은 --same-bits strict로 찾고, 달라진 텐서는 --record 200과 `paceline replay RUN --step N`으로 찾으세요"
            ),
        )
    })
}

/// A job that is over before it was done.
fn ended(facts: &Facts<'_>) -> Option<Finding> {
    let lang = facts.lang;
    let is_done = facts.seen.is_some_and(|seen| seen.end.is_some());
    if is_done || !facts.ranks.is_empty() {
        return None;
    }
    let resume = facts.folder.map_or(String::new(), |folder| {
        let folder = folder.display();
        say!(
            lang,
            "start it again with --resume {folder}",
            "--resume {folder} 옵션으로 이어서 시작하세요"
        )
    });
    let check = "ended early";
    let last = facts.seen.and_then(|seen| seen.incidents.last());
    if let Some(Incident::Stopped { step, signal }) = last {
        return Some(finding(
            Severity::Note,
            check,
            say!(
                lang,
                "the job stopped after step {step}, because {signal} asked it to",
                "{signal} 요청으로 스텝 {step} 이후 작업이 중단됨"
            ),
            say!(lang, "it has saved before", "중단하기 전에 저장했습니다"),
            resume,
        ));
    }
    Some(match facts.failed {
        Some(failed) => {
            let error = failed
                .error
                .as_ref()
                .filter(|error| **error != failed.cause);
            let what = match (lang, error) {
                // The launcher's own words are English, and say more.
                (Lang::En, None) => failed.cause.clone(),
                (Lang::En, Some(error)) => format!("{}: {error}", failed.cause),
                (Lang::Ko, _) => failed.text(lang),
            };
            let why = match &failed.log {
                Some(log) => say!(
                    lang,
                    "that ended the job; its output is in {log}",
                    "이 때문에 작업이 끝났습니다. 출력: {log}"
                ),
                None => say!(lang, "that ended the job", "이 때문에 작업이 끝났습니다"),
            };
            finding(
                Severity::Error,
                check,
                what,
                why,
                (failed.hint.as_deref()).map_or(resume, |hint| advice(lang, hint).to_owned()),
            )
        }
        None => {
            let steps = facts.seen?.steps;
            finding(
                Severity::Error,
                check,
                say!(
                    lang,
                    "the job ended after step {steps} without a word",
                    "스텝 {steps} 이후 아무 기록 없이 작업이 끝남"
                ),
                say!(
                    lang,
                    "its launcher was killed too, or it was started by `paceline run`, torchrun or srun, whose output has the reason; or it runs on another machine",
                    "런처도 함께 강제 종료되었거나, `paceline run`, torchrun, srun으로 시작해 그쪽 출력에 이유가 있거나, 다른 머신에서 실행 중입니다"
                ),
                resume,
            )
        }
    })
}

/// Time that was lost.
fn slow(seen: &Seen, lang: Lang) -> Option<Finding> {
    let slow = |what, why, fix| Some(finding(Severity::Warning, "slow", what, why, fix));
    let Some(end) = &seen.end else {
        let last: Vec<f64> = seen
            .waited
            .pieces()
            .iter()
            .rev()
            .take(LAST)
            .map(Piece::mean)
            .collect();
        let waited = last.iter().sum::<f64>() / last.len().max(1) as f64;
        if waited / 100.0 <= WAITED_MAX {
            return None;
        }
        return slow(
            say!(
                lang,
                "rank 0 waited for other ranks in {waited:.0} % of its last steps",
                "최근 스텝의 {waited:.0} % 동안 랭크 0이 다른 랭크를 기다림"
            ),
            say!(
                lang,
                "another rank is slower, or there is little to compute between two all-reduces",
                "더 느린 랭크가 있거나, 두 all-reduce 사이에 계산할 것이 적습니다"
            ),
            say!(
                lang,
                "the end of the job says which; `paceline watch` shows the waits of all steps",
                "어느 랭크인지는 작업이 끝날 때 나옵니다. 스텝별 대기 시간은 `paceline watch`로 볼 수 있습니다"
            ),
        );
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
        let waited = data_share(end) * 100.0;
        return slow(
            say!(
                lang,
                "a rank waited for data in {waited:.0} % of the time",
                "전체 시간의 {waited:.0} % 동안 데이터를 기다린 랭크가 있음"
            ),
            say!(
                lang,
                "samples are read and decoded more slowly than they are used",
                "샘플을 쓰는 속도보다 읽고 디코딩하는 속도가 느립니다"
            ),
            say!(
                lang,
                "--workers N reads with more threads for each rank; put the data on a faster disk, or make it smaller once",
                "--workers N으로 랭크마다 더 많은 스레드로 읽거나, 데이터를 더 빠른 디스크로 옮기거나, 미리 작게 변환해 두세요"
            ),
        );
    }
    if least > 1.0 - WAITED_MAX {
        return None;
    }
    let at_once = end.usage.all_busy_share() * 100.0;
    let (most_percent, least_percent) = (most * 100.0, least * 100.0);
    match most - least > SPREAD {
        true => slow(
            say!(
                lang,
                "all ranks computed at once in {at_once:.0} % of the time; rank {busiest} was busy for {most_percent:.0} %, another one for {least_percent:.0} %",
                "모든 랭크가 동시에 계산한 시간은 {at_once:.0} %; 랭크 {busiest}의 계산 시간은 {most_percent:.0} %, 가장 짧은 랭크는 {least_percent:.0} %"
            ),
            say!(
                lang,
                "the others waited for rank {busiest}: its device or its cores are slower or shared, or it has more samples",
                "다른 랭크가 랭크 {busiest}의 계산을 기다렸습니다. 그 랭크의 장치나 코어가 느리거나 다른 작업과 나누어 쓰고 있거나, 샘플이 더 많습니다"
            ),
            say!(
                lang,
                "look at its machine with `paceline doctor` and `paceline gpu top`; --exclude-stragglers goes on without a slow rank",
                "그 머신을 `paceline doctor`와 `paceline gpu top`으로 확인하세요. --exclude-stragglers를 주면 느린 랭크를 빼고 계속합니다"
            ),
        ),
        false => slow(
            say!(
                lang,
                "all ranks computed at once in {at_once:.0} % of the time, and waited for each other equally",
                "모든 랭크가 동시에 계산한 시간은 {at_once:.0} %이고, 서로 기다린 시간은 고르게 나뉨"
            ),
            say!(
                lang,
                "a step has little to compute beside what it sends",
                "한 스텝에서 보내는 양에 비해 계산할 것이 적습니다"
            ),
            say!(
                lang,
                "a larger --global-batch, --accumulate, or --comm-hook bf16; `paceline compare 1 2 -- PROGRAM` shows whether more ranks pay",
                "--global-batch를 키우거나 --accumulate, --comm-hook bf16을 쓰세요. 랭크를 늘려 빨라지는지는 `paceline compare 1 2 -- PROGRAM`으로 잴 수 있습니다"
            ),
        ),
    }
}

/// The largest share of the time in which a rank waited for data.
fn data_share(end: &End) -> f64 {
    let waited = end
        .ranks
        .iter()
        .map(|rank| Duration::from_nanos(rank.waited_for_data_ns));
    share(waited.max().unwrap_or_default(), end.usage.total())
}

/// One rank whose threads leave cores idle, or whose GPU may not be the only one.
fn alone(seen: &Seen, lang: Lang) -> Option<Finding> {
    let start = seen.start.as_ref().filter(|start| start.world == 1)?;
    let (threads, cores) = (start.threads?, start.environment.cores?);
    if start.device.as_deref() != Some(CPU) {
        return Some(finding(
            Severity::Note,
            ONLY_SOME,
            say!(lang, "the job has one rank", "작업의 랭크는 하나임"),
            say!(
                lang,
                "it uses one GPU, however many there are",
                "GPU가 몇 개든 하나만 씁니다"
            ),
            say!(
                lang,
                "--use-gpu N; `paceline gpu top` shows which GPUs a job uses",
                "--use-gpu N을 주세요. 작업이 쓰는 GPU는 `paceline gpu top`으로 볼 수 있습니다"
            ),
        ));
    }
    (threads < cores).then(|| {
        finding(
            Severity::Note,
            ONLY_SOME,
            say!(
                lang,
                "the job's only rank computes on {threads} of {cores} cores",
                "하나뿐인 랭크가 코어 {cores}개 중 {threads}개에서 계산함"
            ),
            say!(
                lang,
                "the other cores have nothing to do",
                "다른 코어는 할 일이 없습니다"
            ),
            say!(
                lang,
                "--nproc-per-node N, or a larger --threads-per-rank",
                "--nproc-per-node N을 주거나 --threads-per-rank를 키우세요"
            ),
        )
    })
}

/// Steps that changed nothing.
fn skipped(seen: &Seen, lang: Lang) -> Option<Finding> {
    let is_lost = |incident: &&Incident| {
        matches!(
            incident,
            Incident::Skipped { .. } | Incident::WentBack { .. }
        )
    };
    let count = seen.incidents.iter().filter(is_lost).count();
    let is_least = seen.incidents_left_out > 0;
    (count > 0).then(|| {
        let what = match lang {
            Lang::En => format!(
                "{}{} had a loss or a gradient that was infinite or NaN",
                if is_least { "at least " } else { "" },
                counted(count, "step")
            ),
            Lang::Ko => format!(
                "손실이나 그래디언트가 무한대 또는 NaN이 된 스텝: {}{count}개",
                if is_least { "최소 " } else { "" }
            ),
        };
        finding(
            Severity::Warning,
            "wrong numbers",
            what,
            say!(
                lang,
                "the learning rate is too high, a sample is broken, or fp16 overflowed",
                "학습률이 너무 크거나, 잘못된 샘플이 있거나, fp16에서 오버플로가 났습니다"
            ),
            say!(
                lang,
                "a lower --lr, a longer --warmup, --clip-norm 1, or --precision bf16 in place of fp16",
                "--lr을 낮추거나 --warmup을 늘리거나 --clip-norm 1을 주거나, fp16 대신 --precision bf16을 쓰세요"
            ),
        )
    })
}

#[cfg(test)]
mod tests;
