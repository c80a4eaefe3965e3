//! `paceline gpu p2p`: whether the devices reach each other as the driver says, tried out, and what NCCL has to be told.

mod text;

use std::io::{self, Write};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use clap::Args;
use paceline_doctor::Severity;
use paceline_doctor::links::{Judgement, P2P_DISABLE, Surroundings, judge};
use paceline_nccl::pairs::{LinkReport, PairTest, serve, test};
use paceline_nccl::{NcclError, Places};
use paceline_words::{Lang, say};
use serde::Serialize;

use crate::exit::{Exit, Failure, note, warn};
use crate::flags::{finish, print, seconds, whole};
use crate::usage;

/// What `paceline gpu p2p` is told.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct P2pArgs {
    /// Print one JSON object with everything
    #[arg(long)]
    pub json: bool,
    /// Size of a copy, in MiB
    #[arg(long, value_name = "MIB", value_parser = whole::<usize>(1..=1024), default_value = "16")]
    size: usize,
    /// How long one way of two devices may take before it counts as stuck
    #[arg(long, value_name = "SECONDS", value_parser = seconds(1..=600), default_value = "10")]
    timeout: Duration,
    /// Language of the report [default: the locale's, else en]
    #[arg(long, value_name = "LANG", value_parser = usage::langs())]
    lang: Option<Lang>,
    /// The step to begin with, in the child that tries links
    #[arg(long, value_name = "STEP", value_parser = whole::<usize>(0..=100_000), hide = true)]
    pub child: Option<usize>,
}

impl P2pArgs {
    /// How links are tested.
    fn test(&self) -> PairTest {
        PairTest {
            message_bytes: self.size << 20,
            timeout: self.timeout,
            ..PairTest::default()
        }
    }
}

/// What is printed as JSON.
#[derive(Serialize)]
struct Json<'a> {
    paceline_gpu_p2p: u32,
    report: &'a LinkReport,
    #[serde(flatten)]
    judgement: &'a Judgement,
}

pub(super) const HELP: &str = "\
Copies data between each two devices, both ways: through the host's memory, and directly
where the driver says that it can, by copies and by a kernel as NCCL's. What arrives is
compared with what was sent. It needs NVIDIA's driver, and neither NCCL nor CUDA's toolkit;
`train --device cuda` and `run` do the same before they start several ranks.

Devices are those that CUDA_VISIBLE_DEVICES shows, with CUDA's numbers, which may differ
from those of nvidia-smi. PACELINE_CUDA_LIBRARY names the driver's library where the
loader does not find libcuda.so.1. docs/gpu.md explains what to do about broken links.

Exit codes: 0 no link is broken; 1 a link is broken, or the host's memory cannot be
reached; 2 wrong usage; 3 there is no driver or no device, or it does not answer.

Examples:
  Before the first job on a new machine:
    paceline gpu p2p
  What a script has to set for NCCL to work here:
    paceline gpu p2p --json | jq -r '.variables[] | join(\"=\")'";

/// Tries all links, prints what was found, and says by its code whether all is well.
///
/// *Errors*: there is no driver or no device, or it does not answer.
pub(super) fn run(args: &P2pArgs) -> Result<Exit, Failure> {
    if let Some(first) = args.child {
        // The answer is useless once the parent is gone; a link that is stuck would keep the child forever.
        let _ =
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
        return finish(serve(&args.test(), first, &mut io::stdout().lock()));
    }
    let refused = |error: NcclError| Failure::new(Exit::Environment, &error, error.hint());
    let report = try_all(&args.test()).map_err(refused)?;
    let lang = usage::report_lang(args.lang, args.json);
    let judgement = judge(&report, &Surroundings::here(), lang);
    let exit = print(|out| match args.json {
        true => {
            let json = Json {
                paceline_gpu_p2p: 1,
                report: &report,
                judgement: &judgement,
            };
            serde_json::to_writer(&mut *out, &json)?;
            writeln!(out)
        }
        false => out.write_all(text::of(&report, &judgement, lang).as_bytes()),
    });
    exit.map(|_| match judgement.worst() == Some(Severity::Error) {
        true => Exit::JobFailed,
        false => Exit::Done,
    })
}

/// Looks for NCCL, before ranks are started that need it.
///
/// *Errors*: it is not installed, or too old.
pub fn require_nccl() -> Result<(), NcclError> {
    paceline_nccl::installed(&Places::from_env()).map(drop)
}

/// Tests the links between the devices of this process, before ranks are started on them. The result is what NCCL has to be told
/// there, without variables that the user has set; what was found and what follows is said on stderr, in this language.
///
/// *Cost*: as [`test()`]: by estimate a second or two with two devices whose links are well, some seconds with eight; with one the
/// driver's start.
///
/// *Errors*: there is no driver or no device, or it does not answer.
pub fn settings(lang: Lang) -> Result<Vec<(String, String)>, NcclError> {
    let report = try_all(&PairTest::default())?;
    let judgement = judge(&report, &Surroundings::here(), lang);
    let findings = judgement.findings.iter();
    for finding in findings.filter(|finding| finding.severity != Severity::Note) {
        warn(&finding.what);
        if !finding.fix.is_empty() {
            warn(&finding.fix);
        }
    }
    for (name, value) in &judgement.variables {
        warn(&say!(
            lang,
            "{name}={value} is set for the ranks",
            "랭크에 설정함: {name}={value}"
        ));
    }
    Ok(judgement.variables)
}

/// The same for a program that is started as so many ranks, which may or may not use the devices: nothing is tested unless it sees
/// several and the user leaves NCCL the choice. A program that is started again is neither tested nor told about again.
pub(crate) fn settings_for_program(ranks: usize, lang: Lang) -> &'static [(String, String)] {
    static TESTED: OnceLock<Vec<(String, String)>> = OnceLock::new();
    let set = |name| std::env::var(name).ok();
    let shows_one = set("CUDA_VISIBLE_DEVICES").is_some_and(|list| !list.contains(','));
    if ranks < 2 || shows_one || set(P2P_DISABLE).is_some() {
        return &[];
    }
    if paceline_gpu::devices::count().map_or(true, |devices| devices < 2) {
        return &[];
    }
    TESTED.get_or_init(|| {
        settings(lang).unwrap_or_else(|error| {
            note(&error.to_string());
            Vec::new()
        })
    })
}

/// Tries all links, in children of this program, which has to have the command of this module.
fn try_all(pairs: &PairTest) -> Result<LinkReport, NcclError> {
    let program = std::env::current_exe().map_err(|error| {
        NcclError::untestable(&format!("this program's file is not known: {error}"), None)
    })?;
    let size = pairs
        .message_bytes
        .div_ceil(1 << 20)
        .clamp(1, 1024)
        .to_string();
    test(pairs, &mut |first| {
        let mut command = Command::new(&program);
        command.args(["gpu", "p2p", "--size", &size, "--child", &first.to_string()]);
        if let Some(library) = &pairs.places.cuda {
            command.env(paceline_nccl::CUDA_VARIABLE, library);
        }
        command
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags;

    fn told(words: &str) -> Result<P2pArgs, clap::Error> {
        let words = std::iter::once("p2p").chain(words.split_whitespace());
        let matches = flags::command::<P2pArgs>("p2p").try_get_matches_from(words)?;
        Ok(flags::read(&matches))
    }

    #[test]
    fn sizes_and_times_have_bounds() {
        let test = told("--size 4 --timeout 2").expect("fine").test();
        assert_eq!(
            (test.message_bytes, test.timeout),
            (4 << 20, Duration::from_secs(2))
        );
        assert_eq!(told("").expect("fine").test().message_bytes, 16 << 20);
        for words in [
            "--size 0",
            "--size 2000",
            "--timeout 0",
            "--timeout 601",
            "--size -1",
        ] {
            let error = told(words).expect_err(words);
            assert!(
                error.to_string().contains("expected a whole number"),
                "{error}"
            );
        }
    }
}
