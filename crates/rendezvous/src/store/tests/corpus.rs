//! Bytes that once were interesting, replayed: against the decoders, and against a server that must live on.
//!
//! One file for each in `crates/rendezvous/corpus/store`: a request's or a reply's body (`request-...`, `reply-...`), or
//! what a member sends after its proof (`stream-...`), as hexadecimal digits with comments after `#`. The name's end
//! says what becomes of it: `-ok` is a message (a stream is answered), `-bad` is none (its sender is dropped).

use std::path::Path;

use proptest::prelude::*;

use super::wire::{HEAD_BYTES, Reply, Request};
use super::*;

struct Case {
    name: String,
    bytes: Vec<u8>,
    is_ok: bool,
}

/// The corpus' files whose names begin with `kind`.
fn cases(kind: &str) -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/store");
    let mut cases = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if !name.starts_with(kind) {
            continue;
        }
        let is_ok = name.ends_with("-ok");
        assert!(is_ok || name.ends_with("-bad"), "{name}");
        let bytes = from_hex(&std::fs::read_to_string(&path).unwrap());
        cases.push(Case { name, bytes, is_ok });
    }
    assert!(cases.len() >= 5, "{} of {kind}", cases.len());
    cases
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default())
        .flat_map(str::chars)
        .filter(|digit| !digit.is_whitespace())
        .map(|digit| digit.to_digit(16).unwrap())
        .collect();
    assert!(digits.len().is_multiple_of(2));
    digits
        .chunks(2)
        .map(|pair| (pair[0] << 4 | pair[1]) as u8)
        .collect()
}

#[test]
fn recorded_requests_decode_or_fail_as_they_did() {
    for case in cases("request-") {
        let request = Request::decode(&case.bytes);
        assert_eq!(request.is_ok(), case.is_ok, "{}: {request:?}", case.name);
        if let Ok(request) = request {
            assert_eq!(request.encode()[HEAD_BYTES..], case.bytes, "{}", case.name);
        }
    }
}

#[test]
fn recorded_replies_decode_or_fail_as_they_did() {
    for case in cases("reply-") {
        let reply = Reply::decode(&case.bytes);
        assert_eq!(reply.is_ok(), case.is_ok, "{}: {reply:?}", case.name);
        if let Ok(reply) = reply {
            assert_eq!(reply.encode()[HEAD_BYTES..], case.bytes, "{}", case.name);
        }
    }
}

#[test]
fn a_server_lives_through_every_recorded_stream() {
    let bench = Bench::with(ServerOptions {
        stall_timeout: SOON,
        ..ServerOptions::default()
    });
    let client = bench.client();
    for case in cases("stream-") {
        let mut member = bench.raw_member();
        // One that is dropped may be so before it has sent everything.
        let sent = member.write_all(&case.bytes);
        if case.is_ok {
            sent.unwrap();
            let mut head = [0; HEAD_BYTES];
            member
                .read_exact(&mut head)
                .unwrap_or_else(|error| panic!("{}: {error}", case.name));
        } else {
            assert_closed(member);
        }
        assert!(client.check(&[]).unwrap(), "{}", case.name);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_server_lives_through_any_stream(
        frames in prop::collection::vec((0..20_u8, prop::collection::vec(any::<u8>(), 0..24)), 0..12),
        rest: Vec<u8>,
    ) {
        let bench = Bench::new();
        let client = bench.client();
        let mut member = bench.raw_member();
        // Frames that are whole, so that bodies are reached, and something else at the end.
        for (operation, body) in frames {
            let mut frame = (body.len() as u32 + 1).to_le_bytes().to_vec();
            frame.push(operation);
            frame.extend_from_slice(&body);
            let _ = member.write_all(&frame);
        }
        let _ = member.write_all(&rest);
        drop(member);
        prop_assert!(client.check(&[]).unwrap());
        client.set("others", b"served").unwrap();
        prop_assert_eq!(client.get("others", SECONDS).unwrap(), b"served");
    }
}
