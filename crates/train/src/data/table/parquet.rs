//! Parquet: columns of numbers, booleans, dates and text, a block of rows at a time.

use std::fs::File;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;

use ::parquet::basic::{Compression, ConvertedType, LogicalType, TimeUnit, Type};
use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use ::parquet::data_type::DataType;
use ::parquet::errors::ParquetError;
use ::parquet::file::reader::{FileReader, SerializedFileReader};
use ::parquet::schema::types::{ColumnDescPtr, ColumnDescriptor};
use half::f16;

use super::json::Value;
use crate::data::DataProblem;

/// The first bytes of every Parquet file.
pub(super) const MAGIC: &[u8] = b"PAR1";

/// Most rows, and about as many cells, of a block.
const BLOCK_ROWS: usize = 1024;
const BLOCK_CELLS: usize = 1 << 20;

/// The rows of a file.
///
/// *Cost*: a block, and a page of each column.
pub(super) struct Parquet {
    file: SerializedFileReader<File>,
    columns: Vec<Column>,
    /// The next row group, and rows of the one before it that were not read yet.
    group: usize,
    left: usize,
    /// Rows of the block that were not returned yet.
    ahead: usize,
    /// Rows that were returned.
    row: u64,
}

/// A column of a schema's first level.
struct Column {
    /// Its place among all columns, if its type can be read and its values are wanted.
    leaf: Option<(usize, ColumnDescPtr)>,
    reader: Option<ColumnReader>,
    /// Its part of the block.
    block: std::vec::IntoIter<Option<Value>>,
}

/// A row's number, from 1, and its values by column.
type NumberedRow = (u64, Vec<Option<Value>>);

impl Parquet {
    /// Opens a file and returns the names of its columns too.
    ///
    /// *Errors*: no whole Parquet file; no column that can be read.
    pub(super) fn open(file: File) -> Result<(Self, Vec<String>), DataProblem> {
        let file = guarded(|| SerializedFileReader::new(file))?;
        let schema = file.metadata().file_metadata().schema_descr_ptr();
        let (mut names, mut columns): (Vec<String>, Vec<Column>) = (Vec::new(), Vec::new());
        for (at, column) in schema.columns().iter().enumerate() {
            let root = schema.get_column_root(at);
            let is_flat = root.is_primitive() && column.max_rep_level() == 0;
            // The columns of a struct come one after another.
            if names.last().is_some_and(|last| last == root.name()) && !is_flat {
                continue;
            }
            names.push(root.name().to_owned());
            columns.push(Column {
                leaf: (is_flat && is_readable(column)).then(|| (at, Arc::clone(column))),
                reader: None,
                block: Vec::new().into_iter(),
            });
        }
        if columns.iter().all(|column| column.leaf.is_none()) {
            let problem = "no column of numbers, booleans, dates or text";
            return Err(DataProblem::new(problem));
        }
        let parquet = Self {
            file,
            columns,
            group: 0,
            left: 0,
            ahead: 0,
            row: 0,
        };
        Ok((parquet, names))
    }

    /// Reads no values in columns that are not wanted.
    pub(super) fn only(&mut self, wanted: impl Fn(usize) -> bool) {
        for (at, column) in self.columns.iter_mut().enumerate() {
            column.leaf.take_if(|_| !wanted(at));
        }
    }

    /// The next row.
    ///
    /// *Errors*: a damaged file.
    pub(super) fn next(&mut self) -> Result<Option<NumberedRow>, DataProblem> {
        while self.ahead == 0 {
            if self.left > 0 {
                self.read_block()?;
            } else if !self.open_group()? {
                return Ok(None);
            }
        }
        self.ahead -= 1;
        self.row += 1;
        let columns = self.columns.iter_mut();
        let value = |column: &mut Column| match column.leaf {
            Some(_) => column.block.next().flatten(),
            None => Some(Value::Opaque),
        };
        Ok(Some((self.row, columns.map(value).collect())))
    }

    /// Goes to the next row group, if there is one.
    fn open_group(&mut self) -> Result<bool, DataProblem> {
        if self.group == self.file.num_row_groups() {
            return Ok(false);
        }
        let group = guarded(|| self.file.get_row_group(self.group))?;
        for column in &mut self.columns {
            if let Some((at, _)) = column.leaf {
                let codec = group.metadata().columns().get(at).map(|c| c.compression());
                check_codec(codec)?;
                column.reader = Some(guarded(|| group.get_column_reader(at))?);
            }
        }
        self.left = usize::try_from(group.metadata().num_rows()).unwrap_or(0);
        self.group += 1;
        Ok(true)
    }

    /// Reads the next rows of the group, which has some.
    ///
    /// *Errors*: a damaged file.
    fn read_block(&mut self) -> Result<(), DataProblem> {
        let most = BLOCK_CELLS / self.columns.len().max(1);
        let rows = self.left.min(most.clamp(1, BLOCK_ROWS));
        for column in &mut self.columns {
            let (Some((_, description)), Some(reader)) = (&column.leaf, &mut column.reader) else {
                continue;
            };
            let values = guarded(|| values(reader, description, rows))?;
            if values.len() != rows {
                let group = self.group;
                return Err(DataProblem::incomplete(format!(
                    "no whole Parquet file: row group {group} has fewer rows than it says"
                )));
            }
            column.block = values.into_iter();
        }
        self.left -= rows;
        self.ahead = rows;
        Ok(())
    }
}

/// The result of the library, which panics on some damaged pages.
fn guarded<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, DataProblem> {
    // Nothing is read on after an error.
    match panic::catch_unwind(AssertUnwindSafe(read)) {
        Ok(read) => read.map_err(|error| damaged(&error)),
        Err(_) => Err(DataProblem::incomplete(
            "no whole Parquet file: a page does not have what it says".to_owned(),
        )),
    }
}

fn damaged(error: &ParquetError) -> DataProblem {
    DataProblem::incomplete(format!("no whole Parquet file: {error}"))
}

/// *Errors*: a compression that is not built in.
fn check_codec(codec: Option<Compression>) -> Result<(), DataProblem> {
    use Compression::{BROTLI, LZ4, LZ4_RAW, LZO};
    let name = match codec {
        Some(BROTLI(_)) => "Brotli",
        Some(LZ4 | LZ4_RAW) => "LZ4",
        Some(LZO) => "LZO",
        _ => return Ok(()),
    };
    Err(DataProblem::new(format!("compressed with {name}"))
        .with_hint("write the file with Snappy, Zstandard, gzip or no compression"))
}

/// Whether the values of a column are numbers, booleans, dates or text.
fn is_readable(column: &ColumnDescriptor) -> bool {
    match (column.physical_type(), column.logical_type_ref()) {
        (Type::BYTE_ARRAY, Some(logical)) => matches!(
            logical,
            LogicalType::String | LogicalType::Enum | LogicalType::Json | LogicalType::Decimal(_)
        ),
        (Type::FIXED_LEN_BYTE_ARRAY, Some(LogicalType::Float16)) => true,
        (Type::FIXED_LEN_BYTE_ARRAY, _) => is_decimal(column),
        (Type::BYTE_ARRAY, None) => column.converted_type() != ConvertedType::BSON,
        _ => true,
    }
}

fn is_decimal(column: &ColumnDescriptor) -> bool {
    matches!(column.logical_type_ref(), Some(LogicalType::Decimal(_)))
        || column.converted_type() == ConvertedType::DECIMAL
}

/// What the integers of a column are divided by: times become seconds since 1970, or since midnight. Dates are days since 1970.
fn divisor(column: &ColumnDescriptor) -> f64 {
    match (column.logical_type_ref(), column.converted_type()) {
        (Some(LogicalType::Timestamp(time) | LogicalType::Time(time)), _) => match time.unit {
            TimeUnit::MILLIS => 1e3,
            TimeUnit::MICROS => 1e6,
            TimeUnit::NANOS => 1e9,
        },
        (_, ConvertedType::TIMESTAMP_MILLIS | ConvertedType::TIME_MILLIS) => 1e3,
        (_, ConvertedType::TIMESTAMP_MICROS | ConvertedType::TIME_MICROS) => 1e6,
        (Some(LogicalType::Decimal(decimal)), _) => 10_f64.powi(decimal.scale),
        (_, ConvertedType::DECIMAL) => 10_f64.powi(column.type_scale()),
        _ => 1.0,
    }
}

fn is_unsigned(column: &ColumnDescriptor) -> bool {
    use ConvertedType::{UINT_8, UINT_16, UINT_32, UINT_64};
    match column.logical_type_ref() {
        Some(LogicalType::Integer(integer)) => !integer.is_signed,
        _ => matches!(
            column.converted_type(),
            UINT_8 | UINT_16 | UINT_32 | UINT_64
        ),
    }
}

/// The values of the next rows of a group, at most so many.
fn values(
    reader: &mut ColumnReader,
    column: &ColumnDescriptor,
    rows: usize,
) -> Result<Vec<Option<Value>>, ParquetError> {
    let (is_unsigned, divisor) = (is_unsigned(column), divisor(column));
    let integer = |integer: i128| match divisor {
        1.0 => Some(Value::Number(integer as f64, integer.to_string())),
        divisor => number(integer as f64 / divisor),
    };
    let levels = column.max_def_level();
    match reader {
        ColumnReader::BoolColumnReader(reader) => of(reader, levels, rows, |is| {
            Some(Value::Number(f64::from(*is), is.to_string()))
        }),
        ColumnReader::Int32ColumnReader(reader) => of(reader, levels, rows, |value| {
            integer(match is_unsigned {
                true => value.cast_unsigned().into(),
                false => (*value).into(),
            })
        }),
        ColumnReader::Int64ColumnReader(reader) => of(reader, levels, rows, |value| {
            integer(match is_unsigned {
                true => value.cast_unsigned().into(),
                false => (*value).into(),
            })
        }),
        // Times as Impala and old versions of Spark write them.
        ColumnReader::Int96ColumnReader(reader) => of(reader, levels, rows, |time| {
            number(time.to_micros() as f64 / 1e6)
        }),
        ColumnReader::FloatColumnReader(reader) => {
            of(reader, levels, rows, |value| number((*value).into()))
        }
        ColumnReader::DoubleColumnReader(reader) => {
            of(reader, levels, rows, |value| number(*value))
        }
        ColumnReader::ByteArrayColumnReader(reader) => match is_decimal(column) {
            true => of(reader, levels, rows, |bytes| {
                integer(big_endian(bytes.data())?)
            }),
            false => of(reader, levels, rows, |bytes| text(bytes.data())),
        },
        ColumnReader::FixedLenByteArrayColumnReader(reader) => match is_decimal(column) {
            true => of(reader, levels, rows, |bytes| {
                integer(big_endian(bytes.data())?)
            }),
            false => of(reader, levels, rows, |bytes| {
                let bits = bytes.data().try_into().ok()?;
                number(f16::from_le_bytes(bits).into())
            }),
        },
    }
}

/// The next values of a column, where `levels` stands for one that is there.
fn of<T: DataType>(
    reader: &mut ColumnReaderImpl<T>,
    levels: i16,
    rows: usize,
    value: impl Fn(&T::T) -> Option<Value>,
) -> Result<Vec<Option<Value>>, ParquetError> {
    let (mut known, mut found) = (Vec::new(), Vec::new());
    reader.read_records(rows, Some(&mut found), None, &mut known)?;
    let mut known = known.iter().map(value);
    if levels == 0 {
        return Ok(known.collect());
    }
    let of_level = |level: i16| match level == levels {
        true => known.next().flatten(),
        false => None,
    };
    Ok(found.into_iter().map(of_level).collect())
}

/// A number; `NaN` stands for none, as in pandas.
fn number(number: f64) -> Option<Value> {
    (!number.is_nan()).then(|| Value::Number(number, number.to_string()))
}

/// The signed integer of a decimal; none if it is larger than any that pandas or Spark write.
fn big_endian(bytes: &[u8]) -> Option<i128> {
    let negative = bytes.first()? >> 7 == 1;
    let mut all = [if negative { 0xff } else { 0 }; 16];
    let start = all.len().checked_sub(bytes.len())?;
    all[start..].copy_from_slice(bytes);
    Some(i128::from_be_bytes(all))
}

fn text(bytes: &[u8]) -> Option<Value> {
    match str::from_utf8(bytes) {
        Ok("") => None,
        Ok(text) => Some(Value::Word(text.to_owned())),
        Err(_) => Some(Value::Opaque),
    }
}
