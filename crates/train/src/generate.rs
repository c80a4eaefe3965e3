//! Text from a trained language model, one token at a time.

use std::path::{Path, PathBuf};

use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use paceline_nn::gpt::{Gpt, GptConfig};

use crate::error::TrainError;
use crate::language::{GPT_ENTRY, TOKENIZER_ENTRY};
use crate::tokenizer::Tokenizer;
use crate::trained::{Which, entry, misfit};

/// How the next token is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Most tokens to write; the model may end the text earlier.
    pub tokens: usize,
    /// Scores are divided by it: below 1 likely tokens become more likely; at 0 the likeliest is taken.
    pub temperature: f64,
    /// Only this many of the likeliest tokens are drawn from.
    pub top_k: Option<usize>,
    /// Seed of the draws.
    pub seed: u64,
}

/// A trained language model and its tokenizer.
pub struct Generator {
    pub(crate) gpt: Gpt,
    pub(crate) config: GptConfig,
    tokenizer: Tokenizer,
    pub(crate) device: Device,
    pub(crate) checkpoint: PathBuf,
}

impl Generator {
    /// Loads a checkpoint of the run in `run`, onto the CPU.
    ///
    /// *Errors*: no checkpoint; one of another task; a damaged one.
    pub fn of_run(run: &Path, which: Which) -> Result<Self, TrainError> {
        let saved = which.of_run(run)?;
        let Some(tokenizer) = saved.metadata().get(TOKENIZER_ENTRY) else {
            return Err(TrainError::usage(
                format!("{} holds no language model", run.display()),
                "name the run of a `paceline train --task lm`; for a classifier there is `paceline predict`",
            ));
        };
        let config: GptConfig = entry(&saved, GPT_ENTRY)?;
        let tokenizer = Tokenizer::from_text(tokenizer)
            .map_err(|why| misfit(&saved, format!("its tokenizer cannot be read: {why}")))?;
        let checkpoint = saved.path().to_owned();
        let device = Device::flex();
        let gpt = saved.restore(config.init(&device))?;
        Ok(Self {
            gpt,
            config,
            tokenizer,
            device,
            checkpoint,
        })
    }

    /// Continues `prompt` and hands each piece of new text to `write`, until it returns false.
    ///
    /// *Cost*: a forward pass over the tokens so far, at most one context, for each new token.
    ///
    /// *Errors*: a prompt that the tokenizer cannot read.
    pub fn generate(
        &self,
        prompt: &str,
        options: &GenerateOptions,
        mut write: impl FnMut(&str) -> bool,
    ) -> Result<(), TrainError> {
        let encoded = self.tokenizer.encode(prompt);
        let end = self.tokenizer.end_of_text();
        let mut tokens = vec![end];
        tokens.extend(encoded.map_err(|why| TrainError::Usage {
            message: format!("the tokenizer cannot encode the prompt: {why}"),
            hint: None,
        })?);
        self.device.seed(options.seed);
        let draws = Distribution::Uniform(0.0, 1.0);
        let draws = Tensor::<1>::random([options.tokens], draws, &self.device).into_data();
        let mut decode = self.tokenizer.decoder();
        for draw in draws.iter::<f64>() {
            let scores = self.next_scores(&tokens);
            let token = sample(&scores, options, draw);
            if token == end {
                break;
            }
            tokens.push(token);
            let text = decode(token);
            if !text.is_empty() && !write(&text) {
                break;
            }
        }
        Ok(())
    }

    /// The scores of the token that follows `tokens`.
    fn next_scores(&self, tokens: &[u32]) -> Vec<f32> {
        let window = &tokens[tokens.len().saturating_sub(self.config.context)..];
        let window: Vec<i32> = window.iter().map(|token| *token as i32).collect();
        let length = window.len();
        let window = TensorData::new(window, [1, length]);
        let window = Tensor::<2, Int>::from_data(window, &self.device);
        let x = self.gpt.hidden(window);
        let scores = self.gpt.head(x.slice([0..1, length - 1..length]));
        scores.into_data().iter::<f32>().collect()
    }
}

/// The token at the place `draw`, in `0.0..1.0`, of the distribution that the scores make.
fn sample(scores: &[f32], options: &GenerateOptions, draw: f64) -> u32 {
    let mut ranked: Vec<(u32, f64)> = (0..)
        .zip(scores.iter().map(|score| f64::from(*score)))
        .collect();
    // Ties keep the order of tokens, so that one seed gives one text.
    ranked.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    let kept = options.top_k.unwrap_or(ranked.len()).max(1);
    ranked.truncate(if options.temperature == 0.0 { 1 } else { kept });
    let (first, best) = ranked[0];
    let weight = |score: f64| ((score - best) / options.temperature).exp();
    if ranked.len() == 1 {
        return first;
    }
    let total: f64 = ranked.iter().map(|(_, score)| weight(*score)).sum();
    let mut left = draw * total;
    for (token, score) in &ranked {
        left -= weight(*score);
        if left < 0.0 {
            return *token;
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_drawn_as_often_as_its_score_says_and_only_from_the_likeliest() {
        let draws = |temperature, top_k| {
            let options = GenerateOptions {
                tokens: 1,
                temperature,
                top_k,
                seed: 0,
            };
            // Probabilities 1/6, 1/2, 1/3.
            let scores = [1.0_f32, 3.0, 2.0].map(f32::ln);
            let mut count = [0; 3];
            for draw in 0..600 {
                count[sample(&scores, &options, f64::from(draw) / 600.0) as usize] += 1;
            }
            count
        };
        let near = |got: [i32; 3], expect: [i32; 3]| {
            let far = got
                .iter()
                .zip(expect)
                .any(|(got, expect)| (got - expect).abs() > 1);
            assert!(!far, "{got:?} {expect:?}");
        };
        near(draws(1.0, None), [100, 300, 200]);
        near(draws(1.0, Some(2)), [0, 360, 240]);
        near(draws(1.0, Some(9)), [100, 300, 200]);
        assert_eq!(draws(0.0, None), [0, 600, 0]);
        // Squares of the probabilities: 1, 9, 4.
        near(draws(0.5, None), [43, 386, 171]);
    }
}
