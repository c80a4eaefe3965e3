//! What `/proc` says about processes: state, parent and processor time of one, its threads, and what it has started.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use paceline_words::{Lang, say};

/// The fields of `/proc/<pid>/stat` that are used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// One letter, see proc(5).
    pub state: char,
    /// The parent's pid.
    pub parent: u32,
    /// Clock ticks since boot. Together with the pid it identifies a process for good.
    pub started: u64,
    /// Clock ticks in which it ran, and those of the children that it has waited for.
    ran: [u64; 2],
    /// How many its process has.
    threads: u64,
    /// The status that its parent gets; 0 also for a reader that may not know it.
    status: u64,
}

impl Stat {
    /// Reads it; `None` if there is no such process.
    pub fn read(pid: u32) -> Option<Self> {
        Self::read_from(Path::new(&format!("/proc/{pid}")))
    }

    /// The same for a process or a thread by its folder.
    pub fn read_from(folder: &Path) -> Option<Self> {
        // A program's name need not be text.
        Self::parse(&String::from_utf8_lossy(
            &fs::read(folder.join("stat")).ok()?,
        ))
    }

    fn parse(text: &str) -> Option<Self> {
        // The name stands in parentheses and may contain blanks and parentheses of its own.
        let (_, fields) = text.rsplit_once(')')?;
        let mut fields = fields.split_whitespace();
        let (state, parent) = (fields.next()?.chars().next()?, fields.next()?);
        // The name was field 2 of the line, the parent field 4; the times are fields 14 to 17, the number of threads
        // field 20, the start field 22, the status field 52.
        let mut numbers = fields.map(str::parse::<u64>).skip(9);
        let mut next = || numbers.next()?.ok();
        let ran = [next()? + next()?, next()? + next()?];
        Some(Self {
            state,
            parent: parent.parse().ok()?,
            threads: numbers.nth(2)?.ok()?,
            started: numbers.nth(1)?.ok()?,
            status: numbers.nth(29).and_then(Result::ok).unwrap_or(0),
            ran,
        })
    }

    /// Processor time of the process, or of the thread.
    pub fn cpu(self) -> Duration {
        ticks(self.ran[0])
    }

    /// Processor time of the process's children that it has waited for.
    pub fn reaped_cpu(self) -> Duration {
        ticks(self.ran[1])
    }

    /// Whether it has ended, waited for or not.
    pub fn has_ended(self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// Whether its process ends with an error, even if the system has not taken it apart. A process that replaces its program ends
    /// its other threads, but not itself. False also for a reader that may not know it.
    pub fn is_failing(self) -> bool {
        self.status != 0
    }

    /// Whether a signal or a debugger has stopped it.
    pub fn is_stopped(self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    /// The state in words.
    pub fn state_text(self, lang: Lang) -> String {
        let state = self.state;
        let words = match state {
            'R' => say!(lang, "running", "실행 중"),
            'S' => say!(lang, "sleeping", "대기 중"),
            'D' => say!(
                lang,
                "in an uninterruptible wait, mostly for a disk or a device",
                "중단할 수 없는 대기, 대개 디스크나 장치 때문"
            ),
            'T' => say!(lang, "stopped by a signal", "시그널로 정지됨"),
            't' => say!(lang, "stopped by a debugger", "디버거가 정지시킴"),
            'Z' | 'X' => say!(lang, "ended", "종료됨"),
            _ => return say!(lang, "in state {state}", "상태 {state}"),
        };
        format!("{words} ({state})")
    }
}

/// The state of a process in words, which is gone if it has none.
pub fn state_text(stat: Option<Stat>, lang: Lang) -> String {
    match stat {
        Some(stat) => stat.state_text(lang),
        None => say!(lang, "gone", "없음"),
    }
}

fn ticks(count: u64) -> Duration {
    Duration::from_millis(
        count.saturating_mul(1000) / rustix::param::clock_ticks_per_second().max(1),
    )
}

/// The numbers among a folder's names, of at most `most` entries: processes of `/proc`, threads, descriptors.
pub(crate) fn numbers<T: FromStr>(folder: &Path, most: usize) -> Vec<T> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    entries.take(most).filter_map(number).collect()
}

/// The threads of a process, at most `most`.
pub fn threads(pid: u32, most: usize) -> Vec<u32> {
    numbers(Path::new(&format!("/proc/{pid}/task")), most)
}

/// The status, as of wait(2), of a process that has ended with an error, even if the system has not taken it apart: none of its threads
/// has memory any more, so none can run a program. `None` if one still may, after an end without an error, and for a process of
/// another user.
///
/// Ask only for a process that cannot have been replaced by another one.
pub fn status_without_memory(pid: u32) -> Option<i32> {
    let stat = Stat::read(pid).filter(|stat| stat.is_failing())?;
    let threads = threads(pid, usize::MAX);
    let has_no_memory = |thread: &u32| {
        let sizes = fs::read_to_string(format!("/proc/{pid}/task/{thread}/statm"));
        sizes.is_ok_and(|sizes| sizes.split_whitespace().all(|size| size == "0"))
    };
    // A thread that disappears meanwhile may hide those behind it from the list. In a process that ends there are no new ones.
    let are_all = threads.len() as u64 == stat.threads;
    let has_ended = are_all && threads.iter().all(has_no_memory);
    has_ended.then(|| i32::try_from(stat.status).ok())?
}

/// A process and all that it has started, as far as their parents live; at most `most`.
pub fn tree(root: u32, most: usize) -> Vec<u32> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        let children = children(pid).unwrap_or_default();
        found.extend(children.into_iter().take(most - found.len()));
        next += 1;
    }
    found
}

/// The children of a process, orphans that it has inherited included.
///
/// *Errors*: there is no such process, or no `/proc`.
pub fn children(pid: u32) -> io::Result<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        match fs::read_to_string(thread?.path().join("children")) {
            Ok(text) => {
                let children = text.split_whitespace();
                found.extend(children.filter_map(|pid| pid.parse::<u32>().ok()));
            }
            // The kernel was built without these files, or the thread is gone: look at every process instead.
            Err(_) => return Ok(children_by_scan(pid)),
        }
    }
    Ok(found)
}

fn children_by_scan(own: u32) -> BTreeSet<u32> {
    let all = numbers(Path::new("/proc"), usize::MAX).into_iter();
    let is_child = |pid: &u32| Stat::read(*pid).is_some_and(|stat| stat.parent == own);
    all.filter(is_child).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_is_read_whatever_the_program_is_called() {
        let check = |text: &str, expect: Option<Stat>| {
            assert_eq!(Stat::parse(text), expect, "{text}");
        };
        let rest = "T 17 42 42 0 -1 4194560 1 0 0 0 30 4 5 6 20 0 3 0 991 2412544 200";
        let expect = Some(Stat {
            state: 'T',
            parent: 17,
            started: 991,
            ran: [34, 11],
            threads: 3,
            status: 0,
        });
        check(&format!("42 (sh) {rest}"), expect);
        let ended = format!("42 (sh) {rest}{} 9", " 1".repeat(27));
        let status = Stat::parse(&ended).map(|stat| stat.status);
        assert_eq!(status, Some(9));
        check(&format!("42 (a b) c) {rest}"), expect);
        check(&format!("42 (:-) S 1 2) {rest}"), expect);
        check("42 (sh) T 17", None);
        check("42 sh T 17", None);
        check("", None);
    }

    #[test]
    fn this_process_is_running_and_started_by_its_parent() {
        let stat = Stat::read(std::process::id()).expect("this process exists");
        let parent = std::os::unix::process::parent_id();
        assert_eq!(stat.parent, parent);
        assert!(!stat.is_stopped() && !stat.has_ended());
        assert_eq!(Stat::read(u32::MAX), None);
    }

    #[test]
    fn a_process_has_a_status_once_nothing_of_it_can_run() {
        let started = std::process::Command::new("sleep").arg("30").spawn();
        let mut child = started.expect("sleep");
        let is_failing = |pid| Stat::read(pid).is_some_and(Stat::is_failing);
        assert!(!is_failing(child.id()));
        assert_eq!(status_without_memory(child.id()), None);
        child.kill().expect("it runs");
        let until = std::time::Instant::now() + Duration::from_secs(30);
        let status = loop {
            let status = status_without_memory(child.id());
            if status.is_some() || std::time::Instant::now() > until {
                break status;
            }
            std::thread::yield_now();
        };
        assert!(is_failing(child.id()));
        child.wait().expect("it was killed");
        assert_eq!(status, Some(9));
        assert_eq!(status_without_memory(child.id()), None);
    }

    #[test]
    fn both_ways_to_find_a_child_find_it() {
        let own = std::process::id();
        let mut sleep = std::process::Command::new("sleep");
        let mut child = sleep.arg("30").spawn().expect("sleep");
        let quick = children(own).expect("this process exists");
        let (scan, tree) = (children_by_scan(own), tree(own, 1000));
        child.kill().expect("it runs");
        child.wait().expect("it was killed");
        assert!(quick.contains(&child.id()));
        assert!(scan.contains(&child.id()));
        assert!(tree.contains(&child.id()) && tree[0] == own);
    }
}
