use super::*;

#[test]
fn clocks_are_held_down_for_each_bit_that_is_known() {
    let check = |bits: u64, expect: &[Throttle]| assert_eq!(throttles(bits), expect, "{bits:#x}");
    check(0, &[]);
    check(0x1, &[]); // idle
    check(0x4, &[Throttle::PowerCap]);
    check(0x2, &[Throttle::ClocksSetting]);
    check(0x48, &[Throttle::HardwareThermal, Throttle::Hardware]);
    check(
        0xfe | 0x100,
        &[
            Throttle::PowerCap,
            Throttle::Thermal,
            Throttle::HardwareThermal,
            Throttle::PowerBrake,
            Throttle::Hardware,
            Throttle::SyncBoost,
            Throttle::ClocksSetting,
            Throttle::DisplayClock,
        ],
    );
    check(0xffff_0000_0000_0000, &[]);
}

#[test]
fn a_process_is_listed_once() {
    let list = |entries: &[(u32, u64)]| -> Vec<Process> {
        let process = |(pid, used_bytes): &(u32, u64)| Process {
            pid: *pid,
            used_bytes: *used_bytes,
        };
        entries.iter().map(process).collect()
    };
    let check = |compute: &[(u32, u64)], graphics: &[(u32, u64)], expect: &str| {
        let held = joined(&list(compute), &list(graphics));
        let words = held.iter().map(|held| {
            let bytes = held
                .used_bytes
                .known()
                .map_or("?".to_owned(), u64::to_string);
            let kind = if held.is_compute { "C" } else { "G" };
            format!("{}{kind} {bytes}", held.pid)
        });
        assert_eq!(words.collect::<Vec<_>>().join(", "), expect);
    };
    check(&[], &[], "");
    check(&[(9, 5), (3, 7)], &[], "3C 7, 9C 5");
    check(&[(3, 7)], &[(3, 7), (4, 1)], "3C 7, 4G 1");
    check(&[(3, 7), (3, 8)], &[], "3C 15");
    check(&[(3, u64::MAX), (3, 8)], &[], "3C 8");
    check(&[(3, u64::MAX)], &[(3, 2)], "3C ?");
    check(
        &[(3, u64::MAX - 1), (3, u64::MAX - 1)],
        &[],
        "3C 18446744073709551615",
    );
}

#[test]
fn the_shares_of_all_groups_are_the_whole() {
    let shares = Group::ALL.map(|group| group.pace().share);
    assert_eq!(shares.iter().sum::<u32>(), 100);
    for group in Group::ALL {
        let pace = group.pace();
        assert!(pace.soonest < pace.latest, "{group:?}");
    }
}

#[test]
fn power_beyond_reason_is_none() {
    assert_eq!(milliwatts(350_000), Ok(350_000));
    assert_eq!(milliwatts(u32::MAX), Err(Gap::NotSupported));
    assert!(matches!(milliwatts(2_000_000_000), Err(Gap::Other(_))));
}
