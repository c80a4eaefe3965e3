//! JSON lines.

use super::*;

#[test]
fn json_lines_are_the_same_table() {
    let csv = File::new("a,b,label\n1,x,0\n2.5,y,1\n3,x,0\n").load();
    let json = "\n{\"a\": 1, \"b\": \"x\", \"label\": 0}\n\n{\"b\": \"y\", \"a\": 2.5, \"label\": 1}\r\n{\"a\":3,\"b\":\"x\",\"label\":0}";
    let set = File::new(json).load();
    assert_eq!(
        (&set.schema, &set.values, &set.labels),
        (&csv.schema, &csv.values, &csv.labels)
    );
    // A model of one format reads the other.
    let other = load_as(&File::new(json).options, &csv.schema).expect("it fits");
    assert_eq!(other.values, csv.values);
    let flags =
        File::new("{\"a\": true, \"label\": \"no\"}\n{\"a\": false, \"label\": \"yes\"}\n").load();
    assert_eq!(flags.schema.columns, [Column::Numbers("a".to_owned())]);
    assert_eq!(flags.schema.target.classes(), ["no", "yes"]);
}

#[test]
fn json_lines_that_are_no_rows_are_named() {
    let good = "{\"a\":1,\"label\":0}\n";
    let check = |bad: &str, says: &str| {
        let refusal = File::new(format!("{good}{bad}")).refusal();
        assert_eq!(refusal, format!("table.csv: line 2: {says}"), "{bad}");
    };
    check(
        "{\"a\":[1],\"label\":0}",
        "key \"a\" holds an array; values must be flat",
    );
    check(
        "{\"a\":{\"b\":1},\"label\":0}",
        "key \"a\" holds an object; values must be flat",
    );
    check("{\"a\":1,\"a\":2,\"label\":0}", "key \"a\" is there twice");
    check(
        "{\"a\":1,\"label\":0",
        "no JSON object: EOF while parsing an object, at column 16",
    );
    check("{\"label\":0}", "no value in column \"a\"");
    check("{\"a\":null,\"label\":0}", "no value in column \"a\"");
    check(
        "{\"a\":1,\"z\":1,\"label\":0}",
        "key \"z\" is not in the first object",
    );
    check("{\"a\":1}", "no label in column \"label\"");
    let array = File::new("[{\"a\":1,\"label\":0}]").refusal();
    assert_eq!(
        array,
        "table.csv: a JSON array; JSON lines have an object on each line"
    );
    let bytes = File::new([good.as_bytes(), b"{\"a\":\"\xff\",\"label\":0}"].concat());
    assert_eq!(bytes.refusal(), "table.csv: line 2: not UTF-8 text");
}

#[test]
fn keys_that_come_later_are_missing_before() {
    let text =
        "{\"a\":1,\"label\":0}\n{\"a\":2,\"b\":\"x\",\"label\":1}\n{\"a\":3,\"c\":5,\"label\":0}\n";
    let fill = |options: &mut TableOptions| {
        options.missing_values = MissingValues::Fill;
        options.held_out = 0.0;
    };
    let set = File::new(text).with(fill).load();
    let columns: Vec<&str> = set.schema.columns.iter().map(Column::name).collect();
    assert_eq!(columns, ["a", "b", "c"]);
    assert_eq!(
        (set.sample(0)[1..3].to_vec(), set.sample(1)[1..3].to_vec()),
        (vec![1.0, 0.0], vec![0.0, 1.0])
    );
    let dropped = File::new(text).with(|options| options.drop_columns = names(&["b", "c"]));
    assert_eq!(
        dropped.load().schema.columns,
        [Column::Numbers("a".to_owned())]
    );
    // A model takes keys that the first line lacks.
    let new = File::new("{\"a\":1}\n{\"c\":5,\"b\":\"x\"}\n").with(fill);
    let mut rows = Unlabelled::open(&new.options, &set.schema).expect("it fits");
    let mut values = Vec::new();
    while rows.next(&mut values).expect("a row") {}
    assert_eq!(values[5..7], [0.0, 1.0]);
}
