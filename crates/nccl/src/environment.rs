//! Variables of NCCL's that take away what this program relies on. They are only read: to set one is unsafe in a process with
//! threads.

use crate::error::NcclError;

/// Overrides what a communicator is asked for: with 1 NCCL's functions wait for the peers.
const BLOCKING: &str = "NCCL_COMM_BLOCKING";

/// Lets a thread of NCCL's copy between devices on streams of the same context, instead of a kernel.
const COPIES: &str = "NCCL_P2P_USE_CUDA_MEMCPY";

/// Whether a variable is set, and to what.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// That of this process.
pub(crate) fn here(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// An error where NCCL could not be used safely: a function that waits for a peer that has died holds the only thread that may
/// end the wait.
///
/// *Source*: `NCCL_COMM_BLOCKING` in NCCL's user guide; 0 is what is asked for anyway.
pub(crate) fn check(get: Lookup<'_>) -> Result<(), NcclError> {
    match get(BLOCKING) {
        Some(value) if value.trim() == "1" => Err(NcclError::Environment {
            variable: BLOCKING,
            value,
            why: "its functions would then wait for a peer that is gone, and could not be ended",
        }),
        _ => Ok(()),
    }
}

/// Whether NCCL copies on streams of the device's context. What is ordered behind a collective in the whole context would then be
/// behind itself: the copies that it is made of come later than the order, and wait for its end.
///
/// *Source*: `NCCL_P2P_USE_CUDA_MEMCPY` in NCCL's `transport/p2p.cc`; off unless it is set.
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
