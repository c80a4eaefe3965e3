//! The parallel GPT against the ordinary one, and against itself with its parts elsewhere.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{DType, Device, Int, Tensor, Tolerance};
use paceline_collective::ProcessGroup;
use paceline_nn::gpt::GptConfig;
use paceline_nn::{Pass, Recompute};
use paceline_split::tensor::{ParallelGpt, PartsError, TensorParallel, TensorPlacement};

use crate::support::{Bits, CONFIG, Whole, all_alike, classes, gpt, gradients, on_ranks};

#[derive(Clone, Copy, Debug)]
struct Case {
    parts: usize,
    is_sequence: bool,
    recompute: Recompute,
}

impl Case {
    fn tp(self, group: ProcessGroup) -> TensorParallel {
        let tp = TensorParallel::new(group, self.parts).expect("parts");
        match self.is_sequence {
            true => tp.with_sequence_parallel(),
            false => tp,
        }
    }
}

fn tokens(device: &Device) -> Tensor<2, Int> {
    classes(3 * CONFIG.context, CONFIG.vocabulary, device).reshape([3, CONFIG.context])
}

fn targets(device: &Device) -> Tensor<1, Int> {
    classes(3 * CONFIG.context + 1, CONFIG.vocabulary, device).slice(1..)
}

/// The loss and the gradients of one rank.
fn pass(case: Case, group: ProcessGroup) -> Bits {
    let device = Device::flex().autodiff();
    let tp = case.tp(group.clone());
    let model = ParallelGpt::from_gpt(gpt(&CONFIG, &device), &tp).expect("a model");
    let placement = TensorPlacement::new(&group, &tp, &model).expect("slices");
    let pass = Pass::new(case.recompute).with_seed(1);
    let bits = pass.enter(|| {
        let scores = model.forward(tokens(&device)).into_iter();
        let scores = scores.map(|scores| scores.flatten(0, 1)).collect();
        let losses = tp.cross_entropy(scores, CONFIG.vocabulary, targets(&device));
        let loss = losses.mean();
        let mut bits = gradients(&model, &loss.backward(), &*placement);
        bits.insert("loss".into(), loss.into_data());
        bits
    });
    pass.finish().expect("no failure");
    bits
}

#[test]
fn loss_and_gradients_have_the_same_bits_wherever_the_parts_are() {
    for is_sequence in [false, true] {
        for (parts, worlds) in [(2, &[1, 2][..]), (4, &[1, 2, 3, 4])] {
            let recompute = Recompute::None;
            let case = Case {
                parts,
                is_sequence,
                recompute,
            };
            let expected = all_alike(on_ranks(1, |group| pass(case, group)));
            for world in worlds {
                for recompute in [Recompute::None, Recompute::Blocks] {
                    let case = Case { recompute, ..case };
                    let got = all_alike(on_ranks(*world, |group| pass(case, group)));
                    for (name, data) in &expected {
                        assert_eq!(got.get(name), Some(data), "{case:?} on {world}: {name}");
                    }
                    assert_eq!(got.len(), expected.len());
                }
            }
        }
    }
}

#[test]
fn the_loss_and_gradients_are_close_to_the_ordinary_models() {
    let device = Device::flex().autodiff();
    let whole = gpt(&CONFIG, &device);
    let scores: Tensor<2> = whole.forward(tokens(&device)).flatten(0, 1);
    let loss = CrossEntropyLossConfig::new().init(&device);
    let loss = loss.forward(scores, targets(&device));
    let expected = gradients(&whole, &loss.backward(), &Whole);
    for is_sequence in [false, true] {
        let recompute = Recompute::None;
        let case = Case {
            parts: 2,
            is_sequence,
            recompute,
        };
        let got = all_alike(on_ranks(2, |group| pass(case, group)));
        let tolerance = Tolerance::<f32>::rel_abs(1e-4, 1e-6);
        got["loss"].assert_approx_eq(&loss.clone().into_data(), tolerance);
        for (name, data) in &expected {
            got[name].assert_approx_eq(data, tolerance);
        }
    }
}

#[test]
fn tensors_of_f64_are_summed_in_f64_wherever_the_parts_are() {
    let sum = |world: usize| {
        let mut sums = on_ranks(world, |group| {
            let tp = TensorParallel::new(group, 4).expect("parts");
            let parts = tp.local().map(|part| {
                // Sums that f32 cannot hold.
                let values = [1.0 + 1e-12 * part as f64, 1e9 + part as f64];
                Tensor::<1>::from_data(values, (&Device::flex(), DType::F64))
            });
            let sum = tp.reduce(parts.collect()).into_data();
            sum.try_to_vec::<f64>().expect("f64")
        });
        sums.dedup();
        assert_eq!(sums.len(), 1, "all ranks have the same");
        sums.remove(0)
    };
    let exact = [1.0, 1.0 + 1e-12, 1.0 + 2e-12, 1.0 + 3e-12];
    let expected = vec![(exact[0] + exact[1]) + (exact[2] + exact[3]), 4e9 + 6.0];
    for world in [1, 2, 3, 4] {
        assert_eq!(sum(world), expected, "{world} ranks");
    }
}

#[test]
fn parts_that_do_not_fit_are_refused_with_the_numbers() {
    let device = Device::flex().autodiff();
    let refused = |parts| {
        on_ranks(1, |group| {
            let tp = TensorParallel::new(group, parts).expect("parts");
            ParallelGpt::from_gpt(gpt(&CONFIG, &device), &tp)
                .expect_err("refused")
                .to_string()
        })
        .remove(0)
    };
    assert_eq!(refused(3), "3 parts do not divide 4 attention heads");
    let cut = on_ranks(1, |group| {
        let tp = TensorParallel::new(group, 4).expect("parts");
        let config = GptConfig {
            context: 6,
            ..CONFIG
        };
        ParallelGpt::from_gpt(gpt(&config, &device), &tp.with_sequence_parallel()).err()
    });
    let error = cut[0].as_ref().expect("refused").to_string();
    assert_eq!(error, "4 parts do not divide 6 places of a sequence");
    assert_eq!(refused(12), "11 tokens are too few for 12 parts");
    let few = on_ranks(2, |group| TensorParallel::new(group, 1).err());
    assert_eq!(few[1], Some(PartsError::Ranks { parts: 1, ranks: 2 }));
}
