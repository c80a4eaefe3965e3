//! Lanes and generations of PCIe: cards that have fewer than they could.
//!
//! A device without work lowers its generation to save power, and that is no fault; it does not give up lanes.
//!
//! *Source*: PCI Express base specification (a generation doubles a lane's speed, about); `current_link_width` and its kin of Linux.

use paceline_gpu::bus::Bus;
use paceline_gpu::snapshot::{Device, PcieLink, Snapshot};
use paceline_words::{Lang, say};

use super::words::{gpus, gpus_that, grouped, listed};
use crate::checks;
use crate::finding::{Notes, Severity};

/// Utilisation in percent from which a device has work, and no reason to lower its generation.
const BUSY_PERCENT: u32 = 50;

/// What is known of one device's link; 0 is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Seat {
    lanes: u32,
    /// Lanes of the card, and of what it is plugged into.
    card_lanes: u32,
    slot_lanes: u32,
    generation: u32,
    card_generation: u32,
    slot_generation: u32,
}

fn seat(bus: &Bus<'_>, device: &Device) -> Option<Seat> {
    let nothing = PcieLink::default();
    let place = device.pci.known().map(String::as_str).unwrap_or_default();
    // The kernel's card and slot each tell their own most; the driver tells the most of both together.
    let card = bus.get(place).and_then(|card| card.link.known());
    let slot = bus
        .slot(place)
        .and_then(|slot| slot.link.known())
        .unwrap_or(&nothing);
    let driver = device.pcie.known();
    let (card, driver) = match (card, driver) {
        (None, None) => return None,
        (card, driver) => (card.unwrap_or(&nothing), driver.unwrap_or(&nothing)),
    };
    let or = |first: u32, second: u32| if first > 0 { first } else { second };
    Some(Seat {
        lanes: or(driver.lanes, card.lanes),
        card_lanes: or(card.lanes_max, driver.lanes_max),
        slot_lanes: slot.lanes_max,
        generation: or(driver.generation, card.generation),
        card_generation: or(card.generation_max, driver.generation_max),
        slot_generation: slot.generation_max,
    })
}

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let bus = Bus::of(&snapshot.system);
    let seats = snapshot.devices.iter();
    let seats = seats.filter_map(|device| Some((seat(&bus, device)?, device)));
    let seats: Vec<(Seat, &Device)> = seats.collect();
    if seats.is_empty() {
        return;
    }
    let lang = notes.lang;
    let named = |(seat, device): &(Seat, &Device)| (said(*seat, lang), device.index);
    let words = grouped(seats.iter().map(named));
    let words = words
        .iter()
        .map(|(text, of)| format!("{text}: {}", gpus(of, lang)));
    notes
        .sheet(checks::PCIE)
        .fact(listed(words.collect(), lang));

    judge_lanes(&seats, notes);
    judge_slots(&seats, notes);
    judge_busy(&seats, notes);
}

/// "x16 of 16, generation 1 of 4".
fn said(seat: Seat, lang: Lang) -> String {
    let number = |number: u32| match number {
        0 => "?".to_owned(),
        _ => number.to_string(),
    };
    let Seat {
        lanes,
        card_lanes,
        generation,
        card_generation,
        ..
    } = seat;
    let [lanes, of, generation, of_generation] =
        [lanes, card_lanes, generation, card_generation].map(number);
    say!(
        lang,
        "x{lanes} of {of}, generation {generation} of {of_generation}",
        "x{lanes}(최대 x{of}), {generation}세대(최대 {of_generation}세대)"
    )
}

fn judge_lanes(seats: &[(Seat, &Device)], notes: &mut Notes) {
    let few = seats
        .iter()
        .filter(|(seat, _)| (1..seat.card_lanes).contains(&seat.lanes));
    let key = |seat: &Seat| (seat.lanes, seat.card_lanes, seat.slot_lanes);
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::PCIE);
    for ((lanes, card, slot), of) in grouped(few.map(|(seat, device)| (key(seat), device.index))) {
        let is_narrow_slot = (1..=lanes).contains(&slot);
        let (whom, runs) = (gpus(&of, lang), gpus_that(&of, "runs", "run", lang));
        let what = match (slot, is_narrow_slot) {
            (_, true) => say!(
                lang,
                "{whom} could use {card} PCIe lanes, in a slot with {slot}",
                "{whom}: PCIe 레인 {card}개를 쓸 수 있지만 슬롯은 {slot}개"
            ),
            (0, false) => say!(
                lang,
                "{runs} on {lanes} of {card} PCIe lanes",
                "{runs}: PCIe 레인 {card}개 중 {lanes}개만 사용 중"
            ),
            (_, false) => say!(
                lang,
                "{runs} on {lanes} of {card} PCIe lanes, although the slot has {slot}",
                "{runs}: 슬롯의 레인은 {slot}개인데 PCIe 레인 {card}개 중 {lanes}개만 사용 중"
            ),
        };
        // Many mainboards split 16 lanes for two cards, and most trainings do not notice.
        let severity = match (is_narrow_slot, card / lanes) {
            (true, 0..=2) => Severity::Note,
            _ => Severity::Warning,
        };
        let fix = match is_narrow_slot {
            true => say!(
                lang,
                "put the card into a slot with 16 lanes, where the mainboard's manual shows one; a second card often takes lanes away \
                 from the first",
                "메인보드 설명서에서 16레인 슬롯을 찾아 카드를 옮기세요. 두 번째 카드를 꽂으면 첫 번째 카드의 레인이 줄어드는 경우가 많습니다"
            ),
            false => say!(
                lang,
                "seat the card anew, clean its contacts, leave risers out; look in the firmware for how the slot's lanes are split \
                 (bifurcation)",
                "카드를 다시 꽂고 접점을 닦고 라이저 없이 연결하세요. 펌웨어에서 슬롯의 레인 분할(bifurcation) 설정도 확인하세요"
            ),
        };
        sheet.add(severity, what, slower(lanes, card, lang), fix);
    }
}

fn judge_slots(seats: &[(Seat, &Device)], notes: &mut Notes) {
    let slow = seats
        .iter()
        .filter(|(seat, _)| (1..seat.card_generation).contains(&seat.slot_generation));
    let key = |seat: &Seat| (seat.slot_generation, seat.card_generation);
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::PCIE);
    for ((slot, card), of) in grouped(slow.map(|(seat, device)| (key(seat), device.index))) {
        let severity = match card - slot {
            1 => Severity::Note,
            _ => Severity::Warning,
        };
        let whom = gpus_that(&of, "is", "are", lang);
        sheet.add(
            severity,
            say!(
                lang,
                "{whom} of PCIe generation {card} in a slot of generation {slot}",
                "{whom}: PCIe {card}세대 카드가 {slot}세대 슬롯에 있음"
            ),
            slower(1, 1_u32.checked_shl(card - slot).unwrap_or(u32::MAX), lang),
            say!(
                lang,
                "put the card into a slot of its generation where there is one; see whether the firmware holds the slot down; a riser may",
                "같은 세대의 슬롯이 있으면 옮기세요. 펌웨어가 슬롯의 세대를 낮추고 있는지 확인하세요. 라이저가 원인일 수도 있습니다"
            ),
        );
    }
}

/// A device with work has its full generation, unless the link was trained down.
fn judge_busy(seats: &[(Seat, &Device)], notes: &mut Notes) {
    let down = seats.iter().filter(|(seat, device)| {
        let most = match seat.slot_generation {
            0 => seat.card_generation,
            slot => slot.min(seat.card_generation),
        };
        let busy = device.now.utilization_percent.known();
        busy.is_some_and(|busy| *busy >= BUSY_PERCENT) && (1..most).contains(&seat.generation)
    });
    let of: Vec<u32> = down.map(|(_, device)| device.index).collect();
    if !of.is_empty() {
        let lang = notes.lang;
        let whom = gpus_that(&of, "is", "are", lang);
        notes.sheet(checks::PCIE).warning(
            say!(
                lang,
                "{whom} busy, and the PCIe link stays below the generation of card and slot",
                "{whom}: 작업 중인데도 PCIe 링크가 카드와 슬롯의 세대보다 낮음"
            ),
            say!(
                lang,
                "copies between host and GPU are slower than they could be",
                "호스트와 GPU 사이의 복사가 느려집니다"
            ),
            say!(
                lang,
                "look again while it trains; a link that stays down has a bad contact, riser or cable, or is held down by the firmware",
                "학습 중에 다시 확인하세요. 계속 낮다면 접점, 라이저, 케이블이 불량이거나 펌웨어가 세대를 낮추고 있는 것입니다"
            ),
        );
    }
}

fn slower(part: u32, whole: u32, lang: Lang) -> String {
    let share = share(part, whole, lang);
    say!(
        lang,
        "copies between host and GPU, and between GPUs without NVLink, have {share} of the speed",
        "호스트와 GPU 사이, NVLink가 없는 GPU 사이의 복사 속도가 {share}입니다"
    )
}

/// "half", "a quarter", or percent.
fn share(part: u32, whole: u32, lang: Lang) -> String {
    let percent = u64::from(part) * 100 / u64::from(whole.max(1));
    match whole.checked_div(part).unwrap_or(1) {
        2 if whole.is_multiple_of(part) => say!(lang, "half", "절반"),
        4 if whole.is_multiple_of(part) => say!(lang, "a quarter", "4분의 1"),
        _ => say!(lang, "{percent} %", "{percent} % 수준"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};
    use paceline_gpu::snapshot::Reading;

    fn link(generation: u32, generation_max: u32, lanes: u32, lanes_max: u32) -> PcieLink {
        PcieLink {
            generation,
            generation_max,
            lanes,
            lanes_max,
        }
    }

    /// One card: what the driver says of it, and what the kernel says of card and slot.
    fn with(driver: PcieLink, card: Option<PcieLink>, slot: Option<PcieLink>) -> Snapshot {
        let mut snapshot = machine(1);
        snapshot.devices[0].pcie = driver.into();
        let place = snapshot.devices[0].pci.known().cloned().expect("a place");
        let parent = Bus::of(&snapshot.system)
            .slot(&place)
            .expect("a slot")
            .address
            .clone();
        for device in &mut snapshot.system.pci {
            let link = match device.address.as_str() {
                address if address == place => card,
                address if address == parent => slot,
                _ => None,
            };
            device.link = link.map_or(Reading::default(), Reading::Known);
        }
        snapshot
    }

    #[test]
    fn an_idle_card_that_lowers_its_generation_is_no_fault() {
        let full = link(1, 4, 16, 16);
        check(judge, &with(full, None, None), &[]);
        check(
            judge,
            &with(full, Some(link(1, 4, 16, 16)), Some(link(1, 4, 16, 16))),
            &[],
        );
        // A card with eight lanes has all that it wants.
        check(judge, &with(link(1, 4, 8, 8), None, None), &[]);
        check(judge, &with(PcieLink::default(), None, None), &[]);
    }

    #[test]
    fn lanes_that_are_missing_are_a_warning() {
        let seated = "warning: PCIe: seat the card anew";
        check(judge, &with(link(4, 4, 4, 16), None, None), &[seated]);
        check(
            judge,
            &with(link(4, 4, 8, 16), None, Some(link(4, 4, 8, 16))),
            &[seated],
        );
    }

    #[test]
    fn a_slot_with_fewer_lanes_is_told_from_a_card_that_lost_some() {
        let x4 = with(
            link(4, 4, 4, 16),
            Some(link(4, 4, 4, 16)),
            Some(link(4, 4, 4, 4)),
        );
        check(
            judge,
            &x4,
            &["warning: PCIe: put the card into a slot with 16 lanes"],
        );
        let x8 = with(link(4, 4, 8, 16), None, Some(link(4, 4, 8, 8)));
        check(
            judge,
            &x8,
            &["note: PCIe: put the card into a slot with 16 lanes"],
        );
        let mut notes = Notes::default();
        judge(&x4, &mut notes);
        assert_eq!(
            notes.findings[0].what,
            "GPU 0 could use 16 PCIe lanes, in a slot with 4"
        );
        assert!(notes.findings[0].why.ends_with("a quarter of the speed"));
    }

    #[test]
    fn a_slot_of_an_older_generation_is_named() {
        let slot = |generation| {
            with(
                link(1, generation, 16, 16),
                Some(link(1, 5, 16, 16)),
                Some(link(1, generation, 16, 16)),
            )
        };
        check(judge, &slot(5), &[]);
        check(
            judge,
            &slot(4),
            &["note: PCIe: put the card into a slot of its generation"],
        );
        check(
            judge,
            &slot(3),
            &["warning: PCIe: put the card into a slot of its generation"],
        );
    }

    #[test]
    fn a_card_that_works_has_its_full_generation() {
        let mut snapshot = with(link(1, 4, 16, 16), None, None);
        snapshot.devices[0].now.utilization_percent = 98.into();
        check(
            judge,
            &snapshot,
            &["warning: PCIe: look again while it trains"],
        );
        snapshot.devices[0].now.utilization_percent = 3.into();
        check(judge, &snapshot, &[]);
    }

    #[test]
    fn numbers_that_no_link_has_do_no_harm() {
        let odd = link(u32::MAX, u32::MAX, 3, u32::MAX);
        let snapshot = with(odd, Some(link(1, 90, 0, 7)), Some(link(0, 1, 0, 0)));
        let mut notes = Notes::default();
        judge(&snapshot, &mut notes);
        assert!(!notes.findings.is_empty());
    }
}
