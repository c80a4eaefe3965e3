//! A trained model of samples, applied to those without labels.

use std::path::{Path, PathBuf};

use burn::tensor::{Device, Tensor, TensorData};
use paceline_checkpoint::SavedModel;
use rayon::prelude::*;

use crate::classify::{FEATURES_ENTRY, MODEL_ENTRY, Network, evaluation_images, saved_schema};
use crate::config::{ModelSize, TrainConfig};
use crate::data::table::{TableOptions, Unlabelled};
use crate::data::{DataError, Features, Schema, Target, idx, images};
use crate::error::TrainError;
use crate::model::Net;
use crate::task::EVALUATION_BATCH;
use crate::trained::{Which, entry, misfit};

/// How a task loads the trained model of a run.
#[doc(hidden)]
pub type LoadPredictor = fn(&TrainConfig, Which) -> Result<Predictor, TrainError>;

/// A trained model and what it knows of its data, on the CPU.
pub struct Predictor {
    net: Box<dyn Scores>,
    pub(crate) schema: Schema,
    pub(crate) device: Device,
    pub(crate) checkpoint: PathBuf,
}

/// A [`Network`] of any type.
trait Scores {
    fn scores(&self, features: Features, input: Tensor<2>) -> Tensor<2>;
}

impl<N: Network> Scores for N {
    fn scores(&self, features: Features, input: Tensor<2>) -> Tensor<2> {
        self.forward(features, input)
    }
}

/// What a model says of a sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Of which class it is, or its number.
    pub answer: Answer,
    /// The sample's file, for a model of [images in files](Predictor::reads_files).
    pub file: Option<PathBuf>,
}

/// What is predicted.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// A class.
    Class {
        /// The likeliest one, an index into [`Predictor::classes`].
        class: usize,
        /// The probability of each class.
        probabilities: Vec<f64>,
    },
    /// A number, in the unit of the labels.
    Number(f64),
}

impl Predictor {
    /// Loads a checkpoint of the run in `config.run_dir`, which is one of a built-in network.
    ///
    /// *Errors*: no checkpoint; one of a language model; a damaged one.
    pub fn of_run(config: &TrainConfig, which: Which) -> Result<Self, TrainError> {
        Self::restored(config, which, |saved, schema, device| {
            let size: ModelSize = entry(saved, MODEL_ENTRY)?;
            size.fits(schema.features)
                .map_err(|why| misfit(saved, why))?;
            let outputs = schema.target.outputs();
            Ok(Net::new(schema.features, outputs, size, device))
        })
    }

    /// Loads a checkpoint of the run in `config.run_dir`, which is one of a program with this network.
    ///
    /// *Errors*: no checkpoint; a damaged one, or one that does not fit the network.
    pub fn of_network<N: Network>(config: &TrainConfig, which: Which) -> Result<Self, TrainError> {
        Self::restored(config, which, |_, schema, device| {
            N::init(config, schema.features, schema.target.outputs(), device)
        })
    }

    fn restored<N: Network>(
        config: &TrainConfig,
        which: Which,
        init: impl FnOnce(&SavedModel, &Schema, &Device) -> Result<N, TrainError>,
    ) -> Result<Self, TrainError> {
        let run = &config.run_dir;
        let saved = which.of_run(run)?;
        if !saved.metadata().contains_key(FEATURES_ENTRY) {
            return Err(TrainError::usage(
                format!("{} holds no model of samples", run.display()),
                "for a language model there are `paceline generate` and `paceline eval`",
            ));
        }
        let schema = saved_schema(&saved)?;
        let device = Device::flex();
        let net = init(&saved, &schema, &device)?;
        let checkpoint = saved.path().to_owned();
        Ok(Self {
            net: Box::new(saved.restore(net)?),
            schema,
            device,
            checkpoint,
        })
    }

    /// The scores of the classes, before a softmax, or the number, standardised.
    pub(crate) fn scores(&self, input: Tensor<2>) -> Tensor<2> {
        self.net.scores(self.schema.features, input)
    }

    /// The names of the classes; none if numbers are predicted.
    pub fn classes(&self) -> &[String] {
        self.schema.target.classes()
    }

    /// Whether each sample is a file: the model was trained on an image folder.
    pub fn reads_files(&self) -> bool {
        self.schema.is_of_files()
    }

    /// Hands a prediction for each sample to `write`, in order, until it returns false, and returns warnings about the samples. A model of tables
    /// reads one as CSV, JSON lines or Parquet, which may have other columns too, as `config`, the settings of its run, says; one of an image folder a PNG
    /// or JPEG file, or all in a folder and those below it; one of IDX files such a file of images.
    ///
    /// *Cost*: one batch in memory, but all images of an IDX file.
    ///
    /// *Errors*: a file that cannot be read, or does not fit the model; lines before a bad one have been handed over.
    pub fn predict(
        &self,
        config: &TrainConfig,
        input: &Path,
        mut write: impl FnMut(&Prediction) -> bool,
    ) -> Result<Vec<String>, TrainError> {
        let width = self.schema.features.count();
        match self.schema.features {
            Features::Image { .. } if self.reads_files() => {
                let (files, schema) = (images::files_at(input)?, &self.schema);
                for files in files.chunks(evaluation_images(&self.schema.features)) {
                    let mut values = vec![0.0; files.len() * width];
                    let images = files.par_iter().zip(values.par_chunks_mut(width));
                    let read = |(file, values): (&PathBuf, &mut [f32])| {
                        images::read_as(file, schema, values)
                    };
                    images.map(read).collect::<Result<(), _>>()?;
                    let with_file = |(mut prediction, file): (Prediction, &PathBuf)| {
                        prediction.file = Some(file.clone());
                        write(&prediction)
                    };
                    if !self.apply(&values).into_iter().zip(files).all(with_file) {
                        break;
                    }
                }
            }
            Features::Image { .. } => {
                let mut apply = |values: &[f32]| self.apply(values).iter().all(&mut write);
                let images = idx::images_as(input, &self.schema)?;
                images.chunks(EVALUATION_BATCH * width).all(&mut apply);
            }
            Features::Flat { .. } => {
                let options = TableOptions::new(config, input);
                let mut rows = Unlabelled::open(&options, &self.schema)?;
                let mut apply = |values: &[f32]| self.apply(values).iter().all(&mut write);
                let mut values = Vec::with_capacity(EVALUATION_BATCH * width);
                loop {
                    values.clear();
                    // Rows before a bad one are predicted too.
                    let read = fill(&mut rows, &mut values);
                    let goes_on = values.is_empty() || apply(&values);
                    if !read? || !goes_on {
                        return Ok(rows.warnings());
                    }
                }
            }
        }
        Ok(Vec::new())
    }

    /// The predictions for whole samples.
    fn apply(&self, values: &[f32]) -> Vec<Prediction> {
        let width = self.schema.features.count();
        let values = TensorData::new(values.to_vec(), [values.len() / width, width]);
        let scores = self.scores(Tensor::from_data(values, &self.device));
        let scores = scores.into_data();
        let scores: Vec<f64> = scores.iter::<f64>().collect();
        let rows = scores.chunks(self.schema.target.outputs());
        let answer = |row: &[f64]| match self.schema.target {
            Target::Classes(_) => Answer::of_scores(row),
            Target::Number { mean, deviation } => Answer::Number(row[0] * deviation + mean),
        };
        rows.map(|row| Prediction {
            answer: answer(row),
            file: None,
        })
        .collect()
    }
}

/// Reads rows up to a whole batch; false at the end of the file.
fn fill(rows: &mut Unlabelled, values: &mut Vec<f32>) -> Result<bool, DataError> {
    for _ in 0..EVALUATION_BATCH {
        if !rows.next(values)? {
            return Ok(false);
        }
    }
    Ok(true)
}

impl Answer {
    /// The softmax of the scores.
    fn of_scores(scores: &[f64]) -> Self {
        let first_best = |best: usize, class: usize| {
            if scores[class] > scores[best] {
                class
            } else {
                best
            }
        };
        let class = (0..scores.len()).fold(0, first_best);
        let weights = scores.iter().map(|score| libm::exp(score - scores[class]));
        let weights: Vec<f64> = weights.collect();
        let total: f64 = weights.iter().sum();
        Self::Class {
            class,
            probabilities: weights.iter().map(|weight| weight / total).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_the_softmax_and_the_first_of_equals_is_chosen() {
        let of = |scores: &[f64]| match Answer::of_scores(scores) {
            Answer::Class {
                class,
                probabilities,
            } => (class, probabilities),
            Answer::Number(_) => panic!("scores are of classes"),
        };
        let (class, probabilities) = of(&[1.0_f64, 3.0, 3.0, 1.0].map(f64::ln));
        assert_eq!(class, 1);
        let expected = [0.125, 0.375, 0.375, 0.125];
        for (got, expected) in probabilities.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-12, "{probabilities:?}");
        }
        assert_eq!(of(&[1000.0, 0.0]).1, [1.0, 0.0]);
    }
}
