//! Modules and kernels. Only names and parameters are read from PTX; the known kernel is recognised by its name.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;

use super::{Device, Span, Work, corrupt};
use crate::code::Code;
use crate::machine::{Kind, Link};
use crate::process::Process;

/// A loaded module.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) device: Arc<Device>,
    entries: Vec<Entry>,
}

/// The known kernel.
const KNOWN: &str = "paceline_add_f32";

/// A kernel as PTX declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    name: String,
    /// Sizes of its parameters; empty if it does nothing.
    parameters: Vec<usize>,
    does_nothing: bool,
}

/// A kernel of a module.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) device: Arc<Device>,
    entry: Entry,
}

impl Module {
    /// Reads PTX. With a folder for `foreign` modules, their kernels do nothing, and their PTX is written there.
    pub(crate) fn load(
        device: Arc<Device>,
        ptx: &str,
        foreign: Option<&Path>,
    ) -> Result<Self, Code> {
        let foreign = foreign.filter(|_| !ptx.contains(KNOWN));
        let entries = match foreign {
            None => entries(ptx, entry),
            Some(folder) => {
                keep(folder, ptx).map_err(|_| Code::UNKNOWN)?;
                entries(ptx, foreign_entry)
            }
        };
        let entries = entries.ok_or(Code::INVALID_PTX)?;
        Ok(Self { device, entries })
    }

    pub(crate) fn function(&self, name: &str) -> Result<Function, Code> {
        let entry = self.entries.iter().find(|entry| entry.name == name);
        let entry = entry.ok_or(Code::NOT_FOUND)?.clone();
        Ok(Function {
            device: self.device.clone(),
            entry,
        })
    }
}

impl Function {
    /// Sizes of the parameters, in order.
    pub(crate) fn parameters(&self) -> &[usize] {
        &self.entry.parameters
    }

    /// The work of a launch.
    pub(crate) fn launch(&self, arguments: Vec<u64>, threads: u64) -> Result<Work, Code> {
        if threads == 0 {
            return Err(Code::INVALID_VALUE);
        }
        if self.entry.does_nothing {
            return Ok(Work::new(Kind::Kernel, || Ok(())));
        }
        let device = self.device.clone();
        match (self.entry.name.as_str(), arguments[..].first_chunk::<3>()) {
            (KNOWN, Some(&[to, from, count])) => {
                let work = move || add_f32(&device, to, from, count);
                Ok(Work::new(Kind::Kernel, work))
            }
            (name, _) => {
                eprintln!("fake cuda: kernel {name} is not known here");
                Ok(Work::new(Kind::Kernel, || Err(Code::LAUNCH_FAILED)))
            }
        }
    }
}

/// `dst[i] = dst[i] + src[i]`.
fn add_f32(device: &Arc<Device>, to: u64, from: u64, count: u64) -> Result<(), Code> {
    let length = usize::try_from(count)
        .ok()
        .and_then(|count| count.checked_mul(4));
    let length = length.ok_or(Code::ILLEGAL_ADDRESS)?;
    if length == 0 {
        return Ok(());
    }
    let [to, from] = [to, from].map(|address| reachable(device, address, length));
    let (to, from) = (to?, from?);
    let mut sums = to.read();
    for (sum, other) in sums.chunks_exact_mut(4).zip(from.read().chunks_exact(4)) {
        let [one, other] =
            [&*sum, other].map(|bytes| bytes.try_into().map_or(f32::NAN, f32::from_le_bytes));
        sum.copy_from_slice(&(one + other).to_le_bytes());
    }
    match device.link_to(to.device()) {
        Link::Corrupting | Link::CorruptingKernels => corrupt(&mut sums),
        Link::Stuck => loop {
            std::thread::park();
        },
        Link::Ok | Link::NotSupported => {}
    }
    to.write(&sums);
    Ok(())
}

/// Memory that a kernel on the device may access.
fn reachable(device: &Arc<Device>, address: u64, length: usize) -> Result<Span, Code> {
    let span = Process::here()
        .memory
        .span(address, length)
        .ok_or(Code::ILLEGAL_ADDRESS)?;
    let is_within = Arc::ptr_eq(span.device(), device) || device.reaches(span.device());
    is_within.then_some(span).ok_or(Code::ILLEGAL_ADDRESS)
}

/// Writes PTX to a file named after its hash.
fn keep(folder: &Path, ptx: &str) -> std::io::Result<()> {
    let mut hash = DefaultHasher::new();
    ptx.hash(&mut hash);
    let file = folder.join(format!("{:016x}.ptx", hash.finish()));
    let part = folder.join(format!("{:016x}.{}", hash.finish(), std::process::id()));
    std::fs::write(&part, ptx)?;
    std::fs::rename(part, file)
}

/// The kernels that PTX declares; `None` if it is not PTX.
fn entries(ptx: &str, entry: fn(&str) -> Option<Entry>) -> Option<Vec<Entry>> {
    let lines = ptx
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    let text: String = lines.collect::<Vec<_>>().join("\n");
    let has = |directive: &str| text.split_whitespace().any(|word| word == directive);
    if ![".version", ".target", ".address_size"]
        .into_iter()
        .all(has)
    {
        return None;
    }
    text.split(".entry").skip(1).map(entry).collect()
}

/// Parses one kernel, starting at its name.
fn entry(text: &str) -> Option<Entry> {
    let (name, rest) = text.split_once('(')?;
    let (parameters, _) = rest.split_once(')')?;
    let declared = parameters
        .split(',')
        .map(str::trim)
        .filter(|parameter| !parameter.is_empty());
    let sizes = declared.map(|parameter| {
        let mut words = parameter.split_whitespace();
        let kind = words.find(|word| *word != ".param")?;
        let bits: usize = kind
            .trim_start_matches(['.', 'u', 's', 'b', 'f'])
            .parse()
            .ok()?;
        Some(bits / 8)
    });
    let parameters = sizes.collect::<Option<Vec<_>>>()?;
    Some(Entry {
        name: name.trim().to_owned(),
        parameters,
        does_nothing: false,
    })
}

/// The same for a foreign kernel, whose parameters are ignored.
fn foreign_entry(text: &str) -> Option<Entry> {
    let (name, _) = text.split_once('(')?;
    Some(Entry {
        name: name.trim().to_owned(),
        parameters: Vec::new(),
        does_nothing: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_with_the_sizes_of_their_parameters() {
        let ptx = ".version 7.0\n.target sm_70\n.address_size 64\n// .entry not_this(\n\
            .visible .entry add(\n  .param .u64 to,\n  .param .u64 from,\n  .param .u32 count\n)\n{ ret; }\n\
            .visible .entry none() { ret; }";
        let found = entries(ptx, entry).expect("PTX");
        let expect = [("add", vec![8, 8, 4]), ("none", vec![])];
        let expect = expect.map(|(name, parameters)| Entry {
            name: name.to_owned(),
            parameters,
            does_nothing: false,
        });
        assert_eq!(found, expect);
    }

    #[test]
    fn foreign_kernels_may_take_anything() {
        let ptx = ".version 8.7\n.target sm_90a\n.address_size 64\n\
            .visible .entry gemm(.param .u64 .ptr .align 16 lhs, .param .align 8 .b8 info[64])\n.maxntid 256\n{ ret; }";
        assert_eq!(entries(ptx, entry), None);
        let found = entries(ptx, foreign_entry).expect("PTX");
        assert_eq!(found.len(), 1);
        assert!(found[0].name == "gemm" && found[0].does_nothing);
    }

    #[test]
    fn what_is_no_ptx_is_refused() {
        for text in [
            "",
            ".version 7.0\n.target sm_70",
            ".version 7\n.target a\n.address_size 64\n.entry a(.param what)",
        ] {
            assert_eq!(entries(text, entry), None, "{text}");
        }
    }
}
