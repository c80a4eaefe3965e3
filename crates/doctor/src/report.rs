//! The report: findings first, then what was looked at, and the same as one JSON object.

use std::io::{self, Write};

use paceline_gpu::columns::aligned;
use paceline_words::Lang;
use serde::Serialize;

use crate::finding::{Fact, Finding, Notes, Severity, count};
use crate::nodes::table::{pairs, who};
use crate::nodes::{MissKind, Nodes, Outcome};

/// What was found.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
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
    pub(crate) fn new(host: String, ranks: usize, notes: Notes, nodes: Option<Nodes>) -> Self {
        let findings = match &nodes {
            None => notes.findings,
            Some(nodes) => merged(notes.findings, nodes),
        };
        let mut report = Self {
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

    /// Writes it for people, or as one JSON object on one line.
    pub fn write(&self, json: bool, out: &mut impl Write) -> io::Result<()> {
        if json {
            serde_json::to_writer(&mut *out, self)?;
            return writeln!(out);
        }
        let ranks = count(self.ranks, "rank");
        write_findings(
            &self.findings,
            &format!("on {} for {ranks}", self.host),
            out,
        )?;
        write_facts(&self.facts, out)?;
        if let Some(nodes) = &self.nodes {
            write!(out, "\n{}", who(nodes))?;
            write!(out, "\n{}", pairs(nodes))?;
            if has_measured(nodes) {
                writeln!(
                    out,
                    "round trip, and speed of a short sample while other nodes measure too"
                )?;
            }
        }
        Ok(())
    }

    fn sort(&mut self) {
        // Stable: within a severity in the order of the checks.
        self.findings.sort_by_key(|finding| finding.severity);
    }
}

/// The findings for people, then how many there are where; `place` is such as `on node1`.
pub(crate) fn write_findings(
    findings: &[Finding],
    place: &str,
    out: &mut impl Write,
) -> io::Result<()> {
    for finding in findings {
        writeln!(out, "{finding}")?;
    }
    let number = |severity| {
        let found = findings.iter().filter(|found| found.severity == severity);
        found.count()
    };
    let counted = [Severity::Error, Severity::Warning, Severity::Note]
        .map(|severity| count(number(severity), severity.word(Lang::En)));
    match findings.is_empty() {
        true => writeln!(out, "nothing wrong found {place}")?,
        false => writeln!(out, "{} {place}", counted.join(", "))?,
    }
    writeln!(out)
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
fn merged(own: Vec<Finding>, nodes: &Nodes) -> Vec<Finding> {
    let mut all: Vec<Finding> = Vec::new();
    let others = nodes.cards.iter().filter(|(node, _)| **node != nodes.me);
    let others =
        others.flat_map(|(node, card)| card.findings.iter().map(|found| (*node, found.clone())));
    for (node, mut finding) in own.into_iter().map(|found| (nodes.me, found)).chain(others) {
        let name = nodes.name(node);
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
