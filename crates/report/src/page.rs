//! One page of HTML about runs: curves, ranks, incidents, settings. It needs no network and no script.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use paceline_usage::Lang;
use paceline_usage::busy::share;
use paceline_usage::figures::{clock, thousands};

use crate::chart::{Line, Scale, draw, escaped, number};
use crate::curve::Curve;
use crate::error::ReportError;
use crate::run::{Class, End, Incident, RankEnd, Run};
use crate::words::{self, Word};

/// Most runs on one page: so many colours can be told apart.
pub const RUNS_MAX: usize = 8;

const STYLE: &str = include_str!("page/style.css");

/// The page about the runs in `folders`, which may still train.
///
/// *Cost*: a pass over each `metrics.jsonl`. The page of a run has at most about 400 kB, however many steps it has.
///
/// *Errors*: a folder without a run; the system's.
///
/// # Panics
///
/// With no folder, or more than [`RUNS_MAX`].
pub fn page(folders: &[PathBuf], lang: Lang) -> Result<String, ReportError> {
    assert!(
        (1..=RUNS_MAX).contains(&folders.len()),
        "{} runs",
        folders.len()
    );
    let runs: Vec<Run> = folders
        .iter()
        .map(|folder| Run::read(folder))
        .collect::<Result<_, _>>()?;
    Ok(Page { runs: &runs, lang }.render())
}

/// One of a run's curves.
type Of = fn(&Run) -> &Curve;

struct Page<'a> {
    runs: &'a [Run],
    lang: Lang,
}

impl Page<'_> {
    fn word(&self, word: Word) -> &'static str {
        word.of(self.lang)
    }

    fn render(&self) -> String {
        let lang = match self.lang {
            Lang::En => "en",
            Lang::Ko => "ko",
        };
        let names: Vec<String> = self.runs.iter().map(|run| escaped(&run.name)).collect();
        let title = names.join(", ");
        let mut html = format!(
            "<!DOCTYPE html>\n<html lang=\"{lang}\">\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{title}</title>\n<style>\n{STYLE}</style>\n<h1>{title}</h1>\n"
        );
        html += &self.summary();
        html += &self.curves();
        for run in self.runs {
            html += &self.classes(run);
            html += &self.ranks(run);
        }
        html += &self.incidents();
        html += &self.settings();
        html
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
        let row = |(color, run): (usize, &Run)| {
            let end = run.end.as_ref();
            let state = if end.is_some() {
                words::ENDED
            } else {
                words::NOT_ENDED
            };
            let percent = |end: &End| {
                let usage = &end.usage;
                format!("{:.1} %", share(usage.all_busy(), usage.total()) * 100.0)
            };
            let time = Duration::try_from_secs_f64(run.seconds).unwrap_or(Duration::MAX);
            let hash = end.map_or(String::new(), |end| {
                end.weights_sha256.chars().take(16).collect()
            });
            vec![
                format!("<span class=\"key c{color}\"></span>{}", escaped(&run.name)),
                self.word(state).to_owned(),
                thousands(run.epochs),
                thousands(run.steps),
                run.train_loss
                    .or(run.loss.last())
                    .map_or("–".into(), number),
                last(&run.held_out_loss),
                run.accuracy
                    .last()
                    .map_or("–".into(), |percent| format!("{percent:.2} %")),
                clock(time),
                end.map_or("–".into(), percent),
                format!("<code>{}</code>", escaped(&hash)),
            ]
        };
        let rows: Vec<Vec<String>> = self.runs.iter().enumerate().map(row).collect();
        let mut html = table(&head.map(|word| self.word(word)), &rows);
        let hashes: Vec<_> = self
            .runs
            .iter()
            .map(|run| run.end.as_ref().map(|end| &end.weights_sha256))
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
        let tokens = self.runs.iter().filter(|run| run.has_tokens).count();
        let rate = match tokens {
            0 => words::SAMPLES_RATE,
            some if some == self.runs.len() => words::TOKENS_RATE,
            _ => words::ANY_RATE,
        };
        let of = |curve: Of, is_dotted| {
            let runs = self.runs.iter().enumerate();
            runs.map(move |(color, run)| Line {
                curve: curve(run),
                color,
                is_dotted,
            })
        };
        let loss: Vec<Line<'_>> = of(|run| &run.loss, false)
            .chain(of(|run| &run.held_out_loss, true))
            .collect();
        let mut html = "<div class=\"charts\">\n".to_owned();
        html += &self.figure(words::LOSS, &loss, Scale::Wide, Some(words::HELD_OUT));
        let others: [(Word, Of, bool, Scale); 5] = [
            (words::ACCURACY, |run| &run.accuracy, true, Scale::Fitted),
            (rate, |run| &run.rate, false, Scale::FromZero),
            (words::WAITED, |run| &run.waited, false, Scale::FromZero),
            (
                words::LEARNING_RATE,
                |run| &run.learning_rate,
                false,
                Scale::FromZero,
            ),
            (
                words::GRADIENT_NORM,
                |run| &run.gradient_norm,
                false,
                Scale::Wide,
            ),
        ];
        for (title, curve, is_dotted, scale) in others {
            html += &self.figure(
                title,
                &of(curve, is_dotted).collect::<Vec<_>>(),
                scale,
                None,
            );
        }
        html + "</div>\n"
    }

    fn figure(&self, title: Word, lines: &[Line<'_>], scale: Scale, note: Option<Word>) -> String {
        let svg = draw(lines, scale, self.word(title), self.word(words::STEP));
        if svg.is_empty() {
            return svg;
        }
        let note = note.map_or(String::new(), |note| format!("<p>{}</p>", self.word(note)));
        format!(
            "<figure><figcaption>{}</figcaption>{svg}{note}</figure>\n",
            self.word(title)
        )
    }

    /// The best epoch, and how well each class was predicted at the end.
    fn classes(&self, run: &Run) -> String {
        let best = run.end.as_ref().and_then(|end| end.best.as_ref());
        let best = best.map_or(String::new(), |best| {
            let text = self.word(words::BEST_EPOCH);
            let text = text.replacen("{}", &thousands(best.epoch), 1);
            let text = text.replacen("{}", &escaped(&best.monitor), 1);
            let text = text.replacen("{}", &number(best.value), 1);
            format!("<p>{text}{}</p>\n", self.of_run(run))
        });
        let classes = run.end.iter().flat_map(|end| &end.classes);
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
        format!(
            "{best}<h2>{}{}</h2>\n{}",
            self.word(words::CLASSES),
            self.of_run(run),
            table(&head.map(|word| self.word(word)), &rows)
        )
    }

    /// What each rank did with its time.
    fn ranks(&self, run: &Run) -> String {
        let Some(end) = &run.end else {
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
        let row = |(rank, totals): (usize, &RankEnd)| {
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
        let rows: Vec<Vec<String>> = end.ranks.iter().enumerate().map(row).collect();
        let mut html = format!("<h2>{}{}</h2>\n", self.word(words::RANKS), self.of_run(run));
        let _ = writeln!(html, "<p>{}</p>", self.word(words::SINCE));
        html += &table(&head.map(|word| self.word(word)), &rows);
        let _ = write!(
            html,
            "<p>{}</p><div class=\"at-once\">",
            self.word(words::OF_TIME)
        );
        let most = usage.at_once_ns.len().saturating_sub(1).max(1);
        for (ranks, nanos) in usage.at_once_ns.iter().enumerate() {
            let part = *nanos as f64 / (usage.total_ns.max(1)) as f64 * 100.0;
            let strength = 0.08 + 0.92 * ranks as f64 / most as f64;
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
            for incident in &run.incidents {
                let _ = writeln!(items, "<li>{name}{}</li>", escaped(&self.told(incident)));
            }
            if run.incidents_left_out > 0 {
                let count = thousands(run.incidents_left_out);
                let more = self.word(words::MORE).replace("{}", &count);
                let _ = writeln!(items, "<li>{name}{more}</li>");
            }
            if run.unread > 0 {
                let count = thousands(run.unread);
                let unread = self.word(words::UNREAD).replace("{}", &count);
                let _ = writeln!(items, "<li>{name}{unread}</li>");
            }
        }
        match items.is_empty() {
            true => html += &format!("<p>{}</p>\n", self.word(words::NO_INCIDENT)),
            false => html += &format!("<ul>\n{items}</ul>\n"),
        }
        html
    }

    fn told(&self, incident: &Incident) -> String {
        let at = |step: &u64| format!("{} {}", self.word(words::STEP), thousands(*step));
        match incident {
            Incident::Skipped { step } => format!("{}: {}", at(step), self.word(words::SKIPPED)),
            Incident::WentBack { step, to } => {
                format!("{}: {} {to}", at(step), self.word(words::WENT_BACK))
            }
            Incident::Ranks { step, before, now } => {
                format!(
                    "{}: {} {before} → {now}",
                    at(step),
                    self.word(words::RANKS_NOW)
                )
            }
            Incident::Stopped { step, signal } => {
                format!("{}: {} {signal}", at(step), self.word(words::STOPPED))
            }
            Incident::Slow(slow) => {
                let text = self.word(words::SLOW);
                let text = text.replacen("{}", &format!("{:.4}", slow.seconds), 1);
                let text = text.replacen("{}", &format!("{:.4}", slow.others_seconds), 1);
                format!("{} {}: {text}", self.word(words::RANK), slow.rank)
            }
        }
    }

    /// All settings of one run, or those in which several differ.
    fn settings(&self) -> String {
        if let [run] = self.runs {
            let head = [words::SETTING, words::VALUE, words::SOURCE].map(|word| self.word(word));
            // Those that somebody chose come first.
            let mut settings: Vec<_> = run.settings.iter().collect();
            settings.sort_by_key(|[_, _, source]| source.starts_with("default"));
            let rows = settings
                .into_iter()
                .map(|setting| setting.each_ref().map(|text| escaped(text)).to_vec());
            let rows: Vec<Vec<String>> = rows.collect();
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

/// A table of cells that are HTML.
fn table(head: &[&str], rows: &[Vec<String>]) -> String {
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
