//! Tests of README and `docs/`: every command line in them parses, TOML blocks parse, versions are right. Rust blocks of
//! `docs/` are compiled as doc tests of the library; README's are excerpts of an example.

use std::path::{Path, PathBuf};

use super::parse;

/// A code block of a page.
struct Block {
    page: String,
    language: String,
    text: String,
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn blocks() -> Vec<Block> {
    let docs = std::fs::read_dir(repository().join("docs")).expect("docs");
    let pages = docs.map(|entry| entry.expect("an entry").path());
    let pages = pages.filter(|path| path.extension().is_some_and(|end| end == "md"));
    let mut found = Vec::new();
    for page in pages.chain([repository().join("README.md")]) {
        let text = std::fs::read_to_string(&page).expect("a page");
        let mut parts = text.split("\n```");
        parts.next();
        while let (Some(block), _) = (parts.next(), parts.next()) {
            let (language, text) = block.split_once('\n').unwrap_or((block, ""));
            found.push(Block {
                page: page.display().to_string(),
                language: language.to_string(),
                text: text.to_string(),
            });
        }
    }
    found
}

/// The words of a line after `paceline`, if the line runs it directly or through another program.
fn command(line: &str) -> Option<Vec<String>> {
    let line = line.split(" #").next().unwrap_or(line);
    let words: Vec<&str> = line.split_whitespace().collect();
    let is_program = |at: &usize| {
        // The backend of torch.distributed has the name of the program.
        let is_value = *at > 0 && words[at - 1] == "--backend";
        ["paceline", "target/debug/paceline"].contains(&words[*at]) && !is_value
    };
    let at = (0..words.len()).find(is_program)?;
    let ends = |word: &&&str| !["|", ">", "2>", "&&", "&", ";"].contains(*word);
    let words = words[at..].iter().take_while(ends);
    Some(
        words
            .map(|word| word.trim_matches(['"', '\'']).to_string())
            .collect(),
    )
}

#[test]
fn every_command_line_is_one_that_the_program_takes() {
    let mut count = 0;
    for block in blocks() {
        if !["sh", "bash", "console"].contains(&block.language.as_str()) {
            continue;
        }
        let text = block.text.replace("\\\n", " ");
        for line in text.lines() {
            // In a console block, only the typed lines.
            let typed = line.strip_prefix("$ ").or_else(|| line.strip_prefix("# "));
            let Some(line) = typed.or((block.language != "console").then_some(line)) else {
                continue;
            };
            let Some(words) = command(line) else { continue };
            count += 1;
            // Help and the version are no errors.
            if let Err(stop) = parse(words)
                && stop.0.use_stderr()
            {
                panic!("{}: {line}: {}", block.page, stop.0);
            }
        }
    }
    assert!(count > 30, "{count} command lines found");
}

#[test]
fn toml_parses_and_names_the_version_of_burn_that_is_built_with() {
    let manifest = std::fs::read_to_string(repository().join("Cargo.toml")).expect("a manifest");
    let manifest: toml::Table = manifest.parse().expect("TOML");
    let burn = &manifest["workspace"]["dependencies"]["burn"]["version"];
    let mut seen = 0;
    for block in blocks().iter().filter(|block| block.language == "toml") {
        let table = block.text.parse::<toml::Table>();
        let table = table.unwrap_or_else(|error| panic!("{}: {error}", block.page));
        if let Some(dependencies) = table.get("dependencies") {
            assert_eq!(&dependencies["burn"]["version"], burn, "{}", block.page);
            seen += 1;
        }
    }
    assert!(seen > 0, "no page has a [dependencies] block");
}

#[test]
fn rust_code_on_a_page_is_a_doc_test_or_an_excerpt_of_the_example() {
    let library = include_str!("../lib.rs");
    let example = include_str!("../../../../examples/minimal.rs");
    for block in blocks()
        .iter()
        .filter(|block| block.language.starts_with("rust"))
    {
        assert_eq!(
            block.language, "rust",
            "{}: a block that is not run",
            block.page
        );
        if example.contains(block.text.trim_end()) {
            continue;
        }
        let name = Path::new(&block.page).file_name().expect("a name");
        let name = name.to_string_lossy();
        assert!(
            library.contains(&format!("{name}\")]")),
            "{name} is no doc test"
        );
    }
}
