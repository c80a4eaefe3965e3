//! What `gpu top` knows, as one JSON object.

use std::io::{self, Write};

use paceline_words::Lang;
use serde::Serialize;

use super::super::live;
use super::state::{RankRow, State};
use crate::activity::phase;

#[derive(Serialize)]
struct Report<'a> {
    host: Option<&'a str>,
    driver: Option<&'a str>,
    /// Why no device is seen.
    trouble: Option<&'a str>,
    /// Set when the driver does not answer, and for how long it has not.
    driver_silent_s: Option<f64>,
    devices: &'a [live::Device],
    jobs: Vec<Job<'a>>,
}

#[derive(Serialize)]
struct Job<'a> {
    job: &'a str,
    name: Option<&'a str>,
    launcher_pid: Option<u32>,
    command: &'a str,
    world: Option<usize>,
    restarts: u32,
    stopping_signal: Option<i32>,
    over: Option<&'a str>,
    ranks: Vec<Rank<'a>>,
}

#[derive(Serialize)]
struct Rank<'a> {
    rank: Option<usize>,
    local_rank: usize,
    pid: Option<u32>,
    devices: &'a [u32],
    step: Option<u64>,
    steps_per_second: Option<f64>,
    phase: Option<&'static str>,
    /// What it does, as the end of "the rank is ...".
    doing: Option<String>,
    doing_for_s: Option<f64>,
    cpu_percent: Option<f64>,
    cpu_s: Option<f64>,
    resident_bytes: Option<u64>,
}

/// Writes it on one line.
pub(super) fn write(state: &State, out: &mut impl Write) -> io::Result<()> {
    let look = state.devices.as_deref();
    let jobs = state.job_list().iter();
    let report = Report {
        host: look.map(|look| look.host.as_str()),
        driver: look.and_then(|look| look.driver.as_deref()),
        trouble: look.and_then(|look| look.trouble.as_deref()),
        driver_silent_s: state.silent[0].map(|time| time.as_secs_f64()),
        devices: state.device_list(),
        jobs: jobs.map(|job| of_job(state, job)).collect(),
    };
    serde_json::to_writer(&mut *out, &report)?;
    writeln!(out)
}

fn of_job<'a>(state: &'a State, job: &'a live::Job) -> Job<'a> {
    let running = &job.running;
    let over = running.revocation.as_ref();
    let ranks = state.rows_of(job).into_iter().enumerate();
    Job {
        job: &job.label,
        name: running.name.as_deref(),
        launcher_pid: running.launcher,
        command: &running.command,
        world: running.world,
        restarts: running.restarts,
        stopping_signal: running.stopping,
        over: over.map(|revocation| revocation.text.as_str()),
        ranks: ranks.map(of_rank).collect(),
    }
}

fn of_rank((local_rank, row): (usize, RankRow<'_>)) -> Rank<'_> {
    let activity = row.rank.activity;
    let used = row.used;
    Rank {
        rank: row.rank.rank,
        local_rank,
        pid: row.rank.pid,
        devices: &used.devices,
        step: activity.map(|(activity, _)| activity.step),
        steps_per_second: row.steps_per_second,
        phase: activity.map(|(activity, _)| phase(activity.phase, Lang::En)),
        doing: activity.map(|(activity, _)| activity.to_string()),
        doing_for_s: activity.map(|(_, since)| since.as_secs_f64()),
        cpu_percent: row.cpu_percent,
        cpu_s: used.cpu.known().map(|cpu| cpu.as_secs_f64()),
        resident_bytes: used.resident_bytes.known().copied(),
    }
}
