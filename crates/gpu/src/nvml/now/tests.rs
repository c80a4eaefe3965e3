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
fn the_shares_of_all_groups_are_the_whole() {
    let paces = Group::ALL.map(|(group, pace)| (group, Pace::of(pace)));
    let shares = paces.map(|(_, pace)| pace.share);
    assert_eq!(shares.iter().sum::<u32>(), 100);
    for (group, pace) in paces {
        assert!(pace.soonest < pace.latest, "{group:?}");
    }
}

#[test]
fn power_beyond_reason_is_none() {
    assert_eq!(milliwatts(350_000), Ok(350_000));
    assert_eq!(milliwatts(u32::MAX), Err(Gap::NotSupported));
    assert!(matches!(milliwatts(2_000_000_000), Err(Gap::Other(_))));
}
