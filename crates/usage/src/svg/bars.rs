//! A picture of a comparison: how long each row took, and for how much of that time all of its ranks were busy at once.

use std::fmt::Write as _;

use super::shapes::{Style, rect, text};
use super::{ALL, FAINT, INK, KEY, LEFT, MOST, REST, RULE, STRIP, TIME, TOP, WIDTH};
use super::{axis, headed, percent_or_none};

/// Room for the names on the left and the figures on the right.
const NAMES: f64 = 140.0;
const FIGURES: f64 = 190.0;
const PLOT: f64 = WIDTH - NAMES - FIGURES;
const HEIGHT: f64 = 40.0;
const GAP: f64 = 14.0;
const BOTTOM: f64 = 78.0;
/// Rows of one picture; of more, the first ones are drawn.
const ROWS_MAX: usize = 64;
/// Characters of a name that fit.
const NAME_MAX: usize = 20;

const NAME: Style = Style("end", 13, INK, false);
const FIGURE: Style = Style("start", 13, INK, true);

/// A comparison to be drawn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Bars {
    /// What it says above all.
    pub title: String,
    /// The line below it.
    pub subtitle: String,
    /// The rows, from above.
    pub rows: Vec<Bar>,
}

/// One row. Times are in seconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Bar {
    /// Its name.
    pub name: String,
    /// How long it took: the median of its rounds.
    pub median_s: f64,
    /// Its fastest round.
    pub least_s: f64,
    /// Its slowest round.
    pub most_s: f64,
    /// How long it would take if each rank more saved a whole share of the first row's time.
    pub ideal_s: Option<f64>,
    /// The share of its time in which all ranks were busy at once, `0.0..=1.0`.
    pub all_busy_share: Option<f64>,
    /// What stands behind the bar.
    pub figure: String,
}

impl Bars {
    /// The picture.
    pub fn svg(&self) -> String {
        let rows = &self.rows[..self.rows.len().min(ROWS_MAX)];
        let end = TOP + rows.len() as f64 * (HEIGHT + GAP) - GAP;
        let heads = (self.title.as_str(), self.subtitle.as_str());
        let described: Vec<_> = rows.iter().map(Bar::described).collect();
        let mut svg = headed(end + BOTTOM, heads, &described.join("; "));
        let longest = rows
            .iter()
            .flat_map(|row| [row.most_s, row.ideal_s.unwrap_or(0.0)]);
        let total_s = longest.fold(f64::MIN_POSITIVE, f64::max);
        let x = |at_s: f64| NAMES + PLOT * (at_s / total_s).clamp(0.0, 1.0);
        for mark in axis::marks(total_s) {
            line(
                &mut svg,
                (x(mark.at_s), TOP),
                (x(mark.at_s), end + 5.0),
                RULE,
            );
            text(&mut svg, (x(mark.at_s), end + 20.0), TIME, &mark.label);
        }
        for (place, row) in rows.iter().enumerate() {
            row.draw(&mut svg, TOP + place as f64 * (HEIGHT + GAP), &x);
        }
        self.legend(&mut svg, end + BOTTOM - 18.0);
        svg.push_str("</svg>\n");
        svg
    }

    fn legend(&self, svg: &mut String, y: f64) {
        rect(svg, (LEFT, y - 10.0, 14.0, 12.0), MOST);
        text(svg, (LEFT + 20.0, y), KEY, "time");
        rect(svg, (LEFT + 76.0, y - 10.0, 14.0, 12.0), ALL);
        let busy = "share of it in which all were busy at once";
        text(svg, (LEFT + 96.0, y), KEY, busy);
        line(svg, (LEFT + 362.0, y - 12.0), (LEFT + 362.0, y + 4.0), INK);
        text(svg, (LEFT + 372.0, y), KEY, "ideal");
        line(svg, (LEFT + 425.0, y - 4.0), (LEFT + 445.0, y - 4.0), FAINT);
        text(svg, (LEFT + 453.0, y), KEY, "fastest to slowest round");
        if self.rows.len() > ROWS_MAX {
            let rest = format!("{} more not drawn", self.rows.len() - ROWS_MAX);
            text(svg, (LEFT + 630.0, y), REST, &rest);
        }
    }
}

impl Bar {
    fn described(&self) -> String {
        let busy = percent_or_none(self.all_busy_share);
        format!("{}: {}, all busy {busy}", self.name, self.figure)
    }

    fn draw(&self, svg: &mut String, top: f64, x: &impl Fn(f64) -> f64) {
        let (begin, middle) = (x(0.0), top + HEIGHT / 2.0);
        let width = x(self.median_s) - begin;
        rect(svg, (begin, top, PLOT, HEIGHT), STRIP);
        rect(svg, (begin, top, width, HEIGHT), MOST);
        let busy = width * self.all_busy_share.unwrap_or(0.0).clamp(0.0, 1.0);
        rect(svg, (begin, top, busy, HEIGHT), ALL);
        if let Some(ideal) = self.ideal_s.map(x) {
            line(svg, (ideal, top - 3.0), (ideal, top + HEIGHT + 3.0), INK);
        }
        let (least, most) = (x(self.least_s), x(self.most_s));
        line(svg, (least, middle), (most, middle), FAINT);
        for at in [least, most] {
            line(svg, (at, middle - 4.0), (at, middle + 4.0), FAINT);
        }
        let name: String = self.name.chars().take(NAME_MAX).collect();
        text(svg, (begin - 10.0, middle + 4.5), NAME, &name);
        text(
            svg,
            (begin + PLOT + 10.0, middle + 4.5),
            FIGURE,
            &self.figure,
        );
    }
}

fn line(svg: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64), stroke: &str) {
    let _ = writeln!(
        svg,
        r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="{stroke}" stroke-width="1.5"/>"#
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_has_a_bar_as_long_as_its_time_and_a_part_as_long_as_all_were_busy() {
        let bar = |name: &str, seconds, busy| Bar {
            name: name.to_owned(),
            median_s: seconds,
            least_s: seconds,
            most_s: seconds,
            all_busy_share: busy,
            ..Bar::default()
        };
        let bars = Bars {
            title: "A < B".to_owned(),
            rows: vec![
                bar("1 rank", 35.0, Some(1.0)),
                bar("2 ranks", 17.5, Some(0.46)),
            ],
            ..Bars::default()
        };
        let svg = bars.svg();
        let drawn = |width: f64, fill: &str| {
            let part = format!(r#"width="{width:.1}" height="{HEIGHT:.1}" fill="{fill}""#);
            assert_eq!(svg.matches(&part).count(), 1, "{part} in {svg}");
        };
        drawn(PLOT, MOST);
        drawn(PLOT, ALL);
        drawn(PLOT / 2.0, MOST);
        drawn(PLOT / 2.0 * 0.46, ALL);
        assert!(svg.contains("A &lt; B"), "{svg}");
    }

    #[test]
    fn the_picture_is_bounded_and_takes_what_cannot_be() {
        let odd = Bar {
            name: "x".repeat(1000),
            median_s: f64::NAN,
            most_s: -1.0,
            ideal_s: Some(0.0),
            all_busy_share: Some(7.0),
            ..Bar::default()
        };
        let rows = vec![odd; ROWS_MAX + 3];
        let svg = Bars {
            rows,
            ..Bars::default()
        }
        .svg();
        assert!(svg.contains("3 more not drawn"));
        // The names are in the description in full.
        assert!(svg.len() < ROWS_MAX * 3000, "{}", svg.len());
        assert!(Bars::default().svg().ends_with("</svg>\n"));
    }
}
