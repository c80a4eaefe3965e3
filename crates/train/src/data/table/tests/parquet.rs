//! Parquet files as other programs write them, and damaged ones.

use std::sync::Arc;

use ::parquet::basic::{Compression, GzipLevel, ZstdLevel};
use ::parquet::data_type::{
    BoolType, ByteArray, ByteArrayType, DataType, DoubleType, FixedLenByteArray,
    FixedLenByteArrayType, FloatType, Int32Type, Int64Type,
};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use ::parquet::schema::parser::parse_message_type;
use half::f16;

use super::super::parquet::Parquet;
use super::*;

type Group<'a, 'b> = SerializedRowGroupWriter<'a, &'b mut Vec<u8>>;

/// A file whose row groups these functions write.
fn file(schema: &str, codec: Compression, groups: &[&dyn Fn(&mut Group<'_, '_>)]) -> Vec<u8> {
    let schema = Arc::new(parse_message_type(schema).expect("a schema"));
    let properties = WriterProperties::builder().set_compression(codec).build();
    let mut bytes = Vec::new();
    let mut writer =
        SerializedFileWriter::new(&mut bytes, schema, Arc::new(properties)).expect("memory");
    for write in groups {
        let mut group = writer.next_row_group().expect("memory");
        write(&mut group);
        group.close().expect("memory");
    }
    writer.close().expect("memory");
    bytes
}

/// Writes the next column, which is optional.
fn column<T: DataType>(group: &mut Group<'_, '_>, values: &[Option<T::T>]) {
    let levels: Vec<i16> = values.iter().map(|v| v.is_some().into()).collect();
    let values: Vec<T::T> = values.iter().flatten().cloned().collect();
    let mut column = group.next_column().expect("memory").expect("a column");
    let writer = column.typed::<T>();
    writer
        .write_batch(&values, Some(&levels), None)
        .expect("it fits");
    column.close().expect("memory");
}

fn texts(texts: &[Option<&str>]) -> Vec<Option<ByteArray>> {
    texts.iter().map(|text| text.map(ByteArray::from)).collect()
}

const SCHEMA: &str =
    "message m { optional double x; optional binary w (STRING); optional int64 label; }";

/// A table of two row groups.
fn table(codec: Compression) -> Vec<u8> {
    let rows = |x: &'static [Option<f64>], w: &'static [Option<&str>], labels: &'static [i64]| {
        move |group: &mut Group<'_, '_>| {
            column::<DoubleType>(group, x);
            column::<ByteArrayType>(group, &texts(w));
            let labels: Vec<Option<i64>> = labels.iter().copied().map(Some).collect();
            column::<Int64Type>(group, &labels);
        }
    };
    let one = rows(
        &[Some(1.5), None, Some(3.0)],
        &[Some("a"), Some("b"), None],
        &[0, 1, 0],
    );
    let two = rows(
        &[Some(-2.0), Some(f64::NAN)],
        &[Some(""), Some("a")],
        &[1, 1],
    );
    file(SCHEMA, codec, &[&one, &two])
}

fn fill(options: &mut TableOptions) {
    options.missing_values = MissingValues::Fill;
}

#[test]
fn parquet_is_the_same_table() {
    let csv = File::new("x,w,label\n1.5,a,0\n,b,1\n3,,0\n-2,,1\n,a,1\n").with(fill);
    let csv = csv.load();
    for codec in [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(GzipLevel::default()),
        Compression::ZSTD(ZstdLevel::default()),
    ] {
        let parquet = File::new(table(codec)).with(fill);
        let set = parquet.load();
        assert_eq!(
            (&set.schema, &set.values, &set.labels),
            (&csv.schema, &csv.values, &csv.labels),
            "{codec}"
        );
        let mut rows = Unlabelled::open(&parquet.options, &csv.schema).expect("it fits");
        let mut values = Vec::new();
        while rows.next(&mut values).expect("a row") {}
        assert_eq!(Values::Memory(values), csv.values);
    }
    let strict = File::new(table(Compression::SNAPPY));
    assert_eq!(
        strict.refusal(),
        "table.csv: row 2: no value in column \"x\""
    );
    let skip = strict.with(|options| options.bad_samples = BadSamples::Skip);
    let hint = skip.error().hint().expect("a hint");
    assert_eq!(
        hint,
        "4 bad rows left out, the first: row 2: no value in column \"x\""
    );
}

#[test]
fn dates_times_decimals_and_flags_are_numbers() {
    let schema = "message m {
        optional int32 day (DATE);
        optional int64 milli (TIMESTAMP(MILLIS,true));
        optional int64 nano (TIMESTAMP(NANOS,false));
        optional int32 price (DECIMAL(9,2));
        optional fixed_len_byte_array(9) sum (DECIMAL(20,3));
        optional int32 unsigned (INTEGER(32,false));
        optional int64 long;
        optional boolean flag;
        optional float single;
        optional fixed_len_byte_array(2) half (FLOAT16);
    }";
    let write = |group: &mut Group<'_, '_>| {
        column::<Int32Type>(group, &[Some(20_000)]);
        column::<Int64Type>(group, &[Some(1_700_000_000_250)]);
        column::<Int64Type>(group, &[Some(-1_500_000_000)]);
        column::<Int32Type>(group, &[Some(1234)]);
        let sum = (-123_456_i128).to_be_bytes()[7..].to_vec();
        column::<FixedLenByteArrayType>(group, &[Some(FixedLenByteArray::from(sum))]);
        column::<Int32Type>(group, &[Some(-1)]);
        column::<Int64Type>(group, &[Some(i64::MIN)]);
        column::<BoolType>(group, &[Some(true)]);
        column::<FloatType>(group, &[Some(0.5)]);
        let half = f16::from_f32(-2.5).to_le_bytes().to_vec();
        column::<FixedLenByteArrayType>(group, &[Some(FixedLenByteArray::from(half))]);
    };
    let file = File::new(file(schema, Compression::UNCOMPRESSED, &[&write]));
    let opened = fs::File::open(&file.options.path).expect("a file");
    let (mut rows, names) = Parquet::open(opened).expect("a table");
    assert_eq!((names.len(), names[0].as_str()), (10, "day"));
    let (number, values) = rows.next().expect("read").expect("a row");
    assert_eq!(number, 1);
    let numbers = values.iter().map(|value| match value {
        Some(super::super::json::Value::Number(number, _)) => *number,
        _ => panic!("a number"),
    });
    let expected = [
        20_000.0,
        1_700_000_000.25,
        -1.5,
        12.34,
        -123.456,
        f64::from(u32::MAX),
        i64::MIN as f64,
        1.0,
        0.5,
        -2.5,
    ];
    assert_eq!(numbers.collect::<Vec<_>>(), expected);
    assert!(rows.next().expect("read").is_none());
}

#[test]
fn lists_structs_and_bytes_are_refused_unless_they_are_left_out() {
    let schema = "message m { optional double x;
        optional group point { optional double y; optional double z; }
        optional binary raw; optional int64 label; }";
    let write = |group: &mut Group<'_, '_>| {
        column::<DoubleType>(group, &[Some(1.0), Some(2.0)]);
        column::<DoubleType>(group, &[None, None]);
        column::<DoubleType>(group, &[None, None]);
        let raw = || Some(ByteArray::from(vec![0xff]));
        column::<ByteArrayType>(group, &[raw(), raw()]);
        column::<Int64Type>(group, &[Some(0), Some(1)]);
    };
    let file = || File::new(file(schema, Compression::UNCOMPRESSED, &[&write]));
    assert_eq!(
        file().refusal(),
        "table.csv: row 1: column \"point\" is no number and no text"
    );
    let left_out = file().with(|options| options.drop_columns = names(&["point"]));
    assert_eq!(
        left_out.refusal(),
        "table.csv: row 1: column \"raw\" is no number and no text"
    );
    let left_out = file().with(|options| options.drop_columns = names(&["point", "raw"]));
    assert_eq!(
        left_out.load().schema.columns,
        [Column::Numbers("x".to_owned())]
    );
}

#[test]
fn a_column_that_is_left_out_is_not_read() {
    let mut bytes = table(Compression::UNCOMPRESSED);
    // The length of a word, which the page has first.
    let word = bytes.windows(5).position(|bytes| bytes == b"\x01\0\0\0a");
    bytes[word.expect("a word") + 2] = 9;
    let damaged = File::new(bytes).with(fill);
    let refusal = damaged.refusal();
    assert!(refusal.contains("no whole Parquet file"), "{refusal}");
    let drop = |options: &mut TableOptions| options.drop_columns = vec!["w".to_owned()];
    let set = damaged.with(drop).load();
    assert_eq!((set.len(), set.schema.columns.len()), (5, 1));
}

#[test]
fn files_that_are_no_whole_parquet_are_refused() {
    let none = File::new(file(SCHEMA, Compression::UNCOMPRESSED, &[]));
    let refusal = none.refusal();
    assert!(refusal.starts_with("table.csv: 0 samples; "), "{refusal}");
    let whole = table(Compression::SNAPPY);
    for len in (4..whole.len()).step_by(7) {
        let refusal = File::new(&whole[..len]).with(fill).refusal();
        let start = "table.csv: no whole Parquet file: ";
        assert!(refusal.starts_with(start), "{len}: {refusal}");
    }
    // A wrong byte gives an error or other values, but no panic.
    let spoiled = File::new("").with(fill);
    for at in (4..whole.len()).step_by(3) {
        let mut bytes = whole.clone();
        bytes[at] = !bytes[at];
        fs::write(&spoiled.options.path, bytes).expect("a file");
        let _ = load(&spoiled.options);
    }
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(&whole).expect("memory");
    let packed = File::new(encoder.finish().expect("memory"));
    assert_eq!(packed.refusal(), "table.csv: a Parquet file in gzip");
}
