//! `paceline generate`: text from a trained language model, as it is written.

use std::io::{self, Write};

use paceline_train::Generator;

use super::train::{run_or_newest, settings_of};
use super::{Program, failed};
use crate::cli::GenerateArgs;
use paceline_cli::exit::{Exit, Failure};
use paceline_cli::flags::finish;

/// Prints the prompt and its continuation, each piece as soon as it is known.
///
/// *Errors*: no such run, or one without a language model or a checkpoint; a prompt that cannot be encoded.
pub(crate) fn generate(args: &GenerateArgs) -> Result<Exit, Failure> {
    let run = settings_of(&Program::PACELINE, run_or_newest(args.run.as_deref())?)?.run_dir;
    let generator = Generator::of_run(&run, args.which);
    let generator = generator.map_err(|error| failed(None, &error))?;
    let mut out = io::stdout().lock();
    let mut written = Ok(());
    let mut write = |text: &str| {
        written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        written.is_ok()
    };
    if write(&args.prompt) {
        generator
            .generate(&args.prompt, &args.options, &mut write)
            .map_err(|error| failed(None, &error))?;
        write("\n");
    }
    finish(written)
}
