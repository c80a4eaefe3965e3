//! Calls that the wrapper lacks, or makes trusting the driver too much: texts without an end, lists of any length, fields of
//! a single link. And the devices' handles, which cost milliseconds to get and are kept.
#![allow(unsafe_code)]

mod gpm;
mod lists;

use std::cell::OnceCell;
use std::os::raw::{c_char, c_int, c_uint};
use std::{mem, ptr};

use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try, nvml_try_count};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as c;
use paceline_words::plain;

use crate::snapshot::{DEVICES_MAX, Gap};

use super::gap::gap;
use super::up_to;

pub(super) use self::gpm::{Metric, Place};
pub(super) use self::lists::{PROCESSES_MAX, Process, compute_processes, graphics_processes};

/// Longest text in bytes; the driver's own limits are 80 and 96.
const TEXT_BYTES_MAX: usize = 96;

/// A scope that means all NVLinks of a device together.
pub(super) const ALL_LINKS: u32 = u32::MAX;

/// The driver's library, and of each of its devices the handle and the samples of counters once they were asked for.
#[derive(Debug)]
pub(crate) struct Library {
    nvml: Nvml,
    handles: Vec<OnceCell<Handle>>,
    samples: Vec<OnceCell<gpm::Samples>>,
}

/// The driver's name for a device; it stays the same and valid while the library is loaded, even if the device is lost.
#[derive(Debug)]
struct Handle(c::nvmlDevice_t);

// SAFETY: a handle is a number to everyone but the library, and the library may be called from any thread.
unsafe impl Send for Handle {}

impl Library {
    /// Takes a loaded library with this many devices; only the first [`DEVICES_MAX`] are believed.
    pub(super) fn new(nvml: Nvml, devices: u32) -> Self {
        let devices = usize::try_from(devices).map_or(DEVICES_MAX, |count| count.min(DEVICES_MAX));
        let handles = (0..devices).map(|_| OnceCell::new()).collect();
        let samples = (0..devices).map(|_| OnceCell::new()).collect();
        Self {
            nvml,
            handles,
            samples,
        }
    }

    pub(super) fn nvml(&self) -> &Nvml {
        &self.nvml
    }

    /// How many devices there are, those that do not answer too.
    pub(crate) fn count(&self) -> u32 {
        // At most `DEVICES_MAX`.
        self.handles.len() as u32
    }

    /// The device with this number.
    ///
    /// *Blocks*: the first time as long as the driver needs to wake the device; milliseconds, or seconds where nothing keeps
    /// it awake.
    pub(crate) fn device(&self, index: u32) -> Result<Device<'_>, Gap> {
        let cell = usize::try_from(index)
            .ok()
            .and_then(|at| self.handles.get(at));
        let cell = cell.ok_or_else(|| Gap::other(format!("there is no device {index}")))?;
        if let Some(handle) = cell.get() {
            // SAFETY: the handle came from this very library, which stays loaded while `self` is borrowed.
            return Ok(unsafe { Device::new(handle.0, &self.nvml) });
        }
        let device = self.nvml.device_by_index(index).map_err(gap)?;
        // SAFETY: the handle is kept beside the library that it belongs to.
        let handle = Handle(unsafe { device.handle() });
        // Nothing can have come in between: the cell belongs to this thread.
        let _ = cell.set(handle);
        Ok(device)
    }
}

impl Drop for Library {
    /// Gives back what the driver keeps for this program, as long as its library is there to be called.
    fn drop(&mut self) {
        for samples in self.samples.iter().filter_map(OnceCell::get) {
            samples.free(&self.nvml);
        }
    }
}

/// A text that the driver writes.
fn text(
    bytes: usize,
    write: impl FnOnce(*mut c_char, c_uint) -> c::nvmlReturn_t,
) -> Result<String, NvmlError> {
    let mut buffer = [0u8; TEXT_BYTES_MAX];
    let bytes = bytes.min(TEXT_BYTES_MAX);
    nvml_try(write(buffer.as_mut_ptr().cast(), bytes as c_uint))?;
    Ok(printable(&buffer[..bytes]))
}

/// Bytes up to the first zero, as a text that may be shown.
fn printable(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0);
    let text = String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]);
    plain(&text, usize::MAX).trim().to_owned()
}

/// Version of the driver.
pub(super) fn driver_version(nvml: &Nvml) -> Result<String, NvmlError> {
    let call = nvml_sym(nvml.lib().nvmlSystemGetDriverVersion.as_ref())?;
    // SAFETY: `text` gives a buffer of the length that it names.
    text(80, |to, length| unsafe { call(to, length) })
}

/// Version of the library.
pub(super) fn library_version(nvml: &Nvml) -> Result<String, NvmlError> {
    let call = nvml_sym(nvml.lib().nvmlSystemGetNVMLVersion.as_ref())?;
    // SAFETY: as above.
    text(80, |to, length| unsafe { call(to, length) })
}

/// What the device is called.
pub(super) fn name(device: &Device<'_>) -> Result<String, NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetName.as_ref())?;
    // SAFETY: as above; the handle is of this library.
    text(96, |to, length| unsafe {
        call(device.handle(), to, length)
    })
}

/// The name that no other device has.
pub(super) fn uuid(device: &Device<'_>) -> Result<String, NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetUUID.as_ref())?;
    // SAFETY: as above; the handle is of this library.
    text(96, |to, length| unsafe {
        call(device.handle(), to, length)
    })
}

/// A place on the PCI bus as the kernel writes it: `0000:18:00.0`.
fn address(info: &c::nvmlPciInfo_t) -> Result<String, Gap> {
    // Only the text has the function, which is 0 for all but virtual devices.
    let text = printable(&info.busId.map(|byte| byte as u8));
    let function = text.rsplit_once('.');
    let function = function.and_then(|(_, digits)| u32::from_str_radix(digits, 16).ok());
    let (domain, function) = (info.domain, function.unwrap_or(0));
    let bus = up_to(0xff, "as PCI bus", info.bus)?;
    let device = up_to(0x1f, "as PCI device", info.device)?;
    let function = up_to(7, "as PCI function", function)?;
    Ok(format!("{domain:04x}:{bus:02x}:{device:02x}.{function}"))
}

/// The place of the device.
pub(super) fn place(device: &Device<'_>) -> Result<String, Gap> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetPciInfo_v3.as_ref()).map_err(gap)?;
    // SAFETY: the structure is plain numbers, for which zero is a value.
    let mut info: c::nvmlPciInfo_t = unsafe { mem::zeroed() };
    // SAFETY: the handle is of this library; `info` outlives the call.
    nvml_try(unsafe { call(device.handle(), &mut info) }).map_err(gap)?;
    address(&info)
}

/// The place of the other end of an NVLink.
pub(super) fn remote_place(device: &Device<'_>, link: u32) -> Result<String, Gap> {
    let library = device.nvml().lib();
    let call = nvml_sym(library.nvmlDeviceGetNvLinkRemotePciInfo_v2.as_ref()).map_err(gap)?;
    // SAFETY: the structure is plain numbers, for which zero is a value.
    let mut info: c::nvmlPciInfo_t = unsafe { mem::zeroed() };
    // SAFETY: the handle is of this library; `info` outlives the call.
    nvml_try(unsafe { call(device.handle(), link, &mut info) }).map_err(gap)?;
    address(&info)
}

/// What kind of thing is at the other end of an NVLink. The wrapper's call forgets the answer.
pub(super) fn remote_kind(device: &Device<'_>, link: u32) -> Result<u32, NvmlError> {
    let library = device.nvml().lib();
    let call = nvml_sym(library.nvmlDeviceGetNvLinkRemoteDeviceType.as_ref())?;
    let mut kind = c::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
    // SAFETY: the handle is of this library; `kind` outlives the call.
    nvml_try(unsafe { call(device.handle(), link, &mut kind) })?;
    Ok(kind)
}

/// Memory in use and in all, for drivers before 510, whose numbers count the driver's own share as used.
pub(super) fn memory(device: &Device<'_>) -> Result<(u64, u64), NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetMemoryInfo.as_ref())?;
    let mut info = c::nvmlMemory_t {
        total: 0,
        free: 0,
        used: 0,
    };
    // SAFETY: the handle is of this library; `info` outlives the call.
    nvml_try(unsafe { call(device.handle(), &mut info) })?;
    Ok((info.used, info.total))
}

/// Why the clocks are held down, as bits; older drivers have another name for it.
pub(super) fn throttle_bits(device: &Device<'_>) -> Result<u64, NvmlError> {
    let library = device.nvml().lib();
    let call = nvml_sym(library.nvmlDeviceGetCurrentClocksEventReasons.as_ref())
        .or_else(|_| nvml_sym(library.nvmlDeviceGetCurrentClocksThrottleReasons.as_ref()))?;
    let mut bits = 0;
    // SAFETY: the handle is of this library; `bits` outlives the call.
    nvml_try(unsafe { call(device.handle(), &mut bits) })?;
    Ok(bits)
}

/// Numbers of remapped rows: after corrected errors, after uncorrected ones, pending, failed.
pub(super) fn remapped_rows(device: &Device<'_>) -> Result<[u32; 4], NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetRemappedRows.as_ref())?;
    let mut rows = [0; 4];
    let [corrected, uncorrected, pending, failed] = &mut rows;
    // SAFETY: the handle is of this library; the numbers outlive the call.
    nvml_try(unsafe { call(device.handle(), corrected, uncorrected, pending, failed) })?;
    Ok(rows)
}

/// How many pages were retired for a cause. The wrapper's call makes room for as many as the driver says.
pub(super) fn retired_pages(device: &Device<'_>, cause: u32) -> Result<u32, NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetRetiredPages.as_ref())?;
    let mut count = 0;
    // SAFETY: the handle is of this library; there is no room for addresses, as the count says.
    nvml_try_count(unsafe { call(device.handle(), cause, &mut count, ptr::null_mut()) })?;
    Ok(count)
}

/// One of the driver's numbered values, of the device (scope 0) or of one or all of its NVLinks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Field {
    pub(super) id: u32,
    pub(super) scope: u32,
}

impl Field {
    pub(super) fn of_device(id: u32) -> Self {
        Self { id, scope: 0 }
    }

    /// The field of one NVLink, or of [`ALL_LINKS`].
    pub(super) fn of_link(scope: u32, id: u32) -> Self {
        Self { id, scope }
    }
}

/// The value of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Number {
    pub(super) value: u64,
    /// A counter of this width begins again after 2^32.
    pub(super) is_32_bit: bool,
}

/// Several fields in one call, each with an answer of its own.
pub(super) fn fields<const N: usize>(
    device: &Device<'_>,
    asked: [Field; N],
) -> Result<[Result<Number, Gap>; N], NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetFieldValues.as_ref())?;
    let mut values = asked.map(|field| c::nvmlFieldValue_t {
        fieldId: field.id,
        scopeId: field.scope,
        timestamp: 0,
        latencyUsec: 0,
        valueType: c::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
        // A driver that overlooks a field has not answered it.
        nvmlReturn: c::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED,
        value: c::nvmlValue_t { ullVal: 0 },
    });
    // SAFETY: the handle is of this library; `values` has `N` entries and outlives the call.
    nvml_try(unsafe { call(device.handle(), N as c_int, values.as_mut_ptr()) })?;
    Ok(values.map(|value| number(&value)))
}

fn number(field: &c::nvmlFieldValue_t) -> Result<Number, Gap> {
    if field.nvmlReturn == c::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT {
        // The number of a field that this driver does not know yet.
        return Err(Gap::NoFunction);
    }
    nvml_try(field.nvmlReturn).map_err(gap)?;
    let value = &field.value;
    // SAFETY: all of the union was set to zero before the call, and any bits are a number of each of these types.
    let (value, is_32_bit) = unsafe {
        match field.valueType {
            c::nvmlValueType_enum_NVML_VALUE_TYPE_DOUBLE => (whole(value.dVal), false),
            c::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT => (Some(value.uiVal.into()), true),
            c::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG => (Some(value.ulVal), false),
            c::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG => (Some(value.ullVal), false),
            c::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_LONG_LONG => {
                (value.sllVal.try_into().ok(), false)
            }
            c::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_INT => (value.siVal.try_into().ok(), true),
            c::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_SHORT => {
                (Some(value.usVal.into()), false)
            }
            kind => return Err(Gap::other(format!("a number of the unknown type {kind}"))),
        }
    };
    let value = value.ok_or_else(|| Gap::other("a number below zero, or none"))?;
    Ok(Number { value, is_32_bit })
}

fn whole(number: f64) -> Option<u64> {
    // The conversion cuts what is too large.
    (number >= 0.0).then_some(number as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_written_as_the_kernel_does() {
        let check = |text: &str, [domain, bus, device]: [u32; 3], expect: Option<&str>| {
            // SAFETY: the structure is plain numbers, for which zero is a value.
            let mut info: c::nvmlPciInfo_t = unsafe { mem::zeroed() };
            (info.domain, info.bus, info.device) = (domain, bus, device);
            for (to, byte) in info.busId.iter_mut().zip(text.bytes()) {
                *to = byte as c_char;
            }
            assert_eq!(address(&info).ok().as_deref(), expect, "{text}");
        };
        check("00000000:18:00.0", [0, 0x18, 0], Some("0000:18:00.0"));
        let last = Some("10000:ff:1f.7");
        check("00010000:FF:1F.7", [0x10000, 0xff, 0x1f], last);
        check("", [0, 0x100, 0], None);
        check("", [0, 0, 0x20], None);
        check("00000000:00:00.8", [0, 0, 0], None);
    }

    #[test]
    fn a_text_ends_at_its_zero_or_at_its_buffer() {
        let check = |bytes: &[u8], expect: &str| assert_eq!(printable(bytes), expect);
        check(b"NVIDIA H100\0rest", "NVIDIA H100");
        check(b"no end", "no end");
        check(b" odd\x1b[m\xff\0", "odd [m\u{fffd}");
        check(b"", "");
    }

    #[test]
    fn a_text_is_never_read_beyond_its_buffer() {
        let fill = |to: *mut c_char, length: c_uint| {
            for at in 0..length as usize {
                // SAFETY: `text` gives a buffer of this length.
                unsafe { to.add(at).write(b'x' as c_char) };
            }
            c::nvmlReturn_enum_NVML_SUCCESS
        };
        assert_eq!(text(80, fill).expect("a text"), "x".repeat(80));
        let longest = text(1 << 20, fill).expect("a text");
        assert_eq!(longest.len(), TEXT_BYTES_MAX);
    }

    #[test]
    fn a_field_is_read_by_its_type() {
        let check = |kind: u32, bits: u64, expect: &str| {
            let field = c::nvmlFieldValue_t {
                fieldId: 1,
                scopeId: 0,
                timestamp: 0,
                latencyUsec: 0,
                valueType: kind,
                nvmlReturn: 0,
                value: c::nvmlValue_t { ullVal: bits },
            };
            let text = match number(&field) {
                Ok(number) => format!(
                    "{}{}",
                    number.value,
                    if number.is_32_bit { "/32" } else { "" }
                ),
                Err(gap) => gap.to_string(),
            };
            assert_eq!(text, expect, "type {kind}, {bits:#x}");
        };
        check(0, 2.9f64.to_bits(), "2");
        check(0, f64::NAN.to_bits(), "a number below zero, or none");
        check(0, 1e300f64.to_bits(), "18446744073709551615");
        check(1, 7, "7/32");
        check(3, u64::MAX, "18446744073709551615");
        check(4, u64::MAX, "a number below zero, or none");
        check(5, 9, "9/32");
        check(6, 5, "5");
        check(7, 5, "a number of the unknown type 7");
    }

    #[test]
    fn a_field_may_have_no_answer() {
        let check = |code: u32, expect: Gap| {
            let field = c::nvmlFieldValue_t {
                fieldId: 1,
                scopeId: 0,
                timestamp: 0,
                latencyUsec: 0,
                valueType: 3,
                nvmlReturn: code,
                value: c::nvmlValue_t { ullVal: 0 },
            };
            assert_eq!(number(&field), Err(expect));
        };
        check(2, Gap::NoFunction);
        check(3, Gap::NotSupported);
        check(15, Gap::Lost);
    }
}
