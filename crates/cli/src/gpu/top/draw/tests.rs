//! Frames of many machines in many sizes: some as they are to look, all without a panic.

use std::sync::Arc;

use paceline_gpu::snapshot::Gap;
use paceline_rendezvous::page::Revocation;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::super::live::tests::{counting, device, devices, idle, job, jobs, secs, without};
use super::super::super::live::{Devices, Job};
use super::super::state::tests::two_cards;
use super::super::state::{Key, State};
use super::*;

const THEME: Theme = Theme {
    has_colors: false,
    has_blocks: true,
};

fn frame(state: &State, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("memory");
    let drawn = terminal.draw(|frame| draw(state, THEME, frame.area(), frame.buffer_mut()));
    drawn.expect("memory");
    let text = terminal.backend().to_string();
    // The backend writes each line in quotation marks.
    let lines = text.lines().map(|line| line.trim_matches('"').trim_end());
    lines.collect::<Vec<_>>().join("\n").trim_end().to_owned()
}

fn check(name: &str, state: &State, width: u16, height: u16) {
    let drawn = frame(state, width, height);
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/gpu/top/draw/frames");
    let path = format!("{folder}/{name}.txt");
    if std::env::var_os("PACELINE_WRITE_FRAMES").is_some() {
        std::fs::create_dir_all(folder).expect("a folder");
        std::fs::write(&path, format!("{drawn}\n")).expect("written");
    }
    let expect = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    assert_eq!(
        drawn,
        expect.trim_end(),
        "{name}; PACELINE_WRITE_FRAMES=1 writes it anew"
    );
}

fn state(devices: Option<Arc<Devices>>, list: Vec<Job>) -> State {
    let mut state = State::new(secs(1.0));
    state.see_jobs(Some(jobs(1.0, list)), None);
    state.see_devices(devices, None);
    state
}

fn many(count: u32) -> State {
    let all = (0..count)
        .map(|index| device(index, index * 100 / count))
        .collect();
    let ranks = count as usize;
    let mut first = job(1, ranks, 812, 5.0);
    first.running.world = Some(2 * ranks);
    let mut state = state(Some(devices(1.0, all)), vec![first, job(2, 64, 7, 0.0)]);
    state.press(Key::Move(2));
    state
}

fn nothing() -> State {
    let none = Devices {
        at: secs(1.0),
        trouble: Some("NVIDIA's driver is not installed".to_owned()),
        ..Devices::default()
    };
    state(Some(Arc::new(none)), Vec::new())
}

/// Ranks that have ended, blame each other, say nothing, and a device that fell off the bus.
fn broken() -> State {
    let mut broken = job(1, 5, 812, 0.0);
    broken.running.restarts = 2;
    let text = "rank 1 was killed by signal 9\u{1b}[2J".to_owned();
    broken.running.revocation = Some(Revocation {
        rank: Some(1),
        text,
    });
    let ranks = &mut broken.running.ranks;
    ranks[0].victim_of = Some(1);
    ranks[1].pid = None;
    ranks[3].activity = None;
    (ranks[4].activity, ranks[4].pid) = (None, None);
    let list = vec![
        device(0, 40),
        without(1, &Gap::Lost),
        without(2, &Gap::NotSupported),
    ];
    let mut state = state(Some(devices(1.0, list)), vec![broken]);
    state.see_devices(state.devices.clone(), Some(secs(12.4)));
    state
}

#[test]
fn two_cards_in_a_usual_terminal() {
    check("two-cards-80x24", &two_cards(), 80, 24);
    check("two-cards-120x30", &two_cards(), 120, 30);
    check("two-cards-180x20", &two_cards(), 180, 20);
    check("two-cards-40x10", &two_cards(), 40, 10);
    check("two-cards-25x6", &two_cards(), 25, 6);
}

#[test]
fn many_cards_and_many_ranks() {
    check("eight-80x24", &many(8), 80, 24);
    check("eight-160x40", &many(8), 160, 40);
    check("sixteen-80x24", &many(16), 80, 24);
    let mut state = many(8);
    state.press(Key::NextJob);
    state.press(Key::Last);
    check("ranks64-100x30", &state, 100, 30);
}

/// A device with performance counters that works, two that are held and idle, and two that nobody uses.
fn idle_ones() -> State {
    let all = vec![
        counting(0, 99),
        idle(1, &[4711, 4712, 4713, 4714, 4715]),
        idle(2, &[1002]),
        idle(3, &[]),
        idle(4, &[]),
    ];
    let mut state = state(Some(devices(1.0, all)), vec![job(1, 1, 812, 5.0)]);
    state.press(Key::Focus(Focus::Devices));
    state
}

#[test]
fn devices_that_do_nothing_are_named_with_their_holders() {
    check("idle-80x24", &idle_ones(), 80, 24);
    check("idle-150x24", &idle_ones(), 150, 24);
}

#[test]
fn what_is_broken_is_said() {
    check("broken-100x24", &broken(), 100, 24);
    let mut of_device = broken();
    of_device.press(Key::Focus(Focus::Devices));
    of_device.press(Key::Last);
    check("not-supported-100x24", &of_device, 100, 24);
}

#[test]
fn what_there_is_not_is_said_too() {
    check("nothing-80x24", &nothing(), 80, 24);
    check("looking-80x24", &State::new(secs(1.0)), 80, 24);
    let no_gpu = {
        let mut state = nothing();
        state.see_jobs(Some(jobs(2.0, vec![job(1, 2, 3, 0.0)])), None);
        state
    };
    check("no-gpu-80x24", &no_gpu, 80, 24);
    let no_job = state(Some(devices(1.0, vec![device(0, 7)])), Vec::new());
    check("no-job-80x24", &no_job, 80, 24);
    let mut help = two_cards();
    help.press(Key::Help);
    check("help-90x24", &help, 90, 24);
}

#[test]
fn every_size_has_a_frame() {
    let states = [
        two_cards(),
        idle_ones(),
        many(16),
        many(0),
        broken(),
        nothing(),
        State::new(secs(1.0)),
    ];
    for state in &states {
        for width in (0..60).chain([79, 80, 120, 169, 170, 171, 300]) {
            for height in (0..20).chain([24, 50]) {
                for has_blocks in [false, true] {
                    let area = Rect::new(0, 0, width, height);
                    let theme = Theme {
                        has_colors: true,
                        has_blocks,
                    };
                    draw(state, theme, area, &mut Buffer::empty(area));
                }
            }
        }
    }
}

#[test]
fn what_others_have_written_does_not_reach_the_terminal_as_a_command() {
    let frame = frame(&broken(), 200, 24);
    assert!(frame.contains("killed by signal 9"), "{frame}");
    assert!(!frame.contains('\u{1b}'), "{frame}");
}

#[test]
fn without_colors_nothing_is_coloured() {
    let area = Rect::new(0, 0, 120, 30);
    let mut buffer = Buffer::empty(area);
    draw(&broken(), THEME, area, &mut buffer);
    use ratatui::style::Color;
    assert!(
        buffer
            .content
            .iter()
            .all(|cell| (cell.fg, cell.bg) == (Color::Reset, Color::Reset))
    );
}
