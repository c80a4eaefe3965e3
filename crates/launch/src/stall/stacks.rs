//! Where the threads of a rank wait: their names, states, system calls and kernel functions from `/proc`, without a signal
//! to them; and their stacks from py-spy or gdb, where those are installed.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use paceline_rendezvous::process::{self, Stat};
use paceline_words::Lang;
use rustix::process::Signal;

use super::sample::{PROCESSES_MAX, THREADS_MAX};
use crate::LAUNCHER_VARIABLE;
use crate::command;
use crate::output::is_at_end;
use crate::worker::{Worker, wait_readable};

/// Different lines of one process that are written.
const LINES_MAX: usize = 40;
/// Functions of a thread in the kernel that are named, the innermost ones.
const KERNEL_FUNCTIONS_MAX: usize = 3;
/// A debugger that reads the symbols of a large library needs seconds; one that is stuck is ended.
const TOOL_TIME: Duration = Duration::from_secs(10);
/// All of them together have so long.
const TOOLS_TIME: Duration = Duration::from_secs(30);
/// Programs whose own stacks say nothing: they wait for what they have started.
const SHELLS: [&str; 4] = ["sh", "bash", "dash", "zsh"];
/// Most bytes that are read of its answer.
const TOOL_BYTES_MAX: usize = 256 * 1024;
/// Most lines that are written of it.
const TOOL_LINES_MAX: usize = 120;
/// A killed tool is waited for so long.
const TOOL_ENDS_WITHIN: Duration = Duration::from_secs(1);

/// The debuggers that read the stacks of a program's own functions, within a time.
pub(crate) struct Tools<'a> {
    /// Goes into their environment, so that they end with the launcher.
    launcher_id: &'a str,
    /// At its end when their answers are no longer needed.
    stopped: &'a OwnedFd,
    until: Instant,
    /// Advice about tools that were not found.
    missing: RefCell<BTreeSet<&'static str>>,
}

impl<'a> Tools<'a> {
    pub(crate) fn new(launcher_id: &'a str, stopped: &'a OwnedFd) -> Self {
        Self {
            launcher_id,
            stopped,
            until: Instant::now() + TOOLS_TIME,
            missing: RefCell::default(),
        }
    }

    /// Which tools would show more, once for all ranks.
    pub(crate) fn advice(&self) -> String {
        let missing = self.missing.borrow();
        missing
            .iter()
            .map(|advice| format!("  {advice}\n"))
            .collect()
    }
}

/// All that is known of where a rank's threads are, as lines that end with a newline.
///
/// *Blocks*: a fraction of a second, and as long as the tools have.
pub(crate) fn of(rank: usize, root: u32, tools: &Tools<'_>) -> String {
    let mut text = String::new();
    for pid in process::tree(root, PROCESSES_MAX) {
        let Some(stat) = Stat::read(pid) else {
            continue;
        };
        let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        text += &format!(
            "  rank {rank}, pid {pid} ({name}), {}\n",
            stat.state_text(Lang::En)
        );
        let threads: Vec<_> = process::threads(pid, THREADS_MAX);
        for line in folded(threads.iter().map(|id| thread_line(pid, *id))) {
            text += &format!("    {line}\n");
        }
        for line in tools.stacks(pid, &name) {
            text += &format!("    {line}\n");
        }
    }
    text
}

/// Equal lines as one, with their number: pools have many threads that wait alike.
fn folded(lines: impl Iterator<Item = String>) -> Vec<String> {
    let mut counts = BTreeMap::<String, usize>::new();
    let mut order = Vec::new();
    for line in lines {
        let count = counts.entry(line.clone()).or_default();
        if *count == 0 {
            order.push(line);
        }
        *count += 1;
    }
    let left_out = order.len().saturating_sub(LINES_MAX);
    order.truncate(LINES_MAX);
    let mut folded: Vec<_> = order
        .into_iter()
        .map(|line| match counts[&line] {
            1 => format!("thread {line}"),
            count => format!("{count} threads {line}"),
        })
        .collect();
    if left_out > 0 {
        folded.push(format!("{left_out} more lines are left out"));
    }
    folded
}

/// `name: sleeping (S) in futex, kernel futex_wait_queue < __futex_wait`.
fn thread_line(pid: u32, id: u32) -> String {
    let folder = format!("/proc/{pid}/task/{id}");
    let read = |name: &str| fs::read_to_string(format!("{folder}/{name}")).unwrap_or_default();
    let state = Stat::read_from(Path::new(&folder))
        .map_or_else(|| "ended".to_owned(), |stat| stat.state_text(Lang::En));
    let mut line = format!("{}: {state}", read("comm").trim_end());
    if let Some(call) = system_call(&read("syscall")) {
        line += &format!(" in {call}");
    }
    // Only the superuser may read the stack; every user may read the innermost function.
    let functions = match kernel_stack(&read("stack")) {
        functions if functions.is_empty() => match read("wchan").trim() {
            "" | "0" => Vec::new(),
            function => vec![function.to_owned()],
        },
        functions => functions,
    };
    if !functions.is_empty() {
        line += &format!(", kernel {}", functions.join(" < "));
    }
    line
}

/// `[<0>] futex_wait_queue+0x67/0xa0`, innermost first. A thread that runs has none.
fn kernel_stack(text: &str) -> Vec<String> {
    let function = |line: &str| {
        let (_, rest) = line.split_once("] ")?;
        let (name, _) = rest.split_once('+')?;
        Some(name.to_owned())
    };
    let functions = text.lines().filter_map(function);
    functions.take(KERNEL_FUNCTIONS_MAX).collect()
}

/// The system call that a thread is in, from the first word of its `syscall` file.
fn system_call(text: &str) -> Option<String> {
    let number: libc::c_long = text.split_whitespace().next()?.parse().ok()?;
    let name = CALLS.iter().find(|(known, _)| *known == number);
    match name {
        Some((_, name)) => Some((*name).to_owned()),
        // -1: it waits, and not in a system call.
        None => (number >= 0).then(|| format!("system call {number}")),
    }
}

/// The calls in which threads wait.
const CALLS: &[(libc::c_long, &str)] = &[
    (libc::SYS_futex, "futex"),
    (libc::SYS_read, "read"),
    (libc::SYS_readv, "readv"),
    (libc::SYS_pread64, "pread64"),
    (libc::SYS_write, "write"),
    (libc::SYS_writev, "writev"),
    (libc::SYS_recvfrom, "recvfrom"),
    (libc::SYS_recvmsg, "recvmsg"),
    (libc::SYS_sendto, "sendto"),
    (libc::SYS_sendmsg, "sendmsg"),
    (libc::SYS_connect, "connect"),
    (libc::SYS_accept, "accept"),
    (libc::SYS_accept4, "accept4"),
    (libc::SYS_ppoll, "ppoll"),
    (libc::SYS_pselect6, "pselect6"),
    (libc::SYS_epoll_pwait, "epoll_pwait"),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_poll, "poll"),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_select, "select"),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_epoll_wait, "epoll_wait"),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_pause, "pause"),
    (libc::SYS_nanosleep, "nanosleep"),
    (libc::SYS_clock_nanosleep, "clock_nanosleep"),
    (libc::SYS_rt_sigtimedwait, "rt_sigtimedwait"),
    (libc::SYS_rt_sigsuspend, "rt_sigsuspend"),
    (libc::SYS_restart_syscall, "restart_syscall"),
    (libc::SYS_wait4, "wait4"),
    (libc::SYS_waitid, "waitid"),
    (libc::SYS_ioctl, "ioctl"),
    (libc::SYS_fcntl, "fcntl"),
    (libc::SYS_flock, "flock"),
    (libc::SYS_openat, "openat"),
    (libc::SYS_fsync, "fsync"),
    (libc::SYS_io_getevents, "io_getevents"),
    (libc::SYS_sched_yield, "sched_yield"),
];

impl Tools<'_> {
    fn stacks(&self, pid: u32, name: &str) -> Vec<String> {
        let is_python = name.starts_with("python");
        if SHELLS.contains(&name) || is_at_end(self.stopped) || Instant::now() >= self.until {
            return Vec::new();
        }
        let id = pid.to_string();
        let (tool, args): (_, Vec<&str>) = if is_python {
            ("py-spy", vec!["dump", "--nonblocking", "--pid", &id])
        } else {
            let backtrace = "thread apply all backtrace 12";
            ("gdb", vec!["-nx", "-batch", "-p", &id, "-ex", backtrace])
        };
        let Ok(path) = command::find(Path::new(tool), &|name| std::env::var_os(name)) else {
            let advice = match is_python {
                true => "`pip install py-spy` adds the Python functions of each rank",
                false => "gdb, once installed, adds the native functions of each rank",
            };
            self.missing.borrow_mut().insert(advice);
            return Vec::new();
        };
        match self.output_of(&path, &args) {
            Ok(text) => {
                let is_told = |line: &&str| is_python || is_of_gdb(line);
                let mut lines = text.lines().filter(|line| !line.trim().is_empty());
                let told: Vec<_> = lines.clone().filter(is_told).map(str::to_owned).collect();
                match told.is_empty() {
                    true => vec![format!(
                        "{tool}: {}",
                        lines.next_back().unwrap_or("no answer")
                    )],
                    false => told.into_iter().take(TOOL_LINES_MAX).collect(),
                }
            }
            Err(why) => vec![format!("{tool}: {why}")],
        }
    }

    /// What a tool prints on either stream within its time.
    ///
    /// The tool may attach itself to the process as a debugger; when it is killed the kernel lets the process go on.
    fn output_of(&self, program: &Path, args: &[&str]) -> Result<String, String> {
        let (mut answer, printed) = std::io::pipe().map_err(|error| error.to_string())?;
        let errors = printed.try_clone().map_err(|error| error.to_string())?;
        let mut command = Command::new(program);
        command
            .args(args)
            .env(LAUNCHER_VARIABLE, self.launcher_id)
            .stdin(Stdio::null())
            .stdout(printed)
            .stderr(errors);
        let child = command.spawn().map_err(|error| error.to_string())?;
        // The write ends in this process go with it, so that the tool's end is the pipe's.
        drop(command);
        let tool = Worker::adopt(child.id()).map_err(|error| error.to_string())?;
        let deadline = self.until.min(Instant::now() + TOOL_TIME);
        let (mut text, mut buffer) = (Vec::new(), [0; 4096]);
        let ended = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            wait_readable(&[answer.as_fd(), self.stopped.as_fd()], left);
            if left.is_zero() || is_at_end(self.stopped) || text.len() >= TOOL_BYTES_MAX {
                break false;
            }
            match answer.read(&mut buffer) {
                Ok(0) | Err(_) => break true,
                Ok(count) => text.extend_from_slice(&buffer[..count]),
            }
        };
        if !ended {
            tool.signal(Signal::KILL);
        }
        tool.wait_and_reap(TOOL_ENDS_WITHIN);
        if !ended && text.is_empty() {
            return Err("no answer in time".to_owned());
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

/// A thread's headline or one of its functions; gdb says much else.
fn is_of_gdb(line: &str) -> bool {
    line.starts_with("Thread ") || line.starts_with('#')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_word_names_the_system_call() {
        let check = |text: &str, expect: Option<&str>| {
            assert_eq!(system_call(text).as_deref(), expect, "{text}");
        };
        let futex = format!(
            "{} 0x7f 0x80 0x0 0x0 0x0 0x0 0x7ff 0x7fe\n",
            libc::SYS_futex
        );
        check(&futex, Some("futex"));
        check("99999 0x0", Some("system call 99999"));
        check("running\n", None);
        check("-1 0x7ffd 0x7f00\n", None);
        check("", None);
    }

    #[test]
    fn a_kernel_stack_is_a_few_names() {
        let text = "[<0>] futex_wait_queue+0x67/0xa0\n[<0>] __futex_wait+0x156/0x1d0\n[<0>] do_futex+0xcb/0x190\n\
                    [<0>] do_syscall_64+0x71/0x280\n[<0>] entry_SYSCALL_64_after_hwframe+0x76/0x7e\n";
        let expect = ["futex_wait_queue", "__futex_wait", "do_futex"];
        assert_eq!(kernel_stack(text), expect);
        assert!(kernel_stack("").is_empty());
    }

    #[test]
    fn equal_threads_are_one_line_and_others_are_bounded() {
        let lines = ["a", "b", "a", "a"].map(str::to_owned);
        assert_eq!(folded(lines.into_iter()), ["3 threads a", "thread b"]);
        let many = folded((0..100).map(|line| line.to_string()));
        assert_eq!(many.len(), LINES_MAX + 1);
        assert_eq!(many[LINES_MAX], "60 more lines are left out");
    }

    #[test]
    fn a_tool_is_read_to_its_end_and_does_not_outlive_a_stop() {
        let run = |script: &str, stopped: &OwnedFd| {
            Tools::new("x", stopped).output_of(Path::new("/bin/sh"), &["-c", script])
        };
        let (stopped, stop) = rustix::pipe::pipe().unwrap();
        let text = run("echo out; echo error >&2", &stopped);
        assert_eq!(text.as_deref(), Ok("out\nerror\n"));
        drop(stop);
        assert!(run("exec sleep 60", &stopped).is_err());
    }
}
