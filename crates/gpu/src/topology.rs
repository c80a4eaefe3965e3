//! How devices are wired: what a snapshot says about it, as matrices and a tree, for people and as JSON.
//!
//! Everything here is a pure function of a [`Snapshot`]; the codes are nvidia-smi's.

mod ends;
mod matrix;
mod notes;
mod text;
mod tree;
mod visible;

use std::io::{self, Write};

use serde::Serialize;

pub use self::ends::{End, EndKind};
pub use self::matrix::P2p;
use self::matrix::{CONNECTION_CODES, P2P_CODES, UNKNOWN, meaning};
use self::text::{listed, ranges, shown};
pub use self::tree::{Branch, LinkState, Root};
pub use self::visible::Visible;
use crate::bus::Bus;
use crate::columns::aligned;
use crate::snapshot::Snapshot;
use paceline_words::counted;

/// How the devices of one machine are wired. Its fields are those of the JSON object.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Topology {
    /// Version of these fields.
    pub paceline_topology: u32,
    /// Name of the machine.
    pub host: String,
    /// Version of NVIDIA's driver.
    pub driver: Option<String>,
    /// Newest CUDA that the driver can run.
    pub cuda: Option<(u32, u32)>,
    /// What the rows and columns of `connections` are: GPUs, then other devices, then network cards.
    pub ends: Vec<End>,
    /// The way between each two ends: `X`, `NV` and a number, `PIX`, `PXB`, `PHB`, `NODE`, `SYS`, or `?`.
    pub connections: Vec<Vec<String>>,
    /// Peer-to-peer between the GPUs, for each capability.
    pub p2p: Vec<P2p>,
    /// The PCIe tree.
    pub tree: Vec<Root>,
    /// What `CUDA_VISIBLE_DEVICES` lets a program see, where it is set.
    pub visible: Option<Visible>,
    /// What is missing and why.
    pub notes: Vec<String>,
    #[serde(skip)]
    advice: String,
}

/// Why there is nothing to show.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no GPU to see{}", .reasons.iter().map(|reason| format!("; {reason}")).collect::<String>())]
pub struct NothingToSee {
    reasons: Vec<String>,
    advice: String,
}

impl NothingToSee {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        Some(self.advice.clone())
    }
}

impl Topology {
    /// What the snapshot says.
    ///
    /// *Cost*: the square of the number of ends, with the depth of the bus; a millisecond for 16 devices.
    pub fn of(snapshot: &Snapshot) -> Self {
        let bus = Bus::of(&snapshot.system);
        let ends = ends::all(snapshot, &bus);
        let connections = matrix::connections(snapshot, &bus, &ends);
        let tree = tree::Grower::new(&bus, &ends, snapshot).roots();
        let notes = notes::all(snapshot, &bus, &ends, &connections, &tree);
        Self {
            paceline_topology: 1,
            host: shown(&snapshot.host),
            driver: snapshot.driver.version.known().map(|text| shown(text)),
            cuda: snapshot.driver.cuda.known().copied(),
            connections,
            p2p: matrix::p2p(snapshot),
            tree,
            visible: visible::read(snapshot),
            notes,
            ends,
            advice: notes::advice(snapshot.driver.trouble.as_ref()),
        }
    }

    /// Whether there is a GPU of any maker.
    ///
    /// *Errors*: there is none, and why.
    pub fn something(&self) -> Result<(), NothingToSee> {
        match self.ends.iter().any(|end| end.kind != EndKind::Nic) {
            true => Ok(()),
            false => Err(NothingToSee {
                reasons: self.notes.first().cloned().into_iter().collect(),
                advice: self.advice.clone(),
            }),
        }
    }

    /// Writes it for people, or as one JSON object on one line.
    pub fn write(&self, json: bool, out: &mut impl Write) -> io::Result<()> {
        if json {
            serde_json::to_writer(&mut *out, self)?;
            return writeln!(out);
        }
        let tree = match self.tree.is_empty() {
            true => String::new(),
            false => format!(
                "PCIe tree, with each link towards the host\n\n{}",
                tree::text(&self.tree)
            ),
        };
        let notes: String = self
            .notes
            .iter()
            .map(|note| format!("note: {note}\n"))
            .collect();
        let sections = [self.devices(), self.connections(), self.p2p(), tree, notes];
        let sections: Vec<String> = sections
            .into_iter()
            .filter(|text| !text.is_empty())
            .collect();
        out.write_all(sections.join("\n").as_bytes())
    }

    fn ends_of(&self, kind: EndKind) -> impl Iterator<Item = &End> {
        self.ends.iter().filter(move |end| end.kind == kind)
    }

    fn devices(&self) -> String {
        let gpus = self.ends_of(EndKind::Gpu).count();
        let others = self.ends_of(EndKind::Other);
        let mut head = match (gpus, others.count()) {
            (0, others) => vec![counted(others, "device")],
            (gpus, 0) => vec![counted(gpus, "GPU")],
            (gpus, others) => vec![counted(gpus, "GPU"), counted(others, "other device")],
        };
        let driver = self.driver.as_ref();
        head.extend(driver.map(|version| format!("driver {version}")));
        let cuda = self.cuda;
        head.extend(cuda.map(|(major, minor)| format!("CUDA up to {major}.{minor}")));
        let host = if self.host.is_empty() {
            "this machine"
        } else {
            &self.host
        };
        let mut text = format!("{host}: {}\n\n", head.join(", "));
        let devices = self.ends.iter().filter(|end| end.kind != EndKind::Nic);
        let row = |end: &End| {
            let memory = end.memory_bytes.map(|bytes| format!("{} MiB", bytes >> 20));
            let mut more = Vec::new();
            more.extend(
                end.nvlinks
                    .map(|(up, all)| format!("{up} of {all} NVLinks up")),
            );
            more.extend(
                end.mig_devices
                    .map(|number| format!("MIG on, {}", counted(number as usize, "instance"))),
            );
            let known = |text: &Option<String>| text.clone().unwrap_or_else(|| UNKNOWN.to_owned());
            vec![
                format!("  {}", end.label),
                known(&end.name),
                memory.unwrap_or_default(),
                known(&end.pci),
                more.join(", "),
            ]
        };
        let rows: Vec<Vec<String>> = devices.map(row).collect();
        text.push_str(&aligned(&rows));
        if let Some(visible) = &self.visible {
            text.push('\n');
            text.push_str(&visible.text());
        }
        text
    }

    fn connections(&self) -> String {
        let labels = self.ends.iter().map(|end| end.label.clone());
        let mut header: Vec<String> = std::iter::once(String::new()).chain(labels).collect();
        header.extend(["CPU affinity", "NUMA affinity"].map(str::to_owned));
        let row = |(end, codes): (&End, &Vec<String>)| {
            let none = || "N/A".to_owned();
            let cpus = end.cpus.as_deref().filter(|cpus| !cpus.is_empty());
            let affinity = [
                cpus.map_or_else(none, ranges),
                end.numa_node.map_or_else(none, |node| node.to_string()),
            ];
            grid_row(&end.label, codes, affinity)
        };
        let rows = self.ends.iter().zip(&self.connections).map(row);
        let rows: Vec<Vec<String>> = std::iter::once(header).chain(rows).collect();
        let mut text = format!(
            "Connections, in the codes of nvidia-smi topo -m\n\n{}",
            aligned(&rows)
        );
        text.push_str(&legend(
            &CONNECTION_CODES,
            matrix::occurring([&self.connections]),
        ));
        let nics = self.ends_of(EndKind::Nic);
        let row = |end: &End| {
            let known = |text: &Option<String>| text.clone().unwrap_or_default();
            vec![
                format!("  {}", end.label),
                known(&end.name),
                known(&end.pci),
                end.remarks.join(", "),
            ]
        };
        let rows: Vec<Vec<String>> = nics.map(row).collect();
        if !rows.is_empty() {
            text.push('\n');
            text.push_str(&aligned(&rows));
        }
        text
    }

    fn p2p(&self) -> String {
        let gpus: Vec<&End> = self.ends_of(EndKind::Gpu).collect();
        match gpus.len() {
            0 => return String::new(),
            1 => return "P2P: there is one GPU, so no pair\n".to_owned(),
            _ => {}
        }
        let groups = matrix::same(&self.p2p);
        let mut text = "Peer-to-peer (P2P), in the codes of nvidia-smi topo -p2p\n".to_owned();
        for group in &groups {
            let words: Vec<String> = group
                .iter()
                .map(|one| matrix::capability_word(one.capability).to_owned())
                .collect();
            let what = listed(&words);
            let what = match (groups.len(), group.len()) {
                (1, _) => format!("{what}: all the same"),
                (_, 1) => what,
                _ => format!("{what}: the same"),
            };
            let header =
                std::iter::once(String::new()).chain(gpus.iter().map(|end| end.label.clone()));
            let codes = group.first().map(|one| &one.codes).into_iter().flatten();
            let rows = gpus
                .iter()
                .zip(codes)
                .map(|(end, codes)| grid_row(&end.label, codes, []));
            let rows: Vec<Vec<String>> = std::iter::once(header.collect()).chain(rows).collect();
            text.push_str(&format!("\n{what}\n{}", aligned(&rows)));
        }
        let occurring = matrix::occurring(self.p2p.iter().map(|one| &one.codes));
        let has_ok = occurring.contains("OK");
        text.push_str(&legend(&P2P_CODES, occurring));
        if has_ok {
            text.push_str("\nOK is the driver's word, no proof that data arrives: see `paceline gpu doctor`\n");
        }
        text
    }
}

fn grid_row<const N: usize>(label: &str, codes: &[String], more: [String; N]) -> Vec<String> {
    // As in nvidia-smi's.
    let cell = |code: &String| {
        if code == "X" {
            " X".to_owned()
        } else {
            code.clone()
        }
    };
    let codes = codes.iter().map(cell);
    std::iter::once(label.to_owned())
        .chain(codes)
        .chain(more)
        .collect()
}

/// The codes that occur, in this order.
fn legend(order: &[&str], occurring: std::collections::BTreeSet<String>) -> String {
    let known = order
        .iter()
        .copied()
        .filter(|code| occurring.contains(*code));
    let row = |code: &str| vec![format!("  {code}"), meaning(code).to_owned()];
    let mut rows: Vec<Vec<String>> = known.map(row).collect();
    if occurring.contains(UNKNOWN) && !order.contains(&UNKNOWN) {
        rows.push(row(UNKNOWN));
    }
    format!("\n{}", aligned(&rows))
}

#[cfg(test)]
mod tests;
