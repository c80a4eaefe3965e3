//! Answers written through the pointers of a caller.

use std::ffi::{c_char, c_uint, c_ulong};

use nvml_wrapper_sys::bindings::nvmlPciInfo_t;

use super::Outcome;
use crate::model::{Code, Text};

/// Writes a value; a null pointer is an invalid argument, as to NVML.
pub(super) fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: the caller of a C function gives a place for its answer.
    unsafe { to.write(value) };
    Ok(())
}

/// The bytes of a text in a buffer of a length.
fn bytes(text: &Text, length: usize) -> Result<Vec<u8>, Code> {
    let mut bytes = match text {
        Text::Plain(text) => text.clone().into_bytes(),
        Text::Bytes { bytes } => bytes.clone(),
        Text::Endless { endless } => {
            return Ok(endless.bytes().cycle().take(length).collect());
        }
    };
    bytes.push(0);
    if bytes.len() > length {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    Ok(bytes)
}

/// Writes a text and its end.
pub(super) fn put_text(text: &Text, to: *mut c_char, length: c_uint) -> Outcome {
    if to.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    let bytes = bytes(text, length as usize)?;
    // SAFETY: the caller lends `length` bytes, which is at least as many.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len()) };
    Ok(())
}

/// Writes a place on the bus; `id` is device and vendor as one number.
pub(super) fn put_pci(place: &Text, id: u32, to: *mut nvmlPciInfo_t) -> Outcome {
    let mut info = nvmlPciInfo_t {
        busIdLegacy: [0; 16],
        domain: 0,
        bus: 0,
        device: 0,
        pciDeviceId: id,
        pciSubSystemId: id,
        busId: [0; 32],
    };
    if let Text::Plain(place) = place {
        let mut parts = place.split([':', '.']);
        let mut part = || u32::from_str_radix(parts.next()?, 16).ok();
        let numbers = (part(), part(), part());
        if let (Some(domain), Some(bus), Some(device)) = numbers {
            (info.domain, info.bus, info.device) = (domain, bus, device);
        }
    }
    fill(&mut info.busIdLegacy, place);
    // Eight digits of domain, as NVML has it since its third version of this.
    match place {
        Text::Plain(text) => fill(&mut info.busId, &Text::Plain(format!("0000{text}"))),
        odd => fill(&mut info.busId, odd),
    }
    put(to, info)
}

/// Fills a buffer with a text, cut where it is too long.
fn fill(to: &mut [c_char], text: &Text) {
    let bytes = match text {
        Text::Plain(text) => text.to_uppercase().into_bytes(),
        other => bytes(other, to.len()).unwrap_or_default(),
    };
    for (to, byte) in to.iter_mut().zip(bytes) {
        *to = byte as c_char;
    }
}

/// Writes a list where there is room for it, and how many entries it has; `told` is another number to say instead.
pub(super) fn put_list<T: Copy>(
    list: &[T],
    told: Option<u32>,
    count: *mut c_uint,
    to: *mut T,
) -> Outcome {
    if count.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: the caller says here how many there is room for.
    let room = unsafe { count.read() } as usize;
    put(count, told.unwrap_or(list.len() as c_uint))?;
    if list.is_empty() && told.is_none() {
        return Ok(());
    }
    if room < list.len() || to.is_null() {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    // SAFETY: there is room for `room`, which is at least as many.
    unsafe { std::ptr::copy_nonoverlapping(list.as_ptr(), to, list.len()) };
    Ok(())
}

/// Writes a set as one bit for each number; numbers past the end are left out, as NVML does.
pub(super) fn bits(set: &[usize], to: *mut c_ulong, length: c_uint) -> Outcome {
    if to.is_null() || length == 0 {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: the caller lends `length` words.
    let words = unsafe { std::slice::from_raw_parts_mut(to, length as usize) };
    words.fill(0);
    for number in set {
        if let Some(word) = words.get_mut(number / 64) {
            *word |= 1 << (number % 64);
        }
    }
    Ok(())
}
