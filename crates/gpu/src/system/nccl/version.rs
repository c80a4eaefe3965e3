//! The version of an NCCL library: in the name of its file, else in the text that it prints about itself.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Version, and the CUDA that it was built with.
type Version = ((u32, u32, u32), Option<(u32, u32)>);

const TEXT: &[u8] = b"NCCL version ";
/// The longest text that is read behind it.
const TEXT_BYTES: usize = 64;
/// Constants of a library; NCCL's are less than a MiB, its device code is hundreds and lies in sections of its own.
const CONSTANTS_BYTES_MAX: u64 = 16 << 20;
/// How far a file is searched that is no ELF file, or has no table of its sections.
const SEARCHED_BYTES_MAX: u64 = 64 << 20;
const SECTIONS_MAX: u64 = 1024;
const SECTION_BYTES: u64 = 64;

/// `libnccl.so.2.27.5`
pub(super) fn in_name(name: &str) -> Option<(u32, u32, u32)> {
    let mut parts = name.strip_prefix("libnccl.so.")?.split('.');
    let mut next = || parts.next()?.parse().ok();
    Some((next()?, next()?, next()?))
}

/// Looks into the file: `NCCL version 2.27.5+cuda12.9`.
///
/// *Source*: `VERSION_STRING` in NCCL's `init.cc`.
pub(super) fn in_file(path: &Path) -> Option<Version> {
    let mut file = File::open(path).ok()?;
    for (offset, length) in constants(&mut file).unwrap_or_default() {
        let is_there = file.seek(SeekFrom::Start(offset)).is_ok();
        let found = is_there.then(|| search(&mut file, length)).flatten();
        if found.is_some() {
            return found;
        }
    }
    file.seek(SeekFrom::Start(0)).ok()?;
    search(&mut file, SEARCHED_BYTES_MAX)
}

/// Place and length of the sections that have constants, by the table of a 64-bit little-endian ELF file.
///
/// *Source*: elf(5): `Elf64_Ehdr` and `Elf64_Shdr`.
fn constants(file: &mut File) -> Option<Vec<(u64, u64)>> {
    const PROGRAM_DATA: u32 = 1;
    const WRITE: u64 = 1;
    const ALLOCATED: u64 = 2;
    const EXECUTABLE: u64 = 4;
    let mut header = [0; 64];
    file.read_exact(&mut header).ok()?;
    if header[..6] != *b"\x7fELF\x02\x01" {
        return None;
    }
    let table = number(&header, 0x28, u64::from_le_bytes)?;
    let entry_bytes = u64::from(number(&header, 0x3a, u16::from_le_bytes)?);
    let entries = u64::from(number(&header, 0x3c, u16::from_le_bytes)?);
    if entry_bytes != SECTION_BYTES || entries > SECTIONS_MAX {
        return None;
    }
    file.seek(SeekFrom::Start(table)).ok()?;
    let mut table = Vec::new();
    file.take(entries * SECTION_BYTES)
        .read_to_end(&mut table)
        .ok()?;
    let section = |entry: &[u8]| {
        let (kind, flags) = (
            number(entry, 4, u32::from_le_bytes)?,
            number(entry, 8, u64::from_le_bytes)?,
        );
        let (offset, length) = (
            number(entry, 0x18, u64::from_le_bytes)?,
            number(entry, 0x20, u64::from_le_bytes)?,
        );
        let is_constant = flags & (WRITE | ALLOCATED | EXECUTABLE) == ALLOCATED;
        (kind == PROGRAM_DATA && is_constant).then_some((offset, length))
    };
    let sections = table.chunks_exact(SECTION_BYTES as usize);
    let mut sections: Vec<(u64, u64)> = sections.filter_map(section).collect();
    // Text is in a small one; device code may be constant, too.
    sections.sort_by_key(|(_, length)| *length);
    sections.retain(|(_, length)| *length <= CONSTANTS_BYTES_MAX);
    Some(sections)
}

fn number<T, const N: usize>(bytes: &[u8], at: usize, read: fn([u8; N]) -> T) -> Option<T> {
    Some(read(*bytes.get(at..)?.first_chunk()?))
}

/// Searches so many bytes from where the file stands.
fn search(file: &mut File, most: u64) -> Option<Version> {
    const CHUNK_BYTES: usize = 1 << 20;
    const OVERLAP: usize = TEXT.len() + TEXT_BYTES;
    let mut left = file.take(most);
    let mut window: Vec<u8> = Vec::with_capacity(CHUNK_BYTES + OVERLAP);
    loop {
        let read = (&mut left)
            .take(CHUNK_BYTES as u64)
            .read_to_end(&mut window)
            .ok()?;
        if let Some(version) = find(&window) {
            return Some(version);
        }
        if read == 0 {
            return None;
        }
        // The text may lie across the border.
        window.drain(..window.len().saturating_sub(OVERLAP));
    }
}

fn find(bytes: &[u8]) -> Option<Version> {
    let mut rest = bytes;
    while let Some(at) = rest.windows(TEXT.len()).position(|window| window == TEXT) {
        rest = &rest[at + TEXT.len()..];
        let text = &rest[..rest.len().min(TEXT_BYTES)];
        let end = text.iter().position(|byte| !byte.is_ascii_graphic());
        let text = std::str::from_utf8(&text[..end.unwrap_or(text.len())]);
        if let Some(version) = text.ok().and_then(parse) {
            return Some(version);
        }
    }
    None
}

/// `2.27.5+cuda12.9`
fn parse(text: &str) -> Option<Version> {
    let (version, cuda) = text.split_once("+cuda").unwrap_or((text, ""));
    let mut parts = version.splitn(3, '.');
    let major = parts.next()?.parse().ok()?;
    let minor = parts.next()?.parse().ok()?;
    // Releases may add something to the last number.
    let patch = parts.next()?;
    let digits = patch.bytes().take_while(u8::is_ascii_digit).count();
    let cuda = cuda
        .split_once('.')
        .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    Some(((major, minor, patch[..digits].parse().ok()?), cuda))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_texts_have_versions() {
        assert_eq!(in_name("libnccl.so.2.27.5"), Some((2, 27, 5)));
        assert_eq!(in_name("libnccl.so.2"), None);
        assert_eq!(in_name("libnccl.so"), None);
        for (text, expect) in [
            ("2.27.5+cuda12.9", Some(((2, 27, 5), Some((12, 9))))),
            ("2.18.3", Some(((2, 18, 3), None))),
            ("2.10.3rc1+cuda11", Some(((2, 10, 3), None))),
            ("%d.%d", None),
            ("mismatch", None),
            ("2.27", None),
        ] {
            assert_eq!(parse(text), expect, "{text}");
        }
    }

    #[test]
    fn a_text_is_found_wherever_it_lies() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("libnccl.so.2");
        let text = b"NCCL version mismatch\0NCCL version 2.27.5+cuda12.9\0";
        for before in [0, 1, (1 << 20) - 30, 1 << 20, (3 << 20) - 1] {
            let mut bytes = vec![0; before];
            bytes.extend_from_slice(text);
            std::fs::write(&path, bytes).expect("written");
            assert_eq!(
                in_file(&path),
                Some(((2, 27, 5), Some((12, 9)))),
                "{before}"
            );
        }
        std::fs::write(&path, "NCCL version ").expect("written");
        assert_eq!(in_file(&path), None);
    }

    /// A file with one section, which claims this place and length.
    fn elf(offset: u64, length: u64, text: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[0x28..0x30].copy_from_slice(&64_u64.to_le_bytes());
        bytes[0x3a] = 64;
        bytes[0x3c] = 1;
        let mut section = vec![0; 64];
        section[4] = 1;
        section[8] = 2;
        section[0x18..0x20].copy_from_slice(&offset.to_le_bytes());
        section[0x20..0x28].copy_from_slice(&length.to_le_bytes());
        bytes.extend(section);
        bytes.extend_from_slice(text);
        bytes
    }

    #[test]
    fn constants_are_found_by_the_table_and_a_wrong_table_does_not_hurt() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("libnccl.so.2");
        let text = b"NCCL version 2.27.5+cuda12.9\0";
        let check = |bytes: Vec<u8>, expect: Option<Vec<(u64, u64)>>| {
            std::fs::write(&path, bytes).expect("written");
            let mut file = File::open(&path).expect("open");
            assert_eq!(constants(&mut file), expect);
            assert_eq!(in_file(&path), Some(((2, 27, 5), Some((12, 9)))));
        };
        check(elf(128, 29, text), Some(vec![(128, 29)]));
        check(elf(u64::MAX, 29, text), Some(vec![(u64::MAX, 29)]));
        check(elf(128, u64::MAX, text), Some(vec![]));
        let mut many = elf(128, 29, text);
        many[0x3c..0x3e].fill(0xff);
        check(many, None);
    }
}
