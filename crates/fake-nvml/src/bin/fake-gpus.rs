//! `fake-gpus NAME COMMAND...`: runs any command as on a machine of the fixtures. `fake-gpus --list` names them.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use paceline_fake_nvml::{Fixture, names};

const USAGE: &str = "usage: fake-gpus NAME COMMAND [ARGUMENT...]\n       fake-gpus --list";

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match &arguments[..] {
        [list] if list == "--list" => {
            for (name, about) in names() {
                println!("{name:<20} {about}");
            }
            ExitCode::SUCCESS
        }
        [name, command, rest @ ..] => {
            let why = name
                .to_str()
                .ok_or_else(|| USAGE.to_owned())
                .and_then(set_up)
                // Returns only where it fails: the command takes this process's place, with its terminal and its signals.
                .map(|machine| {
                    let error = Command::new(command)
                        .args(rest)
                        .envs(machine.variables())
                        .exec();
                    format!("{}: {error}", Path::new(command).display())
                });
            let (Ok(why) | Err(why)) = why;
            eprintln!("fake-gpus: {why}");
            ExitCode::from(3)
        }
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
}

/// Sets the machine up beside this program: the command outlives this one, so nothing could take a temporary folder away.
fn set_up(name: &str) -> Result<Fixture, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let folder = program.with_file_name("fake-gpus-machines").join(name);
    let told = |error: std::io::Error| format!("{}: {error}", folder.display());
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(told)?;
    }
    std::fs::create_dir_all(&folder).map_err(told)?;
    Fixture::set_up(name, &folder)
}
