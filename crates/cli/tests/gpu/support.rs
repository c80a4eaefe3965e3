//! Commands on a machine of the fixtures, and what they are expected to print.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use paceline_fake_nvml::Fixture;

/// The launcher.
pub(crate) const LAUNCHER: &str = env!("CARGO_BIN_EXE_paceline-launcher");
/// When it is `write`, what is printed becomes what is expected.
const VARIABLE: &str = "PACELINE_EXPECT";

/// How a command ended, and what it said; the fixture's folders are called ROOT and LIBRARY.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// `paceline-launcher gpu WORDS` on a machine of the fixtures, with its variables and no others.
pub(crate) fn gpu(fixture: &Fixture, words: &[&str]) -> End {
    gpu_with(fixture, words, &[])
}

/// The same with more variables.
pub(crate) fn gpu_with(fixture: &Fixture, words: &[&str], variables: &[(&str, &str)]) -> End {
    let output = Command::new(LAUNCHER)
        .arg("gpu")
        .args(words)
        .env_clear()
        .envs(fixture.variables())
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .output()
        .expect("the launcher runs");
    end(fixture, &output)
}

fn end(fixture: &Fixture, output: &Output) -> End {
    let text = |bytes: &[u8]| {
        let text = String::from_utf8(bytes.to_vec()).expect("text");
        let text = text.replace(&fixture.root().display().to_string(), "ROOT");
        text.replace(&fixture.library().display().to_string(), "LIBRARY")
    };
    End {
        code: output.status.code(),
        out: text(&output.stdout),
        err: text(&output.stderr),
    }
}

impl End {
    /// Everything, as it is kept in a file: stdout, then how it ended and stderr where there is something to say.
    pub(crate) fn transcript(&self) -> String {
        let mut text = self.out.clone();
        if !self.err.is_empty() {
            text.push_str(&format!("--- stderr\n{}", self.err));
        }
        if self.code != Some(0) {
            text.push_str(&format!("--- exit code {:?}\n", self.code));
        }
        text
    }
}

/// Compares texts with files of what is expected, such as `topo/two-cards-ns.txt`; all of them before it fails.
pub(crate) fn expect(texts: impl IntoIterator<Item = (String, String)>) {
    let writes = std::env::var(VARIABLE).is_ok_and(|word| word == "write");
    let mut failures = Vec::new();
    for (file, text) in texts {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/gpu/expected")
            .join(&file);
        let Some(difference) = difference(&path, &text) else {
            continue;
        };
        if writes {
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::fs::write(&path, &text).expect("written");
            failures.push(format!("{file}: {difference}; written anew"));
        } else {
            failures.push(format!("{file}: {difference}\n{text}"));
        }
    }
    let advice = match writes {
        true => format!("read what changed, then run the test without {VARIABLE}"),
        false => format!("{VARIABLE}=write takes over what is printed"),
    };
    assert!(failures.is_empty(), "{}\n{advice}", failures.join("\n"));
}

/// How a text differs from a file's, if it does.
fn difference(path: &Path, text: &str) -> Option<String> {
    let expect = match std::fs::read_to_string(path) {
        Ok(expect) => expect,
        Err(error) => return Some(format!("nothing to compare with ({error})")),
    };
    if expect == text {
        return None;
    }
    let mut lines = expect.lines().zip(text.lines());
    let first = lines.position(|(expect, got)| expect != got);
    let shorter = expect.lines().count().min(text.lines().count());
    Some(format!(
        "differs from line {} on",
        first.unwrap_or(shorter) + 1
    ))
}

/// The names of the files in a folder of what is expected, without their suffix.
pub(crate) fn expected(folder: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/gpu/expected")
        .join(folder);
    let entries = std::fs::read_dir(path).expect("the folder");
    let stem = |entry: std::io::Result<std::fs::DirEntry>| {
        let path = entry.expect("an entry").path();
        path.file_stem()
            .expect("a name")
            .to_string_lossy()
            .into_owned()
    };
    let mut names: Vec<String> = entries.map(stem).collect();
    names.sort();
    names
}
