//! Where in the backward pass the hooks fire, seen by probes between the layers: an order, not a time.

use std::sync::Mutex;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;

use super::*;

const LAYERS: usize = 8;

/// An event of the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// The gradient of this parameter was delivered.
    Gradient(usize),
    /// The pass reached the input of this layer: later layers are done, earlier ones have not begun.
    InputOf(usize),
}

#[derive(Default)]
struct Log(Mutex<Vec<Event>>);

impl Log {
    fn add(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }
}

impl GradientSink for Log {
    fn gradient(&self, index: usize, _gradient: Tensor<1>) {
        self.add(Event::Gradient(index));
    }
}

#[derive(Module, Debug)]
struct Deep {
    layers: Vec<Linear>,
}

/// Fails if Burn ever runs its tape in another order, because hooks then fire late or early.
#[test]
fn a_gradient_is_delivered_before_the_pass_reaches_the_layer_before() {
    let device = Device::flex().autodiff();
    let net = Deep {
        layers: (0..LAYERS)
            .map(|_| LinearConfig::new(4, 4).init(&device))
            .collect(),
    };
    // Two parameters a layer, in the order of registration.
    let ids = net
        .layers
        .iter()
        .flat_map(|layer| [layer.weight.id, layer.bias.as_ref().expect("a bias").id]);
    let index: HashMap<ParamId, usize> = ids.enumerate().map(|(at, id)| (id, at)).collect();
    let tokens = Tokens::new(index.len(), &device);
    let log = Arc::new(Log::default());
    let sink: Arc<dyn GradientSink> = log.clone();
    let (hooked, count) = hook_model(net, &index, &tokens, &sink, None);
    assert_eq!(count, 2 * LAYERS);

    let mut x = Tensor::<2>::ones([3, 4], &device).require_grad();
    for (layer, linear) in hooked.layers.iter().enumerate() {
        let log = log.clone();
        x = custom(x.clone(), x, &Point::on(&device), move |gradient| {
            log.add(Event::InputOf(layer));
            Some(gradient)
        });
        x = relu(linear.forward(x));
    }
    drop(x.sum().backward());

    let events = log.0.lock().unwrap().clone();
    let place = |event| {
        let place = events.iter().position(|e| *e == event);
        place.unwrap_or_else(|| panic!("{event:?} is missing in {events:?}"))
    };
    assert_eq!(events.len(), 3 * LAYERS, "{events:?}");
    for layer in 1..LAYERS {
        for parameter in [2 * layer, 2 * layer + 1] {
            let delivered = place(Event::Gradient(parameter));
            // One layer of slack: a hook is not tied to its own layer's last operation.
            assert!(
                delivered < place(Event::InputOf(layer - 1)),
                "parameter {parameter} came late: {events:?}"
            );
        }
    }
}
