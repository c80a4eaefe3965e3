//! Which charts runs have.

use paceline_words::{Lang, Word};

use crate::chart::{Line, Scale};
use crate::curve::Curve;
use crate::run::Seen;
use crate::words;

/// The metric of built-in tasks with classes.
pub const ACCURACY: &str = "accuracy";

/// Curves of several runs over the same axes.
#[derive(Clone, Debug)]
pub struct Chart<'a> {
    /// What the values are.
    pub title: String,
    /// The same in a word or two, for a list of charts.
    pub short: String,
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
    let chart = |[title, short]: [&str; 2], scale, lines| Chart {
        title: title.to_owned(),
        short: short.to_owned(),
        scale,
        lines,
        note: None,
    };
    let held_out = of(&|run| Some(&run.held_out_loss), true);
    let losses = of(&|run| Some(&run.loss), false);
    let both = |title: Word, short: Word| [title.of(lang), short.of(lang)];
    let mut charts = vec![
        Chart {
            note: Some(words::HELD_OUT),
            ..chart(
                both(words::LOSS, words::LOSS_SHORT),
                Scale::Wide,
                [losses, held_out.clone()].concat(),
            )
        },
        chart(
            both(words::LOSS_HELD_OUT, words::HELD_OUT_LOSS),
            Scale::Fitted,
            held_out,
        ),
    ];
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in runs.iter().flat_map(|run| &run.metrics) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    names.sort_by_key(|name| *name != ACCURACY);
    for name in names {
        let (title, short) = match name {
            ACCURACY => (
                words::ACCURACY.of(lang).to_owned(),
                words::ACCURACY_SHORT.of(lang),
            ),
            name => (words::METRIC.filled(lang, &[&titled(name)]), name),
        };
        let lines = of(&|run| run.metric(name), true);
        charts.push(chart([&title, short], Scale::Fitted, lines));
    }
    charts.extend([
        chart(
            both(rate, words::RATE_SHORT),
            Scale::FromZero,
            of(&|run| Some(&run.rate), false),
        ),
        chart(
            both(words::STEP_TIME, words::STEP_TIME_SHORT),
            Scale::FromZero,
            of(&|run| Some(&run.step_time), false),
        ),
        chart(
            both(words::WAITED, words::WAITS),
            Scale::FromZero,
            of(&|run| Some(&run.waited), false),
        ),
        chart(
            both(words::LEARNING_RATE, words::LEARNING_RATE_SHORT),
            Scale::FromZero,
            of(&|run| Some(&run.learning_rate), false),
        ),
        chart(
            both(words::GRADIENT_NORM, words::GRADIENT_NORM_SHORT),
            Scale::Wide,
            of(&|run| Some(&run.gradient_norm), false),
        ),
    ]);
    charts.retain(|chart| chart.lines.iter().any(|line| line.curve.last().is_some()));
    charts
}

/// The name of a metric at the beginning of a title.
fn titled(name: &str) -> String {
    match name {
        "mae" | "rmse" => name.to_uppercase(),
        "r2" => "R²".to_owned(),
        _ => {
            let mut letters = name.chars();
            let first = letters.next().into_iter().flat_map(char::to_uppercase);
            first.chain(letters).collect()
        }
    }
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
            ["Loss", "Accuracy on held-out data", "MAE on held-out data"]
        );
        let shorts: Vec<&str> = charts.iter().map(|chart| chart.short.as_str()).collect();
        assert_eq!(shorts, ["loss", "accuracy", "mae"]);
        let colors = |chart: usize| -> Vec<usize> {
            charts[chart].lines.iter().map(|line| line.color).collect()
        };
        assert_eq!((colors(1), colors(2)), (vec![1], vec![0, 1]));
    }
    #[test]
    fn the_names_of_metrics_begin_with_a_capital_in_titles() {
        assert_eq!(titled("perplexity"), "Perplexity");
        assert_eq!(titled("rmse"), "RMSE");
        assert_eq!(titled("r2"), "R²");
        assert_eq!(titled("éclat"), "Éclat");
        assert_eq!(titled(""), "");
    }
}
