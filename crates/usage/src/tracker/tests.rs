use std::fs;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, Sender};

use paceline_gpu::sample::DeviceSample;
use paceline_gpu::snapshot::DriverError;

use super::*;
use crate::Replay;
use crate::sample::{RankSample, Sample};

/// No deadline of a test that passes.
const LONG: Duration = Duration::from_secs(600);

/// Two devices that work, and the ranks that it was told of; says after each sample that it was taken.
struct Steady {
    ranks: RankPids,
    taken: Sender<()>,
}

impl Source for Steady {
    fn sample(&mut self, at: Duration) -> Sample {
        let device = |index| DeviceSample {
            index,
            utilization_percent: 90.into(),
            ..DeviceSample::default()
        };
        let rank = |(rank, pid)| RankSample {
            rank,
            pid,
            cpu: at.into(),
            resident_bytes: 1.into(),
        };
        // Nobody may listen any more.
        let _ = self.taken.send(());
        Sample {
            at,
            devices: vec![device(0), device(1)],
            ranks: self.ranks.now().into_iter().map(rank).collect(),
        }
    }

    fn trouble(&self) -> Option<DriverError> {
        Some(DriverError::NoPermission)
    }
}

fn options(folder: &Path) -> Options {
    Options {
        period: Duration::from_millis(1),
        csv: Some(folder.join("usage.csv")),
        json: Some(folder.join("usage.json")),
        svg: Some(folder.join("usage.svg")),
        finish_wait: LONG,
        ..Options::default()
    }
}

fn steady(options: Options) -> (Tracker, Receiver<()>) {
    let (taken, samples) = mpsc::channel();
    let tracker = Tracker::watch(options, RankPids::default(), |ranks| Steady {
        ranks,
        taken,
    });
    (tracker, samples)
}

fn wait(samples: &Receiver<()>, count: usize) {
    for _ in 0..count {
        samples.recv_timeout(LONG).expect("samples go on");
    }
}

/// Waits for two samples that begin after this call: the first of them has been added up then.
fn wait_anew(samples: &Receiver<()>) {
    while samples.try_recv().is_ok() {}
    wait(samples, 2);
}

fn names(folder: &Path) -> Vec<String> {
    let files = fs::read_dir(folder).expect("the folder");
    let mut names: Vec<String> = files
        .map(|file| {
            file.expect("a file")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    names.sort();
    names
}

#[test]
fn a_finished_tracker_has_reported_and_written_what_it_saw() {
    let folder = tempfile::tempdir().expect("a folder");
    let (tracker, samples) = steady(options(folder.path()));
    wait(&samples, 3);
    tracker.ranks().started(0, 100);
    wait_anew(&samples);
    assert!(tracker.report().samples >= 3);
    tracker.ranks().started(0, 200);
    wait_anew(&samples);
    tracker.ranks().ended(0);
    let report = tracker.finish();
    assert!(report.samples >= 8, "{}", report.samples);
    let all = report.gpus_at_once.as_ref().expect("devices");
    assert_eq!(
        (all.counted.as_slice(), all.all_busy_share),
        (&[0, 1][..], 1.0)
    );
    assert_eq!(report.ranks[0].restarts, 1);
    assert_eq!(
        report.notes,
        [Note::NoDriver {
            trouble: DriverError::NoPermission
        }]
    );
    assert_eq!(
        names(folder.path()),
        ["usage.csv", "usage.json", "usage.svg"]
    );
    // The samples' file says the same, to the microsecond.
    let replayed = Replay::open(&folder.path().join("usage.csv")).expect("a header");
    let replayed = replayed.report(Rules::default()).expect("samples");
    assert_eq!(replayed.samples, report.samples);
    assert!((replayed.total_s - report.total_s).abs() < 1e-5);
    let json = fs::read_to_string(folder.path().join("usage.json")).expect("the report");
    assert_eq!(json, report.json());
}

#[test]
fn the_samples_file_is_there_while_the_job_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    let (tracker, samples) = steady(options(folder.path()));
    wait(&samples, 2);
    assert_eq!(names(folder.path()), ["usage.csv.part"]);
    drop(tracker);
}

#[test]
fn files_that_cannot_be_written_are_told_and_harm_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let (tracker, samples) = steady(options(&folder.path().join("none")));
    wait(&samples, 3);
    let report = tracker.finish();
    assert!(report.samples >= 3);
    let path = |note: &Note| match note {
        Note::File { path, .. } => path.rsplit('.').next().map(str::to_owned),
        _ => None,
    };
    let told: Vec<String> = report.notes.iter().filter_map(path).collect();
    assert_eq!(told, ["csv", "svg", "json"]);
    assert!(names(folder.path()).is_empty());
}

/// Answers once, then not before it is let go.
struct Hanging {
    asked: Sender<()>,
    go: Receiver<()>,
    count: u32,
}

impl Source for Hanging {
    fn sample(&mut self, _: Duration) -> Sample {
        self.count += 1;
        // Whoever waits may be gone.
        let _ = self.asked.send(());
        if self.count > 1 {
            let _ = self.go.recv();
        }
        Sample::default()
    }
}

#[test]
fn a_driver_that_hangs_is_left_behind_and_told() {
    let ((asked, samples), (let_go, go)) = (mpsc::channel(), mpsc::channel());
    let options = Options {
        period: Duration::from_millis(1),
        finish_wait: Duration::from_millis(1),
        ..Options::default()
    };
    let tracker = Tracker::watch(options, RankPids::default(), |_| Hanging {
        asked,
        go,
        count: 0,
    });
    wait(&samples, 2);
    let report = tracker.finish();
    assert_eq!(report.samples, 1);
    let Some(Note::Hung { since_s }) = report.notes.last() else {
        panic!("{:?}", report.notes);
    };
    assert!(*since_s > 0.0 && *since_s <= report.total_s);
    drop(let_go);
}

#[test]
fn a_library_that_hangs_while_it_is_loaded_is_told_too() {
    let (let_go, go) = mpsc::channel::<()>();
    let options = Options {
        finish_wait: Duration::from_millis(1),
        ..Options::default()
    };
    let tracker = Tracker::watch(options, RankPids::default(), move |_| {
        let _ = go.recv();
        Machine::without_devices(&Places::default(), RankPids::default())
    });
    let report = tracker.finish();
    assert_eq!(report.notes, [Note::Hung { since_s: 0.0 }]);
    assert!(report.total_s > 0.0);
    drop(let_go);
}

struct Faulty;

impl Source for Faulty {
    fn sample(&mut self, _: Duration) -> Sample {
        panic!("a fault of this test");
    }
}

#[test]
fn a_fault_of_its_own_ends_the_tracker_and_not_the_job() {
    let options = Options {
        finish_wait: LONG,
        ..Options::default()
    };
    let tracker = Tracker::watch(options, RankPids::default(), |_| Faulty);
    let report = tracker.finish();
    assert!(
        matches!(report.notes[..], [Note::Ended { .. }]),
        "{:?}",
        report.notes
    );
}

#[test]
fn a_tracker_that_is_dropped_ends_its_thread() {
    let (tracker, samples) = steady(Options {
        period: Duration::from_millis(1),
        ..Options::default()
    });
    wait(&samples, 1);
    drop(tracker);
    // The source goes with the thread, and its end of the channel with it.
    let ended = loop {
        match samples.recv_timeout(LONG) {
            Ok(()) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(ended, mpsc::RecvTimeoutError::Disconnected);
}

#[test]
fn samples_come_at_multiples_of_the_period() {
    let check = |now_ms, expect_ms| {
        let wait = until_next(Duration::from_millis(now_ms), Duration::from_millis(100));
        assert_eq!(wait, Duration::from_millis(expect_ms));
    };
    check(0, 100);
    check(1, 99);
    check(99, 1);
    // Too late for 300: on to 400.
    check(310, 90);
}

#[test]
fn ranks_come_go_and_are_bounded() {
    let ranks = RankPids::default();
    ranks.started(1, 11);
    ranks.started(0, 10);
    ranks.started(1, 12);
    ranks.ended(0);
    assert_eq!(ranks.now(), [(0, None), (1, Some(12))]);
    for rank in 0..2 * RANKS_MAX as u32 {
        ranks.started(rank, 1);
    }
    assert_eq!(ranks.now().len(), RANKS_MAX);
}
