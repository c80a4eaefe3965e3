//! The report: findings first, then what was looked at, and the same as one JSON object.

use std::io::{self, Write};

use paceline_gpu::columns::aligned;
use paceline_words::{Lang, count, say};
use serde::Serialize;

use crate::finding::{Fact, Finding, Notes, Severity};
use crate::nodes::table::{pairs, who};
use crate::nodes::{MissKind, Nodes, Outcome};

/// What was found.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    #[serde(skip)]
    lang: Lang,
    /// Version of these fields.
    pub paceline_doctor: u32,
    /// Where it was looked from.
    pub host: String,
    /// For how many ranks on this node.
    pub ranks: usize,
    /// What should be known, the worst first.
    pub findings: Vec<Finding>,
    /// What was looked at on this node, and between nodes.
    pub facts: Vec<Fact>,
    /// All nodes and their connections, where there are several.
    pub nodes: Option<Nodes>,
    /// Whether time was up before enough nodes had come.
    pub is_late: bool,
}

/// What the report comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// No error; there may be warnings.
    Sound,
    /// An error was found.
    Fault,
    /// The nodes did not come together in time.
    Late,
}

impl Report {
    pub(crate) fn new(host: String, ranks: usize, notes: Notes, mut nodes: Option<Nodes>) -> Self {
        let lang = notes.lang;
        let findings = match &mut nodes {
            None => notes.findings,
            Some(nodes) => merged(notes.findings, nodes, lang),
        };
        let mut report = Self {
            lang,
            paceline_doctor: 1,
            host,
            ranks,
            findings,
            facts: notes.facts,
            nodes,
            is_late: false,
        };
        report.sort();
        report
    }

    pub(crate) fn add(&mut self, findings: impl IntoIterator<Item = Finding>) {
        self.findings.extend(findings);
        self.sort();
    }

    /// What it comes to, for the exit code.
    pub fn verdict(&self) -> Verdict {
        let is_error = |finding: &Finding| finding.severity == Severity::Error;
        match self.is_late {
            true => Verdict::Late,
            false if self.findings.iter().any(is_error) => Verdict::Fault,
            false => Verdict::Sound,
        }
    }

    /// Writes it for people, or as one JSON object on one line, in the language in which it was found.
    pub fn write(&self, json: bool, out: &mut impl Write) -> io::Result<()> {
        if json {
            serde_json::to_writer(&mut *out, self)?;
            return writeln!(out);
        }
        let (lang, host) = (self.lang, &self.host);
        let ranks = count(lang, self.ranks, "rank", "랭크");
        let place = match lang {
            Lang::En => format!("on {host} for {ranks}"),
            Lang::Ko => format!("{host}, {ranks}"),
        };
        write_findings(&self.findings, &place, lang, out)?;
        write_facts(&self.facts, out)?;
        if let Some(nodes) = &self.nodes {
            write!(out, "\n{}", who(nodes, lang))?;
            write!(out, "\n{}", pairs(nodes, lang))?;
            if has_measured(nodes) {
                let legend = say!(
                    lang,
                    "round trip, and speed of a short sample while other nodes measure too",
                    "왕복 시간, 그리고 다른 노드도 함께 재는 동안 짧게 잰 속도"
                );
                writeln!(out, "{legend}")?;
            }
        }
        Ok(())
    }

    fn sort(&mut self) {
        // Stable: within a severity in the order of the checks.
        self.findings.sort_by_key(|finding| finding.severity);
    }
}

/// The findings for people, then how many there are where; `place` is such as `on node1`, in Korean `node1`.
pub(crate) fn write_findings(
    findings: &[Finding],
    place: &str,
    lang: Lang,
    out: &mut impl Write,
) -> io::Result<()> {
    for finding in findings {
        writeln!(out, "{}", finding.text(lang))?;
    }
    let number = |severity| {
        let found = findings.iter().filter(|found| found.severity == severity);
        found.count()
    };
    let counted = [Severity::Error, Severity::Warning, Severity::Note].map(|severity| {
        let word = severity.word(lang);
        count(lang, number(severity), word, word)
    });
    let counted = match findings.is_empty() {
        true => say!(lang, "nothing wrong found", "발견된 문제 없음"),
        false => counted.join(", "),
    };
    match lang {
        Lang::En => writeln!(out, "{counted} {place}\n"),
        Lang::Ko => writeln!(out, "{place}: {counted}\n"),
    }
}

/// What was looked at, one line each.
pub(crate) fn write_facts(facts: &[Fact], out: &mut impl Write) -> io::Result<()> {
    let facts: Vec<Vec<String>> = facts
        .iter()
        .map(|fact| vec![format!("  {}", fact.check), fact.value.clone()])
        .collect();
    write!(out, "{}", aligned(&facts))
}

fn has_measured(nodes: &Nodes) -> bool {
    let mut all = nodes.rows.values().flat_map(|row| &row.reaches);
    all.any(|reach| matches!(&reach.outcome, Outcome::Reached(_)))
        && !nodes.rows.values().flat_map(|row| &row.reaches).all(|reach| {
            matches!(&reach.outcome, Outcome::Failed(miss) if miss.kind == MissKind::Untried)
        })
}

/// The findings of all nodes about themselves; equal ones are said once, with the nodes that they hold for.
fn merged(own: Vec<Finding>, nodes: &mut Nodes, lang: Lang) -> Vec<Finding> {
    let mut all: Vec<Finding> = Vec::new();
    let mut found: Vec<(usize, Finding)> = own.into_iter().map(|own| (nodes.me, own)).collect();
    for (node, card) in &mut nodes.cards {
        let told = card.take_findings(lang).into_iter();
        let is_own = *node == nodes.me;
        found.extend(told.filter(|_| !is_own).map(|finding| (*node, finding)));
    }
    for (node, mut finding) in found {
        let name = nodes.name(node, lang);
        let same = |known: &&mut Finding| {
            (known.severity, &known.what, &known.fix)
                == (finding.severity, &finding.what, &finding.fix)
        };
        match all.iter_mut().find(same) {
            Some(known) => known.nodes.push(name),
            None => {
                finding.nodes = vec![name];
                all.push(finding);
            }
        }
    }
    all
}

#[cfg(test)]
mod tests;
