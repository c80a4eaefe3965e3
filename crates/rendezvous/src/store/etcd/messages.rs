//! etcd's JSON: requests as it reads them, and of its answers what is used.
//!
//! Bytes are base64, 64-bit numbers are texts, and what has its default value is left out, as in every mapping of
//! protocol buffers to JSON.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Bytes that travel as base64.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Bytes(pub(super) Vec<u8>);

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        STANDARD
            .decode(text.as_bytes())
            .map(Self)
            .map_err(D::Error::custom)
    }
}

/// A 64-bit number that travels as a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Number(pub(super) i64);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        text.parse().map(Self).map_err(D::Error::custom)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Default)]
pub(super) struct Range {
    pub(super) key: Bytes,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) range_end: Option<Bytes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) limit: Option<Number>,
    /// The moment at which to look; now when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) revision: Option<Number>,
    #[serde(skip_serializing_if = "is_false")]
    pub(super) keys_only: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Put {
    pub(super) key: Bytes,
    pub(super) value: Bytes,
    pub(super) lease: Number,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct DeleteRange {
    pub(super) key: Bytes,
}

/// Does `success` if `compare` holds, else `failure`, all at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
pub(super) struct Txn {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) compare: Vec<Compare>,
    pub(super) success: Vec<Operation>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) failure: Vec<Operation>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Compare {
    pub(super) key: Bytes,
    target: &'static str,
    result: &'static str,
    mod_revision: Number,
}

impl Compare {
    /// Holds as long as the key is as it was in that revision; 0 is that of a key that is not there.
    pub(super) fn unchanged(key: Bytes, mod_revision: i64) -> Self {
        Self {
            key,
            target: "MOD",
            result: "EQUAL",
            mod_revision: Number(mod_revision),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) enum Operation {
    #[serde(rename = "request_put")]
    Put(Put),
    #[serde(rename = "request_range")]
    Range(Range),
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Watch {
    create_request: WatchCreate,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct WatchCreate {
    key: Bytes,
    start_revision: Number,
    filters: [&'static str; 1],
}

impl Watch {
    /// For values of one key from that revision on.
    pub(super) fn values(key: Bytes, start_revision: i64) -> Self {
        Self {
            create_request: WatchCreate {
                key,
                start_revision: Number(start_revision),
                filters: ["NODELETE"],
            },
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct LeaseGrant {
    #[serde(rename = "ID")]
    pub(super) id: Number,
    #[serde(rename = "TTL")]
    pub(super) ttl: Number,
}

/// For a lease that is to be kept alive or revoked.
#[derive(Debug, Serialize)]
pub(super) struct Lease {
    #[serde(rename = "ID")]
    pub(super) id: Number,
}

#[derive(Serialize)]
pub(super) struct Authenticate<'a> {
    pub(super) name: &'a str,
    pub(super) password: &'a str,
}

#[derive(Debug, Deserialize, Default)]
pub(super) struct Header {
    #[serde(default)]
    pub(super) revision: Number,
}

#[derive(Debug, Deserialize)]
pub(super) struct KeyValue {
    pub(super) key: Bytes,
    #[serde(default)]
    pub(super) value: Bytes,
    #[serde(default)]
    pub(super) mod_revision: Number,
}

#[derive(Debug, Deserialize, Default)]
pub(super) struct RangeAnswer {
    #[serde(default)]
    pub(super) kvs: Vec<KeyValue>,
    #[serde(default)]
    pub(super) more: bool,
}

#[derive(Debug, Deserialize)]
pub(super) struct TxnAnswer {
    pub(super) header: Header,
    #[serde(default)]
    pub(super) succeeded: bool,
    #[serde(default)]
    pub(super) responses: Vec<OperationAnswer>,
}

#[derive(Debug, Deserialize)]
pub(super) struct OperationAnswer {
    #[serde(default)]
    pub(super) response_range: RangeAnswer,
}

/// The part of every answer: enough to recognise etcd.
#[derive(Debug, Deserialize)]
pub(super) struct PlainAnswer {
    #[serde(rename = "header")]
    _header: Header,
}

#[derive(Debug, Deserialize)]
pub(super) struct DeleteAnswer {
    #[serde(default)]
    pub(super) deleted: Number,
}

#[derive(Debug, Deserialize)]
pub(super) struct AuthenticateAnswer {
    pub(super) token: String,
}

/// One line of a stream.
#[derive(Debug, Deserialize)]
pub(super) struct Streamed<T> {
    pub(super) result: T,
}

#[derive(Debug, Deserialize)]
pub(super) struct KeepAliveAnswer {
    /// Absent if there is no such lease.
    #[serde(rename = "TTL", default)]
    pub(super) ttl: Number,
}

#[derive(Debug, Deserialize)]
pub(super) struct WatchAnswer {
    #[serde(default)]
    pub(super) events: Vec<serde::de::IgnoredAny>,
    #[serde(default)]
    pub(super) canceled: bool,
    #[serde(default)]
    pub(super) cancel_reason: String,
    /// The history from the revision that was asked for is gone.
    #[serde(default)]
    pub(super) compact_revision: Number,
}

#[derive(Debug, Deserialize)]
pub(super) struct Refusal {
    #[serde(default)]
    pub(super) code: u32,
    /// One of the two is there, depending on the version.
    #[serde(default)]
    pub(super) message: String,
    #[serde(default)]
    pub(super) error: String,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(request: &impl Serialize, expect: &str) {
        assert_eq!(serde_json::to_string(request).unwrap(), expect);
    }

    fn key() -> Bytes {
        Bytes(b"a".to_vec())
    }

    #[test]
    fn requests_are_as_etcd_reads_them() {
        let range = Range {
            key: key(),
            ..Range::default()
        };
        check(&range, r#"{"key":"YQ=="}"#);
        let range = Range {
            range_end: Some(Bytes(b"b".to_vec())),
            limit: Some(Number(5)),
            revision: Some(Number(7)),
            keys_only: true,
            ..range
        };
        check(
            &range,
            r#"{"key":"YQ==","range_end":"Yg==","limit":"5","revision":"7","keys_only":true}"#,
        );
        let put = Put {
            key: key(),
            value: Bytes(vec![0, 255]),
            lease: Number(i64::MAX),
        };
        let txn = Txn {
            compare: vec![Compare::unchanged(key(), 3)],
            success: vec![Operation::Put(put)],
            failure: Vec::new(),
        };
        check(
            &txn,
            concat!(
                r#"{"compare":[{"key":"YQ==","target":"MOD","result":"EQUAL","mod_revision":"3"}],"#,
                r#""success":[{"request_put":{"key":"YQ==","value":"AP8=","lease":"9223372036854775807"}}]}"#
            ),
        );
        check(
            &Watch::values(key(), 9),
            r#"{"create_request":{"key":"YQ==","start_revision":"9","filters":["NODELETE"]}}"#,
        );
        let grant = LeaseGrant {
            id: Number(77),
            ttl: Number(120),
        };
        check(&grant, r#"{"ID":"77","TTL":"120"}"#);
    }

    #[test]
    fn what_an_answer_leaves_out_has_its_default() {
        let empty: RangeAnswer = serde_json::from_str(r#"{"header":{"revision":"4"}}"#).unwrap();
        assert!(empty.kvs.is_empty() && !empty.more);
        let found: RangeAnswer = serde_json::from_str(
            r#"{"header":{"cluster_id":"1","revision":"2"},"kvs":[{"key":"YQ==","mod_revision":"2","lease":"77"}]}"#,
        )
        .unwrap();
        assert_eq!(found.kvs[0].value, Bytes(Vec::new()));
        let txn: TxnAnswer =
            serde_json::from_str(r#"{"header":{},"responses":[{"response_put":{}}]}"#).unwrap();
        assert!(!txn.succeeded && txn.responses[0].response_range.kvs.is_empty());
        let lease: Streamed<KeepAliveAnswer> =
            serde_json::from_str(r#"{"result":{"ID":"78"}}"#).unwrap();
        assert_eq!(lease.result.ttl, Number(0));
    }

    #[test]
    fn what_is_no_base64_and_no_number_is_refused() {
        for text in [
            r#"{"kvs":[{"key":"@"}]}"#,
            r#"{"kvs":[{"key":"YQ==","mod_revision":"many"}]}"#,
            r#"{"kvs":[{"key":"YQ==","mod_revision":"9223372036854775808"}]}"#,
            r#"{"kvs":{}}"#,
        ] {
            assert!(serde_json::from_str::<RangeAnswer>(text).is_err(), "{text}");
        }
    }
}
