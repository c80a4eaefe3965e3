//! Ranks as processes of the test's own binary, and the lines that they and the test tell each other.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use paceline_rendezvous::env::{WorkerEnv, worker_vars};
use paceline_rendezvous::page::{JobPage, allow_inherit};
use paceline_rendezvous::store::{Client, Server};
use paceline_rendezvous::token::Token;
use rustix::process::{Pid, Signal, kill_process};

use super::Wire;

/// How long a test waits for anything before it fails.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Set in the processes that play a rank.
pub const ROLE: &str = "PACELINE_TEST_ROLE";
/// Lines of the rank's process that are meant for the test.
pub const MARK: &str = "@@ ";
/// Longest pause between two looks at whether a process has ended.
const LOOK: Duration = Duration::from_millis(2);

/// What a rank tells the test.
pub fn say(line: &str) {
    // One write: a line that a killed process has begun would be glued to the harness's own output.
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(format!("\n{MARK}{line}\n").as_bytes());
    let _ = out.flush();
}

/// Processes of one job; killed when the test ends, however it ends.
pub struct Job {
    ranks: Vec<Rank>,
    pub page: Option<JobPage>,
    pub server: Server,
    pub token: Token,
    tls: bool,
    pub run_id: String,
}

struct Rank {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<(Instant, String)>,
}

impl Job {
    /// Starts `world` processes that run the test called `test`, with `role` and `adapt`'s changes in their environment.
    /// The transport `tls` is TCP, encrypted.
    pub fn start_with(
        test: &str,
        transport: &str,
        world: usize,
        role: &str,
        with_page: bool,
        adapt: impl Fn(&mut WorkerEnv),
    ) -> Self {
        let token = Token::generate().unwrap();
        let (transport, tls) = match transport {
            "tls" => ("tcp", true),
            other => (other, false),
        };
        let server = super::server(if tls { Wire::Tls } else { Wire::Tcp }, &token);
        let page = with_page.then(|| JobPage::create_memfd(world).unwrap());
        let page_fd = page.as_ref().and_then(JobPage::raw_fd);
        let mut run_id = String::new();
        let ranks = super::envs(world, &server, &token).into_iter().map(|env| {
            run_id.clone_from(&env.run_id);
            let mut env = WorkerEnv {
                transport: Some(transport.to_owned()),
                tls,
                page_fd,
                ..env
            };
            adapt(&mut env);
            Rank::start(test, role, &env)
        });
        let ranks = ranks.collect();
        Self {
            ranks,
            page,
            server,
            token,
            tls,
            run_id,
        }
    }

    /// A client of the job's store.
    pub fn store(&self) -> Client {
        let server = self.server.addr().to_string();
        Client::connect_as(&server, &self.token, self.tls, PATIENCE).unwrap()
    }

    /// Under `hierarchical` and `auto over hosts` two ranks share a host, as far as they say.
    pub fn start(test: &str, transport: &str, world: usize, role: &str, with_page: bool) -> Self {
        let (transport, over_hosts) = match transport {
            "auto over hosts" => ("auto", true),
            other => (other, other == "hierarchical"),
        };
        Self::start_with(test, transport, world, role, with_page, |env| {
            if over_hosts {
                env.host_id = Some(format!("host{}", env.rank / 2));
                env.local_rank = if with_page { env.rank } else { env.rank % 2 };
            }
        })
    }

    /// What a rank says next, and when it did; none when its process says nothing more, or not in time.
    pub fn heard(
        &self,
        rank: usize,
        limit: Duration,
    ) -> Result<(Instant, String), RecvTimeoutError> {
        self.ranks[rank].lines.recv_timeout(limit)
    }

    pub fn line(&self, rank: usize) -> String {
        let heard = self.heard(rank, PATIENCE);
        heard
            .unwrap_or_else(|_| panic!("rank {rank} said nothing"))
            .1
    }

    pub fn all_ready(&self) -> Vec<String> {
        (0..self.ranks.len()).map(|rank| self.line(rank)).collect()
    }

    /// A line on the rank's standard input. One that has ended does not hear it.
    pub fn tell(&mut self, rank: usize, line: &str) {
        if let Some(stdin) = &mut self.ranks[rank].stdin {
            let _ = stdin.write_all(format!("{line}\n").as_bytes());
        }
    }

    pub fn signal(&self, rank: usize, signal: Signal) {
        kill_process(Pid::from_child(&self.ranks[rank].child), signal).unwrap();
    }

    pub fn pid(&self, rank: usize) -> u32 {
        self.ranks[rank].child.id()
    }

    /// How a rank's process ended, if it does within `limit`.
    pub fn ended(&mut self, rank: usize, limit: Duration) -> Option<ExitStatus> {
        let started = Instant::now();
        loop {
            let ended = self.ranks[rank].child.try_wait().unwrap();
            if ended.is_some() || started.elapsed() > limit {
                return ended;
            }
            std::thread::sleep(LOOK);
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.child.kill();
            let _ = rank.child.wait();
        }
    }
}

impl Rank {
    fn start(test: &str, role: &str, env: &WorkerEnv) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .envs(worker_vars(env))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        if let Some(fd) = env.page_fd {
            inherit(&mut command, fd);
        }
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(line) = line.strip_prefix(MARK) {
                    let _ = sender.send((Instant::now(), line.to_owned()));
                }
            }
        });
        Self {
            child,
            stdin,
            lines,
        }
    }
}

/// Gives the child the page, and no other child that starts in the same moment: what a test finds left in a process
/// must be its own.
#[allow(unsafe_code)]
fn inherit(command: &mut Command, fd: i32) {
    // SAFETY: the page that owns the descriptor lives as long as the job, and the closure makes one system call.
    unsafe {
        let page = BorrowedFd::borrow_raw(fd);
        command.pre_exec(move || allow_inherit(page));
    }
}
