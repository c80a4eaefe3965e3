//! The pages: a list of runs, a page for each, one that compares several, and what changes of them.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_report::{RUNS_MAX, ReportError, document, sections, words};
use paceline_words::{Lang, Word};

use super::kept::{Kept, Shared, lock};
use super::list::List;
use crate::http::{Answer, Request};

const HTML: &str = "text/html; charset=utf-8";
const NOT_FOUND: &str = "404 Not Found";

/// How often a run is looked at while a browser shows it.
const INTERVAL: Duration = Duration::from_secs(1);
/// How often something is sent, so that a browser that has gone is noticed.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

/// Nothing but what is on the page itself, and the events and pages of this server.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'self'";

/// Replaces the sections that have changed, keeps what was chosen in them, and says when no more come.
const SCRIPT: &str = r#"<p id="lost" hidden>{}</p>
<script>
const source = new EventSource("events" + location.search);
source.onmessage = (event) => {
  for (const [id, html] of JSON.parse(event.data)) {
    const section = document.getElementById(id);
    if (!section) continue;
    const chosen = [...section.querySelectorAll("input:checked")].map((input) => input.value);
    section.innerHTML = html;
    for (const input of section.querySelectorAll("input")) input.checked = chosen.includes(input.value);
  }
};
source.onopen = () => { document.getElementById("lost").hidden = true; };
source.onerror = () => {
  document.getElementById("lost").hidden = false;
  if (source.readyState === EventSource.CLOSED) setTimeout(() => location.reload(), 5000);
};
</script>
"#;

/// Parts of a page as HTML, each with its id.
type Sections = Vec<(&'static str, String)>;

pub(super) struct Pages {
    lang: Lang,
    kept: Arc<Kept>,
    list: Arc<List>,
}

impl Pages {
    pub(super) fn new(folder: PathBuf, lang: Lang) -> Self {
        let kept = Arc::new(Kept::new(folder));
        Self {
            lang,
            list: Arc::new(List::new(kept.clone(), lang)),
            kept,
        }
    }

    fn word(&self, word: Word) -> &'static str {
        word.of(self.lang)
    }

    /// `/` is the list, `/runs/NAME/` a run, `/compare/?run=NAME&run=NAME` several; below each, `events` is what changes of it.
    pub(super) fn answer(&self, request: &Request<'_>) -> Answer {
        match self.found(request) {
            Ok(Some(answer)) => answer
                .with("Content-Security-Policy", POLICY)
                .with("Cache-Control", "no-store"),
            Ok(None) | Err(ReportError::NoRun { .. } | ReportError::NoRuns { .. }) => {
                Answer::text(NOT_FOUND, "there is no such page; the runs are at /")
            }
            Err(error) => Answer::text("500 Internal Server Error", &error.to_string()),
        }
    }

    fn found(&self, request: &Request<'_>) -> Result<Option<Answer>, ReportError> {
        let path = request.path;
        Ok(Some(match path {
            "/" => self.list(),
            "/events" => {
                let list = self.list.clone();
                events(move || Some(vec![list.section()]))
            }
            "/compare/" => match self.chosen(request)? {
                Ok(runs) => self.page(&runs),
                Err(why) => Answer::text("400 Bad Request", &why),
            },
            "/compare/events" => match self.chosen(request)? {
                Ok(runs) => self.events_of(runs),
                Err(why) => Answer::text("400 Bad Request", &why),
            },
            _ => {
                let Some(rest) = path.strip_prefix("/runs/") else {
                    return Ok(None);
                };
                match rest.split_once('/') {
                    Some((name, "")) => self.page(&[self.run(name)?]),
                    Some((name, "events")) => self.events_of(vec![self.run(name)?]),
                    Some(_) => return Ok(None),
                    None => {
                        self.run(rest)?;
                        let answer = Answer::text("303 See Other", "the page ends with a slash");
                        answer.with("Location", &format!("/runs/{rest}/"))
                    }
                }
            }
        }))
    }

    fn list(&self) -> Answer {
        let (id, html) = self.list.section();
        let compare = self.word(words::COMPARE);
        let explained = words::COMPARE_NOTE.filled(self.lang, &[&RUNS_MAX.to_string()]);
        let script = SCRIPT.replace("{}", self.word(words::CUT_OFF));
        let body = format!(
            "<section id=\"{id}\">\n{html}</section>\n\
             <form id=\"compare\" action=\"/compare/\"><p><button>{compare}</button> {explained}</p></form>\n{script}"
        );
        let html = document(self.word(words::RUNS), &body, self.lang);
        Answer::found(HTML, html.into_bytes())
    }

    /// The run of this encoded name. Names are compared with those in the folder, so that none leads out of it.
    fn run(&self, name: &str) -> Result<Shared, ReportError> {
        self.kept.named(|known| encoded(known) == name)
    }

    /// The runs that the query names, or why they cannot be compared.
    fn chosen(&self, request: &Request<'_>) -> Result<Result<Vec<Shared>, String>, ReportError> {
        let mut names: Vec<String> = Vec::new();
        for name in request.parameters("run").map(decoded) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        if names.is_empty() || names.len() > RUNS_MAX {
            let count = names.len();
            return Ok(Err(format!(
                "1 to {RUNS_MAX} runs can be compared, {count} were chosen: go back and choose others"
            )));
        }
        let runs = names
            .iter()
            .map(|name| self.kept.named(|known| known == name));
        runs.collect::<Result<_, _>>().map(Ok)
    }

    fn page(&self, shared: &[Shared]) -> Answer {
        let mut body = format!("<p><a href=\"/\">{}</a></p>\n", self.word(words::RUNS));
        let (names, sections) = Kept::with(shared, |runs| {
            let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
            (names.join(", "), sections(runs, self.lang))
        });
        for (id, html) in sections {
            let _ = writeln!(body, "<section id=\"{id}\">\n{html}</section>");
        }
        body += &SCRIPT.replace("{}", self.word(words::CUT_OFF));
        Answer::found(HTML, document(&names, &body, self.lang).into_bytes())
    }

    fn events_of(&self, shared: Vec<Shared>) -> Answer {
        let lang = self.lang;
        events(move || {
            for run in &shared {
                // A run that is gone stays as it was; the browser asks again and is told.
                lock(run).update().ok()?;
            }
            Some(Kept::with(&shared, |runs| sections(runs, lang)))
        })
    }
}

/// The sections that have changed, as one event after the other: first all of them, because the page may be older.
fn events(mut look: impl FnMut() -> Option<Sections> + 'static) -> Answer {
    let mut shown: HashMap<&'static str, String> = HashMap::new();
    let mut sent_at = Instant::now();
    let mut is_first = true;
    let next = move || {
        if !std::mem::take(&mut is_first) {
            std::thread::sleep(INTERVAL);
        }
        let mut changed = Vec::new();
        for (id, html) in look()? {
            if shown.get(id) != Some(&html) {
                shown.insert(id, html.clone());
                changed.push((id, html));
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

/// A name as a part of an address.
pub(super) fn encoded(name: &str) -> String {
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

/// A value of a form, as browsers send it in a query. What is no code stays as it is.
fn decoded(value: &str) -> String {
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let [first, after @ ..] = rest {
        let code = after.first_chunk::<2>().filter(|_| *first == b'%');
        let code = code.and_then(|code| std::str::from_utf8(code).ok());
        let byte = code.and_then(|code| u8::from_str_radix(code, 16).ok());
        rest = match byte {
            Some(_) => &after[2..],
            None => after,
        };
        bytes.push(match (byte, first) {
            (Some(byte), _) => byte,
            (None, b'+') => b' ',
            (None, other) => *other,
        });
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_browser_sends_of_a_form_is_read() {
        for (sent, expect) in [
            ("a+b", "a b"),
            ("a%20%3Cb%3E%2B", "a <b>+"),
            ("%EC%8B%A4%ED%96%89", "실행"),
            ("100%", "100%"),
            ("%zz%4", "%zz%4"),
            ("", ""),
        ] {
            assert_eq!(decoded(sent), expect, "{sent}");
        }
    }
}
