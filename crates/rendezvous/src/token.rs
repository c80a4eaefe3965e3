//! The job's token: the secret that lets a process join.

use std::fmt;

use hex::FromHexError;
use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// Name of the environment variable that carries the token, as 64 hexadecimal digits.
pub const TOKEN_VARIABLE: &str = "PACELINE_JOB_TOKEN";

/// A job's 256-bit secret. A process that knows it may join; nothing else lets it in.
///
/// `Debug` never shows the bytes, so a token cannot reach a log by accident; [`Token::to_hex`] is the one way out.
///
/// ```
/// use paceline_rendezvous::token::Token;
///
/// let token = Token::generate()?;
/// assert_eq!(Token::from_hex(&token.to_hex())?, token);
/// assert_eq!(format!("{token:?}"), "Token(redacted)");
/// # Ok::<(), paceline_rendezvous::token::TokenError>(())
/// ```
#[derive(Clone)]
pub struct Token([u8; 32]);

impl Token {
    /// A new secret from the operating system's randomness.
    ///
    /// *Errors*: [`TokenError::NoRandomness`] in a sandbox without `getrandom`.
    pub fn generate() -> Result<Self, TokenError> {
        random().map(Self)
    }

    /// Reads the 64 hexadecimal digits of [`Token::to_hex`]; blanks around them are allowed.
    pub fn from_hex(text: &str) -> Result<Self, TokenError> {
        let digits = text.trim();
        let mut bytes = [0; 32];
        match hex::decode_to_slice(digits, &mut bytes) {
            Ok(()) => Ok(Self(bytes)),
            Err(FromHexError::InvalidHexCharacter { index, .. }) => {
                Err(TokenError::Digit { position: index })
            }
            Err(_) => Err(TokenError::Length {
                digits: digits.len(),
            }),
        }
    }

    /// The token as 64 lower-case hexadecimal digits, for the environment of a rank. Do not log it.
    pub fn to_hex(&self) -> String {
        hex::encode(self.0)
    }

    /// A token that anyone who knows `seed` can compute: it keeps two jobs apart but protects neither.
    pub fn derived(seed: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"paceline derived token v1\0");
        hash.update(seed.as_bytes());
        Self(hash.finalize().into())
    }

    /// The HMAC with this key of the parts, one after another.
    pub(crate) fn hmac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mac = Hmac::<Sha256>::new_from_slice(&self.0);
        let mut mac = mac.expect("HMAC takes a key of any length");
        parts.iter().for_each(|part| mac.update(part));
        mac
    }
}

/// Compares in constant time.
impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Token {}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(redacted)")
    }
}

/// Why a token cannot be read or made. The text never contains digits of the token.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The text has the wrong length.
    #[error("a job token has 64 hexadecimal digits, got {digits} characters")]
    Length {
        /// Characters found.
        digits: usize,
    },
    /// One character is not a hexadecimal digit.
    #[error(
        "a job token has 64 hexadecimal digits, and the character at position {position} is not one"
    )]
    Digit {
        /// Index of the character, from 0.
        position: usize,
    },
    /// The operating system gave no random bytes.
    #[error("the operating system gave no random bytes: {reason}")]
    NoRandomness {
        /// The system's words.
        reason: String,
    },
}

impl TokenError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Length { .. } | Self::Digit { .. } => Some(format!(
                "set {TOKEN_VARIABLE} to the same value on every rank, for instance from `openssl rand -hex 32`"
            )),
            Self::NoRandomness { .. } => None,
        }
    }
}

crate::debug_with_hint!(TokenError);

/// 32 random bytes, for tokens and nonces.
pub(crate) fn random() -> Result<[u8; 32], TokenError> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| TokenError::NoRandomness {
        reason: error.to_string(),
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_goes_there_and_back_in_either_case() {
        let token = Token::derived("any");
        assert_eq!(Token::from_hex(&token.to_hex()), Ok(token.clone()));
        assert_eq!(
            Token::from_hex(&format!(" {}\n", token.to_hex().to_uppercase())),
            Ok(token)
        );
    }

    #[test]
    fn bad_hex_is_named_without_repeating_the_secret() {
        let secret = Token::derived("secret").to_hex();
        assert_eq!(
            Token::from_hex(&secret[1..]),
            Err(TokenError::Length { digits: 63 })
        );
        for position in [0, 1, 63] {
            let mut text = secret.clone();
            text.replace_range(position..=position, "g");
            let error = Token::from_hex(&text).unwrap_err();
            assert_eq!(error, TokenError::Digit { position });
            assert!(!error.to_string().contains(&secret[4..12]));
        }
        assert!(Token::from_hex(&"é".repeat(32)).is_err());
    }

    #[test]
    fn generated_tokens_differ() {
        assert_ne!(Token::generate().unwrap(), Token::generate().unwrap());
    }

    #[test]
    fn a_derived_token_depends_on_its_seed_alone() {
        assert_eq!(Token::derived("a"), Token::derived("a"));
        assert_ne!(Token::derived("a"), Token::derived("b"));
    }

    #[test]
    fn debug_shows_no_secret() {
        assert_eq!(format!("{:?}", Token::derived("x")), "Token(redacted)");
    }
}
