//! The devices' part of a frame.

use paceline_gpu::sample::{DeviceSample, Throttle};
use paceline_gpu::snapshot::Reading;
use paceline_usage::idle::Idleness;
use paceline_words::{Lang, shortened};
use ratatui::text::{Line, Span};

use super::super::live::Device;
use super::draw::visible;
use super::state::{Focus, State};
use super::table::{self, Align, Cell, Column, Content, column};
use super::words;
use crate::terminal::{Theme, Tone};

/// Longest name that is shown whole.
const NAME_WIDTH: usize = 22;
/// Memory as full as this is worth a look.
const FULL: f64 = 0.95;

/// Columns of performance counters, which are there if some device has them.
const SM: &str = "SM";
const TENSOR: &str = "TENSOR";

/// Columns of one line for each device, and which of them a device of two lines has in its second one.
const COLUMNS: [(Column, bool); 13] = [
    (column("GPU", 0, Align::Right), false),
    (column("NAME", 5, Align::Left), false),
    (column("UTIL", 4, Align::Fill(6)), false),
    (column("%", 0, Align::Right), false),
    (column(SM, 3, Align::Right), false),
    (column(TENSOR, 3, Align::Right), false),
    (column("MEMORY", 1, Align::Left), false),
    (column("POWER", 2, Align::Right), false),
    (column("TEMP", 3, Align::Right), false),
    (column("LIMIT", 3, Align::Left), false),
    (column("HISTORY", 6, Align::Fill(8)), true),
    (column("CLOCK", 7, Align::Right), true),
    (column("PCIE/NVLINK", 8, Align::Left), true),
];

/// The devices in at most `height` lines; with two for each if `is_tall`.
pub(super) fn lines(
    state: &State,
    theme: Theme,
    width: usize,
    height: usize,
    is_tall: bool,
) -> Vec<Line<'static>> {
    let devices = state.device_list();
    if devices.is_empty() || height == 0 {
        return Vec::new();
    }
    let selected = state.selected[Focus::Devices as usize];
    let has_focus = state.focus() == Focus::Devices;
    let per_device = if is_tall && 2 * devices.len() < height {
        2
    } else {
        1
    };
    // A line says how many there are where not all are shown. With little room devices come before it, and before titles.
    let has_titles = height > 2;
    let is_part = per_device * devices.len() >= height;
    let room = height - usize::from(has_titles) - usize::from(is_part && height > 4);
    let room = room / per_device;
    let shown = visible(devices.len(), room, selected);
    let has_counters = devices.iter().any(has_counters);
    let has_column = |column: &Column, second_line: bool| {
        let is_counter = [SM, TENSOR].contains(&column.title);
        (per_device == 1 || !second_line) && (has_counters || !is_counter)
    };
    let columns: Vec<Column> = (COLUMNS.iter())
        .filter(|(column, second)| has_column(column, *second))
        .map(|(column, _)| *column)
        .collect();
    let rows: Vec<Vec<Cell>> = (devices[shown.clone()].iter())
        .map(|device| {
            let cells = cells(state, theme, device).into_iter().zip(&COLUMNS);
            cells
                .filter(|(_, (column, second))| has_column(column, *second))
                .map(|(cell, _)| cell)
                .collect()
        })
        .collect();
    let mut table = table::lines(&columns, &rows, width, theme).into_iter();
    let titles = table.next().filter(|_| has_titles);
    let mut lines: Vec<Line<'static>> = titles.into_iter().collect();
    for (index, mut line) in shown.clone().zip(table) {
        if has_focus && index == selected {
            line = line.style(theme.selected());
        }
        lines.push(line);
        if per_device == 2 {
            lines.push(second_line(state, theme, &devices[index], width));
        }
    }
    if is_part && lines.len() < height {
        let text = format!(
            "    {} of {} GPUs; h, then j and k show the others",
            shown.len(),
            devices.len()
        );
        lines.push(Line::styled(
            theme.cut(&text, width),
            theme.style(Tone::Dim),
        ));
    }
    lines
}

fn has_counters(device: &Device) -> bool {
    let now = &device.now;
    now.sm_active_percent.known().is_some() || now.tensor_active_percent.known().is_some()
}

fn cells(state: &State, theme: Theme, device: &Device) -> [Cell; 13] {
    let now = &device.now;
    let is_lost = device.now.is_lost();
    let percent = now.utilization_percent.known().copied();
    let idleness = device.idleness.unwrap_or_default();
    let bar = match percent {
        // The bar would be empty.
        Some(_) if idleness.held_idle => Cell::new("IDLE", Tone::Warn),
        Some(_) if idleness.unused => Cell::new("unused", Tone::Warn),
        Some(percent) => Cell {
            content: Content::Bar(f64::from(percent) / 100.0),
            tone: Tone::Good,
        },
        None if is_lost => Cell::new("LOST", Tone::Bad),
        None => missing(),
    };
    let name = device
        .name
        .known()
        .map_or("?", |name| name.strip_prefix("NVIDIA ").unwrap_or(name));
    [
        Cell::new(
            now.index.to_string(),
            if is_lost { Tone::Bad } else { Tone::Title },
        ),
        Cell::new(theme.cut(name, NAME_WIDTH), Tone::Plain),
        bar,
        percent.map_or_else(missing, |percent| {
            Cell::new(percent.to_string(), Tone::Plain)
        }),
        known(&now.sm_active_percent, |percent| format!("{percent:.0}")),
        known(&now.tensor_active_percent, |percent| {
            format!("{percent:.0}")
        }),
        memory(now),
        power(now),
        known(&now.temperature_c, |c| format!("{c}C")),
        limit(now),
        Cell {
            content: Content::History(state.history(now.index).rev().collect()),
            tone: Tone::Good,
        },
        known(&now.sm_clock_mhz, |mhz| format!("{mhz}MHz")),
        traffic(now, theme).map_or_else(missing, |text| Cell::new(text, Tone::Plain)),
    ]
}

fn missing() -> Cell {
    Cell::new("-", Tone::Dim)
}

fn known<T: Copy>(reading: &Reading<T>, text: impl Fn(T) -> String) -> Cell {
    match reading.known() {
        Some(value) => Cell::new(text(*value), Tone::Plain),
        None => missing(),
    }
}

fn memory(now: &DeviceSample) -> Cell {
    let Some(memory) = now.memory.known() else {
        return missing();
    };
    let is_full = words::share(memory.used_bytes, memory.total_bytes) >= FULL;
    Cell::new(
        words::memory(memory),
        if is_full { Tone::Warn } else { Tone::Plain },
    )
}

fn power(now: &DeviceSample) -> Cell {
    let watts = |mw: u32| (f64::from(mw) / 1000.0).round();
    match (now.power_mw.known(), now.power_limit_mw.known()) {
        (Some(power), Some(limit)) => {
            Cell::new(format!("{}/{}W", watts(*power), watts(*limit)), Tone::Plain)
        }
        (Some(power), None) => Cell::new(format!("{}W", watts(*power)), Tone::Plain),
        (None, _) => missing(),
    }
}

fn limit(now: &DeviceSample) -> Cell {
    let Some(throttles) = now.throttles.known() else {
        return missing();
    };
    let marks: Vec<&str> = throttles.iter().map(|t| words::throttle(*t).0).collect();
    Cell::new(marks.join(","), tone(throttles))
}

fn tone(throttles: &[Throttle]) -> Tone {
    match throttles {
        [] => Tone::Plain,
        some if some.iter().any(|throttle| words::throttle(*throttle).2) => Tone::Bad,
        _ => Tone::Warn,
    }
}

/// What goes over PCIe and NVLink.
fn traffic(now: &DeviceSample, theme: Theme) -> Option<String> {
    let ways = [
        ("PCIe", &now.pcie_tx_bytes_s, &now.pcie_rx_bytes_s),
        ("NVLink", &now.nvlink_tx_bytes_s, &now.nvlink_rx_bytes_s),
    ];
    let [up, down] = theme.arrows();
    let text = |(name, tx, rx): (&str, &Reading<u64>, &Reading<u64>)| {
        let rate = |reading: &Reading<u64>| reading.known().map(|rate| words::rate(*rate));
        let (tx, rx) = (rate(tx), rate(rx));
        (tx.is_some() || rx.is_some()).then(|| {
            let of = |rate: Option<String>| rate.unwrap_or_else(|| "-".to_owned());
            format!("{name} {up}{} {down}{}", of(tx), of(rx))
        })
    };
    let texts: Vec<String> = ways.into_iter().filter_map(text).collect();
    (!texts.is_empty()).then(|| texts.join("  "))
}

fn second_line(state: &State, theme: Theme, device: &Device, width: usize) -> Line<'static> {
    let now = &device.now;
    let clock = match (now.sm_clock_mhz.known(), now.memory_clock_mhz.known()) {
        (Some(mhz), Some(memory)) => Some(format!("{mhz}/{memory}MHz")),
        (mhz, _) => mhz.map(|mhz| format!("{mhz}MHz")),
    };
    let texts = [clock, traffic(now, theme)].into_iter().flatten();
    let text = texts.collect::<Vec<_>>().join("  ");
    let indent = 4.min(width);
    let room = width - indent;
    let text = theme.cut(&text, room);
    // The history takes what the numbers leave, in steps, so that it does not move with each of them.
    let used = Span::raw(text.as_str()).width() + 2;
    let history_width = room.saturating_sub(used) / 8 * 8;
    let levels: Vec<char> = (state.history(now.index).rev().take(history_width))
        .map(|p| theme.level(p))
        .collect();
    let blanks = " ".repeat(indent + history_width - levels.len());
    Line::from(vec![
        Span::raw(blanks),
        Span::styled(
            levels.iter().rev().collect::<String>(),
            theme.style(Tone::Good),
        ),
        Span::raw(if history_width > 0 { "  " } else { "" }),
        Span::styled(text, theme.style(Tone::Dim)),
    ])
}

/// Most holders of a device, and most unused devices, that are named.
const HOLDERS_MAX: usize = 4;
const NAMED_MAX: usize = 16;

/// Which devices do nothing, and who holds them, a line for those that are held and one for the others.
pub(super) fn idle_notes(devices: &[Device]) -> Vec<String> {
    let of = |is_it: fn(Idleness) -> bool| {
        let idle = move |device: &&Device| device.idleness.is_some_and(is_it);
        devices.iter().filter(idle)
    };
    let held: Vec<String> = of(|idleness| idleness.held_idle).map(holders).collect();
    let unused: Vec<String> = of(|idleness| idleness.unused)
        .map(|device| device.now.index.to_string())
        .collect();
    let mut notes = Vec::new();
    if !held.is_empty() {
        notes.push(format!("held but idle: {}", held.join(", ")));
    }
    if !unused.is_empty() {
        let unused = shortened(unused, NAMED_MAX, Lang::En);
        notes.push(format!("unused while others work: GPU {unused}"));
    }
    notes
}

/// `GPU 1 for 2m05s (pid 4711)`.
fn holders(device: &Device) -> String {
    let lasts = device.idleness.unwrap_or_default().lasts;
    let processes = device.now.processes.known().into_iter().flatten();
    let pids: Vec<String> = processes.map(|process| process.pid.to_string()).collect();
    let by = match pids.is_empty() {
        true => "no process is seen".to_owned(),
        false => format!("pid {}", shortened(pids, HOLDERS_MAX, Lang::En)),
    };
    let time = words::time(lasts);
    format!("GPU {} for {time} ({by})", device.now.index)
}

/// What there is to say about the selected device.
pub(super) fn sentence(state: &State) -> Option<String> {
    let selected = state.selected[Focus::Devices as usize];
    let device = state.device_list().get(selected)?;
    let now = &device.now;
    let mut parts: Vec<String> = Vec::new();
    parts.extend(device.name.known().cloned());
    if device.now.is_lost() {
        parts.push("it does not answer any more: it fell off the bus".to_owned());
        return Some(format!("GPU {}: {}", now.index, parts.join("; ")));
    }
    if let Some(idleness) = device.idleness.filter(|idleness| idleness.held_idle) {
        let time = words::time(idleness.lasts);
        parts.push(format!(
            "its memory is held, and it has done nothing for {time}"
        ));
    }
    let throttles = now.throttles.known().into_iter().flatten();
    parts.extend(throttles.map(|throttle| words::throttle(*throttle).1.to_owned()));
    let counters: Vec<String> = [
        ("multiprocessors active", &now.sm_active_percent),
        ("occupied", &now.sm_occupancy_percent),
        ("tensor cores", &now.tensor_active_percent),
        ("memory bandwidth", &now.dram_active_percent),
    ]
    .into_iter()
    .filter_map(|(what, share)| Some(format!("{what} {:.1}%", share.known()?)))
    .collect();
    if !counters.is_empty() {
        parts.push(counters.join(", "));
    }
    if let Some(processes) = now.processes.known() {
        let s = if processes.len() == 1 { "" } else { "es" };
        parts.push(format!("{} process{s}", processes.len()));
    }
    let gaps = [
        ("utilisation", now.utilization_percent.gap()),
        ("memory", now.memory.gap()),
        ("power", now.power_mw.gap()),
        ("temperature", now.temperature_c.gap()),
        ("clocks", now.sm_clock_mhz.gap()),
        ("limits", now.throttles.gap()),
        ("PCIe", now.pcie_tx_bytes_s.gap()),
    ];
    let mut by_reason: Vec<(String, Vec<&str>)> = Vec::new();
    let missing = gaps
        .into_iter()
        .filter_map(|(what, gap)| Some((what, gap?)));
    for (what, gap) in missing {
        let reason = gap.to_string();
        match by_reason.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, list)) => list.push(what),
            None => by_reason.push((reason, vec![what])),
        }
    }
    let reasons = by_reason.into_iter();
    parts.extend(reasons.map(|(reason, list)| format!("{reason}: {}", list.join(", "))));
    Some(format!("GPU {}: {}", now.index, parts.join("; ")))
}
