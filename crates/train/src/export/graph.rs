//! The built-in models as graphs of ONNX. Which layers there are follows from the names and shapes of the tensors.

use std::collections::HashMap;

use burn::tensor::TensorData;
use paceline_nn::gpt::GptConfig;
use paceline_nn::vit::VitConfig;

use super::onnx::{Attribute, Dim, Graph, Type, Value};
use crate::data::{Features, Target};
use crate::model::POOLED_SIDE;

/// Added to variances by all norms, but for those of Vision Transformers.
pub(super) const EPSILON: f32 = 1e-5;

/// The same in Vision Transformers.
const VIT_EPSILON: f32 = 1e-6;

/// A score that softmax turns into 0.
const MASKED: f32 = f32::MIN;

/// Tensors by PyTorch's names.
type Tensors = [(String, TensorData)];

/// Class scores of samples, or the predicted number in its own unit.
pub(super) fn of_samples(tensors: &Tensors, features: Features, target: &Target) -> Graph {
    let mut net = Layers::new(tensors);
    let batch = Dim::Named("batch");
    let shape = match features {
        Features::Image {
            height,
            width,
            channels,
        } => vec![
            batch.clone(),
            Dim::Known(channels),
            Dim::Known(height),
            Dim::Known(width),
        ],
        Features::Flat { count } => vec![batch.clone(), Dim::Known(count)],
    };
    let input = net.graph.input("input", Type::Float, &shape);
    let (output, bias) = match features {
        Features::Image { .. } if net.has("fc.weight") => (net.residual(&input), "fc.bias"),
        Features::Image { .. } if net.has("cls_token") => (net.vit(&input), "head.bias"),
        Features::Image { height, width, .. } => {
            (net.small(&input, [height, width]), "output.bias")
        }
        Features::Flat { .. } => (net.perceptron(&input), "output.bias"),
    };
    let shape = [batch, Dim::Known(net.len(bias))];
    match *target {
        Target::Classes(_) => net.graph.output(&output, "logits", &shape),
        Target::Number { mean, deviation } => {
            let [mean, deviation] =
                [mean, deviation].map(|number| net.graph.floats(&[], &[number as f32]));
            let output = net.graph.node("Mul", &[&output, &deviation], &[]);
            let output = net.add(&output, &mean);
            net.graph.output(&output, "prediction", &shape);
        }
    }
    net.graph
}

/// Scores of the token that follows each one.
pub(super) fn gpt(tensors: &Tensors, config: &GptConfig) -> Graph {
    let mut net = Layers::new(tensors);
    let tokens = [Dim::Named("batch"), Dim::Named("sequence")];
    let input = net.graph.input("input_ids", Type::Int64, &tokens);
    let scores = net.gpt(&input, config);
    let [batch, sequence] = tokens;
    net.graph.output(
        &scores,
        "logits",
        &[batch, sequence, Dim::Known(config.vocabulary)],
    );
    net.graph
}

struct Layers<'a> {
    graph: Graph,
    tensors: HashMap<&'a str, &'a TensorData>,
}

impl<'a> Layers<'a> {
    fn new(tensors: &'a Tensors) -> Self {
        let tensors = tensors.iter().map(|(name, data)| (&**name, data));
        Self {
            graph: Graph::default(),
            tensors: tensors.collect(),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The first length of a tensor.
    fn len(&self, name: &str) -> usize {
        self.tensors[name].shape()[0]
    }

    fn weight(&mut self, name: &str) -> Value {
        self.graph.weight(name, self.tensors[name])
    }

    fn weight_and_bias(&mut self, name: &str) -> [Value; 2] {
        ["weight", "bias"].map(|tensor| self.weight(&format!("{name}.{tensor}")))
    }

    fn relu(&mut self, x: &Value) -> Value {
        self.graph.node("Relu", &[x], &[])
    }

    fn add(&mut self, x: &Value, y: &Value) -> Value {
        self.graph.node("Add", &[x, y], &[])
    }

    fn matmul(&mut self, x: &Value, y: &Value) -> Value {
        self.graph.node("MatMul", &[x, y], &[])
    }

    /// A convolution without bias that keeps the size, divided by the stride.
    fn conv(&mut self, x: &Value, name: &str, stride: i64) -> Value {
        let weight = format!("{name}.weight");
        let side = self.tensors[&*weight].shape()[3] as i64;
        let weight = self.weight(&weight);
        let attributes = [
            ("pads", Attribute::Ints(&[side / 2; 4])),
            ("strides", Attribute::Ints(&[stride; 2])),
        ];
        self.graph.node("Conv", &[x, &weight], &attributes)
    }

    fn batch_norm(&mut self, x: &Value, name: &str) -> Value {
        let [weight, bias, mean, var] = ["weight", "bias", "running_mean", "running_var"]
            .map(|tensor| self.weight(&format!("{name}.{tensor}")));
        let epsilon = [("epsilon", Attribute::Float(EPSILON))];
        self.graph.node(
            "BatchNormalization",
            &[x, &weight, &bias, &mean, &var],
            &epsilon,
        )
    }

    fn layer_norm(&mut self, x: &Value, name: &str, epsilon: f32) -> Value {
        let [weight, bias] = self.weight_and_bias(name);
        let epsilon = [("epsilon", Attribute::Float(epsilon))];
        self.graph
            .node("LayerNormalization", &[x, &weight, &bias], &epsilon)
    }

    /// A layer with the weight `[out, in]`, of a matrix.
    fn linear(&mut self, x: &Value, name: &str) -> Value {
        let [weight, bias] = self.weight_and_bias(name);
        self.graph.node(
            "Gemm",
            &[x, &weight, &bias],
            &[("transB", Attribute::Int(1))],
        )
    }

    /// A layer of GPT-2, with the weight `[in, out]`.
    fn projection(&mut self, x: &Value, name: &str) -> Value {
        let [weight, bias] = self.weight_and_bias(name);
        let x = self.matmul(x, &weight);
        self.add(&x, &bias)
    }

    /// A layer with the weight `[out, in]`, of a batch of matrices.
    fn linear_of_rows(&mut self, x: &Value, name: &str) -> Value {
        let [weight, bias] = self.weight_and_bias(name);
        let weight = self.graph.node("Transpose", &[&weight], &[]);
        let x = self.matmul(x, &weight);
        self.add(&x, &bias)
    }

    fn gelu(&mut self, x: &Value) -> Value {
        self.graph
            .node("Gelu", &[x], &[("approximate", Attribute::Text("none"))])
    }

    /// The two last layers of the small networks, without dropout.
    fn hidden(&mut self, x: &Value, hidden: &str) -> Value {
        let x = self.linear(x, hidden);
        let x = self.relu(&x);
        self.linear(&x, "output")
    }

    fn perceptron(&mut self, input: &Value) -> Value {
        let x = self.linear(input, "first");
        let x = self.batch_norm(&x, "norm");
        let x = self.relu(&x);
        self.hidden(&x, "second")
    }

    fn small(&mut self, input: &Value, [height, width]: [usize; 2]) -> Value {
        let mut x = input.clone();
        for layer in ["1", "2"] {
            x = self.conv(&x, &format!("conv{layer}"), 1);
            x = self.batch_norm(&x, &format!("norm{layer}"));
            x = self.relu(&x);
        }
        // ONNX has no adaptive pooling, but means of rows and columns are products.
        let rows = self.graph.floats(&[POOLED_SIDE, height], &means(height));
        x = self.matmul(&rows, &x);
        let columns = self.graph.floats(&[POOLED_SIDE, width], &means(width));
        let columns = self.graph.node("Transpose", &[&columns], &[]);
        x = self.matmul(&x, &columns);
        x = self.graph.node("Flatten", &[&x], &[]);
        self.hidden(&x, "hidden")
    }

    fn residual(&mut self, input: &Value) -> Value {
        let is_large = self.tensors["conv1.weight"].shape()[3] == 7;
        let x = self.conv(input, "conv1", if is_large { 2 } else { 1 });
        let x = self.batch_norm(&x, "bn1");
        let mut x = self.relu(&x);
        if is_large {
            let attributes = [
                ("kernel_shape", Attribute::Ints(&[3; 2])),
                ("pads", Attribute::Ints(&[1; 4])),
                ("strides", Attribute::Ints(&[2; 2])),
            ];
            x = self.graph.node("MaxPool", &[&x], &attributes);
        }
        for stage in 1.. {
            for index in 0.. {
                let block = format!("layer{stage}.{index}");
                if !self.has(&format!("{block}.conv1.weight")) {
                    break;
                }
                let stride = if stage > 1 && index == 0 { 2 } else { 1 };
                x = self.block(&x, &block, stride);
            }
            if !self.has(&format!("layer{stage}.0.conv1.weight")) {
                break;
            }
        }
        let x = self.graph.node("GlobalAveragePool", &[&x], &[]);
        let x = self.graph.node("Flatten", &[&x], &[]);
        self.linear(&x, "fc")
    }

    /// A residual block, whose last convolution but one has the stride.
    fn block(&mut self, input: &Value, block: &str, stride: i64) -> Value {
        let layers = if self.has(&format!("{block}.conv3.weight")) {
            3
        } else {
            2
        };
        let mut x = input.clone();
        for layer in 1..=layers {
            let stride = if layer == layers - 1 { stride } else { 1 };
            x = self.conv(&x, &format!("{block}.conv{layer}"), stride);
            x = self.batch_norm(&x, &format!("{block}.bn{layer}"));
            if layer < layers {
                x = self.relu(&x);
            }
        }
        let mut shortcut = input.clone();
        let downsample = format!("{block}.downsample");
        if self.has(&format!("{downsample}.0.weight")) {
            shortcut = self.conv(input, &format!("{downsample}.0"), stride);
        }
        if self.has(&format!("{downsample}.1.weight")) {
            shortcut = self.batch_norm(&shortcut, &format!("{downsample}.1"));
        }
        x = self.add(&x, &shortcut);
        self.relu(&x)
    }

    fn vit(&mut self, input: &Value) -> Value {
        let VitConfig {
            layers,
            heads,
            width,
            ..
        } = VitConfig::TINY;
        let patch = self.tensors["patch_embed.proj.weight"].shape()[3];
        let [weight, bias] = self.weight_and_bias("patch_embed.proj");
        let strides = [("strides", Attribute::Ints(&[patch as i64; 2]))];
        let patches = self.graph.node("Conv", &[input, &weight, &bias], &strides);
        // 0 keeps a length, and -1 takes the rest.
        let rows = self.graph.ints(&[0, 0, -1]);
        let patches = self.graph.node("Reshape", &[&patches, &rows], &[]);
        let patches = self.graph.node(
            "Transpose",
            &[&patches],
            &[("perm", Attribute::Ints(&[0, 2, 1]))],
        );
        let [zero, one] = [0, 1].map(|number| self.graph.ints(&[number]));
        let shape = self.graph.node("Shape", &[input], &[]);
        let batch = self.graph.node("Slice", &[&shape, &zero, &one], &[]);
        let axis = [("axis", Attribute::Int(0))];
        let shape = self.graph.node("Concat", &[&batch, &one, &one], &axis);
        let class = self.weight("cls_token");
        let class = self.graph.node("Expand", &[&class, &shape], &[]);
        let axis = [("axis", Attribute::Int(1))];
        let x = self.graph.node("Concat", &[&class, &patches], &axis);
        let positions = self.weight("pos_embed");
        let mut x = self.add(&x, &positions);
        for block in 0..layers {
            let name = |layer: &str| format!("blocks.{block}.{layer}");
            let y = self.layer_norm(&x, &name("norm1"), VIT_EPSILON);
            let y = self.linear_of_rows(&y, &name("attn.qkv"));
            let y = self.attention(&y, None, heads, width);
            let y = self.linear_of_rows(&y, &name("attn.proj"));
            x = self.add(&x, &y);
            let y = self.layer_norm(&x, &name("norm2"), VIT_EPSILON);
            let y = self.linear_of_rows(&y, &name("mlp.fc1"));
            let y = self.gelu(&y);
            let y = self.linear_of_rows(&y, &name("mlp.fc2"));
            x = self.add(&x, &y);
        }
        let first = self.graph.int(0);
        let x = self.graph.node("Gather", &[&x, &first], &axis);
        let x = self.layer_norm(&x, "norm", VIT_EPSILON);
        self.linear(&x, "head")
    }

    fn gpt(&mut self, tokens: &Value, config: &GptConfig) -> Value {
        let [zero, one, two] = [0, 1, 2].map(|number| self.graph.ints(&[number]));
        let shape = self.graph.node("Shape", &[tokens], &[]);
        let length = self.graph.node("Slice", &[&shape, &one, &two], &[]);
        let embeddings = self.weight("wte.weight");
        let x = self.graph.node("Gather", &[&embeddings, tokens], &[]);
        let positions = self.weight("wpe.weight");
        let positions = self
            .graph
            .node("Slice", &[&positions, &zero, &length, &zero], &[]);
        let mut x = self.add(&x, &positions);
        let square = self.graph.node(
            "Concat",
            &[&length, &length],
            &[("axis", Attribute::Int(0))],
        );
        let masked = self.graph.floats(&[], &[MASKED]);
        let mask = self.graph.node("Expand", &[&masked, &square], &[]);
        // Above the diagonal; the rest becomes 0.
        let first = self.graph.int(1);
        let mask = self
            .graph
            .node("Trilu", &[&mask, &first], &[("upper", Attribute::Int(1))]);
        for block in 0..config.layers {
            let name = |layer: &str| format!("h.{block}.{layer}");
            let y = self.layer_norm(&x, &name("ln_1"), EPSILON);
            let y = self.projection(&y, &name("attn.c_attn"));
            let y = self.attention(&y, Some(&mask), config.heads, config.width);
            let y = self.projection(&y, &name("attn.c_proj"));
            x = self.add(&x, &y);
            let y = self.layer_norm(&x, &name("ln_2"), EPSILON);
            let y = self.projection(&y, &name("mlp.c_fc"));
            let y = self.gelu(&y);
            let y = self.projection(&y, &name("mlp.c_proj"));
            x = self.add(&x, &y);
        }
        x = self.layer_norm(&x, "ln_f", EPSILON);
        let embeddings = self.graph.node("Transpose", &[&embeddings], &[]);
        self.matmul(&x, &embeddings)
    }

    /// *Shape*: `[batch, sequence, 3 width]`, queries, keys and values, to `[batch, sequence, width]`.
    fn attention(&mut self, x: &Value, mask: Option<&Value>, heads: usize, whole: usize) -> Value {
        let width = whole / heads;
        // 0 keeps a length.
        let apart = self.graph.ints(&[0, 0, heads as i64, width as i64]);
        let together = self.graph.ints(&[0, 0, whole as i64]);
        // Not one `Split`, which has several outputs.
        let mut part = |index: usize, order: &[i64]| {
            let [start, end] = [index, index + 1].map(|at| self.graph.ints(&[(at * whole) as i64]));
            let axis = self.graph.ints(&[2]);
            let part = self.graph.node("Slice", &[x, &start, &end, &axis], &[]);
            let part = self.graph.node("Reshape", &[&part, &apart], &[]);
            self.graph
                .node("Transpose", &[&part], &[("perm", Attribute::Ints(order))])
        };
        let (query, key, value) = (
            part(0, &[0, 2, 1, 3]),
            part(1, &[0, 2, 3, 1]),
            part(2, &[0, 2, 1, 3]),
        );
        let scale = self.graph.floats(&[], &[1.0 / (width as f32).sqrt()]);
        let scores = self.matmul(&query, &key);
        let mut scores = self.graph.node("Mul", &[&scores, &scale], &[]);
        if let Some(mask) = mask {
            scores = self.add(&scores, mask);
        }
        let shares = self
            .graph
            .node("Softmax", &[&scores], &[("axis", Attribute::Int(-1))]);
        let y = self.matmul(&shares, &value);
        let y = self.graph.node(
            "Transpose",
            &[&y],
            &[("perm", Attribute::Ints(&[0, 2, 1, 3]))],
        );
        self.graph.node("Reshape", &[&y, &together], &[])
    }
}

/// The matrix that takes so many values to the means over equal parts, which overlap if they must, as adaptive pooling has them.
fn means(len: usize) -> Vec<f32> {
    let mut matrix = vec![0.0; POOLED_SIDE * len];
    for (part, row) in matrix.chunks_mut(len).enumerate() {
        let of = part * len / POOLED_SIDE..((part + 1) * len).div_ceil(POOLED_SIDE);
        let share = 1.0 / of.len() as f32;
        row[of].fill(share);
    }
    matrix
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_adaptive_pooling_overlap_where_they_must() {
        let five = means(5);
        let row = |part: usize| &five[part * 5..(part + 1) * 5];
        assert_eq!(row(0), [0.5, 0.5, 0.0, 0.0, 0.0]);
        assert_eq!(row(1), [0.0, 0.5, 0.5, 0.0, 0.0]);
        assert_eq!(row(3), [0.0, 0.0, 0.0, 0.5, 0.5]);
        assert_eq!(means(8)[..8], [0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    }
}
