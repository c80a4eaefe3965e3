//! Attention on the kernels of [`paceline_kernels`].

use burn::tensor::Tensor;
use burn::tensor::module::attention as burns;
use burn::tensor::ops::AttentionModuleOptions;
use paceline_kernels::Attention;

use crate::tape::{Point, Slot};
use crate::values::{self, Values, of_process};

/// Attention of several heads: each query's mean of the values, weighted by the softmax over its products with the keys.
///
/// On CPUs and in f32 it is computed on the kernels of this crate's own, block by block and without a tensor of all weights; elsewhere it
/// is Burn's attention.
///
/// *Shape*: queries `[batch, length, width]` with the columns of each head side by side, keys and values `[batch, keys, width]`, to
/// `[batch, length, width]`. If it is causal there are as many keys as queries, and a query sees no key after its own place.
///
/// *Numerics*: the products are divided by the square root of a head's width. On the kernels the bits are the same on any number of
/// threads and with any instruction set (`PACELINE_ISA`). A NaN or an infinity may reach up to 63 queries before it, with a weight of 0.
///
/// *Memory*: on the kernels, queries, keys, values and the output until the backward pass.
///
/// # Panics
///
/// If `heads` does not divide the width, if there are no keys, or other than `length` keys for causal attention, and as
/// [`linear`](crate::linear).
///
/// *Source*: `torch.nn.functional.scaled_dot_product_attention`.
///
/// *Example*:
/// ```
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::attention;
///
/// let x = Tensor::<3>::ones([2, 5, 8], &Device::flex());
/// assert_eq!(attention([x.clone(), x.clone(), x], 4, true).dims(), [2, 5, 8]);
/// ```
pub fn attention(inputs: [Tensor<3>; 3], heads: usize, is_causal: bool) -> Tensor<3> {
    let [batch, length, width] = inputs[0].dims();
    assert!(
        heads > 0 && width.is_multiple_of(heads),
        "{heads} heads do not divide a width of {width}"
    );
    let keys = inputs[1].dims()[1];
    assert!(
        !is_causal || keys == length,
        "causal attention of {length} queries and {keys} keys"
    );
    let [Some(q), Some(k), Some(v)] = inputs.each_ref().map(Values::of) else {
        let [query, key, value] = inputs.map(|x| {
            let [batch, length, _] = x.dims();
            let x = x.reshape([batch, length, heads, width / heads]);
            x.swap_dims(1, 2)
        });
        let options = AttentionModuleOptions {
            is_causal,
            ..AttentionModuleOptions::default()
        };
        let y = burns(query, key, value, None, None, options);
        return y.swap_dims(1, 2).reshape([batch, length, width]);
    };
    let attention = Attention {
        sequences: batch,
        heads,
        queries: length,
        keys,
        width: width / heads,
        causal: is_causal,
    };
    let kernels = of_process();
    let (output, sums) = kernels.attention(&attention, [q.slice(), k.slice(), v.slice()]);
    let shapes = inputs.each_ref().map(Tensor::dims);
    let output = values::tensor(output, shapes[0]);
    let slots = [(); 3].map(|()| Slot::default());
    let tip = Point::origin(&inputs[0]);
    let tip = inputs
        .into_iter()
        .zip(&slots)
        .fold(tip, |tip, (input, slot)| tip.deposit_from(input, slot));
    tip.output(output.clone(), move |of_output| {
        let (output, given) = (
            Values::of_gradient(&output),
            Values::of_gradient(&of_output),
        );
        let inputs = [q.slice(), k.slice(), v.slice()];
        let gradients =
            kernels.attention_gradients(&attention, inputs, &sums, output.slice(), given.slice());
        let gradients = [gradients.queries, gradients.keys, gradients.values];
        for ((slot, gradient), shape) in slots.iter().zip(gradients).zip(shapes) {
            slot.put(Some(values::tensor(gradient, shape)));
        }
    })
}
