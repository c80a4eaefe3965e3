//! The `paceline` program as users run it: real processes, started, killed, stopped and read.

mod bad_input;
mod chaos;
mod comm_hooks;
mod compare;
mod doctor;
mod faults;
mod images;
mod indices;
mod jobs;
mod language;
mod layouts;
mod learning;
mod ledger;
mod membership;
mod memory;
mod mesh;
mod minimal;
mod mlflow;
mod nodes;
#[cfg(feature = "object-store")]
mod object_store;
mod pipeline;
mod plan;
mod preemption;
mod ray;
mod recovery;
mod replay;
mod resume;
mod run;
mod same_bits;
mod signals;
mod step_time;
mod support;
mod tables;
mod tensor_parallel;
mod torch_contract;
mod trained;
mod trainer;
mod zero;

/// The example, for its own tests: cargo builds an example either as a program or as tests, and `step_time` starts it.
#[allow(dead_code, reason = "its main function is not called here")]
#[path = "../../../../examples/step_time/main.rs"]
mod timed_example;
