//! What a server is sent, and what people are told of one that cannot be used.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;

use paceline_testing::tracking::TrackingServer;

use super::*;

fn client(url: &str, variables: &'static [(&str, &str)]) -> Client {
    let variable = |name: &str| {
        let found = variables.iter().find(|(other, _)| *other == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    Client::new(url, variable).expect("a client")
}

#[test]
fn credentials_are_those_of_mlflows_client() {
    let server = TrackingServer::start();
    let sent = |variables| {
        client(server.url(), variables)
            .experiment("test")
            .expect("an experiment");
        server.authorization()
    };
    const TOKEN: (&str, &str) = ("MLFLOW_TRACKING_TOKEN", "t0ken");
    const USER: (&str, &str) = ("MLFLOW_TRACKING_USERNAME", "me");
    const PASSWORD: (&str, &str) = ("MLFLOW_TRACKING_PASSWORD", "secret");
    assert_eq!(sent(&[USER, ("MLFLOW_TRACKING_TOKEN", "")]), None);
    assert_eq!(sent(&[USER, TOKEN]).as_deref(), Some("Bearer t0ken"));
    let basic = sent(&[USER, PASSWORD, TOKEN]);
    assert_eq!(basic.as_deref(), Some("Basic bWU6c2VjcmV0"));
}

#[test]
fn names_and_values_are_such_as_mlflow_takes() {
    for (tag, name) in [
        ("train/loss", "train/loss"),
        ("held_out/top-5 acc.", "held_out/top-5 acc."),
        ("held_out/정확도", "held_out/정확도"),
        ("held_out/F1 @ 50%", "held_out/F1 _ 50_"),
        ("held_out//../x/", "held_out/_/_/x/_"),
    ] {
        assert_eq!(metric_name(tag), name);
    }
    assert_eq!(metric_name(&"x".repeat(300)).len(), 250);

    let server = TrackingServer::start();
    let client = client(server.url(), &[]);
    let experiment = client.experiment("test").expect("an experiment");
    let run_id = client.create_run(&experiment, "run", &[]).expect("a run");
    let params = pairs((0..101).map(|_| ("key", "é".repeat(6001))));
    client.log(&run_id, "params", &params[..2]).expect("cut");
    let run = server.runs().remove(0);
    assert_eq!(run.params["key"].chars().count(), 6000);
    let short = pairs((0..101).map(|_| ("key", String::new())));
    client.log(&run_id, "params", &short).expect("two requests");
}

/// Answers one request with this.
fn answering(status: &str, body: &str) -> String {
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(answer.as_bytes());
    });
    url
}

#[test]
fn a_server_that_cannot_be_used_is_named_with_the_reason_and_what_to_do() {
    let refused = |url: &str| {
        let refused = client(url, &[]).experiment("test").expect_err("refused");
        let text = format!("{refused}\nhint: {}", refused.hint.unwrap_or("none"));
        text.replace(url, "URL")
    };
    const START: &str =
        "hint: start `mlflow server`, and name its address, such as --mlflow http://127.0.0.1:5000";
    const SET: &str =
        "hint: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN";
    let nothing = format!("http://127.0.0.1:{}", paceline_testing::free_ports(1));
    for (url, expected, hint) in [
        (
            nothing,
            "no MLflow server answers at URL: connection refused",
            START,
        ),
        (
            answering("200 OK", "<p/>"),
            "no MLflow server answers at URL: its answer is not JSON",
            START,
        ),
        (
            answering("200 OK", "{}"),
            "no MLflow server answers at URL: its answer lacks /experiment/experiment_id",
            START,
        ),
        (
            answering("502 Bad Gateway", "<p/>"),
            "no MLflow server answers at URL: 502 Bad Gateway",
            START,
        ),
        (
            answering("401 Unauthorized", "log \x1b[m in"),
            "MLflow at URL refuses (401 Unauthorized): log ?[m in",
            SET,
        ),
        (
            answering(
                "400 Bad Request",
                r#"{"error_code":"BAD","message":"it is deleted"}"#,
            ),
            "MLflow at URL refuses (BAD): it is deleted",
            "hint: none",
        ),
    ] {
        assert_eq!(refused(&url), format!("{expected}\n{hint}"));
    }
}
