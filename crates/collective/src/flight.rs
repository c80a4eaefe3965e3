//! The flight recorder: what each rank did last, kept in a ring and written to a file when a group fails.
//!
//! Every group of a rank records its operations in a ring of [`RECORDS`] (`PACELINE_FLIGHT_RECORDS`; 0 turns it off), at
//! the cost of a few plain stores. When a group fails, for whatever reason, each of its ranks writes what it has, with
//! the error and what it was doing, as one JSON file into the folder that `PACELINE_FLIGHT_DIR` names; without the
//! variable there are no files. `paceline run --flight-dir DIR` sets it for all ranks.
//!
//! The files of all ranks together tell more than any rank's error: who called something else, who never came, who was
//! stuck in another group, who sent something else than what is waited for. A rank whose group does not come about leaves
//! a file too, with how far it came. `paceline doctor --flight DIR` reads them and says in one sentence what went wrong
//! (`flight` in paceline-doctor).
//!
//! # Files
//!
//! `rank_3.RUN.0.json` is rank 3's dump of the job with the name `RUN` before its first restart. A file is written beside
//! and renamed, so it is whole or absent. A second dump of the same process replaces its first; another job's file is
//! never replaced: the name then gets a number, `rank_3.RUN.0.2.json`. [`Dump`] is the format. The file lies where all
//! users of the machine could read it only if the folder lets them; it holds no data and no secrets, but names of hosts.
//!
//! *Source*: the idea and the name come from the flight recorder of PyTorch's `ProcessGroupNCCL`.

mod formation;
mod p2p;
mod record;
mod ring;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::net::nodename;
use paceline_rendezvous::token::Token;
use parking_lot::Mutex;

pub(crate) use self::formation::Formation;
pub(crate) use self::p2p::{Mailbox, Noted, P2pCall};
pub use self::record::{
    DUMP_BYTES_MAX, Dump, FORMAT, Failure, FailureKind, Forming, GroupDump, Record, State,
    Unclaimed,
};
use self::record::{GROUPS_MAX, RECORDS_MAX};
pub(crate) use self::ring::{Entry, Membership, Partner, Recorder};
use crate::error::Error;

/// Operations that each group's recorder keeps unless `PACELINE_FLIGHT_RECORDS` says otherwise.
pub const RECORDS: usize = 1024;

/// Groups that failed and are kept for later dumps although they are gone.
const FAILED_MAX: usize = 16;
/// Files of other jobs that a dump steps aside for.
const OTHER_FILES_MAX: usize = 1000;
/// Longest part of the job's name in a file's name, so that the whole stays below what file systems allow.
const RUN_NAME_BYTES_MAX: usize = 64;
/// Longest text that a dump repeats.
const TEXT_BYTES_MAX: usize = 16 << 10;

/// Who records.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    /// The same for all ranks of one start of one job.
    pub(crate) job: String,
    pub(crate) run_id: String,
    pub(crate) restart: u32,
    pub(crate) rank: usize,
    pub(crate) world: usize,
}

impl Identity {
    /// The rank that `env` describes.
    ///
    /// A job is known by a digest of all that its ranks share. Its secret token makes it unlike any other; where the token
    /// is derived from public values, a later job at the same address looks the same, and the files' times tell.
    pub(crate) fn of(env: &WorkerEnv) -> Self {
        let seed = format!(
            "flight\0{}\0{}\0{}\0{}\0{}\0{}",
            env.token.to_hex(),
            env.run_id,
            env.restart_count,
            env.master_addr,
            env.master_port,
            env.world
        );
        Self::named(env, Token::derived(&seed).to_hex()[..16].to_owned())
    }

    /// The rank that `env` describes, of a job that the caller has a name for.
    pub(crate) fn named(env: &WorkerEnv, job: String) -> Self {
        Self {
            job,
            run_id: env.run_id.clone(),
            restart: env.restart_count,
            rank: env.rank,
            world: env.world,
        }
    }
}

/// One rank's recorders, and the file that they end in.
///
/// One for each rank, shared by all groups that the rank is a member of, so that a failure of one of them leaves the whole
/// picture.
#[derive(Debug)]
pub(crate) struct Flight {
    identity: Identity,
    records: usize,
    dir: Option<PathBuf>,
    origin: Instant,
    recorders: Mutex<Recorders>,
    /// Bytes that this rank has sent to others, over all groups.
    sent: Arc<AtomicU64>,
    /// The file that this rank has written; the lock is held while it writes.
    written: Mutex<Option<PathBuf>>,
}

#[derive(Debug, Default)]
struct Recorders {
    alive: Vec<Weak<Recorder>>,
    /// Kept alive although their groups may be gone: the first failure is what everybody wants to see.
    failed: Vec<Arc<Recorder>>,
}

impl Flight {
    /// The recorder of the rank that `env` describes, as its variables want it.
    pub(crate) fn new(env: &WorkerEnv, identity: Identity) -> Arc<Self> {
        Arc::new(Self {
            identity,
            records: env.flight_records.unwrap_or(RECORDS),
            dir: env.flight_dir.as_ref().map(PathBuf::from),
            origin: Instant::now(),
            recorders: Mutex::default(),
            sent: Arc::default(),
            written: Mutex::default(),
        })
    }

    /// When times in the records begin.
    pub(crate) fn origin(&self) -> Instant {
        self.origin
    }

    /// The count of bytes that this rank has sent to others, over all groups.
    pub(crate) fn sent(&self) -> &Arc<AtomicU64> {
        &self.sent
    }

    /// A recorder for a group; it is in all dumps from now on, for as long as the group lives.
    pub(crate) fn recorder(&self, membership: Membership) -> Arc<Recorder> {
        let recorder = Arc::new(Recorder::new(membership, self.records, self.origin));
        let mut recorders = self.recorders.lock();
        recorders.alive.retain(|other| other.strong_count() > 0);
        recorders.alive.push(Arc::downgrade(&recorder));
        recorder
    }

    /// Leaves a dump that says why a group did not come about.
    ///
    /// *Blocks*: and *Errors*: as [`failed`](Self::failed).
    pub(crate) fn never_formed(
        &self,
        membership: Membership,
        formation: &Formation,
        error: &Error,
    ) {
        let recorder = self.recorder(membership);
        let forming = formation.recorded(&recorder.membership.ranks, error);
        let doing = format!("could not {}", forming.phase);
        let set = recorder.forming.set(forming);
        set.expect("the recorder is new");
        self.failed(&recorder, error, &doing);
    }

    /// Notes the first failure of a group and writes the dump. Later calls for the same group wait for the first one to
    /// be done.
    ///
    /// *Blocks*: while the file is written: tell the peers first. *Errors*: none; a file that cannot be written is one
    /// line on standard error.
    pub(crate) fn failed(&self, recorder: &Arc<Recorder>, error: &Error, doing: &str) {
        let mut written = self.written.lock();
        let failure = failure(recorder, error, Instant::now());
        if recorder.failure.set(failure).is_err() {
            return;
        }
        {
            let mut recorders = self.recorders.lock();
            if recorders.failed.len() < FAILED_MAX {
                recorders.failed.push(recorder.clone());
            }
        }
        let Some(dir) = &self.dir else { return };
        match write(&dump(self, doing), dir, written.as_deref()) {
            Ok(path) => *written = Some(path),
            // Nobody may listen any more.
            Err(error) => {
                let _ = writeln!(
                    io::stderr(),
                    "rank {}: cannot write its flight record into {}: {error}",
                    self.identity.rank,
                    dir.display()
                );
            }
        }
    }
}

/// What a rank has recorded up to now, on demand. `doing` is the end of "rank 2 ...".
///
/// *Cost*: a copy of the rings; nothing that is being recorded waits for it.
pub(crate) fn dump(flight: &Flight, doing: &str) -> Dump {
    let mut recorders: Vec<_> = {
        let recorders = flight.recorders.lock();
        recorders.alive.iter().filter_map(Weak::upgrade).collect()
    };
    // Where there are too many, those that failed are needed most.
    recorders.sort_by_key(|recorder| recorder.failure.get().is_none());
    recorders.truncate(GROUPS_MAX);
    // Each has a ring of its operations and one of its sends and receives.
    let each = RECORDS_MAX / 2 / recorders.len().max(1);
    let mut groups: Vec<GroupDump> = Vec::new();
    for recorder in recorders {
        let group = recorder.dump(each);
        // A group may form again under its old name; the one that comes first is the one that failed or is older.
        if groups.iter().all(|other| other.name != group.name) {
            groups.push(group);
        }
    }
    let Identity {
        job,
        run_id,
        restart,
        rank,
        world,
    } = flight.identity.clone();
    let unix = SystemTime::now().duration_since(UNIX_EPOCH);
    Dump {
        paceline_flight: FORMAT,
        version: env!("CARGO_PKG_VERSION").into(),
        job,
        run_id: cut(&run_id),
        restart,
        rank,
        world,
        host: nodename(),
        pid: std::process::id(),
        taken_unix_ns: unix.map_or(0, |since| since.as_nanos() as u64),
        taken_ns: flight.origin.elapsed().as_nanos() as u64,
        doing: cut(doing),
        groups,
    }
}

/// Writes a dump beside and renames it. Replaces `own`, the file of this rank's dump before; nothing else.
fn write(dump: &Dump, dir: &Path, own: Option<&Path>) -> io::Result<PathBuf> {
    fs::create_dir_all(dir)?;
    let mut file = tempfile::Builder::new()
        .prefix(".rank")
        .permissions(readable())
        .tempfile_in(dir)?;
    file.write_all(&dump.to_json())?;
    if let Some(own) = own {
        file.persist(own)?;
        return Ok(own.to_path_buf());
    }
    let stem = format!(
        "rank_{}.{}.{}",
        dump.rank,
        in_a_name(&dump.run_id),
        dump.restart
    );
    for number in 1..=OTHER_FILES_MAX {
        let name = match number {
            1 => format!("{stem}.json"),
            number => format!("{stem}.{number}.json"),
        };
        let path = dir.join(name);
        match file.persist_noclobber(&path) {
            Ok(_) => return Ok(path),
            Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => file = error.file,
            Err(error) => return Err(error.error),
        }
    }
    Err(io::Error::other(format!(
        "there are {OTHER_FILES_MAX} files of other jobs"
    )))
}

/// What a file gets that is made in the ordinary way; the process's mask takes away from it.
fn readable() -> fs::Permissions {
    use std::os::unix::fs::PermissionsExt;
    fs::Permissions::from_mode(0o666)
}

/// A job's name as a part of a file's.
fn in_a_name(run_id: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    let name: String = run_id
        .chars()
        .map(|c| if plain(c) { c } else { '_' })
        .take(RUN_NAME_BYTES_MAX)
        .collect();
    if name.is_empty() { "none".into() } else { name }
}

fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(TEXT_BYTES_MAX)].to_owned()
}

fn failure(recorder: &Recorder, error: &Error, at: Instant) -> Failure {
    let kind = match error {
        Error::PeerLost { .. } => FailureKind::Died,
        Error::PeerLeft { .. } => FailureKind::Left,
        Error::Mismatch { .. } => FailureKind::Mismatch,
        Error::Revoked { .. } => FailureKind::Revoked,
        Error::Call { .. } | Error::AbortedHere { .. } | Error::ThreadGone { .. } => {
            FailureKind::GaveUp
        }
        Error::Aborted { .. } => FailureKind::Aborted,
        error if error.is_deadline() => FailureKind::Deadline,
        _ => FailureKind::Other,
    };
    let blamed = match error {
        Error::Deadline { culprits, .. } => culprits.clone(),
        Error::Absent { missing, .. } => missing.clone(),
        error => error.culprit().into_iter().collect(),
    };
    let global = |rank: usize| recorder.membership.ranks.get(rank).copied();
    let text = match error {
        Error::Store { source, .. } => format!("{error}: {source}"),
        error => error.to_string(),
    };
    Failure {
        kind,
        text: cut(&text),
        culprits: blamed.into_iter().filter_map(global).collect(),
        at_ns: recorder.ns(at) - 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flight(dir: &Path, rank: usize, run_id: &str) -> Arc<Flight> {
        let env = WorkerEnv {
            rank,
            world: 4,
            run_id: run_id.into(),
            flight_dir: Some(dir.display().to_string()),
            ..WorkerEnv::alone()
        };
        Flight::new(&env, Identity::of(&env))
    }

    fn world(flight: &Flight, name: &str) -> Arc<Recorder> {
        flight.recorder(Membership {
            name: name.into(),
            ranks: vec![3, 2, 1, 0],
            transport: "tcp",
        })
    }

    fn died(rank: usize) -> Error {
        Error::PeerLost {
            rank,
            place: "host b, pid 7".into(),
            during: None,
        }
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn read(path: &Path) -> Dump {
        Dump::parse(&fs::read(path).unwrap()).unwrap()
    }

    #[test]
    fn the_first_failure_of_a_group_is_written_once_with_the_job_in_the_name() {
        let dir = tempfile::tempdir().unwrap();
        let flight = flight(dir.path(), 3, "../my run");
        let group = world(&flight, "world");
        flight.failed(&group, &died(1), "is in the data loader");
        flight.failed(&group, &died(2), "is computing");
        assert_eq!(names(dir.path()), ["rank_3.___my_run.0.json"]);
        let dump = read(&dir.path().join("rank_3.___my_run.0.json"));
        assert_eq!(
            (dump.rank, dump.world, dump.run_id.as_str()),
            (3, 4, "../my run")
        );
        assert_eq!(dump.doing, "is in the data loader");
        let failure = dump.groups[0].failure.as_ref().unwrap();
        assert_eq!(failure.kind, FailureKind::Died);
        // Rank 1 of this group is the job's rank 2.
        assert_eq!(failure.culprits, [2]);
        assert_eq!(failure.text, "rank 1 (host b, pid 7) died");
    }

    #[test]
    fn a_rank_replaces_its_own_file_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (flight(dir.path(), 0, "run"), flight(dir.path(), 0, "run"));
        let (dp, pp) = (world(&first, "dp"), world(&first, "pp"));
        first.failed(&dp, &died(1), "");
        second.failed(&world(&second, "dp"), &died(1), "");
        // The first group is gone by then, but not forgotten.
        drop(dp);
        first.failed(&pp, &died(3), "");
        assert_eq!(
            names(dir.path()),
            ["rank_0.run.0.2.json", "rank_0.run.0.json"]
        );
        let dump = read(&dir.path().join("rank_0.run.0.json"));
        let groups: Vec<&str> = dump
            .groups
            .iter()
            .map(|group| group.name.as_str())
            .collect();
        assert_eq!(groups, ["dp", "pp"]);
        assert!(dump.groups.iter().all(|group| group.failure.is_some()));
    }

    #[test]
    fn a_folder_that_cannot_be_written_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let flight = flight(&file, 0, "run");
        let group = world(&flight, "world");
        flight.failed(&group, &died(1), "");
        assert!(group.failure.get().is_some());
        assert_eq!(names(dir.path()), ["file"]);
    }

    #[test]
    fn ranks_of_one_job_have_one_name_for_it_and_other_jobs_others() {
        let env = |rank, restart_count| WorkerEnv {
            rank,
            restart_count,
            ..WorkerEnv::alone()
        };
        let job = |rank, restart| Identity::of(&env(rank, restart)).job;
        assert_eq!(job(0, 0), job(1, 0));
        assert_ne!(job(0, 0), job(0, 1));
        let other = WorkerEnv {
            token: Token::derived("another"),
            ..env(0, 0)
        };
        assert_ne!(job(0, 0), Identity::of(&other).job);
    }
}
