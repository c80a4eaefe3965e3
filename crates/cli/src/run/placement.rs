//! The options of `paceline run` about where ranks run and which devices they see.

use clap::{Arg, ArgAction, ArgMatches};
use paceline_launch::{Binding, Job};

use crate::flags::option;

const HEADING: &str = "CPUs and devices";

/// The options about where ranks run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// The CPUs of each rank; all of the launcher's if not given.
    pub binding: Option<Binding>,
    /// Whether each rank sees one device only, as its first.
    pub virtual_local_rank: bool,
}

/// The options.
pub(crate) fn args() -> Vec<Arg> {
    let args = [
        option("numa_binding")
            .value_name("MODE")
            .value_parser(["node", "socket", "exclusive", "core-complex"])
            .help(
                "Bind ranks to CPUs near their GPUs: to all of the NUMA node (node) or its socket (socket), to cores of the \
                 node that no other rank has (exclusive), or to cores of it that share a cache (core-complex); without GPUs \
                 the ranks are spread over the nodes in order",
            ),
        option("cpu_bind")
            .value_name("MODE")
            .value_parser(["cores", "none"])
            .conflicts_with("numa_binding")
            .help(
                "Bind each rank to an equal share of all cores that no other rank has (cores), or let all run everywhere \
                 (none) [default: none]",
            ),
        option("virtual_local_rank")
            .action(ArgAction::SetTrue)
            .help(
                "Give every rank LOCAL_RANK=0 and, in CUDA_VISIBLE_DEVICES, its own device only; PACELINE_LOCAL_RANK is its \
                 number on the machine",
            ),
    ];
    args.map(|arg| arg.help_heading(HEADING)).into()
}

/// Reads the options.
pub(crate) fn read(matches: &ArgMatches) -> Placement {
    let mode = |name| matches.get_one::<String>(name);
    let words = mode("numa_binding").or(mode("cpu_bind"));
    Placement {
        // `none` is the only word that names no binding.
        binding: words.and_then(|word| word.parse().ok()),
        virtual_local_rank: matches.get_flag("virtual_local_rank"),
    }
}

impl Placement {
    /// Tells the job.
    pub(crate) fn apply(self, job: &mut Job) {
        job.binding = self.binding;
        job.virtual_local_rank = self.virtual_local_rank;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Placement, String> {
        let command = clap::Command::new("run").no_binary_name(true).args(args());
        let matches = command.try_get_matches_from(line.split_whitespace());
        matches
            .map(|matches| read(&matches))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn torchruns_bindings_are_taken() {
        let modes = [
            ("node", Binding::Node),
            ("socket", Binding::Socket),
            ("exclusive", Binding::Exclusive),
            ("core-complex", Binding::CoreComplex),
        ];
        for (word, binding) in modes {
            for option in ["--numa-binding", "--numa_binding"] {
                let placement = parsed(&format!("{option} {word}")).unwrap();
                assert_eq!(placement.binding, Some(binding), "{option} {word}");
            }
        }
    }

    #[test]
    fn ranks_run_everywhere_unless_they_are_bound() {
        assert_eq!(parsed(""), Ok(Placement::default()));
        assert_eq!(parsed("--cpu-bind none"), Ok(Placement::default()));
        let cores = parsed("--cpu_bind=cores").unwrap();
        assert_eq!(cores.binding, Some(Binding::Cores));
        assert!(!cores.virtual_local_rank);
    }

    #[test]
    fn a_virtual_local_rank_is_taken() {
        assert!(parsed("--virtual_local_rank").unwrap().virtual_local_rank);
        assert!(parsed("--virtual-local-rank").unwrap().virtual_local_rank);
    }

    #[test]
    fn what_is_no_binding_is_refused_with_those_that_are() {
        let check = |line: &str, part: &str| {
            let error = parsed(line).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        };
        check(
            "--numa-binding cores",
            "[possible values: node, socket, exclusive, core-complex]",
        );
        check("--cpu-bind node", "[possible values: cores, none]");
        check(
            "--cpu-bind cores --numa-binding node",
            "cannot be used with",
        );
    }
}
