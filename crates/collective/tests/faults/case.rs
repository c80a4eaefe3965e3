//! One fault: who fails how and when, what the others must say, and by when.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use paceline_rendezvous::store::Store as _;

use rustix::process::Signal;

use super::ops::Op;
use super::proxy::{Act, DATA, MESSAGES, PARCELS, Proxy, Trap, Weather};
use crate::common::job::{Job, PATIENCE};

/// How late a survivor may report what it need not wait for. Far above what it takes: machines are shared.
pub const SOON: Duration = Duration::from_secs(8);
/// A fault while the group forms hit a rank that had already done its part: the others form, and have nothing to report. A
/// loaded machine does that to a pause of milliseconds, so the case is played again.
const TOO_LATE: &str = "the group formed before the fault";
const REPLAYS_MAX: usize = 10;
/// The deadline of operations where only a deadline tells.
pub const DEADLINE: Duration = Duration::from_secs(2);
/// What a rank may take beyond its deadline: a quarter of a second for answers, a second for the others' word.
const VERDICT: Duration = Duration::from_millis(1250);
/// Bytes of the head in front of a round's data.
const HEAD_BYTES: usize = 64;
/// Bytes of the head in front of a message from one rank to another.
const PARCEL_HEAD_BYTES: usize = 40;

/// What happens to a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// It is killed.
    Kill,
    /// It is stopped.
    Stop,
    /// It calls exit(0) without a word.
    Exit,
    /// It aborts.
    Abort,
    /// It leaves in order while the others go on.
    Leave,
    /// All its connections are reset.
    Reset,
    /// Its machine is gone: its connections stay half open.
    Vanish,
    /// What it sends is held up somewhere.
    HoldOut,
    /// What is sent to it is held up somewhere.
    HoldIn,
    /// A bit of the next head it sends flips.
    Flip,
    /// Its data connections end in the middle of a head.
    Cut,
    /// Its connections for the operation's data stand still, in the direction from it.
    Stall,
    /// Its connections for the operation's data are reset.
    ResetLane,
    /// A bit of its goodbye flips.
    FlipGoodbye,
    /// It calls something else than the others.
    Differ(Box<Op>),
    /// It is told to use another algorithm than the others.
    Algorithm,
}

/// When it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// It has told where it is, and nobody has connected yet.
    Forming,
    /// While all connect, at no moment in particular.
    Joining,
    /// Before the first operation.
    Before,
    /// Between two operations.
    Between,
    /// While the others wait for it in one.
    Waiting,
    /// In the middle of an operation's data.
    InData,
    /// Between the rounds of an operation.
    BetweenRounds,
    /// While all leave.
    Leaving,
}

pub const MOMENTS: [Moment; 8] = [
    Moment::Forming,
    Moment::Joining,
    Moment::Before,
    Moment::Between,
    Moment::Waiting,
    Moment::InData,
    Moment::BetweenRounds,
    Moment::Leaving,
];

#[derive(Debug, Clone)]
pub struct Case {
    pub transport: &'static str,
    pub world: usize,
    pub victim: usize,
    pub fault: Fault,
    pub moment: Moment,
    pub op: Op,
    /// Operations done before, where the moment leaves that open.
    pub before: usize,
    /// Between the moment that is waited for and the fault.
    pub pause: Duration,
}

/// What the survivors say.
#[derive(Debug)]
struct Expect {
    /// None for an error that blames nobody.
    culprit: Option<usize>,
    words: Vec<String>,
    within: Duration,
}

impl Case {
    pub fn new(
        transport: &'static str,
        fault: Fault,
        moment: Moment,
        kind: &str,
        len: usize,
    ) -> Self {
        let victim = if moment == Moment::Forming { 0 } else { 1 };
        Self {
            transport,
            world: 3,
            victim,
            fault,
            moment,
            op: Op::new(kind, len),
            before: 2,
            pause: Duration::from_millis(3),
        }
        .rooted()
    }

    /// Roots it where the victim has data to send, which is what some faults are about.
    pub fn rooted(mut self) -> Self {
        self.op.root = match self.op.kind.as_str() {
            "broadcast" | "scatter" => self.victim,
            "reduce" | "gather" => (self.victim + 1) % self.world,
            _ => self.op.root,
        };
        self
    }

    /// Whether there is such a case.
    pub fn is_possible(&self) -> bool {
        use Fault::*;
        use Moment::*;
        let Self { moment, fault, .. } = self;
        let kind = self.op.kind.as_str();
        let on_the_wire = matches!(
            fault,
            Reset | Vanish | HoldOut | HoldIn | Flip | Cut | Stall | ResetLane | FlipGoodbye
        );
        if on_the_wire && !self.is_tcp() {
            return false;
        }
        // Sends and receives are not compared.
        if kind == "pass" && matches!(fault, Differ(_)) {
            return false;
        }
        if kind != "pass" && *fault == ResetLane {
            return false;
        }
        match moment {
            Forming => {
                let dialed = !on_the_wire || self.victim == 0;
                dialed
                    && self.victim + 1 < self.world
                    && !matches!(
                        fault,
                        Stall | ResetLane | Leave | FlipGoodbye | Differ(_) | Algorithm
                    )
            }
            Joining => matches!(fault, Kill | Stop | Exit | Abort),
            Before | Between | Waiting => !matches!(fault, FlipGoodbye),
            // A flipped bit of the data is another number, which TCP's checksum and nobody else guards but TLS.
            InData if *fault == Flip => self.transport == "tls",
            InData => {
                kind != "barrier"
                    && matches!(
                        fault,
                        Kill | Stop
                            | Exit
                            | Abort
                            | Reset
                            | Vanish
                            | HoldOut
                            | HoldIn
                            | Cut
                            | Stall
                            | ResetLane
                    )
            }
            BetweenRounds => {
                kind == "all-reduce"
                    && !matches!(fault, Leave | FlipGoodbye | Differ(_) | Algorithm)
            }
            Leaving => !matches!(
                fault,
                Flip | Cut | Stall | ResetLane | Leave | Differ(_) | Algorithm
            ),
        }
    }

    fn is_tcp(&self) -> bool {
        matches!(self.transport, "tcp" | "tls")
    }

    /// Whether the fault lies in the network, so that the victim lives and goes on.
    fn is_on_the_wire(&self) -> bool {
        use Fault::*;
        matches!(
            self.fault,
            Reset | Vanish | HoldOut | HoldIn | Flip | Cut | Stall | ResetLane | FlipGoodbye
        )
    }

    fn weather(&self) -> Option<Weather> {
        let victim = self.victim;
        match self.fault {
            Fault::Reset => Some(Weather::Resets(victim)),
            Fault::Vanish => Some(Weather::Gone(victim)),
            Fault::HoldOut => Some(Weather::HoldsOut(victim)),
            Fault::HoldIn => Some(Weather::HoldsIn(victim)),
            _ => None,
        }
    }

    /// Where the operation's data travels, and the bytes of the head in front of it.
    fn lane(&self) -> (u32, usize) {
        match self.op.kind.as_str() {
            "pass" => (PARCELS, PARCEL_HEAD_BYTES),
            _ => (DATA, HEAD_BYTES),
        }
    }

    fn needs_deadline(&self) -> bool {
        use Fault::*;
        matches!(self.fault, Stop | Vanish | HoldOut | HoldIn | Stall)
            || matches!(self.moment, Moment::Forming | Moment::Joining) && !self.heals()
    }

    /// The rank that finds a broken connection while the group forms dials again.
    fn heals(&self) -> bool {
        self.moment == Moment::Forming && matches!(self.fault, Fault::Flip | Fault::Cut)
    }

    fn expect(&self) -> Expect {
        let victim = self.victim;
        let odd = || {
            vec![
                "differs between ranks".to_owned(),
                format!("rank {victim} called"),
            ]
        };
        let words = match &self.fault {
            _ if self.moment == Moment::Forming => {
                vec![" waited ".into(), format!("rank {victim}")]
            }
            // Where it is then, and so what is said of it, is a matter of chance.
            _ if self.moment == Moment::Joining => vec![format!("rank {victim}")],
            Fault::Kill | Fault::Exit | Fault::Abort | Fault::Reset => {
                vec![format!("rank {victim} (host"), ") died".into()]
            }
            // All have come, and messages say that all live.
            Fault::Stall if self.op.kind != "pass" => {
                vec!["timed out after".into(), "the network between them".into()]
            }
            Fault::Stop | Fault::Vanish | Fault::HoldOut | Fault::HoldIn | Fault::Stall => {
                vec!["timed out after".into(), format!("rank {victim} (host")]
            }
            Fault::Leave => vec![format!("rank {victim} left the group after operation #")],
            Fault::Flip if self.transport == "tls" => vec![
                format!("rank {victim} broke the protocol"),
                "its bytes fail TLS's check".into(),
            ],
            Fault::Flip => vec![
                format!("rank {victim} broke the protocol"),
                match self.op.kind.as_str() {
                    "pass" => "a message begins with".into(),
                    _ => "a frame begins with".into(),
                },
            ],
            Fault::Cut | Fault::ResetLane => {
                vec![format!("a data connection to rank {victim} (host")]
            }
            Fault::FlipGoodbye => vec![
                format!("rank {victim} broke the protocol"),
                "a message begins with".into(),
            ],
            Fault::Differ(_) | Fault::Algorithm => odd(),
        };
        let nobody = match self.fault {
            // Of two ranks nobody knows who is right.
            Fault::Differ(_) | Fault::Algorithm => self.world == 2,
            Fault::Stall => self.op.kind != "pass",
            _ => false,
        };
        let within = match self.needs_deadline() {
            // The group's, and then the operation's.
            true if self.moment == Moment::Joining => 2 * DEADLINE + VERDICT + SOON,
            true => DEADLINE + VERDICT + SOON,
            false => SOON,
        };
        Expect {
            culprit: (!nobody).then_some(victim),
            words,
            within,
        }
    }

    /// Plays it; how long after the fault each survivor reported. What is wrong is told in words.
    pub fn play(&self, test: &str) -> Result<Vec<Duration>, String> {
        for _ in 0..REPLAYS_MAX {
            match Stage::new(self, test).play() {
                Err(reason) if reason == TOO_LATE => {}
                outcome => return outcome.map_err(|reason| format!("{self}: {reason}")),
            }
        }
        Err(format!("{self}: {TOO_LATE}, {REPLAYS_MAX} times"))
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            transport,
            world,
            victim,
            fault,
            moment,
            op,
            before,
            pause,
        } = self;
        write!(
            f,
            "{fault:?} of rank {victim} of {world} over {transport}, {moment:?}, \"{op}\" after {before}, {pause:?}"
        )
    }
}

/// A case being played.
struct Stage<'a> {
    case: &'a Case,
    job: Job,
    proxy: Option<Proxy>,
}

impl<'a> Stage<'a> {
    fn new(case: &'a Case, test: &str) -> Self {
        let deadline = if case.needs_deadline() {
            DEADLINE
        } else {
            PATIENCE
        };
        // Messages have the deadline that the group has formed with.
        let hurries = matches!(case.moment, Moment::Forming | Moment::Joining);
        let forming = match hurries || case.op.kind == "pass" {
            true => deadline,
            false => PATIENCE,
        };
        let role = format!("{} {}", forming.as_millis(), deadline.as_millis());
        let ring = case.moment == Moment::BetweenRounds;
        let odd = case.fault == Fault::Algorithm;
        let job = Job::start_with(test, case.transport, case.world, &role, false, |env| {
            if ring || odd && env.rank == case.victim {
                env.algorithm = Some("allreduce:ring".into());
            }
        });
        let traps = matches!(case.moment, Moment::InData | Moment::BetweenRounds);
        let proxied = case.is_tcp() && (case.is_on_the_wire() || traps);
        Self {
            case,
            job,
            proxy: proxied.then(Proxy::new),
        }
    }

    fn play(&mut self) -> Result<Vec<Duration>, String> {
        let at = match self.case.moment {
            Moment::Forming => {
                let at = self.form_without()?;
                if self.case.heals() {
                    if let Some(proxy) = &self.proxy {
                        if !proxy.sprung(PATIENCE) {
                            return Err("nobody has connected".into());
                        }
                        proxy.release();
                    }
                    self.all("formed")?;
                    self.everybody(&format!("once {}", self.case.op));
                    self.all("done")?;
                    return Ok(Vec::new());
                }
                at
            }
            Moment::Joining => self.fail_joining()?,
            moment => {
                self.form()?;
                self.warm_up()?;
                match moment {
                    Moment::Leaving => return self.leave(),
                    Moment::InData | Moment::BetweenRounds => self.fail_in_data()?,
                    _ => self.fail_around()?,
                }
            }
        };
        self.judge(at)
    }

    fn survivors(&self) -> Vec<usize> {
        let Case { world, victim, .. } = *self.case;
        (0..world).filter(|rank| *rank != victim).collect()
    }

    /// Forms the group, one rank after another where ports have to be taken before others read of them.
    fn form(&mut self) -> Result<(), String> {
        for rank in 0..self.case.world {
            self.come(rank);
        }
        self.all("formed")
    }

    fn come(&mut self, rank: usize) {
        self.job.tell(rank, "form");
        if let Some(proxy) = &mut self.proxy
            && rank + 1 < self.case.world
        {
            proxy.take_port(&self.job, rank);
        }
    }

    /// Has the victim fail when it has said where it is, and the ranks that dial it have not come.
    fn form_without(&mut self) -> Result<Instant, String> {
        let victim = self.case.victim;
        for rank in 0..=victim {
            self.come(rank);
        }
        let store = self.job.store();
        let key = format!(
            "paceline/collective/{}/0/1/record/{victim}",
            self.job.run_id
        );
        store
            .get(&key, PATIENCE)
            .map_err(|error| error.to_string())?;
        let at = self.strike();
        for rank in victim + 1..self.case.world {
            self.come(rank);
        }
        Ok(at)
    }

    /// Has the victim fail while all form; whoever has formed nevertheless goes on.
    fn fail_joining(&mut self) -> Result<Instant, String> {
        self.everybody("form");
        std::thread::sleep(self.case.pause);
        let at = self.strike();
        for rank in self.survivors() {
            self.job.tell(rank, &format!("forever {}", self.case.op));
        }
        Ok(at)
    }

    fn warm_up(&mut self) -> Result<(), String> {
        let (ops, op) = match self.case.moment {
            Moment::Before => return Ok(()),
            // Large ones as they are, so that connections and memory are warm.
            Moment::InData | Moment::BetweenRounds => (1, self.case.op.clone()),
            _ => (self.case.before.max(1), Op::new("barrier", 0)),
        };
        for _ in 0..ops {
            self.everybody(&format!("once {op}"));
            self.all("done")?;
        }
        Ok(())
    }

    /// A fault before or between operations, or while the others wait in one.
    fn fail_around(&mut self) -> Result<Instant, String> {
        let go = format!("forever {}", self.case.op);
        let mut at = None;
        if self.case.moment == Moment::Waiting {
            for rank in self.survivors() {
                self.job.tell(rank, &go);
                self.await_line(rank, "begins")?;
            }
            std::thread::sleep(self.case.pause);
        } else {
            at = Some(self.strike());
            for rank in self.survivors() {
                self.job.tell(rank, &go);
            }
        }
        let at = at.unwrap_or_else(|| self.strike());
        let order = match &self.case.fault {
            Fault::Differ(op) => format!("forever {op}"),
            Fault::Leave => "leave".into(),
            Fault::Algorithm => go,
            _ if self.case.is_on_the_wire() => go,
            _ => return Ok(at),
        };
        self.job.tell(self.case.victim, &order);
        Ok(at)
    }

    /// A fault in the middle of a large operation: over TCP where the proxy holds the data, else at some moment.
    fn fail_in_data(&mut self) -> Result<Instant, String> {
        let Case {
            victim, world, op, ..
        } = self.case;
        // A ring's first round is one slice, with its head.
        let (lane, head) = self.case.lane();
        let after = match self.case.moment {
            Moment::BetweenRounds => head + op.len / world * size_of::<f32>(),
            _ => head + 1000,
        };
        let act = match self.case.fault {
            Fault::Flip => Act::Flip,
            Fault::Cut => Act::Cut,
            Fault::ResetLane => Act::Reset,
            _ => Act::Hold,
        };
        let trap = Trap {
            sender: *victim,
            lane,
            after,
            act,
        };
        if let Some(proxy) = &self.proxy {
            proxy.set_trap(trap);
        }
        self.everybody(&format!("forever {op}"));
        let Some(proxy) = &self.proxy else {
            self.all("begins")?;
            self.all("runs")?;
            std::thread::sleep(self.case.pause);
            return Ok(self.strike());
        };
        if !proxy.sprung(PATIENCE) {
            return Err("the data was never there".into());
        }
        let at = self.strike();
        let is_over = act == Act::Hold && self.case.fault != Fault::Stall;
        if let Some(proxy) = self.proxy.as_ref().filter(|_| is_over) {
            proxy.release();
        }
        Ok(at)
    }

    /// The fault itself; a trap for what the victim is about to send, where it lies there.
    fn strike(&mut self) -> Instant {
        let victim = self.case.victim;
        let at = Instant::now();
        match self.case.fault {
            Fault::Kill => self.job.signal(victim, Signal::KILL),
            Fault::Stop => self.job.signal(victim, Signal::STOP),
            Fault::Exit => self.job.tell(victim, "exit"),
            Fault::Abort => self.job.tell(victim, "abort"),
            _ => {}
        }
        let Some(proxy) = &self.proxy else { return at };
        if let Some(weather) = self.case.weather() {
            if self.case.fault == Fault::Reset {
                // All at once: no word of the first reset passes the others.
                proxy.weather(Weather::Gone(victim));
            }
            proxy.weather(weather);
        }
        let in_data = matches!(self.case.moment, Moment::InData | Moment::BetweenRounds);
        let (after, act) = match self.case.fault {
            Fault::Flip if !in_data => (0, Act::Flip),
            Fault::Cut if !in_data => (10, Act::Cut),
            Fault::Stall if !in_data => (10, Act::Hold),
            Fault::ResetLane if !in_data => (10, Act::Reset),
            Fault::FlipGoodbye => (0, Act::Flip),
            _ => return at,
        };
        proxy.set_trap(Trap {
            sender: victim,
            lane: match self.case.fault {
                Fault::FlipGoodbye => MESSAGES,
                _ => self.case.lane().0,
            },
            after,
            act,
        });
        at
    }

    /// All leave, and the fault falls into that: nobody may hang, and nobody else be blamed.
    fn leave(&mut self) -> Result<Vec<Duration>, String> {
        let at = self.strike();
        let goodbye = self.case.fault == Fault::FlipGoodbye;
        if goodbye {
            self.job.tell(self.case.victim, "leave");
            let go = format!("forever {}", self.case.op);
            self.survivors()
                .into_iter()
                .for_each(|rank| self.job.tell(rank, &go));
            return self.judge(at);
        }
        self.everybody("leave");
        for rank in self.survivors() {
            let line = self.await_line(rank, "left")?;
            let blamed = format!("left after {}:", self.case.victim);
            if line != "left" && !line.starts_with(&blamed) {
                return Err(format!("rank {rank} {line}"));
            }
            self.await_end(rank)?;
        }
        Ok(Vec::new())
    }

    /// What the survivors say, and that they end.
    fn judge(&mut self, at: Instant) -> Result<Vec<Duration>, String> {
        let expect = self.case.expect();
        let mut took = Vec::new();
        for rank in self.survivors() {
            let (heard, line) = self.await_failure(rank)?;
            let late = heard.saturating_duration_since(at);
            if late > expect.within {
                return Err(format!("rank {rank} took {late:?}: {line}"));
            }
            took.push(late);
            let culprit = expect.culprit.map_or("-".into(), |rank| rank.to_string());
            // Of two ranks, one cut off in one direction, each has a point.
            let either = self.case.world == 2 && self.case.fault == Fault::HoldIn;
            let blames = line.starts_with(&format!("failed {culprit}: "));
            let says = expect.words.iter().all(|words| line.contains(words));
            if !(either || blames && says) {
                return Err(format!(
                    "rank {rank} {line}, expected {culprit} and {:?}",
                    expect.words
                ));
            }
        }
        for rank in self.survivors() {
            self.await_line(rank, "gone")?;
            self.await_end(rank)?;
        }
        let lives = matches!(
            self.case.fault,
            Fault::Differ(_)
                | Fault::Algorithm
                | Fault::Flip
                | Fault::Cut
                | Fault::Stall
                | Fault::ResetLane
        ) || self.case.weather().is_some();
        if lives {
            // It learns of it too, or has its own view of who is gone.
            self.await_failure(self.case.victim)?;
            self.await_line(self.case.victim, "gone")?;
            self.await_end(self.case.victim)?;
        }
        Ok(took)
    }

    fn everybody(&mut self, order: &str) {
        (0..self.case.world).for_each(|rank| self.job.tell(rank, order));
    }

    /// All ranks say this.
    fn all(&self, beginning: &str) -> Result<(), String> {
        (0..self.case.world).try_for_each(|rank| self.await_line(rank, beginning).map(drop))
    }

    fn await_failure(&self, rank: usize) -> Result<(Instant, String), String> {
        loop {
            let (at, line) = self.hear(rank)?;
            if self.case.moment == Moment::Forming && line.starts_with("formed") {
                return Err(TOO_LATE.into());
            }
            if !matches!(line.as_str(), "begins" | "runs" | "done") && !line.starts_with("formed") {
                return Ok((at, line));
            }
        }
    }

    fn await_line(&self, rank: usize, beginning: &str) -> Result<String, String> {
        let (_, line) = self.hear(rank)?;
        match line.starts_with(beginning) {
            true => Ok(line),
            false => Err(format!("rank {rank} {line}, expected \"{beginning}\"")),
        }
    }

    fn hear(&self, rank: usize) -> Result<(Instant, String), String> {
        let heard = self.job.heard(rank, PATIENCE);
        heard.map_err(|error| format!("rank {rank} said nothing: {error}"))
    }

    /// Nothing of the group is left in its process, and the process ends by itself.
    fn await_end(&mut self, rank: usize) -> Result<(), String> {
        let started = Instant::now();
        let left = loop {
            let left = leftovers(self.job.pid(rank));
            // A thread that has been joined may be listed for a moment.
            if left.is_empty() || started.elapsed() > SOON {
                break left;
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        if !left.is_empty() {
            return Err(format!("rank {rank} has left {left:?}"));
        }
        self.job.tell(rank, "end");
        match self.job.ended(rank, SOON) {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(format!("rank {rank} ended with {status}")),
            None => Err(format!("rank {rank} did not end")),
        }
    }
}

/// Threads of the group, descriptors of its memory and sockets, and children of a rank's process.
fn leftovers(pid: u32) -> Vec<String> {
    let entries = |folder: &str| {
        let entries = fs::read_dir(format!("/proc/{pid}/{folder}")).into_iter();
        entries.flatten().flatten().map(|entry| entry.path())
    };
    let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
    let threads = entries("task").map(|task| read(task.join("comm")));
    let threads = threads.filter(|name| name.starts_with("rank"));
    let links = entries("fd").filter_map(|link| fs::read_link(link).ok());
    let links = links.map(|link| link.to_string_lossy().into_owned());
    let links = links.filter(|link| link.starts_with("socket:") || link.contains("memfd:"));
    let children = entries("task").map(|task| read(task.join("children")));
    let children = children.filter(|children| !children.is_empty());
    threads.chain(links).chain(children).collect()
}
