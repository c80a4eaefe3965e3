//! What reaches a stand-in for a server, and MLflow itself.

use std::fs::{self, File};
use std::io::Write;
use std::net::TcpListener;

use paceline_testing::tracking::TrackingServer;
use tempfile::TempDir;

use super::*;

fn client(url: &str, variables: &'static [(&str, &str)]) -> Client {
    let variable = |name: &str| {
        let found = variables.iter().find(|(other, _)| *other == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    Client::new(url, variable).expect("a client")
}

/// A run on a new server, and a follower that has sent nothing.
fn begun() -> (TrackingServer, TempDir, Follower) {
    let server = TrackingServer::start();
    let client = client(server.url(), &[]);
    let experiment = client.experiment("test").expect("an experiment");
    let run_id = client.create_run(&experiment, "run", &[]).expect("a run");
    let folder = tempfile::tempdir().expect("a folder");
    let follower = Follower::new(client, run_id, folder.path(), "paceline train");
    (server, folder, follower)
}

fn step(step: u64, loss: f64) -> String {
    format!("{{\"kind\":\"step\",\"step\":{step},\"loss\":{loss}}}\n")
}

/// Replaces the metrics of a run, as a resumed job does.
fn replace(folder: &TempDir, lines: &[String]) {
    let beside = folder.path().join("new");
    fs::write(&beside, lines.concat()).expect("written");
    fs::rename(beside, folder.path().join("metrics.jsonl")).expect("replaced");
}

fn append(folder: &TempDir, line: &str) {
    let path = folder.path().join("metrics.jsonl");
    let mut file = File::options().append(true).open(path).expect("a file");
    file.write_all(line.as_bytes()).expect("written");
}

/// Sends until nothing is left.
fn send_all(follower: &mut Follower) {
    while follower.send().expect("sent") {}
}

fn losses(server: &TrackingServer) -> Vec<(u64, f64)> {
    let metrics = server.runs().remove(0).metrics;
    let losses = metrics.into_iter().filter(|(key, ..)| key == "train/loss");
    losses.map(|(_, step, value)| (step, value)).collect()
}

#[test]
fn a_long_run_is_sent_in_requests_that_the_server_takes() {
    let (server, folder, mut follower) = begun();
    assert!(!follower.send().expect("nothing yet"));
    let lines: Vec<_> = (1..=2500).map(|number| step(number, 0.5)).collect();
    replace(&folder, &lines);
    send_all(&mut follower);
    let steps: Vec<_> = losses(&server).iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, (1..=2500).collect::<Vec<_>>());
    let batches = server
        .calls()
        .into_iter()
        .filter(|call| call == "runs/log-batch");
    assert_eq!(batches.count(), 3);
}

#[test]
fn steps_that_are_done_again_are_sent_once() {
    let (server, folder, mut follower) = begun();
    let start = |step: u64, world: u64| {
        format!("{{\"kind\":\"start\",\"step\":{step},\"world\":{world}}}\n")
    };
    replace(
        &folder,
        &[start(0, 4), step(1, 1.0), step(2, 2.0), step(3, 3.0)],
    );
    send_all(&mut follower);
    replace(
        &folder,
        &[start(0, 4), step(1, 1.0), start(1, 2), step(2, 2.5)],
    );
    send_all(&mut follower);
    for line in [step(3, 3.5), step(4, 4.0)] {
        append(&folder, &line);
        send_all(&mut follower);
    }
    // Another job of the same run asks the server.
    let mut next = Follower::new(
        client(server.url(), &[]),
        follower.run_id.clone(),
        folder.path(),
        "",
    );
    append(
        &folder,
        "{\"kind\":\"end\",\"step\":4,\"weights_sha256\":\"ab\"}\n",
    );
    append(&folder, &start(4, 1));
    append(&folder, &start(4, 3));
    next.finish(Status::Finished, Instant::now());
    assert_eq!(losses(&server), [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]);
    let run = server.runs().remove(0);
    let ranks = run.metrics.iter().filter(|(key, ..)| key == "train/ranks");
    let ranks: Vec<_> = ranks.map(|(_, step, value)| (*step, *value)).collect();
    assert_eq!(ranks, [(0, 4.0), (1, 2.0), (4, 1.0), (4, 3.0)]);
    assert_eq!(
        (&*run.status, &*run.tags["weights_sha256"]),
        ("FINISHED", "ab")
    );
}

#[test]
fn a_request_that_failed_is_tried_again_and_what_had_arrived_is_not_sent_twice() {
    let (server, folder, mut follower) = begun();
    replace(&folder, &[step(1, 1.0), step(2, 2.0)]);
    server.fail(|call, _| call == "runs/log-batch");
    let first = follower.turn();
    assert!(follower.turn() > first, "the pauses grow");
    append(&folder, &step(3, 3.0));
    assert_eq!(follower.unsent(), 3);
    server.fail(|_, _| false);

    let mut follower = Follower::new(follower.client, follower.run_id, folder.path(), "");
    follower.read().expect("lines");
    // The answer to these was lost.
    follower
        .client
        .log_metrics(&follower.run_id, &follower.waiting[..2])
        .expect("sent");
    assert_eq!(follower.turn(), PAUSE);
    assert_eq!(losses(&server), [(1, 1.0), (2, 2.0), (3, 3.0)]);
}

#[test]
fn what_an_unfinished_job_left_in_the_folder_is_not_sent() {
    let (server, folder, mut follower) = begun();
    replace(&folder, &[step(1, 9.0)]);
    follower.skip_old();
    send_all(&mut follower);
    assert!(losses(&server).is_empty());
    replace(&folder, &[step(1, 1.0)]);
    send_all(&mut follower);
    assert_eq!(losses(&server), [(1, 1.0)]);
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

    let (server, _folder, follower) = begun();
    let params: Vec<_> = (0..101).map(|_| ("key", "é".repeat(6001))).collect();
    let client = &follower.client;
    client
        .log_params(&follower.run_id, &params[..2])
        .expect("cut");
    let run = server.runs().remove(0);
    assert_eq!(run.params["key"].chars().count(), 6000);
    let short: Vec<_> = params
        .iter()
        .map(|(key, _)| (*key, String::new()))
        .collect();
    client
        .log_params(&follower.run_id, &short)
        .expect("in two requests");
}

/// Answers one request with this.
fn answering(answer: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let _ = std::io::Read::read(&mut stream, &mut [0; 4096]);
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
    let free = paceline_testing::free_ports(1);
    for (url, expected) in [
        (
            format!("http://127.0.0.1:{free}"),
            "MLflow at URL cannot be reached: connection refused\nhint: start it with `mlflow server`, correct --mlflow, or omit it",
        ),
        (
            answering("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<p/>"),
            "URL is no MLflow server: it answers without JSON\nhint: name the address of `mlflow server`, such as http://127.0.0.1:5000",
        ),
        (
            answering("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
            "URL is no MLflow server: it answers 404 Not Found\nhint: name the address of `mlflow server`, such as http://127.0.0.1:5000",
        ),
        (
            answering("HTTP/1.1 401 Unauthorized\r\nContent-Length: 5\r\n\r\nNo\x1b[m"),
            "MLflow at URL refuses (401 Unauthorized): No?[m\n\
             hint: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        ),
        (
            answering("HTTP/1.1 302 Found\r\nLocation: https://a/b\r\nContent-Length: 0\r\n\r\n"),
            "URL has moved to https://a/b\nhint: name the new address",
        ),
        (
            answering(
                "HTTP/1.1 400 Bad Request\r\nContent-Length: 47\r\n\r\n{\"error_code\":\"BAD\",\"message\":\"it is deleted\"}\n",
            ),
            "MLflow at URL refuses (BAD): it is deleted\nhint: none",
        ),
        (
            answering("HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"),
            "MLflow at URL has failed (502 Bad Gateway)\nhint: look at what the server has printed",
        ),
    ] {
        assert_eq!(refused(&url), expected);
    }
}
