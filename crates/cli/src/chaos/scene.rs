//! What the job is at one moment: which ranks and launchers live and how far each rank is, whom a fault can hit, and what
//! became of an earlier fault. Pure functions of what the job pages say.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use paceline_rendezvous::page::{Activity, Differences, Phase, RunningJob};

use super::plan::{Fault, Strike};
use super::report::Trial;

/// Which page, as [`RunningJob::page`] has it.
pub(super) type Page = (u64, u64);

/// A rank's page and its place there.
pub(super) type Seat = (Page, usize);

/// A living rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rank {
    pub(super) page: Page,
    /// Its place on the page.
    pub(super) slot: usize,
    /// Its number in the job, which it was started with.
    pub(super) rank: usize,
    pub(super) pid: u32,
    /// Steps done, as far as the page ever said; `None` if it said nothing.
    pub(super) done: Option<u64>,
    pub(super) activity: Option<Activity>,
    /// Addresses of some of its weights.
    pub(super) weights: Option<Range<u64>>,
}

impl Rank {
    fn has_finished(&self) -> bool {
        self.phase() == Some(Phase::Finished)
    }

    fn phase(&self) -> Option<Phase> {
        self.activity.map(|activity| activity.phase)
    }
}

/// The job at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Scene {
    pub(super) ranks: Vec<Rank>,
    /// The launchers of the pages on which ranks live.
    pub(super) launchers: Vec<u32>,
    /// The newest generation of each page.
    pub(super) generations: Vec<(Page, u32)>,
    /// What each rank has found, living or not.
    pub(super) differences: HashMap<Seat, Differences>,
}

/// Makes scenes, and remembers how far each rank was since it last went back: one that looks for the others does not say.
#[derive(Debug, Default)]
pub(super) struct Eyes(HashMap<(Seat, u32), (u32, u64)>);

impl Eyes {
    pub(super) fn see(&mut self, jobs: &[RunningJob]) -> Scene {
        let mut scene = Scene::default();
        for job in jobs {
            for (slot, rank) in job.ranks.iter().enumerate() {
                scene.differences.insert((job.page, slot), rank.differences);
                let Some(pid) = rank.pid else { continue };
                let key = ((job.page, slot), pid);
                let activity = rank.activity.map(|(activity, _)| activity);
                if let Some(done) = activity.and_then(steps_done) {
                    // In this order, more differences count more than more steps.
                    let most = self.0.entry(key).or_default();
                    *most = (rank.differences.times, done).max(*most);
                }
                scene.ranks.push(Rank {
                    page: job.page,
                    slot,
                    rank: rank.rank.unwrap_or(slot),
                    pid,
                    done: self.0.get(&key).map(|(_, done)| *done),
                    activity,
                    weights: rank.weights.clone(),
                });
            }
            if job.ranks.iter().any(|rank| rank.pid.is_some()) {
                scene.launchers.extend(job.launcher);
            }
            scene.generations.push((job.page, job.generation));
        }
        scene.ranks.sort_by_key(|rank| (rank.rank, rank.page));
        scene
    }
}

/// Steps that a rank has done, if it says so.
fn steps_done(activity: Activity) -> Option<u64> {
    match activity.phase {
        Phase::Starting | Phase::Rendezvous | Phase::Finished => None,
        Phase::BetweenSteps => Some(activity.step + 1),
        _ => Some(activity.step),
    }
}

/// What a fault hits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) pid: u32,
    /// `None` for a launcher.
    pub(super) rank: Option<usize>,
    /// What that rank is doing, or for a launcher some rank.
    pub(super) activity: Option<Activity>,
    /// Where that rank is, or for a launcher some rank.
    pub(super) seat: Seat,
}

/// What may be hit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules<'a> {
    /// Processes that are stopped or otherwise disturbed, which get no second fault.
    pub(super) held: &'a [u32],
    /// Ranks that no deadly fault may reduce the job to fewer than.
    pub(super) leave: usize,
    /// Whether the only launcher may be killed, because the job is started again then.
    pub(super) resumes: bool,
    /// What a rank has to be doing.
    pub(super) phase: Option<Phase>,
}

/// The target of a fault.
///
/// *Errors*: why no rank fits at the moment.
pub(super) fn target(
    strike: &Strike,
    scene: &Scene,
    rules: Rules<'_>,
) -> Result<Target, &'static str> {
    let is_free = |rank: &&Rank| !rank.has_finished() && !rules.held.contains(&rank.pid);
    let mut free: Vec<&Rank> = scene.ranks.iter().filter(is_free).collect();
    let is_agent = strike.fault == Fault::Agent;
    let launchers = &scene.launchers;
    if free.is_empty() {
        return Err("all ranks were disturbed already");
    }
    free.retain(|rank| strike.fault != Fault::Corrupt || rank.weights.is_some());
    if free.is_empty() {
        return Err("no rank showed its weights");
    }
    if is_agent && launchers.len() < if rules.resumes { 1 } else { 2 } {
        return Err("there was only one launcher");
    }
    let ends_all = is_agent && launchers.len() == 1;
    // A job is over if its last rank exits with code 0. Ranks that are about to join have nothing to go on with.
    let is_exit = strike.fault == Fault::Exit;
    let has_steps = scene.furthest().is_some();
    let can_go_on = |rank: &&&Rank| !is_exit || !has_steps || rank.done.is_some();
    let left = free.iter().filter(can_go_on).count();
    let leave = rules.leave.max(usize::from(is_exit));
    if strike.fault.may_kill() && !ends_all && left <= leave {
        return Err("too few ranks were left");
    }
    let fits = |rank: &&Rank| rules.phase.is_none() || rank.phase() == rules.phase;
    let fit: Vec<&Rank> = free.into_iter().filter(fits).collect();
    let pick = |count: usize| (strike.pick % count as u64) as usize;
    let Some(rank) = (!fit.is_empty()).then(|| fit[pick(fit.len())]) else {
        return Err("no rank did what it should");
    };
    Ok(Target {
        pid: if is_agent {
            launchers[pick(launchers.len())]
        } else {
            rank.pid
        },
        rank: (!is_agent).then_some(rank.rank),
        activity: rank.activity,
        seat: (rank.page, rank.slot),
    })
}

/// What became of the job after a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Fate {
    /// The same ranks continue.
    Continued,
    /// The ranks that are left formed the next generation.
    WentOn,
    /// Ranks were started again.
    Restarted,
    /// The ranks found a flipped bit, and did the step again in which they found it.
    Repaired,
    /// The job ended well, and no rank had found a flipped bit.
    Unnoticed,
    /// The job ended before it made progress again: well.
    Finished,
    /// The same: not well.
    Failed,
}

impl Fate {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Continued => "continued",
            Self::WentOn => "went on without it",
            Self::Restarted => "started again",
            Self::Repaired => "repaired",
            Self::Unnoticed => "unnoticed",
            Self::Finished => "finished",
            Self::Failed => "failed",
        }
    }
}

/// How a flipped bit was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub(super) struct Found {
    /// Steps from the one in which it flipped to the one at whose start the ranks' weights differed.
    pub(super) after_steps: u64,
    /// The rank that was named, if the ranks had a majority.
    pub(super) named: Option<usize>,
}

/// Follows a job after a fault until it makes progress again.
#[derive(Debug)]
pub(super) struct Watch {
    /// The process that was hit.
    pid: u32,
    /// The ranks that there were.
    ranks: Vec<u32>,
    fault: Fault,
    /// The pages that there were, and their generations.
    before: Vec<(Page, u32)>,
    /// The newest generation and the steps done by the furthest rank when it was first seen.
    mark: (u32, Option<u64>),
    /// Steps done when a rank on a new page was first seen.
    first: HashMap<Seat, u64>,
    /// The step in which a bit flipped.
    step: u64,
    /// What each rank had found before.
    differences: HashMap<Seat, Differences>,
    pub(super) found: Option<Found>,
    /// Whether the rank whose bit flipped is lost: what is found later is another bit.
    is_lost: bool,
}

impl Watch {
    /// From the moment of the fault on. `has_steps` says that the job reports its steps, even if it has not begun.
    pub(super) fn new(scene: &Scene, target: &Target, fault: Fault, has_steps: bool) -> Self {
        let furthest = scene.furthest().or(has_steps.then_some(0));
        Self {
            pid: target.pid,
            ranks: scene.ranks.iter().map(|rank| rank.pid).collect(),
            fault,
            before: scene.generations.clone(),
            mark: (scene.generation(), furthest),
            first: HashMap::new(),
            step: target.activity.map_or(0, |activity| activity.step),
            differences: scene.differences.clone(),
            found: None,
            is_lost: false,
        }
    }

    /// What became of the job, once all its ranks have done a step since the fault. `is_held` says that the process that was
    /// hit is still stopped or slow. For programs that do not report steps, the answer comes when there are ranks again.
    pub(super) fn fate(&mut self, scene: &Scene, is_held: bool) -> Option<Fate> {
        let is_flip = self.fault == Fault::Corrupt;
        if is_flip && self.found.is_none() {
            let news = self.news(scene).filter(|_| !self.is_lost);
            self.is_lost |= !scene.ranks.iter().any(|rank| rank.pid == self.pid);
            let found = news?;
            self.mark.1 = Some(found.step);
            self.found = Some(Found {
                after_steps: found.step.saturating_sub(self.step),
                named: found.odd,
            });
        }
        let knows = |page: Page| self.before.iter().any(|(known, _)| *known == page);
        let (old, new): (Vec<&Rank>, Vec<&Rank>) =
            scene.ranks.iter().partition(|rank| knows(rank.page));
        if !new.is_empty() {
            let mut steps = |rank: &&Rank| match rank.done {
                Some(done) => {
                    let first = self.first.entry((rank.page, rank.slot)).or_insert(done);
                    done > *first
                }
                None => self.mark.1.is_none(),
            };
            // Every rank is noted, so no short cut.
            let stepped = new.iter().filter(|rank| steps(rank)).count();
            return (stepped == new.len() && old.is_empty()).then_some(Fate::Restarted);
        }
        let generation = scene.generation();
        if generation > self.mark.0 {
            // A rank may have done the interrupted step before it lost the others.
            self.mark = (generation, scene.furthest().or(self.mark.1));
        }
        let is_newer = self.before.iter().all(|(_, before)| generation > *before);
        // A process that was killed lives a moment longer.
        let is_hit = |rank: &&Rank| rank.pid == self.pid;
        let lives = !self.fault.is_deadly() && old.iter().any(is_hit);
        let went_on = is_newer && !old.iter().any(is_hit);
        if old.is_empty() || is_held || !(lives || went_on) {
            return None;
        }
        let (fate, margin) = match went_on {
            _ if is_flip => (Fate::Repaired, 0),
            true => (Fate::WentOn, 0),
            // A broken connection may show in the next step only.
            false => (Fate::Continued, u64::from(self.fault == Fault::Cut)),
        };
        let stepped = match self.mark.1 {
            // Those that have come since may still be joining.
            Some(before) => (old.iter())
                .filter(|rank| self.ranks.contains(&rank.pid))
                .all(|rank| rank.done > Some(before + margin)),
            None => true,
        };
        stepped.then_some(fate)
    }

    /// A difference between the weights that some rank has found since the fault.
    fn news(&self, scene: &Scene) -> Option<Differences> {
        let times = |seat| self.differences.get(seat).map_or(0, |before| before.times);
        let mut now = scene.differences.iter();
        let news = now.find(|(seat, now)| now.times > times(seat));
        news.map(|(_, found)| *found)
    }
}

impl Scene {
    /// Whether a rank is there that is not about to leave.
    pub(super) fn is_running(&self) -> bool {
        !self.ranks.iter().all(Rank::has_finished)
    }

    fn generation(&self) -> u32 {
        let numbers = self.generations.iter().map(|(_, number)| *number);
        numbers.max().unwrap_or(0)
    }

    /// Steps done by the furthest rank.
    pub(super) fn furthest(&self) -> Option<u64> {
        self.ranks.iter().filter_map(|rank| rank.done).max()
    }
}

/// How far a run is: the share of it that is over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Extent {
    /// The undisturbed run did so many steps, one in this time.
    Steps(u64, Duration),
    /// It is expected to take so long.
    Time(Duration),
}

impl Extent {
    /// How far a later run of the same program is at each moment.
    pub(super) fn of(trial: &Trial) -> Self {
        match trial.steps {
            Some(steps) if steps > 0 => {
                let time = trial
                    .took
                    .saturating_sub(trial.first_step.unwrap_or_default());
                Self::Steps(steps, time.div_f64(steps as f64))
            }
            _ => Self::Time(trial.took),
        }
    }

    /// The steps that have to be done at a share of the run, and the time since the last of them or since the start.
    pub(super) fn place(self, share: f64) -> (u64, Duration) {
        match self {
            Self::Steps(total, step) => {
                let place = share * total as f64;
                (place as u64, step.mul_f64(place.fract()))
            }
            Self::Time(total) => (0, total.mul_f64(share)),
        }
    }
}

#[cfg(test)]
mod tests;
