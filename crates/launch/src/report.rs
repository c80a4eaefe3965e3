//! How a job ended, as data and as a report for people.

mod advice;
mod known;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use paceline_words::{Lang, Text, Word, count, joined, say, span};

use crate::output::TAIL_LINES;
use crate::plan::Plan;
use crate::signals;
use crate::stop::{Meaning, Stop, meaning};

/// "2 ranks go on", or wait for more nodes.
pub(crate) fn ranks_go_on(ranks: usize, is_held: bool, lang: Lang) -> String {
    let (wait, go) = match ranks {
        1 => ("waits", "goes"),
        _ => ("wait", "go"),
    };
    let ranks = count(lang, ranks, "rank", "랭크");
    match is_held {
        true => say!(
            lang,
            "{ranks} {wait} for more nodes",
            "{ranks}가 노드를 더 기다림"
        ),
        false => say!(lang, "{ranks} {go} on", "{ranks}로 계속함"),
    }
}

/// How a job ended.
#[derive(Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// The first failure in time, unless all ranks did well.
    pub failure: Option<Failure>,
    /// The signal by which the job was asked to stop, and did.
    pub stopped_by: Option<i32>,
    /// The step after which all ranks stopped because of it, if they said so.
    pub stopped_after: Option<u64>,
    /// From the first rank's start to the end of everything.
    pub elapsed: Duration,
    /// The same from the start of the last round, from which [`Failure::after`] counts.
    pub(crate) round_elapsed: Duration,
    /// How the job was run.
    pub plan: Plan,
    /// Processes of the job that even SIGKILL did not end, which happens when the kernel waits for a device.
    pub left_behind: Vec<u32>,
    /// How often the job was started again.
    pub restarts: u32,
    /// Why a job of several nodes ended without a failed rank: lost nodes, or too few.
    pub lost: Option<Lost>,
    /// What else people should know, one sentence each.
    pub notes: Vec<String>,
}

impl Outcome {
    /// The request that stopped the job, for a line of its own: only where its step is known or the job was only asked.
    pub(crate) fn stop(&self) -> Option<Stop> {
        let stop = Stop {
            signal: self.stopped_by?,
            step: self.stopped_after,
        };
        let is_news = stop.step.is_some() || meaning(stop.signal) == Meaning::Ask;
        is_news.then_some(stop)
    }

    /// The job's exit code: the failed rank's own, 128 + n for a signal, 4 for a stall, what
    /// [`Outcome::lost`] says, 0 if all is well.
    pub fn exit_code(&self) -> u8 {
        match (&self.failure, self.stopped_by) {
            (Some(failure), _) => failure.kind.exit_code(),
            (None, Some(signal)) => 128_u8.saturating_add(u8::try_from(signal).unwrap_or(0)),
            (None, None) => self.lost.as_ref().map_or(0, |lost| lost.exit_code),
        }
    }
}

/// Why a job of several nodes could not go on. Display is the whole reason, in English.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lost {
    /// For people.
    pub why: Text,
    /// 1 for lost nodes, 2 for nodes whose command lines or tokens contradict each other, 4 for nodes that did not come in time.
    pub exit_code: u8,
}

impl Lost {
    pub(crate) fn new(why: Text, exit_code: u8) -> Self {
        Self { why, exit_code }
    }

    /// What to do about it.
    pub fn hint(&self, lang: Lang) -> Option<String> {
        Some(match self.exit_code {
            2 => say!(
                lang,
                "give every node the same --nnodes and PACELINE_JOB_TOKEN, and a --node-rank of its own, from 0 on",
                "모든 노드에 같은 --nnodes와 PACELINE_JOB_TOKEN을 주고, --node-rank는 0부터 노드마다 다르게 지정하세요"
            ),
            4 => say!(
                lang,
                "is the same command running on every node, with the same endpoint?",
                "모든 노드에서 같은 명령을 같은 엔드포인트로 실행했는지 확인하세요"
            ),
            _ => say!(
                lang,
                "where nodes may come and go (`--rdzv-backend c10d --nnodes MIN:MAX`), a job goes on with those that remain",
                "노드 수가 변할 수 있게 시작하면(`--rdzv-backend c10d --nnodes MIN:MAX`) 남은 노드로 계속 학습합니다"
            ),
        })
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.why, f)
    }
}

/// The rank that is to blame for a failed job. Display is the whole report.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Failure {
    /// Its rank in the job.
    pub rank: usize,
    /// Its rank on this machine.
    pub local_rank: usize,
    /// Its process.
    pub pid: u32,
    /// What it did.
    pub kind: FailureKind,
    /// It said that a setting of its program is wrong.
    pub is_misconfigured: bool,
    /// The rank that reported it, unless it is the failed rank's own end.
    pub reported_by: Option<usize>,
    /// When, from the start of the round that it ended: of the job, or of its last restart.
    pub after: Duration,
    /// How it said why: in the file of `TORCHELASTIC_ERROR_FILE`, as a panic or as a Python traceback.
    pub error: Option<RankError>,
    /// The last lines it wrote to standard error, or to standard output if it wrote none there.
    pub last_lines: Vec<String>,
    /// They are the newest on this launcher's standard error, so the report does not repeat them.
    pub(crate) are_on_console: bool,
    /// What it was doing, such as `in the backward pass at step 42`.
    pub activity: Option<Text>,
    /// Its log file.
    pub log: Option<PathBuf>,
    /// The ranks that did not end well because of it.
    pub victims: Vec<usize>,
    /// Whether all ranks ended with this error, which this one had on behalf of all: it blames itself on the job page.
    #[serde(default)]
    pub is_common: bool,
    /// Where it ran, in a job of several nodes.
    pub node: Option<Node>,
    /// The rank of another node that it said it failed because of.
    pub blames: Option<usize>,
    /// Ranks of other nodes that failed too without saying because of whom, the nearest first.
    pub also: Vec<AlsoFailed>,
}

/// A rank of another node that failed too, and how far from the first failure.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct AlsoFailed {
    /// Its rank in the job.
    pub rank: usize,
    /// Where it ran.
    pub node_rank: usize,
    /// The same as a host.
    pub host: String,
    /// How much later, in microseconds.
    pub later_us: u64,
    /// By how many microseconds that may be wrong; `None` if the clocks of the nodes were not compared.
    pub bound_us: Option<u64>,
}

impl AlsoFailed {
    /// Whether it failed later for certain.
    pub fn is_later(&self) -> bool {
        self.bound_us.is_some_and(|bound| self.later_us > bound)
    }

    /// The same as a sentence.
    pub fn text(&self, lang: Lang) -> String {
        let millis = |micros: u64| Duration::from_micros(micros).as_secs_f64() * 1e3;
        let when = match self.bound_us {
            Some(bound) if self.is_later() => {
                let (later, bound) = (millis(self.later_us), millis(bound));
                say!(
                    lang,
                    "{later:.1} ms later, give or take {bound:.1} ms",
                    "{later:.1} ms 뒤(오차 {bound:.1} ms)"
                )
            }
            Some(bound) => {
                let within = millis(self.later_us.saturating_add(bound));
                say!(
                    lang,
                    "within {within:.1} ms of it; the nodes' clocks cannot tell which was first",
                    "{within:.1} ms 이내, 노드 사이의 시계 오차 때문에 어느 쪽이 먼저인지는 알 수 없음"
                )
            }
            None => say!(
                lang,
                "too; the nodes' clocks were not compared, so it may have been first",
                "노드 사이의 시계를 비교하지 못했으므로 이쪽이 먼저일 수도 있음"
            ),
        };
        let (rank, node, host) = (self.rank, self.node_rank, &self.host);
        say!(
            lang,
            "rank {rank} (node {node}, host {host}) failed {when}",
            "함께 실패한 랭크 {rank}(노드 {node}, 호스트 {host}): {when}"
        )
    }
}

/// One node of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Node {
    /// Its number in the round.
    pub rank: usize,
    /// Its host.
    pub host: String,
}

/// Why a rank failed, in its own words.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct RankError {
    /// What a panic says, or the exception.
    pub message: String,
    /// The lines of the panic or of the traceback, at most 60.
    pub traceback: Vec<String>,
}

impl RankError {
    /// The message without the advice that Paceline's errors end with, and the advice.
    pub(crate) fn parts(&self) -> (&str, Option<&str>) {
        match self.message.rsplit_once("\nhint: ") {
            Some((message, hint)) => (message, Some(hint)),
            None => (&self.message, None),
        }
    }

    /// The advice, in the reader's language if it is known.
    fn hint(&self, lang: Lang) -> Option<&str> {
        let hint = self.parts().1?;
        Some(paceline_words::advice(lang, hint))
    }

    /// The message and the advice, below a line about the rank.
    pub(crate) fn in_lines(&self, lang: Lang) -> String {
        let message = self.parts().0.replace('\n', "\n    ");
        let hint = self.hint(lang);
        let hint = hint.map(|hint| say!(lang, "  hint: {hint}\n", "  조치: {hint}\n"));
        let hint = hint.unwrap_or_default();
        say!(
            lang,
            "  its error: {message}\n{hint}",
            "  오류: {message}\n{hint}"
        )
    }
}

/// What a rank did that ended the job.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum FailureKind {
    /// It exited with this code, which is not 0.
    ExitCode(i32),
    /// A signal that the launcher did not send ended it.
    Signal {
        /// The signal's number.
        number: i32,
        /// The signal's name, such as `SIGKILL`.
        name: String,
        /// Whether it left a core dump.
        core: bool,
    },
    /// It exited with code 0 while another rank still needed it, or without the word that it is done, which it had promised.
    LeftEarly,
    /// It is alive, and another rank gave up waiting for it.
    Stalled {
        /// The state of its process in words.
        state: Text,
    },
}

impl FailureKind {
    pub(crate) fn signal(number: i32, core: bool) -> Self {
        Self::Signal {
            number,
            name: signals::name(number),
            core,
        }
    }

    fn exit_code(&self) -> u8 {
        match self {
            // The kernel keeps eight bits of it.
            Self::ExitCode(code) => u8::try_from(*code & 0xff).unwrap_or(1),
            Self::Signal { number, .. } => {
                128_u8.saturating_add(u8::try_from(*number).unwrap_or(0))
            }
            Self::LeftEarly => 1,
            Self::Stalled { .. } => 4,
        }
    }
}

impl Failure {
    /// Why starting the job again would only repeat this. Code 2 stands for a wrong command line or configuration by
    /// convention of shells, argparse, clap and this project.
    pub(crate) fn is_for_good(&self) -> Option<Word> {
        const USAGE: Word = Word::new(
            "exit code 2 stands for a wrong command line or configuration",
            "종료 코드 2는 잘못된 명령줄이나 설정을 뜻함",
        );
        const SETTING: Word = Word::new(
            "the rank says that a setting of its program is wrong",
            "랭크가 프로그램의 설정이 잘못되었다고 알림",
        );
        match self.kind {
            FailureKind::ExitCode(2) => Some(USAGE),
            FailureKind::ExitCode(_) if self.is_misconfigured => Some(SETTING),
            _ => None,
        }
    }

    /// One sentence: who did what. In English it is also what the other ranks are told.
    pub(crate) fn headline(&self, lang: Lang) -> String {
        let ((what, why), who) = (self.sentence(lang), self.who(lang));
        match lang {
            Lang::En => format!("{who} {what}{why}"),
            Lang::Ko => format!("{who}: {what}{why}"),
        }
    }

    /// The same with the time, for a job that goes on.
    pub(crate) fn incident(&self, lang: Lang) -> String {
        let ((what, why), who) = (self.sentence(lang), self.who(lang));
        let seconds = self.after.as_secs_f64();
        say!(
            lang,
            "{who} {what} after {seconds:.1} s{why}",
            "{who}: 시작 {seconds:.1}초 후 {what}{why}"
        )
    }

    fn who(&self, lang: Lang) -> String {
        let (rank, pid) = (self.rank, self.pid);
        match &self.node {
            Some(Node { rank: node, host }) => say!(
                lang,
                "rank {rank} (node {node}, host {host}, pid {pid})",
                "랭크 {rank}(노드 {node}, 호스트 {host}, pid {pid})"
            ),
            None => say!(lang, "rank {rank} (pid {pid})", "랭크 {rank}(pid {pid})"),
        }
    }

    /// What it did, and the explanation that follows, if there is one.
    fn sentence(&self, lang: Lang) -> (String, String) {
        match &self.kind {
            FailureKind::ExitCode(code) => (
                say!(lang, "exited with code {code}", "종료됨(종료 코드 {code})"),
                String::new(),
            ),
            FailureKind::Signal { number, name, core } => {
                let core = match core {
                    true => say!(lang, ", core dumped", ", 코어 덤프 있음"),
                    false => String::new(),
                };
                let what = say!(
                    lang,
                    "was killed by signal {number} ({name}{core})",
                    "시그널 {number}({name}{core})에 의해 종료됨"
                );
                (what, String::new())
            }
            FailureKind::LeftEarly => {
                let when = match self.reported_by {
                    Some(rank) => say!(
                        lang,
                        "while rank {rank} still needed it",
                        "랭크 {rank}에서 아직 필요한 상태였음"
                    ),
                    None => say!(lang, "before its work was done", "할 일이 남은 상태였음"),
                };
                (
                    say!(lang, "left early", "먼저 종료됨"),
                    say!(
                        lang,
                        ": it exited with code 0 {when}",
                        ": 종료 코드는 0이지만 {when}"
                    ),
                )
            }
            FailureKind::Stalled { state } => {
                let by = self.reported_by.map_or(String::new(), |rank| {
                    say!(
                        lang,
                        "rank {rank} gave up waiting for it; ",
                        "랭크 {rank}에서 기다리다 포기함, "
                    )
                });
                let state = state.of(lang);
                (
                    say!(lang, "stalled", "멈춤"),
                    say!(
                        lang,
                        ": {by}its process is {state}",
                        ": {by}프로세스 상태: {state}"
                    ),
                )
            }
        }
    }

    /// Whether a message is among the last lines; then it need not be said again.
    fn last_lines_have(&self, message: &str) -> bool {
        let first = message.lines().next().unwrap_or_default();
        self.last_lines.iter().any(|line| line.contains(first))
    }

    /// A path on the rank's machine, which is named in a job of several nodes.
    fn place(&self, path: &Path, lang: Lang) -> String {
        let path = path.display();
        match &self.node {
            Some(Node { host, .. }) => {
                say!(lang, "{path} on host {host}", "호스트 {host}의 {path}")
            }
            None => path.to_string(),
        }
    }

    /// What to do about it: the advice of the rank's own error, if that has one.
    pub fn hint(&self, lang: Lang) -> Option<String> {
        match &self.error {
            // An error that is told in full, without advice, leaves nothing to look for.
            Some(error) if self.last_lines.is_empty() => {
                let own = error.hint(lang).map(str::to_owned);
                own.or_else(|| Some(advice::known(self)?.of(lang).to_owned()))
            }
            _ => Some(advice::of(self, lang)),
        }
    }

    /// The whole report.
    pub fn text(&self, lang: Lang) -> String {
        let ((what, why), seconds) = (self.sentence(lang), self.after.as_secs_f64());
        let who = self.who(lang);
        let message = self.error.as_ref().map(|error| error.parts().0);
        let mut text = match (&self.kind, message) {
            // By the convention of this code, no rank is to blame.
            (FailureKind::ExitCode(2), Some(message)) => {
                return say!(
                    lang,
                    "{message}\n  so {who} {what} after {seconds:.3} s",
                    "{message}\n  이 때문에 {who}: 시작 {seconds:.3}초 후 {what}"
                );
            }
            _ if self.is_common => say!(
                lang,
                "all ranks {what} with the same error, first {who} after {seconds:.3} s",
                "모든 랭크가 같은 오류로 {what}, 첫 번째는 시작 {seconds:.3}초 후 {who}"
            ),
            _ => say!(
                lang,
                "{who} {what} after {seconds:.3} s{why}",
                "{who}: 시작 {seconds:.3}초 후 {what}{why}"
            ),
        };
        for line in self.details(lang) {
            text += "\n  ";
            text += &line;
        }
        text
    }

    /// The lines below the first one.
    fn details(&self, lang: Lang) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(activity) = &self.activity {
            let activity = activity.of(lang);
            lines.push(say!(lang, "it was {activity}", "하던 일: {activity}"));
        }
        if let Some(error) = &self.error
            && !self.last_lines_have(&error.message)
        {
            let message = error.parts().0.replace('\n', "\n    ");
            lines.push(say!(lang, "its error: {message}", "오류: {message}"));
            let skipped = error.traceback.len().saturating_sub(TAIL_LINES);
            let traceback = error.traceback.iter().skip(skipped);
            lines.extend(traceback.map(|line| format!("  {line}")));
        }
        let log = self.log.as_ref().map(|log| self.place(log, lang));
        match (self.last_lines.as_slice(), log) {
            ([], Some(log)) if self.error.is_none() => {
                lines.push(say!(lang, "it printed nothing ({log})", "출력 없음({log})"));
            }
            ([], _) => {}
            (_, None) if self.are_on_console => {
                lines.push(say!(
                    lang,
                    "its last lines are above",
                    "마지막 출력은 위에 있음"
                ));
            }
            (_, Some(log)) if self.are_on_console => lines.push(say!(
                lang,
                "its last lines are above, and in its log ({log})",
                "마지막 출력은 위와 로그({log})에 있음"
            )),
            (last, log) => {
                lines.push(match log {
                    Some(log) => say!(
                        lang,
                        "last lines of its log ({log}):",
                        "로그의 마지막 줄({log}):"
                    ),
                    None => say!(lang, "its last lines:", "마지막 출력:"),
                });
                lines.extend(last.iter().map(|line| format!("  {line}")));
            }
        }
        lines.extend(self.also.iter().map(|also| also.text(lang)));
        match self.victims.as_slice() {
            [] => {}
            [one] => lines.push(say!(
                lang,
                "rank {one} was stopped because of it",
                "이 때문에 중단된 랭크: {one}"
            )),
            many => {
                let ranks = Ranks(many).text(lang);
                lines.push(say!(
                    lang,
                    "ranks {ranks} were stopped because of it",
                    "이 때문에 중단된 랭크: {ranks}"
                ));
            }
        }
        lines
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(Lang::En))
    }
}

/// Rank numbers for people.
pub(crate) struct Ranks<'a>(pub(crate) &'a [usize]);

impl Ranks<'_> {
    /// `0, 2 and 4 to 7`.
    pub(crate) fn text(&self, lang: Lang) -> String {
        let runs = self.0.chunk_by(|a, b| a + 1 == *b);
        let runs = runs.flat_map(|run| parts_of_run(run, lang));
        joined(runs.collect(), usize::MAX, lang)
    }
}

/// Two in a row are named, three or more are a range.
fn parts_of_run(run: &[usize], lang: Lang) -> Vec<String> {
    match run {
        [first, _, .., last] => vec![span(first, last, lang)],
        few => few.iter().map(usize::to_string).collect(),
    }
}

#[cfg(test)]
mod tests;
