//! The perceptron 784-1024-1024-10: few large parameters.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use paceline::nn::{linear, relu};

#[derive(Module, Debug)]
pub(crate) struct Mlp {
    first: Linear,
    second: Linear,
    third: Linear,
}

impl Mlp {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(784, 1024).init(device),
            second: LinearConfig::new(1024, 1024).init(device),
            third: LinearConfig::new(1024, 10).init(device),
        }
    }

    /// *Shape*: `[batch, 784]` to `[batch, 10]`.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = relu(linear(&self.first, x));
        linear(&self.third, relu(linear(&self.second, x)))
    }
}
