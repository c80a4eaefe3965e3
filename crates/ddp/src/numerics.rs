//! The numeric fingerprint: whether the kernels of all ranks compute the same bits.
//!
//! On a CPU, Burn's kernels choose the order of additions by the processor's instructions and caches, and functions such as `exp` are the
//! system's. Ranks on other machines may therefore get other bits from the same numbers. Each rank runs the same small operations,
//! forward and backward, and the ranks compare digests of the results. Operations that are made of these (`silu`, an LSTM) are not
//! among them.

use std::sync::OnceLock;

use burn::module::{Param, ParamId};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNormConfig, Initializer, LayerNormConfig};
use burn::tensor::ops::{AttentionModuleOptions, ConvOptions};
use burn::tensor::{DType, Device, Tensor, TensorData, activation, module};
use paceline_nn::{
    Kernels, attention, batch_norm, conv2d, cross_entropy, gelu, layer_norm, mix, product,
};
use serde::{Deserialize, Serialize};

use crate::buffer;
use crate::error::DdpError;
use crate::fingerprint::hash;

/// What happens if the machines of a job's ranks compute other bits in the same operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SameBits {
    /// Rank 0 prints a warning that names the operations.
    #[default]
    Warn,
    /// [`Ddp::new`](crate::Ddp::new) fails.
    Strict,
}

/// The results of an operation.
type Results = Vec<Tensor<1>>;
type Operation = fn(&Device) -> Results;

/// An image, or a filter of four outputs for it.
const IMAGE: [usize; 4] = [2, 4, 9, 9];
const FILTER: [usize; 4] = [4, 4, 3, 3];

/// Burn's names, and Paceline's own layers. A digest has the place of its operation here.
const OPERATIONS: [(&str, Operation); 31] = [
    ("matmul", |on| {
        both_ways(on, [[24, 72], [72, 40]], |[a, b]| a.matmul(b))
    }),
    // The size of the caches decides how more than 512 products are cut.
    ("matmul over 2500 products", |on| {
        both_ways(on, [[8, 2500], [2500, 8]], |[a, b]| a.matmul(b))
    }),
    ("sum", |on| both_ways(on, [[31, 67]], |[x]| x.sum())),
    ("sum_dim of the first axis", |on| {
        both_ways(on, [[67, 31]], |[x]| x.sum_dim(0))
    }),
    ("sum_dim of the last axis", |on| {
        both_ways(on, [[31, 67]], |[x]| x.sum_dim(1))
    }),
    ("mean_dim of the first axis", |on| {
        both_ways(on, [[67, 31]], |[x]| x.mean_dim(0))
    }),
    ("mean_dim of the last axis", |on| {
        both_ways(on, [[31, 67]], |[x]| x.mean_dim(1))
    }),
    ("layer_norm", |on| {
        both_ways(on, [[31, 67], [1, 67], [1, 67]], |[x, gamma, beta]| {
            let beta = Some(beta.reshape([67]));
            module::layer_norm(x, gamma.reshape([67]), beta, 1e-5)
        })
    }),
    ("batch_norm", |on| {
        both_ways(on, [IMAGE], |[x]| {
            BatchNormConfig::new(IMAGE[1]).init(on).forward(x)
        })
    }),
    ("softmax", |on| {
        both_ways(on, [[31, 67]], |[x]| activation::softmax(x, 1))
    }),
    ("log_softmax", |on| {
        both_ways(on, [[31, 67]], |[x]| activation::log_softmax(x, 1))
    }),
    ("exp", |on| of_each(on, Tensor::exp)),
    ("log", |on| of_each(on, |x| positive(x).log())),
    ("sqrt", |on| of_each(on, |x| positive(x).sqrt())),
    ("recip", |on| of_each(on, |x| positive(x).recip())),
    ("powf", |on| of_each(on, |x| positive(x).powf_scalar(1.7))),
    ("sin", |on| of_each(on, Tensor::sin)),
    ("cos", |on| of_each(on, Tensor::cos)),
    ("tanh", |on| of_each(on, Tensor::tanh)),
    ("sigmoid", |on| of_each(on, activation::sigmoid)),
    ("erf", |on| of_each(on, Tensor::erf)),
    ("gelu", |on| of_each(on, activation::gelu)),
    ("conv2d", |on| {
        both_ways(on, [IMAGE, FILTER], |[x, filter]| {
            module::conv2d(x, filter, None, ConvOptions::new([1, 1], [1, 1], [1, 1], 1))
        })
    }),
    ("attention", |on| {
        both_ways(on, [[2, 2, 17, 16]; 3], |[query, key, value]| {
            let options = AttentionModuleOptions {
                is_causal: true,
                ..AttentionModuleOptions::default()
            };
            module::attention(query, key, value, None, None, options)
        })
    }),
    ("paceline::nn::conv2d", |on| {
        both_ways(on, [IMAGE, FILTER], |[x, filter]| {
            // Another initializer would draw random numbers of the program's.
            let zeros = Conv2dConfig::new([4, 4], [3, 3]).with_initializer(Initializer::Zeros);
            let layer = Conv2d {
                weight: Param::initialized(ParamId::new(), filter),
                ..zeros.init(on)
            };
            conv2d(&layer, x)
        })
    }),
    ("paceline::nn::batch_norm", |on| {
        both_ways(on, [IMAGE], |[x]| {
            batch_norm(&BatchNormConfig::new(IMAGE[1]).init(on), x)
        })
    }),
    ("paceline::nn::product", |on| {
        both_ways(on, [[31, 300], [300, 20]], |[x, weight]| {
            product(x, weight, None)
        })
    }),
    ("paceline::nn::layer_norm", |on| {
        both_ways(on, [[31, 67]], |[x]| {
            layer_norm(&LayerNormConfig::new(67).init(on), x)
        })
    }),
    ("paceline::nn::gelu", |on| of_each(on, gelu)),
    ("paceline::nn::attention", |on| {
        both_ways(on, [[2, 17, 32]; 3], |inputs| attention(inputs, 2, true))
    }),
    ("paceline::nn::cross_entropy", |on| {
        both_ways(on, [[31, 67]], |[x]| {
            cross_entropy(x, Tensor::arange(0..31, on))
        })
    }),
];

/// The names of the operations, in the order of their digests.
pub(crate) fn names() -> String {
    OPERATIONS.map(|(name, _)| name).join(", ")
}

/// Digests of the operations on `device`, in f32.
///
/// *Cost*: a few milliseconds on a CPU, once in a process. On a GPU seconds, because kernels are compiled.
///
/// *Errors*: the device cannot be read; `PACELINE_ISA` names no instruction set of this processor.
pub(crate) fn fingerprint(device: &Device) -> Result<Vec<i64>, DdpError> {
    static OF_CPU: OnceLock<Result<Vec<i64>, DdpError>> = OnceLock::new();
    match buffer::is_host(device) {
        true => OF_CPU.get_or_init(|| compute(device)).clone(),
        false => compute(device),
    }
}

fn compute(device: &Device) -> Result<Vec<i64>, DdpError> {
    Kernels::of_process().map_err(|error| DdpError::Device(format!("PACELINE_ISA: {error}")))?;
    let device = device.clone().inner().autodiff();
    let is_host = buffer::is_host(&device);
    let digests = OPERATIONS.map(|(name, operation)| {
        // A GPU adds the parts of a whole tensor in the order in which they end.
        if name == "sum" && !is_host {
            return Ok(0);
        }
        hash(operation(&device), name)
    });
    digests.into_iter().collect()
}

/// The places of the operations in which two fingerprints differ.
pub(crate) fn differences(one: &[i64], other: &[i64]) -> Vec<usize> {
    let places = 0..OPERATIONS.len();
    places.filter(|at| one.get(*at) != other.get(*at)).collect()
}

/// An error if one of the ranks has other bits than rank `than`; `found` has the places of the operations, by rank.
pub(crate) fn judge(than: usize, found: &[Vec<usize>]) -> Result<(), DdpError> {
    let mut differing: Vec<(Vec<usize>, Vec<&'static str>)> = Vec::new();
    for (rank, places) in found.iter().enumerate().filter(|(_, at)| !at.is_empty()) {
        let names = places.iter().filter_map(|at| OPERATIONS.get(*at));
        let names: Vec<&str> = names.map(|(name, _)| *name).collect();
        match differing.iter_mut().find(|(_, of)| *of == names) {
            Some((ranks, _)) => ranks.push(rank),
            None => differing.push((vec![rank], names)),
        }
    }
    match differing.is_empty() {
        true => Ok(()),
        false => Err(DdpError::OtherBits { than, differing }),
    }
}

/// The output of `operation` and its gradients, for inputs of these shapes.
fn both_ways<const D: usize, const N: usize, const E: usize>(
    device: &Device,
    shapes: [[usize; D]; N],
    operation: impl FnOnce([Tensor<D>; N]) -> Tensor<E>,
) -> Results {
    let inputs = shapes.map(|shape| numbers(shape, device).require_grad());
    let output = operation(inputs.clone());
    let given = numbers(output.dims(), device);
    let gradients = (output.clone() * given).sum().backward();
    let gradients = inputs.iter().filter_map(|input| input.grad(&gradients));
    let mut all: Results = gradients.map(|gradient| gradient.reshape([-1])).collect();
    all.push(output.inner().reshape([-1]));
    all
}

fn of_each(device: &Device, operation: impl FnOnce(Tensor<1>) -> Tensor<1>) -> Results {
    both_ways(device, [[2048]], |[x]| operation(x))
}

fn positive(x: Tensor<1>) -> Tensor<1> {
    x.abs() + 0.125
}

/// Numbers between -4 and 4 that are the same everywhere.
fn numbers<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let len: usize = shape.iter().product();
    let any = |at| (mix(at as u64, 0, 0) >> 40) as f32 / (1 << 21) as f32 - 4.0;
    let values: Vec<f32> = (0..len).map(any).collect();
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_runs_on_one_machine_give_one_fingerprint() {
        let device = Device::flex();
        let found = compute(&device).expect("it can be read");
        assert_eq!(compute(&device).expect("it can be read"), found);
        assert_eq!(found.len(), OPERATIONS.len());
    }

    #[test]
    fn ranks_and_operations_that_differ_are_named() {
        let check = |found: &[&[usize]], expect: &str| {
            let found: Vec<Vec<usize>> = found.iter().map(|places| places.to_vec()).collect();
            let judged = judge(0, &found);
            let text = judged.map_or_else(|error| error.to_string(), |()| "the same".into());
            assert_eq!(text, expect);
        };
        check(&[&[], &[]], "the same");
        check(
            &[&[], &[0, 2], &[], &[0, 2]],
            "ranks [1, 3] compute other bits than rank 0 in matmul, sum",
        );
        check(
            &[&[], &[11], &[0, 11]],
            "ranks [1] compute other bits than rank 0 in exp; ranks [2] in matmul, exp",
        );
    }

    #[test]
    fn a_fingerprint_differs_where_its_digests_do_and_everywhere_from_none() {
        let one: Vec<i64> = (0..OPERATIONS.len() as i64).collect();
        let mut other = one.clone();
        other[3] = 99;
        assert!(differences(&one, &one).is_empty());
        assert_eq!(differences(&one, &other), [3]);
        assert_eq!(differences(&one, &[]).len(), OPERATIONS.len());
        assert!(differences(&[], &[]).is_empty());
    }
}
