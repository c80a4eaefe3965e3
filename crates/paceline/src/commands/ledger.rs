//! `paceline ledger verify`: whether a run used every sample once, and what happened to it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, Write as _};

use paceline_checkpoint::ledger::{self, Attempt, Audit, Begin, Cause, Epoch};
use paceline_cli::exit::{Exit, Failure};
use paceline_cli::flags::finish;
use paceline_train::run_dir::checkpoints;
use paceline_usage::files::write_beside;
use paceline_usage::{Lane, Lanes, Piece};
use paceline_words::counted;

use crate::cli::LedgerArgs;

/// Most faults in an error; each has a line.
const FAULTS_MAX: usize = 20;

/// Prints what the ledger of a run says.
///
/// *Errors*: there is no ledger; it proves nothing; the picture cannot be written.
pub(crate) fn verify(args: &LedgerArgs) -> Result<Exit, Failure> {
    let below = checkpoints(&args.run);
    let folders = [&below, &args.run];
    let found = folders
        .into_iter()
        .find(|folder| ledger::path(folder).exists());
    let Some(folder) = found else {
        let message = format!("{} has no ledger", ledger::path(&below).display());
        let hint =
            "name a run directory, or the folder of a program that calls `Checkpoints::record`";
        return Err(Failure::new(Exit::Usage, message, Some(hint.into())));
    };
    let audit = ledger::audit(folder);
    let audit = audit.map_err(|error| Failure::new(Exit::Usage, &error, error.hint()))?;
    if let Some(file) = &args.svg {
        write_beside(file, picture(&audit).svg().as_bytes())
            .map_err(|error| Failure::unwritten(file, &error))?;
    }
    let text = match args.json {
        true => serde_json::to_string(&audit).expect("plain data encodes") + "\n",
        false => report(&audit),
    };
    let printed = finish(io::stdout().lock().write_all(text.as_bytes()))?;
    match &audit.faults[..] {
        [] => Ok(printed),
        faults => {
            let mut message = format!("{} proves nothing:", audit.path.display());
            for fault in faults.iter().take(FAULTS_MAX) {
                let _ = write!(message, "\n  {fault}");
            }
            Err(Failure::new(Exit::JobFailed, message, None))
        }
    }
}

fn report(audit: &Audit) -> String {
    let mut text = format!("ledger    {}\n", audit.path.display());
    let _ = write!(text, "steps     {} committed", audit.steps);
    if audit.rolled_back > 0 {
        let _ = write!(text, ", {} more rolled back", audit.rolled_back);
    }
    text.push('\n');
    let mut first = 1;
    for same in audit.epochs.chunk_by(PartialEq::eq) {
        let last = first + same.len() - 1;
        let of = match last > first {
            true => format!("epochs    {first} to {last}"),
            false => format!("epoch     {first}"),
        };
        let _ = writeln!(text, "{of}: {}", used(&same[0]));
        first = last + 1;
    }
    if audit.skipped > 0 {
        let steps = counted(audit.skipped as usize, "step");
        let _ = writeln!(
            text,
            "skipped   {steps} changed nothing: the loss or a gradient was not finite"
        );
    }
    let given_up = audit.attempts.iter().flat_map(|attempt| &attempt.given_up);
    let (mut samples, mut steps) = (0_u64, 0);
    for of in given_up {
        samples = samples.saturating_add(of.samples);
        steps += of.last - of.first + 1;
    }
    if steps > 0 {
        let samples = counted(samples as usize, "sample");
        let steps = counted(steps as usize, "step");
        let _ = writeln!(
            text,
            "given up  {samples} of {steps}: the ranks went back from a loss or gradient that was not finite"
        );
    }
    for (at_ms, what) in incidents(audit) {
        let _ = writeln!(text, "{:>10}  {what}", clock(audit, at_ms));
    }
    if audit.torn_bytes > 0 {
        let bytes = counted(audit.torn_bytes as usize, "byte");
        let _ = writeln!(
            text,
            "the last record is torn, as a crash leaves it: {bytes} do not count"
        );
    }
    if audit.faults.is_empty() {
        text.push_str(
            "every record is in its place, and every step used the samples that it was dealt\n",
        );
    }
    text
}

fn used(epoch: &Epoch) -> String {
    let Epoch {
        len,
        once,
        repeated,
        unused,
        is_finished,
    } = *epoch;
    match (is_finished, once == len) {
        (true, true) => format!("each of {len} samples was used exactly once"),
        (true, false) => format!(
            "of {len} samples {once} were used once, {repeated} more than once and {unused} never, as its padding or `drop_last` asks"
        ),
        (false, _) => {
            format!("unfinished; of {len} samples {once} were used once, {repeated} more than once")
        }
    }
}

/// What happened, and when.
fn incidents(audit: &Audit) -> Vec<(u64, String)> {
    let mut told: Vec<(u64, String)> = Vec::new();
    let mut before: Option<&Attempt> = None;
    for attempt in &audit.attempts {
        let begin = &attempt.begin;
        let ranks = counted(begin.world, "rank");
        let step = begin.step;
        let lost = before.map_or(0, |before| before.last_step.saturating_sub(step));
        let lost = match lost {
            0 => String::new(),
            lost => format!(", {} rolled back", counted(lost as usize, "step")),
        };
        if let Some(before) = before.filter(|_| begin.cause == Cause::Resume) {
            let last = before.last_step;
            told.push((before.ended_ms, format!("ended after step {last}")));
        }
        let what = match begin.cause {
            Cause::Start => format!("started on {ranks}"),
            Cause::Resume => format!("resumed after step {step} on {ranks}{lost}"),
            Cause::Change => {
                let changes = changes(before, begin);
                format!("{changes}went on after step {step} on {ranks}{lost}")
            }
            Cause::Back => format!("went back to step {step} in memory{lost}"),
        };
        told.push((attempt.began_ms, what));
        if begin.dropped_bytes > 0 {
            let bytes = counted(begin.dropped_bytes as usize, "byte");
            told.push((
                attempt.began_ms,
                format!("removed a torn record of {bytes}"),
            ));
        }
        for of in &attempt.given_up {
            let steps = match of.first == of.last {
                true => format!("step {}", of.last),
                false => format!("steps {} to {}", of.first, of.last),
            };
            let samples = counted(of.samples as usize, "sample");
            let what = format!("{samples} of {steps} were given up: loss or gradient not finite");
            told.push((of.at_ms, what));
        }
        before = Some(attempt);
    }
    if let Some(last) = before {
        told.push((
            last.ended_ms,
            format!("last record: step {}", last.last_step),
        ));
    }
    told
}

/// What the launcher said of the ranks that were lost, and which others are gone or new, by their shards.
fn changes(before: Option<&Attempt>, now: &Begin) -> String {
    let ranks = |begin: &Begin| begin.owners.iter().map(|(rank, _)| *rank).collect();
    let now_there: BTreeSet<usize> = ranks(now);
    let were_there = before.map_or_else(|| now_there.clone(), |before| ranks(&before.begin));
    let mut told: Vec<String> = now.why.iter().cloned().collect();
    for rank in &were_there - &now_there {
        if !told
            .iter()
            .any(|why| why.contains(&format!("rank {rank} ")))
        {
            told.push(format!("rank {rank} was lost"));
        }
    }
    let new = (&now_there - &were_there).into_iter();
    told.extend(new.map(|rank| format!("rank {rank} was replaced")));
    told.iter().map(|what| format!("{what}; ")).collect()
}

/// Hours, minutes and seconds since the run began.
fn clock(audit: &Audit, at_ms: u64) -> String {
    let seconds = (since(audit, at_ms) + 0.5) as u64;
    format!(
        "{}:{:02}:{:02}",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60
    )
}

/// Seconds since the run began.
fn since(audit: &Audit, at_ms: u64) -> f64 {
    let began = audit.attempts.first().map_or(0, |first| first.began_ms);
    at_ms.saturating_sub(began) as f64 / 1e3
}

/// A lane for each rank: the shards that it computed, and which of its steps were rolled back.
fn picture(audit: &Audit) -> Lanes {
    let mut lanes: Vec<(usize, u64, Vec<Piece>)> = Vec::new();
    for attempt in &audit.attempts {
        let begin = &attempt.begin;
        for (place, (rank, first)) in begin.owners.iter().enumerate() {
            let next = begin.owners.get(place + 1);
            let end = next.map_or(begin.layout.shards, |(_, next)| *next);
            let label = match end - first {
                1 => format!("shard {first}"),
                _ => format!("shards {first} to {}", end - 1),
            };
            let at = lanes.iter().position(|(of, ..)| of == rank);
            let at = at.unwrap_or_else(|| {
                lanes.push((*rank, 0, Vec::new()));
                lanes.len() - 1
            });
            let (_, steps, pieces) = &mut lanes[at];
            *steps += attempt.kept;
            let [began, kept, ended] = [attempt.began_ms, attempt.kept_until_ms, attempt.ended_ms]
                .map(|at_ms| since(audit, at_ms));
            for (kind, start_s, end_s) in [(0, began, kept), (1, kept, ended)] {
                if end_s > start_s {
                    let label = label.clone();
                    pieces.push(Piece {
                        start_s,
                        end_s,
                        kind,
                        label,
                    });
                }
            }
        }
    }
    lanes.sort_by_key(|(rank, ..)| *rank);
    let lanes = lanes.into_iter().map(|(rank, steps, pieces)| Lane {
        name: format!("rank {rank}"),
        figure: counted(steps as usize, "step"),
        pieces,
    });
    Lanes {
        title: "Steps of a run".into(),
        subtitle: format!(
            "{} committed, {} rolled back, {}",
            counted(audit.steps as usize, "step"),
            audit.rolled_back,
            match audit.faults.is_empty() {
                true => "every sample used as dealt",
                false => "the ledger proves nothing",
            }
        ),
        kinds: vec!["committed".into(), "rolled back".into()],
        lanes: lanes.collect(),
    }
}
