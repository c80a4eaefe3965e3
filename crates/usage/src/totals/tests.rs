use paceline_gpu::sample::{DeviceSample, ProcessMemory, Throttle};
use paceline_gpu::snapshot::{Gap, Memory};

use super::*;
use crate::sample::RankSample;

const SECOND: u64 = 1_000_000_000;

/// A sample at a second, of devices with these utilisations.
fn sample(at_s: f64, percents: &[Option<u32>]) -> Sample {
    let device = |(index, percent): (usize, &Option<u32>)| DeviceSample {
        index: index as u32,
        utilization_percent: percent.ok_or(Gap::Lost).into(),
        ..DeviceSample::default()
    };
    Sample {
        at: Duration::from_secs_f64(at_s),
        devices: percents.iter().enumerate().map(device).collect(),
        ranks: Vec::new(),
    }
}

fn rank(rank: u32, pid: Option<u32>, cpu_s: f64) -> RankSample {
    RankSample {
        rank,
        pid,
        cpu: Duration::from_secs_f64(cpu_s).into(),
        resident_bytes: 1000.into(),
    }
}

/// Totals of one sample a second, changed by `change` before it is added.
fn totals(samples: usize, change: impl Fn(usize, &mut Sample)) -> Totals {
    let mut totals = Totals::new(Rules::default());
    for second in 0..samples {
        let mut sample = sample(second as f64, &[]);
        change(second, &mut sample);
        totals.add(&sample);
    }
    totals
}

fn devices(percents: impl Fn(usize) -> Vec<Option<u32>>) -> impl Fn(usize, &mut Sample) {
    move |second, now| now.devices = sample(0.0, &percents(second)).devices
}

fn seconds(ns: &[u64]) -> Vec<f64> {
    ns.iter().map(|ns| *ns as f64 / SECOND as f64).collect()
}

#[test]
fn a_sample_speaks_for_the_interval_that_ends_with_it() {
    let both = totals(
        11,
        devices(|s| vec![Some(if s > 4 { 90 } else { 0 }), Some(60)]),
    );
    assert_eq!(seconds(both.device_overlap.at_once_ns()), [0.0, 4.0, 6.0]);
    assert_eq!(both.devices[0].percent.mean(), Some(54.0));
    assert_eq!(both.devices[0].busy.mean(), Some(90.0));
    assert_eq!(both.devices[0].busy.ns, 6 * SECOND);
}

#[test]
fn a_reading_below_the_threshold_is_idle() {
    let check = |percent, busy_percent, expect: &[f64]| {
        let mut totals = Totals::new(Rules {
            busy_percent,
            devices: Some(vec![0]),
            ..Rules::default()
        });
        for second in 0..3 {
            totals.add(&sample(f64::from(second), &[Some(percent)]));
        }
        assert_eq!(seconds(totals.device_overlap.at_once_ns()), expect);
    };
    check(5, 5, &[0.0, 2.0]);
    check(4, 5, &[2.0, 0.0]);
    check(4, 1, &[0.0, 2.0]);
    check(200, 100, &[0.0, 2.0]);
}

#[test]
fn bounds_come_from_the_readings_themselves() {
    let half = totals(5, devices(|_| vec![Some(50), Some(70)]));
    // Taking turns as far as they can, both work in 20 of 100; at the same time as far as they can, in 50.
    assert_eq!(half.device_overlap.bounds(), Some((0.2, 0.5)));
    let late = totals(
        5,
        devices(|s| vec![Some(80), Some(if s > 2 { 100 } else { 0 })]),
    );
    assert_eq!(late.device_overlap.bounds(), Some((0.4, 0.4)));
}

#[test]
fn a_device_that_never_works_is_not_one_of_those_that_are_to_work_at_once() {
    let idle = |s| vec![Some(if s > 2 { 90 } else { 0 }), Some(0), Some(90), Some(0)];
    let two_of_four = totals(11, devices(idle));
    assert_eq!(two_of_four.device_overlap.counted, 2);
    assert_eq!(
        seconds(two_of_four.device_overlap.at_once_ns()),
        [0.0, 2.0, 8.0]
    );
    let mut named = Totals::new(Rules {
        devices: Some(vec![0, 1, 2]),
        ..Rules::default()
    });
    for second in 0..11 {
        named.add(&sample(second as f64, &idle(second)));
    }
    assert_eq!(
        seconds(named.device_overlap.at_once_ns()),
        [0.0, 2.0, 8.0, 0.0]
    );
}

#[test]
fn once_a_rank_is_seen_on_a_device_other_peoples_devices_do_not_count() {
    let ours = totals(11, |second, now| {
        now.devices = sample(0.0, &[Some(90), Some(80), Some(70)]).devices;
        now.ranks = vec![rank(0, Some(77), 0.0)];
        let pids = if second > 4 { vec![5, 77] } else { vec![5] };
        let process = |pid| ProcessMemory {
            pid,
            used_bytes: 9.into(),
        };
        now.devices[1].processes = pids.into_iter().map(process).collect::<Vec<_>>().into();
    });
    assert_eq!(ours.device_overlap.counted, 1);
    assert_eq!(seconds(ours.device_overlap.at_once_ns()), [4.0, 6.0]);
}

#[test]
fn a_lost_device_is_not_busy_and_its_absence_is_told() {
    let lost = totals(11, devices(|s| vec![Some(90), (s <= 4).then_some(90)]));
    assert_eq!(seconds(lost.device_overlap.at_once_ns()), [0.0, 6.0, 4.0]);
    let absent = &lost.devices[1].absence.stretches[0];
    assert_eq!(
        (absent.why.clone(), absent.since_ns),
        (Gap::Lost, 4 * SECOND)
    );
    assert_eq!((absent.until_ns, absent.ns), (10 * SECOND, 6 * SECOND));
    // The share of what was seen, not of what was missing.
    assert_eq!(lost.devices[1].percent.mean(), Some(90.0));
}

#[test]
fn time_in_which_no_device_answers_is_not_observed() {
    let silent = totals(11, devices(|s| vec![(s <= 4).then_some(90); 2]));
    assert_eq!(silent.device_overlap.busy_time.total_ns, 4 * SECOND);
    assert_eq!(seconds(silent.device_overlap.at_once_ns()), [0.0, 0.0, 4.0]);
}

#[test]
fn many_reasons_take_bounded_memory() {
    let odd = totals(1000, |second, now| {
        now.devices = sample(0.0, &[None]).devices;
        now.devices[0].utilization_percent = Err(Gap::other(second)).into();
    });
    let stretches = &odd.devices[0].absence.stretches;
    assert_eq!(stretches.len(), 8);
    assert_eq!(stretches.iter().map(|s| s.ns).sum::<u64>(), 999 * SECOND);
}

#[test]
fn a_late_sample_leaves_its_interval_unobserved() {
    let mut totals = Totals::new(Rules::default());
    for at in [0.0, 1.0, 2.0, 302.0, 303.0] {
        let mut now = sample(at, &[Some(100)]);
        now.devices[0].energy_mj = ((at * 1000.0) as u64).into();
        now.devices[0].power_mw = 1000.into();
        now.ranks = vec![rank(0, Some(9), at)];
        totals.add(&now);
    }
    assert_eq!(totals.device_overlap.busy_time.total_ns, 3 * SECOND);
    assert_eq!((totals.late.count, totals.late.ns), (1, 300 * SECOND));
    assert_eq!(totals.late.since_ns, Some(2 * SECOND));
    // Counters bridge it.
    assert_eq!(totals.devices[0].energy.joules(), Some((303.0, 0.0)));
    assert_eq!(totals.ranks[0].cpu_ns, 303 * SECOND);
}

#[test]
fn time_that_stands_still_or_runs_back_adds_nothing() {
    let mut totals = Totals::new(Rules::default());
    for at in [5.0, 6.0, 6.0, 4.0, 7.0] {
        totals.add(&sample(at, &[Some(100)]));
    }
    assert_eq!(totals.device_overlap.busy_time.total_ns, 2 * SECOND);
    assert_eq!(
        (totals.first_ns, totals.last_ns),
        (Some(5 * SECOND), 7 * SECOND)
    );
}

#[test]
fn energy_is_the_counters_difference_or_else_power_times_time() {
    let check = |counter: fn(u64) -> Option<u64>, power: Option<u32>, expect| {
        let energy = totals(11, |second, now| {
            now.devices = sample(0.0, &[Some(50)]).devices;
            now.devices[0].energy_mj = counter(second as u64).ok_or(Gap::NotSupported).into();
            now.devices[0].power_mw = power.ok_or(Gap::NotSupported).into();
        });
        assert_eq!(energy.devices[0].energy.joules(), expect);
    };
    check(|s| Some(s * 200_000), Some(250_000), Some((2000.0, 0.0)));
    check(|_| None, Some(250_000), Some((2500.0, 2500.0)));
    check(|_| None, None, None);
    // Runs over, or begins anew, at second 5: that second by power.
    check(
        |s| Some((s + 5) % 10 * 200_000),
        Some(250_000),
        Some((2050.0, 250.0)),
    );
    // Jumps to nonsense and back: both by power.
    check(
        |s| Some(if s == 5 { u64::MAX } else { s * 200_000 }),
        Some(250_000),
        Some((2100.0, 500.0)),
    );
    // Away from 3 to 6, then back with what was used meanwhile.
    check(
        |s| (!(3..=6).contains(&s)).then_some(s * 200_000),
        Some(250_000),
        Some((2000.0, 0.0)),
    );
    // Gone for good.
    check(
        |s| (s <= 5).then_some(s * 200_000),
        Some(250_000),
        Some((2250.0, 1250.0)),
    );
}

#[test]
fn memory_that_waits_is_counted_for_anybody_and_for_the_job() {
    let held = totals(11, |second, now| {
        now.devices = sample(0.0, &[Some(if second > 4 { 90 } else { 0 })]).devices;
        now.ranks = vec![rank(0, Some(77), 0.0)];
        let pid = if second > 2 { 77 } else { 5 };
        let used_bytes = 9.into();
        now.devices[0].processes = vec![ProcessMemory { pid, used_bytes }].into();
    });
    assert_eq!(held.devices[0].held_idle_ns, 4 * SECOND);
    assert_eq!(held.devices[0].job_idle_ns, 2 * SECOND);
    let hidden = totals(11, |_, now| {
        now.devices = sample(0.0, &[Some(0), Some(0)]).devices;
        now.devices[0].memory = Memory {
            used_bytes: 2 << 30,
            total_bytes: 8 << 30,
        }
        .into();
    });
    let held = hidden.devices.iter().map(|device| device.held_idle_ns);
    assert_eq!(held.collect::<Vec<_>>(), [10 * SECOND, 0]);
}

#[test]
fn levels_have_peaks_with_their_moment_and_clocks_count_while_busy() {
    let levels = totals(11, |second, now| {
        now.devices = sample(0.0, &[Some(if second > 4 { 90 } else { 0 })]).devices;
        let device = &mut now.devices[0];
        let level = if second == 7 { 9 } else { second as u32 % 5 };
        device.temperature_c = level.into();
        device.sm_clock_mhz = (if second > 4 {
            1000 + second as u32
        } else {
            210
        })
        .into();
        device.pcie_rx_bytes_s = u64::from(level).into();
        device.throttles = vec![Throttle::PowerCap, Throttle::PowerCap].into();
    });
    let device = &levels.devices[0];
    assert_eq!(device.temperature.top, Some((9, 7 * SECOND)));
    assert_eq!(device.sm_clock.range, Some((1005, 1010)));
    assert_eq!(device.sm_clock.mean.mean(), Some(1007.5));
    assert_eq!(device.traffic[1].sum(), Some(27));
    assert_eq!(device.traffic[0].sum(), None);
    assert_eq!(device.throttled_ns[&Throttle::PowerCap], 10 * SECOND);
}

#[test]
fn a_ranks_processor_time_adds_up_over_its_processes() {
    let restarted = totals(11, |second, now| {
        // Attached at 100 s of its time; it dies after second 4, and another one starts in second 7.
        let at = second as f64;
        now.ranks = vec![match second {
            0..=4 => rank(1, Some(10), 100.0 + at),
            5..=6 => RankSample {
                rank: 1,
                ..RankSample::default()
            },
            _ => rank(1, Some(20), at - 6.0),
        }];
    });
    let rank = &restarted.ranks[0];
    assert_eq!((rank.cpu_ns, rank.restarts), (8 * SECOND, 1));
    assert_eq!(rank.busy.ns, 8 * SECOND);
    assert_eq!(rank.percent.mean(), Some(80.0));
    assert!(rank.absence.stretches.is_empty());
    assert_eq!(seconds(restarted.rank_overlap.at_once_ns()), [2.0, 8.0]);
}

#[test]
fn processor_time_that_shrinks_for_a_moment_is_not_counted_twice() {
    let cpu = [0.0, 1.0, 2.0, 0.5, 2.5, 3.5];
    let odd = totals(6, |second, now| {
        now.ranks = vec![rank(0, Some(1), cpu[second])]
    });
    assert_eq!(odd.ranks[0].cpu_ns, 3 * SECOND + SECOND / 2);
}

#[test]
fn ranks_are_busy_from_half_a_core_on() {
    let uneven = totals(11, |second, now| {
        let at = second as f64;
        now.ranks = vec![
            rank(0, Some(1), at * 0.5),
            rank(1, Some(2), at * 0.4),
            rank(2, Some(3), at * 3.0),
        ];
    });
    assert_eq!(
        seconds(uneven.rank_overlap.at_once_ns()),
        [0.0, 0.0, 10.0, 0.0]
    );
    assert_eq!(uneven.ranks[2].percent.mean(), Some(300.0));
}

#[test]
fn ranks_that_come_later_were_idle_before() {
    let growing = totals(11, |second, now| {
        let all = [
            rank(3, Some(1), second as f64),
            rank(0, Some(2), second as f64),
        ];
        now.ranks = all[..if second > 4 { 2 } else { 1 }].to_vec();
    });
    // The second one's first sample is where it begins.
    assert_eq!(seconds(growing.rank_overlap.at_once_ns()), [0.0, 5.0, 5.0]);
    assert_eq!(growing.rank_overlap.bounds(), Some((0.5, 0.5)));
}

#[test]
fn a_source_that_makes_up_devices_and_ranks_is_bounded() {
    let mut totals = Totals::new(Rules::default());
    for round in 0..20_u32 {
        let mut now = sample(f64::from(round), &[]);
        for index in 0..1000 {
            now.devices.push(DeviceSample {
                index: round * 1000 + index,
                ..DeviceSample::default()
            });
            now.ranks.push(rank(round * 1000 + index, None, 0.0));
        }
        totals.add(&now);
    }
    assert_eq!(totals.devices.len(), DEVICES_MAX);
    assert_eq!(totals.ranks.len(), RANKS_MAX);
}

#[test]
fn nonsense_from_outside_overflows_nothing() {
    let mut totals = Totals::new(Rules {
        late_after: Duration::MAX,
        ..Rules::default()
    });
    for at in [
        Duration::ZERO,
        Duration::from_secs(1),
        Duration::MAX,
        Duration::MAX,
    ] {
        let mut now = sample(0.0, &[Some(u32::MAX); 2]);
        now.at = at;
        for device in &mut now.devices {
            device.power_mw = u32::MAX.into();
            device.energy_mj = u64::MAX.into();
            device.pcie_tx_bytes_s = u64::MAX.into();
            device.sm_clock_mhz = u32::MAX.into();
        }
        now.ranks = vec![rank(u32::MAX, Some(0), 0.0)];
        now.ranks[0].cpu = at.into();
        totals.add(&now);
    }
    assert_eq!(totals.devices[0].percent.mean(), Some(100.0));
}

#[test]
fn the_totals_are_those_of_a_count_by_hand() {
    // Random walks of three devices over uneven intervals, in a fixed order.
    let mut state = 11_u64;
    let mut next = |bound: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % bound
    };
    for _ in 0..50 {
        let mut totals = Totals::new(Rules {
            devices: Some(vec![0, 1, 2]),
            ..Rules::default()
        });
        let (mut at_ms, mut at_once, mut late, mut silent) = (0, [0_u64; 4], 0, 0);
        totals.add(&sample(0.0, &[Some(0); 3]));
        totals.add(&sample(0.0, &[Some(0); 3]));
        for _ in 0..200 {
            let step_ms = if next(20) == 0 {
                3001 + next(5000)
            } else {
                50 + next(100)
            };
            at_ms += step_ms;
            let percents: Vec<Option<u32>> = (0..3)
                .map(|_| {
                    (next(10) > 0).then(|| {
                        if next(2) == 0 {
                            next(5) as u32
                        } else {
                            5 + next(96) as u32
                        }
                    })
                })
                .collect();
            totals.add(&sample(at_ms as f64 / 1000.0, &percents));
            let busy = percents
                .iter()
                .filter(|p| p.is_some_and(|p| p >= 5))
                .count();
            match (step_ms > 3000, percents.iter().all(Option::is_none)) {
                (true, _) => late += step_ms,
                (_, true) => silent += step_ms,
                _ => at_once[busy] += step_ms,
            }
        }
        let ms: Vec<u64> = totals
            .device_overlap
            .busy_time
            .at_once_ns
            .iter()
            .map(|ns| ns.div_ceil(1000) / 1000)
            .collect();
        assert_eq!(ms, at_once);
        assert_eq!(totals.late.ns.div_ceil(1000) / 1000, late);
        let total: u64 = at_once.iter().sum();
        assert_eq!(at_ms, total + late + silent);
    }
}
