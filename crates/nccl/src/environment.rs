//! NCCL variables that break this program's assumptions. They are only read: setting one is unsafe in a process with threads.

use crate::error::NcclError;

/// Overrides the communicator's configuration: with 1, NCCL's functions block on their peers.
const BLOCKING: &str = "NCCL_COMM_BLOCKING";

/// Makes an NCCL thread copy between devices on streams of the same context, instead of a kernel.
const COPIES: &str = "NCCL_P2P_USE_CUDA_MEMCPY";

/// Looks up the value of a variable.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Looks up a variable of this process.
pub(crate) fn here(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Refuses an environment in which NCCL is unsafe: a function blocked on a dead peer would hold the only thread that can
/// abort the wait.
///
/// *Source*: `NCCL_COMM_BLOCKING` in NCCL's user guide; this program configures 0.
pub(crate) fn check(get: Lookup<'_>) -> Result<(), NcclError> {
    match get(BLOCKING) {
        Some(value) if value.trim() == "1" => Err(NcclError::setup(
            format!(
                "{BLOCKING}={value} is set for NCCL: its functions would then block on a dead peer and could not be aborted"
            ),
            format!("unset {BLOCKING} for all ranks"),
        )),
        _ => Ok(()),
    }
}

/// Whether NCCL copies on streams of the device's context. Making the whole context wait for a collective would then
/// deadlock: the collective's copies are submitted after the wait and would wait for their own end.
///
/// *Source*: `NCCL_P2P_USE_CUDA_MEMCPY` in NCCL's `transport/p2p.cc`; off by default.
pub(crate) fn copies_in_context(get: Lookup<'_>) -> bool {
    get(COPIES).is_some_and(|value| !matches!(value.trim(), "" | "0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_harms_is_refused() {
        for (value, harms) in [(None, false), (Some("0"), false), (Some("1"), true)] {
            let get = |name: &str| value.filter(|_| name == BLOCKING).map(str::to_owned);
            assert_eq!(check(&get).is_err(), harms, "{value:?}");
            let get = |name: &str| value.filter(|_| name == COPIES).map(str::to_owned);
            assert_eq!(copies_in_context(&get), harms, "{value:?}");
        }
    }
}
