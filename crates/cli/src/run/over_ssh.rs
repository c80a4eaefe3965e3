//! `paceline run --hosts`: a job on several hosts from this terminal, over the user's own ssh.

use std::ffi::OsString;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use paceline_launch::{Answer, Remote, RemoteEnd, Remotes};
use paceline_rendezvous::net::nodename;
use paceline_rendezvous::stop::signal_name;
use paceline_rendezvous::token::Token;
use paceline_words::counted;

use super::agent::{self, Check, Order, Ready, SSH_CONNECTION, VERSION};
use super::args::RunArgs;
use super::hosts::{Host, Hosts};
use crate::exit::{Exit, Failure, note, tell, warn};
use crate::job;

/// Names the command in ssh's place.
const SSH_VARIABLE: &str = "PACELINE_SSH";

/// How long a host may take to answer; `--rdzv-conf join_timeout` shortens it.
const ANSWERS_WITHIN: Duration = Duration::from_secs(30);
/// How long nodes wait for one another at the end, unless `--rdzv-conf close_timeout` says.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);
/// What a launcher takes to end beyond its own times.
const SLACK: Duration = Duration::from_secs(10);

/// Variables of ours that do not go along to other hosts: each has its own.
const OF_ONE_HOST: [&str; 9] = [
    "PACELINE_JOB_TOKEN",
    "PACELINE_STORE",
    "PACELINE_HOST_ID",
    "PACELINE_LAUNCHER",
    "PACELINE_LOCAL_RANK",
    "PACELINE_TERMINAL_COLUMNS",
    "PACELINE_POD_NAMESPACE",
    "PACELINE_SYSTEM_ROOT",
    SSH_VARIABLE,
];

/// Starts the job on these hosts and waits for its end.
///
/// *Errors*: a host cannot take part; then nothing was started. Or one was lost.
pub(super) fn run(args: &RunArgs, hosts: &Hosts) -> Result<Exit, Failure> {
    for warning in &args.warnings {
        warn(warning);
    }
    if args.stdin.is_some_and(|rank| rank > 0) {
        warn("--stdin has no effect: with --hosts no rank reads standard input");
    }
    let ssh = args
        .hosts
        .ssh
        .clone()
        .or_else(|| std::env::var(SSH_VARIABLE).ok());
    let ssh: Vec<String> = ssh
        .unwrap_or_default()
        .split_whitespace()
        .map(str::to_owned)
        .collect();
    let program = text(job::own_program()?)?;
    let remote = |host: &Host| -> Result<Remote, Failure> {
        Ok(Remote {
            name: host.to_string(),
            command: command(host, &ssh, &program),
            check: check(args, host)?,
        })
    };
    let remotes = hosts.iter().map(remote).collect::<Result<_, _>>()?;
    let mut remotes = Remotes::start(remotes, &args.signals).map_err(job::refused)?;
    let within = args
        .nodes
        .conf
        .join_timeout
        .unwrap_or(ANSWERS_WITHIN)
        .min(ANSWERS_WITHIN);
    let answers = match remotes.answers(within) {
        Ok(answers) => answers,
        Err(signal) => {
            tell(format_args!(
                "{}: stopped before the job began",
                signal_name(signal)
            ));
            return Ok(Exit::Signal(u8::try_from(signal).unwrap_or(u8::MAX)));
        }
    };
    let ready = all_ready(hosts, &answers, &|host| remotes.told(host), &program)?;
    let orders = orders(args, hosts, &ready)?;
    note(&summary(hosts, &ready));
    let close = args.nodes.conf.close.unwrap_or(CLOSE_TIMEOUT);
    let ends = remotes.run(&orders, args.shutdown_timeout + close + SLACK);
    let names: Vec<_> = hosts.iter().map(ToString::to_string).collect();
    ending(&names, &ends)
}

/// What starts each host.
///
/// *Errors*: the system has no randomness to give, or the first host no port.
fn orders(args: &RunArgs, hosts: &Hosts, ready: &[Ready]) -> Result<Vec<String>, Failure> {
    let (master_addr, master_port) = meeting(args, hosts, ready)?;
    let token =
        Token::generate().map_err(|error| Failure::new(Exit::Environment, &error, error.hint()))?;
    let order = |node_rank| Order {
        token: token.to_hex(),
        nodes: ready.len(),
        node_rank,
        master_addr: master_addr.clone(),
        master_port,
    };
    Ok((0..ready.len()).map(|node| json(&order(node))).collect())
}

fn summary(hosts: &Hosts, ready: &[Ready]) -> String {
    let ranks = ready.iter().map(|ready| ready.ranks).sum();
    let each = hosts.iter().zip(ready);
    let each = each.map(|(host, ready)| format!("{host} ({})", ready.ranks));
    let each = each.collect::<Vec<_>>().join(", ");
    let (ranks, hosts) = (counted(ranks, "rank"), counted(ready.len(), "host"));
    format!("{ranks} on {hosts}: {each}")
}

/// The command that leads to the launcher of a host: the file that this process runs, else one of the same name in `PATH`.
/// This machine needs no ssh.
fn command(host: &Host, ssh: &[String], program: &str) -> Vec<OsString> {
    let script = format!(
        r#"[ -x "$0" ] && exec "$0" {name}; exec "${{0##*/}}" {name}"#,
        name = agent::NAME
    );
    if is_here(&host.target, &nodename()) {
        // It has been reached by no connection, even if this terminal has.
        let words = ["env", "-u", SSH_CONNECTION, "sh", "-c", &script, program];
        return words.map(OsString::from).into();
    }
    // Login shells of any kind understand these words.
    let line = format!("exec sh -c {} {}", quoted(&script), quoted(program));
    let default = ["ssh".to_owned()];
    let ssh = if ssh.is_empty() { &default[..] } else { ssh };
    // No question, for a password or about a key, that nobody would see; no terminal, which would change bytes.
    let options = ["-T", "-x", "-o", "BatchMode=yes", &host.target, &line];
    ssh.iter()
        .map(OsString::from)
        .chain(options.map(OsString::from))
        .collect()
}

/// Whether a host is this machine, by a name that cannot be another's.
fn is_here(target: &str, nodename: &str) -> bool {
    let short = nodename.split('.').next().unwrap_or_default();
    ["localhost", nodename, short].contains(&target)
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The line with what a host is to check.
fn check(args: &RunArgs, host: &Host) -> Result<String, Failure> {
    let given = args.given.processes.then_some(args.processes);
    let mut words = args.passed.clone();
    words.push(format!("--nproc-per-node={}", host.processes(given)?));
    words.extend(["--stdin=none".to_owned(), "--".to_owned()]);
    words.push(text(args.program.clone())?);
    for arg in &args.args {
        words.push(text(arg)?);
    }
    let is_passed = |name: &str| name.starts_with("PACELINE_") && !OF_ONE_HOST.contains(&name);
    let mut variables: Vec<_> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| is_passed(name))
        .collect();
    variables.push(("PACELINE_HOST_ID".to_owned(), host.to_string()));
    Ok(json(&Check {
        version: VERSION.to_owned(),
        folder: text(folder()?)?,
        variables,
        words,
    }))
}

/// This folder by the name that the shell has for it, which other hosts know rather than the one behind links.
fn folder() -> Result<PathBuf, Failure> {
    let id = |path: &Path| {
        std::fs::metadata(path)
            .ok()
            .map(|file| (file.dev(), file.ino()))
    };
    let named = std::env::var_os("PWD").map(PathBuf::from);
    let named = named.filter(|path| path.is_absolute() && id(path) == id(Path::new(".")));
    named
        .map_or_else(std::env::current_dir, Ok)
        .map_err(|error| Failure::environment(format!("this folder has no name: {error}")))
}

/// A word that travels as JSON.
fn text(word: impl Into<OsString>) -> Result<String, Failure> {
    word.into().into_string().map_err(|word| {
        Failure::usage(format!(
            "{} is no text, and cannot be told to other hosts",
            word.display()
        ))
    })
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("text and numbers are JSON")
}

/// The answers, if all hosts are ready; otherwise says of each other one what is wrong.
fn all_ready(
    hosts: &Hosts,
    answers: &[Answer],
    told: &dyn Fn(usize) -> Vec<String>,
    program: &str,
) -> Result<Vec<Ready>, Failure> {
    let mut ready = Vec::new();
    let mut failures = Vec::new();
    for (number, (host, answer)) in hosts.iter().zip(answers).enumerate() {
        match answer {
            Answer::Ready(answer) => match serde_json::from_str(answer) {
                Ok(answer) => ready.push(answer),
                Err(error) => failures.push(Failure::environment(format!(
                    "{host}: it answers nonsense: {error}"
                ))),
            },
            Answer::Ended(code) => failures.push(refused(host, *code, &told(number), program)),
            Answer::Late => failures.push(late(host, &told(number))),
        }
    }
    for failure in &failures {
        let _ = failure.report();
    }
    let Some(first) = failures.first() else {
        return Ok(ready);
    };
    let count = answers.len();
    let message = format!(
        "{} of {} cannot take part; nothing was started",
        failures.len(),
        counted(count, "host")
    );
    Err(Failure::new(first.exit(), message, None))
}

fn late(host: &Host, told: &[String]) -> Failure {
    let last = told
        .last()
        .map_or_else(String::new, |line| format!("; it said: {line}"));
    let hint = format!(
        "is it up, and does `ssh {} true` come back soon?",
        host.target
    );
    Failure::new(
        Exit::Deadline,
        format!("{host}: no answer in time{last}"),
        Some(hint),
    )
}

/// Why a host is not ready, from the code and the words of its command.
fn refused(host: &Host, code: Option<i32>, told: &[String], program: &str) -> Failure {
    let target = &host.target;
    let all = told.join("\n");
    let has = |words: &[&str]| words.iter().any(|word| all.contains(word));
    let ssh = |hint: String| {
        let said = told
            .last()
            .map_or("ssh ended without a word", String::as_str);
        Failure::new(Exit::Environment, format!("{host}: {said}"), Some(hint))
    };
    match code {
        Some(255) if has(&["HOST IDENTIFICATION HAS CHANGED"]) => ssh(format!(
            "its key is not the one that is known: find out why, then forget the old one by `ssh-keygen -R {host}`"
        )),
        Some(255) if has(&["Host key verification failed"]) => ssh(format!(
            "its key is not known here: `ssh {target}` once by hand shows it and asks"
        )),
        Some(255) if has(&["Permission denied", "Too many authentication failures"]) => {
            ssh(format!(
                "passwords are never asked for: `ssh-copy-id {target}` brings a key there, `ssh-add` unlocks it here"
            ))
        }
        Some(255) if has(&["Could not resolve"]) => {
            ssh("check the name, or give it an entry in ~/.ssh/config".to_owned())
        }
        Some(255) => ssh(format!(
            "is it up, and does sshd run there? `ssh {target} true` has to work"
        )),
        Some(126 | 127) => {
            let hint = format!(
                "install it there as {program}, or in the PATH that `ssh {target} 'echo $PATH'` shows"
            );
            Failure::new(
                Exit::Environment,
                format!("{host}: paceline is not there"),
                Some(hint),
            )
        }
        _ if has(&["unrecognized subcommand"]) => {
            let hint = format!("install version {VERSION} on all hosts");
            Failure::new(
                Exit::Environment,
                format!("{host}: paceline is an older version there"),
                Some(hint),
            )
        }
        _ => {
            let line = |label: &'static str| told.iter().find_map(|line| line.strip_prefix(label));
            let why = line("error: ").or(told.last().map(String::as_str));
            let why = why.unwrap_or("its launcher ended without a word");
            let exit = if code == Some(2) {
                Exit::Usage
            } else {
                Exit::Environment
            };
            Failure::new(
                exit,
                format!("{host}: {why}"),
                line("hint: ").map(str::to_owned),
            )
        }
    }
}

/// Address and port of the first host for the others.
///
/// *Errors*: the port is not known.
fn meeting(args: &RunArgs, hosts: &Hosts, ready: &[Ready]) -> Result<(String, u16), Failure> {
    let first = hosts
        .iter()
        .next()
        .map(ToString::to_string)
        .unwrap_or_default();
    let addr = args
        .nodes
        .master_addr
        .clone()
        .unwrap_or_else(|| address(&first, ready));
    let port = args.nodes.master_port.or_else(|| ready.first()?.port);
    let port = port.ok_or_else(|| Failure::environment(format!("{first}: no port is free")))?;
    Ok((addr, port))
}

/// By what address the other hosts reach the first. What ssh has reached it by is better than its name, which may be one of
/// ssh's configuration alone. This machine is reached by the address from which it has reached others.
fn address(first: &str, ready: &[Ready]) -> String {
    let ends = |ready: &Ready| {
        let words: Vec<_> = ready.connection.as_deref()?.split(' ').collect();
        let [from, _, to, _] = words[..] else {
            return None;
        };
        let known = |addr: &str| addr.parse::<IpAddr>().ok();
        Some((known(from)?, known(to)?))
    };
    let (own, others) = match ready.split_first() {
        Some((own, others)) => (ends(own), others),
        None => (None, ready),
    };
    let from = others.iter().filter_map(ends).map(|(from, _)| from);
    let from = from.into_iter().find(|from| !from.is_loopback());
    match (own.map(|(_, to)| to), from) {
        (Some(to), _) if !to.is_loopback() => to.to_string(),
        (_, Some(addr)) | (Some(addr), None) => addr.to_string(),
        (None, None) => first.to_owned(),
    }
}

/// How the job has ended, from the ends of its launchers: all of them report the same failure.
fn ending(names: &[String], ends: &[RemoteEnd]) -> Result<Exit, Failure> {
    let code = ends.iter().find_map(|end| match end {
        RemoteEnd::Code(0) => None,
        RemoteEnd::Code(code) => Some(*code),
        RemoteEnd::Lost | RemoteEnd::Late => None,
    });
    let exit = match code.unwrap_or(0) {
        // As a rank leaves it: 255 is no signal.
        code @ 129..=192 => Exit::Signal(code - 128),
        code => Exit::of_child(code.into()),
    };
    let of = |which: &RemoteEnd| {
        let names = names.iter().zip(ends).filter(|(_, end)| *end == which);
        names
            .map(|(name, _)| name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let (lost, late) = (of(&RemoteEnd::Lost), of(&RemoteEnd::Late));
    let message = match (lost.is_empty(), late.is_empty()) {
        (true, true) => return Ok(exit),
        (false, _) => {
            format!("{lost}: the connection or the launcher was lost, and what ran there ends")
        }
        (true, false) => {
            format!("{late}: the launcher did not end in time, and its connection was closed")
        }
    };
    let exit = if exit == Exit::Done {
        Exit::JobFailed
    } else {
        exit
    };
    Err(Failure::new(exit, message, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(target: &str) -> Host {
        Host {
            target: target.to_owned(),
            slots: None,
        }
    }

    #[test]
    fn a_word_reaches_a_shell_as_it_is() {
        for word in ["", "a b", "it's", "$HOME `x` \\ \"!\"", "*\n'';"] {
            let line = format!("printf %s {}", quoted(word));
            let said = std::process::Command::new("sh")
                .args(["-c", &line])
                .output();
            assert_eq!(said.expect("a shell").stdout, word.as_bytes());
        }
    }

    #[test]
    fn ssh_gets_its_options_the_host_and_one_line_and_this_machine_needs_none() {
        let ssh = ["ssh", "-p", "2222"].map(str::to_owned);
        let words = command(&host("me@a"), &ssh, "/it's/paceline");
        let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
        let [start @ .., line] = &words[..] else {
            panic!("{words:?}");
        };
        let expect = "ssh -p 2222 -T -x -o BatchMode=yes me@a";
        assert_eq!(start.join(" "), expect);
        assert!(
            line.starts_with("exec sh -c '") && line.ends_with(r"'/it'\''s/paceline'"),
            "{line}"
        );
        let words = command(&host("localhost"), &ssh, "/paceline");
        assert_eq!(words.first().expect("a program"), "env");
        assert!(is_here("n1", "n1.cluster") && is_here("n1.cluster", "n1.cluster"));
        assert!(!is_here("n2", "n1.cluster") && !is_here("me@n1", "n1"));
    }

    #[test]
    fn the_first_host_is_reached_as_ssh_reached_it() {
        let ready = |connection: &str| Ready {
            connection: Some(connection.to_owned()).filter(|text| !text.is_empty()),
            ..Ready::default()
        };
        let check = |connections: &[&str], expect: &str| {
            let all: Vec<_> = connections.iter().map(|&text| ready(text)).collect();
            assert_eq!(address("a", &all), expect, "{connections:?}");
        };
        check(
            &["10.0.0.9 4 10.0.0.1 22", "10.0.0.9 5 10.0.0.2 22"],
            "10.0.0.1",
        );
        check(&["", "10.0.0.9 5 10.0.0.2 22"], "10.0.0.9");
        check(&["", "::1 5 ::1 22"], "a");
        check(&["::1 5 ::1 22", "::1 6 ::1 22"], "::1");
        check(&["::1 5 ::1 22", "10.0.0.9 5 10.0.0.2 22"], "10.0.0.9");
        check(&["x y z", ""], "a");
        check(&["10.0.0.9 4 $(reboot) 22"], "a");
    }

    #[test]
    fn what_ssh_or_a_launcher_says_becomes_an_error_of_its_host_with_advice() {
        let check = |code, told: &[&str], message: &str, hint: &str| {
            let told: Vec<_> = told.iter().map(|&line| line.to_owned()).collect();
            let failure = refused(&host("me@b"), code, &told, "/p/paceline");
            let text = failure.in_full();
            assert!(text.starts_with(&format!("b: {message}")), "{text}");
            assert!(text.contains(hint), "{text}");
        };
        let denied = ["Hello.", "me@b: Permission denied (publickey)."];
        check(Some(255), &denied, denied[1], "`ssh-copy-id me@b`");
        let unknown = ["Host key verification failed."];
        check(Some(255), &unknown, unknown[0], "`ssh me@b` once by hand");
        let changed = [
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @",
            unknown[0],
        ];
        check(Some(255), &changed, unknown[0], "`ssh-keygen -R b`");
        let nowhere = ["ssh: Could not resolve hostname b: Name or service not known"];
        check(Some(255), &nowhere, nowhere[0], "check the name");
        let closed = ["ssh: connect to host b port 22: Connection refused"];
        check(Some(255), &closed, closed[0], "does sshd run there?");
        check(Some(255), &[], "ssh ended without a word", "has to work");
        check(
            Some(127),
            &["sh: 1: exec: paceline: not found"],
            "paceline is not there",
            "/p/paceline",
        );
        check(
            Some(2),
            &["error: unrecognized subcommand 'host-agent'"],
            "paceline is an older",
            VERSION,
        );
        check(
            Some(3),
            &["error: no GPU", "hint: buy one"],
            "no GPU",
            "hint: buy one",
        );
        check(None, &[], "its launcher ended without a word", "");
    }

    #[test]
    fn the_job_ends_as_its_launchers_say_and_a_lost_one_is_named() {
        use RemoteEnd::{Code, Late, Lost};
        let check = |ends: [RemoteEnd; 2], expect: (u8, &str)| {
            let got = match ending(&["a", "b"].map(str::to_owned), &ends) {
                Ok(exit) => (exit.code(), String::new()),
                Err(failure) => (failure.exit().code(), failure.to_string()),
            };
            assert_eq!(got.0, expect.0, "{ends:?}");
            assert!(got.1.starts_with(expect.1), "{ends:?}: {got:?}");
        };
        check([Code(0), Code(0)], (0, ""));
        check([Code(0), Code(7)], (7, ""));
        check([Code(143), Code(143)], (143, ""));
        check([Code(255), Code(255)], (255, ""));
        check([Code(1), Lost], (1, "b: the connection"));
        check([Lost, Code(0)], (1, "a: the connection"));
        check([Lost, Lost], (1, "a, b: the connection"));
        check([Late, Code(0)], (1, "a: the launcher did not end"));
    }
}
