//! The part of a rank's process: does what it is told, and says how it went.

use std::io::BufRead;
use std::sync::mpsc::channel;
use std::time::Duration;

use paceline_collective::{Error, GroupOptions, ProcessGroup};
use rustix::process::{Resource, Rlimit, setrlimit};

use super::ops::Op;
use crate::common::job::{ROLE, say};

/// True when this process is a rank and has played it. Its role is two deadlines in milliseconds: to form the group, and of
/// what is done "forever".
///
/// "form", "once OP", "forever OP" and "leave" are done one after another; "exit" and "abort" at once, whatever the rank
/// is doing. After a failure, or when it has left, the rank ends at the next order; the end of its input ends it as well.
pub fn played() -> bool {
    let Ok(role) = std::env::var(ROLE) else {
        return false;
    };
    // A rank that aborts must not leave a core file.
    let none = Some(0);
    let _ = setrlimit(
        Resource::Core,
        Rlimit {
            current: none,
            maximum: none,
        },
    );
    let (sender, orders) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            match line.as_str() {
                "exit" => std::process::exit(0),
                "abort" => std::process::abort(),
                _ => drop(sender.send(line)),
            }
        }
    });
    let (forming, deadline) = role.split_once(' ').unwrap();
    let millis = |number: &str| Duration::from_millis(number.parse().unwrap());
    let options = GroupOptions {
        timeout: millis(forming),
        arena_bytes: Some(1 << 30),
        ..GroupOptions::default()
    };
    let mut group: Option<ProcessGroup> = None;
    for order in &orders {
        let done = match (order.split_once(' '), &group) {
            (None, None) if order == "form" => ProcessGroup::init(&options).map(|formed| {
                say(&format!("formed {}", formed.transport()));
                group = Some(formed);
            }),
            (None, Some(formed)) if order == "leave" => {
                let health = formed.health();
                drop(group.take());
                say(&match health {
                    Ok(()) => "left".to_owned(),
                    Err(error) => words("left after", &error),
                });
                break;
            }
            (Some(("once", op)), Some(group)) => Op::parse(op).run(group).map(|()| say("done")),
            (Some(("forever", op)), Some(group)) => {
                group.set_timeout(millis(deadline));
                Err(forever(&Op::parse(op), group))
            }
            _ => panic!("cannot {order}"),
        };
        if let Err(error) = done {
            say(&words("failed", &error));
            drop(group.take());
            say("gone");
            break;
        }
    }
    // What is left of the group now would be left for ever; the test looks.
    let _ = orders.recv();
    true
}

fn forever(op: &Op, group: &ProcessGroup) -> Error {
    say("begins");
    let mut told = false;
    loop {
        if let Err(error) = op.run(group) {
            return error;
        }
        if !told {
            say("runs");
            told = true;
        }
    }
}

/// "failed 1: rank 1 died"; "-" for nobody.
fn words(what: &str, error: &Error) -> String {
    let culprit = error.culprit().map_or("-".into(), |rank| rank.to_string());
    format!("{what} {culprit}: {error}")
}
