//! Columns for people to read.

use unicode_width::UnicodeWidthStr;

/// Rows as lines whose columns stand below each other, two spaces between them and none at a line's end.
pub fn aligned(rows: &[Vec<String>]) -> String {
    with_numbers(0, rows)
}

/// The same, with the first `numbers` columns to the right.
pub fn with_numbers(numbers: usize, rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.width()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (place, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let blanks = " ".repeat(width.saturating_sub(cell.width()));
            match place < numbers {
                true => line.extend([blanks.as_str(), cell.as_str(), "  "]),
                false => line.extend([cell.as_str(), blanks.as_str(), "  "]),
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
