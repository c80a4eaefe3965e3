//! The report on a job that was disturbed: a table for people, or JSON.

use std::fmt::Write as _;
use std::time::Duration;

use paceline_gpu::columns::with_numbers;
use paceline_words::counted;
use serde::{Serialize, Serializer};

use super::evidence::Evidence;
use super::plan::Fault;
use super::scene::{Fate, Found};

/// Version of the JSON's fields.
pub(super) const VERSION: u32 = 1;

/// One fault and what became of it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Dealt {
    /// Its place in the plan.
    pub(super) index: usize,
    /// Since the start of the run.
    #[serde(rename = "at_s", serialize_with = "in_seconds")]
    pub(super) at: Duration,
    pub(super) fault: Fault,
    /// `None` for a launcher.
    pub(super) rank: Option<usize>,
    pub(super) pid: u32,
    /// What the rank was doing, or for a launcher some rank.
    pub(super) during: Option<String>,
    /// How long it lasted.
    #[serde(rename = "held_s", serialize_with = "in_seconds")]
    pub(super) held: Option<Duration>,
    pub(super) fate: Option<Fate>,
    /// How a flipped bit was found.
    pub(super) found: Option<Found>,
    /// Until every rank that was left had done a step, from the fault on, or from its end where the rank is still there.
    #[serde(rename = "recovery_s", serialize_with = "in_seconds")]
    pub(super) recovery: Option<Duration>,
    /// Ranks that were running then.
    pub(super) ranks: usize,
}

impl Dealt {
    /// What became of the job, and how it found a flipped bit.
    fn outcome(&self) -> Option<String> {
        let words = self.fate?.words();
        Some(match self.found {
            None => words.to_owned(),
            Some(Found { after_steps, named }) => {
                let who = named.map_or("found".to_owned(), |rank| format!("rank {rank} named"));
                format!(
                    "{words}: {who} after {}",
                    counted(after_steps as usize, "step")
                )
            }
        })
    }
}

/// A fault that was not dealt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Missed {
    pub(super) fault: Fault,
    pub(super) why: String,
}

/// The course of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Trial {
    #[serde(rename = "took_s", serialize_with = "in_seconds")]
    pub(super) took: Duration,
    /// Steps done, if the job said so.
    pub(super) steps: Option<u64>,
    /// When the first step was seen.
    #[serde(skip)]
    pub(super) first_step: Option<Duration>,
    pub(super) dealt: Vec<Dealt>,
    pub(super) missed: Vec<Missed>,
    /// How often the program was started again.
    pub(super) resumed: usize,
    /// How the program ended, in words.
    pub(super) ended: String,
    pub(super) is_success: bool,
    pub(super) has_hung: bool,
    pub(super) saw_ranks: bool,
    pub(super) left_behind: Vec<String>,
}

impl Trial {
    pub(super) fn is_well(&self) -> bool {
        self.is_success && !self.has_hung && self.left_behind.is_empty()
    }
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
    #[serde(rename = "paceline_chaos")]
    pub(super) version: u32,
    pub(super) program: String,
    pub(super) seed: u64,
    /// Faults that were asked for.
    pub(super) faults: usize,
    #[serde(rename = "reference_took_s", serialize_with = "in_seconds")]
    pub(super) reference_took: Option<Duration>,
    #[serde(flatten)]
    pub(super) trial: Trial,
    pub(super) compared: Option<Compared>,
    pub(super) survived: bool,
    /// The folder with the output of the runs.
    pub(super) folder: String,
}

fn in_seconds<S: Serializer>(
    time: &(impl Copy + Into<Option<Duration>>),
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let seconds = |time: Duration| time.as_micros() as f64 / 1e6;
    (*time).into().map(seconds).serialize(serializer)
}

impl Report {
    /// All on one line.
    pub(super) fn json(&self) -> String {
        // Plain data: encoding does not fail.
        serde_json::to_string(self).unwrap_or_default() + "\n"
    }

    /// The table, and the sentences below it.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        if !self.trial.dealt.is_empty() {
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
        let row = |row: &Dealt| {
            let rank = row.rank.map(|rank| rank.to_string());
            vec![
                seconds(row.at),
                row.fault.name(),
                rank.unwrap_or_else(|| "launcher".to_owned()),
                or_dash(row.held.map(seconds)),
                or_dash(row.outcome()),
                or_dash(row.recovery.map(seconds)),
                row.ranks.to_string(),
            ]
        };
        std::iter::once(head)
            .chain(self.trial.dealt.iter().map(row))
            .collect()
    }

    fn summary(&self) -> Vec<(&'static str, String)> {
        let mut lines = vec![("faults", self.faults())];
        if let Some(recovery) = self.recovery() {
            lines.push(("recovery", recovery));
        }
        let trial = &self.trial;
        let hung = if trial.has_hung {
            "hung, and was ended: it "
        } else {
            ""
        };
        let resumed = match trial.resumed {
            0 => String::new(),
            times => format!(", started again {}", counted(times, "time")),
        };
        let (ended, took) = (&trial.ended, seconds(trial.took));
        lines.push(("job", format!("{hung}{ended} after {took}{resumed}")));
        if !trial.saw_ranks {
            let why = "no rank was seen: PROGRAM has to start its ranks with `paceline run` or `paceline train`";
            lines.push(("", why.to_owned()));
        }
        let left = match trial.left_behind.is_empty() {
            true => "no process, no shared memory".to_owned(),
            false => trial.left_behind.join(", "),
        };
        lines.push(("left behind", left));
        lines.push(("same bits", self.same_bits()));
        lines.push(("output", self.folder.clone()));
        let verdict = if self.survived { "yes" } else { "no" };
        lines.push(("survived", verdict.to_owned()));
        lines
    }

    fn faults(&self) -> String {
        let (dealt, of, seed) = (self.trial.dealt.len(), self.faults, self.seed);
        let mut text = format!("{dealt} of {of} dealt, by the plan of seed {seed}");
        let missed = self.trial.missed.iter();
        let mut whys: Vec<&str> = missed.map(|one| &*one.why).collect();
        whys.sort_unstable();
        for same in whys.chunk_by(|a, b| a == b) {
            let _ = write!(text, "; {} not, because {}", same.len(), same[0]);
        }
        text
    }

    /// How often the job recovered in each way, and how fast.
    fn recovery(&self) -> Option<String> {
        let mut ways = Vec::new();
        for fate in [
            Fate::WentOn,
            Fate::Restarted,
            Fate::Continued,
            Fate::Repaired,
        ] {
            let is_it = |row: &&Dealt| row.fate == Some(fate);
            let rows = self.trial.dealt.iter().filter(is_it);
            let mut times: Vec<Duration> = rows.clone().filter_map(|row| row.recovery).collect();
            times.sort_unstable();
            let Some(most) = times.last() else { continue };
            let median = times[(times.len() - 1) / 2];
            let times = counted(rows.count(), "time");
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
fn seconds(time: Duration) -> String {
    match time.as_secs_f64() {
        seconds if seconds < 1.0 => format!("{:.0} ms", seconds * 1000.0),
        seconds => format!("{seconds:.2} s"),
    }
}

#[cfg(test)]
mod tests;
