//! The model that a run begins with: weights from a file, and frozen parameters.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use burn::module::{Flag, Module, ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};
use paceline_checkpoint::read_safetensors;
use paceline_ddp::weights;
use paceline_rendezvous::notice;

use crate::config::TrainConfig;
use crate::error::TrainError;
use crate::layout::Layout;
use crate::report::plural;
use crate::torch_names::{TorchLayout, TorchTensor, is_of_head, plain_key, torch_tensors};

/// Most names in an error.
const NAMES_MAX: usize = 3;

/// `model`, which is whole and random, as the settings have it begin.
///
/// *Errors*: a file that does not fit the model; a pattern that matches nothing.
pub(crate) fn begun<M: Module>(
    config: &TrainConfig,
    layout: &Layout,
    model: M,
) -> Result<M, TrainError> {
    // The other replicas get the weights of the first, and a resumed run those of its checkpoint.
    let reads = layout.replicas().rank() == 0 && !layout.is_joining() && !config.resume;
    let model = match config.init.as_deref().filter(|_| reads) {
        None => model,
        Some(path) => {
            let (model, left) = initialised(model, path)?;
            if layout.is_first() {
                let from = path.display();
                match left.is_empty() {
                    true => notice!(INFO, "begins with the weights of {from}"),
                    false => notice!(
                        INFO,
                        "begins with the weights of {from}, but for a new head: {}",
                        left.join(", ")
                    ),
                }
            }
            model
        }
    };
    match &config.freeze {
        None => Ok(model),
        Some(patterns) => frozen(model, patterns),
    }
}

/// `model` with the weights in a file, and the tensors of the head that stay random because they have another shape there.
fn initialised<M: Module>(model: M, path: &Path) -> Result<(M, Vec<String>), TrainError> {
    let misfit = |Misfit { what, hint }| {
        TrainError::usage(
            format!(
                "cannot begin with the weights of {}: {what}",
                path.display()
            ),
            hint,
        )
    };
    let file = read_safetensors(path).map_err(|what| {
        let hint = "name a safetensors file with --init; PyTorch's own files become one with `safetensors.torch.save_file`";
        misfit(Misfit::new(what, hint))
    })?;
    let (values, left) = assigned(&weights::tensors(&model), file).map_err(misfit)?;
    Ok((weights::import(model, values), left))
}

/// Why a file does not fit a model.
#[derive(Debug)]
struct Misfit {
    what: String,
    hint: String,
}

impl Misfit {
    fn new(what: String, hint: impl Into<String>) -> Self {
        let hint = hint.into();
        Self { what, hint }
    }
}

/// The values of a model's tensors in a file that has them by their paths or by PyTorch's names, and the tensors of the head that have another
/// shape there.
fn assigned(
    tensors: &[(String, Vec<usize>, DType)],
    file: Vec<(String, TensorData)>,
) -> Result<(HashMap<String, TensorData>, Vec<String>), Misfit> {
    let has_paths = file
        .iter()
        .any(|(key, _)| tensors.iter().any(|(path, ..)| path == key));
    let paths = tensors.iter().map(|(path, ..)| path.as_str());
    let torch = torch_tensors(paths).filter(|_| !has_paths);
    let file: HashMap<String, TensorData> = match &torch {
        None => file.into_iter().collect(),
        Some(_) => {
            let plain = |(key, data): (String, _)| Some((plain_key(&key)?.to_owned(), data));
            file.into_iter().filter_map(plain).collect()
        }
    };
    let places = torch.unwrap_or_else(|| {
        let of_path = |(path, ..): &(String, _, _)| TorchTensor {
            name: path.clone(),
            layout: TorchLayout::Same,
        };
        tensors.iter().map(of_path).collect()
    });
    let names: HashSet<&str> = places.iter().map(|place| place.name.as_str()).collect();
    let keys = || file.keys().map(String::as_str);
    if let Some(missing) = places.iter().find(|place| !file.contains_key(&place.name)) {
        let others = keys().filter(|key| !names.contains(key));
        return Err(Misfit::new(
            format!("it has no {}", missing.name),
            nearest(&missing.name, others, "it has"),
        ));
    }
    if let Some(extra) = keys().filter(|key| !names.contains(key)).min() {
        return Err(Misfit::new(
            format!("the model has no {extra}"),
            nearest(extra, names.iter().copied(), "the model has"),
        ));
    }
    // In a user's model the last layer takes the head's place.
    let last = tensors.last().map(|(path, ..)| parent(path));
    let is_built_in = places
        .iter()
        .zip(tensors)
        .any(|(place, (path, ..))| place.name != *path)
        || tensors.iter().any(|(path, ..)| is_of_head(path));
    let mut values = HashMap::new();
    let mut left = Vec::new();
    for (place, (path, shape, dtype)) in places.iter().zip(tensors) {
        let stored = &file[&place.name];
        let found = laid_out(stored, place.layout, *dtype);
        match found.filter(|found| found.shape().to_vec() == *shape) {
            Some(found) => {
                values.insert(path.clone(), found);
            }
            None if is_of_head(path) || !is_built_in && last == Some(parent(path)) => {
                left.push(format!("{} of {:?}", place.name, stored.shape().to_vec()));
            }
            None => {
                let (name, found) = (&place.name, stored.shape().to_vec());
                return Err(Misfit::new(
                    format!(
                        "{name} is {found:?} {:?}, which does not make the model's {shape:?} {dtype:?}",
                        stored.dtype()
                    ),
                    "choose the --model that the weights are of, and images or columns of the same kind and size; only the head may differ",
                ));
            }
        }
    }
    Ok((values, left))
}

/// The path of the module that has a tensor.
fn parent(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(parent, _)| parent)
}

/// A tensor of PyTorch as Burn has it; `None` if its shape or type does not allow that.
fn laid_out(stored: &TensorData, layout: TorchLayout, dtype: DType) -> Option<TensorData> {
    let data = match (
        stored.dtype() == dtype,
        stored.dtype().is_float() && dtype.is_float(),
    ) {
        (true, _) => stored.clone(),
        (false, true) => stored.clone().convert_dtype(dtype),
        (false, false) => return None,
    };
    let shape = data.shape().to_vec();
    match layout {
        TorchLayout::Same => Some(data),
        TorchLayout::Transposed => transposed(&data),
        TorchLayout::Third(part) => third(&data, shape.len().checked_sub(1)?, part),
        TorchLayout::TransposedThird(part) => transposed(&third(&data, 0, part)?),
    }
}

/// The transpose of a matrix; `None` for another number of axes.
pub(crate) fn transposed(data: &TensorData) -> Option<TensorData> {
    let whole = (data.shape().len() == 2).then(|| data.clone())?;
    let whole = Tensor::<2>::from_data(whole, (&Device::flex(), data.dtype()));
    Some(whole.transpose().into_data())
}

/// One of three equal parts along an axis; `None` if it has not so many.
fn third(data: &TensorData, axis: usize, part: usize) -> Option<TensorData> {
    let width = *data.shape().to_vec().get(axis)?;
    let third = width / 3;
    let range = part * third..(part + 1) * third;
    (width.is_multiple_of(3)).then(|| weights::slice(data, axis, range))
}

/// Names that look most like one that is missing, as advice.
fn nearest<'a>(name: &str, others: impl Iterator<Item = &'a str>, whose: &str) -> String {
    let mut others: Vec<(f64, &str)> = others
        .map(|other| (strsim::jaro_winkler(name, other), other))
        .collect();
    others.sort_by(|one, other| other.0.total_cmp(&one.0).then(one.1.cmp(other.1)));
    let others: Vec<&str> = others.iter().map(|(_, name)| *name).collect();
    match others.len() {
        0 => "choose the --model that the weights are of".to_owned(),
        count => format!(
            "{whose} {}; choose the --model that the weights are of",
            listed(&others, count)
        ),
    }
}

/// The first names, and how many more there are.
fn listed(names: &[&str], count: usize) -> String {
    let first = names[..count.min(NAMES_MAX)].join(", ");
    match count.saturating_sub(NAMES_MAX) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

/// `model` without gradients for the parameters that a pattern matches, by their paths or by PyTorch's names. A norm whose running statistics
/// are matched uses them as they are.
fn frozen<M: Module>(model: M, patterns: &str) -> Result<M, TrainError> {
    let tensors = weights::paths(&model);
    let paths = || tensors.iter().map(|(_, path)| path.as_str());
    let torch = torch_tensors(paths());
    let names = |at: usize| {
        let torch = torch.as_ref().map(|torch| torch[at].name.as_str());
        [tensors[at].1.as_str()].into_iter().chain(torch)
    };
    let mut freeze = Freeze {
        ids: HashSet::new(),
        norms: HashSet::new(),
        path: Vec::new(),
    };
    for pattern in patterns.split(',').map(str::trim) {
        let matched = |at: &usize| names(*at).any(|name| matches(pattern, name));
        let matched: Vec<usize> = (0..tensors.len()).filter(matched).collect();
        if matched.is_empty() {
            let known: Vec<&str> = (0..tensors.len())
                .filter_map(|at| names(at).last())
                .collect();
            return Err(TrainError::usage(
                format!("`freeze` is {patterns}, but {pattern:?} matches no parameter"),
                format!(
                    "the model has {}, such as {}; * stands for any text",
                    plural(known.len() as u64, "tensor"),
                    listed(&known, known.len())
                ),
            ));
        }
        for (id, path) in matched.into_iter().map(|at| &tensors[at]) {
            freeze.ids.insert(ParamId::from(*id));
            if let Some(norm) = path.strip_suffix(".running_mean") {
                freeze.norms.insert(norm.to_owned());
            }
        }
    }
    let is_statistic =
        |path: &str| path.ends_with(".running_mean") || path.ends_with(".running_var");
    let mut left = tensors.iter().filter(|(_, path)| !is_statistic(path));
    if left.all(|(id, _)| freeze.ids.contains(&ParamId::from(*id))) {
        return Err(TrainError::usage(
            format!("`freeze` is {patterns}, which leaves nothing to train"),
            "`paceline eval` evaluates a model without training it",
        ));
    }
    Ok(model.map(&mut freeze))
}

/// Whether a pattern matches a whole name: `*` is any text, `?` any letter.
fn matches(pattern: &str, name: &str) -> bool {
    let name: Vec<char> = name.chars().collect();
    // How many letters of the name the pattern so far may match.
    let mut lens = vec![false; name.len() + 1];
    lens[0] = true;
    for wanted in pattern.chars() {
        let mut any = false;
        let next = |len: usize| match wanted {
            '*' => {
                any |= lens[len];
                any
            }
            _ => len > 0 && lens[len - 1] && (wanted == '?' || wanted == name[len - 1]),
        };
        lens = (0..=name.len()).map(next).collect();
    }
    lens[name.len()]
}

struct Freeze {
    ids: HashSet<ParamId>,
    /// Paths of norms.
    norms: HashSet<String>,
    path: Vec<String>,
}

impl ModuleMapper for Freeze {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.ids.contains(&param.id) {
            true => param.set_require_grad(false),
            false => param,
        }
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        let path = self.path.join(".");
        match self.norms.contains(parent(&path)) {
            true => flag.with_value(false),
            false => flag,
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::module::ModuleVisitor;
    use burn::nn::{Linear, LinearConfig};

    use super::*;
    use crate::config::ModelSize;
    use crate::data::Features;
    use crate::export::as_in_torch;
    use crate::model::Net;

    fn image(size: ModelSize, side: usize, classes: usize) -> Net {
        let features = Features::Image {
            height: side,
            width: side,
            channels: 3,
        };
        Net::new(features, classes, size, &Device::flex().autodiff())
    }

    fn resnet18(classes: usize) -> Net {
        image(ModelSize::Resnet18, 32, classes)
    }

    /// A file as torchvision or timm would write it.
    fn torch_file(net: &Net) -> Vec<(String, TensorData)> {
        let mut file = as_in_torch(&weights::export(net)).expect("a built-in model");
        let counter = TensorData::new(vec![7_i64], [1]);
        file.push(("bn1.num_batches_tracked".to_owned(), counter));
        file
    }

    fn assign(
        net: &Net,
        file: Vec<(String, TensorData)>,
    ) -> Result<(HashMap<String, TensorData>, Vec<String>), Misfit> {
        assigned(&weights::tensors(net), file)
    }

    #[test]
    fn a_file_of_pytorch_and_one_of_a_run_give_the_same_weights() {
        let vit = || image(ModelSize::VitTiny, 8, 10);
        let from = resnet18(10);
        for (from, to) in [(from.clone(), resnet18(10)), (vit(), vit())] {
            let expected = weights::export(&from);
            for file in [torch_file(&from), expected.clone()] {
                let (values, left) = assign(&to, file).expect("it fits");
                assert_eq!(left, [""; 0]);
                let net = weights::import(to.clone(), values);
                assert_eq!(weights::export(&net), expected);
            }
        }
        let to = resnet18(10);
        let half = torch_file(&from).into_iter();
        let half = half.map(|(name, data)| match data.dtype() {
            DType::F32 => (name, data.convert_dtype(DType::F16)),
            _ => (name, data),
        });
        let (values, _) = assign(&to, half.collect()).expect("it fits");
        assert!(values.values().all(|data| data.dtype() == DType::F32));
    }

    #[test]
    fn a_head_of_other_classes_stays_random_and_is_named() {
        let (values, left) = assign(&resnet18(3), torch_file(&resnet18(10))).expect("it fits");
        assert_eq!(left, ["fc.weight of [10, 512]", "fc.bias of [10]"]);
        assert!(!values.contains_key("Basic.head.weight"));
        assert!(values.contains_key("Basic.stem.kernel.weight"));
    }

    #[test]
    fn what_is_missing_too_much_or_of_another_shape_is_named() {
        let net = resnet18(10);
        let file = || torch_file(&net);
        let renamed = |name: &str, to: &str| {
            let renamed = file().into_iter().map(|(key, data)| match key == name {
                true => (to.to_owned(), data),
                false => (key, data),
            });
            renamed.collect::<Vec<_>>()
        };
        let error = assign(
            &net,
            renamed("layer2.0.conv1.weight", "layer2.0.conv9.weight"),
        );
        let error = error.expect_err("one is missing");
        assert_eq!(error.what, "it has no layer2.0.conv1.weight");
        assert!(
            error.hint.starts_with("it has layer2.0.conv9.weight;"),
            "{error:?}"
        );
        let mut more = file();
        more.push((
            "layer5.0.conv1.weight".to_owned(),
            TensorData::new(vec![0.0_f32], [1]),
        ));
        let error = assign(&net, more).expect_err("one too much");
        assert_eq!(error.what, "the model has no layer5.0.conv1.weight");
        assert!(error.hint.contains("layer4.0.conv1.weight"), "{error:?}");
        let mut other = file();
        other[0].1 = TensorData::new(vec![0.0_f32; 64 * 49], [64, 1, 7, 7]);
        let error = assign(&net, other).expect_err("another shape");
        assert!(
            error
                .what
                .starts_with("conv1.weight is [64, 1, 7, 7] F32, which does not make"),
            "{error:?}"
        );
    }

    #[test]
    fn the_parts_of_gpt_2s_fused_matrix_are_told_apart() {
        let data = TensorData::new((0..12).map(|at| at as f32).collect::<Vec<_>>(), [2, 6]);
        let part = |part| laid_out(&data, TorchLayout::Third(part), DType::F32).expect("a third");
        assert_eq!(
            part(0),
            TensorData::new(vec![0.0_f32, 1.0, 6.0, 7.0], [2, 2])
        );
        assert_eq!(
            part(2),
            TensorData::new(vec![4.0_f32, 5.0, 10.0, 11.0], [2, 2])
        );
    }

    #[test]
    fn a_users_model_has_its_last_layer_for_a_head() {
        let device = Device::flex();
        let layer = |from, to| -> Linear { LinearConfig::new(from, to).init(&device) };
        let tensors = |last| weights::tensors(&(layer(2, 3), layer(3, last)));
        let file = weights::export(&(layer(2, 3), layer(3, 7)));
        let (values, left) = assigned(&tensors(4), file.clone()).expect("it fits");
        assert_eq!((values.len(), left.len()), (2, 2));
        let narrower = weights::tensors(&(layer(5, 3), layer(3, 7)));
        assigned(&narrower, file).expect_err("another shape before the head");
    }

    #[test]
    fn patterns_match_whole_names() {
        let check = |pattern, name, expected| {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        };
        check("*", "a.b", true);
        check("a.*", "a.b.c", true);
        check("a.*", "b.a.c", false);
        check("*.weight", "a.b.weight", true);
        check("*.weight", "a.weights", false);
        check("layer?.*.bn*", "layer3.0.bn1.bias", true);
        check("layer?.*.bn*", "layer.0.bn1.bias", false);
        check("", "a", false);
        check("가*", "가나", true);
    }

    /// The paths of trained parameters, and of the norms that use running statistics.
    #[derive(Default)]
    struct Trained {
        path: Vec<String>,
        parameters: Vec<String>,
        still: Vec<String>,
    }

    impl ModuleVisitor for Trained {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_owned());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                self.parameters.push(self.path.join("."));
            }
        }

        fn visit_flag(&mut self, flag: &Param<Flag>) {
            if !flag.is_enabled() {
                self.still.push(self.path.join("."));
            }
        }
    }

    #[test]
    fn frozen_parameters_need_no_gradient_and_their_norms_keep_their_statistics() {
        let trained = |patterns| {
            let net = frozen(resnet18(10), patterns).expect("it matches");
            let mut found = Trained::default();
            net.visit(&mut found);
            found
        };
        let found = trained("conv1.*, bn1.*, layer?.*");
        assert_eq!(found.parameters, ["Basic.head.weight", "Basic.head.bias"]);
        assert_eq!(found.still.len(), 20);
        let found = trained("*.kernel.weight,*.shortcut.weight");
        assert_eq!(found.still, [""; 0]);
        assert!(found.parameters.iter().all(|path| !path.contains("kernel")));
        let error = frozen(resnet18(10), "layer1.*,layers.*").expect_err("no such layer");
        let text = error.to_string();
        assert!(text.contains("\"layers.*\" matches no parameter"), "{text}");
        let hint = error.hint().unwrap_or_default();
        assert!(hint.contains("conv1.weight"), "{hint}");
    }
}
