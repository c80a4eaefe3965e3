//! A machine of the fixtures, set up: a copy of the library, what it answers, and a folder that stands for `/`.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::library::Library;
use crate::model::Machine;
use crate::root::Root;
use crate::state::MACHINE_VARIABLE;

/// What a fixture has that says what the driver answers; without it the machine has no NVIDIA driver.
const MACHINE: &str = "nvml.json";

/// What a fixture has that says which files the system has.
const ROOT: &str = "root.json";

/// Where the fixtures are.
fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// The fixtures, and what each is an example of.
pub fn names() -> Vec<(String, String)> {
    let entries = std::fs::read_dir(fixtures()).expect("the fixtures");
    let folders = entries.filter_map(|entry| {
        let folder = entry.ok()?.path();
        let described = folder.join(ROOT);
        if !described.is_file() {
            return None;
        }
        let about = Root::read(&described).map_or_else(|why| why, |root| root.about);
        Some((folder.file_name()?.to_str()?.to_owned(), about))
    });
    let mut names: Vec<_> = folders.collect();
    names.sort();
    names
}

/// A machine that is not there.
///
/// *Example*:
/// ```no_run
/// let machine = paceline_fake_nvml::Fixture::open("two-cards-ns");
/// // Point the program at machine.library() and machine.root(), then look whom it asked.
/// assert_eq!(machine.calls("nvmlDeviceGetP2PStatus"), 10);
/// ```
#[derive(Debug)]
pub struct Fixture {
    library: Library,
    root: PathBuf,
    variables: Vec<(String, String)>,
    json: Option<String>,
    /// Goes with the fixture.
    _folder: Option<TempDir>,
}

impl Fixture {
    /// Sets a machine up in a temporary folder.
    ///
    /// *Errors*: panics where there is no such fixture, or the library is not built.
    pub fn open(name: &str) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let mut fixture = Self::set_up(name, folder.path()).unwrap_or_else(|why| panic!("{why}"));
        fixture._folder = Some(folder);
        fixture.library.keep();
        fixture
    }

    /// Sets a machine up in an empty folder that stays.
    ///
    /// *Errors*: in words, where there is no such fixture or it is wrong.
    pub fn set_up(name: &str, folder: &Path) -> Result<Self, String> {
        let described = fixtures().join(name);
        if !described.join(ROOT).is_file() {
            let names: Vec<_> = names().into_iter().map(|(name, _)| name).collect();
            return Err(format!("no fixture {name}; there are {}", names.join(", ")));
        }
        let root = Root::read(&described.join(ROOT))?;
        let place = folder.join("root");
        root.write(&place)?;
        let machine = described.join(MACHINE);
        let (library, json) = if machine.is_file() {
            let json = std::fs::read_to_string(&machine).map_err(|error| error.to_string())?;
            let parsed = Machine::parse(json.as_bytes())
                .map_err(|error| format!("{}: {error}", machine.display()))?;
            let without: Vec<&str> = parsed.without.iter().map(String::as_str).collect();
            let library = Library::copy_to(folder, &without);
            std::fs::write(library.machine(), &json).map_err(|error| error.to_string())?;
            (library, Some(json))
        } else {
            (Library::in_folder(folder), None)
        };
        Ok(Self {
            library,
            root: place,
            variables: root.variables.into_iter().collect(),
            json,
            _folder: None,
        })
    }

    /// The library that stands for NVIDIA's; nothing lies there where the machine has none.
    pub fn library(&self) -> &Path {
        self.library.path()
    }

    /// The folder that stands for `/`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// What the library answers, to be changed and given to [`Self::load`].
    pub fn json(&self) -> Value {
        let json = self.json.as_deref().expect("this machine has a driver");
        serde_json::from_str(json).expect("it was read before")
    }

    /// Lets the library answer something else in this process. Calls are counted from 0 again.
    pub fn load(&self, json: &Value) {
        self.library.load(&json.to_string());
    }

    /// How often a function of the library was called in this process.
    pub fn calls(&self, function: &str) -> u64 {
        self.library.calls(function)
    }

    /// Variables of the environment with which a program takes itself to be on this machine.
    pub fn variables(&self) -> Vec<(String, String)> {
        let text = |path: &Path| path.display().to_string();
        let mut variables = vec![
            ("PACELINE_NVML_LIBRARY".to_owned(), text(self.library())),
            (MACHINE_VARIABLE.to_owned(), text(&self.library.machine())),
            ("PACELINE_SYSTEM_ROOT".to_owned(), text(self.root())),
        ];
        variables.extend(self.variables.clone());
        variables
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fixture_can_be_set_up() {
        let names = names();
        assert!(names.len() > 1, "{names:?}");
        for (name, about) in names {
            assert!(
                !about.is_empty(),
                "{name} does not say what it is an example of"
            );
            let fixture = Fixture::open(&name);
            assert!(fixture.root().join("proc").is_dir(), "{name}");
        }
    }

    #[test]
    fn a_fixture_that_is_not_there_is_told_with_those_that_are() {
        let folder = TempDir::new().expect("a folder");
        let error = Fixture::set_up("nowhere", folder.path()).expect_err("no fixture");
        assert!(
            error.starts_with("no fixture nowhere; there are "),
            "{error}"
        );
    }
}
