//! Unknown requests, floods, slow readers and crowds.

use super::wire::{Reply, Request};
use super::*;

fn expect(mut member: &TcpStream, reply: &Reply) {
    let expected = reply.encode();
    let mut got = vec![0; expected.len()];
    member.read_exact(&mut got).unwrap();
    assert_eq!(got, expected);
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
    expect(
        &member,
        &Reply::Values([b"1", b"2"].map(|value| Arc::new(value.to_vec())).to_vec()),
    );
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
            prove(&mut stream, &token, Side::Listener, &Claim::plain(PURPOSE)).unwrap();
            let mut request = [0; 9];
            stream.read_exact(&mut request).unwrap();
            let reply = Reply::Unknown {
                operation: request[4],
            };
            stream.write_all(&reply.encode()).unwrap();
        });
        let client = Client::connect(&addr, &token, SECONDS).unwrap();
        client.delete("k1").unwrap_err()
    });
    assert!(
        matches!(&error, StoreError::Unsupported { operation: "delete", server } if *server == addr),
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
    let streams: Vec<TcpStream> = (0..CROWD).map(|_| bench.unauthenticated()).collect();
    // All have connected before the first says a word.
    let members: Vec<TcpStream> = streams
        .into_iter()
        .map(|mut stream| {
            prove(
                &mut stream,
                &bench.token,
                Side::Dialer,
                &Claim::plain(PURPOSE),
            )
            .unwrap();
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
