//! A picture of a schedule: what each rank worked on, and when.

use super::shapes::{Style, rect, text};
use super::{ALL, FAINT, KEY, LEFT, MEAN, MOST, REST, STRIP, TIME, TOP, WIDTH};
use super::{axis, headed};

/// Room for the names on the left and the figures on the right.
const NAMES: f64 = 84.0;
const FIGURES: f64 = 96.0;
const PLOT: f64 = WIDTH - NAMES - FIGURES;
const HEIGHT: f64 = 30.0;
const GAP: f64 = 6.0;
const BOTTOM: f64 = 78.0;
/// Lanes of one picture, and pieces of one lane; of more, the first ones are drawn.
const LANES_MAX: usize = 64;
const PIECES_MAX: usize = 4096;
/// Narrowest piece that has its label in it, for each character.
const CHARACTER: f64 = 9.0;
/// The colors of the kinds, in the order of [`Lanes::kinds`].
const COLORS: [&str; 4] = [MOST, ALL, MEAN, FAINT];

const NAME: Style = Style("end", 13, super::INK, false);
const LABEL: Style = Style("middle", 11, super::INK, false);
const FIGURE: Style = Style("start", 13, super::INK, true);

/// A schedule to be drawn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Lanes {
    /// What it says above all.
    pub title: String,
    /// The line below it.
    pub subtitle: String,
    /// Names of the kinds of work, at most four.
    pub kinds: Vec<String>,
    /// The lanes, from above.
    pub lanes: Vec<Lane>,
}

/// What one rank worked on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Lane {
    /// Its name.
    pub name: String,
    /// What stands behind it.
    pub figure: String,
    /// Its work.
    pub pieces: Vec<Piece>,
}

/// A piece of work. Times are in seconds since the beginning of the picture.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Piece {
    /// When it began.
    pub start_s: f64,
    /// When it ended.
    pub end_s: f64,
    /// The place of its kind in [`Lanes::kinds`].
    pub kind: usize,
    /// What is written on it.
    pub label: String,
}

impl Lanes {
    /// The picture.
    pub fn svg(&self) -> String {
        let lanes = &self.lanes[..self.lanes.len().min(LANES_MAX)];
        let end = TOP + lanes.len() as f64 * (HEIGHT + GAP) - GAP;
        let heads = (self.title.as_str(), self.subtitle.as_str());
        let described = lanes.iter();
        let described = described.map(|lane| format!("{}: {}", lane.name, lane.figure));
        let described: Vec<_> = described.collect();
        let mut svg = headed(end + BOTTOM, heads, &described.join("; "));
        let pieces = lanes.iter().flat_map(|lane| &lane.pieces);
        let total_s = pieces
            .map(|piece| piece.end_s)
            .fold(f64::MIN_POSITIVE, f64::max);
        let x = |at_s: f64| NAMES + PLOT * (at_s / total_s).clamp(0.0, 1.0);
        for mark in axis::marks(total_s) {
            text(&mut svg, (x(mark.at_s), end + 20.0), TIME, &mark.label);
        }
        for (place, lane) in lanes.iter().enumerate() {
            lane.draw(&mut svg, TOP + place as f64 * (HEIGHT + GAP), &x);
        }
        let y = end + BOTTOM - 18.0;
        for (place, (kind, color)) in self.kinds.iter().zip(COLORS).enumerate() {
            let left = LEFT + place as f64 * 200.0;
            rect(&mut svg, (left, y - 10.0, 14.0, 12.0), color);
            text(&mut svg, (left + 20.0, y), KEY, kind);
        }
        if self.lanes.len() > LANES_MAX {
            let rest = format!("{} more not drawn", self.lanes.len() - LANES_MAX);
            text(&mut svg, (LEFT + 630.0, y), REST, &rest);
        }
        svg.push_str("</svg>\n");
        svg
    }
}

impl Lane {
    fn draw(&self, svg: &mut String, top: f64, x: &impl Fn(f64) -> f64) {
        rect(svg, (NAMES, top, PLOT, HEIGHT), STRIP);
        for piece in self.pieces.iter().take(PIECES_MAX) {
            let (start, end) = (x(piece.start_s), x(piece.end_s));
            let color = COLORS[piece.kind.min(COLORS.len() - 1)];
            // A gap keeps neighbours apart.
            rect(
                svg,
                (start, top, (end - start - 0.5).max(0.5), HEIGHT),
                color,
            );
            if end - start > CHARACTER * piece.label.chars().count() as f64 {
                let middle = ((start + end) / 2.0, top + HEIGHT / 2.0 + 4.0);
                text(svg, middle, LABEL, &piece.label);
            }
        }
        let base = top + HEIGHT / 2.0 + 4.5;
        text(svg, (NAMES - 10.0, base), NAME, &self.name);
        text(svg, (NAMES + PLOT + 10.0, base), FIGURE, &self.figure);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_piece_is_as_wide_as_its_time_and_has_a_label_if_it_fits() {
        let piece = |start_s, end_s, kind, label: &str| Piece {
            start_s,
            end_s,
            kind,
            label: label.into(),
        };
        let lanes = Lanes {
            title: "A < B".into(),
            kinds: vec!["forward".into(), "backward".into()],
            lanes: vec![Lane {
                name: "rank 0".into(),
                figure: "idle 25 %".into(),
                pieces: vec![
                    piece(0.0, 0.5, 0, "m<"),
                    piece(0.75, 1.0, 1, "0"),
                    piece(0.7, 0.701, 1, "9"),
                ],
            }],
            ..Lanes::default()
        };
        let svg = lanes.svg();
        for (width, color) in [(PLOT / 2.0, MOST), (PLOT / 4.0, ALL)] {
            let drawn = format!(
                r#"width="{:.1}" height="{HEIGHT:.1}" fill="{color}""#,
                width - 0.5
            );
            assert_eq!(svg.matches(&drawn).count(), 1, "{drawn} in {svg}");
        }
        assert!(
            svg.contains(">m&lt;<") && svg.contains(">0<") && !svg.contains(">9<"),
            "{svg}"
        );
        assert!(svg.contains("rank 0: idle 25"), "{svg}");
    }

    #[test]
    fn the_picture_is_bounded() {
        let piece = Piece {
            end_s: f64::NAN,
            kind: 9,
            ..Piece::default()
        };
        let lane = Lane {
            pieces: vec![piece; PIECES_MAX + 1],
            ..Lane::default()
        };
        let svg = Lanes {
            lanes: vec![lane; 2],
            ..Lanes::default()
        };
        let lines = svg.svg().lines().count();
        assert!(lines < 2 * (PIECES_MAX + 10), "{lines}");
        assert!(Lanes::default().svg().ends_with("</svg>\n"));
    }
}
