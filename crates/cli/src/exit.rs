//! How the program ends: the exit codes, and a failure as people read it.

use std::fmt;
use std::io::{self, Write};
use std::num::NonZeroU8;
use std::path::Path;
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use paceline_launch::marked;
use paceline_words::{Lang, Word};

const ERROR: Word = Word::new("error", "오류");
const HINT: Word = Word::new("hint", "조치");

/// Every way the program ends. This is the table of exit codes.
///
/// | code | meaning |
/// |---|---|
/// | 0 | done |
/// | 1 | the job failed, where no rank left a code of its own; or `doctor` found a fault |
/// | 2 | wrong usage or configuration: correct the command, nothing was started |
/// | 3 | the environment lacks something: a device, a port, disk space, a permission |
/// | 4 | a deadline passed |
/// | 1 to 127 | the code of the rank that failed first, as it left it |
/// | 128 + n | stopped by signal n, or the rank that failed first was |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Everything asked for was done.
    Done,
    /// The job failed, also where that is only read of it.
    JobFailed,
    /// The job failed, and the rank that failed first left this code.
    Child(NonZeroU8),
    /// The command line, the environment's settings or a file of settings is wrong.
    Usage,
    /// The machine lacks what the job needs.
    Environment,
    /// Something did not happen in time.
    Deadline,
    /// This signal ended the job.
    Signal(u8),
}

impl Exit {
    /// The ending for a child's exit code; codes that no process can leave count as a failed job.
    #[must_use]
    pub fn of_child(code: i32) -> Self {
        match u8::try_from(code).map(NonZeroU8::new) {
            Ok(Some(code)) => Self::Child(code),
            Ok(None) => Self::Done,
            Err(_) => Self::JobFailed,
        }
    }

    /// The number that the shell sees.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::JobFailed => 1,
            Self::Child(code) => code.get(),
            Self::Usage => 2,
            Self::Environment => 3,
            Self::Deadline => 4,
            Self::Signal(number) => 128_u8.saturating_add(number),
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// Why the program ends early, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    exit: Exit,
    message: String,
    hint: Option<String>,
}

impl Failure {
    /// A failure with the error's own words.
    pub fn new(exit: Exit, error: impl fmt::Display, hint: Option<String>) -> Self {
        Self {
            exit,
            message: error.to_string(),
            hint,
        }
    }

    /// The command line or the configuration is wrong.
    pub fn usage(message: impl fmt::Display) -> Self {
        Self::new(Exit::Usage, message, None)
    }

    /// The machine lacks something.
    pub fn environment(message: impl fmt::Display) -> Self {
        Self::new(Exit::Environment, message, None)
    }

    /// A file cannot be written.
    pub fn unwritten(path: &Path, error: &io::Error) -> Self {
        Self::environment(format!("{} cannot be written: {error}", path.display()))
    }

    /// How the program ends.
    #[must_use]
    pub fn exit(&self) -> Exit {
        self.exit
    }

    /// The message, and the advice in a line of its own.
    #[must_use]
    pub fn in_full(&self) -> String {
        match &self.hint {
            Some(hint) => format!("{}\nhint: {hint}", self.message),
            None => self.message.clone(),
        }
    }

    /// Prints the failure on stderr and returns how to end.
    ///
    /// Coloured on a terminal only, and not with `NO_COLOR`.
    #[must_use]
    pub fn report(&self) -> Exit {
        put(false, |out| self.write(Lang::En, out));
        self.exit
    }

    /// The same for a message in this language about the job, which its launchers on all nodes have.
    pub(crate) fn report_in(&self, lang: Lang) -> Exit {
        put(true, |out| self.write(lang, out));
        self.exit
    }

    /// `error: ...`, then `hint: ...`, with colours for a stream that removes them where they are unwanted.
    fn write(&self, lang: Lang, out: &mut dyn Write) -> io::Result<()> {
        labelled(out, ERROR.of(lang), AnsiColor::Red, &self.message)?;
        match &self.hint {
            Some(hint) => labelled(out, HINT.of(lang), AnsiColor::Cyan, hint),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Prints a warning on stderr, in the manner of a failure.
pub fn warn(message: &str) {
    say("warning", AnsiColor::Yellow, message);
}

/// Prints on stderr what was chosen without being asked for, in the manner of a failure.
pub fn note(message: &str) {
    say("note", AnsiColor::Blue, message);
}

/// Prints advice on stderr, in the manner of a failure's.
pub fn hint(message: &str) {
    hint_in(Lang::En, message);
}

/// The same in this language.
pub fn hint_in(lang: Lang, message: &str) {
    say(HINT.of(lang), AnsiColor::Cyan, message);
}

/// Prints a line on stderr, for people.
pub fn tell(line: impl fmt::Display) {
    put(false, |out| writeln!(out, "{line}"));
}

fn say(label: &str, color: AnsiColor, message: &str) {
    put(false, |out| labelled(out, label, color, message));
}

/// Writes to stderr: with colours where they are wanted, or with marks for a launcher that reads it. A closed stderr takes no
/// message; the program goes on, and the exit code still tells.
fn put(is_of_job: bool, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) {
    if marked("", is_of_job).is_none() {
        let _ = write(&mut anstream::stderr().lock());
        return;
    }
    let mut bytes = Vec::new();
    let _ = write(&mut anstream::StripStream::new(&mut bytes));
    let text = marked(&String::from_utf8_lossy(&bytes), is_of_job).unwrap_or_default();
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

fn labelled(out: &mut dyn Write, label: &str, color: AnsiColor, text: &str) -> io::Result<()> {
    let style = Style::new().bold().fg_color(Some(color.into()));
    writeln!(out, "{style}{label}:{style:#} {text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ending_has_its_code() {
        let check = |exit: Exit, code| assert_eq!(exit.code(), code, "{exit:?}");
        check(Exit::Done, 0);
        check(Exit::JobFailed, 1);
        check(Exit::Usage, 2);
        check(Exit::Environment, 3);
        check(Exit::Deadline, 4);
        check(Exit::Signal(2), 130);
        check(Exit::Signal(9), 137);
        check(Exit::Signal(15), 143);
    }

    #[test]
    fn a_childs_code_is_passed_on() {
        let check = |code, expect| assert_eq!(Exit::of_child(code).code(), expect, "{code}");
        check(0, 0);
        check(1, 1);
        check(7, 7);
        check(255, 255);
        check(256, 1);
        check(-1, 1);
    }

    fn printed(failure: &Failure, colored: bool) -> String {
        let mut bytes = Vec::new();
        if colored {
            failure.write(Lang::En, &mut bytes).expect("memory");
        } else {
            failure
                .write(Lang::En, &mut anstream::StripStream::new(&mut bytes))
                .expect("memory");
        }
        String::from_utf8(bytes).expect("text")
    }

    #[test]
    fn a_failure_is_an_error_line_and_a_hint_line() {
        let failure = Failure::new(
            Exit::Environment,
            "no GPU",
            Some("use --use-gpu 0".to_owned()),
        );
        assert_eq!(
            printed(&failure, false),
            "error: no GPU\nhint: use --use-gpu 0\n"
        );
        let bare = Failure::environment("no GPU");
        assert_eq!(printed(&bare, false), "error: no GPU\n");
        assert_eq!(
            printed(&bare, true),
            "\u{1b}[1m\u{1b}[31merror:\u{1b}[0m no GPU\n"
        );
    }
}
