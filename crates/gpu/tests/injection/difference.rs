//! Where two JSON documents differ.

use std::collections::BTreeSet;

use serde_json::Value;

/// Paths at which two documents differ, with `*` in place of numbers in lists. A reading that is missing on either side is
/// one difference, and so are lists of different lengths.
pub(crate) fn differences(one: &Value, other: &Value) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    compare(one, other, String::new(), &mut found);
    found
}

fn compare(one: &Value, other: &Value, path: String, found: &mut BTreeSet<String>) {
    if one == other {
        return;
    }
    let below = |name: &str| match path.is_empty() {
        true => name.to_owned(),
        false => format!("{path}/{name}"),
    };
    match (one, other) {
        (Value::Object(a), Value::Object(b))
            if !a.contains_key("missing") && !b.contains_key("missing") =>
        {
            let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for name in names {
                let value = |map: &serde_json::Map<String, Value>| {
                    map.get(name).cloned().unwrap_or_default()
                };
                compare(&value(a), &value(b), below(name), found);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (a, b) in a.iter().zip(b) {
                compare(a, b, below("*"), found);
            }
        }
        _ => {
            found.insert(path);
        }
    }
}

#[test]
fn differences_are_named_by_their_places() {
    let check = |one: &str, other: &str, expect: &[&str]| {
        let json = |text| serde_json::from_str(text).expect("JSON");
        let found = differences(&json(one), &json(other));
        assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), expect);
    };
    check(r#"{"a": [1, 2]}"#, r#"{"a": [1, 2]}"#, &[]);
    check(r#"{"a": [{"b": 1}]}"#, r#"{"a": [{"b": 2}]}"#, &["a/*/b"]);
    check(r#"{"a": [1]}"#, r#"{"a": [1, 2]}"#, &["a"]);
    check(
        r#"{"a": {"used": 1, "total": 2}, "c": 1}"#,
        r#"{"a": {"missing": "lost"}}"#,
        &["a", "c"],
    );
}
