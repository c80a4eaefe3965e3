//! `paceline export`: a trained model for other programs.

use std::path::PathBuf;

use clap::{ArgMatches, value_parser};
use paceline_cli::flags::{required, valued};
use paceline_train::{Format, Which};

/// The command line of `paceline export`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExportArgs {
    /// The run directory; `None` for the newest run.
    pub(crate) run: Option<PathBuf>,
    /// Which of its checkpoints.
    pub(crate) which: Which,
    /// The format.
    pub(crate) format: Format,
    /// The file or folder to write; `None` for one in the run directory.
    pub(crate) output: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Tensors have PyTorch's names and layouts: those of torchvision's resnet18 and resnet50, of
timm's vit_tiny, of Hugging Face's GPT-2, or of the attributes of small networks
(docs/export.md has the classes).
Classes, columns and scaling are in the metadata of safetensors and ONNX.

Formats:
  safetensors    for safetensors.torch.load_file
  torch          a state dict for torch.load
  onnx           for ONNX Runtime: samples in, class scores out
  transformers   a language model as a folder for AutoModelForCausalLM.from_pretrained

Examples:
  paceline export
  paceline export runs/flowers --format onnx --output flowers.onnx
  paceline export runs/shakespeare --format transformers --output shakespeare";

pub(super) fn command() -> clap::Command {
    clap::Command::new("export")
        .about("Write what a run has trained as safetensors, for PyTorch, Transformers or ONNX")
        .after_help(EXAMPLES)
        .arg(super::eval::run())
        .args(super::eval::which_args())
        .arg(
            valued("format", "FORMAT", Format::NAMES)
                .default_value("safetensors")
                .help("Format of the file"),
        )
        .arg(valued("output", "PATH", value_parser!(PathBuf)).help(
            "File or folder to write [default: model.safetensors, model.pt, model.onnx or transformers in the run directory]",
        ))
}

pub(super) fn read(matches: &ArgMatches) -> ExportArgs {
    let format: String = required(matches, "format");
    ExportArgs {
        run: matches.get_one("run").cloned(),
        which: super::eval::which(matches),
        format: Format::named(&format).expect("clap knows the names"),
        output: matches.get_one("output").cloned(),
    }
}
