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
//! | [`mod@env`] | the environment contract: torchrun's names, Slurm's, Paceline's own, and errors that name every fault |
//! | [`token`] | the job's secret |
//! | [`auth`] | the mutual proof of the token, before a byte of a peer is believed |
//! | [`tls`] | TLS on a connection, where the job asks for it |
//! | [`store`] | the key-value store: server, client, stores in one process, under a prefix and on torch's, and where to meet |
//! | [`page`] | the job page: what local ranks are doing, revocation, the request to stop |
//!
//! Nothing here knows tensors, collectives or processes. Every wait has a deadline, every buffer a bound; what Linux
//! alone has is in one private module.
//!
//! A rank joins its job like this; without any variable set it is alone and hosts a store for itself:
//!
//! ```
//! use std::time::Duration;
//! use paceline_rendezvous::env::WorkerEnv;
//! use paceline_rendezvous::store::connect_or_host;
//!
//! let env = WorkerEnv::from_process()?;
//! let (_server, store) = connect_or_host(&env, Duration::from_secs(60))?;
//! store.set(&format!("rank/{}/addr", env.rank), b"10.0.0.5:4711")?;
//! let addr = store.get("rank/0/addr", Duration::from_secs(60))?;
//! assert_eq!(addr, b"10.0.0.5:4711");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod auth;
pub mod env;
mod net;
mod os;
pub mod page;
mod spin;
pub mod store;
pub mod tls;
pub mod token;
