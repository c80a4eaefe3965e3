//! One page of HTML about runs: curves, classes, ranks, incidents, environment, settings. It needs no network and no script.

mod confusion;
mod environment;

use std::fmt::Write as _;
use std::path::PathBuf;

use paceline_usage::busy::share;
use paceline_usage::figures::{clock, thousands};
use paceline_words::{Lang, Word, advice};

use crate::chart::{draw, escaped, number};
use crate::charts::{ACCURACY, charts};
use crate::curve::Curve;
use crate::error::ReportError;
use crate::failure::JobFailure;
use crate::gantt;
use crate::records::{Class, End, RankEnd};
use crate::run::{Run, Seen};
use crate::words;

/// Most runs on one page: so many colours can be told apart.
pub const RUNS_MAX: usize = 8;

const STYLE: &str = include_str!("page/style.css");

/// Most ranks in a table: of more, the half that worked longest and the half that worked least are shown.
const RANKS_MAX: usize = 64;

/// The page about the runs in `folders`, which may still train.
///
/// *Cost*: a pass over each `metrics.jsonl`. The page of a run has at most about 100 kB for each chart, however many steps it has.
///
/// *Errors*: a folder without a run; the system's.
///
/// # Panics
///
/// With no folder, or more than [`RUNS_MAX`].
pub fn page(folders: &[PathBuf], lang: Lang) -> Result<String, ReportError> {
    let runs: Vec<Run> = folders
        .iter()
        .map(|folder| Run::read(folder))
        .collect::<Result<_, _>>()?;
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let shown: Vec<&Run> = runs.iter().collect();
    let sections: Vec<String> = sections(&shown, lang)
        .into_iter()
        .map(|(id, html)| format!("<section id=\"{id}\">\n{html}</section>\n"))
        .collect();
    Ok(document(&names.join(", "), &sections.concat(), lang))
}

/// The sections of a page about runs as HTML, each with its id.
///
/// # Panics
///
/// With no run, or more than [`RUNS_MAX`].
#[must_use]
pub fn sections(runs: &[&Run], lang: Lang) -> Vec<(&'static str, String)> {
    assert!((1..=RUNS_MAX).contains(&runs.len()), "{} runs", runs.len());
    let page = Page { runs, lang };
    let of_each = |section: &dyn Fn(&Run) -> String| -> String {
        runs.iter().map(|run| section(run)).collect()
    };
    vec![
        ("summary", page.summary()),
        ("charts", page.curves()),
        ("classes", of_each(&|run| page.classes(run))),
        ("ranks", of_each(&|run| page.ranks(run))),
        ("steps", of_each(&|run| page.steps(run))),
        ("incidents", page.incidents()),
        ("environment", environment::environment(runs, lang)),
        ("settings", page.settings()),
    ]
}

/// A whole document; `body` is HTML, the title is text.
#[must_use]
pub fn document(title: &str, body: &str, lang: Lang) -> String {
    let lang = match lang {
        Lang::En => "en",
        Lang::Ko => "ko",
    };
    let title = escaped(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"{lang}\">\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n<h1>{title}</h1>\n{body}"
    )
}

struct Page<'a> {
    runs: &'a [&'a Run],
    lang: Lang,
}

impl Page<'_> {
    fn word(&self, word: Word) -> &'static str {
        word.of(self.lang)
    }

    /// A row for each run.
    fn summary(&self) -> String {
        let head = [
            words::RUN,
            words::STATE,
            words::EPOCHS,
            words::STEPS,
            words::TRAIN_LOSS,
            words::HELD_OUT_LOSS,
            words::ACCURACY_SHORT,
            words::TOTAL,
            words::AT_ONCE,
            words::WEIGHTS,
        ];
        let last = |curve: &Curve| curve.last().map_or("–".into(), number);
        let row = |(color, run): (usize, &&Run)| {
            let end = run.seen.end.as_ref();
            let percent = |end: &End| {
                let usage = &end.usage;
                format!("{:.1} %", share(usage.all_busy(), usage.total()) * 100.0)
            };
            let hash = end.and_then(|end| end.weights_sha256.as_ref());
            let hash = hash.map_or(String::new(), |hash| {
                let begin: String = hash.chars().take(16).collect();
                format!("<code>{}</code>", escaped(&begin))
            });
            vec![
                format!("<span class=\"key c{color}\"></span>{}", escaped(&run.name)),
                escaped(&run.state().text(self.lang)),
                thousands(run.seen.epochs),
                thousands(run.seen.steps),
                run.seen
                    .train_loss
                    .or(run.seen.loss.last())
                    .map_or("–".into(), number),
                last(&run.seen.held_out_loss),
                (run.seen.metric(ACCURACY).and_then(Curve::last))
                    .map_or("–".into(), |share| format!("{:.2} %", share * 100.0)),
                clock(run.seen.time()),
                end.filter(|end| !end.ranks.is_empty())
                    .map_or("–".into(), percent),
                hash,
            ]
        };
        let rows: Vec<Vec<String>> = self.runs.iter().enumerate().map(row).collect();
        let mut html = table(&head.map(|word| self.word(word)), &rows);
        let hashes: Vec<_> = self
            .runs
            .iter()
            .map(|run| run.seen.end.as_ref()?.weights_sha256.as_ref())
            .collect();
        if hashes.len() > 1 && hashes[0].is_some() && hashes.iter().all(|hash| *hash == hashes[0]) {
            let _ = writeln!(
                html,
                "<p class=\"same\">{}</p>",
                self.word(words::SAME_WEIGHTS)
            );
        }
        html
    }

    fn curves(&self) -> String {
        let runs: Vec<&Seen> = self.runs.iter().map(|run| &run.seen).collect();
        let mut html = "<div class=\"charts\">\n".to_owned();
        for chart in charts(&runs, self.lang) {
            let svg = draw(&chart, self.word(words::STEP));
            let title = escaped(&chart.title);
            let note = chart.note;
            let note = note.map_or(String::new(), |note| format!("<p>{}</p>", self.word(note)));
            let _ = writeln!(
                html,
                "<figure><figcaption>{title}</figcaption>{svg}{note}</figure>"
            );
        }
        html + "</div>\n"
    }

    /// The best epoch, and how well each class was predicted at the end.
    fn classes(&self, run: &Run) -> String {
        let best = run.seen.end.as_ref().and_then(|end| end.best.as_ref());
        let best = best.map_or(String::new(), |best| {
            let value = best.value.map_or("–".into(), number);
            let monitor = match &*best.monitor {
                "held_out_loss" => words::HELD_OUT_LOSS.of(self.lang).to_owned(),
                other => escaped(other),
            };
            let values = [&*thousands(best.epoch), &*monitor, &*value];
            let text = words::BEST_EPOCH.filled(self.lang, &values);
            format!("<p>{text}{}</p>\n", self.of_run(run))
        });
        let classes = run.seen.end.iter().flat_map(|end| &end.classes);
        let percent = |share: Option<f64>| {
            share.map_or("–".into(), |share| format!("{:.2} %", share * 100.0))
        };
        let row = |class: &Class| {
            vec![
                escaped(&class.name),
                thousands(class.samples),
                percent(class.precision),
                percent(class.recall),
                percent(class.f1),
            ]
        };
        let rows: Vec<Vec<String>> = classes.map(row).collect();
        if rows.is_empty() {
            return best;
        }
        let head = [
            words::CLASS,
            words::SAMPLES,
            words::PRECISION,
            words::RECALL,
            words::F1,
        ];
        let mut html = format!(
            "{best}<h2>{}{}</h2>\n{}",
            self.word(words::CLASSES),
            self.of_run(run),
            table(&head.map(|word| self.word(word)), &rows)
        );
        if let Some(end) = &run.seen.end {
            let matrix = confusion::confusion(&end.classes, &end.confusion, self.lang);
            if !matrix.is_empty() {
                let (title, name) = (self.word(words::CONFUSION), self.of_run(run));
                let _ = write!(html, "<h2>{title}{name}</h2>\n{matrix}");
            }
        }
        html
    }

    /// What each rank did with its time.
    fn ranks(&self, run: &Run) -> String {
        let end = run.seen.end.as_ref();
        let Some(end) = end.filter(|end| !end.ranks.is_empty()) else {
            return String::new();
        };
        let usage = &end.usage;
        let total = usage.total();
        let head = [
            words::RANK,
            words::COMPUTED,
            words::WAITED_RANKS,
            words::WAITED_DATA,
            words::PEAK,
            words::SENT,
        ];
        let seconds = |nanos: u64| format!("{:.2} s", nanos as f64 / 1e9);
        let megabytes = |bytes: u64| format!("{} MB", thousands(bytes / 1_000_000));
        let row = |rank: usize, totals: &RankEnd| {
            let busy = share(usage.busy(rank), total) * 100.0;
            vec![
                rank.to_string(),
                format!("<span class=\"bar\"><i style=\"width:{busy:.1}%\"></i></span>{busy:.1} %"),
                seconds(totals.waited_for_ranks_ns),
                seconds(totals.waited_for_data_ns),
                totals.peak_bytes.map_or("–".into(), megabytes),
                megabytes(totals.sent_bytes),
            ]
        };
        let all = (0..end.ranks.len()).map(|rank| (rank, share(usage.busy(rank), total)));
        let shown = gantt::extremes(all.collect(), RANKS_MAX);
        let rows = shown.into_iter().map(|rank| row(rank, &end.ranks[rank]));
        let rows: Vec<Vec<String>> = rows.collect();
        let mut html = format!("<h2>{}{}</h2>\n", self.word(words::RANKS), self.of_run(run));
        let _ = writeln!(html, "<p>{}</p>", self.word(words::SINCE));
        html += &table(&head.map(|word| self.word(word)), &rows);
        if let Some(note) = gantt::left_out(end.ranks.len(), RANKS_MAX, self.lang) {
            let _ = writeln!(html, "<p>{note}</p>");
        }
        let _ = write!(
            html,
            "<p>{}</p><div class=\"at-once\">",
            self.word(words::OF_TIME)
        );
        let most = usage.at_once_ns.len().saturating_sub(1).max(1);
        let together = usage.at_once_ns.len().div_ceil(RANKS_MAX + 1).max(1);
        for (group, nanos) in usage.at_once_ns.chunks(together).enumerate() {
            let nanos: u64 = nanos.iter().sum();
            let part = nanos as f64 / (usage.total_ns.max(1)) as f64 * 100.0;
            let (first, last) = (
                group * together,
                (group * together + together - 1).min(most),
            );
            let ranks = match first == last {
                true => first.to_string(),
                false => format!("{first}–{last}"),
            };
            let strength = 0.08 + 0.92 * last as f64 / most as f64;
            let label = if part >= 6.0 {
                format!("{ranks}: {part:.0} %")
            } else {
                String::new()
            };
            let ink = if strength > 0.55 { "light" } else { "dark" };
            let _ = write!(
                html,
                "<div class=\"{ink}\" style=\"flex:{part:.3};--strength:{strength:.2}\" title=\"{ranks}: {part:.1} %\"><span>{label}</span></div>"
            );
        }
        html + "</div>\n"
    }

    /// Gantt charts of the last steps whose spans are known.
    fn steps(&self, run: &Run) -> String {
        let known = [&run.seen.plain_step, &run.seen.saved_step];
        let figures: String = known
            .into_iter()
            .flatten()
            .map(|spans| gantt::figure(spans, self.lang))
            .collect();
        match figures.is_empty() {
            true => figures,
            false => format!(
                "<h2>{}{}</h2>\n<div class=\"charts\">\n{figures}</div>\n",
                self.word(words::STEPS_OF_RANKS),
                self.of_run(run)
            ),
        }
    }

    /// The name of a run, where there are several.
    fn of_run(&self, run: &Run) -> String {
        match self.runs.len() {
            1 => String::new(),
            _ => format!(": {}", escaped(&run.name)),
        }
    }

    fn incidents(&self) -> String {
        let mut html = format!("<h2>{}</h2>\n", self.word(words::INCIDENTS));
        let mut items = String::new();
        for run in self.runs {
            let name = self.of_run(run);
            let name = name
                .strip_prefix(": ")
                .map_or(String::new(), |name| format!("{name}: "));
            if run.seen.incidents_left_out > 0 {
                let count = thousands(run.seen.incidents_left_out);
                let more = words::MORE.filled(self.lang, &[&count]);
                let _ = writeln!(items, "<li>{name}{more}</li>");
            }
            for incident in &run.seen.incidents {
                let _ = writeln!(
                    items,
                    "<li>{name}{}</li>",
                    escaped(&incident.text(self.lang))
                );
            }
            if let Some(failure) = &run.failure {
                let _ = writeln!(
                    items,
                    "<li class=\"failed\">{name}{}{}</li>",
                    escaped(&failure.text(self.lang)),
                    self.advice(failure)
                );
            }
            if run.seen.unread > 0 {
                let count = thousands(run.seen.unread);
                let unread = words::UNREAD.filled(self.lang, &[&count]);
                let _ = writeln!(items, "<li>{name}{unread}</li>");
            }
        }
        match items.is_empty() {
            true => html += &format!("<p>{}</p>\n", self.word(words::NO_INCIDENT)),
            false => html += &format!("<ul>\n{items}</ul>\n"),
        }
        html
    }

    /// What the launcher has said besides: what to do, and where the output is.
    fn advice(&self, failure: &JobFailure) -> String {
        let hint = failure.hint.as_deref();
        let told = [
            (words::ADVICE, hint.map(|hint| advice(self.lang, hint))),
            (words::OUTPUT, failure.log.as_deref()),
        ];
        let told = told.into_iter().filter_map(|(word, text)| {
            let text = escaped(text?);
            Some(format!("<p>{}</p>", word.filled(self.lang, &[&text])))
        });
        told.collect()
    }

    /// All settings of one run, or those in which several differ.
    fn settings(&self) -> String {
        if let [run] = self.runs {
            let head = [words::SETTING, words::VALUE, words::SOURCE].map(|word| self.word(word));
            // Those that somebody chose come first.
            let mut settings: Vec<_> = run.settings.iter().collect();
            settings.sort_by_key(|[_, _, source]| source.starts_with("default"));
            let rows = settings.into_iter().map(|[key, value, source]| {
                let source = in_language(source, self.lang);
                [key, value, &source].map(|text| escaped(text)).to_vec()
            });
            let rows: Vec<Vec<String>> = rows.collect();
            // Other programs write none.
            if rows.is_empty() {
                return String::new();
            }
            let title = self.word(words::SETTINGS);
            return format!("<h2>{title}</h2>\n{}", table(&head, &rows));
        }
        let value = |run: &Run, key: &str| {
            let found = run.settings.iter().find(|[name, ..]| name == key);
            found.map_or("–".to_owned(), |[_, value, _]| escaped(value))
        };
        let mut keys: Vec<&str> = Vec::new();
        for [key, ..] in self.runs.iter().flat_map(|run| &run.settings) {
            if !keys.contains(&key.as_str()) {
                keys.push(key);
            }
        }
        let rows = keys.into_iter().filter_map(|key| {
            let values: Vec<String> = self.runs.iter().map(|run| value(run, key)).collect();
            // Of course it does.
            if key == "run_dir" {
                return None;
            }
            let differ = values.iter().any(|other| *other != values[0]);
            differ.then(|| [vec![escaped(key)], values].concat())
        });
        let rows: Vec<Vec<String>> = rows.collect();
        let mut head = vec![self.word(words::SETTING).to_owned()];
        head.extend(self.runs.iter().map(|run| escaped(&run.name)));
        let head: Vec<&str> = head.iter().map(String::as_str).collect();
        format!(
            "<h2>{}</h2>\n{}",
            self.word(words::DIFFERENT),
            table(&head, &rows)
        )
    }
}

/// The source of a setting, which begins with its kind. What follows stays as it is.
fn in_language(source: &str, lang: Lang) -> String {
    const KINDS: [Word; 6] = [
        words::OF_FLAG,
        words::OF_ENVIRONMENT,
        words::OF_FILE,
        words::OF_RUN,
        words::OF_LAUNCHER,
        words::OF_DEFAULT,
    ];
    let named = KINDS.iter().find_map(|kind| {
        let rest = source.strip_prefix(kind.of(Lang::En))?;
        (rest.is_empty() || rest.starts_with(' ')).then(|| format!("{}{rest}", kind.of(lang)))
    });
    named.unwrap_or_else(|| source.to_owned())
}

/// A table of cells that are HTML.
#[must_use]
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut html = "<div class=\"wide\"><table>\n<tr>".to_owned();
    for cell in head {
        let _ = write!(html, "<th>{cell}</th>");
    }
    html += "</tr>\n";
    for row in rows {
        html += "<tr>";
        for cell in row {
            let _ = write!(html, "<td>{cell}</td>");
        }
        html += "</tr>\n";
    }
    html + "</table></div>\n"
}

#[cfg(test)]
mod tests;
