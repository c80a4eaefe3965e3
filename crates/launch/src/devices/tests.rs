//! Machines with GPUs of all kinds, as `/proc` and `/sys` describe them.

use super::*;

fn lookup<'a>(vars: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
    |name| {
        let found = vars.iter().find(|(key, _)| *key == name);
        found.map(|(_, value)| (*value).to_owned())
    }
}

/// The nodes of a machine with these files, or why they are not known.
fn check(tree: &[(String, String)], vars: &[(&str, &str)], expect: &str) {
    let root = tempfile::tempdir().unwrap();
    for (file, text) in tree {
        let path = root.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let got = match Near::read(root.path(), &lookup(vars)) {
        Ok(Near::Nodes(nodes)) => format!("{nodes:?}"),
        Ok(Near::Unknown(why)) => why,
        Err(error) => error.to_string().replace(root.path().to_str().unwrap(), ""),
    };
    assert_eq!(got, expect, "{vars:?}");
}

fn pci(place: &str, node: &str) -> (String, String) {
    (
        format!("sys/bus/pci/devices/{place}/numa_node"),
        format!("{node}\n"),
    )
}

/// Four GPUs: 0 and 1 on node 0, 2 and 3 on node 1; GPU n is `GPU-an...`.
fn four(model_of_last: &str) -> Vec<(String, String)> {
    let places = [
        ("0000:9a:00.0", "1"),
        ("0000:19:00.0", "0"),
        ("0000:3b:00.0", "0"),
        ("0000:cb:00.0", "1"),
    ];
    let numbers = [2, 0, 1, 3];
    let mut tree = Vec::new();
    for ((place, node), number) in places.into_iter().zip(numbers) {
        let model = if number == 3 {
            model_of_last
        } else {
            "NVIDIA H100"
        };
        let text = format!(
            "Model: \t\t {model}\nGPU UUID: \t GPU-a{number}21d5d1-b60b\nBus Location: \t {place}\nGPU Excluded:\t No\n"
        );
        tree.push((format!("proc/driver/nvidia/gpus/{place}/information"), text));
        tree.push(pci(place, node));
    }
    tree
}

#[test]
fn gpus_are_counted_along_the_pci_bus() {
    check(&four("NVIDIA H100"), &[], "[0, 0, 1, 1]");
}

#[test]
fn visible_devices_are_counted_as_cuda_counts_them() {
    let tree = four("NVIDIA H100");
    check(&tree, &[(CUDA, "3, 0")], "[1, 0]");
    check(&tree, &[(CUDA, "GPU-a2,gpu-A1")], "[1, 0]");
    check(&tree, &[(CUDA, "2,-1,0")], "[1]");
    check(&tree, &[(CUDA, "2,9,0")], "[1]");
    check(&tree, &[(CUDA, "1,GPU-a,0")], "[0]");
    check(&tree, &[(CUDA, "")], "CUDA_VISIBLE_DEVICES= shows no GPU");
    check(
        &tree,
        &[(CUDA, "MIG-77")],
        "CUDA_VISIBLE_DEVICES has `MIG-77`, whose GPU is not known",
    );
}

#[test]
fn gpus_that_cuda_orders_by_speed_are_not_guessed_at() {
    let tree = four("NVIDIA T4");
    let why =
        "GPUs of different models are numbered by speed; CUDA_DEVICE_ORDER=PCI_BUS_ID changes that";
    check(&tree, &[], why);
    check(
        &tree,
        &[("CUDA_DEVICE_ORDER", "PCI_BUS_ID")],
        "[0, 0, 1, 1]",
    );
    check(&tree, &[(CUDA, "GPU-a3")], "[1]");
}

#[test]
fn gpus_of_amd_are_found() {
    let properties = |number: usize, text: &str| {
        (
            format!("sys/class/kfd/kfd/topology/nodes/{number}/properties"),
            text.to_owned(),
        )
    };
    let tree = [
        properties(0, "cpu_cores_count 64\nsimd_count 0\nlocation_id 0\n"),
        properties(
            10,
            "simd_count 416\ndomain 0\nlocation_id 50432\nunique_id 43981\n",
        ),
        properties(
            2,
            "simd_count 416\ndomain 1\nlocation_id 256\nunique_id 4660\n",
        ),
        pci("0000:c5:00.0", "1"),
        pci("0001:01:00.0", "0"),
    ];
    check(&tree, &[], "[0, 1]");
    check(&tree, &[(HIP, "1"), (CUDA, "0")], "[1]");
    check(&tree, &[(ROCR, "1,0"), (CUDA, "0")], "[1]");
    check(&tree, &[(ROCR, "GPU-0000000000001234")], "[0]");
}

#[test]
fn what_is_not_known_is_said() {
    check(&[], &[], "no GPU was found");
    let mut tree = four("NVIDIA H100");
    tree.push(pci("0000:19:00.0", "-1"));
    check(&tree, &[], "the system does not know where the GPUs are");
    check(&tree, &[(CUDA, "3")], "[1]");
    tree.push(pci("0000:19:00.0", "left"));
    let error =
        "`/sys/bus/pci/devices/0000:19:00.0/numa_node` says `left`, expected a whole number";
    check(&tree, &[], error);
}

#[test]
fn this_machines_gpus_are_looked_at() {
    Near::read(Path::new("/"), &|name| std::env::var(name).ok()).expect("readable files");
}

#[test]
fn a_rank_alone_with_its_gpu_sees_the_one_that_was_its_own() {
    let check = |local_rank, vars: &[(&str, &str)], expect: &str| {
        let text = match single(local_rank, &lookup(vars)) {
            Ok(vars) => vars
                .iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect::<Vec<_>>()
                .join(" "),
            Err(TooFew { variable, value }) => format!("too few in {variable}={value}"),
        };
        assert_eq!(text, expect, "{local_rank} {vars:?}");
    };
    check(3, &[], "CUDA_VISIBLE_DEVICES=3");
    check(1, &[(CUDA, "4, 6")], "CUDA_VISIBLE_DEVICES=6");
    check(1, &[(CUDA, "GPU-a,MIG-b")], "CUDA_VISIBLE_DEVICES=MIG-b");
    check(
        1,
        &[(CUDA, "0,1"), (HIP, "5,7")],
        "CUDA_VISIBLE_DEVICES=7 HIP_VISIBLE_DEVICES=7",
    );
    check(0, &[(CUDA, "2"), (HIP, "")], "CUDA_VISIBLE_DEVICES=2");
    check(2, &[(CUDA, "0,1")], "too few in CUDA_VISIBLE_DEVICES=0,1");
    check(2, &[(CUDA, "")], "");
}
