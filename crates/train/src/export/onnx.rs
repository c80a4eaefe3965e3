//! The encoding of an ONNX model: nodes over named values.
//!
//! *Source*: `onnx.proto3` of ONNX 1.16, of which this writes the few fields that it needs.

use burn::tensor::TensorData;

use crate::protobuf::Message;

/// Version of the file format.
const IR_VERSION: u64 = 9;
/// Version of the operators: the first with a Gelu.
const OPSET: u64 = 20;

/// Most bytes of a model, because readers measure messages in signed 32-bit numbers.
pub(super) const BYTES_MAX: usize = i32::MAX as usize;

/// The types of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Float = 1,
    Int64 = 7,
}

/// A length that is known, or the name of one that is not.
#[derive(Clone, Debug)]
pub(super) enum Dim {
    Known(usize),
    Named(&'static str),
}

/// A value of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Value(String);

/// An attribute of a node.
pub(super) enum Attribute<'a> {
    Int(i64),
    Float(f32),
    Text(&'a str),
    Ints(&'a [i64]),
}

/// A graph that is being built.
#[derive(Default)]
pub(super) struct Graph {
    message: Message,
    values: usize,
}

impl Graph {
    /// A new input.
    pub(super) fn input(&mut self, name: &str, of: Type, shape: &[Dim]) -> Value {
        self.message.message(11, &described(name, of, shape));
        Value(name.to_owned())
    }

    /// Makes a value an output of the graph, under this name.
    pub(super) fn output(&mut self, value: &Value, name: &str, shape: &[Dim]) {
        let mut node = Message::default();
        node.text(1, &value.0);
        node.text(2, name);
        node.text(4, "Identity");
        self.message.message(1, &node);
        self.message
            .message(12, &described(name, Type::Float, shape));
    }

    /// A tensor of the model.
    pub(super) fn weight(&mut self, name: &str, data: &TensorData) -> Value {
        self.constant(name, Type::Float, data.shape().as_slice(), data.as_bytes())
    }

    /// A vector of whole numbers.
    pub(super) fn ints(&mut self, numbers: &[i64]) -> Value {
        let name = self.name("ints");
        let bytes: Vec<u8> = numbers
            .iter()
            .flat_map(|number| number.to_le_bytes())
            .collect();
        self.constant(&name, Type::Int64, &[numbers.len()], &bytes)
    }

    /// A whole number.
    pub(super) fn int(&mut self, number: i64) -> Value {
        let name = self.name("int");
        self.constant(&name, Type::Int64, &[], &number.to_le_bytes())
    }

    /// A tensor of numbers.
    pub(super) fn floats(&mut self, shape: &[usize], numbers: &[f32]) -> Value {
        let name = self.name("floats");
        let bytes: Vec<u8> = numbers
            .iter()
            .flat_map(|number| number.to_le_bytes())
            .collect();
        self.constant(&name, Type::Float, shape, &bytes)
    }

    fn constant(&mut self, name: &str, of: Type, shape: &[usize], bytes: &[u8]) -> Value {
        let mut tensor = Message::default();
        shape.iter().for_each(|len| tensor.number(1, *len as u64));
        tensor.number(2, of as u64);
        tensor.text(8, name);
        tensor.bytes(9, bytes);
        self.message.message(5, &tensor);
        Value(name.to_owned())
    }

    /// The result of an operator.
    pub(super) fn node(
        &mut self,
        operator: &str,
        inputs: &[&Value],
        attributes: &[(&str, Attribute<'_>)],
    ) -> Value {
        let output = self.name(operator);
        let mut node = Message::default();
        inputs.iter().for_each(|input| node.text(1, &input.0));
        node.text(2, &output);
        node.text(3, &output);
        node.text(4, operator);
        for (name, attribute) in attributes {
            node.message(5, &attribute.encoded(name));
        }
        self.message.message(1, &node);
        Value(output)
    }

    fn name(&mut self, kind: &str) -> String {
        self.values += 1;
        format!("{kind}_{}", self.values)
    }

    /// The file of a model with this graph.
    pub(super) fn model<'a>(
        mut self,
        name: &str,
        metadata: impl Iterator<Item = (&'a String, &'a String)>,
    ) -> Vec<u8> {
        self.message.text(2, name);
        let mut opset = Message::default();
        opset.text(1, "");
        opset.number(2, OPSET);
        let mut model = Message::default();
        model.number(1, IR_VERSION);
        model.text(2, "paceline");
        model.text(3, env!("CARGO_PKG_VERSION"));
        model.message(7, &self.message);
        model.message(8, &opset);
        for (key, value) in metadata {
            let mut entry = Message::default();
            entry.text(1, key);
            entry.text(2, value);
            model.message(14, &entry);
        }
        model.encoded()
    }
}

/// An input or output.
fn described(name: &str, of: Type, shape: &[Dim]) -> Message {
    let mut dims = Message::default();
    for dim in shape {
        let mut described = Message::default();
        match dim {
            Dim::Known(len) => described.number(1, *len as u64),
            Dim::Named(name) => described.text(2, name),
        }
        dims.message(1, &described);
    }
    let (mut tensor, mut typed, mut value) =
        (Message::default(), Message::default(), Message::default());
    tensor.number(1, of as u64);
    tensor.message(2, &dims);
    typed.message(1, &tensor);
    value.text(1, name);
    value.message(2, &typed);
    value
}

impl Attribute<'_> {
    fn encoded(&self, name: &str) -> Message {
        let mut message = Message::default();
        message.text(1, name);
        let kind = match self {
            Self::Float(number) => {
                message.float(2, *number);
                1
            }
            Self::Int(number) => {
                message.number(3, *number as u64);
                2
            }
            Self::Text(text) => {
                message.text(4, text);
                3
            }
            Self::Ints(numbers) => {
                numbers
                    .iter()
                    .for_each(|number| message.number(8, *number as u64));
                7
            }
        };
        message.number(20, kind);
        message
    }
}
