//! Many agents in one thread with virtual time: messages take their time, nodes die, stop, are cut off and come back, ranks
//! fail, all drawn from one seed. After each step the invariants of `decide.rs` are checked.

mod ending;
mod faults;
mod growth;
mod invariants;
mod outside;
mod replacing;
mod scenarios;
mod schedules;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::{Duration, Instant};

use self::replacing::Seats;
use super::agent::Agent;
use super::decide::Rules;
use super::messages::{Answer, Command, Exit, Found, How, Input};
use super::record::{AgentId, Page, Ports, Record, Report, RoundId, State};
use crate::report::{Failure, FailureKind};
use crate::stop::Stop;

/// Longer than what happens in a scenario.
const WORK: Duration = ms(600_000);

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// As after SIGUSR1 to a launcher whose ranks are still at work.
const NOTICE: Stop = Stop {
    signal: 10,
    step: None,
};

/// Fifty agents take fewer in ten minutes; one that spins takes more.
const STEPS_MAX: usize = 3_000_000;

fn rules(nodes_min: usize, nodes_max: usize) -> Rules {
    Rules {
        nodes_min,
        nodes_max,
        max_restarts: 3,
        last_call: ms(1000),
        join_timeout: ms(60_000),
        close_timeout: ms(30_000),
        ready_timeout: ms(20_000),
        ..Rules::example()
    }
}

/// Numbers from a seed (SplitMix64).
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// A fault that strikes agents.
#[derive(Debug, Clone)]
enum Fault {
    /// The agent's process is killed; its machine answers for it.
    Kill(usize),
    /// The machine is gone without a word.
    PowerOff(usize),
    Stop(usize),
    Continue(usize),
    /// These are cut off from all others.
    CutOff(Vec<usize>),
    Heal,
    /// A rank of this node exits with this code; others may fail because of it.
    RankFails {
        node: usize,
        code: i32,
        victims: bool,
    },
    Signal(usize),
    /// The job is asked to stop, on this node; its ranks go on.
    Notice(usize),
    /// An agent is started on this host.
    Arrive {
        host: usize,
    },
    /// An agent is started on the endpoint's host, and hosts a new store there.
    Return,
    /// The store outside of the job is gone.
    StoreDown,
    /// And there again; or another one in its place, which knows nothing.
    StoreUp {
        empty: bool,
    },
    /// An agent has ended, and must not leave anything in a store outside of the job.
    Leave {
        node: usize,
        silent: Vec<AgentId>,
    },
}

#[derive(Debug, Clone)]
enum Event {
    Fault(Fault),
    Wake(usize, u64),
    Input(usize, Box<Input>),
    Request(usize, u64, String, Box<Request>),
    Timeout(usize, u64, String),
    /// The watch of a connection looks at the store.
    Look(usize, u64, String),
    RanksEnd(usize, u64, bool),
    RankFails(usize, u64, Box<Report>),
    Joins(usize, (RoundId, u32), usize),
    BeginHere(usize),
    Settled(usize, RoundId),
    Begin(RoundId),
}

#[derive(Debug, Clone)]
enum Request {
    Enter,
    Page(Page, bool, Duration),
    Publish(Option<Record>, Record),
    Forget(AgentId),
}

#[derive(Default)]
struct Store {
    /// Outside of the job, reached by all that are not cut off.
    host: Option<usize>,
    joined: i64,
    pages: BTreeMap<AgentId, Page>,
    record: Option<Record>,
}

struct Node {
    agent: Agent,
    host: String,
    /// How far its clock is ahead of the world's; nothing that is decided may depend on it.
    ahead: Duration,
    nproc: usize,
    /// Whether the process lives, and whether its machine does.
    alive: bool,
    powered: bool,
    stopped: bool,
    island: usize,
    missed: Vec<Input>,
    connection: u64,
    at: Option<String>,
    /// Whether the record was seen since this store was entered.
    has_record: bool,
    fifo: Duration,
    look_fifo: Duration,
    pending: BTreeSet<u64>,
    wake: u64,
    ranks: Option<Running>,
    /// How often it has started ranks that are to join the job.
    joins: u32,
    exit: Option<(Duration, Exit)>,
    notices: Vec<String>,
}

struct Running {
    record: Record,
    token: u64,
    failed: bool,
    /// The ranks that live, by their local numbers.
    slots: Vec<usize>,
    /// The round for which their generation has ended.
    waits_for: Option<RoundId>,
    seats: Seats,
    /// The newest invitation that they have followed.
    has_begun: RoundId,
    /// They go on although too few nodes have any.
    is_released: bool,
}

/// A started round and when each node joined in.
struct Started {
    record: Record,
    at: Vec<(usize, Duration)>,
}

struct World {
    now: Duration,
    dice: Dice,
    nodes: Vec<Node>,
    stores: BTreeMap<String, Store>,
    queue: BinaryHeap<Reverse<(Duration, u64, usize)>>,
    events: BTreeMap<usize, Event>,
    sequence: u64,
    rules: Rules,
    /// How long the ranks of a round work.
    work: Duration,
    started: BTreeMap<u64, Started>,
    first_failure: BTreeMap<u64, usize>,
    /// Whether some ranks take seconds to end.
    slow_ends: bool,
    /// Whether some ranks cannot go on without a lost one.
    some_are_unable: bool,
    /// How many of a hundred processes that are to join die, before they are ready and afterwards.
    newcomers_die: u64,
    /// Whether ranks admit others.
    admits: bool,
    /// Whether a store outside of the job is down.
    is_down: bool,
    /// The address of an agent ends with it, as a pod's.
    address_goes: bool,
    /// Ranks of each node, if they are all alike.
    nproc: Option<usize>,
    /// Whether the invariants are checked after each step.
    is_checked: bool,
    /// Time that all agents together took of the machine that simulates, and what they were given.
    thought: Duration,
    inputs: u64,
}

/// How a node finds a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Silent,
    Refused,
    Stopped,
    There,
}

impl World {
    /// `hosts[i]` is the host of agent `i`; the first has the endpoint. All come at the times given.
    fn new(seed: u64, rules: Rules, work: Duration, arrivals: &[(usize, Duration)]) -> Self {
        let mut world = Self {
            now: Duration::ZERO,
            dice: Dice(seed),
            nodes: Vec::new(),
            stores: BTreeMap::new(),
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            sequence: 0,
            rules,
            work,
            started: BTreeMap::new(),
            first_failure: BTreeMap::new(),
            slow_ends: false,
            some_are_unable: false,
            newcomers_die: 0,
            admits: true,
            is_down: false,
            address_goes: false,
            nproc: None,
            is_checked: true,
            thought: Duration::ZERO,
            inputs: 0,
        };
        for (host, at) in arrivals {
            world.at(*at, Event::Fault(Fault::Arrive { host: *host }));
        }
        world
    }

    fn fault(&mut self, at: Duration, fault: Fault) {
        self.at(at, Event::Fault(fault));
    }

    fn at(&mut self, at: Duration, event: Event) {
        self.sequence += 1;
        let key = self.sequence as usize;
        self.events.insert(key, event);
        self.queue
            .push(Reverse((at.max(self.now), self.sequence, key)));
    }

    fn after(&mut self, delay: Duration, event: Event) {
        self.at(self.now + delay, event);
    }

    /// Until all agents have ended, or the time is over.
    fn run(&mut self, until: Duration) {
        let mut steps = 0;
        while let Some(Reverse((at, _, key))) = self.queue.pop() {
            steps += 1;
            assert!(steps < STEPS_MAX, "an agent spins");
            if at > until {
                self.queue.push(Reverse((at, key as u64, key)));
                self.now = until;
                return;
            }
            self.now = at;
            if let Some(event) = self.events.remove(&key) {
                self.handle(event);
            }
        }
    }

    fn delay(&mut self) -> Duration {
        match self.dice.below(100) {
            0 => ms(20 + self.dice.below(300)),
            1..=10 => ms(2 + self.dice.below(20)),
            _ => Duration::from_micros(100 + self.dice.below(1500)),
        }
    }

    /// The time by the node's own clock.
    fn clock_of(&self, node: usize) -> Duration {
        self.now + self.nodes[node].ahead
    }

    fn reaches(&self, a: usize, b: usize) -> bool {
        self.nodes[a].island == self.nodes[b].island && self.nodes[b].powered
    }

    fn access(&self, node: usize, store: &str) -> Access {
        match self.stores.get(store).map(|store| store.host) {
            None => Access::Refused,
            Some(None) if self.nodes[node].island != 0 => Access::Silent,
            Some(None) if self.is_down => Access::Refused,
            Some(None) => Access::There,
            Some(Some(host)) if !self.reaches(node, host) => Access::Silent,
            Some(Some(host)) if !self.nodes[host].alive => Access::Refused,
            Some(Some(host)) if self.nodes[host].stopped => Access::Stopped,
            Some(Some(_)) => Access::There,
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Fault(fault) => self.inject(fault),
            Event::Wake(node, wake) => {
                if self.nodes[node].wake == wake && self.nodes[node].alive {
                    self.give(node, Input::Tick);
                }
            }
            Event::Input(node, input) => self.give(node, *input),
            Event::Request(node, id, store, request) => self.serve(node, id, store, *request),
            Event::Timeout(node, id, store) => {
                if self.nodes[node].pending.remove(&id) {
                    self.give(node, Input::Broken { store });
                }
            }
            Event::Look(node, connection, store) => self.look(node, connection, store),
            Event::Joins(node, attempt, slot) => self.joins(node, attempt, slot),
            Event::BeginHere(node) => self.begin_here(node),
            Event::Settled(node, round) => self.settled(node, round),
            Event::Begin(round) => self.begin(round),
            Event::RanksEnd(node, token, well) => self.ranks_end(node, token, well),
            Event::RankFails(node, token, report) => {
                let running = self.nodes[node].ranks.as_mut();
                if let Some(running) = running.filter(|r| r.token == token && !r.failed) {
                    running.failed = true;
                    let lost = report.failure.local_rank;
                    running.slots.retain(|slot| *slot != lost);
                    running.seats.invited.retain(|slot| *slot != lost);
                    running.seats.new.retain(|slot| *slot != lost);
                    running.seats.empty.push(lost);
                    let goes_on = self.rules.recovers_live && !running.slots.is_empty();
                    let number = running.record.id.number;
                    self.first_failure
                        .entry(number)
                        .or_insert(report.failure.rank);
                    self.give(node, Input::RankFailed(report));
                    if goes_on {
                        return;
                    }
                    let leaves = ms(500 + self.dice.below(1500));
                    self.after(leaves, Event::RanksEnd(node, token, false));
                }
            }
        }
    }

    fn give(&mut self, node: usize, input: Input) {
        let now = self.now;
        let target = &mut self.nodes[node];
        if !target.alive || target.exit.is_some() {
            return;
        }
        if target.stopped {
            target.missed.push(input);
            return;
        }
        let ahead = target.ahead;
        // The runtime itself ends the ranks that it has when a signal comes.
        let is_signal = matches!(input, Input::Signal(_));
        let ended = target.ranks.as_ref().filter(|_| is_signal);
        let ended = ended.map(|ranks| ranks.token);
        let started = Instant::now();
        let (commands, wake) = target.agent.on(now + ahead, [input]);
        self.thought += started.elapsed();
        self.inputs += 1;
        target.wake += 1;
        let token = target.wake;
        if let Some(ended) = ended {
            self.after(ms(50), Event::RanksEnd(node, ended, false));
        }
        if wake < Duration::MAX {
            // A process is never woken to the nanosecond.
            let wake = wake.saturating_sub(ahead);
            self.at(wake.max(now) + ms(1), Event::Wake(node, token));
        }
        for command in commands {
            self.obey(node, command);
        }
        if self.is_checked {
            invariants::check(self);
        }
    }

    fn obey(&mut self, node: usize, command: Command) {
        let delay = self.delay();
        match command {
            Command::Scan(stores) => self.scan(node, &stores),
            Command::Attach(store) => {
                self.nodes[node].connection += 1;
                self.nodes[node].pending.clear();
                self.nodes[node].at = Some(store);
                self.nodes[node].has_record = false;
                self.request(node, Request::Enter);
            }
            Command::Page { page, urgent } => {
                let sent = self.clock_of(node);
                let mut page = *page;
                page.sent_us = Some(sent.as_micros() as u64);
                self.request(node, Request::Page(page, urgent, sent));
            }
            Command::Publish { expected, new } => {
                let expected = expected.map(|record| *record);
                self.request(node, Request::Publish(expected, *new));
            }
            Command::Tell { store, page } => {
                if self.access(node, &store) == Access::There {
                    let place = self.stores.get_mut(&store).expect("it is there");
                    place.pages.insert(page.id, *page);
                }
            }
            Command::Forget(id) => self.request(node, Request::Forget(id)),
            Command::Regroup(record) => {
                let is_invitation = record.is_invitation();
                let is_able = is_invitation || !(self.some_are_unable && self.dice.chance(5));
                let Some(running) = &mut self.nodes[node].ranks else {
                    // They have ended, and the agent is about to hear of it.
                    return;
                };
                if !is_invitation {
                    running.waits_for = Some(record.id);
                    running.take_back();
                }
                let answer = Input::Regrouped {
                    round: record.id,
                    slots: is_able.then(|| running.slots.clone()),
                };
                let takes = ms(self.dice.below(5));
                self.after(takes, Event::Input(node, Box::new(answer)));
            }
            Command::Open(round) => {
                let ports = Ports {
                    master: 1,
                    store: 2,
                };
                self.after(
                    ms(1),
                    Event::Input(node, Box::new(Input::Opened(round, ports))),
                );
            }
            Command::Start(record) => self.start(node, *record),
            Command::Join(record, _) => self.join(node, *record),
            Command::Release => {
                if let Some(running) = &mut self.nodes[node].ranks {
                    running.is_released = true;
                }
            }
            Command::Begin => self.after(ms(1), Event::BeginHere(node)),
            Command::EndRanks(how) => {
                let Some(token) = self.nodes[node].ranks.as_ref().map(|ranks| ranks.token) else {
                    // They have ended, and the agent is about to hear of it.
                    return;
                };
                let takes = match how {
                    How::Kill => ms(1 + self.dice.below(5)),
                    How::Save | How::Next | How::Over if self.slow_ends && self.dice.chance(5) => {
                        ms(self.dice.below(10_000))
                    }
                    How::Save | How::Next | How::Over => ms(5 + self.dice.below(200)),
                };
                self.after(takes, Event::RanksEnd(node, token, false));
            }
            Command::Notice(text) => self.nodes[node].notices.push(text),
            Command::Exit(exit) => {
                assert!(
                    self.nodes[node].ranks.is_none(),
                    "node {node} leaves ranks behind"
                );
                self.nodes[node].exit = Some((self.now, exit));
                // What it has said last still goes out.
                let target = &self.nodes[node];
                let silent = target.agent.silent(self.now + target.ahead);
                let leaves = (self.now + delay + ms(50)).max(target.fifo + ms(1));
                self.at(leaves, Event::Fault(Fault::Leave { node, silent }));
            }
        }
    }

    fn start(&mut self, node: usize, record: Record) {
        let going_on = self.nodes[node].ranks.take();
        if record.continues.is_some() && going_on.is_none() {
            // They have ended, and the agent is about to hear of it.
            return;
        }
        invariants::check_start(self, node, &record);
        invariants::check_going_on(node, going_on.as_ref(), &record);
        let place = record.position(self.nodes[node].agent.id());
        let own = place.map(|place| &record.members[place]);
        let slots = own.map(|own| own.slots.clone()).unwrap_or_default();
        let token = self.dice.next();
        let started = self.started.entry(record.id.number).or_insert(Started {
            record: record.clone(),
            at: Vec::new(),
        });
        started.at.push((node, self.now));
        let (slots, seats) = match going_on {
            Some(running) if record.is_invitation() => return self.invite(node, running, record),
            Some(going_on) => (going_on.slots, going_on.seats),
            None => (slots, Seats::default()),
        };
        self.nodes[node].ranks = Some(Running {
            has_begun: record.id,
            record,
            token,
            failed: false,
            slots,
            waits_for: None,
            seats,
            is_released: false,
        });
        let work = self.work + ms(self.dice.below(300));
        self.after(work, Event::RanksEnd(node, token, true));
        self.tell_places(node);
    }

    /// Ranks end well only together: while one is missing the others wait for it.
    fn ranks_end(&mut self, node: usize, token: u64, well: bool) {
        let Some(running) = &self.nodes[node].ranks else {
            return;
        };
        if running.token != token || !self.nodes[node].alive {
            return;
        }
        let record = &running.record;
        let is_whole = record.members.iter().all(|member| {
            let peer = self
                .nodes
                .iter()
                .position(|node| node.agent.id() == member.id);
            peer.is_some_and(|peer| {
                let other = &self.nodes[peer];
                match &other.ranks {
                    Some(ranks) => {
                        ranks.record.id == record.id
                            && !ranks.failed
                            && ranks.waits_for.is_none()
                            && self.reaches(node, peer)
                    }
                    // It may have said yes to an invitation before.
                    None => match other.agent.state() {
                        State::Done(round) => round.number >= record.id.number,
                        _ => false,
                    },
                }
            })
        });
        // Those that wait for more nodes do no step.
        let is_held = self.rules.is_short(record) && !running.is_released;
        if well && (running.failed || !is_whole || is_held) {
            if !running.failed {
                self.after(ms(700), Event::RanksEnd(node, token, true));
            }
            return;
        }
        self.nodes[node].ranks = None;
        let report = match self.nodes[node].agent.state() {
            State::Failed(_, report) => Some(report.clone()),
            _ => None,
        };
        self.give(node, Input::RanksEnded { well });
        if let Some(mut report) = report {
            report.failure.last_lines = vec!["the last line".into()];
            self.after(ms(10), Event::Input(node, Box::new(Input::Lines(report))));
        }
    }

    fn request(&mut self, node: usize, request: Request) {
        let Some(store) = self.nodes[node].at.clone() else {
            return;
        };
        self.sequence += 1;
        let id = self.sequence;
        self.nodes[node].pending.insert(id);
        let timeout = self.rules.lease / 3;
        self.after(timeout, Event::Timeout(node, id, store.clone()));
        // One connection keeps the order.
        let arrives =
            (self.now + self.delay()).max(self.nodes[node].fifo + Duration::from_micros(1));
        self.nodes[node].fifo = arrives;
        self.at(arrives, Event::Request(node, id, store, Box::new(request)));
    }

    fn serve(&mut self, node: usize, id: u64, store: String, request: Request) {
        match self.access(node, &store) {
            Access::Silent => return,
            Access::Refused => {
                if self.nodes[node].pending.remove(&id) {
                    self.give(node, Input::Broken { store });
                }
                return;
            }
            Access::Stopped => {
                // It lies in the socket until the host goes on.
                self.after(ms(100), Event::Request(node, id, store, Box::new(request)));
                return;
            }
            Access::There => {}
        }
        let place = self.stores.get_mut(&store).expect("it is there");
        let (answer, urgent) = match request {
            Request::Enter => {
                place.joined += 1;
                let joined = place.joined;
                let store = store.clone();
                (Some(Input::Attached { store, joined }), false)
            }
            Request::Page(page, urgent, sent) => {
                place.pages.insert(page.id, page);
                let store = store.clone();
                (Some(Input::Beaten { store, sent }), urgent)
            }
            Request::Publish(expected, new) => {
                if place.record == expected {
                    place.record = Some(new);
                }
                let store = store.clone();
                let answer = match place.record.clone() {
                    Some(record) => Input::Published { store, record },
                    None => Input::Broken { store },
                };
                (Some(answer), true)
            }
            Request::Forget(gone) => {
                place.pages.remove(&gone);
                (None, false)
            }
        };
        let entered = matches!(answer, Some(Input::Attached { .. }));
        let connection = self.nodes[node].connection;
        if entered {
            self.look(node, connection, store.clone());
        }
        if urgent {
            for watcher in 0..self.nodes.len() {
                if self.nodes[watcher].at.as_deref() == Some(&store) {
                    let (delay, connection) = (self.delay(), self.nodes[watcher].connection);
                    self.look_once(watcher, connection, &store, delay);
                }
            }
        }
        if self.access(node, &store) == Access::There
            && self.nodes[node].pending.remove(&id)
            && let Some(answer) = answer
        {
            let delay = self.delay();
            self.after(delay, Event::Input(node, Box::new(answer)));
        }
    }

    /// A look, and the next one after a beat.
    fn look(&mut self, node: usize, connection: u64, store: String) {
        let target = &self.nodes[node];
        if target.connection != connection || !target.alive {
            return;
        }
        let delay = self.delay();
        self.look_once(node, connection, &store, delay);
        let again = self.rules.beat_every();
        self.after(again, Event::Look(node, connection, store));
    }

    fn look_once(&mut self, node: usize, connection: u64, store: &str, delay: Duration) {
        let place = &self.stores[store];
        let is_there =
            self.access(node, store) == Access::There && self.nodes[node].connection == connection;
        if is_there && place.record.is_none() && self.nodes[node].has_record {
            let store = store.to_owned();
            self.after(delay, Event::Input(node, Box::new(Input::Broken { store })));
        } else if is_there && place.pages.contains_key(&self.nodes[node].agent.id()) {
            let arrives =
                (self.now + delay).max(self.nodes[node].look_fifo + Duration::from_micros(1));
            let look = Input::Look {
                store: store.to_owned(),
                at: arrives + self.nodes[node].ahead,
                record: place.record.clone(),
                pages: place.pages.values().cloned().collect(),
            };
            self.nodes[node].has_record |= place.record.is_some();
            self.nodes[node].look_fifo = arrives;
            self.at(arrives, Event::Input(node, Box::new(look)));
        }
    }

    fn scan(&mut self, node: usize, stores: &[String]) {
        let mut takes = self.delay();
        let mut found = Vec::new();
        for name in stores {
            let is_outside = self.rules.outage.is_some();
            let answer = match self.access(node, name) {
                Access::Refused if !is_outside => Answer::Refused,
                Access::There => {
                    let record = self.stores.get(name).and_then(|store| store.record.clone());
                    Answer::Store(record.map(Box::new))
                }
                _ => Answer::Silent(String::new()),
            };
            if matches!(answer, Answer::Silent(_)) {
                takes += self.rules.beat_every();
            }
            found.push(Found {
                store: name.clone(),
                answer,
            });
        }
        self.after(takes, Event::Input(node, Box::new(Input::Found(found))));
    }

    /// The newest round in which all members have ranks, and when its last began.
    fn whole_round(&self) -> Option<(&Record, Duration)> {
        let whole = |started: &&Started| {
            started.record.members.iter().all(|member| {
                self.nodes.iter().any(|node| {
                    let same = |ranks: &Running| ranks.record.id == started.record.id;
                    node.agent.id() == member.id && node.ranks.as_ref().is_some_and(same)
                })
            })
        };
        let started = self.started.values().rev().find(whole)?;
        let last = started.at.iter().map(|(_, at)| *at).max()?;
        Some((&started.record, last))
    }

    fn exits(&self) -> Vec<&Exit> {
        self.nodes
            .iter()
            .filter_map(|node| node.exit.as_ref().map(|(_, exit)| exit))
            .collect()
    }
}
