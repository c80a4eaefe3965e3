//! Processes as the kernel shows them.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::tree::Tree;

/// A process.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Process {
    name: String,
    parent: u32,
    #[serde(default)]
    command: Vec<String>,
    /// Nothing where this user may not read it.
    environment: Option<BTreeMap<String, String>>,
    /// When it was started, in seconds since the system was.
    started_s: u64,
    #[serde(default)]
    user: u32,
    /// Its session; itself if not given.
    session: Option<u32>,
    /// Number of its terminal; 0 without one.
    #[serde(default)]
    terminal: u32,
    /// Targets of its open files.
    #[serde(default)]
    open: Vec<String>,
    /// Other lines of its status.
    #[serde(default)]
    status: String,
    /// `R`, `S`, `D`, `Z` or `T`.
    #[serde(default = "sleeping")]
    state: char,
    #[serde(default = "top")]
    cgroup: String,
}

fn sleeping() -> char {
    'S'
}

fn top() -> String {
    "0::/".into()
}

impl Process {
    pub(super) fn write(&self, pid: u32, tree: &mut Tree) {
        let folder = format!("/proc/{pid}");
        let Self {
            name,
            parent,
            state,
            user,
            terminal,
            ..
        } = self;
        let session = self.session.unwrap_or(pid);
        // A terminal listens to the group of the process that is started in it.
        let foreground = if *terminal == 0 {
            -1
        } else {
            i64::from(session)
        };
        // The kernel counts in hundredths of a second here.
        let started = self.started_s * 100;
        tree.text(
            &format!("{folder}/stat"),
            &format!(
                "{pid} ({name}) {state} {parent} {session} {session} {terminal} {foreground} 4194560 5120 0 3 0 4200 900 0 0 20 0 8 0 \
                 {started} 21474836480 262144 18446744073709551615 1 1 0 0 0 0 0 4096 17642 0 0 0 17 3 0 0 0 0 0 0 0 0 0 0 0 0 0"
            ),
        );
        let word = match state {
            'R' => "running",
            'D' => "disk sleep",
            'Z' => "zombie",
            'T' => "stopped",
            _ => "sleeping",
        };
        let status = format!(
            "Name:\t{name}\nUmask:\t0022\nState:\t{state} ({word})\nTgid:\t{pid}\nPid:\t{pid}\nPPid:\t{parent}\n\
             Uid:\t{user}\t{user}\t{user}\t{user}\nGid:\t{user}\t{user}\t{user}\t{user}\nNSpid:\t{pid}\n\
             VmRSS:\t 1048576 kB\nThreads:\t8{}{}",
            if self.status.is_empty() { "" } else { "\n" },
            self.status
        );
        tree.text(&format!("{folder}/status"), &status);
        tree.text(&format!("{folder}/comm"), name);
        let ended = |texts: Vec<String>| {
            texts
                .iter()
                .map(|text| format!("{text}\0"))
                .collect::<String>()
        };
        tree.file(
            &format!("{folder}/cmdline"),
            ended(self.command.clone()).as_bytes(),
        );
        if let Some(environment) = &self.environment {
            let pairs = environment
                .iter()
                .map(|(name, value)| format!("{name}={value}"));
            tree.file(
                &format!("{folder}/environ"),
                ended(pairs.collect()).as_bytes(),
            );
        }
        for (number, target) in self.open.iter().enumerate() {
            tree.plain_link(&format!("{folder}/fd/{number}"), target);
        }
        tree.text(&format!("{folder}/cgroup"), &self.cgroup);
    }
}
