//! The job's key-value store: how ranks tell each other where they are.
//!
//! One process hosts it, every rank is a client. `get`, `wait` and `multi_get` block until keys appear; every operation is
//! atomic, with the meaning it has in torch's TCPStore. What all stores can do is the trait [`Store`]:
//!
//! | store | its keys are |
//! |---|---|
//! | [`Client`] | in a [`Server`], over TCP |
//! | `EtcdStore` (feature `etcd`) | in etcd, which no process of the job hosts |
//!
//! ```text
//!  dialer                                                  listener
//!    proof of the token, in both directions (auth)  <---->            before a byte of a request is believed
//!    frame  4 bytes: length | request               ----->
//!           <-----  frame  4 bytes: length | reply                    in the order of the requests
//!
//!  set "key" to "value"    0f 00 00 00 | 01   03 00 6b 65 79   05 00 00 00 76 61 6c 75 65
//!                          15 bytes      set  "key"            "value"
//!  done                    01 00 00 00 | 00
//! ```
//!
//! `wire.rs` draws all messages byte by byte. `serve.rs` says what happens to a client that stalls, floods or dies.
//! The server's memory is bounded in all of its uses together: values, half-received messages, answers on their way and
//! waiting clients ([`ServerOptions::bytes_max`]). At the bound an operation ends with [`StoreError::Full`], and
//! the client that makes the server hold most outside of the table is dropped.
//!
//! A `get` costs five system calls on both sides together. Both ends look for 50 us at most before they sleep, yield
//! their core while they do, and stop doing so where it does not pay (`spin.rs`). `benches/store.rs` measures it.

mod api;
mod calls;
mod client;
mod conn;
mod error;
#[cfg(feature = "etcd")]
mod etcd;
mod meet;
mod outbox;
mod serve;
mod server;
mod table;
mod torch;
mod wire;

pub use self::api::{KeyList, Store};
pub use self::client::Client;
pub use self::error::StoreError;
#[cfg(feature = "etcd")]
pub use self::etcd::{EndpointError, Etcd, EtcdError, EtcdStore};
pub use self::meet::{NOTICE_AFTER, connect_or_host, find, host_anywhere};
pub use self::server::{Server, ServerOptions};

/// Longest key in bytes.
pub const KEY_BYTES_MAX: usize = 4 << 10;
/// Longest value in bytes.
pub const VALUE_BYTES_MAX: usize = 16 << 20;

/// The purpose of the proof: this store, in this version of its messages.
const PURPOSE: &str = "store 2";

#[cfg(test)]
mod tests;
