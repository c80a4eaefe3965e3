//! Looks and keys, and what they make of a state; the machines here are used by the tests of frames too.

use paceline_gpu::sample::Throttle;

use super::super::super::live::tests::{device, devices, job, jobs, secs};
use super::*;

/// Two devices and a job of two ranks, watched for some seconds.
pub(in super::super) fn two_cards() -> State {
    let mut state = State::new(secs(1.0));
    for s in 0..24_u32 {
        let at = f64::from(s);
        let step = 800 + 5 * u64::from(s);
        state.see_jobs(Some(jobs(at, vec![job(1, 2, step, 0.97 * at)])), None);
        let mut second = device(1, if s % 2 == 0 { 4 * s } else { 0 });
        second.now.throttles = vec![Throttle::PowerCap, Throttle::HardwareThermal].into();
        state.see_devices(Some(devices(at, vec![device(0, 62), second])), None);
    }
    state
}

#[test]
fn time_in_which_all_were_busy_is_added_up() {
    let state = two_cards();
    let (devices, share, total) = state.together().expect("observed");
    assert_eq!((devices, total), (&[0, 1][..], secs(23.0)));
    // The second is busy in every other second, from the second one on.
    assert_eq!(share, 11.0 / 23.0);
}

#[test]
fn of_more_devices_those_of_the_job_are_meant() {
    let mut state = State::new(secs(1.0));
    for s in 0..5 {
        let at = f64::from(s);
        let all = vec![device(0, 90), device(1, 90), device(2, 0), device(3, 0)];
        if s >= 2 {
            state.see_jobs(Some(jobs(at, vec![job(1, 2, 1, at)])), None);
        }
        state.see_devices(Some(devices(at, all)), None);
    }
    let (devices, share, total) = state.together().expect("observed");
    assert_eq!((devices, share, total), (&[0, 1][..], 1.0, secs(2.0)));
}

#[test]
fn looks_too_far_apart_say_nothing_about_the_time_between() {
    let mut state = State::new(secs(1.0));
    for at in [0.0, 1.0, 60.0, 61.0] {
        state.see_devices(Some(devices(at, vec![device(0, 90)])), None);
    }
    assert_eq!(state.together().expect("observed").2, secs(2.0));
}

#[test]
fn ranks_have_their_pace() {
    let state = two_cards();
    let rows = state.rank_rows();
    assert_eq!(rows[0].steps_per_second, Some(5.0));
    let percent = rows[1].cpu_percent.expect("two looks");
    assert!((percent - 97.0).abs() < 1e-6, "{percent}");
}

#[test]
fn a_held_picture_takes_nothing_in() {
    let mut state = two_cards();
    assert!(state.press(Key::Pause));
    state.see_devices(Some(devices(99.0, Vec::new())), Some(secs(12.0)));
    assert_eq!(state.device_list().len(), 2);
    assert_eq!(
        state.silent[0],
        Some(secs(12.0)),
        "but says what does not answer"
    );
    assert!(state.press(Key::Pause));
    state.see_devices(Some(devices(99.0, Vec::new())), None);
    assert_eq!(state.device_list().len(), 0);
}

#[test]
fn keys_stay_among_what_there_is() {
    let mut state = two_cards();
    let mut check = |keys: &[Key], expect: [usize; 2]| {
        for key in keys {
            assert!(state.press(*key));
        }
        assert_eq!(state.selected, expect, "{keys:?}");
    };
    check(&[Key::Move(-1)], [0, 0]);
    check(&[Key::Move(10)], [0, 1]);
    check(&[Key::Focus(Focus::Devices), Key::Last], [1, 1]);
    check(&[Key::First], [0, 1]);
    check(&[Key::NextJob, Key::NextJob, Key::PreviousJob], [0, 0]);
    assert!(!state.press(Key::Quit));
}

#[test]
fn any_key_closes_the_help_and_only_an_interrupt_ends_it_all() {
    let mut state = two_cards();
    assert!(state.press(Key::Help) && state.has_help);
    assert!(state.press(Key::Quit) && !state.has_help);
    assert!(state.press(Key::Help));
    assert!(!state.press(Key::Interrupt));
}

#[test]
fn a_chosen_job_stays_chosen_while_it_runs() {
    let mut state = State::new(secs(1.0));
    let three = || vec![job(1, 2, 1, 0.0), job(2, 4, 1, 0.0), job(3, 1, 1, 0.0)];
    state.see_jobs(Some(jobs(0.0, three())), None);
    let shown = |state: &State| state.job().map(|job| job.running.page.1);
    assert_eq!(shown(&state), Some(1));
    state.press(Key::PreviousJob);
    assert_eq!(shown(&state), Some(3));
    state.press(Key::PreviousJob);
    assert_eq!(shown(&state), Some(2));
    state.press(Key::Last);
    state.see_jobs(Some(jobs(1.0, three().split_off(1))), None);
    assert_eq!((shown(&state), state.selected[1]), (Some(2), 3));
    state.see_jobs(Some(jobs(2.0, three().split_off(2))), None);
    assert_eq!((shown(&state), state.selected[1]), (Some(3), 0));
    state.see_jobs(Some(jobs(3.0, Vec::new())), None);
    assert_eq!(shown(&state), None);
    state.press(Key::NextJob);
}
