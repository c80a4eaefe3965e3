//! What reaches a server of runs that grow, are resumed, and meet failures.

use std::fs::{self, File};
use std::io::Write;

use paceline_testing::tracking::TrackingServer;
use tempfile::TempDir;

use super::*;

fn client(server: &TrackingServer) -> Client {
    Client::new(server.url(), |_| None).expect("a client")
}

/// A run on a new server, and a follower that has sent nothing.
fn begun() -> (TrackingServer, TempDir, Follower) {
    let server = TrackingServer::start();
    let client = client(&server);
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
    let mut next = Follower::new(client(&server), follower.run_id.clone(), folder.path(), "");
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
        .log(&follower.run_id, "metrics", &follower.waiting[..2])
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
