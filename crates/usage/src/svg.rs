//! A picture of utilisation over time: a strip for each device or rank, and where all of them worked at once.

mod axis;
pub(crate) mod bars;
pub(crate) mod lanes;
mod shapes;

use std::fmt::Write as _;

use self::shapes::{Style, columns, escaped, means, rect, text};
use super::Lang;
use super::report::{AtOnce, Overlaps, Report, Series, Subject};
use super::text::words::Words;
use super::text::{percent, percent_or_none};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 96.0;
const TOP: f64 = 84.0;
const PLOT: f64 = WIDTH - LEFT - RIGHT;
const GAP: f64 = 10.0;
const OVERLAP_HEIGHT: f64 = 34.0;
/// Room below the strips: the axis and the legend.
const BOTTOM: f64 = 78.0;
/// Strips of one picture; of more devices or ranks, the first ones are drawn.
const STRIPS_MAX: usize = 64;
/// Columns of a strip; stretches that fall into one are one.
const COLUMNS: usize = 390;

const FONT: &str = "'Noto Sans','Noto Sans CJK KR','Noto Sans KR','DejaVu Sans',sans-serif";
const INK: &str = "#1f2933";
const FAINT: &str = "#667381";
const RULE: &str = "#d9dfe5";
const STRIP: &str = "#f4f6f8";
const MEAN: &str = "#2f6fb3";
const MOST: &str = "#a9c8e8";
const ALL: &str = "#e08a1e";

const TITLE: Style = Style("start", 20, INK, true);
const SUBTITLE: Style = Style("start", 13, FAINT, false);
const HEAD: Style = Style("end", 12, FAINT, false);
const MESSAGE: Style = Style("start", 16, INK, false);
const SCALE: Style = Style("start", 9, FAINT, false);
const OVERLAP: Style = Style("end", 13, INK, true);
const TIME: Style = Style("middle", 12, FAINT, false);
const KEY: Style = Style("start", 12, INK, false);
const REST: Style = Style("start", 12, FAINT, false);

/// What the picture shows, of devices or of ranks.
struct Scene<'a> {
    words: Words,
    subject: Subject,
    all: &'a AtOnce,
    names: Vec<String>,
    busy: Vec<Option<f64>>,
    series: Vec<&'a Series>,
    overlaps: &'a Overlaps,
    width_s: f64,
    total_s: f64,
    left_out: usize,
}

/// The picture; its size is bounded by [`STRIPS_MAX`] strips of [`COLUMNS`] columns.
pub(crate) fn render(report: &Report, lang: Lang) -> String {
    let words = Words(lang);
    match scene(report, words) {
        Some(scene) => draw(&scene),
        None => empty(&words.nothing_drawn(&words.clock(report.total_s))),
    }
}

fn scene(report: &Report, words: Words) -> Option<Scene<'_>> {
    let subject = report.subject();
    let course = &report.history;
    let (all, overlaps) = match subject {
        Subject::Ranks(_) => (report.ranks_at_once.as_ref()?, &course.ranks_at_once),
        _ => (report.gpus_at_once.as_ref()?, &course.gpus_at_once),
    };
    let mut scene = Scene {
        words,
        subject,
        all,
        names: Vec::new(),
        busy: Vec::new(),
        series: Vec::new(),
        overlaps,
        width_s: course.width_s,
        total_s: report.total_s,
        left_out: 0,
    };
    if let Subject::Ranks(_) = subject {
        for (rank, series) in report.ranks.iter().zip(&course.ranks) {
            scene.push(words.rank(rank.rank), rank.busy_share, series);
        }
    } else {
        for (gpu, series) in report.gpus.iter().zip(&course.gpus) {
            if gpu.is_counted || all.counted.is_empty() {
                scene.push(format!("GPU {}", gpu.index), gpu.busy_share, series);
            }
        }
    }
    let is_drawn = !scene.series.is_empty() && scene.total_s > 0.0 && scene.width_s > 0.0;
    is_drawn.then_some(scene)
}

impl<'a> Scene<'a> {
    fn push(&mut self, name: String, busy: Option<f64>, series: &'a Series) {
        if self.series.len() >= STRIPS_MAX {
            self.left_out += 1;
            return;
        }
        self.names.push(name);
        self.busy.push(busy);
        self.series.push(series);
    }

    /// Height of a strip: of many, each is lower.
    fn strip_height(&self) -> f64 {
        match self.series.len() {
            ..=4 => 72.0,
            5..=8 => 48.0,
            9..=16 => 30.0,
            _ => 16.0,
        }
    }

    fn gap(&self) -> f64 {
        if self.series.len() > 16 { 3.0 } else { GAP }
    }

    fn is_overlap_drawn(&self) -> bool {
        self.all.counted.len() > 1
    }

    /// Where the strips end and the overlap's strip begins.
    fn strips_end(&self) -> f64 {
        TOP + self.series.len() as f64 * (self.strip_height() + self.gap())
    }

    fn plot_end(&self) -> f64 {
        let overlap = if self.is_overlap_drawn() {
            OVERLAP_HEIGHT + self.gap()
        } else {
            0.0
        };
        self.strips_end() + overlap - self.gap()
    }

    /// Stretches for each column.
    fn per_column(&self) -> usize {
        let used = (self.total_s / self.width_s).ceil().max(1.0) as usize;
        used.div_ceil(COLUMNS).max(1)
    }

    /// Where a column begins, in pixels.
    fn x(&self, column: usize) -> f64 {
        let at_s = (column * self.per_column()) as f64 * self.width_s;
        LEFT + PLOT * (at_s / self.total_s).min(1.0)
    }
}

fn draw(scene: &Scene) -> String {
    let words = scene.words;
    let height = scene.plot_end() + BOTTOM;
    let title = match scene.all.counted.len() {
        0 => words.title().to_owned(),
        _ => words.picture_title(scene.subject, scene.all, scene.total_s),
    };
    let subtitle = words.picture_subtitle(scene.subject);
    let mut svg = headed(height, (&title, subtitle), &description(scene));
    text(&mut svg, (WIDTH - 12.0, TOP - 8.0), HEAD, words.busy_head());
    let marks = axis::marks(scene.total_s);
    for (place, series) in scene.series.iter().enumerate() {
        let top = TOP + place as f64 * (scene.strip_height() + scene.gap());
        strip(&mut svg, scene, place, series, top);
    }
    if scene.is_overlap_drawn() {
        overlap(&mut svg, scene);
    }
    time_axis(&mut svg, scene, &marks);
    legend(&mut svg, scene, height - 18.0);
    svg.push_str("</svg>\n");
    svg
}

fn open(height: f64, title: &str, description: &str) -> String {
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0}" width="{WIDTH}" height="{height:.0}" role="img" aria-labelledby="title desc" font-family="{FONT}">
<title id="title">{}</title>
<desc id="desc">{}</desc>
<defs><pattern id="unseen" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" fill="#ffffff"/><line x1="0" y1="0" x2="0" y2="6" stroke="#c3ccd5" stroke-width="2"/></pattern></defs>
<rect width="100%" height="100%" fill="#ffffff"/>
"##,
        escaped(title),
        escaped(description)
    )
}

/// The same, with its title and the line below it.
fn headed(height: f64, (title, subtitle): (&str, &str), description: &str) -> String {
    let mut svg = open(height, title, description);
    text(&mut svg, (LEFT, 36.0), TITLE, title);
    text(&mut svg, (LEFT, 60.0), SUBTITLE, subtitle);
    svg
}

fn empty(why: &str) -> String {
    let mut svg = open(96.0, why, why);
    text(&mut svg, (24.0, 54.0), MESSAGE, why);
    svg.push_str("</svg>\n");
    svg
}

fn description(scene: &Scene) -> String {
    let each = scene.names.iter().zip(&scene.busy);
    let each = each.map(|(name, busy)| format!("{name}: {}", percent_or_none(*busy)));
    each.collect::<Vec<_>>().join("; ")
}

/// One device or rank: highest reading and mean of each column, from 0 to 100 percent.
fn strip(svg: &mut String, scene: &Scene, place: usize, series: &Series, top: f64) {
    let height = scene.strip_height();
    rect(svg, (LEFT, top, PLOT, height), STRIP);
    let per = scene.per_column();
    let most = columns(&series.most, per, |chunk| chunk.iter().copied().max());
    let mean = means(&series.mean, per);
    unseen(svg, scene, &mean, top, height);
    let level = |percent: f64| top + height * (1.0 - percent.clamp(0.0, 100.0) / 100.0);
    let most = most.iter().map(|m| m.map(|m| level(f64::from(m))));
    let most: Vec<_> = most.collect();
    let mean = mean.iter().map(|m| m.map(|m| level(f64::from(m))));
    let mean: Vec<_> = mean.collect();
    area(svg, scene, &most, top + height, MOST);
    area(svg, scene, &mean, top + height, MEAN);
    let name = Style("end", if height < 20.0 { 11 } else { 13 }, INK, false);
    let middle = top + height / 2.0 + 4.5;
    text(svg, (LEFT - 10.0, middle), name, &scene.names[place]);
    let busy = percent_or_none(scene.busy[place]);
    text(svg, (WIDTH - 12.0, middle), name, &busy);
    if height > 40.0 {
        for (label, y) in [("100%", top + 9.0), ("0", top + height)] {
            text(svg, (LEFT + PLOT + 4.0, y), SCALE, label);
        }
    }
}

/// A filled stair below the levels; broken where no value is known.
fn area(svg: &mut String, scene: &Scene, levels: &[Option<f64>], floor: f64, fill: &str) {
    let mut path = String::new();
    let mut is_open = false;
    let mut from = 0;
    // Neighbours of one level, to a tenth of a pixel, are one step.
    let tenths = |level: &Option<f64>| level.map(|level| (level * 10.0).round());
    for run in levels.chunk_by(|a, b| tenths(a) == tenths(b)) {
        let to = from + run.len();
        match run.first().copied().flatten() {
            Some(level) => {
                if !is_open {
                    let _ = write!(path, "M{:.1} {floor:.1}", scene.x(from));
                }
                let _ = write!(path, "V{level:.1}H{:.1}", scene.x(to));
                is_open = true;
            }
            None if is_open => {
                let _ = write!(path, "V{floor:.1}Z");
                is_open = false;
            }
            None => {}
        }
        from = to;
    }
    if is_open {
        let _ = write!(path, "V{floor:.1}Z");
    }
    if !path.is_empty() {
        let _ = writeln!(svg, r#"<path d="{path}" fill="{fill}"/>"#);
    }
}

/// Hatches the columns in which nothing could be read, also those after the last reading.
fn unseen(svg: &mut String, scene: &Scene, levels: &[Option<f32>], top: f64, height: f64) {
    let is_unseen = |column: usize| levels.get(column).copied().flatten().is_none();
    let column_s = scene.per_column() as f64 * scene.width_s;
    let columns = ((scene.total_s / column_s).ceil() as usize).min(COLUMNS);
    let mut from = None;
    for column in 0..=columns {
        match (column < columns && is_unseen(column), from) {
            (true, None) => from = Some(column),
            (false, Some(first)) => {
                let (x, end) = (scene.x(first), scene.x(column));
                rect(svg, (x, top, end - x, height), "url(#unseen)");
                from = None;
            }
            _ => {}
        }
    }
}

/// The share of each column in which all worked at once, below all strips, and faintly through them.
fn overlap(svg: &mut String, scene: &Scene) {
    let shares = means(&scene.overlaps.all_share, scene.per_column());
    let top = scene.strips_end();
    rect(svg, (LEFT, top, PLOT, OVERLAP_HEIGHT), STRIP);
    unseen(svg, scene, &shares, top, OVERLAP_HEIGHT);
    let level = |share: f64| top + OVERLAP_HEIGHT * (1.0 - share.clamp(0.0, 1.0));
    let levels = shares.iter().map(|s| s.map(|s| level(f64::from(s))));
    let levels: Vec<_> = levels.collect();
    area(svg, scene, &levels, top + OVERLAP_HEIGHT, ALL);
    let middle = top + OVERLAP_HEIGHT / 2.0 + 4.5;
    let name = scene.words.all_at_once();
    text(svg, (LEFT - 10.0, middle), OVERLAP, name);
    let share = percent(scene.all.all_busy_share);
    text(svg, (WIDTH - 12.0, middle), OVERLAP, &share);
}

fn time_axis(svg: &mut String, scene: &Scene, marks: &[axis::Mark]) {
    let end = scene.plot_end();
    for mark in marks {
        let x = LEFT + PLOT * mark.at_s / scene.total_s;
        let _ = writeln!(
            svg,
            r#"<line x1="{x:.1}" y1="{TOP}" x2="{x:.1}" y2="{:.1}" stroke="{RULE}" stroke-opacity="0.7"/>"#,
            end + 5.0
        );
        text(svg, (x, end + 20.0), TIME, &mark.label);
    }
    let _ = writeln!(
        svg,
        r#"<line x1="{LEFT}" y1="{end:.1}" x2="{:.1}" y2="{end:.1}" stroke="{FAINT}"/>"#,
        LEFT + PLOT
    );
}

fn legend(svg: &mut String, scene: &Scene, y: f64) {
    let has_unseen = svg.contains(r#"fill="url(#unseen)""#);
    let words = scene.words;
    let mut x = LEFT;
    let mut entry = |fill: &str, label: &str| {
        rect(svg, (x, y - 10.0, 14.0, 12.0), fill);
        text(svg, (x + 20.0, y), KEY, label);
        // Wide letters take a whole em.
        let wide = label.chars().map(|c| if c.is_ascii() { 6.1 } else { 12.0 });
        x += 20.0 + wide.sum::<f64>() + 22.0;
    };
    entry(MEAN, words.legend_mean());
    entry(MOST, words.legend_most());
    if scene.is_overlap_drawn() {
        entry(ALL, words.legend_all());
    }
    if has_unseen {
        entry("url(#unseen)", words.not_observed());
    }
    if scene.left_out > 0 {
        let label = words.not_drawn(scene.left_out);
        text(svg, (x, y), REST, &label);
    }
}
