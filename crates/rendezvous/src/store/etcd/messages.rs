//! etcd's JSON: its bytes and numbers, and the used part of its answers.
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
#[serde(default)]
pub(super) struct RangeAnswer {
    pub(super) kvs: Vec<KeyValue>,
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

#[derive(Debug, Deserialize, Default)]
#[serde(default)]
pub(super) struct WatchAnswer {
    pub(super) events: Vec<serde::de::IgnoredAny>,
    pub(super) canceled: bool,
    pub(super) cancel_reason: String,
    /// The history from the revision that was asked for is gone.
    pub(super) compact_revision: Number,
}

#[derive(Debug, Deserialize, Default)]
#[serde(default)]
pub(super) struct Refusal {
    pub(super) code: u32,
    /// One of the two is there, depending on the version.
    pub(super) message: String,
    pub(super) error: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_numbers_travel_as_texts() {
        let values = (Bytes(vec![0, 255]), Number(i64::MAX));
        let text = serde_json::to_string(&values).unwrap();
        assert_eq!(text, r#"["AP8=","9223372036854775807"]"#);
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
