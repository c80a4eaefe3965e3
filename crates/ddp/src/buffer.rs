//! A model's tensors, read out of a Burn module and written back. The one file that knows how tensors lie in memory.

mod mappers;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet, hash_map};
use std::ops::Range;

use burn::backend::{BackendTensor, DispatchDevice, DispatchTensorKind};
use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{
    Bool, Bytes, DType, Device, Element, Int, Shape, Tensor, TensorData, Transaction,
};
use half::slice::HalfFloatSliceExt;
use half::vec::HalfFloatVecExt;
use half::{bf16, f16};
use paceline_nn::{visited_block, visited_is_shared};

use self::mappers::{Import, MakeGradients, Replace, Slice, Write};
use crate::error::DdpError;

/// The role of a module's tensor in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Requires gradients: reduced and optimized.
    Parameter,
    /// Written by the forward pass (running statistics): averaged over the shards.
    Buffer,
    /// Neither: broadcast once, then left alone (frozen weights, integer and boolean tensors).
    Constant,
}

/// One tensor of a module.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) id: ParamId,
    pub(crate) path: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    pub(crate) role: Role,
    /// The one block that has it, unless it is read outside of that block too.
    pub(crate) block: Option<usize>,
}

impl Entry {
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Lists a module's tensors in registration order, each id once.
pub(crate) fn inventory<M: Module>(model: &M) -> Vec<Entry> {
    let buffers = buffer_ids(model);
    let mut still = Still::default();
    model.visit(&mut still);
    let found = walk(model, |path, id, role, tensor| {
        let role = if buffers.contains(&id) && !still.has(path) {
            Role::Buffer
        } else {
            role
        };
        Some(Entry {
            id,
            path: path.to_string(),
            shape: tensor.shape,
            dtype: tensor.dtype,
            role,
            block: visited_block().filter(|_| !visited_is_shared()),
        })
    });
    let mut places = HashMap::new();
    let mut entries: Vec<Entry> = Vec::with_capacity(found.len());
    for entry in found {
        match places.entry(entry.id) {
            hash_map::Entry::Vacant(place) => {
                place.insert(entries.len());
                entries.push(entry);
            }
            hash_map::Entry::Occupied(first) => {
                let first = &mut entries[*first.get()];
                first.block = first.block.filter(|block| Some(*block) == entry.block);
            }
        }
    }
    entries
}

/// Id and path of every tensor of a module in registration order, each id once.
pub(crate) fn paths<M: Module>(model: &M) -> Vec<(u64, String)> {
    let mut seen = HashSet::new();
    walk(model, |path, id, _, _| {
        seen.insert(id).then(|| (id.val(), path.to_string()))
    })
}

/// A tensor of a module, to read later.
pub(crate) struct Handle {
    pub(crate) id: ParamId,
    pub(crate) path: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    is_placeholder: bool,
    read: Read,
}

impl Handle {
    pub(crate) fn is_placeholder(&self) -> bool {
        self.is_placeholder
    }

    /// Bytes of the whole tensor.
    pub(crate) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }

    /// Copies a device's memory now: Burn copies at the first access, and a later step may have overwritten it by then.
    pub(crate) fn read(self) -> TensorData {
        let data = (self.read)();
        data.as_bytes();
        data
    }
}

/// Every tensor of a module in registration order, each id once.
///
/// Running statistics are those after the last forward pass.
pub(crate) fn handles<M: Module>(model: &M) -> Vec<Handle> {
    // `valid()` folds the statistics that the last forward pass left pending into their values.
    let model = model.valid();
    let mut seen = HashSet::new();
    walk(&model, |path, id, _, tensor| {
        seen.insert(id).then(|| Handle {
            id,
            path: path.to_string(),
            is_placeholder: tensor.shape.contains(&0),
            shape: tensor.shape,
            dtype: tensor.dtype,
            read: tensor.read,
        })
    })
}

/// Writes tensors back by path; tensors whose path is not in `values` keep their data.
pub(crate) fn import<M: Module>(model: M, values: HashMap<String, TensorData>) -> M {
    // Pending statistics would overwrite the imported ones at the next forward pass.
    let _ = model.valid();
    model.map(&mut Import {
        path: Vec::new(),
        values,
    })
}

/// Reads the running statistics in `wanted` (id to position) and gives each to `each` with its position.
///
/// *Cost*: one read for all of them. *Errors*: the device cannot be read.
pub(crate) fn read_buffers<M: Module>(
    model: &M,
    wanted: &HashMap<ParamId, usize>,
    mut each: impl FnMut(usize, &[f32]),
) -> Result<(), DdpError> {
    let model = model.valid();
    let found = walk(&model, |_, id, _, tensor| {
        let at = *wanted.get(&id)?;
        (tensor.flat)().map(|values| (at, values))
    });
    let (places, tensors): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    let values = read(tensors, "running statistics")?;
    for (at, data) in places.into_iter().zip(&values) {
        each(at, &floats(data));
    }
    Ok(())
}

/// Reads tensors together: one copy per tensor and one wait. Errors call the tensors `what`.
///
/// *Errors*: the device cannot be read.
pub(crate) fn read(
    tensors: impl IntoIterator<Item = Tensor<1>>,
    what: &str,
) -> Result<Vec<TensorData>, DdpError> {
    let mut transaction = Transaction::default();
    for tensor in tensors {
        transaction = transaction.register(tensor);
    }
    let read = transaction.try_execute();
    read.map_err(|error| DdpError::Device(format!("{what} cannot be read: {error:?}")))
}

/// Values that [`sum`] adds sequentially in one row.
const ADDED_AT_ONCE: usize = 256;

/// The sum of all values, as a tensor of one; 0 for an empty tensor.
///
/// *Numerics*: the order of additions depends on the number of values only. Burn's own sum of a whole tensor adds the partial
/// sums of a GPU's blocks in the order in which the blocks end. Its sums along a dimension have a fixed order but compute
/// each result on one thread, so this function sums many short rows first.
pub(crate) fn sum(mut values: Tensor<1>) -> Tensor<1> {
    loop {
        let len = values.dims()[0];
        match len {
            0 => return Tensor::zeros([1], &values.device()),
            1 => return values,
            _ => {}
        }
        let rows = len.min(ADDED_AT_ONCE);
        let columns = len / rows;
        let even = rows * columns;
        let table: Tensor<2> = values.clone().narrow(0, 0, even).reshape([rows, columns]);
        let sums = table.sum_dim(0).reshape([columns]);
        values = match even == len {
            true => sums,
            false => Tensor::cat(vec![sums, values.narrow(0, even, len - even)], 0),
        };
    }
}

/// The sum of each chunk of `len` values; the last chunk may be shorter.
///
/// *Numerics*: each depends on the values of its chunk only, see [`sum`].
pub(crate) fn sums_of_chunks(values: Tensor<1>, len: usize) -> Tensor<1> {
    let all = values.dims()[0];
    let chunks = all / len;
    let even = chunks * len;
    let mut sums = Vec::new();
    if chunks > 0 {
        let table: Tensor<2> = values.clone().narrow(0, 0, even).reshape([chunks, len]);
        sums.push(table.sum_dim(1).reshape([chunks]));
    }
    if even < all {
        sums.push(sum(values.narrow(0, even, all - even)));
    }
    Tensor::cat(sums, 0)
}

/// Sets the running statistics of a module. They are shared between a module and its clones, so this
/// takes the module by reference.
pub(crate) fn write_buffers<M: Module>(model: &M, values: HashMap<ParamId, Vec<f32>>) {
    restore(model, &typed(model, values));
}

/// `values` in the shapes and types of the model's tensors.
fn typed<M: Module>(
    model: &M,
    mut values: HashMap<ParamId, Vec<f32>>,
) -> HashMap<ParamId, TensorData> {
    let found = walk(model, |_, id, _, tensor| {
        let values = values.remove(&id)?;
        Some((id, narrowed(values, tensor.shape.into(), tensor.dtype)))
    });
    found.into_iter().collect()
}

/// Sets running statistics to exactly these values.
fn restore<M: Module>(model: &M, values: &HashMap<ParamId, TensorData>) {
    let _ = model.valid();
    let _ = model.clone().map(&mut Write { values });
}

/// The values of `data` in f32: f32 values are borrowed, f16 and bf16 values are widened exactly.
///
/// Panics on any other type: `Ddp::new` refuses them, see [`require_summable`], and f64 parameters and their gradients stay tensors.
pub(crate) fn floats(data: &TensorData) -> Cow<'_, [f32]> {
    match data.dtype() {
        DType::F16 => widened::<f16>(data).into(),
        DType::BF16 => widened::<bf16>(data).into(),
        _ => elements::<f32>(data).into(),
    }
}

/// As [`floats`], of data that nobody needs any more.
pub(crate) fn into_floats(data: TensorData) -> Vec<f32> {
    match data.dtype() {
        DType::F16 | DType::BF16 => floats(&data).into_owned(),
        _ => data.try_into_vec().expect("f32, or `floats` panics too"),
    }
}

fn widened<E: Element>(data: &TensorData) -> Vec<f32>
where
    [E]: HalfFloatSliceExt,
{
    elements::<E>(data).to_f32_vec()
}

fn elements<E: Element>(data: &TensorData) -> &[E] {
    data.as_slice()
        .expect("`Ddp::new` admits only types that widen to f32")
}

/// `values` as a tensor of type `dtype`: f16 and bf16 are rounded to nearest, once.
pub(crate) fn narrowed(values: Vec<f32>, shape: Shape, dtype: DType) -> TensorData {
    match dtype {
        DType::F16 => TensorData::new(Vec::<f16>::from_f32_slice(&values), shape),
        DType::BF16 => TensorData::new(Vec::<bf16>::from_f32_slice(&values), shape),
        _ => TensorData::new(values, shape),
    }
}

/// The type that gradients of these parameters are summed in.
pub(crate) fn dtype_of_sums(parameters: &[Entry]) -> DType {
    match parameters.iter().any(|entry| entry.dtype == DType::F64) {
        true => DType::F64,
        false => DType::F32,
    }
}

/// Refuses trained tensors and buffers whose type loses digits in the reducer. It sums gradients in f32, or in f64 if any
/// parameter is f64, and running statistics in f32.
pub(crate) fn require_summable(entries: &[Entry]) -> Result<(), DdpError> {
    let summable = |e: &&Entry| match e.dtype {
        DType::F32 | DType::F16 | DType::BF16 => true,
        DType::F64 => e.role == Role::Parameter,
        _ => false,
    };
    match entries
        .iter()
        .find(|e| e.role != Role::Constant && !summable(e))
    {
        Some(entry) => Err(DdpError::UnsupportedType {
            path: entry.path.clone(),
            dtype: format!("{:?}", entry.dtype),
        }),
        None => Ok(()),
    }
}

/// The shape of a slice of `len` elements of a parameter. It keeps the parameter's rank, so that an optimizer that treats
/// ranks differently stays in the same branch.
pub(crate) fn slice_shape<const D: usize>(len: usize) -> [usize; D] {
    let mut shape = [1; D];
    shape[D - 1] = len;
    shape
}

/// A parameter or its gradient, or a slice of either, row-major.
#[derive(Clone)]
pub(crate) enum Value {
    /// In ordinary memory.
    Host(Vec<f32>),
    /// f32 in memory that somebody gets back.
    Lent(Bytes),
    /// On the parameter's device, in the type of sums.
    Device(Box<Tensor<1>>),
}

impl Value {
    /// A copy of elements of a parameter, on its device and in the type of sums.
    pub(crate) fn on_device(
        whole: &TensorData,
        range: Range<usize>,
        device: &Device,
        dtype: DType,
    ) -> Self {
        let shape = [range.len()];
        let values = match whole.dtype() {
            DType::F64 => TensorData::new(elements::<f64>(whole)[range].to_vec(), shape),
            _ => TensorData::new(floats(whole)[range].to_vec(), shape),
        };
        let values = Tensor::from_data(values.convert_dtype(dtype), (device, dtype));
        Self::Device(Box::new(values))
    }

    /// In ordinary memory, in the type of its parameter.
    pub(crate) fn data(self, shape: Shape, dtype: DType) -> TensorData {
        match self {
            Self::Host(values) => narrowed(values, shape, dtype),
            Self::Lent(bytes) if dtype == DType::F32 => TensorData::from_bytes(bytes, shape, dtype),
            Self::Lent(bytes) => narrowed(bytemuck::cast_slice(&bytes).to_vec(), shape, dtype),
            Self::Device(values) => {
                let data = values.into_data().convert_dtype(dtype);
                TensorData::from_bytes(data.into_bytes(), shape, dtype)
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            Self::Lent(bytes) => bytes.len() / size_of::<f32>(),
            Self::Device(values) => values.dims()[0],
        }
    }

    /// On a device without autodiff.
    pub(crate) fn tensor<const D: usize>(
        self,
        device: &Device,
        shape: Shape,
        dtype: DType,
    ) -> Tensor<D> {
        match self {
            Self::Host(_) | Self::Lent(_) => {
                Tensor::from_data(self.data(shape, dtype), (device, dtype))
            }
            Self::Device(values) => values.to_device(device).reshape(shape).cast(dtype),
        }
    }
}

/// Makes gradients for an optimizer, of averages and the whole shapes of their parameters.
pub(crate) fn gradients<M: Module>(
    model: &M,
    values: HashMap<ParamId, (Value, Shape)>,
) -> GradientsParams {
    let mut visitor = MakeGradients {
        grads: GradientsParams::new(),
        values,
    };
    model.visit(&mut visitor);
    visitor.grads
}

/// The values of `range` of one parameter in row-major order, for fingerprints, and the addresses of the parameter `shown`.
pub(crate) fn window<M: Module>(
    model: &M,
    id: ParamId,
    range: Range<usize>,
    shown: ParamId,
) -> (Option<Tensor<1>>, Option<Range<u64>>) {
    let (mut values, mut memory) = (None, None);
    walk(model, |_, visited, _, tensor| {
        if visited == id {
            values = (tensor.flat)().map(|values| values.slice([range.clone()]));
        }
        if visited == shown {
            memory = (tensor.memory)();
        }
        None::<()>
    });
    (values, memory)
}

/// `model` for an optimizer's step: with slices of those parameters that `ranges` names in the place of whole ones, and with
/// the slices in `values`, which come with their whole shapes, in the place of placeholders.
pub(crate) fn sliced<M: Module>(
    model: M,
    ranges: &HashMap<ParamId, Range<usize>>,
    values: HashMap<ParamId, (Value, Shape)>,
) -> M {
    model.map(&mut Slice { ranges, values })
}

/// Reads whole parameters or slices in f32, row-major, by id.
///
/// *Cost*: one read for all of them; no copy of f32 values in ordinary memory that only `model` holds. *Errors*: the device
/// cannot be read.
pub(crate) fn read_parameters<M: Module>(
    model: M,
    wanted: impl Fn(ParamId) -> bool,
) -> Result<HashMap<ParamId, Vec<f32>>, DdpError> {
    let found = flat_parameters(&model, wanted);
    drop(model);
    let (ids, tensors): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    let values = read(tensors, "weights")?.into_iter().map(into_floats);
    Ok(ids.into_iter().zip(values).collect())
}

/// Whole parameters or slices, row-major, by id, where they are.
pub(crate) fn flat_parameters<M: Module>(
    model: &M,
    wanted: impl Fn(ParamId) -> bool,
) -> HashMap<ParamId, Tensor<1>> {
    let found = walk(model, |_, id, _, tensor| {
        let values = wanted(id).then(|| (tensor.flat)())?;
        values.map(|values| (id, values))
    });
    found.into_iter().collect()
}

/// Replaces whole parameters by id.
pub(crate) fn write_parameters<M: Module>(model: M, values: HashMap<ParamId, Value>) -> M {
    model.map(&mut Replace { values })
}

/// The device that a module's tensors are on.
pub(crate) fn device_of<M: Module>(model: &M) -> Option<Device> {
    model.devices().into_iter().next()
}

/// Whether tensors of this device lie in ordinary memory.
pub(crate) fn is_host(device: &Device) -> bool {
    matches!(
        device.clone().inner().as_dispatch(),
        DispatchDevice::Flex(_)
    )
}

/// Paths of norms that do not train, and so leave their running statistics as they are: a mean of equal values could differ in its last bit.
#[derive(Default)]
struct Still {
    path: Vec<String>,
    norms: HashSet<String>,
}

impl Still {
    fn has(&self, path: &str) -> bool {
        let norm = path.rsplit_once('.').map_or("", |(norm, _)| norm);
        self.norms.contains(norm)
    }
}

impl ModuleVisitor for Still {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        if let (false, [norm @ .., _]) = (flag.is_enabled(), &self.path[..]) {
            self.norms.insert(norm.join("."));
        }
    }
}

/// Ids of the tensors that the forward pass writes.
///
/// A module shares the memory of running statistics with its clones; every other parameter has its own memory. This function
/// therefore writes to a clone and looks for changes in the original.
fn buffer_ids<M: Module>(model: &M) -> HashSet<ParamId> {
    struct Nudge;
    impl ModuleMapper for Nudge {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if param.is_require_grad() {
                return param;
            }
            param.map(|tensor| tensor.add_scalar(1.0))
        }
    }
    let frozen = |model: &M| {
        walk(model, |_, id, role, tensor| {
            (role == Role::Constant && tensor.dtype.is_float()).then(|| (id, (tensor.read)()))
        })
    };
    let _ = model.valid();
    let before = frozen(model);
    if before.is_empty() {
        return Default::default();
    }
    let _ = model.clone().map(&mut Nudge);
    let after: HashMap<ParamId, TensorData> = frozen(model).into_iter().collect();
    let shared: HashMap<ParamId, TensorData> = before
        .into_iter()
        .filter(|(id, data)| after[id] != *data)
        .collect();
    restore(model, &shared);
    shared.into_keys().collect()
}

/// Reads a tensor of any kind and rank.
type Read = Box<dyn FnOnce() -> TensorData>;

/// A tensor of any kind and rank, borrowed for reading.
struct TensorRef<'a> {
    read: Read,
    /// All values in row-major order, of a floating-point tensor.
    flat: &'a dyn Fn() -> Option<Tensor<1>>,
    /// Its addresses in ordinary memory.
    memory: &'a dyn Fn() -> Option<Range<u64>>,
    shape: Vec<usize>,
    dtype: DType,
}

/// Calls `each` for every tensor of a module with its path, and collects the results.
fn walk<M: Module, R>(
    model: &M,
    mut each: impl FnMut(&str, ParamId, Role, TensorRef<'_>) -> Option<R>,
) -> Vec<R> {
    let mut found = Vec::new();
    model.visit(&mut Walk {
        path: Vec::new(),
        each: &mut |path, id, role, tensor| found.extend(each(path, id, role, tensor)),
    });
    found
}

/// The visitor of [`walk`]. One type for all walks, because modules are compiled anew for each type of visitor.
struct Walk<'a> {
    path: Vec<String>,
    each: &'a mut dyn FnMut(&str, ParamId, Role, TensorRef<'_>),
}

impl Walk<'_> {
    fn found(&mut self, id: ParamId, role: Role, tensor: TensorRef<'_>) {
        (self.each)(&self.path.join("."), id, role, tensor);
    }
}

impl ModuleVisitor for Walk<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.base();
        let role = if param.is_require_grad() {
            Role::Parameter
        } else {
            Role::Constant
        };
        let len = tensor.shape().num_elements();
        let view = TensorRef {
            shape: tensor.shape().to_vec(),
            dtype: tensor.dtype(),
            read: {
                let tensor = tensor.clone();
                Box::new(|| tensor.inner_if_autodiff().into_data())
            },
            flat: &|| Some(tensor.clone().inner_if_autodiff().reshape([len])),
            memory: &|| memory(tensor.clone().inner_if_autodiff()),
        };
        self.found(param.id, role, view);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let tensor = param.base();
        let view = TensorRef {
            shape: tensor.shape().to_vec(),
            dtype: tensor.dtype(),
            read: Box::new(|| tensor.into_data()),
            flat: &|| None,
            memory: &|| None,
        };
        self.found(param.id, Role::Constant, view);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let tensor = param.base();
        let view = TensorRef {
            shape: tensor.shape().to_vec(),
            dtype: tensor.dtype(),
            read: Box::new(|| tensor.into_data()),
            flat: &|| None,
            memory: &|| None,
        };
        self.found(param.id, Role::Constant, view);
    }
}

/// The addresses of a tensor without gaps in ordinary memory, good as long as somebody holds the tensor.
fn memory<const D: usize>(tensor: Tensor<D>) -> Option<Range<u64>> {
    let size = tensor.dtype().size();
    let DispatchTensorKind::Flex(BackendTensor::Float(inner)) = tensor.into_dispatch().kind else {
        return None;
    };
    let (start, end) = inner.layout().contiguous_offsets()?;
    let memory = inner.bytes().get(start * size..end * size)?.as_ptr_range();
    Some(memory.start.addr() as u64..memory.end.addr() as u64)
}

/// Reading without recording an operation on the tape.
pub(crate) trait InnerIfAutodiff {
    fn inner_if_autodiff(self) -> Self;
}

impl<const D: usize> InnerIfAutodiff for Tensor<D> {
    fn inner_if_autodiff(self) -> Self {
        if self.is_autodiff() {
            self.inner()
        } else {
            self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_has_every_value_once() {
        let device = Device::flex();
        for len in [0, 1, 2, 255, 256, 257, 511, 513, 65_535, 65_537, 70_000] {
            // Whole numbers below 2^24: sums are exact in every order.
            let values: Vec<f32> = (0..len).map(|i| (i % 100) as f32).collect();
            let expected: f32 = values.iter().sum();
            let sum = sum(Tensor::from_data(TensorData::new(values, [len]), &device));
            assert_eq!(sum.dims(), [1], "{len}");
            assert_eq!(sum.into_scalar::<f32>(), expected, "{len}");
        }
    }

    #[test]
    fn a_sum_shows_one_value_that_is_not_finite_anywhere() {
        let device = Device::flex();
        for at in [0, 300, 65_536, 69_999] {
            let mut values = vec![0.0; 70_000];
            values[at] = f32::NAN;
            let sum = sum(Tensor::from_data(
                TensorData::new(values, [70_000]),
                &device,
            ));
            assert!(sum.into_scalar::<f32>().is_nan(), "{at}");
        }
    }
}
