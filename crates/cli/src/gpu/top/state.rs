//! What `gpu top` knows, and how new looks and keys change it. Nothing in here looks at a clock, a machine or a terminal.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use paceline_rendezvous::page::RunningRank;
use paceline_usage::Rules;
use paceline_usage::busy::BusyTime;

use super::super::live::{Device, Devices, Job, Jobs, RankUse};
use super::pace::Pace;

/// Looks back that a history has; a wide terminal shows about as many.
const HISTORY_MAX: usize = 512;
/// A look that is under way for longer than this is worth a word.
const SILENT_AFTER: Duration = Duration::from_secs(3);

/// Everything that a frame is drawn from.
#[derive(Debug, Default)]
pub(super) struct State {
    /// How often is looked.
    pub(super) interval: Duration,
    pub(super) devices: Option<Arc<Devices>>,
    pub(super) jobs: Option<Arc<Jobs>>,
    /// How long the driver, and the system, have not answered.
    pub(super) silent: [Option<Duration>; 2],
    pub(super) is_paused: bool,
    pub(super) has_help: bool,
    pub(super) focus: Focus,
    /// Index of the device, and of the rank, that is looked at closely.
    pub(super) selected: [usize; 2],
    chosen_page: Option<(u64, u64)>,
    histories: HashMap<u32, VecDeque<Option<u8>>>,
    paces: HashMap<((u64, u64), usize), Pace>,
    together: Together,
}

/// What the keys move in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Focus {
    Devices,
    #[default]
    Ranks,
}

/// What a key means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Quit,
    /// The same, whatever is open.
    Interrupt,
    Help,
    Pause,
    Move(isize),
    First,
    Last,
    Focus(Focus),
    NextJob,
    PreviousJob,
}

/// For how long several devices were busy at the same time.
#[derive(Debug, Default)]
pub(super) struct Together {
    pub(super) devices: Vec<u32>,
    usage: Option<BusyTime>,
    last_at: Option<Duration>,
}

/// One rank as a row.
#[derive(Debug)]
pub(super) struct RankRow<'a> {
    pub(super) rank: &'a RunningRank,
    pub(super) used: &'a RankUse,
    pub(super) steps_per_second: Option<f64>,
    pub(super) cpu_percent: Option<f64>,
}

impl State {
    pub(super) fn new(interval: Duration) -> Self {
        Self {
            interval,
            ..Self::default()
        }
    }

    /// Takes in a look at the devices; one that is known already changes nothing.
    pub(super) fn see_devices(
        &mut self,
        look: Option<Arc<Devices>>,
        looking_for: Option<Duration>,
    ) {
        self.silent[0] = looking_for.filter(|time| *time > self.silent_after());
        let Some(look) = look.filter(|look| self.is_news(&self.devices, look, |look| look.at))
        else {
            return;
        };
        for device in &look.devices {
            let history = self.histories.entry(device.now.index).or_default();
            if history.len() == HISTORY_MAX {
                history.pop_front();
            }
            let percent = device.now.utilization_percent.known().copied();
            history.push_back(percent.map(|percent| u8::try_from(percent.min(100)).unwrap_or(100)));
        }
        self.histories
            .retain(|index, _| look.devices.iter().any(|d| d.now.index == *index));
        self.devices = Some(look);
        self.count_together();
        self.stay_within();
    }

    /// Takes in a look at the jobs, likewise.
    pub(super) fn see_jobs(&mut self, look: Option<Arc<Jobs>>, looking_for: Option<Duration>) {
        self.silent[1] = looking_for.filter(|time| *time > self.silent_after());
        let Some(look) = look.filter(|look| self.is_news(&self.jobs, look, |look| look.at)) else {
            return;
        };
        let mut before = std::mem::take(&mut self.paces);
        for job in &look.jobs {
            for (index, (rank, used)) in job.running.ranks.iter().zip(&job.uses).enumerate() {
                let key = (job.running.page, index);
                let mut pace = before.remove(&key).unwrap_or_default();
                if let Some((activity, _)) = &rank.activity {
                    pace.step(look.at, activity.step);
                }
                pace.cpu(look.at, used.cpu.known().copied());
                self.paces.insert(key, pace);
            }
        }
        self.jobs = Some(look);
        self.stay_within();
    }

    fn is_news<T>(&self, known: &Option<Arc<T>>, look: &T, at: impl Fn(&T) -> Duration) -> bool {
        !self.is_paused && known.as_ref().is_none_or(|known| at(known) < at(look))
    }

    fn silent_after(&self) -> Duration {
        SILENT_AFTER.max(self.interval * 3)
    }

    /// Does what a key asks for; whether to go on.
    pub(super) fn press(&mut self, key: Key) -> bool {
        if self.has_help && key != Key::Interrupt {
            // Any key closes it; one that ends the program ends the help first.
            self.has_help = false;
            return true;
        }
        match key {
            Key::Quit | Key::Interrupt => return false,
            Key::Help => self.has_help = true,
            Key::Pause => self.is_paused = !self.is_paused,
            Key::Focus(focus) => self.focus = focus,
            Key::Move(by) => self.select(|at| at.saturating_add_signed(by)),
            Key::First => self.select(|_| 0),
            Key::Last => self.select(|_| usize::MAX),
            Key::NextJob => self.choose(1),
            Key::PreviousJob => self.choose(-1),
        }
        true
    }

    fn select(&mut self, to: impl Fn(usize) -> usize) {
        let selected = &mut self.selected[self.focus as usize];
        *selected = to(*selected);
        self.stay_within();
    }

    fn choose(&mut self, by: isize) {
        let Some(jobs) = self.jobs.as_ref().filter(|jobs| !jobs.jobs.is_empty()) else {
            return;
        };
        let (now, count) = (self.job_index().unwrap_or(0), jobs.jobs.len());
        let next = (now + count).saturating_add_signed(by) % count;
        self.chosen_page = Some(jobs.jobs[next].running.page);
        self.selected[Focus::Ranks as usize] = 0;
    }

    /// Keeps what is selected among what there is, and the focus where there is something.
    fn stay_within(&mut self) {
        let counts = [
            self.device_list().len(),
            self.job().map_or(0, |job| job.running.ranks.len()),
        ];
        for (selected, count) in self.selected.iter_mut().zip(counts) {
            *selected = (*selected).min(count.saturating_sub(1));
        }
    }

    /// Where the keys go: to what there is, if that is one only.
    pub(super) fn focus(&self) -> Focus {
        match (self.device_list().is_empty(), self.job()) {
            (false, None) => Focus::Devices,
            (true, Some(_)) => Focus::Ranks,
            _ => self.focus,
        }
    }

    pub(super) fn device_list(&self) -> &[Device] {
        self.devices.as_ref().map_or(&[], |look| &look.devices)
    }

    pub(super) fn history(&self, index: u32) -> impl DoubleEndedIterator<Item = Option<u8>> + '_ {
        self.histories.get(&index).into_iter().flatten().copied()
    }

    /// The job that is shown: the one that was chosen, else the first.
    pub(super) fn job(&self) -> Option<&Job> {
        self.jobs.as_ref()?.jobs.get(self.job_index()?)
    }

    pub(super) fn job_index(&self) -> Option<usize> {
        let jobs = &self.jobs.as_ref()?.jobs;
        let chosen = jobs
            .iter()
            .position(|job| Some(job.running.page) == self.chosen_page);
        chosen.or((!jobs.is_empty()).then_some(0))
    }

    pub(super) fn job_list(&self) -> &[Job] {
        self.jobs.as_ref().map_or(&[], |look| &look.jobs)
    }

    /// The ranks of the job that is shown.
    pub(super) fn rank_rows(&self) -> Vec<RankRow<'_>> {
        self.job().map(|job| self.rows_of(job)).unwrap_or_default()
    }

    pub(super) fn rows_of<'a>(&'a self, job: &'a Job) -> Vec<RankRow<'a>> {
        let at = self.jobs.as_ref().map_or(Duration::ZERO, |look| look.at);
        let ranks = job.running.ranks.iter().zip(&job.uses).enumerate();
        let row = |(index, (rank, used))| {
            let pace = self.paces.get(&(job.running.page, index));
            RankRow {
                rank,
                used,
                steps_per_second: pace.and_then(|pace| pace.steps_per_second(at)),
                cpu_percent: pace.and_then(Pace::cpu_percent),
            }
        };
        ranks.map(row).collect()
    }

    /// Devices that are meant to be busy at once: the job's if it holds any that are known, else all.
    fn meant_together(&self) -> Vec<u32> {
        let all = || self.device_list().iter().map(|device| device.now.index);
        let held: Vec<u32> = all()
            .filter(|index| {
                let mut uses = self.job().into_iter().flat_map(|job| &job.uses);
                uses.any(|used| used.devices.contains(index))
            })
            .collect();
        if held.is_empty() {
            all().collect()
        } else {
            held
        }
    }

    fn count_together(&mut self) {
        // What counts as busy, and what as not observed, is the usage tracker's to say.
        let rules = Rules::default();
        let meant = self.meant_together();
        let Some(look) = &self.devices else { return };
        if meant != self.together.devices {
            self.together = Together {
                usage: Some(BusyTime::new(meant.len())),
                devices: meant,
                last_at: None,
            };
        }
        let from = self.together.last_at.replace(look.at);
        let (Some(from), Some(usage)) = (from, &mut self.together.usage) else {
            return;
        };
        if look.at.saturating_sub(from) > rules.late_after.max(self.interval * 3) {
            return;
        }
        let is_busy = |index: &u32| {
            let device = look
                .devices
                .iter()
                .find(|device| device.now.index == *index);
            let percent = device.and_then(|device| device.now.utilization_percent.known());
            percent.is_some_and(|percent| *percent >= rules.busy_percent)
        };
        let busy: Vec<bool> = self.together.devices.iter().map(is_busy).collect();
        let ns = look.at.saturating_sub(from).as_nanos();
        usage.add_stretch(u64::try_from(ns).unwrap_or(u64::MAX), &busy);
    }

    /// For how much of the observed time all devices that are meant to were busy at once.
    pub(super) fn together(&self) -> Option<(&[u32], f64, Duration)> {
        let usage = self.together.usage.as_ref()?;
        let is_seen = !self.together.devices.is_empty() && !usage.total().is_zero();
        is_seen.then(|| {
            (
                &self.together.devices[..],
                usage.all_busy_share(),
                usage.total(),
            )
        })
    }
}

#[cfg(test)]
pub(super) mod tests;
