//! Holds a manifest to Kubernetes' own schemas in `tests/schema/schema.json`.
//!
//! The schemas are pruned to a dozen keywords of JSON Schema, so that these few lines know all of them; one that they do not
//! know is an error and not passed over.

use std::sync::LazyLock;

use serde_json::{Value, json};

static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    serde_json::from_str(include_str!("../../../tests/schema/schema.json")).expect("JSON")
});

/// Compares with the schema of the manifest's own version and kind.
pub(super) fn check(manifest: &Value) -> Result<(), String> {
    let text = |field: &str| manifest[field].as_str().unwrap_or_default();
    let kind = format!("{} {}", text("apiVersion"), text("kind"));
    let root = SCHEMA["roots"][&kind].as_str();
    compare(
        manifest,
        definition(root.ok_or(format!("no schema for `{kind}`"))?),
        &kind,
    )
}

fn definition(name: &str) -> &'static Value {
    let found = &SCHEMA["$defs"][name];
    assert!(found.is_object(), "no definition of {name}");
    found
}

fn compare(value: &Value, schema: &Value, at: &str) -> Result<(), String> {
    let keywords = schema
        .as_object()
        .ok_or(format!("{at}: the schema is no object"))?;
    keywords
        .iter()
        .try_for_each(|(keyword, rule)| holds(keyword, rule, value, schema, at))
}

fn holds(
    keyword: &str,
    rule: &Value,
    value: &Value,
    schema: &Value,
    at: &str,
) -> Result<(), String> {
    let fail = |what: &str| Err(format!("{at}: {what}: {value}"));
    match keyword {
        "$ref" => {
            let name = rule.as_str().and_then(|path| path.strip_prefix("#/$defs/"));
            compare(
                value,
                definition(name.expect("a definition of this file")),
                at,
            )
        }
        "type" if !is_of(value, rule) => fail(&format!("expected {rule}")),
        "enum" if !list(rule).contains(value) => fail(&format!("expected one of {rule}")),
        "format" if !has_format(value, rule) => fail(&format!("out of range of {rule}")),
        "minimum" if value.as_i64() < rule.as_i64() => fail("too small"),
        "maxItems" if items(value).len() as u64 > rule.as_u64().expect("a number") => {
            fail("too long")
        }
        "required" => match list(rule)
            .iter()
            .find(|name| value.get(field(name)).is_none())
        {
            Some(name) => fail(&format!("{name} is missing")),
            None => Ok(()),
        },
        "properties" => fields(value).try_for_each(|(name, found)| match rule.get(name) {
            Some(schema) => compare(found, schema, &format!("{at}.{name}")),
            None => Ok(()),
        }),
        "additionalProperties" => fields(value)
            .filter(|(name, _)| schema["properties"].get(name.as_str()).is_none())
            .try_for_each(|(name, found)| match rule {
                Value::Bool(false) => Err(format!("{at}: unknown field `{name}`")),
                schema => compare(found, schema, &format!("{at}.{name}")),
            }),
        "items" => {
            let mut all = items(value).iter().enumerate();
            all.try_for_each(|(index, item)| compare(item, rule, &format!("{at}[{index}]")))
        }
        "oneOf" => match list(rule)
            .iter()
            .filter(|schema| compare(value, schema, at).is_ok())
            .count()
        {
            1 => Ok(()),
            fitting => fail(&format!("{fitting} of {} schemas fit", list(rule).len())),
        },
        "type" | "enum" | "format" | "minimum" | "maxItems" => Ok(()),
        unknown => Err(format!(
            "{at}: the schema has the keyword `{unknown}`, which is not known here"
        )),
    }
}

fn is_of(value: &Value, rule: &Value) -> bool {
    let is = |kind: &Value| match kind.as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("number") => value.is_number(),
        other => panic!("the schema has the type {other:?}"),
    };
    rule.as_array()
        .map_or_else(|| is(rule), |kinds| kinds.iter().any(is))
}

fn has_format(value: &Value, rule: &Value) -> bool {
    match rule.as_str() {
        Some("int32") => value
            .as_i64()
            .is_some_and(|number| i32::try_from(number).is_ok()),
        Some("int64") => value.is_i64(),
        // Nothing here writes bytes or dates.
        _ => false,
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("the schema has a list here")
}

fn field(name: &Value) -> &str {
    name.as_str().expect("the schema has a name here")
}

fn items(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn fields(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

fn sound() -> Vec<Value> {
    let mut all = Vec::new();
    for jobset in [false, true] {
        let (mut job, mut options) = (super::job(), super::Options::new("image:1"));
        super::everything(&mut job, &mut options);
        options.jobset = jobset;
        all.extend(super::manifests(&job, &options, None).expect("manifests"));
    }
    all
}

/// Every place in the manifest, as a JSON pointer.
fn places(value: &Value, at: String, found: &mut Vec<String>) {
    let names: Vec<String> = match value {
        Value::Object(fields) => fields
            .keys()
            .map(|name| name.replace('~', "~0").replace('/', "~1"))
            .collect(),
        Value::Array(items) => (0..items.len()).map(|index| index.to_string()).collect(),
        _ => Vec::new(),
    };
    for name in names {
        let place = format!("{at}/{name}");
        places(
            value.pointer(&place[at.len()..]).expect("it is there"),
            place.clone(),
            found,
        );
        found.push(place);
    }
}

/// Fields whose names are anybody's choice.
const FREE: [&str; 7] = [
    "labels",
    "limits",
    "matchLabels",
    "nodeSelector",
    "requests",
    "selector",
    "stringData",
];

#[test]
fn a_misspelt_field_is_found_wherever_it_is() {
    let mut tried = 0;
    for manifest in sound() {
        check(&manifest).expect("it is sound");
        let mut all = Vec::new();
        places(&manifest, String::new(), &mut all);
        all.push(String::new());
        for place in all {
            let mut wrong = manifest.clone();
            let Value::Object(fields) = wrong.pointer_mut(&place).expect("it is there") else {
                continue;
            };
            if FREE.contains(&place.rsplit('/').next().expect("a name")) {
                continue;
            }
            fields.insert("compeltions".to_owned(), json!(1));
            let error = check(&wrong).expect_err(&place);
            assert!(error.contains("unknown field `compeltions`"), "{error}");
            tried += 1;
        }
    }
    assert!(tried > 60, "{tried}");
}

#[test]
fn a_wrong_type_is_found_wherever_it_is() {
    let mut tried = 0;
    for manifest in sound() {
        let mut all = Vec::new();
        places(&manifest, String::new(), &mut all);
        for place in all {
            let mut wrong = manifest.clone();
            let value = wrong.pointer_mut(&place).expect("it is there");
            // Numbers are also amounts, so that only text in their place is always wrong.
            *value = if value.is_string() {
                json!(["x"])
            } else {
                json!("x")
            };
            check(&wrong).expect_err(&place);
            tried += 1;
        }
    }
    assert!(tried > 300, "{tried}");
}

#[test]
fn what_is_missing_or_out_of_range_is_found() {
    let check_changed = |pointer: &str, value: Value, text: &str| {
        let job = sound()
            .into_iter()
            .find(|manifest| manifest["kind"] == "Job");
        let mut job = job.expect("a Job");
        match (job.pointer_mut(pointer), value) {
            (Some(fields), Value::Null) => fields.as_object_mut().expect("fields").clear(),
            (Some(found), value) => *found = value,
            (None, _) => panic!("no {pointer}"),
        }
        let error = check(&job).expect_err(text);
        assert!(error.contains(text), "{error}");
    };
    check_changed("/spec", Value::Null, "\"template\" is missing");
    check_changed("/spec/completions", json!(1_i64 << 40), "out of range");
    check_changed("/spec/completions", json!(2.5), "2.5");
    check_changed("/apiVersion", json!("batch/v2"), "no schema");
    check_changed(
        "/spec/template/spec/containers/0/env/0/valueFrom/secretKeyRef",
        Value::Null,
        "\"key\" is missing",
    );
}
