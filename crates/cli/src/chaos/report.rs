//! What is told of a job that was disturbed: a table for people, or JSON.

use std::fmt::Write as _;
use std::time::Duration;

use paceline_gpu::columns::with_numbers;
use paceline_gpu::words::count;
use serde::Serialize;

use super::evidence::Evidence;
use super::scene::Fate;

/// Version of the JSON's fields.
const VERSION: u32 = 1;

/// One fault and what became of it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// Since the start of the run.
    pub(super) at_s: f64,
    pub(super) fault: String,
    /// `None` for a launcher.
    pub(super) rank: Option<usize>,
    pub(super) pid: u32,
    /// How long the rank was stopped or slow.
    pub(super) held_s: Option<f64>,
    pub(super) fate: Option<Fate>,
    /// Until every rank that was left had done a step, from the fault on, or from its end where the rank is still there.
    pub(super) recovery_s: Option<f64>,
    /// Ranks that were running then.
    pub(super) ranks: usize,
}

/// A fault that was not dealt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Missed {
    pub(super) fault: String,
    pub(super) why: &'static str,
}

/// The results of both runs.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Compared {
    pub(super) reference: Vec<Evidence>,
    pub(super) result: Vec<Evidence>,
    /// `None` if the undisturbed run left nothing to compare with.
    pub(super) same_bits: Option<bool>,
}

/// Everything.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) paceline_chaos: u32,
    pub(super) program: String,
    pub(super) seed: u64,
    /// Faults that were asked for.
    pub(super) faults: usize,
    pub(super) took_s: f64,
    pub(super) reference_took_s: Option<f64>,
    pub(super) dealt: Vec<Row>,
    pub(super) missed: Vec<Missed>,
    /// How the program ended, in words.
    pub(super) ended: String,
    pub(super) has_hung: bool,
    pub(super) saw_ranks: bool,
    pub(super) left_behind: Vec<String>,
    pub(super) compared: Option<Compared>,
    pub(super) survived: bool,
    /// The folder with the output of the runs.
    pub(super) folder: String,
}

impl Report {
    pub(super) const VERSION: u32 = VERSION;

    /// All on one line.
    pub(super) fn json(&self) -> String {
        // Plain data: encoding does not fail.
        serde_json::to_string(self).unwrap_or_default() + "\n"
    }

    /// The table, and the sentences below it.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        if !self.dealt.is_empty() {
            text = with_numbers(1, &self.table()) + "\n";
        }
        for (name, says) in self.summary() {
            let _ = writeln!(text, "{name:<12}  {says}");
        }
        text
    }

    fn table(&self) -> Vec<Vec<String>> {
        let words = ["at", "fault", "rank", "for", "the job", "recovery", "ranks"];
        let head = words.map(str::to_owned).to_vec();
        let or_dash = |cell: Option<String>| cell.unwrap_or_else(|| "-".to_owned());
        let row = |row: &Row| {
            vec![
                seconds(row.at_s),
                row.fault.clone(),
                row.rank
                    .map_or("launcher".to_owned(), |rank| rank.to_string()),
                or_dash(row.held_s.map(seconds)),
                or_dash(row.fate.map(|fate| fate.words().to_owned())),
                or_dash(row.recovery_s.map(seconds)),
                row.ranks.to_string(),
            ]
        };
        std::iter::once(head)
            .chain(self.dealt.iter().map(row))
            .collect()
    }

    fn summary(&self) -> Vec<(&'static str, String)> {
        let mut lines = vec![("faults", self.faults())];
        if let Some(recovery) = self.recovery() {
            lines.push(("recovery", recovery));
        }
        let ended = match self.has_hung {
            true => format!("hung, and was ended: it {}", self.ended),
            false => self.ended.clone(),
        };
        lines.push(("job", format!("{ended} after {}", seconds(self.took_s))));
        if !self.saw_ranks {
            let why = "no rank was seen: PROGRAM has to start its ranks with `paceline run` or `paceline train`";
            lines.push(("", why.to_owned()));
        }
        let left = match self.left_behind.is_empty() {
            true => "no process, no shared memory".to_owned(),
            false => self.left_behind.join(", "),
        };
        lines.push(("left behind", left));
        lines.push(("same bits", self.same_bits()));
        lines.push(("output", self.folder.clone()));
        let verdict = if self.survived { "yes" } else { "no" };
        lines.push(("survived", verdict.to_owned()));
        lines
    }

    fn faults(&self) -> String {
        let (dealt, of, seed) = (self.dealt.len(), self.faults, self.seed);
        let mut text = format!("{dealt} of {of} dealt, by the plan of seed {seed}");
        let mut whys: Vec<&str> = self.missed.iter().map(|one| one.why).collect();
        whys.sort_unstable();
        for same in whys.chunk_by(|a, b| a == b) {
            let _ = write!(text, "; {} not, because {}", same.len(), same[0]);
        }
        text
    }

    /// How often the job recovered in each way, and how fast.
    fn recovery(&self) -> Option<String> {
        let mut ways = Vec::new();
        for fate in [Fate::WentOn, Fate::Restarted, Fate::Continued] {
            let is_it = |row: &&Row| row.fate == Some(fate);
            let rows = self.dealt.iter().filter(is_it);
            let mut times: Vec<f64> = rows.clone().filter_map(|row| row.recovery_s).collect();
            times.sort_unstable_by(f64::total_cmp);
            let Some(most) = times.last() else { continue };
            let median = times[(times.len() - 1) / 2];
            let times = count(rows.count(), "time");
            let (median, most) = (seconds(median), seconds(*most));
            ways.push(format!(
                "{} {times} (median {median}, most {most})",
                fate.words()
            ));
        }
        (!ways.is_empty()).then(|| ways.join("; "))
    }

    fn same_bits(&self) -> String {
        let Some(compared) = &self.compared else {
            return "not compared: there was no --reference".to_owned();
        };
        let value = |one: &Evidence| one.value.clone().unwrap_or_else(|| "nothing".to_owned());
        let values = |all: &[Evidence]| all.iter().map(value).collect::<Vec<_>>().join(", ");
        match compared.same_bits {
            Some(true) => format!("yes ({})", values(&compared.result)),
            Some(false) => {
                let (expected, got) = (values(&compared.reference), values(&compared.result));
                format!("no: expected {expected}, got {got}")
            }
            None => {
                let missing = compared.reference.iter().find(|one| one.value.is_none());
                let name = missing.map_or("result", |one| &one.name);
                format!("unknown: the undisturbed run left no {name}; see --compare and --same")
            }
        }
    }
}

/// A time with its unit.
fn seconds(seconds: f64) -> String {
    if seconds < 1.0 {
        format!("{:.0} ms", seconds * 1000.0)
    } else {
        format!("{seconds:.2} s")
    }
}

/// A time as it stands in JSON.
pub(super) fn rounded(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e6
}

#[cfg(test)]
mod tests;
