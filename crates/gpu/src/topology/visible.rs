//! Which devices a program sees that is started with the variables that are set, in words.

use serde::Serialize;

use super::text::{listed, shown};
use crate::devices::{self, Gpu};
use crate::snapshot::Snapshot;

/// What `CUDA_VISIBLE_DEVICES` lets a program see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Visible {
    /// The variable's value.
    pub value: String,
    /// The driver's numbers of the devices that are seen, in the program's order; nothing where that is not known.
    pub devices: Option<Vec<u32>>,
    /// What is to be known about it.
    pub remark: Option<String>,
}

/// What is seen, if the variable is set.
pub(super) fn read(snapshot: &Snapshot) -> Option<Visible> {
    let variable = |name: &str| snapshot.system.variable(name).map(str::to_owned);
    let value = variable("CUDA_VISIBLE_DEVICES")?;
    let gpus: Vec<Gpu> = snapshot.devices.iter().map(Gpu::of).collect();
    let (devices, remark) = match devices::visible(&gpus, &variable) {
        Ok(seen) => {
            let entries = value.split(',').count();
            let is_short = seen.len() < entries && !value.trim().is_empty();
            let remark = format!(
                "{} of its {entries} entries count: it stops at one that is no device here",
                seen.len()
            );
            (Some(seen), is_short.then_some(remark))
        }
        Err(reason) => (None, Some(shown(&reason))),
    };
    Some(Visible {
        value: shown(&value),
        devices,
        remark,
    })
}

impl Visible {
    /// A sentence, and a line with the remark.
    pub(super) fn text(&self) -> String {
        let number = |(number, index): (usize, &u32)| match usize::try_from(*index) == Ok(number) {
            true => format!("GPU{index}"),
            false => format!("GPU{index} (as its {number})"),
        };
        let seen = match self.devices.as_deref() {
            None => "devices that cannot be told from here".to_owned(),
            Some([]) => "no GPU".to_owned(),
            Some(devices) => {
                let devices: Vec<String> = devices.iter().enumerate().map(number).collect();
                listed(&devices)
            }
        };
        let mut text = format!(
            "CUDA_VISIBLE_DEVICES={}: a program started with it sees {seen}\n",
            self.value
        );
        if let Some(remark) = &self.remark {
            text.push_str(&format!("  {remark}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::Device;

    fn check(value: &str, models: [&str; 3], expect: &str) {
        let device = |(index, uuid): (usize, &str)| Device {
            index: index as u32,
            uuid: uuid.to_owned().into(),
            name: models[index].to_owned().into(),
            pci: format!("0000:0{index}:00.0").into(),
            ..Device::default()
        };
        let uuids = ["GPU-aa1", "GPU-ab2", "GPU-ab3"];
        let mut snapshot = Snapshot {
            devices: uuids.into_iter().enumerate().map(device).collect(),
            ..Snapshot::default()
        };
        assert_eq!(read(&snapshot), None);
        let set = ("CUDA_VISIBLE_DEVICES".to_owned(), value.to_owned());
        snapshot.system.variables.push(set);
        let text = read(&snapshot).expect("it is set").text();
        let words = text.split_once(" sees ").expect("a sentence").1;
        assert_eq!(words.replace("\n  ", "; ").trim_end(), expect, "{value}");
    }

    #[test]
    fn what_a_program_sees_is_told_with_its_own_numbers() {
        let check = |value: &str, expect: &str| check(value, ["a", "a", "a"], expect);
        check("0,1", "GPU0 and GPU1");
        check("2, 0", "GPU2 (as its 0) and GPU0 (as its 1)");
        check("GPU-ab2,GPU-aa1", "GPU1 (as its 0) and GPU0 (as its 1)");
        check("", "no GPU");
        let rest = "it stops at one that is no device here";
        check("-1", &format!("no GPU; 0 of its 1 entries count: {rest}"));
        check(
            "0,2,-1,1",
            &format!("GPU0 and GPU2 (as its 1); 2 of its 4 entries count: {rest}"),
        );
    }

    #[test]
    fn numbers_of_different_models_are_cudas_own() {
        let text = "devices that cannot be told from here; GPUs of different models are numbered by speed; \
                    CUDA_DEVICE_ORDER=PCI_BUS_ID changes that";
        check("0", ["slow", "fast", "fast"], text);
        check("GPU-aa", ["slow", "fast", "fast"], "GPU0");
    }
}
