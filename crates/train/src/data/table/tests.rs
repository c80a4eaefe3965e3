//! Real-life tables, and every reason to refuse one.

mod json;
mod parquet;

use std::fs;
use std::io::Write;

use flate2::{Compression, write::GzEncoder};

use super::columns::CATEGORIES_MAX;
use super::*;

fn in_memory(set: Dataset) -> Vec<f32> {
    match set.values {
        Values::Memory(values) => values,
        _ => panic!("a small table is in memory"),
    }
}

/// A file in a folder of its own.
struct File {
    options: TableOptions,
    _folder: tempfile::TempDir,
}

impl File {
    fn new(text: impl AsRef<[u8]>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("table.csv");
        fs::write(&path, text).expect("a file");
        Self {
            options: TableOptions {
                path,
                test_data: None,
                held_out: 0.2,
                split_seed: 0,
                label_column: None,
                objective: Objective::Classification,
                drop_columns: Vec::new(),
                categorical: Vec::new(),
                separator: None,
                missing_values: MissingValues::Error,
                bad_samples: BadSamples::Stop,
                memory: MEMORY_BYTES,
            },
            _folder: folder,
        }
    }

    /// The same with other options.
    fn with(mut self, change: impl FnOnce(&mut TableOptions)) -> Self {
        change(&mut self.options);
        self
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
    let values = |index| subset.sample(index)[column];
    (0..subset.len()).map(values).collect()
}

#[test]
fn columns_besides_the_label_are_features_in_order() {
    let set = File::new("a,label,b\n1,0,10\n1,1,10\n1,2,10\n").load();
    assert_eq!(set.schema.features, Features::Flat { count: 2 });
    assert_eq!(
        (set.len(), set.schema.target.outputs(), set.name.as_str()),
        (3, 3, "table")
    );
    assert_eq!(set.labels.classes(), [0, 1, 2]);
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
    assert_eq!(file.load().labels.classes(), [1, 0]);
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
    for text in ["abc", "inf", "-inf", "1e39", "0x10", "1_000"] {
        let refusal =
            format!("table.csv: line 3: column \"b\" is {text:?}, not a finite 32-bit number");
        check(&format!("a,b,label\n1,2,0\n1,{text},0\n"), &refusal);
    }
    let missing = File::new("a,label\n,0\n").error();
    let hint = missing.hint().expect("a hint");
    assert!(hint.starts_with("--missing-values fill"), "{hint}");
}

#[test]
fn lines_are_counted_as_an_editor_does() {
    for (text, line) in [
        ("a,label\n1,0\nx,0\n", 3),
        ("a,label\n1,0\nx,0", 3),
        ("a,label\r\n1,0\r\nx,0\r\n", 3),
        ("\n\na,label\n1,0\n\nx,0\n\n", 6),
        ("a,label\r\n\r\n \r\n1,0\r\nx,0", 5),
        ("a,label\n\"1\n\",0\nx,0\n", 4),
        ("a,label\n1,0\n\"x\n\ny\",0\n", 3),
    ] {
        let refusal = File::new(text).refusal();
        let start = format!("table.csv: line {line}: column \"a\" is \"x");
        assert!(refusal.starts_with(&start), "{text:?}: {refusal}");
    }
}

#[test]
fn labels_that_are_no_class_are_named_with_their_line() {
    for text in ["-1", "1.5", "2.0", "cat", "4294967296"] {
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
    assert_eq!(set.schema.target.classes(), ["Zebra", "cat", "dog"]);
    assert_eq!(set.labels.classes(), [2, 1, 2, 0]);
    check(
        "a,label\n1,dog\n1,\n",
        "table.csv: line 3: no label in column \"label\"",
    );
    check(
        "a,label\n1,dog\n1,7\n",
        "table.csv: line 3: \"7\" in column \"label\" is a number, but earlier labels are words",
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
        (&in_memory(set.clone())[..], set.labels.classes()),
        (&expected[..], &[1][..])
    );
    assert_eq!((set.train().len(), set.held_out().len()), (0, 1));
    let mut rows = Unlabelled::open(&other.options, schema).expect("it fits");
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
fn other_characters_separate_cells_too() {
    let comma = File::new("a,b,label\n1,2.5,0\n3,4,1\n5,6,0\n").load();
    for separator in [";", "\t", "|"] {
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
    let hint = |bytes: &[u8]| File::new(bytes).error().hint().expect("a hint");
    assert!(hint(b"a,label\n1,0\n\xff,0\n").contains("CP949"));
    assert!(hint(b"a,label\n1,0\n\xff\0,0\n").contains("no text file"));
    assert!(hint(b"\xff\xfea\0,\0b\0\n\0").contains("UTF-16"));
}

#[test]
fn a_held_out_value_beyond_any_scale_is_refused() {
    let held_out = Split::random(10, 0.2, 0).held_out[0];
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

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

#[test]
fn words_become_a_value_for_each_category_of_the_training_rows() {
    // Rows 2 and 6 of ten are held out; "far" is only there.
    let cities = ["b", "a", "far", "c", "a", "b", "a", "c", "a", "b"];
    let rows: String = cities
        .iter()
        .enumerate()
        .map(|(row, city)| format!("{row},{city},0\n"))
        .collect();
    let set = File::new(format!("x,city,label\n{rows}")).load();
    let city = Column::Categories {
        name: "city".to_owned(),
        categories: names(&["a", "b", "c"]),
    };
    assert_eq!(set.schema.columns, [Column::Numbers("x".to_owned()), city]);
    assert_eq!(set.schema.features, Features::Flat { count: 4 });
    assert_eq!(set.schema.check(), Ok(()));
    assert_eq!(set.sample(0)[1..], [0.0, 1.0, 0.0]);
    assert_eq!(set.sample(3)[1..], [0.0, 0.0, 1.0]);
    assert_eq!(set.sample(2)[1..], [0.0; 3]);
    let [warning] = &set.warnings[..] else {
        panic!("one warning: {:?}", set.warnings);
    };
    let says = "1 row with a word in column \"city\" that no training row has, such as \"far\": it counts as no category";
    assert!(warning.ends_with(says), "{warning}");
    // Numbers that no model was trained on are words of no category too.
    let other = File::new("city,x\n3,1\nc,2\n");
    let mut rows = Unlabelled::open(&other.options, &set.schema).expect("it fits");
    let mut values = Vec::new();
    while rows.next(&mut values).expect("a row") {}
    assert_eq!(
        (&values[1..4], &values[5..8]),
        (&[0.0; 3][..], &[0.0, 0.0, 1.0][..])
    );
    assert!(
        rows.warnings()[0].contains("such as \"3\""),
        "{:?}",
        rows.warnings()
    );
}

#[test]
fn numbers_are_categories_where_the_user_says_so() {
    let text = "zip,label\n02,0\n1,1\n02,0\nx,1\n";
    check(
        text,
        "table.csv: line 5: column \"zip\" is \"x\", not a finite 32-bit number",
    );
    check(
        "zip,label\nx,0\n1,1\n",
        "table.csv: line 3: column \"zip\" is \"1\", a number among words",
    );
    let file = File::new(text).with(|options| options.categorical = names(&["zip"]));
    let [Column::Categories { categories, .. }] = &file.load().schema.columns[..] else {
        panic!("one column of words");
    };
    assert!(categories.contains(&"02".to_owned()), "{categories:?}");
}

#[test]
fn too_many_categories_are_refused_and_identifiers_are_suspected() {
    let rows = |count: usize| {
        (0..count)
            .map(|row| format!("n{row},0\n"))
            .collect::<String>()
    };
    let file = File::new(format!("name,label\n{}", rows(CATEGORIES_MAX + 1)));
    assert_eq!(
        file.refusal(),
        "table.csv: column \"name\" has more than 1000 different words"
    );
    let hint = file.error().hint().expect("a hint");
    assert_eq!(hint, "leave it out with --drop-columns \"name\"");
    let suspected = File::new(format!("name,label\n{}", rows(30)))
        .load()
        .warnings;
    assert!(
        suspected[0].contains("has 24 different words in 24 training rows"),
        "{suspected:?}"
    );
    let counted: String = (7..40).map(|row| format!("{row},0\n")).collect();
    let suspected = File::new(format!("id,label\n{counted}")).load().warnings;
    assert!(
        suspected[0].starts_with("column \"id\" counts the rows"),
        "{suspected:?}"
    );
}

#[test]
fn columns_are_left_out_by_name() {
    let file = File::new(",a,b,label\n0,1,x,0\n1,2,y,1\n")
        .with(|options| options.drop_columns = names(&["b", "Unnamed: 0"]));
    assert_eq!(
        file.load().schema.columns,
        [Column::Numbers("a".to_owned())]
    );
    let file = File::new("height,label\n1,0\n2,1\n")
        .with(|options| options.drop_columns = names(&["hight"]));
    assert_eq!(
        file.refusal(),
        "table.csv: no column \"hight\", which --drop-columns names; the columns are height, label"
    );
    assert_eq!(
        file.error().hint().as_deref(),
        Some("did you mean \"height\"?")
    );
    let file =
        File::new("a,label\n1,0\n2,1\n").with(|options| options.drop_columns = names(&["label"]));
    assert_eq!(
        file.refusal(),
        "table.csv: \"label\" is the label, which --drop-columns cannot name"
    );
    assert_eq!(names_in(Some(" id,\"a,b\",,c ")), ["id", "a,b", "c"]);
    assert_eq!(names_in(None), [""; 0]);
}

#[test]
fn missing_values_are_refused_or_filled() {
    for text in ["", "NA", "nan", "null"] {
        check(
            &format!("a,b,label\n1,2,0\n1,{text},0\n"),
            "table.csv: line 3: no value in column \"b\"",
        );
    }
    let fill = |options: &mut TableOptions| options.missing_values = MissingValues::Fill;
    let rows = "1,x\nNA,y\n3,\n,x\n2,y\n2,x\n".replace('\n', ",0\n");
    let set = File::new(format!("a,b,label\n{rows}"))
        .with(fill)
        .with(|options| options.held_out = 0.0)
        .load();
    let Scaling::Standardised { mean, .. } = &set.schema.scaling else {
        panic!("tables are standardised");
    };
    assert_eq!(mean[0], 2.0, "of those that are there");
    assert_eq!(
        (set.sample(1)[0], set.sample(3)[0], set.sample(4)[0]),
        (0.0, 0.0, 0.0)
    );
    assert!(set.sample(0)[0] < 0.0 && set.sample(2)[0] > 0.0);
    // No word is the first category.
    assert_eq!(set.sample(2)[1..], [1.0, 0.0, 0.0]);
    let empty = File::new("a,b,label\n,1,0\n,2,1\n").with(fill);
    assert_eq!(
        empty.refusal(),
        "table.csv: column \"a\" has no value in a training row"
    );
    // Words may come after cells without one.
    let late = File::new("a,label\n,0\nx,1\n")
        .with(fill)
        .with(|options| options.held_out = 0.0);
    assert_eq!(late.load().schema.features, Features::Flat { count: 2 });
}

#[test]
fn a_number_to_predict_is_standardised_over_the_training_rows() {
    let rows: String = (0..10)
        .map(|row| format!("{row},{}\n", 100 * row))
        .collect();
    let regression = |options: &mut TableOptions| {
        options.objective = Objective::Regression;
        options.label_column = Some("price".to_owned());
    };
    let set = File::new(format!("x,price\n{rows}"))
        .with(regression)
        .load();
    let (Target::Number { mean, deviation }, Labels::Numbers(labels)) =
        (&set.schema.target, &set.labels)
    else {
        panic!("a number");
    };
    let train = set.split.train.iter().map(|row| 100.0 * *row as f64);
    assert_eq!((*mean, *deviation), moments(train));
    assert_eq!(labels[9], ((900.0 - mean) / deviation) as f32);
    assert_eq!(set.schema.check(), Ok(()));
    let refused = |text: &str, says: &str| {
        assert_eq!(File::new(text).with(regression).refusal(), says);
    };
    refused(
        "x,price\n1,2\n1,dear\n",
        "table.csv: line 3: \"dear\" in column \"price\" is no finite 32-bit number to predict",
    );
    refused(
        "x,price\n1,NA\n",
        "table.csv: line 2: no label in column \"price\"",
    );
}

#[test]
fn a_separator_that_is_unclear_or_wrong_is_told_as_such() {
    let unclear = File::new("a;b,label\n1;2,0\n");
    assert_eq!(
        unclear.refusal(),
        "table.csv: the first line has \",\" as often as \";\": either could be the separator"
    );
    let named = unclear.with(|options| options.separator = separator_named("semicolon"));
    assert_eq!(
        named.refusal(),
        "table.csv: no column \"label\"; the columns are a, b,label"
    );
    let wrong = File::new("a;b;label\n1;2;0\n").with(|options| options.separator = Some(b','));
    assert_eq!(
        wrong.refusal(),
        "table.csv: the separator \",\" is not in the first line, \"a;b;label\""
    );
    assert_eq!(
        wrong.error().hint().as_deref(),
        Some("\";\" is: name it with --separator")
    );
    let blanks = File::new("a b label\n1 2 0\n3 4 1\n");
    let hint = blanks.error().hint().expect("a hint");
    assert!(hint.contains("--separator"), "{hint}");
    let blanks = blanks.with(|options| options.separator = separator_named("space"));
    assert_eq!(blanks.load().schema.columns.len(), 2);
    for (text, byte) in [
        ("tab", Some(b'\t')),
        ("\\t", Some(b'\t')),
        (":", Some(b':')),
        ("::", None),
        ("1", None),
        ("\"", None),
    ] {
        assert_eq!(separator_named(text), byte, "{text}");
    }
}

#[test]
fn bad_lines_are_skipped_and_counted() {
    let skip = |options: &mut TableOptions| options.bad_samples = BadSamples::Skip;
    let good = "a,b,label\n1,x,0\n2,y,1\n3,x,1\n";
    let bad = "a,b,label\n1,x,0\n1\n2,y,1\n?,x,1\n3,,0\n3,x,cat\n3,x,1\n4,5,0\n";
    let set = File::new(bad).with(skip).load();
    let clean = File::new(good).load();
    assert_eq!(
        (&set.values, &set.labels, &set.schema),
        (&clean.values, &clean.labels, &clean.schema)
    );
    // The other one is of a word that only the held-out row has.
    let [warning, _] = &set.warnings[..] else {
        panic!("two warnings: {:?}", set.warnings);
    };
    let says =
        "5 bad lines are left out, the first is line 3: 1 cell, but the header names 3 columns";
    assert!(warning.ends_with(says), "{warning}");
    let none = File::new("a,label\n1\n2\n").with(skip);
    assert_eq!(
        none.refusal(),
        "table.csv: 0 samples; at least 2 are needed: one to train on, one to hold out"
    );
    let hint = none.error().hint().expect("a hint");
    assert!(
        hint.starts_with("2 bad lines left out, the first: line 2: "),
        "{hint}"
    );
}

#[test]
fn another_file_or_another_share_is_held_out() {
    let test = File::new("b,a,label\nz,9,y\nx,2,x\n");
    let path = test.options.path.clone();
    let set = File::new("a,b,label\n1,x,x\n2,y,y\n3,x,x\n")
        .with(|options| options.test_data = Some(path.clone()));
    let set = set.load();
    assert_eq!((set.train().len(), set.held_out().len()), (3, 2));
    assert_eq!(set.labels.classes(), [0, 1, 0, 1, 0]);
    let Scaling::Standardised { mean, .. } = &set.schema.scaling else {
        panic!("tables are standardised");
    };
    assert_eq!(mean[0], 2.0, "of all rows of the first file");
    assert_eq!(set.sample(3)[1..], [0.0, 0.0]);
    assert!(
        set.warnings[0].contains("such as \"z\""),
        "{:?}",
        set.warnings
    );
    let half = File::new("a,label\n1,0\n2,1\n3,0\n4,1\n").with(|options| options.held_out = 0.5);
    assert_eq!(half.load().held_out().len(), 2);
}

#[test]
fn balanced_weights_are_those_of_scikit_learn() {
    let rows = "1,a\n2,a\n3,a\n4,b\n";
    let set = File::new(format!("x,label\n{rows}"))
        .with(|options| options.held_out = 0.0)
        .load();
    // compute_class_weight("balanced", ..): 4 / (2 * 3), 4 / (2 * 1).
    assert_eq!(set.balanced(), Some(vec![(4.0 / 6.0) as f32, 2.0]));
}

#[test]
fn a_table_larger_than_memory_has_the_same_values() {
    let fill = |options: &mut TableOptions| options.missing_values = MissingValues::Fill;
    let word = |row: usize| ["a", "b", "", "c"][row % 4];
    let number = |row: usize| match row % 7 {
        0 => "NA".to_owned(),
        _ => format!("{}.5", 1_700_000_000 + row * row % 1013),
    };
    let lines = |rows: std::ops::Range<usize>| -> String {
        let line = |row| format!("{},{},{}\n", word(row), number(row), row % 3);
        rows.map(line).collect()
    };
    let csv = File::new(format!("w,x,label\n{}", lines(0..500))).with(fill);
    let test = File::new(format!("w,x,label\nnew,7,0\n{}", lines(500..600)));
    let tested = csv.options.clone();
    let tested = TableOptions {
        test_data: Some(test.options.path.clone()),
        ..tested
    };
    // Keys that come later make wider rows.
    let json = |row| match row {
        0..100 => format!("{{\"label\":\"{}\",\"x\":{row}}}\n", row % 2),
        _ => format!(
            "{{\"x\":{row},\"label\":\"{}\",\"w\":\"{}\"}}\n",
            row % 2,
            word(row)
        ),
    };
    let json = File::new((0..600).map(json).collect::<String>()).with(fill);
    for options in [&csv.options, &tested, &json.options] {
        let small = load(options).expect("a data set");
        assert!(matches!(small.values, Values::Memory(_)));
        // No row, some, and all cells in memory.
        for memory in [0, 1000, 9000] {
            let options = TableOptions {
                memory,
                ..options.clone()
            };
            let large = load(&options).expect("a data set");
            assert!(matches!(large.values, Values::Table(_)));
            assert_eq!(
                (&large.schema, &large.labels, &large.split, &large.warnings),
                (&small.schema, &small.labels, &small.split, &small.warnings)
            );
            let mut values = vec![0.0; large.schema.features.count()];
            for row in (0..large.len()).rev() {
                large.read(row, None, &mut values).expect("a row");
                assert_eq!(values, small.sample(row), "{row}");
            }
        }
    }
}

#[test]
fn a_quote_that_is_not_closed_is_named_with_its_line() {
    // The last one has as many cells as it should.
    for (text, line) in [
        ("a,label\n1,0\n\"2,1\n3,0\n", 3),
        ("a,label\n1,0\n\"2,1", 3),
        ("\"a,label\n1,0\n", 1),
        ("a,label\n1,0\n2,\"1\n3,0\n", 3),
    ] {
        let refusal = format!("table.csv: line {line}: a quote of this row is not closed");
        check(text, &refusal);
    }
}

#[test]
fn a_million_columns_are_refused() {
    let names: Vec<String> = (0..1_000_000).map(|column| format!("c{column}")).collect();
    let file = File::new(names.join(",") + "\n");
    let refusal = "table.csv: 1000000 columns, more than the 131072 supported";
    assert_eq!(file.refusal(), refusal);
    let hint = file.error().hint().expect("a hint");
    assert!(hint.contains("transpose"), "{hint}");
}

#[test]
fn a_row_without_end_is_refused_before_it_is_in_memory() {
    let long = "x".repeat(1 << 20);
    let text = format!("a,label\n1,0\n\"{}", long.repeat(17));
    let file = File::new(text);
    assert_eq!(
        file.refusal(),
        "table.csv: line 3: a row longer than 16777216 bytes"
    );
    let hint = file.error().hint().expect("a hint");
    assert!(hint.starts_with("close the quote"), "{hint}");
}

/// Say to the process that loads a table within a limit how much may be in memory, and which table.
const ALLOWED: [&str; 2] = ["TABLE_BYTES_IN_MEMORY", "TABLE_TO_LOAD"];

/// The limit of that process: cells of this table take 64 MB, its values 32 MB.
const LIMIT_KIB: usize = 40 << 10;

#[test]
fn a_table_is_read_by_a_process_that_has_no_memory_for_it() {
    let [allowed, table] = ALLOWED.map(std::env::var);
    if let (Ok(allowed), Ok(table)) = (allowed, table) {
        let mut file = File::new("");
        file.options.path = table.into();
        file.options.memory = allowed.parse().expect("a number");
        let set = load(&file.options).expect("a data set");
        let mut values = vec![0.0; set.schema.features.count()];
        let mut sum = 0.0;
        for row in 0..set.len() {
            set.read(row, None, &mut values).expect("a row");
            sum += f64::from(values[row]);
        }
        assert!(sum > 0.0, "{sum}");
        return;
    }
    let (columns, rows) = (4000, 2000);
    let names: Vec<String> = (0..columns).map(|column| format!("c{column}")).collect();
    let zeros = vec!["0"; columns].join(",");
    let line = |row: usize| {
        let mut line = zeros.clone().into_bytes();
        line[2 * row] = b'1';
        let line = String::from_utf8(line).expect("text");
        format!("{line},{}\n", row % 2)
    };
    let lines: String = (0..rows).map(line).collect();
    let file = File::new(format!("{},label\n{lines}", names.join(",")));
    let within = |bytes: usize| {
        let program = std::env::current_exe().expect("the tests' program");
        let output = std::process::Command::new("sh")
            .args([
                "-c",
                &format!("ulimit -d {LIMIT_KIB} && exec \"$0\" \"$@\""),
            ])
            .arg(program)
            .args(["a_table_is_read_by_a_process_that_has_no_memory_for_it"])
            .args(["--test-threads", "1"])
            .env(ALLOWED[0], bytes.to_string())
            .env(ALLOWED[1], &file.options.path)
            .env("RAYON_NUM_THREADS", "1")
            .output()
            .expect("a shell");
        let text = [&output.stdout[..], &output.stderr].concat();
        (
            output.status.success(),
            String::from_utf8_lossy(&text).into_owned(),
        )
    };
    let (is_well, said) = within(4 << 20);
    assert!(is_well && said.contains("1 passed"), "{said}");
    // The limit is one.
    let (is_well, said) = within(usize::MAX);
    assert!(!is_well && said.contains("memory allocation of"), "{said}");
}
