//! Slurm: a batch script that starts one launcher on each node.
//!
//! The launchers find each other by what Slurm tells each step. Where the job may lose nodes they meet instead at the
//! first node, and Slurm is told to let the job live.

use std::fmt::{self, Write as _};
use std::str::FromStr;

use crate::error::SubmitError;
use crate::submission::{Ranks, Submission, without_nul};

/// Slurm's own options. Names are sbatch's; the texts are their help.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
pub struct Options {
    /// Partition
    #[arg(long, short = 'p', value_name = "NAME")]
    pub partition: Option<String>,
    /// Whom to charge
    #[arg(long, short = 'A', value_name = "NAME")]
    pub account: Option<String>,
    /// Quality of service
    #[arg(long, short = 'q', value_name = "NAME")]
    pub qos: Option<String>,
    /// Features that nodes must have
    #[arg(long, short = 'C', value_name = "FEATURES")]
    pub constraint: Option<String>,
    /// Folder that the job works in [default: where it is submitted]
    #[arg(long, short = 'D', value_name = "DIR")]
    pub chdir: Option<String>,
    /// File for what the job prints [default: NAME-%j.out; %j is the job's number]
    #[arg(long, short = 'o', value_name = "FILE")]
    pub output: Option<String>,
    /// Folder for the output of every rank; `NAME-JOBID` if not given.
    #[arg(skip)]
    pub log_dir: Option<String>,
    /// Whole nodes, with all their CPUs unless --cpus-per-rank says less
    #[arg(long)]
    pub exclusive: bool,
    /// Ask the ranks to save and stop so long before the time is up, by TERM, USR1, INT or HUP
    #[arg(long = "signal", value_name = "SIGNAL@SECONDS")]
    pub notice: Option<Notice>,
    /// Queue the job again when it is preempted, when a node fails, and when --signal has stopped it
    #[arg(long)]
    pub requeue: bool,
    /// A command for the script to run first, such as 'module load cuda'
    #[arg(long, value_name = "COMMAND")]
    pub setup: Vec<String>,
    /// Another option of sbatch, such as --sbatch-option=--reservation=NAME
    #[arg(long = "sbatch-option", value_name = "OPTION")]
    #[arg(allow_hyphen_values = true)]
    pub directives: Vec<String>,
}

/// A signal, so many seconds before the time limit; written `USR1@120` as for `sbatch --signal`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notice {
    signal: (&'static str, u8),
    seconds: u64,
}

/// The signals that ask a job to stop, and the launcher's exit code after each.
const SIGNALS: [(&str, u8); 4] = [("HUP", 129), ("INT", 130), ("USR1", 138), ("TERM", 143)];

/// Slurm stores 16 bits.
const NOTICE_SECONDS_MAX: u64 = 65_535;

impl FromStr for Notice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str =
            "expected SIGNAL@SECONDS such as TERM@120, with TERM, USR1, INT or HUP";
        let (name, seconds) = text.split_once('@').ok_or(EXPECTED)?;
        let name = name.strip_prefix("SIG").unwrap_or(name);
        let signal = SIGNALS.into_iter().find(|(known, _)| *known == name);
        let seconds = seconds.parse().ok();
        let seconds = seconds.filter(|seconds| (1..=NOTICE_SECONDS_MAX).contains(seconds));
        match (signal, seconds) {
            (Some(signal), Some(seconds)) => Ok(Self { signal, seconds }),
            _ => Err(EXPECTED),
        }
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.signal.0, self.seconds)
    }
}

/// The batch script.
///
/// *Errors*: something cannot be said to Slurm.
pub fn render(job: &Submission, options: &Options) -> Result<String, SubmitError> {
    job.check()?;
    check_name(&job.name)?;
    let mut script = format!(
        "#!/bin/bash\n\
         # Written by `paceline submit slurm`. To submit it again: sbatch {name}.sbatch\n",
        name = job.name
    );
    for directive in directives(job, options)? {
        let _ = writeln!(script, "#SBATCH {directive}");
    }
    script.push_str("\nset -eo pipefail\n");
    options.log_dir.as_deref().map_or(Ok(()), without_nul)?;
    for line in &options.setup {
        without_nul(line)?;
        let _ = writeln!(script, "{line}");
    }
    for (name, value) in &job.env {
        let _ = writeln!(script, "export {name}={}", quoted(value));
    }
    script.push_str(TOKEN);
    if job.nodes.is_elastic() {
        script.push_str(MEETING);
    }
    script.push_str(&start(job, options)?);
    Ok(script)
}

const TOKEN: &str = r"
# The secret by which the launchers and ranks of this job know each other. It is made here, each time the job starts,
# so that it is in no file, and it travels in the environment, so that `ps` does not show it.
PACELINE_JOB_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export PACELINE_JOB_TOKEN
";

const MEETING: &str = r#"
# The job goes on without nodes that it loses. The launchers meet at the first node, on a port that other jobs do not use.
endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 10000))
"#;

/// The `#SBATCH` lines.
fn directives(job: &Submission, options: &Options) -> Result<Vec<String>, SubmitError> {
    let mut lines = vec![format!("--job-name={}", job.name)];
    let (min, max) = (job.nodes.min(), job.nodes.max());
    lines.push(if job.nodes.is_elastic() {
        format!("--nodes={min}-{max}")
    } else {
        format!("--nodes={max}")
    });
    // One launcher on each node; it starts the ranks. With a range Slurm would take it for a reason to give the least.
    if !job.nodes.is_elastic() {
        lines.push("--ntasks-per-node=1".to_owned());
    }
    let cpus = cpus_per_task(job, options)?;
    let resources = [
        cpus.map(|cpus| format!("--cpus-per-task={cpus}")),
        options.exclusive.then(|| "--exclusive".to_owned()),
        job.gpus_per_node
            .map(|gpus| format!("--gpus-per-node={gpus}")),
        job.memory
            .map(|memory| format!("--mem={}M", memory.mebibytes())),
        job.time_limit.map(|limit| format!("--time={limit}")),
    ];
    lines.extend(resources.into_iter().flatten());
    for (setting, value) in [
        ("--partition", &options.partition),
        ("--account", &options.account),
        ("--qos", &options.qos),
        ("--constraint", &options.constraint),
        ("--chdir", &options.chdir),
    ] {
        if let Some(value) = value {
            lines.push(format!("{setting}={}", directive_value(setting, value)?));
        }
    }
    let output = match &options.output {
        Some(output) => directive_value("--output", output)?,
        None => format!("{}-%j.out", job.name),
    };
    lines.push(format!("--output={output}"));
    match options.notice {
        // The script itself is told, so that it knows why the ranks stopped.
        Some(Notice { seconds, .. }) if options.requeue => {
            lines.push(format!("--signal=B:USR1@{seconds}"));
        }
        Some(notice) => lines.push(format!("--signal={notice}")),
        None => {}
    }
    if options.requeue {
        lines.push("--requeue".to_owned());
        lines.push("--open-mode=append".to_owned());
    } else {
        lines.push("--no-requeue".to_owned());
    }
    if job.nodes.is_elastic() {
        lines.push("--no-kill".to_owned());
    }
    for directive in &options.directives {
        if directive.chars().any(char::is_control) || !directive.starts_with('-') {
            let expected = "an option of sbatch such as --reservation=NAME, on one line";
            return Err(SubmitError::setting("--sbatch-option", directive, expected));
        }
        lines.push(directive.clone());
    }
    Ok(lines)
}

/// CPUs to ask for; none where the whole node is asked for, whatever it has.
fn cpus_per_task(job: &Submission, options: &Options) -> Result<Option<usize>, SubmitError> {
    if options.exclusive && job.cpus_per_rank.is_none() {
        return Ok(None);
    }
    if let (Ranks::Named(word), None) = (&job.ranks, job.cpus_per_rank)
        && !options.exclusive
        && word != "gpu"
    {
        let expected =
            "a number, or --exclusive beside it: Slurm gives a job only the CPUs that it asks for";
        return Err(SubmitError::setting("--nproc-per-node", word, expected));
    }
    job.cpus_per_node()
}

/// The last part: the launchers, and the steps after their end.
fn start(job: &Submission, options: &Options) -> Result<String, SubmitError> {
    let srun = srun(job, options)?;
    let notice = options.notice.filter(|_| options.requeue);
    let Some(Notice {
        signal: (name, code),
        ..
    }) = notice
    else {
        return Ok(format!("\n{}\n{srun}\n", how_it_ends(job)));
    };
    Ok(format!(
        r#"
# Some time before its end Slurm tells this script, which asks the ranks to save and stop.
asked=
trap 'asked=1; scancel --signal={name} "$SLURM_JOB_ID"' USR1

{how}
{srun} &
launchers=$!

# The signal interrupts the first wait.
status=0
wait "$launchers" || status=$?
if [[ $asked ]]; then
    status=0
    wait "$launchers" || status=$?
fi

# {code} says that the ranks stopped because they were asked to. The job goes on in its next turn.
if [[ $asked && $status == {code} ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"#,
        how = how_it_ends(job)
    ))
}

fn how_it_ends(job: &Submission) -> &'static str {
    if job.nodes.is_elastic() {
        "# One launcher on each node. Those that are left go on when one is lost; Slurm is told not to end them."
    } else {
        "# One launcher on each node. All of them end by themselves when one of their ranks fails or a node is lost, and say\n\
         # why; Slurm kills what is still there a minute after the first has ended."
    }
}

/// The command line that starts the launchers, over several lines.
fn srun(job: &Submission, options: &Options) -> Result<String, SubmitError> {
    let mut lines = vec![
        "srun --ntasks-per-node=1 --nodes=\"$SLURM_JOB_NUM_NODES\" --export=ALL --input=none"
            .to_owned(),
    ];
    // A step does not inherit --cpus-per-task since Slurm 22.05. Ranks find their places among the CPUs themselves.
    lines.push(match cpus_per_task(job, options)? {
        Some(cpus) => format!("--cpus-per-task={cpus} --cpu-bind=none"),
        None => "--cpu-bind=none".to_owned(),
    });
    lines.push(if job.nodes.is_elastic() {
        "--kill-on-bad-exit=0 --wait=0 --no-kill".to_owned()
    } else {
        "--kill-on-bad-exit=0 --wait=60".to_owned()
    });
    lines.push(format!("{} run", quoted(&job.launcher)));
    lines.push(if job.nodes.is_elastic() {
        // Slurm may have given fewer nodes than the maximum; there is no need to wait for the others.
        format!(
            "--nnodes {}:\"$SLURM_JOB_NUM_NODES\" --rdzv-backend c10d --rdzv-endpoint \"$endpoint\" \
             --rdzv-id \"$SLURM_JOB_ID\"",
            job.nodes.min()
        )
    } else {
        // Slurm says it too; where a launcher cannot read that, jobs of one node each would pass for the job.
        format!("--nnodes {}", job.nodes.max())
    });
    lines.push(match &options.log_dir {
        Some(folder) => format!("--log-dir {}", quoted(folder)),
        None => format!("--log-dir {}-\"$SLURM_JOB_ID\"", job.name),
    });
    let own = shutdown_timeout(job, options)?;
    let words = job.options(own);
    lines.push(joined(words.iter().map(String::as_str)));
    lines.push(joined(job.command()));
    Ok(lines.join(" \\\n    "))
}

/// Time left for the last steps after the ranks have ended.
const RESERVE_SECONDS: u64 = 10;

/// How long a rank may take to stop: as long as Slurm leaves it, unless given.
fn shutdown_timeout(job: &Submission, options: &Options) -> Result<Option<u64>, SubmitError> {
    let Some(Notice { seconds, .. }) = options.notice else {
        return Ok(job.shutdown_timeout);
    };
    match job.shutdown_timeout {
        Some(ranks) if ranks >= seconds => Err(SubmitError::grace(ranks, seconds, "--signal")),
        Some(ranks) => Ok(Some(ranks)),
        None => Ok(Some(seconds.saturating_sub(RESERVE_SECONDS).max(1))),
    }
}

/// A name that is safe in a file's name, in `#SBATCH` and in a comment.
fn check_name(name: &str) -> Result<(), SubmitError> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let starts_well = name
        .bytes()
        .next()
        .is_some_and(|byte| byte.is_ascii_alphanumeric());
    if starts_well && name.len() <= 128 && name.bytes().all(is_plain) {
        return Ok(());
    }
    let why = "expected letters, digits, dots, dashes and underscores, a letter or digit first";
    Err(SubmitError::name(name, why))
}

/// A value behind `#SBATCH --name=`. sbatch reads these lines with rules of its own: blanks end a value outside of quotes,
/// `#` begins a comment.
fn directive_value(setting: &'static str, value: &str) -> Result<String, SubmitError> {
    let refused = |letter: char| letter.is_control() || "\"'\\".contains(letter);
    if value.is_empty() || value.contains(refused) {
        let expected = "a value without quotes, backslashes and line ends";
        return Err(SubmitError::setting(setting, value, expected));
    }
    let is_plain = |letter: char| letter.is_alphanumeric() || "._-/%:,+=@&|*![]~".contains(letter);
    Ok(if value.chars().all(is_plain) {
        value.to_owned()
    } else {
        format!("\"{value}\"")
    })
}

fn joined<'a>(words: impl Iterator<Item = &'a str>) -> String {
    words.map(quoted).collect::<Vec<_>>().join(" ")
}

/// The word as the shell reads it back.
fn quoted(word: &str) -> String {
    let nul = "words with NUL bytes were refused before";
    shlex::try_quote(word).expect(nul).into_owned()
}

#[cfg(test)]
mod tests;
