//! Clients of queues that die, stall or misbehave, requests that nobody knows, and crowds.

use super::wire::{Reply, Request};
use super::*;

impl Bench {
    /// A member that has asked for an item and is told of it by nobody else.
    fn popper(&self, queue: &str) -> TcpStream {
        let mut member = self.raw_member();
        let key = queue;
        let timeout_ms = 60_000;
        let request = Request::QueuePop { timeout_ms, key };
        member.write_all(&request.encode()).unwrap();
        member
    }
}

fn expect(mut member: &TcpStream, reply: &Reply<'_>) {
    let expected = reply.encode();
    let mut got = vec![0; expected.len()];
    member.read_exact(&mut got).unwrap();
    assert_eq!(got, expected);
}

fn wait_for_length(client: &Client, queue: &str, length: usize) {
    let started = Instant::now();
    while client.queue_len(queue).unwrap() != length {
        assert!(started.elapsed() < SECONDS);
        thread::yield_now();
    }
}

#[test]
fn a_client_that_dies_while_it_waits_takes_no_item_along() {
    let bench = Bench::new();
    let client = bench.client();
    drop(bench.popper("work"));
    client.queue_push("work", b"1").unwrap();
    assert_eq!(client.queue_pop("work", SECONDS).unwrap(), b"1");
}

#[test]
fn an_item_shown_to_a_client_that_dies_goes_back_to_its_place() {
    let bench = Bench::new();
    let client = bench.client();
    for item in [b"1", b"2", b"3"] {
        client.queue_push("work", item).unwrap();
    }
    let (first, second) = (bench.popper("work"), bench.popper("work"));
    expect(&first, &Reply::Value(b"1"));
    expect(&second, &Reply::Value(b"2"));
    assert_eq!(client.queue_len("work").unwrap(), 1);
    drop(first);
    wait_for_length(&client, "work", 2);
    drop(second);
    wait_for_length(&client, "work", 3);
    for item in [b"1", b"2", b"3"] {
        assert_eq!(client.queue_pop("work", SECONDS).unwrap(), item);
    }
}

#[test]
fn an_item_given_back_goes_to_whoever_waits_next() {
    let bench = Bench::new();
    let first = bench.popper("work");
    let client = bench.client();
    // Nobody but the server knows that the first one waits; one more round trip on its connection would end the wait.
    client.queue_push("work", b"1").unwrap();
    expect(&first, &Reply::Value(b"1"));
    thread::scope(|scope| {
        let next = scope.spawn(|| bench.client().queue_pop("work", SECONDS).unwrap());
        drop(first);
        assert_eq!(next.join().unwrap(), b"1");
    });
}

#[test]
fn a_client_that_says_anything_but_take_gives_its_item_back() {
    let bench = Bench::new();
    let client = bench.client();
    client.queue_push("work", b"1").unwrap();
    let mut member = bench.popper("work");
    expect(&member, &Reply::Value(b"1"));
    let check = Request::Check { keys: vec![] };
    member.write_all(&check.encode()).unwrap();
    expect(&member, &Reply::Flag(true));
    member.write_all(&Request::QueueTake.encode()).unwrap();
    expect(&member, &Reply::Flag(false));
    assert_eq!(client.queue_pop("work", SECONDS).unwrap(), b"1");
}

#[test]
fn a_client_that_stalls_before_it_takes_its_item_is_dropped_and_the_item_stays() {
    let bench = Bench::with(ServerOptions {
        stall_timeout: SOON,
        ..ServerOptions::default()
    });
    let client = bench.client();
    client.queue_push("work", b"1").unwrap();
    let stalled = bench.popper("work");
    expect(&stalled, &Reply::Value(b"1"));
    assert_eq!(client.queue_pop("work", SECONDS).unwrap(), b"1");
    assert_closed(stalled);
    assert_eq!(bench.server.refused(), 1);
}

#[test]
fn those_who_wait_for_a_queue_are_served_in_the_order_in_which_they_came() {
    let bench = Bench::new();
    let client = bench.client();
    let poppers: Vec<TcpStream> = (0..8)
        .map(|index| {
            let mut popper = bench.raw_member();
            // The answer to the first request proves that the server has seen this one before the next one connects.
            let pop = Request::QueuePop {
                timeout_ms: 60_000,
                key: "work",
            };
            let add = Request::Add {
                key: "asked",
                amount: 1,
            };
            popper
                .write_all(&[add.encode(), pop.encode()].concat())
                .unwrap();
            expect(&popper, &Reply::Number(index + 1));
            popper
        })
        .collect();
    for (index, popper) in poppers.iter().enumerate() {
        client.queue_push("work", &[index as u8]).unwrap();
        expect(popper, &Reply::Value(&[index as u8]));
        (&*popper).write_all(&Request::QueueTake.encode()).unwrap();
        expect(popper, &Reply::Flag(true));
    }
}

#[test]
fn queues_are_bounded_like_everything_else() {
    let bench = Bench::with(ServerOptions {
        bytes_max: 1 << 20,
        ..ServerOptions::default()
    });
    let client = bench.client();
    let mut pushed = 0;
    let error = loop {
        match client.queue_push("work", &[0; 32 << 10]) {
            Ok(count) => pushed = count,
            Err(error) => break error,
        }
    };
    assert!(
        matches!(&error, StoreError::Full { operation: "queue-push", key, .. } if key == "work"),
        "{error}"
    );
    assert!((20..32).contains(&pushed), "{pushed}");
    for _ in 0..pushed {
        client.queue_pop("work", SECONDS).unwrap();
    }
    client.set("key", &[0; 300 << 10]).unwrap();
}

#[test]
fn many_keys_at_once_wait_on_when_one_is_deleted_meanwhile() {
    let bench = Bench::new();
    let writer = bench.client();
    let mut member = bench.raw_member();
    let request = Request::MultiGet {
        timeout_ms: 60_000,
        keys: vec!["a", "b"],
    };
    let add = Request::Add {
        key: "asked",
        amount: 1,
    };
    member
        .write_all(&[add.encode(), request.encode()].concat())
        .unwrap();
    expect(&member, &Reply::Number(1));
    writer.set("a", b"old").unwrap();
    writer.delete("a").unwrap();
    writer.set("b", b"2").unwrap();
    writer.set("a", b"1").unwrap();
    expect(&member, &Reply::Values(vec![b"1", b"2"]));
}

#[test]
fn an_operation_of_a_later_version_is_answered_and_the_connection_lives_on() {
    let bench = Bench::new();
    let mut member = bench.raw_member();
    let add = Request::Add {
        key: "n",
        amount: 1,
    };
    let unknown = b"\x05\0\0\0\x63abcd";
    member
        .write_all(&[&unknown[..], &add.encode()].concat())
        .unwrap();
    expect(&member, &Reply::Unknown { operation: 0x63 });
    expect(&member, &Reply::Number(1));
    assert_eq!(bench.server.refused(), 0);
}

#[test]
fn a_server_that_knows_less_is_named_by_the_client() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (addr, token) = (
        listener.local_addr().unwrap().to_string(),
        Token::derived("job"),
    );
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            prove(&mut stream, &token, Side::Listener, PURPOSE).unwrap();
            let mut request = [0; 13];
            stream.read_exact(&mut request).unwrap();
            let reply = Reply::Unknown {
                operation: request[4],
            };
            stream.write_all(&reply.encode()).unwrap();
        });
        let client = Client::connect(&addr, &token, SECONDS).unwrap();
        client.queue_len("queue1").unwrap_err()
    });
    assert!(
        matches!(&error, StoreError::Unsupported { operation: "queue-length", server } if *server == addr),
        "{error}"
    );
    assert!(error.hint().unwrap().contains("older"));
}

#[test]
fn a_flood_of_requests_sent_ahead_is_answered_in_order_and_in_turns() {
    const REQUESTS: i64 = 20_000;
    let bench = Bench::new();
    let member = bench.raw_member();
    let add = Request::Add {
        key: "n",
        amount: 1,
    };
    let flood = add.encode().repeat(REQUESTS as usize);
    thread::scope(|scope| {
        scope.spawn(|| (&member).write_all(&flood).unwrap());
        bench.assert_serves_others();
        for number in 1..=REQUESTS {
            expect(&member, &Reply::Number(number));
        }
    });
}

#[test]
fn replaced_values_that_slow_readers_still_receive_stay_counted() {
    let bench = Bench::with(ServerOptions {
        bytes_max: 44 << 20,
        ..ServerOptions::default()
    });
    let value = vec![7; 12 << 20];
    // Refused by the table, or already on its way there: that may cost the writer its connection.
    let set = || bench.client().set("large", &value);
    let get = Request::Get {
        timeout_ms: 0,
        key: "large",
    };
    let mut readers = Vec::new();
    let mut outcomes = Vec::new();
    for _ in 0..4 {
        outcomes.push(set().is_ok());
        let mut reader = bench.raw_member();
        reader.write_all(&get.encode()).unwrap();
        // Its first bytes show that the answer has begun; the socket's buffers do not take all of it.
        reader.read_exact(&mut [0; 16]).unwrap();
        readers.push(reader);
    }
    // Two replaced ones on their way and the present one: there is no room for a fourth.
    assert_eq!(outcomes, [true, true, true, false]);
    drop(readers);
    let started = Instant::now();
    while set().is_err() {
        assert!(started.elapsed() < SECONDS);
    }
}

#[test]
fn a_crowd_that_comes_at_one_moment_gets_in() {
    const CROWD: usize = 300;
    let bench = Bench::new();
    let streams: Vec<TcpStream> = (0..CROWD).map(|_| bench.stranger()).collect();
    // All have connected before the first says a word.
    let members: Vec<TcpStream> = streams
        .into_iter()
        .map(|mut stream| {
            prove(&mut stream, &bench.token, Side::Dialer, PURPOSE).unwrap();
            stream
        })
        .collect();
    let add = Request::Add {
        key: "n",
        amount: 1,
    }
    .encode();
    members
        .iter()
        .for_each(|mut member| member.write_all(&add).unwrap());
    let client = bench.client();
    let started = Instant::now();
    while client.add("n", 0).unwrap() < CROWD as i64 {
        assert!(started.elapsed() < SECONDS);
    }
    assert_eq!(bench.server.refused(), 0);
}
