//! Random faults from a seed: any world, transport, operation, fault and moment.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::case::{Case, Fault, MOMENTS, Moment};
use super::ops::{KINDS, Op};
use super::rank::played;

const TEST: &str = "random::random_faults_in_a_row";
const SEED: u64 = 20_251;
/// Cases of an ordinary run: about half a minute.
const CASES: usize = 100;
/// Cases that are played at the same time: most of them wait.
const AT_ONCE: usize = 4;

/// SplitMix64: the same numbers from a seed in every build.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }
}

/// The `number`-th case of a seed, by itself: any of them can be played again alone.
fn case(seed: u64, number: usize) -> Case {
    let mut random = Random(seed ^ (number as u64).wrapping_mul(0xA076_1D64_78BD_642F));
    loop {
        let case = attempt(&mut random);
        if case.is_possible() {
            return case;
        }
    }
}

fn attempt(random: &mut Random) -> Case {
    let moment = random.of(&MOMENTS);
    let world = 2 + random.below(3);
    let kind = random.of(&KINDS);
    let len = match moment {
        Moment::InData => 200_000 + random.below(400_000),
        Moment::BetweenRounds => world * 16 * (500 + random.below(3000)),
        _ => 1 + random.below(20_000),
    };
    let op = Op::new(kind, len);
    let fault = random.of(&[
        Fault::Kill,
        Fault::Stop,
        Fault::Exit,
        Fault::Abort,
        Fault::Leave,
        Fault::Reset,
        Fault::Vanish,
        Fault::HoldOut,
        Fault::HoldIn,
        Fault::Flip,
        Fault::Cut,
        Fault::Stall,
        Fault::ResetLane,
        Fault::FlipGoodbye,
        Fault::Differ(Box::new(Op::new("all-reduce", len + 1))),
    ]);
    let victim = random.below(world);
    let case = Case {
        transport: random.of(&["shm", "tcp"]),
        world,
        victim,
        fault,
        moment,
        op: Op {
            root: random.below(world),
            ..op
        },
        before: random.below(5),
        pause: Duration::from_micros(random.below(20_000) as u64),
    };
    // Some have to have something to send where the fault is.
    match case.moment {
        Moment::InData => case.rooted(),
        _ => case,
    }
}

fn setting(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    let number = value.parse();
    Some(number.unwrap_or_else(|_| panic!("{name} is {value:?}, expected a number")))
}

#[test]
fn random_faults_in_a_row() {
    if played() {
        return;
    }
    let seed = setting("PACELINE_FAULTS_SEED").unwrap_or(SEED);
    if let Some(number) = setting("PACELINE_FAULTS_CASE") {
        let case = case(seed, number as usize);
        println!("seed {seed}, case {number}: {case}");
        case.play(TEST).unwrap();
        return;
    }
    let cases = setting("PACELINE_FAULTS").map_or(CASES, |cases| cases as usize);
    println!("seed {seed}, {cases} cases");
    let (started, next, wrong) = (Instant::now(), AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= cases {
                        return;
                    }
                    let case = case(seed, number);
                    if let Err(reason) = case.play(TEST) {
                        println!("seed {seed}, case {number}: {reason}");
                        wrong
                            .lock()
                            .unwrap()
                            .push(format!("case {number}: {reason}"));
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    println!(
        "{cases} cases in {:.0} s, {} wrong",
        started.elapsed().as_secs_f64(),
        wrong.len()
    );
    assert!(wrong.is_empty(), "seed {seed}:\n{}", wrong.join("\n"));
}
