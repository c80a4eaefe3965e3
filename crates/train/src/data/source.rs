//! A reader of data files: plain or gzip, counted and bounded.

use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;

use super::DataProblem;
use super::error::similar;

/// Maximum uncompressed size, unless there is a limit to each of the parts: a small gzip file can unpack to any size.
const BYTES_MAX: u64 = 8 << 30;

/// The first bytes of every gzip file.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// A reader that knows its file and position.
pub(super) struct Source {
    path: PathBuf,
    reader: Box<dyn Read>,
    gzip: bool,
    read: u64,
    bytes_max: u64,
}

impl Source {
    /// Opens a file. The first bytes, not the name, decide whether it is compressed.
    pub(super) fn open(path: &Path) -> Result<Self, DataProblem> {
        let failed = |source: io::Error| match source.kind() {
            ErrorKind::NotFound => DataProblem::missing(similar(path, |_| true)),
            _ => DataProblem::io(&source),
        };
        let mut file = BufReader::new(File::open(path).map_err(failed)?);
        let gzip = file.fill_buf().map_err(failed)?.starts_with(&GZIP_MAGIC);
        let reader: Box<dyn Read> = if gzip {
            Box::new(MultiGzDecoder::new(file))
        } else {
            Box::new(file)
        };
        Ok(Self {
            path: path.to_owned(),
            reader,
            gzip,
            read: 0,
            bytes_max: BYTES_MAX,
        })
    }

    /// The file itself, for a format that is not read from the first byte to the last.
    ///
    /// *Errors*: it is compressed.
    pub(super) fn into_file(self) -> Result<File, DataProblem> {
        match self.gzip {
            true => Err(DataProblem::new("a Parquet file in gzip")
                .with_hint("unpack it with `gunzip`; Parquet is compressed within")),
            false => File::open(self.path).map_err(|error| DataProblem::io(&error)),
        }
    }

    /// Bytes from the first to the last, uncompressed.
    ///
    /// *Cost*: a compressed file is read to its end; this source then is at it.
    pub(super) fn count(mut self) -> Result<u64, DataProblem> {
        if !self.gzip {
            let file = std::fs::metadata(&self.path);
            return file
                .map(|file| file.len())
                .map_err(|error| DataProblem::io(&error));
        }
        let counted = io::copy(&mut self, &mut io::sink());
        counted.map_err(|error| self.error(error))?;
        Ok(self.read)
    }

    /// Sets the limit of bytes anew, to so many from here on.
    pub(super) fn allow(&mut self, bytes: u64) {
        self.bytes_max = self.read + bytes;
    }

    /// Reads up to `expected` bytes, the number in a complete file.
    pub(super) fn read_some(&mut self, expected: u64) -> Result<Vec<u8>, DataProblem> {
        let mut bytes = Vec::new();
        // Grows with the bytes read; `expected` is only a header's claim.
        let read = self.by_ref().take(expected).read_to_end(&mut bytes);
        read.map_err(|error| self.error(error))?;
        Ok(bytes)
    }

    /// The error of a failed read; distinguishes a broken file from a failing disk.
    pub(super) fn error(&self, source: io::Error) -> DataProblem {
        if source.kind() == ErrorKind::FileTooLarge {
            return DataProblem::too_large("bytes uncompressed", self.read, self.bytes_max);
        }
        // The decompressor's own errors have no OS error code.
        if self.gzip && source.raw_os_error().is_none() {
            let offset = self.read;
            return DataProblem::incomplete(format!(
                "damaged after uncompressed byte {offset}: {source}"
            ));
        }
        DataProblem::io(&source)
    }
}

/// A line is not UTF-8.
pub(super) fn not_text(line: u64, bytes: &[u8]) -> DataProblem {
    let hint = match bytes {
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => {
            "it is UTF-16: `iconv -f UTF-16 -t UTF-8 FILE > NEW` converts it"
        }
        _ if bytes.contains(&0) => "this is no text file, or text in another encoding",
        _ => {
            "`iconv -f CP949 -t UTF-8 FILE > NEW` converts Korean text, with CP1252 in place of CP949 that of Western Europe"
        }
    };
    DataProblem::new(format!("line {line}: not UTF-8 text")).with_hint(hint)
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.reader.read(buffer)?;
        self.read += count as u64;
        if self.read > self.bytes_max {
            return Err(ErrorKind::FileTooLarge.into());
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};

    use super::*;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).expect("memory");
        encoder.finish().expect("memory")
    }

    fn file(bytes: &[u8]) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("data");
        fs::write(&path, bytes).expect("a file");
        (folder, path)
    }

    #[test]
    fn compression_is_told_by_content_not_by_name() {
        for bytes in [b"plain text".to_vec(), gzip(b"plain text")] {
            let (_folder, path) = file(&bytes);
            let read = Source::open(&path).and_then(|mut source| source.read_some(100));
            assert_eq!(read.expect("readable"), b"plain text");
        }
    }

    #[test]
    fn gzip_files_one_after_another_are_one_file() {
        let (_folder, path) = file(&[gzip(b"one "), gzip(b"two")].concat());
        let read = Source::open(&path).and_then(|mut source| source.read_some(100));
        assert_eq!(read.expect("readable"), b"one two");
    }

    #[test]
    fn a_file_that_unpacks_without_end_is_cut_off() {
        let (_folder, path) = file(&gzip(&[0; 100_000]));
        let mut source = Source::open(&path).expect("a file");
        source.bytes_max = 1000;
        let error = source.read_some(u64::MAX).expect_err("too large");
        let message = error.of(&path).to_string();
        let expected = " bytes uncompressed, more than the 1000 supported";
        assert!(message.ends_with(expected), "{message}");
    }

    #[test]
    fn a_folder_and_a_missing_file_are_told_apart() {
        let (folder, path) = file(b"");
        let failed = |path: &Path| {
            let read = Source::open(path).and_then(|mut source| source.read_some(1));
            read.expect_err("not a file").of(path)
        };
        let message = failed(folder.path()).to_string();
        assert!(message.contains(": cannot be read: "), "{message}");
        let missing = failed(&path.with_file_name("dota"));
        assert!(missing.to_string().ends_with(": no such file or folder"));
        assert_eq!(missing.hint().as_deref(), Some("did you mean data?"));
    }
}
