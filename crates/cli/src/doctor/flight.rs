//! `paceline doctor`: reads flight records and prints what they come to.

use std::io::{self, Write};
use std::path::Path;

use paceline_doctor::flight::{
    Diagnosis, FlightReport, Folder, Lag, RankReport, Skipped, diagnose, read_folder,
};
use paceline_gpu::columns::with_numbers;
use paceline_words::{Lang, say};
use serde::Serialize;

use crate::exit::{Exit, Failure};
use crate::flags::print;

/// Rows of the table; of more ranks the culprits and the first ones are shown.
const ROWS_MAX: usize = 64;
/// Files that cannot be read and are named in an error.
const SKIPPED_MAX: usize = 4;

/// Prints what went wrong, the job that wrote last first.
///
/// *Errors*: a folder without a record that can be read is wrong usage.
pub(super) fn read(dir: &Path, lang: Lang, json: bool) -> Result<Exit, Failure> {
    let report = Report::new(dir, lang)?;
    print(|out| report.write(lang, json, out)).map(|_| report.exit())
}

/// What is printed; its fields are those of the JSON object.
#[derive(Serialize)]
struct Report {
    jobs: Vec<JobReport>,
    skipped: Vec<Skipped>,
}

/// One start of one job.
#[derive(Serialize)]
struct JobReport {
    run_id: String,
    restart: u32,
    #[serde(flatten)]
    diagnosis: FlightReport,
}

impl Report {
    fn new(dir: &Path, lang: Lang) -> Result<Self, Failure> {
        let folder = read_folder(dir).map_err(|error| {
            Failure::usage(say!(
                lang,
                "cannot read {}: {error}",
                "{}: 읽을 수 없음: {error}",
                dir.display()
            ))
        })?;
        if folder.jobs.is_empty() {
            return Err(no_records(dir, &folder.skipped, lang));
        }
        Ok(Self::of(folder, lang))
    }

    fn of(folder: Folder, lang: Lang) -> Self {
        let report = |job: paceline_doctor::flight::JobDumps| JobReport {
            run_id: job.run_id,
            restart: job.restart,
            diagnosis: diagnose(&job.dumps, lang),
        };
        Self {
            jobs: folder.jobs.into_iter().map(report).collect(),
            skipped: folder.skipped,
        }
    }

    fn exit(&self) -> Exit {
        if self.jobs.iter().any(|job| job.diagnosis.has_fault()) {
            Exit::JobFailed
        } else {
            Exit::Done
        }
    }

    /// Each finding's headline first; or one JSON object on one line.
    fn write(&self, lang: Lang, json: bool, out: &mut impl Write) -> io::Result<()> {
        if json {
            serde_json::to_writer(&mut *out, self)?;
            return writeln!(out);
        }
        for (place, job) in self.jobs.iter().enumerate() {
            if place > 0 {
                let (id, restart) = (plain(&job.run_id), job.restart);
                let heading = say!(
                    lang,
                    "job {id} before it, restart {restart}:",
                    "그 이전의 작업 {id}, 재시작 {restart}:"
                );
                writeln!(out, "\n{heading}")?;
            }
            job.write(lang, out)?;
        }
        for Skipped { file, reason } in &self.skipped {
            let (file, reason) = (plain(file), plain(reason));
            let line = say!(lang, "skipped {file}: {reason}", "건너뜀 {file}: {reason}");
            writeln!(out, "{line}")?;
        }
        Ok(())
    }
}

impl JobReport {
    fn write(&self, lang: Lang, out: &mut impl Write) -> io::Result<()> {
        for Diagnosis {
            sentence, details, ..
        } in &self.diagnosis.findings
        {
            let (headline, rest) = parts(sentence, lang);
            writeln!(out, "{}", plain(headline))?;
            for line in rest.chain(details.iter().map(String::as_str)) {
                writeln!(out, "  {}", plain(line))?;
            }
        }
        for note in &self.diagnosis.notes {
            let note = plain(note);
            writeln!(out, "{}", say!(lang, "note: {note}", "참고: {note}"))?;
        }
        writeln!(out)?;
        self.write_table(lang, out)
    }

    fn write_table(&self, lang: Lang, out: &mut impl Write) -> io::Result<()> {
        let ranks = &self.diagnosis.ranks;
        let culprits = &self.diagnosis.findings[0].culprits;
        let mut shown: Vec<&RankReport> = ranks.iter().collect();
        if shown.len() > ROWS_MAX {
            shown.sort_by_key(|rank| !culprits.contains(&rank.rank));
            shown.truncate(ROWS_MAX);
        }
        let header = match lang {
            Lang::En => ["rank", "finished", "late p50", "late p99", "host:pid", "it"],
            Lang::Ko => [
                "랭크",
                "끝낸 연산",
                "지연 p50",
                "지연 p99",
                "호스트:pid",
                "상태",
            ],
        };
        let mut rows = vec![header.map(str::to_owned).to_vec()];
        rows.extend(shown.iter().map(|rank| row(rank).to_vec()));
        write!(out, "{}", with_numbers(4, &rows))?;
        match ranks.len() - shown.len() {
            0 => Ok(()),
            more => {
                let line = say!(
                    lang,
                    "and {more} more ranks, all of them with --json",
                    "그 밖에 랭크 {more}개, 전체는 --json으로 볼 수 있습니다"
                );
                writeln!(out, "{line}")
            }
        }
    }
}

/// A sentence as a headline and short lines: it is cut at its first colon or semicolon, and then at semicolons. In Korean a colon follows
/// the subject.
fn parts(sentence: &str, lang: Lang) -> (&str, impl Iterator<Item = &str>) {
    let cuts: &[&str] = match lang {
        Lang::En => &[": ", "; "],
        Lang::Ko => &["; "],
    };
    let cut = cuts.iter().filter_map(|cut| sentence.find(cut)).min();
    let (headline, rest) = sentence.split_at(cut.unwrap_or(sentence.len()));
    let rest = rest.get(2..).unwrap_or_default().split("; ");
    (headline, rest.filter(|part| !part.is_empty()))
}

fn row(rank: &RankReport) -> [String; 6] {
    let lag = |of: fn(&Lag) -> u64| {
        let ns = rank.lag.as_ref().map(of);
        ns.map_or("-".to_owned(), |ns| format!("{:.1} ms", ns as f64 / 1e6))
    };
    [
        rank.rank.to_string(),
        rank.finished
            .map_or("-".to_owned(), |seq| format!("#{seq}")),
        lag(|lag| lag.p50_ns),
        lag(|lag| lag.p99_ns),
        if rank.has_record {
            format!("{}:{}", plain(&rank.host), rank.pid)
        } else {
            "-".to_owned()
        },
        plain(&rank.state),
    ]
}

fn no_records(dir: &Path, skipped: &[Skipped], lang: Lang) -> Failure {
    let dir = dir.display();
    if skipped.is_empty() {
        let message = say!(
            lang,
            "there are no flight records in {dir}",
            "{dir}: 플라이트 레코드가 없습니다"
        );
        let hint = say!(
            lang,
            "ranks leave records when a job fails that was started with `paceline run --flight-dir DIR`",
            "`paceline run --flight-dir DIR`로 시작한 작업이 실패하면 랭크들이 기록을 남깁니다"
        );
        return Failure::new(Exit::Usage, message, Some(hint));
    }
    let reasons: Vec<String> = skipped
        .iter()
        .take(SKIPPED_MAX)
        .map(|skipped| format!("{}: {}", plain(&skipped.file), plain(&skipped.reason)))
        .collect();
    let (count, reasons) = (skipped.len(), reasons.join("; "));
    Failure::usage(say!(
        lang,
        "none of the {count} flight records in {dir} can be read: {reasons}",
        "{dir}: 플라이트 레코드 {count}개를 모두 읽을 수 없습니다: {reasons}"
    ))
}

/// Text of a record, without what a terminal would obey.
fn plain(text: &str) -> String {
    paceline_words::plain(text, usize::MAX)
}

#[cfg(test)]
mod tests {
    use paceline_collective::flight::Dump;

    use super::*;

    /// Rank `rank` of two; rank 1 has not joined operation 2.
    fn dump(rank: usize, restart: u32) -> String {
        let finished = |seq: u64| {
            format!(
                r#"{{"seq":{seq},"op":"all-reduce","reduce":"sum","dtype":"f32","elements":64,"bytes":256,
                "algorithm":"direct","state":"finished","submitted_ns":1,"started_ns":1,"arrived_ns":2000001,
                "ended_ns":2000002}}"#
            )
        };
        let open = r#",{"seq":2,"op":"all-reduce","reduce":"sum","dtype":"f32","elements":64,"bytes":256,
            "algorithm":"direct","state":"failed","submitted_ns":5,"started_ns":5,"ended_ns":60000000005}"#;
        let records = finished(1) + if rank == 0 { open } else { "" };
        format!(
            r#"{{"paceline_flight":1,"version":"0.1.0","job":"j","run_id":"none","restart":{restart},"rank":{rank},
            "world":2,"host":"b","pid":{pid},"taken_unix_ns":{taken},"taken_ns":60000000009,
            "doing":"is in the data loader\u001b[31m at step 812 since 60 s","groups":[{{"name":"world","ranks":[0,1],
            "transport":"shm","submitted":2,"failure":{{"kind":"deadline","text":"too late","culprits":[1],
            "at_ns":60000000005}},"records":[{records}]}}]}}"#,
            pid = 4711 + rank,
            taken = 1_000_000_000_000_000_u64 + u64::from(restart),
        )
    }

    fn folder(files: &[(&str, String)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).expect("written");
        }
        folder
    }

    fn printed(report: &Report, json: bool) -> String {
        let mut out = Vec::new();
        report.write(Lang::En, json, &mut out).expect("memory");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn the_dumps_of_these_tests_are_dumps() {
        assert_eq!(Dump::parse(dump(0, 0).as_bytes()).map(|d| d.rank), Ok(0));
    }

    #[test]
    fn a_headline_and_short_lines_come_first_and_every_rank_has_a_row() {
        let files = [
            ("rank_0.none.0.json", dump(0, 0)),
            ("rank_1.none.0.json", dump(1, 0)),
            ("rank_2.none.0.json", "{}".to_owned()),
        ];
        let report = Report::new(folder(&files).path(), Lang::En).expect("records");
        let lines: Vec<String> = printed(&report, false).lines().map(str::to_owned).collect();
        let expect = [
            "rank 1 (host b, pid 4712) never joined all-reduce #2",
            "  its last finished operation is #1",
            "  rank 0 waited in #2 for 60 s",
            "  rank 1 (host b, pid 4712) is in the data loader [31m at step 812 since 60 s",
            "  rank 0 says: too late",
            "",
            "rank  finished  late p50  late p99  host:pid  it",
            "   0        #1    0.0 ms    0.0 ms  b:4711    in all-reduce #2",
            "   1        #1    0.0 ms    0.0 ms  b:4712    is in the data loader [31m at step 812 since 60 s",
        ];
        assert_eq!(lines[..lines.len() - 1], expect);
        let last = &lines[lines.len() - 1];
        assert!(
            last.starts_with("skipped rank_2.none.0.json: no flight record: "),
            "{last}"
        );
        assert_eq!(report.exit(), Exit::JobFailed);
    }

    #[test]
    fn a_korean_reader_gets_the_same_in_korean() {
        let files = [("rank_0.json", dump(0, 0)), ("rank_1.json", dump(1, 0))];
        let report = Report::new(folder(&files).path(), Lang::Ko).expect("records");
        let mut out = Vec::new();
        report.write(Lang::Ko, false, &mut out).expect("memory");
        let text = String::from_utf8(out).expect("text");
        let expect = "랭크 1(호스트 b, pid 4712): all-reduce #2에 들어오지 않음\n  \
             마지막으로 끝낸 연산은 #1\n  \
             랭크 0: #2에서 60초 대기\n  \
             랭크 1(호스트 b, pid 4712): is in the data loader [31m at step 812 since 60 s\n  \
             랭크 0의 메시지: too late\n\n\
             랭크  끝낸 연산  지연 p50  지연 p99  호스트:pid  상태\n   \
             0         #1    0.0 ms    0.0 ms  b:4711      all-reduce #2에서 대기\n";
        assert!(text.starts_with(expect), "{text}");
    }

    #[test]
    fn a_missing_rank_has_a_row_and_a_note() {
        let report =
            Report::new(folder(&[("rank_0.json", dump(0, 0))]).path(), Lang::En).expect("records");
        let text = printed(&report, false);
        assert!(
            text.contains("\nnote: there is no record of rank 1\n"),
            "{text}"
        );
        assert!(
            text.ends_with("   1         -         -         -  -         left no record\n"),
            "{text}"
        );
    }

    #[test]
    fn nothing_wrong_ends_with_code_0() {
        let text = dump(1, 0).replace(r#""world":2"#, r#""world":1"#);
        let sound = text
            .replace(r#""rank":1"#, r#""rank":0"#)
            .replace("[0,1]", "[0]")
            .replace(r#""culprits":[1]"#, r#""culprits":[]"#)
            .replace(r#""failure":"#, r#""unknown":"#);
        let report =
            Report::new(folder(&[("rank_0.json", sound)]).path(), Lang::En).expect("records");
        assert_eq!(report.exit(), Exit::Done);
        let text = printed(&report, false);
        assert!(
            text.starts_with("the only rank finished the same 1 operation\n  nothing diverged\n"),
            "{text}"
        );
    }

    #[test]
    fn jobs_are_told_apart_and_the_last_comes_first() {
        let files = [
            ("rank_0.none.0.json", dump(0, 0)),
            ("rank_0.none.1.json", dump(0, 1)),
            ("rank_1.none.1.json", dump(1, 1)),
        ];
        let report = Report::new(folder(&files).path(), Lang::En).expect("records");
        let text = printed(&report, false);
        assert!(
            text.starts_with("rank 1 (host b, pid 4712) never joined"),
            "{text}"
        );
        assert!(
            text.contains("\njob none before it, restart 0:\nrank 1 left no record"),
            "{text}"
        );
    }

    #[test]
    fn json_has_the_findings_and_the_ranks() {
        let files = [("rank_0.json", dump(0, 0)), ("rank_1.json", dump(1, 0))];
        let report = Report::new(folder(&files).path(), Lang::En).expect("records");
        let text = printed(&report, true);
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let job = &json["jobs"][0];
        assert_eq!(job["run_id"], "none");
        assert_eq!(job["findings"][0]["cause"], "never-joined");
        assert_eq!(job["findings"][0]["culprits"], serde_json::json!([1]));
        assert_eq!(job["ranks"][1]["finished"], 1);
        assert_eq!(json["skipped"], serde_json::json!([]));
        assert_eq!(text.lines().count(), 1);
    }

    #[test]
    fn a_folder_without_records_is_wrong_usage() {
        let check = |path: &Path, words: &str| {
            let Err(failure) = Report::new(path, Lang::En) else {
                panic!("a report");
            };
            assert_eq!(failure.exit(), Exit::Usage);
            assert!(format!("{failure:?}").contains(words), "{failure:?}");
        };
        let empty = folder(&[]);
        check(empty.path(), "there are no flight records in ");
        check(&empty.path().join("gone"), "cannot read ");
        let bad = folder(&[("rank_0.json", "{}".to_owned())]);
        check(bad.path(), "none of the 1 flight records in ");
    }
}
