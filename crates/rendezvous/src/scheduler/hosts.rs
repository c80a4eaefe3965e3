//! Slurm's lists of hosts: `gpu[01-03,7],login` and `rack[1-2]n[01-16]`.

/// Most hosts in a list.
pub const HOSTS_MAX: usize = super::NODES_MAX;

/// Longest name of a host, as DNS has it.
const HOST_BYTES_MAX: usize = 253;

/// What is wrong with a list of hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HostListError {
    /// Brackets that do not match.
    #[error("its brackets do not match")]
    Brackets,
    /// Something between brackets is no number and no range of them.
    #[error("a range in it is no range of numbers")]
    Range,
    /// A host without a name, or a name longer than 253 bytes.
    #[error("a host in it has no name, or one longer than 253 bytes")]
    Name,
    /// More than [`HOSTS_MAX`] hosts.
    #[error("it has more than {HOSTS_MAX} hosts")]
    TooMany,
}

/// All hosts of a list, in order.
///
/// *Cost*: bounded by [`HOSTS_MAX`] names.
///
/// *Errors*: see [`HostListError`].
///
/// ```
/// use paceline_rendezvous::scheduler::hosts;
///
/// assert_eq!(hosts("gpu[01-02,7],login")?, ["gpu01", "gpu02", "gpu7", "login"]);
/// # Ok::<(), paceline_rendezvous::scheduler::HostListError>(())
/// ```
pub fn hosts(list: &str) -> Result<Vec<String>, HostListError> {
    let mut all = Vec::new();
    for part in parts(list)? {
        let named = expand(part)?;
        if all.len() + named.len() > HOSTS_MAX {
            return Err(HostListError::TooMany);
        }
        all.extend(named);
    }
    Ok(all)
}

/// The list cut at the commas outside of brackets.
fn parts(list: &str) -> Result<Vec<&str>, HostListError> {
    let mut parts = Vec::new();
    let (mut start, mut is_inside) = (0, false);
    for (at, character) in list.char_indices() {
        match (character, is_inside) {
            ('[', false) => is_inside = true,
            (']', true) => is_inside = false,
            ('[', true) | (']', false) => return Err(HostListError::Brackets),
            (',', false) => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if is_inside {
        return Err(HostListError::Brackets);
    }
    parts.push(&list[start..]);
    Ok(parts)
}

/// One part, whose brackets match.
fn expand(part: &str) -> Result<Vec<String>, HostListError> {
    let mut names = vec![String::new()];
    let mut rest = part.trim();
    while let Some((before, after)) = rest.split_once('[') {
        let (inside, after) = after.split_once(']').ok_or(HostListError::Brackets)?;
        let mut longer = Vec::new();
        for name in &names {
            for range in inside.split(',') {
                numbers(range, HOSTS_MAX - longer.len(), |number| {
                    longer.push(format!("{name}{before}{number}"));
                })?;
            }
            if longer
                .last()
                .is_some_and(|name| name.len() > HOST_BYTES_MAX)
            {
                return Err(HostListError::Name);
            }
        }
        names = longer;
        rest = after;
    }
    for name in &mut names {
        name.push_str(rest);
        if name.is_empty() || name.len() > HOST_BYTES_MAX {
            return Err(HostListError::Name);
        }
    }
    Ok(names)
}

/// The numbers of a range such as `08-12`, as wide as it is written.
fn numbers(range: &str, most: usize, mut each: impl FnMut(String)) -> Result<(), HostListError> {
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    let is_number = |text: &str| {
        (1..=HOST_BYTES_MAX).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit())
    };
    if !is_number(first) || !is_number(last) {
        return Err(HostListError::Range);
    }
    let bound = |text: &str| text.parse::<u64>().map_err(|_| HostListError::Range);
    let (from, to) = (bound(first)?, bound(last)?);
    let count = to.checked_sub(from).ok_or(HostListError::Range)?;
    if count >= most as u64 {
        return Err(HostListError::TooMany);
    }
    let width = first.len();
    for number in from..=to {
        each(format!("{number:0width$}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_list_names_all_its_hosts_in_order() {
        for (list, expected) in [
            ("node1", &["node1"][..]),
            ("node2,node1", &["node2", "node1"]),
            (
                "gpu[03-05,9],login",
                &["gpu03", "gpu04", "gpu05", "gpu9", "login"],
            ),
            ("gpu[008-010]", &["gpu008", "gpu009", "gpu010"]),
            ("gpu[9-11]", &["gpu9", "gpu10", "gpu11"]),
            ("r[1-2]n[01-02]x", &["r1n01x", "r1n02x", "r2n01x", "r2n02x"]),
            ("127.0.0.[1-2]", &["127.0.0.1", "127.0.0.2"]),
            ("gpu[7]", &["gpu7"]),
            ("[1-2]", &["1", "2"]),
        ] {
            let all = hosts(list).expect(list);
            assert_eq!(all, expected, "{list}");
        }
    }

    #[test]
    fn what_is_no_list_is_refused_with_a_reason() {
        use HostListError::{Brackets, Name, Range, TooMany};
        for (list, expected) in [
            ("gpu[", Brackets),
            ("gpu[1", Brackets),
            ("gpu1]", Brackets),
            ("gpu[[1]]", Brackets),
            ("gpu[]", Range),
            ("gpu[a-b]", Range),
            ("gpu[3-1]", Range),
            ("gpu[1-2-3]", Range),
            ("gpu[+1]", Range),
            ("gpu[99999999999999999999999]", Range),
            ("", Name),
            ("a,,b", Name),
            (&"x".repeat(254), Name),
            ("gpu[0-65536]", TooMany),
            ("gpu[1-18446744073709551615]", TooMany),
            ("r[1-300]n[1-300]", TooMany),
            ("a[1-40000],b[1-40000]", TooMany),
        ] {
            assert_eq!(hosts(list), Err(expected), "{list}");
        }
    }

    #[test]
    fn the_longest_list_is_read() {
        assert_eq!(hosts("n[0-65535]").map(|hosts| hosts.len()), Ok(HOSTS_MAX));
    }

    proptest! {
        #[test]
        fn no_list_panics_or_grows_without_bound(list in "[a-c0-9,\\[\\]-]{0,40}") {
            if let Ok(hosts) = hosts(&list) {
                prop_assert!(hosts.len() <= HOSTS_MAX);
                prop_assert!(hosts.iter().all(|host| !host.is_empty()));
            }
        }
    }
}
