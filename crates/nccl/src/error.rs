//! Errors of NCCL, the CUDA driver and the ranks' group.

use std::fmt;
use std::time::Duration;

use paceline_collective::Error as GroupError;

use crate::call::CallName;
use crate::report::PairReport;
use crate::version::Version;

/// A failure of NCCL, of the CUDA driver, or of the ranks' process group.
///
/// The first failure latches: every later call of a communicator returns it again.
#[derive(Clone, thiserror::Error)]
pub enum NcclError {
    /// A library is missing, or no copy found can be loaded and used.
    #[error("{library} cannot be loaded; looked for {looked}")]
    Library {
        /// The library's name.
        library: &'static str,
        /// Every place searched, with the reason it failed.
        looked: String,
    },
    /// A static program has no loader for libraries.
    #[error("{library} cannot be loaded, because this program is linked statically")]
    Static {
        /// The library's name.
        library: &'static str,
    },
    /// A library lacks a required function.
    #[error("{path} has no function {function}")]
    Function {
        /// The library.
        path: String,
        /// The missing function.
        function: &'static str,
    },
    /// NCCL is too old.
    #[error("{path} is NCCL {found}, but {least} or newer is needed")]
    TooOld {
        /// The library.
        path: String,
        /// The version found.
        found: Version,
        /// The oldest supported version.
        least: Version,
    },
    /// The driver refused a call.
    #[error("{call} failed{}: {text} (CUDA error {code})", in_call(during))]
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
    #[error("{call} failed{}: {text}{detail}", in_call(during))]
    Nccl {
        /// The function.
        call: &'static str,
        /// NCCL's number.
        code: i32,
        /// The number's meaning.
        text: &'static str,
        /// NCCL's last message; empty or beginning with a separator.
        detail: String,
        /// The call of the communicator during which it happened.
        during: Option<CallName>,
    },
    /// Two ranks use the same device, which NCCL refuses. The same error on every rank.
    #[error("ranks {first} and {second} both use device {uuid} of one host, which NCCL refuses")]
    OneDevice {
        /// The lower rank.
        first: usize,
        /// The higher one.
        second: usize,
        /// The device.
        uuid: String,
    },
    /// A wait for NCCL timed out. The source names the ranks that did not report their state afterwards; without one, all
    /// ranks wait for the same call.
    #[error("{doing} timed out after {} on rank {rank}{}", seconds(*waited), behind(": ", source))]
    Deadline {
        /// This rank.
        rank: usize,
        /// The operation.
        doing: String,
        /// The time waited.
        waited: Duration,
        /// The error that names the missing ranks.
        source: Option<Box<GroupError>>,
    },
    /// A foreign function did not return even after the communicator was aborted; the process must exit.
    #[error("{function} has not returned for {} on rank {rank}{}", seconds(*waited), behind("; before that: ", because))]
    Wedged {
        /// This rank.
        rank: usize,
        /// The function.
        function: &'static str,
        /// The time waited.
        waited: Duration,
        /// The earlier error that caused it, if any.
        because: Option<Box<NcclError>>,
    },
    /// A setting, a device, a version or the system does not fit, or a rank could not do its part.
    #[error("{message}")]
    Other {
        /// What is wrong, as a sentence.
        message: String,
        /// The rank to blame, if it is one.
        rank: Option<usize>,
        /// Advice, if there is any.
        hint: Option<String>,
    },
    /// A failure in a group of some of the job's ranks, which have other numbers there.
    #[error("group {group}{}: {error}", .rank.map(|rank| format!(", rank {rank} of the job")).unwrap_or_default())]
    Along {
        /// The group of the ranks.
        group: String,
        /// The job's number of the rank to blame.
        rank: Option<usize>,
        /// The failure, with numbers of the group.
        error: Box<NcclError>,
    },
    /// The group failed, and NCCL was aborted with it. The error names the rank to blame.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// Data sent in the probe arrived wrong or not at all. The same error on every rank.
    #[error("NCCL does not work between {}", report.failures_in_words())]
    Probe {
        /// The report.
        report: Box<PairReport>,
    },
    /// The probe of the whole group gave a wrong result.
    #[error("NCCL gave rank {rank} a wrong {what} in a probe: expected {expected}, got {got}")]
    WrongResult {
        /// This rank.
        rank: usize,
        /// The operation.
        what: &'static str,
        /// The expected value.
        expected: String,
        /// The received value.
        got: String,
    },
}

impl NcclError {
    /// Something that the user can change.
    pub(crate) fn setup(message: String, hint: impl Into<String>) -> Self {
        Self::Other {
            message,
            rank: None,
            hint: Some(hint.into()),
        }
    }

    /// A failure of one rank.
    pub(crate) fn of_rank(rank: usize, message: String) -> Self {
        Self::Other {
            message,
            rank: Some(rank),
            hint: None,
        }
    }

    /// The operating system refused what a rank was doing.
    pub(crate) fn system(rank: usize, doing: &str, reason: impl fmt::Display) -> Self {
        Self::of_rank(rank, format!("rank {rank} could not {doing}: {reason}"))
    }

    /// A rank could not start NCCL. The group is intact. The same error on every other rank.
    pub(crate) fn unable(rank: usize, reason: &str) -> Self {
        Self::of_rank(rank, format!("rank {rank} cannot use NCCL: {reason}"))
    }

    /// Links between devices cannot be tested: there is no driver, or it does not respond.
    pub fn untestable(reason: &str, hint: Option<String>) -> Self {
        Self::Other {
            message: format!("links between devices cannot be tested: {reason}"),
            rank: None,
            hint,
        }
    }

    /// The rank to blame, if known: its number in the job for [`Along`](Self::Along), otherwise that in the communicator.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Self::Along { rank, .. } => *rank,
            Self::Group(error) => error.culprit(),
            Self::Deadline { source, .. } => source.as_ref().and_then(|it| it.culprit()),
            Self::Wedged {
                because: Some(because),
                ..
            } => because.culprit(),
            Self::Wedged { rank, .. } => Some(*rank),
            Self::Other { rank, .. } => *rank,
            _ => None,
        }
    }

    /// Whether the error is a timeout.
    pub fn is_deadline(&self) -> bool {
        match self {
            Self::Along { error, .. } => error.is_deadline(),
            Self::Group(error) => error.is_deadline(),
            Self::Deadline { .. } => true,
            Self::Wedged { because, .. } => because.as_ref().is_none_or(|it| it.is_deadline()),
            _ => false,
        }
    }

    /// Advice, if there is any.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Along { error, .. } => return error.hint(),
            Self::Group(error) => return error.hint(),
            Self::Deadline {
                source: Some(source),
                ..
            } => return source.hint(),
            Self::Library { library, .. } if library.contains("nccl") => {
                "install NCCL 2.18 or newer (the package libnccl2, or `pip install nvidia-nccl-cu13`, or nvidia-nccl-cu12 for a driver of \
                 CUDA 12), or name its file with PACELINE_NCCL_LIBRARY"
            }
            Self::Library { .. } => {
                "install NVIDIA's driver, or in a container start it with the driver's libraries (`--gpus all`); \
                 if the loader does not find it, name the file with PACELINE_CUDA_LIBRARY"
            }
            Self::Static { .. } => {
                "use the program of the Python package, or one that `cargo install` built"
            }
            Self::Function { .. } => {
                "the file is not NVIDIA's library or has an unsupported version: check PACELINE_NCCL_LIBRARY and \
                 PACELINE_CUDA_LIBRARY, and update it"
            }
            Self::TooOld { .. } => {
                "update it (the package libnccl2, or `pip install --upgrade nvidia-nccl-cu13`), or name a newer file with \
                 PACELINE_NCCL_LIBRARY"
            }
            Self::OneDevice { .. } => {
                "give each rank its own device; to share one for a test, set a different NCCL_HOSTID for each rank \
                 (they then communicate over the network), or NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer"
            }
            Self::Driver { code: 2, .. } => {
                "the device's memory is full: check for other processes on it, or lower the batch size"
            }
            Self::Driver { code: 46, .. } => {
                "another process has exclusive use of the device: `nvidia-smi` shows the process and the compute mode \
                 (`sudo nvidia-smi -c DEFAULT` lets processes share it)"
            }
            Self::Driver { code: 802, .. } => {
                "machines with NVSwitch need a running fabric manager of the driver's version: `systemctl status \
                 nvidia-fabricmanager`, and `nvidia-smi -q` for the state of the fabric; after a boot it may take a minute"
            }
            Self::Driver {
                code: 304 | 999, ..
            } => {
                "the driver's kernel module does not work: check `nvidia-smi`, the kernel log for Xid lines, and that /dev/nvidia-uvm \
                 exists and can be opened (`sudo nvidia-modprobe -u -c 0` creates it; then restart the container, if any)"
            }
            Self::Driver { code: 100, .. } => {
                "no device is visible: check CUDA_VISIBLE_DEVICES and the output of `nvidia-smi`"
            }
            Self::Driver { code: 803, .. } => {
                "the versions of the driver's library and kernel module differ: reboot, or reinstall the driver"
            }
            Self::Nccl { detail, .. } if detail.contains("driver version is insufficient") => {
                "this NCCL needs a newer CUDA than the driver's: update the driver, or install the NCCL for the driver's CUDA \
                 (nvidia-nccl-cu12 for 12); if both are installed, choose one with PACELINE_NCCL_LIBRARY"
            }
            Self::Nccl { detail, .. } if detail.to_lowercase().contains("nvls") => {
                "sums inside NVSwitches (NVLS) do not work here: set NCCL_NVLS_ENABLE=0 on all ranks to turn them off; to fix \
                 them, run the fabric manager of the driver's version, and give a container all devices of the machine"
            }
            Self::Nccl { .. } => {
                "set NCCL_DEBUG=INFO (and NCCL_DEBUG_FILE=/tmp/nccl.%h.%p) and run again: NCCL then logs what it tried"
            }
            Self::Probe { report } => return report.advice(),
            Self::Other { hint, .. } => return hint.clone(),
            Self::WrongResult { .. } => {
                "try NCCL_NVLS_ENABLE=0 (on machines with NVSwitches), then NCCL_P2P_DISABLE=1, then NCCL_SHM_DISABLE=1, then \
                 NCCL_IB_DISABLE=1: the first that helps shows which path between devices is broken"
            }
            Self::Deadline { .. } => {
                "if it is only slow, raise PACELINE_TIMEOUT_SECONDS; NCCL_DEBUG=INFO shows what NCCL waits for, often an \
                 interface that peers cannot reach (NCCL_SOCKET_IFNAME)"
            }
            Self::Wedged {
                because: Some(because),
                ..
            } => return because.hint(),
            _ => return None,
        };
        Some(text.into())
    }

    /// Whether its ranks have the job's numbers, because it says which group it comes from.
    pub(crate) fn is_named(&self) -> bool {
        match self {
            Self::Along { .. } => true,
            Self::Wedged { because, .. } => because.as_ref().is_some_and(|it| it.is_named()),
            _ => false,
        }
    }

    /// Whether all ranks of the group get the same error without being told.
    pub(crate) fn is_known(&self) -> bool {
        matches!(
            self,
            Self::Group(_) | Self::Probe { .. } | Self::WrongResult { .. }
        )
    }

    /// The same failure, attributed to a call.
    pub(crate) fn during(mut self, call: CallName) -> Self {
        if let Self::Driver { during, .. } | Self::Nccl { during, .. } = &mut self {
            during.get_or_insert(call);
        }
        self
    }
}

paceline_rendezvous::debug_with_hint!(NcclError);

/// " during CALL", or nothing.
fn in_call(call: &Option<CallName>) -> String {
    call.map_or_else(String::new, |call| format!(" during {call}"))
}

/// An error behind some words, or nothing.
fn behind<E: fmt::Display>(words: &str, error: &Option<Box<E>>) -> String {
    let error = error.as_ref();
    error.map_or_else(String::new, |error| format!("{words}{error}"))
}

/// A duration in seconds, rounded to one decimal below 10 s.
fn seconds(duration: Duration) -> String {
    match duration.as_secs_f64() {
        seconds if seconds < 10.0 => format!("{} s", (seconds * 10.0).round() / 10.0),
        seconds => format!("{seconds:.0} s"),
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
                        source: None,
                    })),
                },
                "ncclCommAbort has not returned for 5 s on rank 1; before that: all-reduce #12 (bucket 3, step 812) timed out \
                 after 65 s on rank 1",
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
