//! A safetensors file, written and read one tensor at a time.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use burn::tensor::{BoolStore, Bytes, DType, TensorData};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

/// Size limit for reading a header, which is that of the `safetensors` crate.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes of the header's length, which begins a file.
const LEN_BYTES: u64 = 8;

/// A file that is being written.
pub(crate) struct TensorsFile<'a> {
    file: &'a File,
    /// Start and length of each tensor.
    places: HashMap<String, (u64, usize)>,
}

impl<'a> TensorsFile<'a> {
    /// Begins a file of tensors with these paths, shapes and types. It is whole once each has been [put](Self::put).
    pub(crate) fn new(
        mut file: &'a File,
        tensors: &[(String, Vec<usize>, DType)],
        metadata: BTreeMap<String, String>,
    ) -> io::Result<Self> {
        let typed = tensors.iter().map(|tensor| {
            let (name, _, dtype) = tensor;
            let found = DTYPES.iter().find(|(_, burn)| *burn == stored(*dtype));
            let (dtype, _) = found.ok_or_else(|| {
                let why = format!("{name} has type {dtype:?}, which safetensors lacks");
                io::Error::other(why)
            })?;
            Ok((*dtype, tensor))
        });
        let mut sorted = typed.collect::<io::Result<Vec<_>>>()?;
        // The format's order: large types first, which aligns all of them.
        sorted.sort_by(|(a, left), (b, right)| b.cmp(a).then(left.0.cmp(&right.0)));
        let mut end = 0;
        let infos = sorted.into_iter().map(|(kind, (name, shape, dtype))| {
            let start = end;
            end += shape.iter().product::<usize>() * stored(*dtype).size();
            let info = TensorInfo {
                dtype: kind,
                shape: shape.clone(),
                data_offsets: (start, end),
            };
            (name.clone(), info)
        });
        let infos: Vec<_> = infos.collect();
        let metadata = (!metadata.is_empty()).then(|| metadata.into_iter().collect());
        let header = Metadata::new(metadata, infos).map_err(io::Error::other)?;
        let mut encoded = serde_json::to_vec(&header)?;
        encoded.resize(encoded.len().next_multiple_of(8), b' ');
        file.write_all(&(encoded.len() as u64).to_le_bytes())?;
        file.write_all(&encoded)?;
        let data = LEN_BYTES + encoded.len() as u64;
        file.set_len(data + end as u64)?;
        let places = header.tensors().into_iter().map(|(name, info)| {
            let (start, end) = info.data_offsets;
            (name, (data + start as u64, end - start))
        });
        let places = places.collect();
        Ok(Self { file, places })
    }

    /// Writes a tensor.
    ///
    /// *Errors*: a tensor that was not announced, or with another size.
    pub(crate) fn put(&mut self, name: &str, data: &TensorData) -> io::Result<()> {
        let converted = (stored(data.dtype()) != data.dtype())
            .then(|| data.clone().convert_dtype(stored(data.dtype())));
        let bytes = converted.as_ref().unwrap_or(data).as_bytes();
        match self.places.get(name) {
            Some((start, len)) if *len == bytes.len() => self.file.write_all_at(bytes, *start),
            found => Err(io::Error::other(format!(
                "write {name}: expected {:?} bytes, got {}",
                found.map(|(_, len)| len),
                bytes.len()
            ))),
        }
    }
}

/// A tensor in a file.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) name: String,
    path: PathBuf,
    shape: Vec<usize>,
    dtype: DType,
    start: u64,
    len: u64,
}

impl Stored {
    /// The tensor, which is read when its values are. That panics if the file is gone then.
    pub(crate) fn lazy(&self) -> TensorData {
        let bytes = Bytes::from_file(&self.path, self.len, self.start);
        TensorData::from_bytes(bytes, self.shape.clone(), self.dtype)
    }

    pub(crate) fn read(&self) -> io::Result<TensorData> {
        let mut bytes = vec![0; self.len as usize];
        File::open(&self.path)?.read_exact_at(&mut bytes, self.start)?;
        Ok(TensorData::from_bytes_vec(
            bytes,
            self.shape.clone(),
            self.dtype,
        ))
    }
}

/// The tensors of a safetensors file, in the order of their names.
///
/// *Memory*: that of the file.
///
/// *Errors*: the system's, and a file that is not whole, in words.
pub fn read_safetensors(path: &Path) -> Result<Vec<(String, TensorData)>, String> {
    let (mut stored, _) = open(path)?;
    stored.sort_by(|one, other| one.name.cmp(&other.name));
    let read = stored.into_iter().map(|tensor| {
        let data = tensor.read();
        let data = data.map_err(|error| format!("{}: {error}", tensor.name))?;
        Ok((tensor.name, data))
    });
    read.collect()
}

type Header = (Vec<Stored>, BTreeMap<String, String>);

/// The tensors of a file, by path, and its metadata.
///
/// *Errors*: a file that is not whole.
pub(crate) fn open(path: &Path) -> Result<Header, String> {
    let read = || -> io::Result<(Vec<u8>, u64)> {
        let mut file = File::open(path)?;
        let size = file.metadata()?.len();
        let mut len = [0; LEN_BYTES as usize];
        file.read_exact(&mut len)?;
        let len = u64::from_le_bytes(len);
        if len > HEADER_BYTES_MAX.min(size) {
            // A header is never so long: other files begin with other bytes.
            return Err(io::Error::other("it is no safetensors file"));
        }
        let mut header = vec![0; len as usize];
        file.read_exact(&mut header)?;
        Ok((header, size))
    };
    let (header, size) = read().map_err(|error| error.to_string())?;
    let data = LEN_BYTES + header.len() as u64;
    let header: Metadata = serde_json::from_slice(&header).map_err(|error| error.to_string())?;
    let stored = header.tensors().into_iter().map(|(name, info)| {
        let dtype = DTYPES.iter().find(|(dtype, _)| *dtype == info.dtype);
        let (_, dtype) = dtype.ok_or_else(|| format!("{name} has type {:?}", info.dtype))?;
        let (start, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        let mut shape = info.shape.iter();
        let len = shape.try_fold(dtype.size(), |len, dim| len.checked_mul(*dim));
        if len.map(|len| len as u64) != end.checked_sub(start) || end > size - data {
            return Err(format!(
                "{name} of shape {:?} has bytes {start} to {end} of {}",
                info.shape,
                size - data
            ));
        }
        Ok(Stored {
            path: path.to_path_buf(),
            shape: info.shape.clone(),
            dtype: *dtype,
            start: data + start,
            len: end - start,
            name,
        })
    });
    let stored = stored.collect::<Result<Vec<_>, String>>()?;
    let metadata = header.metadata().clone().unwrap_or_default();
    Ok((stored, metadata.into_iter().collect()))
}

/// The type of a tensor in a file. Devices have several for booleans.
pub(crate) fn stored(dtype: DType) -> DType {
    match dtype {
        DType::Bool(_) => DType::Bool(BoolStore::Native),
        other => other,
    }
}

/// The types that safetensors and Burn share.
const DTYPES: [(Dtype, DType); 13] = [
    (Dtype::F64, DType::F64),
    (Dtype::F32, DType::F32),
    (Dtype::F16, DType::F16),
    (Dtype::BF16, DType::BF16),
    (Dtype::I64, DType::I64),
    (Dtype::I32, DType::I32),
    (Dtype::I16, DType::I16),
    (Dtype::I8, DType::I8),
    (Dtype::U64, DType::U64),
    (Dtype::U32, DType::U32),
    (Dtype::U16, DType::U16),
    (Dtype::U8, DType::U8),
    (Dtype::BOOL, DType::Bool(BoolStore::Native)),
];

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;
    use safetensors::tensor::TensorView;

    use super::*;

    #[test]
    fn a_file_has_the_bytes_that_the_safetensors_crate_writes() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        let tensors = [
            ("b", TensorData::new(vec![1.0f32, 2.0, 3.0], [3])),
            ("a", TensorData::new(vec![7u8], [1])),
            ("c", TensorData::new(vec![1i64, 2], [2, 1])),
            ("a.a", TensorData::new(vec![0.5f32], [1, 1])),
            ("d", TensorData::new(vec![true, false, true], [3])),
        ];
        let infos = tensors.iter();
        let infos: Vec<_> = infos
            .map(|(name, data)| ((*name).to_owned(), data.shape().to_vec(), data.dtype()))
            .collect();
        let metadata: BTreeMap<_, _> = [("key".to_owned(), "value".to_owned())].into();
        let file = File::create(&path).expect("created");
        let mut file = TensorsFile::new(&file, &infos, metadata.clone()).expect("begun");
        for (name, data) in &tensors {
            file.put(name, data).expect("written");
        }
        let views =
            tensors
                .iter()
                .zip([Dtype::F32, Dtype::U8, Dtype::I64, Dtype::F32, Dtype::BOOL]);
        let views = views.map(|((name, data), dtype)| {
            let view = TensorView::new(dtype, data.shape().to_vec(), data.as_bytes());
            (*name, view.expect("a view"))
        });
        let expected = safetensors::serialize(views, Some(metadata.clone().into_iter().collect()));
        let written = std::fs::read(&path).expect("read");
        assert_eq!(written, expected.expect("encoded"));
        SafeTensors::deserialize(&written).expect("whole");

        let (stored, read) = open(&path).expect("whole");
        assert_eq!((stored.len(), read), (tensors.len(), metadata));
        for (name, data) in &tensors {
            let found = stored.iter().find(|stored| stored.name == *name);
            let found = found.expect("announced");
            assert_eq!(found.lazy(), *data);
            assert_eq!(found.read().expect("read"), *data);
        }
        let wrong = file.put("b", &tensors[1].1).expect_err("another size");
        assert!(
            wrong.to_string().starts_with("write b: expected"),
            "{wrong}"
        );
        std::fs::write(&path, &written[..written.len() - 1]).expect("cut");
        let error = open(&path).expect_err("cut");
        assert!(error.contains("has bytes"), "{error}");
    }
}
