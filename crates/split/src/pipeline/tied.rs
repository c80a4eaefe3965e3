//! Parameters that several stages read. One stage holds each; the others borrow its value and return its gradient.

use std::rc::Rc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use paceline_nn::tape::Point;

/// A parameter in a model on its way through a stage that holds it.
#[derive(Clone)]
pub(super) struct Lent {
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    read: Rc<dyn Fn() -> TensorData>,
    deposit: Rc<dyn Fn(Point, TensorData) -> Point>,
}

impl Lent {
    /// `None` if the model does not have the parameter.
    pub(super) fn find<M: Module>(model: &M, id: ParamId) -> Option<Self> {
        let mut find = Find { id, found: None };
        model.visit(&mut find);
        find.found
    }

    /// Its value, as the model computes with it.
    pub(super) fn value(&self) -> TensorData {
        (self.read)()
    }

    /// Adds a borrower's gradient to those of this stage in the backward pass from `tip`.
    pub(super) fn deposit(&self, tip: Point, gradient: TensorData) -> Point {
        (self.deposit)(tip, gradient)
    }
}

struct Find {
    id: ParamId,
    found: Option<Lent>,
}

impl ModuleVisitor for Find {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.id != self.id || self.found.is_some() {
            return;
        }
        let tensor = param.val();
        let values = tensor.clone();
        let device = tensor.device().inner();
        self.found = Some(Lent {
            shape: tensor.dims().to_vec(),
            dtype: tensor.dtype(),
            read: Rc::new(move || values.clone().inner().into_data()),
            deposit: Rc::new(move |tip: Point, gradient: TensorData| {
                let dtype = gradient.dtype();
                let gradient = Tensor::<D>::from_data(gradient, (&device, dtype));
                tip.deposit(tensor.clone(), move || Some(gradient))
            }),
        });
    }
}

/// A borrowed parameter, in the backward pass of the stage that borrows it.
pub(super) struct Borrowed(Box<dyn FnOnce(&mut Gradients) -> TensorData>);

impl Borrowed {
    /// The stage's gradient; zeros if it did not use the parameter.
    pub(super) fn gradient(self, gradients: &mut Gradients) -> TensorData {
        (self.0)(gradients)
    }
}

/// `model` with `value` in place of parameter `id`, as a leaf of the tape if it is trained.
pub(super) fn borrow<M: Module>(
    model: M,
    (id, is_trained): (ParamId, bool),
    value: &TensorData,
    device: &Device,
) -> (M, Option<Borrowed>) {
    let mut fill = Fill {
        id,
        is_trained,
        value,
        device,
        borrowed: None,
    };
    let model = model.map(&mut fill);
    (model, fill.borrowed)
}

struct Fill<'a> {
    id: ParamId,
    is_trained: bool,
    value: &'a TensorData,
    device: &'a Device,
    borrowed: Option<Borrowed>,
}

impl ModuleMapper for Fill<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if param.id != self.id {
            return param;
        }
        let (id, _, mapper) = param.consume();
        let dtype = self.value.dtype();
        let mut leaf = Tensor::<D>::from_data(self.value.clone(), (self.device, dtype));
        if !self.is_trained {
            return Param::from_mapped_value(id, leaf, mapper);
        }
        if leaf.is_autodiff() {
            leaf = leaf.require_grad();
        }
        let own = leaf.clone();
        self.borrowed = Some(Borrowed(Box::new(move |gradients| {
            let zeros = own.clone().inner().zeros_like();
            own.grad_remove(gradients).unwrap_or(zeros).into_data()
        })));
        Param::from_mapped_value(id, leaf, mapper)
    }
}
