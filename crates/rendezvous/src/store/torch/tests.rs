//! Against a small server that speaks torch's protocol, and against peers that do not.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use super::super::{Store, StoreError, connect_or_host};
use super::*;
use crate::env::WorkerEnv;

const SECONDS: Duration = Duration::from_secs(20);

type Entries = Arc<(Mutex<HashMap<Vec<u8>, Vec<u8>>>, Condvar)>;

/// Serves validate, set, get and wait as torch's server does, until the test's process ends.
fn torch_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let entries = Entries::default();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let entries = entries.clone();
            // A client that leaves ends its thread with an error, which is how torch's server sees it too.
            thread::spawn(move || serve(&stream.unwrap(), &entries).unwrap_err());
        }
    });
    addr
}

fn serve(mut stream: &TcpStream, entries: &Entries) -> io::Result<()> {
    let mut greeting = [0; 5];
    stream.read_exact(&mut greeting)?;
    if greeting != [0, 0xce, 0xf7, 0x85, 0x3c] {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let (map, changed) = &**entries;
    loop {
        let mut query = [0];
        stream.read_exact(&mut query)?;
        match query[0] {
            1 => {
                let (key, value) = (read_text(stream)?, read_text(stream)?);
                map.lock().unwrap().insert(key, value);
                changed.notify_all();
            }
            3 => {
                let value = map.lock().unwrap()[&read_text(stream)?].clone();
                stream.write_all(&(value.len() as u64).to_le_bytes())?;
                stream.write_all(&value)?;
            }
            6 => {
                assert_eq!(read_u64(stream)?, 1);
                let key = read_text(stream)?;
                let guard = map.lock().unwrap();
                drop(
                    changed
                        .wait_timeout_while(guard, SECONDS, |map| !map.contains_key(&key))
                        .unwrap(),
                );
                stream.write_all(&[0])?;
            }
            other => panic!("query {other}"),
        }
    }
}

fn read_u64(mut stream: &TcpStream) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn read_text(mut stream: &TcpStream) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; read_u64(stream)? as usize];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A peer that reads one greeting and answers each wait with `answer`.
fn peer_that_answers(answer: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&answer).unwrap();
        // Keeps the connection open until the client has left.
        let _ = io::copy(&mut stream, &mut io::sink());
    });
    addr.to_string()
}

#[test]
fn what_one_client_sets_another_gets_also_when_it_asked_first() {
    let server = torch_server().to_string();
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            Agent::connect(&server, SECONDS)
                .unwrap()
                .get("/k", SECONDS)
                .unwrap()
        });
        Agent::connect(&server, SECONDS)
            .unwrap()
            .set("/k", b"node:1", SECONDS)
            .unwrap();
        assert_eq!(reader.join().unwrap(), b"node:1");
    });
}

#[test]
fn the_messages_are_torchs_byte_by_byte() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = listener.local_addr().unwrap().to_string();
    let heard = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        bytes
    });
    let store = Agent::connect(&server, SECONDS).unwrap();
    assert!(store.set("/k", b"v", Duration::from_millis(50)).is_err());
    drop(store);
    let set = b"\x01\x02\0\0\0\0\0\0\0/k\x01\0\0\0\0\0\0\0v";
    let wait = b"\x06\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/k";
    assert_eq!(
        heard.join().unwrap(),
        [&b"\0\xce\xf7\x85\x3c"[..], set, wait].concat()
    );
}

#[test]
fn ranks_under_torchrun_meet_through_its_agents_store() {
    let agent = torch_server();
    let env = WorkerEnv {
        world: 3,
        local_world: 3,
        master_port: agent.port(),
        agent_store: true,
        run_id: "6f1e".into(),
        ..WorkerEnv::alone()
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let env = WorkerEnv {
                    rank,
                    local_rank: rank,
                    ..env.clone()
                };
                scope.spawn(move || {
                    let (server, client) = connect_or_host(&env, SECONDS).unwrap();
                    client.set(&format!("rank/{rank}"), b"here").unwrap();
                    client
                        .wait(&["rank/0", "rank/1", "rank/2"], SECONDS)
                        .unwrap();
                    // The host stays until all have left.
                    client.add("left", 1).unwrap();
                    if server.is_some() {
                        while client.get("left", SECONDS).unwrap() != b"3" {
                            thread::yield_now();
                        }
                    }
                    server.is_some()
                })
            })
            .collect();
        let hosts: Vec<bool> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        assert_eq!(hosts, [true, false, false]);
    });
}

#[test]
fn an_address_left_by_an_earlier_round_is_passed_over() {
    let agent = torch_server();
    let env = WorkerEnv {
        rank: 1,
        world: 2,
        local_world: 2,
        master_port: agent.port(),
        agent_store: true,
        ..WorkerEnv::alone()
    };
    let torch = Agent::connect(&agent.to_string(), SECONDS).unwrap();
    // The agent's own port: somebody listens there who is not the store.
    torch
        .set(
            "/paceline/none/0/store",
            agent.to_string().as_bytes(),
            SECONDS,
        )
        .unwrap();
    thread::scope(|scope| {
        let late =
            scope.spawn(|| connect_or_host(&env, SECONDS).map(|(server, _)| server.is_some()));
        let zero = WorkerEnv {
            rank: 0,
            ..env.clone()
        };
        let _host = connect_or_host(&zero, SECONDS).unwrap();
        assert!(!late.join().unwrap().unwrap());
    });
}

#[test]
fn a_peer_that_is_no_torch_store_is_refused_by_name() {
    for (answer, expected) in [
        (
            b"HTTP/1.1 400".to_vec(),
            "the answer to a wait is 72, expected 0",
        ),
        (
            [&[0][..], &u64::MAX.to_le_bytes()].concat(),
            "at most 4096 are expected",
        ),
    ] {
        let server = peer_that_answers(answer);
        let error = Agent::connect(&server, SECONDS)
            .unwrap()
            .get("/k", SECONDS)
            .unwrap_err();
        assert!(matches!(error, StoreError::AgentStore { .. }));
        assert!(
            error.to_string().contains(expected) && error.to_string().contains(&server),
            "{error}"
        );
        assert!(
            error
                .hint()
                .unwrap()
                .contains("TORCHELASTIC_USE_AGENT_STORE")
        );
    }
}

#[test]
fn a_key_that_never_comes_ends_at_the_deadline() {
    let server = torch_server().to_string();
    let started = Instant::now();
    let store = Agent::connect(&server, SECONDS).unwrap();
    assert!(store.get("/never", Duration::from_millis(50)).is_err());
    assert!(started.elapsed() < SECONDS / 2);
}
