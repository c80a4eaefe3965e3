//! The ranks' statements before NCCL starts, and whether they can start.

use serde::{Deserialize, Serialize};

use crate::driver::Device;
use crate::error::NcclError;
use crate::options::{NcclOptions, Probe};
use crate::report::RankPlace;
use crate::version::Version;

/// Maximum length of the reason of a rank that cannot start.
const REASON_CHARS_MAX: usize = 2000;

/// The first NCCL that can let ranks share a device.
const SHARES_DEVICES: Version = Version {
    major: 2,
    minor: 30,
    patch: Some(0),
};

/// A rank that can start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) place: RankPlace,
    /// Equal for ranks on one host, as NCCL decides it.
    pub(crate) host: String,
    /// Whether `NCCL_MULTI_RANK_GPU_ENABLE` is set.
    pub(crate) shares_device: bool,
    pub(crate) nccl: Version,
    /// The probe; rank 0's counts.
    pub(crate) probe: Probe,
    pub(crate) probe_bytes: usize,
}

/// A rank's identity, or why it cannot start.
pub(crate) type Statement = Result<Identity, String>;

/// This rank's statement, ready to be sent.
pub(crate) fn stated(own: Result<&Identity, &NcclError>) -> Vec<u8> {
    let statement: Statement = match own {
        Ok(identity) => Ok(identity.clone()),
        Err(error) => Err(error.to_string().chars().take(REASON_CHARS_MAX).collect()),
    };
    serde_json::to_vec(&statement).expect("strings and numbers are always JSON")
}

/// Reads a rank's statement.
pub(crate) fn heard(rank: usize, bytes: &[u8]) -> Statement {
    serde_json::from_slice(bytes)
        .unwrap_or_else(|error| Err(format!("it said something that is no statement: {error}")))
        .and_then(|identity: Identity| {
            if identity.place.rank == rank {
                Ok(identity)
            } else {
                Err(format!("it says that it is rank {}", identity.place.rank))
            }
        })
}

/// Whether all ranks can start together. The same answer on every rank.
pub(crate) fn agree(statements: Vec<Statement>) -> Result<Vec<Identity>, NcclError> {
    let each = statements.into_iter().enumerate();
    let all: Vec<Identity> = each
        .map(|(rank, statement)| statement.map_err(|reason| NcclError::unable(rank, &reason)))
        .collect::<Result<_, _>>()?;
    let Some(first) = all.first() else {
        return Ok(all);
    };
    if let Some(other) = all.iter().find(|other| other.nccl != first.nccl) {
        let (rank, least) = (other.place.rank, first.nccl);
        return Err(NcclError::Other {
            message: format!("rank 0 has NCCL {least}, rank {rank} has {}", other.nccl),
            rank: Some(rank),
            hint: Some(
                "install the same version on all hosts, or name the same file on all of them with PACELINE_NCCL_LIBRARY"
                    .into(),
            ),
        });
    }
    for (index, second) in all.iter().enumerate() {
        let same =
            |first: &&Identity| first.host == second.host && first.place.uuid == second.place.uuid;
        let Some(first) = all.iter().take(index).find(same) else {
            continue;
        };
        let wanted = first.shares_device && second.shares_device;
        if !wanted || second.nccl < SHARES_DEVICES {
            return Err(NcclError::OneDevice {
                first: first.place.rank,
                second: second.place.rank,
                uuid: second.place.uuid.clone(),
            });
        }
    }
    Ok(all)
}

/// This rank's identity.
pub(crate) fn own(
    rank: usize,
    device: &Device,
    nccl: Version,
    options: &NcclOptions,
) -> Result<Identity, NcclError> {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let name = system("/proc/sys/kernel/hostname");
    let named = set("NCCL_HOSTID");
    let host = named
        .clone()
        .unwrap_or_else(|| format!("{name} {}", system("/proc/sys/kernel/random/boot_id")));
    Ok(Identity {
        place: RankPlace {
            rank,
            host: named.unwrap_or(name),
            device: device.ordinal,
            name: device.name()?,
            uuid: device.uuid()?,
            bus: device.bus()?,
        },
        host,
        shares_device: set("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|value| value != "0"),
        nccl,
        probe: options.probe,
        probe_bytes: options.probe_bytes,
    })
}

/// A one-line system file; empty if it cannot be read.
fn system(path: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.trim().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(rank: usize, host: &str, uuid: &str, nccl: i32, shares_device: bool) -> Statement {
        Ok(Identity {
            place: RankPlace {
                rank,
                host: host.into(),
                device: 0,
                name: "a device".into(),
                uuid: uuid.into(),
                bus: "00000000:41:00.0".into(),
            },
            host: host.into(),
            shares_device,
            nccl: Version::of_nccl(nccl),
            probe: Probe::Pairs,
            probe_bytes: 1024,
        })
    }

    fn verdict(statements: Vec<Statement>) -> String {
        match agree(statements) {
            Ok(all) => format!("{} ranks begin", all.len()),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn ranks_begin_when_all_can_and_each_has_a_device() {
        let ready = |rank, host, uuid| identity(rank, host, uuid, 23_007, false);
        for (statements, expected) in [
            (
                vec![ready(0, "a", "x"), ready(1, "a", "y"), ready(2, "b", "x")],
                "3 ranks begin",
            ),
            (
                vec![ready(0, "a", "x"), Err("no driver".into())],
                "rank 1 cannot use NCCL: no driver",
            ),
            (
                vec![ready(0, "a", "x"), ready(1, "a", "y"), ready(2, "a", "x")],
                "ranks 0 and 2 both use device x of one host, which NCCL refuses",
            ),
            (
                vec![ready(0, "a", "x"), identity(1, "b", "x", 22_707, false)],
                "rank 0 has NCCL 2.30.7, rank 1 has 2.27.7",
            ),
        ] {
            assert_eq!(verdict(statements), expected);
        }
    }

    #[test]
    fn a_device_is_shared_only_when_both_ranks_and_nccl_allow_it() {
        for (nccl, first, second, begin) in [
            (23_007, true, true, true),
            (23_007, true, false, false),
            (23_007, false, true, false),
            (22_707, true, true, false),
        ] {
            let both = vec![
                identity(0, "a", "x", nccl, first),
                identity(1, "a", "x", nccl, second),
            ];
            assert_eq!(agree(both).is_ok(), begin, "{nccl} {first} {second}");
        }
    }

    #[test]
    fn statements_survive_the_way_and_nonsense_is_told_from_them() {
        let own = identity(3, "a", "x", 23_007, false).unwrap();
        assert_eq!(heard(3, &stated(Ok(&own))), Ok(own.clone()));
        assert_eq!(
            heard(2, &stated(Ok(&own))),
            Err("it says that it is rank 3".into())
        );
        let error = NcclError::setup("there is no CUDA device 4: the driver has 2".into(), "");
        assert_eq!(heard(3, &stated(Err(&error))), Err(error.to_string()));
        let reason = heard(0, b"\xff{").unwrap_err();
        assert!(reason.starts_with("it said something"), "{reason}");
    }
}
