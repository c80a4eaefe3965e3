//! One run of the program: faults are dealt when they are due, the job is watched, and what it leaves behind is ended.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use paceline_launch::Contained;
use paceline_launch::judge::Ending;
use paceline_rendezvous::page::Running;
use signal_hook::consts::{SIGKILL, SIGTERM};

use super::blow::{Held, hit};
use super::plan::{Fault, Moment, Strike};
use super::report::{Dealt, Missed, Trial};
use super::scene::{Extent, Eyes, Fate, Rules, Scene, Watch, target};
use crate::exit::{Failure, note};
use crate::job::refused;

/// Between two looks. Times are known to this.
const LOOK: Duration = Duration::from_millis(1);
/// So long a fault waits for a rank in its phase; then it takes any.
const PHASE_WITHIN: Duration = Duration::from_millis(100);
/// A job that was asked to end has so long.
const GRACE: Duration = Duration::from_secs(30);
/// What a launcher that was killed has started may need so long to end by itself.
const SETTLES_WITHIN: Duration = Duration::from_secs(5);
const SHARED_MEMORY: &str = "/dev/shm";

/// How to run a program, and for how long to wait.
pub(super) struct Setting<'a> {
    pub(super) output: PathBuf,
    pub(super) errors: PathBuf,
    pub(super) hang: Duration,
    /// Ranks that no deadly fault may reduce the job to fewer than.
    pub(super) leave: usize,
    /// The program that goes on after the only launcher was killed.
    pub(super) resume: Option<&'a [OsString]>,
    pub(super) extent: Extent,
    /// The number of a signal that this command has got.
    pub(super) signal: Arc<AtomicUsize>,
}

/// A strike that has not been dealt.
struct Pending {
    strike: Strike,
    /// From when on, once that is known.
    due: Option<Instant>,
    why: String,
}

/// A run that is under way.
struct Run<'a> {
    setting: &'a Setting<'a>,
    started: Instant,
    running: Running,
    eyes: Eyes,
    held: Vec<Held>,
    pending: Vec<Pending>,
    watches: Vec<(usize, Watch)>,
    /// The last sign of life: output, or a change of the scene.
    sign: (u64, Scene, Instant),
    trial: Trial,
}

/// Runs the program under these faults.
///
/// *Blocks*: until the program has ended, hangs, or this command gets a signal.
///
/// *Errors*: it could not be started.
pub(super) fn run(
    setting: &Setting<'_>,
    program: &[OsString],
    strikes: &[Strike],
) -> Result<Trial, Failure> {
    let shared_before = shared_memory();
    let [output, errors] = [&setting.output, &setting.errors]
        .map(|path| File::create(path).map_err(|error| Failure::unwritten(path, &error)));
    let streams = (output?, errors?);
    let pending = |strike: &Strike| Pending {
        strike: *strike,
        due: None,
        why: "the job ended before".to_owned(),
    };
    let mut run = Run {
        setting,
        started: Instant::now(),
        running: Running::new(Path::new("/")),
        eyes: Eyes::default(),
        held: Vec::new(),
        pending: strikes.iter().map(pending).collect(),
        watches: Vec::new(),
        sign: (0, Scene::default(), Instant::now()),
        trial: Trial::default(),
    };
    let mut next = program;
    loop {
        let dealt = run.trial.dealt.len();
        let program = start(next, &streams)?;
        let ending = run.follow(program);
        let dealt = &run.trial.dealt[dealt..];
        let was_killed = dealt.iter().any(|one| one.fault == Fault::Agent);
        let is_over = run.trial.has_hung || setting.signal.load(Ordering::Relaxed) != 0;
        match setting.resume {
            Some(resume) if was_killed && !ending.is_success() && !is_over => {
                next = resume;
                run.trial.resumed += 1;
            }
            _ => {
                run.conclude(ending);
                break;
            }
        }
    }
    let shared = shared_memory();
    let left = shared.difference(&shared_before);
    // The memory of another job that runs is not this one's.
    let left = left.filter(|name| !paceline_launch::is_memory_in_use(name));
    let left = left.map(|name| format!("{SHARED_MEMORY}/{}", name.display()));
    run.trial.left_behind.extend(left);
    Ok(run.trial)
}

fn start(program: &[OsString], streams: &(File, File)) -> Result<Contained, Failure> {
    let [program, args @ ..] = program else {
        return Err(Failure::usage("no PROGRAM to start"));
    };
    let copy = |file: &File| {
        let copy = file.try_clone().map(Stdio::from);
        copy.map_err(|error| Failure::environment(format!("no descriptor is left: {error}")))
    };
    let mut command = Command::new(program);
    let command = command.args(args).stdin(Stdio::null());
    let command = command.stdout(copy(&streams.0)?).stderr(copy(&streams.1)?);
    Contained::start(command).map_err(refused)
}

impl Run<'_> {
    /// Until the program has ended, and what it left behind was noted and ended. Returns how it ended.
    fn follow(&mut self, mut program: Contained) -> Ending {
        // When the program is to be killed, once it was asked to end.
        let mut kill_at: Option<Instant> = None;
        let ending = loop {
            if let Some(ending) = program.ended() {
                break ending;
            }
            let now = Instant::now();
            let scene = self.look(&program, now);
            self.held.retain_mut(|held| held.turn(now));
            let signal = self.setting.signal.load(Ordering::Relaxed);
            self.trial.has_hung |= kill_at.is_none() && self.is_silent(&scene, now);
            match kill_at {
                None if signal != 0 || self.trial.has_hung => {
                    kill_at = Some(now + GRACE);
                    self.end(&program, if signal == 0 { SIGTERM } else { signal as i32 });
                }
                None if scene.is_running() => self.deal(&program, &scene),
                Some(at) if now >= at => self.end(&program, SIGKILL),
                None | Some(_) => {}
            }
            self.watch(&scene);
            std::thread::sleep(LOOK);
        };
        self.trial.took = self.started.elapsed();
        self.held.clear();
        self.trial.left_behind.extend(left_processes(&program));
        program.end(Duration::ZERO);
        ending
    }

    fn look(&mut self, program: &Contained, now: Instant) -> Scene {
        let jobs = self.running.look_among(now, || program.processes());
        let scene = self.eyes.see(&jobs);
        let trial = &mut self.trial;
        trial.saw_ranks |= !scene.ranks.is_empty();
        trial.steps = trial.steps.max(scene.furthest());
        if trial.steps.is_some() {
            trial.first_step.get_or_insert(self.started.elapsed());
        }
        scene
    }

    /// Whether the job has shown no sign of life for too long.
    fn is_silent(&mut self, scene: &Scene, now: Instant) -> bool {
        let bytes = |path| fs::metadata(path).map_or(0, |status| status.len());
        let printed = bytes(&self.setting.output) + bytes(&self.setting.errors);
        if self.sign.0 != printed || self.sign.1 != *scene || !self.held.is_empty() {
            self.sign = (printed, scene.clone(), now);
        }
        now.duration_since(self.sign.2) >= self.setting.hang
    }

    fn end(&mut self, program: &Contained, signal: i32) {
        self.held.clear();
        // The numbers are those of signals that this command was sent, or named here.
        let _ = program.signal(signal);
    }

    /// Deals the first strike that is due and has a target: the next one sees another scene.
    fn deal(&mut self, program: &Contained, scene: &Scene) {
        let now = Instant::now();
        for place in 0..self.pending.len() {
            let Some(due) = self.due(place, now).filter(|due| now >= *due) else {
                continue;
            };
            match self.strike(program, scene, place, now >= due + PHASE_WITHIN) {
                Ok(()) => {
                    self.pending.remove(place);
                    return;
                }
                Err(why) => self.pending[place].why = why,
            }
        }
    }

    /// When a strike is due, once the job is as far as it should be.
    fn due(&mut self, place: usize, now: Instant) -> Option<Instant> {
        let Pending { strike, due, .. } = &mut self.pending[place];
        if due.is_none() {
            *due = match strike.moment {
                Moment::At(share) => match self.setting.extent.place(share) {
                    (0, time) => Some(self.started + time),
                    (steps, time) => (self.trial.steps >= Some(steps)).then(|| now + time),
                },
                Moment::After(gap) => {
                    let mut dealt = self.trial.dealt.iter();
                    let before = dealt.find(|one| one.index + 1 == strike.index);
                    before.map(|one| self.started + one.at + gap)
                }
            };
        }
        *due
    }

    fn strike(
        &mut self,
        program: &Contained,
        scene: &Scene,
        place: usize,
        in_any_phase: bool,
    ) -> Result<(), String> {
        let strike = self.pending[place].strike;
        let held: Vec<u32> = self.held.iter().map(|held| held.pid).collect();
        let rules = Rules {
            held: &held,
            leave: self.setting.leave,
            resumes: self.setting.resume.is_some(),
            phase: strike.phase().filter(|_| !in_any_phase),
        };
        let mut target = target(&strike, scene, rules)?;
        let pid = target.pid;
        let is_ours = || program.processes().contains(&pid);
        let weights = || {
            let (page, slot) = target.seat;
            let (activity, addresses) = self.running.weights_now(page, slot)?;
            target.activity = Some(activity);
            Some(addresses)
        };
        let at = self.started.elapsed();
        // A process that ended a moment ago is another's target.
        let lasting = hit(&strike, pid, is_ours, weights)
            .map_err(|error| format!("its target could not be hit: {error}"))?;
        self.held.extend(lasting);
        let whom = match target.rank {
            Some(rank) => format!("rank {rank}"),
            None => "the launcher".to_owned(),
        };
        let name = strike.fault.name();
        let during = target.activity.map(|activity| activity.to_string());
        let doing = during.as_deref().unwrap_or("running");
        let since = at.as_secs_f64();
        note(&format!("{since:.3} s: {name} {whom} (pid {pid}), {doing}"));
        let has_steps = matches!(self.setting.extent, Extent::Steps(..));
        let watch = Watch::new(scene, &target, strike.fault, has_steps);
        self.watches.push((self.trial.dealt.len(), watch));
        self.trial.dealt.push(Dealt {
            index: strike.index,
            at,
            fault: strike.fault,
            rank: target.rank,
            pid,
            during,
            held: strike.fault.lasts().then_some(strike.hold),
            fate: None,
            found: None,
            recovery: None,
            ranks: scene.ranks.len(),
        });
        Ok(())
    }

    fn watch(&mut self, scene: &Scene) {
        let (trial, held, now) = (&mut self.trial, &self.held, self.started.elapsed());
        let has_steps = trial.steps.is_some();
        self.watches.retain_mut(|(place, watch)| {
            let one = &mut trial.dealt[*place];
            let is_held = held.iter().any(|held| held.pid == one.pid);
            one.fate = watch.fate(scene, is_held);
            one.found = watch.found;
            if let Some(fate) = one.fate {
                // A rank that stood still and is still there held the others up for as long; the rest is the recovery.
                let hold = one.held.filter(|_| fate == Fate::Continued);
                let since = now.saturating_sub(one.at + hold.unwrap_or_default());
                one.recovery = has_steps.then_some(since);
                one.ranks = scene.ranks.len();
            }
            one.fate.is_none()
        });
    }

    /// The program has ended, and with it what was not done.
    fn conclude(&mut self, ending: Ending) {
        let trial = &mut self.trial;
        trial.is_success = ending.is_success();
        trial.ended = match ending {
            Ending::Code(code) => format!("exited with code {code}"),
            Ending::Signal { number, .. } => format!("was ended by signal {number}"),
        };
        for (place, _) in self.watches.drain(..) {
            let one = &mut trial.dealt[place];
            one.fate = Some(match (trial.is_success, one.fault, one.found) {
                (false, ..) => Fate::Failed,
                (true, Fault::Corrupt, None) => Fate::Unnoticed,
                (true, Fault::Corrupt, Some(_)) => Fate::Repaired,
                (true, ..) => Fate::Finished,
            });
        }
        let missed = |one: Pending| Missed {
            fault: one.strike.fault,
            why: one.why,
        };
        trial.missed = self.pending.drain(..).map(missed).collect();
    }
}

/// What still runs after the program's end, once it had the time to end by itself.
fn left_processes(program: &Contained) -> Vec<String> {
    let until = Instant::now() + SETTLES_WITHIN;
    loop {
        let left = program.processes();
        if left.is_empty() || Instant::now() >= until {
            let name = |pid: u32| {
                let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                format!("process {pid} ({})", name.trim_end())
            };
            return left.into_iter().map(name).collect();
        }
        std::thread::sleep(LOOK);
    }
}

/// This user's files in shared memory.
fn shared_memory() -> BTreeSet<OsString> {
    let own = rustix::process::getuid().as_raw();
    let entries = fs::read_dir(SHARED_MEMORY).into_iter().flatten().flatten();
    let is_own = |entry: &fs::DirEntry| entry.metadata().is_ok_and(|status| status.uid() == own);
    let own = entries.filter(is_own);
    own.map(|entry| entry.file_name()).collect()
}

/// The program as it would be typed.
pub(super) fn line(program: &[OsString]) -> String {
    let words = program.iter().map(|word| OsStr::to_string_lossy(word));
    words.collect::<Vec<_>>().join(" ")
}
