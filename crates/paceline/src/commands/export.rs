//! `paceline export`: a trained model for other programs.

use std::io::{self, Write};

use paceline_cli::exit::{Exit, Failure};
use paceline_cli::flags::finish;
use paceline_train::export;
use paceline_words::counted;

use super::train::{run_or_newest, settings_of};
use super::{Program, failed};
use crate::cli::ExportArgs;

/// Writes the model, and prints where it is.
///
/// *Errors*: no such run, or one without a checkpoint; a model that the format does not have; a file that cannot be written.
pub(crate) fn run(args: &ExportArgs) -> Result<Exit, Failure> {
    let run = settings_of(&Program::PACELINE, run_or_newest(args.run.as_deref())?)?.run_dir;
    let exported = export(&run, args.which, args.format, args.output.as_deref());
    let exported = exported.map_err(|error| failed(None, &error))?;
    finish(writeln!(
        io::stdout(),
        "{}: {}, {}, from {}{}",
        exported.path.display(),
        counted(exported.tensors, "tensor"),
        counted(exported.values, "value"),
        exported.checkpoint.display(),
        args.which.note(),
    ))
}
