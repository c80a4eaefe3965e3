//! Modules and kernels: PTX is read as far as names and parameters go, and what a kernel does is known by its name.

use std::sync::Arc;

use super::{Device, Span, Work, corrupt};
use crate::code::Code;
use crate::machine::{Kind, Link};
use crate::process::Process;

/// PTX that was loaded.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) device: Arc<Device>,
    entries: Vec<Entry>,
}

/// A kernel as PTX declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    name: String,
    /// Sizes of its parameters.
    parameters: Vec<usize>,
}

/// A kernel that was found in a module.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) device: Arc<Device>,
    entry: Entry,
}

impl Module {
    /// Reads PTX.
    pub(crate) fn load(device: Arc<Device>, ptx: &str) -> Result<Self, Code> {
        let entries = entries(ptx).ok_or(Code::INVALID_PTX)?;
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
    /// Sizes of the parameters, in their order.
    pub(crate) fn parameters(&self) -> &[usize] {
        &self.entry.parameters
    }

    /// The work of a launch.
    pub(crate) fn launch(&self, arguments: Vec<u64>, threads: u64) -> Result<Work, Code> {
        if threads == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let device = self.device.clone();
        match (self.entry.name.as_str(), arguments[..].first_chunk::<3>()) {
            ("paceline_add_f32", Some(&[to, from, count])) => {
                let work = move || add_f32(&device, to, from, count);
                Ok(Work::Do(Kind::Kernel, Box::new(work)))
            }
            (name, _) => {
                eprintln!("fake cuda: kernel {name} is not known here");
                Ok(Work::Do(
                    Kind::Kernel,
                    Box::new(|| Err(Code::LAUNCH_FAILED)),
                ))
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

/// What a kernel on a device may touch.
fn reachable(device: &Arc<Device>, address: u64, length: usize) -> Result<Span, Code> {
    let span = Process::here()
        .memory
        .span(address, length)
        .ok_or(Code::ILLEGAL_ADDRESS)?;
    let is_within = Arc::ptr_eq(span.device(), device) || device.reaches(span.device());
    if is_within {
        Ok(span)
    } else {
        Err(Code::ILLEGAL_ADDRESS)
    }
}

/// The kernels that PTX declares; nothing where it is no PTX.
fn entries(ptx: &str) -> Option<Vec<Entry>> {
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

/// One kernel, from its name on.
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
        let found = entries(ptx).expect("PTX");
        let expect = [("add", vec![8, 8, 4]), ("none", vec![])];
        let expect = expect.map(|(name, parameters)| Entry {
            name: name.to_owned(),
            parameters,
        });
        assert_eq!(found, expect);
    }

    #[test]
    fn what_is_no_ptx_is_refused() {
        for text in [
            "",
            ".version 7.0\n.target sm_70",
            ".version 7\n.target a\n.address_size 64\n.entry a(.param what)",
        ] {
            assert_eq!(entries(text), None, "{text}");
        }
    }
}
