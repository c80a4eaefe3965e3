//! Text to token numbers and back: bytes, or a tokenizer in Hugging Face's format.

use std::fs;
use std::path::Path;
#[cfg(feature = "tokenizers")]
use std::{sync::mpsc, thread};

#[cfg(feature = "tokenizers")]
use tokenizers::{
    AddedToken, Tokenizer as HuggingFace, models::TrainerWrapper, models::bpe::BPE,
    models::bpe::BpeTrainer, pre_tokenizers::byte_level::ByteLevel,
};

use crate::config::{TokenizerChoice, TrainConfig};
use crate::data::text::Documents;
use crate::error::TrainError;
#[cfg(feature = "tokenizers")]
use crate::task::Part;

/// Name of the tokenizer's file in a run directory.
pub(crate) const FILE: &str = "tokenizer.json";

/// The byte tokenizer in a checkpoint's metadata.
const BYTES: &str = "bytes";

/// Maximum size of a tokenizer's file.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Tokens of a trained tokenizer if no number is set.
#[cfg(feature = "tokenizers")]
const VOCABULARY: usize = 1024;

/// The token between documents.
#[cfg(feature = "tokenizers")]
const END_OF_TEXT: &str = "<|endoftext|>";

/// The same in other models' tokenizers.
#[cfg(feature = "tokenizers")]
const ENDS: [&str; 6] = [
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[SEP]",
    "<|im_end|>",
];

#[cfg(not(feature = "tokenizers"))]
const MISSING: &str = "this program was built without the feature `tokenizers`";

/// A tokenizer.
#[derive(Clone)]
pub(crate) enum Tokenizer {
    /// Each byte is a token with its value, and 256 is the end of a document.
    Bytes,
    /// A tokenizer in Hugging Face's format.
    #[cfg(feature = "tokenizers")]
    HuggingFace {
        tokenizer: Box<HuggingFace>,
        end_of_text: u32,
    },
}

impl Tokenizer {
    /// The tokenizer of a new run: trained on the documents' training parts if it is to be.
    ///
    /// *Errors*: a file that is no tokenizer; a program built without the feature `tokenizers`.
    pub(crate) fn of_new_run(
        config: &TrainConfig,
        documents: &Documents,
    ) -> Result<Self, TrainError> {
        match config.tokenizer_choice() {
            TokenizerChoice::Bytes => Ok(Self::Bytes),
            TokenizerChoice::Bpe => Self::trained(config.vocab, documents).map_err(|why| {
                let hint = "use --tokenizer bytes, or build with `--features tokenizers`";
                TrainError::usage(format!("cannot train a tokenizer: {why}"), hint)
            }),
            TokenizerChoice::File(path) => Self::read(&path),
        }
    }

    /// The tokenizer that the run in `run_dir` began with.
    ///
    /// *Errors*: as for a new run.
    pub(crate) fn of_run(config: &TrainConfig) -> Result<Self, TrainError> {
        match config.tokenizer_choice() {
            TokenizerChoice::Bytes => Ok(Self::Bytes),
            _ => Self::read(&config.run_dir.join(FILE)),
        }
    }

    /// The file from which [`of_run`](Self::of_run) reads it.
    pub(crate) fn file(&self) -> Option<(&'static str, String)> {
        match self {
            Self::Bytes => None,
            #[cfg(feature = "tokenizers")]
            Self::HuggingFace { .. } => Some((FILE, self.to_text())),
        }
    }

    fn read(path: &Path) -> Result<Self, TrainError> {
        let fail = |why: String| {
            let hint = "--tokenizer takes bytes, bpe, or a tokenizer.json in Hugging Face's format";
            TrainError::usage(format!("{}: {why}", path.display()), hint)
        };
        let found = fs::metadata(path).map_err(|error| fail(error.to_string()))?;
        if found.len() > FILE_BYTES_MAX {
            return Err(fail(format!(
                "{} bytes, more than the {FILE_BYTES_MAX} supported",
                found.len()
            )));
        }
        let text = fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
        Self::from_text(&text).map_err(fail)
    }

    /// Reads what [`to_text`](Self::to_text) wrote, or a Hugging Face `tokenizer.json`. The inner error says why not.
    pub(crate) fn from_text(text: &str) -> Result<Self, String> {
        if text == BYTES {
            return Ok(Self::Bytes);
        }
        Self::from_json(text)
    }

    /// Bytes as pieces of UTF-8 text, or one token at a time as the tokenizer's decoder joins them.
    pub(crate) fn decoder(&self) -> Box<dyn FnMut(u32) -> String + '_> {
        match self {
            Self::Bytes => {
                let mut rest = Vec::new();
                Box::new(move |token| {
                    rest.extend(u8::try_from(token));
                    take_text(&mut rest)
                })
            }
            #[cfg(feature = "tokenizers")]
            Self::HuggingFace { tokenizer, .. } => {
                let mut stream = tokenizer.decode_stream(true);
                Box::new(move |token| stream.step(token).ok().flatten().unwrap_or_default())
            }
        }
    }
}

impl Tokenizer {
    /// Number of different tokens.
    pub(crate) fn vocabulary(&self) -> usize {
        match self {
            Self::Bytes => 257,
            // Numbers may have gaps.
            #[cfg(feature = "tokenizers")]
            Self::HuggingFace { tokenizer, .. } => {
                let tokens = tokenizer.get_vocab(true);
                tokens.values().max().map_or(0, |last| *last as usize + 1)
            }
        }
    }

    /// The token between documents.
    pub(crate) fn end_of_text(&self) -> u32 {
        match self {
            Self::Bytes => 256,
            #[cfg(feature = "tokenizers")]
            Self::HuggingFace { end_of_text, .. } => *end_of_text,
        }
    }

    /// The tokens of `text`, without any that the tokenizer adds around it. The inner error says why not.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            #[cfg(feature = "tokenizers")]
            Self::HuggingFace { tokenizer, .. } => {
                let tokens = tokenizer.encode_fast(text, false);
                let tokens = tokens.map_err(|error| error.to_string())?;
                Ok(tokens.get_ids().to_vec())
            }
        }
    }

    /// The tokenizer as text, for a file or a checkpoint's metadata.
    pub(crate) fn to_text(&self) -> String {
        match self {
            Self::Bytes => BYTES.to_owned(),
            #[cfg(feature = "tokenizers")]
            Self::HuggingFace { tokenizer, .. } => {
                tokenizer.to_string(false).expect("it always encodes")
            }
        }
    }

    /// In words.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            #[cfg(feature = "tokenizers")]
            Self::HuggingFace { .. } => "tokens",
        }
    }
}

#[cfg(feature = "tokenizers")]
impl Tokenizer {
    /// Learns from the documents' training parts, one after another.
    fn trained(vocabulary: Option<usize>, documents: &Documents) -> Result<Self, String> {
        let train = |texts: mpsc::IntoIter<String>| {
            let mut tokenizer = HuggingFace::new(BPE::default());
            tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
            tokenizer.with_decoder(Some(ByteLevel::default()));
            let trainer = BpeTrainer::builder()
                .show_progress(false)
                .vocab_size(vocabulary.unwrap_or(VOCABULARY))
                .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
                .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
                .build();
            let mut trainer = TrainerWrapper::BpeTrainer(trainer);
            tokenizer.train(&mut trainer, texts)?;
            tokenizer.to_string(false)
        };
        let (sender, texts) = mpsc::sync_channel(4);
        let (trained, read) = thread::scope(|scope| {
            let reader = scope.spawn(move || {
                documents.each(|piece| {
                    if piece.part == Part::Train {
                        // Nobody listens after an error of the trainer.
                        let _ = sender.send(piece.text.to_owned());
                    }
                    Ok(())
                })
            });
            let trained = train(texts.into_iter());
            (trained, reader.join().expect("reading does not panic"))
        });
        read.map_err(|error| error.to_string())?;
        let trained = trained.map_err(|error| error.to_string());
        trained.and_then(|text| Self::from_json(&text))
    }

    fn from_json(text: &str) -> Result<Self, String> {
        let mut tokenizer: HuggingFace = text
            .parse()
            .map_err(|error| format!("not a tokenizer in Hugging Face's format: {error}"))?;
        // Both would change the text.
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(|error| error.to_string())?;
        let known = |tokenizer: &HuggingFace| {
            let mut ends = ENDS.iter();
            ends.find_map(|end| tokenizer.token_to_id(end))
        };
        if known(&tokenizer).is_none() {
            tokenizer.add_special_tokens(&[AddedToken::from(END_OF_TEXT, true)]);
        }
        let end_of_text = known(&tokenizer).ok_or("it takes no token for the end of a text")?;
        Ok(Self::HuggingFace {
            tokenizer: Box::new(tokenizer),
            end_of_text,
        })
    }
}

#[cfg(not(feature = "tokenizers"))]
impl Tokenizer {
    fn trained(_: Option<usize>, _: &Documents) -> Result<Self, String> {
        Err(MISSING.into())
    }

    fn from_json(_: &str) -> Result<Self, String> {
        Err(MISSING.into())
    }
}

/// Takes all text from the start of `bytes` except an incomplete character at their end; what is no text becomes `\u{fffd}`.
fn take_text(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut used = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        used += chunk.valid().len();
        let invalid = chunk.invalid();
        let is_end = used + invalid.len() == bytes.len();
        let is_incomplete =
            std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
        let is_kept = invalid.is_empty() || is_end && is_incomplete;
        if !is_kept {
            text.push(char::REPLACEMENT_CHARACTER);
            used += invalid.len();
        }
    }
    bytes.drain(..used);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(tokenizer: &Tokenizer, tokens: &[u32]) -> String {
        let mut decode = tokenizer.decoder();
        tokens.iter().map(|token| decode(*token)).collect()
    }

    #[test]
    fn bytes_come_back_as_the_same_text_a_whole_character_at_a_time() {
        let text = "naïve ∑ 🙂\n";
        let tokens = Tokenizer::Bytes.encode(text).expect("bytes");
        assert_eq!(tokens.len(), text.len());
        assert_eq!(decode(&Tokenizer::Bytes, &tokens), text);
        let mut decode = Tokenizer::Bytes.decoder();
        assert_eq!([decode(0xc3), decode(0xa9)], ["", "é"]);
        // A lone start of a character, and the end of a text, are no bytes of text.
        assert_eq!([decode(0xc3), decode(0x41)], ["", "\u{fffd}A"]);
        assert_eq!(decode(256), "");
    }

    #[cfg(feature = "tokenizers")]
    #[test]
    fn a_trained_tokenizer_keeps_any_text_in_fewer_tokens_and_is_the_same_each_time() {
        let train = || Tokenizer::trained(Some(400), &Documents::built_in()).expect("trained");
        let tokenizer = train();
        assert_eq!(tokenizer.vocabulary(), 400);
        assert_eq!(tokenizer.to_text(), train().to_text());
        let text = "Before we proceed any further, hear me speak. naïve 🙂";
        let again = Tokenizer::from_text(&tokenizer.to_text()).expect("a tokenizer");
        let tokens = again.encode(text).expect("tokens");
        assert!(tokens.len() < text.len() * 2 / 3, "{}", tokens.len());
        assert_eq!(decode(&tokenizer, &tokens), text);
        assert!(tokens.iter().all(|token| *token != tokenizer.end_of_text()));
    }

    #[cfg(feature = "tokenizers")]
    #[test]
    fn a_file_that_is_no_tokenizer_is_refused_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.json");
        fs::write(&path, "{}").expect("a file");
        let error = Tokenizer::read(&path).err().expect("refused").to_string();
        assert!(
            error.contains("t.json") && error.contains("Hugging Face"),
            "{error}"
        );
        let missing = Tokenizer::read(&folder.path().join("no.json")).err();
        assert!(missing.expect("refused").to_string().contains("no.json"));
    }
}
