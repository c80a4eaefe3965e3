//! Real-life tables, and every reason to refuse one.

use std::fs;
use std::io::Write;

use flate2::{Compression, write::GzEncoder};

use super::*;

fn in_memory(set: Dataset) -> Vec<f32> {
    match set.values {
        Values::Memory(values) => values,
        Values::Images(_) => panic!("a table is in memory"),
    }
}

/// A file in a folder of its own.
struct File {
    options: CsvOptions,
    _folder: tempfile::TempDir,
}

impl File {
    fn new(text: impl AsRef<[u8]>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("table.csv");
        fs::write(&path, text).expect("a file");
        Self {
            options: CsvOptions {
                path,
                label_column: None,
            },
            _folder: folder,
        }
    }

    fn load(&self) -> Dataset {
        load(&self.options).expect("a data set")
    }

    fn error(&self) -> DataError {
        load(&self.options).expect_err("a broken file")
    }

    /// The error's text, with the folder left out.
    fn refusal(&self) -> String {
        let folder = self.options.path.with_file_name("");
        self.error()
            .to_string()
            .replace(&*folder.to_string_lossy(), "")
    }
}

fn check(text: &str, refusal: &str) {
    assert_eq!(File::new(text).refusal(), refusal, "{text:?}");
}

/// Column `column` of the given subset.
fn column(subset: super::super::Subset<'_>, column: usize) -> Vec<f32> {
    let values = |index| subset.sample(index).0[column];
    (0..subset.len()).map(values).collect()
}

#[test]
fn columns_besides_the_label_are_features_in_order() {
    let set = File::new("a,label,b\n1,0,10\n1,1,10\n1,2,10\n").load();
    assert_eq!(set.schema.features, Features::Flat { count: 2 });
    assert_eq!(
        (set.len(), set.schema.classes.len(), set.name.as_str()),
        (3, 3, "table")
    );
    assert_eq!(set.labels, [0, 1, 2]);
    let Scaling::Standardised { mean, deviation } = set.schema.scaling else {
        panic!("tables are standardised");
    };
    assert_eq!((mean, deviation), (vec![1.0, 10.0], vec![1.0, 1.0]));
}

#[test]
fn training_rows_get_mean_zero_and_deviation_one_and_held_out_rows_do_not_count() {
    let rows: Vec<_> = (0..200_u32).map(|row| row.pow(2) % 101).collect();
    let lines = rows.iter().map(|value| format!("{value}.25,0"));
    let text = "x,label\n".to_owned() + &lines.collect::<Vec<_>>().join("\n");
    let set = File::new(&text).load();

    let of = column(set.train(), 0);
    let mean = of.iter().map(|&value| f64::from(value)).sum::<f64>() / of.len() as f64;
    let square = of
        .iter()
        .map(|&value| f64::from(value).powi(2))
        .sum::<f64>()
        / of.len() as f64;
    assert!(
        mean.abs() < 1e-6 && (square - 1.0).abs() < 1e-6,
        "{mean} {square}"
    );

    // Changing a held-out value changes only that value.
    let held_out = set.split.held_out[0];
    let old = format!("{}.25,0", rows[held_out]);
    let mut lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[held_out + 1], old);
    lines[held_out + 1] = "5000,0";
    let changed = File::new(lines.join("\n")).load();
    assert_eq!(changed.schema.scaling, set.schema.scaling);
    assert_eq!(column(changed.train(), 0), of);
    assert!(column(changed.held_out(), 0)[0] > 10.0);
}

#[test]
fn a_constant_column_becomes_zeros_and_not_noise() {
    // Ten times 0.1 does not sum to 1, so the computed mean would be off.
    let rows = "0.1,0\n".repeat(10);
    let set = File::new(format!("x,label\n{rows}")).load();
    assert_eq!(set.values, Values::Memory(vec![0.0; 10]));
}

#[test]
fn large_offsets_keep_their_differences() {
    let rows: String = (0..10)
        .map(|row| format!("{},0\n", 1_700_000_000 + row))
        .collect();
    let set = File::new(format!("time,label\n{rows}")).load();
    let mut values = in_memory(set);
    values.dedup();
    assert_eq!(values.len(), 10, "as f32 the times would all be one");
}

#[test]
fn quotes_spaces_blank_lines_a_byte_order_mark_and_gzip_are_read() {
    let plain = File::new("a,label\n1,0\n2,1\n").load();
    let odd = "\u{feff}\"a\" , label\r\n\r\n\"1\" ,0\r\n \r\n 2,\"1\"";
    assert_eq!(File::new(odd).load().values, plain.values);

    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(odd.as_bytes()).expect("memory");
    let packed = encoder.finish().expect("memory");
    assert_eq!(File::new(&packed).load().labels, plain.labels);
    let cut = File::new(&packed[..packed.len() - 3]).error();
    let message = cut.to_string();
    assert!(
        message.contains(": damaged after uncompressed byte "),
        "{cut}"
    );
}

#[test]
fn another_label_column_can_be_named() {
    let mut file = File::new("kind,a\n1,5\n0,6\n");
    file.options.label_column = Some("kind".to_owned());
    assert_eq!(file.load().labels, [1, 0]);
}

#[test]
fn without_the_label_column_the_columns_are_listed_and_the_nearest_suggested() {
    let file = File::new("age,Labels\n1,0\n");
    assert_eq!(
        file.refusal(),
        r#"table.csv: no column "label"; the columns are age, Labels"#
    );
    let hint = file.error().hint().expect("a hint");
    assert_eq!(
        hint,
        r#"did you mean "Labels"? name it with --label-column"#
    );
    let unlike = File::new("1.5,2.5\n1,0\n").error().hint().expect("a hint");
    assert!(unlike.starts_with("name the column"), "{unlike}");
}

#[test]
fn headers_that_cannot_be_used_are_refused() {
    check("", "table.csv: empty; the first line must name the columns");
    check(
        "\n\n",
        "table.csv: empty; the first line must name the columns",
    );
    check(
        "a,label,a\n1,0,2\n",
        r#"table.csv: two columns are called "a""#,
    );
    check(
        "label\n1\n",
        r#"table.csv: no column besides the label "label""#,
    );
}

#[test]
fn too_few_rows_are_refused() {
    let need = "at least 2 are needed: one to train on, one to hold out";
    check("a,label\n", &format!("table.csv: 0 samples; {need}"));
    check("a,label\n1,0\n", &format!("table.csv: 1 sample; {need}"));
}

#[test]
fn ragged_lines_are_named() {
    check(
        "a,label\n1,0\n1\n",
        "table.csv: line 3: 1 cell, but the header names 2 columns",
    );
    check(
        "a,label\n1,0,2\n",
        "table.csv: line 2: 3 cells, but the header names 2 columns",
    );
}

#[test]
fn features_that_are_no_numbers_are_named_with_line_and_column() {
    for text in ["abc", "", "nan", "inf", "-inf", "1e39", "0x10", "1_000"] {
        let refusal =
            format!("table.csv: line 3: column \"b\" is {text:?}, not a finite 32-bit number");
        check(&format!("a,b,label\n1,2,0\n1,{text},0\n"), &refusal);
    }
    let missing = File::new("a,label\n,0\n").error();
    let hint = missing.hint().expect("a hint");
    assert!(hint.starts_with("fill in missing values"), "{hint}");
}

#[test]
fn lines_are_counted_as_an_editor_does() {
    for (text, line) in [
        ("a,label\n1,0\nx,0\n", 3),
        ("a,label\n1,0\nx,0", 3),
        ("a,label\r\n1,0\r\nx,0\r\n", 3),
        ("\n\na,label\n\n\nx,0\n\n", 6),
        ("a,label\r\n\r\n \r\nx,0", 4),
        ("a,label\n\"1\n\",0\nx,0\n", 4),
        ("a,label\n\"x\n\ny\",0\n", 2),
    ] {
        let refusal = File::new(text).refusal();
        let start = format!("table.csv: line {line}: column \"a\" is \"x");
        assert!(refusal.starts_with(&start), "{text:?}: {refusal}");
    }
}

#[test]
fn labels_that_are_no_class_are_named_with_their_line() {
    for text in ["-1", "1.5", "2.0", "cat", "", "4294967296"] {
        let refusal = format!(
            "table.csv: line 3: {text:?} in column \"label\" is no class; expected a whole number 0, 1, 2, ..."
        );
        check(&format!("a,label\n1,0\n1,{text}\n"), &refusal);
    }
    check(
        "a,label\n1,0\n1,70000\n",
        "table.csv: line 3: label 70000 is out of range 0..65536",
    );
}

#[test]
fn words_are_classes_in_alphabetical_order() {
    let set = File::new("a,label\n1,dog\n1,cat\n1,dog\n1,Zebra\n").load();
    assert_eq!(set.schema.classes, ["Zebra", "cat", "dog"]);
    assert_eq!(set.labels, [2, 1, 2, 0]);
    check(
        "a,label\n1,dog\n1,\n",
        "table.csv: line 3: \"\" in column \"label\" is no class; expected a whole number 0, 1, 2, ...",
    );
}

#[test]
fn a_model_reads_its_columns_by_name_and_scales_them_as_in_training() {
    let trained = File::new("a,label,b\n1,x,10\n3,y,10\n5,x,10\n").load();
    let schema = &trained.schema;
    let other = File::new("b,extra,a,label\n11,?,3,y\n");
    let set = load_as(&other.options, schema).expect("it fits");
    let Scaling::Standardised { mean, deviation } = &schema.scaling else {
        panic!("tables are standardised");
    };
    let expected = [(3.0 - mean[0]) / deviation[0], 1.0].map(|value| value as f32);
    assert_eq!(
        (&in_memory(set.clone())[..], &set.labels[..]),
        (&expected[..], &[1][..])
    );
    assert_eq!((set.train().len(), set.held_out().len()), (0, 1));
    let mut rows = Unlabelled::open(&other.options.path, schema).expect("it fits");
    let mut values = Vec::new();
    assert!(rows.next(&mut values).expect("a row"));
    assert!(!rows.next(&mut values).expect("the end"));
    assert_eq!(values, expected);
    let narrow = File::new("a,label\n0,x\n1e-9,y\n0,x\n1e-9,y\n").load();
    let far = File::new("a,label\n1e35,x\n");
    let error = load_as(&far.options, &narrow.schema).expect_err("too far");
    let expected = "column \"a\" has a value too far from those that the model was trained on";
    assert!(error.to_string().ends_with(expected), "{error}");
}

#[test]
fn semicolons_and_tabs_separate_cells_too() {
    let comma = File::new("a,b,label\n1,2.5,0\n3,4,1\n5,6,0\n").load();
    for separator in [";", "\t"] {
        let text = "a,b,label\n1,2.5,0\n3,4,1\n5,6,0\n".replace(',', separator);
        assert_eq!(File::new(text).load().values, comma.values, "{separator:?}");
    }
    // A comma in a name does not change the separator.
    let named = File::new("a (m,s);b;label\n1;2.5;0\n3;4;1\n5;6;0\n").load();
    assert_eq!(named.values, comma.values);
    check(
        "a;label\n1,5;0\n2;1\n",
        "table.csv: line 2: column \"a\" is \"1,5\", not a finite 32-bit number",
    );
}

#[test]
fn long_cells_are_quoted_in_part() {
    let refusal = File::new(format!("a,label\n{},0\n", "z".repeat(5000))).refusal();
    assert!(refusal.len() < 200, "{refusal}");
}

#[test]
fn bytes_that_are_no_text_are_refused_with_their_line() {
    let file = File::new(b"a,label\n1,0\n\xff,0\n");
    assert_eq!(file.refusal(), "table.csv: line 3: not UTF-8 text");
}

#[test]
fn a_held_out_value_beyond_any_scale_is_refused() {
    let held_out = Split::fixed(10).held_out[0];
    let value = |row| match row {
        0 => "1e-30",
        row if row == held_out => "3e38",
        _ => "0",
    };
    let rows: String = (0..10).map(|row| format!("{},0\n", value(row))).collect();
    assert_eq!(
        File::new(format!("far,label\n{rows}")).refusal(),
        "table.csv: column \"far\" cannot be standardised: a held-out value is too far from the others"
    );
}
