//! A made-up `/`: what a fixture's `root.json` says as files and links below a folder.

mod pci;
mod process;
mod tree;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use self::pci::Pci;
use self::process::Process;
use self::tree::Tree;

/// What all machines have in common, beside the fixtures.
const COMMON: &str = include_str!("../fixtures/common.json");

/// The files of a system.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Root {
    /// What this machine is an example of.
    pub(crate) about: String,
    /// Variables of its programs.
    pub(crate) variables: BTreeMap<String, String>,
    /// Contents by path; nothing takes a file away that all machines have.
    files: BTreeMap<String, Option<Content>>,
    /// Empty folders.
    folders: Vec<String>,
    /// Targets by path; one that begins with `/` is meant below the root.
    links: BTreeMap<String, String>,
    /// NUMA nodes in order.
    nodes: Vec<Node>,
    /// Devices below their host bridges: `{"pci0000:16": {"0000:16:01.0": {..}}}`.
    pci: BTreeMap<String, BTreeMap<String, Pci>>,
    /// Treatment of devices that are in groups, such as `DMA-FQ`; nothing where there is no such unit.
    iommu: Option<String>,
    processes: BTreeMap<u32, Process>,
}

/// A file's content: a text, whose last line end is added, or lines.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Lines(Vec<String>),
}

/// A NUMA node.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Node {
    cpus: String,
    /// As the kernel writes them: `10 21`.
    distance: String,
    memory_kib: u64,
}

impl Root {
    /// Reads a description, over what all machines have in common.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let told = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let json = std::fs::read(path).map_err(|error| told(&error))?;
        let root: Self = serde_json::from_slice(&json).map_err(|error| told(&error))?;
        let mut common: Self =
            serde_json::from_str(COMMON).map_err(|error| format!("common.json: {error}"))?;
        common.files.extend(root.files);
        common.links.extend(root.links);
        common.folders.extend(root.folders);
        common.processes.extend(root.processes);
        Ok(Self {
            files: common.files,
            links: common.links,
            folders: common.folders,
            processes: common.processes,
            ..root
        })
    }

    /// Makes it, below a folder that does not exist yet.
    pub(crate) fn write(&self, folder: &Path) -> Result<(), String> {
        let mut tree = Tree::below(folder);
        for path in &self.folders {
            tree.folder(path);
        }
        self.write_nodes(&mut tree);
        for (host_bridge, devices) in &self.pci {
            let above = pci::Above::host_bridge(host_bridge, &self.nodes, self.iommu.as_deref());
            for (address, device) in devices {
                device.write(address, &above, &mut tree);
            }
        }
        let variables = self.variables.iter();
        let environ: String = variables
            .map(|(name, value)| format!("{name}={value}\0"))
            .collect();
        tree.file("/proc/self/environ", environ.as_bytes());
        for (pid, process) in &self.processes {
            process.write(*pid, &mut tree);
        }
        for (path, content) in &self.files {
            if let Some(content) = content {
                tree.file(path, content.text().as_bytes());
            }
        }
        for (path, target) in &self.links {
            tree.link(path, target);
        }
        tree.done()
    }

    fn write_nodes(&self, tree: &mut Tree) {
        let Some(last) = self.nodes.len().checked_sub(1) else {
            return;
        };
        let all = if last == 0 {
            "0".to_owned()
        } else {
            format!("0-{last}")
        };
        for file in ["online", "possible", "has_cpu", "has_memory"] {
            tree.text(&format!("/sys/devices/system/node/{file}"), &all);
        }
        for (index, node) in self.nodes.iter().enumerate() {
            let folder = format!("/sys/devices/system/node/node{index}");
            tree.text(&format!("{folder}/cpulist"), &node.cpus);
            tree.text(&format!("{folder}/distance"), &node.distance);
            let memory = format!("Node {index} MemTotal:       {} kB", node.memory_kib);
            tree.text(&format!("{folder}/meminfo"), &memory);
        }
        let memory: u64 = self.nodes.iter().map(|node| node.memory_kib).sum();
        tree.text("/proc/meminfo", &format!("MemTotal:       {memory} kB"));
        let cpus: Vec<&str> = self.nodes.iter().map(|node| node.cpus.as_str()).collect();
        tree.text("/sys/devices/system/cpu/online", &cpus.join(","));
        let status = format!("Name:\tpaceline\nCpus_allowed_list:\t{}", cpus.join(","));
        tree.text("/proc/self/status", &status);
    }
}

impl Content {
    fn text(&self) -> String {
        match self {
            Self::Text(text) if text.is_empty() || text.ends_with('\n') => text.clone(),
            Self::Text(text) => format!("{text}\n"),
            Self::Lines(lines) => lines.iter().flat_map(|line| [line, "\n"]).collect(),
        }
    }
}
