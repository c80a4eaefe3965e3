//! A job on several nodes: this node's agent, driven by real time, real stores and real ranks.

mod meeting;
mod words;

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_rendezvous::endpoint::with_port;
use paceline_rendezvous::env;
use paceline_rendezvous::net::join;
use paceline_rendezvous::nodes;
use paceline_rendezvous::page::Generation;
use paceline_rendezvous::store::Server;
use paceline_words::{Text, Word, count, say};

use self::meeting::{Meeting, serve};
use self::words::{describe, joins};
use crate::elastic::agent::Agent;
use crate::elastic::decide::Rules;
use crate::elastic::link::{Connection, Line, Mailbox, Request, Stores};
use crate::elastic::messages::{Command, Exit, Input, Order};
use crate::elastic::record::{
    AgentId, Complaint, Ending, Page, Phase, Places, Ports, Record, Report, RoundId, Why,
};
use crate::error::LaunchError;
use crate::job::{Cluster, Job, StoreKind};
use crate::notice;
use crate::output::TAIL_LINES;
use crate::report::{Failure, Lost, Node, Outcome, RankError};
use crate::round::{self, Launcher, NodePlace};
use crate::signals;
use crate::solo;
use crate::stop::{Asked, Meaning, Stop, meaning};
use crate::supervise::{Coordinator, Seen};
use crate::worker::{KILLED_ENDS_WITHIN, wait_readable};

/// How long a connection to another machine may take, and an answer from it.
const PROBE_WITHIN: Duration = Duration::from_secs(1);

/// Runs this node's part of the job until the job is over.
pub(crate) fn run(launcher: &Launcher<'_>, cluster: &Cluster) -> Result<Outcome, LaunchError> {
    let node_rank = cluster.place.as_ref().map(|place| place.node_rank);
    nodes::check(cluster.nodes_min, cluster.nodes_max, node_rank)?;
    let begun = Instant::now();
    let mut node = NodeAgent::start(launcher, cluster)?;
    let mut notes = Vec::new();
    let mut left_behind = Vec::new();
    loop {
        while let Some(signal) = launcher.signals.next() {
            // There are no ranks to pass it on to.
            if meaning(signal) != Meaning::Pass {
                node.give(Input::Signal(signal));
            }
        }
        node.pump();
        if let Some(record) = node.start.take() {
            let end = node.run_round(launcher, &record)?;
            notes.extend(end.notes);
            node.round_started = Some(end.started);
            if !end.left_behind.is_empty() {
                // Ranks would start beside what is left of the last ones.
                left_behind = end.left_behind;
                node.give(Input::Signal(libc::SIGKILL));
            }
        } else if let Some(exit) = node.exit.take() {
            let outcome = node.outcome(exit, launcher, begun, left_behind, notes);
            node.finish();
            return Ok(outcome);
        } else if node.start.is_none() {
            let wait = node.wake.saturating_sub(node.now());
            wait_readable(&[launcher.signals.as_fd(), node.line.mailbox.as_fd()], wait);
        }
    }
}

/// Whether launchers of the job with this token and run ID have come to the store at `endpoint`.
///
/// *Blocks*: at most two seconds.
///
/// *Errors*: the variable for TLS is wrong.
pub fn is_job_at(endpoint: &str, job: &Job) -> Result<bool, LaunchError> {
    let stores = Stores::Hosted {
        token: job.token.clone(),
        tls: env::asks_for_tls(&|name| job.variable(name))?,
        run_id: job.run_id.clone(),
    };
    Ok(stores.has_agents(&with_port(endpoint), PROBE_WITHIN))
}

/// The agent and what it acts through.
#[derive(Debug)]
struct NodeAgent<'a> {
    launcher: &'a Launcher<'a>,
    cluster: &'a Cluster,
    agent: Agent,
    line: Line,
    wake: Duration,
    connection: Option<Connection>,
    /// Threads of stores that were left, and of scans.
    threads: Vec<JoinHandle<()>>,
    /// The store that this agent hosts or keeps ready.
    standby: Option<Server>,
    /// The ranks' store of the round in which this node comes first.
    rank_store: Option<Server>,
    addr: String,
    /// Inputs of the runtime itself.
    own: VecDeque<Input>,
    start: Option<Box<Record>>,
    /// The number of the first rank, if the ranks that start are to join others.
    joins: Option<usize>,
    order: Option<Order>,
    /// Whether ranks run here.
    is_running: bool,
    /// The round for which the generation of the ranks ends.
    regrouping: RoundId,
    exit: Option<Exit>,
    /// The complaints of ranks that were passed on, and what was of the places of lost ones.
    complaints: Vec<Complaint>,
    places: Places,
    /// The generation that the ranks are invited to, and its round.
    invited: Option<(u32, RoundId)>,
    /// Whether the supervisor's failure was passed on, and the last request that was.
    heard_failure: bool,
    heard: Option<Asked>,
    /// How the last round was stopped here, if it was.
    stop: Option<Stop>,
    /// The failure of a rank here after it was asked to stop.
    own_failure: Option<Failure>,
    /// Since when the last change of rounds is known.
    changed: Option<(RoundId, Instant)>,
    /// Since when the last round of ranks has run here.
    round_started: Option<Instant>,
    rounds: u32,
    restarts: u32,
    world: usize,
}

impl<'a> NodeAgent<'a> {
    fn start(launcher: &'a Launcher<'a>, cluster: &'a Cluster) -> Result<Self, LaunchError> {
        let job = launcher.job;
        let meeting = match cluster.store {
            StoreKind::Hosted => Meeting::hosted(launcher, cluster)?,
            StoreKind::Etcd => Meeting::etcd(job, cluster)?,
        };
        let addr = meeting.addr;
        let rules = rules(job, cluster);
        let mailbox = Arc::new(Mailbox::new().map_err(LaunchError::system("eventfd"))?);
        let id = AgentId(RandomState::new().hash_one(std::process::id()));
        let line = Line {
            stores: meeting.stores,
            me: id,
            beat: rules.beat_every(),
            clock: Instant::now(),
            mailbox,
        };
        let page = Page {
            host: cluster.host.clone(),
            addr: addr.clone(),
            standby: meeting.standby,
            nproc: job.nproc,
            node_rank: cluster.place.as_ref().map(|place| place.node_rank),
            ..Page::new(id)
        };
        Ok(Self {
            launcher,
            cluster,
            agent: Agent::new(rules, page, meeting.endpoint, Duration::ZERO),
            line,
            wake: Duration::ZERO,
            connection: None,
            threads: Vec::new(),
            standby: meeting.server,
            rank_store: None,
            addr,
            own: VecDeque::new(),
            start: None,
            joins: None,
            order: None,
            is_running: false,
            regrouping: RoundId::default(),
            exit: None,
            complaints: Vec::new(),
            places: Places::default(),
            invited: None,
            heard_failure: false,
            heard: None,
            stop: None,
            own_failure: None,
            changed: None,
            round_started: None,
            rounds: 0,
            restarts: 0,
            world: 0,
        })
    }

    fn now(&self) -> Duration {
        self.line.clock.elapsed()
    }

    fn give(&mut self, input: Input) {
        self.own.push_back(input);
    }

    /// Takes all that has happened, and the time.
    fn pump(&mut self) {
        let mut inputs = std::mem::take(&mut self.own);
        inputs.extend(self.line.mailbox.take());
        if inputs.is_empty() && self.now() >= self.wake {
            inputs.push_back(Input::Tick);
        }
        while !inputs.is_empty() {
            let now = self.now();
            let (commands, wake) = self.agent.on(now, inputs.drain(..));
            self.wake = wake;
            self.note_change();
            for command in commands {
                self.obey(command);
            }
            inputs.append(&mut self.own);
        }
    }

    /// Remembers when a change of rounds was first known, for the notice that says how long it took.
    fn note_change(&mut self) {
        let Some(id) = self.agent.memory().map(|record| record.id) else {
            return;
        };
        if self.changed.is_none_or(|(known, _)| known != id) {
            self.changed = Some((id, Instant::now()));
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Scan(stores) => {
                let line = self.line.clone();
                if !self.spawn("agent/scan", move || line.scan(stores)) {
                    self.give(Input::Found(Vec::new()));
                }
            }
            Command::Tell { store, page } => {
                let line = self.line.clone();
                self.spawn("agent/tell", move || line.tell(&store, &page));
            }
            Command::Attach(store) => {
                self.leave();
                match Connection::open(&self.line, &store) {
                    Ok(connection) => self.connection = Some(connection),
                    Err(_) => self.give(Input::Broken { store }),
                }
            }
            Command::Page { page, urgent } => self.send(Request::Page { page, urgent }),
            Command::Publish { expected, new } => self.send(Request::Publish { expected, new }),
            Command::Forget(id) => self.send(Request::Forget(id)),
            Command::Regroup(record) => {
                self.regrouping = record.id;
                let culprit = match &record.why {
                    Why::Failure(report) => Some(report.failure.rank),
                    Why::Hung(complaint) => Some(complaint.of),
                    _ => None,
                };
                self.order = Some(match record.is_invitation() {
                    true => Order::Stay,
                    false => Order::Regroup(culprit),
                });
            }
            Command::Open(round) => match self.open_ports() {
                Ok(ports) => self.give(Input::Opened(round, ports)),
                Err(error) => {
                    notice::line(&error);
                    self.give(Input::Signal(libc::SIGKILL));
                }
            },
            Command::Start(record) if record.continues.is_some() => {
                // Ranks that have all ended meanwhile do not go on, as the agent is about to hear.
                if self.is_running {
                    self.heard_failure = false;
                    // They are told anew in this round.
                    self.complaints.clear();
                    self.places = Places::default();
                    let is_awaited = record.is_invitation() && record.has_newcomers();
                    self.invited = is_awaited.then(|| (record.generation(), record.id));
                    self.order = Some(self.go_on(&record));
                }
            }
            Command::Start(record) => (self.start, self.joins) = (Some(record), None),
            Command::Join(record, first) => {
                (self.start, self.joins) = (Some(record), Some(first));
            }
            Command::Begin => {
                self.order.get_or_insert(Order::Begin);
            }
            Command::Release => {
                self.order.get_or_insert(Order::Release);
            }
            Command::EndRanks(how) => {
                // Between the command to start and the start nothing runs.
                if self.start.take().is_some() {
                    self.give(Input::RanksEnded { well: false });
                } else {
                    self.order = Some(Order::End(how));
                }
            }
            Command::Notice(text) => notice::line(&text),
            Command::Exit(exit) => self.exit = Some(exit),
        }
    }

    fn send(&self, request: Request) {
        if let Some(connection) = &self.connection {
            connection.send(request);
        }
    }

    /// Starts a thread that ends by itself; it is joined later. Whether it could be started.
    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> bool {
        self.join_finished();
        let thread = std::thread::Builder::new().name(name.into()).spawn(run);
        thread.map(|thread| self.threads.push(thread)).is_ok()
    }

    fn leave(&mut self) {
        if let Some(mut connection) = self.connection.take() {
            self.threads.extend(connection.close());
        }
    }

    fn join_finished(&mut self) {
        let (done, running) = std::mem::take(&mut self.threads)
            .into_iter()
            .partition(JoinHandle::is_finished);
        self.threads = running;
        join_all(done);
    }

    /// A store for the ranks, and a port for the program itself. While ranks run the store stays, because they may be using
    /// it; ranks that start get a new one.
    fn open_ports(&mut self) -> Result<Ports, LaunchError> {
        let server = match self.rank_store.take().filter(|_| self.is_running) {
            Some(server) => server,
            None => serve(self.launcher, &self.addr)?,
        };
        let store = server.addr().port();
        self.rank_store = Some(server);
        let master = match &self.cluster.place {
            Some(place) => place.master_port,
            None => solo::free_port().map_err(LaunchError::system("finding a free port"))?,
        };
        Ok(Ports { master, store })
    }

    fn run_round(
        &mut self,
        launcher: &Launcher<'_>,
        record: &Record,
    ) -> Result<round::RoundEnd, LaunchError> {
        let place = match self.joins {
            Some(first) => self.place_to_join(record, first),
            None => self.place_in(record),
        };
        self.heard_failure = false;
        self.heard = None;
        self.stop = None;
        self.order = None;
        self.complaints.clear();
        self.places = Places::default();
        self.invited = None;
        self.restarts = record.restarts;
        self.world = record.world();
        let changed = self.changed.map_or_else(Instant::now, |(_, at)| at);
        let (max_restarts, lang) = (self.launcher.job.max_restarts, self.launcher.job.lang);
        let (is_first, joins) = (self.rounds == 0, place.joins);
        let is_outside = self.cluster.store == StoreKind::Etcd;
        if let Some(rank) = launcher.job.stdin
            && is_first
            && place.node_rank == 0
            && rank >= place.world
        {
            let line = say!(
                lang,
                "warning: the job has no rank {rank}, so no rank reads standard input",
                "경고: 작업에 랭크 {rank}번이 없어 표준 입력을 읽는 랭크가 없음"
            );
            notice::line(&line);
        }
        self.rounds += 1;
        let notice = || {
            if let Some(what) = describe(record, is_outside, lang)
                && !is_first
                && !joins
            {
                match &record.why {
                    Why::Failure(_) => {
                        solo::notice(&what, (record.restarts, max_restarts), changed, lang);
                    }
                    _ => {
                        let round = record.id.number;
                        let nodes = count(lang, record.members.len(), "node", "노드");
                        let seconds = changed.elapsed().as_secs_f64();
                        let took = say!(
                            lang,
                            "round {round} with {nodes} took {seconds:.3} s",
                            "{nodes}로 라운드 {round} 시작에 {seconds:.3}초 걸림"
                        );
                        notice::line(format_args!("{what}; {took}"));
                    }
                }
            }
        };
        self.is_running = true;
        let end = round::run(launcher, &place, self, notice);
        self.is_running = false;
        let end = end?;
        // A signal that came in the last moment.
        self.hear(end.asked);
        if let Some(stop) = end.stop {
            self.stop = Some(stop);
            self.give(Input::Stop(stop));
        }
        if end.asked.is_some() {
            self.own_failure.clone_from(&end.failure);
        }
        self.give(Input::RanksEnded { well: end.is_well });
        if let Some(failure) = &end.failure {
            let at_us = self.at_us(end.started, failure);
            let report = report(failure, at_us);
            self.give(Input::Lines(Box::new(report)));
        }
        Ok(end)
    }

    /// Tells the agent what people ask for: that the job stops, or that this node leaves it.
    fn hear(&mut self, asked: Option<Asked>) {
        let Some(asked) = asked.filter(|asked| self.heard != Some(*asked)) else {
            return;
        };
        self.heard = Some(asked);
        let signal = asked.signal;
        self.give(if asked.is_ending() {
            Input::Signal(signal)
        } else {
            Input::Stop(Stop { signal, step: None })
        });
    }

    /// When a rank failed, by this agent's clock.
    fn at_us(&self, started: Instant, failure: &Failure) -> u64 {
        let at = (started + failure.after).saturating_duration_since(self.line.clock);
        u64::try_from(at.as_micros()).unwrap_or(u64::MAX)
    }

    /// This node in the newest round.
    fn node(&self) -> Option<Node> {
        Some(Node {
            rank: self.agent.memory()?.position(self.agent.id())?,
            host: self.cluster.host.clone(),
        })
    }

    /// The generation of ranks that a round is, on this node.
    fn go_on(&self, record: &Record) -> Order {
        let place = self.place_in(record);
        let slots = record.members.get(place.node_rank);
        let is_held = record.members.len() < self.cluster.nodes_min;
        let next = Generation {
            number: record.generation(),
            world: record.world(),
            first: record.first_rank(place.node_rank),
            members: slots.map(|member| member.slots.clone()).unwrap_or_default(),
            store: Some(place.store),
            is_held,
        };
        if record.is_invitation() {
            return Order::Invite {
                next: record.has_newcomers().then_some(next),
                replacements: slots.map_or(0, |member| member.replacements),
                incidents: joins(record, is_held, self.launcher.job.lang),
            };
        }
        let is_outside = self.cluster.store == StoreKind::Etcd;
        let why = Text::new(|lang| match &record.why {
            Why::Failure(report) => report.failure.incident(lang),
            _ => describe(record, is_outside, lang).unwrap_or_default(),
        });
        Order::GoOn { next, why }
    }

    fn place_in(&self, record: &Record) -> NodePlace {
        let node_rank = record.position(self.agent.id()).unwrap_or(0);
        let ports = match record.phase {
            Phase::Running(ports) => ports,
            _ => Ports::default(),
        };
        let first = record.members.first();
        let first_addr = first.map_or("127.0.0.1", |member| &member.addr);
        let master_addr = match &self.cluster.place {
            Some(place) => place.master_addr.clone(),
            None => first_addr.to_owned(),
        };
        NodePlace {
            first_rank: record.members.get(node_rank).map_or(0, |own| own.first),
            world: record.world(),
            node_rank,
            node_count: record.members.len(),
            host: Some(self.cluster.host.clone()),
            master_addr,
            master_port: ports.master,
            store: join(first_addr, ports.store),
            restarts: record.restarts,
            replacements_max: 0,
            joins: false,
        }
    }

    /// The place of ranks that the others are to admit. They get their numbers in the job's generations when these do so.
    fn place_to_join(&self, record: &Record, first: usize) -> NodePlace {
        let node_count = record.members.len();
        NodePlace {
            first_rank: first,
            world: record.world().max(first + self.launcher.job.nproc),
            node_rank: node_count,
            node_count: node_count + 1,
            restarts: record.restarts_before,
            joins: true,
            ..self.place_in(record)
        }
    }

    fn outcome(
        &self,
        exit: Exit,
        launcher: &Launcher<'_>,
        begun: Instant,
        left_behind: Vec<u32>,
        notes: Vec<String>,
    ) -> Outcome {
        let (mut failure, mut stop, mut lost) = (None, None, None);
        match exit {
            Exit::Signal(signal) if left_behind.is_empty() => {
                if self.rounds == 0 {
                    let signal = signals::name(signal);
                    let line = say!(
                        launcher.job.lang,
                        "{signal}: stopped while it waited for the other nodes",
                        "{signal}: 다른 노드를 기다리는 동안 중단됨"
                    );
                    notice::line(&line);
                }
                let step = self.stop.and_then(|stop| stop.step);
                stop = Some(Stop { signal, step });
                failure.clone_from(&self.own_failure);
            }
            Exit::Signal(_) => {
                let why = Text::new(|lang| {
                    say!(
                        lang,
                        "processes of this node do not end, so it cannot go on",
                        "이 노드의 프로세스가 끝나지 않아 계속할 수 없음"
                    )
                });
                lost = Some(Lost::new(why, 1));
            }
            Exit::Job(Ending::Finished) => {}
            Exit::Job(Ending::Stopped(of_job)) => stop = Some(of_job),
            Exit::Job(Ending::Failed(report)) => {
                let world = self.agent.memory().map_or(self.world, Record::world);
                let mut of_job = of_job(report.failure, world);
                of_job.are_on_console &= of_job.node == self.node();
                failure = Some(of_job);
            }
            Exit::Job(Ending::Lost(why)) => lost = Some(Lost::new(why, 1)),
            Exit::Job(Ending::Misplaced(why) | Ending::Refused(why)) => {
                lost = Some(Lost::new(why, 2))
            }
            Exit::Job(Ending::TooFew(why)) => lost = Some(Lost::new(why, 4)),
        }
        // A spare reports a failure in a round that it took no part in.
        let round_started = self.round_started.or(self.changed.map(|(_, at)| at));
        let restarts = self.agent.memory().map_or(0, |record| record.restarts);
        Outcome {
            failure,
            stopped_by: stop.map(|stop| stop.signal),
            stopped_after: stop.and_then(|stop| stop.step),
            elapsed: begun.elapsed(),
            round_elapsed: round_started.unwrap_or(begun).elapsed(),
            plan: launcher.plan.clone(),
            left_behind,
            restarts,
            lost,
            notes,
        }
    }

    /// Says goodbye to the store, and ends all threads.
    fn finish(mut self) {
        self.send(Request::Close(self.agent.silent(self.now())));
        self.leave();
        if self.agent.is_host() {
            // No other agent is left to notice its silence, and its own watch ends with it. The writer still has to bring
            // the last page.
            let (writers, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.threads)
                .into_iter()
                .partition(|thread| thread.thread().name() == Some("agent/write"));
            join_all(writers);
            self.standby = None;
            join_all(rest);
        } else {
            join_all(std::mem::take(&mut self.threads));
        }
    }
}

/// The agent decides over the ranks while they run.
impl Coordinator for NodeAgent<'_> {
    fn news(&self) -> Option<BorrowedFd<'_>> {
        Some(self.line.mailbox.as_fd())
    }

    fn turn(&mut self, seen: &Seen) -> (Option<Order>, Option<Instant>) {
        self.hear(seen.asked);
        if self.complaints != seen.complaints {
            self.complaints.clone_from(&seen.complaints);
            self.give(Input::Complaints(seen.complaints.clone()));
        }
        if self.places != seen.places {
            self.places.clone_from(&seen.places);
            self.give(Input::Places(seen.places.clone()));
        }
        if let Some((_, round)) = (self.invited).take_if(|(number, _)| seen.generation >= *number) {
            self.give(Input::Begun(round));
        }
        let failure = seen.failure.as_ref().or(seen.lost.as_ref());
        if let (Some(failure), false) = (failure, self.heard_failure) {
            let started = seen.started.unwrap_or(self.line.clock);
            let mut report = report(failure, self.at_us(started, failure));
            report.recovers = seen.lost.is_some();
            self.heard_failure = true;
            self.give(Input::RankFailed(Box::new(report)));
        }
        self.pump();
        let wake = self.wake.min(self.now() + KILLED_ENDS_WITHIN);
        (self.order.take(), Some(self.line.clock + wake))
    }

    fn regrouped(&mut self, slots: Option<Vec<usize>>) {
        let round = self.regrouping;
        self.give(Input::Regrouped { round, slots });
    }
}

fn rules(job: &Job, cluster: &Cluster) -> Rules {
    Rules {
        nodes_min: cluster.nodes_min,
        nodes_max: cluster.nodes_max,
        is_static: cluster.place.is_some(),
        max_restarts: job.max_restarts,
        recovers_live: job.recovers_live(),
        lease: cluster.lease,
        last_call: cluster.last_call,
        join_timeout: cluster.join_timeout,
        close_timeout: cluster.close_timeout,
        ready_timeout: job.grace + KILLED_ENDS_WITHIN * 2 + cluster.lease,
        blamed_may_end: job.limits.blamed_may_end,
        notice_after: cluster.notice_after,
        endpoint_note: match &cluster.place {
            Some(place) if is_next_to(place.master_port, &cluster.endpoint) => {
                const NOTE: Word = Word::new(
                    " (one above --master-port)",
                    "(--master-port보다 1 큰 포트)",
                );
                NOTE.of(job.lang)
            }
            _ => "",
        },
        lang: job.lang,
        outage: (cluster.store == StoreKind::Etcd).then_some(cluster.outage.max(cluster.lease)),
    }
}

/// Whether the endpoint's port is the one after the program's.
fn is_next_to(master_port: u16, endpoint: &str) -> bool {
    let port = endpoint.rsplit_once(':').map(|(_, port)| port.parse());
    port == Some(Ok(u32::from(master_port) + 1))
}

fn join_all(threads: Vec<JoinHandle<()>>) {
    for thread in threads {
        // A thread that panicked has printed that; the job's end does not depend on it.
        let _ = thread.join();
    }
}

/// The failure for the other nodes.
fn report(failure: &Failure, at_us: u64) -> Report {
    // A path that is not text cannot travel as JSON.
    let text = |path: &PathBuf| PathBuf::from(path.to_string_lossy().into_owned());
    Report {
        failure: Failure {
            error: failure.error.clone().map(short),
            log: failure.log.as_ref().map(text),
            ..failure.clone()
        },
        at_us,
        is_later: false,
        recovers: false,
    }
}

/// As much of an error as a report shows: a look at the store has the pages of all nodes, and all may have failed.
fn short(mut error: RankError) -> RankError {
    let skipped = error.traceback.len().saturating_sub(TAIL_LINES);
    error.traceback.drain(..skipped);
    error
}

/// The failure as all nodes report it. Of `world` ranks, those that did not fail themselves ended because of it.
fn of_job(failure: Failure, world: usize) -> Failure {
    let failed =
        |rank: &usize| *rank == failure.rank || failure.also.iter().any(|also| also.rank == *rank);
    Failure {
        victims: (0..world).filter(|rank| !failed(rank)).collect(),
        ..failure
    }
}
