//! What can go wrong between this program, NVIDIA's libraries and the other ranks.

use std::time::Duration;

use paceline_collective::Error as GroupError;

use crate::call::CallName;
use crate::report::PairReport;
use crate::version::Version;

/// A failure of NCCL, of the CUDA driver, or of the group that ranks meet through.
///
/// The first failure latches: every later call of a communicator returns it again.
#[derive(Clone, thiserror::Error)]
pub enum NcclError {
    /// A library is nowhere, or none that is somewhere can be loaded and used.
    #[error("{library} cannot be loaded; looked for {looked}")]
    Library {
        /// What it is called.
        library: &'static str,
        /// Every place, with what was the matter there.
        looked: String,
    },
    /// A library lacks a function that cannot be done without.
    #[error("{path} has no function {function}")]
    Function {
        /// Where the library is.
        path: String,
        /// What it lacks.
        function: &'static str,
    },
    /// NCCL is too old.
    #[error("{path} is NCCL {found}, but {least} or newer is needed")]
    TooOld {
        /// Where the library is.
        path: String,
        /// What it says it is.
        found: Version,
        /// The oldest one that works.
        least: Version,
    },
    /// The driver refused a call.
    #[error("{call} failed{}: {text} (CUDA error {code})", During(during))]
    Driver {
        /// The function.
        call: &'static str,
        /// The driver's number.
        code: i32,
        /// The driver's name for it.
        text: String,
        /// The call of the communicator during which it happened.
        during: Option<CallName>,
    },
    /// NCCL refused a call, or failed in the middle of one.
    #[error("{call} failed{}: {text}{detail}", During(during))]
    Nccl {
        /// The function.
        call: &'static str,
        /// NCCL's number.
        code: i32,
        /// What the number means.
        text: &'static str,
        /// NCCL's last words; empty or beginning with a separator.
        detail: String,
        /// The call of the communicator during which it happened.
        during: Option<CallName>,
    },
    /// A variable of the environment tells NCCL to work in a way that this program cannot end.
    #[error("{variable}={value} is set for NCCL: {why}")]
    Environment {
        /// Its name.
        variable: &'static str,
        /// What it is set to.
        value: String,
        /// What would come of it.
        why: &'static str,
    },
    /// There is no such device.
    #[error("there is no CUDA device {device}: the driver has {count}")]
    NoDevice {
        /// Which one was asked for.
        device: usize,
        /// How many there are.
        count: usize,
    },
    /// Two ranks have one device, which NCCL refuses. The same error on every rank.
    #[error("ranks {first} and {second} are both on device {uuid} of one host, which NCCL refuses")]
    OneDevice {
        /// The lower rank.
        first: usize,
        /// The higher one.
        second: usize,
        /// The device.
        uuid: String,
    },
    /// Another rank could not begin. The group is sound; the same on every rank but that one.
    #[error("rank {rank} cannot use NCCL: {reason}")]
    Unable {
        /// That rank.
        rank: usize,
        /// Its own words.
        reason: String,
    },
    /// Ranks have different versions of NCCL. The same error on every rank.
    #[error("rank 0 has NCCL {first}, rank {rank} has {other}")]
    Versions {
        /// Rank 0's.
        first: Version,
        /// The first rank with another one.
        rank: usize,
        /// Its version.
        other: Version,
    },
    /// A wait for NCCL was over, and then not all ranks came to say where they are: the error that names those.
    #[error("{doing} was not over after {} on rank {rank}: {source}", Seconds(*waited))]
    Missing {
        /// This rank.
        rank: usize,
        /// What took so long.
        doing: String,
        /// How long.
        waited: Duration,
        /// Who did not come.
        source: Box<GroupError>,
    },
    /// A wait for NCCL was over, although all ranks wait for the same.
    #[error("{doing} was not over after {} on rank {rank}", Seconds(*waited))]
    Deadline {
        /// This rank.
        rank: usize,
        /// What took so long.
        doing: String,
        /// How long.
        waited: Duration,
    },
    /// A foreign function did not return, not even after the communicator was given up; the process has to end.
    #[error("{function} has not returned for {} on rank {rank}{}", Seconds(*waited), Because(because))]
    Wedged {
        /// This rank.
        rank: usize,
        /// What does not return.
        function: &'static str,
        /// How long.
        waited: Duration,
        /// What had gone wrong before; the error that matters, if there is one.
        because: Option<Box<NcclError>>,
    },
    /// The group failed, and NCCL was given up with it: the error that names the rank to blame.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The probe moved data and other data arrived, or none. The same error on every rank.
    #[error("NCCL does not work between {}", report.failures_in_words())]
    Probe {
        /// What was found.
        report: Box<PairReport>,
    },
    /// The probe of the whole group gave a wrong result.
    #[error("NCCL gave rank {rank} a wrong {what} in a probe: expected {expected}, got {got}")]
    WrongResult {
        /// This rank.
        rank: usize,
        /// Which operation.
        what: &'static str,
        /// What should have come.
        expected: String,
        /// What came.
        got: String,
    },
    /// A call with arguments that cannot work.
    #[error("rank {rank} called NCCL's {call} wrongly: {reason}")]
    Call {
        /// This rank.
        rank: usize,
        /// The call.
        call: CallName,
        /// What is wrong.
        reason: String,
    },
    /// The fence that a call's data was to be awaited with failed.
    #[error("the data of {call} did not become ready on rank {rank}: {reason}")]
    Fence {
        /// This rank.
        rank: usize,
        /// The call.
        call: CallName,
        /// What the fence said.
        reason: String,
    },
    /// The driver cannot record or await events over a whole context.
    #[error("the driver (CUDA {version}) has no cuCtxRecordEvent")]
    NoContextEvents {
        /// The version of CUDA that the driver is made for.
        version: Version,
    },
    /// Links between devices cannot be tested: there is no driver, or it does not answer.
    #[error("links between devices cannot be tested: {reason}")]
    Untestable {
        /// What kept it, in words.
        reason: String,
        /// What to do about it, where that is known.
        hint: Option<String>,
    },
    /// The operating system refused something.
    #[error("rank {rank} could not {doing}: {reason}")]
    System {
        /// This rank.
        rank: usize,
        /// What it was doing.
        doing: &'static str,
        /// The system's answer.
        reason: String,
    },
    /// The thread that calls NCCL is gone: the communicator was dropped, or the thread has a bug.
    #[error("the thread of rank {rank} that calls NCCL ended before {call} was done")]
    ThreadGone {
        /// This rank.
        rank: usize,
        /// The call.
        call: CallName,
    },
}

impl NcclError {
    /// The rank to blame, when it is known.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Self::Group(error) => error.culprit(),
            Self::Missing { source, .. } => source.culprit(),
            Self::Wedged {
                because: Some(because),
                ..
            } => because.culprit(),
            Self::Unable { rank, .. }
            | Self::Versions { rank, .. }
            | Self::Call { rank, .. }
            | Self::Fence { rank, .. }
            | Self::System { rank, .. }
            | Self::ThreadGone { rank, .. }
            | Self::Wedged { rank, .. } => Some(*rank),
            Self::Library { .. }
            | Self::Function { .. }
            | Self::TooOld { .. }
            | Self::Driver { .. }
            | Self::Nccl { .. }
            | Self::Environment { .. }
            | Self::NoDevice { .. }
            | Self::OneDevice { .. }
            | Self::Deadline { .. }
            | Self::Probe { .. }
            | Self::WrongResult { .. }
            | Self::Untestable { .. }
            | Self::NoContextEvents { .. } => None,
        }
    }

    /// Whether time ran out.
    pub fn is_deadline(&self) -> bool {
        match self {
            Self::Group(error) => error.is_deadline(),
            Self::Deadline { .. } | Self::Missing { .. } => true,
            Self::Wedged { because, .. } => because.as_ref().is_none_or(|it| it.is_deadline()),
            _ => false,
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Group(error) => return error.hint(),
            Self::Missing { source, .. } => return source.hint(),
            Self::Library { library, .. } if library.contains("nccl") => {
                "install NCCL 2.18 or newer (the package libnccl2, or `pip install nvidia-nccl-cu13`, or nvidia-nccl-cu12 for a driver of \
                 CUDA 12), or name its file with PACELINE_NCCL_LIBRARY"
            }
            Self::Library { .. } => {
                "install NVIDIA's driver, or in a container start it with the driver's libraries (`--gpus all`); \
                 PACELINE_CUDA_LIBRARY names the file where the loader does not find it"
            }
            Self::Function { .. } => {
                "the file is no library of NVIDIA's, or one of another age: look at what PACELINE_NCCL_LIBRARY and \
                 PACELINE_CUDA_LIBRARY name, and update it"
            }
            Self::TooOld { .. } => {
                "update it (the package libnccl2, or `pip install --upgrade nvidia-nccl-cu13`), or name a newer file with \
                 PACELINE_NCCL_LIBRARY"
            }
            Self::Versions { .. } => {
                "install one version on all hosts, or name the same file on all of them with PACELINE_NCCL_LIBRARY"
            }
            Self::Environment { variable, .. } => {
                return Some(format!("unset {variable} for all ranks"));
            }
            Self::NoDevice { .. } => {
                "start no more ranks on a host than it has devices, and look at CUDA_VISIBLE_DEVICES"
            }
            Self::OneDevice { .. } => {
                "give each rank a device of its own; to share one for a test, set NCCL_HOSTID to something different for \
                 each rank (they then talk over the network), or NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer"
            }
            Self::Driver { code: 2, .. } => {
                "the device's memory is full: see who else uses it, and make the batch smaller"
            }
            Self::Driver { code: 46, .. } => {
                "another program has the device for itself: `nvidia-smi` shows who, and whether its compute mode is exclusive \
                 (`sudo nvidia-smi -c DEFAULT` lets several have it)"
            }
            Self::Driver { code: 802, .. } => {
                "on machines with NVSwitch the fabric manager has to run, in the driver's version: `systemctl status \
                 nvidia-fabricmanager`, and `nvidia-smi -q` for the state of the fabric; just after a boot it may need a minute"
            }
            Self::Driver {
                code: 304 | 999, ..
            } => {
                "the driver's kernel module does not do what it should: see `nvidia-smi`, the kernel's log for Xid lines, and whether \
                 /dev/nvidia-uvm is there and may be opened (`sudo nvidia-modprobe -u -c 0` makes it; a container is to be started \
                 again)"
            }
            Self::Driver { code: 100, .. } => {
                "no device is visible: look at CUDA_VISIBLE_DEVICES and at what `nvidia-smi` shows"
            }
            Self::Driver { code: 803, .. } => {
                "the driver's library is of another version than the kernel's module: reboot, or reinstall the driver"
            }
            Self::Nccl { detail, .. } if detail.contains("driver version is insufficient") => {
                "this NCCL is made for a newer CUDA than the driver's: update the driver, or take the NCCL for the driver's \
                 CUDA (nvidia-nccl-cu12 for 12), by PACELINE_NCCL_LIBRARY where both are there"
            }
            Self::Nccl { detail, .. } if detail.to_lowercase().contains("nvls") => {
                "sums inside NVSwitches (NVLS) do not work here: set NCCL_NVLS_ENABLE=0 on all ranks, so that NCCL does without; to mend \
                 it, see that the fabric manager runs in the driver's version, and that a container has all devices of the machine"
            }
            Self::Nccl { .. } => {
                "set NCCL_DEBUG=INFO (and NCCL_DEBUG_FILE=/tmp/nccl.%h.%p) and run again: NCCL then says what it tried"
            }
            Self::Probe { report } => return report.advice(),
            Self::Untestable { hint, .. } => return hint.clone(),
            Self::WrongResult { .. } => {
                "try NCCL_NVLS_ENABLE=0 (where there are NVSwitches), then NCCL_P2P_DISABLE=1, then NCCL_SHM_DISABLE=1, then \
                 NCCL_IB_DISABLE=1: the first that helps tells which way between devices is broken"
            }
            Self::Deadline { .. } => {
                "raise PACELINE_TIMEOUT_SECONDS when it is merely slow; NCCL_DEBUG=INFO says what NCCL waits for, often an \
                 interface that peers cannot reach (NCCL_SOCKET_IFNAME)"
            }
            Self::Wedged {
                because: Some(because),
                ..
            } => return because.hint(),
            Self::NoContextEvents { .. } => {
                "update the driver to one for CUDA 12.5 or newer (555), unset NCCL_P2P_USE_CUDA_MEMCPY, with which it is not used, or \
                 await the data with a fence"
            }
            Self::Driver { .. }
            | Self::Unable { .. }
            | Self::Wedged { .. }
            | Self::Call { .. }
            | Self::Fence { .. }
            | Self::System { .. }
            | Self::ThreadGone { .. } => return None,
        };
        Some(text.into())
    }

    /// The same failure, seen from a call.
    pub(crate) fn during(mut self, call: CallName) -> Self {
        if let Self::Driver { during, .. } | Self::Nccl { during, .. } = &mut self {
            during.get_or_insert(call);
        }
        self
    }
}

paceline_rendezvous::debug_with_hint!(NcclError);

/// " during CALL", or nothing.
struct During<'a>(&'a Option<CallName>);

impl std::fmt::Display for During<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(call) => write!(f, " during {call}"),
            None => Ok(()),
        }
    }
}

/// ", after: ERROR", or nothing.
struct Because<'a>(&'a Option<Box<NcclError>>);

impl std::fmt::Display for Because<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(error) => write!(f, "; before that: {error}"),
            None => Ok(()),
        }
    }
}

/// A duration in seconds, without digits that mean nothing.
struct Seconds(Duration);

impl std::fmt::Display for Seconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seconds = self.0.as_secs_f64();
        if seconds < 10.0 {
            write!(f, "{} s", (seconds * 10.0).round() / 10.0)
        } else {
            write!(f, "{seconds:.0} s")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Kind, Label};

    #[test]
    fn what_is_usual_has_a_way_out() {
        let driver = |code| NcclError::Driver {
            call: "cuInit",
            code,
            text: String::new(),
            during: None,
        };
        let nccl = |detail: &str| NcclError::Nccl {
            call: "ncclCommInitRankConfig",
            code: 1,
            text: "a CUDA call inside NCCL failed",
            detail: detail.into(),
            during: None,
        };
        for (error, expected) in [
            (driver(46), "nvidia-smi -c DEFAULT"),
            (driver(304), "/dev/nvidia-uvm"),
            (driver(802), "nvidia-fabricmanager"),
            (driver(999), "Xid"),
            (
                nccl(" (Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152)"),
                "NCCL_NVLS_ENABLE=0",
            ),
            (
                nccl(" (transport/nvls.cc:123 -> Cuda failure 401)"),
                "NCCL_NVLS_ENABLE=0",
            ),
            (nccl(""), "NCCL_DEBUG=INFO"),
        ] {
            let hint = error.hint().unwrap_or_default();
            assert!(hint.contains(expected), "{error}: {hint}");
        }
    }

    #[test]
    fn messages_read_as_sentences() {
        let call = CallName {
            kind: Kind::AllReduce,
            seq: 12,
            label: Label {
                bucket: Some(3),
                step: 812,
            },
        };
        for (error, expected) in [
            (
                NcclError::Driver {
                    call: "cuEventRecord",
                    code: 700,
                    text: "CUDA_ERROR_ILLEGAL_ADDRESS".into(),
                    during: Some(call),
                },
                "cuEventRecord failed during all-reduce #12 (bucket 3, step 812): CUDA_ERROR_ILLEGAL_ADDRESS (CUDA error 700)",
            ),
            (
                NcclError::Wedged {
                    rank: 1,
                    function: "ncclCommAbort",
                    waited: Duration::from_millis(5040),
                    because: Some(Box::new(NcclError::Deadline {
                        rank: 1,
                        doing: call.to_string(),
                        waited: Duration::from_secs(65),
                    })),
                },
                "ncclCommAbort has not returned for 5 s on rank 1; before that: all-reduce #12 (bucket 3, step 812) was not \
                 over after 65 s on rank 1",
            ),
            (
                NcclError::TooOld {
                    path: "libnccl.so.2".into(),
                    found: Version::of_nccl(21705),
                    least: Version::of_nccl(21800),
                },
                "libnccl.so.2 is NCCL 2.17.5, but 2.18.0 or newer is needed",
            ),
        ] {
            assert_eq!(error.to_string(), expected);
        }
    }
}
