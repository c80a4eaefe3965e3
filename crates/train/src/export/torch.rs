//! A file as `torch.save` writes it for a dictionary of tensors: a pickle and the tensors' bytes in a zip archive.
//!
//! *Source*: the format of PyTorch since 1.6, read back with `torch.load(weights_only=True)` by a test.

use std::fs::File;
use std::io::{self, Write};

use burn::tensor::TensorData;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// Alignment of a tensor's bytes, as `torch.save` has it, so that they can be mapped into memory.
const ALIGNMENT: u16 = 64;

/// Writes `tensors`, which are of type f32, as a dictionary in this order.
///
/// *Errors*: the system's.
pub(super) fn write(file: &File, tensors: &[(String, TensorData)]) -> io::Result<()> {
    let mut archive = ZipWriter::new(file);
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .with_alignment(ALIGNMENT);
    let mut put = |name: &str, bytes: &[u8]| {
        // The archive must know before the bytes come.
        let is_large = bytes.len() >= u32::MAX as usize;
        archive.start_file(format!("archive/{name}"), options.large_file(is_large))?;
        archive.write_all(bytes)
    };
    put("data.pkl", &dictionary(tensors))?;
    put("byteorder", b"little")?;
    for (index, (_, data)) in tensors.iter().enumerate() {
        put(&format!("data/{index}"), data.as_bytes())?;
    }
    put("version", b"3\n")?;
    archive.finish()?;
    Ok(())
}

/// The pickle, whose tensors refer to the archive's files.
fn dictionary(tensors: &[(String, TensorData)]) -> Vec<u8> {
    let mut pickle = Pickle(b"\x80\x02".to_vec());
    pickle.op(EMPTY_DICT);
    pickle.op(MARK);
    for (index, (name, data)) in tensors.iter().enumerate() {
        let shape: Vec<usize> = data.shape().to_vec();
        let stride = |axis: usize| shape[axis + 1..].iter().product();
        let strides: Vec<usize> = (0..shape.len()).map(stride).collect();
        pickle.text(name);
        pickle.global("torch._utils", "_rebuild_tensor_v2");
        pickle.op(MARK);
        pickle.op(MARK);
        pickle.text("storage");
        pickle.global("torch", "FloatStorage");
        pickle.text(&index.to_string());
        pickle.text("cpu");
        pickle.number(shape.iter().product());
        pickle.op(TUPLE);
        pickle.op(PERSISTENT_ID);
        pickle.number(0);
        pickle.numbers(&shape);
        pickle.numbers(&strides);
        pickle.op(NEW_FALSE);
        pickle.global("collections", "OrderedDict");
        pickle.op(EMPTY_TUPLE);
        pickle.op(REDUCE);
        pickle.op(TUPLE);
        pickle.op(REDUCE);
    }
    pickle.op(SET_ITEMS);
    pickle.op(STOP);
    pickle.0
}

/// Operations of Python's pickle protocol 2.
const MARK: u8 = b'(';
const STOP: u8 = b'.';
const EMPTY_DICT: u8 = b'}';
const EMPTY_TUPLE: u8 = b')';
const TUPLE: u8 = b't';
const REDUCE: u8 = b'R';
const GLOBAL: u8 = b'c';
const SET_ITEMS: u8 = b'u';
const UNICODE: u8 = b'X';
const LONG: u8 = 0x8a;
const NEW_FALSE: u8 = 0x89;
const PERSISTENT_ID: u8 = b'Q';

struct Pickle(Vec<u8>);

impl Pickle {
    fn op(&mut self, op: u8) {
        self.0.push(op);
    }

    fn text(&mut self, text: &str) {
        self.op(UNICODE);
        self.0.extend((text.len() as u32).to_le_bytes());
        self.0.extend(text.as_bytes());
    }

    fn global(&mut self, module: &str, name: &str) {
        self.op(GLOBAL);
        self.0.extend(format!("{module}\n{name}\n").as_bytes());
    }

    fn number(&mut self, number: usize) {
        let bytes = (number as i64).to_le_bytes();
        self.op(LONG);
        self.op(bytes.len() as u8);
        self.0.extend(bytes);
    }

    fn numbers(&mut self, numbers: &[usize]) {
        self.op(MARK);
        numbers.iter().for_each(|number| self.number(*number));
        self.op(TUPLE);
    }
}
