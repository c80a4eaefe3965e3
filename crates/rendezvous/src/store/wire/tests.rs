//! The messages go there and back, and whatever else comes is told apart.

use proptest::prelude::*;

use super::*;

impl Request<'_> {
    pub(in crate::store) fn encode(&self) -> Vec<u8> {
        let mut frame = Vec::new();
        self.encode_into(&mut frame);
        frame
    }
}

impl Reply {
    pub(in crate::store) fn encode(&self) -> Vec<u8> {
        let mut frame = Vec::new();
        self.encode_into(&mut frame);
        frame
    }
}

fn split(frame: &[u8]) -> &[u8] {
    let (head, body) = frame.split_at(HEAD_BYTES);
    assert_eq!(body_bytes(head.try_into().unwrap()).unwrap(), body.len());
    body
}

#[test]
fn a_request_has_the_documented_bytes() {
    let frame = Request::Add {
        key: "ab",
        amount: -2,
    }
    .encode();
    assert_eq!(
        frame,
        b"\x0d\0\0\0\x05\x02\0ab\xfe\xff\xff\xff\xff\xff\xff\xff"
    );
}

#[test]
fn the_example_in_the_modules_documentation_is_what_is_sent() {
    let (key, value) = ("key", &b"value"[..]);
    let frame = Request::Set { key, value }.encode();
    assert_eq!(frame, b"\x0f\0\0\0\x01\x03\0key\x05\0\0\0value");
    assert_eq!(Reply::Done.encode(), b"\x01\0\0\0\0");
}

#[test]
fn an_oversized_frame_is_refused_by_its_head() {
    let head = |bytes: usize| body_bytes((bytes as u32).to_le_bytes());
    assert_eq!(head(BODY_BYTES_MAX), Ok(BODY_BYTES_MAX));
    assert!(matches!(
        head(BODY_BYTES_MAX + 1),
        Err(WireError::TooLong { .. })
    ));
    assert!(head(u32::MAX as usize).is_err());
}

#[test]
fn malformed_bodies_are_told_apart() {
    for (body, expected) in [
        (&b""[..], WireError::Cut { field: "operation" }),
        (b"\x63", WireError::Operation { operation: 99 }),
        (b"\x07\x02\0a", WireError::Cut { field: "key" }),
        (b"\x07\x01\0\xff", WireError::KeyText),
        (b"\x07\x01\0ab", WireError::Trailing { bytes: 1 }),
        (
            b"\x07\x01\x10",
            WireError::FieldTooLong {
                field: "key",
                bytes: 4097,
                max: 4096,
            },
        ),
        (
            b"\x01\x01\0a\xff\xff\xff\xff",
            WireError::FieldTooLong {
                field: "value",
                bytes: 0xffff_ffff,
                max: VALUE_BYTES_MAX,
            },
        ),
        (b"\x04\xff\xff\xff\xff", WireError::Cut { field: "key" }),
    ] {
        assert_eq!(Request::decode(body), Err(expected), "{body:?}");
    }
    let mut long = vec![4];
    long.resize(CONTROL_BYTES_MAX + 1, 0);
    assert!(matches!(
        Request::decode(&long),
        Err(WireError::TooLong { .. })
    ));
}

#[test]
fn a_values_head_announces_the_same_frame() {
    let mut frame = Reply::value_head(3).to_vec();
    frame.extend_from_slice(b"abc");
    assert_eq!(frame, Reply::Value(Arc::new(b"abc".to_vec())).encode());

    let values: [&[u8]; 3] = [b"abc", b"", b"de"];
    let mut frame = Reply::values_head(3, 5 + 3 * 4 + 5).to_vec();
    for value in values {
        frame.extend_from_slice(&(value.len() as u32).to_le_bytes());
        frame.extend_from_slice(value);
    }
    assert_eq!(
        frame,
        Reply::Values(values.map(|value| Arc::new(value.to_vec())).to_vec()).encode()
    );
}

proptest! {
    #[test]
    fn requests_go_there_and_back(key in "\\PC{0,40}", keys in prop::collection::vec("[a-z/]{0,9}", 0..9),
                                  value: Vec<u8>, new: Vec<u8>, timeout_ms: u64, amount: i64, most: u32, which in 0..11) {
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let request = match which {
            0 => Request::Set { key: &key, value: &value },
            1 => Request::Get { timeout_ms, key: &key },
            2 => Request::Wait { timeout_ms, keys },
            3 => Request::Check { keys },
            4 => Request::Add { key: &key, amount },
            5 => Request::CompareSet { key: &key, expected: &value, new: &new },
            6 => Request::Delete { key: &key },
            7 => Request::List { most, prefix: &key },
            8 => Request::MultiGet { timeout_ms, keys },
            9 => Request::Count { folder: &key },
            _ => Request::MultiSet { entries: keys.into_iter().map(|key| (key, &value[..])).collect() },
        };
        let frame = request.encode();
        prop_assert_eq!(Request::decode(split(&frame)), Ok(request));
    }

    #[test]
    fn replies_go_there_and_back(keys in prop::collection::vec("[a-z/]{0,9}", 0..9), value: Vec<u8>, number: i64,
                                 flag: bool, bytes: u64, operation: u8, which in 0..11) {
        let reply = match which {
            0 => Reply::Done,
            1 => Reply::Value(Arc::new(value)),
            2 => Reply::Number(number),
            3 => Reply::Flag(flag),
            4 => Reply::TimedOut { missing: keys },
            5 => Reply::NoNumber,
            6 => Reply::Full,
            7 => Reply::Values(keys.into_iter().map(|key| Arc::new(key.into_bytes())).collect()),
            8 => Reply::Keys { more: flag, keys },
            9 => Reply::TooLarge { bytes },
            _ => Reply::Unknown { operation },
        };
        let frame = reply.encode();
        prop_assert_eq!(Reply::decode(split(&frame)), Ok(reply));
    }

    #[test]
    fn any_bytes_decode_or_fail_and_what_decodes_encodes_to_the_same(body: Vec<u8>) {
        if let Ok(request) = Request::decode(&body) {
            let frame = request.encode();
            prop_assert_eq!(split(&frame), &body[..]);
        }
        if let Ok(reply) = Reply::decode(&body) {
            let frame = reply.encode();
            prop_assert_eq!(split(&frame), &body[..]);
        }
    }

    #[test]
    fn a_cut_request_never_decodes(value in prop::collection::vec(any::<u8>(), 1..50), cut in 1..50_usize) {
        let frame = Request::CompareSet { key: "key", expected: &value, new: &value }.encode();
        let body = split(&frame);
        prop_assert!(Request::decode(&body[..body.len() - cut.min(body.len())]).is_err());
    }
}
