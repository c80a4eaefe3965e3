//! The CPUs of each rank on machines of all kinds, as `/sys` describes them.

use super::super::Bound;
use super::*;

/// The CPUs of a machine that the launcher may use.
struct Machine(Topology);

impl Machine {
    /// `cores` cores, each with the CPUs that `threads` says, on the caches, nodes and sockets that divide them evenly.
    fn even(
        cores: usize,
        threads: impl Fn(usize) -> Vec<usize>,
        [complexes, nodes, sockets]: [usize; 3],
    ) -> Self {
        let mut cpus = Vec::new();
        for core in 0..cores {
            let part = |parts: usize| core * parts / cores;
            for number in threads(core) {
                cpus.push(Cpu {
                    number,
                    core,
                    // The first core of the part.
                    complex: part(complexes) * cores / complexes,
                    node: part(nodes),
                    socket: part(sockets),
                });
            }
        }
        cpus.sort_by_key(|cpu| cpu.number);
        Self(Topology { cpus })
    }

    /// Two sockets, four nodes, 32 cores with two threads: CPU n and n + 32. A cache for each node.
    fn two_sockets() -> Self {
        Self::even(32, |core| vec![core, core + 32], [4, 4, 2])
    }

    /// One socket and node of an AMD with four caches for its 16 cores, no second threads.
    fn four_caches() -> Self {
        Self::even(16, |core| vec![core], [4, 1, 1])
    }

    /// Four cores, two threads each, one node: CPUs 0 and 1 are core 0.
    fn laptop() -> Self {
        let mut laptop = Self::even(4, |core| vec![2 * core, 2 * core + 1], [1, 1, 1]);
        for cpu in &mut laptop.0.cpus {
            cpu.core *= 2;
        }
        laptop
    }

    /// What a control group leaves of it.
    fn only(mut self, allowed: &str) -> Self {
        let allowed: Cpus = allowed.parse().unwrap();
        self.0.cpus.retain(|cpu| allowed.contains(cpu.number));
        self
    }

    /// The nodes' order can be another than the sockets'.
    fn renumber_nodes(mut self, to: [usize; 4]) -> Self {
        for cpu in &mut self.0.cpus {
            cpu.node = to[cpu.node];
        }
        self
    }

    /// Binds a rank for each GPU, which are on these nodes.
    fn gpus(&self, binding: Binding, nodes: &[usize], expect: &str) -> &Self {
        self.check(binding, nodes.len(), &Near::Nodes(nodes.to_vec()), expect)
    }

    fn ranks(&self, binding: Binding, nproc: usize, expect: &str) -> &Self {
        let near = Near::Unknown("no GPU was found".to_owned());
        self.check(binding, nproc, &near, expect)
    }

    /// `expect` is the ranks' CPUs and then the cores for each one's threads, or the error.
    fn check(&self, binding: Binding, nproc: usize, near: &Near, expect: &str) -> &Self {
        let got = match Bound::new(binding, nproc, &self.0, near.clone()) {
            Ok(bound) => {
                let cpus = bound.cpus.iter().map(Cpus::to_string);
                let cpus = cpus.collect::<Vec<_>>().join(" | ");
                format!("{cpus} x{}", bound.cores_each)
            }
            Err(error) => error.to_string(),
        };
        assert_eq!(got, expect, "{binding:?} {nproc} {near:?}");
        self
    }
}

#[test]
fn ranks_are_bound_to_the_node_of_their_gpu() {
    Machine::two_sockets()
        .gpus(Binding::Node, &[0, 3], "0-7,32-39 | 24-31,56-63 x8")
        .gpus(
            Binding::Node,
            &[1, 1, 2],
            "8-15,40-47 | 8-15,40-47 | 16-23,48-55 x4",
        )
        .gpus(Binding::Node, &[2], "16-23,48-55 x8");
}

#[test]
fn ranks_beyond_the_gpus_begin_again_with_the_first() {
    let machine = Machine::two_sockets();
    let near = Near::Nodes(vec![3, 0]);
    machine.check(
        Binding::Node,
        3,
        &near,
        "24-31,56-63 | 0-7,32-39 | 24-31,56-63 x4",
    );
    machine.check(Binding::Node, 1, &near, "24-31,56-63 x8");
}

#[test]
fn a_socket_is_all_its_nodes() {
    Machine::two_sockets()
        .gpus(Binding::Socket, &[1, 2], "0-15,32-47 | 16-31,48-63 x16")
        .gpus(Binding::Socket, &[0, 1], "0-15,32-47 | 0-15,32-47 x8");
    Machine::two_sockets()
        .renumber_nodes([0, 2, 1, 3])
        .gpus(Binding::Socket, &[2], "0-15,32-47 x16")
        .gpus(Binding::Socket, &[1], "16-31,48-63 x16");
}

#[test]
fn exclusive_divides_the_cores_of_a_node_among_its_ranks() {
    Machine::two_sockets()
        .gpus(
            Binding::Exclusive,
            &[0, 0, 3],
            "0-3,32-35 | 4-7,36-39 | 24-31,56-63 x4",
        )
        .gpus(
            Binding::Exclusive,
            &[0, 3, 0, 0],
            "0-2,32-34 | 24-31,56-63 | 3-5,35-37 | 6-7,38-39 x2",
        );
}

#[test]
fn exclusive_never_divides_a_core() {
    Machine::laptop()
        .ranks(Binding::Exclusive, 2, "0-3 | 4-7 x2")
        .ranks(Binding::Exclusive, 3, "0-3 | 4-5 | 6-7 x1")
        .ranks(
            Binding::Exclusive,
            5,
            "5 ranks cannot have cores of their own: NUMA node 0 has 4",
        );
}

#[test]
fn a_core_complex_is_one_cache_and_each_rank_gets_another() {
    Machine::four_caches()
        .ranks(Binding::CoreComplex, 2, "0-3 | 4-7 x4")
        .ranks(Binding::CoreComplex, 5, "0-3 | 4-7 | 8-11 | 12-15 | 0-3 x2");
    Machine::four_caches()
        .only("2-9,12-15")
        .ranks(Binding::CoreComplex, 3, "4-7 | 12-15 | 2-3 x2");
    Machine::two_sockets().gpus(Binding::CoreComplex, &[0, 0], "0-7,32-39 | 0-7,32-39 x4");
}

#[test]
fn without_gpus_ranks_are_spread_over_the_nodes_in_order() {
    Machine::two_sockets()
        .ranks(Binding::Node, 1, "0-7,32-39 x8")
        .ranks(Binding::Node, 2, "0-7,32-39 | 16-23,48-55 x8")
        .ranks(
            Binding::Exclusive,
            6,
            "0-3,32-35 | 4-7,36-39 | 8-15,40-47 | 16-19,48-51 | 20-23,52-55 | 24-31,56-63 x4",
        );
    Machine::laptop().ranks(Binding::Node, 2, "0-7 | 0-7 x2");
}

#[test]
fn cores_are_divided_whatever_the_nodes() {
    Machine::two_sockets()
        .ranks(Binding::Cores, 2, "0-15,32-47 | 16-31,48-63 x16")
        .gpus(Binding::Cores, &[3, 0], "0-15,32-47 | 16-31,48-63 x16")
        .ranks(
            Binding::Cores,
            3,
            "0-10,32-42 | 11-21,43-53 | 22-31,54-63 x10",
        );
    // Neighbours share a socket, whatever the numbers of their nodes.
    Machine::two_sockets().renumber_nodes([0, 2, 1, 3]).ranks(
        Binding::Cores,
        2,
        "0-15,32-47 | 16-31,48-63 x16",
    );
    Machine::laptop().ranks(Binding::Cores, 4, "0-1 | 2-3 | 4-5 | 6-7 x1");
    Machine::laptop().ranks(
        Binding::Cores,
        5,
        "5 ranks cannot have cores of their own: this process may use 4",
    );
}

#[test]
fn a_virtual_machine_with_holes_in_its_list_of_cpus_is_bound_too() {
    let holes = || Machine::even(12, |core| vec![core], [12, 1, 1]).only("1,4-6,11");
    holes()
        .ranks(Binding::Node, 2, "1,4-6,11 | 1,4-6,11 x2")
        .ranks(Binding::Exclusive, 2, "1,4-5 | 6,11 x2")
        .ranks(Binding::Cores, 5, "1 | 4 | 5 | 6 | 11 x1")
        .ranks(Binding::CoreComplex, 2, "1 | 4 x1");
}

#[test]
fn only_what_the_launcher_may_use_is_given_away() {
    // One thread of each core on node 0, and node 3.
    Machine::two_sockets()
        .only("0-7,24-31,56-63")
        .ranks(Binding::Node, 2, "0-7 | 24-31,56-63 x8")
        .ranks(Binding::Cores, 3, "0-5 | 6-7,24-26,56-58 | 27-31,59-63 x5")
        .gpus(Binding::Socket, &[0], "0-7 x8")
        .gpus(
            Binding::Node,
            &[0, 1],
            "GPU 1 is on NUMA node 1, where this process may use no CPU",
        );
}

#[test]
fn more_ranks_than_cores_can_share_a_node() {
    Machine::laptop().ranks(Binding::Node, 6, "0-7 | 0-7 | 0-7 | 0-7 | 0-7 | 0-7 x1");
}

#[test]
fn ranks_that_cannot_be_bound_come_with_advice() {
    let near = Near::Unknown(String::new());
    let errors = [
        (Binding::Cores, near.clone(), "start at most 4 ranks"),
        (Binding::Exclusive, near, "--numa-binding node"),
        (Binding::Node, Near::Nodes(vec![7]), "taskset"),
    ];
    for (binding, near, advice) in errors {
        let error = decide(binding, 9, &Machine::laptop().0, &near).unwrap_err();
        let hint = error.hint().expect("advice");
        assert!(hint.contains(advice), "{binding:?}: {hint}");
    }
}
