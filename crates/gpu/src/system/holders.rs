//! What is known about a process that holds a device, and whether it was left behind.

use std::io;

use super::driver::is_in_container;
use super::{CHARS_MAX, line, text};
use crate::host::Host;
use crate::process::{Environ, Stat};
use crate::snapshot::{Gap, Holder, Reading};
use paceline_words::plain;

/// Descriptors that are looked at for one of the device.
const DESCRIPTORS_MAX: usize = 65_536;
/// Control groups, and what the kernel tells about signals and namespaces.
const FILE_BYTES_MAX: u64 = 16 << 10;
/// Set by torchrun for the processes that it starts.
const ELASTIC: &str = "TORCHELASTIC_RUN_ID";
/// NVIDIA's own that hold devices without a parent, and displays: 15 bytes of their names.
const DAEMONS: [&str; 6] = [
    "nvidia-persiste",
    "nvidia-cuda-mps",
    "nv-hostengine",
    "nv-fabricmanage",
    "Xorg",
    "Xwayland",
];
/// Programs that are the first process of a container, and are no agent that starts ranks.
const FIRST: [&str; 9] = [
    "systemd",
    "init",
    "tini",
    "docker-init",
    "dumb-init",
    "catatonit",
    "sh",
    "bash",
    "dash",
];

/// Fills in all that the driver does not tell: name, parent, whether it is an orphan, age, rank.
pub(crate) fn describe(host: &Host<'_>, holder: &mut Holder) {
    let stat = match find(host, holder.pid) {
        Ok(stat) => stat,
        Err(gap) => {
            holder.name = Reading::missing(gap.clone());
            holder.parent = Reading::missing(gap.clone());
            holder.is_orphan = Reading::missing(gap.clone());
            holder.age_s = Reading::missing(gap);
            return;
        }
    };
    let environ = Environ::read(host, holder.pid);
    let variable = |name| environ.as_ref().and_then(|environ| environ.variable(name));
    holder.rank = variable("RANK").and_then(|rank| rank.parse().ok());
    holder.age_s = age_s(host, &stat).ok_or(Gap::NotSupported).into();
    holder.is_orphan = is_orphan(host, holder.pid, &stat, environ.as_ref()).into();
    holder.parent = stat.parent.into();
    holder.name = plain(&stat.name, CHARS_MAX).into();
}

/// The process, unless the number is that of another one: in a container the driver may tell the machine's numbers.
fn find(host: &Host<'_>, pid: u32) -> Result<Stat, Gap> {
    let Some(stat) = Stat::read(host, pid) else {
        let is_hidden = pid != 0 && !host.has("/proc/1");
        return Err(match is_hidden {
            true => Gap::NoPermission,
            false => Gap::other("no such process is seen from here"),
        });
    };
    if !is_in_container(host) {
        return Ok(stat);
    }
    let folder = format!("/proc/{pid}/fd");
    let descriptors = match host.names(&folder, DESCRIPTORS_MAX) {
        Ok(descriptors) => descriptors,
        // Recorded machines seldom have them.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(stat),
        Err(error) => return Err(super::gap(&error)),
    };
    let targets = descriptors.iter();
    let mut targets = targets.filter_map(|name| host.link(&format!("{folder}/{name}")));
    // A process that has ended and was not waited for has none any more.
    match descriptors.is_empty() || targets.any(|target| target.starts_with("/dev/nvidia")) {
        true => Ok(stat),
        false => Err(Gap::other("another process has this number here")),
    }
}

fn age_s(host: &Host<'_>, stat: &Stat) -> Option<u64> {
    let up = line(host, "/proc/uptime")?;
    let up: f64 = up.split_whitespace().next()?.parse().ok()?;
    let started = stat.started_ticks / rustix::param::clock_ticks_per_second().max(1);
    (up as u64).checked_sub(started)
}

/// Whether the process that started this one is gone and no other looks after it.
///
/// A process that makes a session leaves it to its children. A process that sits in another session than its parent and did not
/// make that session itself was therefore not started by this parent: it was given to it when its own ended. That holds for
/// every process that takes orphans in, whatever it is called: process 1, a user's service manager, the first one of a
/// container. It does not show where both share a session, as in a container whose shell started a job; there only a job
/// that names its launcher is known to have lost it.
///
/// Not counted: services and NVIDIA's own daemons, which end their parent on purpose; what was told to outlive its
/// terminal (`nohup`); and what a terminal shows now.
fn is_orphan(
    host: &Host<'_>,
    pid: u32,
    stat: &Stat,
    environ: Option<&Environ>,
) -> Result<bool, Gap> {
    let status = text(host, &format!("/proc/{pid}/status"), FILE_BYTES_MAX).unwrap_or_default();
    // In a namespace of its own a process names its launcher by other numbers.
    let is_numbered_alike =
        field(&status, "NSpid:").is_none_or(|pids| pids.split_whitespace().count() == 1);
    if is_numbered_alike && let Some((launcher, started)) = environ.and_then(Environ::launcher) {
        let found = Stat::read(host, launcher);
        return Ok(found.is_none_or(|found| found.started_ticks != started));
    }
    // Nobody that can be seen from here, as for what is run inside of a container from outside.
    if stat.parent == 0 {
        return Ok(false);
    }
    let parent = match Stat::read(host, stat.parent) {
        Some(parent) => parent,
        // The first process is seldom recorded, and hidden from users where `/proc` is mounted so.
        None if stat.parent == 1 => Stat {
            session: 1,
            ..Stat::default()
        },
        None => return Err(Gap::NoPermission),
    };
    let is_leader = stat.session == pid;
    let is_watched = stat.terminal != 0 && stat.foreground == i64::from(stat.group);
    let is_kept = is_leader
        || is_watched
        || DAEMONS.contains(&stat.name.as_str())
        || ignores_hangup(&status)
        || is_service(host, pid);
    if is_kept {
        return Ok(false);
    }
    if stat.session != parent.session && stat.session > 1 {
        return Ok(true);
    }
    // An agent that starts ranks is no shell and no mere first process.
    let has_agent = environ
        .and_then(|environ| environ.variable(ELASTIC))
        .is_some();
    Ok(stat.parent == 1 && has_agent && FIRST.contains(&parent.name.as_str()))
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(value.trim())
}

/// Signal 1 is the lowest bit.
fn ignores_hangup(status: &str) -> bool {
    let ignored = field(status, "SigIgn:");
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask, 16).ok());
    ignored.is_some_and(|mask| mask & 1 != 0)
}

/// Whether systemd runs it as a service; a user's service manager is none, but what all of his programs lie below.
fn is_service(host: &Host<'_>, pid: u32) -> bool {
    let groups = text(host, &format!("/proc/{pid}/cgroup"), FILE_BYTES_MAX).unwrap_or_default();
    groups.lines().any(|line| {
        let name = line.rsplit('/').next().unwrap_or_default();
        name.ends_with(".service") && !name.starts_with("user@")
    })
}

#[cfg(test)]
mod tests;
