//! Why a job has failed, as its launcher has written it beside the logs.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::path::Path;

use paceline_words::{Lang, plain, say};
use serde::Deserialize;

use crate::tail::METRICS;

/// Where a launcher writes about a failure, in the run directory.
pub const FAILURE: &str = "logs/error.json";

/// Most bytes of such a file.
const BYTES_MAX: u64 = 1 << 20;

/// Longest text of one, part of which other programs have written.
const TEXT_MAX: usize = 2000;

/// A failure, as the launcher has reported it; its texts are English, and a terminal can be given them.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct JobFailure {
    /// What has happened, with the rank.
    pub cause: String,
    /// The rank that failed; nothing if a node was lost.
    pub rank: Option<u64>,
    /// Its host, or the launcher's.
    pub host: Option<String>,
    /// The error that the rank has left.
    pub error: Option<String>,
    /// Advice.
    pub hint: Option<String>,
    /// The file with its output.
    pub log: Option<String>,
    /// How the rank has exited.
    pub exit_code: Option<i64>,
    /// The signal that has killed it.
    pub signal: Option<i64>,
    /// The signal's name.
    pub signal_name: Option<String>,
}

impl JobFailure {
    /// The failure of the last start of a run; not one of an earlier start, since when metrics were written.
    #[must_use]
    pub fn read(folder: &Path) -> Option<Self> {
        let file = File::open(folder.join(FAILURE)).ok()?;
        let written = |file: io::Result<Metadata>| file.and_then(|file| file.modified()).ok();
        // A job that fails before its first step leaves no metrics.
        if written(file.metadata()) < written(fs::metadata(folder.join(METRICS))) {
            return None;
        }
        let mut text = Vec::new();
        file.take(BYTES_MAX).read_to_end(&mut text).ok()?;
        let told: Self = serde_json::from_slice(&text).ok()?;
        let plain = |text: &str| plain(text, TEXT_MAX);
        let known = |text: Option<String>| text.as_deref().map(plain);
        // Advice may follow, which is in `hint` too.
        let first = |text: &str| plain(text.lines().next().unwrap_or_default());
        Some(Self {
            cause: first(&told.cause),
            host: known(told.host),
            error: told.error.as_deref().map(first),
            hint: known(told.hint),
            log: known(told.log),
            signal_name: known(told.signal_name),
            ..told
        })
    }

    /// The failure in a sentence: rank, host and cause, and the error that the rank has left. Without the words for it, the launcher's.
    #[must_use]
    pub fn text(&self, lang: Lang) -> String {
        let known = self
            .rank
            .and_then(|rank| self.of_rank(rank, lang))
            .unwrap_or_else(|| {
                let cause = &self.cause;
                // The launcher of several nodes names the host itself.
                match self.host.as_deref() {
                    Some(host) if !cause.contains(&format!("host {host}")) => {
                        say!(lang, "{cause} (on {host})", "{cause} (호스트 {host})")
                    }
                    _ => cause.clone(),
                }
            });
        let told = match &self.error {
            Some(error) if *error != self.cause => format!("{known}: {error}"),
            _ => known,
        };
        say!(lang, "the job failed: {told}", "작업 실패: {told}")
    }

    fn of_rank(&self, rank: u64, lang: Lang) -> Option<String> {
        let host = self.host.as_deref().unwrap_or("?");
        Some(match (self.signal, self.exit_code) {
            (Some(number), _) => {
                let name = self.signal_name.as_deref().unwrap_or("?");
                say!(
                    lang,
                    "rank {rank} on {host} was killed by signal {number} ({name})",
                    "랭크 {rank}(호스트 {host}): 시그널 {number}({name})에 의해 종료됨"
                )
            }
            (None, Some(code)) if code != 0 => say!(
                lang,
                "rank {rank} on {host} exited with code {code}",
                "랭크 {rank}(호스트 {host}): 종료됨(종료 코드 {code})"
            ),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    fn failure(text: &str) -> JobFailure {
        serde_json::from_str(text).expect("a failure")
    }

    #[test]
    fn a_failure_is_told_with_rank_host_and_cause() {
        let killed = failure(
            r#"{"cause":"rank 1 (pid 7) was killed by signal 9 (SIGKILL)","rank":1,"host":"node1","signal":9,"signal_name":"SIGKILL","exit_code":null,"error":null}"#,
        );
        assert_eq!(
            killed.text(Lang::En),
            "the job failed: rank 1 on node1 was killed by signal 9 (SIGKILL)"
        );
        assert_eq!(
            killed.text(Lang::Ko),
            "작업 실패: 랭크 1(호스트 node1): 시그널 9(SIGKILL)에 의해 종료됨"
        );
        let raised = failure(
            r#"{"cause":"rank 0 (pid 7) exited with code 1","rank":0,"host":"a","exit_code":1,"error":"ValueError: no data"}"#,
        );
        assert_eq!(
            raised.text(Lang::En),
            "the job failed: rank 0 on a exited with code 1: ValueError: no data"
        );
        let lost = failure(r#"{"cause":"node 2 (b) is lost","host":"a","kind":"lost"}"#);
        assert_eq!(
            lost.text(Lang::En),
            "the job failed: node 2 (b) is lost (on a)"
        );
    }

    #[test]
    fn an_earlier_failure_and_a_damaged_file_are_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("logs")).expect("a folder");
        let read = || JobFailure::read(folder.path());
        fs::write(path(METRICS), "").expect("written");
        assert_eq!(read(), None);
        fs::write(path(FAILURE), "{\"cause\":\"a\\u001b[2Jb\"}").expect("written");
        let at = |name: &str, seconds| {
            let file = File::options()
                .write(true)
                .open(path(name))
                .expect("a file");
            let at = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            file.set_modified(at).expect("a time");
        };
        at(METRICS, 10);
        at(FAILURE, 20);
        assert_eq!(read().expect("a failure").cause, "a [2Jb");
        at(METRICS, 30);
        assert_eq!(read(), None, "since then metrics were written");
        fs::write(path(FAILURE), "{").expect("written");
        assert_eq!(read(), None);
    }
}
