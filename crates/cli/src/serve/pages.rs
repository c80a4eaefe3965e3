//! The pages: a list of runs, a page for each, and what changes of it.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use paceline_report::words;
use paceline_report::{ReportError, Run, document, escaped, runs_below, sections, table};
use paceline_usage::figures::clock;
use paceline_words::{Lang, Word};

use crate::http::{Answer, Request};

const HTML: &str = "text/html; charset=utf-8";
const NOT_FOUND: &str = "404 Not Found";

/// Most runs that are kept in memory; the one that was asked for longest ago makes room.
const RUNS_KEPT: usize = 16;
/// How often a run is looked at while a browser shows it.
const INTERVAL: Duration = Duration::from_secs(1);
/// How often something is sent, so that a browser that has gone is noticed.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

/// Nothing but what is on the page itself, and the events of this server.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'";

/// Replaces the sections that have changed, and says when no more come.
const SCRIPT: &str = r#"<p id="lost" hidden>{}</p>
<script>
const source = new EventSource("events");
source.onmessage = (event) => {
  for (const [id, html] of JSON.parse(event.data)) document.getElementById(id).innerHTML = html;
};
source.onopen = () => { document.getElementById("lost").hidden = true; };
source.onerror = () => {
  document.getElementById("lost").hidden = false;
  if (source.readyState === EventSource.CLOSED) setTimeout(() => location.reload(), 5000);
};
</script>
"#;

pub(super) struct Pages {
    folder: PathBuf,
    lang: Lang,
    runs: Mutex<Vec<(PathBuf, Shared)>>,
}

/// A run that several browsers may show.
type Shared = Arc<Mutex<Run>>;

impl Pages {
    pub(super) fn new(folder: PathBuf, lang: Lang) -> Self {
        Self {
            folder,
            lang,
            runs: Mutex::new(Vec::new()),
        }
    }

    fn word(&self, word: Word) -> &'static str {
        word.of(self.lang)
    }

    /// `/` is the list, `/runs/NAME/` a run, `/runs/NAME/events` what changes of it.
    pub(super) fn answer(&self, request: &Request<'_>) -> Answer {
        let unknown = || Answer::text(NOT_FOUND, "there is no such page; the runs are at /");
        let answer = match request.path {
            "/" => Ok(self.list()),
            path => match path
                .strip_prefix("/runs/")
                .and_then(|rest| rest.split_once('/'))
            {
                Some((name, "")) => self.run(name).map(|run| self.page(&run)),
                Some((name, "events")) => self.run(name).map(|run| self.events(run)),
                _ => return unknown(),
            },
        };
        match answer {
            Ok(answer) => answer
                .with("Content-Security-Policy", POLICY)
                .with("Cache-Control", "no-store"),
            Err(ReportError::NoRun { .. } | ReportError::NoRuns { .. }) => unknown(),
            Err(error) => Answer::text("500 Internal Server Error", &error.to_string()),
        }
    }

    /// The runs in the folder now.
    fn folders(&self) -> Vec<(String, PathBuf)> {
        // A folder that has gone, or has no run yet, has none.
        let folders = runs_below(&self.folder).unwrap_or_default();
        let named = |folder: PathBuf| {
            let full = std::fs::canonicalize(&folder).unwrap_or_else(|_| folder.clone());
            Some((full.file_name()?.to_str()?.to_owned(), folder))
        };
        folders.into_iter().filter_map(named).collect()
    }

    fn list(&self) -> Answer {
        let head = [words::RUN, words::WRITTEN].map(|word| self.word(word));
        let row = |(name, folder): (String, PathBuf)| {
            let link = format!(
                "<a href=\"/runs/{}/\">{}</a>",
                encoded(&name),
                escaped(&name)
            );
            let written = age(&folder).map(|age| words::AGO.filled(self.lang, &[&clock(age)]));
            vec![link, written.unwrap_or_default()]
        };
        let rows: Vec<Vec<String>> = self.folders().into_iter().map(row).collect();
        let body = match rows.is_empty() {
            true => format!("<p>{}</p>\n", self.word(words::NO_RUN)),
            false => table(&head, &rows),
        };
        let html = document(self.word(words::RUNS), &body, self.lang);
        Answer::found(HTML, html.into_bytes())
    }

    /// The run of this name. Names are compared with those in the folder, so that none leads out of it.
    fn run(&self, name: &str) -> Result<Shared, ReportError> {
        let found = self
            .folders()
            .into_iter()
            .find(|(known, _)| encoded(known) == name);
        let Some((_, folder)) = found else {
            let folder = self.folder.clone();
            return Err(ReportError::NoRun { folder });
        };
        let kept = {
            let mut runs = lock(&self.runs);
            let place = runs.iter().position(|(kept, _)| *kept == folder);
            place.map(|place| {
                // The last one was asked for last.
                let kept = runs.remove(place);
                runs.push(kept.clone());
                kept.1
            })
        };
        if let Some(run) = kept {
            lock(&run).update()?;
            return Ok(run);
        }
        // Meanwhile other runs can be shown.
        let run = Arc::new(Mutex::new(Run::read(&folder)?));
        let mut runs = lock(&self.runs);
        if runs.len() >= RUNS_KEPT {
            runs.remove(0);
        }
        runs.push((folder, run.clone()));
        Ok(run)
    }

    fn page(&self, run: &Shared) -> Answer {
        let run = lock(run);
        let mut body = format!("<p><a href=\"/\">{}</a></p>\n", self.word(words::RUNS));
        for (id, html) in sections(&[&*run], self.lang) {
            let _ = writeln!(body, "<section id=\"{id}\">\n{html}</section>");
        }
        body += &SCRIPT.replace("{}", self.word(words::CUT_OFF));
        Answer::found(HTML, document(&run.name, &body, self.lang).into_bytes())
    }

    /// The sections that have changed, as one event after the other: first all of them, because the page may be older.
    fn events(&self, run: Shared) -> Answer {
        let lang = self.lang;
        let mut shown: HashMap<&'static str, String> = HashMap::new();
        let mut sent_at = Instant::now();
        let mut is_first = true;
        let next = move || {
            if !std::mem::take(&mut is_first) {
                std::thread::sleep(INTERVAL);
            }
            let mut changed = Vec::new();
            {
                let mut run = lock(&run);
                // A run that is gone stays as it was; the browser asks again and is told.
                run.update().ok()?;
                for (id, html) in sections(&[&*run], lang) {
                    if shown.get(id) != Some(&html) {
                        shown.insert(id, html.clone());
                        changed.push((id, html));
                    }
                }
            }
            if changed.is_empty() && sent_at.elapsed() < SIGN_OF_LIFE {
                return Some(Vec::new());
            }
            sent_at = Instant::now();
            Some(match changed.is_empty() {
                true => b":\n\n".to_vec(),
                false => {
                    let data = serde_json::to_string(&changed).expect("text always encodes");
                    format!("data: {data}\n\n").into_bytes()
                }
            })
        };
        Answer::stream("text/event-stream", Box::new(next))
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long ago a run has written its metrics.
fn age(run: &Path) -> Option<Duration> {
    let metadata = std::fs::metadata(run.join("metrics.jsonl")).ok()?;
    let written = metadata.modified().ok()?;
    Some(
        SystemTime::now()
            .duration_since(written)
            .unwrap_or_default(),
    )
}

/// A name as a part of an address.
fn encoded(name: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let mut text = String::new();
    for byte in name.bytes() {
        let _ = match is_plain(byte) {
            true => write!(text, "{}", char::from(byte)),
            false => write!(text, "%{byte:02X}"),
        };
    }
    text
}
