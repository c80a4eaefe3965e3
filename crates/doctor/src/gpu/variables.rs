//! Variables of CUDA and NCCL that do not fit this machine.
//!
//! *Source*: "CUDA Environment Variables" in NVIDIA's CUDA programming guide, "Environment Variables" in NCCL's user guide.

use paceline_gpu::devices::{Gpu, visible};
use paceline_gpu::snapshot::{Reading, Snapshot};
use paceline_words::{count, say};

use super::pairs::{Pair, pairs};
use super::words::joined;
use crate::checks;
use crate::finding::{Notes, plain};

/// Entries of CUDA_VISIBLE_DEVICES that are looked at; a snapshot from elsewhere may have any number.
const ENTRIES_MAX: usize = 1_024;

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    if snapshot.devices.is_empty() {
        return;
    }
    let all = snapshot.system.variables.iter();
    let named: Vec<String> = all
        .map(|(name, value)| format!("{}={}", plain(name), plain(value)))
        .collect();
    let lang = notes.lang;
    notes.sheet(checks::VARIABLES).fact(match named.is_empty() {
        true => say!(
            lang,
            "none of CUDA's or NCCL's is set",
            "설정된 CUDA·NCCL 변수 없음"
        ),
        false => joined(named, lang),
    });
    judge_visible(snapshot, notes);
    judge_nccl(snapshot, notes);
}

fn value<'a>(snapshot: &'a Snapshot, name: &str) -> Option<&'a str> {
    snapshot.system.variable(name).map(str::trim)
}

fn is_set(snapshot: &Snapshot, name: &str) -> bool {
    value(snapshot, name).is_some_and(|value| !value.is_empty() && value != "0")
}

fn judge_visible(snapshot: &Snapshot, notes: &mut Notes) {
    let Some(list) = value(snapshot, "CUDA_VISIBLE_DEVICES") else {
        return;
    };
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::VARIABLES);
    let entries = list.split(',').map(str::trim);
    let entries: Vec<&str> = entries.take(ENTRIES_MAX).collect();
    let first_bad = entries.iter().position(|entry| !exists(snapshot, entry));
    let Some(left) = first_bad else {
        return;
    };
    let devices = count(lang, snapshot.devices.len(), "GPU", "GPU");
    let shown = plain(list);
    let fix = say!(
        lang,
        "`unset CUDA_VISIBLE_DEVICES`, or name devices that `nvidia-smi -L` shows; a launcher gives each rank its own",
        "`unset CUDA_VISIBLE_DEVICES`를 실행하거나, `nvidia-smi -L`에 나오는 장치로 지정하세요. 랭크별 장치는 런처가 나눠 줍니다"
    );
    // Nothing, or a number below zero, is how one hides all devices on purpose.
    if left == 0 && matches!(entries[0], "" | "-1") {
        sheet.warning(
            say!(
                lang,
                "CUDA_VISIBLE_DEVICES is \"{shown}\", which hides every GPU",
                "CUDA_VISIBLE_DEVICES 값 \"{shown}\" 때문에 모든 GPU가 가려짐"
            ),
            say!(
                lang,
                "programs find no GPU and fail, or train on the CPU without a word",
                "프로그램이 GPU를 찾지 못해 실패하거나, 알림 없이 CPU로 학습합니다"
            ),
            fix,
        );
        return;
    }
    let (entry, before) = (plain(entries[left]), count(lang, left, "device", "장치"));
    sheet.error(
        say!(
            lang,
            "CUDA_VISIBLE_DEVICES is \"{shown}\", and there is no device \"{entry}\" among {devices}",
            "CUDA_VISIBLE_DEVICES 값이 \"{shown}\"인데, 이 머신({devices})에 장치 \"{entry}\" 없음"
        ),
        match left {
            0 => say!(
                lang,
                "CUDA stops reading there, so programs see no GPU at all",
                "CUDA는 거기서 읽기를 멈추므로 프로그램에는 GPU가 하나도 보이지 않습니다"
            ),
            _ => say!(
                lang,
                "CUDA stops reading there, so programs see only the {before} before it",
                "CUDA는 거기서 읽기를 멈추므로 프로그램에는 그 앞의 {before}만 보입니다"
            ),
        },
        fix,
    );
}

/// Whether an entry names a device, as far as that can be told from here.
fn exists(snapshot: &Snapshot, entry: &str) -> bool {
    let gpus: Vec<Gpu> = snapshot.devices.iter().map(Gpu::of).collect();
    if entry.starts_with("GPU-") && gpus.iter().any(|gpu| gpu.uuid.is_empty()) {
        return true;
    }
    // In which order devices are counted does not change which numbers there are.
    let variable = |name: &str| match name {
        "CUDA_VISIBLE_DEVICES" => Some(entry.to_owned()),
        "CUDA_DEVICE_ORDER" => Some("PCI_BUS_ID".to_owned()),
        _ => None,
    };
    visible(&gpus, &variable).map_or(true, |seen| !seen.is_empty())
}

fn judge_nccl(snapshot: &Snapshot, notes: &mut Notes) {
    let pairs = pairs(snapshot);
    let over_nvlink = pairs.iter().any(|pair| pair.is_ok() && pair.has_nvlink);
    let over_pcie = pairs.iter().any(Pair::is_ok_over_pcie);
    let never = ["LOC", "0"].contains(&value(snapshot, "NCCL_P2P_LEVEL").unwrap_or_default());
    let disabled = is_set(snapshot, "NCCL_P2P_DISABLE");
    let setting = match (disabled, never) {
        (true, _) => Some("NCCL_P2P_DISABLE"),
        (false, true) => Some("NCCL_P2P_LEVEL"),
        (false, false) => None,
    };
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::VARIABLES);
    if let Some(setting) = setting {
        if over_nvlink {
            sheet.warning(
                say!(
                    lang,
                    "{setting} switches peer-to-peer off, although NVLink joins these GPUs",
                    "GPU가 NVLink로 연결되어 있는데 {setting} 설정이 P2P를 끔"
                ),
                say!(
                    lang,
                    "NCCL copies everything through the host's memory instead: many times slower than NVLink",
                    "NCCL이 모든 데이터를 호스트 메모리를 거쳐 복사하므로 NVLink보다 몇 배나 느립니다"
                ),
                say!(
                    lang,
                    "`unset {setting}` (look into /etc/nccl.conf and ~/.nccl.conf too); NCCL_P2P_LEVEL=NVL allows it over NVLink only",
                    "`unset {setting}` 명령으로 지우세요(/etc/nccl.conf와 ~/.nccl.conf도 확인하세요). NCCL_P2P_LEVEL=NVL을 주면 NVLink에서만 P2P를 씁니다"
                ),
            );
        } else if over_pcie {
            sheet.note(
                say!(
                    lang,
                    "{setting} switches peer-to-peer off, which the driver calls OK",
                    "드라이버는 P2P가 OK라고 하지만 {setting} 설정이 P2P를 끔"
                ),
                say!(
                    lang,
                    "NCCL copies everything through the host's memory instead: slower, and right where the driver is wrong",
                    "NCCL이 모든 데이터를 호스트 메모리를 거쳐 복사합니다. 느리지만, 드라이버가 틀린 머신에서는 이것이 맞습니다"
                ),
                say!(
                    lang,
                    "`unset {setting}` once you have proved that peer-to-peer works here (see above)",
                    "P2P가 제대로 동작하는지 확인한 뒤(위 참고) `unset {setting}` 명령으로 지우세요"
                ),
            );
        }
    }
    let level = value(snapshot, "NCCL_P2P_LEVEL")
        .filter(|level| !level.is_empty() && !never && *level != "NVL");
    if let Some(level) = level
        && !disabled
        && !pairs.is_empty()
        && pairs
            .iter()
            .all(|pair| !pair.is_ok() && pair.status.is_some())
    {
        let level = plain(level);
        sheet.note(
            say!(
                lang,
                "NCCL_P2P_LEVEL={level} asks for peer-to-peer, which the driver does not offer here",
                "NCCL_P2P_LEVEL={level} 설정이 있지만 드라이버가 P2P를 제공하지 않음"
            ),
            say!(
                lang,
                "it has no effect: NCCL copies through the host's memory",
                "효과가 없습니다. NCCL은 호스트 메모리를 거쳐 복사합니다"
            ),
            say!(
                lang,
                "`unset NCCL_P2P_LEVEL`",
                "`unset NCCL_P2P_LEVEL`을 실행하세요"
            ),
        );
    }
    let is_refused = |pair: &Pair| !pair.is_ok() && pair.status.is_some();
    let needs_host = setting.is_some() || pairs.iter().any(is_refused);
    if is_set(snapshot, "NCCL_SHM_DISABLE") && needs_host && !pairs.is_empty() {
        sheet.warning(
            say!(
                lang,
                "NCCL_SHM_DISABLE takes the way through shared memory, which GPUs here need",
                "NCCL_SHM_DISABLE이 이 머신의 GPU에 필요한 공유 메모리 경로를 막음"
            ),
            say!(
                lang,
                "NCCL then sends what ranks of this machine exchange through the network, far slower; without a network card it fails",
                "NCCL이 같은 머신의 랭크끼리도 훨씬 느린 네트워크로 통신합니다. 네트워크 카드가 없으면 실패합니다"
            ),
            say!(
                lang,
                "`unset NCCL_SHM_DISABLE`",
                "`unset NCCL_SHM_DISABLE`을 실행하세요"
            ),
        );
    }
    let mut nics = snapshot.system.nics.iter();
    let has_rdma = nics.any(|nic| nic.is_rdma && nic.is_up == Reading::Known(true));
    if is_set(snapshot, "NCCL_IB_DISABLE") && has_rdma {
        sheet.warning(
            say!(
                lang,
                "NCCL_IB_DISABLE is set, although there is an RDMA adapter that is up",
                "동작 중인 RDMA 어댑터가 있는데 NCCL_IB_DISABLE이 설정되어 있음"
            ),
            say!(
                lang,
                "jobs of several nodes use TCP sockets instead: slower, and they take CPU time",
                "여러 노드의 작업이 TCP 소켓을 씁니다. 느리고 CPU 시간도 씁니다"
            ),
            say!(
                lang,
                "`unset NCCL_IB_DISABLE`, unless it hangs with it",
                "RDMA에서 멈추는 문제가 없다면 `unset NCCL_IB_DISABLE`을 실행하세요"
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, joined_all, machine};
    use paceline_gpu::snapshot::{Capability, Nic, P2pStatus};

    fn with(variables: &[(&str, &str)], status: P2pStatus, has_nvlink: bool) -> Snapshot {
        let mut snapshot = machine(2);
        joined_all(&mut snapshot, status);
        if has_nvlink {
            let position = Capability::ALL
                .iter()
                .position(|known| *known == Capability::NvLink);
            for link in &mut snapshot.links {
                link.p2p[position.expect("known")] = P2pStatus::Ok.into();
            }
        }
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        snapshot.system.variables = variables.iter().map(owned).collect();
        snapshot
    }

    #[test]
    fn devices_that_do_not_exist_end_the_list() {
        let speaks = |list: &str, expect: &[&str]| {
            let snapshot = with(&[("CUDA_VISIBLE_DEVICES", list)], P2pStatus::Ok, false);
            check(judge, &snapshot, expect);
        };
        let error = ["error: variables: `unset CUDA_VISIBLE_DEVICES`"];
        speaks("0,1", &[]);
        speaks("1", &[]);
        speaks(" 1 , 0 ", &[]);
        speaks("2", &error);
        speaks("0,2", &error);
        speaks("0,two", &error);
        speaks("GPU-0", &[]);
        speaks("GPU-9", &error);
        speaks("MIG-77", &[]);
        speaks("", &["warning: variables: `unset"]);
        speaks("-1", &["warning: variables: `unset"]);
    }

    #[test]
    fn nccl_without_peer_to_peer_is_judged_by_what_it_loses() {
        let speaks = |name: &str, value: &str, status, has_nvlink, expect: &[&str]| {
            check(judge, &with(&[(name, value)], status, has_nvlink), expect);
        };
        let (ok, bad) = (P2pStatus::Ok, P2pStatus::GpuNotSupported);
        let warning = ["warning: variables: `unset NCCL_P2P_DISABLE`"];
        speaks("NCCL_P2P_DISABLE", "1", ok, true, &warning);
        speaks(
            "NCCL_P2P_LEVEL",
            "LOC",
            ok,
            true,
            &["warning: variables: `unset NCCL_P2P_LEVEL`"],
        );
        speaks("NCCL_P2P_LEVEL", "NVL", ok, true, &[]);
        speaks(
            "NCCL_P2P_DISABLE",
            "1",
            ok,
            false,
            &["note: variables: `unset NCCL_P2P_DISABLE`"],
        );
        speaks("NCCL_P2P_DISABLE", "1", bad, false, &[]);
        speaks(
            "NCCL_P2P_LEVEL",
            "SYS",
            bad,
            false,
            &["note: variables: `unset NCCL_P2P_LEVEL`"],
        );
        speaks("NCCL_P2P_LEVEL", "SYS", ok, false, &[]);
        speaks("NCCL_P2P_DISABLE", "0", ok, true, &[]);
    }

    #[test]
    fn shared_memory_must_stay_where_peer_to_peer_is_not() {
        let speaks = |variables: &[(&str, &str)], status, expect: &[&str]| {
            check(judge, &with(variables, status, false), expect);
        };
        let set = ("NCCL_SHM_DISABLE", "1");
        let warning = "warning: variables: `unset NCCL_SHM_DISABLE`";
        speaks(&[set], P2pStatus::Ok, &[]);
        speaks(&[set], P2pStatus::NotSupported, &[warning]);
        let both = [set, ("NCCL_P2P_DISABLE", "1")];
        speaks(
            &both,
            P2pStatus::Ok,
            &["note: variables: `unset NCCL_P2P_DISABLE`", warning],
        );
    }

    #[test]
    fn rdma_that_is_switched_off_is_told() {
        let mut snapshot = with(&[("NCCL_IB_DISABLE", "1")], P2pStatus::Ok, true);
        check(judge, &snapshot, &[]);
        snapshot.system.nics = vec![Nic {
            is_rdma: true,
            is_up: true.into(),
            ..Nic::default()
        }];
        check(
            judge,
            &snapshot,
            &["warning: variables: `unset NCCL_IB_DISABLE`"],
        );
    }
}
