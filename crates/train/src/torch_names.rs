//! PyTorch's names and layouts of the built-in models' tensors: torchvision's of residual networks, timm's of Vision Transformers, Hugging Face's of
//! GPT-2, and the attribute names of the small networks.

/// Where PyTorch has a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TorchTensor {
    /// Its key in a state dict.
    pub(crate) name: String,
    pub(crate) layout: TorchLayout,
}

/// How PyTorch lays a tensor out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TorchLayout {
    /// As Burn does.
    Same,
    /// With the two axes swapped: the weight of a linear layer is `[out, in]`, and `[in, out]` in Burn.
    Transposed,
    /// As one of three equal parts along the last axis: GPT-2 keeps queries, keys and values in one tensor.
    Third(usize),
    /// As one of three equal parts along the first axis, each [transposed](Self::Transposed): so does timm, in a linear layer.
    TransposedThird(usize),
}

/// The places of all tensors of a model, from their paths and in their order; `None` unless the model is a built-in one.
///
/// A third has the same name as the other two. GPT-2's other matrices are `[in, out]`, as in Burn.
pub(crate) fn torch_tensors<'a>(
    paths: impl IntoIterator<Item = &'a str>,
) -> Option<Vec<TorchTensor>> {
    let paths: Vec<&str> = paths.into_iter().collect();
    let blocks = paths.iter().filter_map(|path| {
        let (_, block) = path.split_once(".blocks.")?;
        block.split('.').next()?.parse::<usize>().ok()
    });
    let blocks = blocks.max().map_or(0, |last| last + 1);
    paths
        .iter()
        .map(|path| torch_tensor(path, blocks))
        .collect()
}

/// The key of a file that means the same as one of [`torch_tensors`]: without the prefixes of wrappers, or `None` for a buffer that PyTorch
/// saves and a training does not need.
pub(crate) fn plain_key(key: &str) -> Option<&str> {
    let key = key.strip_prefix("module.").unwrap_or(key);
    let key = key.strip_prefix("transformer.").unwrap_or(key);
    let is_mask = key.ends_with(".attn.bias") || key.ends_with(".attn.masked_bias");
    let is_tied = key == "lm_head.weight";
    let is_counter = key.ends_with(".num_batches_tracked");
    (!is_mask && !is_tied && !is_counter).then_some(key)
}

/// Whether a tensor's shape follows from the classes or the vocabulary, by its path.
pub(crate) fn is_of_head(path: &str) -> bool {
    let (parent, _) = path.rsplit_once('.').unwrap_or((path, ""));
    matches!(
        parent,
        "Conv.output"
            | "Mlp.output"
            | "Basic.head"
            | "Bottleneck.head"
            | "Vit.head"
            | "embedding.tokens"
    )
}

fn torch_tensor(path: &str, blocks: usize) -> Option<TorchTensor> {
    let (model, rest) = path.split_once('.')?;
    match model {
        "Conv" | "Mlp" => attribute(rest),
        "Basic" | "Bottleneck" => residual(rest, blocks),
        "Vit" => vit(rest),
        "embedding" | "blocks" | "norm" => gpt(path),
        _ => None,
    }
}

fn same(name: String) -> TorchTensor {
    let layout = TorchLayout::Same;
    TorchTensor { name, layout }
}

fn transposed(name: String) -> TorchTensor {
    let layout = TorchLayout::Transposed;
    TorchTensor { name, layout }
}

/// PyTorch's name of a layer's own tensor.
fn own(tensor: &str) -> &str {
    match tensor {
        "gamma" => "weight",
        "beta" => "bias",
        other => other,
    }
}

/// Of a small network, whose linear layers have these names.
fn attribute(path: &str) -> Option<TorchTensor> {
    let (layer, tensor) = path.split_once('.')?;
    let name = format!("{layer}.{}", own(tensor));
    let is_linear = matches!(layer, "hidden" | "first" | "second" | "output");
    Some(match (is_linear, tensor) {
        (true, "weight") => transposed(name),
        _ => same(name),
    })
}

/// Of a residual network of so many blocks.
fn residual(path: &str, blocks: usize) -> Option<TorchTensor> {
    if let Some(tensor) = path.strip_prefix("head.") {
        let name = format!("fc.{tensor}");
        return Some(match tensor {
            "weight" => transposed(name),
            _ => same(name),
        });
    }
    if let Some(layer) = path.strip_prefix("stem.") {
        return convolution("", "1", layer).map(same);
    }
    let (block, layer) = path.strip_prefix("blocks.")?.split_once('.')?;
    let stages: &[usize] = match blocks {
        8 => &[2, 2, 2, 2],
        9 => &[3, 3, 3],
        16 => &[3, 4, 6, 3],
        _ => return None,
    };
    let (mut stage, mut index) = (0, block.parse::<usize>().ok()?);
    while index >= *stages.get(stage)? {
        index -= stages[stage];
        stage += 1;
    }
    let prefix = format!("layer{}.{index}.", stage + 1);
    let (part, tensor) = layer.split_once('.')?;
    let number = match part {
        "first" | "narrow" => "1",
        "second" | "middle" => "2",
        "widen" => "3",
        "shortcut" => {
            let tensor = tensor.strip_prefix("kernel.").unwrap_or(tensor);
            let name = match tensor.strip_prefix("norm.") {
                Some(tensor) => format!("{prefix}downsample.1.{}", own(tensor)),
                None => format!("{prefix}downsample.0.{tensor}"),
            };
            return Some(same(name));
        }
        "shortcut_norm" => return Some(same(format!("{prefix}downsample.1.{}", own(tensor)))),
        _ => return None,
    };
    convolution(&prefix, number, tensor).map(same)
}

/// A convolution and its norm, which have one number.
fn convolution(prefix: &str, number: &str, path: &str) -> Option<String> {
    let (layer, tensor) = path.split_once('.')?;
    match layer {
        "kernel" => Some(format!("{prefix}conv{number}.{tensor}")),
        "norm" => Some(format!("{prefix}bn{number}.{}", own(tensor))),
        _ => None,
    }
}

/// Of a Vision Transformer.
fn vit(path: &str) -> Option<TorchTensor> {
    let name = match path {
        "embedding.class" => "cls_token".to_owned(),
        "embedding.positions" => "pos_embed".to_owned(),
        _ => {
            let (layer, tensor) = path.rsplit_once('.')?;
            let tensor = own(tensor);
            match layer.strip_prefix("blocks.") {
                Some(layer) => return layer_of_vit(layer, tensor),
                None if layer == "embedding.patches" => format!("patch_embed.proj.{tensor}"),
                None if path == "head.weight" => return Some(transposed(path.to_owned())),
                None => format!("{layer}.{tensor}"),
            }
        }
    };
    Some(same(name))
}

/// Of a layer in a block of a Vision Transformer: `0.query`.
fn layer_of_vit(path: &str, tensor: &str) -> Option<TorchTensor> {
    let (block, layer) = path.split_once('.')?;
    let (named, is_norm) = match layer {
        "attention_norm" => ("norm1", true),
        "query" | "key" | "value" => ("attn.qkv", false),
        "output" => ("attn.proj", false),
        "feed_norm" => ("norm2", true),
        "up" => ("mlp.fc1", false),
        "down" => ("mlp.fc2", false),
        _ => return None,
    };
    let is_matrix = tensor == "weight" && !is_norm;
    let layout = match (third(layer), is_matrix) {
        (Some(part), true) => TorchLayout::TransposedThird(part),
        (Some(part), false) => TorchLayout::Third(part),
        (None, true) => TorchLayout::Transposed,
        (None, false) => TorchLayout::Same,
    };
    let name = format!("blocks.{block}.{named}.{tensor}");
    Some(TorchTensor { name, layout })
}

/// The part of attention's common layer that one of ours is.
fn third(layer: &str) -> Option<usize> {
    let mut parts = ["query", "key", "value"].iter();
    parts.position(|part| *part == layer)
}

fn gpt(path: &str) -> Option<TorchTensor> {
    let name = match path {
        "embedding.tokens.weight" => "wte.weight".to_owned(),
        "embedding.positions.weight" => "wpe.weight".to_owned(),
        _ => {
            if let Some(tensor) = path.strip_prefix("norm.") {
                return Some(same(format!("ln_f.{}", own(tensor))));
            }
            let (block, layer) = path.strip_prefix("blocks.")?.split_once('.')?;
            let (layer, tensor) = layer.split_once('.')?;
            let named = match layer {
                "attention_norm" => "ln_1",
                "query" | "key" | "value" => "attn.c_attn",
                "output" => "attn.c_proj",
                "feed_norm" => "ln_2",
                "up" => "mlp.c_fc",
                "down" => "mlp.c_proj",
                _ => return None,
            };
            let name = format!("h.{block}.{named}.{}", own(tensor));
            let layout = third(layer).map_or(TorchLayout::Same, TorchLayout::Third);
            return Some(TorchTensor { name, layout });
        }
    };
    Some(same(name))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use paceline_ddp::weights;
    use paceline_nn::gpt::GptConfig;

    use super::*;
    use crate::config::ModelSize;
    use crate::data::Features;
    use crate::model::Net;

    /// PyTorch's names and shapes.
    fn named(tensors: &[(String, Vec<usize>)]) -> Vec<(String, Vec<usize>)> {
        let paths = tensors.iter().map(|(path, _)| &**path);
        let torch = torch_tensors(paths).expect("a built-in model");
        let shaped = torch.into_iter().zip(tensors).map(|(torch, (_, shape))| {
            let mut shape = shape.clone();
            match torch.layout {
                TorchLayout::Same => {}
                TorchLayout::Transposed => shape.reverse(),
                TorchLayout::Third(_) => *shape.last_mut().expect("an axis") *= 3,
                TorchLayout::TransposedThird(_) => {
                    shape.reverse();
                    shape[0] *= 3;
                }
            }
            (torch.name, shape)
        });
        let mut shaped: Vec<_> = shaped.collect();
        shaped.sort();
        shaped.dedup();
        shaped
    }

    fn tensors(net: &Net) -> Vec<(String, Vec<usize>)> {
        let tensors = weights::tensors(net).into_iter();
        tensors.map(|(path, shape, _)| (path, shape)).collect()
    }

    fn image(size: ModelSize, classes: usize) -> Net {
        let features = Features::Image {
            height: 32,
            width: 32,
            channels: 3,
        };
        Net::new(features, classes, size, &Device::flex())
    }

    #[test]
    fn residual_networks_have_torchvisions_names_and_shapes() {
        let check = |size, count: usize, expected: &[(&str, &[usize])]| {
            let found = named(&tensors(&image(size, 1000)));
            for (name, shape) in expected {
                let at = found.iter().find(|(found, _)| found == name);
                assert_eq!(at.map(|(_, shape)| &**shape), Some(*shape), "{name}");
            }
            // torchvision's state dicts have 122 and 320 entries; 20 and 53 of them are `num_batches_tracked`.
            assert_eq!(found.len(), count, "{size:?}");
        };
        check(
            ModelSize::Resnet18,
            122 - 20,
            &[
                ("conv1.weight", &[64, 3, 7, 7]),
                ("bn1.running_mean", &[64]),
                ("layer1.1.bn2.running_var", &[64]),
                ("layer2.0.downsample.0.weight", &[128, 64, 1, 1]),
                ("layer2.0.downsample.1.bias", &[128]),
                ("layer4.1.conv2.weight", &[512, 512, 3, 3]),
                ("fc.weight", &[1000, 512]),
                ("fc.bias", &[1000]),
            ],
        );
        check(
            ModelSize::Resnet50,
            320 - 53,
            &[
                ("layer1.0.conv3.weight", &[256, 64, 1, 1]),
                ("layer1.0.downsample.1.running_mean", &[256]),
                ("layer3.5.bn3.weight", &[1024]),
                ("layer4.2.conv2.weight", &[512, 512, 3, 3]),
                ("fc.weight", &[1000, 2048]),
            ],
        );
        check(
            ModelSize::Resnet20,
            99,
            &[
                ("conv1.weight", &[16, 3, 3, 3]),
                ("layer3.0.downsample.0.weight", &[64, 32, 1, 1]),
                ("layer3.2.bn2.bias", &[64]),
                ("fc.weight", &[1000, 64]),
            ],
        );
    }

    #[test]
    fn a_vision_transformer_has_timms_names_and_shapes() {
        let features = Features::Image {
            height: 224,
            width: 224,
            channels: 3,
        };
        let vit = Net::new(features, 1000, ModelSize::VitTiny, &Device::flex());
        let found = named(&tensors(&vit));
        // Twelve of each block, the class token, positions, patches, the last norm and the head.
        assert_eq!(found.len(), 12 * 12 + 2 + 2 + 2 + 2);
        for (name, shape) in [
            ("cls_token", &[1, 1, 192][..]),
            ("pos_embed", &[1, 197, 192]),
            ("patch_embed.proj.weight", &[192, 3, 16, 16]),
            ("patch_embed.proj.bias", &[192]),
            ("blocks.0.norm1.weight", &[192]),
            ("blocks.11.attn.qkv.weight", &[576, 192]),
            ("blocks.11.attn.qkv.bias", &[576]),
            ("blocks.3.attn.proj.weight", &[192, 192]),
            ("blocks.3.norm2.bias", &[192]),
            ("blocks.3.mlp.fc1.weight", &[768, 192]),
            ("blocks.3.mlp.fc2.weight", &[192, 768]),
            ("norm.bias", &[192]),
            ("head.weight", &[1000, 192]),
            ("head.bias", &[1000]),
        ] {
            let at = found.iter().find(|(found, _)| found == name);
            assert_eq!(at.map(|(_, shape)| &**shape), Some(shape), "{name}");
        }
    }

    #[test]
    fn small_networks_have_the_names_of_their_attributes() {
        let conv = named(&tensors(&image(ModelSize::Tiny, 10)));
        let names: Vec<&str> = conv.iter().map(|(name, _)| &**name).collect();
        assert!(
            names.starts_with(&["conv1.weight", "conv2.weight", "hidden.bias"]),
            "{names:?}"
        );
        assert!(conv.contains(&("hidden.weight".to_owned(), vec![16, 128])));
        assert!(conv.contains(&("norm2.running_var".to_owned(), vec![8])));
        let features = Features::Flat { count: 7 };
        let mlp = Net::new(features, 3, ModelSize::Tiny, &Device::flex());
        let mlp = named(&tensors(&mlp));
        assert!(mlp.contains(&("first.weight".to_owned(), vec![16, 7])));
        assert!(mlp.contains(&("output.weight".to_owned(), vec![3, 16])));
        assert!(mlp.contains(&("norm.weight".to_owned(), vec![16])));
    }

    #[test]
    fn a_gpt_has_the_names_and_shapes_of_gpt_2() {
        let config = GptConfig {
            vocabulary: 257,
            context: 16,
            layers: 2,
            heads: 2,
            width: 8,
            dropout: 0.0,
        };
        let gpt = config.init(&Device::flex());
        let tensors = weights::tensors(&gpt).into_iter();
        let tensors: Vec<_> = tensors.map(|(path, shape, _)| (path, shape)).collect();
        let found = named(&tensors);
        // Twelve of each block, two embeddings and the last norm.
        assert_eq!(found.len(), 2 * 12 + 4, "{found:?}");
        for (name, shape) in [
            ("wte.weight", &[257, 8][..]),
            ("wpe.weight", &[16, 8]),
            ("h.1.attn.c_attn.weight", &[8, 24]),
            ("h.1.attn.c_attn.bias", &[24]),
            ("h.0.attn.c_proj.weight", &[8, 8]),
            ("h.0.mlp.c_fc.weight", &[8, 32]),
            ("h.0.mlp.c_proj.weight", &[32, 8]),
            ("h.0.ln_2.bias", &[8]),
            ("ln_f.weight", &[8]),
        ] {
            let at = found.iter().find(|(found, _)| found == name);
            assert_eq!(at.map(|(_, shape)| &**shape), Some(shape), "{name}");
        }
    }

    #[test]
    fn a_users_model_has_no_other_names() {
        assert_eq!(torch_tensors(["hidden.weight", "output.weight"]), None);
    }

    #[test]
    fn keys_of_a_file_lose_their_wrappers() {
        let check = |key, expected| assert_eq!(plain_key(key), expected);
        check("module.conv1.weight", Some("conv1.weight"));
        check("transformer.h.0.ln_1.weight", Some("h.0.ln_1.weight"));
        check("h.0.attn.c_attn.bias", Some("h.0.attn.c_attn.bias"));
        check("h.0.attn.bias", None);
        check("lm_head.weight", None);
        check("bn1.num_batches_tracked", None);
    }
}
