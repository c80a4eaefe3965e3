//! A PNG or JPEG file as rows of RGB pixels.

use std::fs::File;
use std::io::{Cursor, Read};
use std::path::Path;

use png::{ColorType, DecodingError, Transformations};
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

use crate::data::DataProblem;

/// Maximum size of a file.
const FILE_BYTES_MAX: u64 = 512 << 20;

/// Maximum number of pixels, 384 MiB as RGB: a small file can claim any size.
const PIXELS_MAX: u64 = 1 << 27;

const PNG_MAGIC: &[u8] = b"\x89PNG\r\n\x1a\n";
const JPEG_MAGIC: &[u8] = b"\xff\xd8\xff";

/// An image, row by row, three bytes a pixel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pixels {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) rgb: Vec<u8>,
}

impl Pixels {
    /// Reads an image. The first bytes, not the name, decide what it is.
    ///
    /// Grey becomes equal channels, 16 bits their upper 8; alpha is left out. The image is turned as its
    /// EXIF orientation says.
    ///
    /// *Errors*: neither PNG nor JPEG; truncated, damaged or too large.
    pub(super) fn read(path: &Path) -> Result<Self, DataProblem> {
        Self::decode(&file_bytes(path)?)
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, DataProblem> {
        let (pixels, orientation) = match bytes {
            _ if bytes.starts_with(PNG_MAGIC) => of_png(bytes)?,
            _ if bytes.starts_with(JPEG_MAGIC) => of_jpeg(bytes)?,
            [] => return Err(DataProblem::incomplete("the file is empty".into())),
            _ => {
                let start = &bytes[..bytes.len().min(4)];
                let start: String = start.iter().map(|byte| format!(" {byte:02x}")).collect();
                return Err(DataProblem::new(format!(
                    "neither PNG nor JPEG: it starts with{start}"
                )));
            }
        };
        Ok(pixels.turned(orientation))
    }

    /// The image that a camera has stored in this EXIF orientation, upright.
    fn turned(self, orientation: u16) -> Self {
        if !(2..=8).contains(&orientation) {
            return self;
        }
        let (width, height) = match orientation {
            5..=8 => (self.height, self.width),
            _ => (self.width, self.height),
        };
        let mut rgb = Vec::with_capacity(self.rgb.len());
        for y in 0..height {
            for x in 0..width {
                let (right, down) = (width - 1 - x, height - 1 - y);
                let (from_x, from_y) = match orientation {
                    2 => (right, y),
                    3 => (right, down),
                    4 => (x, down),
                    5 => (y, x),
                    6 => (y, right),
                    7 => (down, right),
                    _ => (down, x),
                };
                let at = 3 * (from_y * self.width + from_x);
                rgb.extend_from_slice(&self.rgb[at..at + 3]);
            }
        }
        Self { width, height, rgb }
    }
}

/// The bytes of a file that may be an image.
///
/// *Errors*: it is no file, cannot be read, or is too large.
pub(super) fn file_bytes(path: &Path) -> Result<Vec<u8>, DataProblem> {
    let failed = |source: std::io::Error| DataProblem::io(&source);
    // Opening a pipe would wait for its other end.
    if !path.metadata().map_err(failed)?.is_file() {
        return Err(DataProblem::new("neither PNG nor JPEG: it is no file"));
    }
    let file = File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    let read = file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes);
    match read.map_err(failed)? as u64 {
        read if read > FILE_BYTES_MAX => Err(DataProblem::too_large("bytes", read, FILE_BYTES_MAX)),
        _ => Ok(bytes),
    }
}

/// *Errors*: more pixels than supported.
fn bounded(width: u64, height: u64) -> Result<(), DataProblem> {
    match width.saturating_mul(height) {
        0 => Err(DataProblem::new(format!("{width} x {height} pixels"))),
        1..=PIXELS_MAX => Ok(()),
        pixels => Err(DataProblem::too_large("pixels", pixels, PIXELS_MAX)),
    }
}

fn of_png(bytes: &[u8]) -> Result<(Pixels, u16), DataProblem> {
    let mut decoder = png::Decoder::new_with_limits(
        Cursor::new(bytes),
        png::Limits {
            bytes: 8 * PIXELS_MAX as usize,
        },
    );
    decoder.set_transformations(Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(png_problem)?;
    let info = reader.info();
    let (width, height) = (info.width, info.height);
    bounded(width.into(), height.into())?;
    let orientation = info.exif_metadata.as_deref().map_or(1, orientation);
    let size = reader.output_buffer_size().unwrap_or(usize::MAX);
    let mut samples = vec![0; size.min(4 * PIXELS_MAX as usize)];
    let frame = reader.next_frame(&mut samples).map_err(png_problem)?;
    samples.truncate(frame.buffer_size());
    let rgb = match frame.color_type {
        ColorType::Rgb => samples,
        ColorType::Rgba => leading::<4, 3>(&samples).flatten().collect(),
        ColorType::Grayscale => samples.iter().flat_map(|grey| [*grey; 3]).collect(),
        ColorType::GrayscaleAlpha => leading::<2, 1>(&samples)
            .flat_map(|[grey]| [grey; 3])
            .collect(),
        ColorType::Indexed => unreachable!("palettes are expanded"),
    };
    let (width, height) = (width as usize, height as usize);
    Ok((Pixels { width, height, rgb }, orientation))
}

/// The first `M` of each `N` samples.
fn leading<const N: usize, const M: usize>(samples: &[u8]) -> impl Iterator<Item = [u8; M]> {
    let pixels = samples.as_chunks::<N>().0.iter();
    pixels.map(|pixel| std::array::from_fn(|channel| pixel[channel]))
}

fn png_problem(error: DecodingError) -> DataProblem {
    match error {
        DecodingError::IoError(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            DataProblem::incomplete("the PNG image is truncated".into())
        }
        error => DataProblem::incomplete(format!("damaged PNG image: {error}")),
    }
}

fn of_jpeg(bytes: &[u8]) -> Result<(Pixels, u16), DataProblem> {
    let problem = |error| DataProblem::incomplete(format!("damaged JPEG image: {error}"));
    // The decoder fills what is missing at the end with grey.
    if !has_end(bytes) {
        return Err(DataProblem::incomplete(
            "the JPEG image is truncated".into(),
        ));
    }
    let options = DecoderOptions::default()
        .set_use_unsafe(false)
        .set_strict_mode(true)
        .set_max_width(u16::MAX.into())
        .set_max_height(u16::MAX.into())
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(problem)?;
    let (width, height) = decoder.dimensions().unwrap_or_default();
    bounded(width as u64, height as u64)?;
    let rgb = decoder.decode().map_err(problem)?;
    if rgb.len() != 3 * width * height {
        let got = rgb.len();
        return Err(DataProblem::new(format!(
            "JPEG image of {width} x {height} pixels in {got} bytes: neither grey, RGB, CMYK nor YCCK"
        )));
    }
    let orientation = decoder.exif().map_or(1, |exif| orientation(exif));
    Ok((Pixels { width, height, rgb }, orientation))
}

/// Whether a JPEG image has its end, whatever follows it: some cameras append a film. Segments are skipped by their length, because they may hold
/// another image.
fn has_end(bytes: &[u8]) -> bool {
    let mut at = JPEG_MAGIC.len() - 1;
    while let Some([first, marker]) = bytes.get(at..).and_then(|rest| rest.first_chunk()) {
        at += match (*first, *marker) {
            (0xff, 0xd9) => return true,
            // A value of compressed data, or a marker without a length.
            (0xff, 0x00 | 0x01 | 0xd0..=0xd8) => 2,
            (0xff, 0xff) => 1,
            (0xff, _) => match bytes.get(at + 2..at + 4) {
                Some(len) => 2 + usize::from(u16::from_be_bytes([len[0], len[1]])),
                None => return false,
            },
            _ => 1,
        };
    }
    false
}

/// The orientation in EXIF data, 1 to 8; 1, upright, if it has none.
///
/// *Source*: CIPA DC-008-2019, tag 0x0112 of the first directory of a TIFF header.
fn orientation(exif: &[u8]) -> u16 {
    read_orientation(exif.strip_prefix(b"Exif\0\0").unwrap_or(exif)).unwrap_or(1)
}

fn read_orientation(tiff: &[u8]) -> Option<u16> {
    let is_little = match tiff.get(..4)? {
        b"II*\0" => true,
        b"MM\0*" => false,
        _ => return None,
    };
    let short = |at: usize| {
        let bytes: [u8; 2] = tiff.get(at..at.checked_add(2)?)?.try_into().ok()?;
        Some(match is_little {
            true => u16::from_le_bytes(bytes),
            false => u16::from_be_bytes(bytes),
        })
    };
    let words = [short(4)?, short(6)?].map(usize::from);
    let directory = match is_little {
        true => words[0] + (words[1] << 16),
        false => (words[0] << 16) + words[1],
    };
    let entries = usize::from(short(directory)?);
    let mut entries = (0..entries).map(|entry| directory + 2 + 12 * entry);
    let entry = entries.find(|entry| short(*entry) == Some(0x0112))?;
    // A short integer is in the first half of the value's four bytes.
    (short(entry + 2)? == 3).then(|| short(entry + 8)).flatten()
}
