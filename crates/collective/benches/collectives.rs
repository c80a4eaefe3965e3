//! The operations of a group, measured as `paceline bench` does, without building the program.
//!
//! ```text
//! cargo bench -p paceline-collective --bench collectives -- [OPERATION]... [OPTION]...
//!     --nproc-per-node N        ranks, 2 if not given
//!     --transport NAME          shm, tcp, auto; `local` makes the ranks threads of one process
//!     --memory arena|ordinary
//!     --min-bytes SIZE  --max-bytes SIZE  --factor N, or --sizes SIZE,...
//!     --iterations N | --seconds S
//!     --json                    one record a line
//!     --quick                   three calls of each size; also what a run by `cargo test` does, with every operation
//! ```
//!
//! Ranks are processes: this program starts itself again for each, with the environment contract.

use std::process::{Child, Command, ExitCode};
use std::time::Duration;

use paceline_collective::bench::{self, Amount, Memory, Op, Record, Settings, Steps, parse_bytes};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_rendezvous::env::{WorkerEnv, worker_vars};
use paceline_rendezvous::store::Server;
use paceline_rendezvous::token::Token;

/// Set in the processes that are ranks.
const RANK_VARIABLE: &str = "PACELINE_BENCH_RANK";

/// What the command line says.
struct Asked {
    settings: Settings,
    ranks: usize,
    transport: String,
    json: bool,
}

fn main() -> ExitCode {
    let asked = match read(std::env::args().skip(1)) {
        Ok(asked) => asked,
        Err(message) => {
            eprintln!("error: {message}");
            return ExitCode::from(2);
        }
    };
    if std::env::var_os(RANK_VARIABLE).is_some() {
        let group = ProcessGroup::init(&GroupOptions::default()).expect("a group");
        measure(&group, &asked);
        return ExitCode::SUCCESS;
    }
    if asked.transport == "local" {
        threads(&asked);
        return ExitCode::SUCCESS;
    }
    match processes(&asked) {
        0 => ExitCode::SUCCESS,
        failed => {
            eprintln!("error: {failed} ranks failed");
            ExitCode::FAILURE
        }
    }
}

/// cargo says `--bench` for a measurement, and nothing in tests.
fn read(mut arguments: impl Iterator<Item = String>) -> Result<Asked, String> {
    let mut settings = Settings::default();
    let (mut ops, mut ranks, mut transport, mut json) = (Vec::new(), 2, "shm".to_owned(), false);
    let (mut min, mut max, mut factor, mut list) = (8, 64 << 20, 8, None);
    let mut quick = true;
    while let Some(word) = arguments.next() {
        let mut value = || {
            let value = arguments.next();
            value.ok_or_else(|| format!("{word} needs a value"))
        };
        let bytes = |text: String| parse_bytes(&text).map_err(|error| error.to_string());
        match word.as_str() {
            "--bench" => quick = false,
            "--quick" => quick = true,
            "--json" => json = true,
            "--nproc-per-node" => ranks = number(&value()?)?,
            "--transport" => transport = value()?,
            "--memory" => {
                let name = value()?;
                settings.memory = bench::named(&Memory::ALL, |one| one.name().into(), &name)
                    .ok_or_else(|| format!("{name} is no memory"))?;
            }
            "--min-bytes" => min = bytes(value()?)?,
            "--max-bytes" => max = bytes(value()?)?,
            "--factor" => factor = number(&value()?)?,
            "--sizes" => {
                let sizes = value()?;
                let sizes: Result<_, _> = sizes.split(',').map(|size| bytes(size.into())).collect();
                list = Some(sizes?);
            }
            "--iterations" => settings.amount = Amount::Iterations(number(&value()?)?),
            "--seconds" => {
                let seconds = value()?.parse().ok().filter(|s: &f64| *s > 0.0 && *s < 1e4);
                let seconds = seconds.ok_or("--seconds needs a number above 0")?;
                settings.amount = Amount::Time(Duration::from_secs_f64(seconds));
            }
            name => ops.push(
                bench::named(&Op::ALL, |op| op.name().into(), name)
                    .ok_or_else(|| format!("{name} is neither an operation nor an option"))?,
            ),
        }
    }
    settings.sizes = list.unwrap_or_else(|| bench::sizes(min, max, &Steps::Factor(factor)));
    if quick {
        settings.amount = Amount::Iterations(3);
        settings.warmup = 1;
        settings.stream_bytes = 1 << 20;
        settings.sizes.retain(|bytes| *bytes <= 1 << 20);
    }
    settings.ops = match ops.len() {
        0 if quick => Op::ALL.to_vec(),
        0 => settings.ops,
        _ => ops,
    };
    Ok(Asked {
        settings,
        ranks,
        transport,
        json,
    })
}

fn number(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| *count > 0);
    count.ok_or_else(|| format!("{text} is no number above 0"))
}

fn measure(group: &ProcessGroup, asked: &Asked) {
    let print = |record: &Record| {
        if asked.json {
            println!("{}", serde_json::to_string(record).expect("plain data"));
        } else {
            println!("{}", bench::line(record));
        }
        if let Record::Timing(timing) = record {
            assert!(timing.wrong.is_none_or(|wrong| wrong == 0), "{timing:?}");
        }
    };
    bench::run(group, &asked.settings, print).expect("a measurement");
}

fn threads(asked: &Asked) {
    let groups = ProcessGroup::local(asked.ranks, &GroupOptions::default()).expect("a group");
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || measure(&group, asked));
        }
    });
}

/// Starts the ranks and waits for them; returns how many failed.
fn processes(asked: &Asked) -> usize {
    let token = Token::generate().expect("the system's randomness");
    let server = Server::bind(([127, 0, 0, 1], 0).into(), &token).expect("a free port");
    let start = |rank| -> Child {
        let env = WorkerEnv {
            rank,
            world: asked.ranks,
            local_rank: rank,
            local_world: asked.ranks,
            master_addr: server.addr().ip().to_string(),
            master_port: server.addr().port(),
            store: Some(server.addr().to_string()),
            token: token.clone(),
            token_is_secret: true,
            transport: Some(asked.transport.clone()),
            ..WorkerEnv::alone()
        };
        let program = std::env::current_exe().expect("this program's own file");
        let mut command = Command::new(program);
        command
            .args(std::env::args_os().skip(1))
            .env(RANK_VARIABLE, "1")
            .envs(worker_vars(&env));
        command.spawn().expect("a process")
    };
    let ranks: Vec<Child> = (0..asked.ranks).map(start).collect();
    let ended = ranks
        .into_iter()
        .map(|mut rank| rank.wait().expect("its end"));
    ended.filter(|status| !status.success()).count()
}
