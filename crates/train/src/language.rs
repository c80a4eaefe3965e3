//! Language modelling: documents packed into sequences of tokens, and a GPT, as a task.

use std::marker::PhantomData;

use burn::tensor::{Device, Int, Tensor, TensorData};
use paceline_checkpoint::{CheckpointError, by_rank_0};
use paceline_collective::ProcessGroup;
use paceline_ddp::Precision;
use paceline_nn::gpt::{Gpt, GptConfig};
use paceline_split::ModelParallel;
use paceline_split::pipeline::Sequential;
use paceline_split::tensor::{ParallelGpt, PartsError, TensorParallel};
use paceline_usage::figures::thousands;

use crate::config::TrainConfig;
use crate::cuts::{Cuts, SequentialTask};
use crate::data::table::TextColumn;
use crate::data::text::Documents;
use crate::data::tokens::Tokens;
use crate::data::{DataError, DataProblem};
use crate::error::TrainError;
use crate::plan::Shape;
use crate::report::plural;
use crate::scores::{self, Classes, Scores};
use crate::task::{Compute, Loss, Metric, Part, Sums, TrainTask, Unit};
use crate::tokenizer::Tokenizer;

/// Tokens of one evaluation batch.
const EVALUATION_TOKENS: usize = 1 << 13;

/// Entries of a checkpoint's metadata.
pub(crate) const GPT_ENTRY: &str = "gpt";
pub(crate) const TOKENIZER_ENTRY: &str = "tokenizer";

/// A text as tokens, packed: all documents in a row, with a separator before each, cut into sequences of `context` tokens.
///
/// A sequence may hold the end of one document and the beginning of the next.
///
/// The model is whole on every rank, or cut into parts.
pub(crate) struct Text<M = Gpt> {
    name: String,
    tokenizer: Tokenizer,
    gpt: GptConfig,
    train: Tokens,
    held_out: Tokens,
    warnings: Vec<String>,
    model: PhantomData<fn() -> M>,
}

impl<M> Text<M> {
    fn new(
        config: &TrainConfig,
        documents: &Documents,
        tokenizer: Tokenizer,
    ) -> Result<Self, TrainError> {
        let gpt = config.gpt(tokenizer.vocabulary());
        let of = |problem: DataProblem| match &config.data {
            Some(path) => problem.of(path),
            None => problem.of("the built-in text".as_ref()),
        };
        let [mut train, mut held_out] = [(), ()].map(|()| Tokens::new(tokenizer.vocabulary()));
        // The documents are in a row, a separator before each.
        let warnings = documents.each(|piece| {
            let tokens = match piece.part {
                Part::Train => &mut train,
                Part::HeldOut => &mut held_out,
            };
            if piece.begins {
                tokens.push(&[tokenizer.end_of_text()])?;
            }
            let encoded = tokenizer.encode(piece.text).map_err(|why| {
                DataProblem::new(format!("the tokenizer cannot encode the text: {why}"))
            })?;
            tokens.push(&encoded)
        })?;
        let predicted = train.len() - 1;
        if predicted < gpt.context {
            let tokens = plural(predicted as u64, "token");
            let context = gpt.context;
            let problem = format!("{tokens} to train on, fewer than the {context} of one context");
            let problem = DataProblem::new(problem).with_hint("lower --context, or add text");
            return Err(of(problem).into());
        }
        Ok(Self {
            name: documents.name.clone(),
            tokenizer,
            gpt,
            train,
            held_out,
            warnings,
            model: PhantomData,
        })
    }

    /// Whether a model of this shape can read the sequences.
    pub(crate) fn fits(&self, gpt: &GptConfig) -> bool {
        (self.gpt.context, self.gpt.vocabulary) == (gpt.context, gpt.vocabulary)
    }

    fn stream(&self, part: Part) -> &Tokens {
        match part {
            Part::Train => &self.train,
            Part::HeldOut => &self.held_out,
        }
    }

    /// The sequences with the given indices, and what follows each of their tokens.
    ///
    /// *Errors*: a temporary file of the tokens cannot be read.
    pub(crate) fn sequences(
        &self,
        part: Part,
        indices: impl Iterator<Item = usize>,
    ) -> Result<Sequences, DataError> {
        let context = self.gpt.context;
        let mut batch = Sequences {
            inputs: Vec::new(),
            targets: Vec::new(),
            places: Vec::new(),
        };
        for (row, index) in indices.enumerate() {
            let tokens = self.sequence(part, index)?;
            let number = |token: &u32| *token as i32;
            let (inputs, targets) = (&tokens[..tokens.len() - 1], &tokens[1..]);
            batch.inputs.extend(inputs.iter().map(number));
            batch
                .inputs
                .resize((row + 1) * context, self.tokenizer.end_of_text() as i32);
            batch.targets.extend(targets.iter().map(number));
            let start = (row * context) as i32;
            batch.places.extend(start..start + targets.len() as i32);
        }
        Ok(batch)
    }

    /// The tokens of a sequence and the one that follows. Only the last sequence is shorter than the context.
    fn sequence(&self, part: Part, index: usize) -> Result<Vec<u32>, DataError> {
        let stream = self.stream(part);
        let start = index * self.gpt.context;
        let end = (start + self.gpt.context).min(stream.len() - 1);
        let read = stream.read(start..end + 1);
        read.map_err(|problem| problem.of(self.name.as_ref()))
    }
}

/// Sequences in plain memory.
pub(crate) struct Sequences {
    /// `[sequences, context]`; a short sequence is filled up with the separator.
    inputs: Vec<i32>,
    /// The tokens that follow, without those of the filling.
    targets: Vec<i32>,
    /// The places in `inputs` that a target follows.
    places: Vec<i32>,
}

impl Sequences {
    /// Number of tokens to predict.
    fn predictions(&self) -> usize {
        self.targets.len()
    }

    fn places(&self) -> Option<&[i32]> {
        (self.places.len() < self.inputs.len()).then_some(&self.places[..])
    }

    /// The scores of the tokens to predict, among those of all places, which are the output of `model`.
    pub(crate) fn scores<M: LanguageModel>(
        &self,
        model: &M,
        output: M::Output,
        precision: Precision,
    ) -> Scores {
        let classes = model.classes(output, self.places(), precision);
        Scores {
            right: Tensor::from_data(&self.targets[..], &classes.device()),
            classes,
        }
    }
}

/// A form of the language model.
pub(crate) trait LanguageModel: Sequential<3, Input = Tensor<2, Int>> {
    /// Out of the whole model, whose parameters are lazy, and the parts of its matrices if they are cut.
    fn of(gpt: Gpt, parts: Option<&TensorParallel>) -> Result<Self, PartsError>;

    /// The scores of the token after each one.
    fn forward(&self, tokens: Tensor<2, Int>) -> Self::Output;

    /// The scores in `output`, of the tokens at `places` only if there are any.
    fn classes(
        &self,
        output: Self::Output,
        places: Option<&[i32]>,
        precision: Precision,
    ) -> Classes;
}

/// Scores of the tokens at `places`, in f32.
fn picked(scores: Tensor<3>, places: Option<&[i32]>, precision: Precision) -> Tensor<2> {
    let scores = precision.logits(scores.flatten(0, 1));
    match places {
        Some(places) => {
            let device = scores.device();
            scores.select(0, Tensor::from_data(places, &device))
        }
        None => scores,
    }
}

impl LanguageModel for Gpt {
    fn of(gpt: Gpt, _: Option<&TensorParallel>) -> Result<Self, PartsError> {
        Ok(gpt)
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        Self::forward(self, tokens)
    }

    fn classes(&self, output: Tensor<3>, places: Option<&[i32]>, precision: Precision) -> Classes {
        Classes::Whole(picked(output, places, precision))
    }
}

impl LanguageModel for ParallelGpt {
    fn of(gpt: Gpt, parts: Option<&TensorParallel>) -> Result<Self, PartsError> {
        Self::from_gpt(gpt, parts.expect("the layout has parts"))
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Vec<Tensor<3>> {
        Self::forward(self, tokens)
    }

    fn classes(
        &self,
        output: Vec<Tensor<3>>,
        places: Option<&[i32]>,
        precision: Precision,
    ) -> Classes {
        let parts = output.into_iter();
        let parts = parts.map(|scores| picked(scores, places, precision));
        Classes::Parts(self.parts().clone(), parts.collect(), self.vocabulary())
    }
}

impl<M: LanguageModel> TrainTask for Text<M> {
    type Model = M;
    type Batch = Sequences;

    const UNIT: Unit = Unit::Tokens;
    const SAMPLE: &'static str = "sequence";

    /// Rank 0 reads the tokenizer from the run directory for all.
    fn open(config: &TrainConfig, group: Option<&ProcessGroup>) -> Result<Self, TrainError> {
        let documents = match &config.data {
            Some(path) => Documents::open(path, TextColumn::new(config))?,
            None => Documents::built_in(),
        };
        let tokenizer = match group {
            None if config.resume => Tokenizer::of_run(config)?,
            None => Tokenizer::of_new_run(config, &documents)?,
            // The others are beyond this.
            Some(group) if group.is_joining() => Tokenizer::of_run(config)?,
            Some(group) => {
                let mut own = None;
                let text = by_rank_0(group, || {
                    let read = Tokenizer::of_run(config)?;
                    let text = read.to_text();
                    own = Some(read);
                    Ok::<_, TrainError>(text)
                })??;
                match own {
                    Some(own) => own,
                    None => Tokenizer::from_text(&text).map_err(CheckpointError::Rank0)?,
                }
            }
        };
        Self::new(config, &documents, tokenizer)
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        format!(
            "{}: {} to train on, {} held out, {} of {} kinds",
            self.name,
            plural(self.train.len() as u64 - 1, "token"),
            thousands(self.held_out.len() as u64 - 1),
            self.tokenizer.kind(),
            thousands(self.gpt.vocabulary as u64),
        )
    }

    fn warnings(&self) -> Vec<String> {
        self.warnings.clone()
    }

    fn len(&self, part: Part) -> usize {
        (self.stream(part).len() - 1).div_ceil(self.gpt.context)
    }

    fn evaluation_batch(&self) -> usize {
        (EVALUATION_TOKENS / self.gpt.context).max(1)
    }

    /// The shape of the model and the tokenizer.
    fn metadata(&self, _: &TrainConfig) -> Vec<(&'static str, String)> {
        let gpt = serde_json::to_string(&self.gpt).expect("it always encodes");
        vec![
            ("data", self.name.clone()),
            (GPT_ENTRY, gpt),
            (TOKENIZER_ENTRY, self.tokenizer.to_text()),
        ]
    }

    fn files(&self) -> Vec<(&'static str, String)> {
        self.tokenizer.file().into_iter().collect()
    }

    fn model(&self, _: &TrainConfig, device: &Device) -> Result<M, TrainError> {
        Ok(M::of(self.gpt.init(device), None)?)
    }

    /// The embedding and the layers.
    fn parts(&self) -> usize {
        self.gpt.layers + 1
    }

    fn place(&self, model: M, devices: &[Device]) -> M {
        ModelParallel::even(devices.to_vec(), self.parts()).place(model)
    }

    fn model_name(&self, _: &TrainConfig) -> String {
        let GptConfig {
            layers,
            heads,
            width,
            context,
            ..
        } = self.gpt;
        format!("gpt of {layers} layers, {heads} heads, width {width}, context {context}")
    }

    fn batch(
        &self,
        part: Part,
        _: Option<u64>,
        indices: impl Iterator<Item = usize>,
    ) -> Result<Sequences, TrainError> {
        Ok(self.sequences(part, indices)?)
    }

    fn cuts() -> Cuts<Self> {
        let cuts = Cuts::blocks::<3>();
        let cuts = cuts.with_parts(|task: &Self, _, device, parts| {
            let gpt = parts.begin(task.gpt.init(device))?;
            Ok(M::of(gpt, Some(parts.tensor_parallel()))?)
        });
        cuts.with_shape(|task: &Self, precision| {
            let gpt = &task.gpt;
            Shape {
                layers: gpt.layers,
                heads: gpt.heads,
                boundary: gpt.context * gpt.width,
                boundary_value_bytes: match precision {
                    Precision::F32 => 4,
                    Precision::Bf16 | Precision::F16 => 2,
                },
                predictions: gpt.context,
                tied: gpt.vocabulary * gpt.width,
            }
        })
    }

    fn loss(&self, model: &M, batch: &Sequences, compute: Compute<'_>) -> Result<Loss, TrainError> {
        Ok(self.scores(model, batch, compute).loss())
    }

    fn evaluate(
        &self,
        model: &M,
        batch: &Sequences,
        compute: Compute<'_>,
    ) -> Result<Sums, TrainError> {
        self.scores(model, batch, compute).sums()
    }

    fn metrics(&self, sums: &Sums) -> Vec<Metric> {
        let perplexity = sums.mean_loss().exp();
        let text = format!("perplexity {perplexity:.2}");
        let perplexity = Metric::number("perplexity", perplexity).shown(text);
        vec![perplexity, scores::accuracy(sums)]
    }
}

impl<M: LanguageModel> SequentialTask<3> for Text<M> {
    fn input(&self, batch: &Sequences, device: &Device) -> Tensor<2, Int> {
        let context = self.gpt.context;
        let shape = [batch.inputs.len() / context, context];
        Tensor::from_data(TensorData::new(batch.inputs.clone(), shape), device)
    }

    fn weight(&self, batch: &Sequences) -> f32 {
        batch.predictions() as f32
    }

    fn loss_of(
        &self,
        model: &M,
        batch: &Sequences,
        output: M::Output,
        compute: Compute<'_>,
    ) -> Loss {
        batch.scores(model, output, compute.precision).loss()
    }

    fn sums_of(
        &self,
        model: &M,
        batch: &Sequences,
        output: M::Output,
        compute: Compute<'_>,
    ) -> Result<Sums, TrainError> {
        batch.scores(model, output, compute.precision).sums()
    }
}

impl<M: LanguageModel> Text<M> {
    /// The scores of a batch.
    pub(crate) fn scores(&self, model: &M, batch: &Sequences, compute: Compute<'_>) -> Scores {
        let output = model.forward(self.input(batch, compute.device));
        batch.scores(model, output, compute.precision)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Given, Inputs, Surroundings};
    use crate::setup::sharded_batches;

    fn config(flags: &[(&str, &str)]) -> TrainConfig {
        let flag = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let inputs = Inputs {
            flags: flags.iter().map(flag).collect(),
            ..Inputs::default()
        };
        let given = Given::read(&inputs).expect("settings");
        let resolved = given.resolve(None, &Surroundings::of_process());
        resolved.expect("settings").config().clone()
    }

    #[test]
    fn every_token_is_a_target_exactly_once_in_an_epoch() {
        for (context, shards, batch) in [("7", "3", "5"), ("64", "1", "16"), ("100", "8", "8")] {
            let config = config(&[
                ("task", "lm"),
                ("context", context),
                ("shards", shards),
                ("global_batch", batch),
                ("nproc_per_node", "1"),
                ("epochs", "2"),
            ]);
            let text = Text::<Gpt>::open(&config, None).expect("the built-in text");
            let samples = text.len(Part::Train);
            // The stream with the number of each token in place of the token.
            let mut train = Tokens::new(1 << 20);
            let numbers: Vec<u32> = (0..text.train.len() as u32).collect();
            train.push(&numbers).expect("in memory");
            let numbered = Text { train, ..text };
            let mut epochs = vec![Vec::new(); 2];
            for plan in sharded_batches(&config, samples, None).expect("steps") {
                for shard in &plan.shards {
                    let batch = numbered
                        .sequences(Part::Train, shard.iter().copied())
                        .expect("in memory");
                    epochs[plan.epoch as usize].extend(batch.targets);
                }
            }
            for mut targets in epochs {
                targets.sort_unstable();
                let all = 1..numbered.train.len() as i32;
                assert!(targets.into_iter().eq(all), "context {context}");
            }
        }
    }

    #[test]
    fn each_place_of_a_batch_predicts_the_token_after_it_and_the_filling_predicts_none() {
        let config = config(&[("task", "lm"), ("context", "900")]);
        let text = Text::<Gpt>::open(&config, None).expect("the built-in text");
        let last = text.len(Part::HeldOut) - 1;
        let batch = text
            .sequences(Part::HeldOut, [last, 0].into_iter())
            .expect("in memory");
        assert_eq!(batch.inputs.len(), 1800);
        let short = (text.held_out.len() - 1) % 900;
        assert!(short > 0, "the last sequence is short");
        assert_eq!(batch.targets.len(), short + 900);
        // The input after a place is its target, up to the end of its sequence.
        for (place, target) in batch.places.iter().zip(&batch.targets) {
            let next = *place as usize + 1;
            if next != short && !next.is_multiple_of(900) {
                assert_eq!(batch.inputs[next], *target, "{place}");
            }
        }
        assert_eq!(batch.inputs[900], 256, "a text begins after a separator");
    }

    #[test]
    fn a_text_shorter_than_one_context_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("short.txt");
        std::fs::write(&path, "x".repeat(100)).expect("a file");
        let config = config(&[
            ("task", "lm"),
            ("context", "91"),
            ("data", &path.to_string_lossy()),
        ]);
        let error = Text::<Gpt>::open(&config, None)
            .err()
            .expect("refused")
            .to_string();
        let expect = "short.txt: 90 tokens to train on, fewer than the 91 of one context";
        assert!(error.ends_with(expect), "{error}");
    }
}
