//! Turns a job's description into a Slurm batch script, Kubernetes manifests or the driver of a Ray job.
//!
//! [`Submission`] is what all need to know; [`slurm::render`], [`kubernetes::render`] and [`ray::render`] are pure functions of it and of
//! the scheduler's own options. [`save`] and [`hand_over`] are the two things that touch the system.
//!
//! ```
//! use paceline_submit::{Nodes, Submission, slurm};
//!
//! let mut job = Submission::new("mnist", "./train");
//! job.nodes = Nodes::parse("2").unwrap();
//! job.args = vec!["--epochs".to_owned(), "it's 3".to_owned()];
//! let script = slurm::render(&job, &slurm::Options::default())?;
//! assert!(script.contains("#SBATCH --nodes=2\n"));
//! assert!(script.contains("./train --epochs \"it's 3\""));
//! # Ok::<(), paceline_submit::SubmitError>(())
//! ```

mod error;
mod hand_over;
pub mod kubernetes;
pub mod ray;
pub mod slurm;
mod submission;
mod units;

pub use error::SubmitError;
pub use hand_over::{hand_over, save};
pub use submission::{Nodes, Ranks, Submission};
pub use units::{Memory, TimeLimit};
