//! From what the user typed to the file that is executed, checked before anything is started, and to the arguments of each
//! rank.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::Access;

use crate::error::LaunchError;
use crate::job::RunAs;

/// A program that exists and may be executed, with the arguments that stand before the user's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Executable {
    pub(crate) file: PathBuf,
    pub(crate) leading_args: Vec<OsString>,
}

/// Names an interpreter for Python scripts and modules, as for torchrun.
pub(crate) const PYTHON_VARIABLE: &str = "PYTHON_EXEC";

/// The interpreters that are looked for in `PATH`, the first one first.
pub(crate) const PYTHONS: [&str; 2] = ["python3", "python"];

/// torchrun replaces this by the local rank in a program's arguments.
const LOCAL_RANK_MACRO: &[u8] = b"${local_rank}";

/// Finds the program. Names without a slash come from `PATH`; scripts and modules run under Python, which does not keep
/// back what they print.
pub(crate) fn resolve(
    program: &Path,
    run_as: RunAs,
    var: &dyn Fn(&str) -> Option<OsString>,
) -> Result<Executable, LaunchError> {
    let is_script = program.extension() == Some(OsStr::new("py"));
    let leading = match run_as {
        RunAs::Module => {
            module_name(program)?;
            vec!["-u".into(), "-m".into(), program.into()]
        }
        RunAs::ByName if !is_script => Vec::new(),
        RunAs::Program => Vec::new(),
        RunAs::ByName | RunAs::Script => {
            script(program)?;
            vec!["-u".into(), program.into()]
        }
    };
    let file = if leading.is_empty() {
        find(program, var)?
    } else {
        python(var)?
    };
    Ok(Executable {
        file,
        leading_args: leading,
    })
}

/// An argument as this rank gets it: torchrun's `${local_rank}` is the rank's number on its machine, and `$${local_rank}`
/// the text itself. Nothing else is replaced, so that `$$` and `$NAME` reach a shell.
pub(crate) fn for_rank(arg: &OsStr, local_rank: usize) -> Cow<'_, OsStr> {
    let bytes = arg.as_bytes();
    let mut rest = bytes;
    let mut made = Vec::new();
    while let Some(at) = find_bytes(rest, LOCAL_RANK_MACRO) {
        let (before, macro_on) = rest.split_at(at);
        if let Some(before) = before.strip_suffix(b"$") {
            made.extend_from_slice(before);
            made.extend_from_slice(LOCAL_RANK_MACRO);
        } else {
            made.extend_from_slice(before);
            made.extend_from_slice(local_rank.to_string().as_bytes());
        }
        rest = &macro_on[LOCAL_RANK_MACRO.len()..];
    }
    if rest.len() == bytes.len() {
        return Cow::Borrowed(arg);
    }
    made.extend_from_slice(rest);
    Cow::Owned(OsString::from_vec(made))
}

fn find_bytes(text: &[u8], word: &[u8]) -> Option<usize> {
    text.windows(word.len()).position(|part| part == word)
}

/// Python takes a file, or a folder or archive with a `__main__.py`.
fn script(program: &Path) -> Result<(), LaunchError> {
    let name = program.display();
    if !program.exists() {
        return Err(not_found(program, false));
    }
    let (why, hint) = if program.is_dir() && !program.join("__main__.py").is_file() {
        let why = "it is a folder without a __main__.py";
        (why, "name a script in it".into())
    } else if rustix::fs::access(program, Access::READ_OK).is_err() {
        let hint = match program.is_dir() {
            true => "name a script in it".into(),
            false => format!("try `chmod +r {name}`"),
        };
        ("this user may not read it", hint)
    } else {
        return Ok(());
    };
    Err(LaunchError::Usage {
        message: format!("script `{name}` cannot be run: {why}"),
        hint: Some(hint),
    })
}

/// A path in the place of a module's name is a mistake that Python explains once for each rank.
fn module_name(program: &Path) -> Result<(), LaunchError> {
    let is_path = program.as_os_str().as_bytes().contains(&b'/');
    if is_path || program.extension() == Some(OsStr::new("py")) {
        let hint = "to run a file, leave --module out; otherwise name the module: `package.train` for package/train.py";
        return Err(LaunchError::Usage {
            message: format!(
                "`{}` is a file name, but --module takes the name of a module",
                program.display()
            ),
            hint: Some(hint.into()),
        });
    }
    Ok(())
}

fn python(var: &dyn Fn(&str) -> Option<OsString>) -> Result<PathBuf, LaunchError> {
    let named = var(PYTHON_VARIABLE).filter(|python| !python.is_empty());
    let missing = |why: String, hint: String| LaunchError::Machine {
        message: format!("no Python found: {why}"),
        hint: Some(hint),
        source: None,
    };
    if let Some(python) = &named {
        let python = Path::new(python);
        return find(python, var).map_err(|why| {
            missing(
                format!("{PYTHON_VARIABLE} is `{}`", python.display()),
                format!(
                    "{why}; unset {PYTHON_VARIABLE} to take the first {} in PATH",
                    PYTHONS.join(" or ")
                ),
            )
        });
    }
    let mut found = PYTHONS.iter().map(|name| find(Path::new(name), var));
    found.find_map(Result::ok).ok_or_else(|| {
        missing(
            format!("neither {} is in PATH", PYTHONS.join(" nor ")),
            format!(
                "activate the environment that has Python, or set {PYTHON_VARIABLE} to the interpreter; --no-python runs a \
                 program that needs none"
            ),
        )
    })
}

/// The file of a program that this user may execute: a name without a slash comes from `PATH`, which `var` looks up.
///
/// *Errors*: no such program, or one that may not be executed.
pub fn find(
    program: &Path,
    var: &dyn Fn(&str) -> Option<OsString>,
) -> Result<PathBuf, LaunchError> {
    let searched_path = !program.as_os_str().as_bytes().contains(&b'/');
    let not_found = || not_found(program, searched_path);
    if program.as_os_str().is_empty() || !searched_path && !program.exists() {
        return Err(not_found());
    }
    if !searched_path {
        return executable(program);
    }
    // As the shell does: a file that may not be executed does not hide one further on, but is named if it is the only one.
    let path = var("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let mut refused = None;
    for folder in std::env::split_paths(&path) {
        let candidate = if folder.as_os_str().is_empty() {
            Path::new(".").join(program)
        } else {
            folder.join(program)
        };
        if !candidate.is_file() {
            continue;
        }
        match executable(&candidate) {
            Ok(file) => return Ok(file),
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(refused.unwrap_or_else(not_found))
}

/// `searched_path` if the name has no slash.
fn not_found(program: &Path, searched_path: bool) -> LaunchError {
    let name = program.display();
    let (place, hint) = match std::env::current_dir() {
        _ if searched_path && program.is_file() => (
            " in PATH",
            format!(
                "to run the file of the current folder, write `./{name}`, or `--run-path {name}` if it is a Python script"
            ),
        ),
        _ if searched_path => (
            " in PATH",
            "install it, or add its folder to PATH; to run a file that is not in PATH, give its folder: `./program`"
                .into(),
        ),
        Ok(folder) => ("", format!("a relative path counts from {}", folder.display())),
        Err(_) => (
            "",
            "a relative path counts from the folder the launcher is started in".into(),
        ),
    };
    LaunchError::Usage {
        message: format!("program `{name}` not found{place}"),
        hint: Some(hint),
    }
}

fn executable(file: &Path) -> Result<PathBuf, LaunchError> {
    let why = match file.metadata() {
        Ok(data) if data.is_dir() => "it is a folder",
        Ok(data) if data.permissions().mode() & 0o111 == 0 => "it has no execute permission",
        Ok(_) if rustix::fs::access(file, Access::EXEC_OK).is_err() => {
            "this user may not execute it"
        }
        Ok(_) => return Ok(file.to_owned()),
        Err(_) => "it cannot be looked at",
    };
    let name = file.display();
    let hint = match file.is_dir() {
        true => "name a program in it".into(),
        false => format!("try `chmod +x {name}`, or --run-path if it is a Python script"),
    };
    Err(LaunchError::Usage {
        message: format!("program `{name}` cannot be executed: {why}"),
        hint: Some(hint),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A folder with `tool` (executable), `plain` (not), `train.py` and `python` (executable).
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, mode) in [
            ("tool", 0o755),
            ("plain", 0o644),
            ("train.py", 0o644),
            ("python", 0o755),
        ] {
            let file = folder.path().join(name);
            fs::write(&file, "").unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        }
        folder
    }

    /// Resolves with `PATH=<folder>` and `PYTHON_EXEC=<folder>/python`; `{}` in both texts is the folder.
    fn check(program: &str, expect: &str) {
        check_as(RunAs::ByName, program, expect);
    }

    fn check_as(run_as: RunAs, program: &str, expect: &str) {
        let folder = folder();
        let here = folder.path().to_str().unwrap();
        let var = |name: &str| match name {
            "PATH" => Some(OsString::from(here)),
            "PYTHON_EXEC" => Some(format!("{here}/python").into()),
            _ => None,
        };
        let text = match resolve(Path::new(&program.replace("{}", here)), run_as, &var) {
            Ok(found) => {
                let mut words = vec![found.file.into_os_string()];
                words.extend(found.leading_args);
                words.join(OsStr::new(" ")).into_string().unwrap()
            }
            Err(error) => error.to_string(),
        };
        assert_eq!(text, expect.replace("{}", here), "{program}");
    }

    #[test]
    fn a_name_is_looked_up_in_path() {
        check("tool", "{}/tool");
        check("nothing", "program `nothing` not found in PATH");
        check(
            "plain",
            "program `{}/plain` cannot be executed: it has no execute permission",
        );
        check("", "program `` not found in PATH");
    }

    #[test]
    fn a_path_is_taken_as_it_is() {
        check("{}/tool", "{}/tool");
        check("{}/nothing", "program `{}/nothing` not found");
        check(
            "{}/plain",
            "program `{}/plain` cannot be executed: it has no execute permission",
        );
        check("{}/", "program `{}/` cannot be executed: it is a folder");
    }

    #[test]
    fn a_python_script_runs_under_python_unbuffered() {
        check("{}/train.py", "{}/python -u {}/train.py");
        check("{}/absent.py", "program `{}/absent.py` not found");
    }

    #[test]
    fn a_program_may_be_run_as_it_is_as_a_script_or_as_a_module() {
        use RunAs::{Module, Program, Script};
        check_as(Script, "{}/plain", "{}/python -u {}/plain");
        check_as(
            Script,
            "{}",
            "script `{}` cannot be run: it is a folder without a __main__.py",
        );
        check_as(Program, "{}/tool", "{}/tool");
        check_as(
            Program,
            "{}/train.py",
            "program `{}/train.py` cannot be executed: it has no execute permission",
        );
        check_as(Module, "package.train", "{}/python -u -m package.train");
        for path in ["package/train", "train.py"] {
            check_as(
                Module,
                path,
                &format!("`{path}` is a file name, but --module takes the name of a module"),
            );
        }
    }

    #[test]
    fn python_is_the_one_that_is_named_or_the_first_in_path() {
        let folder = folder();
        let here = folder.path().to_str().expect("text").to_owned();
        let script = folder.path().join("train.py");
        let with = |python: Option<&str>, path: &str| {
            let var = |name: &str| match name {
                "PATH" => Some(OsString::from(path)),
                PYTHON_VARIABLE => python.map(OsString::from),
                _ => None,
            };
            resolve(&script, RunAs::ByName, &var).map(|found| found.file)
        };
        let python = folder.path().join("python");
        assert_eq!(with(None, &here).expect("found"), python);
        assert_eq!(with(Some(""), &here).expect("found"), python);
        let newer = folder.path().join("python3");
        fs::copy(&python, &newer).expect("copied");
        assert_eq!(with(None, &here).expect("found"), newer);
        assert_eq!(with(Some("python"), &here).expect("found"), python);
        let check = |error: LaunchError, text: &str, hint: &str| {
            assert_eq!(error.to_string(), text);
            let got = error.hint().expect("a hint");
            assert!(got.contains(hint), "{got}");
            assert_eq!(error.exit_code(), 3);
        };
        check(
            with(None, "/nowhere").expect_err("nothing"),
            "no Python found: neither python3 nor python is in PATH",
            "set PYTHON_EXEC",
        );
        check(
            with(Some("/no/python"), &here).expect_err("nothing"),
            "no Python found: PYTHON_EXEC is `/no/python`",
            "program `/no/python` not found",
        );
    }

    #[test]
    fn each_rank_finds_its_local_rank_in_the_arguments() {
        let check = |arg: &str, expect: &str| {
            assert_eq!(for_rank(OsStr::new(arg), 3), OsStr::new(expect), "{arg}");
        };
        check("--device=cuda:${local_rank}", "--device=cuda:3");
        check("${local_rank}/${local_rank}", "3/3");
        check("$${local_rank}", "${local_rank}");
        for left_alone in ["", "$local_rank", "echo $$ ${rank}", "${local_rank"] {
            check(left_alone, left_alone);
        }
    }

    #[test]
    fn what_cannot_be_executed_comes_with_advice_that_fits() {
        let hint = |program: &Path| {
            let error = resolve(program, RunAs::ByName, &|_| None).expect_err("refused");
            error.hint().expect("a hint")
        };
        let folder = folder();
        let plain = folder.path().join("plain");
        let got = hint(&plain);
        assert!(
            got.contains(&format!("chmod +x {}", plain.display())),
            "{got}"
        );
        assert!(got.contains("--run-path"), "{got}");
        let got = hint(folder.path());
        assert!(got.contains("a program in it"), "{got}");
    }

    #[test]
    fn a_missing_program_comes_with_advice() {
        let error = resolve(Path::new("no-such-program"), RunAs::ByName, &|_| None).unwrap_err();
        let hint = error.hint().expect("a hint");
        assert!(
            hint.starts_with("install it, or add its folder to PATH"),
            "{hint}"
        );
        assert_eq!(error.exit_code(), 2);
    }
}
