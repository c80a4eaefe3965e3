//! The `paceline` program as people use it: real processes, started, killed, stopped and read.

mod bad_input;
mod faults;
mod indices;
mod preemption;
mod resume;
mod run;
mod same_bits;
mod signals;
mod step_time;
mod support;
mod torch_contract;
