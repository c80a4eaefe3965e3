//! Which devices a program sees that is started with the variables that are set.

use serde::Serialize;

use super::text::{listed, shown};
use crate::snapshot::{Device, Snapshot};

/// What `CUDA_VISIBLE_DEVICES` lets a program see.
///
/// *Source* - CUDA's documentation of the variable; that a device named twice hides all of them is what PyTorch found out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Visible {
    /// The variable's value.
    pub value: String,
    /// What is seen, in the program's order.
    pub devices: Vec<String>,
    /// What is to be known about it.
    pub remarks: Vec<String>,
}

/// What is seen, if the variable is set.
pub(super) fn read(snapshot: &Snapshot) -> Option<Visible> {
    let variable = |name: &str| {
        let mut all = snapshot.system.variables.iter();
        all.find(|(known, _)| known == name)
            .map(|(_, value)| &**value)
    };
    let value = variable("CUDA_VISIBLE_DEVICES")?;
    let mut visible = Visible {
        value: shown(value),
        devices: Vec::new(),
        remarks: Vec::new(),
    };
    let names: Vec<&str> = value.split(',').map(str::trim).collect();
    // The first one decides what the others are taken for.
    let by_name = ["GPU-", "MIG-"]
        .into_iter()
        .find(|prefix| value.trim().starts_with(prefix));
    for name in names.iter().filter(|_| !value.trim().is_empty()) {
        let found = match by_name {
            Some("GPU-") => by_uuid(&snapshot.devices, name),
            Some(_) => name
                .starts_with("MIG-")
                .then(|| format!("instance {}", shown(name))),
            None => by_number(&snapshot.devices, name),
        };
        match found {
            Some(label) if visible.devices.contains(&label) => {
                visible.devices.clear();
                visible
                    .remarks
                    .push(format!("it names {label} twice, and so hides all devices"));
                break;
            }
            Some(label) => visible.devices.push(label),
            None => {
                let is_last = names.last() == Some(name);
                let rest = if is_last {
                    ""
                } else {
                    ", which hides what comes after it"
                };
                visible
                    .remarks
                    .push(format!("`{}` is no device here{rest}", shown(name)));
                break;
            }
        }
    }
    let models = |device: &Device| device.name.known().cloned();
    let first = snapshot.devices.first().map(models);
    let is_mixed = snapshot
        .devices
        .iter()
        .any(|device| Some(models(device)) != first);
    let by_bus = variable("CUDA_DEVICE_ORDER") == Some("PCI_BUS_ID");
    if by_name.is_none() && is_mixed && !by_bus && !visible.devices.is_empty() {
        visible.remarks.push(
            "CUDA gives the fastest model the number 0; the numbers are those shown here only with \
             CUDA_DEVICE_ORDER=PCI_BUS_ID"
                .to_owned(),
        );
    }
    Some(visible)
}

/// CUDA takes the number that a word begins with.
fn by_number(devices: &[Device], word: &str) -> Option<String> {
    let digits: String = word.chars().take_while(char::is_ascii_digit).collect();
    let index: u32 = digits.parse().ok()?;
    let is_there = devices.iter().any(|device| device.index == index);
    is_there.then(|| format!("GPU{index}"))
}

/// The one device whose identifier begins so.
fn by_uuid(devices: &[Device], word: &str) -> Option<String> {
    let begins = |device: &&Device| {
        let uuid = device.uuid.known();
        word.len() > "GPU-".len() && uuid.is_some_and(|uuid| uuid.starts_with(word))
    };
    let mut found = devices.iter().filter(begins);
    match (found.next(), found.next()) {
        (Some(device), None) => Some(format!("GPU{}", device.index)),
        _ => None,
    }
}

impl Visible {
    /// In words.
    pub(super) fn text(&self) -> String {
        let number = |(number, label): (usize, &String)| match *label == format!("GPU{number}") {
            true => label.clone(),
            false => format!("{label} (as its {number})"),
        };
        let devices: Vec<String> = self.devices.iter().enumerate().map(number).collect();
        let seen = match devices.is_empty() {
            true => "no GPU".to_owned(),
            false => listed(&devices),
        };
        let mut text = format!(
            "CUDA_VISIBLE_DEVICES={}: a program started with it sees {seen}\n",
            self.value
        );
        for remark in &self.remarks {
            text.push_str(&format!("  {remark}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(value: &str, expect: &str) {
        let device = |index: u32, uuid: &str| Device {
            index,
            uuid: uuid.to_owned().into(),
            name: "Some GPU".to_owned().into(),
            ..Device::default()
        };
        let mut snapshot = Snapshot {
            devices: vec![
                device(0, "GPU-aa1"),
                device(1, "GPU-ab2"),
                device(2, "GPU-ab3"),
            ],
            ..Snapshot::default()
        };
        let set = ("CUDA_VISIBLE_DEVICES".to_owned(), value.to_owned());
        snapshot.system.variables.push(set);
        let text = read(&snapshot).expect("it is set").text();
        let words = text.split_once(" sees ").expect("a sentence").1;
        assert_eq!(words.replace("\n  ", "; ").trim_end(), expect, "{value}");
    }

    #[test]
    fn numbers_and_names_choose_and_order_the_devices() {
        check("0,1", "GPU0 and GPU1");
        check("2, 0", "GPU2 (as its 0) and GPU0 (as its 1)");
        check("GPU-aa", "GPU0");
        check("GPU-ab2,GPU-aa1", "GPU1 (as its 0) and GPU0 (as its 1)");
        check("MIG-5e", "instance MIG-5e (as its 0)");
    }

    #[test]
    fn what_is_wrong_hides_what_comes_after_it() {
        check("", "no GPU");
        check("-1", "no GPU; `-1` is no device here");
        check(
            "0,2,-1,1",
            "GPU0 and GPU2 (as its 1); `-1` is no device here, which hides what comes after it",
        );
        check("1,7", "GPU1 (as its 0); `7` is no device here");
        check("GPU-ab", "no GPU; `GPU-ab` is no device here");
        check("GPU-", "no GPU; `GPU-` is no device here");
        check(
            "0,1,0",
            "no GPU; it names GPU0 twice, and so hides all devices",
        );
    }

    #[test]
    fn numbers_of_different_models_are_cudas_own() {
        let model = |index: u32, name: &str| Device {
            index,
            name: name.to_owned().into(),
            ..Device::default()
        };
        let mut snapshot = Snapshot {
            devices: vec![model(0, "slow"), model(1, "fast")],
            ..Snapshot::default()
        };
        assert_eq!(read(&snapshot), None);
        let set = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        snapshot
            .system
            .variables
            .push(set("CUDA_VISIBLE_DEVICES", "0"));
        assert_eq!(read(&snapshot).expect("set").remarks.len(), 1);
        snapshot
            .system
            .variables
            .push(set("CUDA_DEVICE_ORDER", "PCI_BUS_ID"));
        assert_eq!(read(&snapshot).expect("set").remarks.len(), 0);
    }
}
