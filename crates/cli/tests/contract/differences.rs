//! Where a rank finds something else under Paceline than under torchrun, on purpose. Whatever is not here must be the same.

use super::scenarios::Vars;

/// A variable that differs.
pub(crate) struct Difference {
    pub(crate) name: &'static str,
    /// What is expected of both.
    pub(crate) how: How,
    /// Why it is right that they differ.
    pub(crate) why: &'static str,
}

pub(crate) enum How {
    /// Only Paceline sets it.
    Ours,
    /// Only torchrun sets it.
    Theirs,
    /// This here, that there, or the same on both.
    Is {
        ours: &'static str,
        theirs: &'static str,
    },
    /// Compute threads: what the user says, or our share of the cores and torchrun's 1.
    Threads,
    /// The whole job's here, one agent's there.
    Restarts,
}

pub(crate) const DIFFERENCES: &[Difference] = &[
    Difference {
        name: "MASTER_ADDR",
        how: How::Is {
            ours: "127.0.0.1",
            theirs: "localhost",
        },
        why: "an address needs no name service; of nodes it is the one that others have reached the first by",
    },
    Difference {
        name: "TORCHELASTIC_USE_AGENT_STORE",
        how: How::Is {
            ours: "False",
            theirs: "True",
        },
        why: "our store speaks its own protocol and lets nobody in without the token, so rank 0 of a PyTorch program \
              hosts its own TCPStore, at a port that is free",
    },
    Difference {
        name: "IS_MASTER_PORT_SERVED",
        how: How::Is {
            ours: "no",
            theirs: "yes",
        },
        why: "the other side of TORCHELASTIC_USE_AGENT_STORE",
    },
    Difference {
        name: "TORCHELASTIC_RUN_ID",
        how: How::Is {
            ours: "none",
            theirs: "<uuid>",
        },
        why: "a job that nobody named has no name, on one node as on several; its log folder has a random part anyway",
    },
    Difference {
        name: "TORCHELASTIC_RESTART_COUNT",
        how: How::Restarts,
        why: "the budget is the whole job's, so all ranks read one number; an agent of torchrun counts its own failures",
    },
    Difference {
        name: "TORCHELASTIC_SIGNALS_TO_HANDLE",
        how: How::Theirs,
        why: "torchrun's note to its own agent, which its ranks happen to inherit",
    },
    Difference {
        name: "OMP_NUM_THREADS",
        how: How::Threads,
        why: "cores that nobody uses help nobody: ranks share them out, also when there is one",
    },
    Difference {
        name: "RAYON_NUM_THREADS",
        how: How::Ours,
        why: "the same for Rust's thread pool",
    },
    Difference {
        name: "PACELINE_JOB_TOKEN",
        how: How::Ours,
        why: "who may speak to this job's ranks; torchrun has nothing of the kind",
    },
    Difference {
        name: "PACELINE_STORE",
        how: How::Ours,
        why: "where our ranks meet",
    },
    Difference {
        name: "PACELINE_PAGE_FD",
        how: How::Ours,
        why: "the job page, through which a launcher tells its ranks about a failure at once",
    },
    Difference {
        name: "PACELINE_LOCAL_RANK",
        how: How::Ours,
        why: "with a virtual local rank LOCAL_RANK is 0 for all; our ranks still need to know their place on the job page",
    },
    Difference {
        name: "PACELINE_MEMORY_FOLDER",
        how: How::Ours,
        why: "the folder for checkpoints in memory, which the launcher removes with the job",
    },
    Difference {
        name: "PACELINE_LAUNCHER",
        how: How::Ours,
        why: "by it a rank's own children are found and ended",
    },
];

impl Difference {
    /// What is wrong with one variable of one rank, if something is.
    pub(crate) fn mistake(&self, ours: &Vars, theirs: &Vars) -> Option<String> {
        let (our, their) = (ours.get(self.name), theirs.get(self.name));
        let is_right = match self.how {
            How::Ours => our.is_some() && their.is_none(),
            How::Theirs => our.is_none() && their.is_some(),
            How::Is { ours, theirs } => {
                let expected = our.is_some_and(|our| our == ours)
                    && their.is_some_and(|their| their == theirs);
                expected || (our.is_some() && our == their)
            }
            How::Threads => {
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                let ranks = ours["LOCAL_WORLD_SIZE"].parse().unwrap_or(1);
                let share = (cores / ranks).max(1).to_string();
                match (our, their) {
                    (Some(our), Some(their)) => *our == share && their == "1" || our == their,
                    (Some(our), None) => *our == share && ranks == 1,
                    (None, _) => false,
                }
            }
            How::Restarts => {
                let number = |text: Option<&String>| text.and_then(|text| text.parse::<u32>().ok());
                let (our, their) = (number(our), number(their));
                our.is_some() && their.is_some() && their <= our
            }
        };
        let (name, why) = (self.name, self.why);
        (!is_right)
            .then(|| format!("{name} is {our:?} here and {their:?} there, not as agreed: {why}"))
    }
}
