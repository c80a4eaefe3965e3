//! `paceline chaos`: faults for a job of the user's own, and whether it survives them with the same result.

mod args;
mod blow;
mod evidence;
mod plan;
mod report;
mod scene;
mod trial;

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use paceline_launch::RunFolder;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use self::evidence::{Evidence, Places, is_same};
use self::plan::{Strike, plan};
use self::report::{Compared, Report, Trial, VERSION};
use self::scene::Extent;
use self::trial::{Setting, line, run};
use crate::exit::{Exit, Failure, hint, note, tell};
use crate::flags::print;
use crate::job;

pub use self::args::ChaosArgs;
pub(crate) use self::args::{command, read};

/// Lines of the program's errors that are shown when it has failed.
const LINES_SHOWN: usize = 40;

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
    let resume = args.resume();
    let mut setting = Setting {
        output: folder.path().join("reference.out"),
        errors: folder.path().join("reference.err"),
        hang: args.hang_seconds,
        leave: args.leave,
        resume: None,
        extent: Extent::Time(args.every_seconds * args.recipe().count as u32),
        signal: signal.clone(),
    };
    let mut reference = None;
    if let Some(program) = &undisturbed {
        note(&format!("undisturbed: {}", line(program)));
        let (trial, found) = observed(args, &setting, program, &[])?;
        if let Some(exit) = interrupted(&signal) {
            return Ok(exit);
        }
        if !trial.is_well() {
            show_errors(&setting.errors);
            return Err(failed(&trial));
        }
        // Another command than the program may know the result without a job.
        if trial.saw_ranks || *program == args.program {
            setting.extent = Extent::of(&trial);
        }
        reference = Some((trial.took, found));
    }
    note(&format!("with faults: {}", line(&args.program)));
    setting.output = folder.path().join("disturbed.out");
    setting.errors = folder.path().join("disturbed.err");
    setting.resume = resume.as_deref();
    let strikes = plan(&args.recipe());
    let (trial, result) = observed(args, &setting, &args.program, &strikes)?;
    let is_well = trial.is_well();
    if !is_well {
        show_errors(&setting.errors);
    }
    let (reference_took, reference) = reference.unzip();
    let compared = reference.map(|reference| Compared {
        same_bits: is_same(&reference, &result),
        reference,
        result,
    });
    let is_same = (compared.as_ref()).is_none_or(|compared| compared.same_bits == Some(true));
    let report = Report {
        version: VERSION,
        program: line(&args.program),
        seed: args.seed,
        faults: strikes.len(),
        reference_took,
        survived: is_well && is_same && trial.saw_ranks,
        trial,
        compared,
        folder: folder.path().display().to_string(),
    };
    let text = if args.json {
        report.json()
    } else {
        report.text()
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
    program: &[OsString],
    strikes: &[Strike],
) -> Result<(Trial, Vec<Evidence>), Failure> {
    let places = Places::new(args.pattern(), &args.same);
    let trial = run(setting, program, strikes)?;
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
        (false, []) => trial.ended.clone(),
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
        tell(format_args!("  {line}"));
    }
    if !lines.is_empty() {
        hint(&format!("all of the program's errors: {}", file.display()));
    }
}
