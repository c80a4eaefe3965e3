//! What a flight recorder leaves behind, as data: one dump for each rank, and how a file is believed.

use serde::{Deserialize, Serialize};

/// The version of the format that this build writes and reads.
pub const FORMAT: u32 = 1;

/// Longest file that is read or written.
///
/// *Units*: bytes.
pub const DUMP_BYTES_MAX: u64 = 64 << 20;
/// Most records of one dump, over all its groups; the newest are kept.
pub(super) const RECORDS_MAX: usize = 131_072;
/// Most groups of one dump.
pub(super) const GROUPS_MAX: usize = 256;
/// Largest world that is believed.
const WORLD_MAX: usize = paceline_rendezvous::env::WORLD_MAX;

/// What one rank recorded, with who it is and what it was doing. One file each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dump {
    /// [`FORMAT`] of the build that wrote it.
    pub paceline_flight: u32,
    /// Version of the library that wrote it.
    pub version: String,
    /// The same for all ranks of one start of one job, and for no other.
    pub job: String,
    /// The job's name, which need not be unique.
    pub run_id: String,
    /// How often the job had been restarted.
    pub restart: u32,
    /// Global rank.
    pub rank: usize,
    /// Ranks of the job.
    pub world: usize,
    /// The rank's host.
    pub host: String,
    /// The rank's process.
    pub pid: u32,
    /// When the dump was taken, since 1970. With `taken_ns` it turns all other times into the time of day.
    ///
    /// *Units*: ns.
    pub taken_unix_ns: u64,
    /// The same moment since this rank's recorder began, as all other times are.
    ///
    /// *Units*: ns.
    pub taken_ns: u64,
    /// What the rank was doing: the end of "rank 2 ...".
    pub doing: String,
    /// The groups that it was a member of: those that failed, then the others, each in the order in which they formed.
    pub groups: Vec<GroupDump>,
}

/// One group as one of its ranks recorded it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupDump {
    /// The group's name, the same on all its ranks.
    pub name: String,
    /// Global ranks of its members, in the order of their ranks in the group.
    pub ranks: Vec<usize>,
    /// How bytes travelled.
    pub transport: String,
    /// Number of the last operation submitted; 0 for none.
    pub submitted: u64,
    /// For a group that this rank could not form, how far it came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forming: Option<Forming>,
    /// The group's first failure, when it has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
    /// The last operations of all ranks together, by ascending number.
    pub records: Vec<Record>,
    /// The last sends and receives, by ascending number; they are numbered by themselves.
    #[serde(default, alias = "parcels", skip_serializing_if = "Vec::is_empty")]
    pub p2p: Vec<Record>,
    /// Messages that have arrived and that no receive has asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unclaimed: Vec<Unclaimed>,
}

/// How far a group came that did not come about, as one rank saw it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forming {
    /// What this rank was doing: the end of "could not ...".
    pub phase: String,
    /// Global ranks that had come so far, as far as this rank knew.
    pub arrived: Vec<usize>,
    /// How long this rank had tried.
    ///
    /// *Units*: ns.
    pub waited_ns: u64,
}

/// Messages of one rank with one tag that no receive has asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unclaimed {
    /// Their sender, as a rank of the group.
    pub from: u64,
    /// Their tag.
    pub tag: u64,
    /// How many there are.
    pub messages: u64,
}

/// The first failure of a group, as one rank saw it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What kind of failure.
    pub kind: FailureKind,
    /// The error's own words.
    pub text: String,
    /// Global ranks that the error blames.
    pub culprits: Vec<usize>,
    /// When it was latched.
    ///
    /// *Units*: ns since this rank's recorder began.
    pub at_ns: u64,
}

/// What kind of failure broke a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// Time ran out.
    Deadline,
    /// A rank ended without leaving.
    Died,
    /// A rank left in order while it was needed.
    Left,
    /// The ranks called different operations.
    Mismatch,
    /// This rank gave up by itself: it panicked, called wrongly, or said so.
    GaveUp,
    /// Another rank said that the group is broken, and why.
    Aborted,
    /// The launcher ended the job.
    Revoked,
    /// Anything else; the text tells.
    #[serde(other)]
    Other,
}

/// How far an operation has come on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It waits for the operations before it.
    Submitted,
    /// This rank has joined it and waits for the others.
    Started,
    /// This rank had joined it when it failed.
    Failed,
    /// It is complete here.
    Finished,
}

/// One operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The group's running number, from 1.
    pub seq: u64,
    /// Which operation, in the words of [`op_name`](paceline_rendezvous::page::op_name).
    pub op: String,
    /// How numbers are combined, where they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduce: Option<String>,
    /// Type of the numbers, where there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<String>,
    /// Elements of the whole call.
    pub elements: u64,
    /// Bytes of this rank's memory that the operation reads or writes.
    pub bytes: u64,
    /// Gradient bucket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket: Option<u64>,
    /// Training step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Root, as a rank of the group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<u64>,
    /// The other rank of a send or receive, as a rank of the group; none for a receive from any that got nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<u64>,
    /// Tag of a send or receive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<u64>,
    /// Leaves of the tree of a reduction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaves: Option<u64>,
    /// How it was carried out.
    pub algorithm: String,
    /// How far it has come.
    pub state: State,
    /// When it was handed over. All times in ns since this rank's recorder began.
    pub submitted_ns: u64,
    /// When this rank joined it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_ns: Option<u64>,
    /// When the last rank had joined it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrived_ns: Option<u64>,
    /// When it finished or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ns: Option<u64>,
}

impl State {
    /// In the order of their declaration.
    pub(super) const ALL: [Self; 4] =
        [Self::Submitted, Self::Started, Self::Failed, Self::Finished];
}

impl Record {
    /// Whether this rank has entered the operation.
    pub fn is_joined(&self) -> bool {
        self.state > State::Submitted
    }

    /// Whether this rank was still in it, or in it when the group failed.
    pub fn is_open(&self) -> bool {
        self.is_joined() && self.state != State::Finished
    }
}

impl Dump {
    /// Reads a file's bytes.
    ///
    /// *Errors*: what is wrong with them, in words; a dump that comes back keeps every promise of its fields, also one
    /// that was written to mislead.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Version {
            paceline_flight: u32,
        }
        let version: Version =
            serde_json::from_slice(bytes).map_err(|error| format!("no flight record: {error}"))?;
        if version.paceline_flight != FORMAT {
            return Err(format!(
                "its format is {}, but this program reads {FORMAT}",
                version.paceline_flight
            ));
        }
        let dump: Self =
            serde_json::from_slice(bytes).map_err(|error| format!("no flight record: {error}"))?;
        dump.check()?;
        Ok(dump)
    }

    /// One JSON object on one line.
    pub fn to_json(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("a dump has text keys and plain numbers");
        bytes.push(b'\n');
        bytes
    }

    /// A time of this dump as the time of day, since 1970.
    ///
    /// *Units*: ns.
    pub fn unix_ns(&self, at_ns: u64) -> u64 {
        let before = self.taken_ns.saturating_sub(at_ns);
        self.taken_unix_ns.saturating_sub(before)
    }

    /// The group of this name.
    pub fn group(&self, name: &str) -> Option<&GroupDump> {
        self.groups.iter().find(|group| group.name == name)
    }

    fn check(&self) -> Result<(), String> {
        if self.world == 0 || self.world > WORLD_MAX || self.rank >= self.world {
            return Err(format!("rank {} of a world of {}", self.rank, self.world));
        }
        if self.groups.len() > GROUPS_MAX {
            return Err(format!(
                "{} groups, at most {GROUPS_MAX} are believed",
                self.groups.len()
            ));
        }
        for (place, group) in self.groups.iter().enumerate() {
            let refuse = |what: &str| Err(format!("group {:?}: {what}", group.name));
            if self.groups[..place].iter().any(|g| g.name == group.name) {
                return refuse("it is there twice");
            }
            let mut ranks = group.ranks.clone();
            ranks.sort_unstable();
            if ranks.windows(2).any(|pair| pair[0] == pair[1]) {
                return refuse("a rank is in it twice");
            }
            if ranks.last().is_none_or(|last| *last >= self.world) {
                return refuse("its ranks are not of this world");
            }
            if !group.ranks.contains(&self.rank) {
                return refuse("this rank is not in it");
            }
            let is_unordered =
                |records: &[Record]| records.windows(2).any(|two| two[0].seq >= two[1].seq);
            if is_unordered(&group.records) || is_unordered(&group.p2p) {
                return refuse("its records are out of order");
            }
            let is_stranger = |unclaimed: &Unclaimed| unclaimed.from >= ranks.len() as u64;
            if group.unclaimed.iter().any(is_stranger) {
                return refuse("a message is of no rank of it");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record() -> impl Strategy<Value = Record> {
        let number = || proptest::option::of(any::<u64>());
        let word = || proptest::option::of("[a-z]{1,6}");
        (
            ("[a-z -]{1,12}", word(), word(), any::<(u64, u64, u64)>()),
            (number(), number(), number(), number(), number(), number()),
            (0..State::ALL.len(), number(), number(), number()),
        )
            .prop_map(|(what, marks, (state, started_ns, arrived_ns, ended_ns))| {
                let (op, reduce, dtype, (elements, bytes, submitted_ns)) = what;
                let (bucket, step, root, peer, tag, leaves) = marks;
                Record {
                    seq: 0,
                    op,
                    reduce,
                    dtype,
                    elements,
                    bytes,
                    bucket,
                    step,
                    root,
                    peer,
                    tag,
                    leaves,
                    algorithm: "direct".into(),
                    state: State::ALL[state],
                    submitted_ns,
                    started_ns,
                    arrived_ns,
                    ended_ns,
                }
            })
    }

    fn dump() -> impl Strategy<Value = Dump> {
        let failure = (".{0,40}", any::<u64>()).prop_map(|(text, at_ns)| Failure {
            kind: FailureKind::Deadline,
            text,
            culprits: vec![1],
            at_ns,
        });
        let records = proptest::collection::vec(record(), 0..6).prop_map(|mut records| {
            (1..).zip(&mut records).for_each(|(seq, r)| r.seq = seq);
            records
        });
        (
            records,
            proptest::option::of(failure),
            ".{0,20}",
            any::<(u64, u64, u32)>(),
            any::<bool>(),
        )
            .prop_map(
                |(records, failure, doing, (taken_unix_ns, taken_ns, pid), forming)| Dump {
                    paceline_flight: FORMAT,
                    version: "0.1.0".into(),
                    job: "00ff".into(),
                    run_id: "none".into(),
                    restart: 0,
                    rank: 2,
                    world: 4,
                    host: "b".into(),
                    pid,
                    taken_unix_ns,
                    taken_ns,
                    doing,
                    groups: vec![GroupDump {
                        name: "world".into(),
                        ranks: vec![0, 2, 3],
                        transport: "shm".into(),
                        submitted: 9,
                        forming: forming.then(|| Forming {
                            phase: "report in".into(),
                            arrived: vec![0],
                            waited_ns: 7,
                        }),
                        failure,
                        p2p: records.clone(),
                        records,
                        unclaimed: vec![Unclaimed {
                            from: 1,
                            tag: 7,
                            messages: 3,
                        }],
                    }],
                },
            )
    }

    proptest! {
        #[test]
        fn what_is_written_is_what_is_read(dump in dump()) {
            prop_assert_eq!(Dump::parse(&dump.to_json()), Ok(dump));
        }

        #[test]
        fn a_cut_file_is_refused(dump in dump(), share in 0.0..1.0_f64) {
            let bytes = dump.to_json();
            let cut = ((bytes.len() - 2) as f64 * share) as usize;
            prop_assert!(Dump::parse(&bytes[..cut]).is_err());
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Dump::parse(&bytes);
        }

        #[test]
        fn a_changed_byte_does_no_harm(dump in dump(), place in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut bytes = dump.to_json();
            let place = place.index(bytes.len());
            bytes[place] = byte;
            if let Ok(dump) = Dump::parse(&bytes) {
                prop_assert!(dump.rank < dump.world);
            }
        }
    }

    #[test]
    fn what_cannot_be_is_refused_in_words() {
        let check = |from: &str, to: &str, expect: &str| {
            let sound = r#"{"paceline_flight":1,"version":"0","job":"j","run_id":"r","restart":0,"rank":1,"world":2,
                "host":"h","pid":1,"taken_unix_ns":9,"taken_ns":9,"doing":"","groups":[{"name":"world","ranks":[0,1],
                "transport":"shm","submitted":2,"records":[]}]}"#;
            assert!(Dump::parse(sound.as_bytes()).is_ok());
            let error = Dump::parse(sound.replace(from, to).as_bytes()).unwrap_err();
            assert!(error.contains(expect), "{error}");
        };
        check(
            "flight\":1",
            "flight\":2",
            "its format is 2, but this program reads 1",
        );
        check("\"rank\":1", "\"rank\":2", "rank 2 of a world of 2");
        check("\"world\":2", "\"world\":0", "a world of 0");
        check("\"world\":2", "\"world\":99999999", "a world of 99999999");
        check("[0,1]", "[0,1,5]", "not of this world");
        check("[0,1]", "[0]", "this rank is not in it");
        check("[0,1]", "[1,1]", "twice");
        let unclaimed = "\"records\":[],\"unclaimed\":[{\"from\":2,\"tag\":0,\"messages\":1}]";
        check("\"records\":[]", unclaimed, "of no rank of it");
        check("\"doing\"", "\"going\"", "missing field `doing`");
    }
}
