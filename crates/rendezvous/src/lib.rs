//! How the ranks of a Paceline job find each other.
//!
//! ```text
//!   launcher (paceline run, torchrun, srun, a shell)
//!      |  environment: RANK, WORLD_SIZE, MASTER_ADDR, ...          env
//!      |  PACELINE_JOB_TOKEN                                       token
//!      |  PACELINE_PAGE_FD ---> job page, shared memory            page
//!      v                         ^ what each local rank is doing; revoke, stop
//!   rank 0    rank 1 ... rank N--+
//!      |         |          |
//!      |  1. each end proves the token to the other                auth
//!      |         |          |
//!      +---------+----------+--> key-value store                   store
//!         2. set "rank/1/addr", get "rank/0/addr", wait, add
//!                                hosted by the launcher (PACELINE_STORE), or by rank 0 at MASTER_ADDR:MASTER_PORT;
//!                                beside torchrun's agent: by rank 0 on a free port, announced in the agent's store
//! ```
//!
//! | module | owns |
//! |---|---|
//! | [`mod@env`] | the environment contract: torchrun's names, Paceline's own, and errors that name every fault |
//! | [`scheduler`] | the variables of Slurm, Kubernetes and MPI launchers, for ranks and for launchers |
//! | [`token`] | the job's secret |
//! | [`auth`] | mutual authentication by the token |
//! | [`tls`] | TLS on a connection, where the job asks for it |
//! | [`store`] | the key-value store: server, client, a prefix of another store, etcd, and where to meet |
//! | [`endpoint`] | where the launchers of several nodes meet, and which of them hosts the store |
//! | [`mod@notice`] | warnings, which reach stderr in a program without a subscriber |
//! | [`net`] | names resolved within a deadline, addresses as text |
//! | [`process`] | what `/proc` says about a process |
//! | [`page`] | the job page: what local ranks are doing, revocation, the request to stop |
//! | [`stop`] | how a rank receives that request, even if it comes as a signal to the rank alone |
//!
//! Nothing here knows tensors, collectives or processes. Every wait has a deadline, every buffer a bound; one private
//! module has everything that is specific to Linux.
//!
//! A rank joins its job like this. Without any variable it is alone and hosts its own store:
//!
//! ```
//! use std::time::Duration;
//! use paceline_rendezvous::env::WorkerEnv;
//! use paceline_rendezvous::store::{Store, connect_or_host};
//!
//! let env = WorkerEnv::from_process()?;
//! let (_server, store) = connect_or_host(&env, Duration::from_secs(60))?;
//! store.set(&format!("rank/{}/addr", env.rank), b"10.0.0.5:4711")?;
//! let addr = store.get("rank/0/addr", Duration::from_secs(60))?;
//! assert_eq!(addr, b"10.0.0.5:4711");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod auth;
pub mod endpoint;
pub mod env;
mod error_text;
pub mod net;
pub mod nodes;
pub mod notice;
mod os;
pub mod page;
pub mod process;
pub mod scheduler;
mod spin;
pub mod stop;
pub mod store;
pub mod tls;
pub mod token;
pub mod wait;

pub use os::monotonic_ns;
