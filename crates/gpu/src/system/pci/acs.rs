//! Access Control Services: whether a bridge sends what devices say to each other up to the host bridge.

use crate::host::Host;
use crate::snapshot::Gap;
use crate::system::gap;

/// All of a device's configuration; without root the kernel gives the first 64 bytes.
const CONFIG_BYTES: u64 = 4096;
/// What everyone may read.
const HEADER_BYTES: usize = 64;
/// Where extended capabilities begin.
const EXTENDED: usize = 0x100;
/// A capability has 8 bytes at least, so a list that is longer runs in a circle.
const CAPABILITIES_MAX: usize = (CONFIG_BYTES as usize - EXTENDED) / 8;
const ACS: u32 = 0x000d;
/// The control register within the capability.
const CONTROL: usize = 6;
/// Request redirect, completion redirect, upstream forwarding.
const REDIRECTS: u16 = 1 << 2 | 1 << 3 | 1 << 4;

pub(super) fn redirects(host: &Host<'_>, folder: &str) -> Result<bool, Gap> {
    let config = host
        .read(&format!("{folder}/config"), CONFIG_BYTES)
        .map_err(|error| gap(&error))?;
    match control(&config)? {
        Some(control) => Ok(control & REDIRECTS != 0),
        None => Err(Gap::NotSupported),
    }
}

/// The control register, where there is one.
///
/// *Source*: PCI Express Base Specification: the list of extended capabilities, and the ACS capability.
fn control(config: &[u8]) -> Result<Option<u16>, Gap> {
    if config.len() <= HEADER_BYTES {
        return Err(Gap::NoPermission);
    }
    let mut offset = EXTENDED;
    for _ in 0..CAPABILITIES_MAX {
        let Some(header) = bytes::<4>(config, offset).map(u32::from_le_bytes) else {
            return Ok(None);
        };
        // All ones: the device does not answer.
        if header == u32::MAX {
            return Err(Gap::Lost);
        }
        if header & 0xffff == ACS {
            return Ok(bytes(config, offset + CONTROL).map(u16::from_le_bytes));
        }
        offset = (header >> 20) as usize & !3;
        if offset < EXTENDED {
            return Ok(None);
        }
    }
    Ok(None)
}

fn bytes<const N: usize>(config: &[u8], offset: usize) -> Option<[u8; N]> {
    config.get(offset..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A configuration with these words of 32 bits.
    fn config(words: &[(usize, u32)]) -> Vec<u8> {
        let mut config = vec![0; 4096];
        for (offset, word) in words {
            config[*offset..offset + 4].copy_from_slice(&word.to_le_bytes());
        }
        config
    }

    fn header(id: u32, next: u32) -> u32 {
        id | 1 << 16 | next << 20
    }

    #[test]
    fn the_control_register_is_found_along_the_list() {
        let first = config(&[(0x100, header(ACS, 0)), (0x104, 0x001d_00ff)]);
        assert_eq!(control(&first), Ok(Some(0x1d)));
        let second = config(&[
            (0x100, header(0x0001, 0x148)),
            (0x148, header(0x0019, 0x2a0)),
            (0x2a0, header(ACS, 0)),
            (0x2a4, 0),
        ]);
        assert_eq!(control(&second), Ok(Some(0)));
        let last = config(&[(0x100, header(0x0001, 0xff8)), (0xff8, header(ACS, 0))]);
        assert_eq!(control(&last), Ok(Some(0)));
    }

    #[test]
    fn a_list_without_it_and_one_in_a_circle_come_to_an_end() {
        let check = |words: &[(usize, u32)]| assert_eq!(control(&config(words)), Ok(None));
        check(&[]);
        check(&[(0x100, header(0x0001, 0x100))]);
        check(&[(0x100, header(1, 0x200)), (0x200, header(2, 0x100))]);
        check(&[(0x100, header(0x0001, 0x040))]);
        check(&[(0x100, header(0x0001, 0xffc)), (0xffc, header(ACS, 0))]);
    }

    #[test]
    fn what_cannot_be_read_is_told_apart() {
        assert_eq!(control(&[0; 64]), Err(Gap::NoPermission));
        assert_eq!(control(&[]), Err(Gap::NoPermission));
        assert_eq!(control(&[0; 256]), Ok(None));
        assert_eq!(control(&[0xff; 4096]), Err(Gap::Lost));
    }
}
