//! A frame: what is drawn where, for what there is and for the room there is.

use paceline_words::counted;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};

use super::state::{Focus, State};
use super::{devices, ranks, words};
use crate::terminal::{Room, Theme, Tone};

/// From this width on devices and ranks stand beside each other.
const BESIDE_WIDTH: u16 = 170;
/// From this width on a device has one line, because everything fits into it.
const ONE_LINE_WIDTH: usize = 140;
/// Below this height there is no line about what is selected, and below the next none about keys.
const DETAIL_HEIGHT: u16 = 14;
const KEYS_HEIGHT: u16 = 8;

const HELP: [(&str, &str); 8] = [
    ("q, Esc, Ctrl-C", "quit"),
    (
        "up, down, k, j",
        "select a rank or a device; the line below tells more about it",
    ),
    ("PgUp, PgDn, Home, End", "the same in larger steps"),
    ("left, right, h, l", "go to the devices, or to the ranks"),
    ("tab, shift-tab", "show the next job, or the one before"),
    ("space", "hold the picture, and let it go on"),
    ("?", "this page; any key closes it"),
    ("", ""),
];

const LEGEND: [&str; 13] = [
    "GPU   a bar and the share of the last period in which any kernel ran, however few",
    "      of the device's processors it used; then its history, the newest at the right",
    "SM    share of the multiprocessors' time in which they ran anything, and of the time in",
    "      which their tensor cores worked; devices from Hopper on count it",
    "IDLE  a process holds memory of the device, which has computed nothing for 10 s; unused:",
    "      nobody holds it, and others work",
    "LIMIT why clocks are held down: pwr power limit, hot/HOT heat, BRAKE power supply,",
    "      HW hardware, sync another device, set by a user, disp its display",
    "STEP  the training step that the rank writes on the job's page; programs that do not",
    "      are shown without one",
    "CPU   share of one core, of the rank and all that it started",
    "busy at once: share of the time in which every device of the job, or of the",
    "      machine where none is known to be the job's, was busy",
];

/// Draws everything.
pub(super) fn draw(state: &State, theme: Theme, area: Rect, buffer: &mut Buffer) {
    if area.is_empty() {
        return;
    }
    let mut room = Room { area, buffer };
    room.top(header(state, theme, area.width.into()));
    if state.has_help {
        return room.fill(help(theme));
    }
    if area.height >= KEYS_HEIGHT {
        room.bottom(keys(theme, area.width.into()));
    }
    for line in notes(state, theme, area.width.into()).into_iter().rev() {
        room.bottom(line);
    }
    if area.height >= DETAIL_HEIGHT
        && let Some(line) = detail(state, theme, area.width.into())
    {
        room.bottom(line);
    }
    match emptiness(state) {
        Some(sentences) => room.fill(sentences.into_iter().map(Line::from).collect()),
        None => body(state, theme, room),
    }
}

/// Lines that a whole picture has: all devices, all ranks.
pub(super) fn height(state: &State) -> usize {
    let ranks = state.job().map_or(1, |job| job.running.ranks.len() + 2);
    2 * state.device_list().len() + ranks + 10
}

fn body(state: &State, theme: Theme, mut room: Room<'_>) {
    let area = room.area;
    let has_both = !state.device_list().is_empty() && state.job().is_some();
    if has_both && area.width >= BESIDE_WIDTH {
        let left = area.width / 2;
        let lines = devices::lines(state, theme, left.into(), area.height.into(), true);
        let beside = Room {
            area: Rect {
                width: left,
                ..area
            },
            buffer: &mut *room.buffer,
        };
        beside.fill(lines);
        let right = Rect {
            x: area.x + left + 1,
            width: area.width - left - 1,
            ..area
        };
        let lines = ranks::lines(state, theme, right.width.into(), right.height.into());
        return Room {
            area: right,
            buffer: room.buffer,
        }
        .fill(lines);
    }
    let (width, height) = (usize::from(area.width), usize::from(area.height));
    let device_count = state.device_list().len();
    let rank_lines = state.job().map_or(0, |job| job.running.ranks.len() + 2);
    let is_tall = width < ONE_LINE_WIDTH && 1 + 2 * device_count + rank_lines <= height;
    let wanted = if is_tall {
        1 + 2 * device_count
    } else {
        1 + device_count
    };
    let device_lines = match (device_count, rank_lines) {
        (0, _) => 0,
        (_, 0) => height,
        // A job with many ranks gets half of the room at least, and what devices do not need.
        _ => wanted.min(height.saturating_sub(rank_lines).max(height / 2)),
    };
    for line in devices::lines(state, theme, width, device_lines, is_tall) {
        room.top(line);
    }
    let left = room.area.height.into();
    room.fill(ranks::lines(state, theme, width, left));
}

fn header(state: &State, theme: Theme, width: usize) -> Line<'static> {
    let mut parts: Vec<String> = Vec::new();
    if let Some(look) = &state.devices {
        parts.extend(Some(look.host.clone()).filter(|host| !host.is_empty()));
        let driver = look.driver.as_ref();
        parts.extend(driver.map(|version| format!("driver {version}")));
        parts.push(counted(look.devices.len(), "GPU"));
    }
    if let Some(look) = &state.jobs {
        parts.push(counted(look.jobs.len(), "job"));
    }
    parts.push(format!("every {}s", state.interval.as_secs_f64()));
    let at = [
        state.devices.as_ref().map(|l| l.at),
        state.jobs.as_ref().map(|l| l.at),
    ];
    parts.extend(at.into_iter().flatten().max().map(words::clock));
    let mut spans = vec![Span::styled("paceline gpu top", theme.style(Tone::Title))];
    if state.is_paused {
        spans.push(Span::raw(" "));
        spans.push(Span::styled("HELD", theme.selected()));
    }
    let used: usize = spans.iter().map(Span::width).sum();
    let rest = format!("{}{}", theme.dot(), parts.join(theme.dot()));
    spans.push(Span::raw(theme.cut(&rest, width.saturating_sub(used))));
    Line::from(spans)
}

/// What to say in place of a picture.
fn emptiness(state: &State) -> Option<Vec<String>> {
    let has_devices = !state.device_list().is_empty();
    if has_devices || state.job().is_some() {
        return None;
    }
    let (Some(devices), Some(_)) = (&state.devices, &state.jobs) else {
        return Some(vec![String::new(), "Looking ...".to_owned()]);
    };
    let trouble = devices
        .trouble
        .as_deref()
        .unwrap_or("NVIDIA's driver knows no device");
    Some(vec![
        String::new(),
        format!("No GPU is seen: {trouble}."),
        "No job of this user runs on this machine.".to_owned(),
        String::new(),
        "Jobs that `paceline run` or `paceline train` starts appear here by themselves.".to_owned(),
    ])
}

/// What is wrong, and how much of the time all devices worked.
fn notes(state: &State, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let mut notes: Vec<(String, Tone)> = Vec::new();
    for (who, silent) in ["the driver", "the system"].iter().zip(state.silent) {
        if let Some(time) = silent {
            let text = format!("{who} does not answer since {}", words::time(time));
            notes.push((text, Tone::Bad));
        }
    }
    let look = state.devices.as_ref();
    let trouble = look.and_then(|look| look.trouble.as_ref());
    if let Some(trouble) = trouble.filter(|_| state.job().is_some()) {
        notes.push((format!("no GPU is seen: {trouble}"), Tone::Dim));
    }
    if let Some((devices, share, total)) = state.together() {
        let what = match devices {
            [index] => format!("GPU {index} busy"),
            _ => format!("all {} GPUs busy at once", devices.len()),
        };
        let text = format!("{what} {:.2}% of {}", 100.0 * share, words::clock(total));
        notes.push((text, Tone::Plain));
    }
    let idle = devices::idle_notes(state.device_list());
    notes.extend(idle.into_iter().map(|text| (text, Tone::Warn)));
    let is_alone = state.jobs.is_some() && state.job().is_none();
    if is_alone && !state.device_list().is_empty() {
        let text = "no job of this user runs on this machine";
        notes.push((text.to_owned(), Tone::Dim));
    }
    let line =
        |(text, tone): (String, Tone)| Line::styled(theme.cut(&text, width), theme.style(tone));
    notes.into_iter().map(line).collect()
}

fn detail(state: &State, theme: Theme, width: usize) -> Option<Line<'static>> {
    let text = match state.focus() {
        Focus::Devices => devices::sentence(state),
        Focus::Ranks => ranks::sentence(state),
    }?;
    Some(Line::styled(
        theme.cut(&text, width),
        theme.style(Tone::Title),
    ))
}

fn keys(theme: Theme, width: usize) -> Line<'static> {
    let keys = "q quit  ? help  j/k select  h/l devices/ranks  tab job  space hold";
    Line::styled(theme.cut(keys, width), theme.style(Tone::Dim))
}

fn help(theme: Theme) -> Vec<Line<'static>> {
    let key = |(keys, what): (&str, &'static str)| {
        let keys = Span::styled(format!("{keys:22}"), theme.style(Tone::Title));
        Line::from(vec![keys, Span::raw(what)])
    };
    let legend = LEGEND.into_iter().map(Line::from);
    std::iter::once(Line::default())
        .chain(HELP.map(key))
        .chain(legend)
        .collect()
}

/// Which part of a list is shown, so that `selected` is in it.
pub(super) fn visible(count: usize, room: usize, selected: usize) -> std::ops::Range<usize> {
    if count <= room {
        return 0..count;
    }
    let first = selected.saturating_sub(room / 2).min(count - room);
    first..first + room
}

#[cfg(test)]
mod tests;
