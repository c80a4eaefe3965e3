//! The job's key-value store: how ranks tell each other where they are.
//!
//! One process hosts it, every rank is a client. `get` and `wait` block until keys appear, `add` and `compare_set` are
//! atomic, with the meaning they have in torch's TCPStore. Every connection first proves the job's token in both
//! directions ([`crate::auth`]); messages are in `wire.rs`, drawn byte by byte.

mod api;
mod calls;
mod client;
mod conn;
mod error;
mod local;
mod meet;
mod outbox;
mod prefix;
mod serve;
mod server;
mod table;
mod torch;
mod wire;

pub use self::api::{KeyList, Store};
pub use self::client::Client;
pub use self::error::StoreError;
pub use self::local::LocalStore;
pub use self::meet::connect_or_host;
pub use self::prefix::PrefixStore;
pub use self::server::{Server, ServerOptions};
pub use self::torch::TorchStore;

/// Longest key in bytes.
pub const KEY_BYTES_MAX: usize = 4 << 10;
/// Longest value in bytes.
pub const VALUE_BYTES_MAX: usize = 16 << 20;

/// What both sides prove the token for: this store, in this version of its messages.
const PURPOSE: &str = "store 2";

#[cfg(test)]
mod tests;
