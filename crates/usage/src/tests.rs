//! Whole runs, from samples to what people read, against committed texts. Set `PACELINE_BLESS` to write them anew, then
//! read what has changed; set `PACELINE_PICTURES` to a folder to look at the pictures.

mod runs;

use std::path::PathBuf;

use paceline_gpu::snapshot::Gap;
use runs::{device, rank, run, two_gpus};

use super::history::BUCKETS;
use super::report::Note;
use super::*;

fn committed(name: &str, text: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("src/tests/expected")
        .join(name);
    if std::env::var_os("PACELINE_BLESS").is_some() {
        std::fs::write(&path, text).expect("the sources can be written");
    }
    let expect = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, expect, "{name}");
}

fn check(name: &str, report: &Report) {
    committed(&format!("{name}.en.txt"), &report.text(Lang::En));
    committed(&format!("{name}.ko.txt"), &report.text(Lang::Ko));
    let json = report.json();
    let back: Report = serde_json::from_str(&json).expect("a report is read back");
    // Numbers may differ in their last bit, which no text shows.
    assert_eq!(back.text(Lang::En), report.text(Lang::En), "{name}");
    assert!(back.history.gpus.len() == report.gpus.len(), "{name}");
    for lang in [Lang::En, Lang::Ko] {
        let picture = report.svg(lang);
        check_picture(name, &picture);
        if let Some(folder) = std::env::var_os("PACELINE_PICTURES") {
            let path = PathBuf::from(folder).join(format!("{name}.{lang:?}.svg"));
            std::fs::write(path, picture).expect("the folder can be written");
        }
    }
}

/// Well formed as far as a few lines can tell, and of bounded size.
fn check_picture(name: &str, svg: &str) {
    assert!(svg.len() < 1 << 20, "{name}: {} bytes", svg.len());
    for odd in ["NaN", "inf", "--"] {
        assert!(!svg.contains(odd), "{name}: {odd}");
    }
    let mut open = Vec::new();
    for tag in svg.split('<').skip(1) {
        let (tag, text) = tag.split_once('>').expect("every tag ends");
        assert!(!text.contains('>'), "{name}: {text}");
        match tag.strip_prefix('/') {
            Some(tag) => assert_eq!(open.pop(), Some(tag), "{name}"),
            None if tag.ends_with('/') => {}
            None => open.extend(tag.split([' ', '\n']).next()),
        }
    }
    assert!(open.is_empty(), "{name}: {open:?}");
}

/// The recorded run: a line a second, and what it shows is said in the terms that the question was first asked in.
#[test]
fn the_published_two_gpu_run_reads_as_it_was_wanted() {
    let recording = include_str!("tests/expected/two-gpus.csv");
    let replay = Replay::new(recording.as_bytes()).expect("a recording");
    let report = replay.report(Rules::default()).expect("samples");
    let wanted = "⏱️ 실행 시간 요약\n\
                  • 전체 실행 시간 : 0시간 32분 12초\n\
                  • GPU 2대 동시 사용 시간 : 0시간 14분 55초\n\
                  • 동시 사용 비율 : 46.32%\n";
    let text = report.text(Lang::Ko);
    assert!(text.starts_with(wanted), "{text}");
    assert!(text.contains("\nGPU 0: 2340/97887MB (2.39%)\n"), "{text}");
    check("two-gpus", &report);
}

#[test]
fn the_recorded_run_is_what_its_generator_makes() {
    committed("two-gpus.csv", &two_gpus());
}

#[test]
fn one_gpu_is_busy_or_not() {
    let report = run(3600, |second, now| {
        now.devices = vec![device(0, if second % 4 == 0 { 0 } else { 93 })];
    });
    check("one-gpu", &report);
}

#[test]
fn a_gpu_with_counters_says_what_its_utilisation_hides() {
    let report = run(600, |_, now| {
        let mut busy = device(0, 99);
        busy.sm_active_percent = 21.5.into();
        busy.sm_occupancy_percent = 12.0.into();
        busy.tensor_active_percent = 3.25.into();
        busy.dram_active_percent = 40.0.into();
        now.devices = vec![busy, device(1, 99)];
    });
    let gpu = &report.gpus[0];
    let means = [
        gpu.sm_active_percent,
        gpu.sm_occupancy_percent,
        gpu.tensor_active_percent,
        gpu.dram_active_percent,
    ];
    assert_eq!(means, [21.5, 12.0, 3.25, 40.0].map(Some));
    assert_eq!(report.gpus[1].sm_active_percent, None);
    check("counters", &report);
}

#[test]
fn a_job_too_short_to_sample_has_no_figures() {
    let mut report = run(1, |second, now| {
        now.devices = vec![device(0, 93)];
        now.ranks = vec![rank(0, 100, second as f64)];
    });
    assert!(report.text(Lang::En).contains('%'));
    report.total_s = 0.1;
    let text = report.text(Lang::En);
    assert!(
        text.contains("too short to sample") && !text.contains('%'),
        "{text}"
    );
}

#[test]
fn a_machine_without_devices_and_ranks_says_so() {
    let mut report = run(90, |_, _| {});
    report.notes.push(Note::NoDriver {
        trouble: DriverError::NoLibrary("libnvidia-ml.so.1: cannot open".into()),
    });
    check("nothing", &report);
}

#[test]
fn ranks_on_processors_get_the_same_report() {
    let report = run(600, |second, now| {
        let spent = |rank: u32| (second as f64 - f64::from(rank) * 20.0).max(0.0) * 0.93;
        now.ranks = (0..4).map(|r| rank(r, 100 + r, spent(r))).collect();
        if second > 400 {
            // Rank 2 is another process from there on.
            now.ranks[2] = rank(2, 500, (second - 401) as f64 * 0.97);
        }
    });
    check("cpu-ranks", &report);
}

#[test]
fn eight_gpus_have_a_line_each() {
    let report = run(1800, |second, now| {
        let busy = |gpu: u64| second > 60 && (second + gpu) % 50 > gpu;
        now.devices = (0..8)
            .map(|gpu| device(gpu as u32, if busy(gpu) { 97 } else { 1 }))
            .collect();
        now.devices[3].throttles =
            vec![paceline_gpu::sample::Throttle::Thermal; usize::from(second > 900)].into();
        now.ranks = (0..8).map(|r| rank(r, 100 + r, second as f64)).collect();
    });
    check("eight-gpus", &report);
}

#[test]
fn dozens_of_ranks_are_folded() {
    let report = run(600, |second, now| {
        let spent = |rank: u32| second as f64 * (0.4 + f64::from(rank * 7 % 64) / 80.0);
        now.ranks = (0..64).map(|r| rank(r, 100 + r, spent(r))).collect();
    });
    check("many-ranks", &report);
}

#[test]
fn a_card_that_is_lost_is_told() {
    let report = run(1200, |second, now| {
        now.devices = vec![device(0, 97), device(1, 95)];
        if second > 723 {
            now.devices[1] = runs::silent(1, Gap::Lost);
        }
    });
    check("lost-card", &report);
}

#[test]
fn a_driver_that_fails_leaves_the_rest_unobserved() {
    let report = run(1200, |second, now| {
        now.devices = (0..3).map(|gpu| device(gpu, 97)).collect();
        if second > 723 {
            let why = Gap::other("an unknown error occurred in the driver");
            now.devices = (0..3).map(|gpu| runs::silent(gpu, why.clone())).collect();
        }
    });
    check("driver-failed", &report);
}

#[test]
fn devices_that_support_nothing_say_so() {
    let report = run(300, |_, now| {
        now.devices = (0..2)
            .map(|gpu| runs::silent(gpu, Gap::NotSupported))
            .collect();
    });
    check("not-supported", &report);
}

#[test]
fn gpus_that_idle_beside_ranks_that_compute_are_no_headline() {
    let report = run(300, |second, now| {
        now.devices = vec![device(0, 0), device(1, 1)];
        now.ranks = vec![rank(0, 7, second as f64), rank(1, 8, second as f64 * 0.8)];
    });
    check("idle-gpus", &report);
}

/// Two ranks on two cards, of which the second never works; the ranks' processes are on these cards.
fn idle_second_card(cards: [&[u32]; 2]) -> Report {
    run(1932, |second, now| {
        now.devices = vec![device(0, 96), device(1, 0)];
        now.ranks = (0..2).map(|r| rank(r, 100 + r, second as f64)).collect();
        for (card, pids) in now.devices.iter_mut().zip(cards) {
            let process = |pid: &u32| paceline_gpu::sample::ProcessMemory {
                pid: *pid,
                ..Default::default()
            };
            card.processes = pids.iter().map(process).collect::<Vec<_>>().into();
        }
    })
}

#[test]
fn a_gpu_that_idles_beside_two_ranks_is_the_first_line() {
    check("idle-shared", &idle_second_card([&[100, 101], &[]]));
    check("idle-opened", &idle_second_card([&[100], &[101]]));
    check("idle-unknown", &idle_second_card([&[], &[]]));
    let text = idle_second_card([&[100, 101], &[]]).text(Lang::En);
    let first = "warning: GPU 1 did no work while 2 ranks ran; only GPU 0 was busy\n  why: ranks 0, 1 were all on GPU 0\n";
    assert!(text.starts_with(first), "{text}");
    let json: serde_json::Value =
        serde_json::from_str(&idle_second_card([&[100, 101], &[]]).json()).expect("JSON");
    assert_eq!(
        json["notes"][0]["idle_gpus"]["gpus"],
        serde_json::json!([1])
    );
}

#[test]
fn idle_gpus_that_no_rank_was_meant_for_are_no_warning() {
    let quiet = |report: &Report| {
        let text = report.text(Lang::En);
        assert!(text.starts_with("⏱️ "), "{text}");
    };
    // One rank has one card; two ranks have two of three; a job is too short to tell.
    quiet(&run(60, |second, now| {
        now.devices = vec![device(0, 96), device(1, 0)];
        now.ranks = vec![rank(0, 7, second as f64)];
    }));
    quiet(&run(60, |second, now| {
        now.devices = vec![device(0, 96), device(1, 96), device(2, 0)];
        now.ranks = (0..2).map(|r| rank(r, 7 + r, second as f64)).collect();
    }));
    quiet(&run(3, |second, now| {
        now.devices = vec![device(0, 96), device(1, 0)];
        now.ranks = (0..2).map(|r| rank(r, 7 + r, second as f64)).collect();
    }));
}

#[test]
fn a_rank_that_idles_beside_others_is_the_first_line() {
    check(
        "idle-rank",
        &run(600, |second, now| {
            now.ranks = vec![rank(0, 7, second as f64), rank(1, 8, 0.5)];
        }),
    );
}

#[test]
fn what_went_wrong_is_told_at_the_end() {
    let mut report = run(600, |second, now| {
        now.devices = vec![device(0, 97), device(1, 95)];
        if second > 300 {
            now.at += Duration::from_secs(7200);
        }
    });
    report.notes.extend([
        Note::Hung { since_s: 7801.0 },
        Note::Ended { at_s: 12.0 },
        Note::NotStarted {
            why: "too many threads".into(),
        },
        Note::File {
            path: "usage.json".into(),
            why: "no space left on device".into(),
        },
        Note::NoDriver {
            trouble: DriverError::VersionMismatch,
        },
    ]);
    check("notes", &report);
}

#[test]
fn a_week_takes_no_more_memory_than_an_hour() {
    let mut tally = Tally::new(Rules::default(), Duration::from_millis(100));
    // Every entry of every collection, and every field, ends with a comma.
    let size = |tally: &Tally| format!("{tally:?}").matches(',').count();
    let mut sizes = Vec::new();
    let mut add = |hour: u64| {
        for minute in 0..60_u64 {
            for now in 0..3 {
                let mut sample = Sample {
                    at: Duration::from_secs((hour * 60 + minute) * 60)
                        + Duration::from_millis(now * 1000),
                    ..Sample::default()
                };
                let percent = |gpu: u64| ((hour * 31 + minute * 7 + gpu) % 100) as u32;
                sample.devices = (0..8).map(|gpu| device(gpu as u32, percent(gpu))).collect();
                sample.devices[5] = runs::silent(5, Gap::other(minute));
                sample.ranks = (0..8)
                    .map(|r| rank(r, 100 + (hour % 9) as u32, hour as f64))
                    .collect();
                tally.add(&sample);
            }
        }
        sizes.push(size(&tally));
    };
    (0..7 * 24).for_each(&mut add);
    assert!(sizes.iter().all(|now| now == &sizes[0]), "{sizes:?}");
    let course = tally.report().history;
    assert!(
        course
            .gpus
            .iter()
            .all(|series| series.mean.len() <= BUCKETS)
    );
}
