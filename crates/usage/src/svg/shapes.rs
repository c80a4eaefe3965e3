//! Rectangles, words, and values gathered into columns.

use std::fmt::Write as _;

/// One value for each column, nothing where nothing is known.
pub(super) fn columns<T: Copy, R>(
    values: &[Option<T>],
    per: usize,
    one: impl Fn(&[T]) -> Option<R>,
) -> Vec<Option<R>> {
    let chunks = values.chunks(per.max(1));
    chunks
        .map(|chunk| one(&chunk.iter().flatten().copied().collect::<Vec<_>>()))
        .collect()
}

/// The mean of each column.
pub(super) fn means(values: &[Option<f32>], per: usize) -> Vec<Option<f32>> {
    columns(values, per, |chunk| {
        let sum: f32 = chunk.iter().sum();
        (!chunk.is_empty()).then(|| sum / chunk.len() as f32)
    })
}

pub(super) fn rect(svg: &mut String, (x, y, width, height): (f64, f64, f64, f64), fill: &str) {
    let _ = writeln!(
        svg,
        r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" fill="{fill}"/>"#
    );
}

/// How a label looks: which of its ends is at its place, its size, its color and whether it is bold.
#[derive(Clone, Copy)]
pub(super) struct Style(
    pub(super) &'static str,
    pub(super) u32,
    pub(super) &'static str,
    pub(super) bool,
);

pub(super) fn text(svg: &mut String, (x, y): (f64, f64), style: Style, label: &str) {
    let Style(anchor, size, fill, is_bold) = style;
    let weight = if is_bold { r#" font-weight="600""# } else { "" };
    let _ = writeln!(
        svg,
        r#"<text x="{x:.1}" y="{y:.1}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{weight}>{}</text>"#,
        escaped(label)
    );
}

pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
