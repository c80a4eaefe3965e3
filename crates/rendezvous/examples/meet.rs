//! Joins the job described by the environment and says who is there.
//!
//! Alone, or started by hand with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or by a launcher:
//!
//! ```text
//! cargo run --example meet
//! torchrun --nproc-per-node 2 --no-python target/debug/examples/meet
//! ```

use std::error::Error;
use std::time::Duration;

use paceline_rendezvous::env::{EnvError, WorkerEnv};
use paceline_rendezvous::store::{Store, StoreError, connect_or_host};

const TIMEOUT: Duration = Duration::from_secs(30);

fn main() {
    if let Err(error) = meet() {
        eprintln!("error: {error}");
        let hint = error
            .downcast_ref::<EnvError>()
            .and_then(EnvError::hint)
            .or_else(|| {
                error
                    .downcast_ref::<StoreError>()
                    .and_then(StoreError::hint)
            });
        if let Some(hint) = hint {
            eprintln!("hint: {hint}");
        }
        std::process::exit(1);
    }
}

fn meet() -> Result<(), Box<dyn Error>> {
    let env = WorkerEnv::from_process()?;
    let (server, client) = connect_or_host(&env, TIMEOUT)?;

    let me = format!("process {} on node {}", std::process::id(), env.node_rank);
    client.set(&format!("who/{}", env.rank), me.as_bytes())?;
    for rank in 0..env.world {
        let who = client.get(&format!("who/{rank}"), TIMEOUT)?;
        println!(
            "rank {} sees rank {rank}: {}",
            env.rank,
            String::from_utf8_lossy(&who)
        );
    }

    // Whoever hosts the store stays until the last rank has read.
    if client.add("done", 1)? == i64::try_from(env.world)? {
        client.set("all done", b"")?;
    }
    if server.is_some() {
        client.wait(&["all done"], TIMEOUT)?;
    }
    Ok(())
}
