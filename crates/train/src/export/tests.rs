//! Exported files, read back by the programs that they are for.

use std::collections::HashMap;
use std::process::Command;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use paceline_ddp::weights;
use tempfile::TempDir;

use super::*;
use crate::classify::Network;
use crate::config::ModelSize;
use crate::model::Net;

/// Reads each model with PyTorch, Transformers and ONNX Runtime and compares the scores.
const CHECK: &str = include_str!("check.py");

/// Values without a pattern between -0.5 and 0.5.
fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).max(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    (0..count).map(|_| next()).collect()
}

/// `model` with other values in all its tensors, so that none is at its initial one. Variances are positive.
fn disturbed<M: Module>(model: M) -> M {
    let tensors = weights::tensors(&model).into_iter().zip(1..);
    let values = tensors.map(|((path, shape, _), seed)| {
        let count = shape.iter().product();
        let inputs: usize = shape.iter().skip(1).product();
        let scale = (2.0 / inputs as f32).sqrt();
        let around = match path.rsplit('.').next() {
            Some("gamma" | "running_var") => 1.0,
            _ => 0.0,
        };
        let values = noise(count, seed).into_iter();
        let values: Vec<f32> = values.map(|value| around + scale * value).collect();
        (path, TensorData::new(values, shape))
    });
    let values: HashMap<_, _> = values.collect();
    weights::import(model, values)
}

/// Writes a model in all formats, an input and its scores into a new folder below `into`.
fn write(into: &TempDir, name: &str, model: &Model, input: TensorData, scores: TensorData) {
    let folder = into.path().join(name);
    fs::create_dir(&folder).expect("a folder");
    let create = |name: &str| File::create(folder.join(name)).expect("a file");
    let written = model.write_safetensors(&create("model.safetensors"));
    written.expect("written");
    torch::write(&create("model.pt"), &model.tensors).expect("written");
    let onnx = model.onnx().expect("small");
    create("model.onnx").write_all(&onnx).expect("written");
    if matches!(model.kind, Kind::Language(..)) {
        let written = model.write_folder(&folder.join("transformers"));
        written.expect("written");
    }
    let case = [("input".to_owned(), input), ("logits".to_owned(), scores)];
    write_tensors(&create("case.safetensors"), &case, BTreeMap::new()).expect("written");
}

/// A model of samples with random weights. It says 5 classes, or a number with the mean 3 and the deviation 2.
fn of_samples(into: &TempDir, name: &str, features: Features, size: ModelSize, target: Target) {
    let device = Device::flex();
    let net = disturbed(Net::new(features, target.outputs(), size, &device));
    let input = TensorData::new(noise(3 * features.count(), 99), [3, features.count()]);
    let mut output = net.forward(features, Tensor::from_data(input.clone(), &device));
    if let Target::Number { mean, deviation } = target {
        output = output * deviation + mean;
    }
    let model = Model {
        tensors: as_in_torch(&weights::export(&net)).expect("built in"),
        kind: Kind::Samples(features, target),
        metadata: [("classes".to_owned(), "[]".to_owned())].into(),
    };
    write(into, name, &model, input, output.into_data());
}

fn classifier(into: &TempDir, name: &str, features: Features, size: ModelSize) {
    let classes = (0..5).map(|class| class.to_string()).collect();
    of_samples(into, name, features, size, Target::Classes(classes));
}

fn language(into: &TempDir) {
    let device = Device::flex();
    let config = GptConfig {
        vocabulary: 257,
        context: 12,
        layers: 2,
        heads: 2,
        width: 8,
        dropout: 0.1,
    };
    let gpt = disturbed(config.init(&device));
    let tokens: Vec<i64> = (0..18).map(|at| at * 37 % 257).collect();
    let input = TensorData::new(tokens, [2, 9]);
    let scores = gpt.forward(Tensor::<2, Int>::from_data(input.clone(), &device));
    let model = Model {
        tensors: as_in_torch(&weights::export(&gpt)).expect("built in"),
        kind: Kind::Language(config, Tokenizer::Bytes),
        metadata: BTreeMap::new(),
    };
    write(into, "gpt", &model, input, scores.into_data());
}

fn image(side: usize) -> Features {
    Features::Image {
        height: side,
        width: side + 1,
        channels: 3,
    }
}

/// All built-in models in all formats, a folder for each.
fn exported() -> TempDir {
    let into = tempfile::tempdir().expect("a folder");
    let table = Features::Flat { count: 6 };
    classifier(&into, "mlp", table, ModelSize::Tiny);
    let number = Target::Number {
        mean: 3.0,
        deviation: 2.0,
    };
    of_samples(&into, "number", table, ModelSize::Tiny, number);
    classifier(&into, "conv", image(9), ModelSize::Tiny);
    classifier(&into, "resnet20", image(16), ModelSize::Resnet20);
    classifier(&into, "resnet18", image(64), ModelSize::Resnet18);
    classifier(&into, "resnet50", image(64), ModelSize::Resnet50);
    let sides = Features::Image {
        height: 8,
        width: 12,
        channels: 3,
    };
    classifier(&into, "vit", sides, ModelSize::VitTiny);
    language(&into);
    into
}

#[test]
fn pytorch_transformers_and_onnx_runtime_compute_the_same_scores() {
    let packages = [
        "torch",
        "torchvision",
        "transformers",
        "safetensors",
        "onnxruntime",
    ];
    let Some(python) = paceline_testing::python_with(&packages) else {
        return;
    };
    let into = exported();
    let ended = Command::new(&python)
        .args(["-c", CHECK])
        .arg(into.path())
        .output();
    let ended = ended.expect("it started");
    let said = [ended.stdout, ended.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(ended.status.success(), "{}", said.concat());
    assert_eq!(said[0].lines().count(), 8, "{}", said.concat());
}

#[test]
fn a_third_is_where_pytorch_has_it_and_matrices_are_transposed() {
    let tensor = |name: &str, first: f32| {
        let values = (0..4).map(|at| first + at as f32).collect();
        (name.to_owned(), TensorData::new::<f32, _>(values, [2, 2]))
    };
    let of_gpt = [
        tensor("blocks.0.key.weight", 20.0),
        tensor("blocks.0.query.weight", 10.0),
        tensor("blocks.0.value.weight", 30.0),
    ];
    let expected = [10., 11., 20., 21., 30., 31., 12., 13., 22., 23., 32., 33.];
    let expected = TensorData::new::<f32, _>(expected.to_vec(), [2, 6]);
    let joined = as_in_torch(&of_gpt).expect("built in");
    assert_eq!(joined, [("h.0.attn.c_attn.weight".to_owned(), expected)]);
    let of_vit = [
        tensor("Vit.blocks.0.query.weight", 10.0),
        tensor("Vit.blocks.0.key.weight", 20.0),
        tensor("Vit.blocks.0.value.weight", 30.0),
    ];
    let expected = [10., 12., 11., 13., 20., 22., 21., 23., 30., 32., 31., 33.];
    let expected = TensorData::new::<f32, _>(expected.to_vec(), [6, 2]);
    let joined = as_in_torch(&of_vit).expect("built in");
    assert_eq!(joined, [("blocks.0.attn.qkv.weight".to_owned(), expected)]);
    let of_mlp = as_in_torch(&[tensor("Mlp.first.weight", 0.0)]).expect("built in");
    let expected = TensorData::new::<f32, _>(vec![0.0, 2.0, 1.0, 3.0], [2, 2]);
    assert_eq!(of_mlp, [("first.weight".to_owned(), expected)]);
    assert_eq!(as_in_torch(&[tensor("layer.weight", 0.0)]), None);
}

#[test]
fn a_torch_file_has_the_bytes_of_each_tensor_at_an_aligned_place() {
    let tensors = [
        ("a.weight", vec![1.5_f32, -2.0], vec![2, 1]),
        ("b", vec![3.25], vec![1]),
    ];
    let tensors =
        tensors.map(|(name, values, shape)| (name.to_owned(), TensorData::new(values, shape)));
    let file = tempfile::NamedTempFile::new().expect("a file");
    torch::write(file.as_file(), &tensors).expect("written");
    let mut archive = zip::ZipArchive::new(file.reopen().expect("a file")).expect("an archive");
    let names = archive
        .file_names()
        .map(|name| name.expect("text").into_owned());
    let names: Vec<String> = names.collect();
    let expected = ["data.pkl", "byteorder", "data/0", "data/1", "version"];
    assert_eq!(names, expected.map(|name| format!("archive/{name}")));
    for (index, (_, data)) in tensors.iter().enumerate() {
        let mut entry = archive
            .by_name(&format!("archive/data/{index}"))
            .expect("an entry");
        assert_eq!(entry.data_start().expect("known") % 64, 0);
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut entry, &mut bytes).expect("read");
        assert_eq!(bytes, data.as_bytes());
    }
}
