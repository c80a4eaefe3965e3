//! Values that only a process with the job's token can have written, each for its own key.
//!
//! ```text
//! value in etcd  HMAC(token, text), 32 bytes | what was set
//! text         = "paceline etcd 1\0"  u32 bytes of key  key  what was set
//! ```
//!
//! Any client of etcd could write there, so nothing of a value is read before its proof is verified. A value cannot be
//! moved to another key. A client that may write to etcd can put back an old value of the same key and remove keys: that
//! can hold a job up, but cannot forge its state.

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::token::Token;

const LABEL: &[u8] = b"paceline etcd 1\0";
const PROOF_BYTES: usize = 32;

pub(super) fn seal(token: &Token, key: &[u8], value: &[u8]) -> Vec<u8> {
    let proof = keyed(token, key, value).finalize().into_bytes();
    [proof.as_slice(), value].concat()
}

/// The value, if its proof is right.
pub(super) fn open<'v>(token: &Token, key: &[u8], sealed: &'v [u8]) -> Option<&'v [u8]> {
    let (proof, value) = sealed.split_at_checked(PROOF_BYTES)?;
    keyed(token, key, value).verify_slice(proof).ok()?;
    Some(value)
}

/// A number that all processes with the token agree on: the lease that all keys of the job have.
pub(super) fn lease_id(token: &Token, prefix: &[u8]) -> i64 {
    let digest = keyed(token, prefix, b"lease").finalize().into_bytes();
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&digest[..8]);
    // Positive: 0 means no lease.
    (i64::from_le_bytes(bytes) & i64::MAX).max(1)
}

fn keyed(token: &Token, key: &[u8], value: &[u8]) -> Hmac<Sha256> {
    token.hmac(&[LABEL, &(key.len() as u32).to_le_bytes(), key, value])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_good_for_its_key_and_token_alone() {
        let (token, other) = (Token::derived("a"), Token::derived("b"));
        let sealed = seal(&token, b"key", b"value");
        assert_eq!(open(&token, b"key", &sealed), Some(&b"value"[..]));
        assert_eq!(open(&other, b"key", &sealed), None);
        assert_eq!(open(&token, b"kex", &sealed), None);
        // The border between key and value is part of the proof.
        assert_eq!(open(&token, b"keyv", &sealed), None);
        for place in [0, 31, 32, sealed.len() - 1] {
            let mut changed = sealed.clone();
            changed[place] ^= 1;
            assert_eq!(open(&token, b"key", &changed), None, "{place}");
        }
        for length in [0, 31, 32, sealed.len() - 1] {
            assert_eq!(open(&token, b"key", &sealed[..length]), None, "{length}");
        }
        let empty = seal(&token, b"key", b"");
        assert_eq!(open(&token, b"key", &empty), Some(&b""[..]));
    }

    #[test]
    fn leases_differ_by_job_and_by_token() {
        let (token, other) = (Token::derived("a"), Token::derived("b"));
        assert_eq!(lease_id(&token, b"p"), lease_id(&token, b"p"));
        assert_ne!(lease_id(&token, b"p"), lease_id(&token, b"q"));
        assert_ne!(lease_id(&token, b"p"), lease_id(&other, b"p"));
        assert!(lease_id(&token, b"p") > 0);
    }
}
