//! A trained model in the formats of other programs, with PyTorch's names and layouts.

mod graph;
mod onnx;
mod torch;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use burn::tensor::TensorData;
use paceline_checkpoint::{SavedModel, write_tensors};
use paceline_ddp::weights;
use paceline_nn::gpt::GptConfig;
use paceline_usage::files::replace;

use crate::classify::{FEATURES_ENTRY, saved_schema};
use crate::data::{Features, Target};
use crate::error::TrainError;
use crate::init::transposed;
use crate::language::{GPT_ENTRY, TOKENIZER_ENTRY};
use crate::tokenizer::{FILE as TOKENIZER_FILE, Tokenizer};
use crate::torch_names::{TorchLayout, torch_tensors};
use crate::trained::{Which, entry, misfit};

/// A format of other programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A file for `safetensors.torch.load_file`.
    Safetensors,
    /// A dictionary of tensors for `torch.load`.
    Torch,
    /// A model for ONNX Runtime and others, with operators of version 20.
    Onnx,
    /// A folder for `AutoModelForCausalLM.from_pretrained`, of a language model.
    Transformers,
}

impl Format {
    /// The names of all formats.
    pub const NAMES: [&str; 4] = ["safetensors", "torch", "onnx", "transformers"];

    /// The one with a name; `None` if there is none.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let all = [
            Self::Safetensors,
            Self::Torch,
            Self::Onnx,
            Self::Transformers,
        ];
        let at = Self::NAMES.iter().position(|known| *known == name)?;
        Some(all[at])
    }

    /// Where it goes if no place is named.
    fn place(self, run: &Path) -> PathBuf {
        run.join(match self {
            Self::Safetensors => "model.safetensors",
            Self::Torch => "model.pt",
            Self::Onnx => "model.onnx",
            Self::Transformers => "transformers",
        })
    }
}

/// An exported model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The checkpoint's folder.
    pub checkpoint: PathBuf,
    /// The file or folder.
    pub path: PathBuf,
    /// Its tensors.
    pub tensors: usize,
    /// Their values.
    pub values: usize,
}

/// Writes a checkpoint of the run in `run` to `to`, or into the run directory. A file appears complete or not at all, and replaces an older
/// one.
///
/// *Memory*: twice that of the weights, three times for ONNX.
///
/// *Errors*: no checkpoint; a model of a user's program; a format that has no place for the model; the system's; a folder that is there already.
pub fn export(
    run: &Path,
    which: Which,
    format: Format,
    to: Option<&Path>,
) -> Result<Exported, TrainError> {
    let saved = which.of_run(run)?;
    let path = to.map_or_else(|| format.place(run), Path::to_owned);
    let model = Model::of(&saved)?;
    let exported = Exported {
        checkpoint: saved.path().to_owned(),
        path,
        tensors: model.tensors.len(),
        values: model
            .tensors
            .iter()
            .map(|(_, data)| data.num_elements())
            .sum(),
    };
    let path = &exported.path;
    let write = |write: &dyn Fn(&File) -> io::Result<()>| {
        replace(path, write).map_err(|error| unwritten(path, &error))
    };
    match format {
        Format::Safetensors => write(&|file| model.write_safetensors(file))?,
        Format::Torch => write(&|file| torch::write(file, &model.tensors))?,
        Format::Onnx => {
            let bytes = model.onnx()?;
            write(&|mut file| file.write_all(&bytes))?;
        }
        Format::Transformers => model.write_folder(path)?,
    }
    Ok(exported)
}

fn unwritten(path: &Path, error: &io::Error) -> TrainError {
    TrainError::usage(
        format!("cannot write {}: {error}", path.display()),
        "name another place with --output",
    )
}

/// What there is to export.
struct Model {
    /// By PyTorch's names.
    tensors: Vec<(String, TensorData)>,
    kind: Kind,
    metadata: BTreeMap<String, String>,
}

enum Kind {
    Samples(Features, Target),
    Language(GptConfig, Tokenizer),
}

impl Model {
    fn of(saved: &SavedModel) -> Result<Self, TrainError> {
        let has = |entry| saved.metadata().contains_key(entry);
        let kind = if has(FEATURES_ENTRY) {
            let schema = saved_schema(saved)?;
            Kind::Samples(schema.features, schema.target)
        } else if has(GPT_ENTRY) {
            let tokenizer = &saved.metadata()[TOKENIZER_ENTRY];
            let tokenizer = Tokenizer::from_text(tokenizer)
                .map_err(|why| misfit(saved, format!("its tokenizer cannot be read: {why}")))?;
            Kind::Language(entry(saved, GPT_ENTRY)?, tokenizer)
        } else {
            return Err(TrainError::usage(
                format!(
                    "{} holds a model of a program of its own",
                    saved.path().display()
                ),
                "its model.safetensors has the weights by Burn's paths",
            ));
        };
        let mut metadata = saved.metadata().clone();
        // What Transformers looks for.
        metadata.insert("format".into(), "pt".into());
        let tensors = as_in_torch(saved.tensors());
        let tensors = tensors.ok_or_else(|| {
            misfit(
                saved,
                "its tensors are not those of a built-in model".into(),
            )
        })?;
        Ok(Self {
            tensors,
            kind,
            metadata,
        })
    }

    fn write_safetensors(&self, file: &File) -> io::Result<()> {
        write_tensors(file, &self.tensors, self.metadata.clone())
    }

    /// *Errors*: a model that is too large for the format.
    fn onnx(&self) -> Result<Vec<u8>, TrainError> {
        let bytes: usize = self
            .tensors
            .iter()
            .map(|(_, data)| data.as_bytes().len())
            .sum();
        if bytes >= onnx::BYTES_MAX {
            return Err(TrainError::usage(
                format!(
                    "the model has {bytes} bytes, and a file of ONNX holds less than {}",
                    onnx::BYTES_MAX
                ),
                "choose --format safetensors",
            ));
        }
        let graph = match &self.kind {
            Kind::Samples(features, target) => graph::of_samples(&self.tensors, *features, target),
            Kind::Language(config, _) => graph::gpt(&self.tensors, config),
        };
        Ok(graph.model("paceline", self.metadata.iter()))
    }

    /// Writes the folder beside its place first.
    fn write_folder(&self, path: &Path) -> Result<(), TrainError> {
        let Kind::Language(config, tokenizer) = &self.kind else {
            return Err(TrainError::usage(
                "--format transformers is for language models".to_owned(),
                "choose safetensors, torch or onnx",
            ));
        };
        if path.exists() {
            return Err(TrainError::usage(
                format!("{} is there already", path.display()),
                "remove it, or name another folder with --output",
            ));
        }
        let written = || {
            let parent = path
                .parent()
                .filter(|parent| !parent.as_os_str().is_empty());
            let beside = tempfile::tempdir_in(parent.unwrap_or(Path::new(".")))?;
            let folder = beside.path();
            self.write_safetensors(&File::create(folder.join("model.safetensors"))?)?;
            let settings = gpt2_settings(config, tokenizer.end_of_text());
            fs::write(folder.join("config.json"), settings)?;
            if let Some((_, text)) = tokenizer.file() {
                fs::write(folder.join(TOKENIZER_FILE), text)?;
                let settings = r#"{"tokenizer_class": "PreTrainedTokenizerFast"}"#;
                fs::write(folder.join("tokenizer_config.json"), settings)?;
            }
            fs::rename(folder, path)?;
            // It is no longer there to be removed.
            let _ = beside.keep();
            Ok(())
        };
        written().map_err(|error| unwritten(path, &error))
    }
}

/// The tensors by PyTorch's names and in its layouts; `None` unless they are those of a built-in model.
pub(crate) fn as_in_torch(tensors: &[(String, TensorData)]) -> Option<Vec<(String, TensorData)>> {
    let places = torch_tensors(tensors.iter().map(|(path, _)| &**path))?;
    let mut thirds: BTreeMap<String, (usize, [Option<TensorData>; 3])> = BTreeMap::new();
    let mut put = |name, axis, at: usize, part| {
        let (_, parts) = thirds.entry(name).or_insert((axis, Default::default()));
        parts[at] = Some(part);
    };
    let mut named = Vec::with_capacity(tensors.len());
    for (place, (_, data)) in places.into_iter().zip(tensors) {
        match place.layout {
            TorchLayout::Same => named.push((place.name, data.clone())),
            TorchLayout::Transposed => named.push((place.name, transposed(data)?)),
            TorchLayout::Third(at) => put(place.name, data.shape().len() - 1, at, data.clone()),
            TorchLayout::TransposedThird(at) => put(place.name, 0, at, transposed(data)?),
        }
    }
    for (name, (axis, [query, key, value])) in thirds {
        named.push((name, weights::concat(&[query?, key?, value?], axis)));
    }
    Some(named)
}

/// The settings of a model for the class `GPT2LMHeadModel` of Transformers.
fn gpt2_settings(config: &GptConfig, end_of_text: u32) -> String {
    let settings = serde_json::json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocabulary,
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "activation_function": "gelu",
        "layer_norm_epsilon": graph::EPSILON,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "tie_word_embeddings": true,
        "dtype": "float32",
    });
    format!("{settings:#}\n")
}

#[cfg(test)]
mod tests;
