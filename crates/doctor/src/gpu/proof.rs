//! Peer-to-peer over PCIe that the driver calls `OK`: its word, not a proof.
//!
//! *Source*: "GPU troubleshooting" in NCCL's user guide (`OK` and ACS, `simpleP2P` checks what arrives); pytorch/pytorch issues
//! 13045, 24081 and 84803 (DataParallel that hangs or learns nothing, silent corruption, cured by the IOMMU or ACS).

use paceline_gpu::snapshot::{Ancestor, Snapshot};

use super::pairs::{Pair, pairs};
use super::words::{self, joined};
use super::{acs, iommu};
use crate::finding::Notes;

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let pairs = pairs(snapshot);
    let over_pcie = pairs.iter().copied();
    let over_pcie: Vec<Pair> = over_pcie.filter(Pair::is_ok_over_pcie).collect();
    if over_pcie.is_empty() {
        return;
    }
    let of = |some: &[Pair]| {
        words::pairs(
            &some.iter().map(|pair| pair.of).collect::<Vec<_>>(),
            pairs.len(),
        )
    };
    let devices = snapshot.devices.len();
    let proof = format!(
        "prove it: `simpleP2P` of NVIDIA's cuda-samples checks what arrives, and `all_reduce_perf -b 8 -e 256M -f 2 -g {devices} -c 1` of \
         nccl-tests must end with 0 wrong values; `p2pBandwidthLatencyTest` must be faster with peer-to-peer than without"
    );
    let mut sheet = notes.sheet("peer-to-peer");
    let reasons = suspicions(snapshot);
    if !reasons.is_empty() {
        sheet.warning(
            format!(
                "the driver says that peer-to-peer over PCIe is OK between {}, which is no proof here: {}",
                of(&over_pcie),
                joined(reasons)
            ),
            "the driver looks at cards and chipset, not at what lies between: on such machines jobs hang, crawl, or train on garbage \
             without an error. DataParallel meets it first; NCCL on AMD machines with two GPUs, or where NCCL_P2P_LEVEL tells it to",
            format!("{proof}; until then NCCL_P2P_DISABLE=1, and DDP in place of DataParallel"),
        );
        return;
    }
    let across = over_pcie.into_iter();
    let across = across.filter(|pair| pair.ancestor >= Some(Ancestor::HostBridge));
    let across: Vec<Pair> = across.collect();
    if !across.is_empty() {
        sheet.note(
            format!(
                "the driver says that peer-to-peer over PCIe is OK between {}, by way of a CPU; this was not tested",
                of(&across)
            ),
            "some mainboards pass such data on slowly or not at all, and the driver does not know; NCCL itself goes by way of a CPU only \
             where NCCL_P2P_LEVEL tells it to, and on AMD machines with two GPUs",
            format!("{proof}; if it fails or hangs NCCL_P2P_DISABLE=1"),
        );
    }
}

/// What makes the driver's word doubtful.
fn suspicions(snapshot: &Snapshot) -> Vec<String> {
    let mut reasons = Vec::new();
    if let Some(mode) = iommu::translating(snapshot) {
        reasons.push(format!("the IOMMU translates what GPUs send ({mode})"));
    }
    if !acs::in_the_way(snapshot).is_empty() {
        reasons.push("ACS sends it up to the CPU".to_owned());
    }
    if snapshot.system.virtual_machine().is_some() {
        reasons.push("this is a virtual machine".to_owned());
    }
    let mut settings = snapshot.system.driver_parameters.iter();
    if settings.any(|(name, value)| name.contains("ForceP2P") && value.trim() != "0") {
        reasons.push("a setting of the driver (ForceP2P) makes it say so".to_owned());
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, joined_all, machine};
    use paceline_gpu::snapshot::{Capability, P2pStatus};

    fn over_pcie(ancestor: Ancestor) -> Snapshot {
        let mut snapshot = machine(2);
        joined_all(&mut snapshot, P2pStatus::Ok);
        for link in &mut snapshot.links {
            link.ancestor = ancestor.into();
        }
        snapshot
    }

    #[test]
    fn ok_below_one_switch_needs_no_word() {
        check(judge, &over_pcie(Ancestor::Bridge), &[]);
        check(judge, &machine(2), &[]);
    }

    #[test]
    fn ok_by_way_of_a_cpu_is_noted() {
        check(
            judge,
            &over_pcie(Ancestor::Node),
            &["note: peer-to-peer: prove it"],
        );
        let mut nvlink = over_pcie(Ancestor::System);
        for link in &mut nvlink.links {
            let position = Capability::ALL
                .iter()
                .position(|known| *known == Capability::NvLink);
            link.p2p[position.expect("known")] = P2pStatus::Ok.into();
        }
        check(judge, &nvlink, &[]);
    }

    #[test]
    fn ok_where_something_is_in_the_way_is_a_warning() {
        let speaks = |change: fn(&mut Snapshot), reason: &str| {
            let mut snapshot = over_pcie(Ancestor::Bridge);
            change(&mut snapshot);
            check(judge, &snapshot, &["warning: peer-to-peer: prove it"]);
            let mut notes = Notes::default();
            judge(&snapshot, &mut notes);
            assert!(
                notes.findings[0].what.contains(reason),
                "{:?}",
                notes.findings
            );
        };
        speaks(
            |snapshot| {
                snapshot.system.iommu.is_on = true.into();
                snapshot.system.iommu.mode = "DMA-FQ".to_owned().into();
            },
            "(DMA-FQ)",
        );
        speaks(
            |snapshot| snapshot.system.confined_by = vec!["kvm".to_owned()],
            "virtual machine",
        );
        speaks(
            |snapshot| {
                snapshot.system.driver_parameters =
                    vec![("ForceP2P".to_owned(), "0x11".to_owned())];
            },
            "ForceP2P",
        );
    }

    #[test]
    fn what_is_not_ok_is_spoken_of_elsewhere() {
        let mut snapshot = machine(2);
        joined_all(&mut snapshot, P2pStatus::NotSupported);
        snapshot.system.confined_by = vec!["kvm".to_owned()];
        check(judge, &snapshot, &[]);
    }
}
