//! A small launcher that tests can signal and kill from outside, and a small worker that writes on the job page.
//!
//! `launch_probe launch [--nproc N] [--log-dir D] [--console raw] [--signals LIST] [--grace-ms N] [--stall-ms N] [--stacks] [--abort] [log options] -- program
//! args...` with `--nodes MIN:MAX --endpoint H:P [--host NAME] [--node-rank N] [--lease-ms N] [--last-call-ms N]
//! [--join-ms N] [--backend etcd] [--outage-ms N]` for several nodes, prints the outcome to standard error, one `key: value` a line, and exits with the
//! job's exit code.
//!
//! `launch_probe worker word...` obeys the words one after another; see [`obey`].

use std::process::ExitCode;
use std::time::{Duration, Instant};

use paceline_launch::{
    Cluster, Console, Job, LaunchError, LogFormat, OnStall, StaticPlace, StoreKind, run,
    shared_token,
};
use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::page::{
    Activity, JobPage, OpActivity, Phase, Revocation, Stopped, tell_misconfigured,
};
use paceline_rendezvous::stop::StopSignal;
use paceline_rendezvous::token::Token;

/// Longer than any test; so that nothing is left should a test end early.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    match args.next().as_deref() {
        Some("launch") => launch(args),
        Some("worker") => worker(args),
        other => panic!("expected `launch` or `worker`, got {other:?}"),
    }
}

fn launch(mut args: impl Iterator<Item = String>) -> ExitCode {
    let mut job = Job::new("true", 1, Token::generate().expect("randomness"));
    job.report_time = Duration::from_millis(300);
    let mut cluster: Option<Cluster> = None;
    while let Some(flag) = args.next() {
        let mut value = || args.next().expect("the flag needs a value");
        match flag.as_str() {
            "--nproc" => job.nproc = value().parse().expect("a number"),
            "--log-dir" => job.log_dir = Some(value().into()),
            "--console" => {
                job.console = if value() == "raw" {
                    Console::RankZeroRaw
                } else {
                    Console::Prefixed
                }
            }
            "--signals" => job.signals = value().parse().expect("signals"),
            "--fold" => job.logs.fold = true,
            "--timestamps" => job.logs.timestamps = true,
            "--json" => job.logs.format = LogFormat::Json,
            "--prefix" => job.logs.prefix = Some(value().parse().expect("a template")),
            "--redirects" => job.logs.redirects = value().parse().expect("streams"),
            "--tee" => job.logs.tee = value().parse().expect("streams"),
            "--local-ranks" => job.logs.local_ranks = Some(value().parse().expect("ranks")),
            "--filter-out" => job.logs.filter_out = value().parse().expect("words"),
            "--filter-err" => job.logs.filter_err = value().parse().expect("words"),
            "--restart-count" => job.restart_count = value().parse().expect("a number"),
            "--max-restarts" => job.max_restarts = value().parse().expect("a number"),
            "--stall-ms" => {
                job.stall.after = Some(Duration::from_millis(value().parse().expect("a number")));
            }
            "--stacks" => job.stall.stacks = true,
            "--abort" => job.stall.on_stall = OnStall::Abort,
            "--grace-ms" => job.grace = Duration::from_millis(value().parse().expect("a number")),
            "--nodes" => {
                let text = value();
                let (min, max) = text.split_once(':').unwrap_or((&text, &text));
                let number = |text: &str| text.parse().expect("a number");
                let mut nodes = Cluster::new(number(min), number(max), "");
                nodes.last_call = Duration::from_secs(1);
                nodes.notice_after = Duration::ZERO;
                cluster = Some(nodes);
                match shared_token() {
                    Ok(token) => job.token = token,
                    Err(error) => return refused(&error),
                }
            }
            "--endpoint" | "--host" | "--node-rank" | "--lease-ms" | "--last-call-ms"
            | "--join-ms" | "--backend" | "--outage-ms" => {
                let nodes = cluster.as_mut().expect("--nodes comes first");
                let text = value();
                let millis = || Duration::from_millis(text.parse().expect("a number"));
                match flag.as_str() {
                    "--endpoint" => nodes.endpoint = text,
                    "--backend" if text == "etcd" => nodes.store = StoreKind::Etcd,
                    "--outage-ms" => nodes.outage = millis(),
                    "--host" => nodes.host = text,
                    "--lease-ms" => nodes.lease = millis(),
                    "--last-call-ms" => nodes.last_call = millis(),
                    "--join-ms" => nodes.join_timeout = millis(),
                    _ => {
                        nodes.place = Some(StaticPlace {
                            node_rank: text.parse().expect("a number"),
                            master_addr: "127.0.0.1".to_owned(),
                            master_port: 29_555,
                        });
                    }
                }
            }
            "--" => job.program = value().into(),
            word => job.args.push(word.into()),
        }
    }
    job.cluster = cluster;
    match run(job) {
        Ok(outcome) => {
            if let Some(failure) = &outcome.failure {
                eprintln!("failure: {failure}");
            }
            if let Some(lost) = &outcome.lost {
                eprintln!("lost: {lost}");
            }
            eprintln!("left behind: {:?}", outcome.left_behind);
            eprintln!("notes: {:?}", outcome.notes);
            ExitCode::from(outcome.exit_code())
        }
        Err(error) => refused(&error),
    }
}

fn refused(error: &LaunchError) -> ExitCode {
    eprintln!("error: {error}\nhint: {:?}", error.hint());
    ExitCode::from(error.exit_code())
}

fn worker(words: impl Iterator<Item = String>) -> ExitCode {
    let number = |name: &str| -> usize {
        let text = std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is `{text}`"))
    };
    let page = JobPage::from_fd(number("PACELINE_PAGE_FD") as i32).expect("the launcher's page");
    let own = WorkerEnv::from_process().expect("the contract").local_rank;
    let words: Vec<String> = words.collect();
    for word in &words {
        if let Some(code) = obey(word, &words, &page, own) {
            return ExitCode::from(code);
        }
    }
    ExitCode::SUCCESS
}

/// One of the words, `name` or `name=value`; some end the worker.
fn obey(word: &str, words: &[String], page: &JobPage, own: usize) -> Option<u8> {
    let (name, value) = word.split_once('=').unwrap_or((word, ""));
    let number = || {
        value
            .parse::<usize>()
            .unwrap_or_else(|_| panic!("`{word}` needs a number"))
    };
    let activity = |phase, op| {
        page.slot(own).set_activity(&Activity {
            phase,
            step: 42,
            op,
        })
    };
    match name {
        // Joins as a rank of Paceline's does.
        "join" => {
            page.slot(own).set_pid(std::process::id());
            println!("joined");
        }
        "own-slot" => println!("slot {own} is mine"),
        "backward" => activity(Phase::Backward, None),
        "collective" => {
            activity(
                Phase::Communication,
                Some(OpActivity {
                    code: 1,
                    seq: number() as u64,
                    bucket: None,
                }),
            );
        }
        "blame" => page.slot(own).set_victim_of(number(), 0),
        "revoke" => {
            page.revoke(&Revocation {
                rank: Some(number()),
                text: "told by a worker".to_owned(),
            });
        }
        "misconfigured" => tell_misconfigured(number() != 0),
        "exit" => return Some(number() as u8),
        "stop-self" => {
            let own = rustix::process::getpid();
            rustix::process::kill_process(own, rustix::process::Signal::STOP)
                .expect("a signal to itself");
        }
        // Ends with 1 and says what it was told, as a rank does whose collective fails.
        "until-revoked" => {
            let told = page
                .wait_revoked(PATIENCE)
                .then(|| page.revocation())
                .flatten();
            println!("told: {told:?}");
            return Some(1);
        }
        // Looks at the page for requests from now on, as a rank does that saves and stops.
        "poll" => {
            page.slot(own).set_polls_stop();
            println!("polls");
        }
        // Goes on when it is asked to stop, or when this file is there, which it makes then; ends with 1 if nobody asks.
        "until-asked" => {
            let deadline = Instant::now() + PATIENCE;
            while page.stop_requested().is_none() && !std::path::Path::new(value).exists() {
                if Instant::now() >= deadline {
                    return Some(1);
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            if let (Some(signal), false) = (page.stop_requested(), value.is_empty()) {
                std::fs::write(format!("{value}.new"), signal.to_string()).expect("a file");
                std::fs::rename(format!("{value}.new"), value).expect("a file");
            }
        }
        // Has stopped after this step, in agreement with all other ranks: by this signal, or the one it was asked by.
        "stopped" => {
            let (step, signal) = value.split_once(',').unwrap_or((value, ""));
            let told = || {
                words
                    .iter()
                    .find_map(|word| word.strip_prefix("until-asked="))
            };
            let told = || std::fs::read_to_string(told()?).ok()?.parse().ok();
            let signal = (signal.parse().ok()).or_else(|| page.stop_requested());
            let signal = signal.or_else(told);
            page.slot(own).set_stopped(Stopped {
                signal: signal.and_then(StopSignal::new).expect("a signal"),
                step: step.parse().expect("a step"),
            });
        }
        "sleep" => std::thread::sleep(Duration::from_millis(number() as u64)),
        _ => panic!("unknown word `{word}`"),
    }
    None
}
