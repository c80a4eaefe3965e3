//! Which charts runs have.

use paceline_words::{Lang, Word};

use crate::chart::{Line, Scale};
use crate::curve::Curve;
use crate::run::Seen;
use crate::words;

/// The metric of built-in tasks with classes.
pub(crate) const ACCURACY: &str = "accuracy";

/// Curves of several runs over the same axes.
#[derive(Clone, Debug)]
pub struct Chart<'a> {
    /// What the values are.
    pub title: String,
    /// How the axis of values begins.
    pub scale: Scale,
    /// The curves.
    pub lines: Vec<Line<'a>>,
    /// Explains them.
    pub(crate) note: Option<Word>,
}

/// The charts of these runs, without those that have no value yet. The color of a line is the position of its run.
#[must_use]
pub fn charts<'a>(runs: &[&'a Seen], lang: Lang) -> Vec<Chart<'a>> {
    let tokens = runs.iter().filter(|run| run.has_tokens).count();
    let rate = match tokens {
        0 => words::SAMPLES_RATE,
        some if some == runs.len() => words::TOKENS_RATE,
        _ => words::ANY_RATE,
    };
    let of = |curve: &dyn Fn(&'a Seen) -> Option<&'a Curve>, is_dotted| -> Vec<Line<'a>> {
        let curves = runs.iter().enumerate();
        let curves = curves.filter_map(|(color, run)| Some((color, curve(run)?)));
        let line = |(color, curve)| Line {
            curve,
            color,
            is_dotted,
        };
        curves.map(line).collect()
    };
    let chart = |title: &str, scale, lines| Chart {
        title: title.to_owned(),
        scale,
        lines,
        note: None,
    };
    let held_out = of(&|run| Some(&run.held_out_loss), true);
    let losses = of(&|run| Some(&run.loss), false);
    let mut charts = vec![
        Chart {
            note: Some(words::HELD_OUT),
            ..chart(
                words::LOSS.of(lang),
                Scale::Wide,
                [losses, held_out.clone()].concat(),
            )
        },
        chart(words::LOSS_HELD_OUT.of(lang), Scale::Fitted, held_out),
    ];
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in runs.iter().flat_map(|run| &run.metrics) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    names.sort_by_key(|name| *name != ACCURACY);
    for name in names {
        let title = match name {
            ACCURACY => words::ACCURACY.of(lang).to_owned(),
            name => words::METRIC.filled(lang, &[name]),
        };
        let lines = of(&|run| run.metric(name), true);
        charts.push(chart(&title, Scale::Fitted, lines));
    }
    charts.extend([
        chart(
            rate.of(lang),
            Scale::FromZero,
            of(&|run| Some(&run.rate), false),
        ),
        chart(
            words::WAITED.of(lang),
            Scale::FromZero,
            of(&|run| Some(&run.waited), false),
        ),
        chart(
            words::LEARNING_RATE.of(lang),
            Scale::FromZero,
            of(&|run| Some(&run.learning_rate), false),
        ),
        chart(
            words::GRADIENT_NORM.of(lang),
            Scale::Wide,
            of(&|run| Some(&run.gradient_norm), false),
        ),
    ]);
    charts.retain(|chart| chart.lines.iter().any(|line| line.curve.last().is_some()));
    charts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_share_charts_and_each_keeps_its_color() {
        let mut runs = [Seen::default(), Seen::default()];
        runs[0].loss.push(1, 2.0);
        let mut metric = |run: usize, name: &str| {
            let mut curve = Curve::default();
            curve.push(1, 0.5);
            runs[run].metrics.push((name.to_owned(), curve));
        };
        metric(0, "mae");
        metric(1, "mae");
        metric(1, ACCURACY);
        let charts = charts(&[&runs[0], &runs[1]], Lang::En);
        let titles: Vec<&str> = charts.iter().map(|chart| chart.title.as_str()).collect();
        assert_eq!(
            titles,
            ["Loss", "Accuracy on held-out data", "mae on held-out data"]
        );
        let colors = |chart: usize| -> Vec<usize> {
            charts[chart].lines.iter().map(|line| line.color).collect()
        };
        assert_eq!((colors(1), colors(2)), (vec![1], vec![0, 1]));
    }
}
