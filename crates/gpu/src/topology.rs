//! How devices are wired: what a snapshot says about it, as matrices and a tree.

use std::io::{self, Write};

use serde::Serialize;

use crate::snapshot::Snapshot;

/// How the devices of one machine are wired.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Topology {
    /// Name of the machine.
    pub host: String,
}

impl Topology {
    /// What the snapshot says.
    pub fn of(snapshot: &Snapshot) -> Self {
        Self {
            host: snapshot.host.clone(),
        }
    }

    /// Writes it for people, or as one JSON object on one line.
    pub fn write(&self, json: bool, out: &mut impl Write) -> io::Result<()> {
        if json {
            serde_json::to_writer(&mut *out, self)?;
            return writeln!(out);
        }
        writeln!(out, "{}", self.host)
    }
}
