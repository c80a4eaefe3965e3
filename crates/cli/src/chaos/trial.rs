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
use super::plan::{Moment, Strike};
use super::scene::{Extent, Eyes, Fate, Scene, Wait, Watch, target};
use crate::exit::{Failure, note};
use crate::job::refused;

/// Between two looks. Times are known to this.
const LOOK: Duration = Duration::from_millis(1);
/// A job that was asked to end has so long.
const GRACE: Duration = Duration::from_secs(30);
/// What a launcher that was killed has started may need so long to end by itself.
const SETTLES_WITHIN: Duration = Duration::from_secs(5);
const SHARED_MEMORY: &str = "/dev/shm";

/// What to run, and for how long to wait.
pub(super) struct Setting<'a> {
    pub(super) program: &'a [OsString],
    pub(super) output: PathBuf,
    pub(super) errors: PathBuf,
    pub(super) hang: Duration,
    /// Ranks that no deadly fault may reduce the job to fewer than.
    pub(super) leave: usize,
    /// The number of a signal that this command has got.
    pub(super) signal: Arc<AtomicUsize>,
}

/// What was done, and what became of it.
#[derive(Debug)]
pub(super) struct Dealt {
    /// Its place in the plan.
    pub(super) index: usize,
    /// Since the start of the run.
    pub(super) at: Duration,
    pub(super) strike: Strike,
    pub(super) rank: Option<usize>,
    pub(super) pid: u32,
    /// What became of the job and when, once that is known.
    pub(super) fate: Option<(Fate, Option<Duration>)>,
    /// Ranks that were running then.
    pub(super) ranks: usize,
}

/// A run.
#[derive(Debug)]
pub(super) struct Trial {
    pub(super) ending: Ending,
    pub(super) took: Duration,
    /// Steps done, if the job said so, and when the first was seen.
    pub(super) steps: Option<u64>,
    pub(super) first_step: Duration,
    pub(super) has_hung: bool,
    pub(super) saw_ranks: bool,
    pub(super) dealt: Vec<Dealt>,
    /// Faults that were not dealt, and why.
    pub(super) missed: Vec<(Strike, &'static str)>,
    pub(super) left_behind: Vec<String>,
}

impl Trial {
    pub(super) fn is_well(&self) -> bool {
        self.ending.is_success() && !self.has_hung && self.left_behind.is_empty()
    }

    /// How far a later run of the same program is at each moment; `None` if the job reported no steps.
    pub(super) fn extent(&self) -> Extent {
        match self.steps {
            Some(steps) if steps > 0 => {
                let time = self.took.saturating_sub(self.first_step);
                Extent::Steps(steps, time.div_f64(steps as f64))
            }
            _ => Extent::Time(self.took),
        }
    }
}

/// A strike that has not been dealt.
#[derive(Clone, Copy)]
struct Pending {
    /// Its place in the plan.
    index: usize,
    strike: Strike,
    /// Since when its step has been reached.
    reached: Option<Instant>,
    why: &'static str,
}

/// A run that is under way.
struct Run<'a> {
    setting: &'a Setting<'a>,
    program: Contained,
    started: Instant,
    running: Running,
    eyes: Eyes,
    held: Vec<Held>,
    pending: Vec<Pending>,
    dealt: Vec<Dealt>,
    watches: Vec<(usize, Watch)>,
    furthest: Option<u64>,
    first_step: Option<Duration>,
    /// Whether an earlier run of the program has reported steps.
    has_steps: bool,
    saw_ranks: bool,
    /// The last sign of life: output, or a change of the scene.
    sign: (u64, Scene, Instant),
}

/// Runs the program under these faults.
///
/// *Blocks*: until the program has ended, hangs, or this command gets a signal.
///
/// *Errors*: it could not be started.
pub(super) fn run(
    setting: &Setting<'_>,
    strikes: &[Strike],
    extent: Extent,
) -> Result<Trial, Failure> {
    let shared_before = shared_memory();
    let mut run = Run::start(setting, strikes, extent)?;
    let (ending, has_hung) = run.follow(extent);
    let took = run.started.elapsed();
    run.conclude(ending);
    let mut left_behind = left_processes(&run.program);
    run.program.end(Duration::ZERO);
    let shared = shared_memory();
    let left = shared.difference(&shared_before);
    left_behind.extend(left.map(|name| format!("{SHARED_MEMORY}/{}", name.display())));
    let missed = (run.pending.iter()).map(|one| (one.strike, one.why));
    Ok(Trial {
        ending,
        took,
        steps: run.furthest,
        first_step: run.first_step.unwrap_or_default(),
        has_hung,
        saw_ranks: run.saw_ranks,
        missed: missed.collect(),
        dealt: run.dealt,
        left_behind,
    })
}

impl<'a> Run<'a> {
    fn start(
        setting: &'a Setting<'a>,
        strikes: &[Strike],
        extent: Extent,
    ) -> Result<Self, Failure> {
        let create = |path: &Path| {
            File::create(path).map(Stdio::from).map_err(|error| {
                Failure::environment(format!("{} cannot be written: {error}", path.display()))
            })
        };
        let [program, args @ ..] = setting.program else {
            return Err(Failure::usage("no PROGRAM to start"));
        };
        let mut command = Command::new(program);
        command
            .args(args)
            .stdin(Stdio::null())
            .stdout(create(&setting.output)?)
            .stderr(create(&setting.errors)?);
        let program = Contained::start(&mut command).map_err(refused)?;
        let pending = |(index, strike): (usize, &Strike)| Pending {
            index,
            strike: *strike,
            reached: None,
            why: "the job ended before",
        };
        Ok(Self {
            setting,
            program,
            started: Instant::now(),
            running: Running::new(Path::new("/")),
            eyes: Eyes::default(),
            held: Vec::new(),
            pending: strikes.iter().enumerate().map(pending).collect(),
            dealt: Vec::new(),
            watches: Vec::new(),
            furthest: None,
            first_step: None,
            has_steps: matches!(extent, Extent::Steps(..)),
            saw_ranks: false,
            sign: (0, Scene::default(), Instant::now()),
        })
    }

    /// Until the program has ended. Says how, and whether it was ended because it hung.
    fn follow(&mut self, extent: Extent) -> (Ending, bool) {
        // Since when the program is being ended, and whether that is because it hung.
        let mut ending: Option<(Instant, bool)> = None;
        loop {
            if let Some(how) = self.program.ended() {
                return (how, ending.is_some_and(|(_, has_hung)| has_hung));
            }
            let now = Instant::now();
            let scene = self.look(now);
            self.held.retain_mut(|held| held.turn(now));
            match ending {
                None => {
                    let signal = self.setting.signal.load(Ordering::Relaxed);
                    let has_hung = self.is_silent(&scene, now);
                    if signal != 0 || has_hung {
                        ending = Some((now, has_hung));
                        self.end(if signal == 0 { SIGTERM } else { signal as i32 });
                    } else {
                        self.deal(&scene, extent);
                    }
                }
                Some((since, _)) if now >= since + GRACE => self.end(SIGKILL),
                Some(_) => {}
            }
            self.watch(&scene);
            std::thread::sleep(LOOK);
        }
    }

    fn look(&mut self, now: Instant) -> Scene {
        let program = &self.program;
        let jobs = self.running.look_among(now, || program.processes());
        let scene = self.eyes.see(&jobs);
        self.saw_ranks |= !scene.ranks.is_empty();
        self.furthest = self.furthest.max(scene.furthest());
        if self.furthest.is_some() && self.first_step.is_none() {
            self.first_step = Some(self.started.elapsed());
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

    fn end(&mut self, signal: i32) {
        self.held.clear();
        // The numbers are those of signals that this command was sent, or named here.
        let _ = self.program.signal(signal);
    }

    /// Deals the first strike that is due and has a target: the next one sees another scene.
    fn deal(&mut self, scene: &Scene, extent: Extent) {
        for place in 0..self.pending.len() {
            let Pending { index, strike, .. } = self.pending[place];
            let now = Instant::now();
            let is_due = match strike.moment {
                Moment::At(share) => self.is_due(place, extent.place(share), scene, now),
                Moment::After(gap) => {
                    let before = self.dealt.iter().find(|one| one.index + 1 == index);
                    before.is_some_and(|one| now >= self.started + one.at + gap)
                }
            };
            if !is_due {
                continue;
            }
            match self.strike(place, scene) {
                Ok(()) => {
                    self.pending.remove(place);
                    return;
                }
                Err(why) => self.pending[place].why = why,
            }
        }
    }

    /// Whether the job is as far as it should be, and the time since is over.
    fn is_due(
        &mut self,
        place: usize,
        (steps, time): (u64, Duration),
        scene: &Scene,
        now: Instant,
    ) -> bool {
        let pending = &mut self.pending[place];
        if steps > 0 && self.furthest < Some(steps) || scene.ranks.is_empty() {
            return false;
        }
        let since = match steps {
            0 => self.started,
            _ => *pending.reached.get_or_insert(now),
        };
        now >= since + time
    }

    fn strike(&mut self, place: usize, scene: &Scene) -> Result<(), &'static str> {
        let Pending { index, strike, .. } = self.pending[place];
        let held: Vec<u32> = self.held.iter().map(|held| held.pid).collect();
        let target = target(&strike, scene, &held, self.setting.leave).map_err(Wait::words)?;
        let program = &self.program;
        let is_ours = || program.processes().contains(&target.pid());
        let at = self.started.elapsed();
        // A process that ended a moment ago is another's target.
        let lasting =
            hit(&strike, target.pid(), is_ours).map_err(|_| "its target could not be hit")?;
        self.held.extend(lasting);
        let whom = match target.rank() {
            Some(rank) => format!("rank {rank}"),
            None => "the launcher".to_owned(),
        };
        let (name, pid) = (strike.fault.name(), target.pid());
        note(&format!(
            "{:.3} s: {name} {whom} (pid {pid})",
            at.as_secs_f64()
        ));
        let watch = Watch::new(scene, &target, strike.fault, self.has_steps);
        self.watches.push((self.dealt.len(), watch));
        self.dealt.push(Dealt {
            index,
            at,
            strike,
            rank: target.rank(),
            pid,
            fate: None,
            ranks: scene.ranks.len(),
        });
        Ok(())
    }

    fn watch(&mut self, scene: &Scene) {
        let (dealt, held, now) = (&mut self.dealt, &self.held, self.started.elapsed());
        let has_steps = self.furthest.is_some();
        self.watches.retain_mut(|(place, watch)| {
            let one = &mut dealt[*place];
            let is_held = held.iter().any(|held| held.pid == one.pid);
            let fate = watch.fate(scene, is_held);
            // A rank that stood still and is still there held the others up for as long; the rest is the recovery.
            let hold = match fate {
                Some(Fate::Continued) => one.strike.hold,
                _ => Duration::ZERO,
            };
            let since = now.saturating_sub(one.at + hold);
            one.fate = fate.map(|fate| (fate, has_steps.then_some(since)));
            if fate.is_some() {
                one.ranks = scene.ranks.len();
            }
            fate.is_none()
        });
    }

    /// What becomes of a job that has ended before it did another step.
    fn conclude(&mut self, ending: Ending) {
        self.held.clear();
        let fate = match ending.is_success() {
            true => Fate::Finished,
            false => Fate::Failed,
        };
        for (place, _) in self.watches.drain(..) {
            self.dealt[place].fate = Some((fate, None));
        }
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
    entries
        .filter(is_own)
        .map(|entry| entry.file_name())
        .collect()
}

/// How a program ended, in words.
pub(super) fn ended(ending: Ending) -> String {
    match ending {
        Ending::Code(code) => format!("exited with code {code}"),
        Ending::Signal { number, .. } => format!("was ended by signal {number}"),
    }
}

/// The program as it would be typed.
pub(super) fn line(program: &[OsString]) -> String {
    let words = program
        .iter()
        .map(OsString::as_os_str)
        .map(OsStr::to_string_lossy);
    words.collect::<Vec<_>>().join(" ")
}
