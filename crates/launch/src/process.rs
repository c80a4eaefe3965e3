//! The children and threads of a process, from `/proc`.

use std::collections::BTreeSet;
use std::fs;
use std::io;

use paceline_rendezvous::process::Stat;

/// The threads of a process.
pub(crate) fn threads(pid: u32) -> impl Iterator<Item = u32> {
    let entries = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// A process and all that it has started, as far as their parents live; at most `most`.
pub(crate) fn tree(root: u32, most: usize) -> Vec<u32> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        let children = children_of(pid).unwrap_or_default();
        found.extend(children.into_iter().take(most - found.len()));
        next += 1;
    }
    found
}

/// The children of this process, orphans that it has inherited included.
pub(crate) fn children() -> io::Result<BTreeSet<u32>> {
    children_of(std::process::id())
}

fn children_of(pid: u32) -> io::Result<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        match fs::read_to_string(thread?.path().join("children")) {
            Ok(text) => found.extend(
                text.split_whitespace()
                    .filter_map(|pid| pid.parse::<u32>().ok()),
            ),
            // The kernel was built without these files, or the thread is gone: look at every process instead.
            Err(_) => return children_by_scan(pid),
        }
    }
    Ok(found)
}

fn children_by_scan(own: u32) -> io::Result<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        if Stat::read(pid).is_some_and(|stat| stat.parent == own) {
            found.insert(pid);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_to_find_a_child_find_it() {
        let mut child = std::process::Command::new("sleep")
            .arg("30")
            .spawn()
            .unwrap();
        let (quick, scan) = (
            children().unwrap(),
            children_by_scan(std::process::id()).unwrap(),
        );
        let tree = tree(std::process::id(), 1000);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(quick.contains(&child.id()));
        assert!(scan.contains(&child.id()));
        assert!(tree.contains(&child.id()) && tree[0] == std::process::id());
    }
}
