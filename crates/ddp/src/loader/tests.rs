//! Order, bounds, errors in their place, and thread shutdown; gates instead of sleeps.

use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};

use super::*;

/// Longer than any of these tests takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn options(workers: usize, queue: usize) -> LoaderOptions {
    LoaderOptions {
        workers,
        queue,
        timeout: PATIENCE,
    }
}

/// Lets one `pass` return per message, and every `pass` once the sender is gone.
struct Gate(Mutex<Receiver<()>>);

impl Gate {
    fn new() -> (Sender<()>, Self) {
        let (open, gate) = mpsc::channel();
        (open, Self(Mutex::new(gate)))
    }

    fn pass(&self) {
        let gate = self.0.lock().expect("no pass panics");
        let passed = gate.recv_timeout(PATIENCE);
        assert_ne!(
            passed,
            Err(RecvTimeoutError::Timeout),
            "the gate never opened"
        );
    }
}

/// Waits until the early outcomes satisfy the predicate.
fn until<J, B, E: Display>(
    loader: &mut Loader<J, B, E>,
    wanted: impl Fn(&BTreeMap<u64, Outcome<J, B, E>>) -> bool,
) {
    while !wanted(&loader.early) {
        let outcome = loader.outcomes.recv_timeout(PATIENCE);
        loader
            .early
            .extend([outcome.expect("the loader gets there")]);
    }
}

/// The jobs handed out before the error that ended the iteration, and that error.
fn failure<B, E: Display>(
    items: impl Iterator<Item = Result<(u64, B), LoaderError<E>>>,
) -> (Vec<u64>, LoaderError<E>) {
    let mut items = items;
    let mut jobs = Vec::new();
    loop {
        match items.next().expect("an error before the end") {
            Ok((job, _)) => jobs.push(job),
            Err(error) => {
                assert!(items.next().is_none(), "an error ends the iteration");
                return (jobs, error);
            }
        }
    }
}

fn square(job: &u64) -> Result<u64, Infallible> {
    Ok(job * job)
}

#[test]
fn every_batch_comes_once_and_in_order_with_any_number_of_workers() {
    for (workers, queue) in [(0, 0), (0, 3), (1, 0), (1, 4), (2, 1), (5, 0), (5, 9)] {
        let loader = Loader::new(options(workers, queue), 0..100, square).expect("threads");
        let loaded: Vec<_> = loader.map(|item| item.expect("no error")).collect();
        let expected: Vec<_> = (0..100).map(|job| (job, job * job)).collect();
        assert_eq!(loaded, expected, "{workers} workers, queue {queue}");
    }
}

#[test]
fn a_slow_batch_is_waited_for_although_later_ones_are_ready() {
    let (open, gate) = Gate::new();
    let load = move |job: &u64| {
        if *job == 0 {
            gate.pass();
        }
        square(job)
    };
    let mut loader = Loader::new(options(2, 3), 0..5, load).expect("threads");
    until(&mut loader, |early| early.len() == 4);
    drop(open);
    let first = loader.next().expect("a batch").expect("no error");
    assert_eq!(first, (0, 0));
    assert_eq!(loader.count(), 4);
}

#[test]
fn no_more_than_workers_plus_queue_batches_are_on_their_way() {
    const AHEAD: u64 = 5;
    let asked = Arc::new(AtomicU64::new(0));
    let asked_by_caller = asked.clone();
    let (report, most_ahead) = mpsc::channel();
    let jobs = (0..50_u64).inspect(move |job| {
        let ahead = job + 1 - asked.load(Ordering::SeqCst);
        report.send(ahead).expect("the test listens");
    });
    let mut loader = Loader::new(options(2, 3), jobs, square).expect("threads");
    until(&mut loader, |early| early.len() as u64 == AHEAD);
    let mut count = 0;
    loop {
        // Counted before the batch is taken, so `ahead` can be one too low, never too high.
        asked_by_caller.fetch_add(1, Ordering::SeqCst);
        if loader.next().is_none() {
            break;
        }
        count += 1;
    }
    assert_eq!(count, 50);
    drop(loader);
    assert_eq!(most_ahead.iter().max(), Some(AHEAD));
}

#[test]
fn an_error_comes_at_its_place_and_no_later_job_is_started() {
    for workers in [0, 1] {
        let (report, started) = mpsc::channel();
        let load = move |job: &u64| {
            report.send(*job).expect("the test listens");
            if *job == 3 { Err("bad record") } else { Ok(()) }
        };
        let loader = Loader::new(options(workers, 2), 0..100, load).expect("threads");
        let (before, error) = failure(loader);
        assert_eq!(before, [0, 1, 2]);
        assert_eq!(error.to_string(), "batch 3 could not be loaded: bad record");
        assert_eq!(started.iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
    }
}

#[test]
fn batches_begun_before_an_error_are_still_handed_out() {
    let (open, gate) = Gate::new();
    let (report, started) = mpsc::channel();
    let load = move |job: &u64| {
        report.send(*job).expect("the test listens");
        match job {
            0 => {
                gate.pass();
                Ok(())
            }
            3 => Err("bad record"),
            _ => Ok(()),
        }
    };
    let mut loader = Loader::new(options(2, 50), 0..100, load).expect("threads");
    until(&mut loader, |early| early.contains_key(&3));
    drop(open);
    assert_eq!(failure(loader).0, [0, 1, 2]);
    let mut started: Vec<_> = started.iter().collect();
    started.sort_unstable();
    assert_eq!(started, [0, 1, 2, 3]);
}

#[test]
fn a_panic_becomes_an_error_with_its_message() {
    for workers in [0, 2] {
        let load = |job: &u64| {
            assert_ne!(*job, 2, "no such image");
            square(job)
        };
        let loader = Loader::new(options(workers, 2), 0..100, load).expect("threads");
        let (before, error) = failure(loader);
        assert_eq!(before, [0, 1]);
        assert!(
            error
                .to_string()
                .starts_with("loading batch 2 panicked: assertion `left != right` failed: no such"),
            "{error}"
        );
    }
}

#[test]
fn a_panic_in_the_list_of_jobs_becomes_an_error_as_well() {
    for workers in [0, 3] {
        let (report, taken) = mpsc::channel();
        let jobs = (0..100_u64).inspect(move |job| {
            report.send(*job).expect("the test listens");
            assert_ne!(*job, 2, "list is broken");
        });
        let loader = Loader::new(options(workers, 2), jobs, square).expect("threads");
        let (before, error) = failure(loader);
        assert_eq!(before, [0, 1]);
        let text = error.to_string();
        assert!(text.contains("batch 2 panicked") && text.contains("list is broken"));
        assert_eq!(taken.iter().collect::<Vec<_>>(), [0, 1, 2]);
    }
}

#[test]
fn dropping_a_loader_whose_queue_is_full_ends_its_threads() {
    let held = Arc::new(());
    let watch = Arc::downgrade(&held);
    let load = move |job: &u64| {
        let _held = &held;
        square(job)
    };
    let mut loader = Loader::new(options(3, 4), 0.., load).expect("threads");
    until(&mut loader, |early| early.len() == 7);
    drop(loader);
    assert!(watch.upgrade().is_none(), "a thread still holds `load`");
}

#[test]
fn a_batch_that_never_comes_is_an_error_and_does_not_hold_up_dropping() {
    let (open, gate) = Gate::new();
    let (alive, ended) = mpsc::channel::<()>();
    let load = move |job: &u64| {
        let _alive = &alive;
        if *job == 1 {
            gate.pass();
        }
        square(job)
    };
    let hasty = LoaderOptions {
        timeout: Duration::from_millis(20),
        ..options(1, 0)
    };
    let mut loader = Loader::new(hasty, 0..9, load).expect("threads");
    // On a busy machine the first batch may take longer than the timeout; wait for it without one.
    until(&mut loader, |early| early.contains_key(&0));
    assert!(loader.next().expect("a batch").is_ok());
    let error = loader.next().expect("an error").expect_err("a deadline");
    assert_eq!(error.to_string(), "batch 1 was not loaded within 20ms");
    assert!(error.hint().is_some());
    assert!(loader.waited() >= Duration::from_millis(20));

    drop(loader);
    assert_eq!(
        ended.try_recv(),
        Err(TryRecvError::Empty),
        "dropping did not wait for the gate"
    );
    drop(open);
    let last = ended.recv_timeout(PATIENCE);
    assert_eq!(
        last,
        Err(RecvTimeoutError::Disconnected),
        "the thread ends once its function returns"
    );
}

#[test]
fn threads_are_named_and_without_workers_there_are_none() {
    let load = |_: &u64| Ok::<_, Infallible>(thread::current().name().map(str::to_owned));
    let names = |workers| {
        let loader = Loader::new(options(workers, 0), 0..20, load).expect("threads");
        loader.map(|item| item.expect("no error").1)
    };
    let of_workers =
        |name: Option<String>| matches!(name.as_deref(), Some("loader/0" | "loader/1"));
    assert!(names(2).all(of_workers));
    let here = thread::current().name().map(str::to_owned);
    assert!(names(0).all(|name| name == here));
}

#[test]
fn without_workers_a_job_is_taken_only_when_asked_for() {
    let (report, started) = mpsc::channel();
    let load = move |job: &u64| {
        report.send(*job).expect("the test listens");
        square(job)
    };
    let mut loader = Loader::new(options(0, 8), 0..9, load).expect("no thread is needed");
    assert_eq!(started.try_iter().count(), 0);
    loader.next();
    assert_eq!(started.try_iter().collect::<Vec<_>>(), [0]);
}

#[test]
fn time_spent_loading_on_the_callers_thread_counts_as_waited() {
    let load = |_: &u64| {
        thread::sleep(Duration::from_millis(5)); // stands for the work
        Ok::<_, Infallible>(())
    };
    let mut loader = Loader::new(options(0, 0), 0..4, load).expect("no thread is needed");
    assert_eq!(loader.waited(), Duration::ZERO);
    assert_eq!(loader.by_ref().count(), 4);
    assert!(loader.waited() >= Duration::from_millis(20));
}

#[test]
fn the_longest_timeout_is_no_overflow() {
    let patient = LoaderOptions {
        timeout: Duration::MAX,
        ..options(1, 1)
    };
    let loader = Loader::new(patient, 0..3, square).expect("threads");
    assert_eq!(loader.count(), 3);
}

/// A job whose destructor panics on a worker's thread.
#[derive(Debug)]
struct Fragile;

impl Drop for Fragile {
    fn drop(&mut self) {
        let here = thread::current();
        if here.name().is_some_and(|name| name.starts_with("loader/")) {
            panic!("fragile");
        }
    }
}

#[test]
fn a_panic_while_a_failed_job_is_dropped_is_an_error_and_no_hang() {
    let load = |_: &Fragile| Err::<(), _>("bad record");
    let jobs = std::iter::repeat_with(|| Fragile);
    let mut loader = Loader::new(options(2, 1), jobs, load).expect("threads");
    let error = loader.next().expect("an error").expect_err("no batch");
    assert_eq!(error.to_string(), "loading batch 0 panicked: fragile");
    assert!(loader.next().is_none());
}
