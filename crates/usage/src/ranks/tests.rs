//! Recorded processes over time, and a real one.

use std::io::Read;
use std::process::{Command, Stdio};

use paceline_gpu::host::recorded::Recorded;

use super::*;

/// A process: number, parent, group, start, ticks of its own and of its children, pages.
#[derive(Clone, Copy)]
struct Process {
    pid: u32,
    parent: u32,
    group: u32,
    started: u64,
    own: u64,
    children: u64,
    pages: u64,
}

const RANK: Process = Process {
    pid: 100,
    parent: 50,
    group: 100,
    started: 7,
    own: 20,
    children: 0,
    pages: 10,
};

fn child(pid: u32, parent: u32, own: u64) -> Process {
    Process {
        pid,
        parent,
        own,
        ..RANK
    }
}

struct Machine {
    recorded: Recorded,
    ranks: Ranks,
    seconds: u64,
}

impl Machine {
    fn new() -> Self {
        let recorded = Recorded::new(&[("/proc/uptime", "100.00 1.00\n")]);
        let ranks = Ranks::below(recorded.host().path("/"));
        Self {
            recorded,
            ranks,
            seconds: 0,
        }
    }

    /// One second on: these processes are there now, and no others.
    fn with(&mut self, processes: &[Process]) -> &mut Self {
        let folder = self.recorded.host().path("/proc");
        for entry in std::fs::read_dir(&folder).expect("a folder").flatten() {
            if entry.path().is_dir() {
                std::fs::remove_dir_all(entry.path()).expect("removed");
            }
        }
        for process in processes {
            let Process {
                pid,
                parent,
                group,
                started,
                own,
                children,
                pages,
            } = process;
            let folder = folder.join(pid.to_string());
            std::fs::create_dir_all(&folder).expect("made");
            let line = format!(
                "{pid} (a b) R {parent} {group} {group} 0 -1 0 0 0 0 0 {own} 0 {children} 0 20 0 1 0 {started} 0 {pages}\n"
            );
            std::fs::write(folder.join("stat"), line).expect("written");
        }
        self.seconds += 1;
        self
    }

    /// Process, ticks and pages of rank 3, whose process is `pid`.
    fn check(&mut self, pid: u32, expect: (Option<u32>, u64, u64)) {
        let at = Duration::from_secs(self.seconds);
        let samples = self.ranks.sample(&[(3, pid)], at);
        let [sample] = &samples[..] else {
            panic!("{samples:?}");
        };
        let units = self.ranks.units;
        let ticks = sample.cpu.known().expect("time").as_nanos() as u64 / units.tick_ns;
        let pages = sample.resident_bytes.known().expect("memory") / units.page_bytes;
        assert_eq!(
            (sample.rank, sample.pid, ticks, pages),
            (3, expect.0, expect.1, expect.2)
        );
    }
}

#[test]
fn a_rank_is_its_process_and_all_that_it_started() {
    let mut machine = Machine::new();
    let all = [
        RANK,
        child(101, 100, 5),
        child(102, 101, 3),
        Process {
            group: 7,
            ..child(90, 102, 1)
        },
        Process {
            group: 50,
            ..child(200, 50, 1000)
        },
        Process {
            group: 1,
            ..child(201, 200, 1000)
        },
    ];
    machine.with(&all).check(100, (Some(100), 29, 40));
}

#[test]
fn what_lost_its_parent_stays_with_the_rank_that_leads_its_group() {
    let mut machine = Machine::new();
    machine.with(&[
        RANK,
        child(101, 100, 5),
        Process {
            group: 8,
            ..child(102, 101, 3)
        },
    ]);
    machine.check(100, (Some(100), 28, 30));
    // The process in between ended, and its child belongs to process 1 now. One that nobody saw in time is led by the rank.
    machine.with(&[
        RANK,
        Process {
            group: 8,
            ..child(102, 1, 4)
        },
        child(103, 1, 2),
    ]);
    machine.check(100, (Some(100), 20 + 5 + 4 + 2, 30));
}

#[test]
fn time_of_children_that_ended_is_counted_once() {
    let mut machine = Machine::new();
    machine
        .with(&[RANK, child(101, 100, 50)])
        .check(100, (Some(100), 70, 20));
    // It ended at 60 ticks, and the rank waited for it.
    let waited = Process {
        children: 60,
        ..RANK
    };
    machine.with(&[waited]).check(100, (Some(100), 80, 10));
    // Another that nobody saw.
    let waited = Process {
        children: 75,
        ..RANK
    };
    machine.with(&[waited]).check(100, (Some(100), 95, 10));
}

#[test]
fn time_of_children_that_nobody_waited_for_is_kept() {
    let mut machine = Machine::new();
    machine.with(&[RANK, child(101, 100, 50), child(102, 101, 30)]);
    machine.check(100, (Some(100), 100, 30));
    machine.with(&[RANK]).check(100, (Some(100), 100, 10));
    // Later time comes on top.
    let later = Process { own: 25, ..RANK };
    machine.with(&[later]).check(100, (Some(100), 105, 10));
}

#[test]
fn a_number_that_is_used_again_is_another_process() {
    let mut machine = Machine::new();
    machine
        .with(&[RANK, child(101, 100, 50)])
        .check(100, (Some(100), 70, 20));
    let other = Process {
        started: 9,
        group: 1,
        ..child(101, 1, 1000)
    };
    machine.with(&[RANK, other]).check(100, (Some(100), 70, 10));
    machine.with(&[RANK, other]).check(100, (Some(100), 70, 10));
    let reused = Process { started: 9, ..RANK };
    machine.with(&[reused]).check(100, (None, 70, 0));
}

#[test]
fn a_rank_that_ended_keeps_its_time_and_a_new_process_begins_anew() {
    let mut machine = Machine::new();
    machine.with(&[RANK]).check(100, (Some(100), 20, 10));
    machine.with(&[]).check(100, (None, 20, 0));
    let next = Process {
        pid: 300,
        group: 300,
        own: 4,
        ..RANK
    };
    machine.with(&[next]).check(300, (Some(300), 4, 10));
}

#[test]
fn ranks_come_in_order_and_each_has_its_own() {
    let mut machine = Machine::new();
    let second = Process {
        pid: 110,
        parent: 100,
        group: 110,
        own: 1,
        ..RANK
    };
    machine.with(&[
        RANK,
        second,
        child(101, 100, 2),
        Process {
            group: 110,
            ..child(111, 110, 4)
        },
    ]);
    let pids = [(8, 110), (7, 100), (9, 999)];
    let samples = machine.ranks.sample(&pids, Duration::ZERO);
    let ticks: Vec<(u32, Option<u32>, Option<u128>)> = samples
        .iter()
        .map(|sample| {
            let ticks = sample
                .cpu
                .known()
                .map(|cpu| cpu.as_nanos() / u128::from(machine.ranks.units.tick_ns));
            (sample.rank, sample.pid, ticks)
        })
        .collect();
    assert_eq!(
        ticks,
        [
            (7, Some(100), Some(22)),
            (8, Some(110), Some(5)),
            (9, None, None)
        ]
    );
    assert_eq!(machine.ranks.sample(&[], Duration::ZERO), []);
}

#[test]
fn new_processes_are_looked_for_once_a_second() {
    let mut machine = Machine::new();
    machine.with(&[RANK]).check(100, (Some(100), 20, 10));
    machine.with(&[RANK, child(101, 100, 5)]);
    let ticks = |samples: &[RankSample], units: Units| {
        let cpu = samples[0].cpu.known().expect("time");
        cpu.as_nanos() / u128::from(units.tick_ns)
    };
    let units = machine.ranks.units;
    let soon = machine
        .ranks
        .sample(&[(3, 100)], Duration::from_millis(1900));
    assert_eq!(ticks(&soon, units), 20);
    let later = machine
        .ranks
        .sample(&[(3, 100)], Duration::from_millis(2000));
    assert_eq!(ticks(&later, units), 25);
}

/// A real process and its child, which work until they say so and then wait to be ended.
#[test]
fn real_processes_have_clocks() {
    let work = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done";
    let script = format!("({work}; echo; exec sleep 600) & {work}; echo; read x; kill $!; wait");
    let mut shell = Command::new("sh")
        .args(["-c", &script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a shell");
    let mut said = [0; 2];
    let stdout = shell.stdout.as_mut().expect("its output");
    stdout.read_exact(&mut said).expect("two lines");
    let mut ranks = Ranks::below("/");
    let pids = [(0, shell.id())];
    let first = ranks.sample(&pids, Duration::ZERO);
    assert_eq!(first[0].pid, Some(shell.id()));
    assert_eq!(ranks.ranks[&0].members().count(), 2);
    let used = *first[0].cpu.known().expect("time");
    assert!(used > Duration::ZERO);
    assert!(
        first[0]
            .resident_bytes
            .known()
            .is_some_and(|bytes| *bytes > 0)
    );
    // Between looks only clocks are read.
    let second = ranks.sample(&pids, Duration::from_millis(100));
    assert!(second[0].cpu.known().is_some_and(|cpu| *cpu >= used));

    drop(shell.stdin.take());
    shell.wait().expect("ended");
    let last = ranks.sample(&pids, Duration::from_millis(200));
    assert_eq!(last[0].pid, None);
    assert!(last[0].cpu.known().is_some_and(|cpu| *cpu >= used));
    assert_eq!(last[0].resident_bytes, 0.into());
}
