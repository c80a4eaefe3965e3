//! A chart of curves over steps, as SVG whose colours come from the page.

use std::fmt::Write as _;

use crate::charts::Chart;
use crate::curve::Curve;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 276.0;
/// Room for a label such as `-0.0025` in the letters of a narrow screen, which are larger.
const LEFT: f64 = 84.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 18.0;
/// Room for two lines of such letters, of which the first is below the labels of values.
const BOTTOM: f64 = 50.0;
/// Most values that are drawn as dots.
const DOTS_MAX: usize = 128;
/// A range of positive values wider than this gets a logarithmic axis.
const LINEAR_UP_TO: f64 = 40.0;
/// A logarithmic axis over more powers of ten has marks at some of these only.
const DECADES_MAX: i32 = 5;
/// About so many marks along an axis.
const MARKS: f64 = 5.0;

/// A curve and the number of its colour.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// The curve.
    pub curve: &'a Curve,
    /// The number of its colour.
    pub color: usize,
    /// Whether values are points joined by a dashed line: they are few.
    pub is_dotted: bool,
}

/// What the axis of values covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// The values, on a logarithmic axis if they are far apart.
    Wide,
    /// The values.
    Fitted,
    /// 0 too.
    FromZero,
}

/// An axis from values to places between 0 and 1.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    low: f64,
    high: f64,
    is_logarithmic: bool,
}

impl Axis {
    /// The axis of values from `low` to `high`.
    #[must_use]
    pub fn over(low: f64, high: f64, scale: Scale) -> Self {
        let is_logarithmic =
            scale == Scale::Wide && low.is_normal() && low > 0.0 && high / LINEAR_UP_TO > low;
        let low = if scale == Scale::FromZero {
            low.min(0.0)
        } else {
            low
        };
        // A constant still gets an axis.
        let room = if high > low {
            0.0
        } else {
            low.abs().max(1.0) * 0.05
        };
        Self {
            low: low - room,
            high: high + room,
            is_logarithmic,
        }
    }

    /// The place of a value; of one beyond the axis, the nearer end.
    #[must_use]
    pub fn at(&self, value: f64) -> f64 {
        let value = value.clamp(self.low, self.high);
        match self.is_logarithmic {
            true => (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln()),
            false => (value - self.low) / (self.high - self.low),
        }
    }

    /// Round values along the axis.
    #[must_use]
    pub fn marks(&self) -> Vec<f64> {
        if self.is_logarithmic {
            let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
            let decades = powers.end() - powers.start();
            if decades > DECADES_MAX {
                let every = decades / DECADES_MAX + 1;
                let marks = powers
                    .step_by(every as usize)
                    .map(|power| 10_f64.powi(power));
                return marks
                    .filter(|mark| (self.low..=self.high).contains(mark))
                    .collect();
            }
            let marks = powers.flat_map(|power| [1.0, 3.0].map(|first| first * 10_f64.powi(power)));
            return marks
                .filter(|mark| (self.low..=self.high).contains(mark))
                .collect();
        }
        let rough = (self.high - self.low) / MARKS;
        let power = 10_f64.powf(rough.log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|first| first * power);
        let step = steps
            .into_iter()
            .find(|step| *step >= rough)
            .unwrap_or(rough);
        if !step.is_normal() {
            return Vec::new();
        }
        let first = (self.low / step).ceil() as i64;
        let last = (self.high / step).floor() as i64;
        (first..=last).map(|number| number as f64 * step).collect()
    }
}

/// The chart; empty without any value.
pub(crate) fn draw(chart: &Chart<'_>, step_word: &str) -> String {
    let Chart {
        title,
        scale,
        lines,
        ..
    } = chart;
    let pieces = || lines.iter().flat_map(|line| line.curve.pieces());
    let (mut low, mut high, mut last) = (f64::INFINITY, f64::NEG_INFINITY, 0);
    for piece in pieces() {
        low = low.min(piece.least);
        high = high.max(piece.most);
        last = last.max(piece.step);
    }
    if low > high {
        return String::new();
    }
    let steps = Axis::over(0.0, last as f64, Scale::FromZero);
    let values = Axis::over(low, high, *scale);
    let x = |step: u64| LEFT + steps.at(step as f64) * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| TOP + (1.0 - values.at(value)) * (HEIGHT - TOP - BOTTOM);
    let mut svg = format!(
        r#"<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{}">"#,
        escaped(title)
    );
    for mark in values.marks() {
        let at = y(mark);
        let _ = write!(
            svg,
            r#"<path class="grid" d="M{LEFT} {at:.1}H{:.1}"/><text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 4.0,
            number(mark)
        );
    }
    let whole = |mark: &f64| mark.fract() == 0.0;
    for mark in steps.marks().into_iter().filter(whole) {
        let at = x(mark as u64);
        let _ = write!(
            svg,
            r#"<text x="{at:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
            HEIGHT - BOTTOM + 21.0,
            number(mark)
        );
    }
    let _ = write!(
        svg,
        r#"<text class="axis" x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
        WIDTH - RIGHT,
        HEIGHT - 6.0,
        escaped(step_word)
    );
    for line in lines {
        let pieces = line.curve.pieces();
        let join = |points: Vec<String>| points.join("L");
        let means = pieces
            .iter()
            .map(|p| format!("{:.1} {:.1}", x(p.step), y(p.mean())));
        let means: Vec<String> = means.collect();
        let color = line.color;
        if pieces.iter().any(|piece| piece.least < piece.most) {
            let up = pieces
                .iter()
                .map(|p| format!("{:.1} {:.1}", x(p.step), y(p.most)));
            let down = pieces
                .iter()
                .rev()
                .map(|p| format!("{:.1} {:.1}", x(p.step), y(p.least)));
            let band = join(up.chain(down).collect());
            let _ = write!(svg, r#"<path class="band c{color}" d="M{band}Z"/>"#);
        }
        // More dots than this hide the line, and each is as long as ten of its points.
        if line.is_dotted && pieces.len() <= DOTS_MAX {
            for piece in pieces {
                let (x, y) = (x(piece.step), y(piece.mean()));
                let _ = write!(
                    svg,
                    r#"<circle class="dot c{color}" cx="{x:.1}" cy="{y:.1}" r="2.5"><title>{}: {}</title></circle>"#,
                    piece.step,
                    number(piece.mean())
                );
            }
        }
        let class = if line.is_dotted {
            "line dashed"
        } else {
            "line"
        };
        let _ = write!(
            svg,
            r#"<path class="{class} c{color}" d="M{}"/>"#,
            join(means)
        );
    }
    svg.push_str("</svg>");
    svg
}

/// A number with up to four significant digits.
#[must_use]
pub fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 10_000.0 {
        let (divisor, unit) = match size {
            1e9.. => (1e9, "G"),
            1e6.. => (1e6, "M"),
            _ => (1e3, "k"),
        };
        return format!("{}{unit}", trimmed(value / divisor, 2));
    }
    match size {
        0.0 => "0".to_owned(),
        100.0.. => trimmed(value, 1),
        1.0.. => trimmed(value, 3),
        0.001.. => trimmed(value, 5),
        _ => format!("{value:.1e}"),
    }
}

fn trimmed(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    text.to_owned()
}

/// Text as HTML.
#[must_use]
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_round_and_within_the_axis() {
        let marks = |low, high| -> Vec<String> {
            let axis = Axis::over(low, high, Scale::Wide);
            axis.marks().into_iter().map(number).collect()
        };
        assert_eq!(marks(0.0, 2400.0), ["0", "500", "1000", "1500", "2000"]);
        assert_eq!(marks(0.9, 2.31), ["1", "1.5", "2"]);
        assert_eq!(
            marks(0.002, 2.3),
            ["0.003", "0.01", "0.03", "0.1", "0.3", "1"]
        );
        assert_eq!(marks(-1.0, 1.0), ["-1", "-0.5", "0", "0.5", "1"]);
        assert!(!marks(3.0, 3.0).is_empty());
        assert_eq!(marks(1e-9, 1e9).len(), 5);
        assert!(marks(0.0, 5e-324).is_empty());
        assert_eq!(marks(0.0, 1_200_000.0), ["0", "500k", "1M"]);
    }

    #[test]
    fn nothing_to_draw_is_nothing_and_names_cannot_break_the_page() {
        let drawn = |curve: &Curve| {
            let line = Line {
                curve,
                color: 0,
                is_dotted: false,
            };
            let chart = Chart {
                title: "<script>\"".to_owned(),
                short: String::new(),
                scale: Scale::Wide,
                lines: vec![line],
                note: None,
            };
            draw(&chart, "step")
        };
        let mut curve = Curve::default();
        assert_eq!(drawn(&curve), "");
        curve.push(1, 2.0);
        let svg = drawn(&curve);
        assert!(
            svg.contains("&lt;script&gt;&quot;") && !svg.contains("NaN"),
            "{svg}"
        );
    }
}
