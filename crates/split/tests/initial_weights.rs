//! The initial weights of a model in parts. In a program of its own, because all threads of a process share Burn's random numbers.

use burn::tensor::Device;
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::{Ddp, DdpOptions, weights};
use paceline_nn::gpt::{Gpt, GptConfig};
use paceline_split::tensor::{ParallelGpt, TensorParallel};

const CONFIG: GptConfig = GptConfig {
    vocabulary: 11,
    context: 8,
    layers: 2,
    heads: 4,
    width: 16,
    dropout: 0.1,
};

#[test]
fn a_model_in_parts_starts_with_the_weights_of_the_whole_one() {
    let device = Device::flex().autodiff();
    let group = || {
        let groups = ProcessGroup::local(1, &GroupOptions::default());
        groups.expect("a group").remove(0)
    };
    let whole = || -> Gpt {
        device.seed(3);
        CONFIG.init(&device)
    };
    let (_, expected) = Ddp::new(group(), whole(), DdpOptions::default()).expect("a replica");
    let tp = TensorParallel::new(group(), 2).expect("parts");
    let cut = ParallelGpt::from_gpt(whole(), &tp).expect("a model");
    assert_eq!(weights::export(&cut), weights::export(&expected));
}
