//! Frames of runs in many sizes.

use std::fs;
use std::path::Path;

use paceline_gpu::snapshot::{Memory, Reading};
use paceline_report::Run;
use paceline_words::Lang;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::state::{Key, State};
use super::*;
use crate::gpu::running_job;

const THEME: Theme = Theme {
    has_colors: false,
    has_blocks: true,
};

fn write(folder: &Path, loss: f64) {
    let mut lines =
        vec![r#"{"kind":"start","step":0,"world":2,"epochs":2,"steps":400}"#.to_owned()];
    for step in 1..=200 {
        let loss = loss / f64::from(step).sqrt();
        lines.push(format!(
            r#"{{"kind":"step","step":{step},"epoch":1,"loss":{loss},"lr":0.1,"samples":64,"seconds":0.1,"waited_seconds":0.02}}"#
        ));
    }
    lines.push(
        r#"{"kind":"epoch","step":200,"epoch":1,"train_loss":0.4,"held_out_loss":0.3,"accuracy":0.9}"#
            .to_owned(),
    );
    lines.push(
        r#"{"kind":"ranks","step":200,"before":3,"now":2,"why":"rank 2 was killed"}"#.to_owned(),
    );
    fs::create_dir_all(folder).expect("a folder");
    fs::write(folder.join("metrics.jsonl"), lines.join("\n")).expect("written");
}

/// Two runs, of which the first trains here.
fn state(lang: Lang) -> (tempfile::TempDir, State) {
    let folder = tempfile::tempdir().expect("a folder");
    let runs = [("one", 2.0), ("two", 4.0)].map(|(name, loss)| {
        let folder = folder.path().join(name);
        write(&folder, loss);
        Run::read(&folder).expect("a run")
    });
    let mut state = State::new(runs.into(), lang);
    state.runs[0].job = Some(running_job(1, 2, 200));
    (folder, state)
}

fn frame(state: &State, theme: Theme, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("memory");
    let drawn = terminal.draw(|frame| draw(state, theme, frame.area(), frame.buffer_mut()));
    drawn.expect("memory");
    terminal.backend().to_string()
}

#[test]
fn a_frame_has_progress_curves_ranks_and_incidents() {
    let (_folder, mut state) = state(Lang::En);
    let drawn = frame(&state, THEME, 160, 30);
    for part in [
        "paceline watch · all steps",
        "1 one  training  20.0 s left  step 200/400  ██████······ 50 %  train loss 0.14142  640 samples/s  held-out loss 0.3  accuracy 90.00 %  waited 20.0 %",
        "2 two  running, or cut off  20.0 s left  step 200/400",
        " 1 Loss  2 held-out loss  3 accuracy  4 throughput  5 waiting  6 learning rate ",
        "1 rank 0    step     200",
        "backward",
        "1 step 200: the job went on with other ranks: 3 → 2 (rank 2 was killed)",
        "q quit",
    ] {
        assert!(drawn.contains(part), "{part}:\n{drawn}");
    }
    let curve = |drawn: &str, run: char| drawn.lines().filter(|line| line.contains(run)).count();
    assert!(curve(&drawn, '2') > 5, "both curves are there:\n{drawn}");
    state.press(Key::Chart(2));
    state.press(Key::Closer);
    let drawn = frame(&state, THEME, 160, 30);
    assert!(drawn.contains(" 3 Accuracy on held-out data "), "{drawn}");
    assert!(drawn.contains("last 10 % of the steps"), "{drawn}");
    state.press(Key::Help);
    assert!(frame(&state, THEME, 160, 30).contains("the next chart"));
}

#[test]
fn on_a_narrow_screen_nothing_that_matters_is_cut() {
    let (_folder, mut state) = state(Lang::En);
    let drawn = frame(&state, THEME, 80, 30);
    for part in [
        "\"1 one  training  20.0 s left  step 200/400  ██████······ 50 %",
        "\"   train loss 0.14142  640 samples/s  held-out loss 0.3  accuracy 90.00 %",
        " 1 Loss  2 held-out loss  3 accuracy  4 throughput  5 waiting  6 learning rate",
    ] {
        assert!(drawn.contains(part), "{part}:\n{drawn}");
    }
    state.runs[0].run.name = "a-name-that-is-much-too-long-for-it".into();
    let drawn = frame(&state, THEME, 80, 30);
    assert!(
        drawn.contains(
            "1 a-name-that-is-much-t…  training  20.0 s left  step 200/400  ██████······ 50 %"
        ),
        "{drawn}"
    );
    let drawn = frame(&state, THEME, 50, 30);
    assert!(
        drawn.contains("  training  20.0 s left  step 200/400"),
        "{drawn}"
    );
    let drawn = frame(&state, THEME, 30, 12);
    assert!(drawn.contains(" 1 Loss "), "{drawn}");
}

#[test]
fn devices_have_a_line_each() {
    let (_folder, mut state) = state(Lang::En);
    assert!(!frame(&state, THEME, 80, 40).contains("Devices"));
    let device = |index| {
        let mut device = Device {
            name: Reading::Known("NVIDIA H200".to_owned()),
            ..Device::default()
        };
        device.now.index = index;
        device.now.utilization_percent = Reading::Known(50);
        device.now.memory = Reading::Known(Memory {
            used_bytes: 3 << 29,
            total_bytes: 140 << 30,
        });
        device
    };
    state.runs[0].devices = (0..10).map(device).collect();
    let drawn = frame(&state, THEME, 80, 40);
    for part in [
        "Devices",
        "1 GPU 7   ██████······  50 % in use  1.5 of 140.0 GiB  NVIDIA H200",
        "1 and 2 more",
    ] {
        assert!(drawn.contains(part), "{part}:\n{drawn}");
    }
}

#[test]
fn a_failed_run_says_why() {
    let (folder, mut state) = state(Lang::En);
    let logs = folder.path().join("two/logs");
    fs::create_dir(&logs).expect("a folder");
    let error = r#"{"cause":"-","rank":1,"host":"node1","exit_code":3,"error":"no memory"}"#;
    fs::write(logs.join("error.json"), error).expect("written");
    state.runs[1].run.update().expect("read");
    let drawn = frame(&state, THEME, 100, 30);
    for part in [
        "2 two  failed  step 200/400",
        "2 the job failed: rank 1 on node1 exited with code 3: no memory",
    ] {
        assert!(drawn.contains(part), "{part}:\n{drawn}");
    }
}

#[test]
fn charts_go_round_and_one_that_is_gone_is_not_missed() {
    let (_folder, mut state) = state(Lang::En);
    state.press(Key::Move(-1));
    assert!(frame(&state, THEME, 100, 30).contains("Learning rate"));
    state.chart = 99;
    assert!(frame(&state, THEME, 100, 30).contains("Learning rate"));
    state.press(Key::Move(1));
    assert_eq!(state.chart, 0);
    assert!(!state.press(Key::Quit));
}

#[test]
fn korean_frames_have_korean_words() {
    let (_folder, state) = state(Lang::Ko);
    let drawn = frame(&state, THEME, 160, 30).replace(' ', "");
    for part in [
        "학습중",
        "에폭2/2",
        "손실",
        "역전파",
        "이벤트",
        "남음",
        "종료",
    ] {
        assert!(drawn.contains(part), "{part}:\n{drawn}");
    }
}

#[test]
fn no_size_is_too_small() {
    let (folder, mut state) = state(Lang::En);
    for has_colors in [false, true] {
        let theme = Theme {
            has_colors,
            has_blocks: has_colors,
        };
        for width in [1, 3, 10, 40, 200] {
            for height in [1, 2, 3, 5, 9, 14, 60] {
                frame(&state, theme, width, height);
            }
        }
    }
    fs::remove_dir_all(folder.path().join("two")).expect("removed");
    state.look(&mut crate::jobs::Jobs::new());
    assert!(frame(&state, THEME, 160, 30).contains("two holds no run"));
}

#[test]
fn what_a_program_of_torch_has_written_is_shown() {
    let folder = tempfile::tempdir().expect("a folder");
    let lines = [
        r#"{"kind":"start","step":0,"world":2}"#,
        r#"{"kind":"step","step":1,"seconds":0.010,"waited_seconds":0.004}"#,
        r#"{"kind":"spans","step":1,"ranks":[[["backward",0,0.01]],[]],"buckets":[[[1000000,0,0.002,0.004]],[]]}"#,
        r#"{"kind":"end","step":1}"#,
    ];
    fs::write(folder.path().join("metrics.jsonl"), lines.join("\n")).expect("written");
    let run = Run::read(folder.path()).expect("a run");
    assert_eq!(run.seen.unread, 0);
    let state = State::new(vec![run], Lang::En);
    let drawn = frame(&state, THEME, 160, 30);
    for part in [
        "ended  step 1  waited 40.0 %",
        " 1 Time of a step, ms  2 waiting ",
        "Between ranks",
        "1 step 1: 100 % of the communication hidden behind computing (operations: 1, 1 MB, 4 ms, of these 2 ms",
    ] {
        assert!(drawn.contains(part), "{part}:\n{drawn}");
    }
}
