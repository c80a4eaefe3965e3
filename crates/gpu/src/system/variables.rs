//! Variables that decide which devices are seen and how they talk.

use std::collections::BTreeMap;

use super::{CHARS_MAX, text};
use crate::host::Host;
use crate::process::Environ;
use paceline_words::plain;

const NAMES: [&str; 5] = [
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
];
const NCCL: &str = "NCCL_";
/// NCCL knows about 150.
const VARIABLES_MAX: usize = 512;
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Names and values, by name. Those of NCCL that are set by its files and not by the environment count too.
pub(super) fn read(host: &Host<'_>) -> Vec<(String, String)> {
    let mut found = BTreeMap::new();
    // An empty list hides all devices, so it says something.
    let environ = Environ::read(host, "self");
    let set = environ.iter().flat_map(Environ::variables);
    for (name, value) in set {
        if NAMES.contains(&name) || name.starts_with(NCCL) {
            add(&mut found, name, value);
        }
    }
    // What was set since the process began.
    let names: Vec<String> = found.keys().cloned().collect();
    for name in names.iter().map(String::as_str).chain(NAMES) {
        if let Some(value) = host.variable(name) {
            found.insert(name.to_owned(), plain(&value, CHARS_MAX));
        }
    }
    for (name, value) in settings(host) {
        if !found.contains_key(&name) {
            add(&mut found, &name, &value);
        }
    }
    found.into_iter().collect()
}

fn add(found: &mut BTreeMap<String, String>, name: &str, value: &str) {
    if found.len() < VARIABLES_MAX {
        found.insert(plain(name, CHARS_MAX), plain(value, CHARS_MAX));
    }
}

/// What NCCL reads from files: the user's first.
///
/// *Source*: `setEnvFile` in NCCL: `NCCL_CONF_FILE` or `~/.nccl.conf`, then `/etc/nccl.conf`, and the environment before both.
fn settings(host: &Host<'_>) -> Vec<(String, String)> {
    let own = host.variable("NCCL_CONF_FILE");
    let own = own.or_else(|| Some(format!("{}/.nccl.conf", host.variable("HOME")?)));
    let files = own.into_iter().chain(["/etc/nccl.conf".to_owned()]);
    let mut found: Vec<(String, String)> = Vec::new();
    for file in files {
        let text = text(host, &file, FILE_BYTES_MAX).unwrap_or_default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((name, value)) = line.split_once('=') else {
                continue;
            };
            // NCCL trims nothing: with a blank before the sign it is another variable, which nothing reads.
            let is_read = name.starts_with(NCCL) && !name.contains(char::is_whitespace);
            if is_read && !found.iter().any(|(known, _)| known == name) {
                found.push((name.to_owned(), value.to_owned()));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::recorded::Recorded;

    #[test]
    fn variables_that_matter_are_picked_out_of_the_environment() {
        let environ = "HOME=/root\0NCCL_P2P_DISABLE=1\0CUDA_VISIBLE_DEVICES=\0XNCCL_A=1\0NCCL_ODD\0NCCL_DEBUG=a\u{1b}b\0";
        let recorded = Recorded::new(&[("/proc/self/environ", environ)]);
        let expect = [
            ("CUDA_VISIBLE_DEVICES", ""),
            ("NCCL_DEBUG", "a b"),
            ("NCCL_P2P_DISABLE", "1"),
        ];
        check(&recorded, &|_| None, &expect);
        // What was set later wins.
        let later = |name: &str| (name == "CUDA_VISIBLE_DEVICES").then(|| "0,1".to_owned());
        let expect = [("CUDA_VISIBLE_DEVICES", "0,1"), expect[1], expect[2]];
        check(&recorded, &later, &expect);
    }

    #[test]
    fn files_of_nccl_count_where_the_environment_is_silent() {
        let recorded = Recorded::new(&[
            ("/proc/self/environ", "NCCL_DEBUG=WARN\0"),
            (
                "/etc/nccl.conf",
                "# none\nNCCL_DEBUG=INFO\nNCCL_IB_HCA=mlx5\r\nNCCL_ALGO = Ring\nNCCL_P2P_LEVEL=SYS\nPATH=x\nNCCL\n",
            ),
            ("/home/a/.nccl.conf", "NCCL_P2P_LEVEL=NVL\n"),
        ]);
        let home = |name: &str| (name == "HOME").then(|| "/home/a".to_owned());
        let expect = [
            ("NCCL_DEBUG", "WARN"),
            ("NCCL_IB_HCA", "mlx5"),
            ("NCCL_P2P_LEVEL", "NVL"),
        ];
        check(&recorded, &home, &expect);
    }

    fn check(
        recorded: &Recorded,
        variable: &dyn Fn(&str) -> Option<String>,
        expect: &[(&str, &str)],
    ) {
        let found = read(&recorded.host_with(variable));
        let found: Vec<(&str, &str)> = found
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        assert_eq!(found, expect);
    }
}
