//! `paceline chaos`: faults for a job of the user's own, and whether it survives them with the same result.

mod args;
mod blow;
mod evidence;
mod plan;
mod report;
mod scene;
mod trial;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use paceline_launch::RunFolder;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use self::evidence::{Evidence, Places, is_same};
use self::plan::plan;
use self::report::{Compared, Missed, Report, Row, rounded};
use self::scene::Extent;
use self::trial::{Dealt, Setting, Trial, ended, line, run};
use crate::exit::{Exit, Failure, hint, note};
use crate::flags::print;
use crate::job;

pub use self::args::ChaosArgs;
pub(crate) use self::args::{command, read};

/// Lines of the program's errors that are shown when it has failed.
const LINES_SHOWN: usize = 20;

/// Runs the program, undisturbed first if that was asked for, and prints what became of it.
///
/// *Errors*: a program could not be started, a file cannot be read or written, or the undisturbed run failed.
pub(crate) fn chaos(args: &ChaosArgs) -> Result<Exit, Failure> {
    let folder = match &args.log_dir {
        Some(dir) => RunFolder::create(dir, "chaos"),
        None => RunFolder::create_default("chaos", &|name| std::env::var_os(name)),
    };
    let folder = folder.map_err(job::refused)?;
    let signal = Arc::<AtomicUsize>::default();
    for number in [SIGINT, SIGTERM, SIGHUP] {
        let caught = signal_hook::flag::register_usize(number, signal.clone(), number as usize);
        caught.map_err(|error| Failure::environment(format!("cannot catch signals: {error}")))?;
    }
    let undisturbed = args.reference();
    let setting = |program, name: &str| Setting {
        program,
        output: folder.path().join(format!("{name}.out")),
        errors: folder.path().join(format!("{name}.err")),
        hang: args.hang_seconds,
        leave: args.leave,
        signal: signal.clone(),
    };
    let mut reference = None;
    let every = args.every_seconds * args.recipe().count as u32;
    let mut extent = Extent::Time(every);
    if let Some(program) = &undisturbed {
        note(&format!("undisturbed: {}", line(program)));
        let setting = setting(program, "reference");
        let (trial, found) = observed(args, &setting, &[], extent)?;
        if let Some(exit) = interrupted(&signal) {
            return Ok(exit);
        }
        if !trial.is_well() {
            show_errors(&setting.errors);
            return Err(failed(&trial));
        }
        extent = trial.extent();
        reference = Some((trial, found));
    }
    let strikes = plan(&args.recipe());
    note(&format!("with faults: {}", line(&args.program)));
    let setting = setting(&args.program, "disturbed");
    let (trial, found) = observed(args, &setting, &strikes, extent)?;
    if !trial.is_well() {
        show_errors(&setting.errors);
    }
    let report = report(args, trial, found, reference, folder.path());
    let text = match args.json {
        true => report.json(),
        false => report.text(),
    };
    print(|out| out.write_all(text.as_bytes()))?;
    Ok(match interrupted(&signal) {
        Some(exit) => exit,
        None if report.survived => Exit::Done,
        None => Exit::JobFailed,
    })
}

/// One run, and its result.
fn observed(
    args: &ChaosArgs,
    setting: &Setting<'_>,
    strikes: &[plan::Strike],
    extent: Extent,
) -> Result<(Trial, Vec<Evidence>), Failure> {
    let places = Places::new(args.pattern(), &args.same);
    let trial = run(setting, strikes, extent)?;
    let found = places.collect(&setting.output).map_err(|error| {
        Failure::environment(format!("the result of a run cannot be read: {error}"))
    })?;
    Ok((trial, found))
}

fn interrupted(signal: &AtomicUsize) -> Option<Exit> {
    let number = u8::try_from(signal.load(Ordering::Relaxed)).ok()?;
    (number != 0).then_some(Exit::Signal(number))
}

/// Why the undisturbed run is no reference.
fn failed(trial: &Trial) -> Failure {
    let why = match (trial.has_hung, trial.left_behind.as_slice()) {
        (true, _) => "hung".to_owned(),
        (false, []) => ended(trial.ending),
        (false, left) => format!("left behind {}", left.join(", ")),
    };
    Failure::new(
        Exit::JobFailed,
        format!("the undisturbed run {why}, so there is nothing to compare with"),
        None,
    )
}

/// The last lines of a failed run's errors.
fn show_errors(file: &Path) {
    let text = fs::read(file).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    for line in &lines[lines.len().saturating_sub(LINES_SHOWN)..] {
        eprintln!("  {line}");
    }
    if !lines.is_empty() {
        hint(&format!("all of the program's errors: {}", file.display()));
    }
}

fn report(
    args: &ChaosArgs,
    trial: Trial,
    result: Vec<Evidence>,
    reference: Option<(Trial, Vec<Evidence>)>,
    folder: &Path,
) -> Report {
    let is_well = trial.is_well();
    let reference_took_s = reference.as_ref().map(|(trial, _)| rounded(trial.took));
    let compared = reference.map(|(_, reference)| Compared {
        same_bits: is_same(&reference, &result),
        reference,
        result,
    });
    let is_same = (compared.as_ref()).is_none_or(|compared| compared.same_bits == Some(true));
    let missed = trial.missed.iter().map(|(strike, why)| Missed {
        fault: strike.fault.name(),
        why,
    });
    Report {
        paceline_chaos: Report::VERSION,
        program: line(&args.program),
        seed: args.seed(),
        faults: args.recipe().count,
        took_s: rounded(trial.took),
        reference_took_s,
        missed: missed.collect(),
        ended: ended(trial.ending),
        has_hung: trial.has_hung,
        saw_ranks: trial.saw_ranks,
        survived: is_well && is_same && trial.saw_ranks,
        left_behind: trial.left_behind,
        compared,
        dealt: trial.dealt.iter().map(row).collect(),
        folder: folder.display().to_string(),
    }
}

fn row(dealt: &Dealt) -> Row {
    let strike = &dealt.strike;
    let (fate, recovery) = dealt.fate.unzip();
    Row {
        at_s: rounded(dealt.at),
        fault: strike.fault.name(),
        rank: dealt.rank,
        pid: dealt.pid,
        held_s: strike.fault.lasts().then(|| rounded(strike.hold)),
        fate,
        recovery_s: recovery.flatten().map(rounded),
        ranks: dealt.ranks,
    }
}
