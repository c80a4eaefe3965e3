//! The report as people read it.

mod missing;
pub(crate) mod words;

use std::fmt::Write as _;

use paceline_gpu::snapshot::DriverError;
use paceline_gpu::words::runs;
use words::Words;

use super::Lang;
use super::report::{AtOnce, GpuReport, Note, RankReport, Report, Subject};

/// Up to so many devices have several lines each.
const FULL_MAX: usize = 4;
/// Up to so many devices or ranks have a line each; of more, the least and the most busy ones have.
const LINES_MAX: usize = 16;
/// How many of each of these.
const ENDS: usize = 3;
/// Up to so many numbers of devices at once are told one by one.
const AT_ONCE_MAX: usize = 8;
/// A shorter job has too few samples, ten a second, to say anything about.
const SAMPLED_FROM_S: f64 = 0.5;
/// Time that is not worth a word.
const TRIFLE_S: f64 = 1.0;

/// The report, with a line end.
pub(crate) fn render(report: &Report, lang: Lang) -> String {
    let words = Words(lang);
    let mut text = String::new();
    for note in report.notes.iter().filter(|note| is_warning(note)) {
        let _ = writeln!(text, "{}", words.warning(note));
    }
    head(&mut text, report, words);
    if !is_too_short(report) {
        gpus(&mut text, report, words);
        ranks(&mut text, report, words);
    }
    notes(&mut text, report, words);
    text
}

pub(crate) fn is_too_short(report: &Report) -> bool {
    report.total_s < SAMPLED_FROM_S
}

/// Whether a note stands above everything else.
fn is_warning(note: &Note) -> bool {
    matches!(note, Note::IdleGpus { .. } | Note::IdleRanks { .. })
}

fn head(text: &mut String, report: &Report, words: Words) {
    let _ = writeln!(text, "⏱️ {}", words.title());
    let mut line = |label: &str, value: &str| {
        let _ = writeln!(text, "• {label} : {value}");
    };
    line(words.total(), &words.clock(report.total_s));
    let subject = report.subject();
    let at_once = match subject {
        Subject::Gpus(_) => &report.gpus_at_once,
        Subject::Ranks(_) => &report.ranks_at_once,
        Subject::Nothing => &None,
    };
    let Some(all) = at_once else {
        line(words.devices(), words.nothing_to_see());
        return;
    };
    if all.counted.is_empty() {
        let is_known = report.gpus.iter().any(|gpu| gpu.known_s > 0.0);
        line(words.devices(), words.no_gpu_worked(is_known));
        return;
    }
    if is_too_short(report) {
        line(words.share(subject), words.too_short());
        return;
    }
    if all.observed_s <= 0.0 {
        line(words.share(subject), words.not_observed());
        return;
    }
    line(&words.all_busy(subject), &words.clock(all.all_busy_s));
    line(words.share(subject), &percent(all.all_busy_share));
    if let (Some(least), Some(most), true) =
        (all.least_share, all.most_share, all.counted.len() > 1)
    {
        line(
            words.bounds(),
            &words.least_to_most(&percent(least), &percent(most)),
        );
    }
    if all.counted.len() > 1 {
        line(words.at_once(subject), &at_once_list(all, subject, words));
    }
    if is_gap_told(report.total_s, all.observed_s) {
        let unobserved_s = report.total_s - all.observed_s;
        line(
            words.unobserved(),
            &words.clock_beside_share(&words.clock(unobserved_s)),
        );
    }
}

/// Whether so much of the time was not observed that it is worth a word.
pub(crate) fn is_gap_told(total_s: f64, observed_s: f64) -> bool {
    total_s - observed_s > TRIFLE_S.max(total_s / 1000.0)
}

/// Share of the time for each number at once; of many, in four parts between none and all.
fn at_once_list(all: &AtOnce, subject: Subject, words: Words) -> String {
    let top = all.counted.len();
    let time = |from: usize, to: usize| -> f64 {
        let times = all.at_once_s.iter().skip(from).take(to + 1 - from);
        times.sum::<f64>() / all.observed_s
    };
    let mut parts = vec![(0, 0)];
    if top <= AT_ONCE_MAX {
        parts.extend((1..=top).map(|k| (k, k)));
    } else {
        let edge = |part: usize| part * (top - 1) / 4;
        parts.extend((0..4).map(|part| (edge(part) + 1, edge(part + 1))));
        parts.push((top, top));
    }
    let told = parts.into_iter().map(|(from, to)| {
        let number = words.number(subject, from, to);
        format!("{number} {}", percent(time(from, to)))
    });
    told.collect::<Vec<_>>().join(" · ")
}

fn gpus(text: &mut String, report: &Report, words: Words) {
    let counted: Vec<&GpuReport> = report.gpus.iter().filter(|gpu| gpu.is_counted).collect();
    // Where none worked, what they held still matters.
    let is_none = counted.is_empty();
    let held = report.gpus.iter().filter(|gpu| gpu.held_idle_s > 0.0);
    let shown = if is_none { held.collect() } else { counted };
    if shown.is_empty() {
        return;
    }
    let heading = if is_none {
        words.idle_gpus()
    } else {
        words.each_gpu()
    };
    let _ = writeln!(text, "\n{heading}");
    let (ends, left_out) = least_and_most(&shown, |gpu| gpu.busy_share.unwrap_or(0.0));
    for gpu in &ends {
        match shown.len() <= FULL_MAX {
            true => gpu_block(text, gpu, words),
            false => gpu_line(text, gpu, words),
        }
    }
    if left_out > 0 {
        let busy = shown.iter().map(|gpu| gpu.busy_share.unwrap_or(0.0));
        let _ = writeln!(text, "{}", words.left_out(left_out, &spread(busy)));
    }
    sums(text, &shown, words);
    let others: Vec<u32> = report
        .gpus
        .iter()
        .filter(|gpu| !is_none && !gpu.is_counted && gpu.known_s > 0.0)
        .map(|gpu| gpu.index)
        .collect();
    if !others.is_empty() {
        let _ = writeln!(text, "{}", words.others(&numbers(&others)));
    }
}

/// `2340/97887MB (2.39%)`
fn memory(gpu: &GpuReport, words: Words) -> String {
    match (gpu.memory_peak_bytes, gpu.memory_total_bytes) {
        (Some(used), Some(total)) if total > 0 => {
            let share = percent(used as f64 / total as f64);
            format!("{}/{}MB ({share})", used >> 20, total >> 20)
        }
        (Some(used), _) => format!("{}MB", used >> 20),
        _ => words.memory_unknown().to_owned(),
    }
}

fn gpu_block(text: &mut String, gpu: &GpuReport, words: Words) {
    let _ = writeln!(text, "GPU {}: {}", gpu.index, memory(gpu, words));
    let mut line = |parts: Vec<String>| {
        if !parts.is_empty() {
            let _ = writeln!(text, "    {}", parts.join(", "));
        }
    };
    if let Some(share) = gpu.busy_share {
        let mut parts = vec![words.busy(&percent(share), &words.clock(gpu.busy_s))];
        parts.extend(
            gpu.utilization_percent
                .map(|mean| words.utilization(mean, gpu.utilization_busy_percent)),
        );
        line(parts);
    }
    line(counters(gpu, words));
    let mut parts = Vec::new();
    if let Some(joules) = gpu.energy_j {
        parts.push(words.energy(joules, gpu.energy_estimated_j));
    }
    if let (Some(mean), Some(peak)) = (gpu.power_w, gpu.power_peak_w) {
        parts.push(words.power(mean, peak, gpu.power_limit_w));
    }
    parts.extend(gpu.temperature_peak_c.map(|peak| words.temperature(peak)));
    line(parts);
    let clock = gpu.sm_clock_mhz.iter();
    line(clock.map(|mhz| words.clock_mhz(mhz)).collect());
    let mut parts = Vec::new();
    for (name, sent, received) in [
        ("PCIe", gpu.pcie_tx, gpu.pcie_rx),
        ("NVLink", gpu.nvlink_tx, gpu.nvlink_rx),
    ] {
        if let (Some(sent), Some(received)) = (sent, received)
            && sent.bytes.max(received.bytes) > 0
        {
            parts.push(words.traffic(name, &bytes(sent.bytes), &bytes(received.bytes)));
        }
    }
    line(parts);
    line(extras(gpu, words));
}

/// What utilisation does not tell, where the device has counters for it.
fn counters(gpu: &GpuReport, words: Words) -> Vec<String> {
    let sm = gpu.sm_active_percent.map(|mean| words.sm_active(mean));
    let tensor = gpu.tensor_active_percent;
    let tensor = tensor.map(|mean| words.tensor_active(mean));
    sm.into_iter().chain(tensor).collect()
}

/// What is told only where there is something to tell.
fn extras(gpu: &GpuReport, words: Words) -> Vec<String> {
    let mut parts = Vec::new();
    if gpu.held_idle_s >= TRIFLE_S {
        parts.push(words.held(&words.clock(gpu.held_idle_s)));
    }
    for (why, time_s) in &gpu.throttled_s {
        if *time_s >= TRIFLE_S {
            parts.push(words.throttled(words.throttle(*why), &words.clock(*time_s)));
        }
    }
    parts
}

fn gpu_line(text: &mut String, gpu: &GpuReport, words: Words) {
    let mut parts = vec![format!(
        "GPU {:<3} {}",
        format!("{}:", gpu.index),
        memory(gpu, words)
    )];
    if let Some(share) = gpu.busy_share {
        parts.push(words.busy_short(&percent(share)));
        let mean = gpu.utilization_percent;
        parts.extend(mean.map(|mean| words.utilization_short(mean)));
    }
    let energy = gpu.energy_j;
    parts.extend(energy.map(|joules| format!("{:.1} Wh", joules / 3600.0)));
    parts.extend(gpu.temperature_peak_c.map(|peak| format!("{peak} °C")));
    parts.extend(extras(gpu, words));
    let _ = writeln!(text, "{}", parts.join("  "));
}

fn sums(text: &mut String, shown: &[&GpuReport], words: Words) {
    let energies: Vec<f64> = shown.iter().filter_map(|gpu| gpu.energy_j).collect();
    if shown.len() > 1 && energies.len() == shown.len() {
        let _ = writeln!(text, "{}", words.all_energy(energies.iter().sum()));
    }
}

fn ranks(text: &mut String, report: &Report, words: Words) {
    let all = report.ranks_at_once.as_ref();
    let Some(all) = all.filter(|all| all.observed_s > 0.0) else {
        return;
    };
    let _ = writeln!(text, "\n{}", words.each_rank());
    if let (Subject::Gpus(1..), 2..) = (report.subject(), all.counted.len()) {
        let subject = Subject::Ranks(all.counted.len());
        let (busy, time) = (words.all_busy(subject), words.clock(all.all_busy_s));
        let _ = writeln!(text, "{busy} : {time} ({})", percent(all.all_busy_share));
    }
    let shown: Vec<&RankReport> = report.ranks.iter().collect();
    let (ends, left_out) = least_and_most(&shown, |rank| rank.busy_share.unwrap_or(0.0));
    for rank in ends {
        let mut parts = vec![words.busy_short(&percent_or_none(rank.busy_share))];
        let mean = rank.utilization_percent;
        parts.extend(mean.map(|mean| words.cores(mean / 100.0)));
        parts.push(words.cpu_time(&words.clock(rank.cpu_s)));
        let peak = rank.resident_peak_bytes;
        parts.extend(peak.map(|bytes| words.resident(bytes >> 20)));
        if rank.restarts > 0 {
            parts.push(words.restarts(rank.restarts));
        }
        let _ = writeln!(text, "{}: {}", words.rank(rank.rank), parts.join(", "));
    }
    if left_out > 0 {
        let busy = shown.iter().map(|rank| rank.busy_share.unwrap_or(0.0));
        let _ = writeln!(text, "{}", words.left_out(left_out, &spread(busy)));
    }
}

/// All of them, or the least and the most busy ones of many, in their own order; and how many are left out.
fn least_and_most<'a, T>(all: &[&'a T], busy: impl Fn(&T) -> f64) -> (Vec<&'a T>, usize) {
    if all.len() <= LINES_MAX {
        return (all.to_vec(), 0);
    }
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by(|a, b| busy(all[*a]).total_cmp(&busy(all[*b])));
    let mut shown = order[..ENDS].to_vec();
    shown.extend(&order[order.len() - ENDS..]);
    shown.sort_unstable();
    let left_out = all.len() - shown.len();
    (
        shown.into_iter().map(|place| all[place]).collect(),
        left_out,
    )
}

/// `12.00%, 70.10%, 99.00%`: smallest, mean and largest share.
fn spread(shares: impl Iterator<Item = f64> + Clone) -> [String; 3] {
    let count = shares.clone().count().max(1) as f64;
    let least = shares.clone().fold(f64::INFINITY, f64::min);
    let most = shares.clone().fold(0.0, f64::max);
    [least, shares.sum::<f64>() / count, most].map(percent)
}

fn notes(text: &mut String, report: &Report, words: Words) {
    let mut lines = missing::missing(report, words);
    // A missing driver is no news where the ranks compute without one.
    let is_news = |note: &&Note| match (note, report.subject()) {
        (note, _) if is_warning(note) => false,
        (Note::NoDriver { trouble }, Subject::Ranks(_)) => {
            !matches!(trouble, DriverError::NoLibrary(_) | DriverError::NoDriver)
        }
        _ => true,
    };
    let told = report.notes.iter().filter(is_news);
    lines.extend(told.filter_map(|note| words.note(note)));
    if lines.is_empty() {
        return;
    }
    let _ = writeln!(text, "\n{}", words.what_is_missing());
    for line in lines {
        let _ = writeln!(text, "• {line}");
    }
}

/// `0, 2–5, 7`
fn numbers(sorted: &[u32]) -> String {
    let told = runs(sorted)
        .into_iter()
        .map(|(first, last)| match last - first {
            0 => first.to_string(),
            1 => format!("{first}, {last}"),
            _ => format!("{first}–{last}"),
        });
    told.collect::<Vec<_>>().join(", ")
}

/// `46.32%`
pub(crate) fn percent(share: f64) -> String {
    format!("{:.2}%", share * 100.0)
}

/// The same, or a stroke where it is not known.
pub(crate) fn percent_or_none(share: Option<f64>) -> String {
    share.map_or_else(|| "–".into(), percent)
}

/// `12.3 GB`, by 1000.
fn bytes(bytes: u64) -> String {
    let units = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    let value = bytes as f64;
    let unit = units.iter().find(|(size, _)| value >= *size);
    unit.map_or_else(
        || format!("{bytes} B"),
        |(size, name)| format!("{:.1} {name}", value / size),
    )
}

/// `0:12:03`
pub(crate) fn moment(seconds: f64) -> String {
    let seconds = seconds.max(0.0).round() as u64;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours}:{minutes:02}:{:02}", seconds % 60)
}
