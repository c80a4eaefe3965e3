//! One node's checks as a process: `doctor_probe NODES ENDPOINT HOST TIMEOUT_SECONDS [NODE_RANK] [json]`.

use std::io::stdout;
use std::process::ExitCode;
use std::time::Duration;

use paceline_doctor::{Options, Verdict, examine};
use paceline_rendezvous::token::{TOKEN_VARIABLE, Token};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [nodes, endpoint, host, timeout, rest @ ..] = &args[..] else {
        eprintln!("usage: doctor_probe NODES ENDPOINT HOST TIMEOUT_SECONDS [NODE_RANK] [json]");
        return ExitCode::from(2);
    };
    let nodes = nodes.parse().expect("a number of nodes");
    let token = std::env::var(TOKEN_VARIABLE).ok();
    let options = Options {
        nodes_min: nodes,
        nodes_max: nodes,
        endpoint: endpoint.clone(),
        host: Some(host.clone()),
        node_rank: rest.iter().find_map(|word| word.parse().ok()),
        timeout: Duration::from_secs(timeout.parse().expect("seconds")),
        token: token.map(|hex| Token::from_hex(&hex).expect("a token")),
        ..Options::new(1)
    };
    match examine(&options, &|notice| eprintln!("{notice}")) {
        Ok(report) => {
            let json = rest.iter().any(|word| word == "json");
            report.write(json, &mut stdout().lock()).expect("written");
            match report.verdict() {
                Verdict::Sound => ExitCode::SUCCESS,
                Verdict::Fault => ExitCode::from(1),
                Verdict::Late => ExitCode::from(4),
            }
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(error.exit_code())
        }
    }
}
