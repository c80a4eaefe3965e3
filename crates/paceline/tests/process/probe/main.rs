//! The programs that tests start as ranks: `probe fault`, `probe stop`, `probe replay` and `probe device`. They are one example, because each
//! program compiles Burn's generic code anew.

mod device;
mod fault;
mod replay;
mod stop;

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args();
    match args.nth(1).as_deref() {
        Some("fault") => fault::run(args),
        Some("stop") => stop::run(args),
        Some("replay") => replay::run(args),
        Some("device") => device::run(args),
        other => Err(format!("expected fault, stop, replay or device, got {other:?}").into()),
    }
}
