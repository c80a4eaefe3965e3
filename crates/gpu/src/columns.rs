//! Columns for people to read.

/// Rows as lines whose columns stand below each other, two spaces between them and none at a line's end.
pub fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            let missing = width.saturating_sub(cell.chars().count()) + 2;
            line.extend(std::iter::repeat_n(' ', missing));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
