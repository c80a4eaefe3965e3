//! The bits of a forward and backward pass, to compare.

use std::sync::{Mutex, MutexGuard};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Gradients, Tensor, TensorData, Tolerance};

/// The device, for one test at a time: Burn has one stream of random numbers for each process.
pub(crate) fn device() -> (Device, MutexGuard<'static, ()>) {
    static LOCK: Mutex<()> = Mutex::new(());
    let alone = LOCK.lock().unwrap_or_else(|broken| broken.into_inner());
    (Device::flex().autodiff(), alone)
}

/// Values that look random and are the same in every run.
pub(crate) fn values<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0)
        .collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Named tensors; `None` is a missing gradient.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Bits(Vec<(String, Option<TensorData>)>);

impl Bits {
    pub(crate) fn add<const D: usize>(&mut self, name: &str, tensor: Option<Tensor<D>>) {
        let data = tensor.map(|tensor| tensor.inner().into_data());
        self.0.push((name.to_string(), data));
    }

    /// The gradients and the frozen tensors of `model`, running statistics included.
    pub(crate) fn add_model<M: Module>(&mut self, model: &M, gradients: &Gradients) {
        self.add_model_of(model, &[gradients]);
    }

    /// The same of several backward passes, of which one has the gradient of a parameter.
    pub(crate) fn add_model_of<M: Module>(&mut self, model: &M, gradients: &[&Gradients]) {
        // Applies pending running statistics.
        let _ = model.valid();
        model.visit(&mut Collect {
            bits: self,
            gradients,
            path: Vec::new(),
        });
    }

    /// Names of the tensors that are not the same in `other`.
    pub(crate) fn differing(&self, other: &Self) -> Vec<&str> {
        assert_eq!(self.0.len(), other.0.len());
        let pairs = self.0.iter().zip(&other.0);
        let differing = pairs.filter(|(own, other)| own != other);
        differing.map(|((name, _), _)| name.as_str()).collect()
    }

    /// Asserts that all tensors are those of `other` to rounding.
    pub(crate) fn assert_close(&self, other: &Self, tolerance: Tolerance<f32>) {
        for ((name, own), (_, other)) in self.0.iter().zip(&other.0) {
            println!("{name}");
            if let (Some(own), Some(other)) = (own, other) {
                own.assert_approx_eq(other, tolerance);
            }
        }
    }

    pub(crate) fn missing(&self) -> Vec<&str> {
        let missing = self.0.iter().filter(|(_, data)| data.is_none());
        missing.map(|(name, _)| name.as_str()).collect()
    }
}

struct Collect<'a> {
    bits: &'a mut Bits,
    gradients: &'a [&'a Gradients],
    path: Vec<String>,
}

impl ModuleVisitor for Collect<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.base();
        let path = self.path.join(".");
        match tensor.is_require_grad() {
            true => {
                let mut found = self.gradients.iter().filter_map(|all| tensor.grad(all));
                let gradient = found.next();
                assert!(found.next().is_none(), "two gradients of {path}");
                self.bits.add(&path, gradient);
            }
            false => self.bits.add(&path, Some(tensor)),
        }
    }
}
