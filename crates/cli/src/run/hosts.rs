//! The hosts of a job that `paceline run` starts over ssh: `--hosts`, and host files of Open MPI and MPICH.

use std::fmt;
use std::path::{Path, PathBuf};

use clap::Args;
use paceline_launch::NPROC_MAX;
use paceline_rendezvous::nodes::NODES_MAX;

use super::ranks::Processes;
use super::sense::usage;
use crate::exit::Failure;
use crate::flags::whole;

/// The options about hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Nodes")]
pub struct HostsArgs {
    /// Start the job on these hosts over ssh, with N ranks on each [default: one per GPU, or else per core]
    #[arg(long, alias = "host", value_name = "HOST[:N],...", value_parser = Hosts::parse)]
    #[arg(conflicts_with_all = FOR_ONE_NODE)]
    pub hosts: Option<Hosts>,
    /// The same with the hosts of a file, a line `HOST`, `HOST:N` or `HOST slots=N` for each
    #[arg(
        long,
        alias = "machinefile",
        value_name = "FILE",
        conflicts_with = "hosts"
    )]
    #[arg(conflicts_with_all = FOR_ONE_NODE)]
    pub hostfile: Option<PathBuf>,
    /// The command in ssh's place, which gets ssh's options, a host and a command [default: PACELINE_SSH, else ssh]
    #[arg(long, value_name = "COMMAND")]
    pub ssh: Option<String>,
}

/// What is each node's own, and what the hosts decide.
const FOR_ONE_NODE: [&str; 6] = [
    "nnodes",
    "node_rank",
    "local_addr",
    "standalone",
    "rdzv_backend",
    "rdzv_endpoint",
];

/// The hosts of a job, each once; at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hosts(Vec<Host>);

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// As ssh takes it: a name, an address or an entry of ssh's configuration, perhaps with `user@`.
    pub target: String,
    /// How many ranks it has room for, if that is said.
    pub slots: Option<usize>,
}

impl HostsArgs {
    /// The hosts, if there are any.
    ///
    /// *Errors*: the file cannot be read, or a line of it names no host.
    pub(super) fn read(&self) -> Result<Option<Hosts>, Failure> {
        match (&self.hosts, &self.hostfile) {
            (Some(hosts), _) => Ok(Some(hosts.clone())),
            (None, Some(path)) => Hosts::in_file(path).map(Some),
            (None, None) => Ok(None),
        }
    }
}

impl Hosts {
    /// Hosts with commas between them.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let hosts = text.split(',').map(str::trim).map(host);
        let hosts = hosts.collect::<Result<Vec<_>, _>>()?;
        Self::of(hosts.into_iter().map(|host| (None, host))).map_err(|(_, why)| why)
    }

    fn in_file(path: &Path) -> Result<Self, Failure> {
        let file = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| {
            let hint = "name a file with a line for each host, such as `node1 slots=4`";
            usage(format!("host file {file} cannot be read: {error}"), hint)
        })?;
        Self::parse_file(&text).map_err(|(line, why)| {
            let place = line.map_or_else(String::new, |line| format!(":{line}"));
            let hint = "a line is HOST, HOST:N or HOST slots=N; # begins a comment";
            usage(format!("{file}{place}: {why}"), hint)
        })
    }

    /// *Errors*: the number of the line, and what is wrong with it.
    fn parse_file(text: &str) -> Result<Self, (Option<usize>, String)> {
        let mut hosts = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if !line.is_empty() {
                let number = Some(number + 1);
                hosts.push((number, entry(line).map_err(|why| (number, why))?));
            }
        }
        Self::of(hosts)
    }

    fn of(
        hosts: impl IntoIterator<Item = (Option<usize>, Host)>,
    ) -> Result<Self, (Option<usize>, String)> {
        let mut found: Vec<Host> = Vec::new();
        for (line, host) in hosts {
            let target = &host.target;
            if found.iter().any(|other| other.target == *target) {
                let why = format!("{target} is there twice; name it once, with all its ranks");
                return Err((line, why));
            }
            found.push(host);
        }
        match found.len() {
            0 => Err((None, "there is no host".to_owned())),
            1..=NODES_MAX => Ok(Self(found)),
            count => Err((
                None,
                format!("{count} hosts, and at most {NODES_MAX} can be"),
            )),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Host> {
        self.0.iter()
    }
}

impl Host {
    /// The value of `--nproc-per-node` there; `given` is what was asked for on every host.
    ///
    /// *Errors*: more ranks than the host has room for, or a word beside a number.
    pub(super) fn processes(&self, given: Option<Processes>) -> Result<String, Failure> {
        Ok(match (self.slots, given) {
            (None, None) => "auto".to_owned(),
            (Some(slots), None) => slots.to_string(),
            (None, Some(given)) => given.to_string(),
            (Some(slots), Some(Processes::Count(count))) if count <= slots => count.to_string(),
            (Some(slots), Some(given)) => {
                return Err(usage(
                    format!("{self} has {slots} slots, and --nproc-per-node says {given}"),
                    "leave one of the two out, or give --nproc-per-node a number that fits",
                ));
            }
        })
    }
}

/// As people call it.
impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (_, name) = self.target.rsplit_once('@').unwrap_or(("", &self.target));
        f.write_str(name)
    }
}

/// `HOST` or `HOST:N`; an IPv6 address stands in brackets if `:N` follows.
fn host(text: &str) -> Result<Host, String> {
    let (target, slots) = match text.rsplit_once(':') {
        Some((head, _)) if head.contains(':') && !head.ends_with(']') => (text, None),
        Some((head, count)) => (head, Some(slots(count)?)),
        None => (text, None),
    };
    // ssh would take a word that begins with a dash for an option.
    let is_odd = |c: char| c.is_whitespace() || c.is_control();
    if target.is_empty()
        || target.starts_with(['-', '@'])
        || target.ends_with('@')
        || target.contains(is_odd)
    {
        return Err(format!(
            "{text:?} is no host, expected HOST or HOST:N, such as node1:4"
        ));
    }
    Ok(Host {
        target: target.replace(['[', ']'], ""),
        slots,
    })
}

/// A line of a host file.
fn entry(line: &str) -> Result<Host, String> {
    let mut words = line.split_whitespace();
    let mut host = host(words.next().unwrap_or_default())?;
    for word in words {
        match word.split_once('=') {
            Some(("slots", count)) if host.slots.is_none() => host.slots = Some(slots(count)?),
            // Open MPI's limit for more ranks than slots, which are never started here.
            Some(("max_slots" | "max-slots", count)) => drop(slots(count)?),
            _ => return Err(format!("{word:?} has no meaning here, expected slots=N")),
        }
    }
    Ok(host)
}

fn slots(text: &str) -> Result<usize, String> {
    whole::<usize>(1..=NPROC_MAX as u64)(text)
        .map_err(|why| format!("{text:?} is no number of ranks: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(hosts: &Hosts) -> String {
        let show = |host: &Host| match host.slots {
            Some(slots) => format!("{}*{slots}", host.target),
            None => host.target.clone(),
        };
        hosts.iter().map(show).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn hosts_are_names_and_addresses_with_or_without_a_number_of_ranks() {
        let check = |text: &str, expect: Result<&str, &str>| match (Hosts::parse(text), expect) {
            (Ok(hosts), Ok(expect)) => assert_eq!(shown(&hosts), expect, "{text}"),
            (Err(why), Err(part)) => assert!(why.contains(part), "{text}: {why}"),
            (got, _) => panic!("{text}: {got:?}"),
        };
        check("a:4,b:2", Ok("a*4 b*2"));
        check("a", Ok("a"));
        check("me@a:4, 10.0.0.2", Ok("me@a*4 10.0.0.2"));
        check("[fe80::1]:3,::1,[::2]", Ok("fe80::1*3 ::1 ::2"));
        check("a,b,a:2", Err("a is there twice"));
        check("a:0", Err("expected a whole number from 1 to 1024"));
        check("a:x", Err("\"x\" is no number of ranks"));
        for text in ["", "a,,b", "-oProxyCommand=x", "a b", "me@", "@a", ":4"] {
            check(text, Err("is no host"));
        }
    }

    #[test]
    fn a_host_file_is_open_mpis_or_mpichs_and_a_wrong_line_is_named() {
        let check = |text: &str, expect: Result<&str, (Option<usize>, &str)>| match (
            Hosts::parse_file(text),
            expect,
        ) {
            (Ok(hosts), Ok(expect)) => assert_eq!(shown(&hosts), expect, "{text}"),
            (Err((line, why)), Err((number, part))) => {
                assert!(
                    line == number && why.contains(part),
                    "{text}: {line:?} {why}"
                );
            }
            (got, _) => panic!("{text}: {got:?}"),
        };
        let file = "# two\na slots=4 max_slots=8  # big\n\n me@b:2\nc\n";
        check(file, Ok("a*4 me@b*2 c"));
        check("a\n\nb slots=0", Err((Some(3), "\"0\" is no number")));
        check("a\nb cpu=2", Err((Some(2), "\"cpu=2\" has no meaning")));
        check("a:2 slots=3", Err((Some(1), "\"slots=3\" has no meaning")));
        check("a\nb\na", Err((Some(3), "a is there twice")));
        check("# none\n", Err((None, "there is no host")));
    }

    #[test]
    fn the_ranks_of_a_host_are_its_slots_or_what_was_asked_for_on_every_host() {
        let check = |slots, given: Option<&str>, expect: Option<&str>| {
            let host = Host {
                target: "me@a".to_owned(),
                slots,
            };
            let given = given.map(|text| Processes::parse(text).expect(text));
            assert_eq!(
                host.processes(given).ok().as_deref(),
                expect,
                "{slots:?} {given:?}"
            );
        };
        check(None, None, Some("auto"));
        check(Some(4), None, Some("4"));
        check(None, Some("gpu"), Some("gpu"));
        check(Some(4), Some("2"), Some("2"));
        check(Some(4), Some("5"), None);
        check(Some(4), Some("gpu"), None);
    }
}
