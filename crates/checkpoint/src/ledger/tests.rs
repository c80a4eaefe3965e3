//! Ledgers of runs that are killed and resumed, and ledgers that were tampered with.

use std::fs::File;
use std::io::Write as _;
use std::time::UNIX_EPOCH;

use super::audit::read;
use super::lines::{Entry, LINE_BYTES_MAX};
use super::*;
use paceline_ddp::sampler::{
    BatchOptions, DistributedSampler, Padding, SamplerOptions, ShardedBatches,
};

/// 6 steps per epoch: the first two shards take 3 samples of each step's 10 and run out first.
const LEN: usize = 50;
const STEPS: u64 = 6;

fn batches_of(options: SamplerOptions, padding: Padding) -> ShardedBatches {
    let sampler = DistributedSampler::new(options).expect("valid options");
    let mut batch = BatchOptions::new(10);
    batch.padding = padding;
    ShardedBatches::new(sampler, batch).expect("valid options")
}

fn batches(seed: u64) -> ShardedBatches {
    let options = SamplerOptions {
        len: LEN,
        shards: 4,
        seed,
        ..SamplerOptions::default()
    };
    batches_of(options, Padding::None)
}

fn step_of(step: u64, plan: &StepPlan) -> Step {
    let range = plan.range();
    Step {
        step,
        epoch: plan.epoch,
        from: range.start,
        to: range.end,
        indices: Hash::of_indices(&plan.shards),
        generation: 0,
        skipped: false,
        back_to: None,
    }
}

fn begin_of(step: u64, world: usize, batches: &ShardedBatches) -> Begin {
    let shards = batches.layout().shards;
    Begin {
        version: VERSION,
        cause: Cause::Resume,
        step,
        seed: batches.state().seed,
        layout: *batches.layout(),
        generation: 0,
        world,
        owners: (0..world)
            .map(|rank| (rank, rank * shards / world))
            .collect(),
        why: None,
        dropped_bytes: 0,
    }
}

/// A ledger in memory.
struct Lines {
    lines: Vec<String>,
    name: Hash,
    last: Hash,
}

impl Lines {
    fn new() -> Self {
        Self {
            lines: Vec::new(),
            name: Hash::random(),
            last: Hash::default(),
        }
    }

    fn push(&mut self, record: Record) {
        let n = self.lines.len() as u64;
        let entry = Entry {
            n,
            ledger: self.name,
            previous: self.last,
            at_ms: 1_000 * n,
            record,
        };
        let (line, sum) = entry.encode();
        self.lines.push(line);
        self.last = sum;
    }

    /// A process that goes on after step `from` on `world` ranks and is killed after step `to`.
    fn process(mut self, from: u64, to: u64, world: usize) -> Self {
        self.push(Record::Begin(begin_of(from, world, &batches(7))));
        for (step, plan) in (1..=to).zip(batches(7)).skip(from as usize) {
            self.push(Record::Step(step_of(step, &plan)));
        }
        self
    }

    fn read(&self) -> Audit {
        read(self.lines.concat().as_bytes()).expect("memory")
    }
}

/// Records 0 to 6: the begin of a run and its first epoch.
fn one_epoch() -> Lines {
    Lines::new().process(0, STEPS, 2)
}

/// Checks what is wrong.
#[track_caller]
fn check(lines: &[String], expected: &[&str]) {
    let audit = read(lines.concat().as_bytes()).expect("memory");
    let faults: Vec<String> = audit.faults.iter().map(ToString::to_string).collect();
    assert_eq!(faults, expected);
}

#[test]
fn a_run_that_was_killed_twice_used_every_sample_once() {
    let lines = Lines::new().process(0, 8, 4);
    let audit = lines.process(5, 11, 2).process(9, 3 * STEPS, 3).read();
    assert_eq!(audit.faults, []);
    assert_eq!((audit.steps, audit.rolled_back), (18, 3 + 2));
    let whole = Epoch {
        len: LEN,
        once: LEN,
        repeated: 0,
        unused: 0,
        is_finished: true,
    };
    assert_eq!(audit.epochs, [whole; 3]);
    let attempts = audit.attempts.iter();
    let attempts = attempts.map(|a| (a.begin.world, a.last_step, a.steps, a.kept));
    let expected = [(4, 8, 8, 5), (2, 11, 6, 4), (3, 18, 9, 9)];
    assert_eq!(attempts.collect::<Vec<_>>(), expected);
}

#[test]
fn any_sequence_of_kills_and_resumes_is_proved_and_no_lost_step_is() {
    let mut state = 1_u64;
    let mut below = |limit: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % limit
    };
    for _ in 0..200 {
        let mut lines = Lines::new();
        let mut done = 0;
        for _ in 0..=below(6) {
            let from = done - below(done.min(7) + 1);
            done = from + below(9);
            lines = lines.process(from, done, 1 + below(4) as usize);
        }
        let end = done + 1 + below(STEPS);
        let whole = lines.process(done, end, 2);
        let audit = whole.read();
        assert_eq!((audit.faults.as_slice(), audit.steps), (&[][..], end));
        // The same with a process that skips a step: its checkpoint was ahead of its weights.
        let lost = 1 + below(end);
        let mut lines = Lines::new();
        lines.push(Record::Begin(begin_of(0, 2, &batches(7))));
        let plans = batches(7).enumerate();
        let plans = plans.filter(|(at, _)| *at as u64 + 1 != lost);
        for (step, (_, plan)) in (1..=end).zip(plans) {
            lines.push(Record::Step(step_of(step, &plan)));
        }
        let faults = lines.read().faults;
        let is_named = matches!(faults[..], [Fault::OutOfTurn { step, .. }] if step == lost);
        assert!(is_named, "step {lost} of {end}: {faults:?}");
    }
}

#[test]
fn a_record_that_is_removed_edited_doubled_moved_or_of_another_run_is_named() {
    let Lines { lines, name, .. } = one_epoch();
    let changed = |change: &dyn Fn(&mut Vec<String>)| {
        let mut lines = lines.clone();
        change(&mut lines);
        lines
    };
    check(&lines, &[]);
    check(
        &changed(&|lines| drop(lines.remove(3))),
        &["record 3 is missing before line 4"],
    );
    check(
        &changed(&|lines| drop(lines.drain(2..5))),
        &["records 2 to 4 are missing before line 3"],
    );
    check(
        &changed(&|lines| drop(lines.remove(0))),
        &["record 0 is missing before line 1"],
    );
    check(
        &changed(&|lines| lines.insert(4, lines[3].clone())),
        &["line 5 repeats record 3"],
    );
    check(
        &changed(&|lines| lines.swap(3, 4)),
        &["line 5 is out of order: it has record 3, after record 4"],
    );
    check(
        &changed(&|lines| {
            let moved = lines.remove(1);
            lines.insert(4, moved);
        }),
        &["line 5 is out of order: it has record 1, after record 4"],
    );
    let other = one_epoch();
    let found = format!(
        "line 4 is of another run: its ledger is {}, expected {name}",
        other.name
    );
    check(
        &changed(&|lines| lines.insert(3, other.lines[3].clone())),
        &[&found],
    );
    check(
        &changed(&|lines| lines[3] = other.lines[3].clone()),
        &["record 3 is missing before line 5", &found],
    );
    let edited = changed(&|lines| lines[3] = lines[3].replace("\"to\":30", "\"to\":31"));
    assert_ne!(edited, lines);
    let faults = read(edited.concat().as_bytes()).expect("memory").faults;
    assert!(
        matches!(&faults[..], [Fault::Changed { line: 4, .. }]),
        "{faults:?}"
    );
}

#[test]
fn every_changed_byte_is_found() {
    let bytes = Lines::new().process(0, 4, 2).lines.concat().into_bytes();
    // Without the last line's end that line is torn, as after a crash.
    for at in 0..bytes.len() - 1 {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        let faults = read(&changed[..]).expect("memory").faults;
        assert_ne!(faults, [], "byte {at}");
    }
}

#[test]
fn two_processes_that_continue_the_same_record_are_told_apart() {
    let begun = || Lines {
        name: Hash::default(),
        ..Lines::new()
    };
    let (one, other) = (begun().process(0, 4, 2), begun().process(0, 4, 4));
    let mixed = [&one.lines[..3], &other.lines[3..]].concat();
    let faults = read(mixed.concat().as_bytes()).expect("memory").faults;
    assert!(
        matches!(faults[..], [Fault::OtherHistory { line: 4, .. }]),
        "{faults:?}"
    );
}

/// The first epoch with another second step, or none.
fn with_second_step(second: Option<Step>) -> Vec<String> {
    let mut lines = Lines::new();
    lines.push(Record::Begin(begin_of(0, 2, &batches(7))));
    for (step, plan) in (1..=STEPS).zip(batches(7)) {
        match step {
            2 => second.map_or((), |second| lines.push(Record::Step(second))),
            _ => lines.push(Record::Step(step_of(step, &plan))),
        }
    }
    lines.lines
}

#[test]
fn steps_whose_records_are_in_order_must_be_those_that_the_sampler_deals() {
    let plan = batches(7).nth(1).expect("a plan");
    let right = step_of(2, &plan);
    check(&with_second_step(Some(right)), &[]);
    check(&with_second_step(None), &["no record of step 2"]);
    let twice = Step { step: 1, ..right };
    check(
        &with_second_step(Some(twice)),
        &[
            "the run cannot go on after step 1 as recorded: step 1 of generation 0 follows",
            "no record of step 2",
        ],
    );
    let stale = Step {
        generation: 1,
        ..right
    };
    check(
        &with_second_step(Some(stale)),
        &["the run cannot go on after step 1 as recorded: step 2 of generation 1 follows"],
    );
    let again = step_of(2, &batches(7).next().expect("a plan"));
    check(
        &with_second_step(Some(again)),
        &["step 2 used samples 0..10 of epoch 0, expected 10..20 of epoch 0"],
    );
    let other = step_of(2, &batches(8).nth(1).expect("a plan"));
    let (found, expected) = (other.indices, right.indices);
    check(
        &with_second_step(Some(other)),
        &[&format!(
            "step 2 used samples with checksum {found}, but the sampler deals those with {expected}"
        )],
    );
}

#[test]
fn a_run_that_goes_on_where_it_was_not_is_refused() {
    check(
        &Lines::new().process(0, 4, 2).process(6, 8, 2).lines,
        &["no record of steps 5 to 6"],
    );
    check(
        &Lines::new().process(2, 4, 2).lines,
        &["no record of steps 1 to 2"],
    );
    let lines = |step: u64, begin: Begin| {
        let mut lines = Lines::new().process(0, step, 2);
        lines.push(Record::Begin(begin));
        let plan = batches(7).nth(step as usize).expect("a plan");
        lines.push(Record::Step(step_of(step + 1, &plan)));
        lines.lines
    };
    let fits = begin_of(2, 2, &batches(7));
    check(&lines(2, fits.clone()), &[]);
    let refused = |begin: Begin, why: &str| {
        let why = format!("the run cannot go on after step 2 as recorded: {why}");
        check(&lines(2, begin), &[&why]);
    };
    let mut begin = fits.clone();
    begin.layout.global_batch = 20;
    refused(
        begin,
        "sampler state was saved within epoch 0, after 20 samples, with global_batch 10 (now 20)",
    );
    let mut begin = fits.clone();
    begin.seed = 8;
    refused(
        begin,
        "sampler state was saved with seed 7, but seed is now 8",
    );
    let mut begin = fits.clone();
    begin.layout.len = usize::MAX;
    let len = usize::MAX;
    refused(
        begin,
        &format!("{len} samples are more than the 4294967296 that can be checked"),
    );
    for owners in [
        vec![],
        vec![(0, 1)],
        vec![(0, 0), (1, 0)],
        vec![(0, 0), (1, 4)],
        vec![(2, 0)],
    ] {
        let begin = Begin {
            owners,
            ..fits.clone()
        };
        let mut lines = Lines::new();
        lines.push(Record::Begin(Begin { step: 0, ..begin }));
        let plan = batches(7).next().expect("a plan");
        lines.push(Record::Step(step_of(1, &plan)));
        check(
            &lines.lines,
            &[
                "the run cannot go on after step 0 as recorded: the 4 shards are not dealt to replicas among 2 ranks",
            ],
        );
    }
}

#[test]
fn at_the_end_of_an_epoch_the_batch_may_change() {
    let mut lines = one_epoch();
    let options = *batches(7).layout();
    let sampler = DistributedSampler::new(SamplerOptions {
        len: options.len,
        shards: options.shards,
        seed: 7,
        ..SamplerOptions::default()
    });
    let sampler = sampler.expect("valid options");
    let mut other = ShardedBatches::new(sampler, BatchOptions::new(28)).expect("valid options");
    other.set_epoch(1);
    lines.push(Record::Begin(begin_of(STEPS, 2, &other)));
    for (step, plan) in (STEPS + 1..).zip(other.take(2)) {
        lines.push(Record::Step(step_of(step, &plan)));
    }
    let audit = lines.read();
    assert_eq!(audit.faults, []);
    let used: Vec<_> = audit.epochs.iter().map(|epoch| epoch.once).collect();
    assert_eq!(used, [50, 50]);
}

#[test]
fn padding_and_dropped_samples_are_counted() {
    let count = |drop_last, padding| {
        let options = SamplerOptions {
            len: LEN,
            shards: 4,
            drop_last,
            ..SamplerOptions::default()
        };
        let batches = batches_of(options, padding);
        let mut lines = Lines::new();
        lines.push(Record::Begin(begin_of(0, 2, &batches)));
        for (step, plan) in (1..=batches.steps_per_epoch()).zip(batches) {
            lines.push(Record::Step(step_of(step, &plan)));
        }
        let audit = lines.read();
        assert_eq!(audit.faults, []);
        let [
            Epoch {
                once,
                repeated,
                unused,
                is_finished: true,
                ..
            },
        ] = audit.epochs[..]
        else {
            panic!("{:?}", audit.epochs);
        };
        (once, repeated, unused)
    };
    assert_eq!(count(false, Padding::None), (50, 0, 0));
    assert_eq!(count(false, Padding::Torch), (48, 2, 0));
    assert_eq!(count(true, Padding::None), (40, 0, 10));
}

#[test]
fn lines_that_are_no_records_are_named_without_reading_them_whole() {
    let mut lines = one_epoch().lines;
    lines.insert(2, "{}\n".into());
    let faults = read(lines.concat().as_bytes()).expect("memory").faults;
    assert!(
        matches!(&faults[..], [Fault::Changed { line: 3, .. }, ..]),
        "{faults:?}"
    );
    lines[2] = "x".repeat(LINE_BYTES_MAX as usize + 1);
    check(
        &lines,
        &[&format!("line 3 has more than {LINE_BYTES_MAX} bytes")],
    );
    let endless = std::io::BufReader::new(std::io::repeat(b'\n'));
    let faults = read(endless).expect("memory").faults;
    assert_eq!(faults.len(), 20, "reading ends");
}

#[test]
fn a_torn_last_line_is_told_and_the_next_process_removes_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut text = Lines::new().process(0, 4, 2).lines.concat();
    text.truncate(text.len() - 30);
    std::fs::write(path(folder.path()), &text).expect("a file");
    let torn = audit(folder.path()).expect("readable");
    assert_eq!((torn.faults.as_slice(), torn.steps), (&[][..], 3));
    assert!(torn.torn_bytes > 0);

    let mut ledger = Ledger::open(folder.path(), SystemTime::now()).expect("open");
    let dropped_bytes = ledger.lines.take_dropped_bytes();
    assert_eq!(dropped_bytes, torn.torn_bytes);
    let begin = Begin {
        dropped_bytes,
        ..begin_of(3, 1, &batches(7))
    };
    let mut append = |record| {
        let appended = ledger.lines.append(SystemTime::now(), record);
        appended.expect("written");
    };
    append(Record::Begin(begin));
    for (step, plan) in (1..=STEPS).zip(batches(7)).skip(3) {
        append(Record::Step(step_of(step, &plan)));
    }
    let whole = audit(folder.path()).expect("readable");
    assert_eq!((whole.faults.as_slice(), whole.steps), (&[][..], STEPS));
    assert_eq!(
        (whole.torn_bytes, whole.attempts[1].begin.dropped_bytes),
        (0, dropped_bytes)
    );
}

#[test]
fn a_rank_that_becomes_the_first_records_what_the_lost_ones_had_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let plans: Vec<StepPlan> = batches(7).take(4).collect();
    let committed = |step: u64, generation| {
        let plan = &plans[step as usize - 1];
        let begin = begin_of(step - 1, 3, &batches(7));
        Committed {
            terms: Terms {
                seed: begin.seed,
                layout: begin.layout,
                generation,
                world: 3 - generation as usize,
                owners: vec![(generation as usize, 0)],
                why: None,
            },
            step: Step {
                generation,
                ..step_of(step, plan)
            },
            goes_back: false,
        }
    };
    let open = || Ledger::open(folder.path(), UNIX_EPOCH).expect("open");
    let mut first = open();
    for step in 1..=3 {
        first.record(&committed(step, 0)).expect("written");
    }
    // The next rank 0 was lost before it recorded step 4.
    let mut last = open();
    for unwritten in [committed(3, 0), committed(4, 1)] {
        assert_eq!(last.lacks(&unwritten), unwritten.step.step == 4);
        if last.lacks(&unwritten) {
            last.record(&unwritten).expect("written");
        }
    }
    // It repeats a step that only the lost rank had completed.
    last.record(&committed(4, 2)).expect("written");
    let whole = audit(folder.path()).expect("readable");
    assert_eq!((whole.faults.as_slice(), whole.steps), (&[][..], 4));
    let begins = whole.attempts.iter().map(|attempt| &attempt.begin);
    let begins: Vec<_> = begins.map(|b| (b.cause, b.step, b.generation)).collect();
    assert_eq!(
        begins,
        [
            (Cause::Start, 0, 0),
            (Cause::Change, 3, 1),
            (Cause::Change, 3, 2),
        ]
    );
}

#[test]
fn a_ledger_whose_last_record_is_damaged_is_not_continued() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut text = one_epoch().lines.concat();
    text.push_str("another program's\n");
    std::fs::write(path(folder.path()), &text).expect("a file");
    let error = Ledger::open(folder.path(), SystemTime::now()).expect_err("damaged");
    assert!(
        error.to_string().contains("its last record is damaged"),
        "{error}"
    );
    let kept = std::fs::read_to_string(path(folder.path())).expect("readable");
    assert_eq!(kept, text);
}

#[test]
fn a_ledger_that_ends_before_the_newest_checkpoint_lost_its_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |to| {
        let mut file = File::create(path(folder.path())).expect("a file");
        let lines = Lines::new().process(0, to, 2).lines;
        file.write_all(lines.concat().as_bytes()).expect("written");
        audit(folder.path()).expect("readable").faults
    };
    std::fs::create_dir(folder.path().join("step-0000000004")).expect("a folder");
    assert_eq!(write(4), []);
    let [fault] = &write(3)[..] else {
        panic!("one fault");
    };
    let expected = "the last recorded step is 3, but there is a checkpoint of step 4";
    assert_eq!(fault.to_string(), expected);
}

#[test]
fn ten_thousand_ranks_fit_the_ledger_and_a_step_of_theirs_takes_no_more_room() {
    const RANKS: usize = 10_000;
    let options = SamplerOptions {
        len: 4 * RANKS,
        shards: RANKS,
        ..SamplerOptions::default()
    };
    let sampler = DistributedSampler::new(options).expect("valid options");
    let batches =
        ShardedBatches::new(sampler, BatchOptions::new(2 * RANKS)).expect("valid options");
    let mut lines = Lines::new();
    // Half of the ranks are lost after the first step.
    for (from, world) in [(0, RANKS), (1, RANKS / 2)] {
        lines.push(Record::Begin(begin_of(from, world, &batches)));
        let plans = (1..=from + 1).zip(batches.clone()).skip(from as usize);
        for (step, plan) in plans {
            lines.push(Record::Step(step_of(step, &plan)));
        }
    }
    let longest = lines.lines.iter().map(String::len).max();
    assert!(longest.is_some_and(|longest| (longest as u64) < LINE_BYTES_MAX / 8));
    assert!(lines.lines[1].len() < 400, "{}", lines.lines[1]);
    let audit = lines.read();
    assert_eq!((audit.faults.as_slice(), audit.steps), (&[][..], 2));
    assert_eq!(audit.epochs[0].once, 4 * RANKS);
}
